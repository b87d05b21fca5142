// SPDX-License-Identifier: Apache-2.0
// The second launch of a norm's backward: dweight and dbias, each the sum of the rows of partial sums that groups of
// CTAs have left, those of each head.
//
// A CTA of 8 warps has COLUMNS columns of a head; a thread reads VEC_SIZE of them at once. Of a warp, LANES threads
// share a row, and ROWS_AT_ONCE rows are read together. Few threads, each with much on its way: CTAs of 32 warps, a
// column a lane, are most of them idle where rows are few, and those of long rows come in many waves.
#pragma once

#include "norm/partials.cuh"
#include "row_vector.cuh"

namespace trtc {

#define GRADIENTS (HAS_DWEIGHT + HAS_DBIAS)
#define VEC_SIZE 4
#define WARPS 8
#define LANES (COLUMNS / VEC_SIZE)
#define ROWS_AT_ONCE (32 / LANES)
static_assert(LANES * VEC_SIZE == COLUMNS && ROWS_AT_ONCE * LANES == 32, "lanes and columns tile");
static_assert(COLUMNS <= 32 * WARPS, "each column is one thread's in the end");

// Adds BATCH rows from `row` on, each `step` rows behind the last, to a thread's sums, those that are before `rows`:
// all are on their way at once. Behind the last row it is read again, and not added: loads that have a condition each
// are waited for one by one. `IS_EDGE`: of the vector, only the first `columns` are there.
template <int BATCH, bool IS_EDGE>
TRTC_DEVICE void add_rows(float (&sum)[GRADIENTS][VEC_SIZE], const float* from, int64 to_next, const float* last,
                          int64 pitch, int64 row, int64 step, int64 rows, int columns) {
  uint32 word[BATCH][GRADIENTS][VEC_SIZE];
#pragma unroll
  for (int k = 0; k < BATCH; ++k) {
    const float* const of_row = row + k * step < rows ? from + k * to_next : last;
#pragma unroll
    for (int g = 0; g < GRADIENTS; ++g) {
      if constexpr (IS_EDGE) {
        load_elements<VEC_SIZE>(word[k][g], of_row + g * pitch, columns);
      } else {
        load_vector<VEC_SIZE>(word[k][g], of_row + g * pitch);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < BATCH; ++k) {
    const bool is_there = row + k * step < rows;
#pragma unroll
    for (int g = 0; g < GRADIENTS; ++g) {
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) sum[g][i] += is_there ? float_from_bits(word[k][g][i]) : 0.0f;
    }
  }
}

template <class T>
TRTC_DEVICE void store_column(void* array, int64 at, float sum, bool valid) {
  const float value[1] = {sum};
  uint32 word[1];
  pack<T>(word, value);
  store_vector<1>(static_cast<T*>(array) + at, word, valid);
}

TRTC_DEVICE void norm_backward_finish(const Params& params) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int first_column = static_cast<int>(cta_index()) * COLUMNS;
  const int own_column = first_column + lane % LANES * VEC_SIZE;
  const int columns = min(params.hidden - own_column, VEC_SIZE);
  const int64 heads = params.heads;
  const int64 rows = static_cast<int64>(params.groups) * partial_rows(ROWS_PER_GROUP, params.heads);
  // Every `step`th row from `row` on is this thread's.
  const int64 step = WARPS * ROWS_AT_ONCE * heads;
  int64 row = cta_index_y() + (warp * ROWS_AT_ONCE + lane / LANES) * heads;
  const float* const partials = static_cast<const float*>(params.partials) + own_column;
  const float* from = partials + partial_offset(row, 0, GRADIENTS, params.hidden);
  const float* const last = partials + partial_offset(rows - 1, 0, GRADIENTS, params.hidden);
  const int64 to_next = partial_offset(step, 0, GRADIENTS, params.hidden);
  const int64 pitch = partial_offset(0, 1, GRADIENTS, params.hidden);  // from dweight to dbias

  float sum[GRADIENTS][VEC_SIZE] = {};
  constexpr int batch = 8;
#pragma unroll 1
  for (; columns >= VEC_SIZE && row < rows; row += batch * step, from += batch * to_next) {
    add_rows<batch, false>(sum, from, to_next, last, pitch, row, step, rows, columns);
  }
  // What no vector fits: the last columns of rows of another size, by smaller batches.
  constexpr int batch_of_edge = 2;
#pragma unroll 1
  for (; columns > 0 && row < rows; row += batch_of_edge * step, from += batch_of_edge * to_next) {
    add_rows<batch_of_edge, true>(sum, from, to_next, last, pitch, row, step, rows, columns);
  }

  // Over the rows of a warp, and the warps.
  TRTC_SHARED(float, warp_sums, GRADIENTS * WARPS * COLUMNS);
#pragma unroll
  for (int g = 0; g < GRADIENTS; ++g) {
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
#pragma unroll
      for (int distance = 16; distance >= LANES; distance /= 2) sum[g][i] += shuffle_xor(sum[g][i], distance);
      if (lane < LANES) warp_sums[(g * WARPS + warp) * COLUMNS + lane * VEC_SIZE + i] = sum[g][i];
    }
  }
  cta_barrier();
  // Thread i has column i.
  const int column = thread_index();
  const bool stores = column < COLUMNS && first_column + column < params.hidden;
  const int64 to = cta_index_y() * params.hidden + first_column + column;
  float total[GRADIENTS] = {};
#pragma unroll
  for (int g = 0; g < GRADIENTS; ++g) {
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total[g] += warp_sums[(g * WARPS + w) * COLUMNS + column % COLUMNS];
  }
#if HAS_DWEIGHT
  store_column<Dweight>(params.dweight, to, total[0], stores);
#endif
#if HAS_DBIAS
  store_column<Dbias>(params.dbias, to, total[HAS_DWEIGHT], stores);
#endif
}

}  // namespace trtc
