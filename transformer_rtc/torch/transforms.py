"""The operators under vmap: one launch for a whole batch where each row is computed alone, a loop where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..arguments import Array, Input, Update
from .fakes import absent
from .schema import Schema

__all__ = ["batching_rule"]


def batching_rule(schema: Schema, operator: Callable[[], Any]) -> Callable[..., Any]:
    """Return the rule of an operator, as `torch.library.register_vmap` takes it.

    Parameters
    ----------
    schema : Schema
        The operator's.
    operator : callable
        Returns it.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        call = _Call(schema, info.batch_size, in_dims, arguments)
        found = call.in_one(operator()) if call.fits_in_one() else call.one_by_one(operator())
        dims = tuple(0 if wanted else None for wanted in call.wanted)
        return (found, dims) if len(dims) > 1 else (found[0], dims[0])

    return rule


class _Call:
    """A call whose tensors have one dimension more, at `dims`."""

    def __init__(self, schema: Schema, batch: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> None:
        self._schema, self._batch = schema, batch
        self._values = schema.values(arguments)
        self._dims: list[int | None] = [None] * len(self._values)
        for at, dim in zip(schema.taken, in_dims, strict=False):
            self._dims[at] = dim
        self.wanted = [one.is_wanted(self._values) for one in schema.made]
        self._arrays = [
            (at, argument)
            for at, argument in enumerate(schema.declaration.arguments)
            if isinstance(argument, (Input, Update)) and self._values[at] is not None
        ]
        self._ndim = self._ndim_of(0)  # of one example's rows

    def _ndim_of(self, at: int) -> int:
        """Return how many dimensions an example's array has."""
        return int(self._values[at].ndim) - (self._dims[at] is not None)

    def _is_of_rows(self, array: Array) -> bool:
        return self._schema.declaration.shapes(array)[0].leading

    def fits_in_one(self) -> bool:
        """Whether the batch is no more than another dimension of the rows."""
        declaration = self._schema.declaration
        for one, wanted in zip(self._schema.made, self.wanted, strict=True):
            # A sum over the rows of each example, or the shape of what is broadcast.
            of_rows = self._is_of_rows(one.array) and not getattr(one.array, "shape_of", "")
            if wanted and (isinstance(one.array, Update) or not of_rows):
                return False
        for at, array in self._arrays:
            if self._is_of_rows(array):
                continue
            if self._dims[at] is not None:
                return False
            # It must not name a dimension that an example does not have: the batch would be taken for it.
            for shape in declaration.shapes(array):
                named = [declaration.symbols.index(size.symbol) for size in shape.sizes if size.symbol]
                if len(shape.sizes) == self._ndim_of(at) and max(named, default=0) >= self._ndim:
                    return False
        return True

    def in_one(self, operator: Any) -> tuple[Any, ...]:
        """Call the operator once: the batch is the first dimension of all rows."""
        values = list(self._values)
        for at, array in self._arrays:
            if self._is_of_rows(array):
                values[at] = self._broadcast(at) if getattr(array, "broadcast", False) else self._rows(at)
        found = operator(*[values[at] for at in self._schema.taken])
        return found if isinstance(found, tuple) else (found,)

    def _first(self, at: int) -> Any:
        """Return an array whose first dimension is the batch."""
        value, dim = self._values[at], self._dims[at]
        return value.expand(self._batch, *value.shape) if dim is None else value.movedim(dim, 0)

    def _rows(self, at: int) -> Any:
        # Two strides are enough where nothing was moved.
        return (
            self._first(at)
            if self._dims[at] in (None, 0) and self._ndim_of(at) == self._ndim
            else (self._first(at).contiguous())
        )

    def _broadcast(self, at: int) -> Any:
        """Return an array that is broadcast to the rows."""
        named = len(self._schema.declaration.symbols)
        if self._dims[at] is None and self._ndim_of(at) <= named:
            return self._values[at]  # dimensions are counted from the last one
        first = self._first(at)
        missing = [1] * (self._ndim - self._ndim_of(at))
        aligned = first.reshape(self._batch, *missing, *first.shape[1:])
        # Those before the named ones must have one stride together.
        before = self._first(0).shape[: max(1, 1 + self._ndim - named)]
        return aligned.expand(*before, *aligned.shape[len(before) :]).contiguous()

    def one_by_one(self, operator: Any) -> tuple[Any, ...]:
        """Call the operator for each example."""

        def example(at: int, number: int) -> Any:
            value, dim = self._values[at], self._dims[at]
            return value if dim is None else value.select(dim, number)

        found = []
        for number in range(self._batch):
            made = operator(*[example(at, number) for at in self._schema.taken])
            found.append(made if isinstance(made, tuple) else (made,))
        return tuple(
            torch.stack(of_each) if wanted else absent(one, self._values[0])
            for one, wanted, of_each in zip(self._schema.made, self.wanted, zip(*found, strict=True), strict=True)
        )
