"""What kernels are compared with: float64 references, and errors in units of the last place of an output's type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, DType

NUMPY_TYPES: dict[DType, np.dtype[Any]] = {
    FLOAT32: np.dtype(np.float32),
    FLOAT16: np.dtype(np.float16),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
# Bits of the fraction, and the exponents of the smallest and the largest normal number.
_FORMATS = {FLOAT32: (23, -126, 127), FLOAT16: (10, -14, 15), BFLOAT16: (7, -126, 127)}
_MOST_ULPS = {FLOAT32: 4.0, FLOAT16: 1.0, BFLOAT16: 1.0}


def rms_norm(
    x: np.ndarray, weight: np.ndarray | None = None, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and rstd in float64. eps and the offset are float32 in a kernel's parameters: they are rounded first."""
    x = x.astype(np.float64)
    with np.errstate(all="ignore"):
        rstd = 1.0 / np.sqrt(np.mean(x * x, axis=-1) + np.float64(np.float32(eps)))
        y = x * rstd[..., None]
        if weight is not None:
            y = y * (weight.astype(np.float64) + np.float64(np.float32(weight_offset)))
    return y, rstd


def ulps(actual: np.ndarray, expected: np.ndarray, dtype: DType) -> np.ndarray:
    """Return each element's error in ulp of the expected value; infinity where one is NaN and the other is not."""
    fraction, lowest, highest = _FORMATS[dtype]
    actual = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        # One binade above the largest number stands for infinity: a value that rounds up to it is no error.
        beyond = np.ldexp(1.0, highest + 1)
        near, want = np.clip(actual, -beyond, beyond), np.clip(expected, -beyond, beyond)
        _, exponent = np.frexp(want)
        exponent = np.where(want == 0, lowest, np.clip(exponent - 1, lowest, highest))
        error = np.abs(near - want) / np.ldexp(1.0, exponent - fraction)
    nan = np.isnan(actual), np.isnan(expected)
    return np.where(nan[0] & nan[1], 0.0, np.where(nan[0] | nan[1], np.inf, error))


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: DType, what: str = "y") -> None:
    """Hold an output against its float64 reference, by the bound of its type."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if actual.size == 0:
        return
    error = ulps(actual, expected, dtype)
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    assert error[worst] <= _MOST_ULPS[dtype], (
        f"{what}[{', '.join(map(str, worst))}] of {actual.shape} is {actual[worst]!r}, {error[worst]:.3f} ulp from "
        f"{expected[worst]!r}; {int((error > _MOST_ULPS[dtype]).sum())} elements are beyond {_MOST_ULPS[dtype]:g} ulp"
    )


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Return rows of different magnitudes, from where eps counts to where it does not."""
    magnitude = 2.0 ** rng.uniform(-12, 6, (*shape[:-1], 1))
    return (rng.standard_normal(shape, np.float32) * magnitude).astype(NUMPY_TYPES[dtype])


def random_weight(rng: np.random.Generator, hidden: int, dtype: DType) -> np.ndarray:
    return rng.standard_normal(hidden, np.float32).astype(NUMPY_TYPES[dtype])
