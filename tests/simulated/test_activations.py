# SPDX-License-Identifier: Apache-2.0
"""Activations in the simulator: kernels for whole rows and unaligned ones, general kernels, scales of 8-bit outputs."""

from __future__ import annotations

import itertools

import activation_checks as checks
import numpy as np
import pytest
from activation_checks import ANYWHERE, APART, BITS8, FLOATS, GATED, KINDS, PLAIN, WHOLE
from norm_checks import first_of
from rigs import simulated

import transformer_rtc
from transformer_rtc import warming
from transformer_rtc.declaration import declaration_of
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32

pytestmark = pytest.mark.usefixtures("kernels")
# Rows of less than a vector, of whole ones, of more than a CTA has, and a column of many.
SHAPES = ((2, 3, 64), (5, 5), (1, 3001), (3, 2, 1032), (700, 1), (2, 4104), (0, 8))
TYPES = (
    *((one, one, one) for one in FLOATS), (BFLOAT16, FLOAT32, BFLOAT16), (FLOAT32, FLOAT16, BFLOAT16),
    (FLOAT16, BFLOAT16, FLOAT32),
)  # fmt: skip
LIES = (WHOLE, ANYWHERE, APART)


def _each(*axes, first: int = 3, share: float = 0.1):
    """Return combinations in an order in which each axis is mixed, the first of them in the default tier."""
    found = list(itertools.product(*axes))
    return first_of([found[number * 7919 % len(found)] for number in range(len(found))], first, share)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kind", "shape", "types", "lies"), _each(KINDS, SHAPES, TYPES, LIES, first=24, share=0.04))
def test_forward(kind, shape, types, lies, static, rng):
    (rig,) = simulated(80, static=static)
    checks.hold_forward(rig, kind, shape, types, lies, rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kind", "shape", "types", "lies"), _each(KINDS, SHAPES, TYPES, LIES, first=24, share=0.04))
def test_backward(kind, shape, types, lies, static, rng):
    (rig,) = simulated(80, static=static)
    checks.hold_backward(rig, kind, shape, types, lies, rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kind", "shape", "of_x", "of_y"), _each(KINDS, SHAPES[:4], FLOATS, BITS8, first=8))
def test_one_scale(kind, shape, of_x, of_y, static, rng):
    (rig,) = simulated(90, static=static)
    checks.hold_scaled(rig, kind, shape, of_x, of_y, float(np.float32(rng.uniform(0.1, 30))), rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape", "of_x", "of_y"), _each(GATED, (*SHAPES[:4], (2, 5000)), FLOATS, BITS8, first=8)
)
def test_a_scale_of_each_row(kind, shape, of_x, of_y, static, rng):
    (rig,) = simulated(90, static=static)
    checks.hold_row_scaled(rig, kind, shape, of_x, of_y, rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kind", "shape", "dtype"), _each(KINDS, ((3, 37), (2, 3, 64)), FLOATS, first=8, share=0.2))
def test_in_place(kind, shape, dtype, static, rng):
    (rig,) = simulated(90, static=static)
    checks.hold_in_place(rig, kind, shape, dtype, rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), _each(KINDS, FLOATS, first=8, share=0.5))
def test_special_numbers(kind, dtype, static):
    (rig,) = simulated(static=static)
    checks.hold_special(rig, kind, dtype)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_every_float_near_zero_is_within_its_bound(dtype, rng):
    (rig,) = simulated(checked=False)
    x = np.concatenate([-np.logspace(-38, 2.2, 3000), np.logspace(-38, 2.2, 3000), rng.uniform(-16, 16, 3000)])
    x = x.astype(checks.NUMPY_TYPES[dtype])
    for kind in PLAIN:
        y = rig(kind.name, x, **kind.options)
        checks.assert_within(y, checks.expected_of(kind, x, None, dtype is not FLOAT32), dtype, str(kind))
        dx = rig(f"{kind.name}_backward", np.ones_like(x), x, **kind.options)
        wanted, _ = checks.gradients_of(kind, np.ones_like(x), x, None, (dtype is not FLOAT32,) * 2)
        checks.assert_within(dx, wanted, dtype, f"dx of {kind}")


def test_a_configuration_changes_no_bits(rng):
    (rig,) = simulated(90)
    x = checks.numbers(rng, (3, 1000), BFLOAT16)
    family = declaration_of("gelu").family
    wanted = rig("gelu", x)
    (asked,) = warming._requests("gelu", "bfloat16", 1000, False, False, {})
    for config in family.configurations(asked, ARCHITECTURES[90]):
        made = transformer_rtc.operator.Operator(declaration_of("gelu"), config=config)
        with transformer_rtc.using(rig.implementation):
            found = made.call(x, None, None, None, None, None, None, None)
        np.testing.assert_array_equal(checks.bits(found), checks.bits(wanted), err_msg=config.symbol)


def test_one_array_and_two_have_the_same_bits(rng):
    (rig,) = simulated(90)
    x, up = (checks.numbers(rng, (4, 96), FLOAT16) for _ in range(2))
    both = np.concatenate([x, up], axis=-1)
    np.testing.assert_array_equal(rig("silu_and_mul", x, up), rig("silu_and_mul", both))
    dy = checks.numbers(rng, (4, 96), FLOAT16)
    dx, dup = rig("silu_and_mul_backward", dy, x, up)
    np.testing.assert_array_equal(np.concatenate([dx, dup], axis=-1), rig("silu_and_mul_backward", dy, both))


def test_a_gradient_of_a_factor_that_is_not_given_is_refused():
    both, dy = np.ones((2, 8), np.float32), np.ones((2, 4), np.float32)
    with transformer_rtc.using("simulator"), pytest.raises(transformer_rtc.ArgumentError, match="return_dup needs up"):
        transformer_rtc.silu_and_mul_backward(dy, both, return_dup=True)


def test_an_odd_number_of_columns_is_no_pair():
    with (
        transformer_rtc.using("simulator"),
        pytest.raises(
            transformer_rtc.ArgumentError, match="x must have a multiple of 2 elements in its last dimension"
        ),
    ):
        transformer_rtc.silu_and_mul(np.ones((2, 7), np.float32))
