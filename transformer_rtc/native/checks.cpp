// SPDX-License-Identifier: Apache-2.0
// What is checked of a call's arrays, and what follows of how they lie.
#include <algorithm>

#include "errors.hpp"
#include "grid.hpp"
#include "operator.hpp"

namespace {

// A dimension's size where the first array is so.
int64_t size_of(const Size& size, const View& first, const Layout& layout) {
  if (size.symbol == kConstant) return size.multiple;
  return layout.multiple(size) * (size.symbol == 0 ? layout.sizes[0] : first.shape[first.ndim - 1 - size.symbol]);
}

// Whether the first array has the dimensions that a shape names.
bool exists(const Shape& shape, const View& first) {
  for (const Size& size : shape.sizes) {
    if (size.symbol >= first.ndim) return false;
  }
  return true;
}

std::vector<int64_t> sizes_of(const Shape& shape, const View& first, const Layout& layout) {
  std::vector<int64_t> sizes;
  if (shape.leading) sizes.assign(first.shape, first.shape + first.ndim - 1);
  for (const Size& size : shape.sizes) sizes.push_back(size_of(size, first, layout));
  return sizes;
}

// In numbers; the first array has all dimensions that the shape names.
std::string text_of(const Shape& shape, const View& first, const Layout& layout) {
  const std::vector<int64_t> sizes = sizes_of(shape, first, layout);
  return shape_text(sizes.data(), static_cast<int>(sizes.size()));
}

// Whether a shape is of named leading dimensions alone, which the first array may not have.
bool of_leading(const Shape& shape) {
  bool found = !shape.leading && !shape.sizes.empty();
  for (const Size& size : shape.sizes) found = found && size.symbol > 0;
  return found;
}

}  // namespace

bool Operator::has_shape(const Shape& shape, const View& view, const View& first, const Layout& layout) const {
  const int leading = shape.leading ? first.ndim - 1 : 0;
  // One element for each row may have a last dimension of its own, as keepdim=True leaves it.
  const bool kept = shape.leading && shape.sizes.empty() && view.ndim == first.ndim && view.last() == 1;
  if (!kept && view.ndim != leading + static_cast<int>(shape.sizes.size())) return false;
  if (!exists(shape, first)) return false;
  for (int i = 0; i < leading; ++i) {
    if (view.shape[i] != first.shape[i]) return false;
  }
  for (size_t i = 0; i < shape.sizes.size(); ++i) {
    if (view.shape[leading + i] != size_of(shape.sizes[i], first, layout)) return false;
  }
  return true;
}

// What a message says of the shape that an array must have.
std::string Operator::expected(const Shape& shape, const View& first, const Layout& layout) const {
  const std::string given = ", whose shape is " + first.shape_text();
  if (of_leading(shape) && !shape.words.empty()) return shape.words + given;
  if (exists(shape, first)) {
    return "the shape " + text_of(shape, first, layout) + (shape.words.empty() ? "" : ", " + shape.words);
  }
  std::string names;
  for (const Size& size : shape.sizes) {
    const std::string name = size.symbol == kConstant ? "" : symbols_[size.symbol].name;
    const std::string number = size.multiple > 1 || name.empty() ? std::to_string(size.multiple) : "";
    names += (names.empty() ? "" : ", ") + number + (number.empty() || name.empty() ? "" : "*") + name;
  }
  return "the shape [" + names + "] of the dimensions of " + arguments_[0].called + given;
}

void Operator::check_view(const Array& array, const View& view, const View& first, Layout& layout) const {
  const Argument& argument = *array.argument;
  const std::string& name = argument.called;
  const std::string& first_name = arguments_[0].called;
  check_dtype(argument, view.dtype);
  if (view.device != first.device) {
    refuse(name, "must be on the device of " + first_name + ", cuda:" + std::to_string(first.device) +
                     "; it is on cuda:" + std::to_string(view.device));
  }
  if (view.size() > 0 && reinterpret_cast<uintptr_t>(view.data) % dtype_bytes(view.dtype) != 0) {
    refuse(name, "must be aligned to its elements of " + std::to_string(dtype_bytes(view.dtype)) + " bytes");
  }
  if (view.size() > 0 && view.data == nullptr) refuse(name, "has elements, but no memory");
  if (array.written && view.read_only) refuse(name, "is read-only");

  if (array.placement == Placement::rows) return check_rows(array, view, first, layout);
  if (array.placement == Placement::broadcast) return check_broadcast(array, name, view, first, layout);
  if (array.placement == Placement::element) {
    if (view.ndim > 1 || view.size() != 1) refuse(name, "must have the shape () or (1,); it has " + view.shape_text());
  } else if (argument.shapes.size() > 1) {
    check_variant(array, view, first, layout);
  } else if (!has_shape(argument.shapes[0], view, first, layout)) {
    refuse(name, "must have " + expected(argument.shapes[0], first, layout) + "; it has " + view.shape_text());
  }
  if (!view.contiguous()) refuse(name, "must be contiguous: pass " + name + ".contiguous()");
}

void Operator::check_rows(const Array& array, const View& view, const View& first, const Layout& layout) const {
  const std::string& name = array.argument->called;
  const Shape& shape = array.argument->shapes[0];
  if (&view != &first && !has_shape(shape, view, first, layout)) {
    const std::string& first_name = arguments_[0].called;
    const bool same = layout.value(array.width) == first.last();
    const std::string whose = broadcasts_.empty() ? "of " + first_name : "that the inputs are broadcast to";
    refuse(name, (same ? "must have the shape " + whose + ", " + first.shape_text()
                       : "must have the shape " + text_of(shape, first, layout) + ", as " + first_name + " has " +
                             first.shape_text()) +
                     "; it has " + view.shape_text());
  }
  const bool repeats = view.stride(view.ndim - 1) == 0 && is_broadcast(&array - arrays_.data());
  if (view.last() > 1 && view.size() > 0 && view.stride(view.ndim - 1) != 1 && !repeats) {
    refuse(name, "must be contiguous in its last dimension; there its stride is " +
                     std::to_string(view.stride(view.ndim - 1)) + ": pass " + name + ".contiguous()");
  }
}

void Operator::check_variant(const Array& array, const View& view, const View& first, Layout& layout) const {
  const std::string& name = array.argument->called;
  if (layout.pattern != nullptr) {
    if (!view.same_shape(*layout.pattern)) {
      refuse(name, "must have the shape of " + *layout.pattern_name + ", " + layout.pattern->shape_text() +
                       "; it has " + view.shape_text());
    }
    return;
  }
  const std::vector<Shape>& shapes = array.argument->shapes;
  layout.variant = has_shape(shapes[1], view, first, layout) ? 1 : 0;
  if (layout.variant == 0 && !has_shape(shapes[0], view, first, layout)) {
    refuse(name,
           "must have the shape " + text_of(shapes[0], first, layout) + ", " + shapes[0].words +
               (exists(shapes[1], first) ? ", or " + text_of(shapes[1], first, layout) + ", " + shapes[1].words : "") +
               "; it has " + view.shape_text());
  }
  layout.pattern = &view;
  layout.pattern_name = &name;
}

void Operator::check_broadcast(const Array& array, const std::string& name, const View& view, const View& first,
                               Layout& layout) const {
  const int64_t width = layout.value(array.width);
  bool broadcasts = view.ndim >= 1 && view.ndim <= first.ndim && view.last() == width;
  const int missing = first.ndim - view.ndim;  // its leading dimensions
  for (int i = 0; i + 1 < view.ndim && broadcasts; ++i) {
    broadcasts = view.shape[i] == first.shape[missing + i] || view.shape[i] == 1;
  }
  if (!broadcasts) {
    refuse(name, "must have the shape of " + arguments_[0].called + ", " + first.shape_text() +
                     ", or one that is broadcast to it along dimensions before the last; it has " + view.shape_text());
  }
  if (view.size() > 0 && width > 1 && view.stride(view.ndim - 1) != 1) {
    refuse(name, "must be contiguous in its last dimension; there its stride is " +
                     std::to_string(view.stride(view.ndim - 1)) + ": pass " + name + ".contiguous()");
  }
  const auto stride = [&](int dimension) {  // of the rows' shape
    const int own = dimension - missing;
    return own < 0 || view.shape[own] == 1 ? int64_t{0} : view.stride(own);
  };
  BroadcastStrides& strides = layout.broadcast[&array - arrays_.data()];
  const int named = static_cast<int>(symbols_.size());
  for (int symbol = 1; symbol < named && symbol < first.ndim; ++symbol) {
    strides.of[symbol] = stride(first.ndim - 1 - symbol);
  }
  // Those before the named ones are counted as one.
  int64_t extent = 1;
  for (int dimension = first.ndim - 1 - named; dimension >= 0; --dimension) {
    if (first.shape[dimension] == 1) continue;
    if (extent == 1) {
      strides.leading = stride(dimension);
    } else if (stride(dimension) != strides.leading * extent) {
      // The named ones and the columns may stay as they are.
      std::vector<int64_t> shape(first.shape, first.shape + first.ndim - named);
      for (int own = first.ndim - named - missing; own < view.ndim; ++own)
        shape.push_back(own < 0 ? 1 : view.shape[own]);
      refuse(name, "must have dimensions before the " + symbols_.back().name +
                       " that collapse to one stride; its shape is " + view.shape_text() +
                       ": expand these alone, and pass a contiguous array of " +
                       shape_text(shape.data(), static_cast<int>(shape.size())));
    }
    extent *= first.shape[dimension];
  }
}

// Of a result that has the shape of an array which is broadcast: its own strides.
void Operator::check_result_shape(const Call& call, const Array& array, Layout& layout) const {
  const Array& like = arrays_[array.argument->shape_of];
  if (call.objects[array.argument->shape_of] == nullptr) {
    refuse(array.argument->called, "needs " + like.argument->called + "; it is None");
  }
  if (array.placement != Placement::broadcast) return;
  View dense = call.views[array.argument->shape_of];
  dense.strides = nullptr;
  check_broadcast(array, like.argument->called, dense, call.views[0], layout);
}

// Checks how many rows and columns there are.
void Operator::check_counts(const Call& call, const Layout& layout) const {
  const View& first = call.views[0];
  const std::string& first_name = arguments_[0].called;
  const int64_t rows = layout.geometry.rows;
  if (layout.geometry.inner_count > 1 && rows > INT32_MAX) {
    refuse(first_name,
           "has more than 2^31 - 1 rows, so its leading dimensions must collapse to one stride: "
           "pass a contiguous array");
  }
  if (call.word != nullptr && layout.sizes[call.word->equal[0]] != layout.sizes[call.word->equal[1]]) {
    refuse(call.choice->called + "='" + call.word->text + "'",
           call.word->reason + "; the shape of " + first_name + " is " + first.shape_text());
  }
  if (rows > INT32_MAX && symbols_.size() > 1) {
    bool told_apart = call.flags != 0;
    for (size_t i = 0; i < arrays_.size(); ++i) {
      const std::vector<Shape>& shapes = arrays_[i].argument->shapes;
      told_apart |= call.objects[i] != nullptr &&
                    (arrays_[i].placement == Placement::broadcast || (shapes.size() == 1 && of_leading(shapes[0])));
    }
    if (told_apart) {
      refuse(first_name, "may have up to 2^31 - 1 rows where they are told apart by their " + symbols_[1].noun);
    }
  }
  if (layout.variant == 0) return;
  for (size_t symbol = 1; symbol < symbols_.size(); ++symbol) {
    if (symbols_[symbol].conditional && (rows > INT32_MAX || layout.sizes[symbol] > kMostInY)) {
      const std::string &noun = symbols_[symbol].noun, &name = symbols_[symbol].name;
      refuse(*layout.pattern_name, "may have a row for each " + noun + " up to 65535 " + name +
                                       " and 2^31 - 1 rows of " + first_name + "; there are " +
                                       std::to_string(layout.sizes[symbol]) + " " + name + " and " +
                                       std::to_string(rows) + " rows");
    }
  }
}

bool Operator::is_broadcast(int64_t array) const {
  return std::find(broadcasts_.begin(), broadcasts_.end(), array) != broadcasts_.end();
}

// Gives arrays that are broadcast to one shape that shape, and finds the data type that theirs are promoted to.
void Operator::broadcast_rows(Call& call) const {
  int ndim = 0;
  bool same = true;
  DtypeId promoted_to[2] = {};  // of arrays with dimensions, and of those without
  bool promotes = true;
  for (int i : broadcasts_) {
    const View& view = call.views[i];
    ndim = std::max(ndim, view.ndim);
    same = same && view.same_shape(call.views[0]);
    DtypeId& to = promoted_to[view.ndim == 0];
    to = to == 0 ? view.dtype : promoted(to, view.dtype);
    promotes = promotes && to != 0;
  }
  call.promoted = promotes ? promoted_with_scalars(promoted_to[0], promoted_to[1]) : 0;
  if (same) return;
  call.expanded.assign(ndim * (1 + broadcasts_.size()), 1);
  int64_t *const shape = call.expanded.data(), *strides = shape;
  for (int i : broadcasts_) {
    const View& view = call.views[i];
    for (int own = 0; own < view.ndim; ++own) {
      int64_t& extent = shape[ndim - view.ndim + own];
      if (view.shape[own] == 1 || view.shape[own] == extent) continue;
      if (extent != 1) {
        refuse(arrays_[i].argument->called, "must have a shape that is broadcast with that of " + arguments_[0].called +
                                                ", " + call.views[0].shape_text() + "; it has " + view.shape_text());
      }
      extent = view.shape[own];
    }
  }
  for (int i : broadcasts_) {
    View& view = call.views[i];
    strides += ndim;
    for (int dimension = 0; dimension < ndim; ++dimension) {
      const int own = dimension - (ndim - view.ndim);
      const bool repeats = own < 0 || (view.shape[own] == 1 && shape[dimension] != 1);
      strides[dimension] = repeats ? 0 : view.stride(own);
    }
    view.ndim = ndim;
    view.shape = shape;
    view.strides = strides;
  }
}

bool Operator::wants_row_results(const Call& call) const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Argument& argument = *arrays_[i].argument;
    if (call.wanted[i] && argument.kind == Kind::result && argument.shapes[0].sizes.empty()) return true;
  }
  return false;
}

// What Layout::one_row says.
int64_t Operator::columns_as_one_row(const Call& call, const Layout& layout) const {
  const int64_t columns = layout.sizes[0], rows = layout.geometry.rows;
  if (!elementwise_ || layout.geometry.inner_count > 1 || rows == 0 || rows > kMostColumns / columns) return 0;
  if (wants_row_results(call)) return 0;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (call.objects[i] == nullptr && !call.wanted[i]) continue;
    // One element for each column belongs to every row.
    if (arrays_[i].placement != Placement::rows && arrays_[i].by_columns) return 0;
    if (arrays_[i].placement != Placement::rows) continue;
    const RowStrides& strides = layout.strides[i];
    const bool is_one_element = strides.column == 0 && strides.outer == 0;
    // What is allocated has no gaps.
    const bool is_dense = layout.value(arrays_[i].width) == columns && strides.column == 1 &&
                          (call.objects[i] == nullptr || rows == 1 || strides.outer == columns);
    if (!is_one_element && !is_dense) return 0;
  }
  return rows * columns;
}

DtypeId Operator::promoted_dtype(const Call& call, const Argument& output) const {
  if (call.promoted != 0) return call.promoted;
  std::string names, dtypes;
  for (int i : broadcasts_) {
    const std::string separator = names.empty() ? "" : " and ";
    names += separator + arrays_[i].argument->called;
    dtypes += separator + dtype_name(call.views[i].dtype);
  }
  refuse(names, "are " + dtypes + ", which torch promotes to no type: give the data type of " + output.called);
}

Layout Operator::check(Call& call) const {
  if (!broadcasts_.empty()) broadcast_rows(call);
  const View& first = call.views[0];
  const std::string& first_name = arguments_[0].called;
  if (first.ndim < 1) refuse(first_name, "must have at least one dimension; it is a scalar");
  Layout layout;
  layout.split = split_by_ >= 0 && call.objects[split_by_] != nullptr;
  const int64_t multiple = layout.multiple(arrays_[0].width);
  layout.sizes[0] = first.last() / multiple;
  if (layout.sizes[0] * multiple != first.last()) {
    refuse(first_name, "must have a multiple of " + std::to_string(multiple) +
                           " elements in its last dimension; it has " + std::to_string(first.last()));
  }
  const View* row_views[kMaxArrays];
  int row_index[kMaxArrays], row_count = 0, results = 0;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& array = arrays_[i];
    const Argument& argument = *array.argument;
    const View& view = call.views[i];
    results += call.wanted[i];
    if (call.objects[i] != nullptr) {
      if (array.wanted_by != nullptr && !call.wanted[i]) {
        refuse(argument.called, "was given, but " + array.wanted_by->name + " is False");
      }
      if (call.dtypes[i] != 0 && call.dtypes[i] != view.dtype) {
        refuse(argument.called,
               "is " + dtype_name(view.dtype) + " where " + dtype_name(call.dtypes[i]) + " was asked for");
      }
      call.dtypes[i] = view.dtype;
      check_view(array, view, first, layout);
      if (array.placement == Placement::rows) {
        row_views[row_count] = &view;
        row_index[row_count++] = static_cast<int>(i);
      }
    } else if (call.wanted[i]) {
      DtypeId& dtype = call.dtypes[i];
      if (dtype == 0 && argument.like >= 0) dtype = call.dtypes[argument.like];
      if (dtype == 0 && !broadcasts_.empty()) dtype = promoted_dtype(call, argument);
      // Where what it is like was not given, too.
      if (dtype == 0) dtype = argument.dtypes.size() == 1 ? argument.dtypes[0] : first.dtype;
      check_dtype(argument, dtype);
    } else {
      call.dtypes[i] = 0;
    }
  }
  if (results == 0) {
    std::string flags;
    for (const Array& array : arrays_) {
      if (array.wanted_by == nullptr && array.given) continue;
      flags += (flags.empty() ? "" : ", ") + (array.given ? array.wanted_by->name : array.argument->called);
    }
    throw_argument_error(name_ + ": nothing is asked for; one of " + flags + " must be True");
  }

  const int64_t widest = layout.split ? 1 : widest_;
  const bool is_empty = elementwise_ && layout.sizes[0] == 0 && !wants_row_results(call);
  if ((layout.sizes[0] < 1 && !is_empty) || layout.sizes[0] > kMostColumns / widest) {
    const int64_t most = kMostColumns / widest * multiple;
    refuse(first_name, "must have 1 to " + (most == kMostColumns ? "2^30" : std::to_string(most)) +
                           " elements in its last dimension; it has " + std::to_string(first.last()));
  }
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (call.wanted[i] && arrays_[i].argument->shape_of >= 0) check_result_shape(call, arrays_[i], layout);
  }
  RowStrides strides[kMaxArrays];
  if (!collapse_rows(row_views, row_count, layout.geometry, strides)) {
    std::string names;
    for (int i = 0; i < row_count; ++i) {
      names += (names.empty() ? "" : " and ") + arrays_[row_index[i]].argument->called;
    }
    const bool repeats = !call.expanded.empty();
    refuse(names, "must have leading dimensions that collapse to at most two strides; the shape is " +
                      first.shape_text() +
                      (repeats ? ": pass contiguous arrays of that shape" : ": pass a contiguous array"));
  }
  for (int i = 0; i < row_count; ++i) layout.strides[row_index[i]] = strides[i];
  for (int symbol = 1; symbol < static_cast<int>(symbols_.size()) && symbol < first.ndim; ++symbol) {
    const bool counts = !symbols_[symbol].conditional || layout.variant == 1;
    if (counts) layout.sizes[symbol] = first.shape[first.ndim - 1 - symbol];
  }
  check_counts(call, layout);
  if (is_empty) layout.geometry.rows = 0;
  layout.one_row = columns_as_one_row(call, layout);
  return layout;
}
