// Forward: y = softmax(scale * x), or its logarithm.
#pragma once

#include "softmax.cuh"

namespace trtc {

// A part of a row, as it is read. For a narrow result, `v` of a slot is yet to be multiplied by factor(): the scale
// goes into the one fused multiply-add that an exponential needs.
template <class Config, class Params>
struct SoftmaxRow {
  using Input = typename Config::Input;
  using Mask = typename Config::Mask;
  using Part = typename Config::Part;
  enum : bool {
    narrow = !is_same<typename Config::Output, float>,
    folds = narrow && !Config::mask_is_added,
  };
  enum : int { N = Config::vector, steps = Config::steps };

  const Input* x;
  Range range;       // of the part's columns
  const Mask* mask;  // or what is added
  Beside beside;     // of x
  Beside mask_beside;
  RowTile<Config> tile;

  static TRTC_DEVICE float factor(const Params& params) { return folds ? scale_magnitude(params) : 1.0f; }

  // -infinity where there is no column or it does not take part.
  TRTC_DEVICE void load(const Params& params, float (&v)[steps * N], const Part& part, int first) const {
    Vec<Input, N> value[steps];
    Vec<Mask, N> mask_of[steps];
    bool settles = false, mask_settles = false;
    if constexpr (Config::tiled) {
      tile.load(value, minus_infinity_bits<Input>());
    } else {
      settles = part.bring(value, x + first, minus_infinity_bits<Input>(), beside, true);
    }
    if constexpr (Config::has_mask) {
      const bool aligned = rows_aligned<Mask, N>(mask + first - part.shift, 0, 0);
      mask_settles = part.bring(mask_of, mask + first, 0, mask_beside, aligned);
    }
    if (settles) part.settle(value, x + first, minus_infinity_bits<Input>());
    if constexpr (Config::has_mask) {
      if (mask_settles) part.settle(mask_of, mask + first, 0, true);
    }
#pragma unroll
    for (int k = 0; k < steps; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float& element = v[k * N + i];
        element = value[k].get(i);
        if constexpr (Config::mask_is_added) {
          element = masked_score(element, params.scale, mask_of[k].get(i));
        } else if constexpr (Config::has_mask) {
          if (mask_of[k].is_set(i) != Config::mask_keeps) element = minus_infinity();
        }
      }
    }
    if constexpr (!Config::mask_is_added) {
      if (params.scale > 0.0f) {
#pragma unroll
        for (int i = 0; i < (folds ? 0 : steps * N); ++i) v[i] *= params.scale;
      } else {
        // -infinity does not take part whatever the scale.
        const float by = folds ? scale_sign(params) : params.scale;
#pragma unroll
        for (int i = 0; i < steps * N; ++i) v[i] = v[i] == minus_infinity() ? v[i] : v[i] * by;
      }
    }
  }

  // Whether a column is excluded, or -infinity.
  TRTC_DEVICE bool excludes(int column) const {
    if (!range.has(column)) return true;
    Vec<Input, 1> of_x;
    of_x.word[0] = load_element(x + column);
    bool found = of_x.get(0) == minus_infinity();
    if constexpr (Config::has_mask) {
      Vec<Mask, 1> of_mask;
      of_mask.word[0] = load_element(mask + column);
      if constexpr (Config::mask_is_added) {
        found = found || of_mask.get(0) == minus_infinity();
      } else {
        found = found || of_mask.is_set(0) != Config::mask_keeps;
      }
    }
    return found;
  }
};

template <class Config, class Params>
TRTC_DEVICE void softmax_forward(const Params& params) {
  using Input = typename Config::Input;
  using Output = typename Config::Output;
  using Part = typename Config::Part;
  using Row = SoftmaxRow<Config, Params>;
  constexpr int N = Config::vector;
  constexpr int steps = Config::steps;
  constexpr bool chunked = Config::chunked;
  constexpr bool excludes = Config::causal || Config::has_mask;
  constexpr bool again = Config::repeats || chunked;
  // Whether Vecs that have nothing of a row are passed over. Where a row has four warps, these branches take longer
  // than what they save, and 9 registers (16 rows of 4096 keys of bfloat16: 1.82 us in a graph, and 1.73).
  constexpr bool passes_over = Config::causal || chunked || Config::threads < 128;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(), 2,
                                 again, again ? 2 : 1>;

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = softmax_place<Config>(params);
  const auto* all_x = static_cast<const Input*>(params.x) + place.first_column;
  auto* all_out = static_cast<Output*>(params.out) + place.first_column;
  const bool shifted = !Config::tiled && !rows_aligned<Input, N>(all_x, params.x_outer_stride, params.x_inner_stride);
  const bool apart = rows_apart<N>(params, params.columns, params.x_outer_stride, params.x_inner_stride);
  const float factor = Row::factor(params);
  Reduction reduction;
  reduction.begin(params, place.rank);
  RowTiles<Config, 1> tiles;
  if constexpr (Config::tiled) tiles.begin(shared, params, place);

  int64 first_row = place.begin_row();
  do {
    const int64 row = row_of_turn<Config>(params, first_row + place.row_in_cta);
    const bool exists = place.exists(row, params.rows);
    const int columns = Config::tiled ? params.columns : place.columns(row, params.rows);
    Row in;
    if constexpr (Config::tiled) {
      tiles.coming.template fetch<Input>({params.x, params.x_outer_stride, params.x_inner_stride}, params);
      if (!tiles.wait()) continue;  // to the first rows' turn
      in.tile = tiles.now;
    }
    in.x = all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    in.range = range_of<Config::causal>(params, row).from(place.first_column);
    in.beside = beside_part(place, params.columns, row, params.rows, apart);
    in.mask = nullptr;
    in.mask_beside = {false, false};
    if constexpr (Config::has_mask) {
      in.mask_beside = beside_query(params, place, row);
      in.mask = static_cast<const typename Config::Mask*>(params.mask) + mask_offset(params, row) + place.first_column;
    }
    Output* out = all_out + row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    const int shift = shifted ? elements_past<N>(in.x) : 0;
    const bool out_aligned = rows_aligned<Output, N>(out - shift, 0, 0);

    const auto term = [&](float v, float about) { return large_exponential_for<Output>(v - about, factor); };

    // ---- The largest v, and the sum of exponentials about it
    float v[steps * N];
    float p[steps * N];
    float largest = minus_infinity();
    ShiftedSum<Config::threads, N> sums;
    // For a float result, the terms of the largest v, which are 1, are counted apart: others that are added to them are
    // rounded to their ulp, a dozen times in a row that one element dominates.
    constexpr bool counts = is_same<Output, float>;
    constexpr float one = large_one;
    float ones = 0.0f;
    ShiftedSum<Config::threads, N> chunks_ones;  // which are no integers once a chunk has a larger v
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part = softmax_part<Config>(place.thread, shift, columns, in.range, first);
      in.load(params, v, part, first);
      float most[1] = {v[0]};
#pragma unroll
      for (int i = 1; i < steps * N; ++i) most[0] = Largest::of(most[0], v[i]);
      const float of_thread = most[0];
      reduction.template reduce_in_cta<Largest, 0>(most);
      if constexpr (chunked) {
        const float before = largest;
        largest = Largest::of(before, most[0]);
        if (before != minus_infinity()) {
          const float less = exponential((before - largest) * factor);
          sums.scale(less);
          if constexpr (counts) chunks_ones.scale(less);
        }
        reduction.next_row();  // the values of this use are of the chunk
      } else {
        largest = most[0];
      }
      const float about = largest == minus_infinity() ? 0.0f : largest;
      const bool has_ones = counts && of_thread - about == 0.0f;
      float summand[N];
      const auto sum_up = [&](int k) {
#pragma unroll
        for (int i = 0; i < N; ++i) summand[i] = p[k * N + i];
        if (has_ones) {
#pragma unroll
          for (int i = 0; i < N; ++i) summand[i] = v[k * N + i] == about ? 0.0f : summand[i];
        }
      };
      // A full part has a way of its own: none of its slots is late or passed over (16 rows of 1024 keys of
      // bfloat16: 1.67 us in a graph, and 1.80; float32 gains 0.01 us, and takes a sixth longer to compile).
      const bool full = passes_over && !counts && !chunked && !Config::tiled && part.is_full();
      if (!full) {
#pragma unroll
        for (int k = 0; k < steps; ++k) {
#pragma unroll
          for (int i = 0; i < N; ++i) p[k * N + i] = 0.0f;
          if (!passes_over || part.meets(k)) {
#pragma unroll
            for (int i = 0; i < N; ++i) p[k * N + i] = term(v[k * N + i], about);
            sum_up(k);
            sums.add(part, k, summand);
          }
        }
      } else {
#pragma unroll
        for (int k = 0; k < steps; ++k) {
#pragma unroll
          for (int i = 0; i < N; ++i) summand[i] = p[k * N + i] = term(v[k * N + i], about);
          sums.add(summand);
        }
      }
      if (!chunked && has_ones) {
#pragma unroll
        for (int i = 0; i < steps * N; ++i) ones += v[i] == about ? 1.0f : 0.0f;
      }
      if (shifted) {
        sum_up(0);
        sums.add_late(part, summand);
      }
      if (chunked && has_ones) {
#pragma unroll
        for (int k = 0; k < steps; ++k) {
#pragma unroll
          for (int i = 0; i < N; ++i) summand[i] = v[k * N + i] == about ? 1.0f : 0.0f;
          chunks_ones.add(part, k, summand);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) summand[i] = v[i] == about ? 1.0f : 0.0f;
        chunks_ones.add_late(part, summand);
      }
    }
    float sum[counts ? 2 : 1] = {
        sums.template share<Config::rows_per_cta>(place.thread, shift, place.row_in_cta, shifted)};
    if constexpr (counts && chunked) {
      ones = chunks_ones.template share<Config::rows_per_cta, 1>(place.thread, shift, place.row_in_cta, shifted);
    }
    if constexpr (counts) sum[1] = ones;
    reduction.template reduce_in_cta<Sum, 1>(sum);
    float total = sum[0] * (1.0f / one);
    if constexpr (counts) total += sum[1];
    if (total < 0.5f) total = 0.0f;  // nothing takes part

    RowTotals totals = totals_of_row<Config>(params, place, reduction, row, factor, largest, total, chunked);
    if (totals.is_small && !chunked && !Config::logarithm) {
#pragma unroll
      for (int i = 0; i < steps * N; ++i) p[i] *= 1.0f / one;
    }

    // ---- y
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part = softmax_part<Config>(place.thread, shift, columns, in.range, first);
      if (excludes && totals.is_nan()) {
        // A row of NaN: but for what is excluded, and -infinity beside it.
#pragma unroll 1
        for (int slot = 0; slot < steps * N; ++slot) {
          const int column = part.column_of(slot / N, slot % N);
          if (column < part.columns) {
            const bool is_nan = !in.excludes(first + column);
            Vec<Output, 1> result;
            result.set(0, is_nan ? totals.sum : Config::logarithm ? minus_infinity() : 0.0f, 0.0f);
            result.store_element(out + first + column, 0, true);
          }
        }
        continue;
      }
      if constexpr (chunked) in.load(params, v, part, first);
      Vec<Output, N> result[steps];
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        result[k].fill(Config::logarithm ? minus_infinity_bits<Output>() : 0);
        if (!(Config::causal || Config::tiled) || part.meets(k)) {
#pragma unroll
          for (int i = 0; i < N; i += 2) {
            float y[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int slot = k * N + i + j;
              if constexpr (Config::logarithm) {
                y[j] = totals.logarithm_of(v[slot], factor);
              } else {
                float element = p[slot];
                if constexpr (chunked) element = term(v[slot], totals.about) * (totals.is_small ? 1.0f / one : 1.0f);
                y[j] = totals.template quotient_of<Output>(element);
              }
            }
            result[k].set(i, y[0], y[1]);
          }
        }
      }
      if constexpr (Config::tiled) {
        in.tile.put(result);
        in.tile.template store<Output>({params.out, params.out_outer_stride, params.out_inner_stride}, params);
      } else {
        part.store(result, out + first, out_aligned);
      }
    }
    first_row += place.stride;
    reduction.next_row();
  } while (Config::tiled ? tiles.turn(params, place) : Config::repeats && first_row < params.rows);
}

}  // namespace trtc
