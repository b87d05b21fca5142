// Rows: where they lie in global memory, and how one that no vector fits travels.
#pragma once

#include "vector.cuh"

namespace trtc {

// The element offset of a row in an array whose leading dimensions collapse to two strides: rows, and heads inside a
// row. params.inner_magic and .inner_shift divide a number below 2^31 by .inner_count, the heads; that is 1 where one
// stride is enough, and always from 2^31 rows on.
template <class Params>
TRTC_DEVICE int64 row_offset(const Params& params, int64 row, int64 outer_stride, int64 inner_stride) {
  const uint32 outer = multiply_high(static_cast<uint32>(row), params.inner_magic) >> params.inner_shift;
  const uint32 inner = static_cast<uint32>(row) - outer * params.inner_count;
  return params.inner_count == 1 ? row * outer_stride : outer * outer_stride + inner * inner_stride;
}

// Whether every Vec of N elements of every row is aligned.
template <class T, int N>
TRTC_DEVICE bool rows_aligned(const T* base, int64 outer_stride, int64 inner_stride) {
  const uint64 bits = reinterpret_cast<uint64>(base) | static_cast<uint64>(outer_stride | inner_stride) * sizeof(T);
  return bits % (N * sizeof(T) < 16 ? N * sizeof(T) : 16) == 0;
}

// Copies a row's `count` elements from shared memory to global memory, which is aligned only to an element:
// neighbouring threads write neighbouring aligned words of 4 bytes.
template <class T>
TRTC_DEVICE void copy_from_shared(T* global, const T* shared, int count, int thread, int threads) {
  constexpr int per_word = 4 / static_cast<int>(sizeof(T));
  // Elements of the first word that lie before the row.
  const int before = count > 0 ? static_cast<int>(reinterpret_cast<uint64>(global) % 4 / sizeof(T)) : 0;
#pragma unroll 1
  for (int i = thread * per_word - before; i < count; i += threads * per_word) {
    if constexpr (per_word == 1) {
      global[i] = shared[i];
    } else if (i >= 0 && i + per_word <= count) {
      uint32 word = 0;
#pragma unroll
      for (int j = 0; j < per_word; ++j) word |= static_cast<uint32>(shared[i + j].bits) << 8 * sizeof(T) * j;
      *reinterpret_cast<uint32*>(global + i) = word;
    } else {
      for (int j = max(i, 0); j < min(i + per_word, count); ++j) global[j] = shared[j];
    }
  }
}

// A CTA's columns of a row on their way to shared memory. Where every row is a whole number of Vecs, each thread brings
// its own Vecs, and may read them when it has waited. Elsewhere (Config::ragged) no vector fits all rows: neighbouring
// threads bring neighbouring blocks of 16 bytes as they lie in global memory, and a barrier is needed too.
template <class T, class Config>
struct StagedRow {
  enum : int { N = Config::vector, per_block = 16 / static_cast<int>(sizeof(T)) };
  T* shared;
  int shift;  // elements of the first block that are not the row's

  TRTC_DEVICE void locate(char* to, const T* row) {
    shared = reinterpret_cast<T*>(to);
    shift = 0;
    if constexpr (Config::ragged) shift = static_cast<int>(reinterpret_cast<uint64>(row) / sizeof(T) % per_block);
  }

  // The first `columns` of them, and zeros.
  TRTC_DEVICE void fetch(const T* row, int columns, int thread, bool aligned) {
    if constexpr (Config::ragged) {
      constexpr int blocks = Config::chunk / per_block + 2;
#pragma unroll
      for (int k = 0; k < (blocks + Config::threads - 1) / Config::threads; ++k) {
        const int block = k * Config::threads + thread;
        const int column = block * per_block - shift;
        const int end = min(max(columns - column, 0), static_cast<int>(per_block));
        if ((k + 1) * Config::threads <= blocks || block < blocks) {
          copy_async_part(shared + block * per_block, row + (end > 0 ? column : -shift),
                          k == 0 ? max(-column, 0) * sizeof(T) : 0, end * sizeof(T));
        }
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < Config::steps; ++k) {
        const int column = (k * Config::threads + thread) * N;
        if constexpr (Vec<T, N>::bytes >= 4) {
          if (aligned && (Config::exact || column + N <= columns)) {
            copy_async<Vec<T, N>::bytes>(shared + column, row + column);
            continue;
          }
        }
        Vec<T, N> value;
        value.load(row + column, columns - column, false);
        value.store(shared + column, true);
      }
    }
  }

  TRTC_DEVICE Vec<T, N> at(int column) const {
    Vec<T, N> value;
    if constexpr (Config::ragged) {
      const int element = column % per_block + shift;
      value.load_shifted(shared + column / per_block * per_block + element / per_block * per_block,
                         element % per_block);
    } else {
      value.load(shared + column, N, true);
    }
    return value;
  }
};

// An output row's columns: to global memory, or, where no vector fits that, to shared memory first. Between put() and
// finish() the threads of a CTA do the same.
template <class T, class Config>
struct OutputRow {
  enum : int { N = Config::vector, per_block = 16 / static_cast<int>(sizeof(T)) };
  T* global;
  T* shared;
  bool aligned;

  TRTC_DEVICE void begin(T* row, char* staging, int row_in_cta, bool rows_are_aligned) {
    global = row;
    shared = reinterpret_cast<T*>(staging) + row_in_cta * Config::chunk;
    aligned = rows_are_aligned;
  }

  // `first` is the chunk's first column.
  TRTC_DEVICE void put(const Vec<T, N>& value, int column, int first, int columns) {
    if constexpr (N == 1) {
      value.store_element(global + column, 0, column < columns);
    } else {
      T* to = aligned ? global + column : shared + (column - first);
      value.store(to, (Config::ragged && !aligned) || Config::exact || column < columns);
    }
  }

  // `again`: there is another chunk or row, whose put() must wait.
  TRTC_DEVICE void finish(int first, int columns, int thread, bool again) {
    if (N == 1 || aligned) return;
    cta_barrier();
    if constexpr (Config::ragged) {
      const int shift = static_cast<int>(reinterpret_cast<uint64>(global) / sizeof(T) % per_block);
      const int back = (per_block - shift) % per_block;  // from a block in global memory to one in shared memory
#pragma unroll 2
      for (int column = thread * per_block - shift; column < columns; column += Config::threads * per_block) {
        if (column >= 0 && column + per_block <= columns) {
          Vec<T, per_block> value;
          value.load_shifted(shared + (column - back), back);
          value.store(global + column, true);
        } else {
#pragma unroll
          for (int i = 0; i < per_block; ++i) {
            if (column + i >= 0 && column + i < columns) global[column + i] = shared[column + i];
          }
        }
      }
    } else {
      copy_from_shared(global + first, shared, min(columns - first, Config::chunk), thread, Config::threads);
    }
    if (again) cta_barrier();
  }
};

}  // namespace trtc
