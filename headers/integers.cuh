// SPDX-License-Identifier: Apache-2.0
// Elements of any type as integers of 64 bits, or as floats; and integers as elements.
#pragma once

#include "row_vector.cuh"

namespace trtc {

template <class T>
inline constexpr bool is_floating = is_same<T, float> || is_same<T, float16> || is_same<T, bfloat16>;
template <class T>
inline constexpr bool is_signed = is_same<T, int8> || is_same<T, int16> || is_same<T, int32> || is_same<T, int64>;

// Element i of an integer type, extended to 64 bits; of a boolean, 0 or 1.
template <class T, int Words>
TRTC_DEVICE uint64 integer_element(const uint32 (&word)[Words], int i) {
  if constexpr (sizeof(T) == 8) {
    return word[2 * i] | static_cast<uint64>(word[2 * i + 1]) << 32;
  } else {
    constexpr int width = 8 * static_cast<int>(sizeof(T));
    const uint32 highest = word[i * width / 32] << (32 - width - i * width % 32);
    if constexpr (is_same<T, boolean>) return highest >> (32 - width) != 0;
    if constexpr (is_signed<T>)
      return static_cast<uint64>(static_cast<int64>(static_cast<int32>(highest) >> (32 - width)));
    return highest >> (32 - width);
  }
}

// Element i of any type, rounded to nearest even.
template <class T, int Words>
TRTC_DEVICE float any_element(const uint32 (&word)[Words], int i) {
  if constexpr (is_floating<T>) {
    return element<T>(word, i);
  } else {
    const uint64 value = integer_element<T>(word, i);
    if constexpr (is_same<T, int64>) return static_cast<float>(static_cast<int64>(value));
    if constexpr (is_same<T, uint64>) return static_cast<float>(value);
    if constexpr (is_signed<T>) return static_cast<float>(static_cast<int32>(value));
    return static_cast<float>(static_cast<uint32>(value));
  }
}

// Integers as elements: their low bits; of a boolean, whether it is not 0.
template <class T, int N, int Words>
TRTC_DEVICE void pack_integers(uint32 (&word)[Words], const uint64 (&value)[N]) {
#pragma unroll
  for (int i = 0; i < Words; ++i) word[i] = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 8) {
      word[2 * i] = static_cast<uint32>(value[i]);
      word[2 * i + 1] = static_cast<uint32>(value[i] >> 32);
    } else {
      constexpr int width = 8 * static_cast<int>(sizeof(T));
      const uint32 bits = is_same<T, boolean> ? value[i] != 0 : static_cast<uint32>(value[i]);
      word[i * width / 32] |= bits << (32 - width) >> (32 - width) << i * width % 32;
    }
  }
}

// One element's words N times.
template <class T, int N>
TRTC_DEVICE void repeat_element(uint32 (&word)[words_of<T, N>], const uint32 (&one)[words_of<T, 1>]) {
#pragma unroll
  for (int i = 0; i < words_of<T, N>; ++i) {
    word[i] = sizeof(T) == 8 ? one[i % words_of<T, 1>]
                             : one[0] * (sizeof(T) == 1   ? 0x01010101u
                                         : sizeof(T) == 2 ? 0x10001u
                                                          : 1u);
  }
}

}  // namespace trtc
