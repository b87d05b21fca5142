// SPDX-License-Identifier: Apache-2.0
// Addition, a CTA for each tile of elements (arithmetic/vector_tile.cuh): y = x + other, which are broadcast to one
// shape. What a program defines beside what the tile needs: the types Input (x), Other and Output, any of numbers.
#pragma once

#include "arithmetic/vector_tile.cuh"
#include "integers.cuh"

namespace trtc {

// A thread's vectors of an array, or where column_stride is 0, the one element of each row.
template <class T>
TRTC_DEVICE void load_broadcast(uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>], const void* array,
                                const Params& params, const Tile& tile, int64 outer_stride, int64 inner_stride,
                                int column_stride) {
  if (column_stride != 0) {
    load_tile<T>(word, array, params, tile, outer_stride, inner_stride);
    return;
  }
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const T* from = static_cast<const T*>(array) + row_offset(params, tile.row[k], outer_stride, inner_stride);
    uint32 one[words_of<T, 1>];
    load_vector_if<1>(one, from, tile.valid[k]);
    repeat_element<T, VEC_SIZE>(word[k], one);
  }
}

// Integers are added modulo 2^64. What is rounded to y's type is their sum, or the sum in float32 of others.
TRTC_DEVICE void add_vectors(uint32 (&y)[words_of<Output, VEC_SIZE>], const uint32 (&x)[words_of<Input, VEC_SIZE>],
                             const uint32 (&other)[words_of<Other, VEC_SIZE>]) {
  float real[VEC_SIZE];
  if constexpr (is_floating<Input> || is_floating<Other>) {
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) real[i] = any_element<Input>(x, i) + any_element<Other>(other, i);
    pack<Output>(y, real);
  } else {
    uint64 sum[VEC_SIZE];
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) sum[i] = integer_element<Input>(x, i) + integer_element<Other>(other, i);
    if constexpr (is_floating<Output>) {
      constexpr bool is_unsigned = !is_signed<Input> && !is_signed<Other>;  // else 64 bits may have a sign
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) {
        real[i] = is_unsigned ? static_cast<float>(sum[i]) : static_cast<float>(static_cast<int64>(sum[i]));
      }
      pack<Output>(y, real);
    } else {
      pack_integers<Output>(y, sum);
    }
  }
}

TRTC_DEVICE void add(const Params& params) {
  const Tile tile = tile_of(params);
  uint32 x[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>], other[VECTORS_PER_THREAD][words_of<Other, VEC_SIZE>];
  load_broadcast<Input>(x, params.x, params, tile, params.x_outer_stride, params.x_inner_stride,
                        params.x_column_stride);
  load_broadcast<Other>(other, params.other, params, tile, params.other_outer_stride, params.other_inner_stride,
                        params.other_column_stride);
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    uint32 y[words_of<Output, VEC_SIZE>];
    add_vectors(y, x[k], other[k]);
    store_words_of<Output>(params.out, y, params, tile, k, params.out_outer_stride, params.out_inner_stride);
  }
}

}  // namespace trtc
