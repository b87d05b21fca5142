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
  static constexpr TRTC_DEVICE Exchange exchange() {
    return Traits::ctas_per_row == 1 ? Exchange::none : Traits::clusters ? Exchange::cluster : Exchange::grid;
  }
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

template <bool Causal, class Params>
TRTC_DEVICE Range range_of(const Params& params, int64 row) {
  if constexpr (Causal) {
    const uint32 query = static_cast<uint32>(row) - matrix_of(params, row) * params.queries;
    const int64 end = static_cast<int64>(query) + params.diagonal + 1;
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
  const uint32 query = static_cast<uint32>(row) - matrix * params.queries;
  const uint32 batch =
      params.matrix_heads == 1 ? matrix : multiply_high(matrix, params.matrix_heads_magic) >> params.matrix_heads_shift;
  const uint32 head = matrix - batch * params.matrix_heads;
  return batch * params.mask_batch_stride + head * params.mask_head_stride + query * params.mask_query_stride;
}

// Where a CTA's threads are, and the part of each row that it has.
template <class Config>
struct SoftmaxPlace {
  int thread;  // of those of this CTA that share a row
  int row_in_cta;
  int rank;  // of this CTA among those that share its rows
  int first_column;
  int columns;  // of the part

  template <class Params>
  static TRTC_DEVICE SoftmaxPlace here(const Params& params) {
    const int rank = static_cast<int>(cta_index() % Config::ctas_per_row);
    int slice = params.columns;
    if constexpr (Config::ctas_per_row > 1) {
      constexpr int unit = Config::vectors_per_row;
      slice = (params.columns / unit + (params.columns % unit != 0)) * Config::vector;
    }
    const int first = static_cast<int>(min(static_cast<int64>(rank) * slice, static_cast<int64>(params.columns)));
    return {thread_index() % Config::threads, thread_index() / Config::threads, rank, first,
            min(slice, params.columns - first)};
  }
};

}  // namespace trtc
