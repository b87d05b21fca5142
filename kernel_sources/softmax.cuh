// Softmax of rows, of any length at run time. What its tuned kernels, forward and backward, and the general ones share.
//
//   y = exp(v - m) / (sum(exp(v - m)) [+ exp(sink - m)]),   v = scale * x [+ mask], m = max(v [, sink])
//
// with v = -infinity where an element does not take part
//
// A group of `ctas_per_row` CTAs has a row, each a part of it; a part is held in slots (slots.cuh), or, where it is
// longer than these, is read twice, chunk by chunk.
#pragma once

#include "exponential.cuh"
#include "rows.cuh"
#include "slots.cuh"

namespace trtc {

// What a kernel's program says of it (transformer_rtc/ops/softmax_kernels.py), and what follows.
template <class Traits>
struct SoftmaxConfig : Traits {
  using Part = Slots<Traits::threads, Traits::steps, Traits::vector, Traits::causal>;
  enum : int { vectors_per_row = Traits::vector * Traits::ctas_per_row };
  static constexpr TRTC_DEVICE Exchange exchange() { return exchange_of<Traits>(); }
};

// Which columns of a row take part: all, or, where it is causal, those up to its query's, `diagonal` further; or the
// last `window` of them, where that is not 0.
struct Range {
  int begin;
  int end;

  TRTC_DEVICE bool has(int column) const { return column >= begin && column < end; }
  // The same of a part that begins with column `first`.
  TRTC_DEVICE Range from(int first) const { return {begin - first, end - first}; }
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

template <bool Causal, class Params>
TRTC_DEVICE Range range_of(const Params& params, int64 row) {
  if constexpr (Causal) {
    const int64 end = static_cast<int64>(query_of(params, row)) + params.diagonal + 1;
    const int64 last = end < params.columns ? end : params.columns;
    const int64 first = params.window > 0 ? end - params.window : 0;
    return {first > 0 ? static_cast<int>(first) : 0, last > 0 ? static_cast<int>(last) : 0};
  } else {
    return {0, params.columns};
  }
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

// The sink of a row's head.
template <class Sink, class Params>
TRTC_DEVICE float sink_of(const Params& params, int64 row) {
  const auto* sinks = static_cast<const Sink*>(params.sink);
  Vec<Sink, 1> sink;
  sink.load(sinks + head_of_matrix(params, matrix_of(params, row)), 1, true);
  return sink.get(0);
}

// A row's part of it, from what its dx needs too: sum(dy * y), or sum(dy).
template <class Params>
TRTC_DEVICE float sink_gradient(const Params& params, int64 row, float sum, float sink) {
  const float lse = load_float(static_cast<const float*>(params.lse) + row);
  return sink == minus_infinity() ? 0.0f : -exponential(sink - lse) * sum;
}

enum : int { finish_threads = 256 };

// Adds up the rows of the head that this CTA has, in an order that their number fixes; to all threads.
template <class Params>
TRTC_DEVICE float sum_of_head(const Params& params) {
  RowReduction<finish_threads, 1, 1, Exchange::none, 1, false, 1> reduction;
  reduction.begin(params, 0);
  const float* of_rows = static_cast<const float*>(params.row_partials);
  const int64 of_batch = static_cast<int64>(params.matrix_heads) * params.queries;
  float sum[1] = {0.0f};
  for (int64 batch = cta_index() * params.queries; batch < params.rows; batch += of_batch) {
    float of_matrix = 0.0f;
    for (int64 query = thread_index(); query < params.queries; query += finish_threads) {
      of_matrix += load_float(of_rows + batch + query);
    }
    sum[0] += of_matrix;
  }
  reduction.template reduce_in_cta<Sum, 0>(sum);
  return sum[0];
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

// What the elements of a row are made of.
struct RowTotals {
  float sum;         // of exponentials, about what they are about
  float log_sum;     // its logarithm
  float about;       // what a CTA's v are less for its terms
  float correction;  // from there to what the row's exponentials are about
  float quotient;    // what a term is multiplied by, but for 2^-24 where `is_small`, as it has not all its digits then
  float rest;        // what that is rounded by
  bool is_small;

  TRTC_DEVICE bool is_nan() const { return sum != sum; }
  TRTC_DEVICE float logarithm_of(float v, float factor) const {
    return fused_multiply_add(v - about, factor, correction - log_sum);
  }
  template <class Output>
  TRTC_DEVICE float quotient_of(float term) const {
    return is_same<Output, float> ? fused_multiply_add(term, quotient, term * rest) : term * quotient;
  }
};

// Of a row of which this CTA has the largest v, times `factor`, and the sum of exponentials about it. `again`: its
// terms are taken again about what is the row's largest.
template <class Config, class Params, class Reduction>
TRTC_DEVICE RowTotals totals_of_row(const Params& params, const Place<Config>& place, Reduction& reduction, int64 row,
                                    float factor, float largest, float total, bool again) {
  constexpr bool narrow = !is_same<typename Config::Output, float>;
  const bool exists = place.exists(row, params.rows);
  RowTotals found;
  float row_largest = largest;
  float of_cta = 1.0f;  // from what this CTA's exponentials are about to what the row's are
  if constexpr (Config::ctas_per_row > 1) {
    float gathered[2] = {largest, total};
    reduction.gather(gathered);
    row_largest = reduce_lanes<Largest, Config::ctas_per_row>(gathered[0]);
    // A CTA of which nothing takes part adds nothing, however small the others are.
    const float below = gathered[0] == minus_infinity() ? 0.0f : (gathered[0] - row_largest) * factor;
    const float weight = narrow ? approximate_exp2(below * log2_e()) : exponential(below);
    total = reduce_lanes<Sum, Config::ctas_per_row>(gathered[1] * weight);
    of_cta = shuffle_from(weight, place.rank);
  }
  const float row_about = row_largest == minus_infinity() ? 0.0f : row_largest;
  const float base = row_about * factor;
  float common = base;  // what the row's exponentials are about
  const bool nothing = total == 0.0f;
  if constexpr (Config::has_sink) {
    // One more term of the sum.
    const float sink = exists ? sink_of<typename Config::Sink>(params, row) : minus_infinity();
    const float before = nothing ? minus_infinity() : base;
    const float most = Largest::of(before, sink);
    common = most == minus_infinity() ? 0.0f : most;
    total = nothing ? 0.0f : total * exponential(before - common);
    total += exponential(sink - common);
  }
  found.sum = total;
  found.log_sum = total == 0.0f ? 0.0f : logarithm(total);
  if constexpr (Config::has_lse) {
    if (place.thread == 0 && place.rank == 0 && exists) {
      static_cast<float*>(params.lse)[row] = total == 0.0f ? minus_infinity() : common + found.log_sum;
    }
  }
  found.about = again ? row_about : largest == minus_infinity() ? 0.0f : largest;
  found.correction = (found.about - row_about) * factor;
  float multiplier = again ? 1.0f : of_cta;
  if constexpr (Config::has_sink) {
    found.correction += base - common;
    multiplier *= nothing ? 0.0f : exponential(base - common);
  }
  if (largest == minus_infinity()) found.correction = 0.0f;
  // Nothing takes part: zeros.
  const float inverse = nothing ? 0.0f : approximate_reciprocal(total);
  const float inverse_rest = fused_multiply_add(-total, inverse, 1.0f) * inverse;
  found.quotient = multiplier * inverse;
  found.rest = fused_multiply_add(multiplier, inverse, -found.quotient) + multiplier * inverse_rest;
  found.is_small = magnitude(found.quotient) < 0x1p-100f;
  if (!found.is_small) {
    found.quotient *= 1.0f / large_one;
    found.rest *= 1.0f / large_one;
  }
  return found;
}

// The part of a CTA's `columns` that begins with its column `first`.
template <class Config>
TRTC_DEVICE typename Config::Part softmax_part(int thread, int shift, int columns, Range range, int first) {
  const Range here = range.from(first);
  return {thread, shift, min(columns - first, static_cast<int>(Config::Part::capacity)), here.begin, here.end};
}

// What an element adds to the sum of a row's gradients, and its own one; 0 where it did not take part.
template <bool Logarithm>
TRTC_DEVICE float gradient_term(float y, float dy) {
  const bool took_part = y != (Logarithm ? minus_infinity() : 0.0f);
  return !took_part ? 0.0f : Logarithm ? dy : dy * y;
}

template <bool Logarithm, class Output>
TRTC_DEVICE float gradient_of(float y, float dy, float sum, float scale) {
  const bool took_part = y != (Logarithm ? minus_infinity() : 0.0f);
  float found;
  if constexpr (Logarithm) {
    found = fused_multiply_add(-large_exponential_for<Output>(y), sum * (1.0f / large_one), dy);
  } else {
    found = y * (dy - sum);
  }
  return took_part ? scale * found : 0.0f;
}

// Columns of a row that a CTA has: as many whole Vecs as the others that share it.
template <class Config, class Params>
TRTC_DEVICE int softmax_slice(const Params& params) {
  if constexpr (Config::ctas_per_row == 1) return params.columns;
  constexpr int unit = Config::vectors_per_row;
  return (params.columns / unit + (params.columns % unit != 0)) * Config::vector;
}

// What a thread has of the rows.
template <class Config, class Params>
TRTC_DEVICE Place<Config> softmax_place(const Params& params) {
  return Place<Config>::here(params.columns, softmax_slice<Config>(params));
}

// Bytes of shared memory of so many elements; what follows them is aligned.
template <class T>
TRTC_DEVICE int staged_bytes(int elements) {
  return (elements * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
}

}  // namespace trtc
