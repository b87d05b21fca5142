// Backward. With x' = (x - mean) * rstd, w = weight + weight_offset and means over the row:
//
//   dx = rstd * (dy * w - x' * mean(dy * w * x') [- mean(dy * w), where it is centred]) [+ dresidual]
//   dweight = sum over rows of dy * x',   dbias = sum over rows of dy
//
// Groups of CTAs take rows in turn, as RowRing brings them; the weight and the partial sums of its gradient stay in
// registers. A second launch adds the groups' sums up.
#pragma once

#include "norms.cuh"

namespace trtc {

// The inputs of a row.
template <class Config>
struct BackwardRows : InputRows<Config, BackwardRows<Config>> {
  InputRow<typename Config::Gradient, Config> dy;
  InputRow<typename Config::Input, Config> x;
  InputRow<typename Config::Residual, Config> dresidual;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, const Place<Config>& place) {
    dy.begin({params.dy, params.dy_outer_stride, params.dy_inner_stride}, params, place);
    if constexpr (Config::needs_x) x.begin({params.x, params.x_outer_stride, params.x_inner_stride}, params, place);
    if constexpr (Config::has_dresidual) {
      dresidual.begin({params.dresidual, params.dresidual_outer_stride, params.dresidual_inner_stride}, params, place);
    }
  }
  template <class Each>
  TRTC_DEVICE void each(const Each& call) {
    call(dy, Config::dy_at);
    if constexpr (Config::needs_x) call(x, 0);
    if constexpr (Config::has_dresidual) call(dresidual, Config::residual_at);
  }
};

// Leaves a thread's sums over its rows for the second launch: added up over those rows that a CTA holds together which
// have one weight, in shared memory; or, where all have different ones, each as it is.
template <class Config, class Params>
TRTC_DEVICE void store_partials(const Params& params, const float (&sums)[Config::steps * Config::vector], char* shared,
                                int gradient, const Place<Config>& place) {
  constexpr int N = Config::vector;
  constexpr int rows = Config::rows_per_cta;
  float* partials = static_cast<float*>(params.partials);
  int left = 1;  // rows of partial sums
  if constexpr (Config::per_head) left = partial_rows(rows, params.heads);
  const bool adds = left < rows;
  const int64 row = place.group * left + (adds ? 0 : place.row_in_cta);
  float* to = partials + partial_offset(row, gradient, Config::gradients, Config::hidden) + place.first_column;
  float* staging = reinterpret_cast<float*>(shared);
  if (adds) cta_barrier();  // what was in shared memory has been read
#pragma unroll
  for (int k = 0; k < Config::steps; ++k) {
    const int column = (k * Config::threads + place.thread) * N;
    Vec<float, N> value;
#pragma unroll
    for (int i = 0; i < N; i += 2) value.set(i, sums[k * N + i], N == 1 ? 0.0f : sums[k * N + i + (N > 1)]);
    if (adds) {
      value.template store<Space::shared>(staging + place.row_in_cta * Config::chunk + column, true);
    } else {
      value.store(to + column, Config::exact || column < place.most_columns);
    }
  }
  if (adds) {
    cta_barrier();
    constexpr int width = Config::hidden % 4 == 0 ? 4 : 1;
    // Once a launch: a loop, which the compiler would make a third of the kernel's instructions of (1024 columns).
#pragma unroll 1
    for (int at = thread_index() * width; at < left * Config::hidden; at += Config::threads * rows * width) {
      const int head = Config::per_head ? at / Config::hidden : 0, column = at - head * Config::hidden;
      Vec<float, width> sum;
      sum.fill(0);
      const auto add = [&](int row_in_cta) {
        Vec<float, width> one;
        one.load_shared(staging + row_in_cta * Config::chunk + column);
        sum = sum_of_vecs<float>(sum, one);
      };
      if constexpr (Config::per_head) {
#pragma unroll 1
        for (int i = head; i < rows; i += left) add(i);
      } else {
#pragma unroll
        for (int i = 0; i < rows; ++i) add(i);
      }
      sum.store(to + partial_offset(head, 0, Config::gradients, Config::hidden) + column, true);
    }
  }
}

// Where a thread's sums over ragged rows of one shift are left: that of `gradient` in a row of partial sums.
template <class Config>
struct RaggedPartials {
  enum : int { N = Config::vector, elements = Config::steps * N };
  float* of_group;
  const Place<Config>& place;

  TRTC_DEVICE float* of(int gradient) const {
    const int64 row = Config::per_head ? place.begin_row() : place.group;
    return of_group + partial_offset(row, gradient, Config::gradients, Config::hidden) + place.first_column;
  }
  // Both are loops over registers, which have no index: their text is there once. What is stored is used up.
  TRTC_DEVICE void store(float (&sums)[elements], int gradient, int shift) const {
    float* to = of(gradient);
#pragma unroll 1
    for (int slot = place.thread * N; slot < Config::chunk; slot += Config::threads * N) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (Config::within(i, slot - shift, place.most_columns)) to[slot - shift + i] = sums[i];
      }
      turn(sums);
    }
  }
  TRTC_DEVICE void load(float (&sums)[elements], int gradient, int shift) const {
    const float* from = of(gradient);
#pragma unroll 1
    for (int slot = place.thread * N; slot < Config::chunk; slot += Config::threads * N) {
      turn(sums);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool within = Config::within(i, slot - shift, place.most_columns);
        sums[elements - N + i] = within ? from[slot - shift + i] : 0.0f;
      }
    }
  }

 private:
  static TRTC_DEVICE void turn(float (&sums)[elements]) {
#pragma unroll
    for (int i = 0; i + N < elements; ++i) sums[i] = sums[i + N];
  }
};

// The given statistics of the rows that are taken in turn, each sent for a turn before. The compiler waits for them
// behind that turn's barrier. The first CTA of those with neighbouring rows waits longest: none gets ahead, and where
// memory is what they wait for, all end together (float32, 4096: without that, some end at 0.87 of the time of the
// last).
template <class Config, bool Ahead>
struct GivenStatistics {
  float next_mean = 0.0f, next_rstd = 0.0f;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, const Place<Config>&, int64 row) {
    next_mean = next_rstd = 0.0f;
    if (row >= params.rows) return;
    if constexpr (Config::centred) next_mean = load_float(static_cast<const float*>(params.mean) + row);
    next_rstd = load_float(static_cast<const float*>(params.rstd) + row);
  }
  // Those of a turn's row: 0 where there is none.
  template <class Params>
  TRTC_DEVICE void take(const Params& params, const Place<Config>& place, int64 row, float& mean, float& rstd) {
    mean = next_mean;
    rstd = next_rstd;
    begin(params, place, row + place.stride);
  }
};

// Many turns before: each lane of those that share a row has a statistic of another turn. One that all lanes loaded
// would be in a uniform register, for which the compiler waits at once.
template <class Config>
struct GivenStatistics<Config, true> {
  enum : int {
    count = Config::centred ? 2 : 1,
    lanes = Config::threads < 32 ? Config::threads : 32,
    turns = lanes / count,
  };
  static_assert(turns > 1, "there are lanes for several turns");
  float here;  // of this turn and those after it
  float next;  // of as many turns behind them
  int turn;

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, const Place<Config>& place, int64 row) {
    here = fetch(params, place, row);
    next = fetch(params, place, row + turns * place.stride);
    turn = 0;
  }
  template <class Params>
  TRTC_DEVICE void take(const Params& params, const Place<Config>& place, int64 row, float& mean, float& rstd) {
    if (turn == turns) {
      here = next;
      next = fetch(params, place, row + turns * place.stride);
      turn = 0;
    }
    const int lane = thread_index() % 32 / lanes * lanes + turn;
    if constexpr (Config::centred) mean = shuffle_from(here, lane);
    rstd = shuffle_from(here, lane + lanes - turns);
    ++turn;
  }

 private:
  template <class Params>
  static TRTC_DEVICE float fetch(const Params& params, const Place<Config>& place, int64 row) {
    const int lane = place.thread % lanes;
    row += lane % turns * place.stride;
    if (row >= params.rows) return 0.0f;
    if constexpr (Config::centred) {
      if (lane < turns) return load_float(static_cast<const float*>(params.mean) + row);
    }
    return load_float(static_cast<const float*>(params.rstd) + row);
  }
};

template <class Config, class Params>
TRTC_DEVICE void norm_backward(const Params& params) {
  using Gradient = typename Config::Gradient;
  using Input = typename Config::Input;
  using Weight = typename Config::Weight;
  using Output = typename Config::Output;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr int steps = Config::steps;
  constexpr bool centred = Config::centred;
  constexpr float reciprocal_hidden = 1.0f / Config::hidden;
  constexpr bool given = Config::has_statistics;
  constexpr bool finds_statistics = Config::needs_x && !given;
  // Of a row: the sum of dy * w * (x - mean), that of dy * w where it is centred, and what its statistics need.
  constexpr int values = !centred ? (finds_statistics ? 2 : 1) : finds_statistics ? 5 : 2;
  // Several CTAs take their next row's sums while these of the last one are told.
  constexpr int lag = Config::lag;
  // What the sums were made of stays in registers for dx, or is made again.
  constexpr bool held = Config::has_dx && !finds_statistics && lag == 0 && steps * N <= 16;
  using Reduction = RowReduction<Config::threads, Config::rows_per_cta, Config::ctas_per_row, Config::exchange(),
                                 values, true, 2 + 2 * lag>;

  TRTC_DYNAMIC_SHARED(char, shared);
  const auto place = Place<Config>::here();
  const int thread = place.thread;
  constexpr bool reduces = Config::has_dx || finds_statistics;
  Reduction reduction;
  if constexpr (reduces) reduction.begin(params, place.rank);
  RowRing<Config, BackwardRows<Config>> ring;
  ring.begin(params, place, shared);
  const BackwardRows<Config>& inputs = ring.inputs;
  int64 first_row = place.begin_row();

  // With its offset, and in float, where that saves more than it costs.
  ColumnArray<Weight, Config> weights;
  typename ColumnArray<Weight, Config>::Kept weight[Config::weight_held ? steps : 1];
  constexpr bool full_weight_held = held && Config::weight_held;
  float full_weight[full_weight_held ? steps * N : 1];
  if constexpr (Config::has_weight) {
    // Every row that a thread works on is of one head: the launch sees to it.
    const int64 head = head_of<Config::per_head>(params, first_row + place.row_in_cta) * Config::hidden;
    weights.begin(params.weight, head + place.first_column, shared + Config::weight_at);
    if constexpr (Config::weight_held) {
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        weights.load(weight[k], k * threads + thread, place.most_columns);
        if constexpr (full_weight_held) {
#pragma unroll
          for (int i = 0; i < N; ++i) full_weight[k * N + i] = weights.full(weight[k], i, params.weight_offset);
        }
      }
    }
  }
  int kept_shift = -1;  // of the ragged rows whose weight and partial sums are here
  float dweight[Config::has_dweight ? steps * N : 1] = {};
  float dbias[Config::has_dbias ? steps * N : 1] = {};
  float* partials = nullptr;
  if constexpr (Config::gradients > 0) partials = static_cast<float*>(params.partials);
  const RaggedPartials<Config> ragged_partials{partials, place};
  float held_gradient[held ? steps * N : 1];
  float held_normal[held ? steps * N : 1];
  GivenStatistics<Config, Config::statistics_ahead> statistics;
  if constexpr (given) statistics.begin(params, place, first_row + place.row_in_cta);

  // The row whose sums are taken is `lag` rows before the one whose gradients are.
  float mean = 0.0f, rstd = 0.0f, last_mean = 0.0f, last_rstd = 0.0f;
  float sums[values] = {};
#pragma unroll 1
  for (int64 gradient_first = first_row - lag * place.stride; gradient_first < params.rows;
       gradient_first += place.stride) {
    if (lag == 0 || first_row < params.rows) {
      const int64 row = first_row + place.row_in_cta;
      const int columns = place.columns(row, params.rows);
      ring.take(params, first_row);
      const int shift = inputs.shift;
      if constexpr (Config::ragged) {
        if (shift != kept_shift) {
          if (kept_shift >= 0) {
            // The sums go on in other threads.
            if constexpr (Config::has_dweight) ragged_partials.store(dweight, 0, kept_shift);
            if constexpr (Config::has_dbias) ragged_partials.store(dbias, Config::gradients - 1, kept_shift);
            cta_barrier();
            if constexpr (Config::has_dweight) ragged_partials.load(dweight, 0, shift);
            if constexpr (Config::has_dbias) ragged_partials.load(dbias, Config::gradients - 1, shift);
          }
          if constexpr (Config::has_weight) weights.stage(place, shift, params.weight_offset);
          kept_shift = shift;
        }
      }
      if constexpr (given) statistics.take(params, place, row, mean, rstd);

      // ---- What the whole row adds up to; and its part of the weight's gradients, if its statistics are known
      if constexpr (finds_statistics && centred) {
        float total[1] = {0.0f};
        RaggedSum<Config> ragged_total[1];
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          const Vec<Input, N> x = inputs.x.at((k * threads + thread) * N);
          if constexpr (Config::ragged) {
            float of_vec[N];
#pragma unroll
            for (int i = 0; i < N; ++i) of_vec[i] = x.get(i);
            ragged_total[0].add(of_vec);
          } else {
            total[0] += sum_of(x);
          }
        }
        if constexpr (Config::ragged) {
          RaggedSum<Config>::template shares<1, 0>(ragged_total, total, thread, shift, 0, true);
        }
        reduction.template reduce_in_cta<Sum, 0>(total);
        mean = shift_of<Config>(total[0], place.rank);
      }
#pragma unroll
      for (int i = 0; i < values; ++i) sums[i] = 0.0f;
      RaggedSum<Config> ragged_sums[values];
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int slot = (k * threads + thread) * N;
        const Vec<Gradient, N> dy = inputs.dy.at(slot);
        Vec<Input, N> x;
        if constexpr (Config::needs_x) x = inputs.x.at(slot);
        if constexpr (Config::has_weight && !Config::weight_held)
          weights.load(weight[0], k * threads + thread, place.most_columns);
        float of_vec[values] = {};
        const auto add = [&](int sum, int i, float a, float b) {
          float& to = Config::ragged ? ragged_sums[sum].of_place[i] : of_vec[sum];
          to = fused_multiply_add(a, b, to);
        };
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
            if constexpr (Config::has_weight && full_weight_held) {
              gradient *= full_weight[k * N + i];
            } else if constexpr (Config::has_weight) {
              gradient *= weights.full(weight[Config::weight_held ? k : 0], i, params.weight_offset);
            }
            if constexpr (Config::has_dx) {
              add(0, i, gradient, deviation);
              if constexpr (centred) add(1, i, gradient, 1.0f);
            }
            if constexpr (held) {
              held_gradient[k * N + i] = gradient;
              held_normal[k * N + i] = deviation;
            }
            if constexpr (finds_statistics) {
              if constexpr (centred) {
                if (!Config::within(i, slot - shift, columns)) deviation = 0.0f;
                add(3, i, deviation, 1.0f);
              }
              add(values - 1, i, deviation, deviation);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < values; ++i) sums[i] += of_vec[i];
      }
      if constexpr (reduces) {
        if constexpr (Config::ragged) {
          RaggedSum<Config>::template shares<1, 1>(ragged_sums, sums, thread, shift, 0, true);
        }
        reduction.template reduce_in_cta<Sum, 1>(sums);
        if constexpr (finds_statistics && centred) sums[2] = mean;
        reduction.send(sums);
      }
    }
    first_row += place.stride;
    reduction.next_row();
    if constexpr (lag != 0) {
      // The first turn has no row before it; the statistics of the one after it stay for the next turn.
      const float swapped_mean = last_mean, swapped_rstd = last_rstd;
      last_mean = mean;
      last_rstd = rstd;
      mean = swapped_mean;
      rstd = swapped_rstd;
      if (gradient_first < place.begin_row()) continue;
    }

    // ---- The gradients of the row, or of the one before
    if constexpr (reduces) {
      const int64 row = gradient_first + place.row_in_cta;
      const int columns = place.columns(row, params.rows);
      ring.take_again(params, gradient_first);
      reduction.receive(sums);
      float rest = 0.0f;   // of the mean
      float level = 0.0f;  // mean of dy * w
      if constexpr (finds_statistics) {
        float squares;
        if constexpr (centred) {
          const Moments moments = row_moments<Config>(sums[2], sums[3], sums[4], thread);
          // From each CTA's shift to the row's mean.
          sums[0] = fused_multiply_add((sums[2] - moments.mean) - moments.rest, sums[1], sums[0]);
          mean = moments.mean;
          rest = moments.rest;
          squares = moments.squares;
        } else {
          squares = reduce_lanes<Sum, Config::ctas_per_row>(sums[1]);
        }
        rstd = place.exists(row, params.rows) ? rstd_of(squares, reciprocal_hidden, params.eps).high : 0.0f;
      }
      // Mean of dy * w * x'.
      float projection = reduce_lanes<Sum, Config::ctas_per_row>(sums[0]) * reciprocal_hidden;
      if constexpr (finds_statistics) projection *= rstd;
      if constexpr (centred) level = reduce_lanes<Sum, Config::ctas_per_row>(sums[1]) * reciprocal_hidden;
      OutputRow<Output, Config> dx_out;
      if constexpr (Config::has_dx) {
        dx_out.begin({params.dx, params.dx_outer_stride, params.dx_inner_stride}, params, row, place,
                     Config::out_in_slot ? inputs.x.in_place(place) : shared + Config::out_at, inputs.shift);
      }
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        const int slot = (k * threads + thread) * N;
        Vec<Gradient, N> dy;
        Vec<Input, N> x;
        if constexpr (!held) {
          dy = inputs.dy.at(slot);
          x = inputs.x.at(slot);
        }
        Vec<typename Config::Residual, N> dresidual;
        if constexpr (Config::has_dresidual) {
          dresidual = inputs.dresidual.at(slot);
        }
        if constexpr (Config::has_dx && Config::has_weight && !Config::weight_held && !held) {
          weights.load(weight[0], k * threads + thread, place.most_columns);
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
                gradient *= weights.full(weight[Config::weight_held ? k : 0], i + j, params.weight_offset);
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
        if constexpr (Config::has_dx) dx_out.put(result, slot, 0, columns, Config::inside(k));
      }
      if constexpr (Config::has_dx) dx_out.finish(0, columns, thread, true);
    }
  }
  // Those of each head have more CTAs behind them, which go wherever there is a place.
  if constexpr (Config::gradients > 0 && !Config::per_head) let_next_launch_begin();
  wait_async();

  if constexpr (Config::ragged) {
    if constexpr (Config::has_dweight) ragged_partials.store(dweight, 0, kept_shift);
    if constexpr (Config::has_dbias) ragged_partials.store(dbias, Config::gradients - 1, kept_shift);
  } else {
    if constexpr (Config::has_dweight) store_partials<Config>(params, dweight, shared, 0, place);
    if constexpr (Config::has_dbias) store_partials<Config>(params, dbias, shared, Config::gradients - 1, place);
  }
}

template <class Dweight, class Dbias, bool HasDweight, bool HasDbias, int RowsPerGroup, int Columns, class Params>
TRTC_DEVICE void norm_backward_finish(const Params& params) {
  const FinishedColumns<Columns> here;
  const int64 to = cta_index_y() * params.hidden + here.column();
  const bool stores = here.stores(params.hidden);
  float sum[HasDweight + HasDbias];
  here.sums(params, partial_rows(RowsPerGroup, params.heads), HasDweight + HasDbias, sum);
  if constexpr (HasDweight) {
    Vec<Dweight, 1> value;
    value.set(0, sum[0], 0.0f);
    value.store(static_cast<Dweight*>(params.dweight) + to, stores);
  }
  if constexpr (HasDbias) {
    Vec<Dbias, 1> value;
    value.set(0, sum[HasDweight], 0.0f);
    value.store(static_cast<Dbias*>(params.dbias) + to, stores);
  }
}

}  // namespace trtc
