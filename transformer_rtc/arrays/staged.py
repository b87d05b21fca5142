# SPDX-License-Identifier: Apache-2.0
"""Calls with arrays of the host that are staged through a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _native
from ..spec import DTYPES
from .dtypes import storage_dtype
from .framework import Framework, RawView
from .given import GivenArray
from .numpy import host_array, host_memory

_ZEROS = np.zeros(16, np.uint8)


class _Mirror:
    """Host memory copied to a device as it lies, so that strides, alignment and overlap stay what they are."""

    def __init__(self, views: Sequence[RawView | None], device: int, stream: int) -> None:
        self._device, self._stream = device, stream
        spans = sorted(self._span(view) for view in views if view is not None and 0 not in view.shape)
        merged: list[list[int]] = []
        for low, high in spans:
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        # Where host memory begins and ends; and its copy, from the 256-byte boundary before that on, so that what is
        # aligned here is aligned there.
        self._copies: list[tuple[int, int, _native.Buffer]] = []
        for low, high in merged:
            offset = low % 256
            buffer = _native.Buffer(device, offset + high - low)
            buffer.copy_from_host(offset, low, high - low, stream)
            # Kernels may read an array's first block of 16 bytes whole, though they use nothing of what is before it.
            if low % 16:
                buffer.copy_from_host(offset // 16 * 16, _ZEROS.ctypes.data, low % 16, stream)
            self._copies.append((low, high, buffer))

    @staticmethod
    def _span(view: RawView) -> tuple[int, int]:
        size = DTYPES[view.dtype].bytes
        reach = [(extent - 1) * stride * size for extent, stride in zip(view.shape, view.strides, strict=True)]
        return view.pointer + sum(min(0, way) for way in reach), view.pointer + sum(max(0, way) for way in reach) + size

    def _copy(self, view: RawView) -> tuple[int, int, _native.Buffer]:
        return next(copy for copy in self._copies if copy[0] <= view.pointer < copy[1])

    def view(self, view: RawView) -> _native.View:
        """Return the device's view of a host view."""
        pointer = 0
        if 0 not in view.shape:
            low, _, buffer = self._copy(view)
            pointer = buffer.pointer + low % 256 + view.pointer - low
        return _native.View(pointer, view.shape, view.strides, view.dtype, self._device, view.read_only)

    def copy_back(self, view: RawView) -> None:
        """Copy a view's elements, and no others, back to the host."""
        if 0 in view.shape:
            return
        low, high, buffer = self._copy(view)
        memory = np.empty(high - low, np.uint8)
        buffer.copy_to_host(low % 256, memory.ctypes.data, memory.nbytes, self._stream)
        _native.synchronize_stream(self._device, self._stream)
        host_array(view)[...] = host_array(view._replace(pointer=memory.ctypes.data + view.pointer - low))


class _Made:
    """An output on the device that is yet to come back to the host."""

    def __init__(self, buffer: _native.Buffer, shape: tuple[int, ...], dtype: int) -> None:
        self.buffer, self.shape, self.dtype = buffer, shape, dtype


def call_staged(
    native: _native.Operator,
    arrays: list[GivenArray],
    views: list[RawView | None],
    values: tuple[Any, ...],
    framework: Framework,
    device: int,
    stream: int,
) -> object:
    mirror = _Mirror(views, device, stream)

    def empty(shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        buffer = _native.Buffer(device, math.prod(shape) * storage_dtype(dtype).itemsize)
        return _Made(buffer, shape, dtype), buffer.pointer

    held = [
        None if view is None else (mirror.view(view), given.array) for view, given in zip(views, arrays, strict=True)
    ]
    result = native.run_views(held, values, empty, stream)
    for view, given in zip(views, arrays, strict=True):
        if given.written and view is not None:
            mirror.copy_back(view)
    outputs: list[object] = []
    for output in result if isinstance(result, tuple) else (result,):
        if isinstance(output, _Made):
            host = host_memory(output.shape, storage_dtype(output.dtype))
            output.buffer.copy_to_host(0, host.ctypes.data, host.nbytes, stream)
            _native.synchronize_stream(device, stream)
            outputs.append(framework.from_host(host, output.dtype))
        else:
            outputs.append(output)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]
