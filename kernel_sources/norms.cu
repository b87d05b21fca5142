// Normalization of rows: RMSNorm and LayerNorm, forward and backward.
//
//   y = (x - mean) * rstd * (weight + weight_offset) + bias,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// with mean = 0 where a row is not centred (RMSNorm). The tuned kernels come first, forward and backward, then the
// backward's second launch, then general ones with every size and type at run time.
//
// A row is held by `threads` threads of each of `ctas_per_row` CTAs. Thread t of a CTA owns the columns
// [(k * threads + t) * N, ... + N) of each chunk of its CTA's slice, for k = 0, 1, ... steps - 1: the configuration
// alone fixes the order of a sum. Only how the bytes travel depends on alignment.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace trtc {

// What a kernel's program says of it (transformer_rtc/ops/norms.py), and what follows.
template <class Traits>
struct NormConfig : Traits {
  enum : int {
    chunk = Traits::steps * Traits::threads * Traits::vector,
    slice = Traits::chunks * chunk,  // a CTA's columns
  };
  enum : bool {
    // Every Vec of every thread lies in the row: counts are constants then.
    exact = Traits::rows_per_cta == 1 && static_cast<int64>(slice) * Traits::ctas_per_row == Traits::hidden,
  };
  static constexpr TRTC_DEVICE Exchange exchange() {
    return Traits::ctas_per_row == 1 ? Exchange::none : Traits::clusters ? Exchange::cluster : Exchange::grid;
  }
  static_assert(static_cast<int64>(slice) * Traits::ctas_per_row >= Traits::hidden, "the CTAs tile the row");
  static_assert(!Traits::in_shared || Traits::chunks == 1, "shared memory holds a whole slice");
  static_assert(!Traits::ragged || Traits::rows_per_cta == 1, "all threads of a CTA bring one row");

  // Whether element i of a Vec whose first column is `count` columns before the end lies in the row.
  static TRTC_DEVICE bool within(int i, int count) {
    if constexpr (exact) return true;
    return Traits::hidden % Traits::vector == 0 ? count > 0 : i < count;
  }

  // Elements of a Vec that do not lie in the row become 0.
  template <int N>
  static TRTC_DEVICE void clear_outside(float (&element)[N], int count) {
    if constexpr (!exact) {
      if (__builtin_expect(count < N, 0)) {
#pragma unroll
        for (int i = 0; i < N; ++i) element[i] = i < count ? element[i] : 0.0f;
      }
    }
  }
};

// 1 / sqrt(mean + eps), unrounded: high + low.
struct Rstd {
  float high;
  float low;
};

// One Newton step on the approximation, except where that is 0 or infinite.
TRTC_DEVICE Rstd rstd_of(float sum_of_squares, float reciprocal_hidden, float eps) {
  const float value = fused_multiply_add(sum_of_squares, reciprocal_hidden, eps);
  const float y = approximate_rsqrt(value);
  const float error = fused_multiply_add(-value * y, y, 1.0f);
  if (error != error) return {y, 0.0f};
  const float high = fused_multiply_add(0.5f * y, error, y);
  return {high, fused_multiply_add(0.5f * y, error, y - high)};
}

// x * rstd * weight. Where the output is float, rounded once, so that 4 ulp hold at every length; where that meets
// infinity times zero in its correction, as the plain product.
template <class Output>
TRTC_DEVICE float normalized(float x, Rstd rstd, float weight) {
  const float product = x * rstd.high;
  const float y = product * weight;
  if constexpr (is_same<Output, float>) {
    const float rest = fused_multiply_add(x, rstd.low, fused_multiply_add(x, rstd.high, -product));
    const float corrected = fused_multiply_add(product, weight, rest * weight);
    return corrected == corrected ? corrected : y;
  } else {
    return y;
  }
}

// A row's mean, unrounded: high + rest; and what its elements' squares about the mean add up to.
struct Moments {
  float mean;
  float rest;
  float squares;
};

// The moments of a row of several CTAs, from what each found about a shift of its own, near its mean: the shift and the
// sums of deviations and of their squares (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
// computing sample variances", 1979). Lane i of a group of `Ctas` has those of CTA i, which holds `columns` of the row.
// One CTA's deviations are a rounding error's, so a row of equal elements has no variance.
template <int Ctas>
TRTC_DEVICE Moments combined_moments(float shift, float deviations, float squares, float columns,
                                     float reciprocal_hidden) {
  const float common = Ctas == 1 ? shift : shuffle_from(shift, 0);
  const float own = divide(deviations, columns);
  const float offset = columns == 0.0f ? 0.0f : (shift - common) + own;
  const float rest = reduce_lanes<Sum, Ctas>(columns * offset) * reciprocal_hidden;
  const float from_mean = offset - rest;
  const float about_own = columns == 0.0f ? 0.0f : fused_multiply_add(-own, deviations, squares);
  return {common, rest, reduce_lanes<Sum, Ctas>(fused_multiply_add(columns * from_mean, from_mean, about_own))};
}

// The columns that CTA `rank` of those that share a row holds.
template <class Config>
TRTC_DEVICE int columns_of_cta(int rank) {
  return max(0, min(Config::hidden - rank * Config::slice, static_cast<int>(Config::slice)));
}

// Which row of per-head weights belongs to a row: the last of its leading dimensions.
template <bool PerHead, class Params>
TRTC_DEVICE int64 head_of(const Params& params, int64 row) {
  if constexpr (PerHead) {
    const uint32 token = multiply_high(static_cast<uint32>(row), params.heads_magic) >> params.heads_shift;
    return params.heads == 1 ? 0 : static_cast<int64>(static_cast<uint32>(row) - token * params.heads);
  } else {
    return 0;
  }
}

// Adds the squares of a Vec's elements. Sums are by Vec, by chunk and by row: no chain of additions grows long enough
// to lose an ulp.
template <class T, int N>
TRTC_DEVICE float sum_of_squares(const Vec<T, N>& value) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fused_multiply_add(value.get(i), value.get(i), sum);
  return sum;
}

template <class T, int N>
TRTC_DEVICE float sum_of(const Vec<T, N>& value) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += value.get(i);
  return sum;
}

// Rounded to T, element by element.
template <class T, class A, class B, int N>
TRTC_DEVICE Vec<T, N> sum_of_vecs(const Vec<A, N>& a, const Vec<B, N>& b) {
  Vec<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    sum.set(i, a.get(i) + b.get(i), N == 1 ? 0.0f : a.get(i + (N > 1)) + b.get(i + (N > 1)));
  }
  return sum;
}

// ---- Forward -------------------------------------------------------------------------------------------------------

// y of an x that is its deviation from the mean's high part, where it is centred.
template <class Config>
TRTC_DEVICE float forward_value(float x, const Moments& moments, Rstd rstd, float weight, float bias) {
  if constexpr (Config::centred && is_same<typename Config::Output, float>) {
    x -= moments.rest;
  } else if constexpr (Config::centred) {
    const float normal = fused_multiply_add(x, rstd.high, -moments.rest * rstd.high);
    return Config::has_bias ? fused_multiply_add(normal, weight, bias) : normal * weight;
  }
  float y = normalized<typename Config::Output>(x, rstd, weight);
  if constexpr (Config::has_bias) y += bias;
  return y;
}

// y's values of one Vec, and what its weight and bias are.
template <class Config>
struct Affine {
  enum : int { N = Config::vector };
  Vec<typename Config::Weight, N> weight;
  Vec<typename Config::Bias, N> bias;

  TRTC_DEVICE void load(const typename Config::Weight* weights, const typename Config::Bias* biases, int column,
                        int count, bool weight_aligned, bool bias_aligned) {
    if constexpr (Config::has_weight) weight.load(weights + column, count, weight_aligned);
    if constexpr (Config::has_bias) bias.load(biases + column, count, bias_aligned);
  }

  template <class Params>
  TRTC_DEVICE float full_weight(const Params& params, int i) const {
    if constexpr (Config::has_weight) return weight.get(i) + params.weight_offset;
    return 1.0f;
  }
  TRTC_DEVICE float full_bias(int i) const {
    if constexpr (Config::has_bias) return bias.get(i);
    return 0.0f;
  }
};

// The largest magnitude, of all threads, and the inverse of the scale, if they are asked for.
template <class Config, class Params>
TRTC_DEVICE void tell_scaling(const Params& params, float amax, float scale) {
  if constexpr (Config::has_amax) {
    amax = reduce_lanes<Maximum, 32>(amax);
    if (thread_index() % 32 == 0 && amax != 0.0f) maximum_global(static_cast<float*>(params.amax), amax);
  }
  if constexpr (Config::has_scale_inv) {
    if (thread_index() == 0 && cta_index() == 0) *static_cast<float*>(params.scale_inv) = divide(1.0f, scale);
  }
}

template <class Config, class Params>
TRTC_DEVICE void norm_forward(const Params& params) {
  using Input = typename Config::Input;
  using Residual = typename Config::Residual;
  using Weight = typename Config::Weight;
  using Bias = typename Config::Bias;
  using Output = typename Config::Output;
  using Held = typename Config::Held;
  using Reduction =
      RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(),
                   Config::centred ? 3 : 1, Config::repeats, Config::repeats || Config::row_scaled ? 2 : 1>;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr bool exact = Config::exact;
  constexpr bool in_shared = Config::in_shared;
  constexpr bool one_chunk = Config::chunks == 1;
  constexpr bool has_affine = Config::has_weight || Config::has_bias;
  constexpr int affine_bytes = (Config::has_weight ? sizeof(Weight) : 0) + (Config::has_bias ? sizeof(Bias) : 0);
  // Fetched before the sum, the weight's latency is hidden behind the row's; more than this much would not fit beside
  // it.
  constexpr bool early_affine = has_affine && one_chunk && !in_shared && Config::steps * N * affine_bytes <= 64;
  // Vecs of the weight that are on their way while others are used, the first ones while the sum is exchanged: hides
  // the L2 cache's latency.
  constexpr int in_flight = Config::steps == 8 && !Config::repeats ? 4 : Config::steps > 1 ? 2 : 1;
  constexpr int held = in_shared ? 1 : Config::steps;  // Vecs in registers
  // A row that is centred is read three times: its elements stay in registers as floats, but where shared memory holds
  // them at hand, and registers are better spent on more rows in flight.
  constexpr bool unpacked = Config::centred && one_chunk && (!in_shared || Config::ragged);

  TRTC_DYNAMIC_SHARED(char, shared);
  const int thread = Config::rows_per_cta == 1 ? thread_index() : thread_index() % threads;
  const int row_in_cta = Config::rows_per_cta == 1 ? 0 : thread_index() / threads;
  const int rank = static_cast<int>(cta_index() % Config::ctas_per_row);
  const int begin = rank * Config::slice;
  const int64 groups = ctas_in_grid() / Config::ctas_per_row * Config::rows_per_cta;
  const Input* all_x = static_cast<const Input*>(params.x) + begin;
  const bool x_aligned = rows_aligned<Input, N>(all_x, params.x_outer_stride, params.x_inner_stride);
  Reduction reduction;
  reduction.begin(params, rank);
  float scale = 1.0f;
  if constexpr (Config::has_scale) scale = load_float(params.scale);
  float amax = 0.0f;

  int64 first_row = cta_index() / Config::ctas_per_row * Config::rows_per_cta;
  // A row past the last, and a CTA past the row's end, take part in every barrier with no columns, or less.
  const int most_columns = min(Config::hidden - begin, Config::slice);
  do {
    const int64 row = first_row + row_in_cta;
    const bool exists = Config::rows_per_cta == 1 || row < params.rows;
    const int columns = exists ? most_columns : 0;
    const Input* x = all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    Output* out = static_cast<Output*>(params.out) + begin +
                  row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    const int64 head = head_of<Config::per_head>(params, row) * Config::hidden;
    const Weight* weights = nullptr;
    if constexpr (Config::has_weight) weights = static_cast<const Weight*>(params.weight) + head + begin;
    const Bias* biases = nullptr;
    if constexpr (Config::has_bias) biases = static_cast<const Bias*>(params.bias) + head + begin;
    const bool weight_aligned = rows_aligned<Weight, N>(weights, 0, 0);
    const bool bias_aligned = rows_aligned<Bias, N>(biases, 0, 0);
    const Residual* residual = nullptr;
    bool residual_aligned = false;
    if constexpr (Config::added_before || Config::added_after) {
      residual = static_cast<const Residual*>(params.residual) + begin +
                 row_offset(params, row, params.residual_outer_stride, params.residual_inner_stride);
      residual_aligned =
          rows_aligned<Residual, N>(residual, params.residual_outer_stride, params.residual_inner_stride);
    }

    // ---- The row, and its sum of squares; or its sum, where it is centred.
    Vec<Held, N> value[held];
    float element[unpacked ? Config::steps * N : 1];
    Vec<Residual, N> added[held];
    Affine<Config> affine[held];
    StagedRow<Input, Config> x_row;
    StagedRow<Residual, Config> residual_row;
    OutputRow<Held, Config> sum_out;
    if constexpr (Config::added_before) {
      Held* to = static_cast<Held*>(params.residual_out) + begin +
                 row_offset(params, row, params.residual_out_outer_stride, params.residual_out_inner_stride);
      sum_out.begin(to, shared + Config::sum_at, row_in_cta,
                    Config::hidden % N == 0 &&
                        rows_aligned<Held, N>(to, params.residual_out_outer_stride, params.residual_out_inner_stride));
    }
    if constexpr (in_shared) {
      x_row.locate(shared, x);
      x_row.fetch(x, columns, thread, x_aligned);
      if constexpr (Config::added_before || Config::added_after) {
        residual_row.locate(shared + Config::residual_at, residual);
        residual_row.fetch(residual, columns, thread, residual_aligned);
      }
      wait_async();
      if constexpr (Config::ragged) cta_barrier();
    }
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < Config::slice; first += Config::chunk) {
      if constexpr (!in_shared) {
#pragma unroll
        for (int k = 0; k < Config::steps; ++k) {
          const int column = first + (k * threads + thread) * N;
          const int count = exact ? N : columns - column;
          if constexpr (Config::added_before) {
            Vec<Input, N> input;
            input.load(x + column, count, x_aligned);
            added[k].load(residual + column, count, residual_aligned);
            value[k] = sum_of_vecs<Held>(input, added[k]);
            sum_out.put(value[k], column, first, columns);
          } else {
            value[k].load(x + column, count, x_aligned);
            if constexpr (Config::added_after && one_chunk) added[k].load(residual + column, count, residual_aligned);
          }
          if constexpr (early_affine) affine[k].load(weights, biases, column, count, weight_aligned, bias_aligned);
        }
      }
      float chunk_sum = 0.0f;
#pragma unroll
      for (int k = 0; k < Config::steps; ++k) {
        if constexpr (in_shared) {
          const int column = (k * threads + thread) * N;
          if constexpr (Config::added_before) {
            value[0] = sum_of_vecs<Held>(x_row.at(column), residual_row.at(column));
            value[0].store(reinterpret_cast<Held*>(shared + Config::sum_at) + column, true);
            if (Config::ragged || sum_out.aligned) sum_out.put(value[0], column, 0, columns);
          } else {
            value[0] = x_row.at(column);
          }
        }
        chunk_sum += Config::centred ? sum_of(value[k % held]) : sum_of_squares(value[k % held]);
        if constexpr (unpacked) {
#pragma unroll
          for (int i = 0; i < N; ++i) element[k * N + i] = value[k % held].get(i);
        }
      }
      sum += chunk_sum;
      if constexpr (Config::added_before) sum_out.finish(first, columns, thread, !one_chunk || Config::repeats);
    }

    Affine<Config> ahead[in_flight];
    if constexpr (in_shared && has_affine && !Config::row_scaled) {
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        const int column = (k * threads + thread) * N;
        ahead[k].load(weights, biases, column, exact ? N : columns - column, weight_aligned, bias_aligned);
      }
    }

    // ---- Its statistics
    constexpr float reciprocal_hidden = 1.0f / Config::hidden;
    // Where a row that is not held is read again.
    const Held* again = nullptr;
    bool again_aligned = false;
    if constexpr (Config::added_before) {
      again = sum_out.global;
      again_aligned = sum_out.aligned;
    } else {
      again = x;
      again_aligned = x_aligned;
    }
    Moments moments{0.0f, 0.0f, 0.0f};
    float shift = 0.0f;
    if constexpr (Config::centred) {
      float total[1] = {sum};
      reduction.template reduce_in_cta<Sum, 0>(total);
      const float own_columns =
          exact ? static_cast<float>(Config::slice) : static_cast<float>(columns_of_cta<Config>(rank));
      shift = own_columns == 0.0f ? 0.0f : divide(total[0], own_columns);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int first = 0; first < Config::slice; first += Config::chunk) {
        float of_chunk[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < Config::steps; ++k) {
          const int column = first + (k * threads + thread) * N;
          if constexpr (in_shared && !unpacked && Config::added_before) {
            value[0].load(reinterpret_cast<Held*>(shared + Config::sum_at) + column, N, true);
          } else if constexpr (in_shared && !unpacked) {
            value[0] = x_row.at(column);
          } else if constexpr (!one_chunk) {
            value[k].load(again + column, columns - column, again_aligned);
          }
          float deviation[N];
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if constexpr (unpacked) {
              deviation[i] = element[k * N + i] - shift;
            } else {
              deviation[i] = value[k % held].get(i) - shift;
            }
          }
          Config::clear_outside(deviation, columns - column);
          float of_vec[2] = {0.0f, 0.0f};
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if constexpr (unpacked) element[k * N + i] = deviation[i];
            of_vec[0] += deviation[i];
            of_vec[1] = fused_multiply_add(deviation[i], deviation[i], of_vec[1]);
          }
          of_chunk[0] += of_vec[0];
          of_chunk[1] += of_vec[1];
        }
        sums[0] += of_chunk[0];
        sums[1] += of_chunk[1];
      }
      reduction.template reduce_in_cta<Sum, 1>(sums);
      float gathered[3] = {shift, sums[0], sums[1]};
      reduction.gather(gathered);
      const int peer = thread % Config::ctas_per_row;
      moments = combined_moments<Config::ctas_per_row>(
          gathered[0], gathered[1], gathered[2],
          exact ? static_cast<float>(Config::slice) : static_cast<float>(columns_of_cta<Config>(peer)),
          reciprocal_hidden);
    } else {
      float squares[1] = {sum};
      reduction.template reduce_in_cta<Sum, 0>(squares);
      reduction.gather(squares);
      moments.squares = reduce_lanes<Sum, Config::ctas_per_row>(squares[0]);
    }
    const Rstd rstd = rstd_of(moments.squares, reciprocal_hidden, params.eps);
    const bool tells = thread == 0 && rank == 0 && exists;
    if constexpr (Config::has_mean) {
      if (tells) static_cast<float*>(params.mean)[row] = moments.mean + moments.rest;
    }
    if constexpr (Config::has_rstd) {
      if (tells) static_cast<float*>(params.rstd)[row] = rstd.high;
    }

    // ---- y: once, or where each row has a scale, first its largest magnitude
    OutputRow<Output, Config> y_out;
    y_out.begin(
        out, shared + Config::out_at, row_in_cta,
        Config::hidden % N == 0 && rows_aligned<Output, N>(out, params.out_outer_stride, params.out_inner_stride));
    constexpr int passes = Config::row_scaled ? 2 : 1;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const bool measures = pass + 1 < passes;
      float largest_in_row = 0.0f;
#pragma unroll 1
      for (int first = 0; first < Config::slice; first += Config::chunk) {
#pragma unroll
        for (int k = 0; k < Config::steps; ++k) {
          const int column = first + (k * threads + thread) * N;
          const int count = exact ? N : columns - column;
          if constexpr (in_shared) {
            if constexpr (!unpacked && Config::added_before) {
              value[0].load(reinterpret_cast<Held*>(shared + Config::sum_at) + column, N, true);
            } else if constexpr (!unpacked) {
              value[0] = x_row.at(column);
            }
            if constexpr (Config::added_after) added[0] = residual_row.at(column);
          } else if constexpr (!one_chunk) {
            value[k].load(again + column, count, again_aligned);
            if constexpr (Config::added_after) added[k].load(residual + column, count, residual_aligned);
          }
          if constexpr (has_affine && in_shared && !Config::row_scaled) {
            affine[0] = ahead[k % in_flight];
            const int next = column + in_flight * threads * N;
            if (k + in_flight < Config::steps) {
              ahead[k % in_flight].load(weights, biases, next, exact ? N : columns - next, weight_aligned,
                                        bias_aligned);
            }
          } else if constexpr (has_affine && !early_affine) {
            affine[k % held].load(weights, biases, column, count, weight_aligned, bias_aligned);
          }
          Vec<Output, N> result;
#pragma unroll
          for (int i = 0; i < N; i += 2) {
            float y[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < (N == 1 ? 1 : 2); ++j) {
              float x_or_deviation;
              if constexpr (unpacked) {
                x_or_deviation = element[k * N + i + j];
                if constexpr (Config::ctas_per_row > 1) x_or_deviation += shift - moments.mean;
              } else {
                x_or_deviation = value[k % held].get(i + j) - moments.mean;
              }
              y[j] = forward_value<Config>(x_or_deviation, moments, rstd, affine[k % held].full_weight(params, i + j),
                                           affine[k % held].full_bias(i + j));
              if constexpr (Config::added_after) y[j] += added[k % held].get(i + j);
              if constexpr (Config::row_scaled) {
                if (measures && Config::within(i + j, count)) {
                  largest_in_row = Maximum::of(largest_in_row, magnitude(y[j]));
                }
              }
              if constexpr (Config::has_amax) {
                if (Config::within(i + j, count)) amax = Maximum::of(amax, magnitude(y[j]));
              }
              if constexpr (Config::has_scale || Config::row_scaled) y[j] *= scale;
            }
            result.set(i, y[0], y[1]);
          }
          if (!measures) y_out.put(result, column, first, columns);
        }
        if (!measures) y_out.finish(first, columns, thread, !one_chunk || Config::repeats);
      }
      if constexpr (Config::row_scaled) {
        if (measures) {
          float most[1] = {largest_in_row};
          reduction.template reduce_in_cta<Maximum, 2>(most);
          float gathered[Config::centred ? 3 : 1] = {most[0]};
          reduction.gather(gathered);
          const float row_amax = reduce_lanes<Maximum, Config::ctas_per_row>(gathered[0]);
          // A row of zeros has the scale 1.
          scale = row_amax == 0.0f ? 1.0f : divide(largest<Output>(), row_amax);
          if (tells) {
            static_cast<float*>(params.row_scale)[row] = row_amax == 0.0f ? 1.0f : divide(row_amax, largest<Output>());
          }
        }
      }
    }
    first_row += groups;
    reduction.next_row();
  } while (Config::repeats && first_row < params.rows);
  tell_scaling<Config>(params, amax, scale);
}

// The inputs of a row in a slot of a ring.
template <class Config>
struct ForwardRow {
  using Input = typename Config::Input;
  using Residual = typename Config::Residual;
  using Held = typename Config::Held;
  enum : int { N = Config::vector };
  enum : bool { has_residual = Config::added_before || Config::added_after };

  const Input* all_x;
  const Residual* all_residual;
  bool x_aligned, residual_aligned;
  StagedRow<Input, Config> x;
  StagedRow<Residual, Config> residual;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, int first_column) {
    all_x = static_cast<const Input*>(params.x) + first_column;
    x_aligned = rows_aligned<Input, N>(all_x, params.x_outer_stride, params.x_inner_stride);
    if constexpr (has_residual) {
      all_residual = static_cast<const Residual*>(params.residual) + first_column;
      residual_aligned =
          rows_aligned<Residual, N>(all_residual, params.residual_outer_stride, params.residual_inner_stride);
    }
  }

  template <class Params>
  TRTC_DEVICE void locate(const Params& params, char* slot, int row_in_cta, int64 row) {
    x.locate(slot + row_in_cta * Config::chunk * sizeof(Input),
             all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride));
    if constexpr (has_residual) {
      residual.locate(
          slot + Config::residual_at + row_in_cta * Config::chunk * sizeof(Residual),
          all_residual + row_offset(params, row, params.residual_outer_stride, params.residual_inner_stride));
    }
  }

  template <class Params>
  TRTC_DEVICE void fetch(const Params& params, char* slot, int row_in_cta, int64 row, int columns, int thread) {
    locate(params, slot, row_in_cta, row);
    x.fetch(all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride), columns, thread, x_aligned);
    if constexpr (has_residual) {
      residual.fetch(all_residual + row_offset(params, row, params.residual_outer_stride, params.residual_inner_stride),
                     columns, thread, residual_aligned);
    }
  }

  // What is normalized: x, or the sum that was put beside it.
  TRTC_DEVICE Vec<Held, N> held_at(char* slot, int row_in_cta, int column) const {
    if constexpr (Config::added_before) {
      Vec<Held, N> value;
      value.load(reinterpret_cast<Held*>(slot + Config::sum_at) + row_in_cta * Config::chunk + column, N, true);
      return value;
    } else {
      return x.at(column);
    }
  }
};

// The same for many rows in turn: they come through a ring of `stages` slots in shared memory, so that the next ones
// are on their way while one is worked on, and the weight and bias stay in registers.
template <class Config, class Params>
TRTC_DEVICE void norm_forward_in_turn(const Params& params) {
  using Input = typename Config::Input;
  using Residual = typename Config::Residual;
  using Weight = typename Config::Weight;
  using Bias = typename Config::Bias;
  using Output = typename Config::Output;
  using Held = typename Config::Held;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr int steps = Config::steps;
  constexpr int stages = Config::stages;
  constexpr bool exact = Config::exact;
  constexpr bool centred = Config::centred;
  constexpr int lag = Config::lag;
  constexpr int ahead = stages - 1 - lag;  // rows that are on their way
  // A row's elements stay in registers until they are stored, or are read from the slot again.
  constexpr bool held = lag == 0 && steps * N <= 32;
  // Or at least until their deviations are summed.
  constexpr bool unpacked = held || (centred && sizeof(Held) < 4 && steps * N <= (threads > 512 ? 16 : 32));
  constexpr int affine_bytes = (Config::has_weight ? sizeof(Weight) : 0) + (Config::has_bias ? sizeof(Bias) : 0);
  constexpr bool affine_held = steps * N <= 16 || steps * N * affine_bytes <= 64;
  constexpr float reciprocal_hidden = 1.0f / Config::hidden;
  constexpr int values = centred ? 3 : 1;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(),
                                 values, true, 2 + 2 * lag>;

  TRTC_DYNAMIC_SHARED(char, shared);
  const int thread = Config::rows_per_cta == 1 ? thread_index() : thread_index() % threads;
  const int row_in_cta = Config::rows_per_cta == 1 ? 0 : thread_index() / threads;
  const int rank = static_cast<int>(cta_index() % Config::ctas_per_row);
  const int begin = rank * Config::slice;
  const int64 stride = ctas_in_grid() / Config::ctas_per_row * Config::rows_per_cta;
  const int most_columns = min(Config::hidden - begin, Config::slice);
  Reduction reduction;
  reduction.begin(params, rank);
  ForwardRow<Config> inputs;
  inputs.begin(params, begin);
  const int64 begin_row = cta_index() / Config::ctas_per_row * Config::rows_per_cta;
#pragma unroll
  for (int i = 0; i < ahead; ++i) {
    const int64 row = begin_row + i * stride + row_in_cta;
    if (row - row_in_cta < params.rows) {
      inputs.fetch(params, shared + i * Config::slot_bytes, row_in_cta, row, row < params.rows ? most_columns : 0,
                   thread);
    }
    commit_async();
  }

  const Weight* weights = nullptr;
  if constexpr (Config::has_weight) weights = static_cast<const Weight*>(params.weight) + begin;
  const Bias* biases = nullptr;
  if constexpr (Config::has_bias) biases = static_cast<const Bias*>(params.bias) + begin;
  const bool weight_aligned = rows_aligned<Weight, N>(weights, 0, 0);
  const bool bias_aligned = rows_aligned<Bias, N>(biases, 0, 0);
  Affine<Config> affine[affine_held ? steps : 1];
  if constexpr (affine_held) {
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      const int column = (k * threads + thread) * N;
      affine[k].load(weights, biases, column, exact ? N : most_columns - column, weight_aligned, bias_aligned);
    }
  }
  float scale = 1.0f;
  if constexpr (Config::has_scale) scale = load_float(params.scale);
  float amax = 0.0f;

  int slot = 0, output_slot = 0;
  float element[unpacked ? steps * N : 1];
  float sums[values] = {};
  // The row that is read is `lag` rows before the one that is stored.
  int64 first_row = begin_row;
#pragma unroll 1
  for (int64 output_first = first_row - lag * stride; output_first < params.rows; output_first += stride) {
    if (lag == 0 || first_row < params.rows) {
      const int64 row = first_row + row_in_cta;
      const bool exists = Config::rows_per_cta == 1 || row < params.rows;
      const int columns = exists ? most_columns : 0;
      char* here = shared + slot * Config::slot_bytes;
      if constexpr (ahead == 0) {
        inputs.fetch(params, here, row_in_cta, row, columns, thread);
        commit_async();
      }
      wait_async<(ahead > 0 ? ahead - 1 : 0)>();
      // Others brought some of a ragged row; and they have done with the one whose slot is filled now.
      if constexpr (Config::ragged) cta_barrier();
      if constexpr (ahead > 0) {
        const int64 next = row + ahead * stride;
        if (next - row_in_cta < params.rows) {
          const int free = slot + ahead < stages ? slot + ahead : slot + ahead - stages;
          inputs.fetch(params, shared + free * Config::slot_bytes, row_in_cta, next,
                       next < params.rows ? most_columns : 0, thread);
        }
        commit_async();
      }
      inputs.locate(params, here, row_in_cta, row);

      // ---- The row, and its sum of squares; or its sum, where it is centred
      OutputRow<Held, Config> sum_out;
      if constexpr (Config::added_before) {
        Held* to = static_cast<Held*>(params.residual_out) + begin +
                   row_offset(params, row, params.residual_out_outer_stride, params.residual_out_inner_stride);
        sum_out.begin(to, here + Config::sum_at, row_in_cta,
                      Config::hidden % N == 0 && rows_aligned<Held, N>(to, params.residual_out_outer_stride,
                                                                       params.residual_out_inner_stride));
      }
      float total[1] = {0.0f};
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int column = (k * threads + thread) * N;
        Vec<Held, N> value;
        if constexpr (Config::added_before) {
          value = sum_of_vecs<Held>(inputs.x.at(column), inputs.residual.at(column));
          value.store(sum_out.shared + column, true);
          if (Config::ragged || sum_out.aligned) sum_out.put(value, column, 0, columns);
        } else {
          value = inputs.x.at(column);
        }
        total[0] += centred ? sum_of(value) : sum_of_squares(value);
        if constexpr (unpacked) {
#pragma unroll
          for (int i = 0; i < N; ++i) element[k * N + i] = value.get(i);
        }
      }
      if constexpr (Config::added_before) sum_out.finish(0, columns, thread, true);
      reduction.template reduce_in_cta<Sum, 0>(total);
      if constexpr (centred) {
        const float own_columns =
            exact ? static_cast<float>(Config::slice) : static_cast<float>(columns_of_cta<Config>(rank));
        const float shift = own_columns == 0.0f ? 0.0f : divide(total[0], own_columns);
        float deviations[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          const int column = (k * threads + thread) * N;
          Vec<Held, N> value;
          if constexpr (!unpacked) value = inputs.held_at(here, row_in_cta, column);
          float deviation[N];
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if constexpr (unpacked) {
              deviation[i] = element[k * N + i] - shift;
            } else {
              deviation[i] = value.get(i) - shift;
            }
          }
          Config::clear_outside(deviation, columns - column);
          float of_vec[2] = {0.0f, 0.0f};
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if constexpr (held) element[k * N + i] = deviation[i];
            of_vec[0] += deviation[i];
            of_vec[1] = fused_multiply_add(deviation[i], deviation[i], of_vec[1]);
          }
          deviations[0] += of_vec[0];
          deviations[1] += of_vec[1];
        }
        reduction.template reduce_in_cta<Sum, 1>(deviations);
        sums[0] = shift;
        sums[1] = deviations[0];
        sums[2] = deviations[1];
      } else {
        sums[0] = total[0];
      }
      reduction.send(sums);
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    first_row += stride;
    reduction.next_row();
    if (lag != 0 && output_first < begin_row) continue;  // the first turn has no row before it

    // ---- y of the row, or of the one before
    const int64 row = output_first + row_in_cta;
    const bool exists = Config::rows_per_cta == 1 || row < params.rows;
    const int columns = exists ? most_columns : 0;
    char* here = shared + output_slot * Config::slot_bytes;
    if constexpr (lag != 0) inputs.locate(params, here, row_in_cta, row);
    const float own_shift = sums[0];
    reduction.receive(sums);
    Moments moments{0.0f, 0.0f, 0.0f};
    if constexpr (centred) {
      const int peer = thread % Config::ctas_per_row;
      moments = combined_moments<Config::ctas_per_row>(
          sums[0], sums[1], sums[2],
          exact ? static_cast<float>(Config::slice) : static_cast<float>(columns_of_cta<Config>(peer)),
          reciprocal_hidden);
    } else {
      moments.squares = reduce_lanes<Sum, Config::ctas_per_row>(sums[0]);
    }
    const Rstd rstd = rstd_of(moments.squares, reciprocal_hidden, params.eps);
    const bool tells = thread == 0 && rank == 0 && exists;
    if constexpr (Config::has_mean) {
      if (tells) static_cast<float*>(params.mean)[row] = moments.mean + moments.rest;
    }
    if constexpr (Config::has_rstd) {
      if (tells) static_cast<float*>(params.rstd)[row] = rstd.high;
    }
    Output* out = static_cast<Output*>(params.out) + begin +
                  row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    OutputRow<Output, Config> y_out;
    y_out.begin(
        out, Config::out_in_slot ? here : shared + Config::out_at, row_in_cta,
        Config::hidden % N == 0 && rows_aligned<Output, N>(out, params.out_outer_stride, params.out_inner_stride));
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      const int column = (k * threads + thread) * N;
      Vec<Held, N> value;
      if constexpr (!held) value = inputs.held_at(here, row_in_cta, column);
      Vec<Residual, N> added;
      if constexpr (Config::added_after) added = inputs.residual.at(column);
      if constexpr (!affine_held) {
        affine[0].load(weights, biases, column, exact ? N : most_columns - column, weight_aligned, bias_aligned);
      }
      Vec<Output, N> result;
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        float y[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < (N == 1 ? 1 : 2); ++j) {
          float x;
          if constexpr (held) {
            x = element[k * N + i + j];
            if constexpr (centred && Config::ctas_per_row > 1) x += own_shift - moments.mean;
          } else {
            x = value.get(i + j);
            if constexpr (centred) x -= moments.mean;
          }
          const Affine<Config>& of_column = affine[affine_held ? k : 0];
          y[j] =
              forward_value<Config>(x, moments, rstd, of_column.full_weight(params, i + j), of_column.full_bias(i + j));
          if constexpr (Config::added_after) y[j] += added.get(i + j);
          if constexpr (Config::has_amax) {
            if (Config::within(i + j, columns - column)) amax = Maximum::of(amax, magnitude(y[j]));
          }
          if constexpr (Config::has_scale) y[j] *= scale;
        }
        result.set(i, y[0], y[1]);
      }
      y_out.put(result, column, 0, columns);
    }
    y_out.finish(0, columns, thread, true);
    output_slot = output_slot + 1 == stages ? 0 : output_slot + 1;
  }
  wait_async();
  reduction.end();
  tell_scaling<Config>(params, amax, scale);
}

// ---- Backward ------------------------------------------------------------------------------------------------------
//
// With x' = (x - mean) * rstd, w = weight + weight_offset and means over the row:
//   dx = rstd * (dy * w - x' * mean(dy * w * x') [- mean(dy * w), where it is centred]) [+ dresidual]
//   dweight = sum over rows of dy * x',   dbias = sum over rows of dy
//
// Groups of CTAs take rows in turn. What a row needs travels through a ring of `stages` slots in shared memory, so that
// the next rows are on their way while one is worked on; the weight and the partial sums of its gradient stay in
// registers.

// The inputs of a row in a slot of the ring.
template <class Config>
struct BackwardRow {
  using Gradient = typename Config::Gradient;
  using Input = typename Config::Input;
  using Residual = typename Config::Residual;
  enum : int { N = Config::vector };

  const Gradient* all_dy;
  const Input* all_x;
  const Residual* all_dresidual;
  bool dy_aligned, x_aligned, dresidual_aligned;
  StagedRow<Gradient, Config> dy;
  StagedRow<Input, Config> x;
  StagedRow<Residual, Config> dresidual;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, int first_column) {
    all_dy = static_cast<const Gradient*>(params.dy) + first_column;
    dy_aligned = rows_aligned<Gradient, N>(all_dy, params.dy_outer_stride, params.dy_inner_stride);
    if constexpr (Config::needs_x) {
      all_x = static_cast<const Input*>(params.x) + first_column;
      x_aligned = rows_aligned<Input, N>(all_x, params.x_outer_stride, params.x_inner_stride);
    }
    if constexpr (Config::has_dresidual) {
      all_dresidual = static_cast<const Residual*>(params.dresidual) + first_column;
      dresidual_aligned =
          rows_aligned<Residual, N>(all_dresidual, params.dresidual_outer_stride, params.dresidual_inner_stride);
    }
  }

  template <class Params>
  TRTC_DEVICE const Gradient* dy_of(const Params& params, int64 row) const {
    return all_dy + row_offset(params, row, params.dy_outer_stride, params.dy_inner_stride);
  }
  template <class Params>
  TRTC_DEVICE const Input* x_of(const Params& params, int64 row) const {
    return all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
  }
  template <class Params>
  TRTC_DEVICE const Residual* dresidual_of(const Params& params, int64 row) const {
    return all_dresidual + row_offset(params, row, params.dresidual_outer_stride, params.dresidual_inner_stride);
  }

  template <class Params>
  TRTC_DEVICE void locate(const Params& params, char* slot, int row_in_cta, int64 row) {
    dy.locate(slot + Config::dy_at + row_in_cta * Config::chunk * sizeof(Gradient), dy_of(params, row));
    if constexpr (Config::needs_x) {
      x.locate(slot + row_in_cta * Config::chunk * sizeof(Input), x_of(params, row));
    }
    if constexpr (Config::has_dresidual) {
      dresidual.locate(slot + Config::residual_at + row_in_cta * Config::chunk * sizeof(Residual),
                       dresidual_of(params, row));
    }
  }

  template <class Params>
  TRTC_DEVICE void fetch(const Params& params, char* slot, int row_in_cta, int64 row, int columns, int thread) {
    locate(params, slot, row_in_cta, row);
    dy.fetch(dy_of(params, row), columns, thread, dy_aligned);
    if constexpr (Config::needs_x) x.fetch(x_of(params, row), columns, thread, x_aligned);
    if constexpr (Config::has_dresidual) {
      dresidual.fetch(dresidual_of(params, row), columns, thread, dresidual_aligned);
    }
  }
};

// Where a row of partial sums lies, [gradient][hidden]; its pitch is a whole number of Vecs.
TRTC_DEVICE int64 partial_offset(int64 row, int gradient, int gradients, int64 hidden) {
  return (row * gradients + gradient) * ((hidden + 7) / 8 * 8);
}

// Leaves a thread's sums over its rows for the second launch: added up over the rows that a CTA holds together, in
// shared memory; or, where these are of different heads, each as it is.
template <class Config>
TRTC_DEVICE void store_partials(float* partials, const float (&sums)[Config::steps * Config::vector], char* shared,
                                int gradient, int64 group, int first_column, int thread, int row_in_cta) {
  constexpr int N = Config::vector;
  constexpr int rows = Config::rows_per_cta;
  constexpr bool adds = rows > 1 && !Config::per_head;
  const int64 row = Config::per_head ? group * rows + row_in_cta : group;
  float* to = partials + partial_offset(row, gradient, Config::gradients, Config::hidden) + first_column;
  float* staging = reinterpret_cast<float*>(shared);
  if constexpr (adds) cta_barrier();  // what was in shared memory has been read
#pragma unroll
  for (int k = 0; k < Config::steps; ++k) {
    const int column = (k * Config::threads + thread) * N;
    Vec<float, N> value;
#pragma unroll
    for (int i = 0; i < N; i += 2) value.set(i, sums[k * N + i], N == 1 ? 0.0f : sums[k * N + i + (N > 1)]);
    if constexpr (adds) {
      value.store(staging + row_in_cta * Config::chunk + column, true);
    } else {
      value.store(to + column, Config::exact || first_column + column < Config::hidden);
    }
  }
  if constexpr (adds) {
    cta_barrier();
    for (int column = thread_index(); column < Config::hidden; column += Config::threads * rows) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < rows; ++i) sum += staging[i * Config::chunk + column];
      to[column] = sum;
    }
  }
}

template <class Config, class Params>
TRTC_DEVICE void norm_backward(const Params& params) {
  using Gradient = typename Config::Gradient;
  using Input = typename Config::Input;
  using Weight = typename Config::Weight;
  using Output = typename Config::Output;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr int steps = Config::steps;
  constexpr int stages = Config::stages;
  constexpr bool exact = Config::exact;
  constexpr bool centred = Config::centred;
  constexpr float reciprocal_hidden = 1.0f / Config::hidden;
  constexpr bool given = Config::has_statistics;
  constexpr bool finds_statistics = Config::needs_x && !given;
  // Of a row: the sum of dy * w * (x - mean), that of dy * w where it is centred, and what its statistics need.
  constexpr int values = !centred ? (finds_statistics ? 2 : 1) : finds_statistics ? 5 : 2;
  // Several CTAs take their next row's sums while these of the last one are told.
  constexpr int lag = Config::lag;
  constexpr int ahead = stages - 1 - lag;  // rows that are on their way
  // What the sums were made of stays in registers for dx, or is made again.
  constexpr bool held = Config::has_dx && !finds_statistics && lag == 0 && steps * N <= 16;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(),
                                 values, true, 2 + 2 * lag>;

  TRTC_DYNAMIC_SHARED(char, shared);
  const int thread = Config::rows_per_cta == 1 ? thread_index() : thread_index() % threads;
  const int row_in_cta = Config::rows_per_cta == 1 ? 0 : thread_index() / threads;
  const int rank = static_cast<int>(cta_index() % Config::ctas_per_row);
  const int64 group = cta_index() / Config::ctas_per_row;
  const int begin = rank * Config::slice;
  const int64 stride = ctas_in_grid() / Config::ctas_per_row * Config::rows_per_cta;
  const int most_columns = min(Config::hidden - begin, Config::slice);
  constexpr bool reduces = Config::has_dx || finds_statistics;
  Reduction reduction;
  if constexpr (reduces) reduction.begin(params, rank);
  BackwardRow<Config> inputs;
  inputs.begin(params, begin);

  int64 first_row = group * Config::rows_per_cta;
#pragma unroll
  for (int i = 0; i < ahead; ++i) {
    const int64 row = first_row + i * stride + row_in_cta;
    if (row - row_in_cta < params.rows) {
      inputs.fetch(params, shared + i * Config::slot_bytes, row_in_cta, row, row < params.rows ? most_columns : 0,
                   thread);
    }
    commit_async();
  }

  // With its offset, and in float, where that saves more than it costs.
  Vec<Weight, N> weight[Config::weight_held ? steps : 1];
  float full_weight[held ? steps * N : 1];
  const Weight* weights = nullptr;
  bool weight_aligned = false;
  if constexpr (Config::has_weight) {
    // Every row that a thread works on is of one head: the launch sees to it.
    const int64 head = head_of<Config::per_head>(params, first_row + row_in_cta) * Config::hidden;
    weights = static_cast<const Weight*>(params.weight) + head + begin;
    weight_aligned = rows_aligned<Weight, N>(weights, 0, 0);
    if constexpr (Config::weight_held) {
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int column = (k * threads + thread) * N;
        weight[k].load(weights + column, exact ? N : most_columns - column, weight_aligned);
        if constexpr (held) {
#pragma unroll
          for (int i = 0; i < N; ++i) full_weight[k * N + i] = weight[k].get(i) + params.weight_offset;
        }
      }
    }
  }
  float dweight[Config::has_dweight ? steps * N : 1] = {};
  float dbias[Config::has_dbias ? steps * N : 1] = {};
  float held_gradient[held ? steps * N : 1];
  float held_normal[held ? steps * N : 1];
  float next_mean = 0.0f, next_rstd = 0.0f;
  if constexpr (given) {
    if (first_row + row_in_cta < params.rows) {
      if constexpr (centred) next_mean = load_float(static_cast<const float*>(params.mean) + first_row + row_in_cta);
      next_rstd = load_float(static_cast<const float*>(params.rstd) + first_row + row_in_cta);
    }
  }

#if TRTC_ARCHITECTURE >= 90
  allow_next_launch();
#endif
  // The row whose sums are taken is `lag` rows before the one whose gradients are.
  int slot = 0, gradient_slot = 0;
  float mean = 0.0f, rstd = 0.0f, last_mean = 0.0f, last_rstd = 0.0f;
  float sums[values] = {};
#pragma unroll 1
  for (int64 gradient_first = first_row - lag * stride; gradient_first < params.rows; gradient_first += stride) {
    if (lag == 0 || first_row < params.rows) {
      const int64 row = first_row + row_in_cta;
      const bool exists = Config::rows_per_cta == 1 || row < params.rows;
      const int columns = exists ? most_columns : 0;
      char* here = shared + slot * Config::slot_bytes;
      if constexpr (ahead == 0) {
        inputs.fetch(params, here, row_in_cta, row, columns, thread);
        commit_async();
      }
      wait_async<(ahead > 0 ? ahead - 1 : 0)>();
      // Others brought some of a ragged row; and they have done with the one whose slot is filled now.
      if constexpr (Config::ragged) cta_barrier();
      mean = next_mean;
      rstd = next_rstd;
      if constexpr (ahead > 0) {
        const int64 next = row + ahead * stride;
        if (next - row_in_cta < params.rows) {
          const int free = slot + ahead < stages ? slot + ahead : slot + ahead - stages;
          inputs.fetch(params, shared + free * Config::slot_bytes, row_in_cta, next,
                       next < params.rows ? most_columns : 0, thread);
        }
        commit_async();
      }
      if constexpr (given) {
        const int64 next = row + stride;
        next_mean = next_rstd = 0.0f;
        if (next < params.rows) {
          if constexpr (centred) next_mean = load_float(static_cast<const float*>(params.mean) + next);
          next_rstd = load_float(static_cast<const float*>(params.rstd) + next);
        }
      }
      inputs.locate(params, here, row_in_cta, row);

      // ---- What the whole row adds up to; and its part of the weight's gradients, if its statistics are known
      if constexpr (finds_statistics && centred) {
        float total[1] = {0.0f};
#pragma unroll
        for (int k = 0; k < steps; ++k) total[0] += sum_of(inputs.x.at((k * threads + thread) * N));
        reduction.template reduce_in_cta<Sum, 0>(total);
        const float own_columns =
            exact ? static_cast<float>(Config::slice) : static_cast<float>(columns_of_cta<Config>(rank));
        mean = own_columns == 0.0f ? 0.0f : divide(total[0], own_columns);
      }
#pragma unroll
      for (int i = 0; i < values; ++i) sums[i] = 0.0f;
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int column = (k * threads + thread) * N;
        const Vec<Gradient, N> dy = inputs.dy.at(column);
        Vec<Input, N> x;
        if constexpr (Config::needs_x) x = inputs.x.at(column);
        if constexpr (Config::has_weight && !Config::weight_held) {
          weight[0].load(weights + column, exact ? N : most_columns - column, weight_aligned);
        }
        float of_vec[values] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float gradient = dy.get(i);
          if constexpr (Config::has_dbias && !finds_statistics) dbias[k * N + i] += gradient;
          if constexpr (Config::needs_x) {
            float deviation = x.get(i);
            if constexpr (centred) deviation -= mean;
            if constexpr (!finds_statistics) deviation *= rstd;
            if constexpr (Config::has_dweight && !finds_statistics) {
              dweight[k * N + i] = fused_multiply_add(gradient, deviation, dweight[k * N + i]);
            }
            if constexpr (Config::has_weight && held) {
              gradient *= full_weight[k * N + i];
            } else if constexpr (Config::has_weight) {
              gradient *= weight[Config::weight_held ? k : 0].get(i) + params.weight_offset;
            }
            if constexpr (Config::has_dx) {
              of_vec[0] = fused_multiply_add(gradient, deviation, of_vec[0]);
              if constexpr (centred) of_vec[1] += gradient;
            }
            if constexpr (held) {
              held_gradient[k * N + i] = gradient;
              held_normal[k * N + i] = deviation;
            }
            if constexpr (finds_statistics) {
              if constexpr (centred) {
                if (!Config::within(i, columns - column)) deviation = 0.0f;
                of_vec[3] += deviation;
              }
              of_vec[values - 1] = fused_multiply_add(deviation, deviation, of_vec[values - 1]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < values; ++i) sums[i] += of_vec[i];
      }
      if constexpr (reduces) {
        reduction.template reduce_in_cta<Sum, 1>(sums);
        if constexpr (finds_statistics && centred) sums[2] = mean;
        reduction.send(sums);
      }
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    first_row += stride;
    reduction.next_row();
    if constexpr (lag != 0) {
      // The first turn has no row before it; the statistics of the one after it stay for the next turn.
      const float swapped_mean = last_mean, swapped_rstd = last_rstd;
      last_mean = mean;
      last_rstd = rstd;
      mean = swapped_mean;
      rstd = swapped_rstd;
      if (gradient_first < group * Config::rows_per_cta) continue;
    }

    // ---- The gradients of the row, or of the one before
    if constexpr (reduces) {
      const int64 row = gradient_first + row_in_cta;
      const bool exists = Config::rows_per_cta == 1 || row < params.rows;
      const int columns = exists ? most_columns : 0;
      char* here = shared + gradient_slot * Config::slot_bytes;
      if constexpr (lag != 0) inputs.locate(params, here, row_in_cta, row);
      reduction.receive(sums);
      float rest = 0.0f;   // of the mean
      float level = 0.0f;  // mean of dy * w
      if constexpr (finds_statistics) {
        float squares;
        if constexpr (centred) {
          const int peer = thread % Config::ctas_per_row;
          const Moments moments = combined_moments<Config::ctas_per_row>(
              sums[2], sums[3], sums[4],
              exact ? static_cast<float>(Config::slice) : static_cast<float>(columns_of_cta<Config>(peer)),
              reciprocal_hidden);
          // From each CTA's shift to the row's mean.
          sums[0] = fused_multiply_add((sums[2] - moments.mean) - moments.rest, sums[1], sums[0]);
          mean = moments.mean;
          rest = moments.rest;
          squares = moments.squares;
        } else {
          squares = reduce_lanes<Sum, Config::ctas_per_row>(sums[1]);
        }
        rstd = exists ? rstd_of(squares, reciprocal_hidden, params.eps).high : 0.0f;
      }
      // Mean of dy * w * x'.
      float projection = reduce_lanes<Sum, Config::ctas_per_row>(sums[0]) * reciprocal_hidden;
      if constexpr (finds_statistics) projection *= rstd;
      if constexpr (centred) level = reduce_lanes<Sum, Config::ctas_per_row>(sums[1]) * reciprocal_hidden;
      OutputRow<Output, Config> dx_out;
      if constexpr (Config::has_dx) {
        Output* dx = static_cast<Output*>(params.dx) + begin +
                     row_offset(params, row, params.dx_outer_stride, params.dx_inner_stride);
        dx_out.begin(
            dx, Config::out_in_slot ? here : shared + Config::out_at, row_in_cta,
            Config::hidden % N == 0 && rows_aligned<Output, N>(dx, params.dx_outer_stride, params.dx_inner_stride));
      }
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int column = (k * threads + thread) * N;
        Vec<Gradient, N> dy;
        Vec<Input, N> x;
        if constexpr (!held) {
          dy = inputs.dy.at(column);
          x = inputs.x.at(column);
        }
        Vec<typename Config::Residual, N> dresidual;
        if constexpr (Config::has_dresidual) {
          dresidual = inputs.dresidual.at(column);
        }
        if constexpr (Config::has_dx && Config::has_weight && !Config::weight_held && !held) {
          weight[0].load(weights + column, exact ? N : most_columns - column, weight_aligned);
        }
        Vec<Output, N> result;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          float dx[2] = {0.0f, 0.0f};
#pragma unroll
          for (int j = 0; j < (N == 1 ? 1 : 2); ++j) {
            float gradient, normal;
            if constexpr (held) {
              gradient = held_gradient[k * N + i + j];
              normal = held_normal[k * N + i + j];
            } else {
              gradient = dy.get(i + j);
              normal = x.get(i + j);
              if constexpr (centred) normal -= mean;
              if constexpr (centred && finds_statistics) normal -= rest;
              normal *= rstd;
              if constexpr (finds_statistics) {
                if constexpr (Config::has_dbias) dbias[k * N + i + j] += gradient;
                if constexpr (Config::has_dweight) {
                  dweight[k * N + i + j] = fused_multiply_add(gradient, normal, dweight[k * N + i + j]);
                }
              }
              if constexpr (Config::has_weight) {
                gradient *= weight[Config::weight_held ? k : 0].get(i + j) + params.weight_offset;
              }
            }
            gradient = fused_multiply_add(-normal, projection, gradient);
            if constexpr (centred) gradient -= level;
            if constexpr (Config::has_dresidual) {
              dx[j] = fused_multiply_add(gradient, rstd, dresidual.get(i + j));
            } else {
              dx[j] = gradient * rstd;
            }
          }
          result.set(i, dx[0], dx[1]);
        }
        if constexpr (Config::has_dx) dx_out.put(result, column, 0, columns);
      }
      if constexpr (Config::has_dx) dx_out.finish(0, columns, thread, true);
    }
    gradient_slot = gradient_slot + 1 == stages ? 0 : gradient_slot + 1;
  }
  wait_async();
  if constexpr (reduces) reduction.end();

  if constexpr (Config::has_dweight) {
    store_partials<Config>(static_cast<float*>(params.partials), dweight, shared, 0, group, begin, thread, row_in_cta);
  }
  if constexpr (Config::has_dbias) {
    store_partials<Config>(static_cast<float*>(params.partials), dbias, shared, Config::gradients - 1, group, begin,
                           thread, row_in_cta);
  }
}

// The second launch: adds up the rows of partial sums, those of each head. A CTA has 32 columns; its 32 warps share
// the rows, `RowsPerGroup` of each group of the first launch. Warp i returns the sum of column i.
template <int RowsPerGroup, class Params>
TRTC_DEVICE float finished_sum(const Params& params, int gradient, int gradients) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int64 column = cta_index() * 32 + lane;
  const int64 rows = static_cast<int64>(params.groups) * RowsPerGroup;
  const int64 step = 32 * static_cast<int64>(params.heads);
  const float* partials = static_cast<const float*>(params.partials);
  TRTC_SHARED(float, sums, 32 * 33);
  float sum = 0.0f;
  if (column < params.hidden) {
#pragma unroll 4
    for (int64 row = cta_index_y() + warp * static_cast<int64>(params.heads); row < rows; row += step) {
      sum += partials[partial_offset(row, gradient, gradients, params.hidden) + column];
    }
  }
  sums[lane * 33 + warp] = sum;
  cta_barrier();
  const float all = reduce_lanes<Sum, 32>(sums[warp * 33 + lane]);
  cta_barrier();
  return all;
}

template <class Dweight, class Dbias, bool HasDweight, bool HasDbias, int RowsPerGroup, bool Early, class Params>
TRTC_DEVICE void norm_backward_finish(const Params& params) {
#if TRTC_ARCHITECTURE >= 90
  if constexpr (Early) wait_for_last_launch();
#endif
  const int64 column = cta_index() * 32 + thread_index() / 32;
  const int64 to = cta_index_y() * params.hidden + column;
  const bool stores = thread_index() % 32 == 0 && column < params.hidden;
  if constexpr (HasDweight) {
    Vec<Dweight, 1> value;
    value.set(0, finished_sum<RowsPerGroup>(params, 0, HasDweight + HasDbias), 0.0f);
    value.store(static_cast<Dweight*>(params.dweight) + to, stores);
  }
  if constexpr (HasDbias) {
    Vec<Dbias, 1> value;
    value.set(0, finished_sum<RowsPerGroup>(params, HasDweight, HasDweight + HasDbias), 0.0f);
    value.store(static_cast<Dbias*>(params.dbias) + to, stores);
  }
}

// ---- The general kernels: hidden size, types and options at run time
// ------------------------------------------------- Complete for every shape, not fast: `Threads` threads hold a row,
// and read it again for each thing they ask of it.

// A data type as DLPack names it: type code * 256 + bits.
enum class Dtype : int {
  absent = 0,
  float32 = 0x220,
  float16 = 0x210,
  bfloat16 = 0x410,
  float8_e4m3 = 0xa08,
  float8_e5m2 = 0xc08,
  int8 = 0x008,
};

enum : int { general_vector = 4 };

template <class T, int N>
TRTC_DEVICE void load_floats_of(float (&values)[N], const void* row, int column, int columns) {
  const T* first = static_cast<const T*>(row) + column;
  Vec<T, N> value;
  value.load(first, columns - column, rows_aligned<T, N>(first, 0, 0));
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = value.get(i);
}

template <class T, int N>
TRTC_DEVICE void store_floats_of(const float (&values)[N], void* row, int column, int columns) {
  T* first = static_cast<T*>(row) + column;
  Vec<T, N> value;
#pragma unroll
  for (int i = 0; i < N; i += 2) value.set(i, values[i], N == 1 ? 0.0f : values[i + (N > 1)]);
  const bool vector = column + N <= columns && rows_aligned<T, N>(first, 0, 0);
  value.store(first, vector);
#pragma unroll
  for (int i = 0; i < N; ++i) value.store_element(first + i, i, !vector && column + i < columns);
}

// A row of an array of any type.
struct AnyRow {
  char* row;
  Dtype dtype;
  int columns;

  TRTC_DEVICE bool present() const { return dtype != Dtype::absent; }
  TRTC_DEVICE float largest_number() const {
    return dtype == Dtype::float8_e4m3   ? largest<float8_e4m3>()
           : dtype == Dtype::float8_e5m2 ? largest<float8_e5m2>()
                                         : largest<int8>();
  }

  template <int N>
  TRTC_DEVICE void load(float (&values)[N], int column) const {
    if (dtype == Dtype::float32) load_floats_of<float, N>(values, row, column, columns);
    if (dtype == Dtype::float16) load_floats_of<float16, N>(values, row, column, columns);
    if (dtype == Dtype::bfloat16) load_floats_of<bfloat16, N>(values, row, column, columns);
  }

  template <int N>
  TRTC_DEVICE void store(const float (&values)[N], int column) const {
    if (dtype == Dtype::float32) store_floats_of<float, N>(values, row, column, columns);
    if (dtype == Dtype::float16) store_floats_of<float16, N>(values, row, column, columns);
    if (dtype == Dtype::bfloat16) store_floats_of<bfloat16, N>(values, row, column, columns);
    if (dtype == Dtype::float8_e4m3) store_floats_of<float8_e4m3, N>(values, row, column, columns);
    if (dtype == Dtype::float8_e5m2) store_floats_of<float8_e5m2, N>(values, row, column, columns);
    if (dtype == Dtype::int8) store_floats_of<int8, N>(values, row, column, columns);
  }
};

// The row of an array whose element offset is `offset`. `columns` is 0 for a row past the last.
TRTC_DEVICE AnyRow any_row(void* array, int dtype, int64 offset, int columns) {
  return {static_cast<char*>(array) + offset * ((dtype & 0xff) / 8), static_cast<Dtype>(dtype), columns};
}

// Sums over a row: by element of a Vec, by block of 32 Vecs and by row, so that no chain of additions is long.
template <int Count>
struct LongSums {
  float all[Count] = {};
  float block[Count] = {};
  int terms = 0;

  TRTC_DEVICE void add(const float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) block[i] += values[i];
    if (++terms % 32 == 0) close();
  }
  TRTC_DEVICE void close() {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      all[i] += block[i];
      block[i] = 0.0f;
    }
  }
};

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
  return combined_moments<1>(shift, sums.all[0], sums.all[1], static_cast<float>(hidden), reciprocal_hidden);
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
  const int64 column = cta_index() * 32 + thread_index() / 32;
  const int64 offset = cta_index_y() * params.hidden + column;
  const int columns = thread_index() % 32 == 0 && column < params.hidden ? 1 : 0;
  int gradient = 0;
  if (params.dweight_dtype != 0) {
    const float sum[1] = {finished_sum<RowsPerGroup>(params, gradient++, gradients)};
    any_row(params.dweight, params.dweight_dtype, offset, columns).store(sum, 0);
  }
  if (params.dbias_dtype != 0) {
    const float sum[1] = {finished_sum<RowsPerGroup>(params, gradient, gradients)};
    any_row(params.dbias, params.dbias_dtype, offset, columns).store(sum, 0);
  }
}

}  // namespace trtc
