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


def choices(name: object, names: Iterable[str]) -> str:
    """Return what a message adds of the names that are accepted: first the one that was probably meant."""
    accepted = list(names)
    meant = nearest(name, accepted) if isinstance(name, str) else ""
    return f"{meant} It takes {', '.join(accepted)}" if meant else f"; it takes {', '.join(accepted)}"


class TransformerRtcError(Exception):
    """Base class of this package's exceptions.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import TransformerRtcError, rms_norm
    >>> try:
    ...     rms_norm(np.ones((2, 8), np.float32), eps=-1.0)
    ... except TransformerRtcError as error:
    ...     print(type(error).__name__, error, sep=": ")
    ArgumentError: rms_norm: eps must not be negative; it is -1.0
    """


class ArgumentError(TransformerRtcError, ValueError):
    """An argument that is not as described, of an operator or of another public function. A `ValueError`, too.

    An operator raises it before anything is launched. The message names the argument, what was given, and what is
    accepted.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import ArgumentError, rms_norm
    >>> try:
    ...     rms_norm(np.ones((2, 8)))
    ... except ArgumentError as error:
    ...     print(error)
    rms_norm: x must be one of float32, float16, bfloat16; it is float64
    """


class AllocationError(TransformerRtcError, MemoryError):
    """A framework's allocator gave no memory for an output. A `MemoryError`, too.

    Nothing has been launched then. A call with ``out=`` allocates no output.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import AllocationError, softmax
    >>> x = np.broadcast_to(np.zeros(2**22, np.float32), (2**24, 2**22))  # a view of one row; y would have 2**24
    >>> try:
    ...     softmax(x)
    ... except AllocationError:
    ...     print("y is too large")
    y is too large
    """


class SettingsError(TransformerRtcError, ValueError):
    """An environment variable or a setting that is malformed or contradicts another. A `ValueError`, too.

    The first call that needs a variable raises it; importing the package does not.

    Examples
    --------
    >>> from transformer_rtc import SettingsError
    >>> from transformer_rtc.settings import read
    >>> try:
    ...     read({"TRANSFORMER_RTC_CACHE_SIZE": "large"}).check()  # read(os.environ) is what the package uses
    ... except SettingsError as error:
    ...     print(error)
    TRANSFORMER_RTC_CACHE_SIZE is 'large'; it takes bytes, such as 1G, 500M, 0 for no limit
    """


class DeviceNotFoundError(TransformerRtcError, RuntimeError):
    """There is no such CUDA device, or it is too old for every kernel of the package.

    Examples
    --------
    >>> from transformer_rtc import DeviceNotFoundError, device_limits
    >>> try:
    ...     device_limits(1000)
    ... except DeviceNotFoundError:
    ...     print("this machine has no 1001 GPUs")
    this machine has no 1001 GPUs
    """


class DriverNotFoundError(DeviceNotFoundError):
    """There is no NVIDIA driver on this machine.

    It is a `DeviceNotFoundError`: who only asks whether there is a GPU catches that one.

    Examples
    --------
    >>> from transformer_rtc import DeviceNotFoundError, DriverNotFoundError, device_limits
    >>> def what_is_missing():
    ...     try:
    ...         device_limits(0)
    ...     except DriverNotFoundError:  # before the more general one
    ...         return "a driver"
    ...     except DeviceNotFoundError:
    ...         return "a GPU, or CUDA_VISIBLE_DEVICES hides it"
    ...     return "nothing"
    >>> missing = what_is_missing()
    """


class DriverError(TransformerRtcError, RuntimeError):
    """The NVIDIA driver is too old, or refused a call.

    A call that loads or launches a kernel raises it. The message has the driver's own words, such as
    ``CUDA_ERROR_OUT_OF_MEMORY``, or which driver is needed.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import DriverError, rms_norm
    >>> try:
    ...     y = rms_norm(np.ones((2, 8), np.float32))
    ... except DriverError as error:
    ...     raise SystemExit(f"no kernel runs with this driver: {error}") from error
    >>> y.shape
    (2, 8)
    """


class ForkError(TransformerRtcError, RuntimeError):
    """The process was forked from one that had used CUDA, which does not survive a fork.

    Processes that are started by ``spawn`` have no such parent.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import ForkError, rms_norm
    >>> def work(x):  # what each process of a multiprocessing.Pool runs
    ...     try:
    ...         return rms_norm(x)
    ...     except ForkError as error:
    ...         raise RuntimeError("make the pool by multiprocessing.get_context('spawn')") from error
    >>> work(np.ones((2, 8), np.float32)).shape
    (2, 8)
    """


class LaunchError(TransformerRtcError, RuntimeError):
    """A kernel that cannot be launched as asked, such as a cooperative grid that is too large to be resident.

    Examples
    --------
    >>> from transformer_rtc import LaunchConfig, LaunchError, SimulatedDevice, manager
    >>> text = 'extern "C" __global__ void nothing() {}'
    >>> kernel = manager.compile(text, "nothing", (), SimulatedDevice(multiprocessors=8))
    >>> try:
    ...     kernel.launch(LaunchConfig((1000, 1, 1), (256, 1, 1), cooperative=True), {})
    ... except LaunchError as error:
    ...     print(error)
    nothing: a cooperative grid of 1000 CTAs must be resident; the simulated sm_90 can hold 64 of them
    """


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

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import Field, SimulatedDevice, SimulationError, manager
    >>> text = 'extern "C" __global__ void one(const Params p) { ((float*)p.x)[threadIdx.x] = 1.0f; }'
    >>> kernel = manager.compile(text, "one", (Field("x", "pointer"),), SimulatedDevice(checked=True))
    >>> try:
    ...     kernel.launch_plain((1, 1, 1), (32, 1, 1), {"x": np.zeros(8, np.float32)})
    ... except SimulationError as error:
    ...     print(error.kind, error.thread, error.line)
    out_of_bounds (8, 0, 0) 1
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
    """A file that is no pack of cache entries, or a damaged one; or one that cannot be read or written.

    ``transformer-rtc cache`` and `transformer_rtc.archive` raise it. Nothing of a damaged pack is used.

    Examples
    --------
    >>> import os
    >>> from transformer_rtc import PackError
    >>> from transformer_rtc.archive import unpack
    >>> from transformer_rtc.cache import DiskCache
    >>> try:
    ...     unpack(DiskCache(None), os.devnull)
    ... except PackError as error:
    ...     print(error)
    /dev/null is no pack of transformer_rtc
    """


class StaticKernelError(TransformerRtcError, RuntimeError):
    """The installation has no static kernel for an operator and an architecture.

    A call under ``using("static")`` or ``TRANSFORMER_RTC_FORCE_STATIC=1`` raises it. The message says how to rebuild.

    Examples
    --------
    >>> from transformer_rtc import StaticKernelError
    >>> from transformer_rtc.static import image
    >>> try:
    ...     image("norm", 70)
    ... except StaticKernelError as error:
    ...     print(str(error).split(". ")[0])
    there is no static kernel of norm for compute capability 7.0
    """


class CompilerNotFoundError(TransformerRtcError, ImportError):
    """NVRTC or its Python bindings are not installed, or too old; or, for the simulator, no C++ compiler.

    An `ImportError`, too. The message says what to install, and by which command.

    Examples
    --------
    >>> from transformer_rtc import CompilerNotFoundError, TextSpec, manager
    >>> try:
    ...     found = manager.image(TextSpec('extern "C" __global__ void nothing() {}', "nothing"), 90)
    ... except CompilerNotFoundError as error:
    ...     raise SystemExit(str(error)) from error
    >>> found.kind
    'cubin'
    """


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
        `KernelManager.compile` did. The message of a simulated target leaves it out, as no warm-up makes its module.
    reason : str
        Why in a few words, such as ``"it is in no cache"``.

    Examples
    --------
    >>> import json
    >>> import numpy as np
    >>> from transformer_rtc import UnexpectedCompileError, freeze, rms_norm, using
    >>> end = freeze()
    >>> try:
    ...     with using("simulator"):
    ...         rms_norm(np.ones((1, 12345), np.float32))
    ... except UnexpectedCompileError as error:
    ...     print(error.target, json.loads(error.manifest_line)["columns"])
    ... finally:
    ...     end()
    sm_90.fast 12345
    """

    what: str
    symbol: str
    target: str
    key: str
    manifest_line: str
    reason: str

    def __init__(
        self, what: str, symbol: str, target: str, key: str, manifest_line: str = "", reason: str = ""
    ) -> None:
        self.what, self.symbol, self.target, self.key = what, symbol, target, key
        self.manifest_line, self.reason = manifest_line, reason
        architecture, _, simulated = target.partition(".")
        asked = ""
        if manifest_line and not simulated:
            asked = (
                f"\nThe line of a manifest that warms it up: {manifest_line}"
                f"\nThe command: transformer-rtc warmup --manifest FILE --architecture {architecture}"
            )
        super().__init__(f"{what}{asked}")

    def asked_by(self, manifest_line: str) -> UnexpectedCompileError:
        """Return the error with the line that asks for the kernel."""
        return type(self)(self.what, self.symbol, self.target, self.key, manifest_line, self.reason)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.symbol, self.target, self.key, self.manifest_line, self.reason)


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

    Examples
    --------
    >>> from transformer_rtc import CompileError, TextSpec, manager
    >>> try:
    ...     manager.image(TextSpec('extern "C" __global__ void wrong() { x = 1; }', "wrong"), 90)
    ... except CompileError as error:
    ...     print(error.symbol, 'identifier "x" is undefined' in error.log)
    wrong True
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
