// Forward and backward of longer rows, which are in shared memory while the CTAs that share one work on it: what is on
// its way depends on no register, and the loops over it have few instructions. As softmax_forward.cu and
// softmax_backward.cu have it, the order of a sum depends on the columns alone.
#pragma once

#include "blocks.cuh"
#include "softmax.cuh"

namespace trtc {

template <class Config>
using StagedBlocks = Blocks<Config::vector, !Config::causal>;

// What a CTA has of a row.
template <class Config, class Params>
TRTC_DEVICE StagedBlocks<Config> staged_part(const Params& params, const Place<Config>& place, int64 row, int shift) {
  const Range range = range_of<Config::causal>(params, row).from(place.first_column);
  const int columns = max(place.most_columns, 0);
  return {place.thread, threads_in_cta(), shift, columns, max(range.begin, 0), min(range.end, columns)};
}

template <class Config, class Params>
TRTC_DEVICE void softmax_forward_staged(const Params& params) {
  using Input = typename Config::Input;
  using Output = typename Config::Output;
  using Mask = typename Config::Mask;
  constexpr int N = Config::vector;
  using Part = StagedBlocks<Config>;
  using Reduction = RowReduction<Config::threads, 1, Config::ctas_per_row, Config::exchange(), 2, Config::repeats,
                                 Config::repeats ? 2 : 1, true>;
  constexpr bool added = Config::mask_is_added;
  constexpr bool counts = is_same<Output, float>;
  constexpr bool folds = !counts && !added;
  constexpr bool excludes = Config::causal || Config::has_mask;
  // Terms take the place of x.
  constexpr bool keeps = counts && is_same<Input, float> && !added && !Config::logarithm;

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = softmax_place<Config>(params);
  auto* staged = reinterpret_cast<Input*>(shared);
  auto* staged_mask = reinterpret_cast<Mask*>(shared + staged_bytes<Input>(Part::room(softmax_slice<Config>(params))));
  const auto* all_x = static_cast<const Input*>(params.x) + place.first_column;
  auto* all_out = static_cast<Output*>(params.out) + place.first_column;
  const bool shifted = !rows_aligned<Input, N>(all_x, params.x_outer_stride, params.x_inner_stride);
  const float scale = scale_magnitude(params);
  const float factor = folds ? scale : 1.0f;
  Reduction reduction;
  reduction.begin(params, place.rank);

  int64 turn = place.begin_row();
  do {
    const int64 row = row_of_turn<Config>(params, turn);
    const Input* x = all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    Output* out = all_out + row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    const Part part = staged_part<Config>(params, place, row, shifted ? elements_past<N>(x) : 0);
    const auto out_whole = part.inside(rows_aligned<Output, N>(out - part.shift, 0, 0), 0, part.columns);
    const bool has_last = part.fetch(staged, x, true, minus_infinity_bits<Input>());
    if constexpr (Config::has_mask) {
      const Mask* mask = static_cast<const Mask*>(params.mask) + mask_offset(params, row) + place.first_column;
      part.fetch_beside(staged_mask, mask, rows_aligned<Mask, N>(mask - part.shift, 0, 0),
                        beside_query(params, place, row));
    }
    wait_async();
    if constexpr (Config::causal) part.blank(staged, minus_infinity_bits<Input>(), has_last);
    const int first = part.own, stop = part.stop();

    // v of a block, but for `factor`.
    const auto read = [&](int block, float (&v)[N]) {
      Vec<Input, N> value;
      Vec<Mask, N> of_mask;
      value.load_shared(staged + block * N);
      if constexpr (added) of_mask.load_shared(staged_mask + block * N);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[i] = value.get(i);
        if constexpr (added) {
          v[i] = masked_score(v[i], params.scale, of_mask.get(i));
        } else if constexpr (!folds) {
          v[i] *= scale;
        }
      }
    };

    // ---- x takes the scale's sign
    if (!added && !(params.scale > 0.0f)) {
      // -infinity does not take part whatever the scale.
      const float sign = scale_sign(params);
#pragma unroll 1
      for (int block = first; block < stop; block += part.threads) {
        Vec<Input, N> value;
        value.load_shared(staged + block * N);
        float v[N];
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = value.get(i) == minus_infinity() ? minus_infinity() : value.get(i) * sign;
#pragma unroll
        for (int i = 0; i < N; i += 2) value.set(i, v[i], v[i + 1]);  // exact
        value.template store<Space::shared>(staged + block * N, true);
      }
    }

    // ---- The largest v
    float most[1] = {minus_infinity()};
    if constexpr (added) {
#pragma unroll 1
      for (int block = first; block < stop; block += part.threads) {
        float v[N];
        read(block, v);
#pragma unroll
        for (int i = 0; i < N; ++i) most[0] = Largest::of(most[0], v[i]);
      }
    } else {
      Vec<Input, N> largest_of_place;
      largest_of_place.fill(minus_infinity_bits<Input>());
#pragma unroll 1
      for (int block = first; block < stop; block += part.threads) {
        Vec<Input, N> value;
        value.load_shared(staged + block * N);
        if constexpr (Config::has_mask) {
          Vec<Mask, N> of_mask;
          of_mask.load_shared(staged_mask + block * N);
          value.replace(of_mask, Config::mask_keeps, minus_infinity_bits<Input>());
          value.template store<Space::shared>(staged + block * N, true);
        }
        largest_of_place.keep_larger(value);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) most[0] = Largest::of(most[0], largest_of_place.get(i));
      if constexpr (!folds) most[0] *= scale;
    }
    const float of_thread = most[0];
    reduction.template reduce_in_cta<Largest, 0>(most);
    const float largest = most[0];
    const float about = largest == minus_infinity() ? 0.0f : largest;

    const Exponentials<Input, Output, added> terms(about, factor);

    // ---- The sum of exponentials about it
    // Those of the largest v, which are 1, apart: see softmax_forward().
    const bool has_ones = counts && of_thread - about == 0.0f;
    float ones = 0.0f;
    ShiftedSum<Config::threads, N, true> sums;
#pragma unroll 1
    for (int block = first; block < stop; block += part.threads) {
      float v[N], p[N];
      read(block, v);
#pragma unroll
      for (int i = 0; i < N; ++i) p[i] = terms.of(v[i]);
      if constexpr (keeps) {
        Vec<Input, N> kept;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          // What is excluded has a mark.
          kept.set(i, excludes && v[i] == minus_infinity() ? -0.0f : p[i],
                   excludes && v[i + 1] == minus_infinity() ? -0.0f : p[i + 1]);
        }
        kept.template store<Space::shared>(staged + block * N, true);
      }
      if (has_ones) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          ones += v[i] == about ? 1.0f : 0.0f;
          p[i] = v[i] == about ? 0.0f : p[i];
        }
      }
      sums.add(p);
    }
    float sum[counts ? 2 : 1] = {sums.template share<1>(place.thread, part.shift, 0, shifted)};
    if constexpr (counts) sum[1] = ones;
    reduction.template reduce_in_cta<Sum, 1>(sum);
    // Exactly 1 where one element takes part alone.
    float total = terms.is_fused ? divide(sum[0], terms.peak) : sum[0] * (1.0f / large_one);
    if constexpr (counts) total += sum[1];
    if (total < 0.5f) total = 0.0f;  // nothing takes part
    RowTotals totals = totals_of_row<Config>(params, place, reduction, row, factor, largest, total, false);
    if constexpr (terms.is_fused) totals.quotient *= approximate_reciprocal(terms.peak) * large_one;

    // ---- y
    const int used = part.first(), blocks = part.all();
#pragma unroll 1
    for (int block = place.thread; block < blocks; block += part.threads) {
      Vec<Output, N> result;
      result.fill(Config::logarithm ? minus_infinity_bits<Output>() : 0);
      if (!Config::causal || (block >= used && block < stop)) {
        float v[N];
        if constexpr (keeps) {
          Vec<Input, N> kept;
          kept.load_shared(staged + block * N);
#pragma unroll
          for (int i = 0; i < N; ++i) v[i] = kept.get(i);
        } else {
          read(block, v);
        }
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (Config::logarithm) {
            y[i] = totals.logarithm_of(v[i], factor);
          } else {
            y[i] = totals.template quotient_of<Output>(keeps ? v[i] : terms.of(v[i]));
          }
        }
        if constexpr (keeps && excludes) {
#pragma unroll
          for (int i = 0; i < N; ++i) y[i] += 0.0f;  // the mark is -0
        }
        if (!Config::logarithm && totals.is_small) {
#pragma unroll
          for (int i = 0; i < N; ++i) y[i] *= 1.0f / large_one;
        }
        if (excludes && totals.is_nan()) {
          // But for what is excluded, and -infinity beside it.
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const bool is_out = keeps ? bits_from_float(v[i]) == 0x80000000u : v[i] == minus_infinity();
            if (is_out) y[i] = Config::logarithm ? minus_infinity() : 0.0f;
          }
        }
#pragma unroll
        for (int i = 0; i < N; i += 2) result.set(i, y[i], y[i + 1]);
      }
      part.store(result, out, block, out_whole);
    }
    turn += place.stride;
    reduction.next_row();
  } while (Config::repeats && turn < params.rows);
}

template <class Config, class Params>
TRTC_DEVICE void softmax_backward_staged(const Params& params) {
  using Gradient = typename Config::Gradient;
  using Input = typename Config::Input;
  using Output = typename Config::Output;
  constexpr int N = Config::vector;
  using Part = StagedBlocks<Config>;
  using Reduction = RowReduction<Config::threads, 1, Config::ctas_per_row, Config::exchange(), 1, Config::repeats,
                                 Config::repeats ? 2 : 1, true>;
  // What a slot without a column has, too.
  const uint32 absent = absent_bits<Config::logarithm, Input>();

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = softmax_place<Config>(params);
  auto* staged_y = reinterpret_cast<Input*>(shared);
  auto* staged_dy =
      reinterpret_cast<Gradient*>(shared + staged_bytes<Input>(Part::room(softmax_slice<Config>(params))));
  const auto* all_y = static_cast<const Input*>(params.y) + place.first_column;
  const auto* all_dy = static_cast<const Gradient*>(params.dy) + place.first_column;
  auto* all_dx = static_cast<Output*>(params.dx) + place.first_column;
  const bool shifted = !rows_aligned<Input, N>(all_y, params.y_outer_stride, params.y_inner_stride);
  const bool y_apart = rows_apart<N>(params, params.columns, params.y_outer_stride, params.y_inner_stride);
  const bool dy_apart = rows_apart<N>(params, params.columns, params.dy_outer_stride, params.dy_inner_stride);
  Reduction reduction;
  reduction.begin(params, place.rank);

  int64 row = place.begin_row();
  do {
    const Input* y = all_y + row_offset(params, row, params.y_outer_stride, params.y_inner_stride);
    const Gradient* dy = all_dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
    Output* dx = all_dx + row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);
    const Part part = staged_part<Config>(params, place, row, shifted ? elements_past<N>(y) : 0);
    const auto dx_whole = part.inside(rows_aligned<Output, N>(dx - part.shift, 0, 0), 0, part.columns);
    const auto beside = [&](bool apart) { return beside_part(place, params.columns, row, params.rows, apart); };
    const bool has_last = part.fetch_beside(staged_y, y, true, beside(y_apart));
    part.fetch_beside(staged_dy, dy, rows_aligned<Gradient, N>(dy - part.shift, 0, 0), beside(dy_apart));
    wait_async();
    if (Config::causal || part.has_edges()) part.blank(staged_y, absent, has_last);
    const int first = part.own, stop = part.stop();

    // ---- The sum over the row
    ShiftedSum<Config::threads, N, true> sums;
#pragma unroll 1
    for (int block = first; block < stop; block += part.threads) {
      Vec<Input, N> of_y;
      Vec<Gradient, N> of_dy;
      of_y.load_shared(staged_y + block * N);
      of_dy.load_shared(staged_dy + block * N);
      of_dy.clear_where(of_y, absent);
      float term[N];
      gradient_terms<Config::logarithm>(of_y, of_dy, term);
      sums.add(term);
    }
    float sum[1] = {sums.template share<1>(place.thread, part.shift, 0, shifted)};
    reduction.template reduce_in_cta<Sum, 0>(sum);
    reduction.gather(sum);
    const float of_row = reduce_lanes<Sum, Config::ctas_per_row>(sum[0]);
    if constexpr (Config::leaves_sums) {
      if (place.thread == 0 && place.rank == 0) static_cast<float*>(params.row_sums)[row] = of_row;
    }

    // ---- dx
    const int used = part.first(), blocks = part.all();
#pragma unroll 1
    for (int block = place.thread; block < blocks; block += part.threads) {
      Vec<Output, N> result;
      result.fill(0);
      if (!Config::causal || (block >= used && block < stop)) {
        Vec<Input, N> of_y;
        Vec<Gradient, N> of_dy;
        of_y.load_shared(staged_y + block * N);
        of_dy.load_shared(staged_dy + block * N);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          float found[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            found[j] = gradient_of<Config::logarithm, Output>(of_y.get(i + j), of_dy.get(i + j), of_row, params.scale);
          }
          result.set(i, found[0], found[1]);
        }
        result.clear_where(of_y, absent);
      }
      part.store(result, dx, block, dx_whole);
    }
    row += place.stride;
    reduction.next_row();
  } while (Config::repeats && row < params.rows);
}

}  // namespace trtc
