// Backward: dx = scale * y * (dy - sum(dy * y)) of y = softmax(scale * x), and dx = scale * (dy - exp(y) * sum(dy)) of
// its logarithm. Where y is 0, or -infinity, dx is 0 whatever dy is there. A sink's gradient is, of each row,
// -exp(sink - lse) times that sum: a second launch adds up the rows of a head.
#pragma once

#include "softmax.cuh"

namespace trtc {

template <class Config, class Params>
TRTC_DEVICE void softmax_backward(const Params& params) {
  using Gradient = typename Config::Gradient;
  using Input = typename Config::Input;
  using Output = typename Config::Output;
  using Part = typename Config::Part;
  constexpr int N = Config::vector;
  constexpr int steps = Config::steps;
  constexpr bool chunked = Config::chunked;
  constexpr bool again = Config::repeats || chunked;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(), 1,
                                 again, again ? 2 : 1>;
  // What no column has, and what did not take part.
  const uint32 nothing = Config::logarithm ? minus_infinity_bits<Input>() : 0;

  const auto place = softmax_place<Config>(params);
  const auto* all_y = static_cast<const Input*>(params.y) + place.first_column;
  const auto* all_dy = static_cast<const Gradient*>(params.dy) + place.first_column;
  auto* all_dx = static_cast<Output*>(params.dx) + place.first_column;
  const bool shifted = !rows_aligned<Input, N>(all_y, params.y_outer_stride, params.y_inner_stride);
  Reduction reduction;
  reduction.begin(params, place.rank);

  int64 first_row = place.begin_row();
  do {
    const int64 row = first_row + place.row_in_cta;
    const bool exists = place.exists(row, params.rows);
    const int columns = place.columns(row, params.rows);
    const Range of_row = range_of<Config::causal>(params, row);
    const Range range{of_row.begin - place.first_column, of_row.end - place.first_column};
    const Input* y = all_y + row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    const Gradient* dy = all_dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    Output* dx = all_dx + row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);
    const int shift = shifted ? Part::shift_of(y) : 0;
    const bool dy_aligned = rows_aligned<Gradient, N>(dy - shift, 0, 0);
    const bool dx_aligned = rows_aligned<Output, N>(dx - shift, 0, 0);

    Vec<Input, N> of_y[steps];
    Vec<Gradient, N> of_dy[steps];
    const auto load = [&](const Part& part, int first) {
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        of_y[k].fill(nothing);
        of_dy[k].fill(0);
        if (!Config::causal || range.meets(part, k, first)) {
          of_y[k] = part.load(y + first, k, true, nothing);
          of_dy[k] = part.load(dy + first, k, dy_aligned, 0);
        }
      }
    };
    // Whether a slot's column has a gradient.
    const auto takes_part = [&](const Part& part, int k, int i, int first) {
      const bool inside = !Config::causal || range.has(first + part.column_of(k, i));
      return inside && of_y[k].get(i) != (Config::logarithm ? minus_infinity() : 0.0f);
    };

    // ---- The sum over the row
    ShiftedSum<Config::threads, steps, N> sums;
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part{place.thread, shift, min(columns - first, static_cast<int>(Part::capacity))};
      load(part, first);
      float terms[steps * N];
#pragma unroll
      for (int k = 0; k < steps; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float term = Config::logarithm ? of_dy[k].get(i) : of_dy[k].get(i) * of_y[k].get(i);
          terms[k * N + i] = takes_part(part, k, i, first) ? term : 0.0f;
        }
      }
      sums.add(part, terms, shifted);
    }
    const Part whole{place.thread, shift, 0};
    float sum[1] = {sums.template share<Config::rows_per_cta>(whole, place.row_in_cta, shifted)};
    reduction.template reduce_in_cta<Sum, 0>(sum);
    reduction.gather(sum);
    const float of_row_sum = reduce_lanes<Sum, Config::ctas_per_row>(sum[0]);

    if constexpr (Config::has_dsink) {
      if (place.thread == 0 && place.rank == 0 && exists) {
        static_cast<float*>(params.row_partials)[row] =
            sink_gradient(params, row, of_row_sum, sink_of<typename Config::Sink>(params, row));
      }
    }

    // ---- dx
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part{place.thread, shift, min(columns - first, static_cast<int>(Part::capacity))};
      if constexpr (chunked) load(part, first);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        Vec<Output, N> result;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          float gradient[2] = {0.0f, 0.0f};
#pragma unroll
          for (int j = 0; j < (N == 1 ? 1 : 2); ++j) {
            const float of_slot = of_y[k].get(i + j), dy_of_slot = of_dy[k].get(i + j);
            float found;
            if constexpr (Config::logarithm) {
              found = fused_multiply_add(-exponential_for<Output>(of_slot), of_row_sum, dy_of_slot);
            } else {
              found = of_slot * (dy_of_slot - of_row_sum);
            }
            gradient[j] = takes_part(part, k, i + j, first) ? params.scale * found : 0.0f;
          }
          result.set(i, gradient[0], gradient[1]);
        }
        part.store(result, dx + first, k, dx_aligned);
      }
    }
    first_row += place.stride;
    reduction.next_row();
  } while (Config::repeats && first_row < params.rows);
}

template <class Output, class Params>
TRTC_DEVICE void softmax_backward_finish(const Params& params) {
  Vec<Output, 1> value;
  value.set(0, sum_of_head(params), 0.0f);
  value.store(static_cast<Output*>(params.dsink) + cta_index(), thread_index() == 0);
}

}  // namespace trtc
