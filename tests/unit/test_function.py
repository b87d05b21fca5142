"""The functions that are made of declarations: their signatures, documentation, stubs, and what tools see of them."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
import typing
from pathlib import Path

import pytest

import transformer_rtc
from transformer_rtc.declaration import Array, Declaration, Input, Output, Real
from transformer_rtc.request import declarations
from transformer_rtc.spec import FLOAT32

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import make_stubs

NAMES = list(declarations())


@pytest.mark.parametrize("name", NAMES)
def test_a_function_says_what_it_takes_and_returns(name):
    function, declaration = getattr(transformer_rtc, name), declarations()[name]
    assert (function.__name__, function.__module__) == (name, declaration.family.__module__.replace("family", "api"))
    doc = inspect.getdoc(function)
    described = re.findall(r"^(\w+) : .+\n    \S", doc, re.M)
    returned = [one.returned if isinstance(one, Output) else one.name for one in declaration.arrays]
    results = [word for word, one in zip(returned, declaration.arrays, strict=True) if word and not_input(one)]
    assert described == [*inspect.signature(function).parameters, *results]
    sections = re.findall(r"^(\w+)\n-+$", doc, re.M)
    assert sections == ["Parameters", "Returns", "Raises"]
    assert max(map(len, doc.splitlines())) <= 116


def not_input(array: Array) -> bool:
    return not isinstance(array, Input) and bool(getattr(array, "returned_doc", "") or hasattr(array, "wanted_with"))


def test_the_stubs_are_those_of_the_declarations():
    for path, text in make_stubs.stubs().items():
        assert path.read_text() == text, f"run python tests/tools/make_stubs.py: {path}"


@pytest.mark.parametrize("name", NAMES)
def test_tools_see_a_function_like_any_other(name):
    function = getattr(transformer_rtc, name)
    assert inspect.getsource(function).startswith(f"def {name}(")
    assert typing.get_type_hints(function).keys() == {*inspect.signature(function).parameters, "return"}
    assert pickle.loads(pickle.dumps(function)) is function


def test_what_comes_before_a_required_argument_has_no_default():
    parameters = inspect.signature(transformer_rtc.add_rms_norm_backward).parameters
    without = [name for name, found in parameters.items() if found.default is inspect.Parameter.empty]
    assert without == ["dy", "ds", "s"] and list(parameters)[:5] == ["dy", "ds", "s", "weight", "eps"]
    assert declarations()["add_rms_norm_backward"].always == ("dresidual",)
    assert declarations()["rms_norm_backward"].always == ()


# ---- Shapes ----------------------------------------------------------------------------------------------------------


def shapes(text: str, first: str = "... heads columns") -> list[str]:
    arguments = (Input("x", first, (FLOAT32,)), Input("other", text, (FLOAT32,)), Real("eps", 0.0))
    declaration = Declaration("op", None, arguments, positional=("x",))  # type: ignore[arg-type]
    return [str(shape) for shape in declaration.shapes(declaration.arrays[1])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("... columns", ["[..., columns]"]), ("... heads columns", ["[..., columns]"]), ("...", ["[...]"]),
        ("... heads", ["[...]"]), ("... 2*columns", ["[..., 2*columns]"]), ("columns", ["[columns]"]),
        ("columns | heads columns", ["[columns]", "[heads, columns]"]), ("() | 1", ["[]", "[1]"]), ("3", ["[3]"]),
    ],
)  # fmt: skip
def test_a_shape_is_read(text, expected):
    assert shapes(text) == expected


@pytest.mark.parametrize("text", ["width", "... width", "2*width", "columns width"])
def test_a_dimension_that_the_first_array_does_not_have_is_refused(text):
    with pytest.raises(ValueError, match=f"op: other has the shape '{re.escape(text)}', of dimensions that no array"):
        shapes(text)


@pytest.mark.parametrize("text", ["2 * columns", "-1", "*", "Columns", "columns*2"])
def test_what_is_no_dimension_is_refused(text):
    with pytest.raises(ValueError, match="is no dimension"):
        shapes(text)
