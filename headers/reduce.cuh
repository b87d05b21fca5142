// Sums over the threads that share a row: within a warp, a CTA, a cluster, or CTAs of a cooperative grid.
// The order is fixed by the configuration and the CTA's threads alone, and every thread gets the same bits.
#pragma once

#include "row_reduce.cuh"

namespace trtc {

// How CTAs that share a row tell each other their sums.
enum class Exchange {
  none,     // one CTA holds the row
  cluster,  // distributed shared memory
  grid,     // global memory, in a cooperative launch
};

// Of a kernel's traits.
template <class Traits>
constexpr TRTC_DEVICE Exchange exchange_of() {
  return Traits::ctas_per_row == 1 ? Exchange::none : Traits::clusters ? Exchange::cluster : Exchange::grid;
}

// Warps of a CTA that share a row: so many, or, `AtMost`, those of the launch.
template <int Warps, bool AtMost>
TRTC_DEVICE int warps_here() {
  return AtMost ? threads_in_cta() / 32 : Warps;
}

// What CTAs of a cooperative grid need to tell each other values, for each group of CTAs that shares rows. Zeroed
// before the launch.
template <int Buffers, int Count>
struct GridWorkspace {
  uint32 arrived[Buffers];  // CTAs whose values are there, in all rounds together
  float values[Buffers * Count];
};

// Reduces values of a row over all threads of the row. Every thread of every CTA that takes part calls begin() once,
// and then, for each row, of which there is one at least: reduce_in_cta() with `Use` 0, 1 ... in turn, gather(), and
// where `Repeats` next_row(). Buffers are used in turn, so that one barrier a use or a gather is enough.
//
// `AtMost`: a launch may have fewer threads, which are whole warps.
template <int ThreadsPerRow, int RowsPerCta, int CtasPerRow, Exchange How, int Most, bool Repeats, int Buffers,
          bool AtMost = false>
struct RowReduction {
  static_assert(ThreadsPerRow <= 32 || ThreadsPerRow % 32 == 0, "a row is shared by part of a warp or by whole warps");
  static_assert((CtasPerRow == 1) == (How == Exchange::none), "CTAs that share a row must exchange their sums");
  static_assert(CtasPerRow == 1 || (RowsPerCta == 1 && CtasPerRow <= 32), "and hold one row at a time");
  // The warps' barrier orders the reads of one row's values before the release of the next row's; two buffers rely on
  // it.
  static_assert(CtasPerRow == 1 || ThreadsPerRow > 32, "CTAs that share a row have several warps");
  enum : int {
    warps = ThreadsPerRow < 32 ? 1 : ThreadsPerRow / 32,  // a row's, in one CTA
    lanes = ThreadsPerRow < 32 ? ThreadsPerRow : 32,
    slots = warps <= 2 ? 2
    : warps <= 4       ? 4
    : warps <= 8       ? 8
    : warps <= 16      ? 16
                       : 32,  // a power of two for the warps
    buffers = Repeats ? 2 : 1,
    exchanged = Most * CtasPerRow,  // values of a buffer between CTAs, [Most][CtasPerRow]
  };
  static_assert(!AtMost || RowsPerCta == 1, "rows of a CTA are counted by their threads");
  static_assert(!Repeats || Buffers >= 2, "the values of a row are sent before those of the last are read by all");
  using Workspace = GridWorkspace<Buffers, exchanged>;

  Workspace* workspace;  // of the CTAs that share this CTA's rows
  float* cta_values;     // of the cluster
  uint64* all_here;      // one for each of its buffers: completes when they are there
  int rank;              // of this CTA among those that share its rows
  uint32 row_number;
  uint32 sent;
  uint32 received;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, int cta_rank) {
    rank = cta_rank;
    row_number = 0;
    sent = 0;
    received = 0;
    if constexpr (How == Exchange::grid) {
      workspace = static_cast<Workspace*>(params.workspace) + cta_index() / CtasPerRow;
    }
#if TRTC_ARCHITECTURE >= 90
    if constexpr (How == Exchange::cluster) {
      TRTC_SHARED(float, values, Buffers* exchanged);
      TRTC_SHARED(uint64, barriers, Buffers);
      cta_values = values;
      all_here = barriers;
      if (thread_index() == 0) {
#pragma unroll
        for (int i = 0; i < Buffers; ++i) {
          transaction_barrier_init(all_here + i);
          transaction_barrier_expect(all_here + i, exchanged * sizeof(float));
        }
      }
      cluster_arrive_relaxed();  // its wait is in the first send(), behind the loads of the row
    }
#endif
  }

  TRTC_DEVICE void next_row() { ++row_number; }

  // Over the threads of this CTA that share the row. Where there are 2 or 4 values, a part of the lanes adds up each:
  // 12 instructions instead of 20 for two of a warp, but one more that waits: not where rows are taken in turn, nor for
  // two values of one warp.
  template <class Operation, int Use, int Count>
  TRTC_DEVICE void reduce_in_cta(float (&values)[Count]) {
    constexpr bool folds = !Repeats && ((Count == 2 && warps > 1) || (Count == 4 && lanes >= 4));
    constexpr int kept = folds ? 1 : Count;               // values of a lane
    constexpr int group = folds ? lanes / Count : lanes;  // lanes that have the same ones
    if constexpr (folds) fold<Operation, lanes>(values);
#pragma unroll
    for (int i = 0; i < kept; ++i) values[i] = reduce_lanes<Operation, group>(values[i]);
    if constexpr (warps > 1) {
      const int here = warps_here<warps, AtMost>();
      // Where CTAs share a row, one warp has the barrier too: see above.
      if (!AtMost || CtasPerRow > 1 || here > 1) {
        TRTC_SHARED(float, warp_values, buffers * RowsPerCta * warps * Count);
        const int thread = thread_index();
        const int in_row = RowsPerCta == 1 ? thread : thread % ThreadsPerRow;
        const int row_in_cta = RowsPerCta == 1 ? 0 : thread / ThreadsPerRow;
        const int buffer = static_cast<int>(row_number % buffers);
        float* of_row = warp_values + (buffer * RowsPerCta + row_in_cta) * warps * Count;
        float* of_group = of_row + thread % 32 / group * warps;
#pragma unroll
        for (int i = 0; i < kept; ++i) {
          if (thread % group == 0) of_group[i * warps + in_row / 32] = values[i];
        }
        cta_barrier();
        constexpr int readers = slots < group ? slots : group;
#pragma unroll
        for (int i = 0; i < kept; ++i) {
          float value = Operation::nothing();
#pragma unroll
          for (int first = 0; first < slots; first += readers) {
            const int slot = first + thread % readers;
            const float one = slot < here ? of_group[i * warps + slot] : Operation::nothing();
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

  // Tells the row's CTAs `Most` values.
  TRTC_DEVICE void send(const float (&values)[Most]) {
    const int thread = thread_index();
    const int buffer = static_cast<int>(sent % Buffers);
#if TRTC_ARCHITECTURE >= 90
    if constexpr (How == Exchange::cluster) {
      if (sent == 0) cluster_wait();
      if (thread < CtasPerRow) {
#pragma unroll
        for (int i = 0; i < Most; ++i) {
          store_cluster_async(cta_values + buffer * exchanged + i * CtasPerRow + rank, all_here + buffer, thread,
                              values[i]);
        }
      }
    }
#endif
    if constexpr (How == Exchange::grid) {
      if (thread == 0) {
#pragma unroll
        for (int i = 0; i < Most; ++i) {
          store_relaxed_global(workspace->values + buffer * exchanged + i * CtasPerRow + rank, values[i]);
        }
        add_release_global(workspace->arrived + buffer, 1u);
      }
    }
    ++sent;
  }

  // Thread i gets the values of CTA i % CtasPerRow. Where there is only one, they stay what they are.
  TRTC_DEVICE void receive(float (&values)[Most]) {
    const int thread = thread_index();
    const int buffer = static_cast<int>(received % Buffers);
#if TRTC_ARCHITECTURE >= 90
    if constexpr (How == Exchange::cluster) {
      // All stores to this CTA have arrived after the last wait, so it may leave before others do.
      transaction_barrier_wait(all_here + buffer, received / Buffers % 2);
      if constexpr (Repeats) {
        if (thread == 0) transaction_barrier_expect(all_here + buffer, exchanged * sizeof(float));
      }
#pragma unroll
      for (int i = 0; i < Most; ++i) values[i] = cta_values[buffer * exchanged + i * CtasPerRow + thread % CtasPerRow];
    }
#endif
    if constexpr (How == Exchange::grid) {
      if (thread == 0) {
        // Wraps around safely: the distance to the target stays below 2^31.
        const uint32 target = (received / Buffers + 1u) * static_cast<uint32>(CtasPerRow);
        while (static_cast<int32>(load_acquire_global(workspace->arrived + buffer) - target) < 0) spin_hint();
      }
      cta_barrier();
#pragma unroll
      for (int i = 0; i < Most; ++i) {
        values[i] = load_relaxed_global(workspace->values + buffer * exchanged + i * CtasPerRow + thread % CtasPerRow);
      }
    }
    ++received;
  }

  TRTC_DEVICE void gather(float (&values)[Most]) {
    send(values);
    receive(values);
  }
};

}  // namespace trtc
