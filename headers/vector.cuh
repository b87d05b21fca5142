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
  static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16 || bytes == 32,
                "a power of two of bytes");

  uint32 word[words];

  // The first `count` elements (0 or less: none), and zeros. `aligned`: to `bytes`, or to 16 where there are more;
  // otherwise the address is aligned to an element.
  TRTC_DEVICE void load(const T* address, int count, bool aligned) {
    constexpr int quad = 16 / static_cast<int>(sizeof(T));  // elements of 16 bytes
    if constexpr (bytes == sizeof(T) && sizeof(T) == 2) {
      load_2_each(word[0], address, min(count, 1));
    } else if constexpr (bytes == sizeof(T)) {
      load_4_each(word[0], address, count);
    } else if (aligned && count >= N) {
      if constexpr (bytes == 4) load_4(word[0], address);
      if constexpr (bytes == 8) load_8(word[0], word[1], address);
      if constexpr (bytes >= 16) load_16(word[0], word[1], word[2], word[3], address);
      if constexpr (bytes == 32) load_16(word[4], word[5], word[6], word[7], address + quad);
    } else if constexpr (sizeof(T) == 2) {
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

  // From shared memory, `shift` elements, less than 16 bytes of them, behind an address that is aligned to 16 bytes.
  TRTC_DEVICE void load_shifted(const T* address, int shift) {
    constexpr int per_word = sizeof(T) < 4 ? 4 / static_cast<int>(sizeof(T)) : 1;
    static_assert(bytes == 16 || bytes == 8 || bytes == 4, "whole words, in one block of 16 bytes and the next");
    const int skipped = shift / per_word;  // words
    uint32 block[8];
    load_16(block[0], block[1], block[2], block[3], address);
    block[4] = block[5] = block[6] = block[7] = 0;
    if (shift > 0) load_16(block[4], block[5], block[6], block[7], address + 16 / static_cast<int>(sizeof(T)));
#pragma unroll
    for (int i = 0; i < 6; ++i) block[i] = (skipped & 2) != 0 ? block[i + 2] : block[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) block[i] = (skipped & 1) != 0 ? block[i + 1] : block[i];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      word[i] = shift_right(block[i], block[i + 1], 8 * static_cast<int>(sizeof(T)) * (shift % per_word));
    }
  }

  // Aligned like an aligned load; nothing where not `valid`.
  TRTC_DEVICE void store(void* address, bool valid) const {
    if constexpr (bytes == 1) {
      store_1(address, word[0], valid);
    } else if constexpr (bytes == 2) {
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
    } else if constexpr (sizeof(T) == 2) {
      store_2(address, word[i / 2] >> i % 2 * 16, valid);
    } else {
      store_1(address, word[i / 4] >> i % 4 * 8, valid);
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
    } else if constexpr (sizeof(T) == 2) {
      word[i / 2] = halves_from_floats<T>(low, high);
    } else {
      const uint32 pair = bytes_from_floats<T>(low, high);
      word[i / 4] = i % 4 == 0 ? pair : word[i / 4] | pair << 16;
    }
  }
};

}  // namespace trtc
