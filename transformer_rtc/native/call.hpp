// SPDX-License-Identifier: Apache-2.0
// One call of an operator: what it was given, and how its arrays lie.
#pragma once

#include <Python.h>

#include <vector>

#include "declaration.hpp"
#include "driver.hpp"

constexpr int kMaxFlags = 16;
// What the addresses of vectors are multiples of, in bytes, or of their own bytes where these are fewer.
constexpr uint64_t kVectorAlignment = 16;

// The call's array arguments and values, in the order of the declaration.
struct Call {
  View views[kMaxArrays];
  PyObject* objects[kMaxArrays] = {};  // borrowed; null: absent, or an output to allocate
  bool wanted[kMaxArrays] = {};        // outputs and results that are returned
  DtypeId dtypes[kMaxArrays] = {};     // 0: absent; before `run`: of outputs, what is asked for
  double reals[kMaxArrays] = {};
  int32_t integers[kMaxArrays] = {};
  uint32_t flags = 0;             // a bit for each, in their order
  DtypeId promoted = 0;           // of arrays that are broadcast to one shape; 0: torch does not promote their types
  std::vector<int64_t> expanded;  // the shape and strides that these have then
  int64_t sm_margin = 0;
  int implementation = 0;
  const Argument* choice = nullptr;  // whose word asks for two sizes to be one
  const Word* word = nullptr;
};

// How the arrays lie in memory, and the symbols' values.
struct Layout {
  Geometry geometry;
  int64_t sizes[kMaxSymbols] = {1, 1, 1, 1};
  RowStrides strides[kMaxArrays];
  BroadcastStrides broadcast[kMaxArrays];
  int variant = 0;                // which of their shapes arrays with several have
  const View* pattern = nullptr;  // the first of these that is given
  const std::string* pattern_name = nullptr;
  // Columns of all rows together, where the columns depend on no others and no array has gaps between rows: the kernel
  // gets one row of them. 0: it gets the rows.
  int64_t one_row = 0;
  bool split = false;  // an array that is one part of several by itself is given: what has multiples has one part

  int64_t launched_rows() const { return one_row > 0 ? 1 : geometry.rows; }
  int64_t launched_columns() const { return one_row > 0 ? one_row : sizes[0]; }
  int64_t multiple(const Size& size) const { return split && size.symbol >= 0 ? 1 : size.multiple; }
  int64_t value(const Size& size) const { return multiple(size) * (size.symbol < 0 ? 1 : sizes[size.symbol]); }
};

// Where outputs and workspaces come from.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // Returns a new reference and sets `data`. Throws.
  virtual PyObject* allocate(int ndim, const int64_t* shape, DtypeId dtype, int device, char*& data) = 0;
  // The same for bytes that the work put on a stream needs until the reference is given up.
  virtual PyObject* workspace(int64_t bytes, int device, CUstream stream, char*& data);
};

// Owns references until they are returned.
struct Outputs {
  PyObject* objects[kMaxArrays] = {};
  int count = 0;

  Outputs() = default;
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;
  ~Outputs() {
    for (int i = 0; i < count; ++i) Py_XDECREF(objects[i]);
  }
  PyObject* release();
};
