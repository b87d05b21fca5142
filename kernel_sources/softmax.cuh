// Softmax of rows, of any length at run time. What its tuned kernels, forward and backward, and the general ones share.
//
//   y = exp(v - m) / (sum(exp(v - m)) [+ exp(sink - m)]),   v = scale * x [+ mask], m = max(v [, sink])
//
// with v = -infinity where an element does not take part
//
// A group of `ctas_per_row` CTAs has a row, each a part of it; a part is held in slots (slots.cuh), or, where it is
// longer than these, is read twice, chunk by chunk. A warp brings rows of few columns together (tile.cuh).
#pragma once

#include "rows.cuh"
#include "slots.cuh"
#include "softmax/scores.cuh"
#include "tile.cuh"

namespace trtc {

// What a kernel's program says of it (transformer_rtc/ops/softmax/kernels.py), and what follows.
template <class Traits>
struct SoftmaxConfig : Traits {
  using Part = Slots<Traits::threads, Traits::steps, Traits::vector, Traits::causal>;
  enum : int { vectors_per_row = Traits::vector * Traits::ctas_per_row };
  static constexpr TRTC_DEVICE Exchange exchange() { return exchange_of<Traits>(); }
};

// Beside what a CTA has of a row of the mask, where the next query's is.
template <class Config, class Params>
TRTC_DEVICE Beside beside_query(const Params& params, const Place<Config>& place, int64 row) {
  const bool apart = rows_apart<Config::vector>(params.columns, params.mask_query_stride);
  return beside_part(place, params.columns, query_of(params, row), params.queries, apart);
}

// The row that has a turn.
template <class Config, class Params>
TRTC_DEVICE int64 row_of_turn(const Params& params, int64 turn) {
  if constexpr (Config::has_mask && Config::rows_per_cta == 1) return row_of_masked_turn(params, turn);
  return turn;
}

enum : int { finish_threads = 256 };

// The gradient of the sink of the head that this CTA has: what each of its rows adds is -exp(sink - lse) times the sum
// that the row's dx needs, which the first launch has left. In an order that the number of rows fixes; to all threads.
template <class Params>
TRTC_DEVICE float sink_gradient(const Params& params, float sink) {
  RowReduction<finish_threads, 1, 1, Exchange::none, 1, false, 1> reduction;
  reduction.begin(params, 0);
  const float* row_sums = static_cast<const float*>(params.row_sums);
  const float* lse = static_cast<const float*>(params.lse);
  const int64 of_batch = static_cast<int64>(params.matrix_heads) * params.queries;
  float sum[1] = {0.0f};
  for (int64 batch = cta_index() * params.queries; batch < params.rows; batch += of_batch) {
    float of_matrix = 0.0f;
    for (int64 query = thread_index(); query < params.queries; query += finish_threads) {
      const int64 row = batch + query;
      const float of_row = -exponential(sink - load_float(lse + row)) * load_float(row_sums + row);
      of_matrix += sink == minus_infinity() ? 0.0f : of_row;
    }
    sum[0] += of_matrix;
  }
  reduction.template reduce_in_cta<Sum, 0>(sum);
  return sum[0];
}

// What the elements of a row are made of.
struct RowTotals {
  float sum;         // of exponentials, about what they are about
  float log_sum;     // its logarithm
  float about;       // what a CTA's v are less for its terms
  float correction;  // from there to what the row's exponentials are about
  float quotient;    // what a term is multiplied by, but for 2^-24 where `is_small`, as it has not all its digits then
  float rest;        // what that is rounded by
  bool is_small;

  TRTC_DEVICE bool is_nan() const { return sum != sum; }
  TRTC_DEVICE float logarithm_of(float v, float factor) const {
    return fused_multiply_add(v - about, factor, correction - log_sum);
  }
  template <class Output>
  TRTC_DEVICE float quotient_of(float term) const {
    return is_same<Output, float> ? fused_multiply_add(term, quotient, term * rest) : term * quotient;
  }
};

// Of a row of which this CTA has the largest v, times `factor`, and the sum of exponentials about it. `again`: its
// terms are taken again about what is the row's largest.
template <class Config, class Params, class Reduction>
TRTC_DEVICE RowTotals totals_of_row(const Params& params, const Place<Config>& place, Reduction& reduction, int64 row,
                                    float factor, float largest, float total, bool again) {
  constexpr bool narrow = !is_same<typename Config::Output, float>;
  const bool exists = place.exists(row, params.rows);
  RowTotals found;
  float row_largest = largest;
  float of_cta = 1.0f;  // from what this CTA's exponentials are about to what the row's are
  if constexpr (Config::ctas_per_row > 1) {
    float gathered[2] = {largest, total};
    reduction.gather(gathered);
    row_largest = reduce_lanes<Largest, Config::ctas_per_row>(gathered[0]);
    // A CTA of which nothing takes part adds nothing, however small the others are.
    const float below = gathered[0] == minus_infinity() ? 0.0f : (gathered[0] - row_largest) * factor;
    const float weight = narrow ? approximate_exp2(below * log2_e()) : exponential(below);
    total = reduce_lanes<Sum, Config::ctas_per_row>(gathered[1] * weight);
    of_cta = shuffle_from(weight, place.rank);
  }
  const float row_about = row_largest == minus_infinity() ? 0.0f : row_largest;
  const float base = row_about * factor;
  float common = base;  // what the row's exponentials are about
  const bool nothing = total == 0.0f;
  if constexpr (Config::has_sink) {
    // One more term of the sum.
    const float sink = exists ? sink_of<typename Config::Sink>(params, row) : minus_infinity();
    const float before = nothing ? minus_infinity() : base;
    const float most = Largest::of(before, sink);
    common = most == minus_infinity() ? 0.0f : most;
    total = nothing ? 0.0f : total * exponential(before - common);
    total += exponential(sink - common);
  }
  found.sum = total;
  found.log_sum = total == 0.0f ? 0.0f : logarithm(total);
  if constexpr (Config::has_lse) {
    if (place.thread == 0 && place.rank == 0 && exists) {
      static_cast<float*>(params.lse)[row] = total == 0.0f ? minus_infinity() : common + found.log_sum;
    }
  }
  found.about = again ? row_about : largest == minus_infinity() ? 0.0f : largest;
  found.correction = (found.about - row_about) * factor;
  float multiplier = again ? 1.0f : of_cta;
  if constexpr (Config::has_sink) {
    found.correction += base - common;
    multiplier *= nothing ? 0.0f : exponential(base - common);
  }
  if (largest == minus_infinity()) found.correction = 0.0f;
  // Nothing takes part: zeros.
  const float inverse = nothing ? 0.0f : approximate_reciprocal(total);
  const float inverse_rest = fused_multiply_add(-total, inverse, 1.0f) * inverse;
  found.quotient = multiplier * inverse;
  found.rest = fused_multiply_add(multiplier, inverse, -found.quotient) + multiplier * inverse_rest;
  // Only beside others' elements.
  constexpr bool may_be_small = Config::ctas_per_row > 1 || Config::has_sink;
  found.is_small = may_be_small && magnitude(found.quotient) < 0x1p-100f;
  if (!found.is_small) {
    found.quotient *= 1.0f / large_one;
    found.rest *= 1.0f / large_one;
  }
  return found;
}

// The part of a CTA's `columns` that begins with its column `first`.
template <class Config>
TRTC_DEVICE typename Config::Part softmax_part(int thread, int shift, int columns, Range range, int first) {
  const int capacity = Config::Part::capacity;
  const Range here = range.from(first);
  return {thread, shift, min(columns - first, capacity), here.begin, here.end};
}

template <bool Logarithm, class Input, class Gradient, int N>
TRTC_DEVICE void gradient_terms(const Vec<Input, N>& y, const Vec<Gradient, N>& dy, float (&term)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) term[i] = gradient_term<Logarithm>(y.get(i), dy.get(i));
}

// ---- The gradient of a mask of floats -------------------------------------------------------------------------------
//
// It is dx with a scale of 1, added up over the rows that a row of the mask was broadcast to. Groups of `mask_lanes`
// threads share these rows: each adds up every `sharers`-th one, in blocks of 32, and then a CTA's add up theirs in
// pairs, and CTAs of a cluster in their order. So the order depends on the number of rows alone.

enum : int {
  mask_threads = 256,
  mask_lanes = 8,
  mask_vector = 4,
  mask_columns = mask_lanes * mask_vector,  // of a CTA
  mask_groups = mask_threads / mask_lanes,
};

// A thread's columns: neighbours where a vector fits them, and else those of its group in turn.
struct MaskColumns {
  int first;
  int step;

  static TRTC_DEVICE MaskColumns here(bool together) {
    const int lane = thread_index() % mask_lanes;
    const int first = static_cast<int>(cta_index()) * mask_columns;
    return {first + lane * (together ? static_cast<int>(mask_vector) : 1), together ? 1 : static_cast<int>(mask_lanes)};
  }
  TRTC_DEVICE int at(int i) const { return first + i * step; }
};

// A row, by the matrix of one head and batch that it belongs to, and its query.
struct MaskedRow {
  uint32 matrix;
  uint32 query;

  // The first one that a row of the mask was broadcast to, and the `number`-th one.
  template <class Params>
  static TRTC_DEVICE MaskedRow first(const Params& params, uint32 mask_row) {
    const uint32 queries = params.dmask_query_stride != 0 ? params.queries : 1;
    const uint32 heads = params.dmask_head_stride != 0 ? params.matrix_heads : 1;
    const uint32 of_mask = mask_row / queries, batch = of_mask / heads;
    return {batch * params.matrix_heads + (of_mask - batch * heads), mask_row - of_mask * queries};
  }
  template <class Params>
  TRTC_DEVICE MaskedRow behind(const Params& params, uint32 number) const {
    const uint32 of_queries = params.dmask_query_stride != 0 ? number : matrix_of(params, number);
    const uint32 further = params.dmask_query_stride != 0 ? 0 : number - of_queries * params.queries;
    // Where heads were not broadcast to, batches were.
    return {matrix + of_queries * (params.dmask_head_stride != 0 ? params.matrix_heads : 1), query + further};
  }
};

// Adds up a group's share of the `count` rows that a row of the mask was broadcast to.
template <bool Logarithm, bool Whole, class Rows, class Params>
TRTC_DEVICE void add_masked_rows(const Params& params, const Rows& rows, const MaskColumns& columns,
                                 const MaskedRow& first, uint32 count, uint32 share, uint32 sharers,
                                 float (&sum)[mask_vector]) {
  constexpr int N = mask_vector;
  const float* row_sums = static_cast<const float*>(params.row_sums);
#pragma unroll 1
  for (uint32 begin = share; begin < count; begin += 32 * sharers) {
    const uint32 end = min(begin + 32 * sharers, count);
    float block[N] = {};
#pragma unroll(Whole ? 4 : 2)
    for (uint32 number = begin; number < end; number += sharers) {
      const MaskedRow masked = first.behind(params, number);
      const int64 row = masked.matrix * params.queries + masked.query;
      const float of_row = load_float(row_sums + row);
      float y[N], dy[N];
      rows.template load<Whole>(row, masked.query, columns, y, dy);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        block[i] += took_part<Logarithm>(y[i]) ? gradient_of<Logarithm, float>(y[i], dy[i], of_row, 1.0f) : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += block[i];
  }
}

// Adds up sums of columns over the `parts` neighbouring CTAs of a cluster that have them, each at its place in the
// first one of these. Once a launch.
template <int Ctas>
struct MaskPartSums {
  float* values;  // [part][column], in the first CTA
  uint64* all_here;
  int rank;

  TRTC_DEVICE void begin(int parts) {
#if TRTC_ARCHITECTURE >= 90
    TRTC_SHARED(float, shared_values, Ctas* mask_columns);
    TRTC_SHARED(uint64, barrier, 1);
    values = shared_values;
    all_here = barrier;
    rank = static_cast<int>(cta_index_y() % Ctas);
    if (parts > 1) {
      if (thread_index() == 0 && rank % parts == 0) {
        transaction_barrier_init(all_here);
        transaction_barrier_expect(all_here, parts * mask_columns * sizeof(float));
      }
      cluster_arrive_relaxed();
    }
#endif
  }

  // By all threads; `sum` is of the first `mask_lanes` threads, and the result is the first CTA's.
  TRTC_DEVICE bool add_up(int parts, float (&sum)[mask_vector]) {
    constexpr int N = mask_vector;
    bool is_first = true;
#if TRTC_ARCHITECTURE >= 90
    const int part = rank % parts, first_place = thread_index() * N;
    is_first = part == 0;
    cluster_wait();
    if (thread_index() < mask_lanes) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        store_cluster_async(values + part * mask_columns + first_place + i, all_here, rank - part, sum[i]);
      }
      if (is_first) {
        transaction_barrier_wait(all_here);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = values[first_place + i];
#pragma unroll 1
        for (int other = 1; other < parts; ++other) {
#pragma unroll
          for (int i = 0; i < N; ++i) sum[i] += values[other * mask_columns + first_place + i];
        }
      }
    }
#endif
    return is_first;
  }
};

// `Rows` knows the arrays' types: its load() gives y and dy of a row's columns, and a y that takes no part where there
// is no column or it is excluded; its store() takes the gradient. A grid has the mask's columns in x, and its rows in
// y, where `Ctas` neighbours may be a cluster that shares some: in x they would read far from each other.
template <bool Logarithm, int Ctas, class Rows, class Params>
TRTC_DEVICE void mask_gradient(const Params& params, const Rows& rows) {
  constexpr int N = mask_vector;
  const uint32 mask_rows = static_cast<uint32>(params.mask_rows), sharers = static_cast<uint32>(params.sharers);
  const uint32 group =
      static_cast<uint32>(cta_index_y() % Ctas) * mask_groups + static_cast<uint32>(thread_index() / mask_lanes);
  const uint32 share = group % sharers;
  const uint32 in_cta = min(sharers, static_cast<uint32>(mask_groups)), share_in_cta = share % in_cta;
  const uint32 count = static_cast<uint32>(params.rows) / mask_rows;
  const int64 rows_in_turn = Ctas * mask_groups / sharers;
  const MaskColumns columns = MaskColumns::here(rows.together);
  const bool whole = rows.together && columns.first + N <= params.columns;
  TRTC_SHARED(float, shared_sums, mask_vector* mask_threads);
  float* own = shared_sums + thread_index();
  MaskPartSums<Ctas> parts;
  // With several there are no more rows than the grid has at once.
  const int part_count = Ctas == 1 ? 1 : static_cast<int>(sharers / in_cta);
  if constexpr (Ctas > 1) parts.begin(part_count);
#pragma unroll 1
  for (int64 first = cta_index_y() / Ctas * rows_in_turn; first < mask_rows;
       first += ctas_in_grid_y() / Ctas * rows_in_turn) {
    const int64 mask_row = first + group / sharers;
    const bool exists = mask_row < mask_rows;
    float sum[N] = {};
    if (exists) {
      const MaskedRow first_of_row = MaskedRow::first(params, static_cast<uint32>(mask_row));
      if (whole) {
        add_masked_rows<Logarithm, true>(params, rows, columns, first_of_row, count, share, sharers, sum);
      } else {
        add_masked_rows<Logarithm, false>(params, rows, columns, first_of_row, count, share, sharers, sum);
      }
    }
#pragma unroll 1
    for (uint32 half = in_cta / 2; half > 0; half /= 2) {
      if (share_in_cta >= half && share_in_cta < 2 * half) {
#pragma unroll
        for (int i = 0; i < N; ++i) own[i * mask_threads] = sum[i];
      }
      cta_barrier();
      if (share_in_cta < half) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += own[i * mask_threads + half * mask_lanes];
      }
    }
    bool has_all = share_in_cta == 0;
    if constexpr (Ctas > 1) {
      if (part_count > 1) has_all = parts.add_up(part_count, sum) && has_all;
    }
    if (exists && has_all) rows.store(mask_row, columns, sum);
    if (sharers > 1) cta_barrier();  // what others have written is read
  }
}

// Columns of a row that a CTA has: as many whole Vecs as the others that share it.
template <class Config, class Params>
TRTC_DEVICE int softmax_slice(const Params& params) {
  if constexpr (Config::ctas_per_row == 1) return params.columns;
  constexpr int unit = Config::vectors_per_row;
  return (params.columns / unit + (params.columns % unit != 0)) * Config::vector;
}

// What a thread has of the rows.
template <class Config, class Params>
TRTC_DEVICE Place<Config> softmax_place(const Params& params) {
  return Place<Config>::here(params.columns, softmax_slice<Config>(params));
}

// The next row of an array, on its way to shared memory while the one before it is in registers: for rows that are
// whole Vecs, all aligned. A thread sees its own Vecs.
template <class T, class Config>
struct NextRow {
  enum : int { N = Config::vector, steps = Config::steps, stride = Config::threads * N, elements = steps * stride };
  T* of_thread;
  int left;  // columns of the part, from the thread's first one on

  TRTC_DEVICE void begin(char* shared, const Place<Config>& place) {
    of_thread = reinterpret_cast<T*>(shared) + place.thread * N;
    left = place.most_columns - place.thread * N;
  }
  // They may be loaded after wait_async().
  TRTC_DEVICE void fetch(const T* part, const Place<Config>& place) const {
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      if (k * stride < left) {
        copy_async<Vec<T, N>::bytes>(of_thread + k * stride, part + place.thread * N + k * stride);
      }
    }
  }
  TRTC_DEVICE void load(Vec<T, N> (&value)[steps], uint32 fill) const {
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      value[k].fill(fill);
      if (k * stride < left) value[k].load_shared(of_thread + k * stride);
    }
  }
};

// Bytes of shared memory of so many elements; what follows them is aligned.
template <class T>
TRTC_DEVICE int staged_bytes(int elements) {
  return (elements * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
}

}  // namespace trtc
