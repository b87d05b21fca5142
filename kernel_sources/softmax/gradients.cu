// SPDX-License-Identifier: Apache-2.0
// Launches behind a backward's first one: the gradients of heads' sinks and of a mask of floats.
#pragma once

#include "softmax/mask_gradient.cuh"
#include "softmax/sink_gradient.cuh"

namespace trtc {

template <class Sink, class Output, class Params>
TRTC_DEVICE void softmax_backward_sink_gradient(const Params& params) {
  Vec<Output, 1> value;
  value.set(0, sink_gradient(params, sink_of_head<Sink>(params, cta_index())), 0.0f);
  value.store(static_cast<Output*>(params.dsink) + cta_index(), thread_index() == 0);
}

// The rows of dy and y, and the mask's gradient, for mask_gradient().
template <class Traits, class Params>
struct MaskGradientRows {
  using Gradient = typename Traits::Gradient;
  using Input = typename Traits::Input;
  using Output = typename Traits::Output;
  enum : int { N = mask_vector };
  const Params& params;
  const Input* y;
  const Gradient* dy;
  Output* dmask;
  bool aligned;  // all vectors of y and dy are
  bool dmask_aligned;

  static TRTC_DEVICE MaskGradientRows of(const Params& params) {
    const auto* y = static_cast<const Input*>(params.y);
    const auto* dy = static_cast<const Gradient*>(params.dy);
    auto* dmask = static_cast<Output*>(params.dmask);
    return {params,
            y,
            dy,
            dmask,
            rows_aligned<Input, N>(y, params.y_outer_stride, params.y_inner_stride) &&
                rows_aligned<Gradient, N>(dy, params.dy_outer_stride, params.dy_inner_stride),
            rows_aligned<Output, N>(dmask, params.columns, 0)};
  }

  // `Whole`: the columns are neighbours, and all there.
  template <bool Whole>
  TRTC_DEVICE void load(int64 row, uint32 query, const MaskColumns& columns, float (&of_y)[N],
                        float (&of_dy)[N]) const {
    const Input* y_row = y + row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    const Gradient* dy_row = dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    Range range{0, params.columns};
    if constexpr (Traits::causal) range = causal_range(params, query);
    Vec<Input, N> y_vec;
    Vec<Gradient, N> dy_vec;
    y_vec.fill(0);
    dy_vec.fill(0);
    if constexpr (Whole) {
      if (!Traits::causal || (columns.first < range.end && columns.first + N > range.begin)) {
        y_vec.load_aligned(y_row + columns.first);
        dy_vec.load_aligned(dy_row + columns.first);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int at = columns.at(i);
        y_vec.set_bits(i, load_element(y_row + at, range.has(at)));
        dy_vec.set_bits(i, load_element(dy_row + at, range.has(at)));
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool used = (Whole && !Traits::causal) || range.has(columns.at(i));
      of_y[i] = used ? y_vec.get(i) : Traits::logarithm ? minus_infinity() : 0.0f;
      of_dy[i] = dy_vec.get(i);
    }
  }

  TRTC_DEVICE void store(int64 mask_row, const MaskColumns& columns, const float (&sum)[N]) const {
    Vec<Output, N> value;
#pragma unroll
    for (int i = 0; i < N; i += 2) value.set(i, sum[i], sum[i + 1]);
    Output* of_row = dmask + mask_row * params.columns;
    const bool vector = aligned && dmask_aligned && columns.first + N <= params.columns;
    value.store(of_row + columns.first, vector);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value.store_element(of_row + columns.at(i), i, !vector && columns.at(i) < params.columns);
    }
  }
};

template <class Traits, class Params>
TRTC_DEVICE void softmax_backward_mask_gradient(const Params& params) {
  mask_gradient<Traits::logarithm, Traits::ctas>(params, MaskGradientRows<Traits, Params>::of(params));
}

}  // namespace trtc
