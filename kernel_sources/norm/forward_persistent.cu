// SPDX-License-Identifier: Apache-2.0
// Forward of RMSNorm and LayerNorm, persistent: a group of CTAs works on one row after another. norm/forward.cuh has
// the formula; norm/partition.cuh has the row partition and what a program defines. Rows come through a ring of STAGES
// slots in shared memory, so that the next ones are in flight while one is worked on: each thread copies its own
// vectors, or one thread issues the copy of a whole row (BULK).
//
// CTAs that share a row exchange their sums while they finish the row before (LAG), so that nobody waits for them: a
// turn reads one row and stores y of the row that was read LAG turns before.
//
// Rows that are not whole aligned vectors (UNALIGNED) are copied by words (norm/partition.cuh). One that begins between
// two words is copied when its loads would be issued: it is not in flight.
#pragma once

#include "norm/forward.cuh"
#include "norm/staged.cuh"

// Whether one thread issues the copy of a row: a device of sm_90 can.
#define USES_BULK_COPY (BULK && !UNALIGNED && TRTC_ARCHITECTURE >= 90)

namespace trtc {

static_assert(CHUNKS == 1, "a CTA holds its whole slice");
static_assert(!USES_BULK_COPY || ROWS_PER_CTA == 1, "a slot has one barrier, which the fetch of one row completes");

#define ELEMENTS (VECTORS_PER_THREAD * VEC_SIZE)  // of a thread
#define AFFINE_BYTES_PER_COLUMN static_cast<int>((HAS_WEIGHT ? sizeof(Weight) : 0) + (HAS_BIAS ? sizeof(Bias) : 0))
#define AHEAD (STAGES - 1 - LAG)  // rows in flight
// A row stays in registers until y is stored, or is read from its slot again.
#define KEEPS_ROW (LAG == 0 && ELEMENTS <= 32)
// LayerNorm in one pass (norm/forward_shared.cu says how): not of floats, which have instructions to spare.
#define BYTES_IN_SLOT static_cast<int>(ADDED_BEFORE ? sizeof(Residual) : sizeof(NormInput))
#define ONE_PASS \
  (CENTRED && !KEEPS_ROW && ROWS_PER_CTA == 1 && VEC_SIZE >= 4 && BYTES_IN_SLOT < 4 && sizeof(Output) < 4)
// Or it stays there at least until its deviations are summed.
#define KEEPS_FLOATS \
  (KEEPS_ROW || (CENTRED && !ONE_PASS && sizeof(NormInput) < 4 && ELEMENTS <= (THREADS_PER_ROW > 512 ? 16 : 32)))
// Whether the weight and bias stay in registers.
#define KEEPS_AFFINE (ELEMENTS <= 16 || ELEMENTS * AFFINE_BYTES_PER_COLUMN <= 64)

// Issues the copies of a CTA's columns of a row to a slot. Behind the row are zeros, except after a bulk copy
// (clear_behind()).
template <class T>
TRTC_DEVICE void fetch_row(T* slot, const T* from, int columns, int thread, uint64* barrier) {
#if USES_BULK_COPY
  if (VEC_SIZE * sizeof(T) >= 16 && columns > 0) {
    const int all = columns * static_cast<int>(sizeof(T));
    if (thread == 0) copy_bulk(slot, from, all, barrier, 0, all);
    return;
  }
#endif
  copy_row(slot, from, columns, thread);
}

// The row of this thread's part of a CTA, and what its group takes beside it in that turn; `barrier` completes when
// what comes in bulk is there.
TRTC_DEVICE void fetch(const Params& params, Input* x, Residual* residual, int64 first_row, int row_in_cta,
                       int first_column, int slice_columns, int thread, uint64* barrier) {
#if UNALIGNED
  cta_barrier();  // others have used what was in the slot
#endif
  if (first_row < params.rows) {
    const int64 row = first_row + row_in_cta;
    const int columns = ROWS_PER_CTA == 1 || row < params.rows ? slice_columns : 0;
#if USES_BULK_COPY
    if (thread == 0) {
      int of_column = VEC_SIZE * sizeof(Input) >= 16 ? sizeof(Input) : 0;
      if ((ADDED_BEFORE || ADDED_AFTER) && VEC_SIZE * sizeof(Residual) >= 16) of_column += sizeof(Residual);
      transaction_barrier_expect(barrier, max(columns, 0) * of_column);
    }
#endif
    fetch_row(x,
              static_cast<const Input*>(params.x) + first_column +
                  row_offset(params, row, params.x_outer_stride, params.x_inner_stride),
              columns, thread, barrier);
#if ADDED_BEFORE || ADDED_AFTER
    fetch_row(residual,
              static_cast<const Residual*>(params.residual) + first_column +
                  row_offset(params, row, params.residual_outer_stride, params.residual_inner_stride),
              columns, thread, barrier);
#endif
  }
  commit_async();
}

#if USES_BULK_COPY
// What is behind a row becomes zeros, by each thread in its own vectors.
template <class T>
TRTC_DEVICE void clear_behind(T* slot, int columns, int thread) {
  const uint32 zeros[words_of<T, VEC_SIZE>] = {};
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
    if (!is_filled(k) && column >= columns) store_vector<VEC_SIZE, Space::shared>(slot + column, zeros);
  }
}
#endif

// Orders all threads' accesses to shared memory before the bulk copies that are issued next, which use another proxy.
TRTC_DEVICE void order_copies() {
#if USES_BULK_COPY
  fence_bulk();
  cta_barrier();
#endif
}

// A row's x and residual in a slot.
TRTC_DEVICE Input* x_in(char* slots, int slot, int row_in_cta) {
  return reinterpret_cast<Input*>(slots + slot * SLOT_BYTES) + row_in_cta * CHUNK;
}
TRTC_DEVICE Residual* residual_in(char* slots, int slot, int row_in_cta) {
  return reinterpret_cast<Residual*>(slots + slot * SLOT_BYTES + RESIDUAL_AT) + row_in_cta * CHUNK;
}

TRTC_DEVICE void norm_forward_persistent(const Params& params) {
  // Reductions alternate between two buffers: a warp may still read one row's values while another writes the next
  // row's.
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, 1);
  constexpr int sums_of_row = ONE_PASS ? 2 : 1;
  TRTC_SHARED(float, first_shifts, 2);
  TRTC_SHARED(float, warp_sums, 2 * sums_of_row * reduce_floats);
#if CENTRED
  TRTC_SHARED(float, warp_deviations, 2 * 2 * reduce_floats);
#endif
  TRTC_SHARED(uint64, here, STAGES);  // of bulk copies, for each slot
  TRTC_DYNAMIC_SHARED(char, slots);

  const int thread = ROWS_PER_CTA == 1 ? thread_index() : thread_index() % THREADS_PER_ROW;
  const int row_in_cta = ROWS_PER_CTA == 1 ? 0 : thread_index() / THREADS_PER_ROW;
  const int rank = static_cast<int>(cta_index() % CTAS_PER_ROW);
  const int first_column = rank * SLICE;
  const int slice_columns = min(HIDDEN - first_column, SLICE);
  const int64 begin_row = cta_index() / CTAS_PER_ROW * ROWS_PER_CTA;
  const int64 stride = ctas_in_grid() / CTAS_PER_ROW * ROWS_PER_CTA;
  RowExchange exchange = begin_exchange(params, rank);
#if USES_BULK_COPY
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) transaction_barrier_init(here + i);
  }
  cta_barrier();
#endif
#pragma unroll 1
  for (int i = 0; i < AHEAD; ++i) {
    fetch(params, x_in(slots, i, row_in_cta), residual_in(slots, i, row_in_cta), begin_row + i * stride, row_in_cta,
          first_column, slice_columns, thread, here + i);
  }

  uint32 weight[KEEPS_AFFINE ? VECTORS_PER_THREAD : 1][words_of<Weight, VEC_SIZE>];
  uint32 bias[KEEPS_AFFINE ? VECTORS_PER_THREAD : 1][words_of<Bias, VEC_SIZE>];
  const Weight* weight_row = nullptr;
  const Bias* bias_row = nullptr;
#if HAS_WEIGHT
  weight_row = static_cast<const Weight*>(params.weight) + first_column;
#endif
#if HAS_BIAS
  bias_row = static_cast<const Bias*>(params.bias) + first_column;
#endif
  if (KEEPS_AFFINE) load_weight_and_bias(weight, bias, weight_row, bias_row, thread, slice_columns);
  float scale = 1.0f;
#if HAS_SCALE
  scale = load_float(params.scale);
#endif
  float amax = 0.0f;

  int slot = 0, last_slot = 0;  // of the row that is read next, and of the one that is stored next
#if USES_BULK_COPY
  uint32 parity = 0;  // of the slots' phases
#endif
  int buffer = 0;
  float element[KEEPS_FLOATS ? VECTORS_PER_THREAD : 1][VEC_SIZE];
  float found[VALUES] = {};
  // The row that is read is LAG rows before the one that is stored.
  int64 first_row = begin_row;
#pragma unroll 1
  for (int64 stored_first = first_row - LAG * stride; stored_first < params.rows; stored_first += stride) {
    if (LAG == 0 || first_row < params.rows) {
      const int64 row = first_row + row_in_cta;
      const int columns = ROWS_PER_CTA == 1 || row < params.rows ? slice_columns : 0;
      Input* const x = x_in(slots, slot, row_in_cta);
      Residual* const residual = residual_in(slots, slot, row_in_cta);
      if (AHEAD == 0) {
        order_copies();
        fetch(params, x, residual, first_row, row_in_cta, first_column, slice_columns, thread, here + slot);
      }
      wait_async<(AHEAD > 0 ? AHEAD - 1 : 0)>();
#if USES_BULK_COPY
      transaction_barrier_wait(here + slot, parity);
      if (slot + 1 == STAGES) parity ^= 1;
      clear_behind(x, columns, thread);
#if ADDED_BEFORE || ADDED_AFTER
      clear_behind(residual, columns, thread);
#endif
      order_copies();
#elif UNALIGNED
      cta_barrier();
#endif
      if (AHEAD > 0) {
        const int next = slot + AHEAD < STAGES ? slot + AHEAD : slot + AHEAD - STAGES;
        fetch(params, x_in(slots, next, row_in_cta), residual_in(slots, next, row_in_cta), first_row + AHEAD * stride,
              row_in_cta, first_column, slice_columns, thread, here + next);
      }
      slot = slot + 1 == STAGES ? 0 : slot + 1;

      // ---- The row, and the sum of its squares, or of its elements; in one pass, of deviations and their squares
      NormInput* sum_out = nullptr;
#if ADDED_BEFORE
      sum_out = static_cast<NormInput*>(params.residual_out) + first_column +
                row_offset(params, row, params.residual_out_outer_stride, params.residual_out_inner_stride);
#endif
      uint32 packed[words_of<NormInput, VEC_SIZE>];
      load_packed_first(packed, x, residual, sum_out, 0, thread * VEC_SIZE, columns);
      float shift[1] = {0.0f};
      if constexpr (ONE_PASS) {
        if (thread == 0) shift[0] = shift_from<NormInput>(packed, columns);
        broadcast_in_row<THREADS_PER_ROW, ROWS_PER_CTA>(shift, first_shifts + buffer);
      }
      float of_thread[2] = {0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
        float value[VEC_SIZE];
        if (k > 0) load_packed_first(packed, x, residual, sum_out, k, column, columns);
        unpack<NormInput>(value, packed);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          if (KEEPS_FLOATS) element[KEEPS_FLOATS ? k : 0][i] = value[i];
        }
        if constexpr (ONE_PASS) {
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) value[i] -= shift[0];
          clear_outside(value, k, column, columns);
          add_deviations(of_thread, value);
        } else {
          of_thread[0] += CENTRED ? sum_of(value) : sum_of_squares(value);
        }
      }
      float sums[sums_of_row] = {CENTRED ? of_thread[0] : of_thread[0] * SQUARES_SCALE};
      if (ONE_PASS) sums[sums_of_row - 1] = of_thread[1] * SQUARES_SCALE;
#if UNALIGNED && ADDED_BEFORE
      if constexpr (KEEPS_SUM) {
        cta_barrier();
        copy_from_stage(sum_out, reinterpret_cast<const NormInput*>(residual), columns, thread);
      }
#endif

      // ---- Its statistics, as far as this CTA knows
      reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, false>(sums, warp_sums + buffer * sums_of_row * reduce_floats);
#if CENTRED
      const float reciprocal = reciprocal_columns_of_cta(rank);
      float deviations[2] = {sums[0], sums[sums_of_row - 1]};
      const bool again = !ONE_PASS || is_far(deviations[0], deviations[1], reciprocal);
      if (again) shift[0] += sums[0] * reciprocal;
      if (__builtin_expect(again, !ONE_PASS)) {
        of_thread[0] = of_thread[1] = 0.0f;
#pragma unroll(ONE_PASS ? 1 : VECTORS_PER_THREAD)
        for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
          const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
          float deviation[VEC_SIZE];
          if constexpr (!KEEPS_FLOATS) {
            load_packed(packed, x, residual, column);
            unpack<NormInput>(deviation, packed);
          }
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) {
            deviation[i] = (KEEPS_FLOATS ? element[KEEPS_FLOATS ? k : 0][i] : deviation[i]) - shift[0];
          }
          clear_outside(deviation, k, column, columns);
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) {
            if (KEEPS_ROW) element[KEEPS_FLOATS ? k : 0][i] = deviation[i];
          }
          add_deviations(of_thread, deviation);
        }
        deviations[0] = of_thread[0];
        deviations[1] = of_thread[1] * SQUARES_SCALE;
        reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, false>(deviations, warp_deviations + buffer * 2 * reduce_floats);
      }
      found[0] = shift[0];
      found[1] = deviations[0];
      found[2] = deviations[1];
#else
      found[0] = sums[0];
#endif
      send(exchange, found);
    }
    first_row += stride;
    buffer = (buffer + 1) % 2;
    if (LAG != 0 && stored_first < begin_row) continue;  // the first turn has no row before it

    // ---- y of the row, or of the one before
    const int64 row = stored_first + row_in_cta;
    const bool exists = ROWS_PER_CTA == 1 || row < params.rows;
    const int columns = exists ? slice_columns : 0;
    Input* const x = x_in(slots, last_slot, row_in_cta);
    Residual* const residual = residual_in(slots, last_slot, row_in_cta);
    last_slot = last_slot + 1 == STAGES ? 0 : last_slot + 1;
    const float own_shift = found[0];
    receive(exchange, found);
    const Statistics statistics = statistics_of(params, found, thread);
    if (thread == 0 && rank == 0 && exists) store_statistics(params, row, statistics);
    Output* const out = static_cast<Output*>(params.out) + first_column +
                        row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
#if UNALIGNED
    Output* const staged_y =
        OUT_IN_SLOT ? reinterpret_cast<Output*>(x) : reinterpret_cast<Output*>(slots + OUT_AT) + row_in_cta * CHUNK;
#endif
#pragma unroll
    for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
      const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
      const int kept = KEEPS_AFFINE ? k : 0;
      float y[VEC_SIZE];
      if constexpr (KEEPS_ROW) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          y[i] = element[KEEPS_ROW ? k : 0][i];
          if (CENTRED && CTAS_PER_ROW > 1) y[i] += own_shift - statistics.mean_hi;
        }
      } else {
        uint32 packed[words_of<NormInput, VEC_SIZE>];
        load_packed(packed, x, residual, column);
        unpack<NormInput>(y, packed);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          if (CENTRED) y[i] -= statistics.mean_hi;
        }
      }
      uint32 added[words_of<Residual, VEC_SIZE>];
      if (ADDED_AFTER) load_vector<VEC_SIZE, Space::shared>(added, residual + column);
      if constexpr (!KEEPS_AFFINE) {
        if (HAS_WEIGHT) load_affine_vector(weight[0], weight_row, k, thread, slice_columns);
        if (HAS_BIAS) load_affine_vector(bias[0], bias_row, k, thread, slice_columns);
      }
      normalize(y, params, statistics, weight[kept], bias[kept], added);
      if (HAS_AMAX) amax = largest_magnitude(y, column, columns, amax);
      uint32 word[words_of<Output, VEC_SIZE>];
      pack_output(word, y, scale);
#if UNALIGNED
      store_vector<VEC_SIZE, Space::shared>(staged_y + column, word);
#else
      store_vector<VEC_SIZE>(out + column, word, EXACT || column < columns);
#endif
    }
#if UNALIGNED
    cta_barrier();
    copy_from_stage(out, staged_y, columns, thread);
    cta_barrier();
#endif
  }
  wait_async();
  store_amax(params, amax);
  store_scale_inverse(params, scale);
}

}  // namespace trtc
