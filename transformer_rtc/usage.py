# SPDX-License-Identifier: Apache-2.0
"""Who is told of what this process asks for. Pure: no CUDA, no files."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["observe", "observers"]

observers: list[Callable[[object], None]] = []


def observe(what: object) -> None:
    """Tell of what was asked for. Called where a plan or a kernel is made, not where it is used again."""
    for tell in tuple(observers):
        tell(what)
