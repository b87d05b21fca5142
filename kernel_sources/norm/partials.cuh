// SPDX-License-Identifier: Apache-2.0
// Where the first launch of a norm's backward leaves partial sums of the weight's gradients for the second one: rows of
// them, [gradient][hidden], each a whole number of vectors.
#pragma once

#include "platform.cuh"

namespace trtc {

TRTC_DEVICE int64 partial_offset(int64 row, int gradient, int gradients, int64 hidden) {
  return (row * gradients + gradient) * ((hidden + 7) / 8 * 8);
}

// How many rows of partial sums a group of CTAs stores. `rows`: the rows that a CTA holds at once. If that is a
// multiple of the heads, rows of one head are added up: one for each head. Otherwise one for each row.
TRTC_DEVICE int partial_rows(int rows, uint32 heads) {
  return rows % static_cast<int>(heads) == 0 ? static_cast<int>(heads) : rows;
}

}  // namespace trtc
