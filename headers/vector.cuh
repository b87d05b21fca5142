// Vec: N neighbouring elements of a row, held in registers as they lie in memory.
#pragma once

#include "types.cuh"

namespace trtc {

// How many elements an address is past a multiple of `Multiple` of them.
template <int Multiple, class T>
TRTC_DEVICE int elements_past(const T* address) {
  return static_cast<int>(reinterpret_cast<uint64>(address) / sizeof(T) % Multiple);
}

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
  // compiler more than the loads (softmax of 4096 keys: 278 ms, and 230).
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
  TRTC_DEVICE void load_aligned(const T* address) { load_whole<Space::global>(address); }

  // From global memory, aligned, if `valid`; and zeros. 16 bytes and more have no branch: they are sent for as soon as
  // the address is known, ahead of what is done elsewhere.
  TRTC_DEVICE void load_early(const T* address, bool valid) {
    if constexpr (bytes >= 16) {
      load_16(word[0], word[1], word[2], word[3], address, valid);
      if constexpr (bytes == 32) load_16(word[4], word[5], word[6], word[7], address + per_quad, valid);
    } else if (valid) {
      load_whole<Space::global>(address);
    } else {
      fill(0);
    }
  }

  // From global memory, aligned: what is before element `first` and from `end` on is of no use.
  TRTC_DEVICE void load_part(const T* address, int first, int end) {
    if constexpr (reads_whole_blocks) {
      load_whole<Space::global>(address);
    } else {
      fill(0xffffffffu >> (32 - 8 * static_cast<int>(sizeof(T))));  // what must not be used: NaN, or a byte that is set
      load_each(address, first, end);
    }
  }

  // From shared memory, aligned.
  TRTC_DEVICE void load_shared(const T* address) { load_whole<Space::shared>(address); }

  // Aligned like an aligned load; nothing where not `valid`.
  template <Space To = Space::global>
  TRTC_DEVICE void store(T* address, bool valid) const {
    if constexpr (bytes == 1) {
      store_1<To>(address, word[0], valid);
    } else if constexpr (bytes == 2) {
      store_2<To>(address, word[0], valid);
    } else if constexpr (bytes == 4) {
      store_4<To>(address, word[0], valid);
    } else if constexpr (bytes == 8) {
      store_8<To>(address, word[0], word[1], valid);
    } else {
      store_16<To>(address, word[0], word[1], word[2], word[3], valid);
      if constexpr (bytes == 32) store_16<To>(address + per_quad, word[4], word[5], word[6], word[7], valid);
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

  // To global memory, aligned like an aligned store: the first `count` elements, or the last ones; fewer than all. By
  // halves, so that each of at most log2(N) stores is aligned.
  TRTC_DEVICE void store_edge(T* address, int count, bool last) const {
    if constexpr (N > 1) {
      constexpr int half = N / 2;
      const bool has_half = (count & half) != 0;
      const bool goes_on_last = last != has_half;
      half_of(last).store(address + (last ? half : 0), has_half);
      half_of(goes_on_last).store_edge(address + (goes_on_last ? half : 0), count, last);
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

  // Elements before `first`, however far that is, and from `end` on have these bits.
  TRTC_DEVICE void keep(int first, int end, uint32 bits) {
    constexpr int width = static_cast<int>(8 * sizeof(T));
    Vec filling;
    filling.fill(bits);
    keep_words<0>(min(first, N) * width, min(end, N) * width, filling);
  }

  // The first `count` elements become those of another one.
  TRTC_DEVICE void replace_first(const Vec& other, int count) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < words; ++i) word[i] = i < count ? other.word[i] : word[i];
    } else {
      keep_words<0>(count * static_cast<int>(8 * sizeof(T)), 8 * bytes, other);
    }
  }

  // Of bytes: whether any bit is set.
  TRTC_DEVICE bool is_set(int i) const { return (word[i / 4] >> i % 4 * 8 & 0xffu) != 0; }

  // Elements become `fill` where the byte of `mask` is set; `unset`: where it is not.
  TRTC_DEVICE void replace(const Vec<boolean, N>& mask, bool unset, uint32 fill) {
    constexpr int per_word = 4 / static_cast<int>(sizeof(T));  // elements
    constexpr uint32 first = per_word == 1 ? 0 : per_word == 2 ? 0x1100u : 0x3210u;
    Vec filling;
    filling.fill(fill);
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const uint32 bytes = mask.word[i * per_word / 4];
      // The top bit of each byte that is not 0.
      const uint32 tops = ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes;
      const uint32 all = spread_signs(unset ? ~tops : tops, first + i * per_word % 4 * 0x1111u);
      word[i] = (word[i] & ~all) | (filling.word[i] & all);
    }
  }

  // Elements become those of the other one that are larger, or where they are NaN.
  TRTC_DEVICE void keep_larger(const Vec& other) {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i] = bits_from_float(larger(float_from_bits(word[i]), float_from_bits(other.word[i])));
      } else {
        word[i] = larger_halves<T>(word[i], other.word[i]);
      }
    }
  }

  // Elements become 0 where those of the other one are `value`, which is a number's bits, and whose sign counts only
  // where it is not 0.
  template <class U>
  TRTC_DEVICE void clear_where(const Vec<U, N>& other, uint32 value) {
    if constexpr (sizeof(T) == 2 && sizeof(U) == 2) {
#pragma unroll
      for (int i = 0; i < words; ++i) word[i] &= halves_other_than<U>(other.word[i], value | value << 16);
    } else {
      Vec<U, 1> one;
      one.word[0] = value;
#pragma unroll
      for (int i = 0; i < N; ++i) set_bits(i, other.get(i) == one.get(0) ? 0 : bits(i));
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

 private:
  TRTC_DEVICE Vec<T, N / 2> half_of(bool last) const {
    Vec<T, N / 2> found;
    if constexpr (bytes <= 4) {
      found.word[0] = last ? word[0] >> bytes * 4 : word[0];
    } else {
#pragma unroll
      for (int i = 0; i < words / 2; ++i) found.word[i] = last ? word[words / 2 + i] : word[i];
    }
    return found;
  }

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

  // Of word `I` and those behind it.
  template <int I>
  TRTC_DEVICE void keep_words(int first, int end, const Vec& filling) {
    if constexpr (I < words) {
      word[I] = keep_bits<32 * I>(word[I], first, end, filling.word[I]);
      keep_words<I + 1>(first, end, filling);
    }
  }

  template <Space From>
  TRTC_DEVICE void load_whole(const T* address) {
    if constexpr (bytes == 2) load_2<From>(word[0], address, true);
    if constexpr (bytes == 4) load_4<From>(word[0], address);
    if constexpr (bytes == 8) load_8<From>(word[0], word[1], address);
    if constexpr (bytes >= 16) load_16<From>(word[0], word[1], word[2], word[3], address);
    if constexpr (bytes == 32) load_16<From>(word[4], word[5], word[6], word[7], address + per_quad);
  }
};

}  // namespace trtc
