// SPDX-License-Identifier: Apache-2.0
// Backward of activations, a CTA for each tile of elements (activation/tile.cuh):
//
//   dx  = dy * f'(x), or dy * up * f'(x) (GATED)
//   dup = dy * f(x)
//
// PACKED: both are halves of each row of dx. HAS_DUP: else dup is wanted.
#pragma once

#include "activation/tile.cuh"

namespace trtc {

TRTC_DEVICE void activation_backward(const Params& params) {
  const Tile tile = tile_of(params);
  uint32 dy[VECTORS_PER_THREAD][words_of<Gradient, VEC_SIZE>], x[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
  load_tile<Gradient>(dy, params.dy, params, tile, params.dy_outer_stride, params.dy_inner_stride);
  load_tile<Input>(x, params.x, params, tile, params.x_outer_stride, params.x_inner_stride);
#if GATED
  uint32 up[VECTORS_PER_THREAD][words_of<Up, VEC_SIZE>];
  load_up(up, params, tile);
#endif
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    float dx[VEC_SIZE];
#if PACKED || HAS_DUP
    float dup[VEC_SIZE];
#endif
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
      const float gradient = element<Gradient>(dy[k], i);
      const Slope slope = activation_slope<FUNCTION, Widest>(element<Input>(x[k], i));
      dx[i] = gradient * slope.derivative;
#if PACKED || HAS_DUP
      dup[i] = gradient * slope.value;
#endif
#if GATED
      dx[i] *= element<Up>(up[k], i);
#endif
    }
    store_vector_of<Output>(params.dx, dx, params, tile, k, params.dx_outer_stride, params.dx_inner_stride);
#if PACKED
    store_vector_of<Output>(params.dx, dup, params, tile, k, params.dx_outer_stride, params.dx_inner_stride,
                            params.columns);
#elif HAS_DUP
    store_vector_of<UpOutput>(params.dup, dup, params, tile, k, params.dup_outer_stride, params.dup_inner_stride);
#endif
  }
}

}  // namespace trtc
