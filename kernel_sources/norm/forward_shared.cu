// SPDX-License-Identifier: Apache-2.0
// Forward of RMSNorm and LayerNorm, rows in shared memory. norm/forward.cuh has the formula; norm/partition.cuh has the
// row partition and what a program defines. A row is brought by asynchronous copies, each thread its own vectors, and
// read there each time that it is used: registers are better spent on more rows in flight.
//
// The same threads work on ROWS_PER_PASS rows at a time: what is loaded of the weight and bias serves all of them, and
// so does every barrier. A pass that would go past the last row works on the last row again and stores the same bits
// twice.
//
// LayerNorm sums deviations and their squares in one pass over a row (ONE_PASS), about a shift that is known before the
// mean: the mean of a few of its elements. Only if that is far from the mean, deviations are summed again.
//
// norm/staged.cuh has copy_row(), load_packed(), shift_from() and is_far().
#pragma once

#include "norm/forward.cuh"
#include "norm/staged.cuh"

namespace trtc {

static_assert(CHUNKS == 1, "a CTA holds its whole slice");

#define R ROWS_PER_PASS                      // in index arithmetic
#define VALUES_PER_ROW (CENTRED ? 3 : 1)     // floats that CTAs exchange of a row
#define HAS_AFFINE (HAS_WEIGHT || HAS_BIAS)  // affine: the weight and bias
#define AFFINE_BYTES_PER_COLUMN static_cast<int>((HAS_WEIGHT ? sizeof(Weight) : 0) + (HAS_BIAS ? sizeof(Bias) : 0))
// Not if rows share a CTA: the second pass has a barrier, and the rows would not all take it. Not for VEC_SIZE < 4: a
// shift from so few elements is far from the mean too often (is_far() in norm/staged.cuh).
#define ONE_PASS (CENTRED && ROWS_PER_CTA == 1 && VEC_SIZE >= 4)
// Where a row has a scale: whether y stays in registers until that is known; other kernels would spill.
#define KEEPS_Y \
  (ROW_SCALED && !UNALIGNED && THREADS_PER_ROW <= 512 && VEC_SIZE > 1 && VEC_SIZE * AFFINE_BYTES_PER_COLUMN <= 32)
// LOADS_AHEAD: IN_FLIGHT vectors of the weight and bias are loaded before they are used, the first ones while sums are
// exchanged, which hides the L2 latency. Not if y is computed twice, nor in a loop that is not wholly unrolled.
// LOADS_EARLY: the weight is loaded before the sums are taken; with two rows a pass, the sums need these registers.
#define LOADS_AHEAD (HAS_AFFINE && !UNALIGNED && KEEPS_Y == ROW_SCALED)
#define LOADS_EARLY (LOADS_AHEAD && ONE_PASS && R == 1 && EXACT)
// All of a thread's vectors if a CTA is small (kernels.py: LOADS_ALL_AFFINE), half of 8, else 2 if there are so many.
#define IN_FLIGHT                                                          \
  (LOADS_ALL_AFFINE                                   ? VECTORS_PER_THREAD \
   : VECTORS_PER_THREAD == 8 && !PERSISTENT           ? 4                  \
   : VECTORS_PER_THREAD > 1 && THREADS_PER_ROW < 1024 ? 2                  \
                                                      : 1)
// How many of a thread's vectors a loop is unrolled for. Two of unaligned rows: a weight or bias that is unaligned,
// too, is loaded by elements, which is long text for each vector.
#define UNROLLED (UNALIGNED && VECTORS_PER_THREAD > 2 ? 2 : VECTORS_PER_THREAD)
// Where registers are short.
#define COMPUTES_ADDRESSES_ANEW (CENTRED && !ROW_SCALED)

TRTC_DEVICE void norm_forward_shared(const Params& params) {
  // Reductions of a persistent kernel alternate between two buffers: a warp may still read one row's values while
  // another writes the next row's.
  constexpr int buffers = PERSISTENT ? 2 : 1;
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, 1);
  constexpr int sums_of_row = ONE_PASS ? 2 : 1;
  TRTC_SHARED(float, first_shifts, buffers* R);
  TRTC_SHARED(float, warp_sums, buffers * R * sums_of_row * reduce_floats);
#if CENTRED
  TRTC_SHARED(float, warp_deviations, buffers * R * 2 * reduce_floats);
#endif
#if ROW_SCALED
  TRTC_SHARED(float, warp_maxima, buffers * R * reduce_floats);
#endif
  TRTC_DYNAMIC_SHARED(char, stage);
  // Whether reduce_row() folds: fewer instructions, but a longer chain, which a persistent kernel has too few rows to
  // hide.
  constexpr bool folds = !PERSISTENT;

  const int thread = ROWS_PER_CTA == 1 ? thread_index() : thread_index() % THREADS_PER_ROW;
  const int row_in_cta = ROWS_PER_CTA == 1 ? 0 : thread_index() / THREADS_PER_ROW;
  const int rank = static_cast<int>(cta_index() % CTAS_PER_ROW);
  const int first_column = rank * SLICE;
  const int slice_columns = min(HIDDEN - first_column, SLICE);  // 0 or less where the row ends before this slice
  const int64 stride = ctas_in_grid() / CTAS_PER_ROW * (ROWS_PER_CTA * R);

  // Of each row: what lies in shared memory.
  Input* x[R];
  Residual* residual[R];
#if UNALIGNED
  Output* staged_y[R];
#endif
#pragma unroll
  for (int r = 0; r < R; ++r) {
    char* const of_row = stage + r * STAGE_BYTES;
    x[r] = reinterpret_cast<Input*>(of_row) + row_in_cta * CHUNK;
    residual[r] = reinterpret_cast<Residual*>(of_row + RESIDUAL_AT) + row_in_cta * CHUNK;
#if UNALIGNED
    staged_y[r] = reinterpret_cast<Output*>(of_row + OUT_AT) + row_in_cta * CHUNK;
#endif
  }

  RowExchange exchange = begin_exchange(params, rank);
  float scale[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    scale[r] = 1.0f;
#if HAS_SCALE
    scale[r] = load_float(params.scale);
#endif
  }
  float amax = 0.0f;
  int buffer = 0;

  int64 first_row = cta_index() / CTAS_PER_ROW * (ROWS_PER_CTA * R);
  do {
    int64 row[R];
    NormInput* sum_out[R];
#pragma unroll
    for (int r = 0; r < R; ++r) row[r] = R == 1 ? first_row + row_in_cta : min(first_row + r, params.rows - 1);
    // If a CTA has several rows, some may be past the last row: their threads reach every barrier, with 0 columns. A
    // CTA of one row always has a real one.
    const bool exists = ROWS_PER_CTA == 1 || row[0] < params.rows;
    const int columns = exists ? slice_columns : 0;
    const bool is_row_leader = thread == 0 && rank == 0 && exists;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Input* const from = static_cast<const Input*>(params.x) + first_column +
                                row_offset(params, row[r], params.x_outer_stride, params.x_inner_stride);
      copy_row(x[r], from, columns, thread);
#if ADDED_BEFORE || ADDED_AFTER
      const Residual* const residual_from =
          static_cast<const Residual*>(params.residual) + first_column +
          row_offset(params, row[r], params.residual_outer_stride, params.residual_inner_stride);
      copy_row(residual[r], residual_from, columns, thread);
#endif
      sum_out[r] = nullptr;
#if ADDED_BEFORE
      sum_out[r] = static_cast<NormInput*>(params.residual_out) + first_column +
                   row_offset(params, row[r], params.residual_out_outer_stride, params.residual_out_inner_stride);
#endif
    }
    const Weight* weight_row = nullptr;
    const Bias* bias_row = nullptr;
#if HAS_WEIGHT
    weight_row = static_cast<const Weight*>(params.weight) + first_column + head_of(params, row[0]) * HIDDEN;
#endif
#if HAS_BIAS
    bias_row = static_cast<const Bias*>(params.bias) + first_column + head_of(params, row[0]) * HIDDEN;
#endif
    wait_async();
#if UNALIGNED
    cta_barrier();
#endif

    // ---- Each row's sum of squares, or of its elements; in one pass, of deviations and their squares
    float shift[R] = {};
    if constexpr (ONE_PASS) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        uint32 first[words_of<NormInput, VEC_SIZE>];
        load_packed_first(first, x[r], residual[r], sum_out[r], 0, thread * VEC_SIZE, columns);
        if (thread == 0) shift[r] = shift_from<NormInput>(first, columns);
      }
    }
    // The weight is loaded after the rows have arrived: before, the rows would wait for it.
    uint32 weight[IN_FLIGHT][words_of<Weight, VEC_SIZE>];
    uint32 bias[IN_FLIGHT][words_of<Bias, VEC_SIZE>];
    if (LOADS_EARLY) load_weight(weight, weight_row, thread, columns);
    if constexpr (ONE_PASS) broadcast_in_row<THREADS_PER_ROW, ROWS_PER_CTA>(shift, first_shifts + buffer * R);
    float sums[R * sums_of_row] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float of_row[2] = {0.0f, 0.0f};
      const int own = COMPUTES_ADDRESSES_ANEW ? anew(thread) : thread;
#pragma unroll(UNROLLED)
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        const int column = (k * THREADS_PER_ROW + own) * VEC_SIZE;
        uint32 packed[words_of<NormInput, VEC_SIZE>];
        float element[VEC_SIZE];
        if (ONE_PASS && k == 0) {
          load_packed(packed, x[r], residual[r], column);
        } else {
          load_packed_first(packed, x[r], residual[r], sum_out[r], k, column, columns);
        }
        unpack<NormInput>(element, packed);
        if constexpr (ONE_PASS) {
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) element[i] -= shift[r];
          clear_outside(element, k, column, columns);
          add_deviations(of_row, element);
        } else {
          of_row[0] += CENTRED ? sum_of(element) : sum_of_squares(element);
        }
      }
      sums[r * sums_of_row] = CENTRED ? of_row[0] : of_row[0] * SQUARES_SCALE;
      if (ONE_PASS) sums[r * sums_of_row + sums_of_row - 1] = of_row[1] * SQUARES_SCALE;
#if UNALIGNED && ADDED_BEFORE
      if constexpr (KEEPS_SUM) {
        cta_barrier();
        copy_from_stage(sum_out[r], reinterpret_cast<const NormInput*>(residual[r]), columns, thread);
        cta_barrier();  // y may come into its place
      }
#endif
    }
    if (LOADS_AHEAD && !LOADS_EARLY) {
      load_weight_and_bias<IN_FLIGHT>(weight, bias, weight_row, bias_row, thread, columns);
    }

    // ---- Their statistics
    reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, folds>(sums, warp_sums + buffer * R * sums_of_row * reduce_floats);
    float found[VALUES];
#if CENTRED
    const float reciprocal = reciprocal_columns_of_cta(rank);
    bool again[R];
    bool any = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      again[r] = !ONE_PASS;
      if constexpr (ONE_PASS) {
        found[r * VALUES_PER_ROW + 1] = sums[r * 2];
        found[r * VALUES_PER_ROW + 2] = sums[r * 2 + 1];
        again[r] = is_far(sums[r * 2], sums[r * 2 + 1], reciprocal);
      }
      if (again[r]) shift[r] += sums[r * sums_of_row] * reciprocal;
      any = any || again[r];
    }
    if (__builtin_expect(any, !ONE_PASS)) {
      float deviations[R * 2];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float of_row[2] = {0.0f, 0.0f};
#pragma unroll(ONE_PASS ? 1 : UNROLLED)
        for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
          const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
          uint32 packed[words_of<NormInput, VEC_SIZE>];
          float deviation[VEC_SIZE];
          load_packed(packed, x[r], residual[r], column);
          unpack<NormInput>(deviation, packed);
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) deviation[i] -= shift[r];
          clear_outside(deviation, k, column, columns);
          add_deviations(of_row, deviation);
        }
        deviations[r * 2] = of_row[0];
        deviations[r * 2 + 1] = of_row[1] * SQUARES_SCALE;
      }
      reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, folds>(deviations,
                                                            warp_deviations + buffer * R * 2 * reduce_floats);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (again[r]) found[r * VALUES_PER_ROW + 1] = deviations[r * 2];
        if (again[r]) found[r * VALUES_PER_ROW + 2] = deviations[r * 2 + 1];
      }
      // Loading the weight again frees its registers during this rare pass.
      if (ONE_PASS && LOADS_AHEAD) {
        load_weight(weight, weight_row, thread, columns);
        if (!LOADS_EARLY) load_bias(bias, bias_row, thread, columns);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) found[r * VALUES_PER_ROW] = shift[r];
#else
#pragma unroll
    for (int r = 0; r < R; ++r) found[r] = sums[r];
#endif
    // The bias is loaded only after the reductions: with the weight, it leaves too few registers before.
    if (LOADS_EARLY) load_bias(bias, bias_row, thread, columns);
    send(exchange, found);
    receive(exchange, found);
    Statistics statistics[R];
    Output* out[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      statistics[r] = statistics_of(params, found + r * VALUES_PER_ROW, thread);
      if (is_row_leader) store_statistics(params, row[r], statistics[r]);
      out[r] = static_cast<Output*>(params.out) + first_column +
               row_offset(params, row[r], params.out_outer_stride, params.out_inner_stride);
    }

    // ---- y: once, or where each row has a scale, first its largest magnitude
    constexpr int passes = ROW_SCALED ? 2 : 1;
    float kept[KEEPS_Y ? R * VECTORS_PER_THREAD : 1][VEC_SIZE];
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const bool stores = pass + 1 == passes, computes = !KEEPS_Y || !stores;
      float row_amax[R] = {};
      const int own = COMPUTES_ADDRESSES_ANEW ? anew(thread) : thread;
#pragma unroll(UNROLLED)
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        const int column = (k * THREADS_PER_ROW + own) * VEC_SIZE;
        uint32 own_weight[words_of<Weight, VEC_SIZE>], own_bias[words_of<Bias, VEC_SIZE>];
        if (computes && LOADS_AHEAD) {
          if (HAS_WEIGHT) copy_words(own_weight, weight[k % IN_FLIGHT]);
          if (HAS_BIAS) copy_words(own_bias, bias[k % IN_FLIGHT]);
          if (k + IN_FLIGHT < VECTORS_PER_THREAD) {
            if (HAS_WEIGHT) load_affine_vector(weight[k % IN_FLIGHT], weight_row, k + IN_FLIGHT, thread, columns);
            if (HAS_BIAS) load_affine_vector(bias[k % IN_FLIGHT], bias_row, k + IN_FLIGHT, thread, columns);
          }
        } else if (computes) {
          if (HAS_WEIGHT) load_affine_vector(own_weight, weight_row, k, thread, columns);
          if (HAS_BIAS) load_affine_vector(own_bias, bias_row, k, thread, columns);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float y[VEC_SIZE];
          if (computes) {
            uint32 packed[words_of<NormInput, VEC_SIZE>], added[words_of<Residual, VEC_SIZE>];
            load_packed(packed, x[r], residual[r], column);
            if (ADDED_AFTER) load_vector<VEC_SIZE, Space::shared>(added, residual[r] + column);
            unpack<NormInput>(y, packed);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) y[i] -= CENTRED ? statistics[r].mean_hi : 0.0f;
            normalize(y, params, statistics[r], own_weight, own_bias, added);
            if (HAS_AMAX) amax = largest_magnitude(y, column, columns, amax);
            if (ROW_SCALED) row_amax[r] = largest_magnitude(y, column, columns, row_amax[r]);
          }
          if (KEEPS_Y) {
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
              float& kept_value = kept[KEEPS_Y ? r * VECTORS_PER_THREAD + k : 0][i];
              if (stores) {
                y[i] = kept_value;
              } else {
                kept_value = y[i];
              }
            }
          }
          if (stores) {
            uint32 word[words_of<Output, VEC_SIZE>];
            pack_output(word, y, scale[r]);
#if UNALIGNED
            store_vector<VEC_SIZE, Space::shared>(staged_y[r] + column, word);
#else
            store_vector<VEC_SIZE>(out[r] + column, word, EXACT || column < columns);
#endif
          }
        }
      }
#if ROW_SCALED
      if (!stores) {
        reduce_row<Maximum, THREADS_PER_ROW, ROWS_PER_CTA, folds>(row_amax, warp_maxima + buffer * R * reduce_floats);
        float maxima[VALUES] = {};
#pragma unroll
        for (int r = 0; r < R; ++r) maxima[r] = row_amax[r];
        send(exchange, maxima);
        receive(exchange, maxima);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          scale[r] = scale_of_row(params, row[r], reduce_lanes<Maximum, CTAS_PER_ROW>(maxima[r]), is_row_leader);
        }
      }
#endif
    }
#if UNALIGNED
    cta_barrier();
#pragma unroll
    for (int r = 0; r < R; ++r) copy_from_stage(out[r], staged_y[r], columns, thread);
    if (PERSISTENT) cta_barrier();
#endif
    first_row += stride;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && first_row < params.rows);
  store_amax(params, amax);
  store_scale_inverse(params, scale[0]);
}

}  // namespace trtc
