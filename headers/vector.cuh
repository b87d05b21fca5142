// SPDX-License-Identifier: Apache-2.0
// Vec: N neighbouring elements of a row, held in registers as they lie in memory.
#pragma once

#include "types.cuh"

namespace trtc {

// An element's bits, from global memory, if `valid`; else 0.
template <class T>
TRTC_DEVICE uint32 load_element(const T* address, bool valid = true) {
  uint32 bits;
  if constexpr (sizeof(T) == 4) load_4(bits, address, valid);
  if constexpr (sizeof(T) == 2) load_2<Space::global>(bits, address, valid);
  if constexpr (sizeof(T) == 1) load_1(bits, address, valid);
  return bits;
}

template <class T, int N>
struct Vec {
  enum : int {
    bytes = N * static_cast<int>(sizeof(T)),
    words = (bytes + 3) / 4,
    per_quad = 16 / static_cast<int>(sizeof(T)),  // elements of 16 bytes
  };
  static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16 || bytes == 32,
                "a power of two of bytes");

  uint32 word[words];

  // From global memory, aligned to an element: the first `count` elements, all on their way at once, and zeros.
  TRTC_DEVICE void load_elements(const T* address, int count) {
    fill(0);
    load_each(address, 0, count);
  }

  // From global memory, aligned to an element: the elements from `first` to before `end`, all on their way at once; the
  // others stay. Of 4 and more, what decides about an element is in the loads' statement, as its text costs the
  // compiler more than the loads.
  TRTC_DEVICE void load_each(const T* address, int first, int end) {
    if constexpr (N < 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool is_inside = i >= first && i < end;
        const uint32 loaded = load_element(address + i, is_inside);
        if (is_inside) set_bits(i, loaded);
      }
    } else {
      load_fours<0>(address, first, end);
    }
  }

  // From global memory, aligned.
  TRTC_DEVICE void load_aligned(const T* address) {
    if constexpr (bytes == 2) load_2<Space::global>(word[0], address, true);
    if constexpr (bytes == 4) load_4<Space::global>(word[0], address);
    if constexpr (bytes == 8) load_8<Space::global>(word[0], word[1], address);
    if constexpr (bytes >= 16) load_16<Space::global>(word[0], word[1], word[2], word[3], address);
    if constexpr (bytes == 32) load_16<Space::global>(word[4], word[5], word[6], word[7], address + per_quad);
  }

  // Aligned like an aligned load; nothing where not `valid`.
  TRTC_DEVICE void store(T* address, bool valid) const {
    if constexpr (bytes == 1) {
      store_1<Space::global>(address, word[0], valid);
    } else if constexpr (bytes == 2) {
      store_2<Space::global>(address, word[0], valid);
    } else if constexpr (bytes == 4) {
      store_4<Space::global>(address, word[0], valid);
    } else if constexpr (bytes == 8) {
      store_8<Space::global>(address, word[0], word[1], valid);
    } else {
      store_16<Space::global>(address, word[0], word[1], word[2], word[3], valid);
      if constexpr (bytes == 32) store_16<Space::global>(address + per_quad, word[4], word[5], word[6], word[7], valid);
    }
  }

  // Element i alone, to global memory.
  TRTC_DEVICE void store_element(T* address, int i, bool valid) const {
    if constexpr (sizeof(T) == 4) {
      store_4<Space::global>(address, word[i], valid);
    } else if constexpr (sizeof(T) == 2) {
      store_2<Space::global>(address, word[i / 2] >> i % 2 * 16, valid);
    } else {
      store_1<Space::global>(address, word[i / 4] >> i % 4 * 8, valid);
    }
  }

  // To global memory, aligned to an element: the elements from `first` to before `end`.
  TRTC_DEVICE void store_each(T* address, int first, int end) const {
    if constexpr (N < 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) store_element(address + i, i, i >= first && i < end);
    } else {
      store_fours<0>(address, first, end);
    }
  }

  // Every element has these bits.
  TRTC_DEVICE void fill(uint32 bits) {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      word[i] = sizeof(T) == 4 ? bits : sizeof(T) == 2 ? bits | bits << 16 : bits * 0x01010101u;
    }
  }

  // Of element i.
  TRTC_DEVICE uint32 bits(int i) const {
    constexpr int width = 8 * sizeof(T);
    return sizeof(T) == 4 ? word[i] : word[i * width / 32] >> i * width % 32 & ((1u << width % 32) - 1);
  }

  TRTC_DEVICE void set_bits(int i, uint32 bits) {
    constexpr int width = 8 * sizeof(T);
    if constexpr (sizeof(T) == 4) {
      word[i] = bits;
    } else {
      const int place = i * width % 32;
      word[i * width / 32] = (word[i * width / 32] & ~(((1u << width % 32) - 1) << place)) | bits << place;
    }
  }

  // Of bytes: whether any bit is set.
  TRTC_DEVICE bool is_set(int i) const { return (word[i / 4] >> i % 4 * 8 & 0xffu) != 0; }

  TRTC_DEVICE float get(int i) const {
    if constexpr (sizeof(T) == 4) {
      return float_from_bits(word[i]);
    } else {
      return float_from_half<T>(word[i / 2] >> i % 2 * 16);
    }
  }

  // Elements i, which is even, and i + 1.
  TRTC_DEVICE void set(int i, float low, float high) {
    if constexpr (sizeof(T) == 4) {
      word[i] = bits_from_float(low);
      if constexpr (N > 1) word[i + 1] = bits_from_float(high);
    } else if constexpr (sizeof(T) == 2) {
      word[i / 2] = halves_from_floats<T>(low, high);
    } else {
      const uint32 pair = bytes_from_floats<T>(low, high);
      word[i / 4] = i % 4 == 0 ? pair : word[i / 4] | pair << 16;
    }
  }

 private:
  // Of element `I` and those behind it, four at a time.
  template <int I>
  TRTC_DEVICE void load_fours(const T* address, int first, int end) {
    if constexpr (I < N) {
      if constexpr (sizeof(T) == 4) {
        load_4_each<I>(word[I], word[I + 1], word[I + 2], word[I + 3], address + I, first, end);
      } else if constexpr (sizeof(T) == 2) {
        load_2_each<I>(word[I / 2], word[I / 2 + 1], address + I, first, end);
      } else {
        load_1_each<I>(word[I / 4], address + I, first, end);
      }
      load_fours<I + 4>(address, first, end);
    }
  }
  template <int I>
  TRTC_DEVICE void store_fours(T* address, int first, int end) const {
    if constexpr (I < N) {
      if constexpr (sizeof(T) == 4) {
        store_4_each<I>(address + I, word[I], word[I + 1], word[I + 2], word[I + 3], first, end);
      } else if constexpr (sizeof(T) == 2) {
        store_2_each<I>(address + I, word[I / 2], word[I / 2 + 1], first, end);
      } else {
        store_1_each<I>(address + I, word[I / 4], first, end);
      }
      store_fours<I + 4>(address, first, end);
    }
  }
};

}  // namespace trtc
