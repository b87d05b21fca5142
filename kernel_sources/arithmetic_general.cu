// SPDX-License-Identifier: Apache-2.0
// The general kernel of addition: all types, which are named as DLPack does, and sizes at run time.
#pragma once

#include "integers.cuh"

namespace trtc {

enum : int { any_threads = 256 };

// An element: its bits, and what its type's code and number of bits make of them.
struct AnyElement {
  uint64 bits;
  int code, width;

  static TRTC_DEVICE AnyElement at(const void* array, int dtype, int64 offset) {
    AnyElement found{0, dtype >> 8, dtype & 0xff};
    const char* from = static_cast<const char*>(array) + offset * (found.width / 8);
    uint32 low = 0, high = 0;
    if (found.width == 64) {
      load_8<Space::global>(low, high, from);
    } else if (found.width == 32) {
      load_4(low, from, true);
    } else if (found.width == 16) {
      load_2<Space::global>(low, from, true);
    } else {
      load_1(low, from, true);
    }
    found.bits = low | static_cast<uint64>(high) << 32;
    return found;
  }
  TRTC_DEVICE bool is_floating() const { return code == 2 || code == 4; }
  TRTC_DEVICE bool is_signed() const { return code == 0; }
  TRTC_DEVICE uint64 integer() const {
    if (code == 6) return bits != 0;
    const uint64 highest = bits << (64 - width);
    return is_signed() ? static_cast<uint64>(static_cast<int64>(highest) >> (64 - width)) : highest >> (64 - width);
  }
  TRTC_DEVICE float real() const {
    const uint32 word = static_cast<uint32>(bits);
    if (code == 4) return float_from_half<bfloat16>(word);
    if (code == 2) return width == 32 ? float_from_bits(word) : float_from_half<float16>(word);
    return is_signed() ? static_cast<float>(static_cast<int64>(integer())) : static_cast<float>(integer());
  }
};

// Stores the low bits of an element.
TRTC_DEVICE void store_any(void* array, int dtype, int64 offset, uint64 bits) {
  const int width = dtype & 0xff;
  char* to = static_cast<char*>(array) + offset * (width / 8);
  const uint32 low = static_cast<uint32>(bits), high = static_cast<uint32>(bits >> 32);
  store_8<Space::global>(to, low, high, width == 64);
  store_4<Space::global>(to, low, width == 32);
  store_2<Space::global>(to, low, width == 16);
  store_1<Space::global>(to, low, width == 8);
}

template <class Params>
TRTC_DEVICE void add_any(const Params& params) {
  for (int64 at = cta_index() * any_threads + thread_index(); at < params.rows * params.columns;
       at += ctas_in_grid() * any_threads) {
    const int64 row = at / params.columns, column = at - row * params.columns;
    const AnyElement x = AnyElement::at(
        params.x, params.x_dtype,
        row_offset(params, row, params.x_outer_stride, params.x_inner_stride) + column * params.x_column_stride);
    const AnyElement other =
        AnyElement::at(params.other, params.other_dtype,
                       row_offset(params, row, params.other_outer_stride, params.other_inner_stride) +
                           column * params.other_column_stride);
    const uint64 sum = x.integer() + other.integer();
    const bool is_unsigned = !x.is_signed() && !other.is_signed();  // else 64 bits may have a sign
    const float of_integers = is_unsigned ? static_cast<float>(sum) : static_cast<float>(static_cast<int64>(sum));
    const float real = x.is_floating() || other.is_floating() ? x.real() + other.real() : of_integers;
    const int code = params.out_dtype >> 8;
    uint64 bits = sum;
    if (code == 6) bits = sum != 0;
    if (code == 4) bits = halves_from_floats<bfloat16>(real, 0.0f);
    if (code == 2) {
      bits = params.out_dtype == 0x220 ? bits_from_float(real) : halves_from_floats<float16>(real, 0.0f);
    }
    store_any(params.out, params.out_dtype,
              row_offset(params, row, params.out_outer_stride, params.out_inner_stride) + column, bits);
  }
}

}  // namespace trtc
