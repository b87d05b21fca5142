# SPDX-License-Identifier: Apache-2.0
"""What the operators of RMSNorm and LayerNorm are like: `make_api.py` writes the public functions from it."""

from __future__ import annotations

from dataclasses import replace

from ...arguments import (
    Argument,
    Flag,
    Input,
    Margin,
    Output,
    OutputDType,
    OutputWanted,
    Real,
    Result,
    RowShape,
    Stream,
)
from ...declaration import Declaration, Gradient
from ...spec import FLOAT32
from ..scaling import FLOATS, QUANTIZED, ROW_SCALE, scales
from .examples import EXAMPLES
from .family import OPERATORS, NormFamily

__all__ = [
    "ADD_LAYER_NORM",
    "ADD_LAYER_NORM_BACKWARD",
    "ADD_RMS_NORM",
    "ADD_RMS_NORM_BACKWARD",
    "DECLARATIONS",
    "LAYER_NORM",
    "LAYER_NORM_ADD",
    "LAYER_NORM_ADD_BACKWARD",
    "LAYER_NORM_BACKWARD",
    "RMS_NORM",
    "RMS_NORM_ADD",
    "RMS_NORM_ADD_BACKWARD",
    "RMS_NORM_BACKWARD",
    "TITLE",
]

# Of the module of public functions.
TITLE = "Normalization of rows: RMSNorm and LayerNorm, forward and backward, with what is fused into them."

_FAMILY = NormFamily()
_ROWS = "... heads hidden"
_COLUMNS = "hidden | heads hidden"
_NOUNS = {"hidden": "column"}


# ---- Arguments that operators share ----------------------------------------------------------------------------------

_X = Input(
    "x",
    _ROWS,
    FLOATS,
    doc="""An array on a GPU. An array on the host is copied to the current GPU, and y is copied back; without a GPU,
    the simulator computes y. The last dimension is contiguous and has 1 to 2**30 elements. The others collapse to at
    most two strides, as rows and heads of a packed qkv do.""",
)
_RESIDUAL = Input("residual", _ROWS, FLOATS, doc="Of x's shape.")
_WEIGHT = Input(
    "weight",
    _COLUMNS,
    FLOATS,
    optional=True,
    usual=True,
    doc="""One weight for all rows, or one for each head of an x of [..., heads, hidden], for up to 65535 heads. None:
    the factor is 1, whatever `weight_offset` is.""",
)
_BIAS = Input("bias", _COLUMNS, FLOATS, optional=True, doc="Of the weight's shape. None: 0.")
_WEIGHT_OFFSET = Real(
    "weight_offset",
    0.0,
    doc="Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.",
)
_NORMALIZED_SHAPE = RowShape(
    "normalized_shape",
    doc="""The last dimensions of x, which are normalized together, as in torch's layer_norm. They are viewed as one
    dimension; if x's strides do not allow that, pass ``x.contiguous()``. Weight, bias and their gradients have this
    shape, and mean and rstd have the other dimensions. None: the last dimension.""",
)
_MEAN = Result("mean", "...", (FLOAT32,), doc="Whether to return the mean as well.")
_RSTD = Result("rstd", "...", (FLOAT32,), doc="Whether to return rstd as well.")
_SCALING = (*scales("float8"), ROW_SCALE)
_LAST = (
    Margin(
        "sm_margin",
        doc="""How many multiprocessors to leave free, such as for communication at the same time. The launch has no
        more CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.""",
    ),
    Stream(
        "stream",
        doc="""An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.""",
    ),
)


# ---- Forward ---------------------------------------------------------------------------------------------------------


def _eps(norm: str, doc: str) -> Real:
    return Real("eps", 1e-6 if norm == "rms_norm" else 1e-5, minimum=0, doc=doc)


_RESIDUAL_DTYPE = OutputDType(
    "residual_dtype",
    FLOATS,
    ("residual_out",),
    doc="""The data type of s if `residual_out` is not given: float32, float16 or bfloat16, of any framework or by name;
    residual's by default. float32 begins a residual stream of float32 for inputs of 16 bits. y's type does not depend
    on it.""",
)


def _round_before_weight(adds: str) -> Flag:
    whose = "the type of s" if adds else "x's type"
    return Flag(
        "round_before_weight",
        doc=f"""Whether ``x * rstd`` is rounded to {whose} before it is multiplied by the weight, and y is rounded once
        more. If rstd is equal, y has the bits of code with these two steps, such as Hugging Face's LlamaRMSNorm. It
        changes nothing if that type is float32. The gradient ignores this rounding.""",
    )


def _forward(name: str, summary: str) -> Declaration:
    norm, adds, _ = OPERATORS[name]
    centred = norm == "layer_norm"
    types = FLOATS if adds == "after" else QUANTIZED
    positional = ["x", *(["residual"] if adds else []), "weight", *(["bias"] if centred else []), "eps"]
    quantized = "; float8_e4m3fn, float8_e5m2 or int8, which saturate" if adds != "after" else ""
    whose = "residual's" if adds == "after" else "x's"
    out = Output(
        "out",
        _ROWS,
        types,
        like="residual" if adds == "after" else "",
        doc=f"""Where y is written: x itself{" or residual itself" if adds else ""}, or an array that shares no element
        with the inputs, of any type that `out_dtype` names.""",
        returned="y",
        returned_doc=f"An array of x's framework and {whose} type, or as requested.",
    )
    arguments: list[Argument] = [
        replace(_X, doc=_X.doc if not adds else "As in `rms_norm`."),
        *([_RESIDUAL] if adds else []),
        _WEIGHT,
        replace(_BIAS, usual=centred),
        _eps(norm, f"Added to the {'variance' if centred else 'mean of squares'}; not negative."),
        _WEIGHT_OFFSET,
        out,
    ]
    if adds == "before":
        arguments.append(
            Output(
                "residual_out",
                _ROWS,
                FLOATS,
                like="residual",
                doc="""Where s is written, in any type that `residual_dtype` names. It may be x itself or residual
                itself: out=x and residual_out=residual is in place.""",
                returned="s",
                returned_doc="The sum, of residual's type or as requested.",
            )
        )
    arguments += [
        OutputDType(
            "out_dtype",
            types,
            ("out",),
            doc=f"""Of y where `out` is not given, of any framework or by name; {whose} by default. float32, float16 or
            bfloat16{quantized}.""",
        ),
        *([_RESIDUAL_DTYPE] if adds == "before" else []),
        *([_round_before_weight(adds)] if not centred and adds != "after" else []),
        *([_MEAN] if centred else []),
        _RSTD,
        *(_SCALING if adds != "after" else ()),
        *_LAST,
    ]
    statistics = ("mean", "rstd") if centred else ("rstd",)
    # What is normalized is x or, where it is added before, the sum.
    takes = {"x": "residual_out" if adds == "before" else "x", "weight": "weight"}
    before = adds == "before"
    gradient = Gradient(
        f"{norm}_backward",
        takes=takes | {name: name for name in statistics},
        numbers=("eps", "weight_offset", "sm_margin"),
        of={"out": "dy"} | ({"residual_out": "dresidual"} if before else {}),
        gives={"out": ("x", "residual") if before else ("x",), "dweight": ("weight",), "dbias": ("bias",)},
        passes={"residual": "out"} if adds == "after" else {},
    )
    return Declaration(
        name,
        _FAMILY,
        tuple(arguments),
        positional=tuple(positional),
        summary=summary,
        example=EXAMPLES[name],
        nouns=_NOUNS,
        gradient=gradient,
        selector=_NORMALIZED_SHAPE,
    )


RMS_NORM = _forward(
    "rms_norm",
    """Normalize each row by its root mean square.

``y = x * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(mean(x ** 2) + eps)`` over the last
dimension (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). Arithmetic is in float32, and y is
rounded once. Rows of numbers below 1e18 are right at every length. If the squares of larger numbers overflow, rstd
is 0 and y is the bias. An eps below 7e-46 is 0 in float32. Then numbers below 1e-18 lose digits, a row of numbers
below 1e-23 has an infinite rstd and y, and a row of zeros becomes NaN. A row's bits do not depend on the number of
rows, nor on their addresses.""",
)
LAYER_NORM = _forward(
    "layer_norm",
    """Normalize each row to mean 0 and variance 1.

``y = (x - mean) * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(variance + eps)`` over the last
dimension. The variance is that of the population (Ba, Kiros and Hinton, "Layer Normalization", 2016). It is
computed in float32 about the mean, or about a value at most 1.4 standard deviations from it, for which it is
corrected. So a row of large equal numbers with little noise keeps its accuracy. The rules of `rms_norm` for large
numbers, and for an eps of 0, hold for deviations from the mean: if their squares overflow, y is the bias. If the
sum of a row's numbers overflows, y is NaN.""",
)
ADD_RMS_NORM = _forward(
    "add_rms_norm",
    """Add a residual, then normalize: ``s = x + residual``, ``y = rms_norm(s, weight, eps)``.

s is the sum in float32, rounded once to the residual's type or to `residual_dtype`. The rounded s is normalized,
as by two calls. A pre-norm transformer passes s on as the next residual, and a post-norm one passes y on. The
gradient is that of `add_rms_norm_backward`.""",
)
ADD_LAYER_NORM = _forward(
    "add_layer_norm",
    """Add a residual, then normalize: ``s = x + residual``, ``y = layer_norm(s, weight, bias, eps)``.

Rounding is as in `add_rms_norm`. The gradient is that of `add_layer_norm_backward`.""",
)
RMS_NORM_ADD = _forward(
    "rms_norm_add",
    """Normalize, then add a residual: ``y = residual + rms_norm(x, weight, eps)``, rounded once.

Gemma 2 and OLMo 2 use this form. The gradient of residual is that of y. The other gradients are those of
`rms_norm_add_backward`.""",
)
LAYER_NORM_ADD = _forward(
    "layer_norm_add",
    """Normalize, then add a residual: ``y = residual + layer_norm(x, weight, bias, eps)``, rounded once.

Rounding is as in `rms_norm_add`. The gradients are those of `layer_norm_add_backward`.""",
)


# ---- Backward --------------------------------------------------------------------------------------------------------


_DX = Output(
    "out",
    _ROWS,
    FLOATS,
    like="x",
    doc="""Where dx is written: dy, x or dresidual itself, or an array that shares no element with them; float32,
    float16 or bfloat16.""",
    returned="dx",
    returned_doc="If `return_dx`.",
)
_DX_DTYPE = OutputDType(
    "out_dtype",
    FLOATS,
    ("out",),
    doc="Of dx where `out` is not given: float32, float16 or bfloat16; x's by default.",
)


def _backward(norm: str, summary: str) -> Declaration:
    centred = norm == "layer_norm"
    statistics = ("mean", "rstd") if centred else ("rstd",)
    beside = " Give both mean and rstd, or neither." if centred else ""
    arguments = (
        Input("dy", _ROWS, FLOATS, doc="The gradient of y; as `rms_norm` takes x."),
        Input("x", _ROWS, FLOATS, doc="What the forward call was given, of dy's shape."),
        replace(_WEIGHT, doc="The forward call's."),
        _eps(norm, "The forward call's."),
        *(
            Input(
                name,
                "...",
                (FLOAT32,),
                optional=True,
                doc=f"""The forward call's.{beside} It may have one more dimension of 1 at the end. None: computed again
                from x and eps, in the same launch.""",
            )
            for name in statistics
        ),
        Input(
            "dresidual",
            _ROWS,
            FLOATS,
            optional=True,
            doc="A gradient that is added to dx. It is not read if dx is not requested.",
        ),
        replace(_WEIGHT_OFFSET, doc="The forward call's."),
        _DX,
        _DX_DTYPE,
        OutputWanted("return_dx", ("out",), doc="Whether to compute dx."),
        Result(
            "dweight",
            _COLUMNS,
            FLOATS,
            like="weight",
            wanted_with="weight",
            doc="Whether to compute dweight; by default whether a weight is given.",
            returned_doc="Of the weight's shape; [hidden] where there is none.",
        ),
        Result(
            "dbias",
            _COLUMNS,
            FLOATS,
            like="weight",
            wanted_with="weight" if centred else "",
            doc="Whether to compute dbias" + ("; by default whether a weight is given." if centred else "."),
            returned_doc="Of the weight's shape; [hidden] where there is none.",
        ),
        OutputDType(
            "dweight_dtype",
            FLOATS,
            ("dweight", "dbias"),
            doc="Of dweight and dbias; the weight's by default, dy's where there is none.",
        ),
        *_LAST,
    )
    positional = ("dy", "x", "weight", "eps")
    name = f"{norm}_backward"
    return Declaration(
        name,
        _FAMILY,
        arguments,
        positional=positional,
        summary=summary,
        example=EXAMPLES[name],
        nouns=_NOUNS,
        selector=replace(_NORMALIZED_SHAPE, doc="The forward call's."),
    )


RMS_NORM_BACKWARD = _backward(
    "rms_norm",
    """Return the gradients of `rms_norm`: dx, dweight and dbias, or those of them that are requested.

With ``x' = x * rstd`` and ``g = dy * (weight + weight_offset)``::

    dx      = rstd * (g - x' * mean(g * x')) + dresidual     over the last dimension
    dweight = sum(dy * x')                                   over all others, except the heads
    dbias   = sum(dy)

(Zhang and Sennrich, 2019, appendix.) Arithmetic and the sums over rows are in float32, and each result is rounded
once. dweight and dbias have the same bits in every run: the device, the shape, `sm_margin` and whether all rows
are aligned to 16 bytes fix the order of their sums. A row's dx depends on no other row. A gradient that is not
requested costs nothing. For large numbers, and for an eps of 0, rstd is as in the forward. If it is 0, dx is
dresidual and the row adds nothing to dweight. If it is infinite, neither is finite. Without `rstd`, ``g * x`` is
summed before it is multiplied by rstd. If that sum overflows, dx is not finite.""",
)
LAYER_NORM_BACKWARD = _backward(
    "layer_norm",
    """Return the gradients of `layer_norm`: dx, dweight and dbias, or those of them that are requested.

With ``x' = (x - mean) * rstd`` and ``g = dy * (weight + weight_offset)``::

    dx      = rstd * (g - mean(g) - x' * mean(g * x')) + dresidual     over the last dimension
    dweight = sum(dy * x')                                             over all others, except the heads
    dbias   = sum(dy)

(Ba, Kiros and Hinton, 2016.) The other rules are those of `rms_norm_backward`.""",
)
# Of the backward of a fused add: x is called s, and what is added to dx comes from s.
_OF_ADD = {
    "x": Input("x", _ROWS, FLOATS, called="s", doc="What the forward call returned as s, of dy's shape."),
    "dresidual": Input(
        "dresidual",
        _ROWS,
        FLOATS,
        optional=True,
        called="ds",
        doc="The gradient of s. None: s is not used.",
    ),
    "out": replace(
        _DX,
        doc="Where dx is written: dy, ds or s itself, or an array that shares no element with them.",
        returned_doc="If `return_dx`; the gradient of x and of residual.",
    ),
    "out_dtype": replace(
        _DX_DTYPE, doc="Of dx where `out` is not given: float32, float16 or bfloat16; s's by default."
    ),
}
# Of the backward of a norm whose output is added to a residual.
_WITH_ADD = {
    "x": Input("x", _ROWS, FLOATS, doc="What was normalized, of dy's shape."),
    "dresidual": Input(
        "dresidual",
        _ROWS,
        FLOATS,
        optional=True,
        doc="""A gradient that is added to dx, such as that of another use of x; not that of the forward call's
        residual. It is not read if dx is not requested.""",
    ),
}
_ADD_POSITIONAL = ("dy", "dresidual", "x", "weight", "eps")
_ADD_BACKWARD = """Return the gradients of `add_{0}`, whose outputs are y and s.

x and residual have the same gradient, ``{0}_backward(dy, s, weight, eps, dresidual=ds)``: one launch adds
ds."""
_BACKWARD_ADD = """Return the gradients of `{0}_add`, ``y = residual + {0}(x)``, except residual's, which is dy.

They are those of `{0}`, by the same formulas: ``{0}_backward(dy, x, weight, eps, ...)``."""


def _of_add(backward: Declaration, norm: str) -> Declaration:
    name = f"add_{norm}_backward"
    return backward.alias(name, _ADD_BACKWARD.format(norm), _ADD_POSITIONAL, _OF_ADD, EXAMPLES[name])


def _with_add(backward: Declaration, norm: str) -> Declaration:
    name = f"{norm}_add_backward"
    return backward.alias(name, _BACKWARD_ADD.format(norm), called=_WITH_ADD, example=EXAMPLES[name])


ADD_RMS_NORM_BACKWARD = _of_add(RMS_NORM_BACKWARD, "rms_norm")
ADD_LAYER_NORM_BACKWARD = _of_add(LAYER_NORM_BACKWARD, "layer_norm")
RMS_NORM_ADD_BACKWARD = _with_add(RMS_NORM_BACKWARD, "rms_norm")
LAYER_NORM_ADD_BACKWARD = _with_add(LAYER_NORM_BACKWARD, "layer_norm")

DECLARATIONS = (
    RMS_NORM,
    LAYER_NORM,
    ADD_RMS_NORM,
    ADD_LAYER_NORM,
    RMS_NORM_ADD,
    LAYER_NORM_ADD,
    RMS_NORM_BACKWARD,
    LAYER_NORM_BACKWARD,
    ADD_RMS_NORM_BACKWARD,
    ADD_LAYER_NORM_BACKWARD,
    RMS_NORM_ADD_BACKWARD,
    LAYER_NORM_ADD_BACKWARD,
)
