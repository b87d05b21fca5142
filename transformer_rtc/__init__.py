"""Transformer norm and softmax kernels that are compiled by NVRTC the first time they are used."""

from .arrays import DeviceArray
from .dispatch import implementations, using
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .launch import Kernel, LaunchConfig, device_limits
from .manager import Event, KernelManager, manager
from .ops.norms import *  # noqa: F403
from .ops.norms import __all__ as _norms
from .ops.softmax import *  # noqa: F403
from .ops.softmax import __all__ as _softmax
from .simulator import SimulatedDevice
from .spec import Field, KernelSpec, Params, TextSpec
from .version import __version__

__all__ = [
    *_errors,
    *_norms,
    *_softmax,
    "DeviceArray",
    "Event",
    "Field",
    "Kernel",
    "KernelManager",
    "KernelSpec",
    "LaunchConfig",
    "Params",
    "SimulatedDevice",
    "TextSpec",
    "__version__",
    "device_limits",
    "implementations",
    "manager",
    "using",
]
