// SPDX-License-Identifier: Apache-2.0
// Backward of RMSNorm and LayerNorm for rows that do not fit on the chip. norm/backward.cu has the formula;
// norm/partition.cuh has what a program defines.
//
// A CTA has a whole row: thread t has the vector at each column c * CHUNK + t * VEC_SIZE. The kernel is persistent:
// each CTA takes every `stride`th row, BATCH of them at a time, in two steps:
//
//   1. for each row: its statistics and sums, and from these the means that dx needs, which go to shared memory
//   2. for each column: dx of all rows of the batch, and what they add to the weight's gradients
//
// So rows are read again for each step (LayerNorm's that come without statistics once more, for the mean), and partial
// sums, which lie in global memory, once for each batch. norm/backward_finish.cu adds up those of all CTAs. With a
// weight for each head all rows of a CTA are of one head: the launch sees to it.
#pragma once

#include "norm/partials.cuh"
#include "norm/statistics.cuh"

// FINDS_STATISTICS: mean and rstd are not given, so they are found from x. REDUCES: the row has sums.
#define FINDS_STATISTICS (NEEDS_X && !HAS_STATISTICS)
#define REDUCES (HAS_DX || FINDS_STATISTICS)
// A row's sums, in this order: dy * w * x' (or dy * w * (x - shift) until rstd is known); dy * w, for LayerNorm; if
// FINDS_STATISTICS, LayerNorm's sum of deviations from the shift, and that of squares.
#define LEVEL 1
#define DEVIATIONS 2
#define VALUES (1 + CENTRED + FINDS_STATISTICS * (1 + CENTRED))
#define SQUARES (VALUES - 1)
#define GRADIENTS (HAS_DWEIGHT + HAS_DBIAS)

namespace trtc {

static_assert(CTAS_PER_ROW == 1 && ROWS_PER_CTA == 1 && VECTORS_PER_THREAD == 1, "a vector of a row at a time");

enum : int {
  BATCH = 8,   // rows
  BLOCK = 32,  // a thread's vectors whose sums are taken by themselves, so that no chain of additions is long
};

// A row of a batch: where it begins in each array, in elements, and what dx is made of. projection and level are the
// means of dy * w * x' and of dy * w.
struct BatchRow {
  int64 dy, x, dresidual, dx;
  float mean_hi, mean_lo, rstd, projection, level;
};

// The vector at `column` of a row; behind the row are zeros.
template <class T>
TRTC_DEVICE void load_columns(uint32 (&word)[words_of<T, VEC_SIZE>], const void* array, int64 row, int column) {
  const T* const from = static_cast<const T*>(array) + row + column;
#if UNALIGNED
  load_elements<VEC_SIZE>(word, from, HIDDEN - column);
#else
  load_vector<VEC_SIZE>(word, from);
#endif
}

#if FINDS_STATISTICS && CENTRED
// The mean of a row, but for rounding.
TRTC_DEVICE float find_shift(const Params& params, int64 row, float* shared) {
  float total[1] = {0.0f};
#pragma unroll 1
  for (int column = thread_index() * VEC_SIZE; column < HIDDEN;) {
    float of_block = 0.0f;
#pragma unroll 1
    for (int k = 0; k < BLOCK && column < HIDDEN; ++k, column += CHUNK) {
      uint32 word[words_of<Input, VEC_SIZE>];
      float x[VEC_SIZE];
      load_columns<Input>(word, params.x, row, column);
      unpack<Input>(x, word);
      of_block += sum_of(x);
    }
    total[0] += of_block;
  }
  reduce_row<Sum, THREADS_PER_ROW, 1, false>(total, shared);
  return total[0] * (1.0f / HIDDEN);
}
#endif

#if REDUCES
// A row's sums, over all threads; those of squares are multiplied by SQUARES_SCALE.
TRTC_DEVICE void find_sums(float (&sums)[VALUES], const Params& params, const BatchRow& row, int64 weight_row,
                           float* shared) {
#pragma unroll 1
  for (int column = thread_index() * VEC_SIZE; column < HIDDEN;) {
    float of_block[VALUES] = {};
#pragma unroll 1
    for (int k = 0; k < BLOCK && column < HIDDEN; ++k, column += CHUNK) {
      uint32 dy[words_of<Gradient, VEC_SIZE>], x[words_of<Input, VEC_SIZE>];
      load_columns<Gradient>(dy, params.dy, row.dy, column);
      load_columns<Input>(x, params.x, row.x, column);
#if HAS_WEIGHT
      uint32 weight[words_of<Weight, VEC_SIZE>];
      load_columns<Weight>(weight, params.weight, weight_row, column);
#endif
      float of_vector[VALUES] = {};
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) {
        float gradient = element<Gradient>(dy, i), normal = element<Input>(x, i);
#if HAS_WEIGHT
        gradient *= element<Weight>(weight, i) + params.weight_offset;
#endif
        if (CENTRED) normal -= row.mean_hi;
        if (!FINDS_STATISTICS) normal *= row.rstd;
        of_vector[0] = fused_multiply_add(gradient, normal, of_vector[0]);
        if constexpr (CENTRED) of_vector[LEVEL] += gradient;
        if constexpr (FINDS_STATISTICS) {
          if (UNALIGNED && column + i >= HIDDEN) normal = 0.0f;
          if constexpr (CENTRED) of_vector[DEVIATIONS] += normal;
          of_vector[SQUARES] = fused_multiply_add(normal, normal, of_vector[SQUARES]);
        }
      }
      if (FINDS_STATISTICS) of_vector[SQUARES] *= SQUARES_SCALE;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) of_block[i] += of_vector[i];
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sums[i] += of_block[i];
  }
  reduce_row<Sum, THREADS_PER_ROW, 1, false>(sums, shared);
}
#endif

#if GRADIENTS > 0
// Stores partial sums of a vector of columns, or adds them to those of the batches before. The last columns may lie
// behind the row, where its pitch has room.
TRTC_DEVICE void store_partials(float* to, float (&sums)[VEC_SIZE], bool adds) {
  uint32 word[VEC_SIZE];
  if (adds) {
    load_vector<VEC_SIZE>(word, to);
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) sums[i] += float_from_bits(word[i]);
  }
  pack<float>(word, sums);
  store_vector<VEC_SIZE>(to, word);
}
#endif

TRTC_DEVICE void norm_backward_wide(const Params& params) {
  TRTC_SHARED(BatchRow, batch, BATCH);
  const int64 stride = ctas_in_grid();
#if REDUCES
  // For the reductions: of one row's sums, and of the next one's, by turns.
  constexpr int floats_of_sums = reduced_floats(THREADS_PER_ROW, 1, VALUES);
  TRTC_SHARED(float, warp_sums, 2 * floats_of_sums);
  const int64 weight_row = head_of(params, cta_index()) * HIDDEN;
#endif
#if FINDS_STATISTICS && CENTRED
  TRTC_SHARED(float, warp_totals, reduced_floats(THREADS_PER_ROW, 1, 1));
#endif
#pragma unroll 1
  for (int64 first_row = cta_index(); first_row < params.rows; first_row += BATCH * stride) {
    int rows = 0;
#pragma unroll 1
    for (int64 number = first_row; rows < BATCH && number < params.rows; number += stride, ++rows) {
      BatchRow row = {};
      row.dy = row_offset(params, number, params.dy_outer_stride, params.dy_inner_stride);
#if NEEDS_X
      row.x = row_offset(params, number, params.x_outer_stride, params.x_inner_stride);
#if HAS_STATISTICS
#if CENTRED
      row.mean_hi = load_float(static_cast<const float*>(params.mean) + number);
#endif
      row.rstd = load_float(static_cast<const float*>(params.rstd) + number);
#elif CENTRED
      row.mean_hi = find_shift(params, row.x, warp_totals);
#endif
#endif
#if REDUCES
      float sums[VALUES] = {};
      find_sums(sums, params, row, weight_row, warp_sums + rows % 2 * floats_of_sums);
      if constexpr (FINDS_STATISTICS) {
        Statistics found = {};
        float squares = sums[SQUARES];
        if constexpr (CENTRED) {
          squares = combine_moments(found, row.mean_hi, sums[DEVIATIONS], squares, 0);
          // From the shift to the row's mean.
          sums[0] = fused_multiply_add((row.mean_hi - found.mean_hi) - found.mean_lo, sums[LEVEL], sums[0]);
        }
        find_rstd(found, squares, params.eps);
        row.mean_hi = found.mean_hi;
        row.mean_lo = found.mean_lo;
        row.rstd = found.rstd_hi;
        sums[0] *= row.rstd;
      }
      row.projection = sums[0] * (1.0f / HIDDEN);
      if constexpr (CENTRED) row.level = sums[LEVEL] * (1.0f / HIDDEN);
#endif
#if HAS_DRESIDUAL
      row.dresidual = row_offset(params, number, params.dresidual_outer_stride, params.dresidual_inner_stride);
#endif
#if HAS_DX
      row.dx = row_offset(params, number, params.dx_outer_stride, params.dx_inner_stride);
#endif
      if (thread_index() == 0) batch[rows] = row;
    }
    cta_barrier();

#pragma unroll 1
    for (int column = thread_index() * VEC_SIZE; column < HIDDEN; column += CHUNK) {
      float dweight[VEC_SIZE] = {}, dbias[VEC_SIZE] = {};
#if HAS_WEIGHT
      uint32 weight[words_of<Weight, VEC_SIZE>];
      load_columns<Weight>(weight, params.weight, weight_row, column);
#endif
#pragma unroll 1
      for (int k = 0; k < rows; ++k) {
        const BatchRow& row = batch[k];
        uint32 dy[words_of<Gradient, VEC_SIZE>];
        load_columns<Gradient>(dy, params.dy, row.dy, column);
#if NEEDS_X
        uint32 x[words_of<Input, VEC_SIZE>];
        load_columns<Input>(x, params.x, row.x, column);
#endif
#if HAS_DRESIDUAL
        uint32 dresidual[words_of<Residual, VEC_SIZE>];
        load_columns<Residual>(dresidual, params.dresidual, row.dresidual, column);
#endif
#if HAS_DX
        float dx[VEC_SIZE];
#endif
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          float gradient = element<Gradient>(dy, i);
          if (HAS_DBIAS) dbias[i] += gradient;
#if NEEDS_X
          float normal = element<Input>(x, i);
          if (CENTRED) normal -= row.mean_hi;
          if (CENTRED && FINDS_STATISTICS) normal -= row.mean_lo;
          normal *= row.rstd;
          if (HAS_DWEIGHT) dweight[i] = fused_multiply_add(gradient, normal, dweight[i]);
#endif
#if HAS_WEIGHT
          gradient *= element<Weight>(weight, i) + params.weight_offset;
#endif
#if HAS_DX
          gradient = fused_multiply_add(-normal, row.projection, gradient);
          if (CENTRED) gradient -= row.level;
          dx[i] = gradient * row.rstd;
#if HAS_DRESIDUAL
          dx[i] = fused_multiply_add(gradient, row.rstd, element<Residual>(dresidual, i));
#endif
#endif
        }
#if HAS_DX
        uint32 word[words_of<Output, VEC_SIZE>];
        pack<Output>(word, dx);
        Output* const to = static_cast<Output*>(params.dx) + row.dx + column;
#if UNALIGNED
        store_elements<VEC_SIZE>(to, word, HIDDEN - column);
#else
        store_vector<VEC_SIZE>(to, word);
#endif
#endif
      }
#if GRADIENTS > 0
      float* const to =
          static_cast<float*>(params.partials) + partial_offset(cta_index(), 0, GRADIENTS, HIDDEN) + column;
      const bool adds = first_row != cta_index();
      if (HAS_DWEIGHT) store_partials(to, dweight, adds);
      if (HAS_DBIAS) store_partials(to + partial_offset(0, HAS_DWEIGHT, GRADIENTS, HIDDEN), dbias, adds);
#endif
    }
    cta_barrier();  // the next batch's rows take the place of these
  }
}

}  // namespace trtc
