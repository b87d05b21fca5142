# SPDX-License-Identifier: Apache-2.0
"""The general kernels of activations, for every length and type. They are compiled when the package is built."""

from __future__ import annotations

from collections.abc import Sequence

from ...request import LaunchRule, StaticKernel
from ...spec import Field, Params
from ..general import GeneralKernel, general_program, of_arrays
from ..programs import GEOMETRY, dtypes, entry_rule, pointers, row_fields
from ..tile import COLUMNS
from .kernels import ActivationSpec

__all__ = ["KERNELS", "launch", "program"]

_THREADS = 256
_ELEMENTS = 4 * _THREADS
# What a call computes, by numbers.
_CHOSEN = (Field("function", "int32"), Field("gated", "int32"))
_FORWARD_ROWS, _BACKWARD_ROWS = ("x", "up", "out"), ("dy", "x", "up", "dx", "dup")
_FORWARD = Params(
    (
        *pointers(*_FORWARD_ROWS, "scale", "amax", "scale_inv", "row_scale"),
        *row_fields(*_FORWARD_ROWS),
        *dtypes(*_FORWARD_ROWS),
        *GEOMETRY,
        *COLUMNS,
        *_CHOSEN,
    )
)
_BACKWARD = Params(
    (*pointers(*_BACKWARD_ROWS), *row_fields(*_BACKWARD_ROWS), *dtypes(*_BACKWARD_ROWS), *GEOMETRY, *COLUMNS, *_CHOSEN)
)
# As trtc::Function numbers them.
_FUNCTIONS = ("gelu", "gelu_tanh", "silu", "relu_squared")

KERNELS = {
    f"activation_{kernel}": GeneralKernel(params, _THREADS, f"activation_{kernel}_any")
    for kernel, params in (("forward", _FORWARD), ("backward", _BACKWARD), ("row_scaled", _FORWARD))
}


def program() -> str:
    """Return the text of the module of all of them."""
    return general_program("activation_general.cu", KERNELS)


def launch(spec: ActivationSpec, arrays: Sequence[str]) -> tuple[StaticKernel, LaunchRule]:
    """Return the general kernel of a call, as an operator with these arrays fills it, and how it is launched."""
    symbol = f"activation_{spec.kernel}"
    constants = {"function": str(_FUNCTIONS.index(spec.function)), "gated": str(int(spec.gated))}
    fields = (field._replace(source=constants.get(field.name, field.source)) for field in KERNELS[symbol].params.fields)
    elements = 0 if spec.kernel == "row_scaled" else _ELEMENTS
    kernel = StaticKernel(symbol, Params(of_arrays(tuple(fields), arrays)))
    return kernel, entry_rule(_THREADS, elements_per_cta=elements)
