"""The CUDA text that ships with the package, as {name: text}."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def _folders() -> tuple[Path, ...]:
    here = Path(__file__).resolve().parent
    # Beside this file in a wheel; beside the package in a source tree.
    return tuple(
        here / name if (here / name).is_dir() else here.parent / name for name in ("headers", "kernel_sources")
    )


@cache
def texts() -> dict[str, str]:
    """Return every header and kernel source by its name."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for folder in _folders()
        for path in sorted(folder.iterdir())
        if path.suffix in (".cu", ".cuh")
    }


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
