"""The yardstick itself: a reference that accepts anything would hide every fault."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from cases import FLOATS

from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

MOST = {FLOAT32: 4, FLOAT16: 1, BFLOAT16: 1}


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
def test_neighbouring_numbers_are_one_ulp_apart(dtype, rng):
    bits = np.uint32 if dtype is FLOAT32 else np.uint16
    values = (rng.uniform(1, 2, 1000) * 2.0 ** rng.integers(-13, 14, 1000)).astype(reference.NUMPY_TYPES[dtype])
    values = np.concatenate([values, values[:9] * 0, np.array([1, 2, 2**-14, 2**-16], values.dtype)])
    above = (values.view(bits) + 1).view(values.dtype)
    np.testing.assert_array_equal(reference.ulps(above, values.astype(np.float64), dtype), 1)
    np.testing.assert_array_equal(reference.ulps(-above, -values.astype(np.float64), dtype), 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
def test_rounding_to_nearest_is_at_most_half_an_ulp_also_below_the_normal_numbers_and_at_overflow(dtype, rng):
    lowest, highest = {FLOAT32: (-149, 127), FLOAT16: (-24, 15), BFLOAT16: (-133, 127)}[dtype]
    exact = rng.uniform(1, 2, 20_000) * 2.0 ** rng.integers(lowest - 3, highest + 1, 20_000)
    with np.errstate(over="ignore"):
        rounded = exact.astype(reference.NUMPY_TYPES[dtype])
    # ml_dtypes rounds to bfloat16 twice, through float32: half an ulp of that is 2^-17 of one here.
    twice = 2.0**-16 if dtype is BFLOAT16 else 0.0
    assert 0.4 < reference.ulps(rounded, exact, dtype).max() <= 0.5 + twice


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (-math.inf, math.inf),
        (math.nan, math.inf),
        (0.0, 1.0),
    ],
)
def test_what_is_wrong_is_refused(actual, expected, dtype):
    with pytest.raises(AssertionError, match=r"y\[1\]"):
        reference.assert_close(np.array([1.0, actual]), np.array([1.0, expected]), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
def test_the_bound_is_one_ulp_of_16_bits_and_four_of_fp32(dtype):
    ulp = {FLOAT32: 2.0**-23, FLOAT16: 2.0**-10, BFLOAT16: 2.0**-7}[dtype]
    reference.assert_close(np.array([1 + MOST[dtype] * ulp]), np.array([1.0]), dtype)
    with pytest.raises(AssertionError, match="ulp from"):
        reference.assert_close(np.array([1 + 1.01 * MOST[dtype] * ulp]), np.array([1.0]), dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0])
def test_equal_values_are_equal(value):
    reference.assert_close(np.array([value]), np.array([value]), FLOAT16)


def test_another_shape_is_refused():
    with pytest.raises(AssertionError, match=r"\(2,\) instead of \(1, 2\)"):
        reference.assert_close(np.zeros(2), np.zeros((1, 2)), FLOAT32)


def test_the_reference_is_the_formula():
    x, weight = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), np.array([1.0, 2.0], np.float32)
    y, rstd = reference.rms_norm(x, weight, 0.25, 0.5)
    np.testing.assert_allclose(rstd, [1 / math.sqrt(12.75), 2.0])
    np.testing.assert_allclose(y, [[4.5 / math.sqrt(12.75), 10 / math.sqrt(12.75)], [0, 0]])
