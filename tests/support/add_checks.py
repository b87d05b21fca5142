# SPDX-License-Identifier: Apache-2.0
"""What `add` promises, in the simulator and on a GPU: sums in numpy's integers, and in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from frameworks import bits
from reference import NUMPY_TYPES, Expected, U, assert_within
from rigs import Rig

import transformer_rtc
from transformer_rtc import using
from transformer_rtc.spec import BFLOAT16, BOOL, FLOAT16, FLOAT32, INT32, INT64, INTEGERS, UINT8, UINT64, DType

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
NUMBERS = (*FLOATS, *INTEGERS, BOOL)

# Shapes of x and of the other array. Those of one row that has no gaps come first; then what is broadcast along rows,
# along columns, along both, to more dimensions, and from none; and what is empty.
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 8), (3, 8)), ((13, 4, 4), (13, 4, 4)), ((5, 3001), (5, 3001)), ((700, 1), (700, 1)), ((1,), (1,)),
    ((3, 1032), (1032,)), ((3, 1), (1, 5)), ((5,), (2, 3, 5)), ((2, 1, 64), (3, 1)), ((4, 37), (4, 1)), ((), (6,)),
    ((2, 48), ()), ((1, 1), (3, 16)), ((0,), (0,)), ((3, 0), (1,)), ((0, 8), (8,)),
)  # fmt: skip
# Shapes with the strides of x, the other array and the sum, as InfiniOps tests its own addition.
STRIDED = (
    ((13, 4), (10, 1), (10, 1), (10, 1)),
    ((13, 4), (0, 1), (4, 1), (4, 1)),
    ((13, 4, 4), (20, 4, 1), (20, 4, 1), (20, 4, 1)),
    ((13, 4, 4), (4, 0, 1), (0, 4, 1), (16, 4, 1)),
    ((16, 5632), (13312, 1), (13312, 1), (13312, 1)),
    ((13, 16, 2), (128, 4, 1), (0, 2, 1), (64, 4, 1)),
    ((13, 16, 2), (128, 4, 1), (2, 0, 1), (64, 4, 1)),
    ((4, 4, 5632), (45056, 5632, 1), (45056, 5632, 1), (45056, 5632, 1)),
    # And of columns of one element.
    ((6, 40), (8, 0), (40, 1), (48, 1)),
    ((6, 40), (0, 0), (0, 0), (40, 1)),
)


def promoted(x: DType, other: DType) -> DType | None:
    """Return the data type of a sum of arrays with dimensions; None: it has to be given."""
    floating = [one for one in (x, other) if one in FLOATS]
    if floating:
        return floating[0] if len({*floating}) == 1 else FLOAT32
    if x is other:
        return x
    if any(one in INTEGERS[5:] for one in (x, other)):
        return None
    both = np.promote_types(x.name, other.name)
    return next(one for one in NUMBERS if one.name == both.name)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Return numbers of every magnitude that a type has."""
    kind = NUMPY_TYPES[dtype]
    if dtype is BOOL:
        return np.asarray(rng.integers(0, 2, shape), kind)
    if dtype in INTEGERS:
        return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.bytes), kind).reshape(shape).copy()
    return np.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape), kind)


def expected_of(x: np.ndarray, other: np.ndarray, out: DType) -> Expected | np.ndarray:
    """Return a sum: of integers and bools exactly, else in float64 with its bound."""
    exact = all(one.dtype.kind in "iub" for one in (x, other))
    with np.errstate(all="ignore"):
        if exact and out not in FLOATS:
            # Modulo 2^64, and then modulo y's.
            total = x.astype(np.uint64) + other.astype(np.uint64)
            return total != 0 if out is BOOL else total.astype(NUMPY_TYPES[out])
        if exact:
            wide = np.int64 if "i" in (x.dtype.kind, other.dtype.kind) else np.uint64
            total = (x.astype(wide) + other.astype(wide)).astype(np.longdouble)
            return Expected(total, (0.0 if out is FLOAT32 else U) * np.abs(total))
        a, b = x.astype(np.longdouble), other.astype(np.longdouble)
        # An integer is rounded to float32 before, and the sum to float32 before it is rounded to fewer bits.
        rounded = sum(U * np.abs(one) * (given.dtype.kind in "iu") for one, given in ((a, x), (b, other)))
        return Expected(a + b, rounded + (0.0 if out is FLOAT32 else U) * (np.abs(a + b) + rounded))


def assert_sum(found: np.ndarray, x: np.ndarray, other: np.ndarray, out: DType, what: str) -> None:
    expected = expected_of(x, other, out)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=what)
    else:
        assert_within(found, expected, out, what)


def hold_types(rig: Rig, x_type: DType, other_type: DType, out: DType | None, rng: np.random.Generator) -> None:
    """Hold sums of two types, of every way in which shapes are broadcast."""
    for x_shape, other_shape in SHAPES:
        x, other = numbers(rng, x_shape, x_type), numbers(rng, other_shape, other_type)
        of = out or promoted(x_type, other_type)
        assert of is not None
        # Arrays without dimensions promote otherwise.
        options = {"out_dtype": of.name} if out or () in (x_shape, other_shape) else {}
        assert_sum(rig("add", x, other, **options), x, other, of, f"{x_shape} + {other_shape}")


def hold_strides(
    rig: Rig, case: Sequence[tuple[int, ...]], dtype: DType, offset: int, rng: np.random.Generator
) -> None:
    """Hold a sum of arrays that lie apart, in an output of the caller's around which nothing is written."""
    shape, *strides = case
    hosts, given = [], []
    for number, of in enumerate(strides[:2]):
        # A dimension of stride 0 has one element, which is broadcast.
        own = tuple(1 if stride == 0 else size for size, stride in zip(shape, of, strict=True))
        hosts.append(numbers(rng, own, dtype))
        array = rig.guarded(own, dtype, offset and offset + number, of).fill(hosts[-1]).array
        given.append(array.expand(shape) if hasattr(array, "expand") else np.broadcast_to(array, shape))
    out = rig.guarded(shape, dtype, offset and offset + 2, strides[2])
    with using(rig.implementation):
        found = rig.arrays.host(transformer_rtc.add(*given, out=out.array))
    assert_sum(found, *(np.broadcast_to(one, shape) for one in hosts), dtype, f"{shape} {strides}")
    out.assert_intact_around()


def hold_in_place(rig: Rig, dtype: DType, rng: np.random.Generator) -> None:
    """Hold a sum in the place of either array, where that has its shape."""
    for x_shape, other_shape, places in (((3, 40), (3, 40), (0, 1)), ((3, 40), (40,), (0,)), ((1,), (3, 5), (1,))):
        x, other = numbers(rng, x_shape, dtype), numbers(rng, other_shape, dtype)
        wanted = rig("add", x, other)
        for place in places:
            given = [rig.arrays.array(one) for one in (x, other)]
            found = rig("add", *given, out=given[place])
            np.testing.assert_array_equal(bits(found), bits(wanted))


def hold_special(rig: Rig, dtype: DType) -> None:
    """Hold infinities, NaN, signed zeros, and what overflows."""
    large = float(np.finfo(np.float32).max if dtype is not FLOAT16 else np.finfo(np.float16).max)
    x = np.array([np.inf, -np.inf, np.inf, np.nan, 0.0, -0.0, -0.0, large, 1.0], NUMPY_TYPES[dtype])
    other = np.array([1.0, 1.0, -np.inf, 1.0, -0.0, -0.0, 0.0, large, np.nan], NUMPY_TYPES[dtype])
    found = rig("add", x, other).astype(np.float32)
    wanted = np.array([np.inf, -np.inf, np.nan, np.nan, 0.0, -0.0, 0.0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found)[4:7], np.signbit(wanted)[4:7])


def pairs() -> Iterator[tuple[DType, DType, DType | None]]:
    """Yield types of x, the other array and the sum; None: that to which torch promotes them."""
    for x, other in itertools.product(NUMBERS, repeat=2):
        yield x, other, None if promoted(x, other) else INT64
    yield from (
        (INT32, INT32, FLOAT32), (UINT64, UINT64, FLOAT32), (INT64, INT64, BFLOAT16),
        (UINT64, UINT8, FLOAT32), (BOOL, UINT64, FLOAT16), (BFLOAT16, BFLOAT16, FLOAT32),
        (FLOAT32, FLOAT32, FLOAT16), (INT64, INT32, UINT8), (BOOL, BOOL, INT32),
    )  # fmt: skip
