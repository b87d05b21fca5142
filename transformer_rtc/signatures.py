# SPDX-License-Identifier: Apache-2.0
"""What the signatures of public functions name; those of operators are in the stub beside each `api.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

__all__ = ["A", "ArrayLike", "DTypeLike"]


class SupportsDLPack(Protocol):
    # Producers differ in the keywords that they know.
    def __dlpack__(self, *arguments: Any, **options: Any) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


ArrayLike: TypeAlias = SupportsDLPack | SupportsCudaArrayInterface
"""An array that operators take: of torch, CuPy, JAX, numpy, or of whatever else speaks one of the two protocols.

It is for annotations. The types of the operators' functions bind a type variable to it: y has the type of x.

Examples
--------
>>> from typing import TypeVar
>>> import numpy as np
>>> from transformer_rtc import ArrayLike, rms_norm
>>> Array = TypeVar("Array", bound=ArrayLike)
>>> def norm_twice(x: Array) -> Array:
...     return rms_norm(rms_norm(x))
>>> norm_twice(np.ones((2, 8), np.float32)).shape
(2, 8)
"""

# The type of an operator's first array, which its outputs have. The other arrays are only `ArrayLike`: a type checker
# would join the types of a tensor and a parameter, or of two numpy arrays of different data types, into a third one.
A = TypeVar("A", bound=ArrayLike)

# A data type of torch, numpy, CuPy or JAX, or its name. These have no type in common.
DTypeLike: TypeAlias = object
