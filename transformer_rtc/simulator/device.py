# SPDX-License-Identifier: Apache-2.0
"""What a simulated GPU is like, and how it runs threads."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import check_flag, check_integer
from ..errors import ArgumentError, shown
from ..spec import ARCHITECTURES, RESIDENT, SYSTEM_SHARED_MEMORY, DeviceLimits, Target

__all__ = ["ORDERS", "SimulatedDevice"]

# In the order of native/machine.hpp's Schedule.
ORDERS = ("first_in", "last_in", "random")

_MAX_THREADS = 1024


@dataclass(frozen=True)
class SimulatedDevice:
    """A GPU simulated on the CPU: a device for `KernelManager`, an implementation for `using`.

    Parameters
    ----------
    architecture : int
        One of `transformer_rtc.spec.ARCHITECTURES`, 90 for compute capability 9.0: its limits hold, and kernels take
        its branch.
    checked : bool
        Whether every access is checked: races between threads, by what barriers, fences and acquires order; bounds,
        alignment, shared memory that was never written, integer overflow, barriers that not all threads reach. About
        three times slower.
    order : str
        Which thread goes on where several can: ``"first_in"`` (a warp's lanes keep together), ``"last_in"`` (the last
        warp runs as far ahead as it can) or ``"random"``.
    seed : int
        Of the random order.
    static : bool
        Whether operators run the general kernels that a build compiles, instead of specialised ones.
    multiprocessors : int
        How many there are: how large a cooperative grid can be.
    endless_seconds : int
        After how many seconds of CPU time a loop is taken for endless, where nothing proves that it is: of a thread
        that meets no other (in checked mode four times as many), and of threads that meet and change no memory. Four
        times as many of threads that wait for values in memory, or that meet and whose memory is not compared, and of
        which none leaves.

    Raises
    ------
    ArgumentError
        If a value is not as described.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import SimulatedDevice, rms_norm, using
    >>> device = SimulatedDevice(architecture=90, checked=True)
    >>> with using(device):  # a fault of the kernel would be a SimulationError
    ...     y = rms_norm(np.ones((2, 8), np.float32))
    >>> y.shape, device.limits.shared_memory_per_cta
    ((2, 8), 232448)
    """

    architecture: int = 90
    checked: bool = False
    order: str = "first_in"
    seed: int = 0
    static: bool = False
    multiprocessors: int = 8
    endless_seconds: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, int) or self.architecture not in ARCHITECTURES:
            raise ArgumentError(
                f"architecture is {shown(self.architecture)}; it takes {', '.join(map(str, ARCHITECTURES))}"
            )
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise ArgumentError(f"order is {shown(self.order)}; it takes {', '.join(ORDERS)}")
        check_flag(self.checked, "checked")
        check_flag(self.static, "static")
        check_integer(self.seed, "seed", most=2**64 - 1)
        check_integer(self.multiprocessors, "multiprocessors", 1, 1024)
        check_integer(self.endless_seconds, "endless_seconds", 1, 10**6)

    @property
    def limits(self) -> DeviceLimits:
        """What a configuration may use."""
        return ARCHITECTURES[self.architecture]

    @property
    def target(self) -> Target:
        """What kernels are compiled for."""
        return Target(self.architecture, "checked" if self.checked else "fast")

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA."""
        return _MAX_THREADS

    def max_active_ctas(self, threads: int, shared_memory: int) -> int:
        """Return how many CTAs of so many threads and bytes a multiprocessor holds together.

        Examples
        --------
        >>> from transformer_rtc import SimulatedDevice
        >>> SimulatedDevice(architecture=90).max_active_ctas(threads=256, shared_memory=48 * 1024)
        4
        """
        if threads > _MAX_THREADS or shared_memory > self.limits.shared_memory_per_cta:
            return 0
        most_threads, most_ctas = RESIDENT[self.architecture]
        whole_warps = -(-threads // 32) * 32
        memory = self.limits.shared_memory_of_multiprocessor
        return min(most_threads // whole_warps, memory // (shared_memory + SYSTEM_SHARED_MEMORY), most_ctas)

    def __str__(self) -> str:
        return f"the simulated sm_{self.architecture}"
