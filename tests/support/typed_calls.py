# SPDX-License-Identifier: Apache-2.0
"""A user's file, written from the declarations: its lines say which types a type checker must find.

Every public function is called, each operator with each choice of outputs, and wrongly, too.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from transformer_rtc.arguments import (
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
from transformer_rtc.declaration import Declaration, declarations

PACKAGE_FOLDER = Path(__file__).parents[2]

# What else is public and can be called, and what it returns.
OTHERS = {
    "device_limits": "assert_type(t.device_limits(0).architecture, int)",
    "freeze": "assert_type(t.freeze(), Callable[[], None])",
    "implementations": "assert_type(t.implementations(t.rms_norm, device=0), list[str])",
    "record": "with t.record('manifest') as entries:\n        assert_type(entries, list[t.ManifestEntry])",
    "using": "with t.using('simulator'), t.using(t.SimulatedDevice(checked=True)):\n        pass",
    "warmup": "assert_type(t.warmup('rms_norm', 'float32', 4096, manifest='manifest'), list[t.WarmupRecord])",
}

_HEAD = """\
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

{imports}
from typing_extensions import assert_type

import transformer_rtc as t

Mine = TypeVar("Mine", bound=t.ArrayLike)


def mine(x: Mine, weight: t.ArrayLike | None = None) -> tuple[Mine, Mine]:
    return t.rms_norm(x, weight, return_rstd=True)


class Exporter:
    def __dlpack__(self, *, stream: int | None = None) -> object:
        return None


class OfInterface:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


def others(x: Exporter, perhaps: Exporter | None, interface: OfInterface, device_array: t.DeviceArray) -> None:
    assert_type(mine(x), tuple[Exporter, Exporter])
    assert_type(t.silu(interface), OfInterface)
    assert_type(t.silu(device_array), t.DeviceArray)
    assert_type(t.rms_norm(x, perhaps, bias=perhaps, out=perhaps, scale=perhaps), Exporter)
    t.rms_norm_backward(x, x, perhaps)
    assert_type(t.manager, t.KernelManager)
    assert_type(t.manager.compile("text", "entry", [t.Field("n", "int")], 0), t.Kernel)
    assert_type(device_array.shape, tuple[int, ...])
"""
# What a type checker must refuse.
_WRONG = """
def wrong(x: Exporter, many: list[float]) -> None:
    t.silu(many)  # type: ignore[type-var]  # pyright: ignore
    t.rms_norm(many)  # type: ignore[call-overload]  # pyright: ignore
    t.rms_norm(x, many)  # type: ignore[call-overload]  # pyright: ignore
    t.softmax(x, causal="last")  # type: ignore[call-overload]  # pyright: ignore
    t.softmax(x, dim="last")  # type: ignore[call-overload]  # pyright: ignore
    t.rms_norm(x, normalized_shape=1.5)  # type: ignore[call-overload]  # pyright: ignore
    t.gelu(x, approximate="none")  # type: ignore[arg-type]  # pyright: ignore
    y, rstd = t.rms_norm(x)  # type: ignore[misc]  # pyright: ignore
    t.rms_norm(x, return_mean=True)  # type: ignore[call-overload]  # pyright: ignore
    assert_type(t.softmax(x, return_lse=True), Exporter)  # type: ignore[assert-type]  # pyright: ignore
    t.rms_nrom  # type: ignore[attr-defined]  # pyright: ignore
"""


def user_file(type_: str, imports: str) -> str:
    """Return the text of a user's file whose arrays are of a type."""
    lines = [_HEAD.replace("{imports}", imports)]
    lines += [f"    {line}" for line in OTHERS.values()]
    for declaration in declarations().values():
        lines += [f"\n\ndef call_{declaration.name}(x: {type_}, other: t.ArrayLike, flag: bool) -> None:"]
        lines += [f"    {line}" for line in _lines(declaration, type_)]
    return "\n".join([*lines, "", _WRONG])


def _lines(declaration: Declaration, type_: str) -> Iterator[str]:
    plain = type_
    for arguments, count in _calls(declaration):
        expected = type_ if count == 1 else f"tuple[{', '.join([type_] * count)}]"
        if arguments == _required(declaration):
            plain = expected
        yield f"assert_type(t.{declaration.name}({', '.join(arguments)}), {expected})"
    yield f"t.{declaration.name}({', '.join(_everything(declaration))})"
    yield f"t.{declaration.name}({', '.join(map(_value, declaration.positional, itertools.repeat(declaration)))})"
    for choice in declaration.arguments:
        for word in choice.words if isinstance(choice, Choice) else ():
            said = f"{choice.keyword}={word!r}"
            yield f"assert_type(t.{declaration.name}({', '.join([*_required(declaration), said])}), {type_})"
    for value in _SELECTED.get(type(declaration.selector), ()):
        said = f"{declaration.selector.keyword}={value}"
        yield f"assert_type(t.{declaration.name}({', '.join([*_required(declaration), said])}), {plain})"
    # A flag of which only the type is known.
    counts = sorted({count for _, count in _calls(declaration)})
    flags = [one.keyword for one in declaration.arguments if isinstance(one, (Result, OutputWanted))]
    if flags:
        expected = " | ".join(type_ if n == 1 else f"tuple[{', '.join([type_] * n)}]" for n in counts)
        given = [f"{name}=flag" for name in flags]
        yield f"assert_type(t.{declaration.name}({', '.join(_required(declaration) + given)}), {expected})"


def _required(declaration: Declaration) -> list[str]:
    """Return the arguments that every call has: the first array is the user's, and the others are any."""
    needed = [argument for argument, default in declaration.signature if default is ...]
    return [f"{one.keyword}={_value(one.name, declaration)}" for one in needed]


def _everything(declaration: Declaration) -> Iterator[str]:
    """Yield all arguments but words, and flags that say what is returned."""
    for argument in declaration.arguments:
        if not isinstance(argument, (Choice, Result, OutputWanted)):
            yield f"{argument.keyword}={_value(argument.name, declaration)}"


_VALUES = {Real: "1", Integer: "5", Flag: "flag", Margin: "2", OutputDType: '"float16"', Stream: "0"}


_SELECTED = {Dimension: ("-1", "1"), RowShape: ("None", "8", "(4, 8)", "[4, 8]")}


def _value(name: str, declaration: Declaration) -> str:
    argument = declaration.argument(name)
    return _VALUES.get(type(argument), "x" if argument is declaration.arguments[0] else "other")


def _calls(declaration: Declaration) -> Iterator[tuple[list[str], int]]:
    """Yield the arguments of a call for each choice of flags, and how many arrays it returns."""
    flags = [one for one in declaration.arguments if isinstance(one, (Result, OutputWanted))]
    deciding = {one.wanted_with for one in flags if isinstance(one, Result) and one.wanted_with}
    arrays = [one for one in declaration.arrays if isinstance(one, Input) and one.name in deciding]
    for given in itertools.product((False, True), repeat=len(arrays)):
        there = {array.name for array, is_given in zip(arrays, given, strict=True) if is_given}
        with_arrays = [f"{array.keyword}=other" for array in arrays if array.name in there]
        for values in itertools.product(("", "True", "False"), repeat=len(flags)):
            wanted = {}
            for flag, value in zip(flags, values, strict=True):
                left_out = flag.wanted_with in there if flag.default is None else flag.default
                wanted[flag.name] = left_out if value == "" else value == "True"
            count = sum(_is_returned(declaration, array, wanted) for array in declaration.arrays)
            if count:
                said = [f"{flag.keyword}={value}" for flag, value in zip(flags, values, strict=True) if value]
                yield [*_required(declaration), *with_arrays, *said], count


def _is_returned(declaration: Declaration, array: Array, wanted: dict[str, bool]) -> bool:
    if isinstance(array, Result):
        return wanted[array.name]
    about = declaration.about(OutputWanted, array.name)
    return isinstance(array, Output) and (about is None or wanted[about.name])


def errors_of_mypy(text: str, folder: Path) -> str:
    """Return what ``mypy --strict`` finds wrong with a user's file; empty: nothing."""
    (folder / "user.py").write_text(text)
    return _errors(
        folder, "mypy", "--strict", "--config-file=", "--follow-imports=silent", "--cache-dir=cache", "user.py"
    )


def errors_of_pyright(text: str, folder: Path) -> str:
    """Return what pyright, in its strict mode, finds wrong with a user's file; empty: nothing."""
    (folder / "user.py").write_text(text)
    settings = {
        "extraPaths": [str(PACKAGE_FOLDER)],
        "typeCheckingMode": "strict",
        # It has comments of its own, each of which must hide an error.
        "enableTypeIgnoreComments": False,
        "reportUnnecessaryTypeIgnoreComment": True,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return _errors(folder, "pyright", "--pythonpath", sys.executable)


def _errors(folder: Path, checker: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", checker, *options],
        env=os.environ | {"MYPYPATH": str(PACKAGE_FOLDER)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
