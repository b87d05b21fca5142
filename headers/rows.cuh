// SPDX-License-Identifier: Apache-2.0
// Whether rows are aligned, for the general kernels.
#pragma once

#include "row_vector.cuh"
#include "vector.cuh"

namespace trtc {

// What a Vec's address must be a multiple of, in bytes.
template <class T, int N>
constexpr TRTC_DEVICE uint64 vec_alignment() {
  return Vec<T, N>::bytes < 16 ? Vec<T, N>::bytes : 16;
}

// Whether every Vec of N elements of every row is aligned.
template <class T, int N>
TRTC_DEVICE bool rows_aligned(const T* base, int64 outer_stride, int64 inner_stride) {
  const uint64 bits = reinterpret_cast<uint64>(base) | static_cast<uint64>(outer_stride | inner_stride) * sizeof(T);
  return bits % vec_alignment<T, N>() == 0;
}

}  // namespace trtc
