// SPDX-License-Identifier: Apache-2.0
// Forward and backward of softmax for longer rows, which are in shared memory while the CTAs that share one work
// on it: loads in flight need no registers, and the loops over it have few instructions. softmax/forward.cu and
// softmax/backward.cu have the formulas, and softmax/row.cuh the row partition.
//
// THREADS_PER_ROW is only the most: a launch may have fewer whole warps, and the partition uses threads_in_cta().
// Vector i has the columns from i * VEC_SIZE on of a CTA's slice. A thread copies its own vectors to shared memory, and
// no other one sees them: so no barrier is needed, but for the sums.
#pragma once

#if BACKWARD
#include "softmax/gradient.cuh"
#else
#include "softmax/totals.cuh"
#endif
#if UNALIGNED
#include "softmax/unaligned.cuh"
#endif

namespace trtc {

// The vectors [first, stop) of a slice hold all columns that take part. A thread has vector `own`, and every
// threads_in_cta()-th after it. UNALIGNED: all of these count slots (softmax/unaligned.cuh).
struct Vectors {
  Range range;  // of columns that take part
  int count;    // of all vectors of the slice
  int first;
  int stop;
  int own;
};

TRTC_DEVICE Vectors vectors_of_slice(int columns, const Range& range, int shift) {
  const int thread = thread_index();
  Vectors found;
#if CAUSAL || UNALIGNED
  found.range = {max(range.begin, 0) + shift, min(range.end, columns) + shift};
  found.first = found.range.begin / VEC_SIZE;
  found.stop = found.range.end > found.range.begin ? (found.range.end + VEC_SIZE - 1) / VEC_SIZE : 0;
#else
  found.range = {0, columns};
  found.first = 0;
  found.stop = columns / VEC_SIZE;
#endif
  found.count = UNALIGNED && columns > 0 ? (columns + shift + VEC_SIZE - 1) / VEC_SIZE : columns / VEC_SIZE;
  found.own = thread;
#if CAUSAL
  // `own` skips whole rounds of the threads before `first`. An approximate reciprocal replaces the division: the added
  // half keeps every quotient 1/32 away from an integer, more than the error up to 2^22 vectors.
  const float rounds =
      (static_cast<float>(found.first / 32) + 0.5f) * approximate_reciprocal(static_cast<float>(threads_in_cta() / 32));
  found.own += static_cast<int>(rounds) * threads_in_cta();
  if (found.own < found.first) found.own += threads_in_cta();
#endif
  return found;
}

// Bytes of shared memory for a slice of an array: what follows it is aligned.
template <class T>
TRTC_DEVICE int staged_bytes(int slice) {
  const int elements = UNALIGNED ? (slice + 2 * VEC_SIZE - 2) / VEC_SIZE * VEC_SIZE : slice;  // at any shift
  return (elements * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
}

template <class T>
TRTC_DEVICE void copy_vector(T* staged, const T* from) {
  constexpr int piece = alignment_of<T, VEC_SIZE>;  // bytes
  constexpr int elements = piece / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < VEC_SIZE; i += elements) {
    copy_async<piece, !CAUSAL>(staged + i, from + i);
  }
}

// A thread's vectors of an array, on their way to shared memory: it may load them there once it has waited. Returns
// whether the last one is this thread's.
#if UNALIGNED
// Vectors outside `readable`, or all where they are not `aligned`, are read by elements, with `fill` beside these. They
// come last: a thread waits for them. Who has the last vector is known where they are aligned.
template <class T>
TRTC_DEVICE bool fetch(T* staged, const T* from, const Vectors& vectors, const Range& readable, bool aligned,
                       uint32 fill) {
  const int threads = threads_in_cta(), last = vectors.stop - 1;
  if (last < vectors.first) return false;
  const int first_whole = (max(readable.begin, 0) + VEC_SIZE - 1) / VEC_SIZE;
  const int stop_whole = aligned ? min(vectors.stop, readable.end / VEC_SIZE) : 0;
  int vector = vectors.own < first_whole ? vectors.own + threads : vectors.own;
  const T* next = from + vector * VEC_SIZE;
#pragma unroll 1
  for (; vector < stop_whole; vector += threads) {
    copy_vector(staged + vector * VEC_SIZE, next);
    next += threads * VEC_SIZE;
  }
  // At most one vector is behind those.
  const bool has_last = (vectors.stop == stop_whole ? vector - threads : vector) == last;
  const bool has_first = vectors.own == vectors.first && vectors.first < first_whole;
  const int until = !aligned || (has_last && vectors.stop > stop_whole) ? last : has_first ? vectors.first : -1;
  const int step = !aligned ? threads : max(last - vectors.first, 1);
#pragma unroll 1
  for (vector = !aligned ? vectors.own : has_first ? vectors.first : last; vector <= until; vector += step) {
    uint32 word[words_of<T, VEC_SIZE>];
#pragma unroll
    for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) word[i] = fill;
    const int slot = vector * VEC_SIZE;
    load_elements_of(word, from + slot, vectors.range.begin - slot, vectors.range.end - slot);
    store_vector<VEC_SIZE, Space::shared>(staged + slot, word);
  }
  return has_last;
}
#else
template <class T>
TRTC_DEVICE bool fetch(T* staged, const T* from, const Vectors& vectors) {
  const int threads = threads_in_cta();
  int vector = vectors.own;
  const T* next = from + vector * VEC_SIZE;
#pragma unroll 1
  for (; vector < vectors.stop; vector += threads) {
    copy_vector(staged + vector * VEC_SIZE, next);
    next += threads * VEC_SIZE;
  }
  return vector - threads == vectors.stop - 1;
}
#endif

#if CAUSAL || (UNALIGNED && BACKWARD)
// Columns of the first and the last vector that do not take part become those of `fill`, by the threads that have
// these.
template <class T>
TRTC_DEVICE void blank(T* staged, uint32 fill, const Vectors& vectors, bool has_last) {
  const int last = vectors.stop - 1;
  if (last < vectors.first) return;
  const bool has_first = vectors.own == vectors.first;
  const int until = has_last ? last : has_first ? vectors.first : -1;
#pragma unroll 1
  for (int vector = has_first ? vectors.first : last; vector <= until; vector += max(last - vectors.first, 1)) {
    uint32 word[words_of<T, VEC_SIZE>];
    load_vector<VEC_SIZE, Space::shared>(word, staged + vector * VEC_SIZE);
    keep_range<T>(word, fill, vector * VEC_SIZE, vectors.range);
    store_vector<VEC_SIZE, Space::shared>(staged + vector * VEC_SIZE, word);
  }
}
#endif

// A vector of a row; `all`: the slots that have a column.
template <class T>
TRTC_DEVICE void store_staged(T* to, const uint32 (&word)[words_of<T, VEC_SIZE>], int vector, const Range& all) {
#if UNALIGNED
  const int slot = vector * VEC_SIZE;
  const bool is_whole = is_inside(slot, all) && is_aligned(to);
  store_vector<VEC_SIZE>(to + slot, word, is_whole);
  if (!is_whole) store_elements_of(to + slot, word, all.begin - slot, all.end - slot);
#else
  store_vector<VEC_SIZE>(to + vector * VEC_SIZE, word);
#endif
}

// Over the threads of this CTA. One warp has a barrier only where others might still read what CTAs have exchanged.
template <class Operation>
TRTC_DEVICE float reduce_staged(float value, float* shared) {
  if (GRID && threads_in_cta() == 32) cta_barrier();
  return reduce_row<Operation, THREADS_PER_ROW, 1>(value, shared, threads_in_cta() / 32);
}

#if !BACKWARD

// Whether scores stay unscaled, and `factor` is applied in the exponential.
enum : bool { SCALES_LATE = NARROW && !MASK_IS_ADDED };
// Terms of a float32 row replace x in shared memory, so that y needs no second exponential. -0 marks an excluded
// element.
enum : bool { TERMS_REPLACE_X = !NARROW && is_same<Input, float> && !MASK_IS_ADDED && !LOGARITHM };
enum : uint32 { EXCLUDED = 0x80000000u };

// A vector's scores, but for `factor`.
TRTC_DEVICE void load_scores(float (&v)[VEC_SIZE], const Params& params, const Input* x, const Mask* mask) {
  uint32 word[words_of<Input, VEC_SIZE>];
  load_vector<VEC_SIZE, Space::shared>(word, x);
  unpack<Input>(v, word);
#if MASK_IS_ADDED
  uint32 mask_word[words_of<Mask, VEC_SIZE>];
  float added[VEC_SIZE];
  load_vector<VEC_SIZE, Space::shared>(mask_word, mask);
  unpack<Mask>(added, mask_word);
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) v[i] = masked_score(v[i], params.scale, added[i]);
#else
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) v[i] = SCALES_LATE ? v[i] : v[i] * scale_magnitude(params);
#endif
}

#if HAS_MASK && !MASK_IS_ADDED
// Elements of x become -infinity where the mask excludes them.
TRTC_DEVICE void apply_mask(uint32 (&x)[words_of<Input, VEC_SIZE>], const uint32 (&mask)[words_of<Mask, VEC_SIZE>]) {
  constexpr int per_word = 4 / static_cast<int>(sizeof(Input));  // elements
  constexpr uint32 first_bytes = per_word == 1 ? 0 : 0x1100u;    // of the mask, as spread_signs() takes them
#pragma unroll
  for (int i = 0; i < words_of<Input, VEC_SIZE>; ++i) {
    const uint32 bytes = mask[i * per_word / 4];
    // The top bit of each byte that is not 0.
    const uint32 tops = ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes;
    const uint32 out = spread_signs(MASK_KEEPS ? ~tops : tops, first_bytes + i * per_word % 4 * 0x1111u);
    x[i] = (x[i] & ~out) | (minus_infinity_word<Input>() & out);
  }
}
#endif

// Elementwise maximum into `word`; NaN loses.
TRTC_DEVICE void keep_larger(uint32 (&word)[words_of<Input, VEC_SIZE>],
                             const uint32 (&other)[words_of<Input, VEC_SIZE>]) {
#pragma unroll
  for (int i = 0; i < words_of<Input, VEC_SIZE>; ++i) {
    if constexpr (sizeof(Input) == 4) {
      word[i] = bits_from_float(larger(float_from_bits(word[i]), float_from_bits(other[i])));
    } else {
      word[i] = larger_halves<Input>(word[i], other[i]);
    }
  }
}

TRTC_DEVICE void softmax_forward(const Params& params) {
  // Reductions of a persistent kernel alternate between two buffers: a warp may still read one row's values while
  // another writes the next row's.
  constexpr int buffers = PERSISTENT ? 2 : 1;
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, 1, 1);
  TRTC_SHARED(float, warp_largest, buffers* reduce_floats);
  TRTC_SHARED(float, warp_sums, buffers*(COUNTS_ONES ? 2 : 1) * reduce_floats);
#if UNALIGNED
  TRTC_SHARED(float, rotated, rotated_floats());
#endif
  TRTC_DYNAMIC_SHARED(char, shared);

  const int thread = thread_index(), threads = threads_in_cta();
  const int slice = slice_of(params.columns);
  RowExchange exchange = begin_exchange(params);
  const int first_column = exchange.rank * slice;
  const int slice_columns = max(min(params.columns - first_column, slice), 0);
  Input* const staged = reinterpret_cast<Input*>(shared);
  Mask* const staged_mask = reinterpret_cast<Mask*>(shared + staged_bytes<Input>(slice));
  const float factor = SCALES_LATE ? scale_magnitude(params) : 1.0f;
  int buffer = 0;

  int64 row_position = cta_index() / CTAS_PER_ROW;
  do {
    int64 row = row_position;
#if HAS_MASK
    row = row_of_masked_turn(params, row_position);
#endif
    const Input* x = static_cast<const Input*>(params.x) + first_column +
                     row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    Output* out = static_cast<Output*>(params.out) + first_column +
                  row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
#if HAS_MASK
    const Mask* mask = static_cast<const Mask*>(params.mask) + mask_offset(params, row) + first_column;
#endif
#if UNALIGNED
    const int shift = elements_past_vector(x);
    x -= shift;
    out -= shift;
#else
    constexpr int shift = 0;
#endif
    const Range all = {shift, shift + slice_columns};
    const Vectors vectors = vectors_of_slice(slice_columns, range_of_row(params, row).from(first_column), shift);
#if UNALIGNED
    // Of x, nothing beside the row is read: that would have to be replaced.
    [[maybe_unused]] const bool has_last = fetch(staged, x, vectors, all, true, minus_infinity_word<Input>());
#if HAS_MASK
    mask -= shift;
    const Neighbours in_mask = neighbours_in_mask(params, row, first_column, first_column + slice_columns);
    fetch(staged_mask, mask, vectors, readable_slots(all, in_mask), is_aligned(mask), 0);
#endif
#else
    [[maybe_unused]] const bool has_last = fetch(staged, x, vectors);
#if HAS_MASK
    fetch(staged_mask, mask, vectors);
#endif
#endif
    wait_async();
#if CAUSAL
    blank(staged, minus_infinity_word<Input>(), vectors, has_last);
#endif

    // ---- x takes the scale's sign
    if (!MASK_IS_ADDED && !(params.scale > 0.0f)) {
      const float sign = scale_sign(params);
#pragma unroll 1
      for (int vector = vectors.own; vector < vectors.stop; vector += threads) {
        uint32 word[words_of<Input, VEC_SIZE>];
        float v[VEC_SIZE];
        load_vector<VEC_SIZE, Space::shared>(word, staged + vector * VEC_SIZE);
        unpack<Input>(v, word);
        // -infinity does not take part whatever the scale.
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) v[i] = v[i] == minus_infinity() ? v[i] : v[i] * sign;
        pack<Input>(word, v);  // exact
        store_vector<VEC_SIZE, Space::shared>(staged + vector * VEC_SIZE, word);
      }
    }

    // ---- The largest score
    float most = minus_infinity();
#if MASK_IS_ADDED
#pragma unroll 1
    for (int vector = vectors.own; vector < vectors.stop; vector += threads) {
      float v[VEC_SIZE];
      load_scores(v, params, staged + vector * VEC_SIZE, staged_mask + vector * VEC_SIZE);
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) most = larger(most, v[i]);
    }
#else
    uint32 largest_word[words_of<Input, VEC_SIZE>];  // by place in a vector
#pragma unroll
    for (int i = 0; i < words_of<Input, VEC_SIZE>; ++i) largest_word[i] = minus_infinity_word<Input>();
#pragma unroll 1
    for (int vector = vectors.own; vector < vectors.stop; vector += threads) {
      uint32 word[words_of<Input, VEC_SIZE>];
      load_vector<VEC_SIZE, Space::shared>(word, staged + vector * VEC_SIZE);
#if HAS_MASK
      uint32 mask_word[words_of<Mask, VEC_SIZE>];
      load_vector<VEC_SIZE, Space::shared>(mask_word, staged_mask + vector * VEC_SIZE);
      apply_mask(word, mask_word);
      store_vector<VEC_SIZE, Space::shared>(staged + vector * VEC_SIZE, word);
#endif
      keep_larger(largest_word, word);
    }
    float largest_at[VEC_SIZE];
    unpack<Input>(largest_at, largest_word);
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) most = larger(most, largest_at[i]);
    if (!SCALES_LATE) most *= scale_magnitude(params);
#endif
    const float largest = reduce_staged<Largest>(most, warp_largest + buffer * reduce_floats);
    const float origin = largest == minus_infinity() ? 0.0f : largest;
    const Exponentials<Input, Output, MASK_IS_ADDED> terms(origin, factor);

    // ---- The sum of terms about it
#if COUNTS_ONES
    const bool has_ones = most - origin == 0.0f;
    float ones = 0.0f;
#endif
    float sum_at[VEC_SIZE] = {};
#pragma unroll 1
    for (int vector = vectors.own; vector < vectors.stop; vector += threads) {
      float v[VEC_SIZE], term[VEC_SIZE];
      load_scores(v, params, staged + vector * VEC_SIZE, staged_mask + vector * VEC_SIZE);
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) term[i] = terms.of(v[i]);
      if constexpr (TERMS_REPLACE_X) {
        uint32 word[words_of<Input, VEC_SIZE>];
        pack<Input>(word, term);
#pragma unroll
        for (int i = 0; i < (CAUSAL || HAS_MASK ? VEC_SIZE : 0); ++i) {
          word[i] = v[i] == minus_infinity() ? EXCLUDED : word[i];
        }
        store_vector<VEC_SIZE, Space::shared>(staged + vector * VEC_SIZE, word);
      }
#if COUNTS_ONES
      if (has_ones) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          ones += v[i] == origin ? 1.0f : 0.0f;
          term[i] = v[i] == origin ? 0.0f : term[i];
        }
      }
#endif
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) sum_at[i] += term[i];
    }
#if UNALIGNED
    rotate_places(sum_at, shift, rotated, threads / 32);
#endif
    float total = sum_of_places(sum_at);
#if COUNTS_ONES
    float sum[2] = {total, ones};
    reduce_row<Sum, THREADS_PER_ROW, 1, !PERSISTENT>(sum, warp_sums + buffer * 2 * reduce_floats, threads / 32);
    total = sum[0] * (1.0f / large_one) + sum[1];
#else
    total = reduce_staged<Sum>(total, warp_sums + buffer * reduce_floats);
    // Exactly 1 where one element takes part alone.
    total = terms.is_fused ? divide(total, terms.peak) : total * (1.0f / large_one);
#endif
    if (total < 0.5f) total = 0.0f;  // nothing takes part
    const bool stores = thread == 0 && exchange.rank == 0;
    RowTotals totals = totals_of_row(params, exchange, row, true, stores, factor, largest, total, false);
#if !LOGARITHM
    if (terms.is_fused) totals.quotient *= approximate_reciprocal(terms.peak) * large_one;
#endif
    const bool is_nan = (CAUSAL || HAS_MASK) && totals.sum != totals.sum;

    // ---- y
#pragma unroll 1
    for (int vector = thread; vector < vectors.count; vector += threads) {
      uint32 word[words_of<Output, VEC_SIZE>];
#pragma unroll
      for (int i = 0; i < words_of<Output, VEC_SIZE>; ++i) word[i] = LOGARITHM ? minus_infinity_word<Output>() : 0;
      if (!CAUSAL || (vector >= vectors.first && vector < vectors.stop)) {
        float v[VEC_SIZE], y[VEC_SIZE];
        if (TERMS_REPLACE_X) {
          uint32 term_word[words_of<Input, VEC_SIZE>];
          load_vector<VEC_SIZE, Space::shared>(term_word, staged + vector * VEC_SIZE);
          unpack<Input>(v, term_word);
        } else {
          load_scores(v, params, staged + vector * VEC_SIZE, staged_mask + vector * VEC_SIZE);
        }
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
#if LOGARITHM
          y[i] = fused_multiply_add(v[i] - totals.origin, factor, totals.log_offset);
#else
          y[i] = quotient_of(totals, TERMS_REPLACE_X ? v[i] : terms.of(v[i]));
#endif
          if (TERMS_REPLACE_X && (CAUSAL || HAS_MASK)) y[i] += 0.0f;  // the mark is -0
        }
#if !LOGARITHM
        if (totals.is_small) {
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) y[i] *= 1.0f / large_one;
        }
#endif
        if (is_nan) {
          // But for what is excluded, and -infinity beside it.
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) {
            const bool is_out = TERMS_REPLACE_X ? bits_from_float(v[i]) == EXCLUDED : v[i] == minus_infinity();
            if (is_out) y[i] = LOGARITHM ? minus_infinity() : 0.0f;
          }
        }
        pack<Output>(word, y);
      }
      store_staged(out, word, vector, all);
    }
    row_position += ctas_in_grid() / CTAS_PER_ROW;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && row_position < params.rows);
}

#else

TRTC_DEVICE void softmax_backward(const Params& params) {
  // Reductions of a persistent kernel alternate between two buffers: a warp may still read one row's values while
  // another writes the next row's.
  constexpr int buffers = PERSISTENT ? 2 : 1;
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, 1, 1);
  TRTC_SHARED(float, warp_sums, buffers* reduce_floats);
#if UNALIGNED
  TRTC_SHARED(float, rotated, rotated_floats());
#endif
  TRTC_DYNAMIC_SHARED(char, shared);

  const int thread = thread_index(), threads = threads_in_cta();
  const int slice = slice_of(params.columns);
  RowExchange exchange = begin_exchange(params);
  const int first_column = exchange.rank * slice;
  const int slice_columns = max(min(params.columns - first_column, slice), 0);
  Input* const staged_y = reinterpret_cast<Input*>(shared);
  Gradient* const staged_dy = reinterpret_cast<Gradient*>(shared + staged_bytes<Input>(slice));
  int buffer = 0;

  int64 row = cta_index() / CTAS_PER_ROW;
  do {
    const Input* y = static_cast<const Input*>(params.y) + first_column +
                     row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    const Gradient* dy = static_cast<const Gradient*>(params.dy) + first_column +
                         row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    Output* dx = static_cast<Output*>(params.dx) + first_column +
                 row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);
#if UNALIGNED
    const int shift = elements_past_vector(y);
    y -= shift;
    dy -= shift;
    dx -= shift;
#else
    constexpr int shift = 0;
#endif
    const Range all = {shift, shift + slice_columns};
    const Vectors vectors = vectors_of_slice(slice_columns, range_of_row(params, row).from(first_column), shift);
#if UNALIGNED
    const int stop_column = first_column + slice_columns;
    const bool apart = are_rows_apart(params, params.y_outer_stride, params.y_inner_stride) &&
                       are_rows_apart(params, params.dy_outer_stride, params.dy_inner_stride);
    const Range readable =
        readable_slots(all, neighbours_of(row, params.rows, apart, first_column, stop_column, params.columns));
    [[maybe_unused]] const bool has_last = fetch(staged_y, y, vectors, readable, true, absent_word());
    fetch(staged_dy, dy, vectors, readable, is_aligned(dy), 0);
#else
    [[maybe_unused]] const bool has_last = fetch(staged_y, y, vectors);
    fetch(staged_dy, dy, vectors);
#endif
    wait_async();
#if CAUSAL || UNALIGNED
    blank(staged_y, absent_word(), vectors, has_last);
#endif

    // ---- The sum over the row
    float sum_at[VEC_SIZE] = {};
#pragma unroll 1
    for (int vector = vectors.own; vector < vectors.stop; vector += threads) {
      uint32 y_word[words_of<Input, VEC_SIZE>];
      uint32 dy_word[words_of<Gradient, VEC_SIZE>];
      load_vector<VEC_SIZE, Space::shared>(y_word, staged_y + vector * VEC_SIZE);
      load_vector<VEC_SIZE, Space::shared>(dy_word, staged_dy + vector * VEC_SIZE);
      add_gradient_terms<false>(sum_at, y_word, dy_word);
    }
#if UNALIGNED
    rotate_places(sum_at, shift, rotated, threads / 32);
#endif
    float sum[1] = {sum_of_places(sum_at)};
    sum[0] = reduce_staged<Sum>(sum[0], warp_sums + buffer * reduce_floats);
#if CLUSTER || GRID
    exchange_values(exchange, sum);
    sum[0] = reduce_lanes<Sum, CTAS_PER_ROW>(sum[0]);
#endif
#if LEAVES_SUMS
    if (thread == 0 && exchange.rank == 0) static_cast<float*>(params.row_sums)[row] = sum[0];
#endif

    // ---- dx
#pragma unroll 1
    for (int vector = thread; vector < vectors.count; vector += threads) {
      uint32 word[words_of<Output, VEC_SIZE>] = {};
      if (!CAUSAL || (vector >= vectors.first && vector < vectors.stop)) {
        uint32 y_word[words_of<Input, VEC_SIZE>];
        uint32 dy_word[words_of<Gradient, VEC_SIZE>];
        load_vector<VEC_SIZE, Space::shared>(y_word, staged_y + vector * VEC_SIZE);
        load_vector<VEC_SIZE, Space::shared>(dy_word, staged_dy + vector * VEC_SIZE);
        find_gradients(word, y_word, dy_word, sum[0], params.scale);
      }
      store_staged(dx, word, vector, all);
    }
    row += ctas_in_grid() / CTAS_PER_ROW;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && row < params.rows);
}

#endif

}  // namespace trtc
