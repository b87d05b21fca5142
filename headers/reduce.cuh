// SPDX-License-Identifier: Apache-2.0
// Reductions of the general kernels, over the threads of a CTA that share a row.
#pragma once

#include "row_reduce.cuh"

namespace trtc {

// Of rows that follow each other. Every thread calls reduce_in_cta() with `Use` 0, 1 ... for a row, and then
// next_row(). The shared memory of a use alternates from row to row, so that one barrier a use is enough.
template <int ThreadsPerRow, int RowsPerCta>
struct RowReduction {
  int parity = 0;

  TRTC_DEVICE void next_row() { parity ^= 1; }

  template <class Operation, int Use, int Count>
  TRTC_DEVICE void reduce_in_cta(float (&values)[Count]) const {
    constexpr int floats = reduced_floats(ThreadsPerRow, RowsPerCta, Count);
    TRTC_SHARED(float, warp_values, 2 * floats);
    reduce_row<Operation, ThreadsPerRow, RowsPerCta, false>(values, warp_values + parity * floats);
  }
};

}  // namespace trtc
