// SPDX-License-Identifier: Apache-2.0
// Forward of activations, a CTA for each tile of elements (activation/tile.cuh):
//
//   y = f(x), or f(x) * up (GATED), times a scale if there is one (HAS_SCALE)
//
// HAS_AMAX: the largest |y| before the scale is published. HAS_SCALE_INV: the scale's inverse is stored.
#pragma once

#include "activation/tile.cuh"
#include "scaling.cuh"

namespace trtc {

TRTC_DEVICE void activation_forward(const Params& params) {
  const Tile tile = tile_of(params);
  uint32 x[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
  load_tile<Input>(x, params.x, params, tile, params.x_outer_stride, params.x_inner_stride);
#if GATED
  uint32 up[VECTORS_PER_THREAD][words_of<Up, VEC_SIZE>];
  load_up(up, params, tile);
#endif
  float scale = 1.0f;
#if HAS_SCALE
  scale = load_float(params.scale);
#endif
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    float y[VEC_SIZE];
    unpack<Input>(y, x[k]);
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
      y[i] = activation<FUNCTION, Output>(y[i]);
#if GATED
      y[i] *= element<Up>(up[k], i);
#endif
      if (HAS_AMAX && tile.valid[k]) amax = Maximum::of(amax, magnitude(y[i]));
      if (HAS_SCALE) y[i] *= scale;
    }
    store_vector_of<Output>(params.out, y, params, tile, k, params.out_outer_stride, params.out_inner_stride);
  }
#if HAS_AMAX
  publish_amax<THREADS>(static_cast<float*>(params.amax), amax);
#endif
#if HAS_SCALE_INV
  if (thread_index() == 0 && cta_index() == 0) *static_cast<float*>(params.scale_inv) = divide(1.0f, scale);
#endif
}

}  // namespace trtc
