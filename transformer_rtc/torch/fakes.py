# SPDX-License-Identifier: Apache-2.0
"""What operators of torch's return, without its values: shapes and data types, read from declarations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..arguments import Array, Input, Output, Result, Shape, Update
from ..declaration import NOBODY, Declaration, Made
from ..errors import ArgumentError
from ..spec import DType
from .schema import Schema

__all__ = ["Shapes", "absent", "broadcast_shape", "check_devices", "fake_of", "torch_dtype"]


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's data type."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def absent(one: Made, like: torch.Tensor) -> torch.Tensor:
    """Return what stands for a result that a call does not ask for: a tensor without elements, of a fixed type."""
    return torch.empty(0, dtype=torch_dtype(one.array.dtypes[0]), device=like.device)


def broadcast_shape(declaration: Declaration, values: Sequence[Any]) -> torch.Size:
    """Return the shape that the first array is broadcast to with others."""
    shape = torch.broadcast_shapes(*(values[at].shape for at in declaration.broadcast_places))
    if not shape:
        name, first = declaration.name, declaration.arrays[0].keyword
        raise ArgumentError(f"{name}: {first} must have at least one dimension; it is a scalar")
    return shape


class Shapes:
    """The shapes of a call's arrays, and the values of its declaration's symbols."""

    def __init__(self, schema: Schema, values: list[Any]) -> None:
        declaration = schema.declaration
        self._declaration = declaration
        self._first = broadcast_shape(declaration, values) if declaration.broadcasts else values[0].shape
        given = {argument.name: value for argument, value in zip(declaration.arguments, values, strict=True)}
        self._given = [name for name, value in given.items() if value is not None]
        (width,) = declaration.shapes(declaration.arrays[0])[0].sizes[-1:]
        self._sizes = {"": 1, declaration.symbols[0]: self._first[-1] // declaration.parts(width, self._given)}
        two = [a for a in declaration.arrays if isinstance(a, Input) and declaration.has_two_shapes(a)]
        # All arrays that may have one of two shapes have the same.
        self._variant = any(
            given[array.name] is not None and given[array.name].ndim == len(declaration.shapes(array)[1].sizes)
            for array in two
        )
        for place, symbol in enumerate(declaration.symbols[1:], 2):
            counts = place <= len(self._first) and (self._variant or symbol not in declaration.conditional)
            self._sizes[symbol] = self._first[-place] if counts else 1

    def declared(self, array: Array) -> Shape:
        """Return which of the shapes that an array may have is that of the call."""
        return self._declaration.shapes(array)[self._variant and self._declaration.has_two_shapes(array)]

    def of(self, array: Array, shape_of: Any) -> list[Any]:
        """Return an array's shape; that of another one where there is one."""
        if shape_of is not None:
            return list(shape_of.shape)
        shape = self.declared(array)
        leading = self._first[:-1] if shape.leading else ()
        return [
            *leading,
            *(self._declaration.parts(size, self._given) * self._sizes[size.symbol] for size in shape.sizes),
        ]


def _dtype(schema: Schema, one: Made, dtypes: dict[str, torch.dtype], values: list[Any]) -> torch.dtype:
    if one.dtype != NOBODY and values[one.dtype] is not None:
        asked: torch.dtype = values[one.dtype]
        return asked
    if isinstance(one.array, (Output, Result)) and one.array.like in dtypes:
        return dtypes[one.array.like]
    if schema.declaration.broadcasts and isinstance(one.array, Output):
        first, second = (values[at] for at in schema.declaration.broadcast_places)
        return torch.result_type(first, second)
    if len(one.array.dtypes) == 1:
        return torch_dtype(one.array.dtypes[0])
    return dtypes[schema.declaration.arrays[0].name]


def check_devices(name: str, arrays: Iterable[tuple[str, Any]]) -> None:
    """Refuse arrays of several devices, as a call with values does: one on meta would leave all results unset."""
    (first, one), *others = ((keyword, value) for keyword, value in arrays if isinstance(value, torch.Tensor))
    for keyword, other in others:
        if other.device != one.device:
            raise ArgumentError(
                f"{name}: {keyword} must be on the device of {first}, {one.device}; it is on {other.device}"
            )


def fake_of(schema: Schema, arguments: tuple[Any, ...]) -> Any:
    """Return what an operator returns for arguments of which nothing but shapes and types is known."""
    values = schema.values(arguments)
    keywords = (argument.keyword for argument in schema.declaration.arguments)
    check_devices(schema.declaration.name, zip(keywords, values, strict=True))
    shapes = Shapes(schema, values)
    named = dict(zip((argument.name for argument in schema.declaration.arguments), values, strict=True))
    arrays = schema.declaration.arrays
    dtypes = {a.name: named[a.name].dtype for a in arrays if isinstance(named[a.name], torch.Tensor)}
    found = []
    for one in schema.made:
        dtype = dtypes[one.array.name] = _dtype(schema, one, dtypes, values)
        if not one.is_wanted(values):
            found.append(absent(one, values[0]))
            continue
        if isinstance(one.array, Update):
            found.append(torch.empty_like(named[one.array.name], memory_format=torch.contiguous_format))
        else:
            other = getattr(one.array, "shape_of", "")
            shape = shapes.of(one.array, named[other] if other else None)
            found.append(values[0].new_empty(shape, dtype=dtype))
    return found[0] if len(found) == 1 else tuple(found)
