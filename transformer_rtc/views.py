# SPDX-License-Identifier: Apache-2.0
"""Calls whose rows are other dimensions than the last one: arrays are viewed before them, and results behind them.

The native call knows rows in the last dimension alone. Views are those of the arrays' own framework, which records
their gradients, traces and transforms them. Nothing is copied: what no view gives is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .arguments import Array, Choice, Dimension, Input, Integer, Output, RowShape, Update
from .declaration import Declaration
from .errors import ArgumentError, shown

__all__ = ["LAST", "strides_left", "viewed"]

# The default of a dimension. Public functions compare by identity: what is not the default is looked at closely.
LAST = -1

# What an array has: rows, a number for each row, what is broadcast to rows, a row, one element, or something else.
_ROWS, _NUMBERS, _BROADCAST, _ROW, _ELEMENT, _OTHER = range(6)


# ---- What declarations say -------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """An array that a call may be given."""

    at: int  # its number among the arguments
    keyword: str
    role: int
    written: bool


class _Asked(NamedTuple):
    """What a call asks for. Its words are made for messages alone."""

    name: str
    keyword: str
    selected: Any
    returns_several: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.keyword}={shown(self.selected)}"


def _role(declaration: Declaration, array: Array) -> int:
    shape = declaration.shapes(array)[0]
    if getattr(array, "broadcast", False) or getattr(array, "shape_of", ""):
        return _BROADCAST
    if shape.leading:
        return _ROWS if shape.sizes else _NUMBERS
    symbols = [size.symbol for size in shape.sizes]
    return _ROW if symbols == [declaration.symbols[0]] else _OTHER if any(symbols) else _ELEMENT


def _given(declaration: Declaration, roles: tuple[int, ...]) -> Iterator[_Given]:
    for at, argument in enumerate(declaration.arguments):
        if isinstance(argument, (Input, Output)) and (role := _role(declaration, argument)) in roles:
            yield _Given(at, argument.keyword, role, isinstance(argument, Output))


def _refused(declaration: Declaration, roles: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    """Yield what gives dimensions before the last one a meaning: there is none where rows are others."""
    for at, argument in enumerate(declaration.arguments):
        match argument:
            case Choice() if argument.counts:
                yield at, argument.keyword
            case Integer() if argument.needs:
                yield at, argument.keyword
            case Input() if _role(declaration, argument) not in (*roles, _ELEMENT):
                yield at, argument.keyword


def viewed(declaration: Declaration, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of an operator that is told before all other arguments which dimensions are a row.

    Parameters
    ----------
    declaration : Declaration
        The operator's, whose `selector` says how it is told.
    call : callable
        Its native call, which takes all arguments in the order of the declaration.
    """
    assert declaration.selector is not None
    # Dynamo traces `run`: it holds nothing but tuples of numbers and names, and functions.
    name, keyword, first = declaration.name, declaration.selector.keyword, declaration.arrays[0].keyword
    roles, read, view, back, seen = _KINDS[type(declaration.selector)]
    arrays = tuple(_given(declaration, roles))
    returned = tuple(
        (one, _role(declaration, one.array)) for one in declaration.made if not isinstance(one.array, Update)
    )
    refused = tuple(_refused(declaration, roles))
    prefixes = tuple(f"{name}: {one.keyword} " for one in arrays)

    def run(selected: Any, *values: Any) -> Any:
        for one in arrays:
            array = values[one.at]
            if array is not None and not _has_views(array):
                raise ArgumentError(
                    f"{name}: {one.keyword} must be an array of torch, CuPy, JAX or numpy where {keyword} is given, as "
                    f"others have no views; it is a {type(array).__module__}.{type(array).__qualname__}"
                )
        x = values[0]
        if x is None or x.ndim == 0:
            return call(*values)  # which refuses it
        place = read(f"{name}: {keyword}", selected, first, x)
        if place == LAST:
            return call(*values)
        for at, other in refused:
            if values[at] is not None:
                raise ArgumentError(f"{name}: {other} needs rows in the last dimension; {keyword} is {shown(selected)}")
        given = [one for one in arrays if values[one.at] is not None]
        try:
            several = sum(one.is_wanted(values) for one, _ in returned) > 1
            views = view(_Asked(name, keyword, selected, several), place, given, values)
        except RuntimeError as error:  # of a tensor without strides
            raise ArgumentError(f"{name}: {keyword}={shown(selected)}: an array has no such view: {error}") from error
        try:
            result = call(*views)
        except ArgumentError as error:
            if not str(error).startswith(prefixes):
                raise
            raise ArgumentError(f"{error} ({keyword}={shown(selected)}: arrays are seen with {seen})") from None
        found = result if isinstance(result, tuple) else (result,)
        shaped: list[Any] = []
        for made, role in returned:
            if made.is_wanted(values):
                own = isinstance(made.array, Output) and values[made.at] is not None
                shaped.append(values[made.at] if own else back(place, role, found[len(shaped)]))
        return tuple(shaped) if isinstance(result, tuple) else shaped[0]

    return run


# ---- Arrays of any framework -----------------------------------------------------------------------------------------


def _has_views(array: Any) -> bool:
    """Whether an array is of a framework whose results have views, too."""
    if hasattr(array, "movedim") and not isinstance(array, type):  # torch, of which Dynamo traces no more than this
        return True
    # Imported when it is first asked: a process whose arrays are torch's never does.
    from .arrays.detection import framework_type
    from .arrays.protocols import Protocol

    try:
        return framework_type(array, "") is not Protocol
    except ArgumentError:  # it is no array
        return False


def _strides(array: Any) -> tuple[tuple[int, ...], int]:
    """Return an array's strides, and that of elements next to each other."""
    if hasattr(array, "stride"):  # torch
        return tuple(array.stride()), 1
    if hasattr(array, "strides"):
        return tuple(array.strides), array.itemsize
    # JAX, whose arrays have no gaps.
    return tuple(math.prod(array.shape[at + 1 :]) for at in range(array.ndim)), 1


def _strides_words(array: Any) -> str:
    strides, unit = _strides(array)
    return f"{strides} {'elements' if unit == 1 else 'bytes'}"


def _move(array: Any, source: int, destination: int) -> Any:
    """Move a dimension to another place; both count from the end, where -1 is the last one."""
    if hasattr(array, "movedim"):  # torch
        return array.movedim(source, destination)
    axes = list(range(array.ndim))
    axes.insert(array.ndim + destination, axes.pop(source))
    return array.transpose(tuple(axes))


def strides_left(strides: Sequence[Sequence[int]], extents: Sequence[int]) -> int:
    """Return to how many strides dimensions collapse, for several arrays alike."""
    left, next_ones = 0, [-1]
    for at in reversed(range(len(extents))):
        if extents[at] == 1:
            continue
        own = [one[at] for one in strides]
        left += own != next_ones
        next_ones = [stride * extents[at] for stride in own]
    return left


def _integer(value: Any) -> int | None:
    """Return an integer as an int; None: it is none, or a bool."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    try:
        return operator.index(value)
    except Exception:  # another package's code
        return None


def _shape_words(array: Any) -> str:
    return str(tuple(array.shape))


def _check_shape(asked: _Asked, one: _Given, array: Any, first: _Given, x: Any) -> None:
    if tuple(array.shape) != tuple(x.shape):
        raise ArgumentError(
            f"{asked}: {one.keyword} must have the shape of {first.keyword}, {_shape_words(x)}; it has "
            f"{_shape_words(array)}"
        )


# ---- One dimension ---------------------------------------------------------------------------------------------------


def _read_dimension(name: str, selected: Any, first: str, x: Any) -> int:
    """Return which dimension is meant, as a number from the end."""
    dim = _integer(selected)
    if dim is None or not -x.ndim <= dim < x.ndim:
        raise ArgumentError(
            f"{name} must be an integer from {-x.ndim} to {x.ndim - 1}, as {first} has the shape {_shape_words(x)}; it "
            f"is {shown(selected)}"
        )
    return dim if dim < 0 else dim - x.ndim


def _view_dimension(asked: _Asked, dim: int, given: list[_Given], values: tuple[Any, ...]) -> list[Any]:
    """Return the arguments with a dimension of all arrays as the last one."""
    views, x = list(values), values[0]
    rows = []
    for one in given:
        array = values[one.at]
        if one.role == _NUMBERS and array.ndim != x.ndim:  # else the dimension is there, with one element
            continue
        if one.role == _ROWS:
            _check_shape(asked, one, array, given[0], x)
        if array.ndim < -dim:
            raise ArgumentError(f"{asked}: {one.keyword} must have this dimension; its shape is {_shape_words(array)}")
        strides, unit = _strides(array)
        if array.shape[dim] > 1 and strides[dim] != unit and 0 not in array.shape:
            raise ArgumentError(
                f"{asked}: its elements are not next to each other in {one.keyword}, whose strides are "
                f"{_strides_words(array)}: {_way(asked, one, dim, given, values)}"
            )
        views[one.at] = _move(array, dim, -1)
        if one.role == _ROWS:
            rows.append((one, strides))
    others = [at for at in range(x.ndim) if at != x.ndim + dim]
    if strides_left([[strides[at] for at in others] for _, strides in rows], [x.shape[at] for at in others]) > 2:
        one, _ = rows[0]
        names = " and ".join(one.keyword for one, _ in rows)
        raise ArgumentError(
            f"{asked}: the other dimensions of {names} must collapse to at most two strides; those of {one.keyword} "
            f"are {_strides_words(x)}: {_way(asked, one, dim, given, values)}"
        )
    return views


def _way(asked: _Asked, one: _Given, dim: int, given: list[_Given], values: tuple[Any, ...]) -> str:
    """Return what a message says of the call to make instead."""
    if one.written:
        return "leave it out, or pass one that lies in memory as the inputs do"
    x = values[0]
    of_torch = hasattr(x, "movedim")
    package = {"numpy": "np", "cupy": "cp"}.get(type(x).__module__.partition(".")[0], "jnp")
    copies = package != "jnp"  # else arrays have no gaps
    texts = []
    for each in given:
        if each.written:
            continue
        place, text = values[each.at].ndim + dim, each.keyword
        if place >= 0 and (each.role != _NUMBERS or values[each.at].ndim == x.ndim):
            if of_torch:
                text = f"{text}.movedim({place}, -1).contiguous()"
            else:
                text = f"{package}.moveaxis({text}, {place}, -1)"
                text = f"{package}.ascontiguousarray({text})" if copies else text
        texts.append(text if each.role == _ROWS else f"{each.keyword}={text}")
    call, place = f"{asked.name}({', '.join(texts)})", x.ndim + dim
    if asked.returns_several:
        return f"call {call} without {asked.keyword}, and move the results back"
    back = f"{call}.movedim(-1, {place})" if of_torch else f"{package}.moveaxis({call}, -1, {place})"
    return f"call {back}, without {asked.keyword}"


def _back_dimension(dim: int, role: int, array: Any) -> Any:
    return _move(array, -1, dim) if role in (_ROWS, _BROADCAST) else array


# ---- Several dimensions ----------------------------------------------------------------------------------------------


def _read_shape(name: str, selected: Any, first: str, x: Any) -> tuple[int, ...]:
    """Return the sizes of the dimensions that are meant."""
    sizes = [_integer(size) for size in (selected if isinstance(selected, (tuple, list)) else (selected,))]
    if not sizes or any(size is None or size < 1 for size in sizes):
        raise ArgumentError(
            f"{name} must be a positive integer, or a tuple of them that is not empty; it is {shown(selected)}"
        )
    shape = tuple(size for size in sizes if size is not None)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ArgumentError(
            f"{name} must be the last dimensions of {first}, whose shape is {_shape_words(x)}; it is {shown(selected)}"
        )
    return shape


def _view_shape(asked: _Asked, shape: tuple[int, ...], given: list[_Given], values: tuple[Any, ...]) -> list[Any]:
    """Return the arguments with the last dimensions of all arrays as one."""
    views, x, count = list(values), values[0], len(shape)
    for one in given:
        array = values[one.at]
        leading = tuple(array.shape[: array.ndim - count])
        if one.role == _NUMBERS:  # which may have the dimensions with one element each
            if tuple(array.shape) == (*x.shape[: x.ndim - count], *[1] * count):
                views[one.at] = array.reshape((*leading, 1))
            continue
        if one.role == _ROWS:
            _check_shape(asked, one, array, given[0], x)
        elif tuple(array.shape) != shape:
            raise ArgumentError(f"{asked}: {one.keyword} must have this shape; it has {_shape_words(array)}")
        if count == 1:
            continue
        strides, unit = _strides(array)
        if not _is_dense(shape, strides[-count:], unit) and 0 not in leading:
            way = f"{one.keyword}.contiguous()" if hasattr(array, "movedim") else f"ascontiguousarray({one.keyword})"
            raise ArgumentError(
                f"{asked}: these dimensions of {one.keyword} must lie in memory as one; its strides are "
                f"{_strides_words(array)}: "
                f"{'leave it out, or pass a contiguous one' if one.written else f'pass {way}'}"
            )
        views[one.at] = array.reshape((*leading, math.prod(shape)))
    return views


def _is_dense(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != unit:
            return False
        unit *= extent
    return True


def _back_shape(shape: tuple[int, ...], role: int, array: Any) -> Any:
    if len(shape) == 1 or role not in (_ROWS, _ROW):
        return array
    return array.reshape((*array.shape[:-1], *shape))


class _Kind(NamedTuple):
    """A kind of argument that says which dimensions are a row."""

    roles: tuple[int, ...]  # the arrays that are viewed beside those of one element
    read: Callable[..., Any]
    view: Callable[..., list[Any]]
    view_back: Callable[..., Any]
    words: str  # what messages say of the views


_KINDS: dict[type, _Kind] = {
    Dimension: _Kind(
        (_ROWS, _NUMBERS, _BROADCAST), _read_dimension, _view_dimension, _back_dimension, "it as the last one"
    ),
    RowShape: _Kind((_ROWS, _NUMBERS, _ROW), _read_shape, _view_shape, _back_shape, "these dimensions as one"),
}
