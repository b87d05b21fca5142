"""The user's function of a declaration: its signature, its documentation, and its text for type checkers."""

from __future__ import annotations
import __future__

import linecache
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .declaration import (
    Argument,
    Array,
    Choice,
    Declaration,
    Flag,
    Input,
    Integer,
    Margin,
    Output,
    OutputDType,
    OutputWanted,
    Real,
    Result,
)

__all__ = ["documentation", "make", "stub"]

_WIDTH = 120
_RAISES = """\
Raises
------
ArgumentError
    If an argument is not as described, before anything is launched.
CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
    If there is no way to run.
"""


def make(declaration: Declaration, call: Callable[..., object], module: str) -> Callable[..., Any]:
    """Return the user's function, which passes its arguments on in the order of the declaration.

    Parameters
    ----------
    declaration : Declaration
        What it is like.
    call : callable
        What it calls: its global name ``call``.
    module : str
        The module that it belongs to.
    """
    passed = ", ".join(argument.keyword for argument in declaration.arguments)
    text = f"{_head(declaration)}\n    return call({passed})\n"
    # So that tracebacks and inspect.getsource() show it.
    file = f"<transformer_rtc {declaration.name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": module, "Any": Any, "call": call}
    exec(compile(text, file, "exec", __future__.annotations.compiler_flag), namespace)
    function: Callable[..., Any] = namespace[declaration.name]
    function.__doc__ = documentation(declaration)
    return function


def stub(declarations: Sequence[Declaration]) -> str:
    """Return the text of a module with these functions, for type checkers and editors."""
    names = "".join(f'    "{declaration.name}",\n' for declaration in declarations)
    functions = []
    for declaration in declarations:
        body = textwrap.indent(f'"""{documentation(declaration)}"""', "    ", lambda line: line.strip() != "")
        functions.append(f"{_head(declaration)}\n{body}\n")
    head = f"# Written by tests/tools/make_stubs.py.\n\nfrom typing import Any\n\n__all__ = [\n{names}]\n\n"
    return head + "\n".join(functions)


def _head(declaration: Declaration) -> str:
    lines = [f"def {declaration.name}("]
    for place, (argument, default) in enumerate(declaration.signature):
        if place == len(declaration.positional):
            lines.append("    *,")
        given = "" if default is ... else f" = {default!r}"
        lines.append(f"    {argument.keyword}: {_annotation(argument)}{given},")
    return "\n".join([*lines, ") -> Any:"])


def _annotation(argument: Argument) -> str:
    match argument:
        case Real():
            return "float"
        case Result(wanted_with=""):
            return "bool"
        case Result():
            return "bool | None"
        case Flag() | OutputWanted():
            return "bool"
        case Integer():
            return "int | None"
        case Choice():
            return "str | None"
        case Margin():
            return "int"
    return "Any"


# ---- Documentation ---------------------------------------------------------------------------------------------------


def documentation(declaration: Declaration) -> str:
    """Return the documentation of the user's function, in numpydoc's format."""
    parts = [declaration.summary.strip()]
    parts.append(
        "Parameters\n----------\n"
        + "".join(_entry(a.keyword, _type(declaration, a, default), a.doc) for a, default in declaration.signature)
    )
    returned = ""
    for array in declaration.arrays:
        if isinstance(array, Output):
            returned += _entry(array.returned, f"array {_shapes(declaration, array)}", array.returned_doc)
        elif isinstance(array, Result):
            dtype = f", {array.dtypes[0].name}" if len(array.dtypes) == 1 else ""
            said = f"Only if `{array.keyword}`. {array.returned_doc}".rstrip()
            returned += _entry(array.name, f"array {_shapes(declaration, array)}{dtype}", said)
    parts += [f"Returns\n-------\n{returned}", _RAISES]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _entry(name: str, type_: str, text: str) -> str:
    # The words, so that a caller may break its lines where it likes.
    described = textwrap.fill(" ".join(text.split()), _WIDTH - 12, break_long_words=False, break_on_hyphens=False)
    head = f"{name} : {type_}" if type_ else name
    return f"{head}\n{textwrap.indent(described, '    ')}\n"


def _shapes(declaration: Declaration, array: Array) -> str:
    if isinstance(array, Result) and array.shape_of:
        return f"like {array.shape_of}"
    return " or ".join(map(str, declaration.shapes(array)))


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _type(declaration: Declaration, argument: Argument, default: object) -> str:
    optional = ", optional" if default is None else ""
    match argument:
        case Array(shape="() | 1"):
            return f"array of one {argument.dtypes[0].name}{optional}"
        case Output():
            return f"array {_shapes(declaration, argument)}{optional}"
        case Input():
            names = _either(dtype.name for dtype in argument.dtypes)
            or_none = " or None" if argument.optional and default is ... else ""
            return f"array {_shapes(declaration, argument)}, {names}{optional}{or_none}"
        case OutputDType():
            return "data type, optional"
        case Choice():
            return "{" + ", ".join(f'"{word}"' for word in argument.words) + "}, optional"
        case Result() | Flag() | OutputWanted():
            return "bool" + optional
        case Real():
            return "float"
        case Integer() | Margin():
            return "int" + optional
    return "optional"
