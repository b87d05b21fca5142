// SPDX-License-Identifier: Apache-2.0
// What is fixed once the data types and sizes of a call are known: the kernels, how they are launched, and what fills
// their parameters.
#pragma once

#include <memory>
#include <vector>

#include "driver.hpp"

// What fills a field of the parameters: name in C++, name in Python. `index` counts arrays, reals, integers or flags
// in the order of the arguments, or symbols.
#define TRTC_SOURCES(X)                                                                                    \
  X(data, DATA)                 /* of an array */                                                          \
  X(outer_stride, OUTER_STRIDE) /* of an array of rows */                                                  \
  X(inner_stride, INNER_STRIDE)                                                                            \
  X(column_stride, COLUMN_STRIDE)   /* 1, or 0 of one element for the whole row */                         \
  X(stride, STRIDE)                 /* of a broadcast array, along the dimension of the symbol `second` */ \
  X(leading_stride, LEADING_STRIDE) /* of a broadcast array, along what is before the named ones */        \
  X(dtype, DTYPE)                   /* of an array */                                                      \
  X(array_rows, ARRAY_ROWS)         /* rows of a result that has another array's shape */                  \
  X(real, REAL)                                                                                            \
  X(integer, INTEGER)                                                                                      \
  X(flag, FLAG)                                                                                            \
  X(size, SIZE)   /* of a symbol */                                                                        \
  X(magic, MAGIC) /* to divide by it */                                                                    \
  X(shift, SHIFT)                                                                                          \
  X(difference, DIFFERENCE) /* of the sizes of two symbols, `index` and `second` */                        \
  X(rows, ROWS)                                                                                            \
  X(inner_count, INNER_COUNT)                                                                              \
  X(inner_magic, INNER_MAGIC)                                                                              \
  X(inner_shift, INNER_SHIFT)                                                                              \
  X(groups, GROUPS)                                                                                        \
  X(workspace, WORKSPACE)                                                                                  \
  X(partials, PARTIALS)                                                                                    \
  X(row_partials, ROW_PARTIALS)                                                                            \
  X(constant, CONSTANT) /* the number `index` itself */                                                    \
  X(sharers, SHARERS)   /* groups of threads that share what one row of a result was broadcast to */

enum class Source {
#define TRTC_SOURCE(name, python) name,
  TRTC_SOURCES(TRTC_SOURCE)
#undef TRTC_SOURCE
};

struct FieldFill {
  Source source;
  int offset;
  int index;
  int second;
};

constexpr int kMaxParameterBytes = 512;

// One launch of a plan. The first is over the rows; a later one has CTAs for the columns in x, and in y for the
// elements of a symbol or the rows of an array; or CTAs for the elements of a symbol in x.
struct Stage {
  std::shared_ptr<Launcher> launcher;
  LaunchShape shape;  // but for the grid
  std::vector<FieldFill> fields;
  int64_t columns_per_cta = 0;
  int per = -1;            // the symbol
  int rows_of = -1;        // the array
  int64_t row_groups = 0;  // of threads in a cluster, or a CTA without one, that share the rows of `rows_of`
};

struct Plan {
  static constexpr int64_t kAnyGroups = INT32_MAX;

  std::vector<Stage> stages;
  int64_t rows_per_cta = 1;
  int64_t elements_per_cta = 0;  // instead of whole rows: so many, counted in vectors; 0: a CTA has rows
  int64_t ctas_per_row = 1;
  int64_t multiprocessors = 1;
  int64_t max_groups = kAnyGroups;  // of CTAs that share rows, in one grid; fewer than kAnyGroups are persistent
  int64_t workspace_bytes = 0;      // per group, zeroed before the first launch
  int64_t partial_bytes = 0;        // per group, from the first launch to the others
  int64_t row_bytes = 0;            // per row, likewise
  int64_t turn_bytes = 0;  // of partial sums that take as long as a row more of a persistent launch; 0: unknown
  int64_t vec_size = 1;    // in elements: rows that are whole aligned vectors of it have one plan, and others another
  int whole = -1;  // the symbol next to the columns of which each group gets the same elements in all of its rows
};
