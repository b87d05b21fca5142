# SPDX-License-Identifier: Apache-2.0
"""Activations on a GPU: the simulator's checks at full size, and every number of 16 bits."""

from __future__ import annotations

import itertools

import activation_checks as checks
import numpy as np
import pytest
from activation_checks import ANYWHERE, APART, BITS8, FLOATS, GATED, KINDS, PLAIN, WHOLE
from norm_checks import first_of

import transformer_rtc
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

SHAPES = ((4, 33, 4096), (1, 1 << 20), (3, 11008), (2, 3, 1001), (100_003, 1), (7, 50257), (33, 16, 72))
TYPES = (*((one, one, one) for one in FLOATS), (BFLOAT16, FLOAT32, BFLOAT16), (FLOAT32, FLOAT16, BFLOAT16))


def _each(*axes, first: int = 40):
    found = list(itertools.product(*axes))
    return first_of([found[number * 7919 % len(found)] for number in range(len(found))], first, 0.3)


@pytest.mark.parametrize("check", [checks.hold_forward, checks.hold_backward])
@pytest.mark.parametrize(("kind", "shape", "types", "lies"), _each(KINDS, SHAPES, TYPES, (WHOLE, ANYWHERE, APART)))
def test_values(check, kind, shape, types, lies, rig, rng):
    check(rig, kind, shape, types, lies, rng)


@pytest.mark.parametrize(("kind", "shape", "of_x", "of_y"), _each(KINDS, SHAPES[:4], FLOATS, BITS8))
def test_one_scale(kind, shape, of_x, of_y, rig, rng):
    checks.hold_scaled(rig, kind, shape, of_x, of_y, float(np.float32(rng.uniform(0.1, 30))), rng)


@pytest.mark.parametrize(("kind", "shape", "of_x", "of_y"), _each(GATED, (*SHAPES[:4], (2, 50_000)), FLOATS, BITS8))
def test_a_scale_of_each_row(kind, shape, of_x, of_y, rig, rng):
    checks.hold_row_scaled(rig, kind, shape, of_x, of_y, rng)


@pytest.mark.parametrize(("kind", "shape", "dtype"), _each(KINDS, ((3, 3001), (64, 4096)), FLOATS))
def test_in_place(kind, shape, dtype, rig, rng):
    checks.hold_in_place(rig, kind, shape, dtype, rng)


@pytest.mark.parametrize(("kind", "dtype"), list(itertools.product(KINDS, FLOATS)))
def test_special_numbers(kind, dtype, rig):
    checks.hold_special(rig, kind, dtype)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_every_number_of_16_bits(kind, dtype, rig):
    x = np.arange(1 << 16, dtype=np.uint16).view(checks.NUMPY_TYPES[dtype])
    x = x[np.isfinite(x.astype(np.float64))]
    y = rig(kind.name, x, **kind.options)
    checks.assert_within(y, checks.expected_of(kind, x, None, True), dtype, str(kind))
    dx = rig(f"{kind.name}_backward", np.ones_like(x), x, **kind.options)
    checks.assert_within(dx, checks.gradients_of(kind, np.ones_like(x), x, None, (True, True))[0], dtype, str(kind))


@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_many_floats(kind, rig, rng):
    x = np.concatenate([rng.uniform(-20, 20, 1 << 19), -np.logspace(-38, 2.2, 1 << 18), np.logspace(-38, 38, 1 << 18)])
    x = x.astype(np.float32)
    y = rig(kind.name, x, **kind.options)
    checks.assert_within(y, checks.expected_of(kind, x, None, False), FLOAT32, str(kind))
    dx = rig(f"{kind.name}_backward", np.ones_like(x), x, **kind.options)
    checks.assert_within(dx, checks.gradients_of(kind, np.ones_like(x), x, None, (False, False))[0], FLOAT32, str(kind))


def test_more_than_2_32_elements(implementation, torch):
    rows, columns = 65_600, 65_536
    x = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).fill_(2.0)  # 8.6 GB
    x[-1] = 3.0
    y = transformer_rtc.silu_and_mul(x)
    for row, value in ((0, 2.0), (rows - 2, 2.0), (rows - 1, 3.0)):
        wanted = value / (1 + np.exp(-value)) * value
        assert bool(((y[row].double() - wanted).abs() <= 2**-8 * wanted).all())
    del x, y
    torch.cuda.empty_cache()
