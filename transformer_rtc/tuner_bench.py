"""Times the configurations of a request on a GPU: the arrays of a call, and launches between two events."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from . import _native
from .arguments import Array, Choice, Flag, Input, Margin, OutputDType, OutputWanted, Result, Update
from .cache import DiskCache
from .declaration import Declaration, declaration_of
from .device import Gpu
from .errors import CompilerNotFoundError, DriverError, LaunchError, TransformerRtcError
from .kernel_manager import KernelManager
from .operator import Operator
from .request import Request
from .spec import BFLOAT16, BOOL, DTYPES, FLOAT16, FLOAT32, UINT8, DType, Target

__all__ = ["ArrayOf", "GpuBench", "arguments_of"]

_HEADS = 32  # where each has a weight of its own
_L2_CACHE_SIZE = 38  # CUdevice_attribute
_FLUSHED_BYTES = 256 << 20  # at least: to write them takes longer than the host needs to put a launch on the stream
_RANDOM_BYTES = 4 << 20
_PLACES = 64 << 20  # bytes by which one placement of the arrays may differ from another


class ArrayOf(NamedTuple):
    """An array of a call.

    Attributes
    ----------
    shape : tuple of int
        Its extents; it is row-major without gaps.
    dtype : DType
        Of its elements.
    is_read : bool
        Whether its elements count.
    """

    shape: tuple[int, ...]
    dtype: DType
    is_read: bool


def arguments_of(request: Request, rows: int) -> list[Any]:
    """Return the arguments of a call that asks for this, in the order of its declaration; `ArrayOf` for its arrays.

    Parameters
    ----------
    request : Request
        What it asks for.
    rows : int
        About how many rows it has.
    """
    declaration = declaration_of(request.operator)
    sizes = dict.fromkeys(declaration.symbols, 1) | {declaration.symbols[0]: request.columns}
    if request.per_head:
        sizes |= dict.fromkeys(declaration.conditional, _HEADS)
    for argument in declaration.arguments:
        if isinstance(argument, Choice) and argument.name in request.flags and argument.counts:
            sizes[argument.counts[0]] = max(1, min(request.columns, rows))  # a square, where there are so many rows
    others = tuple(sizes[symbol] for symbol in reversed(declaration.symbols[1:]))
    leading = (max(1, rows // math.prod(others)), *others)
    return [_value(declaration, argument, request, sizes, leading) for argument in declaration.arguments]


def _value(
    declaration: Declaration, argument: Any, request: Request, sizes: dict[str, int], leading: tuple[int, ...]
) -> Any:
    if isinstance(argument, Result):
        return request.dtypes[argument.name] is not None
    if isinstance(argument, Array):
        dtype = request.dtypes[argument.name]
        if dtype is None:
            return None
        shapes = declaration.shapes(argument)
        shape = shapes[1 if request.per_head and declaration.has_two_shapes(argument) else 0]
        # One that may be broadcast is the same for all batches.
        first = (1, *leading[1:]) if getattr(argument, "broadcast", False) else leading
        extents = (size.multiple * sizes[size.symbol] if size.symbol else size.multiple for size in shape.sizes)
        return ArrayOf((*(first if shape.leading else ()), *extents), dtype, isinstance(argument, (Input, Update)))
    if isinstance(argument, Choice):
        # A word that asks for no equal sizes, if there is one.
        words = sorted(argument.words, key=lambda word: argument.words[word] is not None)
        return words[0] if argument.name in request.flags else None
    if isinstance(argument, OutputDType):
        return next((dtype.name for name in argument.of if (dtype := request.dtypes[name]) is not None), None)
    if isinstance(argument, OutputWanted):
        return any(request.dtypes[name] is not None for name in argument.of)
    if isinstance(argument, Flag):
        return argument.name in request.flags
    if isinstance(argument, Margin):
        return int(request.margin)
    return argument.default


def _random(dtype: DType, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return bytes of random elements: normally distributed floats, and of truths three of four."""
    count = _RANDOM_BYTES // dtype.bytes
    if dtype in (BOOL, UINT8):
        return (rng.random(count) < 0.25).view(np.uint8)
    floats = rng.standard_normal(count, np.float32)
    if dtype is FLOAT32:
        return floats.view(np.uint8)
    if dtype is FLOAT16:
        return floats.astype(np.float16).view(np.uint8)
    if dtype is BFLOAT16:
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return rng.integers(0, 120, count, np.uint8)  # finite numbers of 8 bits


class _Clock:
    """Writes more than the L2 cache holds, and times what is put on a stream behind that."""

    def __init__(self, device: int, stream: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CompilerNotFoundError(
                f"tuning times launches by cuda-python, which cannot be imported ({error}): pip install cuda-python"
            ) from error
        self._driver = driver
        size = max(_FLUSHED_BYTES, 2 * _native.device_attribute(device, _L2_CACHE_SIZE))
        self._written = _native.Buffer(device, size)
        context = self._call(driver.cuDevicePrimaryCtxRetain, self._call(driver.cuDeviceGet, device))
        self._call(driver.cuCtxSetCurrent, context)
        self._stream = driver.CUstream(stream)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{function.__name__} failed: {status.name}")
        return values[0] if values else None

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes on the device."""
        self._call(self._driver.cuMemcpyDtoDAsync, to, source, size, self._stream)

    def events(self, call: Callable[[], object]) -> tuple[Any, Any]:
        """Put a flush, an event, a call and another event on the stream."""
        self._call(
            self._driver.cuMemsetD8Async, self._written.pointer, random.randrange(256), self._written.bytes,
            self._stream,
        )  # fmt: skip
        start, end = (self._call(self._driver.cuEventCreate, 0) for _ in range(2))
        self._call(self._driver.cuEventRecord, start, self._stream)
        call()
        self._call(self._driver.cuEventRecord, end, self._stream)
        return start, end

    def microseconds(self, start: Any, end: Any) -> float:
        """Return what was between two events, once both have come."""
        self._call(self._driver.cuEventSynchronize, end)
        found = 1e3 * float(self._call(self._driver.cuEventElapsedTime, start, end))
        for event in (start, end):
            self._call(self._driver.cuEventDestroy, event)
        return found


class _Arrays:
    """The arrays of a call on a GPU, somewhere else each time."""

    def __init__(self, request: Request, rows: int, device: int, stream: int, clock: _Clock) -> None:
        self._device = device
        self._apart = _native.Buffer(device, random.randrange(1, _PLACES))
        self._results: dict[tuple[tuple[int, ...], int], _native.Buffer] = {}
        self.values = arguments_of(request, rows)
        self.views: list[tuple[_native.View, object] | None] = []
        rng = np.random.default_rng()
        for argument, value in zip(declaration_of(request.operator).arguments, self.values, strict=True):
            if not isinstance(argument, Array):
                continue
            if not isinstance(value, ArrayOf):
                self.views.append(None)
                continue
            # Unaligned rows begin one element behind a boundary.
            offset = value.dtype.bytes if request.unaligned else 0
            size = math.prod(value.shape) * value.dtype.bytes
            buffer = _native.Buffer(device, size + offset)
            if value.is_read:
                some = _random(value.dtype, rng)
                filled = min(some.nbytes, buffer.bytes)
                buffer.copy_from_host(0, some.ctypes.data, filled, stream)
                while filled < buffer.bytes:
                    more = min(filled, buffer.bytes - filled)
                    clock.copy(buffer.pointer + filled, buffer.pointer, more)
                    filled += more
                _native.synchronize_stream(device, stream)
            strides = tuple(math.prod(value.shape[place + 1 :]) for place in range(len(value.shape)))
            view = _native.View(buffer.pointer + offset, value.shape, strides, value.dtype.id, device, False)
            self.views.append((view, buffer))

    def empty(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        """Return memory for a result: the same one in every call."""
        size = math.prod(shape) * (DTYPES[dtype].bytes if dtype in DTYPES else 1)
        made = self._results.setdefault((tuple(shape), dtype), _native.Buffer(self._device, max(1, size)))
        return made, made.pointer


class GpuBench:
    """Times the configurations of one request on a GPU.

    Parameters
    ----------
    request : Request
        What an operator is asked for.
    device : int
        The GPU's ordinal.
    most_bytes : int
        About what the largest array has.

    Attributes
    ----------
    configs : sequence
        The configurations that compile and can be launched, the default one first.
    """

    def __init__(self, request: Request, device: int, most_bytes: int = 256 << 20) -> None:
        self._request, self._device = request, device
        self._rows = max(1, most_bytes // (request.columns * max(d.bytes for d in request.dtypes.values() if d)))
        self._stream = _native.own_stream(device)
        self._clock = _Clock(device, self._stream)
        declaration, limits = declaration_of(request.operator), Gpu(device).limits
        configs = declaration.family.configurations(request, limits)
        kernels = KernelManager(DiskCache(None), most_kernels=4 * len(configs) + 16)
        target = Target(limits.architecture)

        def compile_all(config: Any) -> Any:
            with contextlib.suppress(TransformerRtcError):  # one that does not compile is none
                for spec, _ in declaration.family.specialise(request, limits, config):
                    kernels.image(spec, target)
                return config
            return None

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = [config for config in pool.map(compile_all, configs) if config is not None]
        self._operators = {config: Operator(declaration, kernels, config) for config in compiled}
        self.configs: Sequence[Any] = [config for config in compiled if self._runs(config)]

    def _runs(self, config: Any) -> bool:
        arrays = _Arrays(self._request, 1, self._device, self._stream, self._clock)
        try:
            self._call(config, arrays)()
            _native.synchronize_stream(self._device, self._stream)
        except LaunchError:  # so many CTAs are not resident together
            return False
        return True

    def _call(self, config: Any, arrays: _Arrays) -> Callable[[], object]:
        native = self._operators[config].native
        return lambda: native.run_views(arrays.views, arrays.values, arrays.empty, self._stream)

    def times(self, configs: Sequence[Any], repetitions: int, rows: int | None = None) -> dict[Any, list[float]]:
        """Return the microseconds of calls with arrays at one place, in an order at random, the L2 cache flushed.

        Parameters
        ----------
        configs : sequence
            Of `configs`.
        repetitions : int
            Calls of each.
        rows : int, optional
            How many rows they have; by default many.
        """
        arrays = _Arrays(self._request, rows or self._rows, self._device, self._stream, self._clock)
        calls = {config: self._call(config, arrays) for config in configs}
        for call in calls.values():
            call()
        events: dict[Any, list[tuple[Any, Any]]] = {config: [] for config in configs}
        for _ in range(repetitions):
            for config in random.sample(list(configs), len(configs)):
                events[config].append(self._clock.events(calls[config]))
        return {config: [self._clock.microseconds(*pair) for pair in pairs] for config, pairs in events.items()}
