// SPDX-License-Identifier: Apache-2.0
// Exponential and logarithm: within about one ulp for float results, and faster for narrow ones.
#pragma once

#include "types.cuh"

namespace trtc {

TRTC_DEVICE float minus_infinity() { return float_from_bits(0xff800000u); }

// The binary logarithm of what large exponentials are multiplied by, and that.
enum : int { large_exponent = 24, large_one = 1 << large_exponent };
constexpr TRTC_DEVICE float log2_e() { return 1.44269504f; }

// e^(x - n log(2)) of an x that is half of log(2) from that at most: Cody and Waite's reduction, and a polynomial of
// degree 6 that was fitted for the least relative error.
TRTC_DEVICE float exponential_of_rest(float x, float n) {
  const float r = fused_multiply_add(n, -1.42860677e-6f, fused_multiply_add(n, -0.693145752f, x));
  float p = fused_multiply_add(r, 0.0013814544f, 0.0083687454f);
  p = fused_multiply_add(p, r, 0.041668389f);
  p = fused_multiply_add(p, r, 0.16666521f);
  p = fused_multiply_add(p, r, 0.49999994f);
  return 1.0f + fused_multiply_add(r * r, p, r);
}

// e^x within 1.5 * 2^-24 of it, 0 where that is less than half of the smallest number, and infinity from 2^128 on: 2^n
// times e^(x - n log(2)) (Cody and Waite, "Software Manual for the Elementary Functions", 1980).
TRTC_DEVICE float exponential(float x) {
  x = x < -110.0f ? -110.0f : x > 110.0f ? 110.0f : x;  // not NaN
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer, in its low bits
  const float shifted = fused_multiply_add(x, log2_e(), magic);
  const float power = exponential_of_rest(x, shifted - magic);
  // 2^n in two factors, each of which has a float's exponent.
  const int32 exponent = static_cast<int32>(bits_from_float(shifted) - bits_from_float(magic));
  const int32 half = exponent >> 1;
  return power * float_from_bits(static_cast<uint32>(half + 127) << 23) *
         float_from_bits(static_cast<uint32>(exponent - half + 127) << 23);
}

// 2^24 e^x of x <= 2 (any below 70), as near: so e^x has all its digits down to where it is rounded to 0. Below -104 it
// is something between 0 and 2^-126.
TRTC_DEVICE float large_exponential(float x) {
  x = larger_or_nan(x, -104.0f);
  const float magic = 12582912.0f + large_exponent + 127;  // as above, with what the exponent of a float is further
  const float shifted = fused_multiply_add(x, log2_e(), magic);
  return exponential_of_rest(x, shifted - magic) * float_from_bits(bits_from_float(shifted) << 23);
}

// The same of factor * x, for a result that is rounded to T; of -infinity 0, or next to it.
template <class T>
TRTC_DEVICE float large_exponential_for(float x, float factor = 1.0f) {
  if constexpr (is_same<T, float>) {
    return large_exponential(x * factor);
  } else {
    return approximate_exp2(fused_multiply_add(x, factor * log2_e(), float{large_exponent}));
  }
}

// 2^24 e^(factor (x - about)) of many x that are no larger than `about`, which is one of them, but for a factor that
// all share: `peak` is what `about` has instead of 2^24. For 16-bit results of x that are numbers of 16 bits (not
// `Wide`), the difference is part of the one fused multiply-add: what rounding leaves of factor * about is in that
// factor.
template <class Input, class Result, bool Wide>
struct Exponentials {
  enum : bool { is_fused = sizeof(Input) == 2 && !Wide && !is_same<Result, float> };
  float about;
  float factor;
  float offset;
  float peak;

  TRTC_DEVICE Exponentials(float about, float factor) : about(about), factor(factor), offset(0.0f), peak(large_one) {
    if constexpr (is_fused) {
      const float slope = factor * log2_e();
      const bool is_large = !(magnitude(about * slope) < 0x1p24f);
      // Far from 0 any number of 16 bits less than `about` has an exponential of 0, with less of a slope too.
      this->factor = is_large ? 0x1p24f / magnitude(about) : slope;
      offset = fused_multiply_add(-about, this->factor, float{large_exponent});
      peak = of(about);
    }
  }
  TRTC_DEVICE float of(float x) const {
    if constexpr (is_fused) {
      return approximate_exp2(fused_multiply_add(x, factor, offset));
    } else {
      return large_exponential_for<Result>(x - about, factor);
    }
  }
};

// log(x) for x >= 1, within 2^-23 absolutely and an ulp of it, by one Newton step on the approximation.
TRTC_DEVICE float logarithm(float x) {
  const float y = approximate_log2(x) * 0.693147182f;
  const float error = fused_multiply_add(x, exponential(-y), -1.0f);
  return error == error ? y + error : x;  // infinity and NaN are their own
}

}  // namespace trtc
