// Rows: where they lie in global memory, and which part of one is whose.
#pragma once

#include "row_vector.cuh"
#include "vector.cuh"

namespace trtc {

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

  // Of rows of which a CTA has `slice` columns.
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

// What a Vec's address must be a multiple of, in bytes.
template <class T, int N>
constexpr TRTC_DEVICE uint64 vec_alignment() {
  return Vec<T, N>::bytes < 16 ? Vec<T, N>::bytes : 16;
}

// Whether every Vec of N elements of every row is aligned.
template <class T, int N>
TRTC_DEVICE bool rows_aligned(const T* base, int64 outer_stride, int64 inner_stride) {
  const uint64 bits = reinterpret_cast<uint64>(base) | static_cast<uint64>(outer_stride | inner_stride) * sizeof(T);
  return bits % vec_alignment<T, N>() == 0;
}

// Whether rows that are `stride` elements from each other do not overlap, and have N elements.
template <int N>
TRTC_DEVICE bool rows_apart(int64 columns, int64 stride) {
  return columns >= N && stride >= columns;
}
// Of an array: there are N elements of it before each row but the first, and behind each but the last, then.
template <int N, class Params>
TRTC_DEVICE bool rows_apart(const Params& params, int64 columns, int64 outer_stride, int64 inner_stride) {
  return rows_apart<N>(columns, outer_stride) && (params.inner_count == 1 || inner_stride >= columns);
}

// Whether what is beside a part of a row, before it and behind it, is known to be memory of the same array, as much as
// a Vec has; else it is not touched.
struct Beside {
  bool before;
  bool behind;
};

// Beside row `number` of `count` that are apart, or are not.
TRTC_DEVICE Beside beside_row(int64 number, int64 count, bool apart) {
  return {apart && number > 0, apart && number + 1 < count};
}

// Beside what a CTA has of it.
template <class Config>
TRTC_DEVICE Beside beside_part(const Place<Config>& place, int64 columns, int64 number, int64 count, bool apart) {
  const Beside of_row = beside_row(number, count, apart);
  return {place.rank > 0 || of_row.before,
          place.first_column + place.most_columns + Config::vector <= columns || of_row.behind};
}

}  // namespace trtc
