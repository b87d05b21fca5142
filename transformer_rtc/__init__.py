"""Transformer norm kernels that are compiled by NVRTC the first time they are used."""

from .arrays import DeviceArray
from .dispatch import implementations, using
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .launch import Kernel, LaunchConfig, device_limits
from .manager import Event, KernelManager, manager
from .manifest import ManifestEntry, record
from .ops.norms import *  # noqa: F403
from .ops.norms import __all__ as _norms
from .simulator import SimulatedDevice
from .spec import Field, KernelSpec, Params, TextSpec
from .version import __version__
from .warmup import WarmupRecord, warmup

freeze = manager.freeze

__all__ = [
    *_errors,
    *_norms,
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
