// SPDX-License-Identifier: Apache-2.0
#include "array.hpp"

#include <algorithm>
#include <cstdlib>

std::string dtype_name(DtypeId dtype) {
  // https://dmlc.github.io/dlpack/latest/c_api.html, DLDataTypeCode
  static const char* const names[] = {"int",           "uint",
                                      "float",         "opaque",
                                      "bfloat",        "complex",
                                      "bool",          "float8_e3m4",
                                      "float8_e4m3",   "float8_e4m3b11fnuz",
                                      "float8_e4m3fn", "float8_e4m3fnuz",
                                      "float8_e5m2",   "float8_e5m2fnuz",
                                      "float8_e8m0fnu"};
  const unsigned code = dtype >> 8;
  const std::string bits = std::to_string(dtype & 0xff);
  if (code >= sizeof(names) / sizeof(names[0])) return "type " + std::to_string(code) + " of " + bits + " bits";
  return code >= 6 ? names[code] : names[code] + bits;
}

namespace {

// DLPack's type codes.
enum Code : unsigned { signed_integer = 0, unsigned_integer = 1, boolean = 6 };

bool is_integer(DtypeId dtype) { return dtype >> 8 == signed_integer || dtype >> 8 == unsigned_integer; }
bool is_floating(DtypeId dtype) { return !is_integer(dtype) && dtype >> 8 != boolean; }

}  // namespace

DtypeId promoted(DtypeId a, DtypeId b) {
  constexpr DtypeId int16 = 16, uint8 = unsigned_integer << 8 | 8, float32 = 2 << 8 | 32;
  if (a == b) return a;
  if (is_floating(a) || is_floating(b)) return !is_floating(a) ? b : !is_floating(b) ? a : float32;
  // Unsigned types of more than 8 bits are promoted with floating point alone.
  const auto is_wide = [](DtypeId dtype) { return dtype >> 8 == unsigned_integer && dtype != uint8; };
  if (is_wide(a) || is_wide(b)) return 0;
  if (!is_integer(a) || !is_integer(b)) return is_integer(a) ? a : b;
  if (a != uint8 && b != uint8) return std::max(a, b);
  return std::max(a == uint8 ? b : a, int16);
}

DtypeId promoted_with_scalars(DtypeId arrays, DtypeId scalars) {
  if (arrays == 0 || scalars == 0) return arrays | scalars;
  const bool decides = arrays >> 8 == boolean || (is_floating(scalars) && !is_floating(arrays));
  return decides ? promoted(arrays, scalars) : arrays;
}

int64_t View::stride(int dimension) const {
  if (strides != nullptr) return strides[dimension];
  int64_t stride = 1;
  for (int i = dimension + 1; i < ndim; ++i) stride *= shape[i];
  return stride;
}

int64_t View::size() const {
  int64_t size = 1;
  for (int i = 0; i < ndim; ++i) size *= shape[i];
  return size;
}

bool View::contiguous() const {
  if (size() == 0) return true;
  int64_t dense = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] > 1 && stride(i) != dense) return false;
    dense *= shape[i];
  }
  return true;
}

bool View::same_shape(const View& other) const {
  return ndim == other.ndim && std::equal(shape, shape + ndim, other.shape);
}

std::string View::shape_text() const { return ::shape_text(shape, ndim); }

std::string shape_text(const int64_t* shape, int ndim) {
  std::string text = "(";
  for (int i = 0; i < ndim; ++i) text += std::to_string(shape[i]) + (i + 1 < ndim ? ", " : ndim == 1 ? "," : "");
  return text + ")";
}

View view_of(const DLTensor& tensor) {
  View view;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.ndim = tensor.ndim;
  view.shape = tensor.shape;
  view.strides = tensor.strides;
  view.dtype = static_cast<DtypeId>(tensor.dtype.code << 8 | tensor.dtype.bits);
  view.device = tensor.device.id;
  return view;
}

bool collapse_rows(const View* const* views, int count, Geometry& geometry, RowStrides* strides) {
  const View& first = *views[0];
  geometry.rows = 1;
  int64_t counts[2] = {1, 1};  // inner, outer
  int64_t group_strides[2][kMaxArrays] = {};
  int groups = 0;
  for (int dimension = first.ndim - 2; dimension >= 0; --dimension) {
    const int64_t extent = first.shape[dimension];
    geometry.rows *= extent;
    if (extent == 1) continue;
    if (groups > 2) continue;  // keep counting rows: none may be left
    bool merges = groups > 0;
    for (int i = 0; i < count && merges; ++i) {
      merges = views[i]->stride(dimension) == group_strides[groups - 1][i] * counts[groups - 1];
    }
    if (merges) {
      counts[groups - 1] *= extent;
      continue;
    }
    if (groups == 2) {
      groups = 3;
      continue;
    }
    for (int i = 0; i < count; ++i) group_strides[groups][i] = views[i]->stride(dimension);
    counts[groups++] = extent;
  }
  if (groups > 2) return geometry.rows == 0;
  geometry.inner_count = groups == 2 ? counts[0] : 1;
  for (int i = 0; i < count; ++i) {
    strides[i].outer = groups == 0 ? 0 : group_strides[groups - 1][i];
    strides[i].inner = groups == 2 ? group_strides[0][i] : 0;
    strides[i].column = views[i]->last() > 1 ? views[i]->stride(first.ndim - 1) : 1;
  }
  return true;
}

Extent extent_of(const View& contiguous) {
  return {contiguous.data, contiguous.data + contiguous.size() * dtype_bytes(contiguous.dtype)};
}

Extent extent_of_strided(const View& view) {
  if (view.size() == 0) return {view.data, view.data};
  int64_t low = 0, high = 1;  // in elements
  for (int i = 0; i < view.ndim; ++i) {
    const int64_t distance = (view.shape[i] - 1) * view.stride(i);
    (distance < 0 ? low : high) += distance;
  }
  const int bytes = dtype_bytes(view.dtype);
  return {view.data + low * bytes, view.data + high * bytes};
}

// Elements from the first to the last one of a row.
static int64_t width_of(const View& rows, const RowStrides& strides) { return strides.column == 0 ? 1 : rows.last(); }

Extent extent_of(const Geometry& geometry, const View& rows, const RowStrides& strides) {
  int64_t low = 0, high = width_of(rows, strides);  // in elements from the first row
  const int64_t reach[] = {(geometry.rows / geometry.inner_count - 1) * strides.outer,
                           (geometry.inner_count - 1) * strides.inner};
  for (int64_t distance : reach) (distance < 0 ? low : high) += distance;
  const int bytes = dtype_bytes(rows.dtype);
  return {rows.data + low * bytes, rows.data + high * bytes};
}

bool rows_overlap(const Geometry& geometry, const View& rows, const RowStrides& strides) {
  const int64_t width = rows.last();
  const int64_t outer_count = geometry.rows / geometry.inner_count;
  int64_t small = std::llabs(strides.inner), small_count = geometry.inner_count;
  int64_t large = std::llabs(strides.outer), large_count = outer_count;
  if (large_count > 1 && (small_count == 1 || large < small)) {
    std::swap(small, large);
    std::swap(small_count, large_count);
  }
  if (small_count > 1 && small < width) return true;
  return large_count > 1 && large < (small_count - 1) * small + width;
}

bool arrays_overlap(const Geometry& geometry, const View& a, const RowStrides& a_strides, const View& b,
                    const RowStrides& b_strides) {
  const int a_bytes = dtype_bytes(a.dtype), b_bytes = dtype_bytes(b.dtype);
  if (!extent_of(geometry, a, a_strides).overlaps(extent_of(geometry, b, b_strides))) return false;
  // Slices of one packed array, as q and k in qkv: their rows lie between each other's.
  if (a_bytes != b_bytes || a_strides.outer != b_strides.outer || a_strides.inner != b_strides.inner ||
      a_strides.inner < 0 || a_strides.outer <= 0 || (b.data - a.data) % a_bytes != 0) {
    return true;
  }
  const int64_t period = a_strides.outer;
  const int64_t between = (geometry.inner_count - 1) * a_strides.inner;
  const int64_t a_span = between + width_of(a, a_strides), b_span = between + width_of(b, b_strides);
  const int64_t offset = (((b.data - a.data) / a_bytes) % period + period) % period;
  return offset < a_span || offset + b_span > period;
}

Divisor divide_by(uint32_t divisor) {
  uint32_t shift = 0;
  while ((uint64_t{2} << shift) < divisor) ++shift;
  const unsigned __int128 power = static_cast<unsigned __int128>(1) << (32 + shift);
  return {static_cast<uint32_t>((power + divisor - 1) / divisor), shift};
}
