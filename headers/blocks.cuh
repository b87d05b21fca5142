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
  TRTC_DEVICE bool is_edge(int block) const { return column(block) < begin || column(block) + N > end; }

  // Brings the blocks that are used; they are there after wait_async(). `aligned`: the array's shift is that of the
  // blocks. What is not the part's is of no use.
  template <class T>
  TRTC_DEVICE void fetch(T* shared, const T* part, bool aligned) const {
    constexpr int bytes = Vec<T, N>::bytes;
    constexpr int piece = bytes < 16 ? bytes : 16;
#pragma unroll 1
    for (int block = first_of_thread(); block < stop(); block += Threads) {
      if (aligned && column(block) + N <= columns) {
#pragma unroll
        for (int i = 0; i < bytes / piece; ++i) {
          constexpr int per_piece = piece / static_cast<int>(sizeof(T));
          const int before = min(max(-column(block) - i * per_piece, 0), per_piece);
          // Of pieces that lie before the part nothing is read.
          const bool is_before = before == per_piece;
          copy_async_part<piece>(shared + block * N + i * per_piece, part + column(block) + i * per_piece,
                                 is_before ? 0 : before * sizeof(T), is_before ? 0 : piece);
        }
      } else {
        Vec<T, N> one;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int at = column(block) + i;
          one.set_bits(i, load_element(part + at, at >= 0 && at < columns));
        }
        one.template store<Space::shared>(shared + block * N, true);
      }
    }
  }

  // What is not used of a block becomes `bits`.
  template <class T>
  TRTC_DEVICE void blank(Vec<T, N>& value, int block, uint32 bits) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!uses(column(block) + i)) value.set_bits(i, bits);
    }
  }

  template <class T>
  TRTC_DEVICE void store(const Vec<T, N>& value, T* part, int block, bool aligned) const {
    const bool whole = aligned && column(block) >= 0 && column(block) + N <= columns;
    value.store(part + column(block), whole);
    if (!whole) value.store_inside(part + column(block), -column(block), columns - column(block));
  }
};

}  // namespace trtc
