// SPDX-License-Identifier: Apache-2.0
// What fills the parameters of a kernel.
#pragma once

#include "call.hpp"
#include "plan.hpp"

// What a launch's parameters are made of.
struct LaunchValues {
  const Call& call;
  const Layout& layout;
  int64_t groups;
  char* workspace;
  char* partials;
  char* row_partials;
  int64_t sharers = 1;
};

// Rows of a result that has the shape of another array.
int64_t rows_of(const Call& call, const Array& array);

// Writes each field's value at its offset.
void fill(char* params, const std::vector<FieldFill>& fields, const std::vector<Array>& arrays,
          const LaunchValues& values);
