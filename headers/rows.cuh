// Rows: where they lie in global memory, which part of one is whose, and how one that no vector fits travels.
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

// An array of rows, as a launch describes it.
struct RowArray {
  void* data;
  int64 outer_stride;
  int64 inner_stride;

  template <class Params>
  TRTC_DEVICE int64 offset(const Params& params, int64 row) const {
    return row_offset(params, row, outer_stride, inner_stride);
  }
};

// What a thread has of the rows. Groups of `ctas_per_row` CTAs have `rows_per_cta` rows at a time.
template <class Config>
struct Place {
  int thread;  // of those of this CTA that share a row
  int row_in_cta;
  int rank;          // of this CTA among those that share its rows
  int first_column;  // of its slice of a row
  int most_columns;  // of that, 0 or less where the row does not come so far
  int64 group;
  int64 stride;  // rows of all groups together

  // Of rows whose size is known to the compiler; and of others, of which a CTA has `slice` columns.
  static TRTC_DEVICE Place here() { return here(Config::hidden, Config::slice); }
  static TRTC_DEVICE Place here(int columns, int slice) {
    constexpr bool one_row = Config::rows_per_cta == 1;
    const int rank = static_cast<int>(cta_index() % Config::ctas_per_row);
    const int first_column = rank * slice;
    return {one_row ? thread_index() : thread_index() % Config::threads,
            one_row ? 0 : thread_index() / Config::threads,
            rank,
            first_column,
            min(columns - first_column, slice),
            cta_index() / Config::ctas_per_row,
            ctas_in_grid() / Config::ctas_per_row * Config::rows_per_cta};
  }

  // A group's first rows begin here.
  TRTC_DEVICE int64 begin_row() const { return group * Config::rows_per_cta; }
  // A row past the last takes part in every barrier with no columns. One row a CTA: the launch has none past the last.
  TRTC_DEVICE bool exists(int64 row, int64 rows) const { return Config::rows_per_cta == 1 || row < rows; }
  TRTC_DEVICE int columns(int64 row, int64 rows) const { return exists(row, rows) ? most_columns : 0; }
};

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
#pragma unroll 1
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
    if constexpr (Config::ragged) shift = elements_past<per_block>(row);
  }

  // The first `columns` of them, and zeros. `is_end`: the array's memory may end with them.
  TRTC_DEVICE void fetch(const T* row, int columns, int thread, bool aligned, bool is_end) {
    if constexpr (Config::ragged) {
      constexpr int blocks = Config::chunk / per_block + 2;
#pragma unroll
      for (int k = 0; k < (blocks + Config::threads - 1) / Config::threads; ++k) {
        const int block = k * Config::threads + thread;
        const int column = block * per_block - shift;
        const int end = min(max(columns - column, 0), static_cast<int>(per_block));
        const bool alone = is_end && end > 0 && end < per_block;
        if (((k + 1) * Config::threads <= blocks || block < blocks) && !alone) {
          copy_async_part<16>(shared + block * per_block, row + (end > 0 ? column : -shift),
                              k == 0 ? max(-column, 0) * sizeof(T) : 0, end * sizeof(T));
        }
      }
      // A block of which the row has the first elements only: the copy touches the others too (compute-sanitizer).
      const int last = (columns + shift) / per_block;
      if (is_end && columns > 0 && last % Config::threads == thread && last * per_block - shift < columns) {
        Vec<T, per_block> rest;
#pragma unroll
        for (int i = 0; i < per_block; ++i) {
          const int at = last * per_block - shift + i;
          rest.set_bits(i, load_element(row + at, at >= 0 && at < columns));
        }
        rest.template store<Space::shared>(shared + last * per_block, true);
      }
    } else {
      if constexpr (Vec<T, N>::bytes >= 4) {
        if (aligned) {
          const T* from = row + thread * N;
          T* to = shared + thread * N;
          // All 8 steps of a long row, as constants beside one address.
#pragma unroll 8
          for (int k = 0; k < Config::steps; ++k) {
            const int at = k * Config::threads * N;
            if constexpr (Config::exact) {
              copy_async<Vec<T, N>::bytes>(to + at, from + at);
            } else {
              const int count = min(max(columns - thread * N - at, 0), static_cast<int>(N));
              copy_async_part<Vec<T, N>::bytes>(to + at, from + at, 0, count * sizeof(T));
            }
          }
          return;
        }
      }
#pragma unroll 1
      for (int k = 0; k < Config::steps; ++k) {
        const int column = (k * Config::threads + thread) * N;
        Vec<T, N> value;
        value.load(row + column, columns - column, false);
        value.template store<Space::shared>(shared + column, true);
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
      value.load_shared(shared + column);
    }
    return value;
  }
};

// The rows of an input, one of which is in shared memory, or on its way there.
template <class T, class Config>
struct InputRow {
  enum : int { N = Config::vector };
  RowArray array;
  const T* all;  // from this CTA's first column on
  bool aligned;
  StagedRow<T, Config> staged;

  TRTC_DEVICE void begin(const RowArray& rows, const Place<Config>& place) {
    array = rows;
    all = static_cast<const T*>(rows.data) + place.first_column;
    aligned = rows_aligned<T, N>(all, rows.outer_stride, rows.inner_stride);
  }
  template <class Params>
  TRTC_DEVICE const T* of(const Params& params, int64 row) const {
    return all + array.offset(params, row);
  }
  template <class Params>
  TRTC_DEVICE void locate(const Params& params, char* region, const Place<Config>& place, int64 row) {
    staged.locate(region + place.row_in_cta * Config::chunk * sizeof(T), of(params, row));
  }
  template <class Params>
  TRTC_DEVICE void fetch(const Params& params, char* region, const Place<Config>& place, int64 row, int columns) {
    locate(params, region, place, row);
    // Behind any row but the last there is memory of the same array, if rows are apart.
    const bool apart =
        array.outer_stride >= Config::hidden && (params.inner_count == 1 || array.inner_stride >= Config::hidden);
    staged.fetch(of(params, row), columns, place.thread, aligned, !apart || row + 1 >= params.rows);
  }
  TRTC_DEVICE Vec<T, N> at(int column) const { return staged.at(column); }
};

// An output row's columns: to global memory, or, where no vector fits that, to shared memory first. Between put() and
// finish() the threads of a CTA do the same.
template <class T, class Config>
struct OutputRow {
  enum : int { N = Config::vector, per_block = 16 / static_cast<int>(sizeof(T)) };
  T* global;
  T* shared;
  bool aligned;

  template <class Params>
  TRTC_DEVICE void begin(const RowArray& rows, const Params& params, int64 row, const Place<Config>& place,
                         char* staging) {
    global = static_cast<T*>(rows.data) + place.first_column + rows.offset(params, row);
    shared = reinterpret_cast<T*>(staging) + place.row_in_cta * Config::chunk;
    aligned = Config::hidden % N == 0 && rows_aligned<T, N>(global, rows.outer_stride, rows.inner_stride);
  }

  // `first` is the chunk's first column.
  TRTC_DEVICE void put(const Vec<T, N>& value, int column, int first, int columns) {
    if constexpr (N == 1) {
      value.store_element(global + column, 0, column < columns);
    } else {
      value.store(global + column, aligned && (Config::exact || column < columns));
      value.template store<Space::shared>(shared + (column - first), !aligned);
    }
  }

  // `again`: there is another chunk or row, whose put() must wait.
  TRTC_DEVICE void finish(int first, int columns, int thread, bool again) {
    if (N == 1 || aligned) return;
    cta_barrier();
    if constexpr (Config::ragged) {
      const int shift = elements_past<per_block>(global);
      const int back = (per_block - shift) % per_block;  // from a block in global memory to one in shared memory
#pragma unroll 2
      for (int column = thread * per_block - shift; column < columns; column += Config::threads * per_block) {
        if (column >= 0 && column + per_block <= columns) {
          Vec<T, per_block> value;
          value.load_shifted(shared + (column - back), back);
          value.store(global + column, true);
        } else {
#pragma unroll 1
          for (int i = max(-column, 0); i < min(columns - column, static_cast<int>(per_block)); ++i) {
            global[column + i] = shared[column + i];
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
