// SPDX-License-Identifier: Apache-2.0
// Narrow floating-point formats in plain arithmetic: for the simulator, and for architectures that have no instruction.
#pragma once

#include "platform.cuh"

namespace trtc {

// A format with `Fraction` bits of fraction and the exponent's bias `Bias`, subnormals included. Magnitudes are without
// the sign.

// The magnitude of the nearest value, ties to even, as if the exponent had no end. `magnitude` is no NaN's.
template <int Fraction, int Bias>
TRTC_DEVICE uint32 narrow_magnitude(uint32 magnitude) {
  constexpr int shift = 23 - Fraction;
  constexpr uint32 smallest_normal = (127u + 1 - Bias) << 23;
  if (magnitude < smallest_normal) {
    // The last place of this sum is that of a subnormal.
    constexpr uint32 one = (127u + 1 - Bias + shift) << 23;
    return bits_from_float(float_from_bits(magnitude) + float_from_bits(one)) - one;
  }
  const uint32 odd = magnitude >> shift & 1;
  return ((magnitude + ((1u << (shift - 1)) - 1) + odd) >> shift) - ((127u - Bias) << Fraction);
}

// A finite value; where the format has infinities and NaNs, they become numbers beyond its largest.
template <int Fraction, int Bias>
TRTC_DEVICE float widen_magnitude(uint32 magnitude) {
  constexpr uint32 scale = (127u + 127 - Bias) << 23;
  return float_from_bits(magnitude << (23 - Fraction)) * float_from_bits(scale);
}

enum : uint32 { infinity_magnitude = 0x7f800000u };

TRTC_DEVICE float with_sign(float value, uint32 sign) { return float_from_bits(bits_from_float(value) | sign << 31); }

// The nearest value of a format of `Bits` bits; magnitudes from `most` on, infinity's too, become that one.
template <int Bits, int Fraction, int Bias>
TRTC_DEVICE uint32 narrowed(float value, uint32 most) {
  const uint32 sign = bits_from_float(value) >> 31, magnitude = bits_from_float(value) & 0x7fffffffu;
  if (magnitude > infinity_magnitude) return (1u << (Bits - 1)) - 1;
  return sign << (Bits - 1) | min(narrow_magnitude<Fraction, Bias>(magnitude), most);
}

TRTC_DEVICE uint32 float16_from_float(float value) { return narrowed<16, 10, 15>(value, 0x7c00u); }

TRTC_DEVICE float float_from_float16(uint32 bits) {
  const uint32 magnitude = bits & 0x7fffu, sign = bits >> 15 & 1;
  if (magnitude >= 0x7c00u) return with_sign(float_from_bits(infinity_magnitude | (magnitude & 0x3ffu) << 13), sign);
  return with_sign(widen_magnitude<10, 15>(magnitude), sign);
}

TRTC_DEVICE uint32 bfloat16_from_float(float value) {
  const uint32 bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > infinity_magnitude) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

// Of both halves of a word the larger one, of which `widen` makes a float; the other one where one is NaN.
template <class Widen>
TRTC_DEVICE uint32 larger_halves(uint32 a, uint32 b, Widen widen) {
  const auto larger_half = [&](uint32 x, uint32 y) {
    const float of_x = widen(x), of_y = widen(y);
    return of_x != of_x || of_y > of_x ? y : x;
  };
  return larger_half(a & 0xffffu, b & 0xffffu) | larger_half(a >> 16, b >> 16) << 16;
}

// The formats of 8 bits saturate: what is beyond the largest number, infinity too, becomes that.
TRTC_DEVICE uint32 float8_e4m3_from_float(float value) { return narrowed<8, 3, 7>(value, 0x7eu); }

TRTC_DEVICE float float_from_float8_e4m3(uint32 bits) {
  const uint32 magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return float_from_bits(0x7fffffffu);
  return with_sign(widen_magnitude<3, 7>(magnitude), bits >> 7 & 1);
}

TRTC_DEVICE int32 int8_from_float(float value) {
  if (value != value) return 0;
  const float bounded = min(max(value, -128.0f), 127.0f);
  // The last place of this sum is 1.
  return static_cast<int32>((bounded + 12582912.0f) - 12582912.0f);
}

TRTC_DEVICE uint32 float8_e5m2_from_float(float value) { return narrowed<8, 2, 15>(value, 0x7bu); }

TRTC_DEVICE float float_from_float8_e5m2(uint32 bits) { return float_from_float16(bits << 8); }

}  // namespace trtc
