// SPDX-License-Identifier: Apache-2.0
#include "errors.hpp"

#include <pybind11/pybind11.h>

namespace py = pybind11;

void throw_argument_error(const std::string& message) { throw PackageError{"ArgumentError", message}; }

void set_python_error() {
  try {
    throw;
  } catch (const PackageError& error) {
    try {
      py::object type = py::module_::import("transformer_rtc.errors").attr(error.type);
      PyErr_SetString(type.ptr(), error.message.c_str());
    } catch (py::error_already_set& gone) {  // the interpreter is shutting down
      gone.restore();
    }
  } catch (const PythonErrorSet&) {
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_SystemError, "an unknown C++ exception");
  }
}
