// SPDX-License-Identifier: Apache-2.0
// The general kernels of softmax: length, types and options at run time. Complete for every shape: `Threads` threads
// have a row, and read it twice, if it has more than a Vec for each of them.
#pragma once

#include "any_row.cuh"
#include "softmax/mask_gradient.cuh"
#include "softmax/sink_gradient.cuh"

namespace trtc {

// Elements that a thread has of a row at a time.
enum : int { softmax_vector = 8 };

// A row of the mask, which is bytes, or numbers that are added; null, where there is none.
template <class Params>
TRTC_DEVICE char* any_mask(const Params& params, int64 row) {
  if (params.mask == nullptr) return nullptr;
  return static_cast<char*>(params.mask) + mask_offset(params, row) * size_of(static_cast<Dtype>(params.mask_dtype));
}

// The columns that take part in a row, but for its mask; none, where there is no row.
template <class Params>
TRTC_DEVICE Range any_range(const Params& params, int64 row, bool exists) {
  if (!exists) return {0, 0};
  return params.causal != 0 ? range_of<true>(params, row) : range_of<false>(params, row);
}

template <class Params>
TRTC_DEVICE float any_sink_of_head(const Params& params, int64 head) {
  float sink[1];
  AnyRow::at(params.sink, params.sink_dtype, head, 1).load(sink, 0);
  return sink[0];
}

// The columns of a row from which its threads read: `Threads` Vecs at a time, those that have any of a range.
template <int Threads>
struct Reading {
  enum : int { N = softmax_vector, stride = Threads * N };
  Range range;
  int first;   // of this thread
  bool again;  // whether it has more than one Vec, which it reads again and does not keep

  TRTC_DEVICE Reading(Range range, int thread) : range(range) {
    const int begin = range.begin - range.begin % stride;
    first = begin + thread * N;
    if (first + N <= range.begin) first += stride;
    again = range.end - begin > stride;
  }
  TRTC_DEVICE bool meets(int column) const { return column < range.end && column + N > range.begin; }
  // Elements outside the range become `outside`.
  TRTC_DEVICE void replace(float (&v)[N], int column, float outside) const {
    if (column >= range.begin && column + N <= range.end) return;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = range.has(column + i) ? v[i] : outside;
  }
};

// v of the columns from `column` on: -infinity where there is none or it does not take part.
template <int Threads, class Row, class Params>
TRTC_DEVICE void load_scaled(const Params& params, float (&v)[softmax_vector], const Row& x, char* mask,
                             const Reading<Threads>& reading, int column) {
  constexpr int N = softmax_vector;
  x.load(v, column);
  reading.replace(v, column, minus_infinity());
  const Dtype mask_type = Row::every_option && mask != nullptr ? static_cast<Dtype>(params.mask_dtype) : Dtype::absent;
  if (mask_type != Dtype::absent && size_of(mask_type) == 1) {
    const boolean* bytes = reinterpret_cast<const boolean*>(mask) + column;
    Vec<boolean, N> of_mask;
    if (column + N <= x.columns && rows_aligned<boolean, N>(bytes, 0, 0)) {
      of_mask.load_aligned(bytes);
    } else {
      of_mask.load_elements(bytes, x.columns - column);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = of_mask.is_set(i) == (params.mask_keeps != 0) ? v[i] : minus_infinity();
  }
  if (mask_type != Dtype::absent && size_of(mask_type) > 1) {
    float added[N];
    AnyRow{mask, mask_type, x.columns}.load(added, column);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = masked_score(v[i], params.scale, added[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = v[i] == minus_infinity() ? v[i] : v[i] * params.scale;
  }
}

template <class Row, bool Logarithm, int Threads, int RowsPerCta, class Params>
TRTC_DEVICE void softmax_forward_of(const Params& params) {
  constexpr int N = softmax_vector;
  constexpr int stride = Threads * N;
  constexpr float one = large_one;
  const int thread = thread_index() % Threads;
  RowReduction<Threads, RowsPerCta> reduction;
  for (int64 first_row = cta_index() * RowsPerCta; first_row < params.rows; first_row += ctas_in_grid() * RowsPerCta) {
    const int64 row = first_row + thread_index() / Threads;
    // A row past the last takes part in the reductions with no columns.
    const bool exists = row < params.rows;
    const int columns = exists ? params.columns : 0;
    const Row x = Row::at(params.x, params.x_dtype,
                          row_offset(params, row, params.x_outer_stride, params.x_inner_stride), columns);
    const Row out = Row::at(params.out, params.out_dtype,
                            row_offset(params, row, params.out_outer_stride, params.out_inner_stride), columns);
    char* const mask = any_mask(params, row);
    const Reading<Threads> reading(any_range(params, row, exists), thread);

    const bool excludes = params.mask != nullptr || params.causal != 0;
    // In one reading: about a v of the thread's own, which is `slack` below its largest one at most. Each time that
    // moves, what came before errs by 2.2 u more, and is e^-slack of itself or less. As in softmax_forward, the terms
    // of the largest v are counted apart.
    constexpr float slack = 2.0f;
    const float lowest = float_from_bits(0xff7fffffu);  // -infinity less than it is no NaN
    float v[N] = {};
    float most = lowest, thread_about = lowest, ones = 0.0f;
    float terms[1] = {0.0f};
    add_long(terms, reading.first, reading.range.end, stride, [&](int column, float (&block)[1]) {
      load_scaled(params, v, x, mask, reading, column);
      float largest = v[0];
#pragma unroll
      for (int i = 1; i < N; ++i) largest = Largest::of(largest, v[i]);
      float of_vec = 0.0f;
      if (largest > most) {
        if (largest > thread_about + slack) {
          const float less = exponential(thread_about - largest);
          terms[0] *= less;
          block[0] *= less;
          thread_about = largest;
        }
        of_vec = ones * large_exponential(most - thread_about);
        most = largest;
        ones = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float term = large_exponential(v[i] - thread_about);
        of_vec += v[i] == most ? 0.0f : term;
        ones += v[i] == most ? 1.0f : 0.0f;
      }
      block[0] += of_vec;
    });
    float row_most[1] = {most};
    reduction.template reduce_in_cta<Largest, 0>(row_most);
    const bool has_sink = params.sink != nullptr && exists;
    const float sink =
        has_sink ? any_sink_of_head(params, head_of_matrix(params, matrix_of(params, row))) : minus_infinity();
    const float about = Largest::of(row_most[0], sink);
    // A row of which infinity is the largest is NaN, as its difference from itself is.
    const float of_most = ones * large_exponential(most - about);
    float sums[2] = {terms[0] * exponential(thread_about - about) + (most == about ? 0.0f : of_most),
                     most == about ? of_most : 0.0f};
    reduction.template reduce_in_cta<Sum, 1>(sums);
    float total = (sums[0] + sums[1]) + (has_sink ? large_exponential(sink - about) : 0.0f);
    if (total < 0.5f) total = 0.0f;  // nothing takes part
    const float log_total = total == 0.0f ? 0.0f : logarithm(total * (1.0f / one));
    if (params.lse != nullptr && thread == 0 && exists) {
      static_cast<float*>(params.lse)[row] = total == 0.0f ? minus_infinity() : about + log_total;
    }
    const float inverse = approximate_reciprocal(total);
    const float inverse_rest = fused_multiply_add(-total, inverse, 1.0f) * inverse;
    for (int column = thread * N; column < columns; column += stride) {
      const bool meets = reading.meets(column);
      if (meets && reading.again) load_scaled(params, v, x, mask, reading, column);
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        // What is excluded, and -infinity beside it, is zero even in a row of NaN.
        const bool in = meets && total != 0.0f && !(excludes && v[i] == minus_infinity());
        if constexpr (Logarithm) {
          y[i] = in ? (v[i] - about) - log_total : minus_infinity();
        } else {
          const float term = large_exponential(v[i] - about);
          y[i] = in ? fused_multiply_add(term, inverse, term * inverse_rest) : 0.0f;
        }
      }
      out.store(y, column);
    }
    reduction.next_row();
  }
}

template <bool Logarithm, int Threads, int RowsPerCta, class Params>
TRTC_DEVICE void softmax_forward_rows(const Params& params) {
  if constexpr (!Logarithm) {  // its logarithm is rarer, and as much to compile
    CommonType<softmax_vector> type(params.columns, params.mask == nullptr);
    type.add(params.x, params.x_dtype, params.x_outer_stride, params.x_inner_stride);
    type.add(params.out, params.out_dtype, params.out_outer_stride, params.out_inner_stride);
    if (type.is_half()) return softmax_forward_of<TypedRow<bfloat16>, Logarithm, Threads, RowsPerCta>(params);
    if (type.is_float()) return softmax_forward_of<TypedRow<float>, Logarithm, Threads, RowsPerCta>(params);
  }
  softmax_forward_of<AnyRow, Logarithm, Threads, RowsPerCta>(params);
}

template <class Row, bool Logarithm, int Threads, int RowsPerCta, class Params>
TRTC_DEVICE void softmax_backward_of(const Params& params) {
  constexpr int N = softmax_vector;
  constexpr int stride = Threads * N;
  const int thread = thread_index() % Threads;
  const float nothing = Logarithm ? minus_infinity() : 0.0f;
  RowReduction<Threads, RowsPerCta> reduction;
  for (int64 first_row = cta_index() * RowsPerCta; first_row < params.rows; first_row += ctas_in_grid() * RowsPerCta) {
    const int64 row = first_row + thread_index() / Threads;
    const bool exists = row < params.rows;
    const int columns = exists ? params.columns : 0;
    const Row y = Row::at(params.y, params.y_dtype,
                          row_offset(params, row, params.y_outer_stride, params.y_inner_stride), columns);
    const Row dy = Row::at(params.dy, params.dy_dtype,
                           row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride), columns);
    const Row dx = Row::at(params.dx, params.dx_dtype,
                           row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride), columns);
    const Reading<Threads> reading(any_range(params, row, exists), thread);
    float of_y[N] = {}, of_dy[N] = {};
    const auto load = [&](int column) {
      y.load(of_y, column);
      dy.load(of_dy, column);
      reading.replace(of_y, column, nothing);
    };
    float sums[1] = {0.0f};
    add_long(sums, reading.first, reading.range.end, stride, [&](int column, float (&sum)[1]) {
      load(column);
      float of_vec = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float term = Logarithm ? of_dy[i] : of_dy[i] * of_y[i];
        of_vec += of_y[i] == nothing ? 0.0f : term;
      }
      sum[0] += of_vec;
    });
    reduction.template reduce_in_cta<Sum, 0>(sums);
    if (params.row_sums != nullptr && thread == 0 && exists) {
      static_cast<float*>(params.row_sums)[row] = sums[0];
    }
    for (int column = thread * N; column < columns; column += stride) {
      const bool meets = reading.meets(column);
      if (meets && reading.again) load(column);
      float found[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gradient =
            Logarithm ? fused_multiply_add(-exponential(of_y[i]), sums[0], of_dy[i]) : of_y[i] * (of_dy[i] - sums[0]);
        found[i] = meets && of_y[i] != nothing ? params.scale * gradient : 0.0f;
      }
      dx.store(found, column);
    }
    reduction.next_row();
  }
}

template <bool Logarithm, int Threads, int RowsPerCta, class Params>
TRTC_DEVICE void softmax_backward_rows(const Params& params) {
  if constexpr (!Logarithm) {
    CommonType<softmax_vector> type(params.columns, true);
    type.add(params.y, params.y_dtype, params.y_outer_stride, params.y_inner_stride);
    type.add(params.dy, params.dy_dtype, params.dy_outer_stride, params.dy_inner_stride);
    type.add(params.dx, params.dx_dtype, params.dx_outer_stride, params.dx_inner_stride);
    if (type.is_half()) return softmax_backward_of<TypedRow<bfloat16>, Logarithm, Threads, RowsPerCta>(params);
    if (type.is_float()) return softmax_backward_of<TypedRow<float>, Logarithm, Threads, RowsPerCta>(params);
  }
  softmax_backward_of<AnyRow, Logarithm, Threads, RowsPerCta>(params);
}

template <class Params>
TRTC_DEVICE void softmax_backward_any_sink_gradient(const Params& params) {
  const float sum[1] = {sink_gradient(params, any_sink_of_head(params, cta_index()))};
  AnyRow::at(params.dsink, params.dsink_dtype, cta_index(), thread_index() == 0 ? 1 : 0).store(sum, 0);
}

// As MaskGradientRows, of any types.
template <bool Logarithm, class Params>
struct AnyMaskGradientRows {
  enum : int { N = mask_vector };
  const Params& params;
  bool aligned;

  template <bool>
  TRTC_DEVICE void load(int64 row, uint32 query, const MaskColumns& columns, float (&of_y)[N],
                        float (&of_dy)[N]) const {
    const int64 y_offset = row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    const int64 dy_offset = row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    const Range range = params.causal != 0 ? causal_range(params, query) : Range{0, params.columns};
    if (columns.first < range.end && columns.first + N > range.begin) {
      AnyRow::at(params.y, params.y_dtype, y_offset, params.columns).load(of_y, columns.first);
      AnyRow::at(params.dy, params.dy_dtype, dy_offset, params.columns).load(of_dy, columns.first);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!range.has(columns.at(i))) {
        of_y[i] = Logarithm ? minus_infinity() : 0.0f;
        of_dy[i] = 0.0f;
      }
    }
  }

  TRTC_DEVICE void store(int64 mask_row, const MaskColumns& columns, const float (&sum)[N]) const {
    AnyRow::at(params.dmask, params.dmask_dtype, mask_row * params.columns, params.columns).store(sum, columns.first);
  }
};

template <bool Logarithm, class Params>
TRTC_DEVICE void softmax_backward_any_mask_gradient(const Params& params) {
  mask_gradient<Logarithm, 1>(params, AnyMaskGradientRows<Logarithm, Params>{params, true});
}

}  // namespace trtc
