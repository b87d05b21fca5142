# SPDX-License-Identifier: Apache-2.0
"""The general kernels of softmax, for every length and type. They are compiled when the package is built."""

from __future__ import annotations

from collections.abc import Sequence

from ...request import LaunchRule, Request
from ...spec import Field, Params
from ..general import ROW_SHAPES, GeneralKernel, general_program, of_arrays, shape_of
from ..programs import GEOMETRY, dtypes, entry_rule, literal, pointers, row_fields
from .kernels import (
    CAUSAL,
    COLUMNS,
    MASK,
    MASK_GRADIENT_ARRAYS,
    MASK_GRADIENT_FIELDS,
    MASK_GRADIENT_RULE,
    MATRICES,
    QUERIES,
    ROW_BYTES,
    ROW_SUMS,
    SCALE,
    SINK_GRADIENT_FIELDS,
    SINK_GRADIENT_RULE,
)

__all__ = ["KERNELS", "launches", "params_of", "program"]

_SOURCE = "softmax_general.cu"

_IS_CAUSAL = Field("causal", "int32", "causal")
_FORWARD = Params(
    (
        *pointers("x", "out", "mask", "sink", "lse"),
        *row_fields("x", "out"),
        *dtypes("x", "out", "mask", "sink"),
        *GEOMETRY,
        *COLUMNS,
        *SCALE,
        *QUERIES,
        *CAUSAL,
        *MATRICES,
        *MASK,
        Field("mask_keeps", "int32", "mask_keeps"),
        _IS_CAUSAL,
    )
)
_BACKWARD = Params(
    (
        *pointers("y", "dy", "dx"),
        *ROW_SUMS,
        *row_fields("y", "dy", "dx"),
        *dtypes("y", "dy", "dx"),
        *GEOMETRY,
        *COLUMNS,
        *SCALE,
        *QUERIES,
        *CAUSAL,
        _IS_CAUSAL,
    )
)
_SINK_GRADIENT = Params((*SINK_GRADIENT_FIELDS, *dtypes("sink", "dsink")))
_MASK_GRADIENT = Params(
    (*MASK_GRADIENT_ARRAYS, *dtypes("y", "dy", "dmask"), *MASK_GRADIENT_FIELDS, *CAUSAL, _IS_CAUSAL)
)


def _kernels() -> dict[str, GeneralKernel]:
    found = {}
    for shape in ROW_SHAPES:
        for name, logarithm in (("softmax", False), ("log_softmax", True)):
            for direction, params in (("forward", _FORWARD), ("backward", _BACKWARD)):
                template = f"softmax_{direction}_rows<{literal(logarithm)}, {shape.threads}, {shape.rows}>"
                found[f"{name}_{direction}_{shape.name}"] = GeneralKernel(params, shape.bounds, template)
    for name, logarithm in (("softmax", False), ("log_softmax", True)):
        template = f"softmax_backward_any_mask_gradient<{literal(logarithm)}>"
        found[f"{name}_backward_mask_gradient"] = GeneralKernel(_MASK_GRADIENT, MASK_GRADIENT_RULE.threads, template)
    found["softmax_backward_sink_gradient"] = GeneralKernel(
        _SINK_GRADIENT, SINK_GRADIENT_RULE.threads, "softmax_backward_any_sink_gradient"
    )
    return found


KERNELS = _kernels()


def program() -> str:
    """Return the text of the module of all of them."""
    return general_program(_SOURCE, KERNELS)


def params_of(symbol: str, arrays: Sequence[str]) -> Params:
    """Return a kernel's parameters as an operator with these arrays fills them."""
    return Params(of_arrays(KERNELS[symbol].params.fields, arrays))


def launches(logarithm: bool, backward: bool, request: Request) -> tuple[tuple[str, LaunchRule], ...]:
    """Return the kernels of a call, and how they are launched."""
    read = (request.dtypes.get(array) for array in ("x", "y", "dy"))
    shape = shape_of(request.columns, read, ROW_SHAPES)
    name = "log_softmax" if logarithm else "softmax"
    first = f"{name}_{'backward' if backward else 'forward'}_{shape.name}"
    followed = []
    if request.dtypes.get("dsink"):
        followed.append(("softmax_backward_sink_gradient", SINK_GRADIENT_RULE))
    if request.dtypes.get("dmask"):
        followed.append((f"{name}_backward_mask_gradient", MASK_GRADIENT_RULE))
    rule = entry_rule(shape.threads * shape.rows, shape.rows, row_bytes=ROW_BYTES if followed else 0)
    return (first, rule), *followed
