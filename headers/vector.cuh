// Vec: N neighbouring elements of a row, held in registers as they lie in memory.
#pragma once

#include "types.cuh"

namespace trtc {

template <class T, int N>
struct Vec {
  enum : int {
    bytes = N * static_cast<int>(sizeof(T)),
    words = (bytes + 3) / 4,
  };
  static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16 || bytes == 32, "a power of two of bytes");

  uint32 word[words];

  // The first `count` elements (0 or less: none), and zeros. `aligned`: to `bytes`, or to 16 where there are more;
  // otherwise the address is aligned to an element.
  TRTC_DEVICE void load(const T* address, int count, bool aligned) {
    constexpr int quad = 16 / static_cast<int>(sizeof(T));  // elements of 16 bytes
    if (aligned && count >= N) {
      if constexpr (bytes == 2) load_2(word[0], address);
      if constexpr (bytes == 4) load_4(word[0], address);
      if constexpr (bytes == 8) load_8(word[0], word[1], address);
      if constexpr (bytes >= 16) load_16(word[0], word[1], word[2], word[3], address);
      if constexpr (bytes == 32) load_16(word[4], word[5], word[6], word[7], address + quad);
    } else if constexpr (sizeof(T) == 2) {
      if constexpr (bytes == 2) load_2_each(word[0], address, min(count, 1));
      if constexpr (bytes == 4 || bytes == 8) load_2_each(word[0], address, count);
      if constexpr (bytes == 8) load_2_each(word[1], address + 2, count - 2);
      if constexpr (bytes >= 16) load_2_each(word[0], word[1], word[2], word[3], address, count);
      if constexpr (bytes == 32) load_2_each(word[4], word[5], word[6], word[7], address + quad, count - quad);
    } else {
      if constexpr (bytes <= 8) load_4_each(word[0], address, count);
      if constexpr (bytes == 8) load_4_each(word[1], address + 1, count - 1);
      if constexpr (bytes >= 16) load_4_each(word[0], word[1], word[2], word[3], address, count);
      if constexpr (bytes == 32) load_4_each(word[4], word[5], word[6], word[7], address + quad, count - quad);
    }
  }

  // Aligned like an aligned load; nothing where not `valid`.
  TRTC_DEVICE void store(void* address, bool valid) const {
    if constexpr (bytes == 2) {
      store_2(address, word[0], valid);
    } else if constexpr (bytes == 4) {
      store_4(address, word[0], valid);
    } else if constexpr (bytes == 8) {
      store_8(address, word[0], word[1], valid);
    } else {
      store_16(address, word[0], word[1], word[2], word[3], valid);
      if constexpr (bytes == 32) {
        store_16(static_cast<char*>(address) + 16, word[4], word[5], word[6], word[7], valid);
      }
    }
  }

  TRTC_DEVICE void store_element(void* address, int i, bool valid) const {
    if constexpr (sizeof(T) == 4) {
      store_4(address, word[i], valid);
    } else {
      store_2(address, word[i / 2] >> i % 2 * 16, valid);
    }
  }

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
    } else {
      word[i / 2] = halves_from_floats<T>(low, high);
    }
  }
};

}  // namespace trtc
