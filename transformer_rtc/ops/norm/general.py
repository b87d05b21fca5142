# SPDX-License-Identifier: Apache-2.0
"""The general kernels of norms, for every shape and type. They are compiled when the package is built."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ...request import LaunchRule, Request
from ...spec import FLOAT32, Field, Params
from ..general import ROW_SHAPES, GeneralKernel, GeneralShape, general_program, of_arrays, shape_of
from ..programs import GEOMETRY, HEADS, dtypes, entry_rule, literal, pointers, row_fields
from .backward import FINISH_BOUNDS, FINISH_FIELDS, FINISH_THREADS, partial_bytes
from .kernels import REALS

__all__ = ["kernels", "launches", "params_of", "program", "rounds"]

_SOURCE = "norm_general.cu"


# Backward, a warp is faster for many rows of 8 KB, too, but takes two and a half times as long for one. Few long rows
# keep 1024 threads busy, where many are a little faster by 512.
_SHAPES = {
    "forward": ROW_SHAPES,
    "backward": (GeneralShape("narrow", 4 << 10, 32, 8), GeneralShape("wide", None, 1024, 1)),
}
# Rows that a backward CTA takes together; down to two where there are few, whose partial sums take no more memory than
# the rows in float32 would: 65 rows have 33 CTAs then, instead of 9.
_BATCH = 8
_LEAST_BATCH = 2

_SIZES = (*GEOMETRY, *HEADS, *REALS, Field("hidden", "int32", "columns"))
_FORWARD_ROWS = ("x", "residual", "out", "residual_out")
_FORWARD_COLUMNS = ("weight", "bias")
_FORWARD = Params(
    (
        *pointers(*_FORWARD_ROWS, *_FORWARD_COLUMNS, "mean", "rstd", "scale", "amax", "scale_inv", "row_scale"),
        *row_fields(*_FORWARD_ROWS),
        *dtypes(*_FORWARD_ROWS),
        *_SIZES,
        *dtypes(*_FORWARD_COLUMNS),
    )
)
_BACKWARD_ROWS = ("dy", "x", "dresidual", "dx")
_BACKWARD = Params(
    (
        *pointers(*_BACKWARD_ROWS, "weight", "mean", "rstd"),
        Field("partials", "pointer", "partials"),
        *row_fields(*_BACKWARD_ROWS),
        *dtypes(*_BACKWARD_ROWS),
        *_SIZES,
        *dtypes("weight", "dweight", "dbias"),
    )
)
_FINISH_RULE = entry_rule(threads=FINISH_THREADS, columns_per_cta=32, per="heads")
_FINISH = Params((*pointers("dweight", "dbias"), *FINISH_FIELDS, *dtypes("dweight", "dbias")))


@cache
def kernels() -> dict[str, GeneralKernel]:
    """Return all of them, by their symbols."""
    found = {}
    for norm in ("rms_norm", "layer_norm"):
        centred = literal(norm == "layer_norm")
        for shape in _SHAPES["forward"]:
            template = f"norm_forward_rows<{centred}, {shape.threads}, {shape.rows}>"
            found[f"{norm}_forward_{shape.name}"] = GeneralKernel(_FORWARD, shape.bounds, template)
        for shape in _SHAPES["backward"]:
            for heads in (False, True):
                # A weight for each head is rarer, and as much to compile.
                typed = "0" if heads else "trtc::half_rows | trtc::float_rows"
                how = f"{_least_batch(heads)}, {_BATCH}, {literal(heads)}, {typed}"
                template = f"norm_backward_rows<{centred}, {shape.threads}, {shape.rows}, {how}>"
                found[f"{norm}_backward_{shape.name}{_of_heads(heads)}"] = GeneralKernel(
                    _BACKWARD, shape.bounds, template
                )
    for shape in _SHAPES["forward"]:
        template = f"norm_forward_rows<false, {shape.threads}, {shape.rows}, true>"
        found[f"rms_norm_forward_{shape.name}_rounds"] = GeneralKernel(_FORWARD, shape.bounds, template)
    for heads, per_group in ((False, 1), (True, _BATCH)):
        found[f"norm_backward_finish{_of_heads(heads)}"] = GeneralKernel(
            _FINISH, FINISH_BOUNDS, f"norm_backward_finish_rows<{per_group}>"
        )
    return found


def _least_batch(heads: bool) -> int:
    return _BATCH if heads else _LEAST_BATCH


def _of_heads(heads: bool) -> str:
    return "_heads" if heads else ""


def program() -> str:
    """Return the text of the module of all of them."""
    return general_program(_SOURCE, kernels())


def params_of(symbol: str, arrays: Sequence[str]) -> Params:
    """Return a kernel's parameters as an operator with these arrays fills them."""
    return Params(of_arrays(kernels()[symbol].params.fields, arrays))


def rounds(request: Request) -> bool:
    """Return whether a forward's kernel rounds x * rstd before the weight: not where that changes no bit."""
    dtypes = request.dtypes
    normalized = dtypes.get("residual_out") or dtypes["x"]
    alone = dtypes["weight"] is None and dtypes["bias"] is None and dtypes["out"] is normalized
    return "round_before_weight" in request.flags and normalized is not FLOAT32 and not alone


def launches(norm: str, backward: bool, request: Request) -> tuple[tuple[str, LaunchRule], ...]:
    """Return the kernels of a call, and how they are launched."""
    shapes = _SHAPES["backward" if backward else "forward"]
    # What forward reads again; backward's shapes are by x, beside which it reads dy.
    read = request.dtypes.get("residual_out") or request.dtypes["x"]
    shape = shape_of(request.columns, (read,), shapes)
    threads = shape.threads * shape.rows
    if not backward:
        symbol = f"{norm}_forward_{shape.name}" + ("_rounds" if rounds(request) else "")
        return ((symbol, entry_rule(threads, shape.rows, persistent=request.margin)),)
    heads = _of_heads(request.per_head)
    gradients = sum(request.dtypes[name] is not None for name in ("dweight", "dbias"))
    partials = partial_bytes(request.columns, gradients, _BATCH if request.per_head else 1)
    rows = _least_batch(request.per_head)
    rule = entry_rule(threads, rows, partial_bytes=partials, persistent=True, whole="heads" if request.per_head else "")
    first = (f"{norm}_backward_{shape.name}{heads}", rule)
    return (first, (f"norm_backward_finish{heads}", _FINISH_RULE)) if gradients else (first,)
