# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.transformer_rtc``: what torch traces, transforms and compiles instead of the native calls.

All of them are made from declarations. An eager call with plain tensors, with a gradient or without, does not come
here: they are for torch.compile, for modes such as FakeTensorMode, for transforms such as vmap, and for subclasses of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.library import Library

from ..arguments import Input, Integer, Output, OutputDType, Real, Stream, Update
from ..arrays import dtype_id
from ..declaration import NOBODY, declarations
from ..errors import ArgumentError
from ..spec import DTYPES
from .autograd import recorded
from .fakes import absent, check_devices, fake_of, torch_dtype
from .schema import Schema, schema_of
from .transforms import batched

__all__ = ["define", "dispatched", "dtype_of", "overload"]

_NAMESPACE = "transformer_rtc"
# Inductor keeps the strides of what the operator gets as they are in eager mode.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_library = Library(_NAMESPACE, "FRAGMENT")
# The operator whose gradient is being computed: what the user called.
_gradient_of: ContextVar[str] = ContextVar("gradient_of", default="")


def define(direct_of: Callable[[str], Callable[..., Any]]) -> None:
    """Define the operators of all public functions.

    Parameters
    ----------
    direct_of : callable
        Of a public function's name, returns its native call that only runs.
    """
    for name in declarations():
        schema = schema_of(name)
        _library.define(schema.text, tags=_TAGS)
        for key in ("CPU", "CUDA"):
            _library.impl(name, _running(schema, direct_of), key)
        _library.impl(name, _differentiating(schema), "Autograd")
        _library._register_fake(name, partial(_fake, schema))
        torch.library.register_vmap(overload(name), batched(schema, overload(name)), lib=_library)


def overload(name: str) -> Any:
    """Return the operator of a public function."""
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _fake(schema: Schema, *arguments: Any) -> Any:
    return fake_of(schema, arguments)


# ---- What runs -------------------------------------------------------------------------------------------------------


def _all_made(schema: Schema, values: list[Any], found: Any) -> Any:
    """Return an operator's results: those that were found, and what stands for the others."""
    left = iter(found if isinstance(found, tuple) else (found,))
    made = []
    for one in schema.made:
        if not one.is_wanted(values):
            made.append(absent(one, values[0]))
        else:
            made.append(values[one.at] if isinstance(one.array, Update) else next(left))
    return tuple(made) if len(made) > 1 else made[0]


def _running(schema: Schema, direct_of: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """Return what runs an operator on tensors."""
    updates = [one.at for one in schema.made if isinstance(one.array, Update)]
    arrays = [at for at, argument in enumerate(schema.declaration.arguments) if isinstance(argument, (Input, Update))]

    def run(*arguments: Any) -> Any:
        values = schema.values(arguments)
        for at in arrays:
            if values[at] is not None and type(values[at]) not in _PLAIN:
                values[at] = values[at].as_subclass(torch.Tensor)
        for at in updates:
            if values[at] is not None:
                values[at] = values[at].clone(memory_format=torch.contiguous_format)
        return _all_made(schema, values, direct_of(schema.declaration.name)(*values))

    return run


# ---- What is differentiated ------------------------------------------------------------------------------------------


def _below_autograd(operator: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _within_function(operator: Any, *arguments: Any) -> Any:
    """Call an operator in the forward of a Function, which turns gradients off: outer transforms take theirs."""
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            return operator(*arguments)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return operator(*arguments)


def _differentiating(schema: Schema) -> Callable[..., Any]:
    """Return what has autograd record an operator's gradient, or refuses that it has one."""
    name = schema.declaration.name
    arrays = [at for at, argument in enumerate(schema.declaration.arguments) if isinstance(argument, (Input, Update))]

    @cache
    def run() -> Callable[..., Any]:
        return partial(_below_autograd, overload(name))

    @cache
    def record() -> Callable[..., Any]:
        gradient = schema.declaration.gradient
        if gradient is None:
            return _refusing(schema)
        backward = _naming(name, dispatched(gradient.operator)) if gradient.operator else None
        return recorded(schema.declaration, _functional(schema, partial(_within_function, overload(name))), backward)

    def differentiate(*arguments: Any) -> Any:
        values = schema.values(arguments)
        tensors = [values[at] for at in arrays if values[at] is not None]
        if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
            raise ArgumentError(f"{name} has no forward-mode derivative: take one in reverse mode, by backward or vjp")
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return run()(*arguments)
        if torch._C._are_functorch_transforms_active():
            # Within one level of torch.func.grad, which looks for what a Function does at each level.
            with torch._functorch.autograd_function.enable_single_level_autograd_function():
                return _all_made(schema, values, record()(*values))
        return _all_made(schema, values, record()(*values))

    return differentiate


def _naming(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call that computes an operator's gradient, so that a refusal of a second one names the operator."""

    def call(*values: Any) -> Any:
        token = _gradient_of.set(name)
        try:
            return backward(*values)
        finally:
            _gradient_of.reset(token)

    return call


def _has_tangent(tensor: Any) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _refusing(schema: Schema) -> Callable[..., Any]:
    """Return what runs an operator whose results refuse to be differentiated."""
    name = schema.declaration.name
    call = _functional(schema, partial(_within_function, overload(name)))

    def run_forward(ctx: Any, values: tuple[Any, ...], *inputs: Any) -> Any:
        of = _gradient_of.get()
        ctx.refusal = f"{of} has no second derivative" if of else f"{name} has no derivative: it is one itself"
        return call(*values)

    def run_backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(ctx.refusal)

    methods = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    function = type(torch.autograd.Function)(name, (torch.autograd.Function,), methods)
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # as `recorded` has it

    def refuse(*values: Any) -> Any:
        return apply(values, *(value for value in values if isinstance(value, torch.Tensor)))

    return refuse


# ---- What calls it as the native operator is called ------------------------------------------------------------------


def dtype_of(dtype: Any) -> torch.dtype:
    """Return torch's data type for a name, or for that of another framework; it depends on nothing else."""
    return torch_dtype(DTYPES[dtype_id(dtype)])


@cache
def dispatched(name: str) -> Callable[..., Any]:
    """Return the call of a public function's operator: of all arguments, in the order of the declaration.

    It returns what the native call returns, and writes what that writes.
    """
    return _functional(schema_of(name), overload(name))


def _functional(schema: Schema, operator: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamo traces `call`: it holds nothing but tuples of numbers and names, and functions.
    name, taken = schema.declaration.name, schema.taken
    arguments = schema.declaration.arguments
    streams = tuple(at for at, argument in enumerate(arguments) if isinstance(argument, Stream))
    dtypes = tuple(at for at, argument in enumerate(arguments) if isinstance(argument, OutputDType))
    reals = tuple((at, argument.keyword) for at, argument in enumerate(arguments) if isinstance(argument, Real))
    integers = tuple((at, argument.largest) for at, argument in enumerate(arguments) if isinstance(argument, Integer))
    arrays = tuple(
        (at, argument.keyword) for at, argument in enumerate(arguments) if isinstance(argument, (Input, Output, Update))
    )
    written = (Output, Update)
    outputs = tuple(
        (one.at, one.asks, one.dtype, one.array.keyword) for one in schema.made if isinstance(one.array, written)
    )
    keywords = tuple(argument.keyword for argument in arguments)
    made = tuple(
        (number, one.at, one.asks, one.with_array, isinstance(one.array, Update), one.array.keyword)
        for number, one in enumerate(schema.made)
    )
    single, nobody = len(made) == 1, NOBODY

    def call(*given: Any) -> Any:
        values = list(given)
        for at in streams:
            if values[at] is not None:
                raise ArgumentError(
                    f"{name}: stream must be None where torch traces or transforms the call: use torch.cuda.stream()"
                )
        for at, keyword in reals:
            if isinstance(values[at], torch.Tensor):
                if torch.is_grad_enabled() and values[at].requires_grad:
                    raise ArgumentError(
                        f"{name}: {keyword} is a tensor that requires grad, and is taken as a number: pass its .item()"
                    )
                if forward_ad._current_level >= 0 and _has_tangent(values[at]):
                    raise ArgumentError(
                        f"{name}: {keyword} is a tensor with a tangent, and is taken as a number: pass its .item()"
                    )
                values[at] = values[at].item()
        for at, largest in integers:
            if isinstance(values[at], int) and values[at] > largest:
                values[at] = largest
        for at in dtypes:
            if values[at] is not None and not isinstance(values[at], torch.dtype):
                values[at] = dtype_of(values[at])
        for at, asks, dtype, keyword in outputs:
            if values[at] is None:
                continue
            check_devices(name, ((arrays[0][1], values[arrays[0][0]]), (keyword, values[at])))
            if asks not in (nobody, at) and not values[asks]:
                raise ArgumentError(f"{name}: {keyword} was given, but {keywords[asks]} is False")
            if torch.is_grad_enabled():
                for other, who in arrays:
                    if values[other] is not None and values[other].requires_grad:
                        raise ArgumentError(
                            f"{name}: {keyword} is written in place, which records no gradient, and {who} requires grad"
                        )
            if dtype != nobody:
                if values[dtype] is not None and values[dtype] != values[at].dtype:
                    raise ArgumentError(f"{name}: {keyword} is {values[at].dtype} where {values[dtype]} was asked for")
                values[dtype] = values[at].dtype
        found = operator(*[values[at] for at in taken])
        if single:
            found = (found,)
        shown = []
        for number, at, asks, beside, is_update, keyword in made:
            if is_update:
                if values[at] is not None:
                    # torch takes a plain tensor of one element for a DTensor, but cannot write it.
                    if hasattr(found[number], "placements") and not hasattr(values[at], "placements"):
                        raise ArgumentError(f"{name}: {keyword} is a plain tensor beside DTensors, and is written")
                    values[at].copy_(found[number])
                continue
            if asks != nobody:
                wanted = values[beside] is not None if values[asks] is None and beside != nobody else values[asks]
                if not wanted:
                    continue
            if at == asks or values[at] is None:  # a result, or an output that the caller leaves to the operator
                shown.append(found[number])
                continue
            if values[at].shape != found[number].shape:
                raise ArgumentError(
                    f"{name}: {keyword} must have the shape {tuple(found[number].shape)}; it has "
                    f"{tuple(values[at].shape)}"
                )
            values[at].copy_(found[number])
            shown.append(values[at])
        return shown[0] if len(shown) == 1 else tuple(shown)

    return call
