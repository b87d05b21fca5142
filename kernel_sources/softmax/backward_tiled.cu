// SPDX-License-Identifier: Apache-2.0
// Backward of softmax for rows so short that a thread has a whole one (softmax/tiled.cuh):
//
//   dx = scale * y * (dy - sum(dy * y))   of y = softmax(scale * x)
//   dx = scale * (dy - exp(y) * sum(dy))  of its logarithm (LOGARITHM)
//
// LEAVES_SUMS: each row's sum is stored for launches that follow, which find the gradients of sinks and masks.
#pragma once

#include "softmax/gradient.cuh"
#include "softmax/tiled.cuh"

namespace trtc {

// First the results.
TRTC_DEVICE RowArray array_of(const Params& params, int number) {
  RowArray array = {params.dx, params.dx_outer_stride, params.dx_inner_stride, sizeof(Output)};
  if (number == 1) array = {params.y, params.y_outer_stride, params.y_inner_stride, sizeof(Input)};
  if (number == 2) array = {params.dy, params.dy_outer_stride, params.dy_inner_stride, sizeof(Gradient)};
  return array;
}

// A bit for each array that is not dense.
TRTC_DEVICE uint32 scattered_arrays(const Params& params) {
  uint32 found = 0;
#pragma unroll
  for (int number = 0; number <= 2; ++number) found |= is_dense(params, array_of(params, number)) ? 0 : 1 << number;
  return found;
}

TRTC_DEVICE void softmax_backward(const Params& params) {
  TRTC_DYNAMIC_SHARED(char, shared);
  const int columns = params.columns, warp = thread_index() / LANES;
  const int64 stride = ctas_in_grid() * ROWS_PER_CTA;
  const uint32 scattered = scattered_arrays(params);
  const BlockPlaces places = find_block_places(columns);
  char* place = shared + warp * WARP_BYTES;
  int to_other = 2 * CTA_BYTES;
  // Of the tile that is worked on, of the next one, and of the one behind that, which begins with this row.
  int count = 0, next_count = 0;
  int64 first_row = cta_index() * ROWS_PER_CTA + warp * LANES;
  do {
    const Tile tile = {place, first_row - 2 * stride, count};
    const Tile y_tile = {place, first_row, count_rows(params, first_row)};
    const Tile dy_tile = {place + CTA_BYTES, first_row, y_tile.count};
    if (count > 0) {
      wait_async<1>();
      warp_barrier();

      // ---- The sum over the row
      uint32 y_word[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
      uint32 dy_word[VECTORS_PER_THREAD][words_of<Gradient, VEC_SIZE>];
      load_row<Input, true>(y_word, place, columns, absent_word());
      load_row<Gradient, false>(dy_word, place + CTA_BYTES, columns, 0);
      float sum_at[VEC_SIZE] = {};
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (has_vector(columns, k)) add_gradient_terms<true>(sum_at, y_word[k], dy_word[k]);
      }
      const float sum = sum_of_places(sum_at);
#if LEAVES_SUMS
      if (lane_index() < count) static_cast<float*>(params.row_sums)[tile.first_row + lane_index()] = sum;
#endif

      // ---- dx
      uint32 before = 0, behind = 0;
      warp_barrier();  // all have read their rows
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (!has_vector(columns, k)) continue;
        uint32 dx_word[words_of<Output, VEC_SIZE>];
        find_gradients(dx_word, y_word[k], dy_word[k], sum, params.scale);
        if (UNALIGNED && k == 0) behind = shuffle_from(dx_word[0] << 16, lane_index() + 1);
        put_vector<Output>(dx_word, before, behind, place, columns, k);
      }
      warp_barrier();
      if ((scattered & 1) == 0) move_dense<Output, false>(tile, places, columns, params.dx);
    } else {
      clear_behind(y_tile, columns, sizeof(Input));
      clear_behind(dy_tile, columns, sizeof(Gradient));
    }

    // ---- The rows of the turn after the next come to where the results leave
    if (scattered != 0) {
      // One text moves all that are scattered.
#pragma unroll 1
      for (int number = 0; number <= 2; ++number) {
        warp_barrier();
        if ((scattered >> number & 1) == 0) continue;
        const Tile moved = {number == 2 ? dy_tile.shared : place, number == 0 ? tile.first_row : first_row,
                            number == 0 ? count : y_tile.count};
        move_scattered(params, moved, array_of(params, number), number > 0);
      }
    }
    warp_barrier();
    if ((scattered & 2) == 0) move_dense<Input, true>(y_tile, places, columns, params.y);
    if ((scattered & 4) == 0) move_dense<Gradient, true>(dy_tile, places, columns, params.dy);
    commit_async();
    count = next_count;
    next_count = y_tile.count;
    first_row += stride;
    place += to_other;
    to_other = -to_other;
  } while (count > 0 || next_count > 0);
}

}  // namespace trtc
