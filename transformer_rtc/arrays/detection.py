# SPDX-License-Identifier: Apache-2.0
"""Which framework an array is of."""

from __future__ import annotations

import sys

from ..errors import ArgumentError
from .cupy import Cupy
from .framework import Framework
from .jax import Jax
from .numpy import Numpy
from .protocols import Protocol
from .torch import Torch

# Of each package: whose arrays they are, and their type.
_FRAMEWORKS: dict[str, tuple[type[Framework], str, str]] = {
    "torch": (Torch, "torch", "Tensor"), "cupy": (Cupy, "cupy", "ndarray"), "jax": (Jax, "jax", "Array"),
    "jaxlib": (Jax, "jax", "Array"), "numpy": (Numpy, "numpy", "ndarray"),
}  # fmt: skip


def framework_type(array: object, argument: str) -> type[Framework]:
    for type_ in type(array).__mro__:
        found, package, name = _FRAMEWORKS.get(str(type_.__module__).partition(".")[0], (None, "", ""))
        # Not everything of a package is an array, such as torch.float32 or a module.
        if found is not None and isinstance(array, getattr(sys.modules.get(package), name, ())):
            return found
    protocols = (getattr(array, name, None) for name in ("__dlpack__", "__cuda_array_interface__"))
    if not isinstance(array, type) and any(protocol is not None for protocol in protocols):
        return Protocol
    raise ArgumentError(
        f"{argument} must be an array (torch, CuPy, JAX, numpy, or one with __dlpack__ or __cuda_array_interface__); "
        f"it is a {type_name(array)}"
    )


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
