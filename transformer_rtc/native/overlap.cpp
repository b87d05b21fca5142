// SPDX-License-Identifier: Apache-2.0
// Which arrays may share memory.
#include "operator.hpp"

namespace {

Extent span_of(const Array& array, const View& view, const Geometry& geometry, const RowStrides& strides) {
  if (array.placement == Placement::broadcast) return extent_of_strided(view);
  return array.placement == Placement::rows ? extent_of(geometry, view, strides) : extent_of(view);
}

}  // namespace

void Operator::check_overlap(const Call& call, const Layout& layout) const {
  const Geometry& geometry = layout.geometry;
  const auto extent = [&](size_t i) { return span_of(arrays_[i], call.views[i], geometry, layout.strides[i]); };
  const auto given = [&](size_t i) { return call.objects[i] != nullptr && call.views[i].size() > 0; };
  const Argument* reader = nullptr;  // of rows, behind the launch that writes
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (arrays_[i].argument->rereads && call.wanted[i]) reader = arrays_[i].argument;
  }
  for (size_t out = 0; out < arrays_.size(); ++out) {
    if (!arrays_[out].written || !given(out)) continue;
    const std::string& name = arrays_[out].argument->called;
    const View& a = call.views[out];
    const RowStrides& a_strides = layout.strides[out];
    const bool of_rows = arrays_[out].placement == Placement::rows;
    if (of_rows && rows_overlap(geometry, a, a_strides)) refuse(name, "has rows that overlap each other");
    for (size_t other = 0; other < arrays_.size(); ++other) {
      // Of two written arrays, the later one is told.
      if (!given(other) || (arrays_[other].written && other >= out)) continue;
      const std::string& other_name = arrays_[other].argument->called;
      const View& b = call.views[other];
      const RowStrides& b_strides = layout.strides[other];
      if (!of_rows || arrays_[other].placement != Placement::rows) {
        if (extent(out).overlaps(extent(other))) refuse(name, "must not overlap " + other_name);
      } else if (arrays_[other].written) {
        if (arrays_overlap(geometry, a, a_strides, b, b_strides)) refuse(name, "must not overlap " + other_name);
      } else {
        const bool in_place = a.data == b.data && a.dtype == b.dtype && a.last() == b.last() &&
                              a_strides.outer == b_strides.outer && a_strides.inner == b_strides.inner &&
                              a_strides.column == b_strides.column;
        if (reader != nullptr && arrays_overlap(geometry, a, a_strides, b, b_strides)) {
          refuse(name, "must not overlap " + other_name + ", which is read again for " + reader->name);
        }
        if (!in_place && arrays_overlap(geometry, a, a_strides, b, b_strides)) {
          refuse(name, "must be " + other_name + " itself or not overlap it");
        }
      }
    }
  }
}
