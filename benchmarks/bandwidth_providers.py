# SPDX-License-Identifier: Apache-2.0
"""What bandwidth.py measures: ours, the peers and the copies.

A provider takes torch and a case, and returns a function from arrays to a call, or raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import common
import softmax_cases
from bandwidth_arrays import DEVICE, EPS, Arrays
from bandwidth_cases import BYTES, FORMS, Case

import transformer_rtc
from transformer_rtc import LaunchConfig

OURS = "transformer_rtc"
STATIC = "static"
TORCH = "torch"
COMPILED = "torch.compile"
TE_KERNELS = "TE kernels"  # those of a checkout; "TE" is the modules of the installed package
COPY = "copy by "  # the names of copies begin with it

Call = Callable[[], Any]
Bind = Callable[[Arrays], Call]
Maker = Callable[[Any, Case], Bind]


class UnsupportedError(Exception):
    """A provider does not have the operator."""


def ours(torch: Any, case: Case) -> Bind:
    function = getattr(transformer_rtc, case.operator)

    def bind(arrays: Arrays) -> Call:
        if case.does.norm == "softmax":
            return softmax_cases.ours(case, arrays.softmax)
        if not case.backward:
            rows = (arrays.x,) if arrays.other is None else (arrays.x, arrays.other)
            options: dict[str, Any] = {"out_dtype": getattr(torch, case.out)} if case.form else {}
            if case.by_row:
                options["row_scaling"] = True
            elif BYTES[case.out] == 1:
                options |= {name: torch.ones(1, device=DEVICE) for name in ("scale", "amax")}
            return functools.partial(function, *rows, *arrays.columns, EPS, **options)
        statistics = {"rstd": arrays.rstd} if arrays.mean is None else {"mean": arrays.mean, "rstd": arrays.rstd}
        if arrays.dresidual is not None:
            statistics["dresidual"] = arrays.dresidual
        return functools.partial(function, arrays.other, arrays.x, arrays.weight, EPS, **statistics)

    return bind


def ours_static(torch: Any, case: Case) -> Bind:
    def bind(arrays: Arrays) -> Call:
        call = ours(torch, case)(arrays)

        def using_static() -> Any:
            with transformer_rtc.using("static"):
                return call()

        return using_static

    return bind


def in_torch(torch: Any, case: Case) -> Callable[..., Any]:
    """Return the operator, or the one whose gradient it is, in torch's operators."""
    norm = getattr(torch.nn.functional, case.does.norm)
    shape = (case.hidden,)

    def plain(x: Any, *columns: Any) -> Any:
        return norm(x, shape, *columns, EPS)

    def per_head(x: Any, weight: Any) -> Any:
        return norm(x, shape, None, EPS) * weight

    def add_before(x: Any, residual: Any, *columns: Any) -> Any:
        total = x + residual
        return norm(total, shape, *columns, EPS), total

    def add_after(x: Any, residual: Any, *columns: Any) -> Any:
        return residual + norm(x, shape, *columns, EPS)

    def to_form(x: Any, *columns: Any) -> Any:
        out = getattr(torch, case.out)
        y = plain(x, *columns).float()
        if BYTES[case.out] > 1:
            return y.to(out)
        largest = 127.0 if case.out == "int8" else torch.finfo(out).max
        amax = y.abs().amax(-1, keepdim=True) if case.by_row else y.abs().amax()
        if not case.by_row:
            return y.clamp(-largest, largest).to(out)  # by a scale of 1; amax is for the next call
        y = y * (largest / amax)
        return (y.round() if case.out == "int8" else y).to(out), (amax / largest).squeeze(-1)

    if case.per_head:
        return per_head
    if case.form in FORMS:
        return to_form
    return {"add before": add_before, "add after": add_after}.get(case.does.way, plain)


def of_function(torch: Any, case: Case, function: Callable[..., Any]) -> Bind:
    """Bind a function to its arrays; for a backward case, the gradient of a call that is made here, untimed."""

    def bind(arrays: Arrays) -> Call:
        if not case.backward:
            rows = (arrays.x,) if arrays.other is None else (arrays.x, arrays.other)
            return functools.partial(function, *rows, *arrays.columns)
        leaves = [array.detach().requires_grad_() for array in (arrays.x, *arrays.columns)]
        with torch.enable_grad():
            y = function(*leaves)
        return lambda: torch.autograd.grad(y, leaves, arrays.other, retain_graph=True)

    return bind


def softmax_in_torch(torch: Any, case: Case, wrap: Callable[[Any], Any]) -> Bind:
    return lambda arrays: softmax_cases.in_torch(torch, case, arrays.softmax, wrap)


def torch_eager(torch: Any, case: Case) -> Bind:
    if case.does.norm == "softmax":
        return softmax_in_torch(torch, case, lambda function: function)
    aten, shape = torch.ops.aten, [case.hidden]
    plain = of_function(torch, case, in_torch(torch, case))

    def layer_norm_backward(arrays: Arrays) -> Call:
        _, mean, rstd = aten.native_layer_norm(arrays.x, shape, *arrays.columns, EPS)
        operands = (arrays.other, arrays.x, shape, mean, rstd, *arrays.columns, [True] * 3)
        return added(arrays, functools.partial(aten.native_layer_norm_backward, *operands))

    def rms_norm_backward(arrays: Arrays) -> Call:
        with suppress(AttributeError, RuntimeError):  # a torch without these operators
            _, rstd = aten._fused_rms_norm(arrays.x, shape, arrays.weight, EPS)
            operands = (arrays.other, arrays.x, shape, rstd, arrays.weight, [True] * 2)
            call = functools.partial(aten._fused_rms_norm_backward, *operands)
            call()
            return added(arrays, call)
        return added(arrays, plain(arrays))

    def added(arrays: Arrays, call: Call) -> Call:
        if arrays.dresidual is None:
            return call

        def with_dresidual() -> Any:
            dx, *others = call()
            return dx.add_(arrays.dresidual), *others

        return with_dresidual

    if not case.backward or case.per_head:
        return plain
    return layer_norm_backward if case.does.norm == "layer_norm" else rms_norm_backward


def torch_compiled(torch: Any, case: Case) -> Bind:
    torch._dynamo.reset()  # else the compiles of earlier shapes count against its limit of recompiles
    with suppress(Exception):  # a compiled gradient is asked for again and again, and must keep what it saved
        import torch._functorch.config as functorch

        functorch.donated_buffer = False
    if case.does.norm == "softmax":
        return softmax_in_torch(torch, case, functools.partial(torch.compile, dynamic=False))
    return of_function(torch, case, torch.compile(in_torch(torch, case), dynamic=False))


def liger(torch: Any, case: Case) -> Bind:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if case.does.norm == "softmax":
        if case.matrix or case.operator.startswith("log_"):
            raise UnsupportedError
        return lambda arrays: softmax_cases.in_liger(case, arrays.softmax)
    refuse_all_but_plain(case)
    if case.kind == "small" and case.backward:
        raise UnsupportedError  # its backward ends a capture, and what follows in this process fails
    if case.does.norm == "layer_norm":
        return of_function(torch, case, lambda x, *columns: LigerLayerNormFunction.apply(x, *columns, EPS))
    call = LigerRMSNormFunction.apply
    return of_function(torch, case, lambda x, weight: call(x, weight, EPS, 0.0, "llama", False))


def quack(torch: Any, case: Case) -> Bind:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm
    from quack.softmax import softmax_bwd, softmax_fwd

    if case.does.norm == "softmax":
        if case.matrix or case.operator.startswith("log_"):
            raise UnsupportedError
        return lambda arrays: softmax_cases.in_quack(case, arrays.softmax, softmax_fwd, softmax_bwd)
    if case.form or case.does.way.startswith("add"):
        raise UnsupportedError
    if case.does.norm == "rms_norm":
        return of_function(torch, case, lambda x, weight: rmsnorm(x, weight, eps=EPS))
    if case.per_head:
        raise UnsupportedError

    def layer_norm(arrays: Arrays) -> Call:
        columns = [column.float() for column in arrays.columns]  # it takes no other, and this is not timed
        if not case.backward:
            return functools.partial(layernorm_fwd, arrays.x, *columns, eps=EPS)
        return functools.partial(
            layernorm_bwd, arrays.x, columns[0], arrays.other, arrays.rstd.view(-1), arrays.mean.view(-1)
        )

    return layer_norm


def transformer_engine(torch: Any, case: Case) -> Bind:
    from transformer_engine import pytorch

    refuse_all_but_plain(case)
    make = {"rms_norm": pytorch.RMSNorm, "layer_norm": pytorch.LayerNorm}[case.does.norm]
    module = make(case.hidden, eps=EPS, dtype=getattr(torch, case.dtype), device=DEVICE)

    def call(x: Any, *columns: Any) -> Any:
        module._parameters.update(zip(("weight", "bias"), columns, strict=False))
        return module(x)

    return of_function(torch, case, call)


def transformer_engine_kernels(torch: Any, case: Case, folder: Path) -> Bind:
    from transformer_engine_launch import Plan

    if not has_te_kernels(case):
        raise UnsupportedError
    plan = Plan(torch, folder, case.operator, case.dtype, case.rows, case.hidden)

    def bind(arrays: Arrays) -> Call:
        if case.backward:
            return plan.backward(arrays.other, arrays.x, arrays.weight, arrays.mean, arrays.rstd)
        return plan.forward(arrays.x, arrays.weight, arrays.bias, EPS)

    return bind


def has_te_kernels(case: Case) -> bool:
    """Whether TransformerEngine's text has a kernel of a case, whose rows have no gaps."""
    return is_plain(case) and not case.part


def is_plain(case: Case) -> bool:
    return not (case.per_head or case.form or case.does.way.startswith("add") or case.does.norm == "softmax")


def refuse_all_but_plain(case: Case) -> None:
    if not is_plain(case):
        raise UnsupportedError


PROVIDERS: dict[str, Maker] = {
    OURS: ours,
    STATIC: ours_static,
    TORCH: torch_eager,
    COMPILED: torch_compiled,
    "Liger": liger,
    "quack": quack,
    "TE": transformer_engine,
}
NAMES = (*PROVIDERS, TE_KERNELS)


def available(torch: Any, with_compile: bool, te_folder: Path | None) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return the providers that this machine has, and why the others are absent."""
    found, absent = {}, {}
    makers = dict(PROVIDERS)
    if te_folder is None:
        absent[TE_KERNELS] = "measured with --transformer-engine"
    else:
        makers[TE_KERNELS] = functools.partial(transformer_engine_kernels, folder=te_folder)
    for name, make in makers.items():
        if name == STATIC and STATIC not in transformer_rtc.implementations(transformer_rtc.rms_norm):
            absent[name] = "this installation has no static kernels for this GPU"
        elif name == COMPILED and not with_compile:
            absent[name] = "measured with --compile"
        else:
            try:
                make(torch, Case("rms_norm", "shape", "bfloat16", 1, 256))
                found[name] = make
            except Exception as error:  # of an import, that can fail in any way
                absent[name] = reason(error)
    return found, absent


# ---- Copies: the ceiling ---------------------------------------------------------------------------------------------


def stream(torch: Any, case: Case, vectors: int) -> Bind:
    if case.form:
        raise UnsupportedError
    does = case.does
    kernel = common.stream_kernel(does.reads, does.writes, vectors)
    count = case.row_bytes // 16
    launch = LaunchConfig((-(-count // (common.STREAM_THREADS * vectors)), 1, 1), (common.STREAM_THREADS, 1, 1))

    def bind(arrays: Arrays) -> Call:
        read = {f"in{index}": array.data_ptr() for index, array in enumerate(arrays.read)}

        def call() -> Any:
            outputs = [torch.empty_like(arrays.read[0]) for _ in range(does.writes)]
            written = {f"out{index}": array.data_ptr() for index, array in enumerate(outputs)}
            values = {**read, **written, "vectors": count}
            kernel.launch(launch, values, torch.cuda.current_stream().cuda_stream)
            return outputs

        return call

    return bind


def torch_copy(torch: Any, case: Case) -> Bind:
    def bind(arrays: Arrays) -> Call:
        if len(arrays.read) == 3:
            return lambda: torch.addcmul(*arrays.read)
        if len(arrays.read) == 2:
            return lambda: torch.add(*arrays.read)
        out = getattr(torch, case.out)
        return lambda: torch.empty_like(arrays.read[0], dtype=out).copy_(arrays.read[0])

    if case.does.writes == 2:
        raise UnsupportedError
    return bind


COPIES: dict[str, Maker] = {
    f"{COPY}torch": torch_copy,
    **{
        f"{COPY}{vectors} vectors a thread": functools.partial(stream, vectors=vectors)  # as many loads in flight
        for vectors in (2, 4)
    },
}


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
