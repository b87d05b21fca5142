// SPDX-License-Identifier: Apache-2.0
// The gradient of heads' sinks, from what the first launch of a backward has left.
#pragma once

#include "row_reduce.cuh"
#include "softmax/scores.cuh"

namespace trtc {

enum : int { finish_threads = 256 };

// The gradient of the sink of the head that this CTA has: what each of its rows adds is -exp(sink - lse) times the sum
// that the row's dx needs, which the first launch has left. In an order that the number of rows fixes; to all threads.
template <class Params>
TRTC_DEVICE float sink_gradient(const Params& params, float sink) {
  TRTC_SHARED(float, warp_sums, reduced_floats(finish_threads, 1, 1));
  const float* row_sums = static_cast<const float*>(params.row_sums);
  const float* lse = static_cast<const float*>(params.lse);
  const int64 of_batch = static_cast<int64>(params.matrix_heads) * params.queries;
  float sum = 0.0f;
  for (int64 batch = cta_index() * params.queries; batch < params.rows; batch += of_batch) {
    float of_matrix = 0.0f;
    for (int64 query = thread_index(); query < params.queries; query += finish_threads) {
      const int64 row = batch + query;
      const float of_row = -exponential(sink - load_float(lse + row)) * load_float(row_sums + row);
      of_matrix += sink == minus_infinity() ? 0.0f : of_row;
    }
    sum += of_matrix;
  }
  return reduce_row<Sum, finish_threads, 1>(sum, warp_sums);
}

}  // namespace trtc
