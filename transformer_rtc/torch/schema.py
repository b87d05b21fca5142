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
)
from ..declaration import Declaration, Made, declaration_of

__all__ = ["Schema", "schema_of"]

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
    """

    declaration: Declaration
    text: str
    taken: tuple[int, ...]
    defaults: tuple[Any, ...]

    @property
    def made(self) -> tuple[Made, ...]:
        """What it returns. Of an update, that is what the array becomes: an operator writes nothing."""
        return self.declaration.made

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
    arguments = ", ".join(_declared(argument, default) for argument, default in taken)
    returned = ", ".join(["Tensor"] * len(declaration.made))
    return Schema(
        declaration,
        f"{name}({arguments}) -> ({returned})" if len(declaration.made) > 1 else f"{name}({arguments}) -> Tensor",
        tuple(number[argument.name] for argument, _ in taken),
        tuple(None if argument.default is ... else argument.default for argument in declaration.arguments),
    )
