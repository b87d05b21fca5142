# SPDX-License-Identifier: Apache-2.0
"""Writes the public functions of each family, and their types, from its declarations. Run it after a change of one."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# Without the package's __init__, which needs what this writes.
if "transformer_rtc" not in sys.modules:
    sys.modules["transformer_rtc"] = ModuleType("transformer_rtc")
    sys.modules["transformer_rtc"].__path__ = [str(Path(__file__).parents[2] / "transformer_rtc")]

from transformer_rtc.arguments import (
    Argument,
    Array,
    Choice,
    Dimension,
    Flag,
    Input,
    Integer,
    Margin,
    Output,
    OutputDType,
    OutputWanted,
    Real,
    Result,
    RowShape,
    Stream,
)
from transformer_rtc.declaration import Declaration
from transformer_rtc.operator import register
from transformer_rtc.spec import INTEGERS
from transformer_rtc.views import LAST, viewed

OPS = Path(__file__).parents[2] / "transformer_rtc" / "ops"

_WIDTH = 120
_ORDER = "Several results are a tuple in this order. One result is not a tuple."
_RAISES = """\
Raises
------
ArgumentError
    If an argument is not as described, before anything is launched.
AllocationError
    If there is no memory for an output.
UnexpectedCompileError
    If a kernel must be compiled, and `freeze` or the environment forbids it.
CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, ForkError, SettingsError, StaticKernelError
    If there is no way to run the call.
"""
_EXAMPLES = """\
Examples
--------
>>> import numpy as np
>>> from transformer_rtc import {name}
{example}"""


_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
\"\"\"{title}\"\"\"

# Written by tests/tools/make_api.py: change declarations.py, and run it.

from __future__ import annotations

{imports}
from ...operator import register
{views}from . import declarations

__all__ = [
{names}]

"""


def module_text(declarations: Sequence[Declaration], title: str) -> str:
    """Return the text of a family's module of public functions."""
    names = "".join(f'    "{name}",\n' for name in sorted(declaration.name for declaration in declarations))
    calls = "".join(f"_{one.name} = register(declarations.{one.name.upper()})\n" for one in declarations)
    calls += "".join(
        f"_{one.name}_viewed = viewed(declarations.{one.name.upper()}, _{one.name})\n"
        for one in declarations
        if one.selector
    )
    functions = "".join(f"\n\n{function_text(one)}" for one in declarations)
    imports = _imports(functions, (("collections.abc", ("Sequence",)), ("typing", ("Any",))))
    views = _imports(calls + functions, (("...views", ("LAST", "viewed")),))
    return _HEAD.format(title=title, names=names, imports=imports, views=views) + calls + functions


def _imports(text: str, modules: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return the imports of those words that a text has."""
    found = ""
    for module, words in modules:
        if used := [word for word in words if re.search(rf"\b{word}\b", text)]:
            found += f"from {module} import {', '.join(used)}\n"
    return found


def function_text(declaration: Declaration) -> str:
    """Return the text of the user's function, which passes its arguments on in the order of the declaration."""
    doc = textwrap.indent(f'"""{documentation(declaration)}"""', "    ", lambda line: line.strip() != "")
    passed = [argument.keyword for argument in declaration.arguments]
    lines = [f"{_head(declaration)}\n{doc}"]
    if selector := declaration.selector:
        default = "LAST" if isinstance(selector, Dimension) else repr(selector.default)
        lines.append(f"    if {selector.keyword} is not {default}:")
        lines.append(_passing(f"_{declaration.name}_viewed", [selector.keyword, *passed], " " * 8))
    lines.append(_passing(f"_{declaration.name}", passed, " " * 4))
    return "\n".join(lines) + "\n"


def _passing(called: str, passed: Sequence[str], indent: str) -> str:
    call = f"{indent}return {called}({', '.join(passed)})"
    if len(call) <= _WIDTH:
        return call
    return f"{indent}return {called}(\n" + "".join(f"{indent}    {name},\n" for name in passed) + f"{indent})"


def function_of(declaration: Declaration, call: Callable[..., object] | None = None) -> Callable[..., Any]:
    """Return the user's function of a declaration that belongs to no family's module; `call`: what it calls."""
    namespace: dict[str, Any] = {"Any": Any, "LAST": LAST, "Sequence": Sequence}
    namespace[f"_{declaration.name}"] = made = call or register(declaration)
    if declaration.selector:
        namespace[f"_{declaration.name}_viewed"] = viewed(declaration, made)
    exec(function_text(declaration), namespace)
    function: Callable[..., Any] = namespace[declaration.name]
    return function


def _head(declaration: Declaration) -> str:
    lines = [f"def {declaration.name}("]
    for place, (argument, default) in enumerate(_parameters(declaration)):
        if place == len(declaration.positional):
            lines.append("    *,")
        given = "" if default is ... else f" = {default!r}"
        lines.append(f"    {argument.keyword}: {_annotation(argument)}{given},")
    return "\n".join([*lines, ") -> Any:"])


def _parameters(declaration: Declaration) -> list[tuple[Argument, object]]:
    """Return the arguments of the user's function, each with its default."""
    found = list(declaration.signature)
    if selector := declaration.selector:
        found.insert(len(declaration.positional), (selector, selector.default))
    return found


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
        case Margin() | Dimension():
            return "int"
        case RowShape():
            return "int | Sequence[int] | None"
    return "Any"


# ---- Types -----------------------------------------------------------------------------------------------------------

_STUB_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
\"\"\"{title}\"\"\"

# Written by tests/tools/make_api.py: change declarations.py, and run it.

{imports}
__all__ = [
{names}]

"""


def stub_text(declarations: Sequence[Declaration], title: str) -> str:
    """Return the text of the stub of a family's module: the types of its functions, and of what they return."""
    names = "".join(f'    "{name}",\n' for name in sorted(declaration.name for declaration in declarations))
    functions = "".join(map(_function_stub, declarations))
    standard = _imports(functions, (("collections.abc", ("Sequence",)), ("typing", ("Literal", "overload"))))
    own = _imports(functions, (("...signatures", ("A", "ArrayLike", "DTypeLike")),))
    imports = "\n".join(filter(None, (standard, own)))
    return _STUB_HEAD.format(title=title, imports=imports, names=names) + functions


class _Overload(NamedTuple):
    """A way to call a function, by which it is known how many arrays it returns."""

    parameters: dict[str, tuple[str, object]]  # types and defaults of what tells it from others; `Ellipsis`: no default
    returned: str


def _function_stub(declaration: Declaration) -> str:
    overloads = list(_overloads(declaration))
    if len(overloads) == 1:
        return _signature_stub(declaration, overloads[0])
    return "".join(f"@overload\n{_signature_stub(declaration, one)}" for one in overloads)


def _signature_stub(declaration: Declaration, overload: _Overload) -> str:
    lines = [f"def {declaration.name}("]
    for place, (argument, default) in enumerate(_parameters(declaration)):
        if place == len(declaration.positional):
            lines.append("    *,")
        usual = _static_type(declaration, argument), default
        type_, given = overload.parameters.get(argument.keyword, usual)
        lines.append(f"    {argument.keyword}: {type_}{'' if given is ... else f' = {given!r}'},")
    return "\n".join([*lines, f") -> {overload.returned}: ...\n"])


def _static_type(declaration: Declaration, argument: Argument) -> str:
    match argument:
        case Input():
            type_ = "A" if argument is declaration.arrays[0] else "ArrayLike"
            return f"{type_} | None" if argument.optional else type_
        case Result():
            return _annotation(argument)
        case Array():
            return "ArrayLike | None"
        case OutputDType():
            return "DTypeLike | None"
        case Choice():
            return f"Literal[{', '.join(map(_quoted, argument.words))}] | None"
        case Stream():
            return "object"
    return _annotation(argument)


def _quoted(word: str) -> str:
    return f'"{word}"'


def _overloads(declaration: Declaration) -> Iterator[_Overload]:
    """Yield one for each choice of outputs and results, and a last one for flags of which only the type is known.

    Where a result is wanted by default if an array is given, that array tells them apart, too. A call that asks for
    nothing is refused: the last one stands for it.
    """
    flags = [one for one in declaration.arguments if isinstance(one, (Result, OutputWanted))]
    made = [one for one in declaration.arrays if isinstance(one, (Output, Result))]
    deciding = list(dict.fromkeys(one.wanted_with for one in flags if isinstance(one, Result) and one.wanted_with))
    counts = set()
    for given in itertools.product((True, False), repeat=len(deciding)):
        known = dict(zip(deciding, given, strict=True))
        usual = [known.get(getattr(one, "wanted_with", ""), one.default) for one in flags]
        choices = [(True, False) if flag else (False, True) for flag in usual]
        for wanted in itertools.product(*choices):
            parameters = {}
            for name, is_given in known.items():
                keyword, default = next((a.keyword, value) for a, value in declaration.signature if a.name == name)
                parameters[keyword] = ("ArrayLike", ...) if is_given else ("None", default)
            for flag, value, left_out in zip(flags, wanted, usual, strict=True):
                type_ = f"Literal[{value}]" + " | None" * (value == left_out and flag.default is None)
                parameters[flag.keyword] = (type_, flag.default if value == left_out else ...)
            count = sum(_is_made(declaration, one, dict(zip(flags, wanted, strict=True))) for one in made)
            if count > 0:
                counts.add(count)
                yield _Overload(parameters, _returned(count))
    if flags:
        yield _Overload({}, " | ".join(map(_returned, sorted(counts))))


def _is_made(declaration: Declaration, array: Output | Result, wanted: dict[Argument, bool]) -> bool:
    about = array if isinstance(array, Result) else declaration.about(OutputWanted, array.name)
    return about is None or wanted[about]


def _returned(count: int) -> str:
    return "A" if count == 1 else f"tuple[{', '.join(['A'] * count)}]"


# ---- Documentation ---------------------------------------------------------------------------------------------------


def documentation(declaration: Declaration) -> str:
    """Return the documentation of the user's function, in numpydoc's format."""
    parts = [declaration.summary.strip()]
    if declaration.gradient:
        parts.append("torch's autograd records the gradient.")
    parts.append(
        "Parameters\n----------\n"
        + "".join(_entry(a.keyword, _type(declaration, a, default), a.doc) for a, default in _parameters(declaration))
    )
    returned = ""
    for array in declaration.arrays:
        if isinstance(array, Output):
            returned += _entry(array.returned, f"array {_shapes(declaration, array)}", array.returned_doc)
        elif isinstance(array, Result):
            dtype = f", {array.dtypes[0].name}" if len(array.dtypes) == 1 else ""
            alone = " It has no gradient." if declaration.gradient else ""
            said = f"Only if `{array.keyword}`.{alone} {array.returned_doc}".rstrip()
            returned += _entry(array.name, f"array {_shapes(declaration, array)}{dtype}", said)
    parts += [f"Returns\n-------\n{returned}", _ORDER, _RAISES]
    if declaration.example:
        parts.append(_EXAMPLES.format(name=declaration.name, example=declaration.example))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _entry(name: str, type_: str, text: str) -> str:
    # Code stays in one line.
    words = re.sub(r"``.*?``", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    described = textwrap.fill(words, _WIDTH - 12, break_long_words=False, break_on_hyphens=False).replace("\0", " ")
    head = f"{name} : {type_}" if type_ else name
    return f"{head}\n{textwrap.indent(described, '    ')}\n"


def _shapes(declaration: Declaration, array: Array) -> str:
    if isinstance(array, Result) and array.shape_of:
        return f"like {array.shape_of}"
    shapes = declaration.shapes(array)
    parts = [size.multiple for size in shapes[0].sizes if size.symbol]
    if declaration.split_by and any(multiple > 1 for multiple in parts):
        one = re.sub(r"\d+\*", "", str(shapes[0]))
        return f"{shapes[0]}, or with `{declaration.split_by}` {one}"
    return " or ".join(map(str, shapes))


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
            taken = [dtype for dtype in argument.dtypes if dtype not in argument.refused]
            every = all(dtype in taken for dtype in INTEGERS)
            names = _either(
                [dtype.name for dtype in taken if not every or dtype not in INTEGERS]
                + ["an integer of 8 to 64 bits"] * every
            )
            or_none = " or None" if argument.optional and default is ... else ""
            placed = "broadcast to " * argument.broadcast + _shapes(declaration, argument)
            return f"array {placed}, {names}{optional}{or_none}"
        case OutputDType():
            return "data type, optional"
        case Choice():
            return "{" + ", ".join(f'"{word}"' for word in argument.words) + "}, optional"
        case Result() | Flag() | OutputWanted():
            return "bool" + optional
        case Real():
            return "float"
        case Integer() | Margin() | Dimension():
            return "int" + optional
        case RowShape():
            return "int or sequence of int" + optional
    return "optional"


def modules() -> dict[Path, str]:
    """Return the text of each family's module and of its stub, by their files."""
    found = {}
    for path in sorted(OPS.glob("*/declarations.py")):
        module = import_module(f"transformer_rtc.ops.{path.parent.name}.declarations")
        found[path.with_name("api.py")] = module_text(module.DECLARATIONS, module.TITLE)
        found[path.with_name("api.pyi")] = stub_text(module.DECLARATIONS, module.TITLE)
    return found


if __name__ == "__main__":
    for path, text in modules().items():
        path.write_text(text)
        print(path)
