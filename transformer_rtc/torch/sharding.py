# SPDX-License-Identifier: Apache-2.0
"""How the operators work on DTensors: which placements of arguments give which placements of results.

All of it is read from declarations. Imported with torch.distributed.tensor: an eager process has neither.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from ..arguments import Array, Choice, Input, Result, Update
from ..declaration import Made, declarations
from .fakes import Shapes, broadcast_shape
from .operators import overload
from .schema import Schema, schema_of

__all__ = ["register"]

# Of results, and of the arguments that are given: None for one that is no array.
Strategy = tuple[list[Placement], list[Placement | None]]


def register() -> None:
    """Register the sharding strategies of all operators."""
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for name in declarations():
        operator = overload(name)
        register_sharding(operator)(partial(_strategies, schema_of(name)))
        # By default DTensor remembers strategies without regard to arguments before the first integer, one of which
        # may be a choice that forbids to shard; some versions tell only None from others. Here all of them count.
        infos[operator] = RuntimeSchemaInfo(static_argnum=1)


def _strategies(schema: Schema, *arguments: Any) -> list[Strategy]:
    """Return the strategies of a call along one dimension of a mesh.

    Parameters
    ----------
    schema : Schema
        The operator's.
    arguments : tuple
        The call's, with what DTensor knows of a tensor in its place.
    """
    call = _Call(schema, arguments)
    # The first of those that cost the same is taken: what is replicated stays so.
    dims = range(len(call.shape) - (not call.has_independent_columns))
    return [call.replicated(), *filter(None, map(call.sharded, dims))]


class _Call:
    """A call of which the strategies are asked."""

    def __init__(self, schema: Schema, arguments: tuple[Any, ...]) -> None:
        self._schema = schema
        self._values = schema.values(arguments)
        self._given = schema.taken[: len(arguments)]
        self._shapes = Shapes(schema, self._values)
        self.first = self._values[0]
        declaration = schema.declaration
        # That of the rows.
        self.shape = broadcast_shape(declaration, self._values) if declaration.broadcasts else self.first.shape

    @property
    def has_independent_columns(self) -> bool:
        """Whether the last dimension may be sharded: no array holds several parts of a row, and no result is of one."""
        declaration = self._schema.declaration
        of_rows = [one for one in self._schema.made if not declaration.shapes(one.array)[0].sizes]
        wanted = any(one.is_wanted(self._values) for one in of_rows if isinstance(one.array, Result))
        others = [one for one in declaration.arrays if one.name == declaration.split_by]
        return declaration.elementwise and not wanted and all(self._value(one) is not None for one in others)

    def _value(self, array: Array) -> Any:
        return self._values[self._schema.declaration.arguments.index(array)]

    def replicated(self) -> Strategy:
        """Return the strategy by which every rank has everything."""
        inputs = [Replicate() if self._is_array(at) else None for at in self._given]
        return [Replicate() for _ in self._schema.made], inputs

    def _is_array(self, at: int) -> bool:
        is_array = isinstance(self._schema.declaration.arguments[at], (Input, Update))
        return is_array and self._values[at] is not None

    def sharded(self, dim: int) -> Strategy | None:
        """Return the strategy by which each rank has some of the rows, or None if that would not be right.

        Parameters
        ----------
        dim : int
            The dimension of the first array along which its rows are sharded, or the last one of independent columns.
        """
        arguments = self._schema.declaration.arguments
        symbol = self._symbol(dim)
        if any(
            isinstance(argument, Choice) and self._values[at] is not None and symbol in argument.counts
            for at, argument in enumerate(arguments)
        ):
            return None
        placements: dict[str, Placement] = {}
        for at, argument in enumerate(arguments):
            if self._is_array(at):
                placement = self._of_input(argument, dim)  # type: ignore[arg-type]
                if placement is None:
                    return None
                placements[argument.name] = placement
        results = [self._of_result(one, dim, placements) for one in self._schema.made]
        if None in results:
            return None
        return results, [placements.get(arguments[at].name) for at in self._given]

    def _symbol(self, dim: int) -> str:
        """Return the name of one of the first array's dimensions; empty: it has none."""
        symbols = self._schema.declaration.symbols
        place = len(self.shape) - 1 - dim
        return symbols[place] if place < len(symbols) else ""

    def _of_input(self, array: Array, dim: int) -> Placement | None:
        """Return how an array lies where the rows are sharded; None: it cannot be so.

        One whose sizes are not those of the rows is not sharded: the operator refuses it as a whole, not by parts.
        """
        shape, size = self._value(array).shape, self.shape[dim]
        if isinstance(array, Input) and (array.broadcast or array.name in self._schema.declaration.broadcasts):
            place = dim - (len(self.shape) - len(shape))
            if place < 0 or shape[place] == 1 != size:
                return Replicate()
        else:
            found = self._place(array, dim)
            if found is None:
                return Replicate()
            place = found
        return Shard(place) if place < len(shape) and shape[place] == size else None

    def _place(self, array: Array, dim: int) -> int | None:
        """Return which dimension of an array is one of the rows'; None: it has not got that."""
        shape, symbol = self._shapes.declared(array), self._symbol(dim)
        if shape.leading:
            return dim
        symbols = [size.symbol for size in shape.sizes]
        return symbols.index(symbol) if symbol in symbols else None

    def _of_result(self, one: Made, dim: int, placements: dict[str, Placement]) -> Placement | None:
        """Return how a result lies where the rows are sharded; None: it cannot be so."""
        array = one.array
        if not one.is_wanted(self._values):
            return Replicate()
        if isinstance(array, Update):
            if array.over_rows:
                return Partial(array.over_rows)
            # A rank without rows would keep the old value. Whether there is one depends on all of the mesh, of which
            # this is one dimension.
            return Replicate() if self.shape[dim] % self.first.mesh.size() == 0 else None
        if isinstance(array, Result) and array.shape_of:
            other = placements.get(array.shape_of)
            return other if isinstance(other, Shard) else Partial()
        place = self._place(array, dim)
        return Partial() if place is None else Shard(place)
