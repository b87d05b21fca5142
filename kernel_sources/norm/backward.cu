// SPDX-License-Identifier: Apache-2.0
// Backward of RMSNorm and LayerNorm. With x' = (x - mean) * rstd, w = weight + weight_offset and means over the row:
//
//   dx = rstd * (dy * w - x' * mean(dy * w * x') [- mean(dy * w)]) [+ dresidual]
//   dweight = sum over rows of dy * x',   dbias = sum over rows of dy
//
// where mean(dy * w) is subtracted, and mean is not 0, for LayerNorm (CENTRED). Any of dx, dweight and dbias may be
// left out, and mean and rstd are given (HAS_STATISTICS) or found again from x.
//
// norm/partition.cuh has the row partition, and what a program defines. The kernel is persistent: each group of
// CTAS_PER_ROW CTAs works on one row after another. They come through a ring of STAGES slots in shared memory, each
// with a row of x, dy and dresidual: the loads of AHEAD rows are in flight while one is worked on. Each row is read
// twice: its sums are taken, which CTAs exchange, and then dx is made. Where LAG is 1, dx is that of the row before,
// whose sums have arrived meanwhile. The weight, and the sums of its gradient over the thread's rows, stay in
// registers. In the end they are partial sums, which norm/backward_finish.cu adds up.
//
// A turn, with STAGES = 4:   LAG = 0 (AHEAD = 3)     LAG = 1 (AHEAD = 2)
//   loads are issued for     row i + 3               row i + 2
//   sums are taken of        row i                   row i
//   dx is stored for         row i                   row i - 1
// Turns below 0 only fill the ring.
#pragma once

#include "norm/partials.cuh"
#include "norm/statistics.cuh"

// FINDS_STATISTICS: mean and rstd are not given, so they are found from x. REDUCES: the row has sums.
#define FINDS_STATISTICS (NEEDS_X && !HAS_STATISTICS)
#define REDUCES (HAS_DX || FINDS_STATISTICS)
// VALUES: a row's sums, in this order: dy * w * x' (or dy * w * (x - shift) until rstd is known); LayerNorm's dy * w;
// if FINDS_STATISTICS, RMSNorm's sum of squares, or LayerNorm's {shift, deviations, squares} for combine_moments().
// BUFFERS: row_reduce.cuh says why there are 4 if a receive comes one send late.
#define VALUES (CENTRED ? (FINDS_STATISTICS ? 5 : 2) : (FINDS_STATISTICS ? 2 : 1))
#define BUFFERS (2 + 2 * LAG)
#define PERSISTENT 1
#define AHEAD (STAGES - 1 - LAG)
// Whether dy * w and x' stay in registers until dx is computed. Otherwise they are read and computed again.
#define KEEPS_PRODUCTS (HAS_DX && !FINDS_STATISTICS && LAG == 0 && VECTORS_PER_THREAD * VEC_SIZE <= 16)
#define GRADIENTS (HAS_DWEIGHT + HAS_DBIAS)
#define VECTOR_STRIDE (THREADS_PER_ROW * VEC_SIZE)  // from a thread's vector to its next one, in elements
#define USES_BULK_COPY (BULK && !UNALIGNED && TRTC_ARCHITECTURE >= 90)

#include "norm/backward_rows.cuh"
#include "norm/exchange.cuh"

namespace trtc {

static_assert(CHUNKS == 1, "a CTA holds its whole slice");
static_assert(!USES_BULK_COPY || ROWS_PER_CTA == 1, "a slot has one barrier, which the fetch of one row completes");

// ---- Partial sums ---------------------------------------------------------------------------------------------------

#if GRADIENTS > 0
// Leaves a thread's sums over its rows for the second launch: each as it is, or added up over those rows that a CTA
// holds together which have one weight.
TRTC_DEVICE void store_partials(const Params& params, const float (&sums)[VECTORS_PER_THREAD][VEC_SIZE], int gradient,
                                char* shared, const RowPartition& partition) {
  int partials_of_cta = 1;  // rows of partial sums
#if PER_HEAD
  partials_of_cta = partial_rows(ROWS_PER_CTA, params.heads);
#endif
  const bool adds = partials_of_cta < ROWS_PER_CTA;
  const int64 row = cta_index() / CTAS_PER_ROW * partials_of_cta + (adds ? 0 : partition.row_in_cta);
  float* const to = static_cast<float*>(params.partials) + partial_offset(row, gradient, GRADIENTS, HIDDEN);
  if (!adds) {
#pragma unroll
    for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
      uint32 word[VEC_SIZE];
      pack<float>(word, sums[k]);
      const bool is_there = is_filled(k) || k * VECTOR_STRIDE < partition.slice_columns - partition.thread * VEC_SIZE;
      store_vector<VEC_SIZE>(to + partition.thread_column + k * VECTOR_STRIDE, word, is_there);
    }
  }
#if SEVERAL_ROWS
  if (adds) {
    float* const staging = reinterpret_cast<float*>(shared);
    cta_barrier();  // what was in shared memory has been read
#pragma unroll
    for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
      uint32 word[VEC_SIZE];
      pack<float>(word, sums[k]);
      store_vector<VEC_SIZE, Space::shared>(
          staging + partition.row_in_cta * CHUNK + partition.thread_column + k * VECTOR_STRIDE, word);
    }
    cta_barrier();
    constexpr int width = HIDDEN % 4 == 0 ? 4 : 1;
    // Once a launch: loops, whose text is there once.
#pragma unroll 1
    for (int at = thread_index() * width; at < partials_of_cta * HIDDEN; at += THREADS_PER_ROW * ROWS_PER_CTA * width) {
      const int head = at / HIDDEN, column = at - head * HIDDEN;
      float sum[width] = {};
#pragma unroll 1
      for (int i = head; i < ROWS_PER_CTA; i += partials_of_cta) {
        uint32 word[width];
        load_vector<width, Space::shared>(word, staging + i * CHUNK + column);
#pragma unroll
        for (int j = 0; j < width; ++j) sum[j] += float_from_bits(word[j]);
      }
      uint32 word[width];
      pack<float>(word, sum);
      store_vector<width>(to + partial_offset(head, 0, GRADIENTS, HIDDEN) + column, word);
    }
  }
#endif
}
#endif

// ---- The kernel -----------------------------------------------------------------------------------------------------

#if HAS_WEIGHT
// A vector of the weight with its offset; and those of a thread.
TRTC_DEVICE void load_vector_of_weight(float (&weight)[VEC_SIZE], const Params& params, const Weight* weight_row, int k,
                                       int thread, int columns) {
  uint32 word[words_of<Weight, VEC_SIZE>];
  load_affine_vector(word, weight_row, k, thread, columns);
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) weight[i] = element<Weight>(word, i) + params.weight_offset;
}
template <int Count>
TRTC_DEVICE void load_weight(float (&weight)[Count][VEC_SIZE], const Params& params, const Weight* weight_row,
                             int thread, int columns) {
#pragma unroll
  for (int k = 0; k < Count; ++k) load_vector_of_weight(weight[k], params, weight_row, k, thread, columns);
}
#endif

TRTC_DEVICE void norm_backward(const Params& params) {
  TRTC_DYNAMIC_SHARED(char, slots);
  // For the reductions within a CTA. Those of the sums alternate between two buffers: a warp may still read one row's
  // sums while another writes the next row's.
  constexpr int floats_of_sums = reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, VALUES);
  TRTC_SHARED(float, warp_sums, 2 * floats_of_sums);
  TRTC_SHARED(float, warp_totals, reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, 1));

  RowPartition partition;
  partition.thread = ROWS_PER_CTA == 1 ? thread_index() : thread_index() % THREADS_PER_ROW;
  partition.row_in_cta = ROWS_PER_CTA == 1 ? 0 : thread_index() / THREADS_PER_ROW;
  partition.rank = static_cast<int>(cta_index() % CTAS_PER_ROW);
  partition.first_column = partition.rank * SLICE;
  partition.thread_column = partition.first_column + partition.thread * VEC_SIZE;
  partition.slice_columns = min(HIDDEN - partition.first_column, SLICE);
  const int thread = partition.thread;
  const int64 stride = ctas_in_grid() / CTAS_PER_ROW * ROWS_PER_CTA;
  const int64 begin_row = cta_index() / CTAS_PER_ROW * ROWS_PER_CTA;

  RowExchange exchange;
  if (REDUCES) exchange = begin_exchange(params, partition.rank);

  uint64* barriers = nullptr;  // of the slots: each completes when its row is there
#if USES_BULK_COPY
  TRTC_SHARED(uint64, slot_barriers, STAGES);
  barriers = slot_barriers;
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) transaction_barrier_init(barriers + i);
  }
  cta_barrier();
  if (!EXACT) {
    clear_behind_row<Gradient>(slots, DY_AT, partition);
    if (NEEDS_X) clear_behind_row<Input>(slots, 0, partition);
    if (HAS_DRESIDUAL) clear_behind_row<Residual>(slots, DRESIDUAL_AT, partition);
  }
#endif
#if HAS_WEIGHT
  // The weight is loaded as floats in the last turn that fills the ring: the wait for the first row hides it. A weight
  // too large for registers is loaded again for each row.
  float weight[WEIGHT_IN_REGISTERS ? VECTORS_PER_THREAD : 1][VEC_SIZE];
  const Weight* weight_row = static_cast<const Weight*>(params.weight) + partition.first_column;
#if PER_HEAD
  // Every row that a thread works on is of one head: the launch sees to it.
  weight_row += head_of(params, begin_row + partition.row_in_cta) * HIDDEN;
#endif
  if (WEIGHT_IN_REGISTERS && AHEAD == 0) load_weight(weight, params, weight_row, thread, partition.slice_columns);
#endif
#if HAS_STATISTICS && NEEDS_X
  GivenStatistics given = begin_statistics(params, thread, begin_row + partition.row_in_cta, stride);
#endif

  float dweight[HAS_DWEIGHT ? VECTORS_PER_THREAD : 1][VEC_SIZE] = {};
  float dbias[HAS_DBIAS ? VECTORS_PER_THREAD : 1][VEC_SIZE] = {};
  float kept_gradient[KEEPS_PRODUCTS ? VECTORS_PER_THREAD : 1][VEC_SIZE];
  float kept_normal[KEEPS_PRODUCTS ? VECTORS_PER_THREAD : 1][VEC_SIZE];
  float mean = 0.0f, rstd = 0.0f, last_mean = 0.0f, last_rstd = 0.0f;  // mean: a shift until the row's is known
  float sums[VALUES] = {};
  // fetched_slot: the slot that the next load fills; slot: the slot whose row is summed next.
  int fetched_slot = 0, slot = 0;
  // summed: the slot of the row summed last; last_summed: that of the row before it.
  char *summed = slots, *last_summed;
#if USES_BULK_COPY
  uint32 parity = 0;  // of the slots' barriers
#endif
  // `first_row` begins the rows whose sums are taken. In turns below 0 there are none: the ring is filled.
  int turn = -AHEAD;
#pragma unroll 1
  for (int64 first_row = begin_row - AHEAD * stride; first_row - LAG * stride < params.rows; first_row += stride) {
    // ---- The loads of a later row are issued
    order_copies();
    fetch(params, slots + fetched_slot * SLOT_BYTES, first_row + AHEAD * stride, partition, barriers + fetched_slot);
    fetched_slot = fetched_slot + 1 == STAGES ? 0 : fetched_slot + 1;
    if (AHEAD > 0 && turn < 0) {
      ++turn;
#if HAS_WEIGHT && WEIGHT_IN_REGISTERS
      if (turn == 0) load_weight(weight, params, weight_row, thread, partition.slice_columns);
#endif
      continue;
    }
    if (LAG == 0 || first_row < params.rows) {
      const int64 row = first_row + partition.row_in_cta;
      last_summed = summed;
      summed = slots + slot * SLOT_BYTES;
      wait_async<AHEAD>();  // the row is there
#if USES_BULK_COPY
      transaction_barrier_wait(barriers + slot, parity);
      if (slot + 1 == STAGES) parity ^= 1;
#elif UNALIGNED
      cta_barrier();
#endif
      slot = slot + 1 == STAGES ? 0 : slot + 1;

      const Gradient* const own_dy = own_vectors<Gradient>(summed, DY_AT, partition);
      const Input* const own_x = own_vectors<Input>(summed, 0, partition);
      const int columns = columns_of_row(params, partition, row);

      // ---- The row's sums, and its part of the weight's gradients if its statistics are known
#if HAS_STATISTICS && NEEDS_X
      take_statistics(given, params, thread, row, stride, mean, rstd);
#endif
      if constexpr (FINDS_STATISTICS && CENTRED) {
        float total[1] = {0.0f};
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
          uint32 x[words_of<Input, VEC_SIZE>];
          load_vector<VEC_SIZE, Space::shared>(x, own_x + k * VECTOR_STRIDE);
          float of_vector = element<Input>(x, 0);
#pragma unroll
          for (int i = 1; i < VEC_SIZE; ++i) of_vector += element<Input>(x, i);
          total[0] += of_vector;
        }
        reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, false>(total, warp_totals);
        // Not the row's mean yet: that of this CTA's slice.
        mean = total[0] * reciprocal_columns_of_cta(partition.rank);
      }
#pragma unroll
      for (int i = 0; i < VALUES; ++i) sums[i] = 0.0f;
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        uint32 dy[words_of<Gradient, VEC_SIZE>], x[words_of<Input, VEC_SIZE>];
        load_vector<VEC_SIZE, Space::shared>(dy, own_dy + k * VECTOR_STRIDE);
        if (NEEDS_X) load_vector<VEC_SIZE, Space::shared>(x, own_x + k * VECTOR_STRIDE);
#if HAS_WEIGHT
        if (!WEIGHT_IN_REGISTERS) {
          load_vector_of_weight(weight[0], params, weight_row, k, thread, partition.slice_columns);
        }
#endif
        float of_vector[VALUES] = {};
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          float gradient = element<Gradient>(dy, i);
          if (HAS_DBIAS && !FINDS_STATISTICS) dbias[HAS_DBIAS ? k : 0][i] += gradient;
#if NEEDS_X
          float normal = element<Input>(x, i);
          if (CENTRED) normal -= mean;
          if (!FINDS_STATISTICS) normal *= rstd;
#if HAS_DWEIGHT
          if (!FINDS_STATISTICS) dweight[k][i] = fused_multiply_add(gradient, normal, dweight[k][i]);
#endif
#if HAS_WEIGHT
          gradient *= weight[WEIGHT_IN_REGISTERS ? k : 0][i];
#endif
          if (HAS_DX) {
            of_vector[0] = fused_multiply_add(gradient, normal, of_vector[0]);
            if (CENTRED) of_vector[CENTRED ? 1 : 0] += gradient;
          }
          if constexpr (KEEPS_PRODUCTS) {
            kept_gradient[k][i] = gradient;
            kept_normal[k][i] = normal;
          }
          if constexpr (FINDS_STATISTICS) {
            if constexpr (CENTRED) {
              if (!is_inside(i, (k * THREADS_PER_ROW + thread) * VEC_SIZE, columns)) normal = 0.0f;
              of_vector[3] += normal;
            }
            of_vector[VALUES - 1] = fused_multiply_add(normal, normal, of_vector[VALUES - 1]);
          }
#endif
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[i] += of_vector[i];
      }
      if constexpr (REDUCES) {
        if (FINDS_STATISTICS) sums[VALUES - 1] *= SQUARES_SCALE;
        reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, false>(sums, warp_sums + turn % 2 * floats_of_sums);
        if constexpr (FINDS_STATISTICS && CENTRED) sums[2] = mean;
        send(exchange, sums);
      }
    }
    ++turn;
    if constexpr (LAG != 0) {
      // The first turn has no row before it. The statistics of the row that comes next stay for the next turn.
      const float next_mean = mean, next_rstd = rstd;
      mean = last_mean;
      rstd = last_rstd;
      last_mean = next_mean;
      last_rstd = next_rstd;
      if (turn == LAG) continue;
    }

    // ---- dx of the row, or of the one before
    if constexpr (REDUCES) {
      const int64 row = first_row - LAG * stride + partition.row_in_cta;
      const int columns = columns_of_row(params, partition, row);
      char* const here = LAG == 0 || first_row >= params.rows ? summed : last_summed;
      receive(exchange, sums);
      float mean_lo = 0.0f;
      if constexpr (FINDS_STATISTICS) {
        Statistics found = {};
        float squares;
        if constexpr (CENTRED) {
          squares = combine_moments(found, sums[2], sums[3], sums[4], thread % CTAS_PER_ROW);
          // From each CTA's shift to the row's mean.
          sums[0] = fused_multiply_add((sums[2] - found.mean_hi) - found.mean_lo, sums[1], sums[0]);
          mean = found.mean_hi;
          mean_lo = found.mean_lo;
        } else {
          squares = reduce_lanes<Sum, CTAS_PER_ROW>(sums[1]);
        }
        find_rstd(found, squares, params.eps);
        rstd = ROWS_PER_CTA == 1 || row < params.rows ? found.rstd_hi : 0.0f;
      }
#if HAS_DX
      // The means of dy * w * x' and of dy * w.
      float projection = reduce_lanes<Sum, CTAS_PER_ROW>(sums[0]) * (1.0f / HIDDEN);
      if (FINDS_STATISTICS) projection *= rstd;
#if CENTRED
      const float level = reduce_lanes<Sum, CTAS_PER_ROW>(sums[1]) * (1.0f / HIDDEN);
#endif
      const int64 dx_offset = row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);
      Output* const own_dx = static_cast<Output*>(params.dx) + partition.thread_column + dx_offset;
#endif
#if HAS_DX && UNALIGNED
      // In the place of x, of which each thread has read its part, or beside the slots.
      Output* const staged_dx = staged_row<Output>(OUT_IN_SLOT ? here : slots, OUT_AT, partition);
#endif
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        uint32 dy[words_of<Gradient, VEC_SIZE>], x[words_of<Input, VEC_SIZE>], dresidual[words_of<Residual, VEC_SIZE>];
        if (!KEEPS_PRODUCTS) {
          load_vector<VEC_SIZE, Space::shared>(dy, own_vectors<Gradient>(here, DY_AT, partition) + k * VECTOR_STRIDE);
          load_vector<VEC_SIZE, Space::shared>(x, own_vectors<Input>(here, 0, partition) + k * VECTOR_STRIDE);
        }
        if (HAS_DRESIDUAL) {
          load_vector<VEC_SIZE, Space::shared>(
              dresidual, own_vectors<Residual>(here, DRESIDUAL_AT, partition) + k * VECTOR_STRIDE);
        }
#if HAS_WEIGHT
        if (!WEIGHT_IN_REGISTERS && !KEEPS_PRODUCTS) {
          load_vector_of_weight(weight[0], params, weight_row, k, thread, partition.slice_columns);
        }
#endif
#if HAS_DX
        float dx[VEC_SIZE];
#endif
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          float gradient, normal;
          if constexpr (KEEPS_PRODUCTS) {
            gradient = kept_gradient[k][i];
            normal = kept_normal[k][i];
          } else {
            gradient = element<Gradient>(dy, i);
            normal = element<Input>(x, i);
            if (CENTRED) normal -= mean;
            if (CENTRED && FINDS_STATISTICS) normal -= mean_lo;
            normal *= rstd;
            if constexpr (FINDS_STATISTICS) {
              if constexpr (HAS_DBIAS) dbias[k][i] += gradient;
              if constexpr (HAS_DWEIGHT) dweight[k][i] = fused_multiply_add(gradient, normal, dweight[k][i]);
            }
#if HAS_WEIGHT
            gradient *= weight[WEIGHT_IN_REGISTERS ? k : 0][i];
#endif
          }
#if HAS_DX
          gradient = fused_multiply_add(-normal, projection, gradient);
#if CENTRED
          gradient -= level;
#endif
          dx[i] = HAS_DRESIDUAL ? fused_multiply_add(gradient, rstd, element<Residual>(dresidual, i)) : gradient * rstd;
#endif
        }
#if HAS_DX
        uint32 word[words_of<Output, VEC_SIZE>];
        pack<Output>(word, dx);
#if UNALIGNED
        store_vector<VEC_SIZE, Space::shared>(staged_dx + thread * VEC_SIZE + k * VECTOR_STRIDE, word);
#else
        const bool is_there = is_filled(k) || k * VECTOR_STRIDE < columns - thread * VEC_SIZE;
        store_vector<VEC_SIZE>(own_dx + k * VECTOR_STRIDE, word, is_there);
#endif
#endif
      }
#if HAS_DX && UNALIGNED
      cta_barrier();
      copy_from_stage(own_dx - thread * VEC_SIZE, staged_dx, columns, thread);
#endif
    }
  }
  // Lets norm/backward_finish.cu begin to launch; it waits for this kernel's stores by itself. Not per head: that
  // launch has more CTAs, which would take the room of CTAs that still work.
  if (GRADIENTS > 0 && !PER_HEAD) let_next_launch_begin();
  wait_async();

#if HAS_DWEIGHT
  store_partials(params, dweight, 0, slots, partition);
#endif
#if HAS_DBIAS
  store_partials(params, dbias, HAS_DWEIGHT, slots, partition);
#endif
}

}  // namespace trtc
