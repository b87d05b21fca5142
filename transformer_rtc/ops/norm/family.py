# SPDX-License-Identifier: Apache-2.0
"""From a request of a norm to its kernels."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import ArgumentError
from ...request import LaunchRule, Request, StaticKernel
from ...spec import DeviceLimits, KernelSpec
from ..scaling import check_scales
from . import general
from .backward import BackwardSpec, FinishSpec, finish_columns, finish_rule
from .candidates import backward_candidates, forward_candidates
from .config import BackwardRow, ForwardRow, NormConfig
from .heuristics import configure, configure_backward, configure_wide_backward, expected_cost, forward_cost
from .kernels import ForwardSpec

__all__ = ["OPERATORS", "NormFamily", "NormOperator", "backward_spec", "forward_spec"]


class NormOperator(NamedTuple):
    """What an operator computes.

    Attributes
    ----------
    norm : str
        ``"rms_norm"`` or ``"layer_norm"``.
    adds : str
        ``"before"`` or ``"after"``: where the forward adds a residual; else empty.
    backward : bool
        Whether it is the backward.
    """

    norm: str
    adds: str = ""
    backward: bool = False


OPERATORS = {
    "rms_norm": NormOperator("rms_norm"),
    "layer_norm": NormOperator("layer_norm"),
    "add_rms_norm": NormOperator("rms_norm", "before"),
    "add_layer_norm": NormOperator("layer_norm", "before"),
    "rms_norm_add": NormOperator("rms_norm", "after"),
    "layer_norm_add": NormOperator("layer_norm", "after"),
    "rms_norm_backward": NormOperator("rms_norm", backward=True),
    "layer_norm_backward": NormOperator("layer_norm", backward=True),
}


class NormFamily:
    """The family of RMSNorm and LayerNorm, as `Family` describes one."""

    name = "norms"

    def check(self, request: Request) -> None:
        """Refuse what types and presence alone show to be wrong."""
        dtypes = request.dtypes

        def refuse(what: str) -> None:
            raise ArgumentError(f"{request.operator}: {what}")

        if OPERATORS[request.operator].backward:
            if "mean" in dtypes and (dtypes["mean"] is None) != (dtypes["rstd"] is None):
                missing = "mean" if dtypes["mean"] is None else "rstd"
                refuse(f"mean and rstd must be given together, or neither; {missing} is None")
            return
        check_scales(request)

    def case(self, request: Request) -> tuple[object, ...]:
        return backward_row(request).case if OPERATORS[request.operator].backward else forward_row(request).case

    def configurations(self, request: Request, limits: DeviceLimits) -> tuple[NormConfig, ...]:
        self.check(request)
        if not OPERATORS[request.operator].backward:
            forward = forward_row(request)
            of_all = sorted(forward_candidates(forward, limits), key=lambda one: forward_cost(one, forward, limits))
            return tuple(dict.fromkeys((configure(forward, limits), *of_all)))
        row, found = backward_row(request), _configure_backward(request, limits)
        others = backward_candidates(row, limits) if found.stages else ()
        if request.per_head:
            others = (config for config in others if config.exchange != "grid")
        return tuple(dict.fromkeys((found, *sorted(others, key=lambda one: expected_cost(one, row, limits)))))

    def specialise(
        self, request: Request, limits: DeviceLimits, config: NormConfig | None = None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        self.check(request)
        if OPERATORS[request.operator].backward:
            return self._backward(request, limits, config)
        spec = forward_spec(request, limits, config)
        return ((spec, spec.launch_rule),)

    def _backward(
        self, request: Request, limits: DeviceLimits, config: NormConfig | None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        spec = backward_spec(request, limits, config)
        dweight, dbias = request.dtypes["dweight"], request.dtypes["dbias"]
        first = (spec, spec.launch_rule)
        if dweight is None and dbias is None:
            return (first,)
        finish = FinishSpec(dweight, dbias, spec.rows_per_group, finish_columns(request.columns))
        return first, (finish, finish_rule(finish, request.columns, spec.per_head, limits))

    def static(self, request: Request) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        self.check(request)
        arrays = tuple(request.dtypes)
        return tuple(
            (StaticKernel(symbol, general.params_of(symbol, arrays)), rule) for symbol, rule in self._general(request)
        )

    def _general(self, request: Request) -> tuple[tuple[str, LaunchRule], ...]:
        operator = OPERATORS[request.operator]
        return general.launches(operator.norm, operator.backward, request)

    def static_program(self) -> str:
        return general.program()


def forward_row(request: Request) -> ForwardRow:
    """Return what the configuration of a forward operator's kernel depends on."""
    dtypes = request.dtypes
    norm, adds, _ = OPERATORS[request.operator]
    x, out, residual = dtypes["x"], dtypes["out"], dtypes.get("residual")
    assert x is not None and out is not None
    return ForwardRow(
        norm,
        request.columns,
        (x, residual) if residual else (x,),
        tuple(dtype for dtype in (dtypes["weight"], dtypes["bias"]) if dtype),
        normalized=residual if residual and adds == "before" else x,
        output=out,
        # What a persistent kernel keeps of the weight is for all rows.
        several=not request.per_head,
        row_scaled=dtypes.get("row_scale") is not None,
        sum=dtypes.get("residual_out"),
    )


def forward_spec(request: Request, limits: DeviceLimits, config: NormConfig | None = None) -> ForwardSpec:
    """Return the kernel of a forward operator, by a configuration or by the heuristics'."""
    dtypes = request.dtypes
    norm, adds, _ = OPERATORS[request.operator]
    x, out = dtypes["x"], dtypes["out"]
    assert x is not None and out is not None
    config = config or configure(forward_row(request), limits)
    return ForwardSpec(
        norm=norm,
        input=x,
        weight=dtypes["weight"],
        bias=dtypes["bias"],
        residual=dtypes.get("residual"),
        adds=adds,
        sum=dtypes.get("residual_out"),
        rounds=general.rounds(request),
        output=out,
        stores=tuple(
            name for name in ("mean", "rstd", "amax", "scale_inv", "row_scale") if dtypes.get(name) is not None
        ),
        scale=dtypes.get("scale") is not None,
        per_head=request.per_head,
        # Where they do not anyway.
        repeats=request.margin and config.stages == 0 and config.exchange != "grid",
        hidden=request.columns,
        config=config,
        unaligned=config.is_unaligned(request.columns, request.unaligned),
    )


def backward_row(request: Request) -> BackwardRow:
    """Return what the configuration of a backward operator's first kernel depends on."""
    dtypes = request.dtypes
    dy, x, out = dtypes["dy"], dtypes["x"], dtypes["out"]
    assert dy is not None and x is not None
    residual = dtypes["dresidual"] if out else None
    rows = (*((x,) if out or dtypes["dweight"] else ()), dy, *((residual,) if residual else ()))
    norm = OPERATORS[request.operator].norm
    return BackwardRow(norm, request.columns, rows, out, dtypes["rstd"] is not None, request.per_head)


def _configure_backward(request: Request, limits: DeviceLimits) -> NormConfig:
    row = backward_row(request)
    config = configure_backward(row, limits)
    # All groups of a cooperative grid are resident together, and may be fewer than there are heads.
    if config is None or (request.per_head and config.exchange == "grid"):
        return configure_wide_backward(row)
    return config


def backward_spec(request: Request, limits: DeviceLimits, config: NormConfig | None = None) -> BackwardSpec:
    """Return the first kernel of a backward operator, by a configuration or by the heuristics'."""
    dtypes = request.dtypes
    dy, x, out = dtypes["dy"], dtypes["x"], dtypes["out"]
    assert dy is not None and x is not None
    config = config or _configure_backward(request, limits)
    return BackwardSpec(
        norm=OPERATORS[request.operator].norm,
        gradient=dy,
        input=x,
        weight=dtypes["weight"] if out else None,
        residual=dtypes["dresidual"] if out else None,
        output=out,
        dweight=dtypes["dweight"] is not None,
        dbias=dtypes["dbias"] is not None,
        statistics=dtypes["rstd"] is not None,
        per_head=request.per_head,
        hidden=request.columns,
        config=config,
        unaligned=config.is_unaligned(request.columns, request.unaligned),
    )
