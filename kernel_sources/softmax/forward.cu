// Forward of softmax for whole rows that threads hold in registers:
//
//   y = exp(v - m) / (sum(exp(v - m)) [+ exp(sink - m)]),   v = scale * x [+ mask],   m = max(v [, sink])
//
// or its logarithm (LOGARITHM), with v = -infinity where an element does not take part. softmax/row.cuh has the row
// partition: a thread holds VECTORS_PER_THREAD vectors. A slice of more columns is read twice, chunk by chunk
// (CHUNKED).
#pragma once

#include "softmax/totals.cuh"

namespace trtc {

enum : int {
  VECTOR_STRIDE = THREADS_PER_ROW * VEC_SIZE,  // columns from a thread's vector to its next
  CHUNK = VECTORS_PER_THREAD * VECTOR_STRIDE,
};

// Whether scores stay unscaled, and `factor` is applied in the exponential.
enum : bool { SCALES_LATE = NARROW && !MASK_IS_ADDED };

#if HAS_MASK && !MASK_IS_ADDED
TRTC_DEVICE bool is_masked(uint32 word, int i) { return ((word >> i % 4 * 8 & 0xffu) != 0) != MASK_KEEPS; }
#endif

// The scores of a thread's vectors; -infinity where there is no column, or it does not take part. `x`, `mask`, `range`:
// from the thread's first column on, behind which `left` are the slice's.
TRTC_DEVICE void load_scores(float (&v)[VECTORS_PER_THREAD][VEC_SIZE], const Params& params, const Input* x,
                             const Mask* mask, int left, const Range& range) {
  uint32 x_word[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
  [[maybe_unused]] uint32 mask_word[VECTORS_PER_THREAD][words_of<Mask, VEC_SIZE>];
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < left && is_in_range(k * VECTOR_STRIDE, range);
    load_vector_or<VEC_SIZE>(x_word[k], minus_infinity_word<Input>(), x + k * VECTOR_STRIDE, is_read);
  }
#if HAS_MASK
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < left && is_in_range(k * VECTOR_STRIDE, range);
    load_vector_or<VEC_SIZE>(mask_word[k], 0, mask + k * VECTOR_STRIDE, is_read);
  }
#endif
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#if CAUSAL
    keep_range<Input>(x_word[k], minus_infinity_word<Input>(), k * VECTOR_STRIDE, range);
#endif
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
TRTC_DEVICE void store_nan(Output* out, const Input* x, const Mask* mask, int left, const Range& range, float nan) {
#pragma unroll 1
  for (int slot = 0; slot < VECTORS_PER_THREAD * VEC_SIZE; ++slot) {
    const int column = slot / VEC_SIZE * VECTOR_STRIDE + slot % VEC_SIZE;
    if (column >= left) break;
    bool is_out = !range.has(column);
    if (!is_out) {
      uint32 word[1];
      float element[1];
      load_vector<1>(word, x + column);
      unpack<Input>(element, word);
      is_out = element[0] == minus_infinity();
#if HAS_MASK
      load_vector<1>(word, mask + column);
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
    store_vector<1>(out + column, word);
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
    const int left_of_row = (exists ? slice_columns : 0) - thread * VEC_SIZE;
    const Range range_of_thread = range_of_row(params, row).from(own);
    const Input* const x = static_cast<const Input*>(params.x) + own +
                           row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    Output* const out = static_cast<Output*>(params.out) + own +
                        row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    const Mask* mask = nullptr;
#if HAS_MASK
    mask = static_cast<const Mask*>(params.mask) + own + mask_offset(params, row);
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
      const int left = left_of_row - first;
      const Range range = range_of_thread.from(first);
      load_scores(v, params, x + first, mask + first, left, range);
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
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (CAUSAL && !is_in_range(k * VECTOR_STRIDE, range)) continue;
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
      }
    }
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
      const int left = left_of_row - first;
      const Range range = range_of_thread.from(first);
#if CAUSAL || HAS_MASK
      if (totals.sum != totals.sum) {
        store_nan(out + first, x + first, mask + first, left, range, totals.sum);
        continue;
      }
#endif
#if CHUNKED
      load_scores(v, params, x + first, mask + first, left, range);
#elif !LOGARITHM && (CLUSTER || GRID || HAS_SINK)
      if (totals.is_small) {
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
          for (int i = 0; i < VEC_SIZE; ++i) v[k][i] *= 1.0f / large_one;
        }
      }
#endif
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        uint32 word[words_of<Output, VEC_SIZE>];
#pragma unroll
        for (int i = 0; i < words_of<Output, VEC_SIZE>; ++i) word[i] = LOGARITHM ? minus_infinity_word<Output>() : 0;
        if (!CAUSAL || is_in_range(k * VECTOR_STRIDE, range)) {
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
        store_vector<VEC_SIZE>(out + first + k * VECTOR_STRIDE, word, k * VECTOR_STRIDE < left);
      }
    }
    first_row += ctas_in_grid() / CTAS_PER_ROW * ROWS_PER_CTA;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && first_row < params.rows);
}

}  // namespace trtc
