// A part of a row in the registers of a CTA's threads, at any length and alignment, which are known at run time.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace trtc {

// Slot i of Vec k of a thread has the column (k * Threads + thread) * N + i - shift of the part. `shift` elements are
// between the part's first one and the multiple of N elements before it, so every Vec is aligned in memory. The slots
// that this leaves before the part, `shift` of thread 0, have its last columns instead: at every alignment, a part of
// Threads * Steps * N columns fits. Where not `Ranged`, `begin` is 0 and `end` is `columns`.
template <int Threads, int Steps, int N, bool Ranged>
struct Slots {
  enum : int { stride = Threads * N, capacity = stride * Steps, vector = N };
  // Whether the ends of rows are stored by halves: of short rows, which have few other Vecs (softmax of 49, 63 and 127
  // keys of bfloat16: 0.82, 0.77 and 0.98 of a copy, by elements 0.46, 0.47 and 0.93). Of others it takes 25 ms more to
  // compile, and is no faster.
  enum : bool { halves_edges = Threads < 8 };
  int thread;
  int shift;
  int columns;  // of the part
  int begin;    // of those that are used: the first one, and the one behind the last
  int end;

  TRTC_DEVICE int column(int k) const { return k * stride + thread * N - shift; }
  TRTC_DEVICE int column_of(int k, int i) const {
    const int first = column(k) + i;
    return k == 0 && first < 0 ? first + capacity : first;
  }
  // Whether the first Vec has slots before the part.
  TRTC_DEVICE bool has_head() const { return thread == 0 && shift > 0; }
  // Whether they have the part's last columns, or some of them. Float32, 400 keys: 0.93 of a copy, and 0.89 by stop().
  TRTC_DEVICE bool has_late() const { return has_head() && (Ranged ? stop() : columns + shift) > capacity; }
  // Whether Vec k may have columns that are used.
  TRTC_DEVICE bool meets(int k) const {
    if constexpr (!Ranged) return k * stride < columns - column(0);
    return (k == 0 && has_head()) || (k * stride > begin - column(0) - N && k * stride < end - column(0));
  }

  // Whether each slot has its column, and all are used: no array needs settle(), and few instructions are on the way of
  // such a row (softmax's backward, 16 rows of 4096 keys: 0.3 us of 2.1 in a graph).
  TRTC_DEVICE bool is_full() const { return !Ranged && shift == 0 && columns == capacity; }
  // Arrays of such a part's columns, that are aligned.
  template <class T>
  TRTC_DEVICE void bring_full(Vec<T, N> (&value)[Steps], const T* part) const {
#pragma unroll
    for (int k = 0; k < Steps; ++k) value[k].load_aligned(part + k * stride + thread * N);
  }
  template <class T>
  TRTC_DEVICE void store_full(const Vec<T, N> (&value)[Steps], T* part) const {
#pragma unroll
    for (int k = 0; k < Steps; ++k) value[k].store(part + k * stride + thread * N, true);
  }

  // Brings what is used of an array of the part's columns; `fill` is what any other slot has. `aligned`: the array's
  // shift is that of the slots. Whether settle() is yet to be called: by then other arrays are on their way. Not
  // `MayBeFull`: a full part is brought as any other.
  template <bool MayBeFull = true, class T>
  TRTC_DEVICE bool bring(Vec<T, N> (&value)[Steps], const T* part, uint32 fill, Beside beside, bool aligned) const {
    if constexpr (MayBeFull && !Ranged) {
      // Ahead of the branch, behind which there is much text (forward, 16 rows of 4096 keys: 1.87 us in a graph, and
      // 1.82). Masked, 1024 keys: 0.915 of a copy, and 0.90 without a way of its own.
      const bool full = aligned && is_full();
#pragma unroll
      for (int k = 0; k < Steps; ++k) value[k].load_early(part + k * stride + thread * N, full);
      if (full) return false;
    }
    const bool whole = shift == 0 && columns % N == 0;
    if (aligned && (beside.before || shift == 0) && (beside.behind || (columns + shift) % N == 0)) {
      const T* of_slots = part - shift;
#pragma unroll
      for (int k = 0; k < Steps; ++k) {
        const int slot = k * stride + thread * N;
        value[k].fill(fill);
        if (slot < stop() && (!Ranged || slot + N > start())) {
          value[k].load_part(of_slots + slot, shift - slot, columns + shift - slot);
        }
      }
      return Ranged || !whole;
    }
#pragma unroll 1
    for (int k = 0; k < Steps; ++k) {
      const int slot = k * stride + thread * N;
      Vec<T, N> one;
      one.fill(fill);
      one.load_each(part + (slot - shift), start() - slot, stop() - slot);
      turn(value, one);
    }
    if (has_late()) {
      Vec<T, N> late;
      late.fill(fill);
      late.load_each(part + (capacity - shift), start() - capacity, stop() - capacity);
      value[0].replace_first(late, shift);
    }
    return false;
  }

  // Brings the part's last columns, where they are in the first thread's head. What Vecs have brought that is not used
  // is replaced, unless it may be anything (`any`). 1001 keys, bfloat16: 0.91 of a copy; with a loop over the elements
  // of a part's first and last Vec, 0.61.
  template <class T>
  TRTC_DEVICE void settle(Vec<T, N> (&value)[Steps], const T* part, uint32 fill, bool any = false) const {
    if (!any) {
#pragma unroll
      for (int k = 0; k < Steps; ++k) {
        const int slot = k * stride + thread * N;
        if (slot < stop() && (slot < start() || slot + N > stop())) value[k].keep(start() - slot, stop() - slot, fill);
      }
    }
    if (has_late()) {
      Vec<T, N> late;
      late.load_part(part - shift + capacity, 0, columns + shift - capacity);
      late.keep(start() - capacity, stop() - capacity, fill);
      value[0].replace_first(late, shift);
    }
  }

  // All of the part's columns.
  template <class T>
  TRTC_DEVICE void store(const Vec<T, N> (&value)[Steps], T* part, bool aligned) const {
    T* of_slots = part - shift;
    const int end = max(columns, 0) + shift, last = end / N;
    const bool head = has_head(), tail = end % N != 0 && last % Threads == thread;
    if (aligned) {
#pragma unroll
      for (int k = 0; k < Steps; ++k) {
        const int slot = k * stride + thread * N;
        value[k].store(of_slots + slot, slot + N <= end && !(k == 0 && head));
      }
      if (!head && !tail) return;
    }
    // The part's first columns, in the first thread, and the last ones, which may be in the same Vec.
    if constexpr (halves_edges) {
      if (aligned && last > 0) {
        bool at_head = head, at_tail = tail;
#pragma unroll 1
        while (at_head || at_tail) {
          const Vec<T, N> one = step(value, at_head ? 0 : last / Threads);
          one.store_edge(of_slots + (at_head ? 0 : last * N), at_head ? N - shift : end % N, at_head);
          at_tail = at_tail && at_head;
          at_head = false;
        }
        return;
      }
    }
    // These by elements, or all Vecs where they are not aligned, and the head's slots that have the part's last
    // columns.
    const int last_step = !aligned ? static_cast<int>(Steps) : tail ? last / Threads : 0;
    const int to_next = aligned ? max(last_step, 1) : 1;
#pragma unroll 1
    for (int k = aligned && !head ? last_step : 0; k <= last_step; k += to_next) {
      const int slot = k * stride + thread * N;
      step(value, k).store_each(of_slots + slot, shift - slot, end - slot);
    }
  }

 private:
  // The slots that are used, but for those of the head.
  TRTC_DEVICE int start() const { return (Ranged ? max(begin, 0) : 0) + shift; }
  TRTC_DEVICE int stop() const { return columns > 0 ? (Ranged ? min(end, columns) : columns) + shift : 0; }

  // Vec k; the first one where there is none.
  template <class T>
  static TRTC_DEVICE Vec<T, N> step(const Vec<T, N> (&value)[Steps], int k) {
    Vec<T, N> one = value[0];
#pragma unroll
    for (int other = 1; other < Steps; ++other) one = k == other ? value[other] : one;
    return one;
  }

  // The first one leaves, and `last` is behind the others: a loop over Vecs in registers, which have no index. Its text
  // is there once, and few threads come to it.
  template <class T>
  static TRTC_DEVICE void turn(Vec<T, N> (&value)[Steps], const Vec<T, N>& last) {
#pragma unroll
    for (int k = 0; k + 1 < Steps; ++k) value[k] = value[k + 1];
    value[Steps - 1] = last;
  }
};

// Adds up what a part's slots hold, in an order that does not depend on the shift: by the columns' places modulo
// Threads * N, then over a thread's N places, and over the threads. So a row's sum has the same bits wherever it lies.
// `AtMost`: the CTA, which has one row, may have fewer threads, whole warps, which are to be read for `Threads` above.
template <int Threads, int N, bool AtMost = false>
struct ShiftedSum {
  float of_place[N] = {};

  // Elements in order, of which those of thread 0 before the row are 0.
  TRTC_DEVICE void add(const float (&element)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) of_place[i] += element[i];
  }

  // The elements of Vec k, in order. The slots of thread 0's first Vec that have the part's last columns are added by
  // add_late(), behind all others.
  template <class Part>
  TRTC_DEVICE void add(const Part& part, int k, const float (&element)[N]) {
    if (k == 0 && part.has_late()) {
#pragma unroll
      for (int i = 0; i < N; ++i) of_place[i] += i < part.shift ? 0.0f : element[i];
    } else {
      add(element);
    }
  }

  template <class Part>
  TRTC_DEVICE void add_late(const Part& part, const float (&element)[N]) {
    if (part.has_late()) {
#pragma unroll
      for (int i = 0; i < N; ++i) of_place[i] += i < part.shift ? element[i] : 0.0f;
    }
  }

  TRTC_DEVICE void scale(float factor) {
#pragma unroll
    for (int i = 0; i < N; ++i) of_place[i] *= factor;
  }

  // This thread's share of the row's sum. Called by all threads of a CTA, which hold `Rows` rows. `shifted`: some row
  // of the launch has a shift. Each `Use` of a kernel has shared memory of its own.
  template <int Rows, int Use = 0>
  TRTC_DEVICE float share(int thread, int shift, int row_in_cta, bool shifted) {
    ShiftedSum one[1] = {*this};
    float found[1];
    shares<Rows, Use>(one, found, thread, shift, row_in_cta, shifted);
    return found[0];
  }

  // Of several sums at once.
  template <int Rows, int Use, int Count>
  static TRTC_DEVICE void shares(ShiftedSum (&sums)[Count], float (&found)[Count], int thread, int shift,
                                 int row_in_cta, bool shifted) {
    if (shifted) {
      // The first `shift` places become those of the thread behind: together they are what it has where the shift is 0.
      float behind[Count][N];
      constexpr int lanes = Threads < 32 ? Threads : 32;
      constexpr int warps = Threads / lanes;
      const int lane = thread % lanes;
#pragma unroll
      for (int s = 0; s < Count; ++s) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          behind[s][i] = shuffle_from(sums[s].of_place[i], thread_index() % 32 - lane + (lane + 1) % lanes);
        }
      }
      if constexpr (warps > 1) {
        const int here = warps_here<warps, AtMost>();
        TRTC_SHARED(float, firsts, Rows * warps * Count * N);
        float* of_row = firsts + row_in_cta * warps * Count * N;
        const int warp = thread / 32;
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < Count * N; ++i) of_row[warp * Count * N + i] = sums[i / N].of_place[i % N];
        }
        cta_barrier();
        if (lane == 31) {
#pragma unroll
          for (int i = 0; i < Count * N; ++i)
            behind[i / N][i % N] = of_row[(warp + 1 < here ? warp + 1 : 0) * Count * N + i];
        }
      }
#pragma unroll
      for (int s = 0; s < Count; ++s) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[s].of_place[i] = i < shift ? behind[s][i] : sums[s].of_place[i];
      }
    }
#pragma unroll
    for (int s = 0; s < Count; ++s) found[s] = sums[s].of_thread();
  }

  // Over the places, in an order that is the same from whichever place on columns follow each other.
  TRTC_DEVICE float of_thread() {
#pragma unroll
    for (int distance = N / 2; distance >= 1; distance /= 2) {
#pragma unroll
      for (int i = 0; i < distance; ++i) of_place[i] += of_place[i + distance];
    }
    return of_place[0];
  }
};

}  // namespace trtc
