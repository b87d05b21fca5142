// SPDX-License-Identifier: Apache-2.0
// What an operator declares: its arguments in the order of the call, and the shapes of its arrays in symbols.
#pragma once

#include <string>
#include <vector>

#include "array.hpp"

// The kinds of arguments: name in C++, name in Python.
#define TRTC_KINDS(X)                                                                           \
  X(input, INPUT)                 /* array of the caller's that is read */                      \
  X(output, OUTPUT)               /* array that is written; allocated where None, returned */   \
  X(update, UPDATE)               /* array of the caller's that is read and written, or None */ \
  X(result, RESULT)               /* bool: whether to allocate and return such an array */      \
  X(output_dtype, OUTPUT_DTYPE)   /* data type of outputs and results, or None */               \
  X(output_wanted, OUTPUT_WANTED) /* bool: whether an output is made and returned */            \
  X(real, REAL)                   /* float */                                                   \
  X(integer, INTEGER)             /* int of 32 bits */                                          \
  X(flag, FLAG)                   /* bool that is part of a plan's key */                       \
  X(choice, CHOICE)               /* one of some words, or None; a flag: whether it is given */ \
  X(sm_margin, SM_MARGIN)         /* int: multiprocessors to leave free */                      \
  X(stream, STREAM)               /* stream handle, an object that has one, or None */

enum class Kind {
#define TRTC_KIND(name, python) name,
  TRTC_KINDS(TRTC_KIND)
#undef TRTC_KIND
};

constexpr int kConstant = -1;
constexpr int kMaxSizes = 4;  // of a shape, behind the leading dimensions

// A dimension: a symbol's value times a number, or the number alone.
struct Size {
  int64_t multiple;
  int symbol;  // or kConstant
};

// A shape in symbols. Symbol 0 is the last dimension of the first array, divided by its multiple there; symbol s the
// one that is s before the last, and 1 where the first array has fewer dimensions.
struct Shape {
  bool leading;  // first all dimensions of the first array but its last
  std::vector<Size> sizes;
  std::string words;  // what a message says of it, such as "one element for each column of x"
};

struct Symbol {
  std::string name;
  std::string noun;  // of one element, such as "head"
  // Whether it is 1 unless an array has the second of two shapes, and only that one names it.
  bool conditional;
};

// A word that a choice takes.
struct Word {
  std::string text;
  int equal[2] = {kConstant, kConstant};  // symbols that must have one value then
  std::string reason;                     // what a message says where they have not
};

struct Argument {
  Kind kind = Kind::input;
  std::string name;
  std::string called;  // by the user's function, in messages

  // Of arrays.
  std::vector<Shape> shapes;    // that are accepted; several mean the same one for all arrays with several
  std::vector<DtypeId> dtypes;  // that are accepted
  bool optional = false;        // of an array, or an integer: it may be None
  bool broadcast = false;  // dimensions before the last may be 1 or missing, or, of a result, are those of `shape_of`
  bool rereads = false;    // of a result: a later launch than the one that writes outputs reads the inputs for it
  int like = -1;           // the earlier array whose data type it has by default; the first one where that is absent
  int shape_of = -1;       // of a result: the array whose shape it has
  int wanted_with = -1;    // of a result: by default it is wanted where this array is given

  std::vector<int> of;  // the arrays that a data type or a bool is about

  // Of numbers.
  bool has_minimum = false;
  double minimum = 0;
  int64_t largest = INT32_MAX;  // an integer beyond is taken for it
  std::string noun;             // of an integer, in messages
  int needs = -1;               // the choice that must be given with it
  std::string needs_words;

  std::vector<Word> words;  // of a choice
};

// How an array lies in memory.
enum class Placement {
  rows,       // [..., width]: the leading dimensions of all such arrays collapse alike to two strides
  broadcast,  // a stride for each named leading dimension of the rows, and one for the others
  dense,      // without gaps
  element,    // one element: the shape () or (1,)
};

// What the hot call asks of an array.
struct Array {
  const Argument* argument;
  int position;  // of the argument
  Placement placement;
  bool given;    // it may be the caller's
  bool input;    // the caller's, and read
  bool written;  // into the caller's memory
  bool required;
  bool sums;                            // a result over all rows: zero where there are none
  bool by_columns;                      // its last dimension is the columns, or a multiple: it is read by vectors
  Size width;                           // of a row, of arrays of rows
  const Argument* wanted_by = nullptr;  // null: always
};

bool is_array(Kind kind);
// Throws std::invalid_argument for what no declaration can be.
std::vector<Array> arrays_of(const std::vector<Argument>& arguments, const std::vector<Symbol>& symbols);
