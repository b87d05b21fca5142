// SPDX-License-Identifier: Apache-2.0
// Backward of softmax for rows that threads hold in registers:
//
//   dx = scale * y * (dy - sum(dy * y))   of y = softmax(scale * x)
//   dx = scale * (dy - exp(y) * sum(dy))  of its logarithm (LOGARITHM)
//
// softmax/row.cuh has the row partition: a thread holds VECTORS_PER_THREAD vectors of y and of dy. A slice of more
// columns is read twice, chunk by chunk (CHUNKED). A kernel may be persistent and have rows PREFETCHED: the next row
// is on its way to shared memory while the threads hold one.
//
// LEAVES_SUMS: each row's sum is stored for launches that follow, which find the gradients of sinks and masks.
#pragma once

#include "softmax/gradient.cuh"
#if UNALIGNED
#include "softmax/unaligned.cuh"
#endif

namespace trtc {

#if PREFETCHED
// A thread's vectors of a row, to its own place in shared memory: it may load them there once it has waited.
template <class T>
TRTC_DEVICE void prefetch(T* shared, const T* from, int left) {
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    if (k * VECTOR_STRIDE < left) {
      copy_async<VEC_SIZE * sizeof(T)>(shared + k * VECTOR_STRIDE, from + k * VECTOR_STRIDE);
    }
  }
}
template <class T>
TRTC_DEVICE void load_prefetched(uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>], const T* shared,
                                 uint32 fill, int left) {
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
    for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) word[k][i] = fill;
    if (k * VECTOR_STRIDE < left) load_vector<VEC_SIZE, Space::shared>(word[k], shared + k * VECTOR_STRIDE);
  }
}
#endif

// What a thread has of a row, or of a chunk of one.
struct Part {
  const Input* y;  // from the thread's first vector on
  const Gradient* dy;
  Output* dx;
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
  part.y += first;
  part.dy += first;
  part.dx += first;
#if UNALIGNED
  const int begin = first_column + first, stop = begin + min(slice_columns - first, static_cast<int>(CHUNK));
  const bool apart = are_rows_apart(params, params.y_outer_stride, params.y_inner_stride) &&
                     are_rows_apart(params, params.dy_outer_stride, params.dy_inner_stride);
  const Neighbours neighbours = neighbours_of(row, params.rows, apart, begin, stop, params.columns);
  part.slots = slots_of_chunk(of_row.slots.shift, thread, slice_columns - first, range_of_row(params, row).from(begin),
                              neighbours);
#else
  part.left -= first;
  part.range = of_row.range.from(first);
#endif
  return part;
}

// A thread's vectors of y and dy; y is what takes no part where there is no column, or it is not used.
TRTC_DEVICE void load_row(uint32 (&y_word)[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>],
                          uint32 (&dy_word)[VECTORS_PER_THREAD][words_of<Gradient, VEC_SIZE>], const Part& part) {
#if UNALIGNED
  const bool dy_aligned = is_aligned(part.dy);
  load_vectors(y_word, absent_word(), part.y, part.slots, true);
  load_vectors(dy_word, 0, part.dy, part.slots, dy_aligned);
  load_edges<true>(y_word, absent_word(), part.y, part.slots, true);
  load_edges<false>(dy_word, 0, part.dy, part.slots, dy_aligned);
  if (part.slots.wrapped > 0) {
    uint32 wrapped_y[words_of<Input, VEC_SIZE>], wrapped_dy[words_of<Gradient, VEC_SIZE>];
    load_wrapped(wrapped_y, part.y, part.slots, true);
    load_wrapped(wrapped_dy, part.dy, part.slots, dy_aligned);
    put_wrapped<Input>(y_word[0], wrapped_y, part.slots);
    put_wrapped<Gradient>(dy_word[0], wrapped_dy, part.slots);
  }
#else
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < part.left && is_in_range(k * VECTOR_STRIDE, part.range);
    load_vector_or<VEC_SIZE>(y_word[k], absent_word(), part.y + k * VECTOR_STRIDE, is_read);
  }
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < part.left && is_in_range(k * VECTOR_STRIDE, part.range);
    load_vector_or<VEC_SIZE>(dy_word[k], 0, part.dy + k * VECTOR_STRIDE, is_read);
  }
#if CAUSAL
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    keep_range<Input>(y_word[k], absent_word(), k * VECTOR_STRIDE, part.range);
  }
#endif
#endif
}

TRTC_DEVICE void softmax_backward(const Params& params) {
  // Reductions of a persistent kernel alternate between two buffers: a warp may still read one row's values while
  // another writes the next row's.
  constexpr int buffers = PERSISTENT ? 2 : 1;
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, 1);
  TRTC_SHARED(float, warp_sums, buffers* reduce_floats);
#if UNALIGNED
  TRTC_SHARED(float, rotated, rotated_floats());
#endif

  const int thread = ROWS_PER_CTA == 1 ? thread_index() : thread_index() % THREADS_PER_ROW;
  const int row_in_cta = ROWS_PER_CTA == 1 ? 0 : thread_index() / THREADS_PER_ROW;
  const int slice = slice_of(params.columns);
  RowExchange exchange = begin_exchange(params);
  const int first_column = exchange.rank * slice;
  const int own = first_column + thread * VEC_SIZE;  // the thread's first column
  const int slice_columns = min(params.columns - first_column, slice);
  const Input* const all_y = static_cast<const Input*>(params.y) + own;
  const Gradient* const all_dy = static_cast<const Gradient*>(params.dy) + own;
  Output* const all_dx = static_cast<Output*>(params.dx) + own;
  const int64 stride = ctas_in_grid() / CTAS_PER_ROW * ROWS_PER_CTA;
  int buffer = 0;

  int64 first_row = cta_index() / CTAS_PER_ROW * ROWS_PER_CTA;
#if PREFETCHED
  TRTC_DYNAMIC_SHARED(char, shared);
  Input* const shared_y = reinterpret_cast<Input*>(shared) + thread * VEC_SIZE;
  Gradient* const shared_dy = reinterpret_cast<Gradient*>(shared + CHUNK * sizeof(Input)) + thread * VEC_SIZE;
  const int left_of_next = slice_columns - thread * VEC_SIZE;
  prefetch<Input>(shared_y, all_y + row_offset(params, first_row, params.y_outer_stride, params.y_inner_stride),
                  left_of_next);
  prefetch<Gradient>(shared_dy, all_dy + row_offset(params, first_row, params.dy_outer_stride, params.dy_inner_stride),
                     left_of_next);
#endif
  do {
    const int64 row = first_row + row_in_cta;
    // If a CTA has several rows, some may be past the last row: their threads reach every barrier, with 0 columns. A
    // CTA of one row always has a real one.
    const bool exists = ROWS_PER_CTA == 1 || row < params.rows;
    const int row_columns = exists ? slice_columns : 0;
    Part of_row = {};
    of_row.y = all_y + row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    of_row.dy = all_dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    of_row.dx = all_dx + row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);
#if UNALIGNED
    const int shift = elements_past_vector(of_row.y);
    of_row.slots.shift = shift;
    of_row.y -= shift;
    of_row.dy -= shift;
    of_row.dx -= shift;
#else
    of_row.left = row_columns - thread * VEC_SIZE;
    of_row.range = range_of_row(params, row).from(own);
#endif

    // ---- The sum over the row
    uint32 y_word[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
    uint32 dy_word[VECTORS_PER_THREAD][words_of<Gradient, VEC_SIZE>];
    float sum_at[VEC_SIZE] = {};
#if UNALIGNED
    uint32 absent[words_of<Input, VEC_SIZE>];
#pragma unroll
    for (int i = 0; i < words_of<Input, VEC_SIZE>; ++i) absent[i] = absent_word();
#endif
#pragma unroll 1
    for (int first = 0; first == 0 || (CHUNKED && first < slice_columns); first += CHUNK) {
      const Part part = part_from(first, of_row, params, row, thread, first_column, row_columns);
#if PREFETCHED
      wait_async();
      load_prefetched<Input>(y_word, shared_y, absent_word(), part.left);
      load_prefetched<Gradient>(dy_word, shared_dy, 0, part.left);
      const int64 next = row + stride;
      if (next < params.rows) {
        prefetch<Input>(shared_y, all_y + row_offset(params, next, params.y_outer_stride, params.y_inner_stride),
                        part.left);
        prefetch<Gradient>(shared_dy, all_dy + row_offset(params, next, params.dy_outer_stride, params.dy_inner_stride),
                           part.left);
      }
#else
      load_row(y_word, dy_word, part);
#endif
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#if UNALIGNED
        uint32 used_word[words_of<Input, VEC_SIZE>];
        copy_words(used_word, y_word[k]);
        if (k == 0 && part.slots.wrapped > 0) {
          keep_elements<Input>(used_word, absent, part.slots.wrapped, VEC_SIZE);
        }
        if (is_used(part, k)) add_gradient_terms<true>(sum_at, used_word, dy_word[k]);
#else
        if (is_used(part, k)) add_gradient_terms<true>(sum_at, y_word[k], dy_word[k]);
#endif
      }
#if UNALIGNED
      if (part.slots.wrapped > 0) {
        // Behind all others, as their columns are.
        uint32 wrapped_word[words_of<Input, VEC_SIZE>];
        copy_words(wrapped_word, y_word[0]);
        keep_elements<Input>(wrapped_word, absent, 0, part.slots.wrapped);
        add_gradient_terms<true>(sum_at, wrapped_word, dy_word[0]);
      }
#endif
    }
#if UNALIGNED
    rotate_places(sum_at, shift, rotated);
#endif
    float sum[1] = {sum_of_places(sum_at)};
    sum[0] = reduce_row<Sum, THREADS_PER_ROW, ROWS_PER_CTA>(sum[0], warp_sums + buffer * reduce_floats);
#if CLUSTER || GRID
    exchange_values(exchange, sum);
    sum[0] = reduce_lanes<Sum, CTAS_PER_ROW>(sum[0]);
#endif
#if LEAVES_SUMS
    if (thread == 0 && exchange.rank == 0 && exists) static_cast<float*>(params.row_sums)[row] = sum[0];
#endif

    // ---- dx
#pragma unroll 1
    for (int first = 0; first == 0 || (CHUNKED && first < slice_columns); first += CHUNK) {
      const Part part = part_from(first, of_row, params, row, thread, first_column, row_columns);
      if (CHUNKED) load_row(y_word, dy_word, part);
#if UNALIGNED
      uint32 dx_word[VECTORS_PER_THREAD][words_of<Output, VEC_SIZE>];
#endif
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        uint32 word[words_of<Output, VEC_SIZE>] = {};
        if (is_used(part, k)) find_gradients(word, y_word[k], dy_word[k], sum[0], params.scale);
#if UNALIGNED
        copy_words(dx_word[k], word);
#else
        store_vector<VEC_SIZE>(part.dx + k * VECTOR_STRIDE, word, k * VECTOR_STRIDE < part.left);
#endif
      }
#if UNALIGNED
      store_vectors(part.dx, dx_word, part.slots);
#endif
    }
    first_row += stride;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && first_row < params.rows);
}

}  // namespace trtc
