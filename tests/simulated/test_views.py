# SPDX-License-Identifier: Apache-2.0
"""Softmax along any dimension and norms over several, in the simulator, against float64 and against moved arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import reference
import softmax_reference
from frameworks import bits
from reference import NUMPY_TYPES, assert_within

import transformer_rtc
from transformer_rtc import (
    SimulatedDevice,
    layer_norm,
    log_softmax,
    record,
    rms_norm,
    softmax,
    softmax_backward,
    using,
)
from transformer_rtc.declaration import declarations
from transformer_rtc.spec import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, DType

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
NORMS = [name for name, declaration in declarations().items() if declaration.family.name == "norms"]
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


# ---- Norms -----------------------------------------------------------------------------------------------------------


def arguments(rng: np.random.Generator, name: str, shape: tuple[int, ...], count: int, dtype: DType) -> dict[str, Any]:
    """Return all arrays that a norm takes, of several normalized dimensions."""
    given: dict[str, Any] = {}
    for one in declarations()[name].arguments:
        if one.name in ("x", "dy", "residual", "dresidual"):
            given[one.keyword] = random(rng, shape, dtype)
        elif one.name in ("weight", "bias"):
            given[one.keyword] = random(rng, shape[-count:], dtype)
        elif one.keyword.startswith("return_"):
            given[one.keyword] = True
    return given


def flat(array: Any, shape: tuple[int, ...], count: int) -> Any:
    """Return an array with its last dimensions as one."""
    if not isinstance(array, np.ndarray) or array.shape[-count:] != shape[-count:]:
        return array
    return array.reshape(*array.shape[:-count], math.prod(shape[-count:]))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("shape", "count"), [((3, 4, 5), 2), ((3, 2, 1, 7), 3), ((4, 6), 2), ((2, 3, 5), 1)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_several_dimensions_is_that_of_one(name, shape, count, dtype, rng):
    function, given = getattr(transformer_rtc, name), arguments(rng, name, shape, count, dtype)
    found = function(**given, normalized_shape=shape[-count:])
    expected = function(**{key: flat(one, shape, count) for key, one in given.items()})
    assert len(found) == len(expected) > 1
    # Of flat arrays' shapes, what each one's is.
    rows, width = shape[:-count], math.prod(shape[-count:])
    shapes = {(*rows, width): shape, (width,): shape[-count:], rows: rows}
    if rows == ():  # x has the shape of the weight
        shapes[(width,)] = shape
    for one, other in zip(found, expected, strict=True):
        assert one.shape == shapes[other.shape]
        assert_same(one.reshape(other.shape), other)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_norms_over_several_dimensions_are_those_of_float64(dtype, rng):
    x, weight, bias = random(rng, (5, 3, 11), dtype), random(rng, (3, 11)), random(rng, (3, 11), dtype)
    expected = reference.forward(True, x.reshape(5, 33), weight.ravel(), bias.ravel(), 1e-5, out=dtype)
    y, mean, rstd = layer_norm(x, weight, bias, normalized_shape=(3, 11), return_mean=True, return_rstd=True)
    assert y.shape == x.shape and mean.shape == rstd.shape == (5,)
    assert_within(y.reshape(5, 33), expected["out"], dtype)
    assert_within(mean, expected["mean"], FLOAT32)
    assert_within(rstd, expected["rstd"], FLOAT32)
    dy = random(rng, x.shape, dtype)
    gradients = reference.backward(True, dy.reshape(5, 33), x.reshape(5, 33), weight.ravel(), 1e-5)
    # Statistics as torch leaves them, with dimensions of 1, too.
    for kept in ((), (1,), (1, 1)):
        found = transformer_rtc.layer_norm_backward(
            dy, x, weight, mean=mean.reshape(5, *kept), rstd=rstd.reshape(5, *kept), normalized_shape=(3, 11)
        )
        assert [one.shape for one in found] == [(5, 3, 11), (3, 11), (3, 11)]
        for one, key, of in zip(found, ("out", "dweight", "dbias"), (dtype, FLOAT32, FLOAT32), strict=True):
            assert_within(one.reshape(gradients[key].value.shape), gradients[key], of)


def test_outputs_of_8_bits_and_their_scales_are_of_rows_of_several_dimensions(rng):
    x, weight = random(rng, (5, 3, 8)), random(rng, (3, 8))
    y, row_scale = rms_norm(x, weight, normalized_shape=(3, 8), row_scaling=True, out_dtype="int8")
    assert y.shape == x.shape and y.dtype == np.int8 and row_scale.shape == (5,)
    flat_y, flat_scale = rms_norm(x.reshape(5, 24), weight.ravel(), row_scaling=True, out_dtype="int8")
    assert_same(y.reshape(5, 24), flat_y)
    assert_same(row_scale, flat_scale)
    scale, amax, inverse = (np.full(1, value, np.float32) for value in (2, 0, 0))
    out = np.empty(x.shape, NUMPY_TYPES[FLOAT8_E4M3])
    delayed = {"scale": scale, "amax": amax, "scale_inv": inverse}
    assert rms_norm(x, weight, normalized_shape=(3, 8), out=out, **delayed) is out
    assert_same(out.reshape(5, 24), rms_norm(x.reshape(5, 24), weight.ravel(), out_dtype="float8_e4m3fn", scale=scale))
    assert amax[0] > 0 and inverse[0] == 0.5


def test_rows_of_several_dimensions_may_have_gaps_and_outputs_of_the_caller(rng):
    packed, residual = random(rng, (4, 3, 5, 6)), random(rng, (4, 5, 6))
    x, out, total = packed[:, 1], np.zeros((4, 2, 5, 6), np.float32), np.zeros((4, 5, 6), np.float32)
    y, s = transformer_rtc.add_rms_norm(x, residual, normalized_shape=(5, 6), out=out[:, 1], residual_out=total)
    assert y.base is out and s is total and (out[:, 0] == 0).all()
    expected = transformer_rtc.add_rms_norm(x.reshape(4, 30), residual.reshape(4, 30))
    assert_same(y.reshape(4, 30), expected[0])
    assert_same(s.reshape(4, 30), expected[1])
    assert rms_norm(x[:0], normalized_shape=(5, 6)).shape == (0, 5, 6)
    before = packed.copy()
    assert rms_norm(x, normalized_shape=(5, 6), out=x) is x
    assert_same(x.reshape(4, 30), rms_norm(before[:, 1].reshape(4, 30)))
    assert_same(packed[:, ::2], before[:, ::2])


def test_the_kernels_are_those_of_the_view(rng):
    with record() as lines:
        softmax(along(rng, 1, FLOAT32), dim=1)
        rms_norm(random(rng, (2, 3, 8)), random(rng, (3, 8)), normalized_shape=(3, 8))
    with record() as expected:
        softmax(np.empty((2, 5), np.float32))
        rms_norm(random(rng, (2, 24)), random(rng, 24))
    assert lines == expected and len(lines) == 2
