// A part of a row in the registers of a CTA's threads, at any length and alignment, which are known at run time.
#pragma once

#include "reduce.cuh"
#include "vector.cuh"

namespace trtc {

// Slot i of Vec k of a thread has the column (k * Threads + thread) * N + i - shift of the part. `shift` elements are
// between the part's first one and the multiple of N elements before it, so every Vec is aligned in memory. The slots
// that this leaves before the part, `shift` of thread 0, have its last columns instead: at every alignment, a part of
// Threads * Steps * N columns fits.
template <int Threads, int Steps, int N>
struct Slots {
  enum : int { capacity = Threads * Steps * N, vector = N };
  int thread;
  int shift;
  int columns;  // of the part

  TRTC_DEVICE int column(int k) const { return (k * Threads + thread) * N - shift; }
  TRTC_DEVICE int column_of(int k, int i) const {
    const int first = column(k) + i;
    return k == 0 && first < 0 ? first + capacity : first;
  }
  TRTC_DEVICE bool within(int k, int i) const { return column_of(k, i) < columns; }

  // How far an array's elements are from a multiple of N.
  template <class T>
  static TRTC_DEVICE int shift_of(const T* part) {
    return static_cast<int>(reinterpret_cast<uint64>(part) / sizeof(T) % N);
  }

  // Vec k of an array of the part's columns; `fill` is what no element has. `aligned`: its shift is that of the slots.
  template <class T>
  TRTC_DEVICE Vec<T, N> load(const T* part, int k, bool aligned, uint32 fill) const {
    const int first = column(k);
    Vec<T, N> value;
    if (aligned && first >= 0 && first + N <= columns) {
      value.load_aligned(part + first);
    } else {
      value.fill(fill);
      if (first < columns) {
#pragma unroll 1
        for (int i = N - 1; i >= 0; --i) {
          const int at = column_of(k, i);
          value.push(at < columns ? load_element(part + at) : fill);
        }
      }
    }
    return value;
  }

  template <class T>
  TRTC_DEVICE void store(const Vec<T, N>& value, T* part, int k, bool aligned) const {
    const int first = column(k);
    const bool whole = aligned && first >= 0 && first + N <= columns;
    value.store(part + first, whole);
    if (!whole && first < columns) {
      Vec<T, N> rest = value;
#pragma unroll 1
      for (int i = 0; i < N; ++i) {
        const int at = column_of(k, i);
        rest.store_element(part + at, 0, at < columns);
        rest.push_down();
      }
    }
  }
};

// Moves all by `Distance` places where the shift has that bit.
template <int Distance, int Count>
TRTC_DEVICE void move_down(float (&place)[Count], int shift) {
#pragma unroll
  for (int i = 0; i < Count / 2 + Distance - 1; ++i) {
    place[i] = (shift & Distance) != 0 ? place[i + Distance] : place[i];
  }
}

// Adds up what a part's slots hold, in an order that does not depend on the shift: by the columns' places modulo
// Threads * N, then over these places as if the shift were 0. So a row's sum has the same bits wherever it lies.
template <int Threads, int Steps, int N>
struct ShiftedSum {
  float of_place[N] = {};

  // One part's elements, [k][i]. `shifted`: some row of the launch has a shift.
  TRTC_DEVICE void add(const Slots<Threads, Steps, N>& slots, const float (&element)[Steps * N], bool shifted) {
    // The last columns, which thread 0 has in its first Vec, are added last.
    const int late = shifted && slots.thread == 0 ? slots.shift : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) of_place[i] += i < late ? 0.0f : element[i];
#pragma unroll
    for (int k = 1; k < Steps; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) of_place[i] += element[k * N + i];
    }
    if (shifted) {
#pragma unroll
      for (int i = 0; i < N; ++i) of_place[i] += i < late ? element[i] : 0.0f;
    }
  }

  TRTC_DEVICE void scale(float factor) {
#pragma unroll
    for (int i = 0; i < N; ++i) of_place[i] *= factor;
  }

  // This thread's share of the row's sum. Called by all threads of a CTA, which hold `Rows` rows.
  template <int Rows>
  TRTC_DEVICE float share(const Slots<Threads, Steps, N>& slots, int row_in_cta, bool shifted) {
    if (shifted) {
      // The thread's own places, and those of the thread behind it: `shift` further are what it would have.
      float place[2 * N];
      constexpr int lanes = Threads < 32 ? Threads : 32;
      constexpr int warps = Threads / lanes;
      const int lane = slots.thread % lanes;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        place[i] = of_place[i];
        place[N + i] = shuffle_from(of_place[i], thread_index() % 32 - lane + (lane + 1) % lanes);
      }
      if constexpr (warps > 1) {
        TRTC_SHARED(float, firsts, Rows * warps * N);
        float* of_row = firsts + row_in_cta * warps * N;
        const int warp = slots.thread / 32;
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < N; ++i) of_row[warp * N + i] = of_place[i];
        }
        cta_barrier();
        if (lane == 31) {
#pragma unroll
          for (int i = 0; i < N; ++i) place[N + i] = of_row[(warp + 1) % warps * N + i];
        }
      }
      if constexpr (N > 4) move_down<4>(place, slots.shift);
      if constexpr (N > 2) move_down<2>(place, slots.shift);
      if constexpr (N > 1) move_down<1>(place, slots.shift);
#pragma unroll
      for (int i = 0; i < N; ++i) of_place[i] = place[i];
    }
#pragma unroll
    for (int distance = 1; distance < N; distance *= 2) {
#pragma unroll
      for (int i = 0; i < N; i += 2 * distance) of_place[i] += of_place[i + distance];
    }
    return of_place[0];
  }
};

}  // namespace trtc
