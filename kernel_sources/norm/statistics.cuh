// SPDX-License-Identifier: Apache-2.0
// The statistics of a row: mean, and rstd = 1 / sqrt(mean((x - mean)^2) + eps).
#pragma once

#include "norm/partition.cuh"

namespace trtc {

// Sums are taken by vector, chunk and row, so that no chain of additions loses an ulp. Sums of squares are multiplied
// by SQUARES_SCALE, a power of two of at most 32 / HIDDEN: it is exact, and squares of numbers up to 1e18 do not
// overflow. A smaller scale would make sums of small numbers subnormal.

#define MEAN_OF_SQUARES (1.0f / HIDDEN / SQUARES_SCALE)

// mean and rstd, unrounded.
struct Statistics {
  float mean_hi, mean_lo;
  float rstd_hi, rstd_lo;
};

TRTC_DEVICE float sum_of(const float (&element)[VEC_SIZE]) {
  float sum = element[0];
#pragma unroll
  for (int i = 1; i < VEC_SIZE; ++i) sum += element[i];
  return sum;
}

TRTC_DEVICE float sum_of_squares(const float (&element)[VEC_SIZE]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) sum = fused_multiply_add(element[i], element[i], sum);
  return sum;
}

// Adds up deviations and their squares.
TRTC_DEVICE void add_deviations(float (&sums)[2], const float (&deviation)[VEC_SIZE]) {
  float sum = deviation[0], squares = deviation[0] * deviation[0];
#pragma unroll
  for (int i = 1; i < VEC_SIZE; ++i) {
    sum += deviation[i];
    squares = fused_multiply_add(deviation[i], deviation[i], squares);
  }
  sums[0] += sum;
  sums[1] += squares;
}

// rstd of the scaled sum of squares about the mean. One Newton step on the approximation, except where that is 0 or
// infinite.
TRTC_DEVICE void find_rstd(Statistics& row, float squares, float eps) {
  const float value = fused_multiply_add(squares, MEAN_OF_SQUARES, eps);
  const float y = approximate_rsqrt(value);
  const float error = fused_multiply_add(-value * y, y, 1.0f);
  const bool found = error == error;
  row.rstd_hi = found ? fused_multiply_add(0.5f * y, error, y) : y;
  row.rstd_lo = found ? fused_multiply_add(0.5f * y, error, y - row.rstd_hi) : 0.0f;
}

// The mean of a row, and its scaled sum of squares about that, which is returned, from what each CTA found about a
// shift of its own, near its mean: the shift, the sum of deviations and the scaled sum of their squares (Chan, Golub
// and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979). Lane i of a group of
// CTAS_PER_ROW has those of CTA i. No division: it is a call, around which registers spill. If the squares about the
// mean are below 2^-18 of those they are the difference of, they are rounding errors: the variance becomes 0 and the
// mean the nearest float, as for a row of equal elements.
TRTC_DEVICE float combine_moments(Statistics& row, float shift, float deviations, float squares, int rank) {
  const float columns = columns_of_cta(rank);
  const float own = deviations * reciprocal_columns_of_cta(rank);
  float common = shift, rest = own;
  float about_mean = fused_multiply_add(-own, deviations * SQUARES_SCALE, squares);
  float about_common = squares;
  if (CTAS_PER_ROW > 1) {
    common = shuffle_from(shift, 0);
    const float offset = columns == 0.0f ? 0.0f : (shift - common) + own;
    rest = reduce_lanes<Sum, CTAS_PER_ROW>(columns * offset) * (1.0f / HIDDEN);
    const float from_mean = offset - rest, weight = columns * SQUARES_SCALE;
    const float about_own = columns == 0.0f ? 0.0f : about_mean;
    about_mean = reduce_lanes<Sum, CTAS_PER_ROW>(fused_multiply_add(weight * from_mean, from_mean, about_own));
    about_common = reduce_lanes<Sum, CTAS_PER_ROW>(fused_multiply_add(weight * offset, offset, squares));
  }
  if (about_mean < 0x1p-18f * about_common) {
    about_mean = 0.0f;
    rest = (common + rest) - common;
  }
  row.mean_hi = common;
  row.mean_lo = rest;
  return about_mean;
}

}  // namespace trtc
