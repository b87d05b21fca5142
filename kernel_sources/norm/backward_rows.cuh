// SPDX-License-Identifier: Apache-2.0
// The rows of a norm's backward: the ring of slots in shared memory that they come through, and their statistics where
// these are given.
#pragma once

#include "norm/partition.cuh"

namespace trtc {

// What a thread has of the rows.
struct RowPartition {
  int thread;  // of those of this CTA that share a row
  int row_in_cta;
  int rank;           // of this CTA among those that share its rows
  int first_column;   // of this CTA
  int thread_column;  // of the thread's first vector
  int slice_columns;  // that the CTA has; 0 or less where the row ends before its slice
};

// If a CTA has several rows, some may be past the last row: their threads reach every barrier, with 0 columns. A CTA of
// one row always has a real one.
TRTC_DEVICE int columns_of_row(const Params& params, const RowPartition& partition, int64 row) {
  return ROWS_PER_CTA == 1 || row < params.rows ? partition.slice_columns : 0;
}

// ---- The ring -------------------------------------------------------------------------------------------------------

// Whether one copy brings a row, rather than one of each vector: it must be aligned to 16 bytes.
template <class T>
inline constexpr bool comes_in_bulk = USES_BULK_COPY && VEC_SIZE * sizeof(T) >= 16;

// This CTA's columns of a row of an array in a slot; and there a thread's first vector, the next ones of which are each
// VECTOR_STRIDE elements behind the last.
template <class T>
TRTC_DEVICE T* staged_row(char* slot, int at, const RowPartition& partition) {
  return reinterpret_cast<T*>(slot + at) + partition.row_in_cta * CHUNK;
}
template <class T>
TRTC_DEVICE T* own_vectors(char* slot, int at, const RowPartition& partition) {
  return staged_row<T>(slot, at, partition) + partition.thread * VEC_SIZE;
}

// Issues the copies of one row of an array, `offset` elements behind its first one; what is behind its columns becomes
// 0, except after a bulk copy (clear_behind_row()). `here` is the slot's barrier.
template <class T>
TRTC_DEVICE void fetch_row(const void* array, int64 offset, char* slot, int at, const RowPartition& partition,
                           int columns, uint64* here) {
#if UNALIGNED
  const T* const row = static_cast<const T*>(array) + partition.first_column + offset;
  copy_to_stage(staged_row<T>(slot, at, partition), row, columns, partition.thread);
#else
#if USES_BULK_COPY
  if constexpr (comes_in_bulk<T>) {
    const T* const row = static_cast<const T*>(array) + partition.first_column + offset;
    const int bytes = columns * static_cast<int>(sizeof(T));
    if (partition.thread == 0 && columns > 0) copy_bulk(staged_row<T>(slot, at, partition), row, bytes, here, 0, bytes);
    return;
  }
#endif
  constexpr int bytes = VEC_SIZE * sizeof(T);
  const T* const from = static_cast<const T*>(array) + partition.thread_column + offset;
  T* const to = own_vectors<T>(slot, at, partition);
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_there = is_filled(k) || k * VECTOR_STRIDE < columns - partition.thread * VEC_SIZE;
    if constexpr (bytes < 4) {  // what no asynchronous copy brings
      uint32 word[1];
      load_vector_if<VEC_SIZE>(word, from + k * VECTOR_STRIDE, is_there);
      store_vector<VEC_SIZE, Space::shared>(to + k * VECTOR_STRIDE, word);
    } else if (is_filled(k)) {
      copy_async<bytes>(to + k * VECTOR_STRIDE, from + k * VECTOR_STRIDE);
    } else {
      copy_async_part<bytes>(to + k * VECTOR_STRIDE, from + k * VECTOR_STRIDE, 0, is_there ? bytes : 0);
    }
  }
#endif
}

// Issues the copies of the CTA's rows from `first_row` on; none past the last row. Commits a group in any case, so that
// wait_async<AHEAD>() counts turns.
TRTC_DEVICE void fetch(const Params& params, char* slot, int64 first_row, const RowPartition& partition, uint64* here) {
  if (first_row < params.rows) {
    const int64 row = first_row + partition.row_in_cta;
    const int columns = columns_of_row(params, partition, row);
#if USES_BULK_COPY
    constexpr int bytes_of_column = (comes_in_bulk<Gradient> ? sizeof(Gradient) : 0) +
                                    (NEEDS_X && comes_in_bulk<Input> ? sizeof(Input) : 0) +
                                    (HAS_DRESIDUAL && comes_in_bulk<Residual> ? sizeof(Residual) : 0);
    if (partition.thread == 0) transaction_barrier_expect(here, max(columns, 0) * bytes_of_column);
#endif
    const int64 dy_offset = row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    fetch_row<Gradient>(params.dy, dy_offset, slot, DY_AT, partition, columns, here);
#if NEEDS_X
    const int64 x_offset = row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    fetch_row<Input>(params.x, x_offset, slot, 0, partition, columns, here);
#endif
#if HAS_DRESIDUAL
    const int64 offset = row_offset(params, row, params.dresidual_outer_stride, params.dresidual_inner_stride);
    fetch_row<Residual>(params.dresidual, offset, slot, DRESIDUAL_AT, partition, columns, here);
#endif
  }
  commit_async();
}

// A bulk copy writes no zeros behind a row's columns. This clears that part of every slot once; no copy touches it
// later.
template <class T>
TRTC_DEVICE void clear_behind_row(char* slots, int at, const RowPartition& partition) {
  if constexpr (comes_in_bulk<T>) {
    constexpr uint32 zeros[words_of<T, VEC_SIZE>] = {};
#pragma unroll 1
    for (int column = partition.thread * VEC_SIZE; column < CHUNK; column += THREADS_PER_ROW * VEC_SIZE) {
      if (column < partition.slice_columns) continue;
#pragma unroll 1
      for (int slot = 0; slot < STAGES; ++slot) {
        T* const staged = staged_row<T>(slots + slot * SLOT_BYTES, at, partition);
        store_vector<VEC_SIZE, Space::shared>(staged + column, zeros);
      }
    }
  }
}

// Orders all threads' accesses to shared memory before the copies that are issued next: bulk copies use another proxy,
// and unaligned copies write what other threads read.
TRTC_DEVICE void order_copies() {
#if USES_BULK_COPY
  fence_bulk();
#endif
#if USES_BULK_COPY || UNALIGNED
  cta_barrier();
#endif
}

// ---- Given statistics -----------------------------------------------------------------------------------------------

#if HAS_STATISTICS && NEEDS_X
#if STATISTICS_AHEAD

// Statistics are loaded many rows ahead: each lane of a row holds a statistic of a different row. If all lanes loaded
// the same address, the compiler would use a uniform register and wait for it at once.
#define LANES (THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32)
#define ROWS_AHEAD (LANES / (CENTRED ? 2 : 1))
static_assert(ROWS_AHEAD > 1, "there are lanes for several rows");

struct GivenStatistics {
  float current;  // of this turn's row and those after it
  float next;     // of as many rows behind them
  int next_row;   // of `current`
};

TRTC_DEVICE float fetch_statistic(const Params& params, int thread, int64 row, int64 stride) {
  const int lane = thread % LANES;
  row += lane % ROWS_AHEAD * stride;
  if (row >= params.rows) return 0.0f;
#if CENTRED
  if (lane < ROWS_AHEAD) return load_float(static_cast<const float*>(params.mean) + row);
#endif
  return load_float(static_cast<const float*>(params.rstd) + row);
}

TRTC_DEVICE GivenStatistics begin_statistics(const Params& params, int thread, int64 row, int64 stride) {
  return {fetch_statistic(params, thread, row, stride),
          fetch_statistic(params, thread, row + ROWS_AHEAD * stride, stride), 0};
}

// The statistics of a turn's row; 0 where there is none.
TRTC_DEVICE void take_statistics(GivenStatistics& given, const Params& params, int thread, int64 row, int64 stride,
                                 float& mean, float& rstd) {
  if (given.next_row == ROWS_AHEAD) {
    given.current = given.next;
    given.next = fetch_statistic(params, thread, row + ROWS_AHEAD * stride, stride);
    given.next_row = 0;
  }
  const int lane = thread_index() % 32 / LANES * LANES + given.next_row;
  if (CENTRED) mean = shuffle_from(given.current, lane);
  rstd = shuffle_from(given.current, lane + LANES - ROWS_AHEAD);
  ++given.next_row;
}

#else

// Waits for a load here: a shuffle needs its operand, whereas the compiler would delay a copy. All lanes of a warp call
// it.
TRTC_DEVICE float arrived(float loaded) { return shuffle_from(loaded, thread_index() % 32); }

// Whether the loads are waited for before the next ones are issued. Loads that share a hardware scoreboard complete
// together, so a later use would wait for the next row's too.
#define WAITS_FOR_STATISTICS (CENTRED && sizeof(Input) == 4 && CTAS_PER_ROW == 1)

// Statistics are loaded one row ahead: the compiler waits for them behind that row's barrier. This keeps CTAs with
// neighbouring rows in step, so that all end together.
struct GivenStatistics {
  float next_mean, next_rstd;
};

TRTC_DEVICE GivenStatistics begin_statistics(const Params& params, int, int64 row, int64) {
  GivenStatistics given = {0.0f, 0.0f};
  if (row >= params.rows) return given;
#if CENTRED
  given.next_mean = load_float(static_cast<const float*>(params.mean) + row);
#endif
  given.next_rstd = load_float(static_cast<const float*>(params.rstd) + row);
  return given;
}

TRTC_DEVICE void take_statistics(GivenStatistics& given, const Params& params, int thread, int64 row, int64 stride,
                                 float& mean, float& rstd) {
  mean = WAITS_FOR_STATISTICS ? arrived(given.next_mean) : given.next_mean;
  rstd = WAITS_FOR_STATISTICS ? arrived(given.next_rstd) : given.next_rstd;
  given = begin_statistics(params, thread, row + stride, stride);
}

#endif
#endif

}  // namespace trtc
