// Forward: y = softmax(scale * x), or its logarithm.
#pragma once

#include "softmax.cuh"

namespace trtc {

// A part of a row, as it is read: v of each slot, -infinity where there is no column or it does not take part.
template <class Config, class Params>
struct SoftmaxRow {
  using Input = typename Config::Input;
  using Part = typename Config::Part;
  enum : int { N = Config::vector, steps = Config::steps };

  const Input* x;
  Range range;                        // of the part's columns
  const typename Config::Mask* mask;  // or what is added

  TRTC_DEVICE void load(const Params& params, float (&v)[steps * N], const Part& part, int first) const {
    Vec<Input, N> value[steps];
    Vec<typename Config::Mask, N> mask_of[Config::has_mask ? steps : 1];
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      const bool read = !Config::causal || range.meets(part, k, first);
      if (read) {
        value[k] = part.load(x + first, k, true, minus_infinity_bits<Input>());
      } else {
        value[k].fill(minus_infinity_bits<Input>());
      }
      if constexpr (Config::has_mask) {
        mask_of[k].fill(0);
        if (read) {
          const bool aligned = rows_aligned<typename Config::Mask, N>(mask + first - part.shift, 0, 0);
          mask_of[k] = part.load(mask + first, k, aligned, 0);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < steps; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float& element = v[k * N + i];
        const float x_of_slot = value[k].get(i);
        if constexpr (Config::mask_is_added) {
          element = fused_multiply_add(x_of_slot, params.scale, mask_of[k].get(i));
        } else {
          element = x_of_slot * params.scale;
        }
        // Whatever the scale's sign.
        bool out = x_of_slot == minus_infinity();
        if constexpr (Config::causal) {
          out = out || !range.has(first + part.column_of(k, i));
        }
        if constexpr (Config::mask_is_added) {
          out = out || mask_of[k].get(i) == minus_infinity();
        } else if constexpr (Config::has_mask) {
          out = out || mask_of[k].is_set(i) != Config::mask_keeps;
        }
        if (out) element = minus_infinity();
      }
    }
  }
};

template <class Config, class Params>
TRTC_DEVICE void softmax_forward(const Params& params) {
  using Input = typename Config::Input;
  using Output = typename Config::Output;
  using Part = typename Config::Part;
  constexpr int N = Config::vector;
  constexpr int steps = Config::steps;
  constexpr bool chunked = Config::chunked;
  // What is excluded, and -infinity beside it, is zero even in a row of NaN.
  constexpr bool excludes = Config::causal || Config::has_mask;
  constexpr bool again = Config::repeats || chunked;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(), 2,
                                 again, again ? 2 : 1>;

  const auto place = softmax_place<Config>(params);
  const auto* all_x = static_cast<const Input*>(params.x) + place.first_column;
  auto* all_out = static_cast<Output*>(params.out) + place.first_column;
  const bool shifted = !rows_aligned<Input, N>(all_x, params.x_outer_stride, params.x_inner_stride);
  Reduction reduction;
  reduction.begin(params, place.rank);

  int64 first_row = place.begin_row();
  do {
    const int64 row = first_row + place.row_in_cta;
    const bool exists = place.exists(row, params.rows);
    const int columns = place.columns(row, params.rows);
    const Range of_row = range_of<Config::causal>(params, row);
    SoftmaxRow<Config, Params> in;
    in.x = all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    in.range = {of_row.begin - place.first_column, of_row.end - place.first_column};
    in.mask = nullptr;
    if constexpr (Config::has_mask) {
      in.mask = static_cast<const typename Config::Mask*>(params.mask) + mask_offset(params, row) + place.first_column;
    }
    Output* out = all_out + row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    const int shift = shifted ? Part::shift_of(in.x) : 0;
    const bool out_aligned = rows_aligned<Output, N>(out - shift, 0, 0);

    // ---- The largest v, and the sum of exponentials about it
    float v[steps * N];
    float largest = minus_infinity();
    ShiftedSum<Config::threads, steps, N> sums;
    // For a float result, the terms that are 1 are counted apart: others that are added to them are rounded to their
    // ulp, a dozen times in a row that one element dominates.
    constexpr bool counts = is_same<Output, float>;
    float ones = 0.0f;
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part{place.thread, shift, min(columns - first, static_cast<int>(Part::capacity))};
      in.load(params, v, part, first);
      float most[1] = {v[0]};
#pragma unroll
      for (int i = 1; i < steps * N; ++i) most[0] = Largest::of(most[0], v[i]);
      reduction.template reduce_in_cta<Largest, 0>(most);
      if constexpr (chunked) {
        const float before = largest;
        largest = Largest::of(before, most[0]);
        if (before != minus_infinity()) {
          const float factor = exponential(before - largest);
          sums.scale(factor);
          ones *= factor;
        }
        reduction.next_row();  // the values of this use are of the chunk
      } else {
        largest = most[0];
      }
      const float about = largest == minus_infinity() ? 0.0f : largest;
      float p[steps * N];
#pragma unroll
      for (int i = 0; i < steps * N; ++i) {
        p[i] = exponential_for<Output>(v[i] - about);
        if constexpr (excludes) p[i] = v[i] == minus_infinity() ? -0.0f : p[i];  // a mark
        if constexpr (!chunked && Config::logarithm) {
          // Where the largest one is infinite, so that what takes part is NaN and not -infinity too.
          const float below = excludes ? (v[i] - about) + about * 0.0f : v[i] - about;
          v[i] = excludes && v[i] == minus_infinity() ? v[i] : below;
        } else if constexpr (!chunked) {
          v[i] = p[i];
        }
        if constexpr (counts) {
          const bool one = p[i] == 1.0f;
          ones += one ? 1.0f : 0.0f;
          p[i] = one ? 0.0f : p[i];
        }
      }
      sums.add(part, p, shifted);
    }
    const Part whole{place.thread, shift, 0};
    float sum[counts ? 2 : 1] = {sums.template share<Config::rows_per_cta>(whole, place.row_in_cta, shifted)};
    if constexpr (counts) sum[1] = ones;
    reduction.template reduce_in_cta<Sum, 1>(sum);

    // ---- Of all CTAs
    const float about = largest == minus_infinity() ? 0.0f : largest;
    float common = about;
    float total = sum[0];
    if constexpr (counts) total += sum[1];
    if constexpr (Config::ctas_per_row > 1) {
      float gathered[2] = {largest, total};
      reduction.gather(gathered);
      const float most = reduce_lanes<Largest, Config::ctas_per_row>(gathered[0]);
      common = most == minus_infinity() ? 0.0f : most;
      // A CTA of which nothing takes part adds nothing, however small the others are.
      const float of_cta =
          gathered[0] == minus_infinity() ? gathered[1] : gathered[1] * exponential(gathered[0] - common);
      total = reduce_lanes<Sum, Config::ctas_per_row>(of_cta);
    }
    if constexpr (Config::has_sink) {
      // One more term of the sum.
      const float sink = exists ? sink_of<typename Config::Sink>(params, row) : minus_infinity();
      const float before = total == 0.0f ? minus_infinity() : common;
      const float most = Largest::of(before, sink);
      common = most == minus_infinity() ? 0.0f : most;
      total = total == 0.0f ? 0.0f : total * exponential(before - common);
      total += exponential(sink - common);
    }
    // Nothing takes part: zeros.
    const float log_total = total == 0.0f ? 0.0f : logarithm(total);
    if constexpr (Config::has_lse) {
      if (place.thread == 0 && place.rank == 0 && exists) {
        static_cast<float*>(params.lse)[row] = total == 0.0f ? minus_infinity() : common + log_total;
      }
    }
    // From what a CTA's exponentials are about to what the row's are, over the sum: a factor, and what it is rounded
    // by.
    const float correction = largest == minus_infinity() ? 0.0f : about - common;
    const float inverse = total == 0.0f ? 0.0f : divide(1.0f, total);
    const float inverse_rest = total == 0.0f ? 0.0f : fused_multiply_add(-total, inverse, 1.0f) * inverse;
    constexpr bool corrected = (Config::ctas_per_row > 1 || Config::has_sink) && !chunked;
    const float factor = corrected ? exponential(correction) : 1.0f;
    const float quotient = factor * inverse;
    const float rest = fused_multiply_add(factor, inverse, -quotient) + factor * inverse_rest;

    // ---- y
#pragma unroll 1
    for (int first = 0; first == 0 || (chunked && first < place.most_columns); first += Part::capacity) {
      const Part part{place.thread, shift, min(columns - first, static_cast<int>(Part::capacity))};
      if constexpr (chunked) in.load(params, v, part, first);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        Vec<Output, N> result;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          float y[2] = {0.0f, 0.0f};
#pragma unroll
          for (int j = 0; j < (N == 1 ? 1 : 2); ++j) {
            float element = v[k * N + i + j];
            if constexpr (Config::logarithm) {
              y[j] = (chunked ? element - common : element + correction) - log_total;
              if (excludes && element == minus_infinity()) y[j] = element;
            } else {
              bool excluded = false;
              if constexpr (chunked) {
                excluded = element == minus_infinity();
                element = exponential_for<Output>(element - common);
              } else {
                excluded = bits_from_float(element) == 0x80000000u;
              }
              y[j] =
                  is_same<Output, float> ? fused_multiply_add(element, quotient, element * rest) : element * quotient;
              if (excludes && excluded) y[j] = 0.0f;
            }
          }
          result.set(i, y[0], y[1]);
        }
        part.store(result, out + first, k, out_aligned);
      }
    }
    first_row += place.stride;
    reduction.next_row();
  } while (Config::repeats && first_row < params.rows);
}

}  // namespace trtc
