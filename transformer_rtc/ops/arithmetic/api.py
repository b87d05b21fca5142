# SPDX-License-Identifier: Apache-2.0
"""Arithmetic: the sum of two arrays."""

# Written by tests/tools/make_api.py: change declarations.py, and run it.

from __future__ import annotations

from typing import Any

from ...operator import register
from . import declarations

__all__ = [
    "add",
]

_add = register(declarations.ADD)


def add(
    x: Any,
    other: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Return the sum of two arrays, which are broadcast to one shape.

    ``y = x + other``. Integers are added exactly, and wrap around beyond 64 bits and beyond y's type. The sum of two
    bools is true if one of them is. If x or `other` has a floating-point type, both are converted to float32 and
    added, and y is rounded once. An array without dimensions decides y's type only by its category, as in torch: bool,
    integer or floating point. At least one of the two has dimensions. uint16, uint32 and uint64 have no sum with bools
    and other integers of any dimensions unless y's type is given. Leading dimensions of all arrays must collapse to
    two strides in the same way.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., columns], float32, float16, bfloat16, bool or an integer of 8 to 64 bits
        An array of any numbers, contiguous in its last dimension.
    other : array [..., columns], float32, float16, bfloat16, bool or an integer of 8 to 64 bits
        Another one, of a shape that is broadcast with x's as torch does it.
    out : array [..., columns], optional
        Where y is written: an input of y's shape and type itself, or an array that shares no element with the
        inputs.
    out_dtype : data type, optional
        The data type of y if `out` is not given, of any framework or by name. By default it is the type that torch
        promotes those of x and `other` to. Floating-point numbers do not become integers, and numbers do not become
        bools.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., columns]
        Of x's framework, and of the shape that both are broadcast to.

    Several results are a tuple in this order. One result is not a tuple.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    AllocationError
        If there is no memory for an output.
    UnexpectedCompileError
        If a kernel must be compiled, and `freeze` or the environment forbids it.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, ForkError, SettingsError, StaticKernelError
        If there is no way to run the call.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import add
    >>> x, other = np.array([[1], [2]]), np.array([10, 20], np.int8)
    >>> add(x, other)  # of the larger of the two types, int64
    array([[11, 21],
           [12, 22]])
    """
    return _add(x, other, out, out_dtype, stream)
