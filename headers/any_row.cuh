// Rows of any data type, known at run time: for kernels that are complete rather than fast.
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

// Whether Vecs of a row that begins so many bytes behind a multiple of 16 are aligned.
template <class T, int N>
TRTC_DEVICE bool is_aligned(int past) {
  return past % vec_alignment<T, N>() == 0;
}

template <class T, int N>
TRTC_DEVICE void load_floats_of(float (&values)[N], const void* row, int column, int columns, int past) {
  const T* first = static_cast<const T*>(row) + column;
  Vec<T, N> value;
  value.load(first, columns - column, is_aligned<T, N>(past));
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = value.get(i);
}

template <class T, int N>
TRTC_DEVICE void store_floats_of(const float (&values)[N], void* row, int column, int columns, int past) {
  T* first = static_cast<T*>(row) + column;
  Vec<T, N> value;
#pragma unroll
  for (int i = 0; i < N; i += 2) value.set(i, values[i], N == 1 ? 0.0f : values[i + (N > 1)]);
  const bool vector = column + N <= columns && is_aligned<T, N>(past);
  value.store(first, vector);
#pragma unroll
  for (int i = 0; i < N; ++i) value.store_element(first + i, i, !vector && column + i < columns);
}

// A row of an array of any type.
struct AnyRow {
  char* row;
  Dtype dtype;
  int columns;
  int past;  // bytes behind a multiple of 16

  TRTC_DEVICE bool present() const { return dtype != Dtype::absent; }
  TRTC_DEVICE float largest_number() const {
    return dtype == Dtype::float8_e4m3   ? largest<float8_e4m3>()
           : dtype == Dtype::float8_e5m2 ? largest<float8_e5m2>()
                                         : largest<int8>();
  }

  TRTC_DEVICE void prefetch(int column) const { prefetch_global(row + column * size_of(dtype)); }

  // N columns, the first of which is a multiple of N.
  template <int N>
  TRTC_DEVICE void load(float (&values)[N], int column) const {
    if (dtype == Dtype::float32) {
      load_floats_of<float, N>(values, row, column, columns, past);
    } else if (dtype == Dtype::bfloat16) {
      load_floats_of<bfloat16, N>(values, row, column, columns, past);
    } else {
      load_floats_of<float16, N>(values, row, column, columns, past);
    }
  }

  template <int N>
  TRTC_DEVICE void store(const float (&values)[N], int column) const {
    if (dtype == Dtype::float32) {
      store_floats_of<float, N>(values, row, column, columns, past);
    } else if (dtype == Dtype::bfloat16) {
      store_floats_of<bfloat16, N>(values, row, column, columns, past);
    } else if (dtype == Dtype::float16) {
      store_floats_of<float16, N>(values, row, column, columns, past);
    } else if (dtype == Dtype::float8_e4m3) {
      store_floats_of<float8_e4m3, N>(values, row, column, columns, past);
    } else if (dtype == Dtype::float8_e5m2) {
      store_floats_of<float8_e5m2, N>(values, row, column, columns, past);
    } else {
      store_floats_of<int8, N>(values, row, column, columns, past);
    }
  }
};

// The row of an array whose element offset is `offset`. `columns` is 0 for a row past the last.
TRTC_DEVICE AnyRow any_row(void* array, int number, int64 offset, int columns) {
  const Dtype dtype = static_cast<Dtype>(number);
  char* const row = static_cast<char*>(array) + offset * size_of(dtype);
  return {row, dtype, columns, static_cast<int>(reinterpret_cast<uint64>(row) % 16)};
}

// Sums over a row: by element of a Vec, by block of 32 Vecs and by row, so that no chain of additions is long.
template <int Count>
struct LongSums {
  float all[Count] = {};
  float block[Count] = {};
  int terms = 0;

  TRTC_DEVICE void add(const float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) block[i] += values[i];
    if (++terms % 32 == 0) close();
  }
  TRTC_DEVICE void close() {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      all[i] += block[i];
      block[i] = 0.0f;
    }
  }
};

}  // namespace trtc
