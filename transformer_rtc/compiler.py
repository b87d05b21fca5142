# SPDX-License-Identifier: Apache-2.0
"""A program's text -> machine code: which NVRTC is opened, when, and what it is asked for."""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

from . import sources
from .errors import ArgumentError, CompileError, CompilerNotFoundError
from .spec import FIRST_NVRTC

__all__ = [
    "OPTIONS",
    "REPORT",
    "Compiled",
    "bindings_major",
    "check_architecture",
    "compile_program",
    "compiler_identity",
    "entries_of",
    "file_identity",
    "installed",
    "installed_versions",
    "is_stopped",
    "versions",
]

# Contraction is off, so that a fused multiply-add is only where a kernel names it and every compiler computes the same.
OPTIONS = ("--std=c++17", "--fmad=false")
# Makes the log a resource report.
REPORT = "-Xptxas=-v"
# Where there is a driver, NVRTC of this version and later keeps a cache of its own, which has no logs.
_CACHING = (12, 9)

# Where NVRTC comes from, by the major version of the bindings, which decides which one is opened.
_DISTRIBUTIONS = {"12": "nvidia_cuda_nvrtc_cu12", "13": "nvidia_cuda_nvrtc"}
_INSTALL = "pip install 'transformer_rtc[cu12]' (or [cu13] for a driver of CUDA 13)"

# These make NVRTC read files that no cache key sees, or make something else than the machine code that is asked for.
_REFUSED_OPTIONS = re.compile(
    r"\s*(-I|--?(include-path|pre-include|include|(use-|create-)?pch|gpu-architecture|arch|dlto))"
)
_INCLUDE_PATH_OPTION = re.compile(r"\s*(-I|--?include-path)")


class Compiled(NamedTuple):
    """What a compile gave.

    Attributes
    ----------
    image : bytes
        A cubin, or PTX ending in a zero byte.
    kind : str
        ``"cubin"``, or ``"ptx"`` for an architecture NVRTC does not know yet: the driver compiles it when it loads.
    log : str
        NVRTC's log; with `REPORT` among the options, the resource report.
    compiler : str
        The identity of what really compiled it.
    ptx : bytes
        The PTX that a cubin was assembled from, if it was asked for.
    version : str
        For people, where the identity is a file: what it is, and its version.
    """

    image: bytes
    kind: str
    log: str
    compiler: str
    ptx: bytes = b""
    version: str = ""


def _installed_version(distribution: str) -> tuple[str, str] | None:
    return next(installed_versions(distribution), None)


def installed_versions(distribution: str) -> Iterator[tuple[str, str]]:
    """Yield the version and the folder of each that is installed, in the order in which Python looks for them."""
    # importlib.metadata says the same and takes 30 ms to import: more than everything else in a warm start.
    pattern = re.compile(re.escape(distribution) + r"-([^-]+)\.dist-info", re.IGNORECASE)
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = pattern.fullmatch(name)
            if match:
                yield match[1], os.path.realpath(folder or ".")


def file_identity(path: str) -> str:
    """Return what tells a file from another of the same path: its real path, size and time."""
    path = os.path.realpath(path)
    status = os.stat(path)
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def bindings_major() -> str:
    """Return the major version of the installed bindings, which is NVRTC's.

    Raises
    ------
    CompilerNotFoundError
        If there are none, or of another version.
    """
    found = _installed_version("cuda_bindings")
    major = found[0].split(".")[0] if found else ""
    if major not in _DISTRIBUTIONS:
        what = f"cuda-bindings {found[0]} is installed" if found else "cuda-python is not installed"
        raise CompilerNotFoundError(f"a kernel must be compiled, and {what}: {_INSTALL}")
    return major


def _libraries(major: str) -> Iterator[str]:
    """Yield the paths of NVRTC where no distribution of it is installed, the one that is taken first."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for variable, below in (("CONDA_PREFIX", "lib"), ("CUDA_HOME", "lib64"), ("CUDA_PATH", "lib64")):
        if os.environ.get(variable):
            folders.append(os.path.join(os.environ[variable], below))
    for folder in [*folders, "/usr/local/cuda/lib64"]:
        path = os.path.join(folder, f"libnvrtc.so.{major}")
        if folder and os.path.exists(path):
            yield path


def installed() -> list[str]:
    """Return every NVRTC that is installed for Python, by distribution, version and folder."""
    found = {
        (distribution, version, folder): None
        for distribution in _DISTRIBUTIONS.values()
        for version, folder in installed_versions(distribution)
    }
    return [f"{distribution} {version} in {folder}" for distribution, version, folder in found]


@functools.cache
def compiler_identity() -> str:
    """Return which NVRTC would compile, without opening it.

    The distribution and its version where there is one, else the library's real path, size and time.

    Raises
    ------
    CompilerNotFoundError
        If there is none.
    """
    major = bindings_major()
    distribution = _DISTRIBUTIONS[major]
    found = _installed_version(distribution)
    if found:
        return f"{distribution} {found[0]}"
    for path in _libraries(major):
        return file_identity(path)
    raise CompilerNotFoundError(f"a kernel must be compiled, and NVRTC {major} is not installed: {_INSTALL}")


def _library(major: str) -> str:
    """Return the path of the NVRTC that `compiler_identity` names."""
    import glob

    found = _installed_version(_DISTRIBUTIONS[major])
    if found:
        for path in glob.glob(f"nvidia/*/lib/libnvrtc.so.{major}", root_dir=found[1]):
            return os.path.join(found[1], path)
    for path in _libraries(major):
        return path
    # The wheel's files are elsewhere. Its import takes longer than most compiles, so it comes last.
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return str(load_nvidia_dynamic_lib("nvrtc").abs_path)


class _Opened:
    """NVRTC, opened."""

    def __init__(self) -> None:
        major = bindings_major()
        try:
            from .nvrtc import Nvrtc  # with ctypes: most processes compile nothing

            path = _library(major)
            self.nvrtc = Nvrtc(path)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            raise CompilerNotFoundError(
                f"a kernel must be compiled, and NVRTC cannot be opened: {error}. {_INSTALL}"
            ) from error
        self.version = ".".join(map(str, self.nvrtc.version))
        self.caches = self.nvrtc.version >= _CACHING
        found = _installed_version(_DISTRIBUTIONS[major])
        # An installation may consist of links to files that are elsewhere.
        is_of = found and any(each.startswith(found[1] + os.sep) for each in (path, os.path.realpath(path)))
        if found and is_of and found[0].startswith(f"{self.version}."):
            self.identity, self.told = f"{_DISTRIBUTIONS[major]} {found[0]}", ""
        else:
            self.identity, self.told = file_identity(path), f"NVRTC {self.version}"


_STOP_SECONDS = 60.0  # longer than any compile; who imports what a compile imports, and forks, must not wait for ever


class _Compiling:
    """Compiles that are going on. A fork, and the interpreter's end, wait for those of other threads.

    NVRTC has locks of its own, which a child would find locked for ever, and global variables, which are destroyed when
    the process ends.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[int] = []
        self._stopped_by: int | None = None

    def __enter__(self) -> None:
        mine = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._stopped_by in (None, mine))
            self._threads.append(mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._threads.remove(threading.get_ident())
            self._changed.notify_all()

    def stop(self) -> None:
        """Wait for the compiles of other threads, and let none begin until `go_on`."""
        mine = threading.get_ident()
        self._changed.acquire()  # until `go_on`: a child has only the thread that holds it
        self._changed.wait_for(lambda: self._stopped_by in (None, mine))
        self._stopped_by = mine
        self._changed.wait_for(lambda: all(thread == mine for thread in self._threads), _STOP_SECONDS)

    def is_stopped(self) -> bool:
        return self._stopped_by is not None

    def go_on(self) -> None:
        self._stopped_by = None
        self._changed.notify_all()
        self._changed.release()

    def go_on_in_child(self) -> None:
        mine = threading.get_ident()
        self._threads = [thread for thread in self._threads if thread == mine]
        self.go_on()


_compiling = _Compiling()


def is_stopped() -> bool:
    """Whether, at the interpreter's end or around a fork, only one thread may compile."""
    return _compiling.is_stopped()


os.register_at_fork(before=_compiling.stop, after_in_parent=_compiling.go_on, after_in_child=_compiling.go_on_in_child)
atexit.register(_compiling.stop)
_opening = threading.Lock()
_opened: _Opened | None = None


def _open() -> _Opened:
    global _opened
    with _opening:
        if _opened is None:
            _opened = _Opened()
        return _opened


def versions() -> dict[str, str]:
    """Return the versions of what takes part in a compile, opening nothing."""
    from .version import __version__

    found = {"transformer_rtc": __version__, "python": sys.version.split()[0]}
    for distribution in ("cuda_bindings", *_DISTRIBUTIONS.values()):
        installed = _installed_version(distribution)
        if installed:
            found[distribution] = installed[0]
    return found


def check_architecture(architecture: int) -> None:
    """Refuse an architecture of which `compile_program` would make PTX, as NVRTC does not know it yet.

    Raises
    ------
    CompilerNotFoundError
        If this NVRTC does not compile for it, or there is none.
    """
    opened = _open()
    if architecture in opened.nvrtc.architectures:
        return
    first = FIRST_NVRTC.get(architecture)
    later = f"NVRTC {first[0]}.{first[1]} or later does" if first else "a later one may"
    raise CompilerNotFoundError(
        f"NVRTC {opened.version} does not compile for sm_{architecture}; {later}: pip install 'transformer_rtc[cu13]'"
    )


def entries_of(image: bytes) -> list[str]:
    """Return the names of the kernels in a cubin or in PTX, as the driver knows them."""
    # A cubin has a section of parameters for each.
    pattern = rb"\0\.nv\.constant0\.([\w$]+)(?=\0)" if image.startswith(b"\x7fELF") else rb"\.entry\s+([\w$]+)"
    return sorted({name.decode() for name in re.findall(pattern, image)})


def compile_program(
    symbol: str,
    program: str,
    headers: dict[str, str],
    options: tuple[str, ...],
    architecture: int,
    *,
    ptx: bool = False,
    keep_ptx: bool = False,
) -> Compiled:
    """Compile a program. Releases the GIL; several threads may compile at once.

    Parameters
    ----------
    symbol : str
        The entry's name, for messages.
    program : str
        CUDA C++.
    headers : dict of str to str
        What it may include; nothing else is found.
    options : tuple of str
        Beyond `OPTIONS` and the architecture.
    architecture : int
        90 for compute capability 9.0.
    ptx : bool
        Whether to stop at PTX.
    keep_ptx : bool
        Whether to return a cubin's PTX beside it.

    Raises
    ------
    CompileError
        If NVRTC refuses the program or does not compile for the architecture any more.
    CompilerNotFoundError
        If NVRTC is not installed.
    ArgumentError
        If an option or an include names files, or an option replaces the target.
    """
    for option in options:
        if _REFUSED_OPTIONS.match(option):
            instead = "; include_folders names folders" if _INCLUDE_PATH_OPTION.match(option) else ""
            raise ArgumentError(
                f"{symbol}: the option {option} makes NVRTC read files that no cache key sees, or make other code than "
                f"is asked for{instead}"
            )
    sources.check_paths(symbol, (program, *headers.values()))
    with _compiling:
        opened = _open()
        known = opened.nvrtc.architectures
        newest = max((other for other in known if other <= architecture), default=architecture)
        kind = "ptx" if ptx or newest != architecture else "cubin"
        target = f"compute_{newest}" if kind == "ptx" else f"sm_{architecture}"
        all_options = (f"--gpu-architecture={target}", *OPTIONS, *options)
        if REPORT in options and opened.caches:
            all_options += ("--no-cache",)
        # NVRTC looks for includes beside the program too.
        with opened.nvrtc.program(program, f"{sources.NOWHERE}{symbol}.cu", headers) as made:
            refused = made.compile(all_options)
            log = made.log()
            if refused:
                raise CompileError(
                    symbol, all_options, program, log or refused, {**versions(), "nvrtc": opened.version}
                )
            text = made.ptx() if kind == "ptx" or keep_ptx else b""
            if kind == "ptx":
                return Compiled(text, kind, log, opened.identity, version=opened.told)
            return Compiled(made.cubin(), kind, log, opened.identity, text, opened.told)
