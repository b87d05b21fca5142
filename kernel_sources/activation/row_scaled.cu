// SPDX-License-Identifier: Apache-2.0
// Forward of gated activations with a scale of each row, a CTA for each row:
//
//   row_scale = max |f(x) * up| / the largest number of Output,  y = f(x) * up / row_scale
//
// The CTA's threads keep a row of up to CHUNK elements in registers; of a longer one they find y again.
#pragma once

#include "activation/tile.cuh"
#include "scaling.cuh"

namespace trtc {

enum : int { CHUNK = THREADS * VECTORS_PER_THREAD * VEC_SIZE };

// A thread's y of a row from `first` on; 0 behind the row.
TRTC_DEVICE void find_chunk(float (&y)[VECTORS_PER_THREAD][VEC_SIZE], const Params& params, Tile& tile, int first) {
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    tile.row[k] = cta_index();
    tile.column[k] = first + (k * THREADS + thread_index()) * VEC_SIZE;
    tile.valid[k] = tile.column[k] < params.columns;
  }
  uint32 x[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>], up[VECTORS_PER_THREAD][words_of<Up, VEC_SIZE>];
  load_tile<Input>(x, params.x, params, tile, params.x_outer_stride, params.x_inner_stride);
  load_up(up, params, tile);
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    unpack<Input>(y[k], x[k]);
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) y[k][i] = activation<FUNCTION, Output>(y[k][i]) * element<Up>(up[k], i);
  }
}

TRTC_DEVICE void activation_row_scaled(const Params& params) {
  TRTC_SHARED(float, warp_values, reduced_floats(THREADS, 1, 1));
  float y[VECTORS_PER_THREAD][VEC_SIZE];
  Tile tile;
  float amax = 0.0f;
#pragma unroll 1
  for (int first = 0; first < params.columns; first += CHUNK) {
    find_chunk(y, params, tile, first);
#pragma unroll
    for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) amax = Maximum::of(amax, magnitude(y[k][i]));
    }
  }
  amax = reduce_row<Maximum, THREADS, 1>(amax, warp_values);
  const RowScale scale = RowScale::of(amax, largest<Output>());
  if (thread_index() == 0) static_cast<float*>(params.row_scale)[cta_index()] = scale.scale;
#pragma unroll 1
  for (int first = 0; first < params.columns; first += CHUNK) {
    if (params.columns > CHUNK) find_chunk(y, params, tile, first);
#pragma unroll
    for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) y[k][i] *= scale.inverse;
      store_vector_of<Output>(params.out, y[k], params, tile, k, params.out_outer_stride, params.out_inner_stride);
    }
  }
}

}  // namespace trtc
