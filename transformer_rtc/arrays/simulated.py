# SPDX-License-Identifier: Apache-2.0
"""Calls with arrays of the host whose kernels are simulated there."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _native
from .dlpack import HOST
from .dtypes import storage_dtype
from .framework import Framework, RawView
from .given import GivenArray
from .numpy import host_memory


def call_simulated(
    native: _native.Operator,
    arrays: list[GivenArray],
    views: list[RawView | None],
    values: tuple[Any, ...],
    framework: Framework,
) -> object:
    made: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def empty(shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        array = host_memory(shape, storage_dtype(dtype))
        made[id(array)] = array, dtype
        return array, array.ctypes.data

    held = [
        None if view is None else (_native.View(*view[:4], HOST, view.read_only), given.array)
        for view, given in zip(views, arrays, strict=True)
    ]
    result = native.run_views(held, values, empty, 0)
    outputs = [
        framework.from_host(*made[id(output)]) if id(output) in made else output
        for output in (result if isinstance(result, tuple) else (result,))
    ]
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]
