# SPDX-License-Identifier: Apache-2.0
"""A kernel on a simulated device."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import _native
from ..errors import ArgumentError, LaunchError, SimulationError
from ..launch import (
    DEFAULT_DYNAMIC_SHARED,
    MAX_DYNAMIC_SHARED,
    MAX_THREADS,
    STATIC_SHARED,
    Dim3,
    Kernel,
    KernelDevice,
    LaunchConfig,
)
from ..spec import Params
from . import _machine, toolchain
from .device import ORDERS, SimulatedDevice

__all__ = ["SimulatedKernel"]

# (address, writable, initialised, name, element bytes, columns, outer count, outer stride, inner count, inner stride)
Rows = tuple[int, bool, bool, str, int, int, int, int, int, int]
_MAX_STATIC_SHARED = 48 * 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_files = itertools.count()
_modules: weakref.WeakValueDictionary[bytes, _machine.Module] = weakref.WeakValueDictionary()


def _volume(size: Dim3) -> int:
    return size[0] * size[1] * size[2]


class SimulatedFunction:
    """What `_native.Function` is on a GPU."""

    def __init__(self, device: SimulatedDevice, image: bytes, symbol: str) -> None:
        self.device = device
        self.symbol = symbol
        self._image = image
        # Devices that differ in the order of threads share it.
        module = _modules.get(image)
        if module is None:
            with self._file() as path:
                module = _modules[image] = _machine.Module(path)
        self._module = module
        self._attributes = {
            MAX_THREADS: min(device.max_threads, self._module.max_threads(symbol)),
            # Which of a text's kernels a variable belongs to shows when they run: `launch` checks it again then.
            STATIC_SHARED: min(self._module.static_shared_memory(False), _MAX_STATIC_SHARED),
        }
        self._attributes[MAX_DYNAMIC_SHARED] = DEFAULT_DYNAMIC_SHARED - self._attributes[STATIC_SHARED]

    @contextlib.contextmanager
    def _file(self) -> Iterator[str]:
        file = os.memfd_create(self.symbol[:200], os.MFD_CLOEXEC)
        try:
            os.write(file, self._image)
            # The loader takes a path that it has seen for the module that it has. A later file may get this number, so
            # each gets a spelling of its own.
            spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_files):b}")
            yield f"/proc/{os.getpid()}/{spelling}fd/{file}"
        finally:
            os.close(file)

    def attribute(self, id: int) -> int:
        return self._attributes.get(id, 0)

    def set_attribute(self, id: int, value: int) -> None:
        if id == MAX_DYNAMIC_SHARED:
            static = self.attribute(STATIC_SHARED)
            if value + static > self.device.limits.shared_memory_per_cta:
                raise LaunchError(
                    f"{self.symbol}: {value} bytes of dynamic shared memory beside {static} static ones; a CTA of "
                    f"{self.device} has {self.device.limits.shared_memory_per_cta}"
                )
        self._attributes[id] = value

    def set_cache_preference(self, preference: int) -> None:
        pass

    def max_active_ctas(self, block: Dim3, dynamic_shared_memory: int) -> int:
        return self.device.max_active_ctas(_volume(block), dynamic_shared_memory + self.attribute(STATIC_SHARED))

    def max_active_clusters(self, block: Dim3, cluster: Dim3, dynamic_shared_memory: int) -> int:
        size = _volume(cluster)
        if size > self.device.limits.max_cluster_size:
            return 0
        return self.max_active_ctas(block, dynamic_shared_memory) * self.device.multiprocessors // size

    def parameter_bytes(self) -> int:
        return self._module.parameter_bytes(self.symbol)

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3,
        dynamic_shared_memory: int,
        cooperative: bool,
        params: bytes,
        stream: int,
        memory: Sequence[Rows] = (),
        knows_memory: bool = False,
    ) -> None:
        """Launch, and run to the end; where it is said so, `memory` is all that the kernel may write."""
        if stream != 0:
            raise ArgumentError(f"{self.symbol}: stream is {stream}; the simulator has none but 0")
        self._check(grid, block, cluster, dynamic_shared_memory)
        device = self.device
        fault, suspects = self._module.run(
            self.symbol, grid, block, cluster, dynamic_shared_memory, cooperative, params, memory, knows_memory,
            device.endless_seconds, device.checked, ORDERS.index(device.order), device.seed,
        )  # fmt: skip
        self._raise_suspects(suspects, fault)
        if fault is not None:
            kind, message, at, other, file, line = fault
            frames = self._frames(at, other)
            if file:
                frames[0] = [("", os.path.basename(file), line), *frames[0]]
            raise SimulationError(
                kind, message, self.symbol, frames[0], *self._place(at), frames[1], *self._place(other)
            )
        static = self._module.static_shared_memory(True)
        if static > _MAX_STATIC_SHARED or static + dynamic_shared_memory > device.limits.shared_memory_per_cta:
            raise LaunchError(
                f"{self.symbol}: {static} bytes of static shared memory and {dynamic_shared_memory} dynamic ones; "
                f"{device} takes at most {_MAX_STATIC_SHARED}, and {device.limits.shared_memory_per_cta} in all"
            )

    def _check(self, grid: Dim3, block: Dim3, cluster: Dim3, dynamic_shared_memory: int) -> None:
        def refuse(what: str) -> None:
            raise LaunchError(f"{self.symbol}: {what}")

        for name, size, most in (("grid", grid, _MAX_GRID), ("block", block, _MAX_BLOCK)):
            if any(not 1 <= extent <= limit for extent, limit in zip(size, most, strict=True)):
                refuse(f"{name} is {size}; it takes 1 to {most}")
        if _volume(block) > self.attribute(MAX_THREADS):
            refuse(f"{_volume(block)} threads of a CTA; it takes at most {self.attribute(MAX_THREADS)}")
        if _volume(cluster) > self.device.limits.max_cluster_size:
            refuse(
                f"a cluster of {_volume(cluster)} CTAs; {self.device} takes at most "
                f"{self.device.limits.max_cluster_size}"
            )
        if any(extent % part for extent, part in zip(grid, cluster, strict=True)):
            refuse(f"grid is {grid}; it must be a multiple of the cluster, {cluster}")
        if dynamic_shared_memory > self.attribute(MAX_DYNAMIC_SHARED):
            refuse(
                f"{dynamic_shared_memory} bytes of dynamic shared memory; {self.attribute(MAX_DYNAMIC_SHARED)} are "
                f"allowed: set max_dynamic_shared_memory"
            )

    @staticmethod
    def _place(party: Any) -> tuple[Any, Any]:
        return (None, None) if party is None else party[1:]

    def _frames(self, *parties: Any) -> list[list[tuple[str, str, int]]]:
        offsets = [party[0] for party in parties if party is not None and party[0] is not None]
        with self._file() as path:
            located = toolchain.locate(path, offsets)
        frames = []
        for party in parties:
            found = located.get(party[0], []) if party is not None and party[0] is not None else []
            frames.append(
                [frame for frame in found if frame[1] not in toolchain.PRELUDE and not frame[0].startswith("trtc_run_")]
            )
        return frames

    def _raise_suspects(self, suspects: Sequence[Any], fault: Any) -> None:
        # One barrier of the text may be several places in the code: only different lines are a fault. A deadlock or a
        # race is told first.
        if fault is not None and fault[0] != "deadlock":
            return
        parties = [party for _, a, b in suspects for party in (a, b)]
        frames = self._frames(*parties)
        for number, (message, a, b) in enumerate(suspects):
            first, second = frames[2 * number], frames[2 * number + 1]
            if first and second and [frame[1:] for frame in first] != [frame[1:] for frame in second]:
                raise SimulationError(
                    "divergent_barrier", message, self.symbol, second, *self._place(b), first, *self._place(a)
                )


class SimulatedKernel(Kernel):
    """A kernel on a simulated device. Made by `KernelManager`.

    It is a `Kernel`, and runs to its end in `launch`. `registers` and `local_memory` are 0: nobody knows.
    """

    def __init__(self, symbol: str, params: Params, on: KernelDevice, function: SimulatedFunction) -> None:
        self._simulated = function
        super().__init__(symbol, params, on, function, _native.PythonLauncher(zero, function.launch, params.size))

    def launch(self, config: LaunchConfig, params: bytes | Mapping[str, Any], stream: int = 0) -> None:
        """Launch the kernel, and run it to its end.

        Parameters
        ----------
        config : LaunchConfig
            The grid and what belongs to it.
        params : bytes or mapping
            What `Params.pack` gave, or its values by name. A pointer may be a numpy array, or anything with its
            interface: in checked mode, the kernel may touch these arrays and no other memory.
        stream : int
            0.

        Raises
        ------
        SimulationError
            If the kernel does what it must not.
        LaunchError
            If the launch exceeds the device's limits.
        ArgumentError
            If the parameters have another size, or an array is no host array.
        """
        memory: list[Rows] = []
        packed = params
        knows_memory = not isinstance(packed, bytes)
        if not isinstance(packed, bytes):
            values = self._values(packed)
            for field in self.params.fields:
                value = values.get(field.name)
                if field.type == "int64" and value != 0:
                    knows_memory = False  # it may be an address
                if field.type == "pointer" and value is not None and not isinstance(value, int):
                    values[field.name] = self._take(field.name, value, memory)
                    knows_memory = knows_memory and not _may_hold_addresses(value)
                elif field.type == "pointer" and value != 0:
                    knows_memory = False
            packed = self.params.pack(**values)
            knows_memory = knows_memory and all(outer * inner == 1 for *_, outer, _, inner, _ in memory)
        self._check(config, packed, stream)
        self._simulated.launch(
            config.grid, config.block, config.cluster, config.dynamic_shared_memory, config.cooperative, packed, stream,
            memory, knows_memory,
        )  # fmt: skip

    def _take(self, name: str, array: Any, memory: list[Rows]) -> int:
        interface = getattr(array, "__array_interface__", None)
        if interface is None:
            raise ArgumentError(f"{self.symbol}: {name} must be an address or a numpy array; it is {type(array)}")
        address, read_only = interface["data"]
        size, shape, strides = int(interface["typestr"][2:]), interface["shape"], interface.get("strides")
        dimensions: list[tuple[int, int]] = []
        if strides is None or 0 in shape:
            size *= math.prod(shape)
        else:
            dimensions = sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent != 1)
        while dimensions and dimensions[0][0] == size:  # what lies without gaps is one row
            size *= dimensions.pop(0)[1]
        # Rows may be apart, and what lies between them is not the kernel's.
        if dimensions and dimensions[0][0] < size:
            step = dimensions[0][0]
            why = "elements overlap" if step > 0 else "a stride is negative" if step else "a stride is 0"
            raise ArgumentError(
                f"{self.symbol}: {name} has the shape {shape} and strides of {strides} bytes: {why}; it takes an array "
                f"of which each element has its own place, in the order of addresses, as numpy.ascontiguousarray makes "
                f"it, or an address"
            )
        if size == 0:
            return int(address)
        apart: list[tuple[int, int]] = [(0, 1), (0, 1), *reversed(dimensions)]
        outer, (outer_step, outer_extent), (inner_step, inner_extent) = apart[:-2], apart[-2], apart[-1]
        for place in itertools.product(*(range(extent) for _, extent in outer)):
            start = address + sum(i * stride for i, (stride, _) in zip(place, outer, strict=True))
            memory.append(
                (start, not read_only, True, name, 1, size, outer_extent, outer_step, inner_extent, inner_step)
            )
        return int(address)


def _may_hold_addresses(array: Any) -> bool:
    """Whether an array's elements are as wide as addresses, or of a type that says nothing of what they are."""
    kind, size = array.__array_interface__["typestr"][1], int(array.__array_interface__["typestr"][2:])
    return kind not in "biufc" or (kind in "iu" and size == 8)


def zero(address: int, size: int) -> None:
    """Zero host memory: a workspace's."""
    ctypes.memset(address, 0, size)
