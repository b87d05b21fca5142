# SPDX-License-Identifier: Apache-2.0
"""What shows how far a command is: a bar by tqdm, or lines where it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["has_bar", "shown"]


def has_bar() -> bool:
    """Whether `shown` shows a bar."""
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True


def shown(unit: str, line: Callable[[Any], str]) -> Callable[[Any, int, int], None]:
    """Return what is told of each record, how many there are by now, and how many there will be.

    Parameters
    ----------
    unit : str
        What a record is of, for the bar.
    line : callable
        What a line says of a record. None is no record: it begins or ends what is shown.
    """
    try:
        from tqdm import tqdm
    except ImportError:

        def show(record: Any, done: int, total: int) -> None:
            if record is not None:
                print(f"[{done}/{total}] {line(record)}", file=sys.stderr)

        return show
    bars: list[Any] = []

    def advance(record: Any, done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc="transformer_rtc", unit=unit))
        if record is not None:
            bars[0].update()
        if done == total:
            bars[0].close()

    return advance
