# SPDX-License-Identifier: Apache-2.0
"""What a call asks of a framework, and what it learns of an array."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..spec import DType
from .dtypes import dtype_id, numpy_dtype


class RawView(NamedTuple):
    """An array as its framework tells it. Strides are in elements; `device_type` is DLPack's."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    device_type: int
    device: int
    read_only: bool


class Framework:
    """What `call` asks of a framework. One instance serves one call.

    Attributes
    ----------
    capturable : bool
        Whether its arrays can be part of a graph that a stream is captured into.
    graph_memory : bool
        Whether what it allocates during a capture belongs to the graph, also when nobody holds it any more.
    capturing : bool
        Whether the call's stream is being captured.
    """

    capturable = True
    graph_memory = False

    def __init__(self, accepted: Mapping[str, tuple[DType, ...]]) -> None:
        self.capturing = False
        self._accepted = accepted  # data types, by what messages call an argument

    def _dtype_of(self, dtype: object, argument: str) -> int:
        with contextlib.suppress(ArgumentError):
            return dtype_id(dtype)
        names = ", ".join(accepted.name for accepted in self._accepted[argument])
        raise ArgumentError(f"{argument} must be one of {names}; it is {dtype}")

    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        """View an array; what makes it is waited for by `stream`, or by the caller where that is None."""
        raise NotImplementedError

    def place(self, array: Any, argument: str) -> tuple[int, int]:
        """Return where an array is: (DLPack device type, device)."""
        view = self.view(array, argument, None)
        return view.device_type, view.device

    def stream(self, device: int) -> int:
        """Return the stream that the framework would use now."""
        raise NotImplementedError

    @contextlib.contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        """Allocate on a device, for use on a stream."""
        yield

    def empty(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        """Return a new array and its pointer."""
        raise NotImplementedError

    def finish(self, outputs: tuple[Any, ...], stream: int, arrays: list[object]) -> tuple[Any, ...]:
        """Return what the user gets."""
        return outputs

    def from_host(self, array: np.ndarray[Any, Any], dtype: int) -> object:
        """Return a host array, of the storage type, as the framework's own."""
        return array.view(numpy_dtype(dtype))

    def dispatches(self, arrays: Sequence[Any]) -> bool:
        """Whether the framework does more with a call with these arrays than run it, some of which may be None."""
        return False

    def records(self, arrays: Sequence[Any]) -> bool:
        """Whether the framework is to record a gradient of a call with these arrays, some of which may be None."""
        return False

    def was_written(self, array: Any) -> None:
        """Learn that an array of the caller's was written."""

    def check_out(self, argument: str) -> None:
        """Refuse an output given by the user where arrays are immutable."""

    def check_dtype(self, dtype: int, argument: str) -> None:
        """Refuse the data type of an output that the framework has no arrays of."""


def element_strides(strides: Sequence[int] | None, shape: tuple[int, ...], size: int, argument: str) -> tuple[int, ...]:
    if strides is None:
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if any(stride % size for stride in strides):
        raise ArgumentError(
            f"{argument} must have strides that are multiples of its elements' size; they are {strides}"
        )
    return tuple(stride // size for stride in strides)


def check_addressable(
    pointer: int, shape: Sequence[int], strides: Sequence[int] | None, size: int, argument: str
) -> None:
    """Refuse what describes no memory: `strides` are in the unit of `size` bytes, or dense where they are None."""
    if strides is None:
        reach = math.prod(shape)
    elif len(strides) != len(shape):
        raise ArgumentError(f"{argument} has {len(shape)} dimensions and {len(strides)} strides")
    else:
        reach = 1 + sum(abs(stride) * max(0, extent - 1) for extent, stride in zip(shape, strides, strict=True))
    elements = math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= pointer < 2**64 or max(reach, elements) * size >= 2**62:
        raise ArgumentError(
            f"{argument} must lie in memory that can be addressed; it is at {pointer:#x} with the shape {tuple(shape)}"
        )
