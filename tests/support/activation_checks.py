# SPDX-License-Identifier: Apache-2.0
"""What every activation promises: in the simulator and on a GPU, against float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from frameworks import bits
from reference import LARGEST, NUMPY_TYPES, Expected, U, assert_within
from rigs import Rig

from transformer_rtc import using
from transformer_rtc.spec import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8, DType

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)


class Kind(NamedTuple):
    """An operator, with what its function is told of x and a second factor."""

    name: str
    gated: bool = False
    packed: bool = False
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.name}{'_packed' if self.packed else ''}{'_tanh' if self.options else ''}"


_TANH = {"approximate": "tanh"}
PLAIN = (Kind("gelu"), Kind("gelu", options=_TANH), Kind("silu"), Kind("relu_squared"))
GATED = tuple(
    Kind(name, True, packed, options)
    for name, options in (("silu_and_mul", {}), ("gelu_and_mul", {}), ("gelu_and_mul", _TANH))
    for packed in (False, True)
)
KINDS = (*PLAIN, *GATED)

# ---- References ------------------------------------------------------------------------------------------------------

# What a function is off in float32: each ulp of it is at most 2 units of 2^-24. Of the derivative, each term is.
_OFF = 6 * U
# Deep below the smallest normal number, what a product with 2^-24 loses; of a derivative, times up to 2^11, or 2^14 of
# a narrow one.
_LEAST = 2.0**-143


def _least(x: np.ndarray, narrow: bool) -> np.ndarray:
    """Return what may be lost of a result next to zero: a narrow one's factor of x is 0 below 2^-138."""
    return np.maximum(_LEAST, 2.0**-138 * np.abs(np.where(np.isfinite(x), x, 0.0)) if narrow else 0.0)


def _sigmoid(v: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(v))
    return np.where(v < 0, small / (1 + small), 1 / (1 + small))


def function_of(kind: Kind, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a function in float64, its derivative, and the sum of the magnitudes of the derivative's terms."""
    with np.errstate(all="ignore"):
        if kind.name.startswith("relu"):
            positive = np.where(np.isnan(x), x, np.maximum(x, 0.0))
            return positive**2, 2 * positive, 2 * positive
        is_exact = kind.name.startswith("gelu") and not kind.options
        if is_exact:
            part = 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))
            term = x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        else:
            factor = 2 * math.sqrt(2 / math.pi)
            v = factor * (x + 0.044715 * x**3) if kind.options else x
            slope = factor * (1 + 3 * 0.044715 * x * x) if kind.options else 1.0
            part, other = _sigmoid(v), _sigmoid(-v)
            term = np.where(part * other == 0, 0.0, x * part * other * slope)
        term = np.where(np.isinf(x), 0.0, term)
        value = np.where(np.isneginf(x) & (part == 0), -0.0 if is_exact else np.nan, x * part)
        return value, part + term, part + np.abs(term)


def _moved(x: np.ndarray, derivative: np.ndarray) -> np.ndarray:
    """Return how far a value moves where x is off by all of itself; of -infinity, it does not move."""
    return np.where(np.isneginf(x), 0.0, np.abs(x * derivative))


def expected_of(kind: Kind, x: np.ndarray, up: np.ndarray | None, narrow: bool) -> Expected:
    """Return y in float64, and its bound; `narrow`: it is rounded to fewer bits than float32."""
    x = x.astype(np.float64)
    value, derivative, _ = function_of(kind, x)
    other = 1.0 if up is None else up.astype(np.float64)
    with np.errstate(all="ignore"):
        # And what one rounding of the argument does. A narrow result is found to 2^-13 of it.
        off = (_OFF + (2.0**-13 if narrow else 0)) * np.abs(value) + U * _moved(x, derivative)
        return Expected(value * other, (off + U * np.abs(value) + _least(x, narrow)) * np.abs(other))


def gradients_of(
    kind: Kind, dy: np.ndarray, x: np.ndarray, up: np.ndarray | None, narrow: tuple[bool, bool]
) -> tuple[Expected, Expected]:
    """Return the gradients of x and of the second factor in float64, and their bounds."""
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    value, derivative, terms = function_of(kind, x)
    other = dy if up is None else dy * up.astype(np.float64)
    with np.errstate(all="ignore"):
        # The argument is rounded, too: a term changes by as much as it and its own argument do.
        of_terms = (_OFF + (2.0**-12 if narrow[0] else 0) + 2 * U * (1 + np.minimum(x * x, 200.0))) * terms
        of_value = (_OFF + U + (2.0**-13 if narrow[1] else 0)) * np.abs(value) + U * _moved(x, derivative)
        return (
            Expected(other * derivative, (of_terms + 2.0 ** (14 if narrow[0] else 11) * _LEAST) * np.abs(other)),
            Expected(dy * value, (of_value + _least(x, narrow[1])) * np.abs(dy)),
        )


# ---- Calls -----------------------------------------------------------------------------------------------------------


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Return numbers near zero, and some far from it."""
    found = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.2, 8.0, 1.5)
    return found.astype(NUMPY_TYPES[dtype])


class _Lies(NamedTuple):
    """How arrays lie: elements beyond an aligned address, and between rows."""

    offset: int = 0
    gap: int = 0


WHOLE, APART, ANYWHERE = _Lies(), _Lies(0, 16), _Lies(1, 3)


def _placed(rig: Rig, shape: tuple[int, ...], dtype: DType, lies: _Lies, number: int) -> Any:
    stride = shape[-1] + lies.gap
    # Rows of two leading dimensions that do not collapse, where there is a gap.
    strides = [1]
    for extent in (stride, *shape[-2:0:-1]):
        strides.insert(0, strides[0] * extent + (lies.gap if len(strides) == 2 else 0))
    return rig.guarded(shape, dtype, lies.offset and lies.offset + number, tuple(strides[-len(shape) :]))


def _call(rig: Rig, operator: str, given: list[Any], outputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    import transformer_rtc

    with using(rig.implementation):
        found = getattr(transformer_rtc, operator)(*given, **outputs, **options)
    return found if isinstance(found, tuple) else (found,)


def _fill(rig: Rig, arrays: list[np.ndarray], dtypes: list[DType], lies: _Lies) -> list[Any]:
    placed = [
        _placed(rig, one.shape, dtype, lies, n) for n, (one, dtype) in enumerate(zip(arrays, dtypes, strict=True))
    ]
    for place, one in zip(placed, arrays, strict=True):
        place.fill(one)
    return placed


def _inputs(kind: Kind, x: np.ndarray, up: np.ndarray | None) -> list[np.ndarray]:
    if up is None:
        return [x]
    return [np.concatenate([x, up], axis=-1)] if kind.packed else [x, up]


def hold_forward(
    rig: Rig,
    kind: Kind,
    shape: tuple[int, ...],
    types: tuple[DType, DType, DType],
    lies: _Lies,
    rng: np.random.Generator,
) -> np.ndarray:
    """Hold y to its bound, in an output of the caller's around which nothing is written."""
    of_x, of_up, of_y = types
    of_up = of_x if kind.packed else of_up
    x = numbers(rng, shape, of_x)
    up = numbers(rng, shape, of_up) if kind.gated else None
    given = _fill(rig, _inputs(kind, x, up), [of_x, of_up][: 1 if kind.packed or not kind.gated else 2], lies)
    out = _placed(rig, shape, of_y, lies, 2)
    (found,) = _call(rig, kind.name, [one.array for one in given], {"out": out.array}, kind.options)
    assert found is out.array
    host = rig.arrays.host(found).copy()
    assert_within(host, expected_of(kind, x, up, of_y is not FLOAT32), of_y, str(kind))
    out.assert_intact_around()
    # An element's bits depend on no other, nor on where it lies: the same of a dense array, which is allocated.
    (dense,) = _call(rig, kind.name, [rig.arrays.array(one) for one in _inputs(kind, x, up)], {"out_dtype": of_y.name},
                     kind.options)  # fmt: skip
    np.testing.assert_array_equal(bits(rig.arrays.host(dense)), bits(host))
    return host


def hold_backward(
    rig: Rig,
    kind: Kind,
    shape: tuple[int, ...],
    types: tuple[DType, DType, DType],
    lies: _Lies,
    rng: np.random.Generator,
) -> None:
    """Hold the gradients to their bounds."""
    of_x, of_up, of_dy = types
    of_up = of_x if kind.packed else of_up
    x, dy = numbers(rng, shape, of_x), numbers(rng, shape, of_dy)
    up = numbers(rng, shape, of_up) if kind.gated else None
    arrays = [dy, *_inputs(kind, x, up)]
    given = _fill(rig, arrays, [of_dy, of_x, of_up][: len(arrays)], lies)
    dx = _placed(rig, arrays[1].shape, of_x, lies, 3)
    found = _call(rig, f"{kind.name}_backward", [one.array for one in given], {"out": dx.array}, kind.options)
    assert found[0] is dx.array
    hosts = [rig.arrays.host(one).copy() for one in found]
    if kind.packed:
        hosts = [hosts[0][..., : shape[-1]], hosts[0][..., shape[-1] :]]
    narrow = (of_x is not FLOAT32, of_up is not FLOAT32)
    wanted = gradients_of(kind, dy, x, up, narrow)
    for name, host, one, dtype in zip(("dx", "dup"), hosts, wanted, (of_x, of_up), strict=False):
        assert_within(host, one, dtype, f"{name} of {kind}")
    dx.assert_intact_around()


def hold_scaled(
    rig: Rig, kind: Kind, shape: tuple[int, ...], of_x: DType, of_y: DType, scale: float, rng: np.random.Generator
) -> None:
    """Hold an output of 8 bits with one scale, amax and the scale's inverse."""
    x, up = numbers(rng, shape, of_x), numbers(rng, shape, of_x) if kind.gated else None
    values = [np.full(1, value, np.float32) for value in (scale, 0.25, -1.0)]
    made = dict(zip(("scale", "amax", "scale_inv"), map(rig.arrays.array, values), strict=True))
    given = [rig.arrays.array(one) for one in _inputs(kind, x, up)]
    (found,) = _call(rig, kind.name, given, {"out_dtype": of_y.name, **made}, kind.options)
    wanted = expected_of(kind, x, up, True)
    scaled = Expected(wanted.value * scale, (wanted.bound + U * np.abs(wanted.value)) * scale)
    assert_within(rig.arrays.host(found), scaled, of_y, str(kind))
    most = max(0.25, float(np.abs(wanted.value).max(initial=0)))
    np.testing.assert_allclose(rig.arrays.host(made["amax"]), [most], rtol=2.0**-12)
    np.testing.assert_array_equal(rig.arrays.host(made["scale_inv"]), [np.float32(1) / np.float32(scale)])


def hold_row_scaled(
    rig: Rig, kind: Kind, shape: tuple[int, ...], of_x: DType, of_y: DType, rng: np.random.Generator
) -> None:
    """Hold an output of 8 bits with a scale of each row; one of zeros has the scale 1."""
    x, up = numbers(rng, shape, of_x), numbers(rng, shape, of_x)
    up.reshape(-1, shape[-1])[0] = 0
    given = [rig.arrays.array(one) for one in _inputs(kind, x, up)]
    y, scales = _call(rig, kind.name, given, {"out_dtype": of_y.name, "row_scaling": True}, kind.options)
    scales = rig.arrays.host(scales)
    wanted = expected_of(kind, x, up, True)
    most = np.abs(wanted.value).max(axis=-1) / LARGEST[of_y]
    assert scales.dtype == np.float32 and scales.reshape(-1)[0] == 1
    np.testing.assert_allclose(scales.reshape(-1)[1:], most.reshape(-1)[1:], rtol=2.0**-12)
    by = scales.astype(np.float64)[..., None]
    scaled = Expected(wanted.value / by, (wanted.bound + 4 * U * np.abs(wanted.value)) / by)
    assert_within(rig.arrays.host(y), scaled, of_y, str(kind))


def hold_special(rig: Rig, kind: Kind, dtype: DType) -> None:
    """Hold infinities, NaN, zeros and numbers whose squares overflow or vanish."""
    large, least = {FLOAT16: (60000.0, 6e-8)}.get(dtype, (3e38, 1e-38))
    values = [np.inf, np.nan, 0.0, -0.0, large, -large, least, -least, 200.0, -200.0, 1.0, -1.0, -np.inf]
    x = np.array(values, NUMPY_TYPES[dtype])
    up = np.ones_like(x) if kind.gated else None
    (y,) = _call(rig, kind.name, [rig.arrays.array(one) for one in _inputs(kind, x, up)], {}, kind.options)
    y = rig.arrays.host(y)
    assert np.isposinf(y[0]) and np.isnan(y[1]) and y[2] == 0 and y[3] == 0
    assert_within(y[4:], expected_of(kind, x[4:], None, dtype is not FLOAT32), dtype, str(kind))
    dy = np.ones_like(x)
    found = _call(rig, f"{kind.name}_backward", [rig.arrays.array(one) for one in (dy, *_inputs(kind, x, up))], {},
                  kind.options)  # fmt: skip
    dx = rig.arrays.host(found[0])[: len(x) - 1]  # of -infinity it is any number, or none
    x, dy = x[:-1], dy[:-1]
    wanted, _ = gradients_of(kind, dy, x, None, (dtype is not FLOAT32,) * 2)
    assert np.isnan(dx[1])
    assert_within(dx[4:], wanted[4:], dtype, f"dx of {kind}")


def hold_in_place(rig: Rig, kind: Kind, shape: tuple[int, ...], dtype: DType, rng: np.random.Generator) -> None:
    """Hold y in the place of each input, and dx in that of x, to the bits that they have elsewhere."""
    x, dy = numbers(rng, shape, dtype), numbers(rng, shape, dtype)
    up = numbers(rng, shape, dtype) if kind.gated else None
    inputs = _inputs(kind, x, up)
    (wanted,) = _call(rig, kind.name, [rig.arrays.array(one) for one in inputs], {}, kind.options)
    for place in range(0 if kind.packed else len(inputs)):
        given = [rig.arrays.array(one) for one in inputs]
        (found,) = _call(rig, kind.name, given, {"out": given[place]}, kind.options)
        np.testing.assert_array_equal(bits(rig.arrays.host(found)), bits(rig.arrays.host(wanted)))
    backward = f"{kind.name}_backward"
    wanted = _call(rig, backward, [rig.arrays.array(one) for one in (dy, *inputs)], {}, kind.options)
    given = [rig.arrays.array(one) for one in (dy, *inputs)]
    found = _call(rig, backward, given, {"out": given[1]}, kind.options)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(bits(rig.arrays.host(one)), bits(rig.arrays.host(other)))


BITS8 = (FLOAT8_E4M3, FLOAT8_E5M2, INT8)
