# SPDX-License-Identifier: Apache-2.0
"""What this process asks for, and who is told of it. Pure: no CUDA, no files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["asked", "observe", "observers"]

# In the order in which it was needed. The last ones, as a process may run for days.
asked: deque[object] = deque(maxlen=4096)
observers: list[Callable[[object], None]] = []


def observe(what: object) -> None:
    """Keep what was asked for, and tell of it. Called where a plan or a kernel is made, not where it is used again."""
    asked.append(what)
    for tell in tuple(observers):
        tell(what)
