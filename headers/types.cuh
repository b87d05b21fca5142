// SPDX-License-Identifier: Apache-2.0
// Storage types. Arithmetic is in float: a value is converted when it is loaded and when it is stored.
#pragma once

#include "ptx.cuh"

namespace trtc {

struct float16 {
  uint16 bits;
};

struct bfloat16 {
  uint16 bits;
};

struct float8_e4m3 {
  unsigned char bits;
};

struct float8_e5m2 {
  unsigned char bits;
};

struct int8 {
  unsigned char bits;
};

// Whether something holds: any byte but 0.
struct boolean {
  unsigned char bits;
};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

// The value of the 16-bit type T in the low half of a word, whatever the high half holds.
template <class T>
TRTC_DEVICE float float_from_half(uint32 word) {
  if constexpr (is_same<T, bfloat16>) {
    return float_from_bits(word << 16);
  } else {
    return float_from_float16_bits(static_cast<uint16>(word));
  }
}

// Two values of the 16-bit type T in one word. Rounds to nearest even; overflow gives infinity; NaN stays NaN.
template <class T>
TRTC_DEVICE uint32 halves_from_floats(float low, float high) {
  if constexpr (is_same<T, bfloat16>) {
    return bfloat16_bits_from_floats(low, high);
  } else {
    return float16_bits_from_floats(low, high);
  }
}

// Of both values of the 16-bit type T in a word the larger one; the other one where one is NaN.
template <class T>
TRTC_DEVICE uint32 larger_halves(uint32 a, uint32 b) {
  if constexpr (is_same<T, bfloat16>) {
    return larger_bfloat16s(a, b);
  } else {
    return larger_float16s(a, b);
  }
}

// All bits of each value of the 16-bit type T in a word that is not the one in `value`; 0 is equal to the one below
// zero.
template <class T>
TRTC_DEVICE uint32 halves_other_than(uint32 word, uint32 value) {
  if constexpr (is_same<T, bfloat16>) {
    return bfloat16s_unlike(word, value);
  } else {
    return float16s_unlike(word, value);
  }
}

// Two values of the 8-bit type T in the low half of a word. What the type cannot hold becomes its largest number.
template <class T>
TRTC_DEVICE uint32 bytes_from_floats(float low, float high) {
  if constexpr (is_same<T, float8_e4m3>) {
    return float8_e4m3_bits_from_floats(low, high);
  } else if constexpr (is_same<T, float8_e5m2>) {
    return float8_e5m2_bits_from_floats(low, high);
  } else {
    return int8_bits_from_float(low) | int8_bits_from_float(high) << 8;
  }
}

// Infinity's bits, below zero.
template <class T>
TRTC_DEVICE uint32 minus_infinity_bits() {
  return sizeof(T) == 4 ? 0xff800000u : is_same<T, bfloat16> ? 0xff80u : 0xfc00u;
}

// The largest number of an 8-bit type.
template <class T>
TRTC_DEVICE float largest() {
  return is_same<T, float8_e4m3> ? 448.0f : is_same<T, float8_e5m2> ? 57344.0f : 127.0f;
}

}  // namespace trtc
