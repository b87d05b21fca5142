# SPDX-License-Identifier: Apache-2.0
"""The CUDA text that ships with the package, as {name: text}."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache

from . import directives
from .errors import ArgumentError

# A folder of no file: what a compiler looks for there, it does not find.
NOWHERE = "/nonexistent/"

# Looks for a newline, where "^" would be tried at every character.
_INCLUDE = re.compile(r'\n\s*#\s*include\s*"([^"]+)"')


@cache
def texts() -> dict[str, str]:
    """Return every header and kernel source by its name, that of a folder's file with the folder."""
    here = os.path.dirname(os.path.realpath(__file__))
    found = {}
    for name in ("headers", "kernel_sources"):
        # Beside this file in a wheel; beside the package in a source tree.
        folder = os.path.join(here, name)
        if not os.path.isdir(folder):
            folder = os.path.join(os.path.dirname(here), name)
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for file in sorted(files):
                if file.endswith((".cu", ".cuh")):
                    path = os.path.join(parent, file)
                    with open(path, encoding="utf-8") as text:
                        found[os.path.relpath(path, folder).replace(os.sep, "/")] = text.read()
    return found


def _includes(text: str) -> list[str]:
    return _INCLUDE.findall(f"\n{text}")


# A key is made of these for every kernel that a process uses; the texts are the package's few.
_includes_of_ours = lru_cache(maxsize=256)(_includes)


@lru_cache(maxsize=256)
def fingerprint(text: str) -> str:
    """Return the SHA-256 of one of the package's texts, in hexadecimal."""
    import hashlib  # opens OpenSSL: not at import

    return hashlib.sha256(text.encode()).hexdigest()


def included(program: str) -> dict[str, str]:
    """Return the texts that a program includes, directly or not: with it, exactly what the compiler reads."""
    found: dict[str, str] = {}
    pending = _includes(program)
    while pending:
        name = pending.pop()
        text = texts().get(name)
        if text is not None and name not in found:
            found[name] = text
            pending += _includes_of_ours(text)
    return dict(sorted(found.items()))


def _names(text: str) -> Iterator[str]:
    """Yield the names that a text includes or asks for."""
    for directive in (directives.INCLUDE, directives.HAS_INCLUDE):
        for match in directive.finditer(f"\n{text}"):
            yield match[2][1:-1]


def _is_path(name: str) -> bool:
    return name.startswith("/") and not name.startswith(NOWHERE)


def check_paths(symbol: str, texts: Iterable[str]) -> None:
    """Refuse texts of which one includes a file by its path.

    Raises
    ------
    ArgumentError
        If one does.
    """
    for text in texts:
        if directives.may_include(text) and any(map(_is_path, _names(text))):
            raise ArgumentError(
                f"{symbol} includes a file by its path, which no cache key sees; give its folder to include_folders, "
                f"and include it by its name"
            )
