// SPDX-License-Identifier: Apache-2.0
// From the largest score of a row and its sum of exponentials to what makes y of a term: for the forward kernels.
//
// A term is 2^24 exp(v - m) (`large_one` in exponential.cuh): an exponential too small for a float keeps its digits. If
// y is 8 or 16 bits (NARROW), v is not scaled yet: `factor` is part of the exponential's multiply-add.
//
// For y of floats (COUNTS_ONES), the terms of the largest score, which are 1, are counted apart: others that are added
// to them are rounded to their ulp, a dozen times in a row that one element dominates.
#pragma once

#include "softmax/row.cuh"

namespace trtc {

enum : bool { NARROW = !COUNTS_ONES };

struct RowTotals {
  float sum;     // of exponentials; NaN where y is
  float origin;  // what is subtracted from scores for their terms
#if LOGARITHM
  float log_offset;  // y is (v - origin) * factor + log_offset
#else
  float quotient;  // y is term * quotient, but for 2^-24 where `is_small`: it would lose digits
  float rest;      // what `quotient` is rounded by
  bool is_small;
#endif
};

#if !LOGARITHM
TRTC_DEVICE float quotient_of(const RowTotals& totals, float term) {
  return NARROW ? term * totals.quotient : fused_multiply_add(term, totals.quotient, term * totals.rest);
}
#endif

// `largest`, `total`: of this CTA's slice. `again`: its terms are taken again, about what is the row's largest. By one
// thread of a row that `stores`, lse is written.
TRTC_DEVICE RowTotals totals_of_row(const Params& params, RowExchange& exchange, int64 row, bool exists, bool stores,
                                    float factor, float largest, float total, bool again) {
  float row_largest = largest;
  [[maybe_unused]] float of_cta = 1.0f;  // from what this CTA's exponentials are about to what the row's are
#if CLUSTER || GRID
  float values[2] = {largest, total};
  exchange_values(exchange, values);
  row_largest = reduce_lanes<Largest, CTAS_PER_ROW>(values[0]);
  // A CTA of which nothing takes part adds nothing, however small the others are.
  const float below = values[0] == minus_infinity() ? 0.0f : (values[0] - row_largest) * factor;
  const float weight = NARROW ? approximate_exp2(below * log2_e()) : exponential(below);
  total = reduce_lanes<Sum, CTAS_PER_ROW>(values[1] * weight);
  of_cta = shuffle_from(weight, exchange.rank);
#endif
  const float row_origin = row_largest == minus_infinity() ? 0.0f : row_largest;
  const float base = row_origin * factor;
  [[maybe_unused]] float common = base;  // what the row's exponentials are about
  [[maybe_unused]] const bool nothing = total == 0.0f;
#if HAS_SINK
  // One more term of the sum.
  const float sink = exists ? sink_of<Sink>(params, row) : minus_infinity();
  const float most = larger(nothing ? minus_infinity() : base, sink);
  common = most == minus_infinity() ? 0.0f : most;
  total = nothing ? 0.0f : total * exponential(base - common);
  total += exponential(sink - common);
#endif
  RowTotals found;
  found.sum = total;
#if HAS_LSE || LOGARITHM
  const float log_sum = total == 0.0f ? 0.0f : logarithm(total);
#endif
#if HAS_LSE
  if (stores) static_cast<float*>(params.lse)[row] = total == 0.0f ? minus_infinity() : common + log_sum;
#endif
  found.origin = again ? row_origin : largest == minus_infinity() ? 0.0f : largest;
#if LOGARITHM
  float correction = (found.origin - row_origin) * factor;
#if HAS_SINK
  correction += base - common;
#endif
  found.log_offset = (largest == minus_infinity() ? 0.0f : correction) - log_sum;
#else
  float multiplier = again ? 1.0f : of_cta;
#if HAS_SINK
  multiplier *= nothing ? 0.0f : exponential(base - common);
#endif
  // Where nothing takes part, y is 0.
  const float inverse = nothing ? 0.0f : approximate_reciprocal(total);
  const float inverse_rest = fused_multiply_add(-total, inverse, 1.0f) * inverse;
  found.quotient = multiplier * inverse;
  found.rest = fused_multiply_add(multiplier, inverse, -found.quotient) + multiplier * inverse_rest;
  // Only beside others' elements.
  found.is_small = (CTAS_PER_ROW > 1 || HAS_SINK) && magnitude(found.quotient) < 0x1p-100f;
  if (!found.is_small) {
    found.quotient *= 1.0f / large_one;
    found.rest *= 1.0f / large_one;
  }
#endif
  return found;
}

}  // namespace trtc
