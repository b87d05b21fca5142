// SPDX-License-Identifier: Apache-2.0
// Forward of RMSNorm and LayerNorm, rows in registers. norm/forward.cuh has the formula; norm/partition.cuh has the row
// partition and what a program defines. For each row:
//
//   1. Each thread loads its vectors, and adds the residual to them (ADDED_BEFORE).
//   2. RMSNorm sums squares. LayerNorm sums elements, takes the mean of the CTA's slice as `shift`, and then sums the
//      deviations from it and their squares.
//   3. CTAs that share the row exchange these sums. Every thread finds mean and rstd.
//   4. Each thread computes and stores y. If each row has a scale (ROW_SCALED), a pass before that finds the largest
//      |y|.
//
// A slice of several chunks (CHUNKS > 1) does not fit in registers: every pass over it reads global memory again. Rows
// that are not whole aligned vectors (UNALIGNED) travel through a shared-memory stage.
#pragma once

#include "norm/forward.cuh"

namespace trtc {

#define ONE_CHUNK (CHUNKS == 1)
#define LOADS_AGAIN (!ONE_CHUNK && !UNALIGNED)  // vector by vector, for which few registers are needed
#define HAS_AFFINE (HAS_WEIGHT || HAS_BIAS)     // affine: the weight and bias
#define AFFINE_BYTES_PER_COLUMN static_cast<int>((HAS_WEIGHT ? sizeof(Weight) : 0) + (HAS_BIAS ? sizeof(Bias) : 0))
#define AFFINE_BYTES_PER_THREAD (VECTORS_PER_THREAD * VEC_SIZE * AFFINE_BYTES_PER_COLUMN)
// LOADS_EARLY: the weight and bias are loaded beside the row, whose latency hides theirs. LOADS_LATE: LayerNorm loads
// them around its last reduction, since earlier they need too many registers. Otherwise each vector is loaded just
// before its use. HAS_ROOM: the registers hold a thread's part of both.
#define HAS_ROOM (THREADS_PER_ROW <= 256 && AFFINE_BYTES_PER_THREAD <= 128 && !ADDED_BEFORE && !ADDED_AFTER)
#define LOADS_EARLY (HAS_AFFINE && ONE_CHUNK && (AFFINE_BYTES_PER_THREAD <= 64 || (HAS_ROOM && !CENTRED)))
#define LOADS_LATE (HAS_AFFINE && ONE_CHUNK && HAS_ROOM && !LOADS_EARLY)
// Whether the first use of the row also waits for the weight and bias (await_beside()). A long row does not: too few
// CTAs are resident to hide that wait.
#define AWAITS_BOTH (!ADDED_BEFORE && !ADDED_AFTER && (ROW_SCALED || HIDDEN * sizeof(NormInput) < 8192))
// LayerNorm uses a row three times: it stays in registers as floats, but not beside so much of the weight and bias.
#define KEEPS_FLOATS (CENTRED && ONE_CHUNK && !LOADS_LATE)
// A 16-bit row stays packed during the last reduction and exchange and is unpacked again behind them: it takes half the
// registers. Rows of one warp gain nothing, as a multiprocessor holds 32 CTAs at most; nor do rows with few elements a
// thread.
#define UNPACKS_ANEW \
  (CENTRED && LOADS_LATE && sizeof(NormInput) < 4 && THREADS_PER_ROW > 32 && VECTORS_PER_THREAD * VEC_SIZE >= 32)
// Whether y stays in registers until the scale of its row is known; else it is computed twice.
#define KEEPS_Y (ROW_SCALED && ONE_CHUNK)

// Loads vector k of a thread from the chunk that begins at `from`. `columns` columns are left from there on; a vector
// behind them becomes zeros.
template <class T>
TRTC_DEVICE void load_of_chunk(uint32 (&word)[words_of<T, VEC_SIZE>], const T* from, int k, int thread, int columns) {
  const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
  const bool is_there = is_filled(k) || column < columns;
  load_vector_if<VEC_SIZE>(word, from + column, is_there);
}

// All of a thread's vectors of a chunk.
template <class T>
TRTC_DEVICE void load_chunk(uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>], const T* from, int columns,
                            char* stage, int thread, int row_in_cta) {
#if UNALIGNED
  T* const staged = reinterpret_cast<T*>(stage) + row_in_cta * CHUNK;
  cta_barrier();  // others have read what was staged last
  copy_to_stage(staged, from, columns, thread);
  wait_async();
  cta_barrier();
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    load_vector<VEC_SIZE, Space::shared>(word[k], staged + (k * THREADS_PER_ROW + thread) * VEC_SIZE);
  }
#else
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) load_of_chunk(word[k], from, k, thread, columns);
#endif
}

#if ADDED_BEFORE
// The sums of a chunk's vectors and the residual's, which are stored.
TRTC_DEVICE void add_chunk(uint32 (&sum)[VECTORS_PER_THREAD][words_of<NormInput, VEC_SIZE>], const Input* x,
                           const Residual* residual, NormInput* sum_out, int columns, char* stage, int thread,
                           int row_in_cta) {
  uint32 added[VECTORS_PER_THREAD][words_of<Residual, VEC_SIZE>];
#if UNALIGNED
  uint32 input[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
  load_chunk<Input>(input, x, columns, stage, thread, row_in_cta);
  load_chunk<Residual>(added, residual, columns, stage, thread, row_in_cta);
  cta_barrier();
  NormInput* const staged = reinterpret_cast<NormInput*>(stage) + row_in_cta * CHUNK;
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    add_residual(sum[k], input[k], added[k]);
    store_vector<VEC_SIZE, Space::shared>(staged + (k * THREADS_PER_ROW + thread) * VEC_SIZE, sum[k]);
  }
  cta_barrier();
  copy_from_stage(sum_out, staged, columns, thread);
#else
  // Each sum is stored before the next one's vectors are loaded: they need fewer registers.
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
    const bool is_there = EXACT || column < columns;
    uint32 input[words_of<Input, VEC_SIZE>];
    load_vector_if<VEC_SIZE>(input, x + column, is_there);
    load_vector_if<VEC_SIZE>(added[k], residual + column, is_there);
    add_residual(sum[k], input, added[k]);
    store_vector<VEC_SIZE>(sum_out + column, sum[k], is_there);
  }
#endif
}
#endif

// x - mean_hi of one vector. `x` holds its deviations from the CTA's shift already if floats stay in registers
// (KEEPS_FLOATS); else it is unpacked again.
TRTC_DEVICE void subtract_mean(float (&x)[VEC_SIZE], const uint32 (&packed)[words_of<NormInput, VEC_SIZE>], float shift,
                               float mean) {
  if (!KEEPS_FLOATS) unpack<NormInput>(x, packed);
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) {
    if (!KEEPS_FLOATS && CENTRED) x[i] -= mean;
    if (KEEPS_FLOATS && CTAS_PER_ROW > 1) x[i] += shift - mean;
  }
}

TRTC_DEVICE void norm_forward_registers(const Params& params) {
  // Reductions of a persistent kernel alternate between two buffers: a warp may still read one row's values while
  // another writes the next row's.
  constexpr int buffers = PERSISTENT ? 2 : 1;
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, 1);
  TRTC_SHARED(float, warp_sums, buffers* reduce_floats);
#if CENTRED
  TRTC_SHARED(float, warp_deviations, buffers * 2 * reduce_floats);
#endif
#if ROW_SCALED
  TRTC_SHARED(float, warp_maxima, buffers* reduce_floats);
#endif
  TRTC_DYNAMIC_SHARED(char, stage);  // empty unless UNALIGNED
  // Whether reduce_row() folds: fewer instructions, but a longer chain, which a persistent kernel has too few rows to
  // hide.
  constexpr bool folds = !PERSISTENT;

  const int thread = ROWS_PER_CTA == 1 ? thread_index() : thread_index() % THREADS_PER_ROW;
  const int row_in_cta = ROWS_PER_CTA == 1 ? 0 : thread_index() / THREADS_PER_ROW;
  const int rank = static_cast<int>(cta_index() % CTAS_PER_ROW);
  const int first_column = rank * SLICE;
  const int slice_columns = min(HIDDEN - first_column, SLICE);  // 0 or less where the row ends before this slice
  const int64 stride = ctas_in_grid() / CTAS_PER_ROW * ROWS_PER_CTA;

  RowExchange exchange = begin_exchange(params, rank);
  float scale = 1.0f;
#if HAS_SCALE
  scale = load_float(params.scale);
#endif
  float amax = 0.0f;
  int buffer = 0;

  int64 first_row = cta_index() / CTAS_PER_ROW * ROWS_PER_CTA;
  do {
    const int64 row = first_row + row_in_cta;
    // If a CTA has several rows, some may be past the last row: their threads reach every barrier, with 0 columns. A
    // CTA of one row always has a real one.
    const bool exists = ROWS_PER_CTA == 1 || row < params.rows;
    const int columns = exists ? slice_columns : 0;
    const bool is_row_leader = thread == 0 && rank == 0 && exists;
    const Input* const x = static_cast<const Input*>(params.x) + first_column +
                           row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
#if ADDED_BEFORE || ADDED_AFTER
    const Residual* const residual =
        static_cast<const Residual*>(params.residual) + first_column +
        row_offset(params, row, params.residual_outer_stride, params.residual_inner_stride);
#endif
#if ADDED_BEFORE
    NormInput* const sum_out =
        static_cast<NormInput*>(params.residual_out) + first_column +
        row_offset(params, row, params.residual_out_outer_stride, params.residual_out_inner_stride);
    const NormInput* const packed_row = sum_out;  // where it is read again
#else
    const NormInput* const packed_row = x;
#endif
    const Weight* weight_row = nullptr;
    const Bias* bias_row = nullptr;
#if HAS_WEIGHT
    weight_row = static_cast<const Weight*>(params.weight) + first_column + head_of(params, row) * HIDDEN;
#endif
#if HAS_BIAS
    bias_row = static_cast<const Bias*>(params.bias) + first_column + head_of(params, row) * HIDDEN;
#endif

    // ---- The row, and the sum of its squares, or of its elements
    uint32 packed[VECTORS_PER_THREAD][words_of<NormInput, VEC_SIZE>];
    uint32 added[VECTORS_PER_THREAD][words_of<Residual, VEC_SIZE>];
    uint32 weight[VECTORS_PER_THREAD][words_of<Weight, VEC_SIZE>];
    uint32 bias[VECTORS_PER_THREAD][words_of<Bias, VEC_SIZE>];
    float element[VECTORS_PER_THREAD][VEC_SIZE];
    float sum[1] = {0.0f};
#pragma unroll 1
    for (int first = 0; first < SLICE; first += CHUNK) {
#if ADDED_BEFORE
      add_chunk(packed, x + first, residual + first, sum_out + first, columns - first, stage, thread, row_in_cta);
#else
      load_chunk<NormInput>(packed, x + first, columns - first, stage, thread, row_in_cta);
#if ADDED_AFTER
      if (ONE_CHUNK) load_chunk<Residual>(added, residual, columns, stage, thread, row_in_cta);
#endif
#endif
      if (LOADS_EARLY) {
        load_weight_and_bias<VECTORS_PER_THREAD>(weight, bias, weight_row, bias_row, thread, columns);
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD && AWAITS_BOTH; ++k) {
          if (HAS_WEIGHT) await_beside(packed[k][0], weight[k][0], params);
          if (HAS_BIAS) await_beside(packed[k][0], bias[k][0], params);
        }
      }
      float of_chunk = 0.0f;
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        unpack<NormInput>(element[k], packed[k]);
        of_chunk += CENTRED ? sum_of(element[k]) : sum_of_squares(element[k]);
      }
      sum[0] += CENTRED ? of_chunk : of_chunk * SQUARES_SCALE;
    }

    // ---- Its statistics
    reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, folds>(sum, warp_sums + buffer * reduce_floats);
    float found[VALUES];
    float shift = 0.0f;
#if CENTRED
    shift = sum[0] * reciprocal_columns_of_cta(rank);
    float deviations[2] = {0.0f, 0.0f};  // their sum, and that of their squares
#pragma unroll 1
    for (int first = 0; first < SLICE; first += CHUNK) {
#if UNALIGNED
      if (!ONE_CHUNK) load_chunk<NormInput>(packed, packed_row + first, columns - first, stage, thread, row_in_cta);
#endif
      float of_chunk[2] = {0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        float deviation[VEC_SIZE];
        if (LOADS_AGAIN) load_of_chunk<NormInput>(packed[k], packed_row + first, k, thread, columns - first);
        if (!KEEPS_FLOATS) unpack<NormInput>(element[k], packed[k]);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) deviation[i] = element[k][i] - shift;
        clear_outside(deviation, k, first + (k * THREADS_PER_ROW + thread) * VEC_SIZE, columns);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) element[k][i] = deviation[i];
        add_deviations(of_chunk, deviation);
      }
      deviations[0] += of_chunk[0];
      deviations[1] += of_chunk[1] * SQUARES_SCALE;
    }
    if (UNPACKS_ANEW) {
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
        for (int i = 0; i < words_of<NormInput, VEC_SIZE>; ++i) forget_uses(packed[k][i]);
      }
    }
    // The bias is loaded only after the reduction: with the weight, it leaves too few registers before.
    if (LOADS_LATE) load_weight(weight, weight_row, thread, columns);
    reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, folds>(deviations, warp_deviations + buffer * 2 * reduce_floats);
    if (LOADS_LATE) load_bias(bias, bias_row, thread, columns);
    found[0] = shift;
    found[1] = deviations[0];
    found[2] = deviations[1];
#else
    found[0] = sum[0];
#endif
    send(exchange, found);
    receive(exchange, found);
    const Statistics statistics = statistics_of(params, found, thread);
    if (is_row_leader) store_statistics(params, row, statistics);

    // ---- y: once, or where each row has a scale, first its largest magnitude
    Output* const out = static_cast<Output*>(params.out) + first_column +
                        row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    constexpr int passes = ROW_SCALED ? 2 : 1;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const bool stores = pass + 1 == passes;
      float row_amax = 0.0f;
#pragma unroll 1
      for (int first = 0; first < SLICE; first += CHUNK) {
#if UNALIGNED
        if (!ONE_CHUNK) load_chunk<NormInput>(packed, packed_row + first, columns - first, stage, thread, row_in_cta);
#if ADDED_AFTER
        if (!ONE_CHUNK) load_chunk<Residual>(added, residual + first, columns - first, stage, thread, row_in_cta);
#endif
        Output* const staged = reinterpret_cast<Output*>(stage) + row_in_cta * CHUNK;
        if (stores) cta_barrier();  // others have read what was staged last
#endif
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
          const int in_chunk = (k * THREADS_PER_ROW + thread) * VEC_SIZE, column = first + in_chunk;
          if (!KEEPS_Y || !stores) {
            if (LOADS_AGAIN) load_of_chunk<NormInput>(packed[k], packed_row + first, k, thread, columns - first);
#if ADDED_AFTER
            if (LOADS_AGAIN) load_of_chunk<Residual>(added[k], residual + first, k, thread, columns - first);
#endif
            if (HAS_AFFINE && !LOADS_EARLY && !LOADS_LATE) {
              if (HAS_WEIGHT) load_affine_vector(weight[k], weight_row + first, k, thread, columns - first);
              if (HAS_BIAS) load_affine_vector(bias[k], bias_row + first, k, thread, columns - first);
            }
            subtract_mean(element[k], packed[k], shift, statistics.mean_hi);
            normalize(element[k], params, statistics, weight[k], bias[k], added[k]);
            if (HAS_AMAX) amax = largest_magnitude(element[k], column, columns, amax);
            if (ROW_SCALED) row_amax = largest_magnitude(element[k], column, columns, row_amax);
          }
          if (stores) {
            uint32 word[words_of<Output, VEC_SIZE>];
            pack_output(word, element[k], scale);
#if UNALIGNED
            store_vector<VEC_SIZE, Space::shared>(staged + in_chunk, word);
#else
            store_vector<VEC_SIZE>(out + column, word, EXACT || column < columns);
#endif
          }
        }
#if UNALIGNED
        if (stores) {
          cta_barrier();
          copy_from_stage(out + first, staged, columns - first, thread);
        }
#endif
      }
#if ROW_SCALED
      if (!stores) {
        float maximum[1] = {row_amax};
        reduce_row<Maximum, THREADS_PER_ROW, ROWS_PER_CTA, folds>(maximum, warp_maxima + buffer * reduce_floats);
        float maxima[VALUES] = {maximum[0]};
        send(exchange, maxima);
        receive(exchange, maxima);
        scale = scale_of_row(params, row, reduce_lanes<Maximum, CTAS_PER_ROW>(maxima[0]), is_row_leader);
      }
#endif
    }
    first_row += stride;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && first_row < params.rows);
  store_amax(params, amax);
  store_scale_inverse(params, scale);
}

}  // namespace trtc
