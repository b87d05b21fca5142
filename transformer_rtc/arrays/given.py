# SPDX-License-Identifier: Apache-2.0
"""The arrays among the arguments of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arguments import Array, Input, Result, RowShape, Stream
from ..declaration import Declaration
from ..errors import ArgumentError, shown
from ..spec import DType
from .streams import stream_handle


class GivenArray(NamedTuple):
    """An array among a call's arguments."""

    name: str  # what messages call it
    array: Any  # None where it is left out
    written: bool  # where the caller gives it
    dtypes: tuple[DType, ...]


def arrays_of(operator: str, declaration: Declaration, values: tuple[Any, ...]) -> tuple[list[GivenArray], int | None]:
    """Return the arrays of a call, one for each argument that is an array; and the handle of the stream it is given."""
    arrays: list[GivenArray] = []
    stream = None
    for argument, value in zip(declaration.arguments, values, strict=True):
        name = f"{operator}: {argument.keyword}"
        if isinstance(argument, Stream):
            stream = None if value is None else stream_handle(value, operator)
        elif isinstance(argument, Result):  # the caller never gives it
            arrays.append(GivenArray(argument.name, None, False, ()))
        elif isinstance(argument, Array):
            if value is None and isinstance(argument, Input) and not argument.optional:
                raise ArgumentError(f"{name} must be an array; it is None")
            if isinstance(declaration.selector, RowShape) and arrays and _is_shape(value):
                raise ArgumentError(
                    f"{name} must be an array; it is {shown(value)}: the shape of a row is "
                    f"{declaration.selector.keyword}={shown(value)}"
                )
            arrays.append(GivenArray(name, value, not isinstance(argument, Input), argument.dtypes))
    return arrays, stream


def _is_shape(value: object) -> bool:
    """Whether it is sizes, which torch's functions take where these take an array."""
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    return bool(sizes) and all(type(size) is int for size in sizes)
