// SPDX-License-Identifier: Apache-2.0
// Forward of softmax for rows so short that a thread has a whole one (softmax/tiled.cuh):
//
//   y = exp(v - m) / (sum(exp(v - m)) [+ exp(sink - m)]),   v = scale * x,   m = max(v [, sink])
//
// or its logarithm (LOGARITHM).
#pragma once

#include "softmax/tiled.cuh"
#include "softmax/totals.cuh"

namespace trtc {

// First the results.
TRTC_DEVICE RowArray array_of(const Params& params, int number) {
  RowArray array = {params.out, params.out_outer_stride, params.out_inner_stride, sizeof(Output)};
  if (number == 1) array = {params.x, params.x_outer_stride, params.x_inner_stride, sizeof(Input)};
  return array;
}

// A bit for each array that is not dense.
TRTC_DEVICE uint32 scattered_arrays(const Params& params) {
  uint32 found = 0;
#pragma unroll
  for (int number = 0; number <= 1; ++number) found |= is_dense(params, array_of(params, number)) ? 0 : 1 << number;
  return found;
}

TRTC_DEVICE void softmax_forward(const Params& params) {
  TRTC_DYNAMIC_SHARED(char, shared);
  const int columns = params.columns, warp = thread_index() / LANES;
  const int64 stride = ctas_in_grid() * ROWS_PER_CTA;
  const uint32 scattered = scattered_arrays(params);
  const BlockPlaces places = find_block_places(columns);
  // Scores of narrow results stay unscaled: `factor` is applied in the exponential.
  const float factor = NARROW ? scale_magnitude(params) : 1.0f;
  // -infinity does not take part whatever the scale's sign.
  const float by = !NARROW ? params.scale : params.scale > 0.0f ? 1.0f : scale_sign(params);
  RowExchange exchange = {};  // of nothing: a row has one CTA
  char* place = shared + warp * WARP_BYTES;
  int to_other = CTA_BYTES;
  // Of the tile that is worked on, of the next one, and of the one behind that, which begins with this row.
  int count = 0, next_count = 0;
  int64 first_row = cta_index() * ROWS_PER_CTA + warp * LANES;
  do {
    const Tile tile = {place, first_row - 2 * stride, count};
    const Tile coming = {place, first_row, count_rows(params, first_row)};
    if (count > 0) {
      wait_async<1>();
      warp_barrier();

      // ---- The largest score, and the sum of terms about it
      uint32 x_word[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
      load_row<Input, true>(x_word, place, columns, minus_infinity_word<Input>());
      float v[VECTORS_PER_THREAD][VEC_SIZE];  // scores, and in their place the terms
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) unpack<Input>(v[k], x_word[k]);
      if (by != 1.0f) {
#pragma unroll
        for (int i = 0; i < VECTORS_PER_THREAD * VEC_SIZE; ++i) {
          float& score = v[i / VEC_SIZE][i % VEC_SIZE];
          score = score == minus_infinity() ? score : score * by;
        }
      }
      float largest = minus_infinity();
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (!has_vector(columns, k)) continue;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) largest = larger(largest, v[k][i]);
      }
      const float origin = largest == minus_infinity() ? 0.0f : largest;
      float sum_at[VEC_SIZE] = {};
      float ones = 0.0f;
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (!has_vector(columns, k)) continue;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          const float below = v[k][i] - origin;
          const float term = large_exponential_for<Output>(below, factor);
          const bool is_one = COUNTS_ONES && below == 0.0f;
          sum_at[i] += is_one ? 0.0f : term;
          if (is_one) ones += 1.0f;
          if (!LOGARITHM) v[k][i] = term;
        }
      }
      float total = sum_of_places(sum_at) * (1.0f / large_one) + ones;
      if (total < 0.5f) total = 0.0f;  // nothing takes part

      const int64 row = tile.first_row + lane_index();
      const bool exists = lane_index() < count;
      const RowTotals totals = totals_of_row(params, exchange, row, exists, exists, factor, largest, total, false);

      // ---- y
#if !LOGARITHM
      const float shrink = totals.is_small ? 1.0f / large_one : 1.0f;
#endif
      uint32 before = 0, behind = 0;
      warp_barrier();  // all have read their rows
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (!has_vector(columns, k)) continue;
        float y[VEC_SIZE];
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
#if LOGARITHM
          y[i] = fused_multiply_add(v[k][i] - totals.origin, factor, totals.log_offset);
#else
          y[i] = quotient_of(totals, v[k][i] * shrink);
#endif
        }
        uint32 y_word[words_of<Output, VEC_SIZE>];
        pack<Output>(y_word, y);
        if (UNALIGNED && k == 0) behind = shuffle_from(y_word[0] << 16, lane_index() + 1);
        put_vector<Output>(y_word, before, behind, place, columns, k);
      }
      warp_barrier();
      if ((scattered & 1) == 0) move_dense<Output, false>(tile, places, columns, params.out);
    } else {
      clear_behind(coming, columns, sizeof(Input));
    }

    // ---- The rows of the turn after the next come to where the results leave
    if (scattered != 0) {
      // One text moves all that are scattered.
#pragma unroll 1
      for (int number = 0; number <= 1; ++number) {
        warp_barrier();
        if ((scattered >> number & 1) == 0) continue;
        const Tile moved = {place, number == 0 ? tile.first_row : first_row, number == 0 ? count : coming.count};
        move_scattered(params, moved, array_of(params, number), number > 0);
      }
    }
    warp_barrier();
    if ((scattered & 2) == 0) move_dense<Input, true>(coming, places, columns, params.x);
    commit_async();
    count = next_count;
    next_count = coming.count;
    first_row += stride;
    place += to_other;
    to_other = -to_other;
  } while (count > 0 || next_count > 0);
}

}  // namespace trtc
