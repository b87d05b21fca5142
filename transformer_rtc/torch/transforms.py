# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.vmap: one launch for the whole batch where that is right, or one for each example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arguments import Array, Input, Update
from ..declaration import Declaration, Made
from ..views import strides_left
from .schema import Schema

__all__ = ["batched"]


def batched(schema: Schema, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's rule for batches, as `torch.library.register_vmap` takes it.

    Parameters
    ----------
    schema : Schema
        The operator's.
    operator : callable
        The operator itself, which is called with whole batches or with examples.
    """
    declaration = schema.declaration
    arrays = [(at, one) for at, one in enumerate(declaration.arguments) if isinstance(one, (Input, Update))]
    of_rows = frozenset(at for at, one in arrays if _leads(declaration, one))
    batch = _Batch(schema, of_rows)

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        values = schema.values(arguments)
        # Each batched array with its batch in front.
        moved = {
            at: values[at].movedim(dim, 0) if dim else values[at]
            for at, dim in zip(schema.taken, in_dims, strict=False)
            if isinstance(dim, int)
        }
        wanted = [one for one in schema.made if one.is_wanted(values)]
        alone = any(_is_of_all_rows(declaration, one) for one in wanted) or not of_rows.issuperset(moved)
        whole = None if alone else batch.whole(info.batch_size, moved, values)
        if whole is None:
            found = _one_by_one(schema, operator, info.batch_size, moved, values)
        else:
            found = batch.call(operator, whole, wanted)
        dims = tuple(0 if one in wanted else None for one in schema.made)
        return (found, dims) if len(dims) > 1 else (found[0], dims[0])

    return rule


def _leads(declaration: Declaration, array: Array) -> bool:
    return declaration.shapes(array)[0].leading


def _is_of_all_rows(declaration: Declaration, one: Made) -> bool:
    """Whether something that an operator returns depends on all rows, such as a sum over them."""
    return bool(getattr(one.array, "shape_of", "")) or not _leads(declaration, one.array)


# ---- One launch for the whole batch ----------------------------------------------------------------------------------


class _Batch:
    """An operator's call with a whole batch, whose examples are rows among others."""

    def __init__(self, schema: Schema, of_rows: frozenset[int]) -> None:
        declaration = schema.declaration
        arguments = declaration.arguments
        self._schema, self._symbols = schema, declaration.symbols
        self._broadcast = [at for at in sorted(of_rows) if getattr(arguments[at], "broadcast", False)]
        one_shape = [(at, arguments[at]) for at in sorted(of_rows) if at not in self._broadcast]
        # Arrays with a number for each row are contiguous.
        self._rows = [at for at, one in one_shape if isinstance(one, Array) and declaration.shapes(one)[0].sizes]
        self._numbers = [at for at, _ in one_shape if at not in self._rows]
        arrays = [(at, one) for at, one in enumerate(arguments) if isinstance(one, Input) and at not in of_rows]
        self._shared = [(at, declaration.shapes(one)) for at, one in arrays]

    def whole(self, size: int, moved: dict[int, Any], values: list[Any]) -> tuple[list[Any], int] | None:
        """Return the arguments for the whole batch, and how many dimensions of size 1 these have behind it.

        None: the shapes of an example do not fit together, of which its own call tells.
        """
        values = self._broadcast_to_one(moved, values)
        whole = list(values)
        for at in (*self._rows, *self._numbers, *self._broadcast):
            if at in moved:
                whole[at] = moved[at]
            elif values[at] is not None:
                whole[at] = values[at].expand(1 if at in self._broadcast else size, *values[at].shape)
        rows = [at for at in self._rows if whole[at] is not None]
        numbers = [at for at in self._numbers if whole[at] is not None]
        broadcast = [at for at in self._broadcast if whole[at] is not None]
        example = whole[0].shape[1:]
        if not all(whole[at].ndim > 1 and whole[at].shape[1:-1] == example[:-1] for at in rows):
            return None
        if not all(_broadcasts(whole[at].shape[1:], example) for at in broadcast):
            return None

        # The batch must not be taken for a dimension that has a name.
        named = len(self._symbols)
        missing = max(0, named - len(example))
        if missing and self._names(whole, frozenset(self._symbols[-missing:])):
            return None
        for at in (*rows, *numbers):
            whole[at] = _behind_batch(whole[at], missing)
        extents = whole[0].shape
        # What calls take: leading dimensions that collapse to two strides, for all arrays alike.
        if _strides_left([whole[at] for at in rows], extents[:-1]) > 2 or any(whole[at].stride(-1) != 1 for at in rows):
            rows, numbers = [], [*rows, *numbers]
        for at in numbers:
            whole[at] = whole[at].contiguous()
        for at in broadcast:
            array = _behind_batch(whole[at], len(extents) - whole[at].ndim)
            # And of these, those before the named ones, to one.
            leading = extents[: len(extents) - named]
            if _strides_left([array], leading) > 1:
                array = array.expand(*leading, *array.shape[len(leading) :])
                array = array.clone(memory_format=torch.contiguous_format)
            whole[at] = array if array.stride(-1) == 1 else array.contiguous()
        return whole, missing

    def _broadcast_to_one(self, moved: dict[int, Any], values: list[Any]) -> list[Any]:
        """Return the arguments, and change those with a batch, so that arrays have the shape of an example's rows."""
        places = self._schema.declaration.broadcast_places
        if not places:
            return values
        examples = [moved[at].shape[1:] if at in moved else values[at].shape for at in places]
        try:
            shape = torch.broadcast_shapes(*examples)
        except RuntimeError:  # of which an example's own call tells
            return values
        found = list(values)
        dtype = self._schema.made[0].dtype
        if found[dtype] is None and () in map(tuple, examples):
            # An example without dimensions decides the type only by its category; a batch of such would do more.
            pairs = zip(places, examples, strict=True)
            alone = (torch.empty(one, dtype=values[at].dtype, device="meta") for at, one in pairs)
            found[dtype] = torch.result_type(*alone)
        for at, example in zip(places, examples, strict=True):
            if at in moved:
                array = _behind_batch(moved[at], len(shape) - len(example))
                moved[at] = array.expand(array.shape[0], *shape)
            else:
                found[at] = values[at].expand(shape)
        return found

    def _names(self, values: list[Any], symbols: frozenset[str]) -> bool:
        """Whether the shape of what all rows share names any of these dimensions."""
        given = [(values[at].ndim, shapes) for at, shapes in self._shared if values[at] is not None]
        sizes = [size for ndim, shapes in given for shape in shapes if len(shape.sizes) == ndim for size in shape.sizes]
        return not symbols.isdisjoint(size.symbol for size in sizes)

    def call(self, operator: Callable[..., Any], whole: tuple[list[Any], int], wanted: list[Made]) -> tuple[Any, ...]:
        """Call the operator, and return its results with the batch in front."""
        values, missing = whole
        found = _called(self._schema, operator, values)
        if not missing:
            return found
        inserted = tuple(range(1, 1 + missing))
        return tuple(
            result.squeeze(inserted) if one in wanted else result
            for one, result in zip(self._schema.made, found, strict=True)
        )


def _behind_batch(array: Any, count: int) -> Any:
    """Return an array with so many dimensions of size 1 behind its first."""
    for _ in range(count):
        array = array.unsqueeze(1)
    return array


def _broadcasts(own: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an array can be broadcast to a shape along dimensions before the last."""
    if not 1 <= len(own) <= len(shape):
        return False
    return all(one in (1, other) for one, other in zip(own, shape[len(shape) - len(own) :], strict=True))


def _strides_left(arrays: list[Any], extents: Sequence[int]) -> int:
    """Return to how many strides leading dimensions collapse, for all arrays alike, which are broadcast to them."""
    dimensions = range(len(extents))
    strides = [[0 if array.shape[at] == 1 else array.stride(at) for at in dimensions] for array in arrays]
    return strides_left(strides, extents)


# ---- One launch for each example -------------------------------------------------------------------------------------


def _called(schema: Schema, operator: Callable[..., Any], values: list[Any]) -> tuple[Any, ...]:
    found = operator(*[values[at] for at in schema.taken])
    return found if isinstance(found, tuple) else (found,)


def _one_by_one(
    schema: Schema, operator: Callable[..., Any], size: int, moved: dict[int, Any], values: list[Any]
) -> tuple[Any, ...]:
    """Call the operator with each example, and return the results with the batch in front."""
    if size == 0:
        # One example of zeros, whose results are left out: they say the shapes, and have gradients.
        moved = {at: torch.cat([array, array.new_zeros(1, *array.shape[1:])]) for at, array in moved.items()}
    found = []
    for example in range(max(1, size)):
        given = list(values)
        for at, array in moved.items():
            given[at] = array[example].contiguous()
        found.append(_called(schema, operator, given))
    stacked = tuple(
        torch.stack(results) if one.is_wanted(values) else results[0]
        for one, results in zip(schema.made, zip(*found, strict=True), strict=True)
    )
    return stacked if size else tuple(one[:0] for one in stacked)
