// A part of a row in a CTA's shared memory, as it lies in global memory: in blocks of N elements that are aligned
// there.
#pragma once

#include "rows.cuh"

namespace trtc {

// Block b has the columns b * N - shift + i of the part: `shift` elements are between the part's first one and the
// multiple of N elements before it. Thread t has every block from t on that is a multiple of the CTA's threads behind
// it, which no other one sees. A kernel is for any number of warps up to 16. `Whole`: all columns are used.
template <int N, bool Whole>
struct Blocks {
  int threads;
  int shift;
  int columns;  // of the part
  int begin;    // of those that are used: the first one, and the one behind the last; within the part
  int end;
  int own;  // the first block of those that are used which is this thread's

  TRTC_DEVICE Blocks(int thread, int threads, int shift, int columns, int begin, int end)
      : threads(threads), shift(shift), columns(columns), begin(begin), end(end), own(thread) {
    if constexpr (!Whole) {
      // Whole turns of the threads are before it. No integers are divided: a half more is at least 1/32 away from every
      // quotient that is a whole number, and the approximation, up to 2^22 blocks, less than that from the quotient.
      const float turns =
          (static_cast<float>(first() / 32) + 0.5f) * approximate_reciprocal(static_cast<float>(threads / 32));
      own += static_cast<int>(turns) * threads;
      if (own < first()) own += threads;
    }
  }

  // Elements of shared memory that a part of so many columns needs at any alignment.
  static TRTC_DEVICE int room(int columns) { return (columns + 2 * N - 2) / N * N; }

  TRTC_DEVICE int column(int block) const { return block * N - shift; }
  // The blocks of the part, and those that have columns which are used.
  TRTC_DEVICE int all() const { return columns > 0 ? (columns + shift + N - 1) / N : 0; }
  TRTC_DEVICE int first() const { return Whole ? 0 : (begin + shift) / N; }
  TRTC_DEVICE int stop() const { return end > begin ? (end + shift + N - 1) / N : 0; }

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
  // the part's. Returns whether the last one is this thread's, of an array that is `aligned`.
  template <class T>
  TRTC_DEVICE bool fetch(T* shared, const T* part, bool aligned, uint32 fill) const {
    return fetch_blocks(shared, part, aligned, fill, {false, false});
  }
  // The same where these columns may have anything, so that copies bring all: of two arrays, a row would wait for the
  // elements of one after those of the other (bfloat16, backward, 16385: 0.83 of a copy instead of 0.93; forward, of
  // one array, 0.95 and, with blank() behind it, 0.92). What is not `beside` the part must not be touched, as a copy of
  // a part of a block does (compute-sanitizer).
  template <class T>
  TRTC_DEVICE bool fetch_beside(T* shared, const T* part, bool aligned, Beside beside) const {
    return fetch_blocks(shared, part, aligned, 0, beside);
  }

  // Whether the first or the last block has anything but columns of the part.
  TRTC_DEVICE bool has_edges() const { return shift > 0 || (columns + shift) % N != 0; }

  // Columns that are not used become `bits`, in the first and the last block that are, by the threads which have these;
  // `has_last`: as fetch() told.
  template <class T>
  TRTC_DEVICE void blank(T* shared, uint32 bits, bool has_last) const {
    const int from = first(), last = stop() - 1;
    if (last < from) return;
    const bool blanks_first = begin > column(from) && own == from;
    const bool blanks_last = end < column(last) + N && has_last;
    const int until = blanks_last ? last : blanks_first ? from : -1;
#pragma unroll 1
    for (int block = blanks_first ? from : last; block <= until; block += max(last - from, 1)) {
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
  TRTC_DEVICE bool fetch_blocks(T* shared, const T* part, bool aligned, uint32 fill, Beside beside) const {
    constexpr int bytes = Vec<T, N>::bytes;
    constexpr int piece = bytes < 16 ? bytes : 16;
    constexpr int of_piece = piece / static_cast<int>(sizeof(T));
    const Run whole = inside(aligned, 0, columns);
    const int last = stop() - 1;
    if (last < first()) return false;
    const int last_whole = min(last, whole.stop - 1);
    int behind = own < whole.first ? own + threads : own;  // this thread's block behind the last whole one
#pragma unroll 1
    for (; behind <= last_whole; behind += threads) {
#pragma unroll
      for (int i = 0; i < N; i += of_piece) {
        copy_async<piece, Whole>(shared + behind * N + i, part + column(behind) + i);
      }
    }
    // Nothing is divided to find out: at most one block is behind the last whole one.
    const bool has_last = (last == last_whole ? behind - threads : behind) == last;
    if (whole.first <= first() && last == last_whole) return has_last;
    // All; or the first and the last one, which neighbouring threads bring at once.
    const bool brings_first = own == first() && own < whole.first;
    const bool brings_last = has_last && last > last_whole;
    const int until = !aligned || brings_last ? last : brings_first ? first() : -1;
#pragma unroll 1
    for (int block = !aligned       ? own
                     : brings_first ? first()
                                    : last;
         block <= until; block += aligned ? max(last - first(), 1) : threads) {
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
    return has_last;
  }
};

}  // namespace trtc
