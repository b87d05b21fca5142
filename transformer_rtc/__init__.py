# SPDX-License-Identifier: Apache-2.0
"""Transformer norm, softmax and activation kernels that are compiled by NVRTC the first time they are used."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

try:
    from . import _native as _native
except ImportError as error:
    if error.name != __name__:  # the module is there and cannot be loaded, and the error says why
        raise
    # As in a clone where nothing is built. Python's own words are of a circular import.
    raise ImportError(
        "transformer_rtc is not installed: run pip install -e '.[cu12]' in the clone", name=__name__, path=__file__
    ) from None
from . import errors as _errors
from .errors import SettingsError

# A free-threaded Python turns the GIL on when it imports the native module, and says so; not if its user forbids that.
# Asked before there is anything else: a thread that waited for another's import has what that left, though it failed.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise SettingsError(
        "the GIL is off (PYTHON_GIL=0 or -X gil=0), and transformer_rtc needs it: leave the setting out, and a "
        "free-threaded Python turns the GIL on when it imports transformer_rtc"
    )

from .arrays import DeviceArray
from .device import device_limits
from .errors import *  # noqa: F403
from .events import Event
from .imports import when_imported as _when_imported
from .kernel_manager import KernelManager, manager
from .launch import Kernel, LaunchConfig
from .operator import operator_of as _operator_of
from .ops.activation import api as _activations
from .ops.activation.api import *  # noqa: F403
from .ops.arithmetic import api as _arithmetic
from .ops.arithmetic.api import *  # noqa: F403
from .ops.norm import api as _norms
from .ops.norm.api import *  # noqa: F403
from .ops.softmax import api as _softmax
from .ops.softmax.api import *  # noqa: F403
from .select import implementations, using
from .settings import settings as _settings
from .simulator import SimulatedDevice
from .spec import Field, KernelSpec, Params, TextSpec
from .version import __version__

if TYPE_CHECKING:
    from . import torch as torch
    from .manifest import ManifestEntry
    from .recording import record
    from .signatures import ArrayLike
    from .warming import WarmupRecord, warmup

freeze = manager.freeze
# Imported when they are first used: most processes never do.
_LATER = {
    "ArrayLike": "signatures",
    "ManifestEntry": "manifest",
    "WarmupRecord": "warming",
    "record": "recording",
    "warmup": "warming",
}

__all__ = [
    "ArrayLike",
    "DeviceArray",
    "Event",
    "Field",
    "Kernel",
    "KernelManager",
    "KernelSpec",
    "LaunchConfig",
    "ManifestEntry",
    "Params",
    "SimulatedDevice",
    "TextSpec",
    "WarmupRecord",
    "__version__",
    "device_limits",
    "freeze",
    "implementations",
    "manager",
    "record",
    "using",
    "warmup",
]
# One by one: type checkers read no other way to add a module's.
__all__ += _activations.__all__
__all__ += _arithmetic.__all__
__all__ += _errors.__all__
__all__ += _norms.__all__
__all__ += _softmax.__all__


def _with_torch() -> None:
    from .torch.operators import define

    define(lambda name: _operator_of(name).direct)


def _with_dynamo() -> None:
    from .torch.tracing import substitute

    modules = (_activations, _arithmetic, _norms, _softmax)
    substitute({name: vars(module)[f"_{name}"] for module in modules for name in module.__all__})


def _with_dtensor() -> None:
    from .torch.sharding import register

    register()


# None of the three is imported for this: an eager process of one rank needs no more than torch.
_when_imported("torch", _with_torch)
_when_imported("torch._dynamo", _with_dynamo)
_when_imported("torch.distributed.tensor", _with_dtensor)

if _settings.record:
    import_module(".recording", __name__)


def _later(name: str) -> object:
    if name == "torch":  # a package of its own, and no public name here: a star import must not hide the user's torch
        return import_module(".torch", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return found


if not TYPE_CHECKING:  # a type checker would take any name to be there
    __getattr__ = _later


def __dir__() -> list[str]:
    return sorted([*__all__, "torch"])
