// SPDX-License-Identifier: Apache-2.0
// What the kernels of softmax share: how a row is partitioned, and how CTAs that share one exchange what they found.
//
// A kernel is for whole rows: all begin at aligned addresses, and the number of columns, which a launch says, is a
// multiple of VEC_SIZE. Or it is for any rows (UNALIGNED): softmax/unaligned.cuh.
//
// Row partition: CTAS_PER_ROW CTAs have a slice each, of as many whole vectors as the others; the last ones may have
// less, or nothing. A CTA has ROWS_PER_CTA rows at a time, each of which THREADS_PER_ROW threads share, vector by
// vector in turn. So thread t has the columns t * VEC_SIZE, (t + THREADS_PER_ROW) * VEC_SIZE, ... of a slice, with the
// VEC_SIZE - 1 behind each. A sum is first by place in a vector, then over the places, the threads, and the CTAs: its
// order depends on the columns alone.
//
// A program is text that transformer_rtc/ops/softmax/kernels.py writes. It defines the element types, struct Params,
// and every upper-case name that no file here defines, and then includes one kernel file. Flags are macros, 0 or 1.
// Numbers are enumerators, which `#if` would read as 0. CLUSTER, GRID: how the CTAs of a row exchange values.
// PERSISTENT: whether a CTA works on several rows, one after another. EXCHANGED: floats that each CTA sends for a row,
// 2 of forward and 1 of backward. COUNTS_ONES: y is float32; NARROW: it is not. Softmax of bfloat16, shortened:
//
//   #include "types.cuh"
//   #define CAUSAL 0  // likewise LOGARITHM, HAS_MASK, HAS_SINK, UNALIGNED, CHUNKED, CLUSTER, GRID ...
//   namespace trtc {
//   using Input = bfloat16;  // likewise Output, Mask, Sink
//   enum : int {
//     THREADS_PER_ROW = 128, ROWS_PER_CTA = 1, VEC_SIZE = 8, VECTORS_PER_THREAD = 4, CTAS_PER_ROW = 1, EXCHANGED = 2,
//   };
//   }
//   struct Params { ... };  // pointers, strides, rows, columns, scale ...
//   #include "softmax/forward.cu"
//   extern "C" __global__ __launch_bounds__(128, 8) void NAME(const __grid_constant__ Params params) {
//     trtc::wait_for_last_launch();
//     trtc::softmax_forward(params);
//   }
#pragma once

#include "row_reduce.cuh"
#include "softmax/scores.cuh"

namespace trtc {

enum : int {
  VECTOR_STRIDE = THREADS_PER_ROW * VEC_SIZE,  // columns from a thread's vector to its next
  CHUNK = VECTORS_PER_THREAD * VECTOR_STRIDE,  // columns that the threads of a row hold at once
};

// Columns of a CTA's slice.
TRTC_DEVICE int slice_of(int columns) {
  constexpr int unit = CTAS_PER_ROW * VEC_SIZE;
  return CTAS_PER_ROW == 1 ? columns : (columns / unit + (columns % unit != 0)) * VEC_SIZE;
}

#if CAUSAL
TRTC_DEVICE Range range_of_row(const Params& params, int64 row) { return causal_range(params, query_of(params, row)); }
#else
TRTC_DEVICE Range range_of_row(const Params& params, int64 row) { return {0, params.columns}; }
#endif

// Whether a vector at this column may have columns that take part.
TRTC_DEVICE bool is_in_range(int column, const Range& range) {
  return !CAUSAL || (column > range.begin - VEC_SIZE && column < range.end);
}

// Elements of a vector at this column that are not in the range become those of `fill`.
template <class T>
TRTC_DEVICE void keep_range(uint32 (&word)[words_of<T, VEC_SIZE>], uint32 fill, int column, const Range& range) {
  if (!is_in_range(column, range) || (column >= range.begin && column + VEC_SIZE <= range.end)) return;
#pragma unroll
  for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) {
    if constexpr (sizeof(T) == 4) {
      word[i] = range.has(column + i) ? word[i] : fill;
    } else {
      const uint32 low = range.has(column + 2 * i) ? 0x0000ffffu : 0,
                   high = range.has(column + 2 * i + 1) ? 0xffff0000u : 0;
      word[i] = (word[i] & (low | high)) | (fill & ~(low | high));
    }
  }
}

// -infinity in every element of a word.
template <class T>
TRTC_DEVICE uint32 minus_infinity_word() {
  return sizeof(T) == 4 ? minus_infinity_bits<T>() : minus_infinity_bits<T>() * 0x10001u;
}

// Over the places of a vector: in an order that is the same from whichever place on they are counted (rotate_places()).
TRTC_DEVICE float sum_of_places(const float (&of_place)[VEC_SIZE]) {
  float sum[VEC_SIZE];
#pragma unroll
  for (int i = 0; i < VEC_SIZE; ++i) sum[i] = of_place[i];
#pragma unroll
  for (int distance = VEC_SIZE / 2; distance >= 1; distance /= 2) {
#pragma unroll
    for (int i = 0; i < distance; ++i) sum[i] += sum[i + distance];
  }
  return sum[0];
}

// ---- Between the CTAs that share a row ------------------------------------------------------------------------------

// EXCHANGED values of each CTA for a row, in one of the buffers in turn (row_reduce.cuh).
struct RowExchange {
  int rank;  // of this CTA among those that share its row
  uint32 round;
  float* buffers;
#if CLUSTER
  uint64* barriers;
#else
  uint32* arrived;
#endif
};
enum : int { EXCHANGE_BUFFERS = PERSISTENT ? 2 : 1 };

TRTC_DEVICE RowExchange begin_exchange(const Params& params) {
  RowExchange exchange = {};
  exchange.rank = static_cast<int>(cta_index() % CTAS_PER_ROW);
#if CLUSTER
  TRTC_SHARED(float, buffers, EXCHANGE_BUFFERS * EXCHANGED * CTAS_PER_ROW);
  TRTC_SHARED(uint64, barriers, EXCHANGE_BUFFERS);
  exchange.buffers = buffers;
  exchange.barriers = barriers;
  begin_cluster_exchange<CTAS_PER_ROW, EXCHANGE_BUFFERS, EXCHANGED>(barriers);
#elif GRID
  constexpr int words = grid_workspace_words(CTAS_PER_ROW, EXCHANGE_BUFFERS, EXCHANGED);
  exchange.arrived = static_cast<uint32*>(params.workspace) + cta_index() / CTAS_PER_ROW * words;
  exchange.buffers = reinterpret_cast<float*>(exchange.arrived + EXCHANGE_BUFFERS);
#endif
  return exchange;
}

// Thread i gets the values of CTA i % CTAS_PER_ROW.
TRTC_DEVICE void exchange_values(RowExchange& exchange, float (&values)[EXCHANGED]) {
  [[maybe_unused]] const uint32 buffer = exchange.round % EXCHANGE_BUFFERS, times = exchange.round / EXCHANGE_BUFFERS;
  [[maybe_unused]] float* const of_round = exchange.buffers + buffer * (EXCHANGED * CTAS_PER_ROW);
#if CLUSTER
  if (exchange.round == 0) cluster_wait();
  send_to_cluster<CTAS_PER_ROW>(values, of_round, exchange.barriers + buffer, exchange.rank);
  receive_from_cluster<CTAS_PER_ROW, PERSISTENT>(values, of_round, exchange.barriers + buffer, times % 2);
#elif GRID
  send_to_grid<CTAS_PER_ROW>(values, of_round, exchange.arrived + buffer, exchange.rank);
  receive_from_grid<CTAS_PER_ROW>(values, of_round, exchange.arrived + buffer, times);
#endif
  ++exchange.round;
}

}  // namespace trtc
