# SPDX-License-Identifier: Apache-2.0
"""What a manager tells of a compile or a load, and whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from . import log
from .simulator import SimulatedDevice
from .spec import Target

__all__ = ["Event", "Listeners"]


class Event(NamedTuple):
    """One compile or load.

    Attributes
    ----------
    kind : str
        ``"compile"``: NVRTC or the simulator's compiler ran. ``"load"``: a cubin or a simulator's module was loaded.
        ``"load_ptx"``: PTX was loaded, and the driver compiled it.
    symbol : str
        The kernel.
    target : Target
        The architecture that the kernel is for, of a GPU or of the simulator.
    device : int or SimulatedDevice or None
        The device of a load. None: a compile.
    milliseconds : float
        How long it took.
    size : int
        Bytes of the image.
    origin : str
        Where the image came from: ``"compiler"``, ``"disk"`` (the cache), ``"companion"`` (the companion wheel) or
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


class Listeners:
    """Those who are told of events, and how many there were of each kind.

    Parameters
    ----------
    is_logged : bool
        Whether events are printed even where no handler of `logging` reads them.

    Attributes
    ----------
    counts : Counter of str
        Of events, by their kinds.
    """

    def __init__(self, is_logged: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._callbacks: dict[object, Callable[[Event], None]] = {}  # by what their `stop` knows
        self._is_logged = is_logged

    def add(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Have a callback told of every event from now on, until what is returned is called."""
        added = object()
        self._callbacks[added] = callback

        def stop() -> None:
            self._callbacks.pop(added, None)

        return stop

    def tell(self, event: Event, where: str = "") -> None:
        """Count an event, log it, and call who waits for it; `where`: the device's name in the log."""
        self.counts[event.kind] += 1
        if log.is_read(log.INFO, self._is_logged):
            what = f"{event.kind} {event.symbol} {where or event.target} {event.milliseconds:.2f} ms"
            log.tell(log.INFO, f"{what}, {event.size} bytes from {event.origin}", self._is_logged)
        for callback in tuple(self._callbacks.values()):
            callback(event)
