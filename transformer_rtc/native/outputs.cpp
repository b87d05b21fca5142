// SPDX-License-Identifier: Apache-2.0
// Outputs and results: what is allocated, and what a simulated launch is told of all arrays.
#include <pybind11/pybind11.h>

#include "errors.hpp"
#include "operator.hpp"

PyObject* Outputs::release() {
  PyObject* result = objects[0];
  if (count > 1) {
    result = PyTuple_New(count);
    if (result == nullptr) throw PythonErrorSet{};
    for (int i = 0; i < count; ++i) PyTuple_SET_ITEM(result, i, objects[i]);
  }
  count = 0;
  return result;
}

PyObject* Allocator::workspace(int64_t bytes, int device, CUstream, char*& data) {
  constexpr DtypeId uint8 = 1 << 8 | 8;
  return allocate(1, &bytes, uint8, device, data);
}

namespace {

// The shape of what is allocated for an array.
class MadeShape {
 public:
  MadeShape(const Array& array, const Call& call, const Layout& layout) {
    const View& first = call.views[0];
    const Argument& argument = *array.argument;
    if (argument.shape_of >= 0) {
      const View& like = call.views[argument.shape_of];
      ndim = like.ndim;
      shape = like.shape;
      return;
    }
    const Shape& of =
        argument.shapes[argument.shapes.size() > 1 && array.placement == Placement::dense ? layout.variant : 0];
    if (of.leading && (of.sizes.empty() || layout.value(of.sizes[0]) == first.last())) {
      ndim = first.ndim - 1 + static_cast<int>(of.sizes.size());
      shape = first.shape;
      return;
    }
    if (!of.leading) {
      ndim = static_cast<int>(of.sizes.size());
      for (int i = 0; i < ndim; ++i) few_[i] = layout.value(of.sizes[i]);
      shape = few_;
      return;
    }
    many_.assign(first.shape, first.shape + first.ndim - 1);
    many_.push_back(layout.value(of.sizes[0]));
    ndim = first.ndim;
    shape = many_.data();
  }
  MadeShape(const MadeShape&) = delete;
  MadeShape& operator=(const MadeShape&) = delete;

  int ndim;
  const int64_t* shape;

 private:
  int64_t few_[kMaxSizes];
  std::vector<int64_t> many_;
};

}  // namespace

void Operator::make_outputs(Call& call, Layout& layout, Allocator& allocator, Outputs& outputs) const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (!call.wanted[i]) continue;
    if (call.objects[i] != nullptr) {
      outputs.objects[outputs.count++] = Py_NewRef(call.objects[i]);
      continue;
    }
    const MadeShape made(arrays_[i], call, layout);
    outputs.objects[outputs.count] =
        allocator.allocate(made.ndim, made.shape, call.dtypes[i], call.views[0].device, call.views[i].data);
    ++outputs.count;
    if (reinterpret_cast<uintptr_t>(call.views[i].data) % kVectorAlignment != 0) {
      throw PackageError{"AllocationError", name_ + ": the framework allocated " + arrays_[i].argument->called +
                                                " at an address that is no multiple of " +
                                                std::to_string(kVectorAlignment) + " bytes"};
    }
    if (arrays_[i].placement == Placement::rows) {
      const int64_t width = layout.value(arrays_[i].width);
      layout.strides[i] = {layout.geometry.inner_count * width, width};
    }
  }
}

int64_t Operator::elements(const Call& call, const Layout& layout, size_t array) const {
  if (call.objects[array] != nullptr) return call.views[array].size();
  const MadeShape made(arrays_[array], call, layout);
  return View{nullptr, made.ndim, made.shape}.size();
}

void Operator::zero_sums(const Call& call, const Layout& layout, const Launcher& launcher, CUstream stream) const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const int64_t count = call.wanted[i] && arrays_[i].sums ? elements(call, layout, i) : 0;
    if (count > 0) launcher.zero(call.views[i].data, count * dtype_bytes(call.dtypes[i]), stream);
  }
}

std::vector<Memory> Operator::memory(const Call& call, const Layout& layout) const {
  const Geometry& geometry = layout.geometry;
  std::vector<Memory> memory;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& array = arrays_[i];
    if (call.objects[i] == nullptr && !call.wanted[i]) continue;
    const bool update = array.argument->kind == Kind::update;
    Memory rows{&array.argument->name, call.views[i].data,   dtype_bytes(call.dtypes[i]), 1, 1, 0, 1, 0,
                !array.input,          array.input || update};
    if (array.placement == Placement::rows) {
      rows.columns = layout.strides[i].column == 0 ? 1 : layout.value(array.width);
      rows.outer_count = geometry.rows / geometry.inner_count;
      rows.outer_stride = layout.strides[i].outer;
      rows.inner_count = geometry.inner_count;
      rows.inner_stride = layout.strides[i].inner;
    } else if (array.placement == Placement::broadcast && array.input) {
      const Extent extent = extent_of_strided(call.views[i]);
      rows.data = const_cast<char*>(extent.low);
      rows.columns = (extent.high - extent.low) / dtype_bytes(call.dtypes[i]);
    } else {
      rows.columns = elements(call, layout, i);
    }
    memory.push_back(rows);
  }
  return memory;
}
