// SPDX-License-Identifier: Apache-2.0
// The general kernels of activations: function, columns, types and options at run time. `gated`: y is multiplied by
// `up`, or where there is none, by the second half of each row of x.
#pragma once

#include "activation/functions.cuh"
#include "any_row.cuh"
#include "scaling.cuh"

namespace trtc {

enum : int { any_threads = 256, any_vec = 4 };

// A call for each element, and one kernel for all functions: the text that loads and stores any type is long.
TRTC_OUT_OF_LINE float any_activation(Function function, float x) {
  if (function == Function::gelu) return activation<Function::gelu, float>(x);
  if (function == Function::gelu_tanh) return activation<Function::gelu_tanh, float>(x);
  if (function == Function::silu) return activation<Function::silu, float>(x);
  return activation<Function::relu_squared, float>(x);
}
TRTC_OUT_OF_LINE Slope any_slope(Function function, float x) {
  if (function == Function::gelu) return activation_slope<Function::gelu, float>(x);
  if (function == Function::gelu_tanh) return activation_slope<Function::gelu_tanh, float>(x);
  if (function == Function::silu) return activation_slope<Function::silu, float>(x);
  return activation_slope<Function::relu_squared, float>(x);
}

// The rows of a call, all of one number.
template <class Params>
TRTC_DEVICE AnyRow row_of(const Params& params, void* array, int dtype, int64 row, int64 outer, int64 inner,
                          int first_column = 0) {
  return AnyRow::at(array, dtype, row_offset(params, row, outer, inner) + first_column, params.columns);
}
template <class Params>
TRTC_DEVICE AnyRow x_row(const Params& params, int64 row) {
  return row_of(params, params.x, params.x_dtype, row, params.x_outer_stride, params.x_inner_stride);
}
template <class Params>
TRTC_DEVICE AnyRow up_row(const Params& params, int64 row) {
  if (params.up != nullptr) {
    return row_of(params, params.up, params.up_dtype, row, params.up_outer_stride, params.up_inner_stride);
  }
  return row_of(params, params.x, params.x_dtype, row, params.x_outer_stride, params.x_inner_stride, params.columns);
}

// y before it is scaled, of columns from `column` on; 0 behind the row.
template <class Params>
TRTC_DEVICE void find_any(float (&y)[any_vec], const Params& params, int64 row, int column) {
  float up[any_vec];
  x_row(params, row).load(y, column);
  if (params.gated != 0) up_row(params, row).load(up, column);
#pragma unroll
  for (int i = 0; i < any_vec; ++i)
    y[i] = any_activation(static_cast<Function>(params.function), y[i]) * (params.gated != 0 ? up[i] : 1.0f);
}

template <class Params>
TRTC_DEVICE void activation_forward_any(const Params& params) {
  const float scale = params.scale == nullptr ? 1.0f : load_float(params.scale);
  float amax = 0.0f;
  const int64 vectors = (static_cast<int64>(params.columns) + any_vec - 1) / any_vec;
  for (int64 at = cta_index() * any_threads + thread_index(); at < params.rows * vectors;
       at += ctas_in_grid() * any_threads) {
    const int64 row = at / vectors;
    const int column = static_cast<int>(at - row * vectors) * any_vec;
    float y[any_vec];
    find_any(y, params, row, column);
#pragma unroll
    for (int i = 0; i < any_vec; ++i) {
      amax = Maximum::of(amax, magnitude(y[i]));
      y[i] *= scale;
    }
    row_of(params, params.out, params.out_dtype, row, params.out_outer_stride, params.out_inner_stride)
        .store(y, column);
  }
  if (params.amax != nullptr) publish_amax<any_threads>(static_cast<float*>(params.amax), amax);
  if (params.scale_inv != nullptr && thread_index() == 0 && cta_index() == 0) {
    *static_cast<float*>(params.scale_inv) = divide(1.0f, scale);
  }
}

// A CTA for each row.
template <class Params>
TRTC_DEVICE void activation_row_scaled_any(const Params& params) {
  TRTC_SHARED(float, warp_values, reduced_floats(any_threads, 1, 1));
  const int64 row = cta_index();
  const AnyRow out =
      row_of(params, params.out, params.out_dtype, row, params.out_outer_stride, params.out_inner_stride);
  RowScale scale = {};
  for (int pass = 0; pass < 2; ++pass) {
    float amax = 0.0f;
    for (int column = thread_index() * any_vec; column < params.columns; column += any_threads * any_vec) {
      float y[any_vec];
      find_any(y, params, row, column);
#pragma unroll
      for (int i = 0; i < any_vec; ++i) {
        amax = Maximum::of(amax, magnitude(y[i]));
        y[i] *= scale.inverse;
      }
      if (pass == 1) out.store(y, column);
    }
    if (pass == 0) scale = RowScale::of(reduce_row<Maximum, any_threads, 1>(amax, warp_values), out.largest_number());
  }
  if (thread_index() == 0) static_cast<float*>(params.row_scale)[row] = scale.scale;
}

template <class Params>
TRTC_DEVICE void activation_backward_any(const Params& params) {
  const int64 vectors = (static_cast<int64>(params.columns) + any_vec - 1) / any_vec;
  for (int64 at = cta_index() * any_threads + thread_index(); at < params.rows * vectors;
       at += ctas_in_grid() * any_threads) {
    const int64 row = at / vectors;
    const int column = static_cast<int>(at - row * vectors) * any_vec;
    float gradient[any_vec], x[any_vec], up[any_vec], dup[any_vec];
    row_of(params, params.dy, params.dy_dtype, row, params.dy_outer_stride, params.dy_inner_stride)
        .load(gradient, column);
    x_row(params, row).load(x, column);
    if (params.gated != 0) up_row(params, row).load(up, column);
#pragma unroll
    for (int i = 0; i < any_vec; ++i) {
      const Slope slope = any_slope(static_cast<Function>(params.function), x[i]);
      dup[i] = gradient[i] * slope.value;
      x[i] = gradient[i] * slope.derivative * (params.gated != 0 ? up[i] : 1.0f);
    }
    row_of(params, params.dx, params.dx_dtype, row, params.dx_outer_stride, params.dx_inner_stride).store(x, column);
    if (params.gated != 0 && params.up == nullptr) {
      row_of(params, params.dx, params.dx_dtype, row, params.dx_outer_stride, params.dx_inner_stride, params.columns)
          .store(dup, column);
    } else if (params.gated != 0 && params.dup != nullptr) {
      row_of(params, params.dup, params.dup_dtype, row, params.dup_outer_stride, params.dup_inner_stride)
          .store(dup, column);
    }
  }
}

}  // namespace trtc
