// SPDX-License-Identifier: Apache-2.0
// Which elements have a gradient: for the backward kernels. Where y is 0, or -infinity for a logarithm,
// an element took no part: its dx is 0, and its dy counts as 0, whatever it is.
#pragma once

#include "softmax/row.cuh"

namespace trtc {

// y where nothing took part, in every element of a word.
TRTC_DEVICE uint32 absent_word() { return LOGARITHM ? minus_infinity_word<Input>() : 0; }

// Whether elements of T are cleared in pairs, as they lie in words; else as floats.
template <class T>
inline constexpr bool clears_pairs = sizeof(T) == 2 && sizeof(Input) == 2;

// Elements become 0 where y took no part.
template <class T>
TRTC_DEVICE void clear_absent_pairs(uint32 (&word)[words_of<T, VEC_SIZE>],
                                    const uint32 (&y_word)[words_of<Input, VEC_SIZE>]) {
  if constexpr (clears_pairs<T>) {
#pragma unroll
    for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) word[i] &= halves_other_than<Input>(y_word[i], absent_word());
  }
}
template <class T>
TRTC_DEVICE void clear_absent(float (&value)[VEC_SIZE], const float (&y)[VEC_SIZE]) {
  if constexpr (!clears_pairs<T>) {
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) value[i] = took_part<LOGARITHM>(y[i]) ? value[i] : 0.0f;
  }
}

// Adds up what a vector's elements add to the sum of the row. `ClearsY`: of 16 bits, y is cleared as well, which
// changes no sum. What is unpacked here is another value then than find_gradients() unpacks: else the compiler would
// keep both arrays as floats during the row's exchange, which take twice the registers.
template <bool ClearsY>
TRTC_DEVICE void add_gradient_terms(float (&sum_at)[VEC_SIZE], const uint32 (&y_word)[words_of<Input, VEC_SIZE>],
                                    const uint32 (&dy_word)[words_of<Gradient, VEC_SIZE>]) {
  uint32 used_y[words_of<Input, VEC_SIZE>], used_dy[words_of<Gradient, VEC_SIZE>];
#pragma unroll
  for (int i = 0; i < words_of<Input, VEC_SIZE>; ++i) used_y[i] = y_word[i];
#pragma unroll
  for (int i = 0; i < words_of<Gradient, VEC_SIZE>; ++i) used_dy[i] = dy_word[i];
  if (ClearsY && !LOGARITHM) clear_absent_pairs<Input>(used_y, y_word);
  clear_absent_pairs<Gradient>(used_dy, y_word);
  float y[VEC_SIZE], dy[VEC_SIZE];
  unpack<Input>(y, used_y);
  unpack<Gradient>(dy, used_dy);
  clear_absent<Gradient>(dy, y);
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) sum_at[i] += gradient_term<LOGARITHM>(y[i], dy[i]);
}

// A vector of dx, of a row with this sum.
TRTC_DEVICE void find_gradients(uint32 (&dx_word)[words_of<Output, VEC_SIZE>],
                                const uint32 (&y_word)[words_of<Input, VEC_SIZE>],
                                const uint32 (&dy_word)[words_of<Gradient, VEC_SIZE>], float sum, float scale) {
  float y[VEC_SIZE], dy[VEC_SIZE], dx[VEC_SIZE];
  unpack<Input>(y, y_word);
  unpack<Gradient>(dy, dy_word);
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) dx[i] = gradient_of<LOGARITHM, Output>(y[i], dy[i], sum, scale);
  clear_absent<Output>(dx, y);
  pack<Output>(dx_word, dx);
  clear_absent_pairs<Output>(dx_word, y_word);
}

}  // namespace trtc
