// SPDX-License-Identifier: Apache-2.0
#include "fields.hpp"

#include <cstring>

namespace {

// Of what is divided by, only: where rows are told apart they are fewer than 2^31.
Divisor divide_by_count(int64_t count) {
  return count > 1 && count <= INT32_MAX ? divide_by(static_cast<uint32_t>(count)) : Divisor{};
}

}  // namespace

int64_t rows_of(const Call& call, const Array& array) {
  const View& like = call.views[array.argument->shape_of];
  return like.size() / like.last();
}

void fill(char* params, const std::vector<FieldFill>& fields, const std::vector<Array>& arrays,
          const LaunchValues& values) {
  const Call& call = values.call;
  const Layout& layout = values.layout;
  const Geometry& geometry = layout.geometry;
  const Divisor inner = divide_by_count(geometry.inner_count);
  // A size is divided by through two fields.
  int divided = -1;
  Divisor divisor{};
  for (const FieldFill& field : fields) {
    const int i = field.index;
    const auto put = [&](auto value) { std::memcpy(params + field.offset, &value, sizeof(value)); };
    const auto divide = [&] {
      if (divided != i) divisor = divide_by_count(layout.sizes[i]);
      divided = i;
      return divisor;
    };
    switch (field.source) {
      case Source::data:
        put(call.views[i].data);
        break;
      case Source::outer_stride:
        put(layout.strides[i].outer);
        break;
      case Source::inner_stride:
        put(geometry.inner_count > 1 ? layout.strides[i].inner : int64_t{0});
        break;
      case Source::column_stride:
        put(static_cast<int32_t>(layout.strides[i].column));
        break;
      case Source::stride:
        put(layout.broadcast[i].of[field.second]);
        break;
      case Source::leading_stride:
        put(layout.broadcast[i].leading);
        break;
      case Source::dtype:
        put(static_cast<int32_t>(call.dtypes[i]));
        break;
      case Source::array_rows:
        put(rows_of(call, arrays[i]));
        break;
      case Source::real:
        put(static_cast<float>(call.reals[i]));
        break;
      case Source::integer:
        put(call.integers[i]);
        break;
      case Source::flag:
        put(static_cast<int32_t>(call.flags >> i & 1));
        break;
      case Source::size:
        put(static_cast<uint32_t>(i == 0 ? layout.launched_columns() : layout.sizes[i]));
        break;
      case Source::magic:
        put(divide().magic);
        break;
      case Source::shift:
        put(divide().shift);
        break;
      case Source::difference:
        put(static_cast<int32_t>(layout.sizes[i] - layout.sizes[field.second]));
        break;
      case Source::constant:
        put(static_cast<int32_t>(field.index));
        break;
      case Source::rows:
        put(layout.launched_rows());
        break;
      case Source::inner_count:
        put(static_cast<uint32_t>(geometry.inner_count));
        break;
      case Source::inner_magic:
        put(inner.magic);
        break;
      case Source::inner_shift:
        put(inner.shift);
        break;
      case Source::groups:
        put(static_cast<int32_t>(values.groups));
        break;
      case Source::workspace:
        put(values.workspace);
        break;
      case Source::partials:
        put(values.partials);
        break;
      case Source::row_partials:
        put(values.row_partials);
        break;
      case Source::sharers:
        put(static_cast<int32_t>(values.sharers));
        break;
    }
  }
}
