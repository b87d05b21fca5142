// SPDX-License-Identifier: Apache-2.0
// Reductions of values over the threads that share a row: those of a warp, of a CTA, and of the CTAs of a cluster or of
// a cooperative grid. Plain functions: shared memory and barriers are the kernel's, and handed in.
//
// The order is fixed by the number of threads and CTAs alone, and every thread gets the same bits. A CTA has
// `RowsPerCta` rows of `ThreadsPerRow` threads each: a power of two up to 32, or whole warps. Called by all threads.
#pragma once

#include "ptx.cuh"

namespace trtc {

// ---- What values are combined by ------------------------------------------------------------------------------------

struct Sum {
  static TRTC_DEVICE float nothing() { return 0.0f; }
  static TRTC_DEVICE float of(float a, float b) { return a + b; }
};

// Of values without a sign: they compare as their bits do, and NaN is above infinity.
struct Maximum {
  static TRTC_DEVICE float nothing() { return 0.0f; }
  static TRTC_DEVICE float of(float a, float b) { return float_from_bits(max(bits_from_float(a), bits_from_float(b))); }
};

// NaN loses.
struct Largest {
  static TRTC_DEVICE float nothing() { return float_from_bits(0xff800000u); }
  static TRTC_DEVICE float of(float a, float b) { return larger(a, b); }
};

// ---- In a warp ------------------------------------------------------------------------------------------------------

// Over groups of `Lanes` neighbouring lanes (a power of two). Called by whole converged warps.
template <class Operation, int Lanes>
TRTC_DEVICE float reduce_lanes(float value) {
  static_assert(Lanes >= 1 && Lanes <= 32 && (Lanes & (Lanes - 1)) == 0, "a group is a power of two within a warp");
#pragma unroll
  for (int distance = Lanes / 2; distance >= 1; distance /= 2) {
    value = Operation::of(value, shuffle_xor(value, distance));
  }
  return value;
}

// Adds up values, as many as a power of two: each in one of as many groups of neighbouring lanes, whose lanes add up
// what those in their place in the others have of it. In group i, values[0] is what is left of value i then.
template <class Operation, int Lanes, int Count>
TRTC_DEVICE void fold(float (&values)[Count]) {
  const int lane = thread_index() % Lanes;
#pragma unroll
  for (int count = Count / 2, distance = Lanes / 2; count >= 1; count /= 2, distance /= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float given = upper ? values[i] : values[i + count];
      values[i] = Operation::of(upper ? values[i + count] : values[i], shuffle_xor(given, distance));
    }
  }
}

// ---- In a CTA -------------------------------------------------------------------------------------------------------

// The warps of a row; and the power of two that is no less than a number up to 32.
constexpr TRTC_DEVICE int warps_of_row(int threads_per_row) { return threads_per_row < 32 ? 1 : threads_per_row / 32; }
constexpr TRTC_DEVICE int power_of_two_from(int number) {
  return number <= 2 ? 2 : number <= 4 ? 4 : number <= 8 ? 8 : number <= 16 ? 16 : 32;
}

// The floats of shared memory that reduce_row() needs for `count` values: one, for the sake of C++, where a row is
// shared within a warp.
constexpr TRTC_DEVICE int reduced_floats(int threads_per_row, int rows_per_cta, int count) {
  return threads_per_row <= 32 ? 1 : rows_per_cta * warps_of_row(threads_per_row) * count;
}

// Reduces each of the values over the threads of a row that are in this CTA. `shared`: reduced_floats(). They are free
// again behind the CTA's next barrier, so reductions that follow each other without one use two places in turn.
//
// `Folds`: of 2 or 4 values, a part of the lanes adds up each, where that is fewer instructions (12, not 20, for two of
// several warps; but one more that waits: not where few rows are in flight).
//
// `warps_here`: a launch may have fewer warps for the CTA's one row. One alone needs no barrier.
template <class Operation, int ThreadsPerRow, int RowsPerCta, bool Folds, int Count>
TRTC_DEVICE void reduce_row(float (&values)[Count], float* shared, int warps_here = warps_of_row(ThreadsPerRow)) {
  static_assert(ThreadsPerRow <= 32 || ThreadsPerRow % 32 == 0, "a row is shared by part of a warp or by whole warps");
  constexpr int warps = warps_of_row(ThreadsPerRow);
  constexpr int lanes = ThreadsPerRow < 32 ? ThreadsPerRow : 32;
  constexpr bool folds = Folds && ((Count == 2 && warps > 1) || (Count == 4 && lanes >= 4));
  constexpr int kept = folds ? 1 : Count;               // values of a lane
  constexpr int group = folds ? lanes / Count : lanes;  // lanes that have the same ones
  if constexpr (folds) fold<Operation, lanes>(values);
#pragma unroll
  for (int i = 0; i < kept; ++i) values[i] = reduce_lanes<Operation, group>(values[i]);
  if constexpr (warps > 1) {
    if (warps_here > 1) {
      // A part for each row, in it one for each value, and there a float for each warp.
      const int thread = thread_index();
      float* of_row = shared + (RowsPerCta == 1 ? 0 : thread / ThreadsPerRow) * warps * Count;
      float* of_group = of_row + thread % 32 / group * warps;
      const int warp = (RowsPerCta == 1 ? thread : thread % ThreadsPerRow) / 32;
#pragma unroll
      for (int i = 0; i < kept; ++i) {
        if (thread % group == 0) of_group[i * warps + warp] = values[i];
      }
      cta_barrier();
      // Every group of lanes reads and reduces all of them.
      constexpr int places = power_of_two_from(warps);
      constexpr int readers = places < group ? places : group;
#pragma unroll
      for (int i = 0; i < kept; ++i) {
        float value = Operation::nothing();
#pragma unroll
        for (int first = 0; first < places; first += readers) {
          const int place = first + thread % readers;
          const float one = place < warps_here ? of_group[i * warps + place] : Operation::nothing();
          value = first == 0 ? one : Operation::of(value, one);
        }
        values[i] = reduce_lanes<Operation, readers>(value);
      }
    }
  }
  if constexpr (folds) {
    const float found = values[0];
    const int first = thread_index() % 32 / lanes * lanes;
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] = shuffle_from(found, first + i * group);
  }
}

// The same of one value, by less text: it compiles sooner.
template <class Operation, int ThreadsPerRow, int RowsPerCta>
TRTC_DEVICE float reduce_row(float value, float* shared, int warps_here = warps_of_row(ThreadsPerRow)) {
  constexpr int lanes = ThreadsPerRow < 32 ? ThreadsPerRow : 32;
  value = reduce_lanes<Operation, lanes>(value);
  if constexpr (ThreadsPerRow > 32) {
    if (warps_here > 1) {
      constexpr int warps = ThreadsPerRow / 32, places = power_of_two_from(warps);
      const int thread = RowsPerCta == 1 ? thread_index() : thread_index() % ThreadsPerRow;
      float* const of_row = RowsPerCta == 1 ? shared : shared + thread_index() / ThreadsPerRow * warps;
      if (thread % 32 == 0) of_row[thread / 32] = value;
      cta_barrier();
      value = thread % places < warps_here ? of_row[thread % places] : Operation::nothing();
      value = reduce_lanes<Operation, places>(value);
    }
  }
  return value;
}

// All threads of a row that are in this CTA get the values of the first one. `shared`: RowsPerCta * Count floats,
// unless a row is shared within a warp; free again as above.
template <int ThreadsPerRow, int RowsPerCta, int Count>
TRTC_DEVICE void broadcast_in_row(float (&values)[Count], float* shared) {
  if constexpr (ThreadsPerRow <= 32) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      values[i] = shuffle_from(values[i], thread_index() % 32 / ThreadsPerRow * ThreadsPerRow);
    }
  } else {
    float* of_row = shared + (RowsPerCta == 1 ? 0 : thread_index() / ThreadsPerRow) * Count;
    const bool is_first = (RowsPerCta == 1 ? thread_index() : thread_index() % ThreadsPerRow) == 0;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (is_first) of_row[i] = values[i];
    }
    cta_barrier();
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] = of_row[i];
  }
}

// ---- Between CTAs that share rows -----------------------------------------------------------------------------------
// Each CTA sends its values to all of them, itself included; then thread i of each receives those of CTA i % Ctas, for
// reduce_lanes<..., Ctas>() to reduce. A kernel that sends once has one buffer, [Count][Ctas] floats. One that goes on
// has two, in turn: whoever sends the values of row i has received those of row i - 1, so all others have sent those,
// and received those of row i - 2, whose buffer nobody reads any more. Where a receive comes one send late, it has
// four.

#if TRTC_ARCHITECTURE >= 90

// In a cluster: `buffers` lie in shared memory, and a barrier for each completes when all values are there. The
// barriers are there for the others only after cluster_wait(), which comes before the first send.
template <int Ctas, int Buffers, int Count>
TRTC_DEVICE void begin_cluster_exchange(uint64* barriers) {
  if (thread_index() == 0) {
#pragma unroll
    for (int i = 0; i < Buffers; ++i) {
      transaction_barrier_init(barriers + i);
      transaction_barrier_expect(barriers + i, Count * Ctas * sizeof(float));
    }
  }
  cluster_arrive_relaxed();
}

template <int Ctas, int Count>
TRTC_DEVICE void send_to_cluster(const float (&values)[Count], float* buffer, uint64* barrier, int rank) {
  const int thread = thread_index();
  if (thread < Ctas) {
#pragma unroll
    for (int i = 0; i < Count; ++i) store_cluster_async(buffer + i * Ctas + rank, barrier, thread, values[i]);
  }
}

// `parity`: of the times that this buffer was received before. `Again`: it will be received again. All stores to this
// CTA have arrived after the last one, so it may leave before others do.
template <int Ctas, bool Again, int Count>
TRTC_DEVICE void receive_from_cluster(float (&values)[Count], const float* buffer, uint64* barrier, uint32 parity) {
  const int thread = thread_index();
  transaction_barrier_wait(barrier, parity);
  if constexpr (Again) {
    if (thread == 0) transaction_barrier_expect(barrier, Count * Ctas * sizeof(float));
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) values[i] = buffer[i * Ctas + thread % Ctas];
}

#endif

// In a cooperative grid: of global memory, zeroed before the launch, each group of CTAs that share rows has a counter
// for each buffer, of arrivals at all rows together, and behind these the buffers.
constexpr TRTC_DEVICE int grid_workspace_words(int ctas, int buffers, int count) {
  return buffers * (1 + count * ctas);
}

template <int Ctas, int Count>
TRTC_DEVICE void send_to_grid(const float (&values)[Count], float* buffer, uint32* arrived, int rank) {
  if (thread_index() == 0) {
#pragma unroll
    for (int i = 0; i < Count; ++i) store_relaxed_global(buffer + i * Ctas + rank, values[i]);
    add_release_global(arrived, 1u);
  }
}

// `times`: how often this buffer was received before.
template <int Ctas, int Count>
TRTC_DEVICE void receive_from_grid(float (&values)[Count], const float* buffer, const uint32* arrived, uint32 times) {
  const int thread = thread_index();
  if (thread == 0) {
    // Wraps around safely: the distance to the target stays below 2^31.
    const uint32 target = (times + 1u) * static_cast<uint32>(Ctas);
    while (static_cast<int32>(load_acquire_global(arrived) - target) < 0) spin_hint();
  }
  cta_barrier();
#pragma unroll
  for (int i = 0; i < Count; ++i) values[i] = load_relaxed_global(buffer + i * Ctas + thread % Ctas);
}

}  // namespace trtc
