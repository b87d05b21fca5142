# SPDX-License-Identifier: Apache-2.0
"""Times the configurations of a request on a GPU: the arrays of a call, and launches between two events."""

from __future__ import annotations

import functools
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
from .errors import CompileError, DriverError, LaunchError, SettingsError
from .kernel_manager import KernelManager
from .operator import Planner
from .request import Request
from .spec import BFLOAT16, BOOL, DTYPES, FLOAT16, FLOAT32, UINT8, DType, Target

__all__ = ["ArrayOf", "GpuBench", "arguments_of"]

_HEADS = 32  # where each has a weight of its own
_L2_CACHE_SIZE = 38  # CUdevice_attribute
_FLUSHED_BYTES = 256 << 20  # at least: to write them takes longer than the host needs to put a launch on the stream
_RANDOM_BYTES = 4 << 20
_MEMORY_OF_ARRAYS = 32  # the largest array has at most such a part of a GPU's memory
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

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.bytes


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
    sizes = _sizes_of(declaration, request, rows)
    others = tuple(sizes[symbol] for symbol in reversed(declaration.symbols[1:]))
    leading = (max(1, rows // math.prod(others)), *others)
    return [_value(declaration, argument, request, sizes, leading) for argument in declaration.arguments]


def _sizes_of(declaration: Declaration, request: Request, rows: int) -> dict[str, int]:
    """Return the extents of the dimensions that have names."""
    columns, *others = declaration.symbols
    sizes = dict.fromkeys(declaration.symbols, 1) | {columns: request.columns}
    if request.per_head:
        sizes |= dict.fromkeys(declaration.conditional, _HEADS)
    # Some arrays have one element for each head.
    present = [array for array in declaration.arrays if request.dtypes[array.name] is not None]
    named = {size.symbol for array in present for size in declaration.shapes(array)[0].sizes}
    sizes |= dict.fromkeys(named.intersection(others), _HEADS)
    chosen = [one for one in declaration.arguments if isinstance(one, Choice) and one.name in request.flags]
    if others and (any(one.counts for one in chosen) or any(getattr(one, "broadcast", False) for one in present)):
        # A matrix for each head, a square one where there are so many rows.
        sizes[others[0]] = max(1, min(request.columns, rows // math.prod(sizes[name] for name in others[1:])))
    return sizes


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
        given = [name for name, dtype in request.dtypes.items() if dtype]
        extents = (declaration.parts(size, given) * sizes.get(size.symbol, 1) for size in shape.sizes)
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
    """Return bytes of random elements: normally distributed floats, and truths of which one of four is set."""
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

    def __init__(self, device: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise SettingsError(
                f"tuning times launches by cuda-python, which cannot be imported ({error}): install the extra cu12 or "
                f"cu13 of transformer_rtc"
            ) from error
        self._driver = driver
        self.stream = _native.own_stream(device)
        size = max(_FLUSHED_BYTES, 2 * _native.device_attribute(device, _L2_CACHE_SIZE))
        self._written = _native.Buffer(device, size)
        self._before = _native.current_context()
        self._device = self._call(driver.cuDeviceGet, device)
        self._call(driver.cuCtxSetCurrent, self._call(driver.cuDevicePrimaryCtxRetain, self._device))

    def close(self) -> None:
        """Give the thread the context back that it had."""
        _native.set_current_context(self._before)
        self._call(self._driver.cuDevicePrimaryCtxRelease, self._device)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{function.__name__} failed: {status.name}")
        return values[0] if values else None

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes on the device."""
        self._call(self._driver.cuMemcpyDtoDAsync, to, source, size, self.stream)

    def events(self, call: Callable[[], object]) -> tuple[Any, Any]:
        """Put a flush, an event, a call and another event on the stream."""
        written, driver = self._written, self._driver
        self._call(driver.cuMemsetD8Async, written.pointer, random.randrange(256), written.bytes, self.stream)
        start, end = (self._call(driver.cuEventCreate, 0) for _ in range(2))
        self._call(driver.cuEventRecord, start, self.stream)
        call()
        self._call(driver.cuEventRecord, end, self.stream)
        return start, end

    def microseconds(self, start: Any, end: Any) -> float:
        """Return what was between two events, once both have come."""
        self._call(self._driver.cuEventSynchronize, end)
        found = 1e3 * float(self._call(self._driver.cuEventElapsedTime, start, end))
        for event in (start, end):
            self._call(self._driver.cuEventDestroy, event)
        return found


class _Arrays:
    """The arrays of a call on a GPU, somewhere else each time, and the memory of its results."""

    def __init__(self, request: Request, rows: int, device: int, clock: _Clock) -> None:
        self._device = device
        self._pad = _native.Buffer(device, random.randrange(1, _PLACES))  # the arrays behind it lie somewhere else
        self._results: list[_native.Buffer] = []
        self._next = 0
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
            buffer = _native.Buffer(device, value.bytes + offset)
            if value.is_read:
                some = _random(value.dtype, rng)
                filled = min(some.nbytes, buffer.bytes)
                buffer.copy_from_host(0, some.ctypes.data, filled, clock.stream)
                while filled < buffer.bytes:
                    more = min(filled, buffer.bytes - filled)
                    clock.copy(buffer.pointer + filled, buffer.pointer, more)
                    filled += more
                _native.synchronize_stream(device, clock.stream)
            strides = tuple(math.prod(value.shape[place + 1 :]) for place in range(len(value.shape)))
            view = _native.View(buffer.pointer + offset, value.shape, strides, value.dtype.id, device, False)
            self.views.append((view, buffer))

    def call(self, native: _native.Operator, stream: int) -> None:
        """Put a call on a stream. Its results have the memory that they had in the call before."""
        self._next = 0
        native.run_views(self.views, self.values, self._allocate, stream)

    def _allocate(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        """Return memory for the next result or workspace of a call, which grows to the largest one."""
        size = max(1, math.prod(shape) * (DTYPES[dtype].bytes if dtype in DTYPES else 1))
        number, self._next = self._next, self._next + 1
        if number == len(self._results):
            self._results.append(_native.Buffer(self._device, size))
        elif self._results[number].bytes < size:
            self._results[number] = _native.Buffer(self._device, size)
        return self._results[number], self._results[number].pointer


class GpuBench:
    """Times the configurations of one request on a GPU.

    Parameters
    ----------
    request : Request
        What an operator is asked for.
    device : int
        The GPU's ordinal.
    most_bytes : int
        About what the largest array has; less on a GPU with little memory.
    most : int, optional
        How many configurations to compile at most: those that the family finds cheapest.
    columns : int, optional
        Of a row, where the request stands for a bucket of lengths; by default the bucket's most.

    Attributes
    ----------
    configs : sequence
        The configurations that compile and can be launched, the default one first.

    Raises
    ------
    CompileError, CompilerNotFoundError, UnexpectedCompileError, LaunchError, DriverError
        If the default configuration cannot be compiled or launched.
    """

    def __init__(
        self,
        request: Request,
        device: int,
        most_bytes: int = 256 << 20,
        most: int | None = None,
        columns: int | None = None,
    ) -> None:
        self._request, self._device = request, device
        self._timed = request._replace(columns=columns or request.columns)
        few = [value for value in arguments_of(self._timed, 1) if isinstance(value, ArrayOf)]
        one_row = max(value.bytes for value in few) // math.prod(few[0].shape[:-1])
        most_bytes = min(most_bytes, _native.device_memory(device) // _MEMORY_OF_ARRAYS)
        self._rows = max(1, most_bytes // max(1, one_row))
        declaration, self._limits = declaration_of(request.operator), Gpu(device).limits
        default, *others = declaration.family.configurations(request, self._limits)[:most]
        self._kernels = KernelManager(DiskCache(None), most_kernels=8 * (1 + len(others)))

        def compiled(config: Any) -> Any:
            try:
                self._compile(request, config)
            except CompileError:  # it needs more than there is
                return None
            return config

        self._compile(request, default)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            others = [config for config in pool.map(compiled, others) if config is not None]
        self._operators = {
            config: Planner(declaration, self._kernels, config).native_operator() for config in (default, *others)
        }
        self._clock = _Clock(device)
        try:
            arrays = _Arrays(request, 1, device, self._clock)
            self._run(default, arrays)
            self.configs: Sequence[Any] = [default, *(config for config in others if self._runs(config, arrays))]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the thread the context back that it had."""
        self._clock.close()

    def _compile(self, request: Request, config: Any) -> None:
        for spec, _ in declaration_of(request.operator).family.specialise(request, self._limits, config):
            self._kernels.image(spec, Target(self._limits.architecture))

    def _run(self, config: Any, arrays: _Arrays) -> None:
        arrays.call(self._operators[config], self._clock.stream)
        _native.synchronize_stream(self._device, self._clock.stream)

    def _runs(self, config: Any, arrays: _Arrays) -> bool:
        """Whether a configuration can be launched: so many CTAs are resident, and a kernel's static memory has room."""
        try:
            self._run(config, arrays)
        except LaunchError:
            return False
        except DriverError as error:
            if any(name in str(error) for name in ("INVALID_VALUE", "OUT_OF_RESOURCES", "OUT_OF_MEMORY")):
                return False
            raise
        return True

    def takes_unaligned(self, config: Any) -> bool:
        """Whether a configuration can be compiled and launched for unaligned rows, too."""
        unaligned = self._request._replace(unaligned=True)
        try:
            self._compile(unaligned, config)
        except CompileError:
            return False
        return self._runs(config, _Arrays(unaligned, 1, self._device, self._clock))

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
        arrays = _Arrays(self._timed, rows or self._rows, self._device, self._clock)
        calls = {
            config: functools.partial(arrays.call, self._operators[config], self._clock.stream) for config in configs
        }
        for call in calls.values():  # which allocate what results need
            call()
        events: dict[Any, list[tuple[Any, Any]]] = {config: [] for config in configs}
        for _ in range(repetitions):
            for config in random.sample(list(configs), len(configs)):
                events[config].append(self._clock.events(calls[config]))
        return {config: [self._clock.microseconds(*pair) for pair in pairs] for config, pairs in events.items()}
