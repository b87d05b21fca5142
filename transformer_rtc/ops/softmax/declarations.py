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
    doc="Of the keys that a causal mode leaves, only the last so many.",
)
_STREAM = Stream("stream", doc="As `rms_norm` takes it.")
_DIM = Dimension(
    "dim",
    doc="""The dimension that is a row. One before the last is moved to the end by a view, and so is that of a mask;
    results are moved back, and lse is without it. The elements of a row must be next to each other in memory, and the
    other dimensions must collapse to two strides: otherwise pass ``x.movedim(dim, -1).contiguous()``, and move the
    result back. `causal`, `window` and `sink` need the last dimension.""",
)


# ---- Forward ---------------------------------------------------------------------------------------------------------


def _forward(name: str, summary: str, excluded: str, with_sink: str) -> Declaration:
    arguments = (
        Input(
            "x",
            _ROWS,
            _FLOATS,
            doc="""[..., heads, queries, keys] where a mask, a sink or a causal mode tells rows apart. As `rms_norm`
            takes it. -inf does not take part, whatever the scale's sign; a row with NaN, or with an infinite v above
            all others, becomes NaN.""",
        ),
        Real(
            "scale",
            1.0,
            doc="""What x is multiplied by, in float32, before the maximum. For a y of 16 bits, differences of x and
            scale * log2(e) must be finite in float32: magnitudes of x up to 1.7e38, and of scale up to 2.3e38; in the
            general kernels, and in lse, v itself.""",
        ),
        Input(
            "mask",
            _ROWS,
            (BOOL, UINT8, *_FLOATS),
            optional=True,
            broadcast=True,
            usual_dtype=BOOL,
            doc="""Of bool or uint8: which elements do not take part, those where it is not 0, as Megatron has it. Of
            floats: what is added to v, ``v = scale * x + mask``, rounded once; -inf does not take part. It has x's
            shape, or one that is broadcast to it along dimensions before the last; those before the heads must
            collapse to one stride.""",
        ),
        Flag(
            "mask_keeps",
            doc="""Whether a mask of bool or uint8 says which elements take part, as torch's
            scaled_dot_product_attention has it.""",
        ),
        Choice(
            "causal",
            _WORDS,
            counts=("queries", "keys"),
            doc=f"""Which keys a query of x [..., queries, keys] sees: as many as its own number, for as many queries as
            keys; or so that the last query sees the last key (query i sees keys up to i + keys - queries). The others
            are not read, and y is {excluded} there.""",
        ),
        _WINDOW,
        Input(
            "sink",
            "heads",
            _FLOATS,
            optional=True,
            doc=f"One more logit for every row of a head, which only adds to the sum: ``{with_sink}``.",
        ),
        Output(
            "out",
            _ROWS,
            _FLOATS,
            doc="Where y is written: x itself, or an array that shares no element with the inputs.",
            returned="y",
            returned_doc="Of x's framework, or `out`.",
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
            returned_doc="With the sink's term; -inf where nothing takes part.",
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
        selector=_DIM,
    )


SOFTMAX = _forward(
    "softmax",
    """Return the softmax of each row: ``y = exp(v - max(v)) / sum(exp(v - max(v)))`` with ``v = scale * x``.

Over `dim`. Arithmetic is in float32, and y is rounded once; v is rounded to float32 where y is float32
or a mask of floats is added, else differences of x are scaled. What does not take part has v = -inf: y is 0 there.
A row of which nothing takes part becomes zeros. What a mask or a causal mode excludes is 0 even in a row that is
NaN otherwise. A row's bits do not depend on how many rows there are, nor on where they lie. At most 13 kernels
serve all lengths: few new lengths compile anything.""",
    excluded="0",
    with_sink="y = exp(v) / (sum(exp(v)) + exp(sink))",
)
LOG_SOFTMAX = _forward(
    "log_softmax",
    """Return the logarithm of the softmax of each row: ``y = v - log(sum(exp(v)))`` with ``v = scale * x``.

As `softmax` does it; y is -inf where something does not take part. In float16, so is what is below -65504, and the
backward takes it for the same.""",
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
            doc="The forward call's: what it excludes is not read, and dx is 0 there.",
        ),
        replace(_WINDOW, doc="The forward call's, likewise."),
        Input(
            "sink",
            "heads",
            _FLOATS,
            optional=True,
            doc="The forward call's, for its gradient, which needs lse, too.",
        ),
        Input(
            "lse",
            "...",
            (FLOAT32,),
            optional=True,
            doc="What the forward call returned; it may have a last dimension of 1 beside.",
        ),
        # Masks of bytes are refused by the family, which says why.
        Input(
            "mask",
            _ROWS,
            (*_FLOATS, BOOL, UINT8),
            optional=True,
            broadcast=True,
            refused=(BOOL, UINT8),
            doc="The forward call's, of floats, for its gradient: its elements are not read.",
        ),
        Output(
            "out",
            _ROWS,
            _FLOATS,
            like="y",
            doc="""Where dx is written: dy or y itself, unless dmask is returned, for which they are read again; or an
            array that shares no element with the inputs.""",
            returned="dx",
            returned_doc="Of dy's framework, or `out`.",
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
        selector=replace(_DIM, doc="As the forward call takes it."),
    )


SOFTMAX_BACKWARD = _backward(
    "softmax_backward",
    """Return the gradient of `softmax` for x: ``dx = scale * y * (dy - sum(dy * y))``.

It needs no mask: where y is 0, dx is 0, even if dy is NaN or infinite there. A mask of floats, which was added, has
a gradient of its own: ``dmask = sum(y * (dy - sum(dy * y)))``, of which the outer sum is over the rows that an
element of the mask was broadcast to.""",
    dsink="-sum(exp(sink - lse) * sum(dy * y))",
)
LOG_SOFTMAX_BACKWARD = _backward(
    "log_softmax_backward",
    """Return the gradient of `log_softmax` for x: ``dx = scale * (dy - exp(y) * sum(dy))``.

Where y is -inf, dx is 0 and dy does not count. The gradient of a mask of floats is
``sum(dy - exp(y) * sum(dy))``, of which the outer sum is over the rows that an element of the mask was broadcast
to.""",
    dsink="-sum(exp(sink - lse) * sum(dy))",
)

DECLARATIONS = (SOFTMAX, LOG_SOFTMAX, SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD)
