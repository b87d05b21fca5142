# SPDX-License-Identifier: Apache-2.0
"""What addition is like: `make_api.py` writes the public function from it."""

from __future__ import annotations

from ...arguments import Input, Output, OutputDType, Stream
from ...declaration import MOST_COLUMNS, Declaration, Gradient
from ...spec import BFLOAT16, BOOL, FLOAT16, FLOAT32, INTEGERS
from .family import ArithmeticFamily

__all__ = ["ADD", "DECLARATIONS", "TITLE"]

# Of the module of public functions.
TITLE = "Arithmetic: the sum of two arrays."

_NUMBERS = (FLOAT32, FLOAT16, BFLOAT16, *INTEGERS, BOOL)
_ROWS = "... columns"

ADD = Declaration(
    "add",
    ArithmeticFamily(),
    (
        Input("x", _ROWS, _NUMBERS, doc="An array of any numbers, contiguous in its last dimension."),
        Input("other", _ROWS, _NUMBERS, doc="Another one, of a shape that is broadcast with x's as torch does it."),
        Output(
            "out",
            _ROWS,
            _NUMBERS,
            doc="""Where y is written: an input of y's shape and type itself, or an array that shares no element with
            the inputs.""",
            returned="y",
            returned_doc="Of x's framework, and of the shape that both are broadcast to.",
        ),
        OutputDType(
            "out_dtype",
            _NUMBERS,
            ("out",),
            doc="""The data type of y if `out` is not given, of any framework or by name. By default it is the type that
            torch promotes those of x and `other` to. Floating-point numbers do not become integers, and numbers do not
            become bools.""",
        ),
        Stream("stream", doc="As in `rms_norm`."),
    ),
    positional=("x", "other"),
    summary="""Return the sum of two arrays, which are broadcast to one shape.

``y = x + other``. Integers are added exactly, and wrap around beyond 64 bits and beyond y's type. The sum of two
bools is true if one of them is. If x or `other` has a floating-point type, both are converted to float32 and
added, and y is rounded once. An array without dimensions decides y's type only by its category, as in torch: bool,
integer or floating point. At least one of the two has dimensions. uint16, uint32 and uint64 have no sum with bools
and other integers of any dimensions unless y's type is given. Leading dimensions of all arrays must collapse to
two strides in the same way.""",
    example="""\
>>> x, other = np.array([[1], [2]]), np.array([10, 20], np.int8)
>>> add(x, other)  # of the larger of the two types, int64
array([[11, 21],
       [12, 22]])
""",
    buckets=(MOST_COLUMNS,),
    gradient=Gradient("", takes={}, numbers=(), of={"out": "dy"}, gives={}, passes={"x": "out", "other": "out"}),
    broadcasts=("x", "other"),
    elementwise=True,
)

DECLARATIONS = (ADD,)
