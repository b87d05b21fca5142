// Softmax of rows, of any length at run time. What its tuned kernels, forward and backward, and the general ones share.
//
//   y = exp(v - m) / (sum(exp(v - m)) [+ exp(sink - m)]),   v = scale * x [+ mask], m = max(v [, sink])
//
// with v = -infinity where an element does not take part
//
// A group of `ctas_per_row` CTAs has a row, each a part of it; a part is held in slots (slots.cuh), or, where it is
// longer than these, is read twice, chunk by chunk.
#pragma once

#include "exponential.cuh"
#include "rows.cuh"
#include "slots.cuh"

namespace trtc {

// What a kernel's program says of it (transformer_rtc/ops/softmax_kernels.py), and what follows.
template <class Traits>
struct SoftmaxConfig : Traits {
  using Part = Slots<Traits::threads, Traits::steps, Traits::vector>;
  enum : int { vectors_per_row = Traits::vector * Traits::ctas_per_row };
  static constexpr TRTC_DEVICE Exchange exchange() { return exchange_of<Traits>(); }
};

// Which columns of a row take part: all, or, where it is causal, those up to its query's, `diagonal` further; or the
// last `window` of them, where that is not 0.
struct Range {
  int begin;
  int end;

  TRTC_DEVICE bool has(int column) const { return column >= begin && column < end; }
  // Whether a Vec of a part that begins with column `first` has such a column. Thread 0's first one may have the last
  // columns too.
  template <class Part>
  TRTC_DEVICE bool meets(const Part& part, int k, int first) const {
    const int column = first + part.column(k);
    return part.column(k) < 0 || (column + Part::vector > begin && column < end);
  }
};

template <class Params>
TRTC_DEVICE uint32 matrix_of(const Params& params, int64 row) {
  return params.queries == 1 ? static_cast<uint32>(row)
                             : multiply_high(static_cast<uint32>(row), params.queries_magic) >> params.queries_shift;
}

template <class Params>
TRTC_DEVICE uint32 query_of(const Params& params, int64 row) {
  return static_cast<uint32>(row) - matrix_of(params, row) * params.queries;
}

template <bool Causal, class Params>
TRTC_DEVICE Range range_of(const Params& params, int64 row) {
  if constexpr (Causal) {
    const int64 end = static_cast<int64>(query_of(params, row)) + params.diagonal + 1;
    const int64 last = end < params.columns ? end : params.columns;
    const int64 first = params.window > 0 ? end - params.window : 0;
    return {first > 0 ? static_cast<int>(first) : 0, last > 0 ? static_cast<int>(last) : 0};
  } else {
    return {0, params.columns};
  }
}

template <class Params>
TRTC_DEVICE uint32 batch_of(const Params& params, uint32 matrix) {
  return params.matrix_heads == 1 ? matrix
                                  : multiply_high(matrix, params.matrix_heads_magic) >> params.matrix_heads_shift;
}

template <class Params>
TRTC_DEVICE uint32 head_of_matrix(const Params& params, uint32 matrix) {
  return matrix - batch_of(params, matrix) * params.matrix_heads;
}

// Where the row of a mask that is broadcast to [..., heads, queries, columns] begins.
template <class Params>
TRTC_DEVICE int64 mask_offset(const Params& params, int64 row) {
  const uint32 matrix = matrix_of(params, row);
  const uint32 batch = batch_of(params, matrix), head = head_of_matrix(params, matrix);
  const uint32 query = query_of(params, row);
  return batch * params.mask_batch_stride + head * params.mask_head_stride + query * params.mask_query_stride;
}

// The sink of a row's head.
template <class Sink, class Params>
TRTC_DEVICE float sink_of(const Params& params, int64 row) {
  const auto* sinks = static_cast<const Sink*>(params.sink);
  Vec<Sink, 1> sink;
  sink.load(sinks + head_of_matrix(params, matrix_of(params, row)), 1, true);
  return sink.get(0);
}

// A row's part of it, from what its dx needs too: sum(dy * y), or sum(dy).
template <class Params>
TRTC_DEVICE float sink_gradient(const Params& params, int64 row, float sum, float sink) {
  const float lse = load_float(static_cast<const float*>(params.lse) + row);
  return sink == minus_infinity() ? 0.0f : -exponential(sink - lse) * sum;
}

enum : int { finish_threads = 256 };

// Adds up the rows of the head that this CTA has, in an order that their number fixes; to all threads.
template <class Params>
TRTC_DEVICE float sum_of_head(const Params& params) {
  RowReduction<finish_threads, 1, 1, Exchange::none, 1, false, 1> reduction;
  reduction.begin(params, 0);
  const float* of_rows = static_cast<const float*>(params.row_partials);
  const int64 of_batch = static_cast<int64>(params.matrix_heads) * params.queries;
  float sum[1] = {0.0f};
  for (int64 batch = cta_index() * params.queries; batch < params.rows; batch += of_batch) {
    float of_matrix = 0.0f;
    for (int64 query = thread_index(); query < params.queries; query += finish_threads) {
      of_matrix += load_float(of_rows + batch + query);
    }
    sum[0] += of_matrix;
  }
  reduction.template reduce_in_cta<Sum, 0>(sum);
  return sum[0];
}

// What a thread has of the rows: each CTA of a row as many whole Vecs.
template <class Config, class Params>
TRTC_DEVICE Place<Config> softmax_place(const Params& params) {
  if constexpr (Config::ctas_per_row == 1) return Place<Config>::here(params.columns, params.columns);
  constexpr int unit = Config::vectors_per_row;
  return Place<Config>::here(params.columns, (params.columns / unit + (params.columns % unit != 0)) * Config::vector);
}

}  // namespace trtc
