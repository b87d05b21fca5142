// SPDX-License-Identifier: Apache-2.0
// Arrays as the kernels see them: typed views of somebody's memory, and the geometry of their rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dlpack.hpp"

// A data type as DLPack names it: type code * 256 + bits. It is the package's only numbering of types.
using DtypeId = uint16_t;
constexpr int dtype_bytes(DtypeId dtype) { return (dtype & 0xff) / 8; }
std::string dtype_name(DtypeId dtype);

// The data type that torch promotes two to; 0: it does not promote them.
DtypeId promoted(DtypeId a, DtypeId b);
// The same of arrays with dimensions, and of those without, which decide only by their category: bool, integer or
// floating point. Either may be 0, where there is none.
DtypeId promoted_with_scalars(DtypeId arrays, DtypeId scalars);

// Borrows shape and strides.
struct View {
  char* data = nullptr;
  int ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements; null: row-major without gaps
  DtypeId dtype = 0;
  int device = 0;
  bool read_only = false;

  int64_t stride(int dimension) const;
  int64_t size() const;
  bool contiguous() const;  // row-major without gaps
  bool same_shape(const View& other) const;
  int64_t last() const { return shape[ndim - 1]; }  // of at least one dimension
  std::string shape_text() const;
};

std::string shape_text(const int64_t* shape, int ndim);

View view_of(const DLTensor& tensor);

// The rows of arrays with the same leading dimensions: the last one is a row, and the others collapse, for all the
// arrays alike, to `rows / inner_count` outer times `inner_count` inner ones.
struct Geometry {
  int64_t rows = 1;
  int64_t inner_count = 1;
};

constexpr int kMaxArrays = 12;

struct RowStrides {
  int64_t outer = 0;
  int64_t inner = 0;
  int64_t column = 1;  // 0: one element is broadcast to the whole row
};

constexpr int kMaxSymbols = 4;

// Of an array that is broadcast to the rows.
struct BroadcastStrides {
  int64_t leading = 0;           // along the dimensions before the named ones, which are counted as one
  int64_t of[kMaxSymbols] = {};  // along the dimension that is so many before the last
};

constexpr int64_t kMostColumns = int64_t{1} << 30;

// Collapses views[0 .. count), which have the same leading dimensions. Strides of dimensions that do not repeat are 0.
// Returns false where more than two strides are left.
bool collapse_rows(const View* const* views, int count, Geometry& geometry, RowStrides* strides);

// Whether two rows of an array share an element.
bool rows_overlap(const Geometry& geometry, const View& rows, const RowStrides& strides);

// Whether an array of rows shares an element with another; when in doubt, yes.
bool arrays_overlap(const Geometry& geometry, const View& a, const RowStrides& a_strides, const View& b,
                    const RowStrides& b_strides);

// From an array's first byte to one past its last.
struct Extent {
  const char* low;
  const char* high;

  bool overlaps(const Extent& other) const { return low < other.high && other.low < high; }
};

Extent extent_of(const View& contiguous);
Extent extent_of_strided(const View& view);
Extent extent_of(const Geometry& geometry, const View& rows, const RowStrides& strides);

// floor(n / divisor) = (n * magic) >> (32 + shift) for n < 2^31 and 2 <= divisor < 2^31 (Granlund and Montgomery,
// "Division by invariant integers using multiplication", 1994).
struct Divisor {
  uint32_t magic;
  uint32_t shift;
};
Divisor divide_by(uint32_t divisor);
