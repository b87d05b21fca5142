# SPDX-License-Identifier: Apache-2.0
"""Every exception that this package raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AllocationError",
    "ArgumentError",
    "CompileError",
    "CompilerNotFoundError",
    "DeviceNotFoundError",
    "DriverError",
    "DriverNotFoundError",
    "ForkError",
    "LaunchError",
    "PackError",
    "SettingsError",
    "SimulationError",
    "StaticKernelError",
    "TransformerRtcError",
    "UnexpectedCompileError",
]


def shown(value: object) -> str:
    """Return what a message says of a value that somebody gave: its repr, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # another package's, as of a tensor whose stream is being captured
        return f"a {type(value).__qualname__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return what a message adds of the name that was probably meant; empty where none is like it.

    A prefix that all of them have is none of the likeness.
    """
    from difflib import get_close_matches  # only for a mistake

    found = get_close_matches(name.removeprefix(prefix), [one.removeprefix(prefix) for one in names], 1)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


class TransformerRtcError(Exception):
    """Base class of this package's exceptions."""


class ArgumentError(TransformerRtcError, ValueError):
    """An argument that an operator does not accept. Raised before anything is launched."""


class AllocationError(TransformerRtcError, MemoryError):
    """A framework's allocator gave no memory for an output."""


class SettingsError(TransformerRtcError, ValueError):
    """An environment variable or a setting that is malformed or contradicts another."""


class DeviceNotFoundError(TransformerRtcError, RuntimeError):
    """There is no such CUDA device."""


class DriverNotFoundError(DeviceNotFoundError):
    """There is no NVIDIA driver on this machine."""


class DriverError(TransformerRtcError, RuntimeError):
    """The NVIDIA driver is too old, or refused a call."""


class ForkError(TransformerRtcError, RuntimeError):
    """The process was forked from one that had used CUDA, which does not survive a fork."""


class LaunchError(TransformerRtcError, RuntimeError):
    """A kernel that cannot be launched as asked, such as a cooperative grid that is too large to be resident."""


class SimulationError(TransformerRtcError, RuntimeError):
    """A kernel did in the simulator what it must not.

    Attributes
    ----------
    kind : str
        ``"race"``, ``"out_of_bounds"``, ``"misaligned"``, ``"uninitialised"``, ``"read_only"``, ``"overflow"``,
        ``"divergent_barrier"``, ``"deadlock"``, ``"endless"``, ``"unfinished_copy"``, ``"exited_shared_memory"``,
        ``"trap"`` or ``"signal"``.
    what : str
        What happened.
    kernel : str
        Its symbol.
    frames, other_frames : list of tuple of (str, str, int)
        Where, and where the other party of a race or a barrier was: (function, file, line), from the innermost
        outwards. Empty where it is unknown.
    block, thread, other_block, other_thread : tuple of int or None
        Whose access it was, and the other party.
    """

    kind: str
    what: str
    kernel: str
    frames: list[tuple[str, str, int]]
    block: tuple[int, int, int] | None
    thread: tuple[int, int, int] | None
    other_frames: list[tuple[str, str, int]]
    other_block: tuple[int, int, int] | None
    other_thread: tuple[int, int, int] | None

    def __init__(
        self,
        kind: str,
        what: str,
        kernel: str,
        frames: list[tuple[str, str, int]],
        block: tuple[int, int, int] | None,
        thread: tuple[int, int, int] | None,
        other_frames: list[tuple[str, str, int]],
        other_block: tuple[int, int, int] | None,
        other_thread: tuple[int, int, int] | None,
    ) -> None:
        self.kind, self.what, self.kernel = kind, what, kernel
        self.frames, self.block, self.thread = frames, block, thread
        self.other_frames, self.other_block, self.other_thread = other_frames, other_block, other_thread
        message = f"{kernel}: {kind}: {what}\n  {self._party(frames, block, thread)}"
        if other_frames or other_thread is not None:
            message += f"\n  the other: {self._party(other_frames, other_block, other_thread)}"
        super().__init__(message)

    @staticmethod
    def _party(frames: list[tuple[str, str, int]], block: object, thread: object) -> str:
        who = f"block {block} thread {thread}" if thread is not None else "a thread"
        where = ", called from ".join(f"{file}:{line}" for _, file, line in frames)
        return f"{who} at {where}" if where else who

    @property
    def file(self) -> str | None:
        """The file of the line that did it: the innermost one that is not the library's platform.cuh or ptx.cuh."""
        return self._line()[0]

    @property
    def line(self) -> int | None:
        """That line."""
        return self._line()[1]

    def _line(self) -> tuple[str, int] | tuple[None, None]:
        for _, file, line in self.frames:
            if file not in ("platform.cuh", "ptx.cuh"):
                return file, line
        return (self.frames[0][1], self.frames[0][2]) if self.frames else (None, None)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (
            self.kind, self.what, self.kernel, self.frames, self.block, self.thread, self.other_frames,
            self.other_block, self.other_thread,
        )  # fmt: skip


class PackError(TransformerRtcError, ValueError):
    """A file that is no pack of cache entries, or a damaged one."""


class StaticKernelError(TransformerRtcError, RuntimeError):
    """The installation has no static kernel for an operator and an architecture."""


class CompilerNotFoundError(TransformerRtcError, ImportError):
    """NVRTC or its Python bindings are not installed, or too old; or, for the simulator, no C++ compiler."""


class UnexpectedCompileError(TransformerRtcError, RuntimeError):
    """A kernel would have to be compiled while compiles are forbidden.

    Attributes
    ----------
    what : str
        What happened.
    symbol : str
        The kernel's name.
    target : str
        What it is for, such as ``"sm_90"``.
    key : str
        Under which it is not in the cache.
    manifest_line : str
        What of a manifest asks for it, for `transformer_rtc.warmup`; empty where no operator and no
        `KernelManager.compile` did.
    """

    what: str
    symbol: str
    target: str
    key: str
    manifest_line: str

    def __init__(self, what: str, symbol: str, target: str, key: str, manifest_line: str = "") -> None:
        self.what, self.symbol, self.target, self.key, self.manifest_line = what, symbol, target, key, manifest_line
        asked = f"\nThe line of a manifest that warms it up: {manifest_line}" if manifest_line else ""
        super().__init__(f"{what}{asked}")

    def asked_by(self, manifest_line: str) -> UnexpectedCompileError:
        """Return the error with the line that asks for the kernel."""
        return type(self)(self.what, self.symbol, self.target, self.key, manifest_line)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.symbol, self.target, self.key, self.manifest_line)


class CompileError(TransformerRtcError, RuntimeError):
    """NVRTC, or the simulator's C++ compiler, refused a program.

    Attributes
    ----------
    symbol : str
        The kernel's name.
    options : tuple of str
        The compiler's options.
    source : str
        The program, without the headers it includes.
    log : str
        The compiler's log.
    versions : dict of str to str
        The versions of what took part.
    """

    symbol: str
    options: tuple[str, ...]
    source: str
    log: str
    versions: dict[str, str]

    def __init__(self, symbol: str, options: tuple[str, ...], source: str, log: str, versions: dict[str, str]) -> None:
        self.symbol, self.options, self.source, self.log, self.versions = symbol, options, source, log, versions
        numbered, number = "", 1
        for line in source.splitlines():
            numbered += f"{number:4d} | {line}\n"
            # As the compiler counts: a caller's text starts again at its own first line.
            number = int(line.split()[1]) if line.startswith("#line ") else number + 1
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        compiler = "NVRTC" if "nvrtc" in versions else "the C++ compiler"
        super().__init__(
            f"{compiler} could not compile {symbol}\n{log.strip()}\n\noptions: {' '.join(options)}\n"
            f"versions: {found}\nprogram:\n{numbered.rstrip()}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.symbol, self.options, self.source, self.log, self.versions)
