// SPDX-License-Identifier: Apache-2.0
// Forward of softmax for rows that threads hold in registers:
//
//   y = exp(v - m) / (sum(exp(v - m)) [+ exp(sink - m)]),   v = scale * x [+ mask],   m = max(v [, sink])
//
// or its logarithm (LOGARITHM), with v = -infinity where an element does not take part. softmax/row.cuh has the row
// partition: a thread holds VECTORS_PER_THREAD vectors. A slice of more columns is read twice, chunk by chunk
// (CHUNKED).
#pragma once

#include "softmax/totals.cuh"
#if UNALIGNED
#include "softmax/unaligned.cuh"
#endif

namespace trtc {

// Whether scores stay unscaled, and `factor` is applied in the exponential.
enum : bool { SCALES_LATE = NARROW && !MASK_IS_ADDED };

#if HAS_MASK && !MASK_IS_ADDED
TRTC_DEVICE bool is_masked(uint32 word, int i) { return ((word >> i % 4 * 8 & 0xffu) != 0) != MASK_KEEPS; }
#endif

// What a thread has of a row, or of a chunk of one.
struct Part {
  const Input* x;  // from the thread's first vector on
  const Mask* mask;
  Output* out;
#if UNALIGNED
  Slots slots;
#else
  int left;     // columns of the slice from there on
  Range range;  // of those that take part
#endif
};

#if UNALIGNED
TRTC_DEVICE bool is_used(const Part& part, int k) {
  return meets(k * VECTOR_STRIDE, part.slots.used) || (k == 0 && part.slots.wrapped > 0);
}
#else
TRTC_DEVICE bool is_used(const Part& part, int k) { return is_in_range(k * VECTOR_STRIDE, part.range); }
#endif

// The part of a slice from its column `first` on. `of_row`: from its first one on.
TRTC_DEVICE Part part_from(int first, const Part& of_row, const Params& params, int64 row, int thread, int first_column,
                           int slice_columns) {
  Part part = of_row;
  part.x += first;
  part.out += first;
#if HAS_MASK
  part.mask += first;
#endif
#if UNALIGNED
  const int begin = first_column + first, stop = begin + min(slice_columns - first, static_cast<int>(CHUNK));
  const bool apart = are_rows_apart(params, params.x_outer_stride, params.x_inner_stride);
  Neighbours neighbours = neighbours_of(row, params.rows, apart, begin, stop, params.columns);
#if HAS_MASK
  const Neighbours in_mask = neighbours_in_mask(params, row, begin, stop);
  neighbours = {neighbours.before && in_mask.before, neighbours.behind && in_mask.behind};
#endif
  part.slots = slots_of_chunk(of_row.slots.shift, thread, slice_columns - first, range_of_row(params, row).from(begin),
                              neighbours);
#else
  part.left -= first;
  part.range = of_row.range.from(first);
#endif
  return part;
}

// The scores of a thread's vectors; -infinity where there is no column, or it does not take part.
TRTC_DEVICE void load_scores(float (&v)[VECTORS_PER_THREAD][VEC_SIZE], const Params& params, const Part& part) {
  uint32 x_word[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
  [[maybe_unused]] uint32 mask_word[VECTORS_PER_THREAD][words_of<Mask, VEC_SIZE>];
  const uint32 excluded = minus_infinity_word<Input>();
#if UNALIGNED
  [[maybe_unused]] const bool mask_aligned = is_aligned(part.mask);
  load_vectors(x_word, excluded, part.x, part.slots, true);
#if HAS_MASK
  load_vectors(mask_word, 0, part.mask, part.slots, mask_aligned);
#endif
  load_edges<true>(x_word, excluded, part.x, part.slots, true);
#if HAS_MASK
  load_edges<false>(mask_word, 0, part.mask, part.slots, mask_aligned);
#endif
  if (part.slots.wrapped > 0) {
    uint32 wrapped_x[words_of<Input, VEC_SIZE>];
    load_wrapped(wrapped_x, part.x, part.slots, true);
#if HAS_MASK
    uint32 wrapped_mask[words_of<Mask, VEC_SIZE>];
    load_wrapped(wrapped_mask, part.mask, part.slots, mask_aligned);
    put_wrapped<Mask>(mask_word[0], wrapped_mask, part.slots);
#endif
    put_wrapped<Input>(x_word[0], wrapped_x, part.slots);
  }
#else
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < part.left && is_in_range(k * VECTOR_STRIDE, part.range);
    load_vector_or<VEC_SIZE>(x_word[k], excluded, part.x + k * VECTOR_STRIDE, is_read);
  }
#if HAS_MASK
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < part.left && is_in_range(k * VECTOR_STRIDE, part.range);
    load_vector_or<VEC_SIZE>(mask_word[k], 0, part.mask + k * VECTOR_STRIDE, is_read);
  }
#endif
#if CAUSAL
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    keep_range<Input>(x_word[k], excluded, k * VECTOR_STRIDE, part.range);
  }
#endif
#endif
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    unpack<Input>(v[k], x_word[k]);
#if MASK_IS_ADDED
    float added[VEC_SIZE];
    unpack<Mask>(added, mask_word[k]);
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) v[k][i] = masked_score(v[k][i], params.scale, added[i]);
#elif HAS_MASK
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) v[k][i] = is_masked(mask_word[k][i / 4], i) ? minus_infinity() : v[k][i];
#endif
  }
  if (MASK_IS_ADDED || (SCALES_LATE && params.scale > 0.0f)) return;
  // -infinity does not take part whatever the scale's sign.
  const float by = SCALES_LATE ? scale_sign(params) : params.scale;
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) v[k][i] = v[k][i] == minus_infinity() ? v[k][i] : v[k][i] * by;
  }
}

#if CAUSAL || HAS_MASK
// Stores a row whose sum is NaN: NaN, but 0 (or -infinity of a logarithm) for elements that are excluded or -infinity.
// A loop that is not unrolled, since it is rare.
TRTC_DEVICE void store_nan(const Part& part, float nan) {
#pragma unroll 1
  for (int place = 0; place < VECTORS_PER_THREAD * VEC_SIZE; ++place) {
    int column = place / VEC_SIZE * VECTOR_STRIDE + place % VEC_SIZE;
#if UNALIGNED
    if (!part.slots.all.has(column)) column += CHUNK;  // it may be wrapped
    if (!part.slots.all.has(column)) continue;
    bool is_out = !part.slots.used.has(column);
#else
    if (column >= part.left) break;
    bool is_out = !part.range.has(column);
#endif
    if (!is_out) {
      uint32 word[1];
      float element[1];
      load_vector<1>(word, part.x + column);
      unpack<Input>(element, word);
      is_out = element[0] == minus_infinity();
#if HAS_MASK
      load_vector<1>(word, part.mask + column);
#if MASK_IS_ADDED
      unpack<Mask>(element, word);
      is_out = is_out || element[0] == minus_infinity();
#else
      is_out = is_out || is_masked(word[0], 0);
#endif
#endif
    }
    uint32 word[1];
    const float y[1] = {!is_out ? nan : LOGARITHM ? minus_infinity() : 0.0f};
    pack<Output>(word, y);
    store_vector<1>(part.out + column, word);
  }
}
#endif

TRTC_DEVICE void softmax_forward(const Params& params) {
  // Reductions of several rows or chunks alternate between two buffers: a warp may still read one row's or chunk's
  // values while another writes the next one's.
  constexpr int buffers = PERSISTENT || CHUNKED ? 2 : 1;
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, 1);
  TRTC_SHARED(float, warp_largest, buffers* reduce_floats);
  TRTC_SHARED(float, warp_sums, buffers*(COUNTS_ONES ? 2 : 1) * reduce_floats);
#if UNALIGNED
  TRTC_SHARED(float, rotated, (COUNTS_ONES && CHUNKED ? 2 : 1) * rotated_floats());
#endif

  const int thread = ROWS_PER_CTA == 1 ? thread_index() : thread_index() % THREADS_PER_ROW;
  const int row_in_cta = ROWS_PER_CTA == 1 ? 0 : thread_index() / THREADS_PER_ROW;
  const int slice = slice_of(params.columns);
  RowExchange exchange = begin_exchange(params);
  const int first_column = exchange.rank * slice;
  const int own = first_column + thread * VEC_SIZE;  // the thread's first column
  const int slice_columns = min(params.columns - first_column, slice);
  const float factor = SCALES_LATE ? scale_magnitude(params) : 1.0f;
  int buffer = 0;

  int64 first_row = cta_index() / CTAS_PER_ROW * ROWS_PER_CTA;
  do {
    int64 row = first_row + row_in_cta;
#if HAS_MASK
    if (ROWS_PER_CTA == 1) row = row_of_masked_turn(params, row);
#endif
    // If a CTA has several rows, some may be past the last row: their threads reach every barrier, with 0 columns. A
    // CTA of one row always has a real one.
    const bool exists = ROWS_PER_CTA == 1 || row < params.rows;
    const int row_columns = exists ? slice_columns : 0;
    Part of_row = {};
    of_row.x = static_cast<const Input*>(params.x) + own +
               row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    of_row.out = static_cast<Output*>(params.out) + own +
                 row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
#if HAS_MASK
    of_row.mask = static_cast<const Mask*>(params.mask) + own + mask_offset(params, row);
#endif
#if UNALIGNED
    const int shift = elements_past_vector(of_row.x);
    of_row.slots.shift = shift;
    of_row.x -= shift;
    of_row.out -= shift;
#if HAS_MASK
    of_row.mask -= shift;
#endif
#else
    of_row.left = row_columns - thread * VEC_SIZE;
    of_row.range = range_of_row(params, row).from(own);
#endif

    // ---- The largest score, and the sum of terms about it
    float v[VECTORS_PER_THREAD][VEC_SIZE];  // scores, and in their place the terms
    float largest = minus_infinity();
    float sum_at[VEC_SIZE] = {};
#if COUNTS_ONES
    float ones_at[VEC_SIZE] = {};
#endif
#pragma unroll 1
    for (int first = 0; first == 0 || (CHUNKED && first < slice_columns); first += CHUNK) {
      const Part part = part_from(first, of_row, params, row, thread, first_column, row_columns);
      load_scores(v, params, part);
      float chunk_largest = v[0][0];
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) chunk_largest = larger(chunk_largest, v[k][i]);
      }
      chunk_largest =
          reduce_row<Largest, THREADS_PER_ROW, ROWS_PER_CTA>(chunk_largest, warp_largest + buffer * reduce_floats);
#if CHUNKED
      const float before = largest;
      largest = larger(before, chunk_largest);
      if (before != minus_infinity()) {
        const float less = exponential((before - largest) * factor);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) sum_at[i] *= less;
#if COUNTS_ONES
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) ones_at[i] *= less;
#endif
      }
      buffer = (buffer + 1) % buffers;
#else
      largest = chunk_largest;
#endif
      const float origin = largest == minus_infinity() ? 0.0f : largest;
#if UNALIGNED
      // What wrapped columns add comes behind all others.
      float before_at[VEC_SIZE];
      uint32 wrapped_ones = 0;
#pragma unroll
      for (int i = 0; i < VEC_SIZE; ++i) before_at[i] = sum_at[i];
      if (COUNTS_ONES && part.slots.wrapped > 0) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) wrapped_ones |= static_cast<uint32>(v[0][i] - origin == 0.0f) << i;
      }
#endif
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (CAUSAL && !is_used(part, k)) continue;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          const float below = v[k][i] - origin;
          const float term = large_exponential_for<Output>(below, factor);
#if COUNTS_ONES
          sum_at[i] += below == 0.0f ? 0.0f : term;
          if (below == 0.0f) ones_at[i] += 1.0f;
#else
          sum_at[i] += term;
#endif
          if (!LOGARITHM) v[k][i] = term;
        }
#if UNALIGNED
        if (k == 0 && part.slots.wrapped > 0) replace_places(sum_at, before_at, part.slots.wrapped);
#endif
      }
#if UNALIGNED
      if (part.slots.wrapped > 0) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
          float term = v[0][i];
          if (LOGARITHM) term = large_exponential_for<Output>(term - origin, factor);
          sum_at[i] += i < part.slots.wrapped && (wrapped_ones >> i & 1) == 0 ? term : 0.0f;
        }
      }
#endif
    }
#if UNALIGNED
    rotate_places(sum_at, shift, rotated);
#if COUNTS_ONES && CHUNKED
    rotate_places(ones_at, shift, rotated + rotated_floats());
#endif
#endif
#if COUNTS_ONES
    float sum[2] = {sum_of_places(sum_at), sum_of_places(ones_at)};
    reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA, buffers == 1>(sum, warp_sums + buffer * 2 * reduce_floats);
    float total = sum[0] * (1.0f / large_one) + sum[1];
#else
    float total = sum_of_places(sum_at);
    total =
        reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA>(total, warp_sums + buffer * reduce_floats) * (1.0f / large_one);
#endif
    if (total < 0.5f) total = 0.0f;  // nothing takes part

    const bool stores = thread == 0 && exchange.rank == 0 && exists;
    const RowTotals totals = totals_of_row(params, exchange, row, exists, stores, factor, largest, total, CHUNKED);

    // ---- y
#pragma unroll 1
    for (int first = 0; first == 0 || (CHUNKED && first < slice_columns); first += CHUNK) {
      const Part part = part_from(first, of_row, params, row, thread, first_column, row_columns);
#if CAUSAL || HAS_MASK
      if (totals.sum != totals.sum) {
        store_nan(part, totals.sum);
        continue;
      }
#endif
#if CHUNKED
      load_scores(v, params, part);
#elif !LOGARITHM && (CLUSTER || GRID || HAS_SINK)
      if (totals.is_small) {
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) v[k][i] *= 1.0f / large_one;
        }
      }
#endif
#if UNALIGNED
      uint32 y_word[VECTORS_PER_THREAD][words_of<Output, VEC_SIZE>];
#endif
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        uint32 word[words_of<Output, VEC_SIZE>];
#pragma unroll
        for (int i = 0; i < words_of<Output, VEC_SIZE>; ++i) word[i] = LOGARITHM ? minus_infinity_word<Output>() : 0;
        if (!CAUSAL || is_used(part, k)) {
          float y[VEC_SIZE];
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) {
#if LOGARITHM
            y[i] = fused_multiply_add(v[k][i] - totals.origin, factor, totals.log_offset);
#else
            float term = v[k][i];
#if CHUNKED
            term = large_exponential_for<Output>(term - totals.origin, factor);
            if (totals.is_small) term *= 1.0f / large_one;
#endif
            y[i] = quotient_of(totals, term);
#endif
          }
          pack<Output>(word, y);
        }
#if UNALIGNED
        copy_words(y_word[k], word);
#else
        store_vector<VEC_SIZE>(part.out + k * VECTOR_STRIDE, word, k * VECTOR_STRIDE < part.left);
#endif
      }
#if UNALIGNED
      store_vectors(part.out, y_word, part.slots);
#endif
    }
    first_row += ctas_in_grid() / CTAS_PER_ROW * ROWS_PER_CTA;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && first_row < params.rows);
}

}  // namespace trtc
