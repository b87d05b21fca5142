# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings of public names: which docstrings there are, and what fails of one."""

from __future__ import annotations

import ast
import doctest
import inspect
import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import transformer_rtc

PACKAGE = Path(transformer_rtc.__file__).parent


def docstrings(module: ModuleType) -> dict[str, str]:
    """Return the docstrings of a module's public names, and of their public methods that have examples, by names."""
    found = {}
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, str):
            continue  # the version
        is_documented = inspect.isclass(value) or inspect.isroutine(value)
        found[name] = inspect.cleandoc(value.__doc__ or "") if is_documented else _written_after(name)
        if inspect.isclass(value):
            methods = ((f"{name}.{method}", inspect.cleandoc(text)) for method, text in _methods(value))
            found |= {method: text for method, text in methods if ">>>" in text}
    return found


def _methods(class_: type) -> Iterator[tuple[str, str]]:
    """Yield the names and docstrings of a class's own public methods and properties."""
    for name, value in vars(class_).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value.__doc__ or ""


def _written_after(variable: str) -> str:
    """Return the docstring of a variable: the text after the statement that assigns it; empty where it has none."""
    for path in sorted(PACKAGE.glob("*.py")):
        code = path.read_text(encoding="utf-8")
        if f"\n{variable}" not in code:
            continue  # without parsing it
        for statement, after in pairwise(ast.parse(code).body):
            match statement, after:
                case ((ast.Assign(targets=[target]) | ast.AnnAssign(target=target)), ast.Expr(ast.Constant(str(text)))):
                    if ast.unparse(target) == variable:
                        return inspect.cleandoc(text)
    return ""


def failures(name: str, text: str) -> str:
    """Return what is wrong with the examples of a docstring; empty where nothing is."""
    if "\nExamples\n--------\n" not in text:
        return f"{name} has no section of examples"
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, 0)
    code = "".join(example.source for example in test.examples)
    if name.rpartition(".")[2] not in code:
        return f"the examples of {name} do not use it"
    if any(doctest.SKIP in example.options for example in test.examples):
        return f"the examples of {name} are not all run"
    report = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(test, out=report.write)
    return report.getvalue()
