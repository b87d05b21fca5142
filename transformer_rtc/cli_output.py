# SPDX-License-Identifier: Apache-2.0
"""What the commands of the command line print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from .errors import TransformerRtcError

__all__ = ["Failure", "emit", "size_text", "table"]


class Failure(Exception):
    """What a command itself finds wrong, or says of an error.

    Attributes
    ----------
    error : TransformerRtcError or None
        What it says more of.
    """

    def __init__(self, told: str, error: TransformerRtcError | None = None) -> None:
        super().__init__(told)
        self.error = error


def emit(arguments: argparse.Namespace, document: object, lines: Sequence[str]) -> None:
    """Print a command's result: as JSON where it was asked for, else as lines."""
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        for line in lines:
            print(line)


def size_text(count: int) -> str:
    """Return a number of bytes with its unit."""
    if count < 2**10:
        return f"{count} bytes"
    return f"{count / 2**10:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; nothing where there are no rows. A header that begins with ``>`` is on the right."""
    if not rows:
        return []
    names = [header.removeprefix(">") for header in headers]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if header.startswith(">") else cell.ljust(width)
            for cell, width, header in zip(row, widths, headers, strict=True)
        ).rstrip()
        for row in (names, *rows)
    ]
