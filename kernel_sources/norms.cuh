// SPDX-License-Identifier: Apache-2.0
// Normalization of rows, RMSNorm and LayerNorm: what the general kernels have in common.
//
//   y = (x - mean) * rstd * (weight + weight_offset) + bias,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// with mean = 0 where a row is not centred (RMSNorm).
#pragma once

#include "norm/partials.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "scaling.cuh"

namespace trtc {

// 1 / sqrt(mean + eps), unrounded: high + low.
struct Rstd {
  float high;
  float low;
};

// `to_mean` makes the sum of squares their mean. One Newton step on the approximation, except where that is 0 or
// infinite.
TRTC_DEVICE Rstd rstd_of(float sum_of_squares, float to_mean, float eps) {
  const float value = fused_multiply_add(sum_of_squares, to_mean, eps);
  const float y = approximate_rsqrt(value);
  const float error = fused_multiply_add(-value * y, y, 1.0f);
  if (error != error) return {y, 0.0f};
  const float high = fused_multiply_add(0.5f * y, error, y);
  return {high, fused_multiply_add(0.5f * y, error, y - high)};
}

// x * rstd * weight, rounded once, so that 4 ulp hold at every length; where that meets infinity times zero in its
// correction, as the plain product.
TRTC_DEVICE float normalized(float x, Rstd rstd, float weight) {
  const float product = x * rstd.high;
  const float rest = fused_multiply_add(x, rstd.low, fused_multiply_add(x, rstd.high, -product));
  const float corrected = fused_multiply_add(product, weight, rest * weight);
  return corrected == corrected ? corrected : product * weight;
}

// A row's mean, unrounded: high + rest; and what its elements' squares about the mean add up to, scaled: times
// `to_mean`, that is their mean.
struct Moments {
  float mean;
  float rest;
  float squares;
  float to_mean;
};

// What sums of squares are scaled by: 32 / hidden, as a power of two, which changes no bit, and at most 1. Those of a
// long row of numbers up to 1e18 overflow otherwise.
TRTC_DEVICE float squares_scale(float reciprocal_hidden) {
  const float scale = 32.0f * float_from_bits(bits_from_float(reciprocal_hidden) & 0xff800000u);
  return scale < 1.0f ? scale : 1.0f;
}

// The moments of a row from what was found about a shift near its mean: the sum of deviations and the scaled one of
// their squares. Less than 2^-18 of what it is the difference of is rounding: then there is no variance, as in a row of
// equal elements, and the mean is the nearest float, which is that element.
TRTC_DEVICE Moments moments_about(float shift, float deviations, float squares, float reciprocal_hidden, float scale) {
  float rest = deviations * reciprocal_hidden;
  float about_mean = fused_multiply_add(-rest, deviations * scale, squares);
  if (about_mean < 0x1p-18f * squares) {
    about_mean = 0.0f;
    rest = (shift + rest) - shift;
  }
  return {shift, rest, about_mean, divide(reciprocal_hidden, scale)};
}

// Which row of per-head weights belongs to a row: the last of its leading dimensions.
template <class Params>
TRTC_DEVICE int64 head_of(const Params& params, int64 row) {
  const uint32 token = multiply_high(static_cast<uint32>(row), params.heads_magic) >> params.heads_shift;
  return params.heads == 1 ? 0 : static_cast<int64>(static_cast<uint32>(row) - token * params.heads);
}

// ---- Partial sums of the weight's gradients ------------------------------------------------------------------------

// A second launch adds up the rows of partial sums, those of each head. A CTA of 8 warps has `Columns` columns; a
// thread reads 4 of them at once. Few threads, each with much on its way: CTAs of 32 warps, a column a lane, are most
// of them idle where rows are few, and those of long rows come in many waves.
template <int Columns>
struct FinishedColumns {
  enum : int {
    N = 4,
    warps = 8,
    lanes = Columns / N,        // of a row of partial sums
    rows_at_once = 32 / lanes,  // of a warp
  };
  static_assert(lanes * N == Columns && rows_at_once * lanes == 32 && Columns <= 32 * warps, "lanes and threads tile");

  // Thread i has that of column i in the end, where it stores any.
  TRTC_DEVICE int64 column() const { return cta_index() * Columns + thread_index(); }
  TRTC_DEVICE bool stores(int64 hidden) const { return thread_index() < Columns && column() < hidden; }

  // Of all gradients: one after the other, they would wait for memory twice.
  template <int Most, class Params>
  TRTC_DEVICE void sums(const Params& params, int rows_per_group, int gradients, float (&all)[Most]) const {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const int own = static_cast<int>(cta_index()) * Columns + lane % lanes * N;
    const int columns = min(params.hidden - own, static_cast<int>(N));
    const int64 rows = static_cast<int64>(params.groups) * rows_per_group;
    const int64 step = warps * rows_at_once * static_cast<int64>(params.heads);
    const int64 first = cta_index_y() + (warp * rows_at_once + lane / lanes) * static_cast<int64>(params.heads);
    const float* of_row = static_cast<const float*>(params.partials) + own;
    const float* const last = of_row + partial_offset(rows - 1, 0, gradients, params.hidden);
    of_row += partial_offset(first, 0, gradients, params.hidden);
    const int64 to_next = partial_offset(step, 0, gradients, params.hidden);
    const int64 pitch = partial_offset(0, 1, gradients, params.hidden);
    TRTC_SHARED(float, of_warps, Most * warps * Columns);
    float sum[Most][N] = {};
    // Batches without a rest: behind the last row it is read again, and not added. (Loads that have a condition each
    // are waited for one by one.)
    constexpr int batch = 8;
    int64 row = first;
#pragma unroll 1
    for (; columns >= N && row < rows; row += batch * step, of_row += batch * to_next) {
      Vec<float, N> value[batch][Most];
#pragma unroll
      for (int k = 0; k < batch; ++k) {
        const float* from = row + k * step < rows ? of_row + k * to_next : last;
#pragma unroll
        for (int i = 0; i < Most; ++i) value[k][i].load_aligned(from + (i < gradients ? i * pitch : 0));
      }
      add_rows(value, row, step, rows, sum);
    }
    // What no Vec fits: the last columns of rows of another size, by smaller batches.
    constexpr int of_rest = 2;
#pragma unroll 1
    for (; columns > 0 && row < rows; row += of_rest * step, of_row += of_rest * to_next) {
      Vec<float, N> value[of_rest][Most];
#pragma unroll
      for (int k = 0; k < of_rest; ++k) {
        const float* from = row + k * step < rows ? of_row + k * to_next : last;
#pragma unroll
        for (int i = 0; i < Most; ++i) {
          value[k][i].load_elements(from + (i < gradients ? i * pitch : 0), columns);
        }
      }
      add_rows(value, row, step, rows, sum);
    }
#pragma unroll
    for (int i = 0; i < Most; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int distance = 16; distance >= lanes; distance /= 2) sum[i][j] += shuffle_xor(sum[i][j], distance);
        if (lane < lanes) of_warps[(i * warps + warp) * Columns + lane * N + j] = sum[i][j];
      }
    }
    cta_barrier();
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      all[i] = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) all[i] += of_warps[(i * warps + w) * Columns + thread_index() % Columns];
    }
  }

 private:
  // Row `row` and every `step`th behind it, those before `rows`.
  template <int Batch, int Most>
  static TRTC_DEVICE void add_rows(const Vec<float, N> (&value)[Batch][Most], int64 row, int64 step, int64 rows,
                                   float (&sum)[Most][N]) {
#pragma unroll
    for (int k = 0; k < Batch; ++k) {
      const bool valid = row + k * step < rows;
#pragma unroll
      for (int i = 0; i < Most; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum[i][j] += valid ? value[k][i].get(j) : 0.0f;
      }
    }
  }
};

}  // namespace trtc
