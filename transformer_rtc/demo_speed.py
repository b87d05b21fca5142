# SPDX-License-Identifier: Apache-2.0
"""How fast the demonstration's calls are on a GPU, beside torch's where it is installed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _native
from .arrays import DeviceArray
from .demo_cases import Case, forward_of
from .spec import DType

__all__ = ["Speed", "gpu_torch", "speed_of"]

_CALLS = 20
_ARRAY_BYTES = 256 << 20  # far more than an L2 cache holds
_PART_OF_MEMORY = 32


class Speed(NamedTuple):
    """How fast a call is.

    Attributes
    ----------
    rows : int
        Of its arrays.
    microseconds : float
        What a call takes, of many in a row.
    gigabytes_per_second : float
        What it reads and writes in this time.
    torch_microseconds : float or None
        What torch's call takes; None: there is no torch, or it has no such call.
    """

    rows: int
    microseconds: float
    gigabytes_per_second: float
    torch_microseconds: float | None


def gpu_torch() -> tuple[Any, str]:
    """Return torch and nothing, or None and why it is not compared with."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, f"torch cannot be imported: {error}"
    return (torch, "") if torch.cuda.is_available() else (None, "this torch has no GPU")


def _seconds(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    synchronize()
    return (time.perf_counter() - start) / _CALLS


def speed_of(case: Case, dtype: DType, device: int, torch: Any) -> Speed:
    """Time a case with many rows.

    Parameters
    ----------
    case : Case
        What is called.
    dtype : DType
        Of all arrays.
    device : int
        The GPU's ordinal.
    torch : module or None
        What to compare with, and whose tensors are taken; None: arrays of this package.
    """
    most = min(_ARRAY_BYTES, _native.device_memory(device) // _PART_OF_MEMORY)
    rows = max(1, most // (case.columns * dtype.bytes))
    shapes = [(rows, case.columns) if letter == "r" else (case.columns,) for letter in case.shapes]
    results = forward_of(case).shapes.count("r") if case.is_backward else 1
    size = (case.shapes.count("r") + results) * rows * case.columns * dtype.bytes
    theirs = None
    if torch is None:
        stream = _native.own_stream(device)
        arrays = [_device_array(shape, dtype, device, stream) for shape in (*shapes, shapes[0])]
        *given, out = arrays
        seconds = _seconds(
            lambda: case.operator(*given, out=out, stream=stream),
            lambda: _native.synchronize_stream(device, stream),
        )
    else:
        with torch.cuda.device(device):
            tensors = [torch.randn(shape, dtype=getattr(torch, dtype.name), device="cuda") for shape in shapes]
            seconds = _seconds(lambda: case.operator(*tensors), torch.cuda.synchronize)
            theirs = _torch_seconds(torch, case, tensors)
    return Speed(rows, seconds * 1e6, size / seconds / 1e9, None if theirs is None else theirs * 1e6)


def _device_array(shape: tuple[int, ...], dtype: DType, device: int, stream: int) -> DeviceArray:
    size = dtype.bytes
    for extent in shape:
        size *= extent
    return DeviceArray(_native.Buffer(device, size), shape, dtype.id, stream)


def _torch_seconds(torch: Any, case: Case, tensors: list[Any]) -> float | None:
    """Return the time of torch's forward call, or of autograd's backward; None where this torch lacks it."""
    try:
        if not case.is_backward:
            return _seconds(lambda: case.torch(torch, *tensors), torch.cuda.synchronize)
        dy, *given = tensors
        forward = forward_of(case)
        given += [torch.randn_like(given[-1]) for _ in forward.shapes[len(given) :]]  # a bias, which has a gradient
        given = [tensor.requires_grad_() for tensor in given[: len(forward.shapes)]]
        y = case.torch(torch, *given)
        return _seconds(lambda: torch.autograd.grad(y, given, dy, retain_graph=True), torch.cuda.synchronize)
    except (AttributeError, RuntimeError):  # it is too old, or there is too little memory
        return None
