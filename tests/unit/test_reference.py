# SPDX-License-Identifier: Apache-2.0
"""The yardstick itself: a reference that accepts anything would hide every fault."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import reference
from cases import FLOAT8, FLOATS

from transformer_rtc.spec import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8

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
    [*itertools.permutations((math.nan, math.inf, -math.inf, 1.0), 2), (0.0, 1.0)],
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


def test_another_shape_or_type_is_refused():
    with pytest.raises(AssertionError, match=r"\(2,\) instead of \(1, 2\)"):
        reference.assert_close(np.zeros(2), np.zeros((1, 2)), FLOAT32)
    expected = reference.Expected(np.zeros(2), np.zeros(2))
    with pytest.raises(AssertionError, match="float16 instead of float32"):
        reference.assert_within(np.zeros(2, np.float16), expected, FLOAT32)


def test_the_reference_is_the_formula():
    x, weight = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), np.array([1.0, 2.0], np.float32)
    y, rstd = reference.rms_norm(x, weight, 0.25, 0.5)
    np.testing.assert_allclose(rstd, [1 / math.sqrt(12.75), 2.0])
    np.testing.assert_allclose(y, [[4.5 / math.sqrt(12.75), 10 / math.sqrt(12.75)], [0, 0]])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("heads", [0, 3])
def test_the_gradients_are_those_of_the_forward_reference(centred, heads, rng):
    # By central differences of sum(dy * y + ds * x).
    shape = (4, 3, 11) if heads else (5, 11)
    x, dy, ds = (rng.standard_normal(shape) for _ in range(3))
    weight = rng.standard_normal(shape[1:] if heads else shape[-1:])
    bias = rng.standard_normal(weight.shape)

    def total(x, weight, bias):
        y = reference.forward(centred, x, weight, bias, 0.125, 0.5)["out"].value
        return np.sum(dy * y + ds * x)

    def slope(values, call):
        found, step = np.zeros_like(values), 1e-5
        for place in np.ndindex(values.shape):
            change = np.zeros_like(values)
            change[place] = step
            found[place] = (call(values + change) - call(values - change)) / (2 * step)
        return found

    found = reference.backward(centred, dy, x, weight, 0.125, 0.5, dresidual=ds)
    slopes = {
        "out": slope(x, lambda x: total(x, weight, bias)),
        "dweight": slope(weight, lambda weight: total(x, weight, bias)),
        "dbias": slope(bias, lambda bias: total(x, weight, bias)),
    }
    for name, expected in slopes.items():
        np.testing.assert_allclose(found[name].value, expected, rtol=1e-7, atol=1e-8)


def test_given_statistics_are_taken_as_they_are(rng):
    x, dy = (rng.standard_normal((3, 7)) for _ in range(2))
    found = reference.backward(True, dy, x, mean=np.full(3, 0.5), rstd=np.full(3, 2.0))
    normal = (x - 0.5) * 2
    np.testing.assert_allclose(found["dweight"].value, (dy * normal).sum(axis=0))
    mean = (dy * normal).mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(found["out"].value, 2 * (dy - normal * mean - dy.mean(axis=-1, keepdims=True)))


@pytest.mark.parametrize("centred", [False, True])
def test_arithmetic_in_float32_is_within_the_bounds_and_coarser_arithmetic_is_not(centred, rng):
    # About 1: a mean that is nearly zero has no relative error to speak of.
    x, dy = (1 + rng.standard_normal((5, 300)).astype(np.float32) for _ in range(2))
    weight, bias = (rng.standard_normal(300).astype(np.float32) for _ in range(2))
    y = reference.forward(centred, x, weight, bias)
    back = reference.backward(centred, dy, x, weight)
    for result in (*y.values(), *back.values()):
        if not result.bound.any():
            continue
        error = result.bound / np.abs(result.value).max()
        assert error.max() < 2.0**-16  # 1.2 of 2^-18 in 1500 draws
        reference.assert_within(result.value.astype(np.float32), result, FLOAT32)
        # An error as large as 16 bits have is far beyond each bound.
        with pytest.raises(AssertionError, match="times what its arithmetic"):
            reference.assert_within((result.value * (1 + 2.0**-12)).astype(np.float32), result, FLOAT32)


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, INT8], ids=lambda dtype: dtype.symbol)
def test_rounding_once_is_within_the_bound_and_a_neighbour_is_not(dtype, rng):
    # As an output in 16 or 8 bits is held: half a unit in the last place, and what float32 did before.
    exact = rng.uniform(1, 100, 5000)
    kind = reference.NUMPY_TYPES[dtype]
    rounded = np.rint(exact).astype(kind) if dtype is INT8 else exact.astype(kind)
    expected = reference.Expected(exact, exact * 2 * reference.U)
    reference.assert_within(rounded, expected, dtype)
    integers = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.bytes]
    above = (rounded.view(integers) + (1 if dtype is not FLOAT32 else 9)).view(kind)
    with pytest.raises(AssertionError, match="times what its arithmetic"):
        reference.assert_within(above, expected, dtype)
    wrong = reference.excess(above, expected, dtype) > 1
    assert wrong.mean() > 0.9


@pytest.mark.parametrize(("dtype", "most"), [(FLOAT8_E4M3, 448.0), (FLOAT8_E5M2, 57344.0), (INT8, 127.0)])
def test_what_saturates_is_compared_as_its_largest_number(dtype, most):
    kind = reference.NUMPY_TYPES[dtype]
    exact = np.array([2 * most, math.inf, most])
    expected = reference.Expected(exact, np.zeros(3))
    reference.assert_within(np.full(3, most).astype(kind), expected, dtype)
    for wrong in (most / 2, -most):
        with pytest.raises(AssertionError, match=r"y\[0\]"):
            reference.assert_within(np.array([wrong, most, most]).astype(kind), expected, dtype)


def test_rows_are_scaled_by_their_largest_magnitude():
    y = reference.Expected(np.array([[1.0, -4.0, 2.0], [0.0, 0.0, 0.0]]), np.full((2, 3), 1e-9))
    scaled, scale = reference.row_scaled(y, INT8)
    np.testing.assert_allclose(scaled.value, [[127 / 4, -127, 127 / 2], [0, 0, 0]])
    np.testing.assert_allclose(scale.value, [4 / 127, 1])
    assert reference.largest_magnitude(y).value == 4 and reference.largest_magnitude(y, 5.0).value == 5
    assert np.isnan(reference.largest_magnitude(y, math.nan).value)
