"""The general kernels of activations, for every length and type. They are compiled when the package is built."""

from __future__ import annotations

from collections.abc import Sequence

from ...request import LaunchRule
from ...spec import Params
from ..general import GeneralKernel, general_program, of_arrays
from ..programs import GEOMETRY, dtypes, entry_rule, literal, pointers, row_fields
from .kernels import COLUMNS, ActivationSpec

__all__ = ["KERNELS", "launch", "params_of", "program"]

_THREADS = 256
_ELEMENTS = 4 * _THREADS
_FORWARD_ROWS, _BACKWARD_ROWS = ("x", "up", "out"), ("dy", "x", "up", "dx", "dup")
_FORWARD = Params(
    (
        *pointers(*_FORWARD_ROWS, "scale", "amax", "scale_inv", "row_scale"),
        *row_fields(*_FORWARD_ROWS),
        *dtypes(*_FORWARD_ROWS),
        *GEOMETRY,
        *COLUMNS,
    )
)
_BACKWARD = Params(
    (*pointers(*_BACKWARD_ROWS), *row_fields(*_BACKWARD_ROWS), *dtypes(*_BACKWARD_ROWS), *GEOMETRY, *COLUMNS)
)
# Functions, and whether they have a second factor.
_KINDS = (("gelu", 2), ("gelu_tanh", 2), ("silu", 2), ("relu_squared", 1))


def _symbol(function: str, gated: bool, kernel: str) -> str:
    return f"{function}{'_and_mul' if gated else ''}_{kernel}"


KERNELS = {
    _symbol(function, gated, kernel): GeneralKernel(
        params, _THREADS, f"activation_{kernel}_any<trtc::Function::{function}, {literal(gated)}>"
    )
    for function, kinds in _KINDS
    for gated in (False, True)[:kinds]
    for kernel, params in (("forward", _FORWARD), ("backward", _BACKWARD), ("row_scaled", _FORWARD))
    if gated or kernel != "row_scaled"
}


def program() -> str:
    """Return the text of the module of all of them."""
    return general_program("activation_general.cu", KERNELS)


def params_of(symbol: str, arrays: Sequence[str]) -> Params:
    """Return a kernel's parameters as an operator with these arrays fills them."""
    return Params(of_arrays(KERNELS[symbol].params.fields, arrays))


def launch(spec: ActivationSpec) -> tuple[str, LaunchRule]:
    """Return the general kernel of a call, and how it is launched."""
    elements = 0 if spec.kernel == "row_scaled" else _ELEMENTS
    return _symbol(spec.function, spec.gated, spec.kernel), entry_rule(_THREADS, elements_per_cta=elements)
