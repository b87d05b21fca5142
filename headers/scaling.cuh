// SPDX-License-Identifier: Apache-2.0
// Outputs of 8 bits: a scale of each row, and the largest magnitude of all rows.
#pragma once

#include "row_reduce.cuh"

namespace trtc {

// What a row is divided by whose largest magnitude is `amax`, so that this becomes `most`, the type's largest number;
// and the inverse. A row of zeros has the scale 1. A scale is 2^-126 at least: the inverse of less is no number, or
// overflows.
struct RowScale {
  float scale, inverse;

  static TRTC_DEVICE RowScale of(float amax, float most) {
    if (amax == 0.0f) return {1.0f, 1.0f};
    const float inverse = divide(most, amax);  // of NaN, NaN
    return {Maximum::of(divide(amax, most), 0x1p-126f), inverse > 0x1p126f ? 0x1p126f : inverse};
  }
};

// Called by a whole CTA of `Threads`, at its end: `most` becomes the maximum of what it was and of each thread's
// `amax`. One thread of a CTA reads it, and few write: an atomic of each warp would take longer than the rows.
template <int Threads>
TRTC_DEVICE void publish_amax(float* most, float amax) {
  constexpr int warps = Threads / 32;
  static_assert(warps * 32 == Threads && warps <= 32, "a lane for each warp");
  TRTC_SHARED(float, of_warps, warps);
  amax = reduce_lanes<Maximum, 32>(amax);
  if (thread_index() % 32 == 0) of_warps[thread_index() / 32] = amax;
  cta_barrier();
  if (thread_index() >= 32) return;
  amax = reduce_lanes<Maximum, 32>(thread_index() < warps ? of_warps[thread_index()] : 0.0f);
  if (thread_index() != 0) return;
  // As bits: NaN is above infinity.
  if (bits_from_float(amax) > bits_from_float(load_atomically_global(most))) maximum_global(most, amax);
}

}  // namespace trtc
