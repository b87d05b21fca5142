// Normalization of rows.
//
//   rms_norm:  y = x * rstd * (weight + weight_offset),   rstd = 1 / sqrt(mean(x^2) + eps)
//
// A row is held by `threads` threads of each of `ctas_per_row` CTAs. Thread t of a CTA owns the columns
// [(k * threads + t) * N, ... + N) of each chunk of its CTA's slice, for k = 0, 1, ... steps - 1: the configuration
// alone fixes the order of a sum. Only how the bytes travel depends on alignment.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace trtc {

template <class Input_, class Weight_, class Output_, bool HasWeight, bool HasRstd, int Hidden, int ThreadsPerRow,
          int RowsPerCta, int N, int Steps, int Chunks, int CtasPerRow, Exchange How, bool InShared>
struct NormConfig {
  using Input = Input_;
  using Weight = Weight_;
  using Output = Output_;
  using Sum = RowSum<ThreadsPerRow, RowsPerCta, CtasPerRow, How>;
  enum : bool {
    has_weight = HasWeight,
    has_rstd = HasRstd,
    in_shared = InShared,  // the row is held in shared memory, not in registers
  };
  enum : int {
    hidden = Hidden,
    threads = ThreadsPerRow,
    rows_per_cta = RowsPerCta,
    vector = N,
    steps = Steps,    // Vecs of a row that a thread holds
    chunks = Chunks,  // more than 1: the row cannot be held, and is read twice
    chunk = Steps * ThreadsPerRow * N,
    slice = Chunks * Steps * ThreadsPerRow * N,  // a CTA's columns
    ctas_per_row = CtasPerRow,
  };
  // Every Vec of every thread lies in the row: counts are constants then.
  enum : bool {
    exact = RowsPerCta == 1 && static_cast<int64>(Chunks) * Steps * ThreadsPerRow * N * CtasPerRow == Hidden
  };
  static_assert(static_cast<int64>(slice) * CtasPerRow >= Hidden, "the CTAs tile the row");
  static_assert(!InShared || (Chunks == 1 && RowsPerCta == 1), "shared memory holds a whole slice of one row");
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

// Brings a CTA's columns of a row to shared memory, each thread its own.
template <class Config>
TRTC_DEVICE void fetch_row(typename Config::Input* shared, const typename Config::Input* x, int columns, int thread,
                           bool aligned) {
  constexpr int N = Config::vector;
  using InputVec = Vec<typename Config::Input, N>;
#pragma unroll 4
  for (int k = 0; k < Config::steps; ++k) {
    const int column = (k * Config::threads + thread) * N;
    if (aligned && (Config::exact || column + N <= columns)) {
      copy_async<InputVec::bytes>(shared + column, x + column);
    } else {
      InputVec value;
      value.load(x + column, columns - column, false);
      value.store(shared + column, true);
    }
  }
  wait_async();
}

template <class Config, class Params>
TRTC_DEVICE void rms_norm_forward(const Params& params) {
  using Input = typename Config::Input;
  using Weight = typename Config::Weight;
  using Output = typename Config::Output;
  using Sum = typename Config::Sum;
  constexpr int N = Config::vector;
  constexpr int threads = Config::threads;
  constexpr bool exact = Config::exact;
  constexpr bool in_shared = Config::in_shared;
  constexpr bool one_chunk = Config::chunks == 1;
  // Fetched before the sum, the weight's latency is hidden behind the row's; more than this much would not fit beside
  // it.
  constexpr bool early_weight =
      Config::has_weight && one_chunk && !in_shared && Config::steps * N * sizeof(Weight) <= 64;
  // Vecs of the weight that are on their way while others are used, the first ones while the sum is exchanged: hides
  // the L2 cache's latency.
  constexpr int in_flight = Config::steps == 8 && !Sum::repeats ? 4 : Config::steps > 1 ? 2 : 1;
  constexpr int held = in_shared ? 1 : Config::steps;  // Vecs in registers

  TRTC_DYNAMIC_SHARED(char, staging);
  Input* row_in_shared = reinterpret_cast<Input*>(staging);
  const int thread = Config::rows_per_cta == 1 ? thread_index() : thread_index() % threads;
  const int row_in_cta = Config::rows_per_cta == 1 ? 0 : thread_index() / threads;
  const int rank = static_cast<int>(cta_index() % Config::ctas_per_row);
  const int begin = rank * Config::slice;
  const int64 groups = ctas_in_grid() / Config::ctas_per_row * Config::rows_per_cta;
  const Input* all_x = static_cast<const Input*>(params.x) + begin;
  const bool x_aligned = rows_aligned<Input, N>(all_x, params.x_outer_stride, params.x_inner_stride);
  Sum sum;
  sum.begin(params, rank);

  int64 row = cta_index() / Config::ctas_per_row * Config::rows_per_cta + row_in_cta;
  // A row past the last, and a CTA past the row's end, take part in every barrier with no columns, or less.
  const int most_columns = min(Config::hidden - begin, Config::slice);
  do {
    const bool exists = Config::rows_per_cta == 1 || row < params.rows;
    const int columns = exists ? most_columns : 0;
    const Input* x = all_x + row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
    Output* out = static_cast<Output*>(params.out) + begin +
                  row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
    const Weight* w = nullptr;
    if constexpr (Config::has_weight) w = static_cast<const Weight*>(params.weight) + begin;
    const bool out_aligned =
        Config::hidden % N == 0 && rows_aligned<Output, N>(out, params.out_outer_stride, params.out_inner_stride);
    const bool w_aligned = rows_aligned<Weight, N>(w, 0, 0);

    float squares = 0.0f;
    Vec<Input, N> value[held];
    Vec<Weight, N> weight[held];
    if constexpr (in_shared) fetch_row<Config>(row_in_shared, x, columns, thread, x_aligned);
#pragma unroll 1
    for (int first = 0; first < Config::slice; first += Config::chunk) {
      if constexpr (!in_shared) {
#pragma unroll
        for (int k = 0; k < Config::steps; ++k) {
          const int column = first + (k * threads + thread) * N;
          const int count = exact ? N : columns - column;
          value[k].load(x + column, count, x_aligned);
          if constexpr (early_weight) weight[k].load(w + column, count, w_aligned);
        }
      }
      // Summed by Vec, by chunk and by row: no chain of additions grows long enough to lose an ulp.
      float chunk_squares = 0.0f;
#pragma unroll
      for (int k = 0; k < Config::steps; ++k) {
        if constexpr (in_shared) value[0].load(row_in_shared + (k * threads + thread) * N, N, true);
        float vec_squares = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float element = value[k % held].get(i);
          vec_squares = fused_multiply_add(element, element, vec_squares);
        }
        chunk_squares += vec_squares;
      }
      squares += chunk_squares;
    }

    Vec<Weight, N> ahead[in_flight];
    if constexpr (in_shared && Config::has_weight) {
#pragma unroll
      for (int k = 0; k < in_flight; ++k) {
        const int column = (k * threads + thread) * N;
        ahead[k].load(w + column, exact ? N : columns - column, w_aligned);
      }
    }
    const Rstd rstd = rstd_of(sum.sum(squares), 1.0f / Config::hidden, params.eps);
    if constexpr (Config::has_rstd) {
      if (thread == 0 && rank == 0 && exists) static_cast<float*>(params.rstd)[row] = rstd.high;
    }

    // An output that no vector fits is put together in shared memory: where the row was, if elements are as wide.
    Output* out_in_shared = reinterpret_cast<Output*>(row_in_shared);
    if constexpr (in_shared && sizeof(Input) != sizeof(Output)) {
      out_in_shared = reinterpret_cast<Output*>(staging + Config::slice * sizeof(Input));
    }
    out_in_shared += row_in_cta * Config::chunk;
#pragma unroll 1
    for (int first = 0; first < Config::slice; first += Config::chunk) {
      Output* to = out_aligned ? out : out_in_shared;
      const int origin = out_aligned ? 0 : first;
#pragma unroll
      for (int k = 0; k < Config::steps; ++k) {
        const int column = first + (k * threads + thread) * N;
        const int count = exact ? N : columns - column;
        if constexpr (in_shared) {
          value[0].load(row_in_shared + column, N, true);
        } else if constexpr (!one_chunk) {
          value[k].load(x + column, count, x_aligned);
        }
        if constexpr (Config::has_weight && in_shared) {
          weight[0] = ahead[k % in_flight];
          const int next = column + in_flight * threads * N;
          if (k + in_flight < Config::steps) ahead[k % in_flight].load(w + next, exact ? N : columns - next, w_aligned);
        } else if constexpr (Config::has_weight && !early_weight) {
          weight[k].load(w + column, count, w_aligned);
        }
        Vec<Output, N> result;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          float low_weight = 1.0f;
          float high_weight = 1.0f;
          if constexpr (Config::has_weight) {
            low_weight = weight[k % held].get(i) + params.weight_offset;
            if constexpr (N > 1) high_weight = weight[k % held].get(i + 1) + params.weight_offset;
          }
          const float low = normalized<Output>(value[k % held].get(i), rstd, low_weight);
          const float high = N == 1 ? 0.0f : normalized<Output>(value[k % held].get(i + 1), rstd, high_weight);
          result.set(i, low, high);
        }
        result.store(to + (column - origin), exact || column < columns);
      }
      if (!out_aligned) {
        cta_barrier();
        copy_from_shared(out + origin, to, min(columns - origin, Config::chunk), thread, threads);
        if constexpr (!one_chunk || Sum::repeats) cta_barrier();
      }
    }
    row += groups;
  } while (Sum::repeats && row < params.rows);
}

// ---- The general kernel: hidden size, weight's and output's type at run time ----------------------------------------

// A data type as DLPack names it: type code * 256 + bits.
enum class Dtype : int {
  absent = 0,
  float32 = 0x220,
  float16 = 0x210,
  bfloat16 = 0x410,
};

template <class T, int N>
TRTC_DEVICE void load_floats_of(float (&values)[N], const void* row, int column, int columns) {
  const T* first = static_cast<const T*>(row) + column;
  Vec<T, N> value;
  value.load(first, columns - column, rows_aligned<T, N>(first, 0, 0));
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = value.get(i);
}

template <int N>
TRTC_DEVICE void load_floats(float (&values)[N], Dtype dtype, const void* row, int column, int columns) {
  if (dtype == Dtype::float32) load_floats_of<float, N>(values, row, column, columns);
  if (dtype == Dtype::float16) load_floats_of<float16, N>(values, row, column, columns);
  if (dtype == Dtype::bfloat16) load_floats_of<bfloat16, N>(values, row, column, columns);
}

template <class T, int N>
TRTC_DEVICE void store_floats_of(const float (&values)[N], void* row, int column, int columns) {
  T* first = static_cast<T*>(row) + column;
  Vec<T, N> value;
#pragma unroll
  for (int i = 0; i < N; i += 2) value.set(i, values[i], values[i + 1]);
  const bool vector = column + N <= columns && rows_aligned<T, N>(first, 0, 0);
  value.store(first, vector);
#pragma unroll
  for (int i = 0; i < N; ++i) value.store_element(first + i, i, !vector && column + i < columns);
}

template <int N>
TRTC_DEVICE void store_floats(const float (&values)[N], Dtype dtype, void* row, int column, int columns) {
  if (dtype == Dtype::float32) store_floats_of<float, N>(values, row, column, columns);
  if (dtype == Dtype::float16) store_floats_of<float16, N>(values, row, column, columns);
  if (dtype == Dtype::bfloat16) store_floats_of<bfloat16, N>(values, row, column, columns);
}

// Complete for every shape, not fast: `Threads` threads hold a row and read it twice.
template <class Input, int Threads, int RowsPerCta, class Params>
TRTC_DEVICE void rms_norm_forward_rows(const Params& params) {
  constexpr int N = 4;
  const int thread = thread_index() % Threads;
  const int64 row = cta_index() * RowsPerCta + thread_index() / Threads;
  // A row past the last takes part in the sum with no columns.
  const bool exists = row < params.rows;
  const int columns = exists ? params.hidden : 0;
  const Input* x =
      static_cast<const Input*>(params.x) + row_offset(params, row, params.x_outer_stride, params.x_inner_stride);
  const Dtype weight_dtype = static_cast<Dtype>(params.weight_dtype);
  const Dtype out_dtype = static_cast<Dtype>(params.out_dtype);
  const int64 out_bytes = out_dtype == Dtype::float32 ? 4 : 2;
  char* out = static_cast<char*>(params.out) +
              out_bytes * row_offset(params, row, params.out_outer_stride, params.out_inner_stride);
  const bool aligned = rows_aligned<Input, N>(x, 0, 0);

  // Summed by element of a Vec, by block of 32 Vecs and by row, so that no chain of additions is long.
  constexpr int step = Threads * N;
  float squares[N] = {};
  for (int first = thread * N; first < columns; first += 32 * step) {
    float block[N] = {};
    for (int column = first; column < columns && column < first + 32 * step; column += step) {
      Vec<Input, N> value;
      value.load(x + column, columns - column, aligned);
#pragma unroll
      for (int i = 0; i < N; ++i) block[i] = fused_multiply_add(value.get(i), value.get(i), block[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) squares[i] += block[i];
  }
  RowSum<Threads, RowsPerCta, 1, Exchange::none> sum;
  sum.begin(params, 0);
  const Rstd rstd = rstd_of(sum.sum((squares[0] + squares[1]) + (squares[2] + squares[3])),
                            divide(1.0f, static_cast<float>(params.hidden)), params.eps);
  if (params.rstd != nullptr && thread == 0 && exists) static_cast<float*>(params.rstd)[row] = rstd.high;

  for (int column = thread * N; column < columns; column += Threads * N) {
    Vec<Input, N> value;
    value.load(x + column, columns - column, aligned);
    float weight[N];
    if (weight_dtype != Dtype::absent) load_floats(weight, weight_dtype, params.weight, column, columns);
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i] = normalized<float>(value.get(i), rstd,
                               weight_dtype != Dtype::absent ? weight[i] + params.weight_offset : 1.0f);
    }
    store_floats(y, out_dtype, out, column, columns);
  }
}

}  // namespace trtc
