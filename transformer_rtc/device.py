# SPDX-License-Identifier: Apache-2.0
"""What the package asks of a device: a GPU and a simulated one answer alike."""

from __future__ import annotations

from . import _native
from .checks import is_integer
from .errors import ArgumentError, DeviceNotFoundError, TransformerRtcError, shown
from .launch import Kernel
from .simulator import SimulatedDevice
from .spec import ARCHITECTURES, DeviceLimits, Params, Target
from .tuning import Tuning, tuning_of

__all__ = [
    "Device",
    "DeviceLike",
    "Gpu",
    "SimulatedGpu",
    "device_limits",
    "device_of",
    "is_simulated",
    "is_too_old",
    "too_old",
]

# CUdevice_attribute of the CUDA driver API.
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_PER_CTA, _CLUSTERS = 16, 75, 76, 97, 120
_PORTABLE_CLUSTER = 8
# Of the compute capability, as of an architecture: what an older one lacks, kernels have as instructions.
OLDEST_ARCHITECTURE = 80


class Device:
    """A device, as the package uses it. Users give it as an ordinal or a `SimulatedDevice`; `device_of` makes it.

    Attributes
    ----------
    given : int or SimulatedDevice
        What users know it by: a kernel's and an event's device.
    name : str
        In messages.
    log_name : str
        In the log.
    static : bool
        Whether operators run the general kernels on it, instead of specialised ones.
    """

    given: int | SimulatedDevice
    name: str
    log_name: str
    static: bool

    @property
    def limits(self) -> DeviceLimits:
        """What a configuration may use."""
        raise NotImplementedError

    @property
    def target(self) -> Target:
        """What kernels are compiled for; `transformer_rtc.toolchain` finds the compiler by it."""
        raise NotImplementedError

    @property
    def tuning(self) -> Tuning:
        """What was measured of its configurations."""
        return tuning_of(self.product)

    @property
    def product(self) -> str:
        """What a tuning file calls it: every device of a kind alike."""
        raise NotImplementedError

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors there are."""
        raise NotImplementedError

    def has_stream(self, stream: int) -> bool:
        """Whether a stream is this device's."""
        raise NotImplementedError

    def load(self, symbol: str, params: Params, image: bytes) -> Kernel:
        """Return a kernel of an image that was compiled for the device's target."""
        raise NotImplementedError


class Gpu(Device):
    """A GPU, by its ordinal. The driver is asked when something is asked for, not before."""

    given: int
    static = False

    def __init__(self, ordinal: int) -> None:
        self.given = ordinal
        self.name = self.log_name = f"cuda:{ordinal}"

    @property
    def limits(self) -> DeviceLimits:
        found = device_limits(self.given)
        if is_too_old(found):
            raise DeviceNotFoundError(f"{self.name} ({self.product}) {too_old(found)}")
        return found

    @property
    def target(self) -> Target:
        return Target(self.limits.architecture)

    @property
    def product(self) -> str:
        return _native.device_name(self.given)

    @property
    def multiprocessors(self) -> int:
        return _native.device_attribute(self.given, _MULTIPROCESSORS)

    def has_stream(self, stream: int) -> bool:
        return _native.stream_on_device(self.given, stream)

    def load(self, symbol: str, params: Params, image: bytes) -> Kernel:
        function = _native.Function(self.given, image, symbol)
        return Kernel(symbol, params, self, function, function)


class SimulatedGpu(Device):
    """A GPU that is simulated on the CPU."""

    given: SimulatedDevice

    def __init__(self, given: SimulatedDevice) -> None:
        self.given = given
        self.name = str(given)
        self.log_name = str(given.target)
        self.static = given.static

    @property
    def limits(self) -> DeviceLimits:
        return self.given.limits

    @property
    def target(self) -> Target:
        return self.given.target

    @property
    def product(self) -> str:
        return f"simulated sm_{self.target.architecture}"

    @property
    def multiprocessors(self) -> int:
        return self.given.multiprocessors

    def has_stream(self, stream: int) -> bool:
        return stream == 0

    def load(self, symbol: str, params: Params, image: bytes) -> Kernel:
        from .simulator.kernel import SimulatedFunction, SimulatedKernel  # loads the machine

        return SimulatedKernel(symbol, params, self, SimulatedFunction(self.given, image, symbol))


# What users give, or what was made of it.
DeviceLike = int | SimulatedDevice | Device


def is_simulated(device: object) -> bool:
    """Whether a user gives a simulated device."""
    return isinstance(device, SimulatedDevice)


def device_of(device: DeviceLike) -> Device:
    """Return the device that a user gives.

    Raises
    ------
    ArgumentError
        If it is no ordinal of a GPU and no simulated device.
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, SimulatedDevice):
        return SimulatedGpu(device)
    _check_ordinal(device)
    return Gpu(device)


def _check_ordinal(device: object) -> None:
    """Refuse what is no ordinal of a GPU."""
    if not is_integer(device, 0, 2**31 - 1):
        raise ArgumentError(f"device is {shown(device)}; it takes the ordinal of a GPU, from 0 on")


def has_gpu() -> bool:
    """Whether this process sees a GPU that it can use."""
    try:
        _native.current_device()
    except TransformerRtcError:
        return False
    return True


def is_too_old(limits: DeviceLimits) -> bool:
    """Whether no kernel of the package runs on a GPU."""
    return limits.architecture < OLDEST_ARCHITECTURE


def too_old(limits: DeviceLimits) -> str:
    """Return what a message says of such a GPU."""
    return (
        f"has compute capability {limits.architecture / 10:.1f}; transformer_rtc needs "
        f"{OLDEST_ARCHITECTURE / 10:.1f} or newer, such as A100, L4, H100 and RTX 30 have"
    )


def device_limits(device: int) -> DeviceLimits:
    """Return what a device's kernels may use, as its driver says.

    Parameters
    ----------
    device : int
        The ordinal of a GPU.

    Returns
    -------
    DeviceLimits
        ``architecture``: 90 for compute capability 9.0; ``shared_memory_per_cta`` in bytes; ``max_cluster_size`` in
        CTAs, 1 where there are no clusters.

    Raises
    ------
    ArgumentError
        If `device` is no ordinal.
    DeviceNotFoundError
        If there is no such device.
    DriverError
        If the driver is too old.

    Examples
    --------
    >>> from transformer_rtc import DeviceNotFoundError, SimulatedDevice, device_limits
    >>> try:
    ...     limits = device_limits(0)
    ... except DeviceNotFoundError:  # here: what an H100 has
    ...     limits = SimulatedDevice(architecture=90).limits
    >>> limits.shared_memory_per_cta >= 48 * 1024
    True
    """
    _check_ordinal(device)
    architecture = 10 * _native.device_attribute(device, _MAJOR) + _native.device_attribute(device, _MINOR)
    largest = ARCHITECTURES[architecture].max_cluster_size if architecture in ARCHITECTURES else _PORTABLE_CLUSTER
    return DeviceLimits(
        architecture=architecture,
        shared_memory_per_cta=_native.device_attribute(device, _SHARED_PER_CTA),
        max_cluster_size=largest if _native.device_attribute(device, _CLUSTERS) else 1,
    )
