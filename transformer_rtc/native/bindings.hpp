// SPDX-License-Identifier: Apache-2.0
// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "driver.hpp"

inline CUstream as_stream(uintptr_t handle) { return reinterpret_cast<CUstream>(handle); }

inline LaunchShape launch_shape(const std::array<unsigned, 3>& grid, const std::array<unsigned, 3>& block,
                                const std::array<unsigned, 3>& cluster, unsigned dynamic_shared_memory,
                                bool cooperative) {
  return {{grid[0], grid[1], grid[2]},
          {block[0], block[1], block[2]},
          {cluster[0], cluster[1], cluster[2]},
          dynamic_shared_memory,
          cooperative};
}

void bind_operator(pybind11::module_& module);
void bind_gradient(pybind11::module_& module);
