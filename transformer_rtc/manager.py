"""Where the parts meet: from a spec to a kernel on a device, through the disk cache and the compiler."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar

from . import compiler, sources, static
from .cache import DiskCache, digest
from .errors import SettingsError, TransformerRtcError, UnexpectedCompileError
from .launch import Kernel, device_limits
from .settings import Settings, settings
from .spec import Field, KernelSpec, Params, TextSpec

__all__ = ["Event", "KernelManager", "manager"]

_T = TypeVar("_T")


class Event(NamedTuple):
    """One compile or load.

    Attributes
    ----------
    kind : str
        ``"compile"``: NVRTC ran. ``"load"``: a cubin was loaded. ``"load_ptx"``: PTX was, and the driver compiled it.
    symbol : str
        The kernel.
    architecture : int
        90 for compute capability 9.0.
    device : int or None
        Of a load.
    milliseconds : float
        What it took.
    size : int
        Bytes of the image.
    origin : str
        Where the image came from: ``"compiler"``, ``"disk"`` or ``"package"``.
    """

    kind: str
    symbol: str
    architecture: int
    device: int | None
    milliseconds: float
    size: int
    origin: str


class Image(NamedTuple):
    """What can be loaded."""

    data: bytes
    kind: str
    origin: str


class CompileFunction(Protocol):
    def __call__(
        self, symbol: str, program: str, headers: dict[str, str], options: tuple[str, ...], architecture: int
    ) -> compiler.Compiled: ...


class _Made:
    """A value, or the error of making it, once it is there."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.maker = threading.get_ident()
        self.value: Any = None
        self.error: BaseException | None = None


class _Once:
    """Makes each value once, however many threads ask; others are not blocked meanwhile. A failure is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, _Made] = {}

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        while True:
            with self._lock:
                made = self._made.get(key)
                mine = made is None
                if made is None:
                    made = self._made[key] = _Made()
            if mine:
                try:
                    made.value = make()
                except BaseException as error:
                    made.error = error
                    with self._lock:
                        del self._made[key]
                    raise
                finally:
                    made.there.set()
            if made.maker == threading.get_ident() and not made.there.is_set():
                raise TransformerRtcError("a callback asked for the kernel whose compile or load it is being told of")
            made.there.wait()
            if made.error is None:
                value: _T = made.value
                return value
            # Whoever waited gets the failure too, but not another thread's interrupt.
            if isinstance(made.error, Exception):
                raise made.error

    def __contains__(self, key: Hashable) -> bool:
        made = self._made.get(key)
        return made is not None and made.there.is_set() and made.error is None


class KernelManager:
    """Gives kernels: compiled once, kept on disk, loaded once on each device.

    Parameters
    ----------
    cache : DiskCache
        Where compiled kernels are kept.
    compile_program : callable
        The compiler; `transformer_rtc.compiler.compile_program` by default.
    identity : callable
        Which compiler that is, without opening it.
    options : Settings
        What the environment asks for.
    """

    def __init__(
        self,
        cache: DiskCache,
        compile_program: CompileFunction = compiler.compile_program,
        identity: Callable[[], str] = compiler.compiler_identity,
        options: Settings = settings,
    ) -> None:
        self.cache = cache
        self.counts: Counter[str] = Counter()
        self._compile_program = compile_program
        self._identity = identity
        self._settings = options
        self._images = _Once()
        self._kernels = _Once()
        self._callbacks: list[Callable[[Event], None]] = []

    def on_event(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` for every compile and load from now on; what is returned stops that."""
        self._callbacks.append(callback)

        def stop() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return stop

    def get(self, spec: KernelSpec, device: int) -> Kernel:
        """Return a kernel on a device: from memory, else from disk, else compiled.

        Parameters
        ----------
        spec : KernelSpec
            The kernel.
        device : int
            The device's ordinal.

        Raises
        ------
        CompileError, CompilerNotFoundError, UnexpectedCompileError
            If it must be compiled and cannot be.
        DeviceNotFoundError, DriverError
            If it cannot be loaded.
        """
        return self._load(spec, spec.symbol, spec.params, device, lambda architecture: self.image(spec, architecture))

    def get_static(self, family: str, symbol: str, params: Params, device: int) -> Kernel:
        """Return a kernel that was compiled when the package was built.

        Raises
        ------
        StaticKernelError
            If this installation has none for the device.
        """

        def image(architecture: int) -> Image:
            data, kind = static.image(family, architecture)
            return Image(data, kind, "package")

        return self._load((family, symbol), symbol, params, device, image)

    def compile(
        self, text: str, symbol: str, fields: tuple[Field, ...], device: int, options: tuple[str, ...] = ()
    ) -> Kernel:
        """Return a caller's own kernel: the same cache, load and launch.

        Parameters
        ----------
        text : str
            CUDA C++ with an ``extern "C" __global__`` entry named `symbol`. It may include this package's headers.
        symbol : str
            The entry.
        fields : tuple of Field
            Its parameters: one struct by value, which the text knows as ``Params``.
        device : int
            The device's ordinal.
        options : tuple of str
            For NVRTC, beyond the package's own.
        """
        return self.get(TextSpec(text, symbol, tuple(fields), tuple(options)), device)

    def is_compiled(self, spec: KernelSpec, device: int) -> bool:
        """Whether `get` would not compile."""
        if (spec, device) in self._kernels:
            return True
        architecture = device_limits(device).architecture
        return (spec, architecture) in self._images or self._read(spec, architecture, self._identity()) is not None

    def image(self, spec: KernelSpec, architecture: int) -> Image:
        """Return a kernel's machine code: from disk, else compiled and put there. Needs no device."""
        return self._images.get((spec, architecture), lambda: self._make_image(spec, architecture))

    def _key(self, spec: KernelSpec, architecture: int, identity: str) -> str:
        program = spec.program
        return digest(
            {
                "program": program,
                "headers": sources.included(program),
                "options": [*compiler.OPTIONS, *spec.options],
                "architecture": architecture,
                "compiler": identity,
            }
        )

    def _read(self, spec: KernelSpec, architecture: int, identity: str) -> Image | None:
        found = self.cache.get(f"{spec.symbol}.sm_{architecture}", self._key(spec, architecture, identity))
        if found is None:
            return None
        return Image(found, "cubin" if found.startswith(b"\x7fELF") else "ptx", "disk")

    def _make_image(self, spec: KernelSpec, architecture: int) -> Image:
        found = self._read(spec, architecture, self._identity())
        if found is not None:
            return found
        if self._settings.force_static:
            raise SettingsError(f"TRANSFORMER_RTC_FORCE_STATIC=1 forbids the compile of {spec.symbol}")
        if self._settings.on_compile == "error":
            raise UnexpectedCompileError(
                f"{spec.symbol} for sm_{architecture} is not in the cache {self.cache.folder}, and "
                f"TRANSFORMER_RTC_ON_COMPILE=error forbids to compile it"
            )
        if self._settings.on_compile == "warn":
            warnings.warn(f"transformer_rtc compiles {spec.symbol} for sm_{architecture}", RuntimeWarning, stacklevel=2)
        program = spec.program
        start = time.perf_counter()
        report = ("-Xptxas=-v",) if self._settings.log >= 2 else ()
        compiled = self._compile_program(
            spec.symbol, program, sources.included(program), (*spec.options, *report), architecture
        )
        elapsed = (time.perf_counter() - start) * 1e3
        if self._settings.log >= 2:
            print(f"{program}\n{compiled.log}", file=sys.stderr)
        self._tell(Event("compile", spec.symbol, architecture, None, elapsed, len(compiled.image), "compiler"))
        # Filed under what really compiled it, which may not be what the environment promised.
        self.cache.put(
            f"{spec.symbol}.sm_{architecture}",
            self._key(spec, architecture, compiled.compiler),
            compiled.image,
            {"symbol": spec.symbol, "architecture": architecture, "kind": compiled.kind, "compiler": compiled.compiler},
        )
        return Image(compiled.image, compiled.kind, "compiler")

    def _load(self, key: Hashable, symbol: str, params: Params, device: int, image: Callable[[int], Image]) -> Kernel:
        def make() -> Kernel:
            architecture = device_limits(device).architecture
            data, kind, origin = image(architecture)
            start = time.perf_counter()
            kernel = Kernel(symbol, params, device, data)
            elapsed = (time.perf_counter() - start) * 1e3
            event = "load" if kind == "cubin" else "load_ptx"
            self._tell(Event(event, symbol, architecture, device, elapsed, len(data), origin))
            return kernel

        return self._kernels.get((key, device), make)

    def _tell(self, event: Event) -> None:
        self.counts[event.kind] += 1
        if self._settings.log:
            where = f"sm_{event.architecture}" if event.device is None else f"cuda:{event.device}"
            print(
                f"transformer_rtc: {event.kind} {event.symbol} {where} {event.milliseconds:.2f} ms, {event.size} bytes "
                f"from {event.origin}",
                file=sys.stderr,
            )
        for callback in tuple(self._callbacks):
            callback(event)


manager = KernelManager(DiskCache(settings.cache_dir))
