# SPDX-License-Identifier: Apache-2.0
"""Which implementation is chosen, run-time compiled, static or simulated, and what happens to arrays of the host."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from . import _native, compiler, static
from .arrays import HOST
from .declaration import declarations
from .device import Device, device_of, is_simulated
from .errors import (
    ArgumentError,
    CompilerNotFoundError,
    DeviceNotFoundError,
    SettingsError,
    StaticKernelError,
    shown,
)
from .settings import settings
from .simulator import SimulatedDevice

__all__ = ["device_for", "implementations", "is_static", "simulating_on_host", "using"]

# A plan is keyed with the implementation's place in this list.
IMPLEMENTATIONS = ("rtc", "static", "simulator")
_RTC, _STATIC, _SIMULATOR = range(3)
# "simulator", and from there on every other simulated device that was used.
_simulated = [SimulatedDevice(checked=settings.simulate == "checked")]
chosen: ContextVar[int] = ContextVar(
    "transformer_rtc.implementation",
    default=_STATIC if settings.force_static else _SIMULATOR if settings.simulate else _RTC,
)

# Whether "rtc" was named: else arrays of the host may be simulated where there is no GPU.
_is_named: ContextVar[bool] = ContextVar("transformer_rtc.is_named", default=False)

_told = False


def device_for(implementation: int, ordinal: int, argument: str) -> Device:
    """Return the device that a call runs on.

    Parameters
    ----------
    implementation : int
        The number of the chosen implementation.
    ordinal : int
        The GPU that the arrays are on; `arrays.HOST`: the host.
    argument : str
        What messages call the first array.

    Raises
    ------
    ArgumentError
        If the simulator is chosen for arrays of a GPU.
    SettingsError
        If an environment variable has a value that it does not take.
    """
    settings.check()
    if implementation < _SIMULATOR:
        return device_of(ordinal)
    if ordinal != HOST:
        raise ArgumentError(f"{argument} is on cuda:{ordinal}; the simulator takes arrays of the host")
    return device_of(_simulated[implementation - _SIMULATOR])


def is_static(implementation: int, on: Device) -> bool:
    """Whether a call runs general kernels, with an implementation by its number."""
    return on.static or implementation == _STATIC


def _level_of_caller() -> int:
    """Return how many frames the function that asks is below the first one outside of the package."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level + 1


def simulating_on_host() -> contextlib.AbstractContextManager[None] | None:
    """Return the context in which arrays of the host are simulated; None: they are staged through a GPU.

    Raises
    ------
    DeviceNotFoundError
        If there is no GPU and nothing that stands in for one.
    SettingsError
        If an environment variable has a value that it does not take.
    """
    global _told
    settings.check()
    if chosen.get() >= _SIMULATOR:
        return contextlib.nullcontext()
    try:
        _native.current_device()
    except DeviceNotFoundError as error:
        if chosen.get() != _RTC or _is_named.get():
            raise
        from .simulator import toolchain

        try:
            toolchain.compiler_identity()
        except CompilerNotFoundError as missing:
            raise type(error)(f"{error}; {missing}") from error
        if not _told:
            _told = True
            warnings.warn(
                f"transformer_rtc runs its kernels on the CPU, in a simulator that is made for correctness and not for "
                f"speed: {error}. TRANSFORMER_RTC_SIMULATE=1 asks for it without this warning",
                RuntimeWarning,
                stacklevel=_level_of_caller(),
            )
        return using("simulator")
    return None


def implementations(op: Callable[..., object], device: int = 0) -> list[str]:
    """Return how an operator can run on a device.

    Parameters
    ----------
    op : callable
        An operator of this package, such as `rms_norm`.
    device : int
        The device's ordinal.

    Returns
    -------
    list of str
        ``"rtc"``, kernels that are compiled at run time, if NVRTC is installed and not forbidden. ``"static"``, kernels
        that were compiled with the package, if it has any for the device. ``"simulator"``, arrays on the host on the
        CPU, if there is a C++ compiler. It is the only one on a machine without a GPU.

    Raises
    ------
    ArgumentError
        If `op` is not an operator of this package.
    DeviceNotFoundError
        If there is no such device, or it is too old.
    SettingsError
        If an environment variable has a value that it does not take.

    Examples
    --------
    >>> from transformer_rtc import implementations, rms_norm
    >>> "simulator" in implementations(rms_norm)
    True
    """
    name = getattr(op, "__name__", None)
    declaration = declarations().get(name) if isinstance(name, str) else None
    if declaration is None:
        raise ArgumentError(f"op is {shown(op)}; it takes {', '.join(declarations())} of transformer_rtc")
    settings.check()
    from .simulator import toolchain

    simulator = []
    if not settings.force_static:
        with contextlib.suppress(CompilerNotFoundError):
            toolchain.compiler_identity()
            simulator.append("simulator")
    try:
        architecture = device_of(device).limits.architecture
    except DeviceNotFoundError:
        if device == 0 and simulator:
            return simulator
        raise
    found = []
    if not settings.force_static:
        with contextlib.suppress(CompilerNotFoundError):
            compiler.compiler_identity()
            found.append("rtc")
    with contextlib.suppress(StaticKernelError):
        static.image(declaration.family.name, architecture)
        found.append("static")
    return found + simulator


@contextlib.contextmanager
def using(implementation: str | SimulatedDevice) -> Iterator[None]:
    """Choose how operators run within a ``with`` block, in this thread or task.

    Parameters
    ----------
    implementation : str or SimulatedDevice
        ``"rtc"``, ``"static"`` or ``"simulator"``; or a simulated device, which says how to simulate. The first two
        need a GPU, even for arrays on the host, which are not simulated then.

    Raises
    ------
    ArgumentError
        If there is no such implementation.
    SettingsError
        If the environment forces another one, or a variable of it has a value that it does not take.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import rms_norm, using
    >>> with using("simulator"):
    ...     y = rms_norm(np.ones((2, 8), np.float32))
    >>> y.shape
    (2, 8)
    """
    named = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if not named and not is_simulated(implementation):
        raise ArgumentError(
            f"implementation is {shown(implementation)}; it takes {', '.join(IMPLEMENTATIONS)} or a SimulatedDevice"
        )
    settings.check()
    if settings.force_static and implementation != "static":
        raise SettingsError(f"using({implementation!r}) contradicts TRANSFORMER_RTC_FORCE_STATIC=1")
    if not isinstance(implementation, str):
        if implementation not in _simulated:
            _simulated.append(implementation)
        number = _SIMULATOR + _simulated.index(implementation)
    else:
        number = IMPLEMENTATIONS.index(implementation)
    token, named_token = chosen.set(number), _is_named.set(number == _RTC)
    try:
        yield
    finally:
        _is_named.reset(named_token)
        chosen.reset(token)
