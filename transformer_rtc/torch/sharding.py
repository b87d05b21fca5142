"""How the operators run on distributed tensors: rows are sharded, what all rows share is replicated.

Imported with torch.distributed.tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..arguments import Array, Choice, Input, Update
from ..declaration import declarations
from .operators import overload
from .schema import Schema, schema_of

__all__ = ["register"]


def register() -> None:
    """Tell torch how each operator's tensors may be placed."""
    for name in declarations():
        register_sharding(overload(name))(_placements_of(schema_of(name)))


def _placements_of(schema: Schema) -> Callable[..., Any]:
    def placements(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        call = _Call(schema, schema.values(arguments))
        dims: list[int | None] = [None, *call.dims()]
        return [(call.outputs(dim), call.inputs(dim, len(arguments))) for dim in dims]

    return placements


class _Call:
    """A call whose tensors are known by their shapes. A dimension is one of the rows'; None: nothing is sharded."""

    def __init__(self, schema: Schema, values: list[Any]) -> None:
        self._schema, self._declaration, self._values = schema, schema.declaration, values
        self._named = {argument.name: value for argument, value in zip(self._arguments, values, strict=True)}
        self._ndim = len(values[0].shape)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self._declaration.arguments

    def _symbol(self, dim: int) -> str:
        """Return the name of one of the rows' dimensions, if it has one."""
        number = self._ndim - 1 - dim
        return self._declaration.symbols[number] if number < len(self._declaration.symbols) else ""

    def dims(self) -> list[int]:
        """Return the dimensions that may be sharded."""
        if any(isinstance(one.array, Update) and one.is_wanted(self._values) for one in self._schema.made):
            return []  # what is updated, each part of the rows would update for itself
        # Where a mode tells rows apart by their place among others, these stay together.
        apart = {
            symbol
            for argument, value in zip(self._arguments, self._values, strict=True)
            if isinstance(argument, Choice) and value is not None
            for equal in argument.words.values()
            if equal is not None
            for symbol in (equal.first, equal.second)
        }
        return [dim for dim in range(self._ndim - 1) if self._symbol(dim) not in apart]

    def _own(self, array: Array, dim: int, like: Any) -> int | None:
        """Return the dimension of an array that goes along a dimension of the rows; None: it has none."""
        shapes = self._declaration.shapes(array)
        if getattr(array, "shape_of", "") or getattr(array, "broadcast", False):
            own = dim - (self._ndim - len(like.shape))  # dimensions are counted from the last one
            return own if own >= 0 and like.shape[own] != 1 else None
        if shapes[0].leading:
            return dim
        shape = next((one for one in shapes if like is None or len(one.sizes) == len(like.shape)), shapes[0])
        names = [size.symbol for size in shape.sizes]
        symbol = self._symbol(dim)
        return names.index(symbol) if symbol in names else None

    def inputs(self, dim: int | None, count: int) -> list[Any]:
        """Return the placement of each argument that torch was given."""
        found: list[Any] = []
        for at in self._schema.taken[:count]:
            argument, value = self._arguments[at], self._values[at]
            if not isinstance(argument, (Input, Update)) or value is None:
                found.append(None)
            else:
                own = None if dim is None else self._own(argument, dim, value)
                found.append(Replicate() if own is None else Shard(own))
        return found

    def outputs(self, dim: int | None) -> list[Any]:
        """Return the placement of each result."""
        found: list[Any] = []
        for one in self._schema.made:
            if dim is None or not one.is_wanted(self._values):
                found.append(Replicate())
                continue
            own = self._own(one.array, dim, self._like(one.array))
            # What has no such dimension is a sum over it.
            found.append(Partial() if own is None else Shard(own))
        return found

    def _like(self, array: Array) -> Any:
        """Return the array whose shape a result has, if there is one."""
        name = getattr(array, "shape_of", "")
        if not name and self._declaration.has_two_shapes(array):
            two = (
                a.name for a in self._declaration.arrays if isinstance(a, Input) and self._declaration.has_two_shapes(a)
            )
            return next((self._named[one] for one in two if self._named[one] is not None), None)
        return self._named[name] if name else None
