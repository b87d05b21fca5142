// The general kernels: hidden size, types and options at run time. Complete for every shape, not fast: `Threads`
// threads hold a row, and read it again for each thing they ask of it.
#pragma once

#include "any_row.cuh"
#include "norms.cuh"

namespace trtc {

// The moments of a row about its mean, or about 0; to all its threads.
template <bool Centred, int Threads, class Reduction>
TRTC_DEVICE Moments moments_of(const AnyRow& x, Reduction& reduction, int thread, int hidden) {
  constexpr int N = general_vector;
  const float reciprocal_hidden = divide(1.0f, static_cast<float>(hidden));
  float shift = 0.0f;
  if constexpr (Centred) {
    LongSums<1> total;
    for (int column = thread * N; column < x.columns; column += Threads * N) {
      float value[N];
      x.load(value, column);
      total.add({(value[0] + value[1]) + (value[2] + value[3])});
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
  constexpr int N = general_vector;
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
        float y[N], w[N], b[N], added[N];
        x.load(y, column);
        if (weight.present()) weight.load(w, column);
        if (bias.present()) bias.load(b, column);
        if (residual.present() && !residual_out.present()) residual.load(added, column);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (Centred) y[i] = (y[i] - moments.mean) - moments.rest;
          y[i] = normalized<float>(y[i], rstd, weight.present() ? w[i] + params.weight_offset : 1.0f);
          if (bias.present()) y[i] += b[i];
          if (residual.present() && !residual_out.present()) y[i] += added[i];
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

// A CTA takes `Batch` rows in turn: their statistics; then, by column, their part of the weight's gradients, which it
// adds up in its rows of partials; then their dx, which may lie where dy or x do. Row i of every batch is of one head:
// the launch sees to it.
template <bool Centred, int Threads, int RowsPerCta, int Batch, bool PerHead, class Params>
TRTC_DEVICE void norm_backward_rows(const Params& params) {
  constexpr int N = general_vector;
  const int thread = thread_index() % Threads;
  const float reciprocal_hidden = divide(1.0f, static_cast<float>(params.hidden));
  const int gradients = (params.dweight_dtype != 0) + (params.dbias_dtype != 0);
  float* partials = static_cast<float*>(params.partials);
  RowReduction<Threads, RowsPerCta, 1, Exchange::none, 2, true, 2> reduction;
  reduction.begin(params, 0);
  TRTC_SHARED(float, means, Batch);
  TRTC_SHARED(float, rests, Batch);
  TRTC_SHARED(float, rstds, Batch);

  bool adds = false;
  // At least once, so that a CTA without rows leaves zeros.
  for (int64 batch = cta_index() * Batch; batch < params.rows || !adds; batch += ctas_in_grid() * Batch) {
#pragma unroll 1
    for (int in_batch = thread_index() / Threads; in_batch < Batch; in_batch += RowsPerCta) {
      const int64 row = batch + in_batch;
      const bool exists = row < params.rows;
      Moments moments{0.0f, 0.0f, 0.0f};
      float rstd = 0.0f;
      if (params.rstd != nullptr) {
        if (Centred && exists) moments.mean = load_float(static_cast<const float*>(params.mean) + row);
        if (exists) rstd = load_float(static_cast<const float*>(params.rstd) + row);
      } else {
        const AnyRow x =
            any_row(params.x, params.x_dtype, row_offset(params, row, params.x_outer_stride, params.x_inner_stride),
                    exists ? params.hidden : 0);
        moments = moments_of<Centred, Threads>(x, reduction, thread, params.hidden);
        if (exists) rstd = rstd_of(moments.squares, reciprocal_hidden, params.eps).high;
      }
      if (thread == 0) {
        means[in_batch] = moments.mean;
        rests[in_batch] = moments.rest;
        rstds[in_batch] = rstd;
      }
      reduction.next_row();
    }
    cta_barrier();

    if (gradients != 0) {
      for (int column = thread_index(); column < params.hidden; column += Threads * RowsPerCta) {
        float sums[2] = {0.0f, 0.0f};
        for (int in_batch = 0; in_batch < Batch; ++in_batch) {
          const int64 row = batch + in_batch;
          if (row < params.rows) {
            float gradient[1], value[1];
            any_row(params.dy, params.dy_dtype, row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride),
                    params.hidden)
                .load(gradient, column);
            any_row(params.x, params.x_dtype, row_offset(params, row, params.x_outer_stride, params.x_inner_stride),
                    params.hidden)
                .load(value, column);
            const float normal = ((value[0] - means[in_batch]) - rests[in_batch]) * rstds[in_batch];
            sums[0] = fused_multiply_add(gradient[0], normal, sums[0]);
            sums[1] += gradient[0];
          }
          if (PerHead || in_batch + 1 == Batch) {
            const int64 to = PerHead ? cta_index() * Batch + in_batch : cta_index();
            int gradient = 0;
            if (params.dweight_dtype != 0) {
              float* sum = partials + partial_offset(to, gradient++, gradients, params.hidden) + column;
              *sum = adds ? *sum + sums[0] : sums[0];
            }
            if (params.dbias_dtype != 0) {
              float* sum = partials + partial_offset(to, gradient, gradients, params.hidden) + column;
              *sum = adds ? *sum + sums[1] : sums[1];
            }
            sums[0] = sums[1] = 0.0f;
          }
        }
      }
      cta_barrier();
    }

#pragma unroll 1
    for (int in_batch = thread_index() / Threads; params.dx != nullptr && in_batch < Batch; in_batch += RowsPerCta) {
      const int64 row = batch + in_batch;
      const int columns = row < params.rows ? params.hidden : 0;
      const AnyRow dy = any_row(params.dy, params.dy_dtype,
                                row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride), columns);
      const AnyRow x = any_row(params.x, params.x_dtype,
                               row_offset(params, row, params.x_outer_stride, params.x_inner_stride), columns);
      const AnyRow dresidual =
          any_row(params.dresidual, params.dresidual_dtype,
                  row_offset(params, row, params.dresidual_outer_stride, params.dresidual_inner_stride), columns);
      const AnyRow dx = any_row(params.dx, params.dx_dtype,
                                row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride), columns);
      const AnyRow weight =
          any_row(params.weight, params.weight_dtype, head_of<true>(params, row) * params.hidden, columns);
      const float mean = means[in_batch], rest = rests[in_batch], rstd = rstds[in_batch];
      LongSums<2> sums;
#pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {
        for (int column = thread * N; column < columns; column += Threads * N) {
          float gradient[N], normal[N], w[N], added[N] = {};
          dy.load(gradient, column);
          x.load(normal, column);
          if (weight.present()) weight.load(w, column);
          if (pass == 1 && dresidual.present()) dresidual.load(added, column);
          float of_vec[2] = {0.0f, 0.0f};
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if (weight.present()) gradient[i] *= w[i] + params.weight_offset;
            normal[i] = ((normal[i] - mean) - rest) * rstd;
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
  const FinishedColumn<32> here;
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
