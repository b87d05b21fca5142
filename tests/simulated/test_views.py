# SPDX-License-Identifier: Apache-2.0
"""Softmax along any dimension, in the simulator, against float64 and against moved arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import softmax_reference
from frameworks import bits
from reference import NUMPY_TYPES, assert_within

import transformer_rtc
from transformer_rtc import (
    SimulatedDevice,
    log_softmax,
    record,
    softmax,
    softmax_backward,
    using,
)
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, DType

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
SHAPE = (2, 5, 3, 7)


@pytest.fixture(autouse=True)
def general_kernels() -> Iterator[None]:
    """Nothing is compiled on the way."""
    with using(SimulatedDevice(static=True, checked=True)):
        yield


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType = FLOAT32) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(NUMPY_TYPES[dtype])


def along(rng: np.random.Generator, dim: int, dtype: DType, padding: int = 0) -> np.ndarray:
    """Return an array of `SHAPE` with the elements of a dimension next to each other, and gaps behind each row."""
    rows = np.moveaxis(np.empty(SHAPE, np.int8), dim, -1).shape
    padded = random(rng, (*rows[:-1], rows[-1] + padding), dtype)
    return np.moveaxis(padded[..., : rows[-1]], -1, dim)


def without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    dim %= len(shape)
    return shape[:dim] + shape[dim + 1 :]


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_array_equal(bits(found), bits(expected))


# ---- Softmax ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("dim", range(-4, 4))
def test_softmax_along_any_dimension_is_that_of_float64(dim, dtype, rng):
    for padding in (0, 3):
        x = along(rng, dim, dtype, padding)
        expected = softmax_reference.forward(np.moveaxis(x, dim, -1), 0.7, out=dtype)
        for function, name in ((softmax, "y"), (log_softmax, "log_y")):
            y, lse = function(x, dim=dim, scale=0.7, return_lse=True)
            assert y.shape == SHAPE and lse.shape == without(SHAPE, dim)
            assert_within(np.moveaxis(y, dim, -1), expected[name], dtype)
            assert_within(lse, expected["lse"], FLOAT32)


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -2, 3])
def test_gradients_along_any_dimension_are_those_of_float64(dim, logarithm, rng):
    dy, x = along(rng, dim, BFLOAT16, 1), along(rng, dim, FLOAT16)
    name = "log_softmax" if logarithm else "softmax"
    y = getattr(transformer_rtc, name)(x, dim=dim)
    dx = getattr(transformer_rtc, f"{name}_backward")(dy, y, dim=dim, scale=0.5, out_dtype="float32")
    expected = softmax_reference.backward(*(np.moveaxis(one, dim, -1) for one in (dy, y)), 0.5, None, logarithm)
    assert dx.shape == SHAPE
    assert_within(np.moveaxis(dx, dim, -1), expected, FLOAT32)
    # lse is for sinks alone, and has no place for the dimension, or one of a single element.
    lse = np.zeros(without(SHAPE, dim), np.float32)
    for given in (lse, np.expand_dims(lse, dim)):
        again = getattr(transformer_rtc, f"{name}_backward")(
            dy, y, dim=dim, scale=0.5, out_dtype="float32", lse=given, return_dsink=False
        )
        assert_same(again, dx)


@pytest.mark.parametrize("shape", [SHAPE, (1, 5, 3, 7), (5, 1, 1), (5, 3, 7)], ids=str)
def test_a_mask_and_its_gradient_move_as_x_does(shape, rng):
    dim = -3
    x, dy = along(rng, dim, FLOAT32), along(rng, dim, FLOAT32)
    rows = random(rng, (*without(shape, dim), shape[dim]))
    mask = np.moveaxis(rows, -1, dim)
    y = softmax(x, dim=dim, mask=mask)
    within = np.ones(np.moveaxis(x, dim, -1).shape, bool)
    added = np.broadcast_to(rows, within.shape)
    assert_within(
        np.moveaxis(y, dim, -1), softmax_reference.forward(np.moveaxis(x, dim, -1), added=added)["y"], FLOAT32
    )
    dx, dmask = softmax_backward(dy, y, dim=dim, mask=mask)
    assert dx.shape == SHAPE and dmask.shape == mask.shape
    of_moved = (np.ascontiguousarray(np.moveaxis(one, dim, -1)) for one in (dy, y))
    expected_dx, expected_dmask = softmax_backward(*of_moved, mask=rows)
    assert_same(np.moveaxis(dx, dim, -1), expected_dx)
    assert_same(np.moveaxis(dmask, dim, -1), expected_dmask)
    keeps = rows > 0
    hidden = softmax(x, dim=dim, mask=np.moveaxis(keeps, -1, dim), mask_keeps=True)
    assert_same(np.moveaxis(hidden, dim, -1), softmax(np.moveaxis(x, dim, -1), mask=keeps, mask_keeps=True))


def test_outputs_of_the_caller_are_written_along_the_dimension(rng):
    x = along(rng, 1, FLOAT32)
    expected = softmax(x, dim=1)
    for dtype in FLOATS:
        memory = np.zeros((2, 3, 7, 8), NUMPY_TYPES[dtype])
        out = np.moveaxis(memory[..., :5], -1, 1)
        y, lse = softmax(x, dim=1, out=out, return_lse=True)
        assert y is out and lse.shape == (2, 3, 7) and (memory[..., 5:] == 0).all()
        assert_same(out, softmax(x, dim=1, out_dtype=dtype.name))
    assert softmax(x, dim=1, out=x) is x
    assert_same(x, expected)


def test_a_sliced_dimension_of_one_packed_array(rng):
    x = random(rng, (9, 4, 6))[2:8:2].transpose(2, 1, 0)  # [6, 4, 3], with elements of dim=0 next to each other
    moved = np.ascontiguousarray(np.moveaxis(x, 0, -1))
    assert_same(softmax(x, dim=0), np.moveaxis(softmax(moved), -1, 0))
    assert softmax(x[:, :0], dim=0).shape == (6, 0, 3)
    # A dimension of one counts as no stride of its own, wherever its elements would lie.
    gaps = random(rng, (4, 3, 6))[:, None, :2]
    assert_same(softmax(np.moveaxis(gaps, -1, 0), dim=0), np.moveaxis(softmax(gaps), -1, 0))
    # Elements along a dimension of one have no neighbours.
    one = random(rng, (4, 1, 6))
    assert (softmax(one, dim=1) == 1).all() and softmax(one[:, :, :0], dim=1).shape == (4, 1, 0)


def test_the_kernels_are_those_of_the_view(rng):
    with record() as lines:
        softmax(along(rng, 1, FLOAT32), dim=1)
    with record() as expected:
        softmax(np.empty((2, 5), np.float32))
    assert lines == expected and len(lines) == 1
