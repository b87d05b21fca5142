// SPDX-License-Identifier: Apache-2.0
// What the arguments that are no arrays say: numbers, words, data types, and which outputs are wanted.
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "errors.hpp"
#include "operator.hpp"

namespace py = pybind11;

namespace {

// Python's or numpy's.
bool is_bool(PyObject* value) {
  const char* type = Py_TYPE(value)->tp_name;
  return PyBool_Check(value) || std::strcmp(type, "numpy.bool") == 0 || std::strcmp(type, "numpy.bool_") == 0;
}

// What a message says of a value.
std::string shown(PyObject* value) {
  return py::module_::import("transformer_rtc.errors").attr("shown")(py::handle(value)).cast<std::string>();
}

bool loses_gradient(PyObject* value) {
  return py::module_::import("transformer_rtc.arrays").attr("loses_gradient")(py::handle(value)).cast<bool>();
}

std::string minimum_text(double minimum) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", minimum);
  return text;
}

}  // namespace

void Operator::refuse(const std::string& argument, const std::string& what) const {
  throw_argument_error(name_ + ": " + argument + " " + what);
}

void Operator::refuse_dtype(const Argument& argument, const std::string& given) const {
  std::string names;
  for (DtypeId accepted : argument.dtypes) names += (names.empty() ? "" : ", ") + dtype_name(accepted);
  refuse(argument.called, "must be one of " + names + "; it is " + given);
}

void Operator::check_dtype(const Argument& argument, DtypeId dtype) const {
  for (DtypeId accepted : argument.dtypes) {
    if (accepted == dtype) return;
  }
  refuse_dtype(argument, dtype_name(dtype));
}

DtypeId Operator::dtype_of(const Argument& argument, PyObject* object) {
  PyObject* known = PyDict_GetItemWithError(dtypes_seen_, object);  // borrowed
  if (known == nullptr) {
    PyErr_Clear();  // unhashable: let the slow way say what is wrong
    py::object id;
    try {
      id = py::module_::import("transformer_rtc.arrays").attr("dtype_id")(py::handle(object));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_ValueError)) throw;
      refuse_dtype(argument, shown(object));
    }
    if (PyDict_SetItem(dtypes_seen_, object, id.ptr()) != 0) PyErr_Clear();
    return id.cast<DtypeId>();
  }
  return static_cast<DtypeId>(PyLong_AsLong(known));
}

bool Operator::truth(const Argument& argument, PyObject* value) const {
  if (value == Py_True || value == Py_False) return value == Py_True;
  if (!is_bool(value)) refuse(argument.called, "must be True or False; it is " + shown(value));
  return PyObject_IsTrue(value) == 1;
}

double Operator::real_of(const Argument& argument, PyObject* value) const {
  // A tensor of one element is a number, whose gradient would be lost.
  if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value) && loses_gradient(value)) {
    refuse(argument.called, "is a tensor that requires grad, and is taken as a number: pass its .item()");
  }
  const double number = PyFloat_AsDouble(value);
  if (is_bool(value) || (number == -1.0 && PyErr_Occurred())) {
    const bool too_large = PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    if (too_large) refuse(argument.called, "must be finite in float32; it is " + shown(value));
    refuse(argument.called, std::string("must be a real number; it is of type ") + Py_TYPE(value)->tp_name);
  }
  if (!std::isfinite(static_cast<float>(number))) {
    refuse(argument.called, "must be finite; it is " + std::to_string(static_cast<float>(number)) + " in float32");
  }
  if (argument.has_minimum && number < argument.minimum) {
    refuse(argument.called, argument.minimum == 0
                                ? "must not be negative; it is " + shown(value)
                                : "must be at least " + minimum_text(argument.minimum) + "; it is " + shown(value));
  }
  return number;
}

int32_t Operator::integer_of(const Argument& argument, PyObject* value, PyObject* const* arguments) const {
  if (value == Py_None && argument.optional) return 0;
  if (argument.needs >= 0 && arguments[argument.needs] == Py_None) {
    refuse(argument.called, "needs " + argument.needs_words + "; it is " + shown(value) + " and " +
                                arguments_[argument.needs].called + " is None");
  }
  const auto least = argument.has_minimum ? static_cast<int64_t>(argument.minimum) : int64_t{INT32_MIN};
  // Beyond 64 bits it is the largest or the least number of these.
  int64_t number = PyBool_Check(value) ? INT64_MIN : PyNumber_AsSsize_t(value, nullptr);
  const bool failed = PyErr_Occurred() != nullptr;
  if (number > argument.largest && argument.largest < INT32_MAX) number = argument.largest;
  if (failed || number < least || number > INT32_MAX) {
    PyErr_Clear();
    refuse(argument.called, "must be " + argument.noun + "; it is " + shown(value));
  }
  return static_cast<int32_t>(number);
}

// Returns whether a word is given.
bool Operator::choose(const Argument& argument, PyObject* value, Call& call) const {
  if (value == Py_None) return false;
  if (PyUnicode_Check(value)) {
    for (const Word& word : argument.words) {
      if (PyUnicode_CompareWithASCIIString(value, word.text.c_str()) != 0) continue;
      if (word.equal[0] != kConstant) {
        call.choice = &argument;
        call.word = &word;
      }
      return true;
    }
  }
  std::string words;
  for (const Word& word : argument.words) words += (words.empty() ? "'" : ", '") + word.text + "'";
  refuse(argument.called, "must be " + words + " or None; it is " + shown(value));
}

void Operator::read_values(PyObject* const* arguments, Call& call) {
  for (size_t i = 0; i < arrays_.size(); ++i) call.wanted[i] = arrays_[i].argument->kind == Kind::output;
  int array = 0, real = 0, integer = 0, flag = 0;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    PyObject* value = arguments[i];
    switch (argument.kind) {
      case Kind::input:
      case Kind::output:
      case Kind::update:
        ++array;
        break;
      case Kind::result:
        call.wanted[array++] = value == Py_None && argument.wanted_with >= 0
                                   ? arguments[arrays_[argument.wanted_with].position] != Py_None
                                   : truth(argument, value);
        break;
      case Kind::output_wanted: {
        const bool wanted = truth(argument, value);
        for (int output : argument.of) call.wanted[output] = wanted;
        break;
      }
      case Kind::output_dtype:
        if (value != Py_None) {
          const DtypeId dtype = dtype_of(argument, value);
          check_dtype(argument, dtype);
          for (int output : argument.of) call.dtypes[output] = dtype;
        }
        break;
      case Kind::real:
        call.reals[real++] = real_of(argument, value);
        break;
      case Kind::integer:
        call.integers[integer++] = integer_of(argument, value, arguments);
        break;
      case Kind::flag:
        call.flags |= static_cast<uint32_t>(truth(argument, value)) << flag++;
        break;
      case Kind::choice:
        call.flags |= static_cast<uint32_t>(choose(argument, value, call)) << flag++;
        break;
      case Kind::sm_margin:
        // Beyond 2^63 - 1 it is that: more than any device has.
        call.sm_margin = PyBool_Check(value) ? -1 : PyNumber_AsSsize_t(value, nullptr);
        if (call.sm_margin < 0) {
          PyErr_Clear();
          refuse(argument.called, "must be a non-negative integer; it is " + shown(value));
        }
        break;
      case Kind::stream:
        break;
    }
  }
  PyObject* implementation = nullptr;
  if (PyContextVar_Get(implementation_, nullptr, &implementation) != 0) throw PythonErrorSet{};
  call.implementation = static_cast<int>(PyLong_AsLong(implementation));
  Py_DECREF(implementation);
}
