// Rows: where they lie in global memory, and how one that no vector fits travels.
#pragma once

#include "vector.cuh"

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

// Whether every Vec of N elements of every row is aligned.
template <class T, int N>
TRTC_DEVICE bool rows_aligned(const T* base, int64 outer_stride, int64 inner_stride) {
  const uint64 bits = reinterpret_cast<uint64>(base) | static_cast<uint64>(outer_stride | inner_stride) * sizeof(T);
  return bits % (N * sizeof(T) < 16 ? N * sizeof(T) : 16) == 0;
}

// Copies a row's `count` elements from shared memory to global memory, which is aligned only to an element:
// neighbouring threads write neighbouring aligned words of 4 bytes.
template <class T>
TRTC_DEVICE void copy_from_shared(T* global, const T* shared, int count, int thread, int threads) {
  constexpr int per_word = 4 / static_cast<int>(sizeof(T));
  // Elements of the first word that lie before the row.
  const int before = count > 0 ? static_cast<int>(reinterpret_cast<uint64>(global) % 4 / sizeof(T)) : 0;
#pragma unroll 1
  for (int i = thread * per_word - before; i < count; i += threads * per_word) {
    if constexpr (per_word == 1) {
      global[i] = shared[i];
    } else if (i < 0) {
      global[i + 1] = shared[i + 1];
    } else if (i + 1 == count) {
      global[i] = shared[i];
    } else {
      *reinterpret_cast<uint32*>(global + i) = shared[i].bits | static_cast<uint32>(shared[i + 1].bits) << 16;
    }
  }
}

}  // namespace trtc
