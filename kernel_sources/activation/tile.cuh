// SPDX-License-Identifier: Apache-2.0
// The tiles of activations' arrays. What a program defines beside what the tile needs: the types Input (x), Up,
// Gradient (dy), Output, UpOutput and Widest, the wider one of these two; and
//
//   FUNCTION        Function:: of functions.cuh
//   GATED           y is multiplied by a second array
//   PACKED          that is the second half of each row of x
#pragma once

#include "activation/functions.cuh"
#include "arithmetic/vector_tile.cuh"

namespace trtc {

#if GATED
// The second factor's vectors.
TRTC_DEVICE void load_up(uint32 (&word)[VECTORS_PER_THREAD][words_of<Up, VEC_SIZE>], const Params& params,
                         const Tile& tile) {
#if PACKED
  load_tile<Up>(word, params.x, params, tile, params.x_outer_stride, params.x_inner_stride, params.columns);
#else
  load_tile<Up>(word, params.up, params, tile, params.up_outer_stride, params.up_inner_stride);
#endif
}
#endif

}  // namespace trtc
