# SPDX-License-Identifier: Apache-2.0
"""What the operators of activations are like: `make_api.py` writes the public functions from it."""

from __future__ import annotations

import textwrap

from ...arguments import Argument, Choice, Input, Output, OutputDType, Result, Stream
from ...declaration import Declaration, Gradient
from ..scaling import FLOATS, QUANTIZED, ROW_SCALE, scales
from .examples import EXAMPLES
from .family import BUCKETS, ActivationFamily

__all__ = [
    "DECLARATIONS",
    "GELU",
    "GELU_AND_MUL",
    "GELU_AND_MUL_BACKWARD",
    "GELU_BACKWARD",
    "RELU_SQUARED",
    "RELU_SQUARED_BACKWARD",
    "SILU",
    "SILU_AND_MUL",
    "SILU_AND_MUL_BACKWARD",
    "SILU_BACKWARD",
    "TITLE",
]

# Of the module of public functions.
TITLE = "Activations, forward and backward: GELU, SiLU, squared ReLU, and gated ones."

_FAMILY = ActivationFamily()
_ROWS, _PAIR = "... columns", "... 2*columns"
_BITS8 = "float8_e4m3fn, float8_e5m2 or int8"
_STREAM = Stream("stream", doc="As in `rms_norm`.")
_UP = Input("up", _ROWS, FLOATS, optional=True, doc="The second factor, of x's shape. None: x has both.")


def _approximate(doc: str) -> tuple[Argument, ...]:
    return (Choice("approximate", {"tanh": None}, doc=doc),)


def _forward(name: str, summary: str, gated: bool) -> Declaration:
    has_two = "gelu" in name
    pair = " Without `up` its last dimension has the argument of f and then `up`, each as long as y's." if gated else ""
    arguments = (
        Input("x", _PAIR if gated else _ROWS, FLOATS, doc=f"As in `rms_norm`.{pair}"),
        *((_UP,) if gated else ()),
        *(_approximate("``'tanh'``: P is approximated by tanh. None: P is exact.") if has_two else ()),
        Output(
            "out",
            _ROWS,
            QUANTIZED,
            doc=f"""Where y is written: x itself{" or up itself" if gated else ""}, or an array that shares no element
            with the inputs.""",
            returned="y",
            returned_doc="An array of x's framework and type, or as requested.",
        ),
        OutputDType(
            "out_dtype",
            QUANTIZED,
            ("out",),
            doc=f"""Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or
            bfloat16; {_BITS8}, which saturate.""",
        ),
        *scales("float8 or int8"),
        *((ROW_SCALE,) if gated else ()),
        _STREAM,
    )
    takes = {"x": "x", "up": "up"} if gated else {"x": "x"}
    gives: dict[str, tuple[str, ...]] = {"out": ("x",)}
    gradient = Gradient(
        f"{name}_backward",
        takes=takes,
        numbers=("approximate",) if has_two else (),
        of={"out": "dy"},
        gives=gives | ({"dup": ("up",)} if gated else {}),
    )
    return Declaration(
        name,
        _FAMILY,
        arguments,
        positional=("x", "up") if gated else ("x",),
        summary=summary,
        example=EXAMPLES[name],
        buckets=BUCKETS,
        gradient=gradient,
        split_by="up" if gated else "",
        elementwise=True,
    )


def _backward(name: str, summary: str, gated: bool) -> Declaration:
    pair = " Without `up`, both halves' gradients." if gated else ""
    arguments = (
        Input("dy", _ROWS, FLOATS, doc="The gradient of y."),
        Input("x", _PAIR if gated else _ROWS, FLOATS, doc="What the forward call was given."),
        *((_UP,) if gated else ()),
        *(_approximate("The forward call's.") if "gelu" in name else ()),
        Output(
            "out",
            _PAIR if gated else _ROWS,
            FLOATS,
            like="x",
            doc=f"Where dx is written: x itself, or an array that shares no element with the inputs.{pair}",
            returned="dx",
            returned_doc="An array of dy's framework, or `out`.",
        ),
        OutputDType("out_dtype", FLOATS, ("out",), doc="Of dx where `out` is not given; x's by default."),
        *(
            (
                Result(
                    "dup",
                    _ROWS,
                    FLOATS,
                    like="up",
                    wanted_with="up",
                    doc="Whether to return the gradient of `up`; by default whether it is given.",
                    returned_doc="Of up's data type.",
                ),
            )
            if gated
            else ()
        ),
        _STREAM,
    )
    backward = f"{name}_backward"
    return Declaration(
        backward,
        _FAMILY,
        arguments,
        positional=("dy", "x", "up") if gated else ("dy", "x"),
        summary=summary,
        example=EXAMPLES[backward],
        buckets=BUCKETS,
        split_by="up" if gated else "",
        elementwise=True,
    )


_GELU = """with ``P(x) = (1 + erf(x / sqrt(2))) / 2`` or, approximated,
``P(x) = (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2`` (Hendrycks and Gimpel, "Gaussian Error Linear
Units", 2016)"""
_SILU = """with ``sigmoid(x) = 1 / (1 + exp(-x))`` (Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units", 2017)"""
_ROUNDED = """Arithmetic is in float32, and y is rounded once. A y below the smallest normal number may become 0.
If x is -infinity, y is NaN, and 0 in the exact GELU. An element's bits depend on no other element, nor on its
address."""
_ROUNDED_RELU = "Arithmetic is in float32, and y is rounded once; of NaN it is NaN."
_FUNCTIONS = {
    "gelu": ("the Gaussian error linear unit", f"``y = x * P(x)`` {_GELU}.", _ROUNDED),
    "silu": ("the sigmoid linear unit", f"``y = x * sigmoid(x)`` {_SILU}.", _ROUNDED),
    "relu_squared": (
        "the squared rectified linear unit",
        '``y = max(x, 0) ** 2`` (So and others, "Primer: Searching for Efficient Transformers", 2021).',
        _ROUNDED_RELU,
    ),
    "gelu_and_mul": (
        "the gated Gaussian error linear unit",
        f'``y = x * P(x) * up`` {_GELU} (Shazeer, "GLU Variants Improve Transformer", 2020: GEGLU).',
        _ROUNDED,
    ),
    "silu_and_mul": (
        "the gated sigmoid linear unit",
        f'``y = x * sigmoid(x) * up`` {_SILU} (Shazeer, "GLU Variants Improve Transformer", 2020: SwiGLU).',
        _ROUNDED,
    ),
}


def _text(*paragraphs: str) -> str:
    return "\n\n".join(textwrap.fill(" ".join(text.split()), 112, break_on_hyphens=False) for text in paragraphs)


def _pair(name: str) -> tuple[Declaration, Declaration]:
    what, formula, rounded = _FUNCTIONS[name]
    gated = name.endswith("_and_mul")
    both = ("x and `up` are two arrays, or the halves of each row of one.",) if gated else ()
    gradients = "``dx = dy * up * f'(x)`` and ``dup = dy * f(x)``" if gated else "``dx = dy * f'(x)``"
    of = f"{gradients}, as `{name}` has f. Each is rounded once."
    return (
        _forward(name, _text(f"Return {what}.", f"{formula} {rounded}", *both), gated),
        _backward(name, _text(f"Return the gradient of `{name}`.", of), gated),
    )


GELU, GELU_BACKWARD = _pair("gelu")
SILU, SILU_BACKWARD = _pair("silu")
RELU_SQUARED, RELU_SQUARED_BACKWARD = _pair("relu_squared")
GELU_AND_MUL, GELU_AND_MUL_BACKWARD = _pair("gelu_and_mul")
SILU_AND_MUL, SILU_AND_MUL_BACKWARD = _pair("silu_and_mul")

DECLARATIONS = (
    GELU,
    SILU,
    RELU_SQUARED,
    GELU_AND_MUL,
    SILU_AND_MUL,
    GELU_BACKWARD,
    SILU_BACKWARD,
    RELU_SQUARED_BACKWARD,
    GELU_AND_MUL_BACKWARD,
    SILU_AND_MUL_BACKWARD,
)
