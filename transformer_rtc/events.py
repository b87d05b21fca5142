# SPDX-License-Identifier: Apache-2.0
"""What a manager tells of a compile or a load."""

from __future__ import annotations

from typing import NamedTuple

from .simulator import SimulatedDevice
from .spec import Target

__all__ = ["Event"]


class Event(NamedTuple):
    """One compile or load.

    Attributes
    ----------
    kind : str
        ``"compile"``: NVRTC ran, or the simulator's compiler. ``"load"``: a cubin or a simulator's module was loaded.
        ``"load_ptx"``: PTX was, and the driver compiled it.
    symbol : str
        The kernel.
    target : Target
        What it is for: an architecture; a GPU's, or the simulator's.
    device : int or SimulatedDevice or None
        Of a load.
    milliseconds : float
        What it took.
    size : int
        Bytes of the image.
    origin : str
        Where the image came from: ``"compiler"``; ``"disk"``: the cache; ``"companion"``: the companion wheel; or
        ``"package"``.

    Examples
    --------
    >>> from transformer_rtc import Event, KernelManager, TextSpec
    >>> from transformer_rtc.cache import DiskCache
    >>> def tell(event: Event) -> None:
    ...     print(event.kind, event.symbol, event.target, event.origin)
    >>> manager = KernelManager(DiskCache(None))  # an empty one: all has to be compiled
    >>> stop = manager.on_event(tell)
    >>> image = manager.image(TextSpec('extern "C" __global__ void nothing() {}', "nothing"), 90)
    compile nothing sm_90 compiler
    >>> stop()
    """

    kind: str
    symbol: str
    target: Target
    device: int | SimulatedDevice | None
    milliseconds: float
    size: int
    origin: str
