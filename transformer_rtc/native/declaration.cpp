// SPDX-License-Identifier: Apache-2.0
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

[[noreturn]] void refuse(const Argument& argument, const std::string& what) {
  throw std::invalid_argument(argument.name + " " + what);
}

void check_shape(const Argument& argument, const Shape& shape, int symbols) {
  if (shape.leading ? shape.sizes.size() > 1 : shape.sizes.size() > kMaxSizes)
    refuse(argument, "has too many dimensions");
  for (const Size& size : shape.sizes) {
    if (size.symbol < kConstant || size.symbol >= symbols) refuse(argument, "has an unknown symbol");
    if (size.multiple < 1) refuse(argument, "has a multiple below 1");
  }
}

Array array_of(const Argument& argument, int position, int number, int symbols) {
  if (argument.shapes.empty() || argument.shapes.size() > 2) refuse(argument, "has no shape, or more than two");
  if (argument.dtypes.empty()) refuse(argument, "has no data type");
  for (int other : {argument.like, argument.shape_of, argument.wanted_with}) {
    if (other < -1 || other >= number) refuse(argument, "is like an array behind it");
  }
  for (const Shape& shape : argument.shapes) check_shape(argument, shape, symbols);
  const Kind kind = argument.kind;
  Array array{};
  array.argument = &argument;
  array.position = position;
  array.placement = placement_of(argument);
  array.given = kind != Kind::result;
  array.input = kind == Kind::input;
  array.written = kind == Kind::output || kind == Kind::update;
  array.required = kind == Kind::input && !argument.optional;
  for (const Shape& shape : argument.shapes) {
    array.by_columns = !shape.sizes.empty() && shape.sizes.back().symbol == 0;
  }
  array.sums = kind == Kind::result && (!argument.shapes[0].leading || argument.shape_of >= 0);
  if (array.placement == Placement::rows || array.placement == Placement::broadcast) {
    if (argument.shapes.size() > 1 || argument.shapes[0].sizes.size() != 1)
      refuse(argument, "has rows of no one width");
    array.width = argument.shapes[0].sizes[0];
  }
  if (kind == Kind::result && array.placement == Placement::broadcast && argument.shape_of < 0) {
    refuse(argument, "is a broadcast result, which has the shape of another array");
  }
  return array;
}

// Checks the numbers by which arguments that are no arrays name others.
void check_value(const Argument& argument, int arguments, int arrays, int symbols) {
  for (int array : argument.of) {
    if (array < 0 || array >= arrays) refuse(argument, "is about an unknown array");
  }
  if (argument.needs < -1 || argument.needs >= arguments) refuse(argument, "needs an unknown argument");
  for (const Word& word : argument.words) {
    for (int symbol : word.equal) {
      if (symbol < kConstant || symbol >= symbols) refuse(argument, "has an unknown symbol");
    }
  }
}

}  // namespace

std::vector<Array> arrays_of(const std::vector<Argument>& arguments, const std::vector<Symbol>& symbols) {
  const int symbol_count = static_cast<int>(symbols.size());
  std::vector<Array> arrays;
  int choices = 0;  // whose words ask for equal sizes: a call keeps one
  for (size_t position = 0; position < arguments.size(); ++position) {
    const Argument& argument = arguments[position];
    const int number = static_cast<int>(arrays.size());
    if (is_array(argument.kind)) arrays.push_back(array_of(argument, static_cast<int>(position), number, symbol_count));
    choices += std::any_of(argument.words.begin(), argument.words.end(),
                           [](const Word& word) { return word.equal[0] != kConstant; });
  }
  const auto is_first = [](const Array& array) {
    return array.position == 0 && array.placement == Placement::rows && array.required && array.width.symbol == 0;
  };
  if (arrays.empty() || !is_first(arrays[0]) || arrays.size() > kMaxArrays) {
    throw std::invalid_argument("an operator's first argument is an array of rows, and it has at most " +
                                std::to_string(kMaxArrays) + " arrays");
  }
  if (choices > 1) throw std::invalid_argument("more than one choice asks for equal sizes");
  for (const Argument& argument : arguments) {
    check_value(argument, static_cast<int>(arguments.size()), static_cast<int>(arrays.size()), symbol_count);
    if (argument.kind != Kind::output_wanted) continue;
    for (int output : argument.of) arrays[output].wanted_by = &argument;
  }
  return arrays;
}
