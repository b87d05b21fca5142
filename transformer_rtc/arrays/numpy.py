# SPDX-License-Identifier: Apache-2.0
"""Arrays of numpy, and memory of the host as numpy sees it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import AllocationError, ArgumentError
from ..spec import DTYPES
from .dlpack import CPU
from .dtypes import numpy_dtype, storage_dtype
from .framework import Framework, RawView, element_strides


class Numpy(Framework):
    """Arrays of numpy."""

    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        if isinstance(array, np.ma.MaskedArray):
            raise ArgumentError(f"{argument} must have no mask; pass its .filled()")
        if not array.dtype.isnative:
            raise ArgumentError(f"{argument} must have the machine's byte order; it is {array.dtype.str}")
        dtype = self._dtype_of(array.dtype, argument)
        strides = element_strides(array.strides, array.shape, array.itemsize, argument)
        return RawView(array.ctypes.data, array.shape, strides, dtype, CPU, 0, not array.flags.writeable)

    def check_dtype(self, dtype: int, argument: str) -> None:
        try:
            numpy_dtype(dtype)
        except ImportError as error:
            name = DTYPES[dtype].name
            raise ArgumentError(
                f"{argument} is {name}, of which numpy has arrays only with ml_dtypes: pip install ml_dtypes"
            ) from error


def host_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise AllocationError(f"an output of the shape {shape} could not be allocated: {error}") from error


def host_array(view: RawView) -> np.ndarray[Any, Any]:
    """Return host memory as numpy sees it, with the storage type."""
    dtype = storage_dtype(view.dtype)

    class Memory:
        __array_interface__ = {
            "shape": view.shape, "typestr": dtype.str, "data": (view.pointer, view.read_only),
            "strides": tuple(stride * dtype.itemsize for stride in view.strides), "version": 3,
        }  # fmt: skip

    return np.asarray(Memory())
