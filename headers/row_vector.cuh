// SPDX-License-Identifier: Apache-2.0
// Where rows lie, and vectors: N neighbouring elements of a row, as the 32-bit words that lie in memory, and as floats.
// Plain functions on small arrays, which the compiler keeps in registers.
#pragma once

#include "types.cuh"

namespace trtc {

// The element offset of a row in an array whose leading dimensions collapse to two strides: rows, and heads inside a
// row. params.inner_magic and .inner_shift divide a number below 2^31 by .inner_count, the heads; that is 1 where one
// stride is enough, and always from 2^31 rows on.
template <class Params>
TRTC_DEVICE int64 row_offset(const Params& params, int64 row, int64 outer_stride, int64 inner_stride) {
  const uint32 outer = multiply_high(static_cast<uint32>(row), params.inner_magic) >> params.inner_shift;
  const uint32 inner = static_cast<uint32>(row) - outer * params.inner_count;
  return params.inner_count == 1 ? row * outer_stride : outer * outer_stride + inner * inner_stride;
}

// The words of N elements.
template <class T, int N>
inline constexpr int words_of = (N * static_cast<int>(sizeof(T)) + 3) / 4;

// What a vector's address must be a multiple of, in bytes.
template <class T, int N>
inline constexpr int alignment_of = N * sizeof(T) < 16 ? N * static_cast<int>(sizeof(T)) : 16;

// From an aligned address.
template <int N, Space From = Space::global, class T, int Words>
TRTC_DEVICE void load_vector(uint32 (&word)[Words], const T* from) {
  constexpr int bytes = N * sizeof(T);
  static_assert(Words == words_of<T, N>, "as many words as the elements have");
  if constexpr (bytes >= 16) {
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
      load_16<From>(word[i], word[i + 1], word[i + 2], word[i + 3], reinterpret_cast<const uint32*>(from) + i);
    }
  } else if constexpr (bytes == 8) {
    load_8<From>(word[0], word[1], from);
  } else if constexpr (bytes == 4) {
    load_4<From>(word[0], from);
  } else if constexpr (bytes == 2) {
    load_2<From>(word[0], from, true);
  } else {
    load_1(word[0], from, true);
  }
}

// From an aligned address of global memory if `valid`; else every word is `fill`. It has no branch: one would have
// addresses computed in it, for each vector anew.
template <int N, class T, int Words>
TRTC_DEVICE void load_vector_or(uint32 (&word)[Words], uint32 fill, const T* from, bool valid) {
  constexpr int bytes = N * sizeof(T);
  static_assert(bytes >= 4 && Words == words_of<T, N>, "as many words as the elements have");
  if constexpr (bytes >= 16) {
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
      load_16(word[i], word[i + 1], word[i + 2], word[i + 3], reinterpret_cast<const uint32*>(from) + i, valid, fill);
    }
  } else if constexpr (bytes == 8) {
    load_8(word[0], word[1], from, valid, fill);
  } else {
    load_4(word[0], from, valid);
    word[0] = valid ? word[0] : fill;
  }
}

// From an aligned address of global memory if `valid`, else zeros. 16 bytes and more have no branch: they are sent for
// as soon as the address is known.
template <int N, class T, int Words>
TRTC_DEVICE void load_vector_if(uint32 (&word)[Words], const T* from, bool valid) {
  if constexpr (N * sizeof(T) >= 16) {
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
      load_16(word[i], word[i + 1], word[i + 2], word[i + 3], reinterpret_cast<const uint32*>(from) + i, valid);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Words; ++i) word[i] = 0;
    if (valid) load_vector<N>(word, from);
  }
}

// From an address of global memory that is aligned to an element: the first `count` elements, and zeros.
template <int N, class T, int Words>
TRTC_DEVICE void load_elements(uint32 (&word)[Words], const T* from, int count) {
  static_assert(sizeof(T) > 1, "of 16 or 32 bits");
#pragma unroll
  for (int i = 0; i < Words; ++i) word[i] = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    uint32 bits;
    if constexpr (sizeof(T) == 4) {
      load_4(bits, from + i, i < count);
      word[i] = bits;
    } else {
      load_2<Space::global>(bits, from + i, i < count);
      word[i / 2] |= bits << i % 2 * 16;
    }
  }
}

// To an aligned address, if `valid`.
template <int N, Space To = Space::global, class T, int Words>
TRTC_DEVICE void store_vector(T* to, const uint32 (&word)[Words], bool valid = true) {
  constexpr int bytes = N * sizeof(T);
  static_assert(Words == words_of<T, N>, "as many words as the elements have");
  if constexpr (bytes >= 16) {
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
      store_16<To>(reinterpret_cast<uint32*>(to) + i, word[i], word[i + 1], word[i + 2], word[i + 3], valid);
    }
  } else if constexpr (bytes == 8) {
    store_8<To>(to, word[0], word[1], valid);
  } else if constexpr (bytes == 4) {
    store_4<To>(to, word[0], valid);
  } else if constexpr (bytes == 2) {
    store_2<To>(to, word[0], valid);
  } else {
    store_1<To>(to, word[0], valid);
  }
}

// To an address of global memory that is aligned to an element: the first `count` elements.
template <int N, class T, int Words>
TRTC_DEVICE void store_elements(T* to, const uint32 (&word)[Words], int count) {
  static_assert(sizeof(T) > 1, "of 16 or 32 bits");
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 4) {
      store_4<Space::global>(to + i, word[i], i < count);
    } else {
      store_2<Space::global>(to + i, word[i / 2] >> i % 2 * 16, i < count);
    }
  }
}

template <int Words>
TRTC_DEVICE void copy_words(uint32 (&to)[Words], const uint32 (&from)[Words]) {
#pragma unroll
  for (int i = 0; i < Words; ++i) to[i] = from[i];
}

// Element i as a float.
template <class T, int Words>
TRTC_DEVICE float element(const uint32 (&word)[Words], int i) {
  if constexpr (sizeof(T) == 4) {
    return float_from_bits(word[i]);
  } else {
    return float_from_half<T>(word[i / 2] >> i % 2 * 16);
  }
}

// The elements as floats.
template <class T, int N, int Words>
TRTC_DEVICE void unpack(float (&value)[N], const uint32 (&word)[Words]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 4) {
      value[i] = float_from_bits(word[i]);
    } else {
      value[i] = float_from_half<T>(word[i / 2] >> i % 2 * 16);
    }
  }
}

// Floats as elements: rounded to nearest even; 8-bit types saturate.
template <class T, int N, int Words>
TRTC_DEVICE void pack(uint32 (&word)[Words], const float (&value)[N]) {
  if constexpr (sizeof(T) == 1) {
#pragma unroll
    for (int i = 0; i < Words; ++i) word[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float second = i + 1 < N ? value[i + (N > 1)] : 0.0f;
    if constexpr (sizeof(T) == 4) {
      word[i] = bits_from_float(value[i]);
      if constexpr (N > 1) word[i + 1] = bits_from_float(second);
    } else if constexpr (sizeof(T) == 2) {
      word[i / 2] = halves_from_floats<T>(value[i], second);
    } else {
      word[i / 4] |= bytes_from_floats<T>(value[i], second) << i % 4 * 8;
    }
  }
}

}  // namespace trtc
