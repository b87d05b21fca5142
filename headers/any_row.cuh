// SPDX-License-Identifier: Apache-2.0
// Rows of data types that are known at run time: for kernels that are complete, and fast for simple rows.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace trtc {

// A data type as DLPack names it: type code * 256 + bits.
enum class Dtype : int {
  absent = 0,
  float32 = 0x220,
  float16 = 0x210,
  bfloat16 = 0x410,
  float8_e4m3 = 0xa08,
  float8_e5m2 = 0xc08,
  int8 = 0x008,
};

// In bytes.
TRTC_DEVICE int size_of(Dtype dtype) { return (static_cast<int>(dtype) & 0xff) / 8; }

// Values that a function gives.
template <int N>
struct Floats {
  float of[N];
};

template <class T, int N>
TRTC_DEVICE Floats<N> load_floats_of(const void* row, int column, int columns) {
  const T* first = static_cast<const T*>(row) + column;
  Vec<T, N> value;
  if (column + N <= columns && rows_aligned<T, N>(first, 0, 0)) {  // lanes meet behind it, to unpack
    value.load_aligned(first);
  } else {
    value.load_elements(first, columns - column);
  }
  Floats<N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) values.of[i] = value.get(i);
  return values;
}
// Without a branch: lanes that left a function apart are not seen to meet again (compute-sanitizer's synccheck).
template <class T, int N>
TRTC_DEVICE void store_floats_of(const Floats<N>& values, void* row, int column, int columns) {
  T* first = static_cast<T*>(row) + column;
  Vec<T, N> value;
#pragma unroll
  for (int i = 0; i < N; i += 2) value.set(i, values.of[i], N == 1 ? 0.0f : values.of[i + (N > 1)]);
  const bool whole = column + N <= columns && rows_aligned<T, N>(first, 0, 0);
  value.store(first, whole);
  value.store_each(first, 0, whole ? 0 : columns - column);
}

// N columns of a row of any type, which begin with a multiple of N.
template <int N>
TRTC_OUT_OF_LINE Floats<N> load_floats(const void* row, Dtype dtype, int column, int columns) {
  if (dtype == Dtype::float32) return load_floats_of<float, N>(row, column, columns);
  if (dtype == Dtype::bfloat16) return load_floats_of<bfloat16, N>(row, column, columns);
  return load_floats_of<float16, N>(row, column, columns);
}
template <int N>
TRTC_OUT_OF_LINE void store_floats(Floats<N> values, void* row, Dtype dtype, int column, int columns) {
  if (dtype == Dtype::float32) {
    store_floats_of<float, N>(values, row, column, columns);
  } else if (dtype == Dtype::bfloat16) {
    store_floats_of<bfloat16, N>(values, row, column, columns);
  } else if (dtype == Dtype::float16) {
    store_floats_of<float16, N>(values, row, column, columns);
  } else if (dtype == Dtype::float8_e4m3) {
    store_floats_of<float8_e4m3, N>(values, row, column, columns);
  } else if (dtype == Dtype::float8_e5m2) {
    store_floats_of<float8_e5m2, N>(values, row, column, columns);
  } else {
    store_floats_of<int8, N>(values, row, column, columns);
  }
}

// A row of an array of any type, of which Vecs may not be aligned, or whole. A call for each Vec: with the text for all
// types at every place, the general kernels of norms took twice as long to compile.
struct AnyRow {
  enum : bool { every_option = true };  // with masks and scales, which no call on TypedRows has
  char* row;
  Dtype dtype;
  int columns;

  // That of an array whose element offset is `offset`. `columns` is 0 for a row past the last.
  static TRTC_DEVICE AnyRow at(void* array, int number, int64 offset, int columns) {
    const Dtype dtype = static_cast<Dtype>(number);
    return {static_cast<char*>(array) + offset * size_of(dtype), dtype, columns};
  }
  TRTC_DEVICE bool present() const { return dtype != Dtype::absent; }
  TRTC_DEVICE float largest_number() const {
    return dtype == Dtype::float8_e4m3   ? largest<float8_e4m3>()
           : dtype == Dtype::float8_e5m2 ? largest<float8_e5m2>()
                                         : largest<int8>();
  }

  // N columns, the first of which is a multiple of N.
  template <int N>
  TRTC_DEVICE void load(float (&values)[N], int column) const {
    const Floats<N> loaded = load_floats<N>(row, dtype, column, columns);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = loaded.of[i];
  }
  template <int N>
  TRTC_DEVICE void store(const float (&values)[N], int column) const {
    Floats<N> stored;
#pragma unroll
    for (int i = 0; i < N; ++i) stored.of[i] = values[i];
    store_floats<N>(stored, row, dtype, column, columns);
  }
};

// The same, where all Vecs are aligned and whole, of float32, or of either type of 16 bits: which of both it is decides
// behind each load, so that the text of a kernel is there once for them.
template <class T>
struct TypedRow {
  enum : bool { every_option = false };
  T* row;
  Dtype dtype;
  int columns;

  static TRTC_DEVICE TypedRow at(void* array, int number, int64 offset, int columns) {
    return {static_cast<T*>(array) + offset, static_cast<Dtype>(number), columns};
  }
  TRTC_DEVICE bool present() const { return dtype != Dtype::absent; }
  TRTC_DEVICE float largest_number() const { return 0.0f; }  // no row is scaled

  template <int N>
  TRTC_DEVICE void load(float (&values)[N], int column) const {
    Vec<T, N> value;
    value.load_aligned(row + column);
    if (sizeof(T) == 4 || dtype == Dtype::bfloat16) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = value.get(i);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = float_from_half<float16>(value.bits(i));
    }
  }
  template <int N>
  TRTC_DEVICE void store(const float (&values)[N], int column) const {
    Vec<T, N> value;
    if (sizeof(T) == 4 || dtype == Dtype::bfloat16) {
#pragma unroll
      for (int i = 0; i < N; i += 2) value.set(i, values[i], values[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) value.word[i / 2] = halves_from_floats<float16>(values[i], values[i + 1]);
    }
    value.store(row + column, true);
  }
};

// What TypedRows a kernel has text for, beside that for AnyRows.
enum : int { half_rows = 1, float_rows = 2 };

// Whether all arrays of a call are of one type, and every Vec of N elements of their rows is aligned and whole, so that
// they can be TypedRows.
template <int N>
struct CommonType {
  bool is_common;
  Dtype dtype = Dtype::absent;

  TRTC_DEVICE CommonType(int columns, bool possible) : is_common(possible && columns % N == 0) {}
  TRTC_DEVICE void add(const void* data, int number, int64 outer_stride, int64 inner_stride) {
    const Dtype other = static_cast<Dtype>(number);
    if (other == Dtype::absent) return;
    if (dtype == Dtype::absent) dtype = other;
    const uint64 strides = static_cast<uint64>(outer_stride | inner_stride) * size_of(other);
    is_common = is_common && other == dtype && (reinterpret_cast<uint64>(data) | strides) % 16 == 0;
  }
  TRTC_DEVICE bool is_float() const { return is_common && dtype == Dtype::float32; }
  TRTC_DEVICE bool is_half() const { return is_common && (dtype == Dtype::bfloat16 || dtype == Dtype::float16); }
};

// Adds up what `of_vec` gives of the Vecs from `column` on: by element of a Vec, by block of 32 Vecs and by row, so
// that no chain of additions is long.
template <int Count, class OfVec>
TRTC_DEVICE void add_long(float (&all)[Count], int column, int columns, int step, const OfVec& of_vec) {
  while (column < columns) {
    float block[Count] = {};
#pragma unroll 1
    for (int k = 0; k < 32 && column < columns; ++k, column += step) of_vec(column, block);
#pragma unroll
    for (int i = 0; i < Count; ++i) all[i] += block[i];
  }
}

}  // namespace trtc
