# SPDX-License-Identifier: Apache-2.0
"""What an operator of torch's is like: its schema, and what stands where, read from a declaration."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ..arguments import (
    Argument,
    Array,
    Choice,
    Flag,
    Input,
    Integer,
    Margin,
    Output,
    OutputDType,
    OutputWanted,
    Real,
    Result,
    Stream,
    Update,
)
from ..declaration import Declaration, declaration_of

__all__ = ["NOBODY", "Made", "Schema", "schema_of"]

# Where there is no such argument.
NOBODY = -1

# Of arguments that are no arrays, in torch's language of schemas.
_TYPES: dict[type[Argument], str] = {
    Real: "float",
    Integer: "SymInt?",  # such as a part of a dimension, which may be another one in the next call
    Flag: "bool",
    Choice: "str?",
    Margin: "int",
    OutputDType: "ScalarType?",
    OutputWanted: "bool",
}


class Made(NamedTuple):
    """Something that the operator returns. Numbers are those of arguments, in the order of the declaration.

    Attributes
    ----------
    array : Output, Update or Result
        What it is. Of an update, the operator returns what its array becomes: it writes nothing.
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

    def is_wanted(self, values: tuple[Any, ...] | list[Any]) -> bool:
        """Whether a call asks for it, of all arguments in the order of the declaration."""
        if self.asks == NOBODY:
            return True
        if isinstance(self.array, Update):
            return values[self.at] is not None
        if values[self.asks] is None and self.with_array != NOBODY:
            return values[self.with_array] is not None
        return bool(values[self.asks])


class Schema(NamedTuple):
    """An operator of torch's.

    It is functional: it takes all arguments of the public function but outputs and the stream, in that order, and
    returns all outputs, updates and results, in the order of the declaration. What a call does not ask for has no
    elements.

    Attributes
    ----------
    declaration : Declaration
        Of what.
    text : str
        In torch's language, with the operator's name.
    taken : tuple of int
        Its arguments, by their numbers in the declaration.
    defaults : tuple
        Of all arguments of the declaration.
    made : tuple of Made
        What it returns.
    """

    declaration: Declaration
    text: str
    taken: tuple[int, ...]
    defaults: tuple[Any, ...]
    made: tuple[Made, ...]

    def values(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return all arguments in the order of the declaration. torch leaves out the last ones that are defaults."""
        values = list(self.defaults)
        for at, value in zip(self.taken, arguments, strict=False):
            values[at] = value
        return values


def _is_taken(argument: Argument) -> bool:
    return not isinstance(argument, (Output, Stream))


def _declared(argument: Argument, default: object) -> str:
    """Return an argument as torch's schemas write it."""
    if isinstance(argument, Result):
        kind = "bool?" if argument.wanted_with else "bool"
        default = None if argument.wanted_with else False
    elif isinstance(argument, Array):
        kind = "Tensor" if isinstance(argument, Input) and not argument.optional else "Tensor?"
    else:
        kind = _TYPES[type(argument)]
    return f"{kind} {argument.keyword}" + ("" if default is ... else f"={default}")


@cache
def schema_of(name: str) -> Schema:
    """Return the schema of a public function's operator."""
    declaration = declaration_of(name)
    number = {argument.name: at for at, argument in enumerate(declaration.arguments)}
    taken = [(argument, default) for argument, default in declaration.signature if _is_taken(argument)]
    made = []
    for at, array in enumerate(declaration.arguments):
        if not isinstance(array, (Output, Update, Result)):
            continue
        wanted, dtype = declaration.about(OutputWanted, array.name), declaration.about(OutputDType, array.name)
        asks = number[wanted.name] if wanted else NOBODY if isinstance(array, Output) else at
        beside = number[array.wanted_with] if isinstance(array, Result) and array.wanted_with else NOBODY
        made.append(Made(array, at, asks, beside, number[dtype.name] if dtype else NOBODY))
    arguments = ", ".join(_declared(argument, default) for argument, default in taken)
    returned = ", ".join(["Tensor"] * len(made))
    return Schema(
        declaration,
        f"{name}({arguments}) -> ({returned})" if len(made) > 1 else f"{name}({arguments}) -> Tensor",
        tuple(number[argument.name] for argument, _ in taken),
        tuple(None if argument.default is ... else argument.default for argument in declaration.arguments),
        tuple(made),
    )
