# SPDX-License-Identifier: Apache-2.0
"""Activations and gated MLPs of other libraries: found out by running their forward on a little data."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..ops.activation.api import gelu, gelu_and_mul, relu_squared, silu, silu_and_mul
from .activations import is_taken, of_each
from .formulas import alone
from .modules import rows

__all__ = [
    "Activation",
    "Gate",
    "activation_of",
    "forward_of_activation",
    "forward_of_gate",
    "gate_of",
    "may_be_activation",
]

_WORDS = ("gelu", "silu", "swish", "relusquared")


class Activation(NamedTuple):
    """What a module without parameters computes of each element.

    Attributes
    ----------
    name : str
        The operator's.
    approximate : str or None
        As the operator takes it.
    """

    name: str
    approximate: str | None = None

    def __str__(self) -> str:
        return self.name if self.approximate is None else f"{self.name}, approximated by tanh"


class Gate(NamedTuple):
    """What an MLP computes: ``down(f(gate(x)) * up(x))``.

    Attributes
    ----------
    function : Activation
        f.
    names : tuple of str
        Its modules: of gate and up, or of both in one; and of down.
    function_name : str
        The module that computes f.
    """

    function: Activation
    names: tuple[str, ...]
    function_name: str

    def __str__(self) -> str:
        return f"{self.function.name}(gate) * up in one launch"


_IN_TORCH: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation("gelu"): torch.nn.functional.gelu,
    Activation("gelu", "tanh"): lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation("silu"): torch.nn.functional.silu,
    Activation("relu_squared"): lambda x: torch.relu(x).square(),
}
_GATED: dict[str, Callable[..., Any]] = {"gelu": gelu_and_mul, "silu": silu_and_mul}
_PAIRS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
_FUNCTIONS = ("act_fn", "activation_fn", "act")
# Of variables of the forwards below, one of which is given the name of the original's.
_OWN_NAMES = frozenset(("function", "gate", "modules", "self", "up"))


# ---- Which function --------------------------------------------------------------------------------------------------


def may_be_activation(class_: type) -> bool:
    """Whether a class's name says that it may be one of the known functions."""
    return any(word in class_.__name__.lower() for word in _WORDS)


def activation_of(module: torch.nn.Module) -> Activation | str:
    """Return what a module computes of each element, or why it is none of the known functions.

    A copy of it runs on the CPU, on numbers of many magnitudes and of three types, in training and evaluation mode.
    """
    if module._parameters or module._buffers or module._modules or "forward" in module.__dict__:
        return "it has parameters, buffers, modules, or a forward of its own"
    if getattr(module, "inplace", False):
        return "it works in place"
    if _takes(type(module)) is None:
        return "its forward takes other arguments than one tensor"
    left = list(_IN_TORCH)
    for dtype, training in itertools.product(_NEAR, (False, True)):
        x = _numbers(dtype)
        copy = object.__new__(type(module))
        copy.__dict__.update(module.__dict__, training=training)
        with alone():
            try:
                found = [copy.forward(x.clone()) for _ in range(2)]
            except Exception as error:
                return f"its forward fails on the CPU: {type(error).__name__}: {error}"
            left = [one for one in left if all(_is(each, _IN_TORCH[one](x)) for each in found)]
    return left[0] if left else "it computes something else than the known functions"


def _takes(class_: type) -> str | None:
    """Return the name of the one tensor that a class's forward takes; None: it takes others."""
    parameters = list(inspect.signature(class_.forward).parameters.values())  # type: ignore[attr-defined]
    if len(parameters) != 2 or any(one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters):
        return None
    return None if parameters[1].name in _OWN_NAMES else parameters[1].name


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of both signs: many near zero, and some up to 10^4, or up to 100 of 16 bits."""
    most = 4.0 if dtype is torch.float32 else 2.0
    of: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    sizes = torch.cat([torch.logspace(-4, most, 90, **of), torch.linspace(0.1, 12, 166, **of)])
    return torch.cat([sizes, -sizes]).to(dtype).reshape(16, 32)


# How far another implementation of a formula may be: of 16 bits, one that rounds after each step.
_NEAR = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}


def _is(found: object, wanted: torch.Tensor) -> bool:
    fits = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    return fits and torch.allclose(found, wanted, **_NEAR[wanted.dtype])


def gate_of(module: torch.nn.Module) -> Gate | str | None:
    """Return what an MLP computes, or why a gated one is left alone; None: it is no gated MLP.

    Its class's forward runs on the CPU. In the place of its layers there are others, which give numbers of many
    magnitudes and see what they are given: its own are not touched.
    """
    names = next((names for names in _PAIRS if all(name in module._modules for name in names)), None)
    function_name = next((name for name in _FUNCTIONS if name in module._modules), None)
    if names is None or function_name is None:
        return None
    function = module._modules[function_name]
    if "forward" in module.__dict__ or function is None or _takes(type(module)) is None:
        return "its forward was replaced, or takes other arguments than one tensor"
    known = getattr(function.forward, "activation", None)  # it was swapped before
    activation = known if isinstance(known, Activation) else activation_of(function)
    if not isinstance(activation, Activation) or activation.name not in _GATED:
        return "it has another function than GELU and SiLU"
    given = {name: value for name, value in vars(module).items() if name[0] != "_"}
    for dtype, training in itertools.product(_NEAR, (False, True)):
        seen = _Layers(dtype, names)
        stand_ins = {**given, **seen.layers, "training": training, function_name: _IN_TORCH[activation]}
        with alone():
            try:
                found = [type(module).forward(SimpleNamespace(**stand_ins), seen.x) for _ in range(2)]
            except Exception as error:
                return f"its forward fails on stand-ins for its layers: {type(error).__name__}: {error}"
            wanted = _IN_TORCH[activation](seen.gate) * seen.up
            right = len(seen.products) == 2 and all(_is(one, wanted) for one in seen.products)
            if not right or any(one is not seen.y for one in found):
                return "it computes something else than down(f(gate(x)) * up(x))"
    return Gate(activation, names, function_name)


class _Layers:
    """Stand-ins for the layers of an MLP."""

    def __init__(self, dtype: torch.dtype, names: tuple[str, ...]) -> None:
        numbers = _numbers(dtype).flatten()[::4]
        count = len(numbers)
        self.x, self.y = numbers.clone(), numbers.clone()
        # Each number with each, but for products that have no place in 16 bits.
        self.gate = numbers[:, None].expand(count, count).contiguous()
        self.up = numbers.flip(0)[None].expand(count, count).contiguous()
        self.products: list[torch.Tensor] = []
        both = torch.cat([self.gate, self.up], -1)
        results = (self.gate, self.up) if len(names) == 3 else (both,)
        self.layers: dict[str, Any] = {
            name: functools.partial(self._give, result) for name, result in zip(names, results, strict=False)
        }
        self.layers[names[-1]] = self._take

    def _give(self, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x is not self.x:
            raise ValueError("a layer is given something else than x")
        return result.clone()

    def _take(self, product: torch.Tensor) -> torch.Tensor:
        self.products.append(product.clone())
        return self.y


# ---- The same, by this package ---------------------------------------------------------------------------------------


def forward_of_activation(activation: Activation, class_: type) -> Callable[..., Any]:
    """Return a forward that computes a function; `class_` has that for what the operators do not take."""
    original: Callable[..., Any] = class_.forward  # type: ignore[attr-defined]
    call: Callable[..., Any] = {"gelu": gelu, "silu": silu, "relu_squared": relu_squared}[activation.name]
    options = {"approximate": activation.approximate} if activation.approximate else {}

    def forward(self: Any, x: torch.Tensor) -> Any:
        return of_each(call, x, **options) if is_taken(x) else original(self, x)

    return _named(forward, _takes(class_), activation=activation)


def forward_of_gate(gate: Gate, class_: type) -> Callable[..., Any]:
    """Return a forward that computes a gated MLP; by its function's module where the operators do not take something.

    That is so, too, where somebody looks at that module by a hook.
    """
    call, (first, *second, last), function_name = _GATED[gate.function.name], gate.names, gate.function_name
    options: dict[str, Any] = {"approximate": gate.function.approximate} if gate.function.approximate else {}

    def forward(self: Any, x: torch.Tensor) -> Any:
        modules = self._modules
        gate, up = modules[first](x), modules[second[0]](x) if second else None
        function = modules[function_name]
        if (
            not is_taken(gate)
            or (up is not None and up.dtype is not gate.dtype)
            or function._forward_hooks
            or function._forward_pre_hooks
            or function._backward_hooks
            or function._backward_pre_hooks
        ):
            gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
            return modules[last](function(gate) * up)
        if not gate.is_contiguous() or not (up is None or up.is_contiguous()):
            gate, up = rows(gate), None if up is None else rows(up)
        return modules[last](call(gate, up, **options))

    return _named(forward, _takes(class_), gate=gate)


def _named(forward: Callable[..., Any], parameter: str | None, **about: Any) -> Callable[..., Any]:
    """Have a forward's tensor, which no inner function uses, called as in the original: a caller may name it."""
    code = forward.__code__
    assert parameter is not None
    forward.__code__ = code.replace(co_varnames=("self", parameter, *code.co_varnames[2:]))
    for name, value in about.items():
        setattr(forward, name, value)
    return forward
