// Forward: y of rows that each CTA, or cluster, has one of (norm_forward) or several together (norm_forward_in_shared),
// or takes in turn (norm_forward_in_turn).
#pragma once

#include "norms.cuh"

namespace trtc {

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

// Whether x * rstd is rounded before it is multiplied by the weight, to Config::Rounded, which other kernels do not
// have.
template <class...>
using Void = void;
template <class Config, class = void>
inline constexpr bool rounds_before_weight = false;
template <class Config>
inline constexpr bool rounds_before_weight<Config, Void<typename Config::Rounded>> = true;

// The weight and bias of all columns of a CTA.
template <class Config>
struct AffineRow {
  ColumnArray<typename Config::Weight, Config> weight;
  ColumnArray<typename Config::Bias, Config> bias;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, int64 first, char* shared) {
    if constexpr (Config::has_weight) weight.begin(params.weight, first, shared + Config::weight_at);
    if constexpr (Config::has_bias) bias.begin(params.bias, first, shared + Config::bias_at);
  }
  template <class Params>
  TRTC_DEVICE void stage(const Params& params, const Place<Config>& place, int shift) const {
    if constexpr (Config::has_weight) weight.stage(place, shift, params.weight_offset);
    if constexpr (Config::has_bias) bias.stage(place, shift, 0.0f);
  }
};

// Those of one Vec.
template <class Config>
struct Affine {
  enum : int { N = Config::vector };
  using Weights = ColumnArray<typename Config::Weight, Config>;
  typename Weights::Kept weight;
  typename ColumnArray<typename Config::Bias, Config>::Kept bias;

  TRTC_DEVICE void load(const AffineRow<Config>& row, int number, int columns) {
    if constexpr (Config::has_weight) row.weight.load(weight, number, columns);
    if constexpr (Config::has_bias) row.bias.load(bias, number, columns);
  }

  template <class Params>
  TRTC_DEVICE float full_weight(const Params& params, int i) const {
    if constexpr (Config::has_weight) return Weights::full(weight, i, params.weight_offset);
    return 1.0f;
  }
  TRTC_DEVICE float full_bias(int i) const {
    if constexpr (Config::has_bias) return bias.get(i);
    return 0.0f;
  }
};

// What a column has of weight and bias.
template <class Config>
constexpr TRTC_DEVICE int affine_bytes_of() {
  return (Config::has_weight ? sizeof(typename Config::Weight) : 0) +
         (Config::has_bias ? sizeof(typename Config::Bias) : 0);
}

// Those of the first `Count` Vecs of a thread: where all are aligned, without a branch between them.
template <class Config, int Count>
TRTC_DEVICE void load_first(Affine<Config> (&affine)[Count], const AffineRow<Config>& row, int thread, int columns) {
  constexpr int N = Config::vector;
  constexpr int stride = Config::threads * N;
  const int column = thread * N;
  const bool aligned = (!Config::has_weight || row.weight.aligned) && (!Config::has_bias || row.bias.aligned);
  if (Config::hidden % N == 0 && aligned) {
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const bool valid = Config::filled(k) || column + k * stride < columns;
      if constexpr (Config::has_weight) affine[k].weight.load_if(row.weight.part + column + k * stride, valid);
      if constexpr (Config::has_bias) affine[k].bias.load_if(row.bias.part + column + k * stride, valid);
    }
  } else {
    // Rare: the text is there once.
#pragma unroll 1
    for (int k = 0; k < Count; ++k) {
      Affine<Config> last;
      last.load(row, k * Config::threads + thread, columns);
#pragma unroll
      for (int i = 0; i + 1 < Count; ++i) affine[i] = affine[i + 1];
      affine[Count - 1] = last;
    }
  }
}

// x * rstd, rounded to T, in the place of x.
template <class T, int N>
TRTC_DEVICE void round_normals(float (&x)[N], Rstd rstd) {
  Vec<T, N> rounded;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    rounded.set(i, x[i] * rstd.high, N == 1 ? 0.0f : x[i + (N > 1)] * rstd.high);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = rounded.get(i);
}

// What a row's y is computed from beside its elements.
struct Normalization {
  Moments moments;
  Rstd rstd;
  float scale;
};

// One Vec of y before it is scaled, from what forward_value() takes, in the place of that; its first element is the
// part's `column`. `most` becomes the largest magnitude, if that is asked for.
template <bool Measures, class Config, class Params, int N>
TRTC_DEVICE void finish_values(const Params& params, float (&y)[N], const Normalization& row,
                               const Affine<Config>& affine, const Vec<typename Config::Residual, N>& added, int column,
                               int columns, float& most) {
  if constexpr (rounds_before_weight<Config>) round_normals<typename Config::Rounded>(y, row.rstd);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (rounds_before_weight<Config>) {
      y[i] *= affine.full_weight(params, i);
      if constexpr (Config::has_bias) y[i] += affine.full_bias(i);
    } else {
      y[i] = forward_value<Config>(y[i], row.moments, row.rstd, affine.full_weight(params, i), affine.full_bias(i));
    }
    if constexpr (Config::added_after) y[i] += added.get(i);
    if constexpr (Measures) {
      if (Config::within(i, column, columns)) most = Maximum::of(most, magnitude(y[i]));
    }
  }
}

// It as it is stored.
template <class Config, int N>
TRTC_DEVICE Vec<typename Config::Output, N> output_of(const float (&y)[N], float scale) {
  constexpr bool scaled = Config::has_scale || Config::row_scaled;
  Vec<typename Config::Output, N> result;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float second = N == 1 ? 0.0f : y[i + (N > 1)];
    result.set(i, scaled ? y[i] * scale : y[i], scaled ? second * scale : second);
  }
  return result;
}

// What a thread keeps of y until the scale of its row is known, `Count` Vecs. It takes them, and then gives them.
template <int N, int Count>
struct KeptValues {
  float values[Count * N];

  TRTC_DEVICE void pass(float (&y)[N], int number, bool gives) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (gives) {
        y[i] = values[number * N + i];
      } else {
        values[number * N + i] = y[i];
      }
    }
  }
};
template <int N>
struct KeptValues<N, 0> {};

// Of a row whose CTAs have told each other {shift, deviations, squares}, or {squares} where it is not centred.
template <class Config, class Params>
TRTC_DEVICE Normalization normalization_of(const Params& params, const float* told, float scale, int thread) {
  Normalization found{{0.0f, 0.0f, 0.0f}, {0.0f, 0.0f}, scale};
  if constexpr (Config::centred) {
    found.moments = row_moments<Config>(told[0], told[1], told[2], thread);
  } else {
    found.moments.squares = reduce_lanes<Sum, Config::ctas_per_row>(told[0]);
  }
  found.rstd = rstd_of(found.moments.squares, 1.0f / Config::hidden, params.eps);
  return found;
}

template <class Config, class Params>
TRTC_DEVICE void tell_statistics(const Params& params, const Place<Config>& place, int64 row,
                                 const Normalization& found) {
  const bool tells = place.thread == 0 && place.rank == 0 && place.exists(row, params.rows);
  if constexpr (Config::has_mean) {
    if (tells) static_cast<float*>(params.mean)[row] = found.moments.mean + found.moments.rest;
  }
  if constexpr (Config::has_rstd) {
    if (tells) static_cast<float*>(params.rstd)[row] = found.rstd.high;
  }
}

// What a row is multiplied by whose CTAs have told each other their largest magnitudes.
template <class Config, class Params>
TRTC_DEVICE float tell_row_scale(const Params& params, const Place<Config>& place, int64 row, float told) {
  const float row_amax = reduce_lanes<Maximum, Config::ctas_per_row>(told);
  const auto found = RowScale::of(row_amax, largest<typename Config::Output>());
  if (place.thread == 0 && place.rank == 0 && place.exists(row, params.rows)) {
    static_cast<float*>(params.row_scale)[row] = found.scale;
  }
  return found.inverse;
}

// The largest magnitude, of all threads, and the inverse of the scale, if they are asked for.
template <class Config, class Params>
TRTC_DEVICE void tell_scaling(const Params& params, float amax, float scale) {
  if constexpr (Config::has_amax) {
    tell_amax<Config::threads * Config::rows_per_cta>(static_cast<float*>(params.amax), amax);
  }
  if constexpr (Config::has_scale_inv) {
    if (thread_index() == 0 && cta_index() == 0) *static_cast<float*>(params.scale_inv) = divide(1.0f, scale);
  }
}

// Whether a thread may find the moments of its elements in one pass over shared memory. Rows that share a CTA would not
// all take them again; of fewer elements at a time, one part in 20 or more would.
template <class Config>
constexpr TRTC_DEVICE bool one_pass_of() {
  return Config::centred && Config::rows_per_cta == 1 && Config::vector >= 4;
}

// Where rows are taken in turn, floats have instructions to spare (262144: 0.936 of a copy, in one pass 0.916). What
// counts is the type of what lies in the slot.
template <class Config>
constexpr TRTC_DEVICE bool one_pass_in_turn() {
  using Stored = typename Select<Config::added_before, typename Config::Residual, typename Config::Held>::Type;
  return one_pass_of<Config>() && sizeof(Stored) < 4 && sizeof(typename Config::Output) < 4;
}

// The inputs of a row: x, and the residual that is added before or after; and their sum, where it is added before.
template <class Config>
struct ForwardRows : InputRows<Config, ForwardRows<Config>> {
  using Held = typename Config::Held;
  enum : int { N = Config::vector };
  enum : bool {
    has_residual = Config::added_before || Config::added_after,
    // Deviations outside are left out anyway: a row need not wait for zeros (4093: 0.83 of a copy, and 0.81; 5121: 0.87
    // and 0.85).
    leaves_outside = Config::ragged && one_pass_in_turn<Config>(),
    // Whether the sum is kept in the residual's place in the slot; one of another type is added up each time that it is
    // read, to the same bits.
    keeps_sum = Config::added_before && is_same<Held, typename Config::Residual>,
  };
  InputRow<typename Config::Input, Config> x;
  InputRow<typename Config::Residual, Config> residual;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, const Place<Config>& place) {
    x.begin({params.x, params.x_outer_stride, params.x_inner_stride}, params, place);
    if constexpr (has_residual) {
      residual.begin({params.residual, params.residual_outer_stride, params.residual_inner_stride}, params, place);
    }
  }
  template <class Each>
  TRTC_DEVICE void each(const Each& call) {
    call(x, 0);
    if constexpr (has_residual) call(residual, Config::residual_at);
  }

  // What is normalized: x, or its sum with the residual, which is written and kept in the slot.
  TRTC_DEVICE Vec<Held, N> first_held_at(OutputRow<Held, Config>& sum_out, int k, int slot, int columns) const {
    if constexpr (Config::added_before && !keeps_sum) {
      const Vec<Held, N> value = held_at(slot);
      // No shared memory is kept for it: a Vec that is not whole, or not aligned, is stored by elements.
      Held* const to = sum_out.global + (slot - sum_out.shift);
      const int begin = sum_out.shift - slot, end = columns + begin;
      const bool whole = sum_out.aligned && (Config::inside(k) || (begin <= 0 && end >= N));
      value.store(to, whole);
      if (!whole) value.store_each(to, begin, end);
      return value;
    } else if constexpr (Config::added_before) {
      const Vec<Held, N> value = sum_of_vecs<Held>(x.at(slot), residual.at(slot));
      value.template store<Space::shared>(sum_out.shared + slot, true);
      if constexpr (Config::ragged) {
        if (sum_out.aligned) sum_out.put_aligned(value, slot, columns, Config::inside(k));
      } else if (sum_out.aligned) {
        sum_out.put(value, slot, 0, columns);
      }
      return value;
    } else {
      return x.at(slot);
    }
  }
  TRTC_DEVICE Vec<Held, N> held_at(int slot) const {
    if constexpr (keeps_sum) {
      return residual.at(slot);
    } else if constexpr (Config::added_before) {
      return sum_of_vecs<Held>(x.at(slot), residual.at(slot));
    } else {
      return x.at(slot);
    }
  }
  // The N columns from `column` on of a ragged part, the first of which has place `shift`: those of the slots from
  // `column` on, but for the places before it, which are of the next ones. All threads' Vecs must be there.
  TRTC_DEVICE Vec<Held, N> held_columns(int thread, int k, int columns) const {
    const int column = (k * Config::threads + thread) * N;
    Vec<Held, N> value = held_inside(column, k, columns);
    value.replace_first(held_inside(column + N, k + 1, columns), this->shift);
    return value;
  }
  // Whether a slot of step k, which may be that behind the last one, has anything of the part, or zeros: else nothing
  // may have come.
  TRTC_DEVICE bool came(int slot, int k, int columns) const {
    if (Config::filled(k)) return true;
    if constexpr (leaves_outside) return slot < columns + this->shift;
    return k < Config::steps || slot < Config::chunk;
  }
  TRTC_DEVICE Vec<Held, N> held_inside(int slot, int k, int columns) const {
    Vec<Held, N> value;
    value.fill(0);
    if (came(slot, k, columns)) value = held_at(slot);
    return value;
  }
  // Where the sum is staged: in the residual's place.
  TRTC_DEVICE char* sum_staging(const Place<Config>& place) const {
    return has_residual ? residual.in_place(place) : nullptr;
  }
};

template <class Config, class Params>
TRTC_DEVICE void begin_sum(OutputRow<typename Config::Held, Config>& to, const Params& params, int64 row,
                           const Place<Config>& place, char* staging, int shift = 0) {
  if constexpr (Config::added_before) {
    to.begin({params.residual_out, params.residual_out_outer_stride, params.residual_out_inner_stride}, params, row,
             place, staging, shift);
  }
}

template <class Config, class Params>
TRTC_DEVICE void norm_forward(const Params& params) {
  using Input = typename Config::Input;
  using Residual = typename Config::Residual;
  using Output = typename Config::Output;
  using Held = typename Config::Held;
  constexpr int values = Config::centred ? 3 : 1;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(),
                                 values, Config::repeats, Config::repeats || Config::row_scaled ? 2 : 1>;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr int steps = Config::steps;
  constexpr bool exact = Config::exact;
  constexpr bool one_chunk = Config::chunks == 1;
  constexpr bool has_affine = Config::has_weight || Config::has_bias;
  constexpr int affine_bytes = affine_bytes_of<Config>();
  // Fetched before the sum, the weight's latency is hidden behind the row's; more than this much would not fit beside
  // it.
  constexpr bool affine_early = has_affine && one_chunk && steps * N * affine_bytes <= 64;
  // Or behind the threads' last exchange. Where each Vec of y loads its own, that waits for the store before it
  // (LayerNorm, bfloat16, 16 rows of 4096: 2.4 us in a graph, and 1.8).
  constexpr bool affine_late = has_affine && one_chunk && !affine_early && !ForwardRows<Config>::has_residual &&
                               threads <= 256 && steps * N * affine_bytes <= 128;
  // A row of 16 bits is unpacked again behind that exchange: 64 registers instead of 79 (4096: 0.962 of a copy, and
  // 0.947). Not one of a single warp, of which a multiprocessor has 32 at most (1024: 0.950 and 0.964), nor one of
  // fewer elements (1536: 0.954 and 0.960).
  constexpr bool unpacks_anew = Config::centred && affine_late && threads > 32 && steps * N >= 32;
  // A row that is centred is read three times: its elements stay in registers as floats, but not beside so much (2048:
  // 1.02 times as fast).
  constexpr bool unpacked = Config::centred && one_chunk && !affine_late;

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = Place<Config>::here();
  const int thread = place.thread;
  ForwardRows<Config> inputs;
  inputs.begin(params, place);
  Reduction reduction;
  reduction.begin(params, place.rank);
  float scale = 1.0f;
  if constexpr (Config::has_scale) scale = load_float(params.scale);
  float amax = 0.0f;

  int64 first_row = place.begin_row();
  do {
    const int64 row = first_row + place.row_in_cta;
    const int columns = place.columns(row, params.rows);
    AffineRow<Config> affine_row;
    affine_row.begin(params, head_of<Config::per_head>(params, row) * Config::hidden + place.first_column, shared);

    // ---- The row, and its sum of squares; or its sum, where it is centred.
    Vec<Held, N> value[steps];
    float element[unpacked ? steps * N : 1];
    Vec<Residual, N> added[steps];
    Affine<Config> affine[steps];
    OutputRow<Held, Config> sum_out;
    begin_sum(sum_out, params, row, place, shared + Config::sum_at);
    const Input* x = inputs.x.of(params, row);
    const Residual* residual = nullptr;
    if constexpr (inputs.has_residual) residual = inputs.residual.of(params, row);
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < Config::slice; first += Config::chunk) {
      const int own = first + thread * N;
      if constexpr (Config::added_before) {
        // Each sum is stored before the next one's Vecs are loaded: they need fewer registers (RMSNorm of 4096 columns
        // of bfloat16: 1.04 of a copy, and 1.01).
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          const int column = own + k * threads * N;
          const int count = exact ? N : columns - column;
          Vec<Input, N> input;
          input.load(x + column, count, inputs.x.aligned);
          added[k].load(residual + column, count, inputs.residual.aligned);
          value[k] = sum_of_vecs<Held>(input, added[k]);
          sum_out.put(value[k], column, first, columns);
        }
      } else {
        load_vecs<Config>(value, x + own, columns - own, inputs.x.aligned);
        if constexpr (Config::added_after && one_chunk) {
          load_vecs<Config>(added, residual + own, columns - own, inputs.residual.aligned);
        }
      }
      if constexpr (affine_early) load_first(affine, affine_row, thread, columns);
      float chunk_sum = 0.0f;
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        chunk_sum += Config::centred ? sum_of(value[k]) : sum_of_squares(value[k]);
        if constexpr (unpacked) {
#pragma unroll
          for (int i = 0; i < N; ++i) element[k * N + i] = value[k].get(i);
        }
      }
      sum += chunk_sum;
      if constexpr (Config::added_before) sum_out.finish(first, columns, thread, !one_chunk || Config::repeats);
    }

    // ---- Its statistics
    // Where a row that is not held is read again.
    const Held* again = nullptr;
    bool again_aligned = false;
    if constexpr (Config::added_before) {
      again = sum_out.global;
      again_aligned = sum_out.aligned;
    } else {
      again = x;
      again_aligned = inputs.x.aligned;
    }
    float total[1] = {sum};
    if constexpr (affine_late && !Config::centred) load_first(affine, affine_row, thread, columns);
    reduction.template reduce_in_cta<Sum, 0>(total);
    float told[values];
    float shift = 0.0f;
    if constexpr (Config::centred) {
      shift = shift_of<Config>(total[0], place.rank);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int first = 0; first < Config::slice; first += Config::chunk) {
        float of_chunk[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          const int column = first + (k * threads + thread) * N;
          if constexpr (!one_chunk) value[k].load(again + column, columns - column, again_aligned);
          float deviation[N];
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if constexpr (unpacked) {
              deviation[i] = element[k * N + i] - shift;
            } else {
              deviation[i] = value[k].get(i) - shift;
            }
          }
          Config::clear_outside(deviation, k, column, columns);
          if constexpr (unpacked) {
#pragma unroll
            for (int i = 0; i < N; ++i) element[k * N + i] = deviation[i];
          }
          add_deviations(of_chunk, deviation);
        }
        sums[0] += of_chunk[0];
        sums[1] += of_chunk[1];
      }
      if constexpr (unpacks_anew) {
#pragma unroll
        for (int k = 0; k < steps; ++k) value[k].forget_unpacked();
      }
      if constexpr (affine_late) load_first(affine, affine_row, thread, columns);
      reduction.template reduce_in_cta<Sum, 1>(sums);
      told[0] = shift;
      told[1] = sums[0];
      told[2] = sums[1];
    } else {
      told[0] = total[0];
    }
    reduction.gather(told);
    Normalization found = normalization_of<Config>(params, told, scale, thread);
    tell_statistics<Config>(params, place, row, found);

    // ---- y: once, or where each row has a scale, first its largest magnitude
    OutputRow<Output, Config> y_out;
    y_out.begin({params.out, params.out_outer_stride, params.out_inner_stride}, params, row, place,
                shared + Config::out_at);
    constexpr int passes = Config::row_scaled ? 2 : 1;
    constexpr bool keeps = Config::row_scaled && one_chunk;
    KeptValues<N, keeps ? steps : 0> kept;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const bool stores = pass + 1 == passes;
      float largest_in_row = 0.0f;
#pragma unroll 1
      for (int first = 0; first < Config::slice; first += Config::chunk) {
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          const int column = first + (k * threads + thread) * N;
          const int count = exact ? N : columns - column;
          if constexpr (!one_chunk) {
            value[k].load(again + column, count, again_aligned);
            if constexpr (Config::added_after) added[k].load(residual + column, count, inputs.residual.aligned);
          }
          float y[N];
          if (!keeps || !stores) {
            if constexpr (has_affine && !affine_early && !affine_late) affine[k].load(affine_row, column / N, columns);
#pragma unroll
            for (int i = 0; i < N; ++i) {
              if constexpr (unpacked) {
                y[i] = element[k * N + i];
                if constexpr (Config::ctas_per_row > 1) y[i] += shift - found.moments.mean;
              } else {
                y[i] = value[k].get(i) - found.moments.mean;
              }
            }
            constexpr bool measures = Config::has_amax || Config::row_scaled;
            finish_values<measures>(params, y, found, affine[k], added[k], column, columns,
                                    Config::has_amax ? amax : largest_in_row);
          }
          if constexpr (keeps) kept.pass(y, k, stores);
          if (stores) y_out.put(output_of<Config>(y, found.scale), column, first, columns);
        }
        if (stores) y_out.finish(first, columns, thread, !one_chunk || Config::repeats);
      }
      if constexpr (Config::row_scaled) {
        if (!stores) {
          float most[1] = {largest_in_row};
          reduction.template reduce_in_cta<Maximum, 2>(most);
          float of_ctas[values] = {most[0]};
          reduction.gather(of_ctas);
          found.scale = tell_row_scale<Config>(params, place, row, of_ctas[0]);
        }
      }
    }
    first_row += place.stride;
    reduction.next_row();
  } while (Config::repeats && first_row < params.rows);
  tell_scaling<Config>(params, amax, scale);
}

// Rows in shared memory, `together` of them at a time: what is loaded and unpacked of the weight and bias serves all of
// them, and so does every barrier. Past the last row they are that row again, which gets the same bits twice.
template <class Config, class Params>
TRTC_DEVICE void norm_forward_in_shared(const Params& params) {
  using Held = typename Config::Held;
  using Output = typename Config::Output;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr int steps = Config::steps;
  constexpr int together = Config::together;
  constexpr int values = Config::centred ? 3 : 1;
  using Reduction = RowReduction<threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(),
                                 together * values, Config::repeats, Config::repeats || Config::row_scaled ? 2 : 1>;
  constexpr bool has_affine = Config::has_weight || Config::has_bias;
  constexpr int affine_bytes = affine_bytes_of<Config>();
  constexpr bool one_pass = one_pass_of<Config>();
  // Where a row has a scale: whether y stays in registers until that is known; others would spill.
  constexpr bool keeps = Config::row_scaled && threads <= 512 && N > 1 && N * affine_bytes <= 32;
  // Vecs of the weight and bias that are on their way while others are used, the first ones while the sums are
  // exchanged: hides the L2 cache's latency (LayerNorm, bfloat16, 65536: all 8 0.95 of a copy, 7 of them 0.85); larger
  // CTAs have no registers for them, and where each serves several rows, half of them last as long.
  constexpr bool loads_ahead = has_affine && keeps == Config::row_scaled;
  // Before the sums, which hide it then (65536: 0.97, and 0.84 behind them); two rows' sums need the registers (0.85
  // and 0.96).
  constexpr bool loads_early = loads_ahead && one_pass && together == 1 && Config::exact;
  constexpr int in_flight = Config::columns_ahead ? steps : steps == 8 && !Config::repeats ? 4 : steps > 1 ? 2 : 1;

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = Place<Config>::here();
  const int thread = place.thread;
  ForwardRows<Config> inputs[together];
#pragma unroll
  for (int r = 0; r < together; ++r) inputs[r].begin(params, place);
  Reduction reduction;
  reduction.begin(params, place.rank);
  float scale = 1.0f;
  if constexpr (Config::has_scale) scale = load_float(params.scale);
  float amax = 0.0f;

  int64 first_row = together * place.begin_row();
  do {
    int64 row[together];
    char* slot[together];
#pragma unroll
    for (int r = 0; r < together; ++r) {
      row[r] = together == 1 ? first_row + place.row_in_cta : min(first_row + r, params.rows - 1);
      slot[r] = shared + r * Config::slot_bytes;
    }
    const int columns = place.columns(row[0], params.rows);
#pragma unroll
    for (int r = 0; r < together; ++r) {
      inputs[r].locate(params, slot[r], place, row[r]);
      inputs[r].fetch(params, slot[r], place, row[r], nullptr);
    }
    AffineRow<Config> affine_row;
    affine_row.begin(params, head_of<Config::per_head>(params, row[0]) * Config::hidden + place.first_column, shared);
    wait_async();

    // ---- Each row's sum of squares; or its sum, where it is centred. Shared memory has its elements at hand each time
    // that they are read: registers are better spent on more rows in flight.
    OutputRow<Held, Config> sum_out[together];
    float shift[together] = {};
#pragma unroll
    for (int r = 0; r < together; ++r) {
      begin_sum(sum_out[r], params, row[r], place, inputs[r].sum_staging(place));
      if constexpr (one_pass) {
        const Vec<Held, N> first = inputs[r].first_held_at(sum_out[r], 0, thread * N, columns);
        if (thread == 0) shift[r] = ThreadMoments<Config>::shift_from(first, columns);
      }
    }
    // Not before the rows have come: 0.83 instead of 0.95 (LayerNorm, bfloat16, 16384).
    Affine<Config> ahead[in_flight];
    if constexpr (loads_early) load_first(ahead, affine_row, thread, columns);
    if constexpr (one_pass) reduction.tell_in_cta(shift);
    float total[together * (one_pass ? 2 : 1)] = {};
#pragma unroll
    for (int r = 0; r < together; ++r) {
      ThreadMoments<Config> own;
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int column = (k * threads + thread) * N;
        const Vec<Held, N> value =
            one_pass && k == 0 ? inputs[r].held_at(column) : inputs[r].first_held_at(sum_out[r], k, column, columns);
        if constexpr (one_pass) {
          own.add(value, shift[r], k, column, columns);
        } else {
          total[r] += Config::centred ? sum_of(value) : sum_of_squares(value);
        }
      }
      if constexpr (one_pass) {
        total[r * 2] = own.sums.of_row[0];
        total[r * 2 + 1] = own.sums.of_row[1];
      }
      if constexpr (ForwardRows<Config>::keeps_sum) sum_out[r].finish(0, columns, thread, true);
    }
    if constexpr (loads_ahead && !loads_early) load_first(ahead, affine_row, thread, columns);

    // ---- Their statistics
    reduction.template reduce_in_cta<Sum, 0>(total);
    float told[together * values];
    if constexpr (Config::centred) {
      const float reciprocal = reciprocal_columns_of_cta<Config>(place.rank);
      bool again[together];
      bool any = false;
#pragma unroll
      for (int r = 0; r < together; ++r) {
        if constexpr (one_pass) {
          told[r * values + 1] = total[r * 2];
          told[r * values + 2] = total[r * 2 + 1];
          again[r] = is_far(total[r * 2], total[r * 2 + 1], reciprocal);
          if (again[r]) shift[r] += shift_of<Config>(total[r * 2], place.rank);
        } else {
          again[r] = true;
          shift[r] = shift_of<Config>(total[r], place.rank);
        }
        any = any || again[r];
      }
      if (__builtin_expect(any, !one_pass)) {
        float sums[together * 2];
#pragma unroll
        for (int r = 0; r < together; ++r) {
          float of_row[2] = {0.0f, 0.0f};
#pragma unroll(one_pass ? 1 : steps)
          for (int k = 0; k < steps; ++k) {
            const int column = (k * threads + thread) * N;
            const Vec<Held, N> value = inputs[r].held_at(column);
            float deviation[N];
#pragma unroll
            for (int i = 0; i < N; ++i) deviation[i] = value.get(i) - shift[r];
            Config::clear_outside(deviation, k, column, columns);
            add_deviations(of_row, deviation);
          }
          sums[r * 2] = of_row[0];
          sums[r * 2 + 1] = of_row[1];
        }
        reduction.template reduce_in_cta<Sum, 1>(sums);
#pragma unroll
        for (int r = 0; r < together; ++r) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (again[r]) told[r * values + 1 + i] = sums[r * 2 + i];
          }
        }
        // So that they need no registers here.
        if constexpr (one_pass && loads_ahead) load_first(ahead, affine_row, thread, columns);
      }
#pragma unroll
      for (int r = 0; r < together; ++r) told[r * values] = shift[r];
    } else {
#pragma unroll
      for (int r = 0; r < together; ++r) told[r] = total[r];
    }
    reduction.gather(told);
    Normalization found[together];
#pragma unroll
    for (int r = 0; r < together; ++r) {
      found[r] = normalization_of<Config>(params, told + r * values, scale, thread);
      tell_statistics<Config>(params, place, row[r], found[r]);
    }

    // ---- y: once, or where each row has a scale, first its largest magnitude
    OutputRow<Output, Config> y_out[together];
#pragma unroll
    for (int r = 0; r < together; ++r) {
      y_out[r].begin({params.out, params.out_outer_stride, params.out_inner_stride}, params, row[r], place,
                     slot[r] + Config::out_at);
    }
    constexpr int passes = Config::row_scaled ? 2 : 1;
    KeptValues<N, keeps ? together * steps : 0> kept;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const bool stores = pass + 1 == passes;
      float largest_in_row[together] = {};
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int column = (k * threads + thread) * N;
        Affine<Config> affine;
        if (keeps && stores) {
          // Nothing is computed.
        } else if constexpr (loads_ahead) {
          affine = ahead[k % in_flight];
          if (k + in_flight < steps) {
            ahead[k % in_flight].load(affine_row, (k + in_flight) * threads + thread, columns);
          }
        } else if constexpr (has_affine) {
          affine.load(affine_row, k * threads + thread, columns);
        }
#pragma unroll
        for (int r = 0; r < together; ++r) {
          float y[N];
          if (!keeps || !stores) {
            const Vec<Held, N> value = inputs[r].held_at(column);
            Vec<typename Config::Residual, N> added;
            if constexpr (Config::added_after) added = inputs[r].residual.at(column);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = value.get(i) - found[r].moments.mean;
            constexpr bool measures = Config::has_amax || Config::row_scaled;
            finish_values<measures>(params, y, found[r], affine, added, column, columns,
                                    Config::has_amax ? amax : largest_in_row[r]);
          }
          if constexpr (keeps) kept.pass(y, r * steps + k, stores);
          if (stores) y_out[r].put(output_of<Config>(y, found[r].scale), column, 0, columns);
        }
      }
#pragma unroll
      for (int r = 0; r < together; ++r) {
        if (stores) y_out[r].finish(0, columns, thread, Config::repeats);
      }
      if constexpr (Config::row_scaled) {
        if (!stores) {
          reduction.template reduce_in_cta<Maximum, 2>(largest_in_row);
          float of_ctas[together * values] = {};
#pragma unroll
          for (int r = 0; r < together; ++r) of_ctas[r] = largest_in_row[r];
          reduction.gather(of_ctas);
#pragma unroll
          for (int r = 0; r < together; ++r) {
            found[r].scale = tell_row_scale<Config>(params, place, row[r], of_ctas[r]);
          }
        }
      }
    }
    first_row += together * place.stride;
    reduction.next_row();
  } while (Config::repeats && first_row < params.rows);
  tell_scaling<Config>(params, amax, scale);
}

// The same for many rows in turn, as RowRing brings them; the weight and bias stay in registers, or in shared memory as
// ragged rows have them.
template <class Config, class Params>
TRTC_DEVICE void norm_forward_in_turn(const Params& params) {
  using Held = typename Config::Held;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr int steps = Config::steps;
  constexpr bool centred = Config::centred;
  constexpr int lag = Config::lag;
  // A row's elements stay in registers until they are stored, or are read from the slot again.
  constexpr bool held = !Config::ragged && lag == 0 && steps * N <= 32;
  constexpr bool one_pass = one_pass_in_turn<Config>() && !held;
  // Or at least until their deviations are summed.
  constexpr bool unpacked =
      held || (!Config::ragged && !one_pass && centred && sizeof(Held) < 4 && steps * N <= (threads > 512 ? 16 : 32));
  constexpr int affine_bytes = affine_bytes_of<Config>();
  constexpr bool affine_held = !Config::ragged && (steps * N <= 16 || steps * N * affine_bytes <= 64);
  constexpr int values = centred ? 3 : 1;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(),
                                 values, true, 2 + 2 * lag>;

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = Place<Config>::here();
  const int thread = place.thread;
  Reduction reduction;
  reduction.begin(params, place.rank);
  RowRing<Config, ForwardRows<Config>> ring;
  ring.begin(params, place, shared);

  AffineRow<Config> affine_row;
  affine_row.begin(params, place.first_column, shared);
  int staged_shift = -1;
  Affine<Config> affine[affine_held ? steps : 1];
  if constexpr (affine_held) {
#pragma unroll
    for (int k = 0; k < steps; ++k) affine[k].load(affine_row, k * threads + thread, place.most_columns);
  }
  float scale = 1.0f;
  if constexpr (Config::has_scale) scale = load_float(params.scale);
  float amax = 0.0f;

  float element[unpacked ? steps * N : 1];
  float sums[values] = {};
  // The row that is read is `lag` rows before the one that is stored.
  int64 first_row = place.begin_row();
#pragma unroll 1
  for (int64 output_first = first_row - lag * place.stride; output_first < params.rows; output_first += place.stride) {
    if (lag == 0 || first_row < params.rows) {
      const int64 row = first_row + place.row_in_cta;
      const int columns = place.columns(row, params.rows);
      ring.take(params, first_row);
      const int row_shift = ring.inputs.shift;
      if constexpr (Config::ragged) {
        if (row_shift != staged_shift) affine_row.stage(params, place, row_shift);
        staged_shift = row_shift;
      }

      // ---- The row, and its sum of squares; or its sum, or those of deviations, where it is centred
      OutputRow<Held, Config> sum_out;
      begin_sum(sum_out, params, row, place, ring.inputs.sum_staging(place), row_shift);
      float shift[1] = {0.0f};
      float total[one_pass ? 2 : 1] = {};
      ThreadMoments<Config> own;
      Vec<Held, N> of_columns[Config::ragged && !one_pass ? steps : 1];
      if constexpr (Config::ragged) {
        if constexpr (Config::added_before) {
#pragma unroll
          for (int k = 0; k < steps; ++k) {
            const int slot = (k * threads + thread) * N;
            if (ring.inputs.came(slot, k, columns)) ring.inputs.first_held_at(sum_out, k, slot, columns);
          }
          if constexpr (ForwardRows<Config>::keeps_sum) cta_barrier();  // others' sums
        }
        // Each thread by itself: a barrier takes longer (4097: 0.857 of a copy, and 0.847).
        if constexpr (one_pass) shift[0] = own.shift_from(ring.inputs.held_columns(0, 0, columns), columns, row_shift);
        RaggedSum<Config> ragged_total;
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          if (!Config::meets(k, thread, columns)) continue;
          const Vec<Held, N> value = ring.inputs.held_columns(thread, k, columns);
          if constexpr (one_pass) {
            own.add(value, shift[0], k, (k * threads + thread) * N, columns, row_shift);
          } else {
            of_columns[k] = value;
            float of_vec[N];
#pragma unroll
            for (int i = 0; i < N; ++i) of_vec[i] = value.get(i);
            if constexpr (centred) ragged_total.add(of_vec);
            if constexpr (!centred) ragged_total.add_products(of_vec, of_vec);
          }
        }
        if constexpr (!one_pass) total[0] = ragged_total.of_thread();
      } else {
        const Vec<Held, N> first = ring.inputs.first_held_at(sum_out, 0, thread * N, columns);
        if (one_pass && thread == 0) shift[0] = own.shift_from(first, columns);
        if constexpr (one_pass) reduction.tell_in_cta(shift);
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          const int slot = (k * threads + thread) * N;
          const Vec<Held, N> value = k == 0 ? first : ring.inputs.first_held_at(sum_out, k, slot, columns);
          if constexpr (one_pass) {
            own.add(value, shift[0], k, slot, columns);
          } else {
            total[0] += centred ? sum_of(value) : sum_of_squares(value);
          }
          if constexpr (unpacked) {
#pragma unroll
            for (int i = 0; i < N; ++i) element[k * N + i] = value.get(i);
          }
        }
      }
      if constexpr (one_pass) {
        own.sums.finish();
        total[0] = own.sums.of_row[0];
        total[1] = own.sums.of_row[1];
      }
      if constexpr (ForwardRows<Config>::keeps_sum) sum_out.finish(0, columns, thread, true);
      reduction.template reduce_in_cta<Sum, 0>(total);
      if constexpr (centred) {
        const float reciprocal = reciprocal_columns_of_cta<Config>(place.rank);
        bool again = true;
        float deviations[2] = {};
        if constexpr (one_pass) {
          again = is_far(total[0], total[1], reciprocal);
          deviations[0] = total[0];
          deviations[1] = total[1];
          if (again) shift[0] += shift_of<Config>(total[0], place.rank);
        } else {
          shift[0] = shift_of<Config>(total[0], place.rank);
        }
        if (__builtin_expect(again, !one_pass)) {
          DeviationSums<Config> of_thread;
#pragma unroll(one_pass ? 1 : steps)
          for (int k = 0; k < steps; ++k) {
            if (!Config::meets(k, thread, columns)) continue;
            const int slot = (k * threads + thread) * N;
            Vec<Held, N> value;
            if constexpr (Config::ragged && one_pass) {
              value = ring.inputs.held_columns(thread, k, columns);
            } else if constexpr (Config::ragged) {
              value = of_columns[k];
            } else if constexpr (!unpacked) {
              value = ring.inputs.held_at(slot);
            }
            float deviation[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
              if constexpr (unpacked) {
                deviation[i] = element[k * N + i] - shift[0];
              } else {
                deviation[i] = value.get(i) - shift[0];
              }
            }
            Config::clear_outside(deviation, k, slot, columns, row_shift);
            if constexpr (held) {
#pragma unroll
              for (int i = 0; i < N; ++i) element[k * N + i] = deviation[i];
            }
            of_thread.add(deviation);
          }
          of_thread.finish();
          deviations[0] = of_thread.of_row[0];
          deviations[1] = of_thread.of_row[1];
          reduction.template reduce_in_cta<Sum, 1>(deviations);
        }
        sums[0] = shift[0];
        sums[1] = deviations[0];
        sums[2] = deviations[1];
      } else {
        sums[0] = total[0];
      }
      reduction.send(sums);
    }
    first_row += place.stride;
    reduction.next_row();
    if (lag != 0 && output_first < place.begin_row()) continue;  // the first turn has no row before it

    // ---- y of the row, or of the one before
    const int64 row = output_first + place.row_in_cta;
    const int columns = place.columns(row, params.rows);
    ring.take_again(params, output_first);
    const float own_shift = sums[0];
    reduction.receive(sums);
    const Normalization found = normalization_of<Config>(params, sums, scale, thread);
    tell_statistics<Config>(params, place, row, found);
    OutputRow<typename Config::Output, Config> y_out;
    y_out.begin({params.out, params.out_outer_stride, params.out_inner_stride}, params, row, place,
                Config::out_in_slot ? ring.inputs.x.in_place(place) : shared + Config::out_at, ring.inputs.shift);
    const auto y_of = [&](int k) {
      const int slot = (k * threads + thread) * N;
      Vec<Held, N> value;
      if constexpr (!held) value = ring.inputs.held_inside(slot, k, columns);
      Vec<typename Config::Residual, N> added;
      if constexpr (Config::added_after) {
        added.fill(0);
        if (ring.inputs.came(slot, k, columns)) added = ring.inputs.residual.at(slot);
      }
      if constexpr (!affine_held) affine[0].load(affine_row, k * threads + thread, place.most_columns);
      float x[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (held) {
          x[i] = element[k * N + i];
          if constexpr (centred && Config::ctas_per_row > 1) x[i] += own_shift - found.moments.mean;
        } else {
          x[i] = value.get(i);
          if constexpr (centred) x[i] -= found.moments.mean;
        }
      }
      finish_values<Config::has_amax>(params, x, found, affine[affine_held ? k : 0], added, slot - ring.inputs.shift,
                                      columns, amax);
      return output_of<Config>(x, found.scale);
    };
    if (Config::ragged && !y_out.aligned) {
      // Rare: the text is there once, and in the other loop nothing is stored that a load could be.
#pragma unroll 1
      for (int k = 0; k < steps; ++k) y_out.put(y_of(k), (k * threads + thread) * N, 0, columns);
    } else {
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int slot = (k * threads + thread) * N;
        if constexpr (Config::ragged) {
          if (!Config::meets(k, thread, columns + ring.inputs.shift)) continue;
          y_out.put_aligned(y_of(k), slot, columns, Config::inside(k));
        } else {
          y_out.put(y_of(k), slot, 0, columns);
        }
      }
    }
    y_out.finish(0, columns, thread, true);
  }
  wait_async();
  tell_scaling<Config>(params, amax, scale);
}

}  // namespace trtc
