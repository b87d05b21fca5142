// The general kernels: hidden size, types and options at run time. Complete for every shape, not fast: `Threads`
// threads hold a row, and read it again for each thing they ask of it.
#pragma once

#include "any_row.cuh"
#include "norms.cuh"

namespace trtc {

// Elements that a thread has of a row at a time, forward and for the moments: a Vec's bounds, type and alignment cost
// as much as its elements (H200, bfloat16, 16384 columns: RMSNorm 0.54 of a copy, by 4 0.34). Backward has no registers
// for so many.
enum : int { forward_vector = 8, backward_vector = 4 };

// The moments of a row about its mean, or about 0; to all its threads.
template <bool Centred, int Threads, class Reduction>
TRTC_DEVICE Moments moments_of(const AnyRow& x, Reduction& reduction, int thread, int hidden) {
  constexpr int N = forward_vector;
  const float reciprocal_hidden = divide(1.0f, static_cast<float>(hidden));
  float shift = 0.0f;
  if constexpr (Centred) {
    LongSums<1> total;
    for (int column = thread * N; column < x.columns; column += Threads * N) {
      float value[N];
      x.load(value, column);
#pragma unroll
      for (int distance = N / 2; distance >= 1; distance /= 2) {
#pragma unroll
        for (int i = 0; i < distance; ++i) value[i] += value[i + distance];
      }
      total.add({value[0]});
    }
    total.close();
    reduction.template reduce_in_cta<Sum, 0>(total.all);
    shift = divide(total.all[0], static_cast<float>(hidden));
  }
  LongSums<2> sums;
  for (int column = thread * N; column < x.columns; column += Threads * N) {
    float value[N];
    x.load(value, column);
    float of_vec[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float deviation = column + i < x.columns ? value[i] - shift : 0.0f;
      of_vec[0] += deviation;
      of_vec[1] = fused_multiply_add(deviation, deviation, of_vec[1]);
    }
    sums.add(of_vec);
  }
  sums.close();
  reduction.template reduce_in_cta<Sum, 1>(sums.all);
  if constexpr (!Centred) return {0.0f, 0.0f, sums.all[1]};
  return combined_moments<1>(shift, sums.all[0], sums.all[1], static_cast<float>(hidden), reciprocal_hidden,
                             reciprocal_hidden);
}

template <bool Centred, int Threads, int RowsPerCta, class Params>
TRTC_DEVICE void norm_forward_rows(const Params& params) {
  constexpr int N = forward_vector;
  const int thread = thread_index() % Threads;
  const int row_in_cta = thread_index() / Threads;
  RowReduction<Threads, RowsPerCta, 1, Exchange::none, 1, true, 2> reduction;
  reduction.begin(params, 0);
  const float scale_of_all = params.scale == nullptr ? 1.0f : load_float(params.scale);
  float amax = 0.0f;
  for (int64 first_row = cta_index() * RowsPerCta; first_row < params.rows; first_row += ctas_in_grid() * RowsPerCta) {
    const int64 row = first_row + row_in_cta;
    // A row past the last takes part in the sums with no columns.
    const bool exists = row < params.rows;
    const int columns = exists ? params.hidden : 0;
    AnyRow x = any_row(params.x, params.x_dtype, row_offset(params, row, params.x_outer_stride, params.x_inner_stride),
                       columns);
    const AnyRow residual =
        any_row(params.residual, params.residual_dtype,
                row_offset(params, row, params.residual_outer_stride, params.residual_inner_stride), columns);
    const AnyRow residual_out =
        any_row(params.residual_out, params.residual_out_dtype,
                row_offset(params, row, params.residual_out_outer_stride, params.residual_out_inner_stride), columns);
    const AnyRow out = any_row(params.out, params.out_dtype,
                               row_offset(params, row, params.out_outer_stride, params.out_inner_stride), columns);
    const int64 head = head_of<true>(params, row) * params.hidden;
    const AnyRow weight = any_row(params.weight, params.weight_dtype, head, columns);
    const AnyRow bias = any_row(params.bias, params.bias_dtype, head, columns);
    if (residual_out.present()) {
      for (int column = thread * N; column < columns; column += Threads * N) {
        float value[N], added[N];
        x.load(value, column);
        residual.load(added, column);
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] += added[i];
        residual_out.store(value, column);
      }
      x = residual_out;  // each thread reads what it wrote
    }
    const Moments moments = moments_of<Centred, Threads>(x, reduction, thread, params.hidden);
    const Rstd rstd = rstd_of(moments.squares, divide(1.0f, static_cast<float>(params.hidden)), params.eps);
    if (params.mean != nullptr && thread == 0 && exists) {
      static_cast<float*>(params.mean)[row] = moments.mean + moments.rest;
    }
    if (params.rstd != nullptr && thread == 0 && exists) static_cast<float*>(params.rstd)[row] = rstd.high;

    float scale = scale_of_all;
    for (int pass = params.row_scale == nullptr ? 1 : 0; pass < 2; ++pass) {
      float largest_in_row = 0.0f;
      for (int column = thread * N; column < columns; column += Threads * N) {
        float y[N], other[N];
        x.load(y, column);
        if (weight.present()) weight.load(other, column);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (Centred) y[i] = (y[i] - moments.mean) - moments.rest;
          y[i] = normalized<float>(y[i], rstd, weight.present() ? other[i] + params.weight_offset : 1.0f);
        }
        if (bias.present()) {
          bias.load(other, column);
#pragma unroll
          for (int i = 0; i < N; ++i) y[i] += other[i];
        }
        if (residual.present() && !residual_out.present()) {
          residual.load(other, column);
#pragma unroll
          for (int i = 0; i < N; ++i) y[i] += other[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (column + i < columns) largest_in_row = Maximum::of(largest_in_row, magnitude(y[i]));
          y[i] *= scale;
        }
        if (pass == 1) out.store(y, column);
      }
      amax = Maximum::of(amax, largest_in_row);
      if (pass == 0) {
        float most[1] = {largest_in_row};
        reduction.template reduce_in_cta<Maximum, 2>(most);
        const float number = out.largest_number();
        // A row of zeros has the scale 1.
        scale = most[0] == 0.0f ? 1.0f : divide(number, most[0]);
        if (thread == 0 && exists) {
          static_cast<float*>(params.row_scale)[row] = most[0] == 0.0f ? 1.0f : divide(most[0], number);
        }
      }
    }
    reduction.next_row();
  }
  if (params.amax != nullptr) {
    amax = reduce_lanes<Maximum, 32>(amax);
    if (thread_index() % 32 == 0 && amax != 0.0f) maximum_global(static_cast<float*>(params.amax), amax);
  }
  if (params.scale_inv != nullptr && thread_index() == 0 && cta_index() == 0) {
    *static_cast<float*>(params.scale_inv) = divide(1.0f, scale_of_all);
  }
}

// Adds to partial sums of neighbouring columns, or sets them, and forgets what was added. The last ones may lie behind
// the row, where its pitch has room.
template <int N>
TRTC_DEVICE void move_to_partials(float* to, float (&sums)[N], bool adds) {
  Vec<float, N> value;
  value.fill(0);
  if (adds) value.load_aligned(to);
#pragma unroll
  for (int i = 0; i < N; i += 2) value.set(i, value.get(i) + sums[i], value.get(i + 1) + sums[i + 1]);
  value.store(to, true);
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] = 0.0f;
}

// A CTA takes `Most` rows in turn, or half as many again and again, down to `Least`, where there are not so many for
// each: their statistics; then, by column, their part of the weight's gradients, which it adds up in its rows of
// partials; then their dx, which may lie where dy or x do. With a weight for each head there are always `Most`, and row
// i of every batch is of one head: the launch sees to it.
template <bool Centred, int Threads, int RowsPerCta, int Least, int Most, bool PerHead, class Params>
TRTC_DEVICE void norm_backward_rows(const Params& params) {
  static_assert(Least == Most || !PerHead, "a row of partials is of one head");
  constexpr int N = backward_vector;
  const int thread = thread_index() % Threads;
  const float reciprocal_hidden = divide(1.0f, static_cast<float>(params.hidden));
  const int gradients = (params.dweight_dtype != 0) + (params.dbias_dtype != 0);
  RowReduction<Threads, RowsPerCta, 1, Exchange::none, 2, true, 2> reduction;
  reduction.begin(params, 0);
  TRTC_SHARED(char*, dy_rows, Most);
  TRTC_SHARED(char*, x_rows, Most);
  TRTC_SHARED(float, means, Most);
  TRTC_SHARED(float, rests, Most);
  TRTC_SHARED(float, rstds, Most);

  const int64 ctas = ctas_in_grid();
  int of_batch = Most;
#pragma unroll
  for (int fewer = Most / 2; fewer >= Least; fewer /= 2) {
    if (params.rows < ctas * of_batch) of_batch = fewer;
  }
  bool adds = false;
  // At least once, so that a CTA without rows leaves zeros.
  for (int64 batch = cta_index() * of_batch; batch < params.rows || !adds; batch += ctas * of_batch) {
    const int rows = static_cast<int>(min(params.rows - batch, static_cast<int64>(of_batch)));  // 0 or less: none
#pragma unroll 1
    for (int in_batch = thread_index() / Threads; in_batch < rows; in_batch += RowsPerCta) {
      const int64 row = batch + in_batch;
      const AnyRow dy = any_row(params.dy, params.dy_dtype,
                                row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride), params.hidden);
      const AnyRow x = any_row(params.x, params.x_dtype,
                               row_offset(params, row, params.x_outer_stride, params.x_inner_stride), params.hidden);
      Moments moments{0.0f, 0.0f, 0.0f};
      float rstd = 0.0f;
      if (params.rstd != nullptr) {
        if (Centred) moments.mean = load_float(static_cast<const float*>(params.mean) + row);
        rstd = load_float(static_cast<const float*>(params.rstd) + row);
      } else {
        moments = moments_of<Centred, Threads>(x, reduction, thread, params.hidden);
        rstd = rstd_of(moments.squares, reciprocal_hidden, params.eps).high;
      }
      if (thread == 0) {
        dy_rows[in_batch] = dy.row;
        x_rows[in_batch] = x.row;
        means[in_batch] = moments.mean;
        rests[in_batch] = moments.rest;
        rstds[in_batch] = rstd;
      }
      reduction.next_row();
    }
    cta_barrier();

    if (gradients != 0) {
      for (int column = thread_index() * N; column < params.hidden; column += Threads * RowsPerCta * N) {
        // One row waits for memory instead of each (bfloat16, 256: 0.17 of a copy instead of 0.14).
#pragma unroll 1
        for (int in_batch = 0; in_batch < rows; ++in_batch) {
          any_row(dy_rows[in_batch], params.dy_dtype, 0, params.hidden).prefetch(column);
          any_row(x_rows[in_batch], params.x_dtype, 0, params.hidden).prefetch(column);
        }
        float of_weight[N] = {}, of_bias[N] = {};
        const auto leave = [&](int64 row) {
          float* to = static_cast<float*>(params.partials) + partial_offset(row, 0, gradients, params.hidden) + column;
          if (params.dweight_dtype != 0) move_to_partials(to, of_weight, adds);
          to += partial_offset(0, gradients - 1, gradients, params.hidden);
          if (params.dbias_dtype != 0) move_to_partials(to, of_bias, adds);
        };
#pragma unroll 1
        for (int in_batch = 0; in_batch < (PerHead ? Most : rows); ++in_batch) {
          if (!PerHead || in_batch < rows) {
            float gradient[N], value[N];
            any_row(dy_rows[in_batch], params.dy_dtype, 0, params.hidden).load(gradient, column);
            any_row(x_rows[in_batch], params.x_dtype, 0, params.hidden).load(value, column);
#pragma unroll
            for (int i = 0; i < N; ++i) {
              if constexpr (Centred) value[i] = (value[i] - means[in_batch]) - rests[in_batch];
              of_weight[i] = fused_multiply_add(gradient[i], value[i] * rstds[in_batch], of_weight[i]);
              of_bias[i] += gradient[i];
            }
          }
          if constexpr (PerHead) leave(cta_index() * Most + in_batch);
        }
        if constexpr (!PerHead) leave(cta_index());
      }
      cta_barrier();
    }

#pragma unroll 1
    for (int in_batch = thread_index() / Threads; params.dx != nullptr && in_batch < rows; in_batch += RowsPerCta) {
      const int64 row = batch + in_batch;
      const AnyRow dy = any_row(dy_rows[in_batch], params.dy_dtype, 0, params.hidden);
      const AnyRow x = any_row(x_rows[in_batch], params.x_dtype, 0, params.hidden);
      const AnyRow dresidual =
          any_row(params.dresidual, params.dresidual_dtype,
                  row_offset(params, row, params.dresidual_outer_stride, params.dresidual_inner_stride), params.hidden);
      const AnyRow dx = any_row(params.dx, params.dx_dtype,
                                row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride), params.hidden);
      const AnyRow weight =
          any_row(params.weight, params.weight_dtype, head_of<true>(params, row) * params.hidden, params.hidden);
      const float mean = means[in_batch], rest = rests[in_batch], rstd = rstds[in_batch];
      LongSums<2> sums;
#pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {
        for (int column = thread * N; column < params.hidden; column += Threads * N) {
          float gradient[N], normal[N], w[N], added[N] = {};
          dy.load(gradient, column);
          x.load(normal, column);
          if (weight.present()) weight.load(w, column);
          if (pass == 1 && dresidual.present()) dresidual.load(added, column);
          float of_vec[2] = {0.0f, 0.0f};
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if (weight.present()) gradient[i] *= w[i] + params.weight_offset;
            if constexpr (Centred) normal[i] = (normal[i] - mean) - rest;
            normal[i] *= rstd;
            of_vec[0] = fused_multiply_add(gradient[i], normal[i], of_vec[0]);
            of_vec[1] += gradient[i];
          }
          if (pass == 0) {
            sums.add(of_vec);
          } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
              gradient[i] = fused_multiply_add(-normal[i], sums.all[0], gradient[i]);
              if constexpr (Centred) gradient[i] -= sums.all[1];
              gradient[i] = fused_multiply_add(gradient[i], rstd, added[i]);
            }
            dx.store(gradient, column);
          }
        }
        if (pass == 0) {
          sums.close();
          reduction.template reduce_in_cta<Sum, 2>(sums.all);
          sums.all[0] *= reciprocal_hidden;
          sums.all[1] *= reciprocal_hidden;
        }
      }
      reduction.next_row();
    }
    cta_barrier();  // the next batch's statistics take the place of these
    adds = true;
  }
}

template <int RowsPerGroup, class Params>
TRTC_DEVICE void norm_backward_finish_rows(const Params& params) {
  const int gradients = (params.dweight_dtype != 0) + (params.dbias_dtype != 0);
  const FinishedColumns<32> here;
  const int64 offset = cta_index_y() * params.hidden + here.column();
  const int columns = here.stores(params.hidden) ? 1 : 0;
  float sum[2];
  here.sums(params, RowsPerGroup, gradients, sum);
  if (params.dweight_dtype != 0) {
    const float of_weight[1] = {sum[0]};
    any_row(params.dweight, params.dweight_dtype, offset, columns).store(of_weight, 0);
  }
  if (params.dbias_dtype != 0) {
    const float of_bias[1] = {params.dweight_dtype != 0 ? sum[1] : sum[0]};
    any_row(params.dbias, params.dbias_dtype, offset, columns).store(of_bias, 0);
  }
}

}  // namespace trtc
