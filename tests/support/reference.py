# SPDX-License-Identifier: Apache-2.0
"""What kernels are compared with: float64 references, and how far from them arithmetic in float32 may lead.

The bounds are derived, with u = 2^-24: an operation in float32 errs by at most u of its result. In an `Expected`, the
rounding to the output's type is not counted; `assert_within` adds it: half a unit in the last place.

Sums over a row. Additions are by Vec, step, lane, warp and CTA. The errors of the partial sums are independent, and
partial sums of one level are parts of the whole: with n terms of about one size their squares add up to less than twice
that of the whole, so that the sum's error has a standard deviation below u of the sum of magnitudes. `SUM` is four of
them. Where all terms are equal, errors are too: `LONGEST` additions are the longest chain that a term goes through.

rstd. Squares add up to within SUM u, those about a mean within SUM u + 2 u (a deviation errs by u), and 1 / hidden and
the addition of eps err by u each. The root halves all that. rstd is kept as a pair; stored, it errs by u more.

mean. It is a shift within LONGEST u of the mean of magnitudes, and the mean of the deviations from that, each exact or
within u: SUM u of the mean of their magnitudes. The sum of squares about the shift is as much larger as the shift's
error squared. Many forward kernels that read a row from shared memory take both from a shift which they have before the
mean, and again from a better one where that is more than sqrt(2) standard deviations from the mean: by so much the
magnitudes are larger at most, and by its square the squares. What leads from the shift to the mean errs by 3 u of it,
and its square by 6 u. Every forward is allowed as much.

y. A deviation errs by u in each of two subtractions, of which the first one's result is larger by the shift's distance
from the mean, and by the mean's error; weight + offset errs by u. The two products err by u together where y is
float32, for the first one's error is corrected; elsewhere by u each, and by u because rstd is cut to one float. Adding
a bias or a residual errs by u of the result. Where x * rstd is rounded before the weight, what it is rounded to is one
of the numbers that those within its error are rounded to, mostly the same one, and one more product errs by u.

dx = rstd * (g - x' * mean(g * x') - mean(g)) + dresidual. g = dy * (weight + offset) errs by 2 u. x' errs as above, or
by 2 u where mean and rstd are given: what is given is exact. A mean over the row errs by SUM u, and by what its terms
do, of the mean of magnitudes. The three terms cancel: each subtraction errs by u of their magnitudes.

dweight, dbias. A chain of additions errs by u for each addition, of the sum of magnitudes: a thread's rows in turn, the
rows that a CTA holds together, and in the second launch the groups that a thread of one of 8 warps has in turn, what
other lanes have, in 4 steps at most, and the 8 warps; or as many as there are groups: adding 0 does not err.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from transformer_rtc.spec import BFLOAT16, BOOL, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8, INTEGERS, DType

NUMPY_TYPES: dict[DType, np.dtype[Any]] = {
    FLOAT32: np.dtype(np.float32),
    FLOAT16: np.dtype(np.float16),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    FLOAT8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    **{dtype: np.dtype(dtype.name) for dtype in (*INTEGERS, BOOL)},
}
# Bits of the fraction, and the exponents of the smallest and the largest normal number.
_FORMATS = {
    FLOAT32: (23, -126, 127),
    FLOAT16: (10, -14, 15),
    BFLOAT16: (7, -126, 127),
    FLOAT8_E4M3: (3, -6, 8),
    FLOAT8_E5M2: (2, -14, 15),
}
# The largest numbers of the types that saturate.
LARGEST = {FLOAT8_E4M3: 448.0, FLOAT8_E5M2: 57344.0, INT8: 127.0}
_MOST_ULPS = {FLOAT32: 4.0, FLOAT16: 1.0, BFLOAT16: 1.0}

U = 2.0**-24
SUM = 4.0
LONGEST = 32.0
_SMALLEST = 2.0**-149


@dataclass(frozen=True)
class Expected:
    """A result in float64, and how far float32 may be from it before the result is rounded to its type."""

    value: np.ndarray
    bound: np.ndarray

    def __getitem__(self, key: Any) -> Expected:
        return Expected(self.value[key], self.bound[key])

    @property
    def largest(self) -> Expected:
        """The largest magnitude of each row."""
        size = np.abs(self.value)
        value = size.max(axis=-1)
        with np.errstate(invalid="ignore"):
            above, below = (size + self.bound).max(axis=-1) - value, value - (size - self.bound).max(axis=-1)
        return Expected(value, np.maximum(above, below))


def _wide(array: np.ndarray | None, otherwise: float = 0.0) -> np.ndarray:
    return np.float64(otherwise) if array is None else array.astype(np.float64)


def _float32(value: float) -> np.float64:
    """Return what a kernel's parameters hold."""
    return np.float64(np.float32(value))


class _Statistics(NamedTuple):
    """Of rows, all [..., 1]."""

    mean: np.ndarray
    rstd: np.ndarray
    mean_error: np.ndarray
    rstd_error: np.ndarray  # of rstd
    shift_error: np.ndarray
    distance: np.ndarray  # of a shift from the mean, the most


def _statistics(x: np.ndarray, centred: bool, eps: float, shifted: bool = False) -> _Statistics:
    """Return them; `shifted`: found from a shift that is not the mean."""
    zero = np.zeros((*x.shape[:-1], 1))
    mean = x.mean(axis=-1, keepdims=True) if centred else zero
    mean = np.where(np.isinf(mean), np.nan, mean)  # deviations from it are no numbers
    deviation = x - mean
    squares = np.mean(deviation * deviation, axis=-1, keepdims=True)
    shift_error = mean_error = zero
    distance = np.sqrt(2 * squares) if shifted else zero
    if centred:
        shift_error = LONGEST * U * np.abs(x).mean(axis=-1, keepdims=True)
        magnitudes = np.abs(deviation).mean(axis=-1, keepdims=True) + shift_error + distance
        mean_error = U * (SUM * magnitudes + 3 * distance) + _SMALLEST
    of_squares = U * ((SUM + 2 * centred) * (squares + shift_error**2 + distance**2) + 6 * distance**2)
    rstd_error = 0.5 * (of_squares / (squares + _float32(eps)) + 2 * U)
    return _Statistics(mean, 1.0 / np.sqrt(squares + _float32(eps)), mean_error, rstd_error, shift_error, distance)


def added(x: np.ndarray, residual: np.ndarray, dtype: DType | None = None) -> np.ndarray:
    """Return x + residual as a kernel rounds it: to float32, then to a type, by default the residual's."""
    with np.errstate(all="ignore"):
        total = x.astype(np.float32) + residual.astype(np.float32)
        return total.astype(NUMPY_TYPES[dtype] if dtype else residual.dtype)


def forward(
    centred: bool,
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: np.ndarray | None = None,
    out: DType = FLOAT32,
    rounds: bool = False,
) -> dict[str, Expected]:
    """Return out, mean and rstd. `residual` is added to y; for what is added before, x is what `added` returns.

    `rounds`: x * rstd is rounded to x's type before the weight, where that is no float32.
    """
    rounded = x.dtype if rounds and x.dtype != np.float32 else None
    x, b, r = _wide(x), _wide(bias), _wide(residual)
    w = np.float64(1.0) if weight is None else _wide(weight) + _float32(weight_offset)
    with np.errstate(all="ignore"):
        s = _statistics(x, centred, eps, shifted=centred)
        normal = (x - s.mean) * s.rstd
        products = 3 if out is not FLOAT32 else 0 if bias is None and residual is None else 1
        relative = s.rstd_error + U * ((weight is not None) + products + 2 * centred)
        y = normal * w
        deviation_error = s.mean_error + U * s.distance
        bound = np.abs(y) * relative + deviation_error * s.rstd * np.abs(w) + _SMALLEST * (1 + np.abs(w))
        if rounded is not None:
            error = np.abs(normal) * (s.rstd_error + 4 * U)
            error = np.where(np.isfinite(error), error, 0)  # of a row with an infinity
            least, most = ((normal + error * way).astype(rounded).astype(np.float64) for way in (-1, 1))
            normal = np.where(least == most, least, (least + most) / 2)
            y = normal * w
            bound = np.where(least == most, 0, np.abs(most - least) / 2 * np.abs(w)) + 2 * U * np.abs(y) + _SMALLEST
        for more in [b] * (bias is not None) + [r] * (residual is not None):
            y = y + more
            bound = bound + U * np.abs(y)
        return {
            "out": Expected(y, bound),
            "mean": Expected(s.mean[..., 0], s.mean_error[..., 0]),
            "rstd": Expected(s.rstd[..., 0], (s.rstd * s.rstd_error)[..., 0]),
        }


def scaled(y: Expected, scale: np.ndarray) -> Expected:
    """Return y times a scale: one more product."""
    scale = _wide(scale)
    with np.errstate(all="ignore"):
        return Expected(y.value * scale, (y.bound + U * np.abs(y.value)) * np.abs(scale))


def row_scaled(y: Expected, dtype: DType) -> tuple[Expected, Expected]:
    """Return y over its row's scale, and the scales.

    They are the largest magnitude over the largest number, or 2^-126 where that is less, and 1 for zeros.
    """
    with np.errstate(all="ignore"):
        largest = y.largest
        zeros = largest.value == 0
        scale = np.where(zeros, 1.0, np.maximum(largest.value / LARGEST[dtype], 2.0**-126))
        relative = np.where(zeros, 0.0, largest.bound / largest.value)
        value = y.value / scale[..., None]
        # 1 / scale is rounded, and so is the product.
        bound = y.bound / scale[..., None] + np.abs(value) * (relative[..., None] + 2 * U)
        return Expected(value, bound), Expected(scale, scale * relative)


def largest_magnitude(y: Expected, before: float = 0.0) -> Expected:
    """Return what amax becomes."""
    flat = Expected(np.append(y.value, before), np.append(y.bound, 0.0))
    return flat[None].largest


def additions(rows: int, groups: int = 1) -> int:
    """Return the longest chain of additions in a sum over rows that are shared out over groups of CTAs."""
    return math.ceil(rows / groups) + 8 + min(groups, math.ceil(groups / 8) + 4 + 8)


def backward(
    centred: bool,
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    mean: np.ndarray | None = None,
    rstd: np.ndarray | None = None,
    dresidual: np.ndarray | None = None,
    groups: int = 1,
) -> dict[str, Expected]:
    """Return out (dx), dweight and dbias; these are sums over rows, those of each head where the weight has heads."""
    x, dy = _wide(x), _wide(dy)
    w = np.float64(1.0) if weight is None else _wide(weight) + _float32(weight_offset)
    zero = np.zeros((*x.shape[:-1], 1))
    with np.errstate(all="ignore"):
        if rstd is None:
            s = _statistics(x, centred, eps)
            of_rstd = s.rstd_error + U  # cut to one float
        else:
            given = zero if mean is None else _wide(mean)[..., None]
            s = _Statistics(given, _wide(rstd)[..., None], zero, zero, zero, zero)
            of_rstd = zero
        normal = (x - s.mean) * s.rstd
        of_normal = np.abs(normal) * (of_rstd + U * (2 + centred)) + s.mean_error * s.rstd

        def mean_of(values: np.ndarray) -> np.ndarray:
            return values.mean(axis=-1, keepdims=True)

        g = dy * w
        size = np.abs(g)
        projection, level = mean_of(g * normal), mean_of(g) if centred else zero
        # A term is g times the deviation from the shift, and rstd and 1 / hidden are multiplied afterwards.
        of_projection = (
            (SUM + 3) * U * mean_of(size * (np.abs(normal) + s.shift_error * s.rstd))
            + np.abs(projection) * (of_rstd + 3 * U)
            + s.mean_error * s.rstd * mean_of(size)
        )
        of_level = (SUM + 3) * U * mean_of(size) if centred else zero
        terms = size + np.abs(normal * projection) + np.abs(level)
        inner = g - normal * projection - level
        error = 2 * U * size + of_normal * np.abs(projection) + np.abs(normal) * of_projection + of_level
        error = error + (1 + centred) * U * terms
        dx = inner * s.rstd
        bound = error * s.rstd + np.abs(dx) * of_rstd
        if dresidual is not None:
            dx = dx + _wide(dresidual)
        bound = bound + U * np.abs(dx) + _SMALLEST
        heads = weight is not None and weight.ndim == 2
        axes = tuple(range(dy.ndim - 1 - heads))
        chain = additions(math.prod(dy.shape[: dy.ndim - 1 - heads]), groups) * U
        return {
            "out": Expected(dx, bound),
            "dweight": Expected(
                (dy * normal).sum(axis=axes),
                (np.abs(dy) * of_normal).sum(axis=axes) + chain * np.abs(dy * normal).sum(axis=axes) + _SMALLEST,
            ),
            "dbias": Expected(dy.sum(axis=axes), chain * np.abs(dy).sum(axis=axes)),
        }


def rms_norm(
    x: np.ndarray, weight: np.ndarray | None = None, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and rstd in float64. eps and the offset are float32 in a kernel's parameters: they are rounded first."""
    found = forward(False, x, weight, None, eps, weight_offset)
    return found["out"].value, found["rstd"].value


def unit(expected: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the unit in the last place of each number in a type."""
    if dtype is INT8:
        return np.ones_like(expected)
    fraction, lowest, highest = _FORMATS[dtype]
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(expected)
        exponent = np.where(expected == 0, lowest, np.clip(exponent - 1, lowest, highest))
        return np.ldexp(1.0, exponent - fraction)


def _clipped(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is INT8:
        return np.clip(values, -128.0, 127.0)
    # One binade above the largest number stands for infinity: a value that rounds up to it is no error.
    beyond = LARGEST.get(dtype) or np.ldexp(1.0, _FORMATS[dtype][2] + 1)
    return np.clip(values, -beyond, beyond)


def ulps(actual: np.ndarray, expected: np.ndarray, dtype: DType) -> np.ndarray:
    """Return each element's error in ulp of the expected value; infinity where one is NaN and the other is not."""
    actual = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        near, want = _clipped(actual, dtype), _clipped(expected, dtype)
        error = np.abs(near - want) / unit(want, dtype)
    nan = np.isnan(actual), np.isnan(expected)
    return np.where(nan[0] & nan[1], 0.0, np.where(nan[0] | nan[1], np.inf, error))


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: DType, what: str = "y") -> None:
    """Hold an output against its float64 reference, by the most ulp that rms_norm's y or rstd may be off."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if actual.size == 0:
        return
    error = ulps(actual, expected, dtype)
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    assert error[worst] <= _MOST_ULPS[dtype], (
        f"{what}[{', '.join(map(str, worst))}] of {actual.shape} is {actual[worst]!r}, {error[worst]:.3f} ulp from "
        f"{expected[worst]!r}; {int((error > _MOST_ULPS[dtype]).sum())} elements are beyond {_MOST_ULPS[dtype]:g} ulp"
    )


def excess(actual: np.ndarray, expected: Expected, dtype: DType) -> np.ndarray:
    """Return each element's error over what it may be."""
    if dtype is INT8:
        # int8 has no NaN: it is 0.
        expected = Expected(np.nan_to_num(expected.value, nan=0.0, posinf=np.inf, neginf=-np.inf), expected.bound)
    error = ulps(actual, expected.value, dtype)
    with np.errstate(all="ignore"):
        # Rows with an infinity or a NaN have no bound: what is a number in them is exact.
        allowed = np.where(np.isfinite(expected.bound), expected.bound, 0.0)
        # What is rounded may be this much larger, where the type's numbers lie further apart.
        rounding = 0.5 * unit(_clipped(np.abs(expected.value) + allowed, dtype), dtype)
        return error / ((allowed + rounding) / unit(_clipped(expected.value, dtype), dtype))


def assert_within(actual: np.ndarray, expected: Expected, dtype: DType, what: str = "y") -> None:
    """Hold an output against its float64 reference, by the bound that its arithmetic has."""
    assert actual.dtype == NUMPY_TYPES[dtype], f"{what}: {actual.dtype} instead of {dtype.name}"
    assert actual.shape == expected.value.shape, f"{what}: {actual.shape} instead of {expected.value.shape}"
    if actual.size == 0:
        return
    over = excess(actual, expected, dtype)
    worst = np.unravel_index(int(np.argmax(over)), over.shape)
    assert over[worst] <= 1, (
        f"{what}[{', '.join(map(str, worst))}] of {actual.shape} is {actual[worst]!r} instead of "
        f"{expected.value[worst]!r}: {over[worst]:.3f} times what its arithmetic ({expected.bound[worst]:.3g}) and "
        f"rounding may do; {int((over > 1).sum())} elements are beyond theirs"
    )


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Return rows of different magnitudes, from where eps counts to where it does not."""
    magnitude = 2.0 ** rng.uniform(-12, 6, (*shape[:-1], 1))
    return (rng.standard_normal(shape, np.float32) * magnitude).astype(NUMPY_TYPES[dtype])


def random_weight(rng: np.random.Generator, shape: int | tuple[int, ...], dtype: DType) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(NUMPY_TYPES[dtype])
