# SPDX-License-Identifier: Apache-2.0
"""Data types: their ids, and what numpy and the array interface protocols call them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError, shown
from ..spec import BFLOAT16, BOOL, DTYPES, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INTEGERS

# Of the array interface protocols.
TYPESTRS = {"<f4": FLOAT32.id, "<f2": FLOAT16.id, "|b1": BOOL.id} | {
    f"{'<' if dtype.bytes > 1 else '|'}{dtype.symbol[0]}{dtype.bytes}": dtype.id for dtype in INTEGERS
}
_OF_ML_DTYPES = (BFLOAT16.id, FLOAT8_E4M3.id, FLOAT8_E5M2.id)  # what numpy itself has no type for
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


def dtype_id(dtype: object) -> int:
    """Return the id (`transformer_rtc.spec.DType.id`) of a data type: torch's, numpy's, CuPy's, JAX's, or its name.

    Raises
    ------
    ArgumentError
        If it is none that operators know.
    """
    name = ""
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    # numpy would take an array for its data type.
    if name not in _BY_NAME and not isinstance(dtype, np.generic) and not hasattr(type(dtype), "__dlpack__"):
        try:
            found = np.dtype(dtype)  # type: ignore[call-overload]
            name = found.name if found.isnative else ""
        except Exception:  # numpy parses what it is given, and fails in many ways
            name = ""
    if name not in _BY_NAME:
        raise ArgumentError(f"a data type must be one of {', '.join(_BY_NAME)}; it is {shown(dtype)}")
    return _BY_NAME[name].id


def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """Return numpy's type for an id: its own, or that of ml_dtypes."""
    if dtype in _OF_ML_DTYPES:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, DTYPES[dtype].name))
        return found
    return storage_dtype(dtype)


def storage_dtype(dtype: int) -> np.dtype[Any]:
    """Return numpy's own type of the same size: for bfloat16 uint16, for 8-bit floats and workspaces uint8."""
    if dtype in DTYPES and dtype not in _OF_ML_DTYPES:
        return np.dtype(DTYPES[dtype].name)
    return np.dtype(np.uint16 if dtype == BFLOAT16.id else np.uint8)
