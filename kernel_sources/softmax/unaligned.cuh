// SPDX-License-Identifier: Apache-2.0
// Rows that begin at any element and have any number of columns (UNALIGNED), read and written in aligned vectors.
//
// Slots: where the first column of a CTA's slice is `shift` elements behind an aligned address, column c has slot
// c + shift. Vectors of slots are aligned, and threads share them as row.cuh says of columns. Slots before the first
// column are in the first thread's first vector. Where the row's last columns have no slot left, they wrap into these:
// so threads hold a row of CHUNK columns at any shift.
//
// The order of a sum depends on the columns alone: what wrapped columns add comes last, and rotate_places() moves sums
// from the places of slots to those of columns.
#pragma once

#include "softmax/row.cuh"

namespace trtc {

// Elements from the aligned address before `from` up to it.
template <class T>
TRTC_DEVICE int elements_past_vector(const T* from) {
  return static_cast<int>(reinterpret_cast<uint64>(from) / sizeof(T) % VEC_SIZE);
}
template <class T>
TRTC_DEVICE bool is_aligned(const T* vector) {
  return reinterpret_cast<uint64>(vector) % alignment_of<T, VEC_SIZE> == 0;
}

// Whether all slots of a vector are in a range, whose slots count from the same one on; and whether any is.
TRTC_DEVICE bool is_inside(int slot, const Range& slots) { return slot >= slots.begin && slot + VEC_SIZE <= slots.end; }
TRTC_DEVICE bool meets(int slot, const Range& slots) { return slot + VEC_SIZE > slots.begin && slot < slots.end; }

// Whether there is memory of the same arrays beside the columns of a part of a row, as much as a vector has: such
// vectors may be read whole. What is read beside the part may be written at the same time, by a call in place: it is
// replaced, or counts for nothing.
struct Neighbours {
  bool before;
  bool behind;
};

// Beside the columns [first, stop) of row `number` of `count`; `apart`: rows do not overlap, and have a vector.
TRTC_DEVICE Neighbours neighbours_of(int64 number, int64 count, bool apart, int first, int stop, int columns) {
  return {reads_whole_blocks && (first > 0 || (apart && number > 0)),
          reads_whole_blocks && (stop + VEC_SIZE <= columns || (apart && number + 1 < count))};
}
TRTC_DEVICE bool are_rows_apart(const Params& params, int64 outer_stride, int64 inner_stride) {
  return params.columns >= VEC_SIZE && outer_stride >= params.columns &&
         (params.inner_count == 1 || inner_stride >= params.columns);
}
#if HAS_MASK
TRTC_DEVICE Neighbours neighbours_in_mask(const Params& params, int64 row, int first, int stop) {
  const bool apart = params.columns >= VEC_SIZE && params.mask_query_stride >= params.columns;
  return neighbours_of(query_of(params, row), params.queries, apart, first, stop, params.columns);
}
#endif

// ---- Elements of a vector, from `begin` to before `end` -------------------------------------------------------------

// From global memory; the others stay.
template <class T>
TRTC_DEVICE void load_elements_of(uint32 (&word)[words_of<T, VEC_SIZE>], const T* from, int begin, int end) {
#pragma unroll
  for (int i = 0; i < VEC_SIZE; i += 4) {
    constexpr int per_word = 4 / static_cast<int>(sizeof(T));
    uint32* const of_four = word + i / per_word;
    if constexpr (sizeof(T) == 4) {
      load_4_each<0>(of_four[0], of_four[1], of_four[2], of_four[3], from + i, begin - i, end - i);
    } else if constexpr (sizeof(T) == 2) {
      load_2_each<0>(of_four[0], of_four[1], from + i, begin - i, end - i);
    } else {
      load_1_each<0>(of_four[0], from + i, begin - i, end - i);
    }
  }
}
template <class T>
TRTC_DEVICE void store_elements_of(T* to, const uint32 (&word)[words_of<T, VEC_SIZE>], int begin, int end) {
  static_assert(sizeof(T) > 1, "of 16 or 32 bits");
#pragma unroll
  for (int i = 0; i < VEC_SIZE; i += 4) {
    constexpr int per_word = 4 / static_cast<int>(sizeof(T));
    const uint32* const of_four = word + i / per_word;
    if constexpr (sizeof(T) == 4) {
      store_4_each<0>(to + i, of_four[0], of_four[1], of_four[2], of_four[3], begin - i, end - i);
    } else if constexpr (sizeof(T) == 2) {
      store_2_each<0>(to + i, of_four[0], of_four[1], begin - i, end - i);
    }
  }
}
// The first or the last `count` elements of an aligned vector, fewer than all: by halves, so that each of at most
// log2(VEC_SIZE) stores is aligned.
template <class T>
TRTC_DEVICE void store_end_of(T* to, const uint32 (&word)[words_of<T, VEC_SIZE>], int count, bool is_last) {
  uint32 rest[words_of<T, VEC_SIZE>];
  copy_words(rest, word);
#pragma unroll
  for (int half = VEC_SIZE / 2; half >= 1; half /= 2) {
    const int bytes = half * static_cast<int>(sizeof(T)), words = bytes / 4;
    const bool has_half = (count & half) != 0, goes_on_upper = is_last != has_half;
    T* const at = to + (is_last ? half : 0);
    if (bytes == 8) {
      store_8<Space::global>(at, is_last ? rest[words] : rest[0], is_last ? rest[words + 1] : rest[words / 2],
                             has_half);
    } else if (bytes == 4) {
      store_4<Space::global>(at, is_last ? rest[words] : rest[0], has_half);
    } else {
      store_2<Space::global>(at, is_last ? rest[0] >> 16 : rest[0], has_half);
    }
#pragma unroll
    for (int i = 0; i < words; ++i) rest[i] = goes_on_upper ? rest[words + i] : rest[i];
    to += goes_on_upper ? half : 0;
  }
}
// The others become those of `filling`.
template <class T>
TRTC_DEVICE void keep_elements(uint32 (&word)[words_of<T, VEC_SIZE>], const uint32 (&filling)[words_of<T, VEC_SIZE>],
                               int begin, int end) {
  constexpr int bits = 8 * static_cast<int>(sizeof(T)), most = VEC_SIZE;
#pragma unroll
  for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) {
    if constexpr (sizeof(T) == 4) {
      word[i] = i >= begin && i < end ? word[i] : filling[i];
    } else {
      word[i] = keep_bits(word[i], min(begin, most) * bits - 32 * i, min(end, most) * bits - 32 * i, filling[i]);
    }
  }
}

// ---- Vectors in registers -------------------------------------------------------------------------------------------

// Slots that vectors may be read from: of `all` that have a column, and beside them.
TRTC_DEVICE Range readable_slots(const Range& all, const Neighbours& neighbours) {
  return {all.begin - (neighbours.before ? VEC_SIZE : 0), all.end + (neighbours.behind ? VEC_SIZE : 0)};
}

// What a thread has of a chunk of a row; all slots count from the thread's first one on.
struct Slots {
  int shift;
  int wrapped;     // places of the thread's first vector that have wrapped columns: they are before this one
  Range all;       // have a column
  Range used;      // have one that takes part
  Range readable;  // vectors inside these may be read whole
};

// Of the columns [first, first + count) of a slice, where `range` is relative to the first of these.
TRTC_DEVICE Slots slots_of_chunk(int shift, int thread, int count, const Range& range, const Neighbours& neighbours) {
  Slots slots;
  slots.shift = shift;
  slots.all = count > 0 ? Range{shift, shift + min(count, static_cast<int>(CHUNK))} : Range{0, 0};
  slots.used = range.from(-shift).within(slots.all);
  slots.wrapped = thread == 0 && slots.used.end > CHUNK ? shift : 0;
  slots.readable = readable_slots(slots.all, neighbours).from(thread * VEC_SIZE);
  slots.all = slots.all.from(thread * VEC_SIZE);
  slots.used = slots.used.from(thread * VEC_SIZE);
  return slots;
}

// Vector k has the slots from k * VECTOR_STRIDE on. Arrays in registers have no index that is known only at run time.
template <int Words>
TRTC_DEVICE void get_vector(uint32 (&one)[Words], const uint32 (&word)[VECTORS_PER_THREAD][Words], int k) {
#pragma unroll
  for (int i = 0; i < Words; ++i) {
    one[i] = word[0][i];
#pragma unroll
    for (int other = 1; other < VECTORS_PER_THREAD; ++other) one[i] = k == other ? word[other][i] : one[i];
  }
}
template <int Words>
TRTC_DEVICE void put_vector(uint32 (&word)[VECTORS_PER_THREAD][Words], const uint32 (&one)[Words], int k) {
#pragma unroll
  for (int i = 0; i < Words; ++i) {
#pragma unroll
    for (int other = 0; other < VECTORS_PER_THREAD; ++other) word[other][i] = k == other ? one[i] : word[other][i];
  }
}

// The vectors of a thread that are partly in a range of slots, in order: at most two, where the range begins and where
// it ends; or with `all`, every vector. Wrapped columns are in number VECTORS_PER_THREAD. Negative: there is none left.
struct Edges {
  bool all;
  int begin;
  int end;

  TRTC_DEVICE int first() const { return all ? 0 : begin >= 0 ? begin : end; }
  TRTC_DEVICE int behind(int k) const {
    if (all) return k < VECTORS_PER_THREAD ? k + 1 : -1;
    return k == begin && end > begin ? end : -1;
  }
};
TRTC_DEVICE int edge_at(int slot) {
  return slot > 0 && slot % VECTOR_STRIDE < VEC_SIZE && slot % VEC_SIZE != 0 ? slot / VECTOR_STRIDE : -1;
}
TRTC_DEVICE Edges edges_of(const Range& slots, bool all) { return {all, edge_at(slots.begin), edge_at(slots.end)}; }

// Sends for the vectors of an array that are read whole; `fill` is what others have. `aligned`: its vectors of slots
// are.
template <class T>
TRTC_DEVICE void load_vectors(uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>], uint32 fill, const T* from,
                              const Slots& slots, bool aligned) {
  const Range readable = aligned ? slots.readable : Range{0, 0};
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = meets(k * VECTOR_STRIDE, slots.used) && is_inside(k * VECTOR_STRIDE, readable);
    load_vector_or<VEC_SIZE>(word[k], fill, from + k * VECTOR_STRIDE, is_read);
  }
}

// Reads what load_vectors() left, by elements, but for wrapped columns. `Fills`: slots that are not used have `fill`
// then, where anything may be else. Few threads have an edge: so the loop is not unrolled.
template <bool Fills, class T>
TRTC_DEVICE void load_edges(uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>], uint32 fill, const T* from,
                            const Slots& slots, bool aligned) {
  const Edges edges = edges_of(slots.used, !aligned);
#pragma unroll 1
  for (int k = edges.first(); k >= 0 && k < VECTORS_PER_THREAD; k = edges.behind(k)) {
    const int slot = k * VECTOR_STRIDE, begin = slots.used.begin - slot, end = slots.used.end - slot;
    const bool is_read = aligned && is_inside(slot, slots.readable);
    if (!Fills && is_read) continue;
    uint32 one[words_of<T, VEC_SIZE>], filling[words_of<T, VEC_SIZE>];
    get_vector(one, word, k);
    if (!is_read) load_elements_of(one, from + slot, begin, end);
#pragma unroll
    for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) filling[i] = fill;
    if (Fills) keep_elements<T>(one, filling, begin, end);
    put_vector(word, one, k);
  }
}

// The vector that has the wrapped columns, and puts these in their places of a thread's first one.
template <class T>
TRTC_DEVICE void load_wrapped(uint32 (&wrapped)[words_of<T, VEC_SIZE>], const T* from, const Slots& slots,
                              bool aligned) {
  if (aligned && is_inside(CHUNK, slots.readable)) {
    load_vector<VEC_SIZE>(wrapped, from + CHUNK);
  } else {
#pragma unroll
    for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) wrapped[i] = 0;
    load_elements_of(wrapped, from + CHUNK, slots.used.begin - CHUNK, slots.used.end - CHUNK);
  }
}
template <class T>
TRTC_DEVICE void put_wrapped(uint32 (&first)[words_of<T, VEC_SIZE>], const uint32 (&wrapped)[words_of<T, VEC_SIZE>],
                             const Slots& slots) {
  uint32 others[words_of<T, VEC_SIZE>];
  copy_words(others, first);
  copy_words(first, wrapped);
  keep_elements<T>(first, others, slots.used.begin - CHUNK, slots.used.end - CHUNK);
}

// Stores all columns.
template <class T>
TRTC_DEVICE void store_vectors(T* to, const uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>],
                               const Slots& slots) {
  const bool is_whole = is_aligned(to);
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    store_vector<VEC_SIZE>(to + k * VECTOR_STRIDE, word[k], is_whole && is_inside(k * VECTOR_STRIDE, slots.all));
  }
  const Edges edges = edges_of(slots.all, !is_whole);
#pragma unroll 1
  for (int k = edges.first(); k >= 0; k = edges.behind(k)) {
    const int slot = k * VECTOR_STRIDE;
    uint32 one[words_of<T, VEC_SIZE>];
    get_vector(one, word, k);
    const int begin = slots.all.begin - slot, end = slots.all.end - slot;
    // Of rows of few vectors, this is much of what is stored.
    if (THREADS_PER_ROW < 8 && is_whole && (begin <= 0 || end >= VEC_SIZE)) {
      store_end_of(to + slot, one, begin <= 0 ? end : VEC_SIZE - begin, begin > 0);
    } else {
      store_elements_of(to + slot, one, begin, end);
    }
  }
}

// ---- The order of sums ----------------------------------------------------------------------------------------------

// The sums of the first `count` places become others.
TRTC_DEVICE void replace_places(float (&sum_at)[VEC_SIZE], const float (&other_at)[VEC_SIZE], int count) {
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) sum_at[i] = i < count ? other_at[i] : sum_at[i];
}

// The floats of shared memory that rotate_places() needs: one, for the sake of C++, where a row is shared within a
// warp.
constexpr TRTC_DEVICE int rotated_floats() {
  return THREADS_PER_ROW <= 32 ? 1 : ROWS_PER_CTA * warps_of_row(THREADS_PER_ROW) * VEC_SIZE;
}

// Of sums by place in a thread's vectors of slots, makes those of its vectors of columns: the first `shift` places
// become the next thread's, and the last thread's are the first's. Place i has the columns' place i - shift then,
// modulo VEC_SIZE, which makes no difference to sum_of_places(). Called by all threads of a CTA. `warps_here`: a launch
// may have fewer warps for the CTA's one row.
TRTC_DEVICE void rotate_places(float (&sum_at)[VEC_SIZE], int shift, float* shared,
                               int warps_here = warps_of_row(THREADS_PER_ROW)) {
  constexpr int warps = warps_of_row(THREADS_PER_ROW);
  constexpr int lanes = THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32;
  const int lane = thread_index() % lanes;
  float of_next[VEC_SIZE];
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) {
    of_next[i] = shuffle_from(sum_at[i], thread_index() % 32 - lane + (lane + 1) % lanes);
  }
  if (warps > 1 && warps_here > 1) {
    const int thread = ROWS_PER_CTA == 1 ? thread_index() : thread_index() % THREADS_PER_ROW;
    float* const of_row = shared + (ROWS_PER_CTA == 1 ? 0 : thread_index() / THREADS_PER_ROW) * warps * VEC_SIZE;
    const int warp = thread / 32;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) of_row[warp * VEC_SIZE + i] = sum_at[i];
    }
    cta_barrier();
    if (lane == 31) {
      const float* const of_warp = of_row + (warp + 1 < warps_here ? warp + 1 : 0) * VEC_SIZE;
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) of_next[i] = of_warp[i];
    }
  }
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) sum_at[i] = i < shift ? of_next[i] : sum_at[i];
}

}  // namespace trtc
