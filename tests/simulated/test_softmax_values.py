# SPDX-License-Identifier: Apache-2.0
"""Softmax of infinities, NaN, scores that are far from zero or from each other, and of nothing, in the simulator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import softmax_reference as expected
import softmax_values
from norm_checks import first_of
from reference import NUMPY_TYPES, assert_within
from softmax_checks import CHOSEN, DIVIDED, FLOATS, call, calls_of, held, of_ways, poisoned, simulated

from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

pytestmark = pytest.mark.usefixtures("kernels", poisoned.__name__)
# Where y and what is made 0 both have 16 bits, two at a time.
OF_ZEROS = (*((one, one, one) for one in FLOATS[::-1]), (BFLOAT16, FLOAT32, FLOAT16), (FLOAT32, BFLOAT16, FLOAT16))
IN_PARTS = ("general", "chunks of CTAs of a grid", "chunks of CTAs", CHOSEN)
CALLS = [
    *calls_of(softmax_values.hold_infinities, [9, 700], FLOATS, [False, True], share=0.2),
    *calls_of(softmax_values.hold_infinities, [32], [BFLOAT16, FLOAT32], [True], ways=DIVIDED, share=0.2),
    *calls_of(
        softmax_values.hold_what_took_no_part, [37], OF_ZEROS, ways=("general", "staged", "warps", CHOSEN), first=1
    ),
    *calls_of(softmax_values.hold_an_element_alone, [20, 300, 5000, 70_000], FLOATS, share=0.2),
    *calls_of(
        softmax_values.hold_small_numbers, [40_000, 300_000, 8], [-200.0, -1000.0], ways=IN_PARTS, first=1, share=0.2
    ),
    *calls_of(softmax_values.hold_a_slope, [0.02, 1e-6, 1e-3, 0.3, 3.0], [40_000, 900, 300_000], [1, -1], share=0.15),
    *calls_of(softmax_values.hold_far_scores, [300, 20, 3000, 70_000], [BFLOAT16, FLOAT16], share=0.2),
    *calls_of(softmax_values.hold_far_masks, [300, 3000], FLOATS, [FLOAT32, BFLOAT16], share=0.2),
    *calls_of(softmax_values.hold_whatever_is_added, ways=("general", "staged", "warps", "chunks"), share=0.5),
]


@pytest.mark.parametrize(("check", "way", "values"), CALLS)
def test_values(check, way, values, rng):
    with held(way) as on:
        check(on, rng, *values)


@pytest.mark.parametrize(("way", "columns", "dtype"), of_ways(DIVIDED, (500, 32)))
def test_infinities_and_nan_however_a_row_is_held(way, columns, dtype, rng):
    with held(way) as on:
        softmax_values.hold_infinities(on, rng, columns, dtype, False)


@pytest.mark.thorough(share=0.3)
@pytest.mark.parametrize("size", [-200.0, -1000.0])
def test_small_numbers_beside_parts_of_nothing_where_there_are_no_clusters(size, rng):
    softmax_values.hold_small_numbers(simulated(80), rng, 40_000, size)


@pytest.mark.parametrize("dtype", first_of([FLOAT32, BFLOAT16], 2))
def test_infinities_and_nan_where_a_thread_has_learnt_a_largest_before(dtype, rng):
    # The general kernel reads a long row once for the sum: a thread's later elements change what its earlier are about,
    # those of this Vec's block of 32 and, at `last`, those of the block before.
    threads, vector = 512, 8
    later, last = 5 * threads * vector, 32 * threads * vector
    lowest = ml_dtypes.finfo(NUMPY_TYPES[dtype]).min
    x = expected.drawn(rng, (12, last + 100), dtype)
    x[0, last + 3] = np.inf
    x[1, last + 3] = np.nan
    x[2, 3], x[2, last + 3] = np.inf, 7
    x[3, 3], x[3, last + 3] = np.nan, 7
    x[4, 3], x[4, later + 3], x[4, last + 3] = np.nan, np.inf, 7
    x[5, :later], x[5, last:] = -np.inf, -np.inf
    x[6] = lowest
    x[7], x[7, last + 3] = lowest, 5
    x[8], x[8, 3] = -np.inf, lowest
    x[9] = -np.inf
    x[10, :vector] = np.nan  # a thread's first Vec: nothing of it is the largest
    x[11, later + 3], x[11, last + 3] = 15, 30
    found = expected.forward(x, out=dtype)
    y, lse = call(simulated(static=True), "softmax", x, return_lse=True)
    assert_within(y, found["y"], dtype)
    assert_within(call(simulated(static=True), "log_softmax", x), found["log_y"], dtype, "log_y")
    assert_within(lse, found["lse"], FLOAT32, "lse")
