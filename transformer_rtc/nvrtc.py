# SPDX-License-Identifier: Apache-2.0
"""The functions of libnvrtc, called through ctypes. Imported by the first compile of a process.

cuda.bindings has them too, and its import takes longer than most compiles.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from types import TracebackType

__all__ = ["Nvrtc", "Program"]

_STRINGS = POINTER(c_char_p)
# By the functions' names, what they take; each but the last returns a result, which is 0 for success.
_PARAMETERS: dict[str, tuple[type, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, _STRINGS, _STRINGS),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
    "nvrtcCompileProgram": (c_void_p, c_int, _STRINGS),
    **{
        f"nvrtcGet{what}{size}": (c_void_p, POINTER(c_size_t) if size else c_char_p)
        for what in ("ProgramLog", "PTX", "CUBIN")
        for size in ("Size", "")
    },
    "nvrtcGetErrorString": (c_int,),
}


def _strings(texts: Collection[str]) -> ctypes.Array[c_char_p]:
    return (c_char_p * len(texts))(*(text.encode() for text in texts))


class Nvrtc:
    """A libnvrtc, opened. Its functions run without the GIL; several threads may call them at once.

    Parameters
    ----------
    path : str
        The file. With a folder in it, the system opens this one, whatever else of its name is open already.

    Raises
    ------
    OSError
        If it cannot be opened.
    AttributeError
        If it lacks a function.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name, parameters in _PARAMETERS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = parameters, c_int
        self._library.nvrtcGetErrorString.restype = c_char_p
        major, minor, count = c_int(), c_int(), c_int()
        self.call("nvrtcVersion", major, minor)
        self.version = (major.value, minor.value)
        # A compile opens this one by its name, and NVRTC 13.0 does not look beside itself.
        builtins = os.path.join(os.path.dirname(path), f"libnvrtc-builtins.so.{major.value}.{minor.value}")
        if os.path.exists(builtins):
            ctypes.CDLL(builtins)
        self.call("nvrtcGetNumSupportedArchs", count)
        architectures = (c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", architectures)
        self.architectures = tuple(architectures)

    def program(self, text: str, name: str, headers: dict[str, str]) -> Program:
        """Return a program, which `Program` describes."""
        return Program(self, text, name, headers)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function, which must succeed."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {self.name_of(result)}")

    def compile(self, program: c_void_p, options: Collection[str]) -> int:
        result: int = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
        return result

    def name_of(self, result: int) -> str:
        name: bytes = self._library.nvrtcGetErrorString(result)
        return name.decode()


class Program:
    """A program of an NVRTC, as a context, which destroys it.

    Parameters
    ----------
    nvrtc : Nvrtc
        What compiles it.
    text, name : str
        CUDA C++, and the path that messages give it.
    headers : dict of str to str
        What it may include, by the names in its includes.
    """

    def __init__(self, nvrtc: Nvrtc, text: str, name: str, headers: dict[str, str]) -> None:
        self._nvrtc = nvrtc
        self._handle = c_void_p()
        texts, names = _strings(headers.values()), _strings(headers)
        nvrtc.call("nvrtcCreateProgram", self._handle, text.encode(), name.encode(), len(headers), texts, names)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._nvrtc.call("nvrtcDestroyProgram", self._handle)

    def compile(self, options: Collection[str]) -> str:
        """Compile it; return the name of the error, if any, which `log` explains."""
        result = self._nvrtc.compile(self._handle, options)
        return self._nvrtc.name_of(result) if result else ""

    def log(self) -> str:
        return self._read("ProgramLog").rstrip(b"\0").decode(errors="replace")

    def ptx(self) -> bytes:
        """Return its PTX, which ends in a zero byte."""
        return self._read("PTX")

    def cubin(self) -> bytes:
        return self._read("CUBIN")

    def _read(self, what: str) -> bytes:
        size = c_size_t()
        self._nvrtc.call(f"nvrtcGet{what}Size", self._handle, size)
        data = ctypes.create_string_buffer(size.value)
        self._nvrtc.call(f"nvrtcGet{what}", self._handle, data)
        return data.raw
