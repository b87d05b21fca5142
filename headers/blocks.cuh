// A part of a row in a CTA's shared memory, as it lies in global memory: in blocks of N elements that are aligned
// there.
#pragma once

#include "vector.cuh"

namespace trtc {

// Block b has the columns b * N - shift + i of the part: `shift` elements are between the part's first one and the
// multiple of N elements before it. Thread t has every `Threads`-th block from t on, which no other thread sees.
template <int Threads, int N>
struct Blocks {
  int thread;
  int shift;
  int columns;  // of the part
  int begin;    // of those that are used: the first one, and the one behind the last; within the part
  int end;

  // Elements of shared memory that a part of so many columns needs at any alignment.
  static TRTC_DEVICE int room(int columns) { return (columns + 2 * N - 2) / N * N; }

  TRTC_DEVICE int column(int block) const { return block * N - shift; }
  // The blocks of the part, those that have columns which are used, and the first one of these that is this thread's.
  TRTC_DEVICE int all() const { return columns > 0 ? (columns + shift + N - 1) / N : 0; }
  TRTC_DEVICE int first() const { return (begin + shift) / N; }
  TRTC_DEVICE int stop() const { return end > begin ? (end + shift + N - 1) / N : 0; }
  TRTC_DEVICE int first_of_thread() const {
    const int block = first() / Threads * Threads + thread;
    return block < first() ? block + Threads : block;
  }
  TRTC_DEVICE bool uses(int column) const { return column >= begin && column < end; }

  // Neighbouring blocks.
  struct Run {
    int first;
    int stop;

    TRTC_DEVICE bool has(int block) const {
      return static_cast<uint32>(block - first) < static_cast<uint32>(stop - first);
    }
  };
  // Those of which all columns are from `from` to before `to`, where the array's shift is that of the blocks
  // (`aligned`); else none.
  TRTC_DEVICE Run inside(bool aligned, int from, int to) const {
    const int first_inside = (from + shift + N - 1) / N;
    return {first_inside, aligned ? max((to + shift) / N, first_inside) : first_inside};
  }

  // Brings the blocks that are used; they are there after wait_async(). `fill` is what their columns have that are not
  // the part's.
  template <class T>
  TRTC_DEVICE void fetch(T* shared, const T* part, bool aligned, uint32 fill) const {
    constexpr int bytes = Vec<T, N>::bytes;
    constexpr int piece = bytes < 16 ? bytes : 16;
    const Run whole = inside(aligned, 0, columns);
    const int own = first_of_thread(), last = stop() - 1;
    const int last_whole = min(last, whole.stop - 1);
#pragma unroll 1
    for (int block = own < whole.first ? own + Threads : own; block <= last_whole; block += Threads) {
#pragma unroll
      for (int i = 0; i < N; i += piece / static_cast<int>(sizeof(T))) {
        copy_async<piece>(shared + block * N + i, part + column(block) + i);
      }
    }
    if (whole.first <= first() && last == last_whole) return;
    // The first and the last one; or all.
#pragma unroll 1
    for (int block = aligned ? first() : own; block <= last; block += aligned ? max(last - first(), 1) : Threads) {
      if (block % Threads != thread || whole.has(block)) continue;
      Vec<T, N> one;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int at = column(block) + i;
        const bool exists = at >= 0 && at < columns;
        const uint32 bits = load_element(part + at, exists);
        one.set_bits(i, exists ? bits : fill);
      }
      one.template store<Space::shared>(shared + block * N, true);
    }
  }

  // Columns that are not used become `bits`, in the first and the last block that are, by the threads which have these.
  template <class T>
  TRTC_DEVICE void blank(T* shared, uint32 bits) const {
    const int last = stop() - 1;
#pragma unroll 1
    for (int block = first(); block <= last; block += max(last - first(), 1)) {
      if (block % Threads != thread) continue;
      Vec<T, N> value;
      value.load_shared(shared + block * N);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!uses(column(block) + i)) value.set_bits(i, bits);
      }
      value.template store<Space::shared>(shared + block * N, true);
    }
  }

  // To the part's first column on; `whole`: the blocks that are inside it, where this array is aligned; else none.
  template <class T>
  TRTC_DEVICE void store(const Vec<T, N>& value, T* part, int block, const Run& whole) const {
    const bool is_whole = whole.has(block);
    T* to = part + column(block);
    value.store(to, is_whole);
    if (!is_whole) value.store_inside(to, -column(block), columns - column(block));
  }
};

}  // namespace trtc
