# SPDX-License-Identifier: Apache-2.0
"""Compile before the first step what a model will ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import warming
from ..arrays import dtype_id
from ..checks import is_integer
from ..errors import ArgumentError, shown
from ..manifest import line
from ..request import Asked
from ..spec import DTYPES
from ..warming import Progress, WarmupRecord
from .activations import GEGLU, GELU, SiLU, SwiGLU
from .formulas import Formula
from .gates import Activation, Gate
from .modules import TAKEN, LayerNorm, Norm, RMSNorm
from .softmax_module import Softmax
from .sum_modules import AddNorm

__all__ = ["asked_by", "warmup"]


def warmup(
    model: torch.nn.Module,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    *,
    training: bool | None = None,
    keys: int | Sequence[int] = (),
    unaligned: bool = True,
    architectures: str | Sequence[str] | None = None,
    threads: int | None = None,
    progress: bool | Progress = False,
) -> list[WarmupRecord]:
    """Compile what a model's modules of this package will ask for, on all cores, so that no later call does.

    That is what its modules of this package need, activations with as many tensors as they take, and what `patch` and
    `kernel_mapping` have swapped: for inputs that require grad, where the model is trained. The model is not run.

    Parameters
    ----------
    model : Module
        On any device, meta included.
    dtype : torch.dtype or sequence of them, optional
        Of what the modules are given: float32, float16 or bfloat16. None: each module's own parameters' type.
    training : bool, optional
        Whether to compile a training step, of which parameters that do not require grad have no gradient; else what
        runs without grad. None: whether the model is in training mode, and some parameter requires grad. Where
        activation checkpointing runs the forward without grad first, as its reentrant form does, call both.
    keys : int or sequence of int
        The lengths of the rows of `Softmax` modules, which are called without a mask. Others compile at their first
        call, or by `transformer_rtc.warmup`.
    unaligned, architectures, threads, progress : optional
        As `transformer_rtc.warmup` takes them.

    Returns
    -------
    list of WarmupRecord
        One for each kernel and architecture.

    Raises
    ------
    ArgumentError
        If an argument is not as described, or the model has no module of this package.
    DeviceNotFoundError, DriverError
        If there is no GPU and no architecture is named.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import RMSNorm, warmup
    >>> records = warmup(torch.nn.Sequential(RMSNorm(64), torch.nn.Linear(64, 64)), architectures="sm_90")
    >>> {record.status for record in records} <= {"compiled", "cached"}
    True
    """
    asked = asked_by(model, dtype, training, keys)
    if not asked:
        raise ArgumentError("model has no module of transformer_rtc whose kernels are known: patch() it before")
    return warming.warmup(
        manifest=asked, architectures=architectures, unaligned=unaligned, threads=threads, progress=progress
    )


def asked_by(
    model: torch.nn.Module,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    training: bool | None = None,
    keys: int | Sequence[int] = (),
) -> list[Asked]:
    """Return what a model's modules will ask for, each once. Arguments and errors are those of `warmup`."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model is {shown(model)}; it takes a torch.nn.Module")
    dtypes = [None] if dtype is None else [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    for one in dtypes:
        if one is not None and one not in TAKEN:
            raise ArgumentError(f"dtype is {shown(one)}; it takes {', '.join(sorted(map(str, TAKEN)))} or None")
    lengths = [keys] if isinstance(keys, int) else list(keys)
    for length in lengths:
        if not is_integer(length, 1, 2**30):
            raise ArgumentError(f"keys has {shown(length)}; it takes integers from 1 to {2**30}")
    if training is None:
        training = model.training and any(parameter.requires_grad for parameter in model.parameters())
    found: dict[str, Asked] = {}
    usual = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    for module in model.modules():
        own = next((one.dtype for one in module.parameters(recurse=False)), usual)
        for given in dtypes:
            kind = given or own
            if kind in TAKEN:
                for asked in _of(module, kind, training, lengths):
                    found.setdefault(line(asked), asked)
    return list(found.values())


def _of(module: torch.nn.Module, dtype: torch.dtype, training: bool, lengths: Sequence[int]) -> Iterable[Asked]:
    formula = getattr(module.forward, "formula", None)
    if isinstance(formula, Formula):
        if not formula.weighted:
            return []  # it does not say how long its rows are
        weight = module.weight
        norm = _NormOf(module, dtype, weight.numel(), formula.rounding, formula.out_dtype(dtype, weight.dtype))
        return norm.asked("rms_norm", training)
    if isinstance(module, Norm):
        assert isinstance(module, (RMSNorm, LayerNorm))
        name = "rms_norm" if isinstance(module, RMSNorm) else "layer_norm"
        rounding = getattr(module, "rounding", "once")
        columns = math.prod(module.normalized_shape)
        norm = _NormOf(module, dtype, columns, rounding, module.out_dtype or dtype, module.sm_margin > 0)
        asked = [*norm.asked(name, training)]
        if isinstance(module, AddNorm):
            asked += norm.asked_of_sum(name, training, module)
        return asked
    activation = _activation_of(module)
    if activation is not None:
        return _of_activation(*activation, dtype, training)
    if isinstance(module, Softmax):
        return [one for length in lengths for one in _of_softmax(module, dtype, length, training)]
    return []


class _NormOf:
    """What a norm asks for, of x of one type."""

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        columns: int,
        rounding: str,
        out_dtype: torch.dtype,
        margin: bool = False,
    ) -> None:
        self._dtype, self._columns, self._margin = dtype, columns, margin
        self._weight, self._bias = (getattr(module, name, None) for name in ("weight", "bias"))
        self._out_dtype, self._twice = out_dtype, rounding == "twice"

    def asked(self, name: str, training: bool) -> Iterator[Asked]:
        """Yield what a norm asks for."""
        yield self._forward(name, name, training, {})
        if training:
            yield self._backward(name, self._dtype, [self._dtype], None)

    def asked_of_sum(self, name: str, training: bool, module: AddNorm) -> Iterator[Asked]:
        """Yield what a norm of a sum asks for, whose sum is used later and, as the last one's of a model, is not."""
        residual = module.residual_dtype or self._dtype
        more = {"residual": residual, "residual_dtype": module.residual_dtype}
        yield self._forward(f"add_{name}", name, training, more)
        if training:
            for gradient in (residual, None):
                yield self._backward(name, residual, [self._dtype, residual], gradient)

    def _forward(self, operator: str, norm: str, training: bool, more: dict[str, Any]) -> Asked:
        values = {"weight": _dtype_of(self._weight), "out_dtype": self._out_dtype, **more}
        if norm == "layer_norm":
            values |= {"bias": _dtype_of(self._bias), "return_mean": training}
        else:
            values["round_before_weight"] = self._twice
        return self._asked(operator, values | {"return_rstd": training})

    def _backward(self, norm: str, x: torch.dtype, inputs: list[torch.dtype], gradient: torch.dtype | None) -> Asked:
        """Return what autograd asks for: of x of a type, and gradients of the inputs' types."""
        has_mean = norm == "layer_norm"
        parameters = (self._weight, self._bias)
        trained = [one is not None and one.requires_grad for one in parameters]
        kinds = {one.dtype for one in parameters if one is not None and one.requires_grad}
        values = {
            "x": x,
            "weight": _dtype_of(self._weight),
            "rstd": True,
            "dresidual": gradient,
            "return_dweight": trained[0],
            "return_dbias": trained[1],
            "out_dtype": _of_several(set(inputs)),
            "dweight_dtype": _of_several(kinds) if kinds else None,
        }
        return self._asked(f"{norm}_backward", values | ({"mean": True} if has_mean else {}), self._out_dtype)

    def _asked(self, operator: str, values: dict[str, Any], dtype: torch.dtype | None = None) -> Asked:
        return _asked(operator, dtype or self._dtype, self._columns, values, self._margin)


def _activation_of(module: torch.nn.Module) -> tuple[Activation, tuple[bool, ...]] | None:
    """Return what an activation computes, and whether it is given a second factor; () where it has none."""
    swapped = getattr(module.forward, "activation", None)
    if isinstance(swapped, Activation):
        return swapped, ()
    gate = getattr(module.forward, "gate", None)
    if isinstance(gate, Gate):
        return gate.function, (len(gate.names) == 3,)
    if isinstance(module, GELU):
        return Activation("gelu", "tanh" if module.approximate == "tanh" else None), ()
    if isinstance(module, SiLU):
        return Activation("silu"), ()
    if isinstance(module, SwiGLU):
        return Activation("silu"), (True, False)
    if isinstance(module, GEGLU):
        return Activation("gelu", "tanh" if module.approximate == "tanh" else None), (True, False)
    return None


def _of_activation(
    activation: Activation, ups: tuple[bool, ...], dtype: torch.dtype, training: bool
) -> Iterator[Asked]:
    # Kernels of all lengths are the same.
    columns, options = 64, {"approximate": activation.approximate} if activation.approximate else {}
    for up in ups or (None,):
        name = activation.name if up is None else f"{activation.name}_and_mul"
        values: dict[str, Any] = options if up is None else {**options, "up": dtype if up else None}
        yield _asked(name, dtype, columns, values)
        if training:
            yield _asked(f"{name}_backward", dtype, columns, values)


def _of_softmax(module: Softmax, dtype: torch.dtype, keys: int, training: bool) -> Iterator[Asked]:
    out_dtype = module.out_dtype or dtype
    yield _asked("softmax", dtype, keys, {"out_dtype": out_dtype})
    if training:
        yield _asked("softmax_backward", out_dtype, keys, {"y": out_dtype, "out_dtype": dtype})


def _asked(operator: str, dtype: torch.dtype, columns: int, values: dict[str, Any], margin: bool = False) -> Asked:
    return Asked(warming.request_of(operator, DTYPES[dtype_id(dtype)], columns, False, margin, values))


def _dtype_of(parameter: torch.Tensor | None) -> torch.dtype | None:
    return None if parameter is None else parameter.dtype


def _of_several(kinds: set[torch.dtype]) -> torch.dtype:
    """Return the type in which gradients of some types are computed at once."""
    return next(iter(kinds)) if len(kinds) == 1 else torch.float32
