// SPDX-License-Identifier: Apache-2.0
// The package's own exceptions (transformer_rtc/errors.py), thrown from C++.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

#include <string>

struct PackageError {
  const char* type;  // the name of a class in transformer_rtc.errors
  std::string message;
};

// A Python exception is set already.
struct PythonErrorSet {};

[[noreturn]] void throw_argument_error(const std::string& message);

// Calls what takes the GIL. A thread that outlives the interpreter is ended there, by an unwinding that would run our
// destructors without the GIL and that must not be caught: it stops for good instead, as from Python 3.14 on.
template <class Call>
auto taking_gil(Call call) {
  try {
    return call();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Sets the Python exception for the C++ exception being handled.
void set_python_error();
