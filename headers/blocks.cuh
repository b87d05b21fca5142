// A part of a row in a CTA's shared memory, as it lies in global memory: in blocks of N elements that are aligned
// there.
#pragma once

#include "rows.cuh"

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
    fetch_blocks(shared, part, aligned, fill, {false, false});
  }
  // The same where these columns may have anything, so that copies bring all: of two arrays, a row would wait for the
  // elements of one after those of the other (bfloat16, backward, 16385: 0.83 of a copy instead of 0.93; forward, of
  // one array, 0.95 and, with blank() behind it, 0.92). What is not `beside` the part must not be touched, as a copy of
  // a part of a block does (compute-sanitizer).
  template <class T>
  TRTC_DEVICE void fetch_beside(T* shared, const T* part, bool aligned, Beside beside) const {
    fetch_blocks(shared, part, aligned, 0, beside);
  }

  // Whether the first or the last block has anything but columns of the part.
  TRTC_DEVICE bool has_edges() const { return shift > 0 || (columns + shift) % N != 0; }

  // Columns that are not used become `bits`, in the first and the last block that are, by the threads which have these.
  template <class T>
  TRTC_DEVICE void blank(T* shared, uint32 bits) const {
    const int from = first(), last = stop() - 1;
    if (last < from) return;
    const int until = end < column(last) + N ? last : from;
#pragma unroll 1
    for (int block = begin > column(from) ? from : last; block <= until; block += max(last - from, 1)) {
      if (block % Threads != thread) continue;
      Vec<T, N> value;
      value.load_shared(shared + block * N);
      value.keep(begin - column(block), end - column(block), bits);
      value.template store<Space::shared>(shared + block * N, true);
    }
  }

  // To the part's first column on; `whole`: the blocks that are inside it, where this array is aligned; else none.
  template <class T>
  TRTC_DEVICE void store(const Vec<T, N>& value, T* part, int block, const Run& whole) const {
    const bool is_whole = whole.has(block);
    T* to = part + column(block);
    value.store(to, is_whole);
    if (!is_whole) value.store_each(to, -column(block), columns - column(block));
  }

 private:
  template <class T>
  TRTC_DEVICE void fetch_blocks(T* shared, const T* part, bool aligned, uint32 fill, Beside beside) const {
    constexpr int bytes = Vec<T, N>::bytes;
    constexpr int piece = bytes < 16 ? bytes : 16;
    constexpr int of_piece = piece / static_cast<int>(sizeof(T));
    const Run whole = inside(aligned, 0, columns);
    const int own = first_of_thread(), last = stop() - 1;
    const int last_whole = min(last, whole.stop - 1);
#pragma unroll 1
    for (int block = own < whole.first ? own + Threads : own; block <= last_whole; block += Threads) {
#pragma unroll
      for (int i = 0; i < N; i += of_piece) {
        copy_async<piece>(shared + block * N + i, part + column(block) + i);
      }
    }
    if (whole.first <= first() && last == last_whole) return;
    // All; or the first and the last one, which neighbouring threads bring at once.
    const bool has_first = first() % Threads == thread;
#pragma unroll 1
    for (int block = !aligned    ? own
                     : has_first ? first()
                                 : last;
         block <= last; block = !aligned        ? block + Threads
                                : block == last ? last + 1
                                                : last) {
      if (block % Threads != thread || whole.has(block)) continue;
      const T* from = part + column(block);
      const int begins = max(-column(block), 0), ends = min(columns - column(block), N);
      if (aligned && (begins == 0 || beside.before) && (ends == N || beside.behind)) {
#pragma unroll
        for (int i = 0; i < N; i += of_piece) {
          const int size = static_cast<int>(sizeof(T));
          copy_async_part<piece>(shared + block * N + i, from + i, min(max(begins - i, 0), of_piece) * size,
                                 min(max(ends - i, 0), of_piece) * size);
        }
        continue;
      }
      Vec<T, N> one;
      one.fill(fill);
      one.load_each(from, begins, ends);
      one.template store<Space::shared>(shared + block * N, true);
    }
  }
};

}  // namespace trtc
