"""The CUDA text that ships with the package, as {name: text}."""

from __future__ import annotations

import os
import re
from functools import cache

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@cache
def texts() -> dict[str, str]:
    """Return every header and kernel source by its name."""
    here = os.path.dirname(os.path.realpath(__file__))
    found = {}
    for name in ("headers", "kernel_sources"):
        # Beside this file in a wheel; beside the package in a source tree.
        folder = os.path.join(here, name)
        if not os.path.isdir(folder):
            folder = os.path.join(os.path.dirname(here), name)
        for file in sorted(os.listdir(folder)):
            if file.endswith((".cu", ".cuh")):
                with open(os.path.join(folder, file), encoding="utf-8") as text:
                    found[file] = text.read()
    return found


def included(program: str) -> dict[str, str]:
    """Return the texts that a program includes, directly or not: with it, exactly what the compiler reads."""
    found: dict[str, str] = {}
    pending = _INCLUDE.findall(program)
    while pending:
        name = pending.pop()
        text = texts().get(name)
        if text is not None and name not in found:
            found[name] = text
            pending += _INCLUDE.findall(text)
    return dict(sorted(found.items()))
