# SPDX-License-Identifier: Apache-2.0
"""What an operator is like, and what operators there are. A leaf: no CUDA, no files."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .arguments import (
    Argument,
    Array,
    Choice,
    Flag,
    Input,
    Output,
    OutputDType,
    OutputWanted,
    Result,
    Selector,
    Shape,
    Size,
    Update,
    size_of,
)
from .errors import ArgumentError
from .request import Family, Request

__all__ = [
    "MOST_COLUMNS",
    "NOBODY",
    "Declaration",
    "Gradient",
    "Made",
    "check_request",
    "columns_of",
    "declaration_of",
    "declarations",
    "declare",
    "operator_names",
]

# Where there is no such argument.
NOBODY = -1

# The most columns of a row.
MOST_COLUMNS = 1 << 30

# What fields of parameters call other things of a launch than arguments and dimensions.
RESERVED = frozenset(
    ("rows", "groups", "workspace", "partials", "row_partials", "sharers", "inner_count", "inner_magic", "inner_shift")
)


class Gradient(NamedTuple):
    """How an operator's gradient is computed. Names are those of arguments, not of keywords.

    Attributes
    ----------
    operator : str
        The operator that computes it. Empty: `passes` says all, and the gradient of an input that was broadcast is
        summed over what it was broadcast along.
    takes : mapping of str to str
        Its arrays, and which of the forward's arrays each is: an input, an output, or a result.
    numbers : tuple of str
        What both are given alike.
    of : mapping of str to str
        The forward's outputs, and which array of its is the gradient of each. The first one must be there.
    gives : mapping of str to tuple of str
        Its outputs and results, and the forward's inputs that each is the gradient of.
    only_for : mapping of str to str
        Which of its arrays are given only where an input of the forward's needs a gradient.
    passes : mapping of str to str
        Inputs of the forward's whose gradient is that of an output, as it is.
    """

    operator: str
    takes: Mapping[str, str]
    numbers: tuple[str, ...]
    of: Mapping[str, str]
    gives: Mapping[str, tuple[str, ...]]
    only_for: Mapping[str, str] = MappingProxyType({})
    passes: Mapping[str, str] = MappingProxyType({})


class Made(NamedTuple):
    """Something that a call returns or changes. Numbers are those of arguments, in the order of the declaration.

    Attributes
    ----------
    array : Output, Update or Result
        What it is.
    at : int
        Its own.
    asks : int
        The argument that says whether it is there; `NOBODY`: it always is.
    with_array : int
        The array beside which it is there by default, if it is a result.
    dtype : int
        The argument that says its data type, or `NOBODY`.
    """

    array: Output | Update | Result
    at: int
    asks: int
    with_array: int
    dtype: int

    def is_wanted(self, values: Sequence[Any]) -> bool:
        """Whether a call asks for it, of all arguments in the order of the declaration."""
        if self.asks == NOBODY:
            return True
        if isinstance(self.array, Update):
            return values[self.at] is not None
        flag = values[self.asks]
        if flag is None and self.with_array != NOBODY:
            return values[self.with_array] is not None
        return isinstance(flag, (bool, np.bool_)) and bool(flag)  # the native call refuses another one


@dataclass(eq=False, repr=False)
class Declaration:
    """An operator, and the user's function that calls it: all that is said of both is said here.

    Attributes
    ----------
    name : str
        Of both.
    family : Family
        Who knows its kernels.
    arguments : tuple of Argument
        In the order of the native call. The first is an array of rows: its last dimension is a row.
    positional : tuple of str
        The names of what the user's function takes by position; the others are keywords.
    summary : str
        What the function's documentation begins with.
    example : str
        What it ends with: lines of a doctest, which call the function with numpy arrays and show what it returns. The
        imports of numpy and of the function are written before it.
    buckets : sequence of int
        Numbers of columns, ascending to the largest that there may be: rows of up to one of them have the same kernels,
        which are asked for with it. Empty: each number of columns has its own.
    nouns : mapping of str to str
        What messages call one element of a dimension, where it is not the dimension's name without its last letter.
    alias_of : str
        The operator whose kernels it asks for, of a function that calls the same arguments by other names.
    gradient : Gradient or None
        How its gradient is computed; None: it has none.
    split_by : str
        The optional array, one part of several, in whose presence arrays with several times the columns have one part
        instead, as many columns as there are. Empty: there is none.
    broadcasts : tuple of str
        The first array and another one, where both are broadcast to one shape, as torch does: that is the shape of the
        first array in what is said of others. Each may have any number of dimensions, and 1 element in its rows. An
        output has by default the data type that torch promotes theirs to. Empty: there are none.
    elementwise : bool
        Whether columns depend on no others, but for results of rows: a part of each row may be computed alone.
    selector : Selector or None
        The keyword of the user's function that says which dimensions are a row; None: the last one always is.
    """

    name: str
    family: Family
    arguments: tuple[Argument, ...]
    _: KW_ONLY
    positional: tuple[str, ...]
    summary: str = ""
    example: str = ""
    buckets: Sequence[int] = ()
    nouns: Mapping[str, str] = field(default_factory=dict)
    alias_of: str = ""
    gradient: Gradient | None = None
    split_by: str = ""
    broadcasts: tuple[str, ...] = ()
    elementwise: bool = False
    selector: Selector | None = None

    def __post_init__(self) -> None:
        if not self.arguments or not isinstance(self.arguments[0], Input) or self.arguments[0].optional:
            raise ValueError(f"{self.name}: the first argument is an array of rows that must be given")
        taken = [*self.symbols, *(argument.name for argument in self.arguments if not isinstance(argument, Array))]
        for name in taken:
            if name in RESERVED or taken.count(name) > 1:
                raise ValueError(f"{self.name}: {name} names something else already")

        kinds = [isinstance(array, Result) for array in self.arrays if isinstance(array, (Output, Result))]
        if self.gradient and kinds != sorted(kinds):
            raise ValueError(f"{self.name}: outputs come before results, as gradients are given for them")

    @property
    def operator(self) -> str:
        """The operator whose kernels it asks for."""
        return self.alias_of or self.name

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arguments that are arrays: those whose data types a request has, in its order."""
        return tuple(argument for argument in self.arguments if isinstance(argument, Array))

    @cached_property
    def broadcast_places(self) -> tuple[int, ...]:
        """Which of the arguments are broadcast to one shape."""
        return tuple(at for at, argument in enumerate(self.arguments) if argument.name in self.broadcasts)

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """The names of flags and choices."""
        return tuple(argument.name for argument in self.arguments if isinstance(argument, (Flag, Choice)))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the first array's last dimensions, from the last one on."""
        return tuple(size_of(word).symbol for word in reversed(self.arrays[0].shape.split()) if word != "...")

    @cached_property
    def conditional(self) -> frozenset[str]:
        """The symbols that are 1 unless an array has the second of two shapes."""
        named = [size.symbol for array in self.arrays[1:] for shape in self.shapes(array)[:1] for size in shape.sizes]
        also = [size.symbol for array in self.arrays[1:] for shape in self.shapes(array)[1:] for size in shape.sizes]
        return frozenset(also).difference(named, self.symbols[:1])

    def parts(self, size: Size, given: Container[str]) -> int:
        """Return how many times its symbol a dimension is, where these arrays are given."""
        return 1 if size.symbol and self.split_by and self.split_by in given else size.multiple

    def noun(self, symbol: str) -> str:
        """Return what messages call one element of a dimension."""
        return self.nouns.get(symbol, symbol.removesuffix("s"))

    @property
    def most_columns(self) -> int:
        """The most columns that an operator's rows may have, of which an array may have several times as many."""
        of_rows = (shape for array in self.arrays for shape in self.shapes(array) if shape.leading and shape.sizes)
        widths = [shape.sizes[0] for shape in of_rows]
        return MOST_COLUMNS // max(size.multiple for size in widths if size.symbol)

    def argument(self, name: str) -> Argument:
        """Return an argument by its name."""
        return next(argument for argument in self.arguments if argument.name == name)

    def about(self, kind: type[OutputDType] | type[OutputWanted], array: str) -> Argument | None:
        """Return the argument that says an output's data type, or whether it is wanted."""
        return next((one for one in self.arguments if isinstance(one, kind) and array in one.of), None)

    @cached_property
    def made(self) -> tuple[Made, ...]:
        """The outputs, updates and results."""
        number = {argument.name: at for at, argument in enumerate(self.arguments)}
        made = []
        for at, array in enumerate(self.arguments):
            if not isinstance(array, (Output, Update, Result)):
                continue
            wanted, dtype = self.about(OutputWanted, array.name), self.about(OutputDType, array.name)
            asks = number[wanted.name] if wanted else NOBODY if isinstance(array, Output) else at
            beside = number[array.wanted_with] if isinstance(array, Result) and array.wanted_with else NOBODY
            made.append(Made(array, at, asks, beside, number[dtype.name] if dtype else NOBODY))
        return tuple(made)

    @cached_property
    def _shapes(self) -> dict[str, tuple[Shape, ...]]:
        return {array.name: self._read(array) for array in self.arrays}

    def shapes(self, array: Array) -> tuple[Shape, ...]:
        """Return the shapes that an array may have.

        Raises
        ------
        ValueError
            If one names what the first array does not have.
        """
        return self._shapes[array.name]

    def has_two_shapes(self, array: Array) -> bool:
        """Whether an array may have one of two shapes, the second with a row for each head; not one of one element."""
        return len(self.shapes(array)) > 1 and bool(self.shapes(array)[0].sizes)

    def _read(self, array: Array) -> tuple[Shape, ...]:
        leading = list(reversed(self.symbols[1:]))
        found = []
        for text in array.shape.split(" | "):
            words = [] if text == "()" else text.split()
            starts = words[:1] == ["..."]
            if starts and leading and words[1 : 1 + len(leading)] == leading:
                del words[1 : 1 + len(leading)]  # they name what the dots are
            sizes = [size_of(word) for word in words[starts:]]
            known = self.symbols[:1] if starts else self.symbols
            if any(size.symbol and size.symbol not in known for size in sizes):
                raise ValueError(
                    f"{self.name}: {array.name} has the shape {text!r}; the dots are all dimensions of "
                    f"{self.arrays[0].name} {self.arrays[0].shape!r} but the last, and no others have names"
                )
            found.append(Shape(starts, tuple(sizes)))
        return tuple(found)

    @cached_property
    def signature(self) -> tuple[tuple[Argument, object], ...]:
        """The arguments in the order of the user's function, each with its default; `Ellipsis`: it has none."""
        first = [self.argument(name) for name in self.positional]
        others = [argument for argument in self.arguments if argument not in first]
        defaults = [argument.default for argument in first]
        # What comes before an argument that must be given must be given, too.
        last = max((place for place, default in enumerate(defaults) if default is ...), default=-1)
        defaults[: last + 1] = [...] * (last + 1)
        return (*zip(first, defaults, strict=True), *((argument, argument.default) for argument in others))

    @property
    def always(self) -> tuple[str, ...]:
        """The optional arrays that the user's function must be given, though perhaps as None."""
        return tuple(a.name for a, default in self.signature if isinstance(a, Input) and a.optional and default is ...)

    def alias(
        self,
        name: str,
        summary: str,
        positional: Sequence[str] = (),
        called: Mapping[str, Argument] | None = None,
        example: str = "",
    ) -> Declaration:
        """Return a function that asks for the same kernels.

        Parameters
        ----------
        name : str
            Its name.
        summary : str
            What its documentation begins with.
        positional : sequence of str
            As `Declaration` has it; by default as here.
        called : mapping of str to Argument, optional
            Arguments that are called or documented otherwise, by their names.
        example : str
            What its documentation ends with.
        """
        others = called or {}
        return replace(
            self,
            name=name,
            alias_of=self.name,
            summary=summary,
            example=example,
            arguments=tuple(others.get(argument.name, argument) for argument in self.arguments),
            positional=tuple(positional) or self.positional,
        )


# ---- What operators there are ----------------------------------------------------------------------------------------

_declarations: dict[str, Declaration] = {}


def declare(declaration: Declaration) -> None:
    """Add an operator to those that there are."""
    _declarations[declaration.name] = declaration


def declarations() -> dict[str, Declaration]:
    """Return every public function's declaration by its name, those that call another one's operator included."""
    return dict(_declarations)


def declaration_of(operator: str) -> Declaration:
    """Return an operator's declaration."""
    return _declarations[operator]


def operator_names() -> list[str]:
    """Return the names of all operators, without functions that call another one's."""
    return [name for name, declaration in _declarations.items() if not declaration.alias_of]


def columns_of(operator: str, columns: int) -> int:
    """Return with which number of columns rows of so many are asked for.

    Raises
    ------
    ArgumentError
        If no row may have so many.
    """
    most = declaration_of(operator).most_columns
    if not 1 <= columns <= most:
        raise ArgumentError(f"{operator}: a hidden size is {columns}; it must be from 1 to {most}")
    return next((bucket for bucket in declaration_of(operator).buckets if bucket >= columns), columns)


def check_request(request: Request) -> None:
    """Refuse what no call of the operator could ask for.

    Raises
    ------
    ArgumentError
        If it is so.
    """
    name = request.operator
    declaration = declaration_of(name)
    for array in declaration.arrays:
        dtype = request.dtypes[array.name]
        if dtype is None:
            required = isinstance(array, Input) and not array.optional
            if required or (isinstance(array, Output) and not declaration.about(OutputWanted, array.name)):
                raise ArgumentError(f"{name}: {array.name} must have a data type")
        elif dtype not in array.dtypes:
            accepted = ", ".join(other.name for other in array.dtypes)
            raise ArgumentError(f"{name}: {array.name} must be one of {accepted}; it is {dtype.name}")
    of_heads = [one for one in declaration.arrays if isinstance(one, Input) and declaration.has_two_shapes(one)]
    if request.per_head and not any(request.dtypes[array.name] for array in of_heads):
        names = " or ".join(f"a {array.name}" for array in of_heads) or "an array of which there is none here"
        raise ArgumentError(f"{name}: per_head needs {names}, which each head has of its own")
