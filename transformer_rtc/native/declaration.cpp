#include "declaration.hpp"

#include <algorithm>
#include <stdexcept>

bool is_array(Kind kind) {
  return kind == Kind::input || kind == Kind::output || kind == Kind::update || kind == Kind::result;
}

namespace {

Placement placement_of(const Argument& argument) {
  const auto& shapes = argument.shapes;
  if (argument.broadcast) return Placement::broadcast;
  if (shapes.size() == 2 && shapes[0].sizes.empty() && !shapes[0].leading) return Placement::element;
  return shapes[0].leading && !shapes[0].sizes.empty() ? Placement::rows : Placement::dense;
}

}  // namespace

std::vector<Array> arrays_of(const std::vector<Argument>& arguments, const std::vector<Symbol>& symbols) {
  std::vector<Array> arrays;
  for (size_t position = 0; position < arguments.size(); ++position) {
    const Argument& argument = arguments[position];
    const Kind kind = argument.kind;
    if (!is_array(kind)) continue;
    const int number = static_cast<int>(arrays.size());
    if (argument.shapes.empty() || argument.shapes.size() > 2 || argument.dtypes.empty() || argument.like >= number ||
        argument.shape_of >= number || argument.wanted_with >= number) {
      throw std::invalid_argument(argument.name + " has no shape, more than two, or is like an array behind it");
    }
    Array array{};
    array.argument = &argument;
    array.position = static_cast<int>(position);
    array.placement = placement_of(argument);
    array.given = kind != Kind::result;
    array.input = kind == Kind::input;
    array.written = kind == Kind::output || kind == Kind::update;
    array.required = kind == Kind::input && !argument.optional;
    array.sums = kind == Kind::result && (!argument.shapes[0].leading || argument.shape_of >= 0);
    for (const Shape& shape : argument.shapes) {
      for (const Size& size : shape.sizes) {
        if (size.symbol >= static_cast<int>(symbols.size())) throw std::invalid_argument("an unknown symbol");
      }
      if (shape.leading && shape.sizes.size() > 1) {
        throw std::invalid_argument(argument.name + " has more than one dimension behind the leading ones");
      }
    }
    if (array.placement == Placement::rows || array.placement == Placement::broadcast) {
      if (argument.shapes.size() > 1) throw std::invalid_argument("rows have one shape");
      if (!argument.shapes[0].sizes.empty()) array.width = argument.shapes[0].sizes.back();
    }
    if (kind == Kind::result && array.placement == Placement::broadcast && argument.shape_of < 0) {
      throw std::invalid_argument(argument.name + " is a broadcast result, which has the shape of another array");
    }
    arrays.push_back(array);
  }
  const auto is_first = [](const Array& array) {
    return array.position == 0 && array.placement == Placement::rows && array.required && array.width.symbol == 0;
  };
  if (arrays.empty() || !is_first(arrays[0]) || arrays.size() > kMaxArrays) {
    throw std::invalid_argument("an operator's first argument is an array of rows, and it has at most " +
                                std::to_string(kMaxArrays) + " arrays");
  }
  for (const Argument& argument : arguments) {
    if (argument.kind != Kind::output_wanted) continue;
    for (int output : argument.of) arrays.at(output).wanted_by = &argument;
  }
  return arrays;
}
