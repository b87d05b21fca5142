# SPDX-License-Identifier: Apache-2.0
"""Kernels that were compiled when the package was built -> bytes."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from . import _native
from .errors import StaticKernelError

# Beside the native module: the same build made both, and an editable install keeps both away from the sources.
_FOLDER = os.path.join(os.path.dirname(_native.__file__), "static_kernels")
_REBUILD = (
    "Rebuild transformer_rtc with NVRTC present and without "
    "-C cmake.define.TRANSFORMER_RTC_STATIC_KERNELS=OFF, or unset TRANSFORMER_RTC_FORCE_STATIC"
)

# A cubin runs on its architecture and later minor revisions; the PTX is for every other one from 8.0 on.
PTX_ARCHITECTURE = 80


class StaticImage(NamedTuple):
    """A module with one entry per input type.

    Attributes
    ----------
    image : bytes
        A cubin, or PTX ending in a zero byte.
    kind : str
        ``"cubin"`` or ``"ptx"``.
    """

    image: bytes
    kind: str


def manifest() -> dict[str, object]:
    """Return what the build wrote of its static kernels; empty where it made none.

    ``"seconds"`` of CPU time, and ``"files"``: of each its name, family, bytes, seconds (0: it came with another one's
    compile) and compiler.
    """
    try:
        with open(os.path.join(_FOLDER, "manifest.json"), encoding="utf-8") as file:
            found = json.load(file)
    except OSError:
        return {}
    assert isinstance(found, dict)
    return found


def available() -> bool:
    """Whether this installation has static kernels."""
    return os.path.exists(os.path.join(_FOLDER, "manifest.json"))


def file_name(family: str, architecture: int, kind: str) -> str:
    """Return the name of a family's module for an architecture."""
    return f"{family}.sm_{architecture}.cubin" if kind == "cubin" else f"{family}.compute_{architecture}.ptx"


def image(family: str, architecture: int) -> StaticImage:
    """Return the module of an operator family that runs on an architecture.

    Raises
    ------
    StaticKernelError
        If this installation has none.
    """
    major, minor = divmod(architecture, 10)
    names = [(file_name(family, major * 10 + lower, "cubin"), "cubin") for lower in range(minor, -1, -1)]
    if architecture >= PTX_ARCHITECTURE:
        names.append((file_name(family, PTX_ARCHITECTURE, "ptx"), "ptx"))
    for name, kind in names:
        try:
            with open(os.path.join(_FOLDER, name), "rb") as file:
                return StaticImage(file.read(), kind)
        except FileNotFoundError:
            continue
    raise StaticKernelError(f"there is no static kernel of {family} for compute capability {major}.{minor}. {_REBUILD}")
