// SPDX-License-Identifier: Apache-2.0
// How the norms' kernels partition a row, and how its columns travel.
//
// CTAS_PER_ROW CTAs share a row. Each has a slice of SLICE columns; the last CTAs may have fewer, or none. A CTA holds
// CHUNK columns of ROWS_PER_CTA rows at a time. Of a row's THREADS_PER_ROW threads there, thread t has the columns
// [(k * THREADS_PER_ROW + t) * VEC_SIZE, ... + VEC_SIZE) of a chunk for k = 0, 1, ... VECTORS_PER_THREAD - 1. The
// configuration alone fixes the order of a sum.
//
// A program is text that transformer_rtc/ops/norm/kernels.py writes. It defines the element types, struct Params, and
// every upper-case name that no file here defines, and then includes one kernel file. Flags are macros, 0 or 1.
// Numbers are enumerators: `#if` would read them as 0, so only C++ may test them. LayerNorm of bfloat16, 4096 columns,
// shortened:
//
//   #include "types.cuh"
//   #define CENTRED 1     // LayerNorm; 0: RMSNorm
//   #define HAS_WEIGHT 1  // likewise HAS_BIAS, HAS_MEAN, ADDED_BEFORE, PERSISTENT, UNALIGNED, CLUSTER, GRID ...
//   #define SQUARES_SCALE 0x1p-7f
//   namespace trtc {
//   using Input = bfloat16;  // likewise Residual, NormInput, Weight, Bias, Output
//   enum : int {
//     HIDDEN = 4096, THREADS_PER_ROW = 128, ROWS_PER_CTA = 1, VEC_SIZE = 8, VECTORS_PER_THREAD = 4,
//     CTAS_PER_ROW = 1, CHUNKS = 1, STAGES = 0, LAG = 0, ROWS_PER_PASS = 1,
//   };
//   }
//   struct Params { ... };  // pointers, strides, rows, eps ...
//   #include "norm/forward_registers.cu"
//   extern "C" __global__ __launch_bounds__(128) void NAME(const __grid_constant__ Params params) {
//     trtc::wait_for_last_launch();
//     trtc::norm_forward_registers(params);
//   }
#pragma once

#include "row_reduce.cuh"
#include "row_vector.cuh"

namespace trtc {

// ---- Row partition --------------------------------------------------------------------------------------------------

#define CHUNK (THREADS_PER_ROW * VECTORS_PER_THREAD * VEC_SIZE)
// Slices are about equal, since all CTAs of a row wait for the longest. They are multiples of 64 elements, whole
// 128-byte lines for 2-byte types, where HIDDEN is one and the CTAs hold them: bulk copies are faster then.
#define LINE 64
#define SLICE_IN_LINES ((HIDDEN - 1) / (LINE * CTAS_PER_ROW) * LINE + LINE)
#define SLICE_IN_VECTORS ((HIDDEN - 1) / (VEC_SIZE * CTAS_PER_ROW) * VEC_SIZE + VEC_SIZE)
#define SLICE (HIDDEN % LINE == 0 && SLICE_IN_LINES <= CHUNKS * CHUNK ? SLICE_IN_LINES : SLICE_IN_VECTORS)
static_assert(SLICE <= CHUNKS * CHUNK, "the CTAs hold a row");
static_assert(UNALIGNED || HIDDEN % VEC_SIZE == 0, "rows are whole vectors");

// Every vector of every thread lies in the row.
#define EXACT (ROWS_PER_CTA == 1 && static_cast<int64>(CHUNKS) * CHUNK * CTAS_PER_ROW == HIDDEN)

// Whether vector k lies in the row for every thread of every CTA. Then the compiler drops the bounds test.
constexpr TRTC_DEVICE bool is_filled(int k) {
  const int64 least = HIDDEN - static_cast<int64>(CTAS_PER_ROW - 1) * SLICE;  // columns of the last CTA
  return EXACT || (CHUNKS == 1 && ROWS_PER_CTA == 1 && (k + 1) * THREADS_PER_ROW * VEC_SIZE <= least);
}

// Whether element i of the vector at a CTA's `column` is one of its `columns`.
TRTC_DEVICE bool is_inside(int i, int column, int columns) {
  return EXACT || (UNALIGNED ? column + i : column) < columns;
}

// The elements of vector k, at a CTA's `column`, that are not in the row become 0.
TRTC_DEVICE void clear_outside(float (&element)[VEC_SIZE], int k, int column, int columns) {
  if (is_filled(k)) return;
  if (__builtin_expect(columns - column < VEC_SIZE, 0)) {
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) element[i] = is_inside(i, column, columns) ? element[i] : 0.0f;
  }
}

// The columns that CTA `rank` of a row has, and the inverse; 0 where there are none.
TRTC_DEVICE float columns_of_cta(int rank) {
  return static_cast<float>(EXACT ? SLICE : max(0, min(HIDDEN - rank * SLICE, SLICE)));
}
TRTC_DEVICE float reciprocal_columns_of_cta(int rank) {
  constexpr int before_last = (HIDDEN - 1) / SLICE;  // CTAs
  constexpr float of_last = 1.0f / static_cast<float>(HIDDEN - before_last * SLICE);
  if (EXACT) return of_last;
  return rank < before_last ? 1.0f / SLICE : rank == before_last ? of_last : 0.0f;
}

// Which row of per-head weights belongs to a row: the last of its leading dimensions.
TRTC_DEVICE int64 head_of(const Params& params, int64 row) {
#if PER_HEAD
  const uint32 token = multiply_high(static_cast<uint32>(row), params.heads_magic) >> params.heads_shift;
  return params.heads == 1 ? 0 : static_cast<int64>(static_cast<uint32>(row) - token * params.heads);
#else
  return 0;
#endif
}

// A thread's index for another pass over its vectors. Their addresses are computed anew from it: else each would keep a
// register from one pass to the next.
TRTC_DEVICE int anew(int thread) {
  uint32 bits = thread;
  forget_uses(bits);
  return static_cast<int>(bits);
}

// ---- Vectors --------------------------------------------------------------------------------------------------------

// Loads vector k of the weight or bias. `columns` columns are left from `from` on; what is behind them becomes 0.
template <class T>
TRTC_DEVICE void load_affine_vector(uint32 (&word)[words_of<T, VEC_SIZE>], const T* from, int k, int thread,
                                    int columns) {
  const int column = (k * THREADS_PER_ROW + thread) * VEC_SIZE;
  if constexpr (UNALIGNED) {
    const bool is_aligned = reinterpret_cast<uint64>(from) % alignment_of<T, VEC_SIZE> == 0;
    if (is_aligned && column + VEC_SIZE <= columns) {
      load_vector<VEC_SIZE>(word, from + column);
    } else {
      load_elements<VEC_SIZE>(word, from + column, columns - column);
    }
  } else {
    load_vector_if<VEC_SIZE>(word, from + column, is_filled(k) || column < columns);
  }
}

#if UNALIGNED
// Rows that are no whole aligned vectors travel through shared memory: a row's threads copy it, neighbouring threads
// neighbouring words of 4 bytes, and read or write vectors there. Half of all 16-bit rows of an odd length begin
// between two words: these are copied by elements.
template <class T>
TRTC_DEVICE bool is_whole_words(const T* row) {
  return sizeof(T) == 4 || reinterpret_cast<uint64>(row) % 4 == 0;
}

// Columns behind the row become 0. The caller has a barrier before, and wait_async() and a barrier after.
template <class T>
TRTC_DEVICE void copy_to_stage(T* stage, const T* from, int columns, int thread) {
  if (is_whole_words(from)) {
    constexpr int of_word = 4 / sizeof(T);  // elements
#pragma unroll 1
    for (int first = thread * of_word; first < CHUNK; first += THREADS_PER_ROW * of_word) {
      const int count = max(0, min(columns - first, of_word));
      copy_async_part<4>(stage + first, count > 0 ? from + first : from, 0, count * static_cast<int>(sizeof(T)));
    }
    return;
  }
  // All loads of a batch are in flight before the first element is stored.
  constexpr int batch = (VECTORS_PER_THREAD > 1 ? 2 : 1) * VEC_SIZE;
#pragma unroll 1
  for (int first = thread; first < CHUNK; first += batch * THREADS_PER_ROW) {
    T element[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      element[i] = T{};
      if (first + i * THREADS_PER_ROW < columns) element[i] = from[first + i * THREADS_PER_ROW];
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int column = first + i * THREADS_PER_ROW;
      if (VECTORS_PER_THREAD % 2 == 0 || column < CHUNK) stage[column] = element[i];
    }
  }
}

template <class T>
TRTC_DEVICE void copy_from_stage(T* to, const T* stage, int columns, int thread) {
  columns = min(columns, CHUNK);
  int first = 0;
  if constexpr (sizeof(T) == 2) {
    if (is_whole_words(to)) {
#pragma unroll 1
      for (int column = thread * 2; column + 1 < columns; column += THREADS_PER_ROW * 2) {
        uint32 word[1];
        load_vector<2, Space::shared>(word, stage + column);
        store_vector<2>(to + column, word);
      }
      first = columns / 2 * 2;
    }
  }
#pragma unroll 1
  for (int column = first + thread; column < columns; column += THREADS_PER_ROW) to[column] = stage[column];
}
#endif

}  // namespace trtc
