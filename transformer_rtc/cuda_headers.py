# SPDX-License-Identifier: Apache-2.0
"""Where NVIDIA's wheels have CUDA's headers, and which wheel a missing one is in."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

from . import compiler
from .errors import ArgumentError, CompilerNotFoundError

__all__ = ["WHEELS", "Wheel", "folders", "refuse"]


class Wheel(NamedTuple):
    """A wheel with headers of CUDA's.

    Attributes
    ----------
    what : str
        What it is, for messages.
    pip : str
        What pip installs.
    below : str
        Where it has the headers, in a folder of Python's packages.
    headers : str
        Which ones: a regular expression of names.
    """

    what: str
    pip: str
    below: str
    headers: str


_RUNTIME = r"cuda_\w+\.h(pp)?|cooperative_groups(\.h|/.*)|mma\.h|(vector|device)_\w+\.h|(math_constants|cuComplex)\.h"
_CCCL = r"(cub|thrust|cuda|nv)/.*"
_CRT = r"crt/.*"
_CURAND = r"curand\w*\.h"

# By CUDA's major version.
WHEELS = {
    "12": (
        Wheel("CUDA 12's runtime", "nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include", _RUNTIME),
        Wheel("CUDA 12's C++ libraries", "nvidia-cuda-cccl-cu12", "nvidia/cuda_cccl/include", _CCCL),
        Wheel("CUDA 12's compiler", "nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/include", _CRT),
        Wheel("CUDA 12's cuRAND", "nvidia-curand-cu12", "nvidia/curand/include", _CURAND),
    ),
    "13": (
        Wheel("CUDA 13's runtime", "'nvidia-cuda-runtime>=13,<14'", "nvidia/cu13/include", _RUNTIME),
        Wheel("CUDA 13's C++ libraries", "'nvidia-cuda-cccl>=13,<14'", "nvidia/cu13/include/cccl", _CCCL),
        Wheel("CUDA 13's compiler", "'nvidia-cuda-crt>=13,<14'", "nvidia/cu13/include", _CRT),
        Wheel("CUDA 13's cuRAND", "'nvidia-curand>=10.4,<11'", "nvidia/cu13/include", _CURAND),
    ),
}
_STANDARD = re.compile(r"[a-z_]+|(std\w+|assert|errno|float|inttypes|limits|locale|math|signal|string|time|wchar)\.h")

_found: dict[tuple[str, ...], tuple[str, ...]] = {}  # by where Python looks for packages


def _majors() -> Iterable[str]:
    """Return the major version of CUDA that compiles; where nothing does, what any version has made is right."""
    try:
        return (compiler.bindings_major(),)
    except CompilerNotFoundError:
        return tuple(WHEELS)


def _installed(below: str) -> Iterable[str]:
    for folder in sys.path:
        path = os.path.join(os.path.realpath(folder or "."), below)
        if os.path.isdir(path):
            yield path


def folders() -> tuple[str, ...]:
    """Return where the wheels for the compiler's major version have headers, those that are installed."""
    key = tuple(sys.path)
    found = _found.get(key, ())
    if not found or not all(map(os.path.isdir, found)):
        for major in _majors():
            paths = [next(iter(_installed(wheel.below)), None) for wheel in WHEELS[major]]
            found = tuple(dict.fromkeys(path for path in paths if path is not None))
            if found:
                break
        _found[key] = found
    return found


def refuse(symbol: str, name: str, of_cuda: bool) -> str:
    """Say of a missing header of CUDA's how it is had, or return what else there is to say of a name.

    Raises
    ------
    ArgumentError
        If it is CUDA's, and the simulator compiles.
    CompilerNotFoundError
        If it is CUDA's, and its wheel is not installed.
    """
    if _STANDARD.fullmatch(name):
        compiles = "NVRTC" if of_cuda else "the simulator"
        return (
            f"{name} is of the standard library, and {compiles} has none; cuda/std/ of NVIDIA's CCCL has a part of it\n"
        )
    majors = (compiler.bindings_major(),) if of_cuda else tuple(WHEELS)
    found = [wheel for major in majors for wheel in WHEELS[major] if re.fullmatch(wheel.headers, name)]
    if not found and not any(os.path.isfile(os.path.join(folder, name)) for folder in folders()):
        return ""
    if not of_cuda:
        raise ArgumentError(
            f"{symbol} includes {name}, and the simulator cannot compile CUDA's headers: leave it out there by "
            f"#ifndef TRTC_SIMULATOR, or run the kernel on a GPU"
        ) from None
    for wheel in found:
        if not any(os.path.isfile(os.path.join(path, name)) for path in _installed(wheel.below)):
            below = [one.below for major, wheels in WHEELS.items() if major not in majors for one in wheels
                     if re.fullmatch(one.headers, name)]  # fmt: skip
            other = next((path for one in below for path in _installed(one)), None)
            _found.clear()  # it may be installed while the process runs
            instead = f"; {other} is of another version, which is not for NVRTC {majors[0]}" if other else ""
            raise CompilerNotFoundError(
                f"{symbol} includes {name}, a header of {wheel.what}, which is not installed{instead}: pip install "
                f"{wheel.pip}"
            ) from None
    # It is there, and was not handed over.
    return f"{name} is CUDA's; one of CUDA's headers names it by a macro, and those are not followed\n"
