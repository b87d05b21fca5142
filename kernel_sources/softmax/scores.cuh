// SPDX-License-Identifier: Apache-2.0
// Which elements of a row of softmax take part, and what their scores are made of: causal modes, masks, heads' sinks,
// the scale. And an element's gradient.
#pragma once

#include "exponential.cuh"
#include "row_vector.cuh"

namespace trtc {

// Which columns of a row take part: all, or, where it is causal, those up to its query's, `diagonal` further; or the
// last `window` of them, where that is not 0.
struct Range {
  int begin;
  int end;

  TRTC_DEVICE bool has(int column) const { return column >= begin && column < end; }
  // The same of a part that begins with column `first`.
  TRTC_DEVICE Range from(int first) const { return {begin - first, end - first}; }
  TRTC_DEVICE Range within(const Range& other) const { return {max(begin, other.begin), min(end, other.end)}; }
};

template <class Params>
TRTC_DEVICE uint32 matrix_of(const Params& params, int64 row) {
  return params.queries == 1 ? static_cast<uint32>(row)
                             : multiply_high(static_cast<uint32>(row), params.queries_magic) >> params.queries_shift;
}

template <class Params>
TRTC_DEVICE uint32 query_of(const Params& params, int64 row) {
  return static_cast<uint32>(row) - matrix_of(params, row) * params.queries;
}

// Of a query, and of a row. It ends within the columns, as `diagonal` is how many more these are than the queries, of
// which there are fewer than 2^31.
template <class Params>
TRTC_DEVICE Range causal_range(const Params& params, uint32 query) {
  const int end = max(static_cast<int>(query) + params.diagonal + 1, 0);
  return {params.window > 0 ? max(end - params.window, 0) : 0, end};
}

template <bool Causal, class Params>
TRTC_DEVICE Range range_of(const Params& params, int64 row) {
  if constexpr (Causal) return causal_range(params, query_of(params, row));
  return {0, params.columns};
}

template <class Params>
TRTC_DEVICE uint32 batch_of(const Params& params, uint32 matrix) {
  return params.matrix_heads == 1 ? matrix
                                  : multiply_high(matrix, params.matrix_heads_magic) >> params.matrix_heads_shift;
}

template <class Params>
TRTC_DEVICE uint32 head_of_matrix(const Params& params, uint32 matrix) {
  return matrix - batch_of(params, matrix) * params.matrix_heads;
}

// Where the row of a mask that is broadcast to [..., heads, queries, columns] begins.
template <class Params>
TRTC_DEVICE int64 mask_offset(const Params& params, int64 row) {
  const uint32 matrix = matrix_of(params, row);
  const uint32 batch = batch_of(params, matrix), head = head_of_matrix(params, matrix);
  const uint32 query = query_of(params, row);
  return batch * params.mask_batch_stride + head * params.mask_head_stride + query * params.mask_query_stride;
}

// The row that has a turn where there is a mask. Where all heads have one mask, their rows of a query follow each
// other, so that the mask comes from memory once and not for each head.
template <class Params>
TRTC_DEVICE int64 row_of_masked_turn(const Params& params, int64 turn) {
  if (params.mask_head_stride != 0 || params.matrix_heads <= 1) return turn;
  const uint32 of_batches = batch_of(params, static_cast<uint32>(turn));  // a query of all batches' in order
  const uint32 head = head_of_matrix(params, static_cast<uint32>(turn));
  const uint32 batch = matrix_of(params, of_batches), query = query_of(params, of_batches);
  return static_cast<int64>(batch * params.matrix_heads + head) * params.queries + query;
}

// The sink of a head.
template <class Sink, class Params>
TRTC_DEVICE float sink_of_head(const Params& params, int64 head) {
  uint32 word[1];
  float sink[1];
  load_vector<1>(word, static_cast<const Sink*>(params.sink) + head);
  unpack<Sink>(sink, word);
  return sink[0];
}

// Of a row's.
template <class Sink, class Params>
TRTC_DEVICE float sink_of(const Params& params, int64 row) {
  return sink_of_head<Sink>(params, head_of_matrix(params, matrix_of(params, row)));
}

// What scores are multiplied by, without its sign: 0 has become part of them, as has the sign.
template <class Params>
TRTC_DEVICE float scale_magnitude(const Params& params) {
  return params.scale == 0.0f ? 1.0f : magnitude(params.scale);
}
template <class Params>
TRTC_DEVICE float scale_sign(const Params& params) {
  return params.scale < 0.0f ? -1.0f : params.scale;
}

// v where what a mask has is added: -infinity on either side does not take part, whatever the other is.
TRTC_DEVICE float masked_score(float x, float scale, float added) {
  const bool out_of_it = x == minus_infinity() || added == minus_infinity();
  return out_of_it ? minus_infinity() : fused_multiply_add(x, scale, added);
}

// ---- Gradients ------------------------------------------------------------------------------------------------------

// Whether an element took part. Where it did not, whatever its dy is, its dx is 0, and its dy counts as 0.
template <bool Logarithm>
TRTC_DEVICE bool took_part(float y) {
  return y != (Logarithm ? minus_infinity() : 0.0f);
}

// What an element adds to the sum of a row's gradients, of which dy is 0 where it did not take part; and its own
// gradient, where it did.
template <bool Logarithm>
TRTC_DEVICE float gradient_term(float y, float dy) {
  return Logarithm ? dy : dy * y;
}

template <bool Logarithm, class Output>
TRTC_DEVICE float gradient_of(float y, float dy, float sum, float scale) {
  if constexpr (Logarithm) {
    return scale * fused_multiply_add(-large_exponential_for<Output>(y), sum * (1.0f / large_one), dy);
  } else {
    return scale * (y * (dy - sum));
  }
}

}  // namespace trtc
