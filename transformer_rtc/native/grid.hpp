// SPDX-License-Identifier: Apache-2.0
// The grids of launches behind the first one.
#pragma once

#include "call.hpp"
#include "plan.hpp"

constexpr int64_t kMostInY = 65535;  // CTAs of a grid's second dimension

// Groups of threads of a stage's CTA that share the rows that one of `array_rows` rows was broadcast to.
int64_t sharers_of(const Stage& stage, int64_t rows, int64_t array_rows);

// How a later launch is shaped; `array_rows`: rows of the stage's array, if it has one.
LaunchShape later_shape(const Stage& stage, const Layout& layout, int64_t array_rows);
