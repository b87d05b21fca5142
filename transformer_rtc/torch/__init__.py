# SPDX-License-Identifier: Apache-2.0
"""What torch needs beside calls on tensors: gradients, modules, whole models. Never imported without torch.

`RMSNorm`, `LayerNorm`, `AddRMSNorm`, `AddLayerNorm`, `Softmax`, `GELU`, `SiLU`, `SwiGLU` and `GEGLU` are modules.
`patch` swaps those that a model has, `kernel_mapping` and `patch_mapping` do it through Hugging Face's own ways, and
`warmup` compiles what a model needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import megatron as megatron
    from . import transformer_engine as transformer_engine
    from .activations import GEGLU, GELU, SiLU, SwiGLU
    from .hugging_face import kernel_mapping, patch_mapping
    from .modules import LayerNorm, RMSNorm
    from .patching import Patch, patch
    from .softmax_module import Softmax
    from .sum_modules import AddLayerNorm, AddRMSNorm
    from .warming import warmup

__all__ = [
    "GEGLU",
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "LayerNorm",
    "Patch",
    "RMSNorm",
    "SiLU",
    "Softmax",
    "SwiGLU",
    "kernel_mapping",
    "patch",
    "patch_mapping",
    "warmup",
]

# Imported when they are first used: a process that only records gradients needs none of them.
_LATER = {
    "AddLayerNorm": "sum_modules",
    "AddRMSNorm": "sum_modules",
    "GEGLU": "activations",
    "GELU": "activations",
    "LayerNorm": "modules",
    "Patch": "patching",
    "RMSNorm": "modules",
    "SiLU": "activations",
    "Softmax": "softmax_module",
    "SwiGLU": "activations",
    "kernel_mapping": "hugging_face",
    "patch": "patching",
    "patch_mapping": "hugging_face",
    "warmup": "warming",
}


# Modules whose classes have one name, so that they are not among those above.
_MODULES = ("megatron", "transformer_engine")


def _later(name: str) -> object:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return found


if not TYPE_CHECKING:  # a type checker would take any name to be there
    __getattr__ = _later


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
