// SPDX-License-Identifier: Apache-2.0
// Rows in shared memory: how they come there, what is read of them, and the moments of their elements in one pass,
// about a shift that is known before the mean.
#pragma once

#include "norm/forward.cuh"

namespace trtc {

// Whether the sum with the residual is kept in the residual's place. Of another type, it is added up each time that it
// is used, to the same bits.
#define KEEPS_SUM (ADDED_BEFORE && is_same<NormInput, Residual>)

// Brings a CTA's columns of a row to shared memory; behind the row are zeros. Each thread copies its own vectors, which
// it may read when it has waited; of rows that are not aligned, all threads' after a barrier.
template <class T>
TRTC_DEVICE void copy_row(T* stage, const T* from, int columns, int thread) {
#if UNALIGNED
  copy_to_stage(stage, from, columns, thread);
#else
  constexpr int bytes = VEC_SIZE * sizeof(T);
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
    const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
    if constexpr (bytes < 4) {  // there is no such copy
      uint32 word[words_of<T, VEC_SIZE>];
      load_vector_if<VEC_SIZE>(word, from + column, column < columns);
      store_vector<VEC_SIZE, Space::shared>(stage + column, word);
    } else if (is_filled(k)) {
      copy_async<bytes>(stage + column, from + column);
    } else {
      copy_async_part<bytes>(stage + column, column < columns ? from + column : from, 0, column < columns ? bytes : 0);
    }
  }
#endif
}

// A vector of what is normalized, from a row's x and residual in shared memory.
TRTC_DEVICE void load_packed(uint32 (&packed)[words_of<NormInput, VEC_SIZE>], const Input* x, const Residual* residual,
                             int column) {
  if constexpr (KEEPS_SUM) {
    load_vector<VEC_SIZE, Space::shared>(packed, residual + column);
  } else if constexpr (ADDED_BEFORE) {
    uint32 input[words_of<Input, VEC_SIZE>], added[words_of<Residual, VEC_SIZE>];
    load_vector<VEC_SIZE, Space::shared>(input, x + column);
    load_vector<VEC_SIZE, Space::shared>(added, residual + column);
    add_residual(packed, input, added);
  } else {
    load_vector<VEC_SIZE, Space::shared>(packed, x + column);
  }
}

// The same when it is used first: the sum is stored, to `sum_out` and in the residual's place.
TRTC_DEVICE void load_packed_first(uint32 (&packed)[words_of<NormInput, VEC_SIZE>], const Input* x, Residual* residual,
                                   NormInput* sum_out, int k, int column, int columns) {
#if ADDED_BEFORE
  uint32 input[words_of<Input, VEC_SIZE>], added[words_of<Residual, VEC_SIZE>];
  load_vector<VEC_SIZE, Space::shared>(input, x + column);
  load_vector<VEC_SIZE, Space::shared>(added, residual + column);
  add_residual(packed, input, added);
  if constexpr (KEEPS_SUM) store_vector<VEC_SIZE, Space::shared>(residual + column, packed);
  if constexpr (!UNALIGNED) {
    store_vector<VEC_SIZE>(sum_out + column, packed, is_filled(k) || column < columns);
  } else if constexpr (!KEEPS_SUM) {
    store_elements<VEC_SIZE>(sum_out + column, packed, columns - column);
  }
#else
  load_packed(packed, x, residual, column);
#endif
}

// In pairs: a row waits for it.
TRTC_DEVICE float sum_in_pairs(const float (&element)[VEC_SIZE]) {
  float sum[VEC_SIZE];
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) sum[i] = element[i];
#pragma unroll
  for (int distance = VEC_SIZE / 2; distance >= 1; distance /= 2) {
#pragma unroll
    for (int i = 0; i < distance; ++i) sum[i] += sum[i + distance];
  }
  return sum[0];
}

// The shift, from the first vector of a CTA's `columns`: the mean of its elements but for the largest and the smallest,
// so that a single one far from the others does not move it; in the elements' type, so that most differences are exact.
template <class T>
TRTC_DEVICE float shift_from(const uint32 (&words)[words_of<T, VEC_SIZE>], int columns) {
  float element[VEC_SIZE], most[VEC_SIZE], least[VEC_SIZE];
  unpack<T>(element, words);
  clear_outside(element, 0, 0, columns);
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) most[i] = least[i] = element[i];
#pragma unroll
  for (int distance = VEC_SIZE / 2; distance >= 1; distance /= 2) {
#pragma unroll
    for (int i = 0; i < distance; ++i) {
      most[i] = larger(most[i], most[i + distance]);
      least[i] = -larger(-least[i], -least[i + distance]);
    }
  }
  float shift = (sum_in_pairs(element) - most[0] - least[0]) * (1.0f / (VEC_SIZE > 2 ? VEC_SIZE - 2 : 1));
#if UNALIGNED
  if (columns < VEC_SIZE) shift = columns <= 0 ? 0.0f : divide(sum_in_pairs(element), static_cast<float>(columns));
#else
  if (columns <= 0) shift = 0.0f;
#endif
  float rounded[VEC_SIZE];
  uint32 rounded_words[words_of<T, VEC_SIZE>];
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) rounded[i] = shift;
  pack<T>(rounded_words, rounded);
  unpack<T>(rounded, rounded_words);
  return rounded[0];
}

// Whether a shift is more than sqrt(2) standard deviations from the mean of the elements whose deviations from it these
// are the sums of, that of squares scaled: then the sum of squares about the mean loses more than 1.6 of its 24 bits.
// Of normally distributed elements one part of 10000 has such a shift, of vectors of 4 one of 100. So is one about
// which they are too large for a float, or no numbers.
TRTC_DEVICE bool is_far(float deviations, float squares, float reciprocal_columns) {
  const float own = deviations * reciprocal_columns;
  return !(own * (deviations * SQUARES_SCALE) <= (2.0f / 3.0f) * squares) || squares > 0x1.fffffep127f;
}

}  // namespace trtc
