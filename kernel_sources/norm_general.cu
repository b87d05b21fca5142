// SPDX-License-Identifier: Apache-2.0
// The general kernels: hidden size, types and options at run time. Complete for every shape: `Threads` threads have a
// row, and read it again for each thing they ask of it.
#pragma once

#include "any_row.cuh"
#include "norms.cuh"

namespace trtc {

// Elements that a thread has of a row at a time, forward and for the moments: what AnyRow asks about a Vec costs as
// much as its elements. Backward has no registers for so many.
enum : int { forward_vector = 8, backward_vector = 4 };

// The moments of a row about its mean, or about 0; to all its threads.
template <bool Centred, int Threads, class Row, class Reduction>
TRTC_DEVICE Moments moments_of(const Row& x, Reduction& reduction, int thread, int hidden) {
  constexpr int N = forward_vector;
  const float reciprocal_hidden = divide(1.0f, static_cast<float>(hidden));
  const float scale = squares_scale(reciprocal_hidden);
  float shift = 0.0f;
  if constexpr (Centred) {
    float total[1] = {0.0f};
    add_long(total, thread * N, x.columns, Threads * N, [&](int column, float (&sum)[1]) {
      float value[N];
      x.load(value, column);
#pragma unroll
      for (int distance = N / 2; distance >= 1; distance /= 2) {
#pragma unroll
        for (int i = 0; i < distance; ++i) value[i] += value[i + distance];
      }
      sum[0] += value[0];
    });
    reduction.template reduce_in_cta<Sum, 0>(total);
    shift = divide(total[0], static_cast<float>(hidden));
  }
  float sums[2] = {0.0f, 0.0f};
  add_long(sums, thread * N, x.columns, Threads * N, [&](int column, float (&sum)[2]) {
    float value[N];
    x.load(value, column);
    float of_vec[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float deviation = column + i < x.columns ? value[i] - shift : 0.0f;
      of_vec[0] += deviation;
      of_vec[1] = fused_multiply_add(deviation, deviation, of_vec[1]);
    }
    sum[0] += of_vec[0];
    sum[1] = fused_multiply_add(of_vec[1], scale, sum[1]);
  });
  reduction.template reduce_in_cta<Sum, 1>(sums);
  return moments_about(shift, Centred ? sums[0] : 0.0f, sums[1], reciprocal_hidden, scale);
}

// Values become the nearest ones of a type of 16 bits.
template <int N>
TRTC_DEVICE void round_to(Dtype dtype, float (&values)[N]) {
  const bool is_bfloat16 = dtype == Dtype::bfloat16;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const uint32 pair = is_bfloat16 ? halves_from_floats<bfloat16>(values[i], values[i + 1])
                                    : halves_from_floats<float16>(values[i], values[i + 1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32 half = pair >> 16 * j;
      values[i + j] = is_bfloat16 ? float_from_half<bfloat16>(half) : float_from_half<float16>(half);
    }
  }
}

// `Rounds`: x * rstd is rounded to the type of what is normalized, one of 16 bits, before the weight is multiplied.
template <class Row, bool Centred, int Threads, int RowsPerCta, bool Rounds, class Params>
TRTC_DEVICE void norm_forward_of(const Params& params) {
  constexpr int N = forward_vector;
  const int thread = thread_index() % Threads;
  const int row_in_cta = thread_index() / Threads;
  RowReduction<Threads, RowsPerCta> reduction;
  const float scale_of_all = !Row::every_option || params.scale == nullptr ? 1.0f : load_float(params.scale);
  float amax = 0.0f;
  for (int64 first_row = cta_index() * RowsPerCta; first_row < params.rows; first_row += ctas_in_grid() * RowsPerCta) {
    const int64 row = first_row + row_in_cta;
    // A row past the last takes part in the sums with no columns.
    const bool exists = row < params.rows;
    const int columns = exists ? params.hidden : 0;
    Row x = Row::at(params.x, params.x_dtype, row_offset(params, row, params.x_outer_stride, params.x_inner_stride),
                    columns);
    const Row residual =
        Row::at(params.residual, params.residual_dtype,
                row_offset(params, row, params.residual_outer_stride, params.residual_inner_stride), columns);
    const Row residual_out =
        Row::at(params.residual_out, params.residual_out_dtype,
                row_offset(params, row, params.residual_out_outer_stride, params.residual_out_inner_stride), columns);
    const Row out = Row::at(params.out, params.out_dtype,
                            row_offset(params, row, params.out_outer_stride, params.out_inner_stride), columns);
    const int64 head = head_of(params, row) * params.hidden;
    const Row weight = Row::at(params.weight, params.weight_dtype, head, columns);
    const Row bias = Row::at(params.bias, params.bias_dtype, head, columns);
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
    const Rstd rstd = rstd_of(moments.squares, moments.to_mean, params.eps);
    if (params.mean != nullptr && thread == 0 && exists) {
      static_cast<float*>(params.mean)[row] = moments.mean + moments.rest;
    }
    if (params.rstd != nullptr && thread == 0 && exists) static_cast<float*>(params.rstd)[row] = rstd.high;

    float scale = scale_of_all;
    for (int pass = !Row::every_option || params.row_scale == nullptr ? 1 : 0; pass < 2; ++pass) {
      float largest_in_row = 0.0f;
      for (int column = thread * N; column < columns; column += Threads * N) {
        float y[N], other[N];
        x.load(y, column);
        if (weight.present()) weight.load(other, column);
        if constexpr (Rounds) {
#pragma unroll
          for (int i = 0; i < N; ++i) y[i] *= rstd.high;
          round_to(x.dtype, y);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (Rounds) {
            y[i] *= weight.present() ? other[i] + params.weight_offset : 1.0f;
          } else {
            if constexpr (Centred) y[i] = (y[i] - moments.mean) - moments.rest;
            y[i] = normalized(y[i], rstd, weight.present() ? other[i] + params.weight_offset : 1.0f);
          }
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
        if constexpr (Row::every_option) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if (column + i < columns) largest_in_row = Maximum::of(largest_in_row, magnitude(y[i]));
            y[i] *= scale;
          }
        }
        if (pass == 1) out.store(y, column);
      }
      amax = Maximum::of(amax, largest_in_row);
      if (pass == 0) {
        float most[1] = {largest_in_row};
        reduction.template reduce_in_cta<Maximum, 2>(most);
        const auto of_row = RowScale::of(most[0], out.largest_number());
        scale = of_row.inverse;
        if (thread == 0 && exists) static_cast<float*>(params.row_scale)[row] = of_row.scale;
      }
    }
    reduction.next_row();
  }
  if (Row::every_option && params.amax != nullptr) {
    publish_amax<Threads * RowsPerCta>(static_cast<float*>(params.amax), amax);
  }
  if (Row::every_option && params.scale_inv != nullptr && thread_index() == 0 && cta_index() == 0) {
    *static_cast<float*>(params.scale_inv) = divide(1.0f, scale_of_all);
  }
}

template <bool Centred, int Threads, int RowsPerCta, bool Rounds = false, class Params>
TRTC_DEVICE void norm_forward_rows(const Params& params) {
  const bool scales =
      params.scale != nullptr || params.amax != nullptr || params.scale_inv != nullptr || params.row_scale != nullptr;
  CommonType<forward_vector> type(params.hidden, !scales);
  type.add(params.x, params.x_dtype, params.x_outer_stride, params.x_inner_stride);
  type.add(params.residual, params.residual_dtype, params.residual_outer_stride, params.residual_inner_stride);
  type.add(params.out, params.out_dtype, params.out_outer_stride, params.out_inner_stride);
  type.add(params.residual_out, params.residual_out_dtype, params.residual_out_outer_stride,
           params.residual_out_inner_stride);
  type.add(params.weight, params.weight_dtype, 0, 0);
  type.add(params.bias, params.bias_dtype, 0, 0);
  if (type.is_half()) return norm_forward_of<TypedRow<bfloat16>, Centred, Threads, RowsPerCta, Rounds>(params);
  if constexpr (!Rounds) {
    if (type.is_float()) return norm_forward_of<TypedRow<float>, Centred, Threads, RowsPerCta, Rounds>(params);
  }
  norm_forward_of<AnyRow, Centred, Threads, RowsPerCta, Rounds>(params);
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

// What a row of a batch is given by, once its sums are known.
template <class Row>
struct BackwardRow {
  Row dy, x, dresidual, dx, weight;
  float mean, rest, rstd;
  float projection, level;  // means of dy * w * x' and of dy * w
};

// A CTA takes `Most` rows in turn, or half as many again and again, down to `Least`, where there are not so many for
// each: what each of them adds up to; then, by column, their dx, which may lie where dy or x do, and their part of the
// weight's gradients, which it adds up in its rows of partials. With a weight for each head there are always `Most`,
// and row i of every batch is of one head: the launch sees to it.
template <class Row, bool Centred, int Threads, int RowsPerCta, int Least, int Most, bool PerHead, class Params>
TRTC_DEVICE void norm_backward_of(const Params& params) {
  static_assert(Least == Most || !PerHead, "a row of partials is of one head");
  constexpr int N = backward_vector;
  const int thread = thread_index() % Threads;
  const float reciprocal_hidden = divide(1.0f, static_cast<float>(params.hidden));
  const int gradients = (params.dweight_dtype != 0) + (params.dbias_dtype != 0);
  RowReduction<Threads, RowsPerCta> reduction;
  TRTC_SHARED(BackwardRow<Row>, batch_rows, Most);

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
      BackwardRow<Row> of;
      const auto row_of = [&](void* array, int dtype, int64 outer_stride, int64 inner_stride) {
        return Row::at(array, dtype, row_offset(params, row, outer_stride, inner_stride), params.hidden);
      };
      of.dy = row_of(params.dy, params.dy_dtype, params.dy_outer_stride, params.dy_inner_stride);
      of.x = row_of(params.x, params.x_dtype, params.x_outer_stride, params.x_inner_stride);
      of.dresidual = row_of(params.dresidual, params.dresidual_dtype, params.dresidual_outer_stride,
                            params.dresidual_inner_stride);
      of.dx = row_of(params.dx, params.dx_dtype, params.dx_outer_stride, params.dx_inner_stride);
      of.weight = Row::at(params.weight, params.weight_dtype, head_of(params, row) * params.hidden, params.hidden);
      Moments moments{};
      if (params.rstd != nullptr) {
        if (Centred) moments.mean = load_float(static_cast<const float*>(params.mean) + row);
        of.rstd = load_float(static_cast<const float*>(params.rstd) + row);
      } else {
        moments = moments_of<Centred, Threads>(of.x, reduction, thread, params.hidden);
        of.rstd = rstd_of(moments.squares, moments.to_mean, params.eps).high;
      }
      of.mean = moments.mean;
      of.rest = moments.rest;
      float sums[2] = {0.0f, 0.0f};
      if (params.dx != nullptr) {
        add_long(sums, thread * N, params.hidden, Threads * N, [&](int column, float (&sum)[2]) {
          float gradient[N], normal[N], w[N];
          of.dy.load(gradient, column);
          of.x.load(normal, column);
          if (of.weight.present()) of.weight.load(w, column);
          float of_vec[2] = {0.0f, 0.0f};
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if (of.weight.present()) gradient[i] *= w[i] + params.weight_offset;
            if constexpr (Centred) normal[i] = (normal[i] - of.mean) - of.rest;
            of_vec[0] = fused_multiply_add(gradient[i], normal[i] * of.rstd, of_vec[0]);
            of_vec[1] += gradient[i];
          }
          sum[0] += of_vec[0];
          sum[1] += of_vec[1];
        });
        reduction.template reduce_in_cta<Sum, 2>(sums);
      }
      of.projection = sums[0] * reciprocal_hidden;
      of.level = sums[1] * reciprocal_hidden;
      if (thread == 0) batch_rows[in_batch] = of;
      reduction.next_row();
    }
    cta_barrier();

    for (int column = thread_index() * N; column < params.hidden; column += Threads * RowsPerCta * N) {
      float of_weight[N] = {}, of_bias[N] = {}, w[N];
      const auto leave = [&](int64 row) {
        if (gradients == 0) return;
        float* to = static_cast<float*>(params.partials) + partial_offset(row, 0, gradients, params.hidden) + column;
        if (params.dweight_dtype != 0) move_to_partials(to, of_weight, adds);
        to += partial_offset(0, gradients - 1, gradients, params.hidden);
        if (params.dbias_dtype != 0) move_to_partials(to, of_bias, adds);
      };
      const auto load_weight = [&](const Row& weight) {
        if (weight.present()) weight.load(w, column);
#pragma unroll
        for (int i = 0; i < N; ++i) w[i] = weight.present() ? w[i] + params.weight_offset : 1.0f;
      };
      if (!PerHead && params.dx != nullptr && rows > 0) load_weight(batch_rows[0].weight);
#pragma unroll 1
      for (int in_batch = 0; in_batch < (PerHead ? Most : rows); ++in_batch) {
        if (!PerHead || in_batch < rows) {
          const BackwardRow<Row>& of = batch_rows[in_batch];
          float gradient[N], normal[N], added[N] = {};
          of.dy.load(gradient, column);
          of.x.load(normal, column);
          if (of.dresidual.present()) of.dresidual.load(added, column);
          if (PerHead && params.dx != nullptr) load_weight(of.weight);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if constexpr (Centred) normal[i] = (normal[i] - of.mean) - of.rest;
            normal[i] *= of.rstd;
            of_weight[i] = fused_multiply_add(gradient[i], normal[i], of_weight[i]);
            of_bias[i] += gradient[i];
          }
          if (params.dx != nullptr) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
              gradient[i] *= w[i];
              gradient[i] = fused_multiply_add(-normal[i], of.projection, gradient[i]);
              if constexpr (Centred) gradient[i] -= of.level;
              gradient[i] = fused_multiply_add(gradient[i], of.rstd, added[i]);
            }
            of.dx.store(gradient, column);
          }
        }
        if constexpr (PerHead) leave(cta_index() * Most + in_batch);
      }
      if constexpr (!PerHead) leave(cta_index());
    }
    cta_barrier();  // the next batch's rows take the place of these
    adds = true;
  }
}

template <bool Centred, int Threads, int RowsPerCta, int Least, int Most, bool PerHead, int Typed, class Params>
TRTC_DEVICE void norm_backward_rows(const Params& params) {
  if constexpr (Typed != 0) {
    CommonType<forward_vector> type(params.hidden, true);
    type.add(params.dy, params.dy_dtype, params.dy_outer_stride, params.dy_inner_stride);
    type.add(params.x, params.x_dtype, params.x_outer_stride, params.x_inner_stride);
    type.add(params.dresidual, params.dresidual_dtype, params.dresidual_outer_stride, params.dresidual_inner_stride);
    type.add(params.dx, params.dx_dtype, params.dx_outer_stride, params.dx_inner_stride);
    type.add(params.weight, params.weight_dtype, 0, 0);
    if constexpr ((Typed & half_rows) != 0) {
      if (type.is_half()) {
        return norm_backward_of<TypedRow<bfloat16>, Centred, Threads, RowsPerCta, Least, Most, PerHead>(params);
      }
    }
    if constexpr ((Typed & float_rows) != 0) {
      if (type.is_float()) {
        return norm_backward_of<TypedRow<float>, Centred, Threads, RowsPerCta, Least, Most, PerHead>(params);
      }
    }
  }
  norm_backward_of<AnyRow, Centred, Threads, RowsPerCta, Least, Most, PerHead>(params);
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
    AnyRow::at(params.dweight, params.dweight_dtype, offset, columns).store(of_weight, 0);
  }
  if (params.dbias_dtype != 0) {
    const float of_bias[1] = {params.dweight_dtype != 0 ? sum[1] : sum[0]};
    AnyRow::at(params.dbias, params.dbias_dtype, offset, columns).store(of_bias, 0);
  }
}

}  // namespace trtc
