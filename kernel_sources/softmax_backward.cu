// Backward: dx = scale * y * (dy - sum(dy * y)) of y = softmax(scale * x), and dx = scale * (dy - exp(y) * sum(dy)) of
// its logarithm. Where y is 0, or -infinity, dx is 0 whatever dy is there. The gradients of sinks and of a mask of
// floats have launches of their own, for which the first one leaves these sums.
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
  static_assert(!Config::in_turn || (Config::repeats && !chunked && !Config::causal && Config::rows_per_cta == 1),
                "a CTA takes whole rows in turn");
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(), 1,
                                 again, again ? 2 : 1>;
  // What a slot without a column has, too.
  const uint32 absent = absent_bits<Config::logarithm, Input>();

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = softmax_place<Config>(params);
  const auto* all_y = static_cast<const Input*>(params.y) + place.first_column;
  const auto* all_dy = static_cast<const Gradient*>(params.dy) + place.first_column;
  auto* all_dx = static_cast<Output*>(params.dx) + place.first_column;
  const bool shifted = !Config::tiled && !rows_aligned<Input, N>(all_y, params.y_outer_stride, params.y_inner_stride);
  Reduction reduction;
  reduction.begin(params, place.rank);
  const auto y_of = [&](int64 row) {
    return all_y + row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
  };
  const auto dy_of = [&](int64 row) {
    return all_dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
  };

  // Whether rows come before their turn; else they are read when they have it.
  const bool comes = Config::in_turn && params.columns % N == 0 && !shifted &&
                     rows_aligned<Gradient, N>(all_dy, params.dy_outer_stride, params.dy_inner_stride);
  NextRow<Input, Config> next_y;
  NextRow<Gradient, Config> next_dy;
  const auto fetch = [&](int64 row) {
    if (comes && row < params.rows) {
      next_y.fetch(y_of(row), place);
      next_dy.fetch(dy_of(row), place);
    }
  };
  if constexpr (Config::in_turn) {
    next_y.begin(shared, place);
    next_dy.begin(shared + staged_bytes<Input>(next_y.elements), place);
    fetch(place.begin_row());
  }
  RowTiles<Config, 2> tiles;
  if constexpr (Config::tiled) tiles.begin(shared, params, place);

  int64 first_row = place.begin_row();
  do {
    if constexpr (Config::tiled) {
      tiles.coming.template fetch<Input>({params.y, params.y_outer_stride, params.y_inner_stride}, params);
      const RowArray gradients{params.dy, params.dy_outer_stride, params.dy_inner_stride};
      tiles.coming.of_array(1).template fetch<Gradient>(gradients, params);
      if (!tiles.wait()) continue;  // to the first rows' turn
    }
    const int64 row = first_row + place.row_in_cta;
    const bool exists = place.exists(row, params.rows);
    const int columns = Config::tiled ? params.columns : place.columns(row, params.rows);
    const Range range = range_of<Config::causal>(params, row).from(place.first_column);
    const Input* y = y_of(row);
    const Gradient* dy = dy_of(row);
    Output* dx = all_dx + row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);
    const int shift = shifted ? elements_past<N>(y) : 0;
    const bool dy_aligned = rows_aligned<Gradient, N>(dy - shift, 0, 0);
    const bool dx_aligned = rows_aligned<Output, N>(dx - shift, 0, 0);

    Vec<Input, N> of_y[steps];
    Vec<Gradient, N> of_dy[steps];
    const auto beside = [&](int64 outer_stride, int64 inner_stride) {
      const bool apart = rows_apart<N>(params, params.columns, outer_stride, inner_stride);
      return beside_part(place, params.columns, row, params.rows, apart);
    };
    const auto load = [&](const Part& part, int first) {
      if constexpr (Config::in_turn) {
        if (comes) {
          wait_async();
          next_y.load(of_y, absent);
          next_dy.load(of_dy, 0);
          fetch(row + place.stride);
          return;
        }
      }
      if constexpr (Config::tiled) {
        tiles.now.load(of_y, absent);
        tiles.now.of_array(1).load(of_dy, 0);
      } else {
        // Only the second reading of a chunk meets a full part here, or one whose dy is not aligned.
        const bool settles = part.template bring<chunked>(of_y, y + first, absent,
                                                          beside(params.y_outer_stride, params.y_inner_stride), true);
        const bool dy_settles = part.template bring<chunked>(
            of_dy, dy + first, 0, beside(params.dy_outer_stride, params.dy_inner_stride), dy_aligned);
        if (settles) part.settle(of_y, y + first, absent);
        if (dy_settles) part.settle(of_dy, dy + first, 0, true);
      }
    };
    // ---- The sum over the row
    ShiftedSum<Config::threads, N> sums;
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part = softmax_part<Config>(place.thread, shift, columns, range, first);
      // A full part has a way of its own: none of its slots is late or passed over (16 rows of 1024 keys of bfloat16:
      // 1.53 us in a graph, and 1.68). With the branches in this order and the condition spelt out here, the compiler
      // places that way ahead of the other's text, and addresses the part by uniform registers (16 rows of 4096: 1.68
      // us, and 1.75).
      float term[N];
      const bool full = !Config::in_turn && !Config::tiled && part.is_full() && dy_aligned;
      if (!full) {
        load(part, first);
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          if (part.meets(k)) {
            of_dy[k].clear_where(of_y[k], absent);
            gradient_terms<Config::logarithm>(of_y[k], of_dy[k], term);
            sums.add(part, k, term);
          }
        }
        if (shifted) {
          gradient_terms<Config::logarithm>(of_y[0], of_dy[0], term);
          sums.add_late(part, term);
        }
      } else {
        part.bring_full(of_y, y + first);
        part.bring_full(of_dy, dy + first);
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          of_dy[k].clear_where(of_y[k], absent);
          gradient_terms<Config::logarithm>(of_y[k], of_dy[k], term);
          sums.add(term);
        }
      }
    }
    float sum[1] = {sums.template share<Config::rows_per_cta>(place.thread, shift, place.row_in_cta, shifted)};
    reduction.template reduce_in_cta<Sum, 0>(sum);
    reduction.gather(sum);
    const float of_row_sum = reduce_lanes<Sum, Config::ctas_per_row>(sum[0]);

    if constexpr (Config::leaves_sums) {
      if (place.thread == 0 && place.rank == 0 && exists) static_cast<float*>(params.row_sums)[row] = of_row_sum;
    }

    // ---- dx
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part = softmax_part<Config>(place.thread, shift, columns, range, first);
      if constexpr (chunked) load(part, first);
      Vec<Output, N> result[steps];
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        result[k].fill(0);
        if (!(Config::causal || Config::tiled) || part.meets(k)) {
#pragma unroll
          for (int i = 0; i < N; i += 2) {
            float found[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float of_slot = of_y[k].get(i + j), gradient = of_dy[k].get(i + j);
              found[j] = gradient_of<Config::logarithm, Output>(of_slot, gradient, of_row_sum, params.scale);
            }
            result[k].set(i, found[0], found[1]);
          }
          result[k].clear_where(of_y[k], absent);
        }
      }
      if constexpr (Config::tiled) {
        tiles.now.put(result);
        tiles.now.template store<Output>({params.dx, params.dx_outer_stride, params.dx_inner_stride}, params);
      } else if (!(part.is_full() && dx_aligned)) {
        part.store(result, dx + first, dx_aligned);
      } else {
        part.store_full(result, dx + first);
      }
    }
    first_row += place.stride;
    reduction.next_row();
  } while (Config::tiled ? tiles.turn(params, place) : Config::repeats && first_row < params.rows);
}

template <class Sink, class Output, class Params>
TRTC_DEVICE void softmax_backward_sink_gradient(const Params& params) {
  Vec<Output, 1> value;
  value.set(0, sink_gradient(params, sink_of_head<Sink>(params, cta_index())), 0.0f);
  value.store(static_cast<Output*>(params.dsink) + cta_index(), thread_index() == 0);
}

// The rows of dy and y, and the mask's gradient, for mask_gradient().
template <class Traits, class Params>
struct MaskGradientRows {
  using Gradient = typename Traits::Gradient;
  using Input = typename Traits::Input;
  using Output = typename Traits::Output;
  enum : int { N = mask_vector };
  const Params& params;
  const Input* y;
  const Gradient* dy;
  Output* dmask;
  bool together;  // all vectors of y and dy are aligned
  bool dmask_aligned;

  static TRTC_DEVICE MaskGradientRows of(const Params& params) {
    const auto* y = static_cast<const Input*>(params.y);
    const auto* dy = static_cast<const Gradient*>(params.dy);
    auto* dmask = static_cast<Output*>(params.dmask);
    return {params,
            y,
            dy,
            dmask,
            rows_aligned<Input, N>(y, params.y_outer_stride, params.y_inner_stride) &&
                rows_aligned<Gradient, N>(dy, params.dy_outer_stride, params.dy_inner_stride),
            rows_aligned<Output, N>(dmask, params.columns, 0)};
  }

  // `Whole`: the columns are neighbours, and all there.
  template <bool Whole>
  TRTC_DEVICE void load(int64 row, uint32 query, const MaskColumns& columns, float (&of_y)[N],
                        float (&of_dy)[N]) const {
    const Input* y_row = y + row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    const Gradient* dy_row = dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    Range range{0, params.columns};
    if constexpr (Traits::causal) range = causal_range(params, query);
    Vec<Input, N> y_vec;
    Vec<Gradient, N> dy_vec;
    y_vec.fill(0);
    dy_vec.fill(0);
    if constexpr (Whole) {
      if (!Traits::causal || (columns.first < range.end && columns.first + N > range.begin)) {
        y_vec.load_aligned(y_row + columns.first);
        dy_vec.load_aligned(dy_row + columns.first);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int at = columns.at(i);
        y_vec.set_bits(i, load_element(y_row + at, range.has(at)));
        dy_vec.set_bits(i, load_element(dy_row + at, range.has(at)));
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool used = (Whole && !Traits::causal) || range.has(columns.at(i));
      of_y[i] = used ? y_vec.get(i) : Traits::logarithm ? minus_infinity() : 0.0f;
      of_dy[i] = dy_vec.get(i);
    }
  }

  TRTC_DEVICE void store(int64 mask_row, const MaskColumns& columns, const float (&sum)[N]) const {
    Vec<Output, N> value;
#pragma unroll
    for (int i = 0; i < N; i += 2) value.set(i, sum[i], sum[i + 1]);
    Output* of_row = dmask + mask_row * params.columns;
    const bool vector = together && dmask_aligned && columns.first + N <= params.columns;
    value.store(of_row + columns.first, vector);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value.store_element(of_row + columns.at(i), i, !vector && columns.at(i) < params.columns);
    }
  }
};

template <class Traits, class Params>
TRTC_DEVICE void softmax_backward_mask_gradient(const Params& params) {
  mask_gradient<Traits::logarithm, Traits::ctas>(params, MaskGradientRows<Traits, Params>::of(params));
}

}  // namespace trtc
