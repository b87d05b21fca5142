# SPDX-License-Identifier: Apache-2.0
"""Where the parts meet: from a spec to a kernel on a device, through the disk cache and the compiler."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from . import compiler, includes, log, usage
from .cache import DiskCache
from .checks import check_flag, check_integer, check_type, paths_of
from .device import Device, DeviceLike, device_of
from .errors import ArgumentError, CompilerNotFoundError, DriverError, SettingsError, UnexpectedCompileError, shown
from .events import Event, Listeners
from .launch import Kernel, refuses_image
from .lookup import Image, Lookup
from .once import Beside, Once
from .settings import Settings, settings
from .spec import Field, KernelSpec, Params, Target, TextSpec, is_name
from .toolchain import CompileFunction, NvrtcToolchain, target_of, toolchain_of

__all__ = ["KernelManager", "manager"]

# A model needs some dozens; hidden sizes that vary without end, as of padded batches, must not fill a GPU.
MOST_KERNELS = 512


class KernelManager:
    """Compiles each kernel once, keeps it on disk, and loads it once on each device.

    The least recently used kernels are dropped. A dropped kernel is unloaded when nothing uses it, and loaded again by
    the next call. A kernel whose launch a graph has captured stays loaded.

    Parameters
    ----------
    cache : DiskCache
        Where compiled kernels are kept.
    compile_program : callable
        The compiler; `transformer_rtc.compiler.compile_program` by default.
    identity : callable
        Returns which compiler that is, without opening it.
    options : Settings
        The settings of the environment.
    most_kernels : int
        How many kernels stay loaded, and how many kernels' machine code stays in memory.

    Attributes
    ----------
    counts : Counter of str
        How many events there were of each kind.

    Raises
    ------
    ArgumentError
        If an argument is not as described.

    Examples
    --------
    >>> from transformer_rtc import KernelManager, TextSpec
    >>> from transformer_rtc.cache import DiskCache
    >>> own = KernelManager(DiskCache(None))  # keeps nothing on disk
    >>> spec = TextSpec('extern "C" __global__ void nothing() {}', "nothing")
    >>> own.image(spec, 90).kind  # for compute capability 9.0
    'cubin'
    >>> own.in_memory(spec, 90), own.counts["compile"]
    (True, 1)
    """

    def __init__(
        self,
        cache: DiskCache,
        compile_program: CompileFunction = compiler.compile_program,
        identity: Callable[[], str] = compiler.compiler_identity,
        options: Settings = settings,
        most_kernels: int = MOST_KERNELS,
    ) -> None:
        check_type(cache, DiskCache, "cache")
        check_type(options, Settings, "options")
        for name, function in (("compile_program", compile_program), ("identity", identity)):
            if not callable(function):
                raise ArgumentError(f"{name} is {shown(function)}; it takes a callable")
        self._nvrtc = NvrtcToolchain(compile_program, identity)
        self._settings = options
        self._lookup = Lookup(cache, self._nvrtc, options.other_nvrtc)
        check_integer(most_kernels, "most_kernels", 1)
        self._images = Once(most_kernels)
        self._kernels = Once(most_kernels)
        self._listeners = Listeners(is_logged=options.log >= 1)
        self.counts = self._listeners.counts
        self._untold: dict[tuple[KernelSpec, Target], Event] = {}
        self._freezes = 0

    @property
    def cache(self) -> DiskCache:
        """Where compiled kernels are kept."""
        return self._lookup.cache

    @cache.setter
    def cache(self, cache: DiskCache) -> None:
        self._lookup.cache = cache

    def on_event(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with the `Event` of every later compile and load. The returned function stops that.

        Raises
        ------
        ArgumentError
            If `callback` is no callable.
        """
        if not callable(callback):
            raise ArgumentError(f"callback is {shown(callback)}; it takes a callable")
        return self._listeners.add(callback)

    def freeze(self) -> Callable[[], None]:
        """Forbid compiles from now on, as after a warm-up: NVRTC's, and the driver's of PTX.

        A call that needs one raises `UnexpectedCompileError`, which says what to warm up.

        Returns
        -------
        callable
            Ends it.

        Examples
        --------
        >>> from transformer_rtc import TextSpec, UnexpectedCompileError, freeze, manager
        >>> end = freeze()  # that of `transformer_rtc.manager`
        >>> try:
        ...     manager.image(TextSpec('extern "C" __global__ void late() {}', "late"), 90)
        ... except UnexpectedCompileError as error:
        ...     print(error.symbol)
        late
        >>> end()
        """
        self._freezes += 1
        frozen = True

        def stop() -> None:
            nonlocal frozen
            self._freezes -= frozen
            frozen = False

        return stop

    def _read(self, spec: KernelSpec, on: Device | Target) -> KernelSpec:
        """Return a kernel with the files that it includes now."""
        if not includes.may_include(spec):
            return spec
        target = on if isinstance(on, Target) else on.target
        return includes.read(spec, toolchain_of(target, self._nvrtc).has_cuda_headers)

    def get(self, spec: KernelSpec, device: DeviceLike) -> Kernel:
        """Return a kernel on a device: from memory, or from disk, or compiled.

        Parameters
        ----------
        spec : KernelSpec
            The kernel.
        device : int or SimulatedDevice
            The GPU's ordinal, or a simulated one.

        Raises
        ------
        CompileError, CompilerNotFoundError, UnexpectedCompileError
            If it must be compiled and cannot be.
        DeviceNotFoundError, DriverError
            If it cannot be loaded.
        ArgumentError
            If an argument is not as described.
        SettingsError
            If an environment variable has a value that it does not take.
        """
        check_type(spec, KernelSpec, "spec")
        on = device_of(device)
        spec = self._read(spec, on)
        return self._load(spec, spec.symbol, spec.params, on, lambda target: self.image(spec, target))

    def get_all(self, specs: Sequence[KernelSpec], device: DeviceLike) -> list[Kernel]:
        """Return the kernels of one call, as `get` does; those that must be compiled are compiled at the same time.

        By threads that end with their compile; the compiler is called by several, then.

        Parameters
        ----------
        specs : tuple or list of KernelSpec
            The kernels.
        device : int or SimulatedDevice
            The GPU's ordinal, or a simulated one.

        Raises
        ------
        CompileError, CompilerNotFoundError, UnexpectedCompileError, DeviceNotFoundError, DriverError, ArgumentError
            As `get` raises them.
        """
        if not isinstance(specs, (tuple, list)):
            raise ArgumentError(f"specs is {shown(specs)}; it takes a tuple or list of KernelSpec")
        for spec in specs:
            check_type(spec, KernelSpec, "specs")
        on = device_of(device)
        specs = [self._read(spec, on) for spec in specs]
        others = list(specs)  # that were not asked for yet
        beside: dict[KernelSpec, Beside] = {}

        def before_compile(target: Target) -> None:
            # What warns of a compile does so in the caller's thread.
            if self._settings.on_compile == "allow" and toolchain_of(target, self._nvrtc).compiles_beside():
                for other in others:
                    if (other, on.given) not in self._kernels:
                        beside[other] = Beside(functools.partial(self._image_untold, other, target))
            others.clear()

        def image(spec: KernelSpec, target: Target) -> Image:
            if spec in beside:
                beside.pop(spec).end()
            return self._image(spec, target, before_compile)

        def load(spec: KernelSpec) -> Kernel:
            if spec in others:
                others.remove(spec)
            return self._load(spec, spec.symbol, spec.params, on, lambda target: image(spec, target))

        return [load(spec) for spec in specs]

    def get_static(
        self, family: str, symbol: str, params: Params, device: DeviceLike, program: Callable[[], str]
    ) -> Kernel:
        """Return a kernel that was compiled when the package was built.

        Parameters
        ----------
        family, symbol : str
            The family's name, and the kernel's in its module.
        params : Params
            The kernel's parameters.
        device : int or SimulatedDevice
            The GPU's ordinal; or a simulated one, for which the module is compiled now.
        program : callable
            The module's text.

        Raises
        ------
        StaticKernelError
            If this installation has none for the device.
        """

        def image(target: Target) -> Image:
            found = toolchain_of(target, self._nvrtc).prebuilt(family, target)
            if found is None:
                return self.image(TextSpec(program(), f"static_{family}"), target)
            return Image(found.image, found.kind, "package")

        return self._load((family, symbol), symbol, params, device, image)

    def compile(
        self,
        text: str,
        symbol: str,
        fields: Sequence[Field],
        device: DeviceLike,
        options: Sequence[str] = (),
        include_folders: Sequence[str | os.PathLike[str]] = (),
    ) -> Kernel:
        """Return a caller's own kernel: the same cache, load and launch.

        Parameters
        ----------
        text : str
            CUDA C++ with an ``extern "C" __global__`` entry named `symbol`. It may include headers of
            `include_folders`, of this package, and of NVIDIA's wheel of the CUDA runtime.
        symbol : str
            The entry.
        fields : tuple or list of Field
            Its parameters: one struct by value, which the text knows as ``Params``.
        device : int or SimulatedDevice
            The GPU's ordinal, or a simulated one, on which every access can be checked.
        options : tuple or list of str
            For NVRTC, beyond the package's own; the simulator takes those that define macros.
        include_folders : tuple or list of str or path
            Where headers are looked for, in this order. Each file that is reached is read now, and the kernel's key
            depends on what it says.

        Raises
        ------
        ArgumentError
            If an argument is not as described, or a header of CUDA's is included in the simulator.
        CompileError, CompilerNotFoundError, UnexpectedCompileError, DeviceNotFoundError, DriverError
            As `get` raises them.

        Examples
        --------
        >>> from transformer_rtc import Field, SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void scale(const Params p) { ((float*)p.x)[threadIdx.x] *= p.factor; }'
        >>> fields = (Field("x", "pointer"), Field("factor", "float32"))
        >>> manager.compile(text, "scale", fields, SimulatedDevice()).params.size  # `Kernel.launch` launches it
        16
        """
        if not is_name(symbol):
            raise ArgumentError(f"symbol is {shown(symbol)}; it takes the name of the entry")

        def as_tuple(given: Any) -> Any:
            return tuple(given) if isinstance(given, list) else given

        spec = TextSpec(text, symbol, as_tuple(fields), as_tuple(options), paths_of(include_folders, "include_folders"))
        usage.observe(spec)
        on = device_of(device)
        found = self._read(spec, on)

        def image(target: Target) -> Image:
            try:
                return self.image(found, target)
            except UnexpectedCompileError as error:
                from .manifest import line

                raise error.asked_by(line(spec)) from None

        return self._load(found, symbol, spec.params, on, image)

    def is_compiled(self, spec: KernelSpec, device: DeviceLike) -> bool:
        """Whether `get` would not compile."""
        check_type(spec, KernelSpec, "spec")
        on = device_of(device)
        spec = self._read(spec, on)
        if (spec, on.given) in self._kernels:
            return True
        target = on.target
        return (spec, target) in self._images or self._lookup.read(spec, target)[0] is not None

    def in_memory(self, spec: KernelSpec, target: int | Target) -> bool:
        """Whether `image` would read no file."""
        on = target_of(spec, target)
        return (self._read(spec, on), on) in self._images

    def image(self, spec: KernelSpec, target: int | Target, cubin: bool = False) -> Image:
        """Return a kernel's machine code: from disk, or compiled and written there. It needs no device.

        Parameters
        ----------
        spec : KernelSpec
            The kernel.
        target : int or Target
            An architecture, such as 90; or the simulator's.
        cubin : bool
            Whether to refuse an architecture that NVRTC does not know, instead of making PTX for it.

        Raises
        ------
        CompileError, CompilerNotFoundError, UnexpectedCompileError, ArgumentError, SettingsError
            As `get` raises them.
        """
        check_flag(cubin, "cubin")

        def check(target: Target) -> None:
            if cubin:
                toolchain_of(target, self._nvrtc).check_target(target)

        on = target_of(spec, target)
        return self._image(self._read(spec, on), on, check)

    def _image(self, spec: KernelSpec, target: Target, before_compile: Callable[[Target], None]) -> Image:
        found = self._images.get((spec, target), lambda: self._make_image(spec, target, before_compile))
        # Of a compile by a thread of get_all(): in the thread of whoever gets it first, who may hold locks that a
        # callback takes.
        event = self._untold.pop((spec, target), None)
        if event is not None:
            self._listeners.tell(event)
        return found

    def _image_untold(self, spec: KernelSpec, target: Target) -> None:
        def keep(event: Event) -> None:
            self._untold[spec, target] = event

        self._images.get((spec, target), lambda: self._make_image(spec, target, lambda _: None, keep))

    def key(self, spec: KernelSpec, target: Target, identity: str) -> str:
        """Return a kernel's key in the disk cache.

        Parameters
        ----------
        spec : KernelSpec
            The kernel.
        target : Target
            What it is for.
        identity : str
            Which compiler; empty: none, which is the key of the source.
        """
        return self._lookup.key(self._read(spec, target), target, identity)

    def _check_compile(self, what: Callable[[], tuple[str, str]], symbol: str, target: Target, key: str) -> None:
        """Do what the settings ask for before a compile; `what` returns why there is one, at length and in short."""
        if self._freezes or self._settings.on_compile == "error":
            why = "freeze()" if self._freezes else "TRANSFORMER_RTC_ON_COMPILE=error"
            happened, reason = what()
            told = f"{happened}, and {why} forbids to compile it{toolchain_of(target, self._nvrtc).advice(why)}"
            raise UnexpectedCompileError(told, symbol, str(target), key, reason=reason)
        if self._settings.on_compile == "warn":
            warnings.warn(f"transformer_rtc compiles {symbol} for {target}", RuntimeWarning, stacklevel=3)

    def _make_image(
        self,
        spec: KernelSpec,
        target: Target,
        before_compile: Callable[[Target], None],
        tell: Callable[[Event], None] | None = None,
    ) -> Image:
        self._settings.check()
        found, key = self._lookup.read(spec, target)
        if found is not None:
            return found
        stem = f"{spec.symbol}.{target}"
        if self._settings.force_static:
            raise SettingsError(f"TRANSFORMER_RTC_FORCE_STATIC=1 forbids the compile of {spec.symbol}")
        self._check_compile(lambda: self._lookup.miss(spec, target, key), spec.symbol, target, key)
        toolchain = toolchain_of(target, self._nvrtc)
        with self.cache.claim(stem, key) as others:
            if others is not None:
                return Image(others, toolchain.kind_of(others), "disk")
            before_compile(target)
            program = spec.program
            start = time.perf_counter()
            report = log.is_read(log.DEBUG, self._settings.log >= 2)
            headers = includes.headers_of(spec)
            with includes.explained(spec, toolchain.has_cuda_headers):
                compiled = toolchain.compile(spec.symbol, program, headers, spec.options, target, report)
            elapsed = (time.perf_counter() - start) * 1e3
            if compiled.kind != "module":
                includes.check_symbol(spec, compiler.entries_of(compiled.image))
            # Filed under what really compiled it, which may not be what the environment promised.
            self.cache.put(
                stem,
                self.key(spec, target, compiled.compiler),
                compiled.image,
                {
                    "symbol": spec.symbol,
                    "target": str(target),
                    "kind": compiled.kind,
                    "compiler": compiled.compiler,
                    "version": compiled.version,
                    "source": self.key(spec, target, ""),
                },
            )
        if report:
            log.tell(log.DEBUG, f"{spec.symbol}\n{program}\n{compiled.log}", self._settings.log >= 2)
        (tell or self._listeners.tell)(
            Event("compile", spec.symbol, target, None, elapsed, len(compiled.image), "compiler")
        )
        return Image(compiled.image, compiled.kind, "compiler")

    def _load(
        self, key: Hashable, symbol: str, params: Params, device: DeviceLike, image: Callable[[Target], Image]
    ) -> Kernel:
        on = device_of(device)

        def make() -> Kernel:
            self._settings.check()
            target = on.target
            found = image(target)
            data, kind, origin, by_another = found
            if kind == "ptx" and not self._settings.force_static:
                what = f"{symbol} is PTX, which the driver must compile for {target}"
                self._check_compile(lambda: (what, "it is PTX"), symbol, target, "")
            start = time.perf_counter()
            try:
                kernel = on.load(symbol, params, data)
            except DriverError as error:
                if not by_another or not refuses_image(error):
                    raise
                self._lookup.refuse(found)
                self._images.forget((key, target))
                try:
                    return make()
                except CompilerNotFoundError:
                    raise error from None
            elapsed = (time.perf_counter() - start) * 1e3
            event = "load_ptx" if kind == "ptx" else "load"
            self._listeners.tell(Event(event, symbol, target, on.given, elapsed, len(data), origin), on.log_name)
            return kernel

        return self._kernels.get((key, on.given), make)


manager: KernelManager = KernelManager(
    DiskCache(settings.cache_dir, settings.read_only_cache_dir, settings.cache_bytes, uses_companion=settings.companion)
)
"""The process's `KernelManager`, on the disk cache that the environment names.

Examples
--------
>>> from transformer_rtc import TextSpec, manager
>>> manager.image(TextSpec('extern "C" __global__ void nothing() {}', "nothing"), 90).kind
'cubin'
"""
