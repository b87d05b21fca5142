# SPDX-License-Identifier: Apache-2.0
"""The functions that are made of declarations: their signatures, documentation, and what tools see of them."""

from __future__ import annotations

import inspect
import pickle
import re
import typing

import make_api
import pytest

import transformer_rtc
from transformer_rtc.arguments import Array, Input, Output, Real
from transformer_rtc.declaration import Declaration, declarations
from transformer_rtc.spec import FLOAT32

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
    assert sections == ["Parameters", "Returns", "Raises", "Examples"]
    assert max(map(len, doc.splitlines())) <= 116


# What users pass: a change of it is one of the public interface.
SIGNATURES = {
    "add": "x, other, *, out=None, out_dtype=None, stream=None",
    "gelu": "x, *, approximate=None, out=None, out_dtype=None, scale=None, amax=None, scale_inv=None, stream=None",
    "silu": "x, *, out=None, out_dtype=None, scale=None, amax=None, scale_inv=None, stream=None",
    "relu_squared": "x, *, out=None, out_dtype=None, scale=None, amax=None, scale_inv=None, stream=None",
    "gelu_and_mul": (
        "x, up=None, *, approximate=None, out=None, out_dtype=None, scale=None, amax=None, scale_inv=None, "
        "row_scaling=False, stream=None"
    ),
    "silu_and_mul": (
        "x, up=None, *, out=None, out_dtype=None, scale=None, amax=None, scale_inv=None, row_scaling=False, stream=None"
    ),
    "gelu_backward": "dy, x, *, approximate=None, out=None, out_dtype=None, stream=None",
    "silu_backward": "dy, x, *, out=None, out_dtype=None, stream=None",
    "relu_squared_backward": "dy, x, *, out=None, out_dtype=None, stream=None",
    "gelu_and_mul_backward": (
        "dy, x, up=None, *, approximate=None, out=None, out_dtype=None, return_dup=None, stream=None"
    ),
    "silu_and_mul_backward": "dy, x, up=None, *, out=None, out_dtype=None, return_dup=None, stream=None",
    "rms_norm": (
        "x, weight=None, eps=1e-06, *, normalized_shape=None, bias=None, weight_offset=0.0, out=None, "
        "out_dtype=None, round_before_weight=False, return_rstd=False, scale=None, amax=None, scale_inv=None, "
        "row_scaling=False, sm_margin=0, stream=None"
    ),
    "layer_norm": (
        "x, weight=None, bias=None, eps=1e-05, *, normalized_shape=None, weight_offset=0.0, out=None, "
        "out_dtype=None, return_mean=False, return_rstd=False, scale=None, amax=None, scale_inv=None, "
        "row_scaling=False, sm_margin=0, stream=None"
    ),
    "add_rms_norm": (
        "x, residual, weight=None, eps=1e-06, *, normalized_shape=None, bias=None, weight_offset=0.0, out=None, "
        "residual_out=None, out_dtype=None, residual_dtype=None, round_before_weight=False, return_rstd=False, "
        "scale=None, amax=None, scale_inv=None, row_scaling=False, sm_margin=0, stream=None"
    ),
    "add_layer_norm": (
        "x, residual, weight=None, bias=None, eps=1e-05, *, normalized_shape=None, weight_offset=0.0, out=None, "
        "residual_out=None, out_dtype=None, residual_dtype=None, return_mean=False, return_rstd=False, scale=None, "
        "amax=None, scale_inv=None, row_scaling=False, sm_margin=0, stream=None"
    ),
    "rms_norm_add": (
        "x, residual, weight=None, eps=1e-06, *, normalized_shape=None, bias=None, weight_offset=0.0, out=None, "
        "out_dtype=None, return_rstd=False, sm_margin=0, stream=None"
    ),
    "layer_norm_add": (
        "x, residual, weight=None, bias=None, eps=1e-05, *, normalized_shape=None, weight_offset=0.0, out=None, "
        "out_dtype=None, return_mean=False, return_rstd=False, sm_margin=0, stream=None"
    ),
    "rms_norm_backward": (
        "dy, x, weight=None, eps=1e-06, *, normalized_shape=None, rstd=None, dresidual=None, weight_offset=0.0, "
        "out=None, out_dtype=None, return_dx=True, return_dweight=None, return_dbias=False, dweight_dtype=None, "
        "sm_margin=0, stream=None"
    ),
    "layer_norm_backward": (
        "dy, x, weight=None, eps=1e-05, *, normalized_shape=None, mean=None, rstd=None, dresidual=None, "
        "weight_offset=0.0, out=None, out_dtype=None, return_dx=True, return_dweight=None, return_dbias=None, "
        "dweight_dtype=None, sm_margin=0, stream=None"
    ),
    "add_rms_norm_backward": (
        "dy, ds, s, weight=None, eps=1e-06, *, normalized_shape=None, rstd=None, weight_offset=0.0, out=None, "
        "out_dtype=None, return_dx=True, return_dweight=None, return_dbias=False, dweight_dtype=None, sm_margin=0, "
        "stream=None"
    ),
    "add_layer_norm_backward": (
        "dy, ds, s, weight=None, eps=1e-05, *, normalized_shape=None, mean=None, rstd=None, weight_offset=0.0, "
        "out=None, out_dtype=None, return_dx=True, return_dweight=None, return_dbias=None, dweight_dtype=None, "
        "sm_margin=0, stream=None"
    ),
    "rms_norm_add_backward": (
        "dy, x, weight=None, eps=1e-06, *, normalized_shape=None, rstd=None, dresidual=None, weight_offset=0.0, "
        "out=None, out_dtype=None, return_dx=True, return_dweight=None, return_dbias=False, dweight_dtype=None, "
        "sm_margin=0, stream=None"
    ),
    "layer_norm_add_backward": (
        "dy, x, weight=None, eps=1e-05, *, normalized_shape=None, mean=None, rstd=None, dresidual=None, "
        "weight_offset=0.0, out=None, out_dtype=None, return_dx=True, return_dweight=None, return_dbias=None, "
        "dweight_dtype=None, sm_margin=0, stream=None"
    ),
    "softmax": (
        "x, *, dim=-1, scale=1.0, mask=None, mask_keeps=False, causal=None, window=None, sink=None, out=None, "
        "out_dtype=None, return_lse=False, stream=None"
    ),
    "log_softmax": (
        "x, *, dim=-1, scale=1.0, mask=None, mask_keeps=False, causal=None, window=None, sink=None, out=None, "
        "out_dtype=None, return_lse=False, stream=None"
    ),
    "softmax_backward": (
        "dy, y, *, dim=-1, scale=1.0, causal=None, window=None, sink=None, lse=None, mask=None, out=None, "
        "out_dtype=None, return_dsink=None, return_dmask=None, stream=None"
    ),
    "log_softmax_backward": (
        "dy, y, *, dim=-1, scale=1.0, causal=None, window=None, sink=None, lse=None, mask=None, out=None, "
        "out_dtype=None, return_dsink=None, return_dmask=None, stream=None"
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_public_signatures_are_these(name):
    by_position: list[str] = []
    by_keyword: list[str] = []
    for found in inspect.signature(getattr(transformer_rtc, name)).parameters.values():
        text = found.name if found.default is found.empty else f"{found.name}={found.default!r}"
        (by_keyword if found.kind is found.KEYWORD_ONLY else by_position).append(text)
    assert ", ".join((*by_position, "*", *by_keyword)) == SIGNATURES.get(name)


def test_every_public_function_has_its_signature_here():
    assert SIGNATURES.keys() == set(NAMES)


def test_help_names_the_data_types_that_a_call_takes():
    for name in ("softmax_backward", "log_softmax_backward"):
        assert re.search(r"^mask : array broadcast to \[..., keys\], float32, float16 or bfloat16, optional$",
                         inspect.getdoc(getattr(transformer_rtc, name)), re.M)  # fmt: skip
    assert "mask : array broadcast to [..., keys], bool, uint8, float32" in inspect.getdoc(transformer_rtc.softmax)


def test_help_of_the_logarithm_says_what_it_is():
    doc = " ".join(inspect.getdoc(transformer_rtc.log_softmax).split())
    assert "y is -inf there" in doc and "``y = v - log(sum(exp(v)) + exp(sink))``" in doc
    assert "y is 0 there" not in doc and "exp(v) / (" not in doc


def not_input(array: Array) -> bool:
    return not isinstance(array, Input) and bool(getattr(array, "returned_doc", "") or hasattr(array, "wanted_with"))


def test_the_functions_are_those_of_the_declarations():
    assert make_api.modules().keys() == {*make_api.OPS.glob("*/api.py"), *make_api.OPS.glob("*/api.pyi")}
    for path, text in make_api.modules().items():
        assert path.read_text() == text, f"run python tests/tools/make_api.py: {path}"


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


def declaration_of_names(*arguments) -> Declaration:
    return Declaration("op", None, arguments, positional=())  # type: ignore[arg-type]


def test_a_name_means_one_thing():
    x = Input("x", "... heads columns", (FLOAT32,))
    for name in ("rows", "groups", "workspace", "heads", "columns", "inner_magic"):
        with pytest.raises(ValueError, match=f"^op: {name} names something else already"):
            declaration_of_names(x, Real(name, 0.0))
    for arguments in ((), (Real("eps", 0.0), x), (Input("x", "... columns", (FLOAT32,), optional=True),)):
        with pytest.raises(ValueError, match=r"^op: the first argument is an array of rows that must be given"):
            declaration_of_names(*arguments)


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
    with pytest.raises(
        ValueError, match=f"op: other has the shape '{re.escape(text)}'; the dots are all dimensions of"
    ):
        shapes(text)


@pytest.mark.parametrize("text", ["... heads", "... queries", "... heads columns", "... queries heads columns"])
def test_the_names_of_leading_dimensions_are_all_of_them(text):
    with pytest.raises(ValueError, match=r"the dots are all dimensions of x '\.\.\. heads queries columns' but"):
        shapes(text, "... heads queries columns")
    assert shapes("... heads queries", "... heads queries columns") == ["[...]"]


@pytest.mark.parametrize("text", ["2 * columns", "-1", "*", "Columns", "columns*2", "0*columns", "0", "02"])
def test_what_is_no_dimension_is_refused(text):
    with pytest.raises(ValueError, match="is no dimension"):
        shapes(text)
