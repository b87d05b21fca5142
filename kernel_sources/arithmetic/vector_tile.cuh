// SPDX-License-Identifier: Apache-2.0
// The elements of a CTA: vectors that follow each other in a row, and then in the next one. What a program defines:
// Params, with a geometry and `columns`, and
//
//   THREADS, VECTORS_PER_THREAD, VEC_SIZE   of a CTA, of a thread and of a vector; VEC_SIZE is 1 of unaligned rows
#pragma once

#include "row_vector.cuh"

namespace trtc {

// Where a thread's vectors are.
struct Tile {
  int64 row[VECTORS_PER_THREAD], column[VECTORS_PER_THREAD];
  bool valid[VECTORS_PER_THREAD];
};

TRTC_DEVICE Tile tile_of(const Params& params) {
  Tile tile;
  const uint64 first = static_cast<uint64>(cta_index()) * (THREADS * VECTORS_PER_THREAD);
  if (params.rows == 1) {  // no vector is divided: the host makes one row of rows without gaps
#pragma unroll
    for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
      tile.row[k] = 0;
      tile.column[k] = static_cast<int64>(first + k * THREADS + thread_index()) * VEC_SIZE;
      tile.valid[k] = tile.column[k] < params.columns;
    }
    return tile;
  }
  const uint32 vectors = static_cast<uint32>(params.columns + VEC_SIZE - 1) / VEC_SIZE;  // of a row
  const uint64 first_row = first < 0x100000000u ? static_cast<uint32>(first) / vectors : first / vectors;
  const uint32 begin = static_cast<uint32>(first - first_row * vectors);
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const uint32 vector = begin + k * THREADS + thread_index(), rows = vector / vectors;
    tile.row[k] = static_cast<int64>(first_row + rows);
    tile.column[k] = static_cast<int64>(vector - rows * vectors) * VEC_SIZE;
    tile.valid[k] = tile.row[k] < params.rows;
  }
  return tile;
}

// A thread's vectors of an array, as its strides say, from `first_column` of each row on.
template <class T>
TRTC_DEVICE void load_tile(uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>], const void* array,
                           const Params& params, const Tile& tile, int64 outer_stride, int64 inner_stride,
                           int first_column = 0) {
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const T* from = static_cast<const T*>(array) + row_offset(params, tile.row[k], outer_stride, inner_stride);
    load_vector_if<VEC_SIZE>(word[k], from + first_column + tile.column[k], tile.valid[k]);
  }
}

// Vector k of an array.
template <class T>
TRTC_DEVICE void store_words_of(void* array, const uint32 (&word)[words_of<T, VEC_SIZE>], const Params& params,
                                const Tile& tile, int k, int64 outer_stride, int64 inner_stride, int first_column = 0) {
  T* to = static_cast<T*>(array) + row_offset(params, tile.row[k], outer_stride, inner_stride);
  store_vector<VEC_SIZE>(to + first_column + tile.column[k], word, tile.valid[k]);
}
template <class T>
TRTC_DEVICE void store_vector_of(void* array, const float (&value)[VEC_SIZE], const Params& params, const Tile& tile,
                                 int k, int64 outer_stride, int64 inner_stride, int first_column = 0) {
  uint32 word[words_of<T, VEC_SIZE>];
  pack<T>(word, value);
  store_words_of<T>(array, word, params, tile, k, outer_stride, inner_stride, first_column);
}

}  // namespace trtc
