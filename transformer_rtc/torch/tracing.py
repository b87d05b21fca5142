"""The public functions under torch.compile: Dynamo traces calls of the operators instead of theirs.

Imported with torch._dynamo: an eager process has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..declaration import Declaration, declaration_of
from .operators import dispatched

__all__ = ["substitute"]


def substitute(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have Dynamo trace the operators of public functions, which are given by their names."""
    for name, function in functions.items():
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(_traced(declaration_of(name)))


def _traced(declaration: Declaration) -> Callable[..., Any]:
    """Return a function of the same arguments as the public one that Dynamo can trace."""
    # It holds nothing but tuples, a dictionary and functions, for which Dynamo needs no guards.
    number = {argument.name: at for at, argument in enumerate(declaration.arguments)}
    name, call = declaration.name, dispatched(declaration.name)
    positional = tuple(number[argument] for argument in declaration.positional)
    places = {argument.keyword: number[argument.name] for argument in declaration.arguments}
    defaults = tuple(None if argument.default is ... else argument.default for argument in declaration.arguments)

    def traced(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > len(positional):
            raise TypeError(f"{name}() takes {len(positional)} positional arguments but {len(arguments)} were given")
        values = list(defaults)
        for at, value in zip(positional, arguments):  # noqa: B905
            values[at] = value
        for keyword, value in keywords.items():
            if keyword not in places:
                raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}")
            values[places[keyword]] = value
        return call(*values)

    return traced
