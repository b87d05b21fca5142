# SPDX-License-Identifier: Apache-2.0
"""A loaded kernel and one launch of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from . import _native
from .checks import check_flag, check_integer, check_type, is_integer
from .errors import ArgumentError, DriverError, LaunchError, shown
from .simulator import SimulatedDevice
from .spec import Params

__all__ = ["Dim3", "Kernel", "LaunchConfig", "refuses_image"]

Dim3 = tuple[int, int, int]

# CUfunction_attribute and CUfunc_cache of the CUDA driver API.
MAX_THREADS, STATIC_SHARED, _LOCAL, _REGISTERS, MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 0, 1, 3, 4, 8, 14
_CACHE_PREFERENCES = {"none": 0, "shared": 1, "l1": 2, "equal": 3}
_PORTABLE_CLUSTER = 8
# What the driver says of machine code that is for a newer driver, or for another GPU.
_REFUSALS = ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
DEFAULT_DYNAMIC_SHARED = 48 * 1024  # a launch may have this much without asking


def refuses_image(error: DriverError) -> bool:
    """Whether the driver refused machine code for what it is, and not for want of memory or an earlier failure."""
    return any(name in str(error) for name in _REFUSALS)


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched.

    Attributes
    ----------
    grid, block : tuple of int
        CTAs, and threads of one.
    cluster : tuple of int
        CTAs of a cluster; (1, 1, 1) is none.
    dynamic_shared_memory : int
        Bytes of a CTA, beyond the kernel's static ones.
    cooperative : bool
        Whether all CTAs must be resident together, so that they may wait for each other.

    Raises
    ------
    ArgumentError
        If a value is not as described.

    Examples
    --------
    >>> from transformer_rtc import LaunchConfig
    >>> LaunchConfig(grid=(4, 1, 1), block=(256, 1, 1), cluster=(2, 1, 1))
    LaunchConfig(grid=(4, 1, 1), block=(256, 1, 1), cluster=(2, 1, 1), dynamic_shared_memory=0, cooperative=False)
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_shared_memory: int = 0
    cooperative: bool = False

    def __post_init__(self) -> None:
        for name in ("grid", "block", "cluster"):
            _check_dim3(getattr(self, name), name)
        check_integer(self.dynamic_shared_memory, "dynamic_shared_memory")
        check_flag(self.cooperative, "cooperative")


def _check_dim3(size: object, name: str) -> None:
    """Refuse what is no size of a grid, a block or a cluster."""
    if not (isinstance(size, tuple) and len(size) == 3 and all(is_integer(one, 0, 2**32 - 1) for one in size)):
        raise ArgumentError(f"{name} is {shown(size)}; it takes a tuple of three integers from 0 to 2**32 - 1")


class Function(Protocol):
    """What a kernel asks of the driver, or of what stands in for it."""

    def attribute(self, id: int) -> int: ...
    def set_attribute(self, id: int, value: int) -> None: ...
    def set_cache_preference(self, preference: int) -> None: ...
    def max_active_ctas(self, block: Dim3, dynamic_shared_memory: int) -> int: ...
    def max_active_clusters(self, block: Dim3, cluster: Dim3, dynamic_shared_memory: int) -> int: ...
    def parameter_bytes(self) -> int: ...
    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3,
        dynamic_shared_memory: int,
        cooperative: bool,
        params: bytes,
        stream: int,
    ) -> None: ...


class KernelDevice(Protocol):
    """What a kernel asks of its device. `transformer_rtc.device.Device` has it, and imports this module."""

    @property
    def given(self) -> int | SimulatedDevice: ...
    @property
    def name(self) -> str: ...
    @property
    def multiprocessors(self) -> int: ...
    def has_stream(self, stream: int) -> bool: ...


class Kernel:
    """A kernel loaded on one device. Made by `KernelManager`.

    Attributes
    ----------
    symbol : str
        Its name.
    params : Params
        Its parameters.
    device : int or SimulatedDevice
        What it is loaded on: the ordinal of a GPU, or a simulated one.
    multiprocessors : int
        How many its device has.

    Examples
    --------
    >>> from transformer_rtc import Kernel, SimulatedDevice, manager
    >>> def occupancy(kernel: Kernel, threads: int) -> float:
    ...     return threads * kernel.max_active_ctas((threads, 1, 1)) / 2048
    >>> text = 'extern "C" __global__ void nothing() {}'
    >>> kernel = manager.compile(text, "nothing", (), SimulatedDevice(architecture=90))
    >>> kernel.symbol, kernel.max_threads, occupancy(kernel, 768)
    ('nothing', 1024, 0.75)
    """

    def __init__(
        self,
        symbol: str,
        params: Params,
        on: KernelDevice,
        function: Function,
        launcher: _native.Launcher,
    ) -> None:
        self.symbol = symbol
        self.params = params
        self.device: int | SimulatedDevice = on.given
        self.function = function
        self.launcher = launcher
        self.where: str = on.name
        self.multiprocessors: int = on.multiprocessors
        self._on = on
        self._preparing = threading.Lock()
        # What a launch may have without asking; static shared memory is part of it.
        self._free_dynamic_shared = DEFAULT_DYNAMIC_SHARED - self.static_shared_memory
        loaded = self.function.parameter_bytes() if params.fields else -1
        if loaded not in (-1, params.size):
            raise LaunchError(f"{symbol} takes {loaded} bytes of parameters, and its fields describe {params.size}")

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self.function.attribute(_REGISTERS)

    @property
    def static_shared_memory(self) -> int:
        """Bytes of shared memory that the text declares."""
        return self.function.attribute(STATIC_SHARED)

    @property
    def local_memory(self) -> int:
        """Bytes of local memory of a thread: spills and arrays that are no registers."""
        return self.function.attribute(_LOCAL)

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA."""
        return self.function.attribute(MAX_THREADS)

    @property
    def max_dynamic_shared_memory(self) -> int:
        """The most dynamic shared memory of a launch, in bytes. Set it to use more than 48 KiB."""
        return self.function.attribute(MAX_DYNAMIC_SHARED)

    @max_dynamic_shared_memory.setter
    def max_dynamic_shared_memory(self, size: int) -> None:
        check_integer(size, "max_dynamic_shared_memory")
        self.function.set_attribute(MAX_DYNAMIC_SHARED, size)

    def set_cache_preference(self, preference: str) -> None:
        """Say what on-chip memory is for: ``"none"``, ``"shared"``, ``"l1"`` or ``"equal"``.

        Raises
        ------
        ArgumentError
            If it is another word.

        Examples
        --------
        >>> from transformer_rtc import SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void nothing() {}'
        >>> manager.compile(text, "nothing", (), SimulatedDevice()).set_cache_preference("l1")
        """
        if not isinstance(preference, str) or preference not in _CACHE_PREFERENCES:
            raise ArgumentError(f"preference is {shown(preference)}; it takes {', '.join(_CACHE_PREFERENCES)}")
        self.function.set_cache_preference(_CACHE_PREFERENCES[preference])

    def max_active_ctas(self, block: Dim3, dynamic_shared_memory: int = 0) -> int:
        """Return how many CTAs a multiprocessor can hold together.

        Parameters
        ----------
        block : tuple of int
            Threads of a CTA.
        dynamic_shared_memory : int
            Bytes of a CTA.

        Raises
        ------
        ArgumentError
            If an argument is not as described.

        Examples
        --------
        >>> from transformer_rtc import SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void nothing() {}'
        >>> kernel = manager.compile(text, "nothing", (), SimulatedDevice(architecture=90))
        >>> kernel.max_active_ctas((512, 1, 1)), kernel.max_active_ctas((512, 1, 1), 100 * 1024)
        (4, 2)
        """
        _check_dim3(block, "block")
        check_integer(dynamic_shared_memory, "dynamic_shared_memory")
        return self.function.max_active_ctas(block, dynamic_shared_memory)

    def max_active_clusters(self, block: Dim3, cluster: Dim3, dynamic_shared_memory: int = 0) -> int:
        """Return how many clusters the device can hold together.

        Parameters
        ----------
        block : tuple of int
            Threads of a CTA.
        cluster : tuple of int
            CTAs of a cluster.
        dynamic_shared_memory : int
            Bytes of a CTA.

        Raises
        ------
        ArgumentError
            If an argument is not as described.
        DriverError
            If no such cluster can be.

        Examples
        --------
        >>> from transformer_rtc import SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void nothing() {}'
        >>> kernel = manager.compile(text, "nothing", (), SimulatedDevice(multiprocessors=8))
        >>> kernel.max_active_clusters((512, 1, 1), (2, 1, 1))  # 8 * 4 CTAs
        16
        """
        _check_dim3(block, "block")
        _check_dim3(cluster, "cluster")
        check_integer(dynamic_shared_memory, "dynamic_shared_memory")
        if cluster[0] * cluster[1] * cluster[2] > _PORTABLE_CLUSTER:
            self.function.set_attribute(_NON_PORTABLE_CLUSTER, 1)
        return self.function.max_active_clusters(block, cluster, dynamic_shared_memory)

    def prepare(self, config: LaunchConfig) -> int:
        """Set what the driver must be told before such a launch, and return how many CTAs can be resident together.

        Raises
        ------
        LaunchError
            If not one cluster, or for a cooperative launch not one CTA, can be resident.
        DriverError
            If the driver has no memory to tell.
        ArgumentError
            If `config` is no `LaunchConfig`.

        Examples
        --------
        >>> from transformer_rtc import LaunchConfig, SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void nothing() {}'
        >>> kernel = manager.compile(text, "nothing", (), SimulatedDevice(multiprocessors=8))
        >>> kernel.prepare(LaunchConfig((1, 1, 1), (1024, 1, 1), cooperative=True))  # the largest cooperative grid
        16
        """
        check_type(config, LaunchConfig, "config")
        # Never lowered: another thread's launch may need what is set.
        with self._preparing:  # a thread that asks for less must not take back what another one has asked for
            if config.dynamic_shared_memory > self.max_dynamic_shared_memory:
                self.max_dynamic_shared_memory = config.dynamic_shared_memory
        size = config.cluster[0] * config.cluster[1] * config.cluster[2]
        if size > 1:
            try:
                resident = size * self.max_active_clusters(config.block, config.cluster, config.dynamic_shared_memory)
            except DriverError as error:
                # Else another kernel would take this one's place for good.
                if "CUDA_ERROR_OUT_OF_MEMORY" in str(error):
                    raise
                resident = 0  # larger than any cluster of this device
        else:
            per_multiprocessor = self.max_active_ctas(config.block, config.dynamic_shared_memory)
            resident = per_multiprocessor * self.multiprocessors
        if resident == 0:
            raise LaunchError(
                f"{self.symbol}: {size} CTAs of {config.block} threads with {config.dynamic_shared_memory} bytes of "
                f"dynamic shared memory must be resident together; {self.where} can hold 0"
            )
        return resident

    def launch(self, config: LaunchConfig, params: bytes | Mapping[str, Any], stream: int = 0) -> None:
        """Launch the kernel.

        Parameters
        ----------
        config : LaunchConfig
            The grid and what belongs to it.
        params : bytes or mapping
            What `Params.pack` gave, or its values by name.
        stream : int
            A ``CUstream`` of the kernel's device; 0 is the legacy default stream.

        Raises
        ------
        LaunchError
            If a cooperative grid or a cluster cannot be resident.
        ArgumentError
            If an argument is not as described, the parameters have another size, or the stream is another device's.

        Examples
        --------
        >>> import numpy as np
        >>> from transformer_rtc import Field, LaunchConfig, SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void scale(const Params p) { ((float*)p.x)[threadIdx.x] *= p.factor; }'
        >>> fields = (Field("x", "pointer"), Field("factor", "float32"))
        >>> kernel = manager.compile(text, "scale", fields, SimulatedDevice())
        >>> x = np.array([1, 2, 3], np.float32)
        >>> kernel.launch(LaunchConfig(grid=(1, 1, 1), block=(3, 1, 1)), {"x": x, "factor": 2.0})
        >>> x
        array([2., 4., 6.], dtype=float32)
        """
        packed = params if isinstance(params, bytes) else self.params.pack(**self._values(params))
        self._check(config, packed, stream)
        try:
            self.function.launch(
                config.grid,
                config.block,
                config.cluster,
                config.dynamic_shared_memory,
                config.cooperative,
                packed,
                stream,
            )
        except DriverError as error:
            # Asked only now: it takes as long as the launch.
            if "CUDA_ERROR_INVALID_HANDLE" not in str(error) or self._on.has_stream(stream):
                raise
            raise ArgumentError(
                f"{self.symbol}: stream belongs to another device or context than {self.where}"
            ) from error

    def _values(self, params: object) -> dict[str, Any]:
        if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
            raise ArgumentError(f"{self.symbol}: params is {shown(params)}; it takes bytes, or values by their names")
        return dict(params)

    def _check(self, config: LaunchConfig, packed: bytes, stream: int) -> None:
        check_type(config, LaunchConfig, "config")
        check_integer(stream, "stream", most=2**64 - 1)
        if len(packed) != self.params.size:
            raise ArgumentError(f"{self.symbol} takes {self.params.size} bytes of parameters; {len(packed)} were given")
        if (
            config.cooperative
            or config.cluster != (1, 1, 1)
            or config.dynamic_shared_memory > self._free_dynamic_shared
        ):
            resident = self.prepare(config)
            ctas = config.grid[0] * config.grid[1] * config.grid[2]
            if config.cooperative and ctas > resident:
                raise LaunchError(
                    f"{self.symbol}: a cooperative grid of {ctas} CTAs must be resident; {self.where} can hold "
                    f"{resident} of them"
                )

    def launch_plain(self, grid: Dim3, block: Dim3, params: bytes | Mapping[str, Any], stream: int = 0) -> None:
        """Launch independent CTAs: `launch` with a grid and a block alone, whose errors it raises.

        Examples
        --------
        >>> from transformer_rtc import SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void nothing() {}'
        >>> kernel = manager.compile(text, "nothing", (), SimulatedDevice())
        >>> kernel.launch_plain((100, 1, 1), (64, 1, 1), {})
        """
        self.launch(LaunchConfig(grid, block), params, stream)

    def launch_cooperative(self, grid: Dim3, block: Dim3, params: bytes | Mapping[str, Any], stream: int = 0) -> None:
        """Launch CTAs that may wait for each other: a cooperative `launch`, whose errors it raises.

        Examples
        --------
        >>> from transformer_rtc import SimulatedDevice, manager
        >>> text = 'extern "C" __global__ void nothing() {}'
        >>> kernel = manager.compile(text, "nothing", (), SimulatedDevice(multiprocessors=8))
        >>> kernel.launch_cooperative((kernel.multiprocessors, 1, 1), (64, 1, 1), {})  # a CTA for each
        """
        self.launch(LaunchConfig(grid, block, cooperative=True), params, stream)
