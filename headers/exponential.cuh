// Exponential and logarithm: within about one ulp for float results, and faster for narrow ones.
#pragma once

#include "types.cuh"

namespace trtc {

TRTC_DEVICE float minus_infinity() { return float_from_bits(0xff800000u); }

// e^x within 1.2 * 2^-24 of it, 0 where that is less than half of the smallest number, and infinity from 2^128 on: x =
// n log(2) + r (Cody and Waite, "Software Manual for the Elementary Functions", 1980), and e^r by a polynomial of
// degree 6 that was fitted for the least relative error.
TRTC_DEVICE float exponential(float x) {
  x = x < -110.0f ? -110.0f : x > 110.0f ? 110.0f : x;  // not NaN
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer, in its low bits
  const float shifted = fused_multiply_add(x, 1.44269504f, magic);
  const float n = shifted - magic;
  const float r = fused_multiply_add(n, -1.42860677e-6f, fused_multiply_add(n, -0.693145752f, x));
  float p = fused_multiply_add(r, 0.0013814544f, 0.0083687454f);
  p = fused_multiply_add(p, r, 0.041668389f);
  p = fused_multiply_add(p, r, 0.16666521f);
  p = fused_multiply_add(p, r, 0.49999994f);
  const float power = 1.0f + fused_multiply_add(r * r, p, r);
  // 2^n in two factors, each of which has a float's exponent.
  const int32 exponent = static_cast<int32>(bits_from_float(shifted) - bits_from_float(magic));
  const int32 half = exponent >> 1;
  return power * float_from_bits(static_cast<uint32>(half + 127) << 23) *
         float_from_bits(static_cast<uint32>(exponent - half + 127) << 23);
}

// The same for a result that is rounded to T.
template <class T>
TRTC_DEVICE float exponential_for(float x) {
  if constexpr (is_same<T, float>) {
    return exponential(x);
  } else {
    return approximate_exp2(x * 1.44269504f);
  }
}

// log(x) for x >= 1, within 2^-23 absolutely and an ulp of it, by one Newton step on the approximation.
TRTC_DEVICE float logarithm(float x) {
  const float y = approximate_log2(x) * 0.693147182f;
  const float error = fused_multiply_add(x, exponential(-y), -1.0f);
  return error == error ? y + error : x;  // infinity and NaN are their own
}

}  // namespace trtc
