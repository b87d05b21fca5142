// The package's own exceptions (transformer_rtc/errors.py), thrown from C++.
#pragma once

#include <string>

struct PackageError {
  const char* type;  // the name of a class in transformer_rtc.errors
  std::string message;
};

// A Python exception is set already.
struct PythonErrorSet {};

[[noreturn]] void throw_argument_error(const std::string& message);

// Sets the Python exception for the C++ exception being handled.
void set_python_error();
