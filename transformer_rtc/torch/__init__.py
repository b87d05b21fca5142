"""What torch needs beside calls on tensors: gradients and modules."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .modules import LayerNorm, RMSNorm
    from .softmax_module import Softmax
    from .sum_modules import AddLayerNorm, AddRMSNorm

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "LayerNorm",
    "RMSNorm",
    "Softmax",
]

# Imported when they are first used: a process that only records gradients needs none of them.
_LATER = {
    "AddLayerNorm": "sum_modules",
    "AddRMSNorm": "sum_modules",
    "LayerNorm": "modules",
    "RMSNorm": "modules",
    "Softmax": "softmax_module",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
