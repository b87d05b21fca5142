# SPDX-License-Identifier: Apache-2.0
"""Arrays of CuPy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import AllocationError
from .dlpack import CUDA
from .dtypes import numpy_dtype
from .framework import Framework, RawView, element_strides


class Cupy(Framework):
    """Arrays of CuPy."""

    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        dtype = self._dtype_of(array.dtype, argument)
        strides = element_strides(array.strides, array.shape, array.itemsize, argument)
        return RawView(array.data.ptr, array.shape, strides, dtype, CUDA, array.device.id, False)

    def stream(self, device: int) -> int:
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)

    @contextlib.contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device):
            if stream == cuda.get_current_stream(device).ptr:
                yield
            else:
                with cuda.ExternalStream(stream, device):
                    yield

    def empty(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        try:
            made = sys.modules["cupy"].empty(shape, numpy_dtype(dtype))
        except (MemoryError, ValueError) as error:
            raise AllocationError(f"CuPy could not allocate an output: {error}") from error
        return made, made.data.ptr
