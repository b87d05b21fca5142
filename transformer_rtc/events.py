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
    """

    kind: str
    symbol: str
    target: Target
    device: int | SimulatedDevice | None
    milliseconds: float
    size: int
    origin: str
