# SPDX-License-Identifier: Apache-2.0
"""From a request of softmax or its logarithm to its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...errors import ArgumentError
from ...request import LaunchRule, Request, StaticKernel
from ...spec import BFLOAT16, BOOL, FLOAT16, FLOAT32, UINT8, DeviceLimits, KernelSpec
from . import general
from .candidates import candidates
from .config import SoftmaxConfig, SoftmaxRow
from .heuristics import configure, cost
from .kernels import MaskGradientSpec, SinkGradientSpec, SoftmaxBackwardSpec, SoftmaxForwardSpec

__all__ = ["OPERATORS", "SoftmaxFamily", "SoftmaxOperator", "row_of"]

_FLOATS = (FLOAT32, FLOAT16, BFLOAT16)


class SoftmaxOperator(NamedTuple):
    """What an operator computes.

    Attributes
    ----------
    logarithm : bool
        Whether it is the logarithm of softmax.
    backward : bool
        Whether it is the backward.
    """

    logarithm: bool = False
    backward: bool = False


OPERATORS = {
    "softmax": SoftmaxOperator(),
    "log_softmax": SoftmaxOperator(logarithm=True),
    "softmax_backward": SoftmaxOperator(backward=True),
    "log_softmax_backward": SoftmaxOperator(logarithm=True, backward=True),
}


class SoftmaxFamily:
    """The family of softmax and its logarithm, as `Family` describes one."""

    name = "softmax"

    def check(self, request: Request) -> None:
        """Refuse what types and presence alone show to be wrong."""
        dtypes = request.dtypes
        if dtypes.get("dsink") and not (dtypes["sink"] and dtypes["lse"]):
            missing = "sink" if not dtypes["sink"] else "lse"
            raise ArgumentError(f"{request.operator}: return_dsink needs sink and lse; {missing} is None")
        mask = dtypes.get("mask")
        if OPERATORS[request.operator].backward:
            if dtypes.get("dmask") and mask is None:
                raise ArgumentError(f"{request.operator}: return_dmask needs mask; it is None")
            for name in ("mask", "dmask"):
                dtype = dtypes.get(name)
                if dtype and dtype not in _FLOATS:
                    raise ArgumentError(
                        f"{request.operator}: only a mask of floats has a gradient; {name} is {dtype.name}"
                    )
        if "mask_keeps" in request.flags and (mask is None or mask in _FLOATS):
            given = "there is none" if mask is None else f"it is {mask.name}, and is added"
            raise ArgumentError(f"{request.operator}: mask_keeps needs a mask of bool or uint8; {given}")

    def case(self, request: Request) -> tuple[object, ...]:
        return row_of(request).case

    def configurations(self, request: Request, limits: DeviceLimits) -> tuple[SoftmaxConfig, ...]:
        self.check(request)
        row = row_of(request)
        found = configure(row, limits)
        others = () if found.chunked else candidates(row, limits)
        return tuple(dict.fromkeys((found, *sorted(others, key=lambda config: cost(config, row, limits)))))

    def specialise(
        self, request: Request, limits: DeviceLimits, config: SoftmaxConfig | None = None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        self.check(request)
        row = row_of(request)
        config = config or configure(row, limits)
        spec = _spec(request, config)
        rule = spec.launch_rule._replace(
            threads=config.threads, dynamic_shared_memory=config.shared_memory(request.columns, row.staged)
        )
        return (spec, rule), *((spec, spec.launch_rule) for spec in _gradients(request, limits))

    def static(self, request: Request) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        self.check(request)
        arrays = tuple(request.dtypes)
        return tuple(
            (StaticKernel(symbol, general.params_of(symbol, arrays)), rule)
            for symbol, rule in general.launches(*OPERATORS[request.operator], request)
        )

    def static_program(self) -> str:
        return general.program()


def row_of(request: Request) -> SoftmaxRow:
    """Return what a kernel's configuration depends on."""
    dtypes = request.dtypes
    causal = "causal" in request.flags
    out, mask = dtypes["out"], dtypes.get("mask")
    assert out is not None
    if OPERATORS[request.operator].backward:
        dy, y = dtypes["dy"], dtypes["y"]
        assert dy is not None and y is not None
        sums = bool(dtypes.get("dsink") or dtypes.get("dmask"))
        return SoftmaxRow(request.columns, (dy, y, out), (y, dy), backward=True, causal=causal, sums=sums)
    x = dtypes["x"]
    assert x is not None
    staged = (x, mask) if mask else (x,)
    return SoftmaxRow(request.columns, (x, out), staged, causal=causal, masked=mask is not None)


def _spec(request: Request, config: SoftmaxConfig) -> SoftmaxForwardSpec | SoftmaxBackwardSpec:
    """Return the kernel of a call that divides rows so."""
    dtypes = request.dtypes
    logarithm, backward = OPERATORS[request.operator]
    causal = "causal" in request.flags
    out = dtypes["out"]
    assert out is not None
    if backward:
        dy, y = dtypes["dy"], dtypes["y"]
        assert dy is not None and y is not None
        sums = bool(dtypes.get("dsink") or dtypes.get("dmask"))
        return SoftmaxBackwardSpec(dy, y, out, logarithm, causal, sums, config.of_kernel, request.unaligned)
    x, mask = dtypes["x"], dtypes["mask"]
    assert x is not None
    return SoftmaxForwardSpec(
        input=x,
        output=out,
        logarithm=logarithm,
        causal=causal,
        mask=BOOL if mask is UINT8 else mask,
        keeps="mask_keeps" in request.flags,
        sink=dtypes["sink"],
        lse=dtypes["lse"] is not None,
        config=config.of_kernel,
        unaligned=request.unaligned,
    )


def _gradients(request: Request, limits: DeviceLimits) -> Iterator[SinkGradientSpec | MaskGradientSpec]:
    """Yield the kernels that follow a backward's first one, in the order of their results."""
    dtypes = request.dtypes
    sink, dsink, dmask = (dtypes.get(name) for name in ("sink", "dsink", "dmask"))
    if dsink:
        assert sink is not None
        yield SinkGradientSpec(sink, dsink)
    if dmask:
        dy, y = dtypes["dy"], dtypes["y"]
        assert dy is not None and y is not None
        logarithm = OPERATORS[request.operator].logarithm
        clusters = min(limits.max_cluster_size, limits.max_ctas_per_row) >= MaskGradientSpec.CTAS
        yield MaskGradientSpec(dy, y, dmask, logarithm, "causal" in request.flags, clusters)
