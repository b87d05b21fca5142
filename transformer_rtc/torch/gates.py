"""Activations and gated MLPs of other libraries: found out by running their forward on a little data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..ops.activation.api import gelu, gelu_and_mul, relu_squared, silu, silu_and_mul
from .formulas import alone
from .modules import TAKEN, rows

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
# Of what another implementation of a formula in float32 may differ.
_NEAR = {"rtol": 1e-5, "atol": 2e-6}


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
_GATED = {"gelu": gelu_and_mul, "silu": silu_and_mul}
_PAIRS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
_FUNCTIONS = ("act_fn", "activation_fn", "act")


def may_be_activation(class_: type) -> bool:
    """Whether a class's name says that it may be one of the known functions."""
    return any(word in class_.__name__.lower() for word in _WORDS)


def activation_of(module: torch.nn.Module) -> Activation | str:
    """Return what a module computes of each element, or why it is none of the known functions."""
    if module._parameters or module._buffers or module._modules or "forward" in module.__dict__:
        return "it has parameters, buffers, modules, or a forward of its own"
    if getattr(module, "inplace", False):
        return "it works in place"
    if _takes(type(module).forward) is None:
        return "its forward takes other arguments than one tensor"
    with alone():
        x = torch.linspace(-9, 9, 721).reshape(7, 103)
        try:
            found = module.forward(x.clone())
        except Exception as error:
            return f"its forward fails on the CPU: {type(error).__name__}: {error}"
        for activation, function in _IN_TORCH.items():
            if _is(found, function(x)):
                return activation
    return "it computes something else than the known functions"


def _takes(forward: Callable[..., Any]) -> str | None:
    """Return the name of the one tensor that a forward takes; None: it takes others."""
    parameters = list(inspect.signature(forward).parameters.values())
    if len(parameters) != 2 or any(one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters):
        return None
    return parameters[1].name


def gate_of(module: torch.nn.Module) -> Gate | None:
    """Return what an MLP computes; None: it is no gated MLP of a known function.

    Its class's forward runs on the CPU, with small layers in the place of its own: these are not touched.
    """
    names = next((names for names in _PAIRS if all(name in module._modules for name in names)), None)
    function_name = next((name for name in _FUNCTIONS if name in module._modules), None)
    if names is None or function_name is None or "forward" in module.__dict__ or _takes(type(module).forward) is None:
        return None
    function = module._modules[function_name]
    known = getattr(getattr(function, "forward", None), "activation", None)  # it was swapped before
    activation = known if known is not None else activation_of(function) if function is not None else None
    if not isinstance(activation, Activation) or activation.name not in _GATED:
        return None
    in_torch, given = _IN_TORCH[activation], {name: value for name, value in vars(module).items() if name[0] != "_"}
    with alone():
        generator = torch.Generator().manual_seed(11)
        gate, up, down = (torch.randn(shape, generator=generator) / 3 for shape in ((8, 6), (8, 6), (6, 8)))
        both = torch.cat([gate, up], -1)
        layers = [gate, up, down] if len(names) == 3 else [both, down]
        stand_ins = {name: lambda x, layer=layer: x @ layer for name, layer in zip(names, layers, strict=True)}
        x = 3 * torch.randn(5, 8, generator=generator)
        try:
            found = type(module).forward(SimpleNamespace(**given, **stand_ins, **{function_name: in_torch}), x)
        except Exception:  # it asks for more than these
            return None
        wanted = (in_torch(x @ gate) * (x @ up)) @ down
        return Gate(activation, names, function_name) if _is(found, wanted) else None


def _is(found: object, wanted: torch.Tensor) -> bool:
    fits = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    return fits and torch.allclose(found, wanted, **_NEAR)


# ---- The same, by this package ---------------------------------------------------------------------------------------


def forward_of_activation(activation: Activation, class_: type) -> Callable[..., Any]:
    """Return a forward that computes a function; `class_` has that for types that the operators do not take."""
    original: Callable[..., Any] = class_.forward  # type: ignore[attr-defined]
    call: Callable[..., Any] = {"gelu": gelu, "silu": silu, "relu_squared": relu_squared}[activation.name]
    options = {"approximate": activation.approximate} if activation.approximate else {}

    def forward(self: Any, x: torch.Tensor) -> Any:
        if x.dtype not in TAKEN or x.ndim == 0:
            return original(self, x)
        return call(x if x.is_contiguous() else rows(x), **options)

    return _named(forward, _takes(original), activation=activation)


def forward_of_gate(gate: Gate, class_: type) -> Callable[..., Any]:
    """Return a forward that computes a gated MLP."""
    original: Callable[..., Any] = class_.forward  # type: ignore[attr-defined]
    call, names = _GATED[gate.function.name], gate.names
    options: dict[str, Any] = {"approximate": gate.function.approximate} if gate.function.approximate else {}

    first, *second, last = names

    def forward(self: Any, x: torch.Tensor) -> Any:
        modules = self._modules
        gate, up = modules[first](x), modules[second[0]](x) if second else None
        if gate.dtype not in TAKEN or (up is not None and up.dtype not in TAKEN):
            return original(self, x)
        if not gate.is_contiguous() or not (up is None or up.is_contiguous()):
            gate, up = rows(gate), None if up is None else rows(up)
        return modules[last](call(gate, up, **options))

    return _named(forward, _takes(original), gate=gate)


def _named(forward: Callable[..., Any], parameter: str | None, **about: Any) -> Callable[..., Any]:
    """Have a forward's tensor, which no inner function uses, called as in the original: a caller may name it."""
    code = forward.__code__
    assert parameter is not None
    forward.__code__ = code.replace(co_varnames=("self", parameter, *code.co_varnames[2:]))
    for name, value in about.items():
        setattr(forward, name, value)
    return forward
