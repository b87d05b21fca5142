// Sums over the threads that share a row: within a warp, a CTA, a cluster, or CTAs of a cooperative grid.
// The order is fixed by the configuration alone, and every thread gets the same bits.
#pragma once

#include "ptx.cuh"

namespace trtc {

// How CTAs that share a row tell each other their sums.
enum class Exchange {
  none,     // one CTA holds the row
  cluster,  // distributed shared memory
  grid,     // global memory, in a cooperative launch
};

// Sum over groups of `Lanes` neighbouring lanes (a power of two). Called by whole converged warps.
template <int Lanes>
TRTC_DEVICE float sum_lanes(float value) {
  static_assert(Lanes >= 1 && Lanes <= 32 && (Lanes & (Lanes - 1)) == 0, "a group is a power of two within a warp");
#pragma unroll
  for (int distance = Lanes / 2; distance >= 1; distance /= 2) value += shuffle_xor(value, distance);
  return value;
}

// Sum of `Count` values that other CTAs wrote, a power of two. Called by whole converged warps.
template <int Count>
TRTC_DEVICE float sum_strided(const float* values) {
  constexpr int lanes = Count < 32 ? Count : 32;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Count; i += lanes) sum += load_relaxed_global(values + i + thread_index() % lanes);
  return sum_lanes<lanes>(sum);
}

// What CTAs of a cooperative grid need to add up one row at a time, for each group of CTAs that shares rows.
// Zeroed before the launch. `partials` has two halves, used in turn.
template <int Ctas>
struct GridWorkspace {
  uint32 arrived;
  float partials[2 * Ctas];
};

// Sums one value a row over all threads of the row. Every thread of every CTA that takes part calls begin() once, then
// sum(): once, or under Exchange::grid once for each row of a sequence. There, two buffers are used in turn, so that
// one barrier a row is enough: a thread can be at most one barrier ahead of another.
template <int ThreadsPerRow, int RowsPerCta, int CtasPerRow, Exchange How>
struct RowSum {
  static_assert(ThreadsPerRow <= 32 || ThreadsPerRow % 32 == 0, "a row is shared by part of a warp or by whole warps");
  static_assert((CtasPerRow == 1) == (How == Exchange::none), "CTAs that share a row must exchange their sums");
  static_assert(CtasPerRow == 1 || (RowsPerCta == 1 && CtasPerRow <= ThreadsPerRow), "and hold one row at a time");
  // The warps' barrier orders the reads of one row's sums before the release of the next row's; two buffers rely on it.
  static_assert(How != Exchange::grid || ThreadsPerRow > 32, "a grid's CTAs have several warps");
  enum : bool { repeats = How == Exchange::grid };
  enum : int {
    warps = ThreadsPerRow < 32 ? 1 : ThreadsPerRow / 32,  // a row's, in one CTA
    lanes = ThreadsPerRow < 32 ? ThreadsPerRow : 32,
    slots = warps <= 2 ? 2
    : warps <= 4       ? 4
    : warps <= 8       ? 8
    : warps <= 16      ? 16
                       : 32,  // a power of two for the warps
    buffers = repeats ? 2 : 1,
  };

  GridWorkspace<CtasPerRow>* workspace;  // of the CTAs that share this CTA's rows
  float* cta_sums;                       // of the cluster
  uint64* all_here;                      // completes when they are
  int rank;                              // of this CTA among those that share its rows
  uint32 round;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, int cta_rank) {
    rank = cta_rank;
    round = 0;
    if constexpr (How == Exchange::grid) {
      workspace = static_cast<GridWorkspace<CtasPerRow>*>(params.workspace) + cta_index() / CtasPerRow;
    }
#if TRTC_ARCHITECTURE >= 90
    if constexpr (How == Exchange::cluster) {
      TRTC_SHARED(float, sums, CtasPerRow);
      TRTC_SHARED(uint64, barrier, 1);
      cta_sums = sums;
      all_here = barrier;
      if (thread_index() == 0) transaction_barrier_init(all_here, CtasPerRow * sizeof(float));
      cluster_arrive_relaxed();  // its wait is in sum(), behind the loads of the row
    }
#endif
  }

  TRTC_DEVICE float sum(float value) {
    const int thread = thread_index();
    const int in_row = RowsPerCta == 1 ? thread : thread % ThreadsPerRow;
    const int row_in_cta = RowsPerCta == 1 ? 0 : thread / ThreadsPerRow;
    const int buffer = static_cast<int>(round % buffers);
    value = sum_lanes<lanes>(value);
    if constexpr (warps > 1) {
      TRTC_SHARED(float, warp_sums, buffers * RowsPerCta * warps);
      float* sums = warp_sums + (buffer * RowsPerCta + row_in_cta) * warps;
      if (thread % 32 == 0) sums[in_row / 32] = value;
      cta_barrier();
      value = sum_lanes<slots>(thread % slots < warps ? sums[thread % slots] : 0.0f);
    }
#if TRTC_ARCHITECTURE >= 90
    if constexpr (How == Exchange::cluster) {
      cluster_wait();
      if (thread < CtasPerRow) store_cluster_async(cta_sums + rank, all_here, thread, value);
      // All stores to this CTA have arrived after the wait, so it may leave before others do.
      transaction_barrier_wait(all_here);
      value = sum_lanes<CtasPerRow>(cta_sums[thread % CtasPerRow]);
    }
#endif
    if constexpr (How == Exchange::grid) {
      float* sums = workspace->partials + buffer * CtasPerRow;
      if (thread == 0) {
        store_relaxed_global(sums + rank, value);
        add_release_global(&workspace->arrived, 1u);
        // Wraps around safely: the distance to the target stays below 2^31.
        const uint32 target = (round + 1u) * static_cast<uint32>(CtasPerRow);
        while (static_cast<int32>(load_acquire_global(&workspace->arrived) - target) < 0) spin_hint();
      }
      cta_barrier();
      value = sum_strided<CtasPerRow>(sums);
      ++round;
    }
    return value;
  }
};

}  // namespace trtc
