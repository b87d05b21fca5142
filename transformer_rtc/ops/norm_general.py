"""The general kernels of norms, for every shape and type.

They are compiled when the package is built, or for rows that, with what belongs to them, do not fit on the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dispatch import LaunchRule, Request
from ..spec import Field, KernelSpec, Params
from .norm_kernels import FINISH_FIELDS, FINISH_THREADS, REALS, partial_bytes
from .programs import (
    GEOMETRY,
    HEADS,
    MINIMAL,
    GeneralKernel,
    dtypes,
    general_program,
    literal,
    of_arrays,
    pointers,
    row_fields,
)

__all__ = ["GeneralSpec", "launches", "params_of", "program"]

_SOURCE = "norm_general.cu"
# Rows of at most this many columns are held by a warp.
_NARROW = 1024
# Threads of a row, and rows of a CTA.
_SHAPES = {"narrow": (32, 8), "wide": (512, 1)}
# Rows that a backward CTA takes together.
_BATCH = 8

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
_FINISH_RULE = LaunchRule(threads=FINISH_THREADS, columns_per_cta=32)
_FINISH = Params((*pointers("dweight", "dbias"), *FINISH_FIELDS, *dtypes("dweight", "dbias")))


def _kernels() -> dict[str, GeneralKernel]:
    found = {}
    for shape, (threads, rows) in _SHAPES.items():
        for norm in ("rms_norm", "layer_norm"):
            centred = literal(norm == "layer_norm")
            # LayerNorm with as few registers as the compiler takes otherwise spills 72 bytes for sm_100, and is no
            # faster (H200, 16384 x 4096: 539 us, and 532 with those of one CTA; RMSNorm 268, and 417).
            bounds = f"{threads * rows}, 1" if norm == "layer_norm" else threads * rows
            found[f"{norm}_forward_{shape}"] = GeneralKernel(
                _FORWARD, bounds, f"norm_forward_rows<{centred}, {threads}, {rows}>"
            )
            for heads in (False, True):
                found[f"{norm}_backward_{shape}{_of_heads(heads)}"] = GeneralKernel(
                    _BACKWARD,
                    threads * rows,
                    f"norm_backward_rows<{centred}, {threads}, {rows}, {_BATCH}, {literal(heads)}>",
                )
    for heads, per_group in ((False, 1), (True, _BATCH)):
        found[f"norm_backward_finish{_of_heads(heads)}"] = GeneralKernel(
            _FINISH, FINISH_THREADS, f"norm_backward_finish_rows<{per_group}>"
        )
    return found


def _of_heads(heads: bool) -> str:
    return "_heads" if heads else ""


_KERNELS = _kernels()


def program() -> str:
    """Return the text of the module of all of them."""
    return general_program(_SOURCE, _KERNELS)


def params_of(symbol: str, arrays: Sequence[str]) -> Params:
    """Return a kernel's parameters as an operator with these arrays fills them."""
    return Params(of_arrays(_KERNELS[symbol].params.fields, arrays))


def launches(norm: str, request: Request) -> tuple[tuple[str, LaunchRule], ...]:
    """Return the kernels of a call, and how they are launched."""
    shape = "narrow" if request.columns <= _NARROW else "wide"
    threads, rows = _SHAPES[shape]
    if "backward" not in request.operator:
        return ((f"{norm}_forward_{shape}", LaunchRule(threads * rows, rows, persistent=request.margin)),)
    heads = _of_heads(request.per_head)
    gradients = sum(request.dtypes[name] is not None for name in ("dweight", "dbias"))
    partials = partial_bytes(request.columns, gradients, _BATCH if request.per_head else 1)
    rule = LaunchRule(threads * rows, _BATCH, partial_bytes=partials, persistent=True, whole_heads=request.per_head)
    first = (f"{norm}_backward_{shape}{heads}", rule)
    return (first, (f"norm_backward_finish{heads}", _FINISH_RULE)) if gradients else (first,)


@dataclass(frozen=True)
class GeneralSpec(KernelSpec):
    """A general kernel compiled at run time.

    Attributes
    ----------
    name : str
        The kernel's.
    arrays : tuple of str
        What its operator has.
    """

    name: str
    arrays: tuple[str, ...]

    @property
    def symbol(self) -> str:
        return self.name

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def params(self) -> Params:
        return params_of(self.name, self.arrays)

    @property
    def program(self) -> str:
        return general_program(_SOURCE, {self.name: _KERNELS[self.name]})
