// Backward of softmax for whole rows that threads hold in registers:
//
//   dx = scale * y * (dy - sum(dy * y))   of y = softmax(scale * x)
//   dx = scale * (dy - exp(y) * sum(dy))  of its logarithm (LOGARITHM)
//
// softmax/row.cuh has the row partition: a thread holds VECTORS_PER_THREAD vectors of y and of dy. A slice of more
// columns is read twice, chunk by chunk (CHUNKED). Where CTAs take rows in turn and have them PREFETCHED, the next row
// is on its way to shared memory while the threads hold one.
//
// LEAVES_SUMS: each row's sum is stored for launches that follow, which find the gradients of sinks and masks.
#pragma once

#include "softmax/gradient.cuh"

namespace trtc {

enum : int {
  VECTOR_STRIDE = THREADS_PER_ROW * VEC_SIZE,  // columns from a thread's vector to its next
  CHUNK = VECTORS_PER_THREAD * VECTOR_STRIDE,
};

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

// A thread's vectors of y and dy; y is what takes no part where there is no column, or it is not in `range`. All of
// these are from the thread's first column on, behind which `left` are the slice's.
TRTC_DEVICE void load_row(uint32 (&y_word)[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>],
                          uint32 (&dy_word)[VECTORS_PER_THREAD][words_of<Gradient, VEC_SIZE>], const Input* y,
                          const Gradient* dy, int left, const Range& range) {
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < left && is_in_range(k * VECTOR_STRIDE, range);
    load_vector_or<VEC_SIZE>(y_word[k], absent_word(), y + k * VECTOR_STRIDE, is_read);
  }
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const bool is_read = k * VECTOR_STRIDE < left && is_in_range(k * VECTOR_STRIDE, range);
    load_vector_or<VEC_SIZE>(dy_word[k], 0, dy + k * VECTOR_STRIDE, is_read);
  }
#if CAUSAL
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) keep_range<Input>(y_word[k], absent_word(), k * VECTOR_STRIDE, range);
#endif
}

TRTC_DEVICE void softmax_backward(const Params& params) {
  // Reductions of a persistent kernel alternate between two buffers: a warp may still read one row's values while
  // another writes the next row's.
  constexpr int buffers = PERSISTENT ? 2 : 1;
  constexpr int reduce_floats = reduced_floats(THREADS_PER_ROW, ROWS_PER_CTA, 1);
  TRTC_SHARED(float, warp_sums, buffers* reduce_floats);

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
    const int left_of_row = (exists ? slice_columns : 0) - thread * VEC_SIZE;
    const Range range_of_thread = range_of_row(params, row).from(own);
    const Input* const y = all_y + row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    const Gradient* const dy = all_dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    Output* const dx = all_dx + row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);

    // ---- The sum over the row
    uint32 y_word[VECTORS_PER_THREAD][words_of<Input, VEC_SIZE>];
    uint32 dy_word[VECTORS_PER_THREAD][words_of<Gradient, VEC_SIZE>];
    float sum_at[VEC_SIZE] = {};
#pragma unroll 1
    for (int first = 0; first == 0 || (CHUNKED && first < slice_columns); first += CHUNK) {
      const Range range = range_of_thread.from(first);
#if PREFETCHED
      wait_async();
      load_prefetched<Input>(y_word, shared_y, absent_word(), left_of_row);
      load_prefetched<Gradient>(dy_word, shared_dy, 0, left_of_row);
      const int64 next = row + stride;
      if (next < params.rows) {
        prefetch<Input>(shared_y, all_y + row_offset(params, next, params.y_outer_stride, params.y_inner_stride),
                        left_of_row);
        prefetch<Gradient>(shared_dy, all_dy + row_offset(params, next, params.dy_outer_stride, params.dy_inner_stride),
                           left_of_row);
      }
#else
      load_row(y_word, dy_word, y + first, dy + first, left_of_row - first, range);
#endif
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        if (is_in_range(k * VECTOR_STRIDE, range)) add_gradient_terms(sum_at, y_word[k], dy_word[k]);
      }
    }
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
      const int left = left_of_row - first;
      const Range range = range_of_thread.from(first);
      if (CHUNKED) load_row(y_word, dy_word, y + first, dy + first, left, range);
#pragma unroll
      for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
        uint32 word[words_of<Output, VEC_SIZE>] = {};
        if (is_in_range(k * VECTOR_STRIDE, range)) find_gradients(word, y_word[k], dy_word[k], sum[0], params.scale);
        store_vector<VEC_SIZE>(dx + first + k * VECTOR_STRIDE, word, k * VECTOR_STRIDE < left);
      }
    }
    first_row += stride;
    buffer = (buffer + 1) % buffers;
  } while (PERSISTENT && first_row < params.rows);
}

}  // namespace trtc
