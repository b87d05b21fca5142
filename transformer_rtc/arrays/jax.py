# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import _native
from ..errors import ArgumentError
from ..spec import DType
from .protocols import Protocol
from .streams import context_kept

# What calls on a stream of our own read, until they are done.
_in_flight: deque[tuple[_native.Event, list[object]]] = deque()
_in_flight_lock = threading.Lock()


class Jax(Protocol):
    """Arrays of JAX, which are immutable."""

    capturable = False  # it moves and reuses memory as it likes

    def __init__(self, accepted: Mapping[str, tuple[DType, ...]]) -> None:
        super().__init__(accepted)
        self._first: Any = None  # array of the call

    def place(self, array: Any, argument: str) -> tuple[int, int]:
        # A tracer answers hasattr with what its array would have.
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise ArgumentError(f"{argument} is a JAX tracer: call this operator outside of jit, vmap and grad")
        if self._first is None:
            self._first = array
        return super().place(array, argument)

    def stream(self, device: int) -> int:
        return _native.own_stream(device)

    def check_out(self, argument: str) -> None:
        raise ArgumentError(f"{argument} is a JAX array, and those are immutable: leave it out")

    def finish(self, outputs: tuple[Any, ...], stream: int, arrays: list[object]) -> tuple[Any, ...]:
        # JAX may reuse an input's memory as soon as nobody holds it, whatever a stream of ours still does.
        event = _native.Event(outputs[0].device, stream)
        with _in_flight_lock:
            while _in_flight and _in_flight[0][0].done():
                _in_flight.popleft()
            _in_flight.append((event, [*arrays, *self._held]))
        outputs = super().finish(outputs, stream, arrays)
        from_dlpack = sys.modules["jax"].dlpack.from_dlpack
        with context_kept():
            return tuple(from_dlpack(output) for output in outputs)

    def from_host(self, array: np.ndarray[Any, Any], dtype: int) -> object:
        (device,) = self._first.devices()  # one that is sharded has no DLPack
        return sys.modules["jax"].device_put(super().from_host(array, dtype), device)
