# SPDX-License-Identifier: Apache-2.0
"""What the operators of softmax and its logarithm are like: `make_api.py` writes the public functions from it."""

from __future__ import annotations

from dataclasses import replace

from ...arguments import Choice, Dimension, Equal, Flag, Input, Integer, Output, OutputDType, Real, Result, Stream
from ...declaration import MOST_COLUMNS, Declaration, Gradient
from ...spec import BFLOAT16, BOOL, FLOAT16, FLOAT32, UINT8
from .config import BUCKETS
from .examples import EXAMPLES
from .family import SoftmaxFamily

__all__ = [
    "DECLARATIONS",
    "LOG_SOFTMAX",
    "LOG_SOFTMAX_BACKWARD",
    "SOFTMAX",
    "SOFTMAX_BACKWARD",
    "TITLE",
]

# Of the module of public functions.
TITLE = "Softmax of rows and its logarithm, forward and backward, scaled, masked and causal."

_FAMILY = SoftmaxFamily()
_FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
_ROWS = "... heads queries keys"
_NOUNS = {"queries": "query"}


# ---- Arguments that operators share ----------------------------------------------------------------------------------

_WORDS = {
    "upper_triangular": Equal("queries", "keys", "needs as many queries as keys"),
    "aligned": None,
}
_WINDOW = Integer(
    "window",
    minimum=1,
    largest=MOST_COLUMNS,
    noun="a number of keys of at least 1",
    needs="causal",
    needs_words="a causal mode",
    doc="How many keys a query sees: the last ones of those that the causal mode leaves.",
)
_STREAM = Stream("stream", doc="As in `rms_norm`.")


def _dim(name: str) -> Dimension:
    return Dimension(
        "dim",
        doc=f"""The dimension of a row. If it is not the last, arrays and a mask are viewed with it at the end, and
        results are viewed back. lse does not have it. The elements of a row must be next to each other in memory, and
        the other dimensions must collapse to two strides. In a contiguous array only the last dimension is so: for
        dim=1 call ``{name}(x.movedim(1, -1).contiguous()).movedim(-1, 1)``, without `dim`, and with numpy
        ``np.moveaxis({name}(np.ascontiguousarray(np.moveaxis(x, 1, -1))), -1, 1)``. `causal`, `window` and `sink`
        need the last dimension.""",
    )


# ---- Forward ---------------------------------------------------------------------------------------------------------


def _forward(name: str, summary: str, excluded: str, with_sink: str) -> Declaration:
    arguments = (
        Input(
            "x",
            _ROWS,
            _FLOATS,
            doc="""As in `rms_norm`. With a mask, a sink or a causal mode, the dimensions are [..., heads, queries,
            keys]. An element of -inf is excluded, whatever the scale's sign. A row with NaN, or with an infinite v
            above all others, becomes NaN.""",
        ),
        Real(
            "scale",
            1.0,
            doc="""The factor of x, in float32, before the maximum. For a y of 16 bits, differences of x and
            scale * log2(e) must be finite in float32: magnitudes of x are at most 1.7e38, and of scale 2.3e38. In the
            general kernels, and in lse, v itself must be finite.""",
        ),
        Input(
            "mask",
            _ROWS,
            (BOOL, UINT8, *_FLOATS),
            optional=True,
            broadcast=True,
            usual_dtype=BOOL,
            doc="""A mask of bool or uint8 excludes elements where it is not 0, as Megatron's does. A mask of floats is
            added, ``v = scale * x + mask``, and v is rounded once; -inf excludes an element. The mask has x's shape, or
            is broadcast to it along dimensions before the last. Its dimensions before the heads must collapse to one
            stride.""",
        ),
        Flag(
            "mask_keeps",
            doc="""Whether a mask of bool or uint8 excludes elements where it is 0 instead, as in torch's
            scaled_dot_product_attention.""",
        ),
        Choice(
            "causal",
            _WORDS,
            counts=("queries", "keys"),
            doc=f"""Which keys a query of x [..., queries, keys] sees. "upper_triangular": query i sees keys 0 to i, and
            there are as many queries as keys. "aligned": the last query sees the last key, so query i sees keys 0 to
            i + keys - queries. Other keys are not read, and y is {excluded} there.""",
        ),
        _WINDOW,
        Input(
            "sink",
            "heads",
            _FLOATS,
            optional=True,
            doc=f"One more logit for every row of a head. It only adds to the sum: ``{with_sink}``.",
        ),
        Output(
            "out",
            _ROWS,
            _FLOATS,
            doc="Where y is written: x itself, or an array that shares no element with the inputs.",
            returned="y",
            returned_doc="An array of x's framework, or `out`.",
        ),
        OutputDType(
            "out_dtype",
            _FLOATS,
            ("out",),
            doc="Of y where `out` is not given: float32, float16 or bfloat16; x's by default.",
        ),
        Result(
            "lse",
            "...",
            (FLOAT32,),
            doc="Whether to return ``log(sum(exp(v)))`` as well.",
            returned_doc="It includes the sink's term, and is -inf for a row whose elements are all excluded.",
        ),
        _STREAM,
    )
    gradient = Gradient(
        f"{name}_backward",
        takes={"y": "out", "sink": "sink", "lse": "lse", "mask": "mask"},
        numbers=("scale", "causal", "window"),
        of={"out": "dy"},
        gives={"out": ("x",), "dsink": ("sink",), "dmask": ("mask",)},
        only_for={"sink": "sink", "lse": "sink", "mask": "mask"},
    )
    return Declaration(
        name,
        _FAMILY,
        arguments,
        positional=("x",),
        summary=summary,
        example=EXAMPLES[name],
        buckets=BUCKETS,
        nouns=_NOUNS,
        gradient=gradient,
        selector=_dim(name),
    )


SOFTMAX = _forward(
    "softmax",
    """Return the softmax of each row: ``y = exp(v - max(v)) / sum(exp(v - max(v)))`` with ``v = scale * x``.

The sums are over `dim`. Arithmetic is in float32, and y is rounded once. If y is float32 or a mask of floats is
added, v is rounded to float32; otherwise differences of x are scaled. An excluded element has v = -inf, and its y
is 0. A row whose elements are all excluded becomes zeros. Elements that a mask or a causal mode excludes are 0
even if the rest of the row is NaN. A row's bits do not depend on the number of rows, nor on their addresses. At
most 14 kernels serve all lengths, so few new lengths compile a kernel.""",
    excluded="0",
    with_sink="y = exp(v) / (sum(exp(v)) + exp(sink))",
)
LOG_SOFTMAX = _forward(
    "log_softmax",
    """Return the logarithm of the softmax of each row: ``y = v - log(sum(exp(v)))`` with ``v = scale * x``.

The rules are those of `softmax`, except that y is -inf for excluded elements. In float16, a y below -65504 is
-inf, too, and the backward treats it as excluded.""",
    excluded="-inf",
    with_sink="y = v - log(sum(exp(v)) + exp(sink))",
)


# ---- Backward --------------------------------------------------------------------------------------------------------


def _backward(name: str, summary: str, dsink: str) -> Declaration:
    arguments = (
        Input("dy", _ROWS, _FLOATS, doc="The gradient of y."),
        Input("y", _ROWS, _FLOATS, doc="y as the forward call returned it, of dy's shape."),
        Real("scale", 1.0, doc="The forward call's."),
        Choice(
            "causal",
            _WORDS,
            counts=("queries", "keys"),
            doc="The forward call's. Elements that it excludes are not read, and dx is 0 there.",
        ),
        replace(_WINDOW, doc="The forward call's."),
        Input(
            "sink",
            "heads",
            _FLOATS,
            optional=True,
            doc="The forward call's, for its own gradient, which also needs lse.",
        ),
        Input(
            "lse",
            "...",
            (FLOAT32,),
            optional=True,
            doc="The forward call's result. It may have one more dimension of 1 at the end.",
        ),
        # Masks of bytes are refused by the family, which says why.
        Input(
            "mask",
            _ROWS,
            (*_FLOATS, BOOL, UINT8),
            optional=True,
            broadcast=True,
            refused=(BOOL, UINT8),
            doc="The forward call's mask of floats, for its own gradient. Its elements are not read.",
        ),
        Output(
            "out",
            _ROWS,
            _FLOATS,
            like="y",
            doc="""Where dx is written: dy or y itself, or an array that shares no element with the inputs. If dmask is
            returned, it may not be dy or y, which are read again.""",
            returned="dx",
            returned_doc="An array of dy's framework, or `out`.",
        ),
        OutputDType(
            "out_dtype",
            _FLOATS,
            ("out",),
            doc="Of dx where `out` is not given: float32, float16 or bfloat16; y's by default.",
        ),
        Result(
            "dsink",
            "heads",
            _FLOATS,
            like="sink",
            wanted_with="sink",
            returned_doc="Of the sink's data type.",
            doc=f"""Whether to return the sink's gradient, ``{dsink}`` over the batches and queries, in an order that
            the shape fixes; by default whether a sink is given.""",
        ),
        Result(
            "dmask",
            _ROWS,
            (*_FLOATS, BOOL, UINT8),
            like="mask",
            shape_of="mask",
            wanted_with="mask",
            rereads=True,
            doc="""Whether to return the mask's gradient, added up in float32 in an order that the shape fixes; by
            default whether a mask is given.""",
            returned_doc="Of the mask's data type; contiguous.",
        ),
        _STREAM,
    )
    return Declaration(
        name,
        _FAMILY,
        arguments,
        positional=("dy", "y"),
        summary=summary,
        example=EXAMPLES[name],
        buckets=BUCKETS,
        nouns=_NOUNS,
        selector=Dimension("dim", doc="The forward call's."),
    )


SOFTMAX_BACKWARD = _backward(
    "softmax_backward",
    """Return the gradient of `softmax` for x: ``dx = scale * y * (dy - sum(dy * y))``.

The gradient for x needs no mask: where y is 0, dx is 0, even if dy is NaN or infinite there. A mask of floats has
a gradient of its own: ``dmask = sum(y * (dy - sum(dy * y)))``. The outer sum is over the rows that an element of
the mask was broadcast to.""",
    dsink="-sum(exp(sink - lse) * sum(dy * y))",
)
LOG_SOFTMAX_BACKWARD = _backward(
    "log_softmax_backward",
    """Return the gradient of `log_softmax` for x: ``dx = scale * (dy - exp(y) * sum(dy))``.

Where y is -inf, dx is 0 and dy is ignored. The gradient of a mask of floats is ``sum(dy - exp(y) * sum(dy))``. The
outer sum is over the rows that an element of the mask was broadcast to.""",
    dsink="-sum(exp(sink - lse) * sum(dy))",
)

DECLARATIONS = (SOFTMAX, LOG_SOFTMAX, SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD)
