// SPDX-License-Identifier: Apache-2.0
// What the forward kernels of RMSNorm and LayerNorm share beside the partition of a row and its statistics.
//
//   y = (x - mean) * rstd * (weight + weight_offset) + bias,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// where mean is 0 for RMSNorm (CENTRED is 0). A residual is added to x, and the sum is stored and normalized
// (ADDED_BEFORE), or it is added to y (ADDED_AFTER).
//
// norm/partition.cuh has the row partition, and what a program defines. Input is x's type. NormInput is the type of
// what is normalized: x, or its sum with the residual.
#pragma once

// VALUES: floats that CTAs exchange for a pass: {shift, deviations, squares} of LayerNorm, {squares} of RMSNorm, for
// each row. BUFFERS: 1 if a CTA exchanges once; 2 in alternation; 4 if a receive comes one row late (row_reduce.cuh).
#define VALUES (ROWS_PER_PASS * (CENTRED ? 3 : 1))
#define BUFFERS (STAGES > 0 ? 2 + 2 * LAG : PERSISTENT || ROW_SCALED ? 2 : 1)

#include "norm/exchange.cuh"
#include "norm/statistics.cuh"
#include "scaling.cuh"

namespace trtc {

// ---- Vectors --------------------------------------------------------------------------------------------------------

// The first `Count` of a thread's vectors of the weight, or of the bias, if there is one.
template <int Count>
TRTC_DEVICE void load_weight(uint32 (&weight)[Count][words_of<Weight, VEC_SIZE>], const Weight* row, int thread,
                             int columns) {
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    if (HAS_WEIGHT) load_affine_vector(weight[k], row, k, thread, columns);
  }
}
template <int Count>
TRTC_DEVICE void load_bias(uint32 (&bias)[Count][words_of<Bias, VEC_SIZE>], const Bias* row, int thread, int columns) {
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    if (HAS_BIAS) load_affine_vector(bias[k], row, k, thread, columns);
  }
}
template <int Count>
TRTC_DEVICE void load_weight_and_bias(uint32 (&weight)[Count][words_of<Weight, VEC_SIZE>],
                                      uint32 (&bias)[Count][words_of<Bias, VEC_SIZE>], const Weight* weight_row,
                                      const Bias* bias_row, int thread, int columns) {
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    if (HAS_WEIGHT) load_affine_vector(weight[k], weight_row, k, thread, columns);
    if (HAS_BIAS) load_affine_vector(bias[k], bias_row, k, thread, columns);
  }
}

// Makes whoever uses `word` wait for `other` too. Otherwise the compiler delays the load of `other` until its use.
// rows >> 48 is 0, which the compiler cannot know, so no bit changes.
TRTC_DEVICE void await_beside(uint32& word, uint32 other, const Params& params) {
  word |= other & static_cast<uint32>(params.rows >> 48);
}

// The sum of a vector and the residual's, rounded to its type.
TRTC_DEVICE void add_residual(uint32 (&sum)[words_of<NormInput, VEC_SIZE>],
                              const uint32 (&x)[words_of<Input, VEC_SIZE>],
                              const uint32 (&residual)[words_of<Residual, VEC_SIZE>]) {
  float a[VEC_SIZE], b[VEC_SIZE];
  unpack<Input>(a, x);
  unpack<Residual>(b, residual);
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) a[i] += b[i];
  pack<NormInput>(sum, a);
}

// ---- Statistics -----------------------------------------------------------------------------------------------------

// The statistics of a row from what its CTAs have found: {shift, deviations, squares}, or {squares} of RMSNorm.
TRTC_DEVICE Statistics statistics_of(const Params& params, const float* found, int thread) {
  Statistics row = {0.0f, 0.0f, 0.0f, 0.0f};
#if CENTRED
  const float squares = combine_moments(row, found[0], found[1], found[2], thread % CTAS_PER_ROW);
#else
  const float squares = reduce_lanes<Sum, CTAS_PER_ROW>(found[0]);
#endif
  find_rstd(row, squares, params.eps);
  return row;
}

// By one thread of a row.
TRTC_DEVICE void store_statistics(const Params& params, int64 row, const Statistics& found) {
#if HAS_MEAN
  static_cast<float*>(params.mean)[row] = found.mean_hi + found.mean_lo;
#endif
#if HAS_RSTD
  static_cast<float*>(params.rstd)[row] = found.rstd_hi;
#endif
}

// ---- y --------------------------------------------------------------------------------------------------------------

// x * rstd * weight, where y is of floats: rounded once, so that 4 ulp hold at every length; where that meets infinity
// times zero in its correction, the plain product.
TRTC_DEVICE float normalized_float(float x, const Statistics& row, float weight) {
  const float product = x * row.rstd_hi;
  const float rest = fused_multiply_add(x, row.rstd_lo, fused_multiply_add(x, row.rstd_hi, -product));
  const float corrected = fused_multiply_add(product, weight, rest * weight);
  return corrected == corrected ? corrected : product * weight;
}

// A vector of y before it is scaled, in the place of x less the mean's high part.
TRTC_DEVICE void normalize(float (&y)[VEC_SIZE], const Params& params, const Statistics& row,
                           const uint32 (&weight_words)[words_of<Weight, VEC_SIZE>],
                           const uint32 (&bias_words)[words_of<Bias, VEC_SIZE>],
                           const uint32 (&residual_words)[words_of<Residual, VEC_SIZE>]) {
#if HAS_WEIGHT
  float weight[VEC_SIZE];
  unpack<Weight>(weight, weight_words);
#endif
#if HAS_BIAS
  float bias[VEC_SIZE];
  unpack<Bias>(bias, bias_words);
#endif
#if ADDED_AFTER
  float residual[VEC_SIZE];
  unpack<Residual>(residual, residual_words);
#endif
#if ROUNDS
  // x * rstd is rounded to the type of x before it is multiplied by the weight, as some models are trained.
  uint32 rounded[words_of<NormInput, VEC_SIZE>];
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) y[i] *= row.rstd_hi;
  pack<NormInput>(rounded, y);
  unpack<NormInput>(y, rounded);
#endif
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) {
#if HAS_WEIGHT
    const float factor = weight[i] + params.weight_offset;
#else
    const float factor = 1.0f;
#endif
#if HAS_BIAS
    const float term = bias[i];
#else
    const float term = 0.0f;
#endif
    if (ROUNDS) {
      y[i] *= factor;
      if (HAS_BIAS) y[i] += term;
    } else if (is_same<Output, float>) {
      if (CENTRED) y[i] -= row.mean_lo;
      y[i] = normalized_float(y[i], row, factor);
      if (HAS_BIAS) y[i] += term;
    } else if (CENTRED) {
      const float normal = fused_multiply_add(y[i], row.rstd_hi, -row.mean_lo * row.rstd_hi);
      y[i] = HAS_BIAS ? fused_multiply_add(normal, factor, term) : normal * factor;
    } else {
      y[i] = y[i] * row.rstd_hi * factor;
      if (HAS_BIAS) y[i] += term;
    }
#if ADDED_AFTER
    y[i] += residual[i];
#endif
  }
}

// The largest magnitude of a vector of y at a CTA's `column`, and of `most`.
TRTC_DEVICE float largest_magnitude(const float (&y)[VEC_SIZE], int column, int columns, float most) {
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) {
    if (is_inside(i, column, columns)) most = Maximum::of(most, magnitude(y[i]));
  }
  return most;
}

// y as it is stored.
TRTC_DEVICE void pack_output(uint32 (&word)[words_of<Output, VEC_SIZE>], const float (&y)[VEC_SIZE], float scale) {
  float scaled[VEC_SIZE];
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) scaled[i] = HAS_SCALE || ROW_SCALED ? y[i] * scale : y[i];
  pack<Output>(word, scaled);
}

#if ROW_SCALED
// What each row of y is multiplied by. Its inverse, by which a user multiplies, is stored by one thread of a row that
// `stores`.
TRTC_DEVICE float scale_of_row(const Params& params, int64 row, float amax, bool stores) {
  const RowScale found = RowScale::of(amax, largest<Output>());
  if (stores) static_cast<float*>(params.row_scale)[row] = found.scale;
  return found.inverse;
}
#endif

// Raises params.amax to the largest |y| of this CTA. Called by all threads, at the end.
TRTC_DEVICE void store_amax(const Params& params, float amax) {
#if HAS_AMAX
  publish_amax<THREADS_PER_ROW * ROWS_PER_CTA>(static_cast<float*>(params.amax), amax);
#endif
}

TRTC_DEVICE void store_scale_inverse(const Params& params, float scale) {
#if HAS_SCALE_INV
  if (thread_index() == 0 && cta_index() == 0) *static_cast<float*>(params.scale_inv) = divide(1.0f, scale);
#endif
}

}  // namespace trtc
