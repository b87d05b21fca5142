// SPDX-License-Identifier: Apache-2.0
// The gradient of a mask of floats.
// It is dx with a scale of 1, added up over the rows that a row of the mask was broadcast to. Groups of `mask_lanes`
// threads share these rows: each adds up every `sharers`-th one, in blocks of 32, and then a CTA's add up theirs in
// pairs, and CTAs of a cluster in their order. So the order depends on the number of rows alone.
#pragma once

#include "rows.cuh"
#include "softmax/scores.cuh"

namespace trtc {

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

  static TRTC_DEVICE MaskColumns here(bool aligned) {
    const int lane = thread_index() % mask_lanes;
    const int first = static_cast<int>(cta_index()) * mask_columns;
    return {first + lane * (aligned ? static_cast<int>(mask_vector) : 1), aligned ? 1 : static_cast<int>(mask_lanes)};
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
  const int64 rows_at_once = Ctas * mask_groups / sharers;
  const MaskColumns columns = MaskColumns::here(rows.aligned);
  const bool whole = rows.aligned && columns.first + N <= params.columns;
  TRTC_SHARED(float, shared_sums, mask_vector* mask_threads);
  float* own = shared_sums + thread_index();
  MaskPartSums<Ctas> parts;
  // With several there are no more rows than the grid has at once.
  const int part_count = Ctas == 1 ? 1 : static_cast<int>(sharers / in_cta);
  if constexpr (Ctas > 1) parts.begin(part_count);
#pragma unroll 1
  for (int64 first = cta_index_y() / Ctas * rows_at_once; first < mask_rows;
       first += ctas_in_grid_y() / Ctas * rows_at_once) {
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

}  // namespace trtc
