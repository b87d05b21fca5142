# SPDX-License-Identifier: Apache-2.0
"""What an RMSNorm of another library computes: found out by running it on a little data, not by its name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..ops.norm.api import rms_norm
from .modules import TAKEN, rows

__all__ = ["Formula", "alone", "find", "forward_of"]

_EPS_NAMES = ("variance_epsilon", "eps")
_ELEMENTS = 2048
# Of rows that are given to a norm without a weight, which does not say how many it has: the size of no usual group.
_COLUMNS = 88
# Of elements that may be rounded otherwise than in float64: an original computes in float32. Formulas differ in more.
_ROUNDED_OTHERWISE = 0.02
_TYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
# Of variables of `forward_of`, one of which is given the name of the original's.
_OWN_NAMES = frozenset(("dtype", "eps", "out_dtype", "self", "weight"))
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)


class Formula(NamedTuple):
    """What an RMSNorm computes: ``x * rstd * (weight + weight_offset)``, or ``x * rstd``.

    Attributes
    ----------
    eps_name : str
        Its attribute that has eps; empty: whichever of the two usual ones it has.
    weight_offset : float
        0, or 1 for a weight that is stored around zero.
    rounding : str
        ``"twice"`` where ``x * rstd`` is rounded to x's type before the weight is multiplied.
    promotes : bool
        Whether y has the type that a product of x and the weight has; else it has x's.
    weighted : bool
        Whether there is a weight.
    """

    eps_name: str
    weight_offset: float = 0.0
    rounding: str = "once"
    promotes: bool = False
    weighted: bool = True

    def out_dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """Return the type of y."""
        return torch.promote_types(x, weight) if self.promotes else x


_KNOWN = tuple((offset, rounding, promotes) for offset in (0.0, 1.0) for rounding in ("once", "twice")
               for promotes in (False, True))  # fmt: skip


# ---- Which formula ---------------------------------------------------------------------------------------------------


def find(module: torch.nn.Module, known: dict[Any, Formula | str]) -> Formula | str:
    """Return what a module computes, or why it is none of the formulas.

    Its forward runs on the CPU, on a copy of the module with a weight of its own: the module, its hooks and torch's
    random state are not touched, whatever device it is on.

    Parameters
    ----------
    module : Module
        A norm.
    known : dict
        What was found of modules of the same class and the same attributes, which is added to.
    """
    parameters = {name: one for name, one in module._parameters.items() if one is not None}
    weight = parameters.get("weight")
    others = parameters.keys() - {"weight"} or module._buffers or module._modules
    if others or (weight is not None and weight.ndim != 1):
        return "it has other parameters, buffers or modules than one weight of one dimension"
    eps_name = next((name for name in _EPS_NAMES if isinstance(module.__dict__.get(name), float)), None)
    if eps_name is None:
        return f"it has no {' or '.join(_EPS_NAMES)}"
    if parameter_of(type(module)) is None:
        return "its forward takes other arguments than one tensor"
    own = {name: value for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE}
    plain = all(isinstance(value, (int, float, str, type(None), torch.dtype)) for value in own.values())
    columns = None if weight is None else weight.numel()
    key = (type(module), columns, tuple(sorted((name, repr(value)) for name, value in own.items())))
    found = known.get(key) if plain else None
    if found is None:
        found = known[key] = _find(module, columns, eps_name)
    return found


def parameter_of(class_: type) -> str | None:
    """Return the name of the one tensor that a class's forward takes; None: it takes others."""
    parameters = list(inspect.signature(class_.forward).parameters.values())  # type: ignore[attr-defined]
    if len(parameters) != 2 or any(one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters):
        return None
    return None if parameters[1].name in _OWN_NAMES else parameters[1].name


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have no mode of the caller change what is computed."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _find(module: torch.nn.Module, columns: int | None, eps_name: str) -> Formula | str:
    with alone():
        x, weight = _data(columns or _COLUMNS, module.__dict__[eps_name])
        left = [Formula(eps_name, *known) for known in _KNOWN]
        if columns is None:
            left, weight = [Formula(eps_name, weighted=False)], None
        for number, (x_dtype, weight_dtype) in enumerate(_TYPES):
            given = x.to(x_dtype), None if weight is None else weight.to(weight_dtype)
            try:
                found = _run(module, *given, training=number % 2 == 0)
            except Exception as error:
                return f"its forward fails on the CPU: {type(error).__name__}: {error}"
            if not isinstance(found, torch.Tensor) or found.shape != x.shape:
                return "its forward does not return one tensor of x's shape"
            x_hat = given[0].double()
            x_hat = x_hat * torch.rsqrt(x_hat.square().mean(-1, keepdim=True) + module.__dict__[eps_name])
            left = [formula for formula in left if _is(formula, found, x_hat, *given)]
            if not left:
                beside = "" if weight is None else f" and a weight of {weight_dtype}"
                return f"for x of {x_dtype}{beside} it computes something else than RMSNorm"
    # What is left of several, of very few columns, computes the same.
    return left[0]


def _data(columns: int, eps: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x [2, rows, columns] with rows of several magnitudes, in some of which eps matters, and a weight."""
    generator = torch.Generator("cpu").manual_seed(47)
    count = max(2, -(-_ELEMENTS // (2 * columns)))
    x = torch.randn(2, count, columns, generator=generator, device="cpu", dtype=torch.float32)
    x[1, ::2] *= max(min(eps, 1.0), 1e-12) ** 0.5
    weight = torch.rand(columns, generator=generator, device="cpu", dtype=torch.float32) * 3 - 1.5
    return x, weight


def _run(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor | None, training: bool) -> Any:
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    if weight is not None:
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        copy.__dict__["_parameters"] = module._parameters | {"weight": parameter}
    copy.__dict__["training"] = training
    return copy.forward(x.clone())


def _is(
    formula: Formula, found: torch.Tensor, x_hat: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None
) -> bool:
    dtype, y = x.dtype, x_hat
    if weight is not None:
        dtype = formula.out_dtype(x.dtype, weight.dtype)
        y = y.to(x.dtype).double() if formula.rounding == "twice" else y
        y = y * (weight.double() + formula.weight_offset)
    if found.dtype != dtype:
        return False
    expected = y.to(dtype).double()
    error = (found.double() - expected).abs()
    # Subnormal numbers of float16 have fewer bits.
    floor = torch.finfo(torch.float16).smallest_normal * 1e-2 if dtype == torch.float16 else 1e-7
    otherwise = (error > 1e-5 * expected.abs() + floor).double().mean()
    return bool(otherwise <= _ROUNDED_OTHERWISE and (error <= 0.02 * expected.abs() + 1e-4).all())


def _eps_of(module: torch.nn.Module) -> Any:
    return next(getattr(module, name) for name in _EPS_NAMES if hasattr(module, name))


# ---- The same, by this package ---------------------------------------------------------------------------------------


def forward_of(
    formula: Formula, rounding: str, original: Callable[..., Any] | None = None, parameter: str = "hidden_states"
) -> Callable[..., Any]:
    """Return a forward that computes a formula.

    Parameters
    ----------
    formula : Formula
        What to compute.
    rounding : str
        ``"once"``, or ``"twice"``: as often as the formula says.
    original : callable, optional
        The forward that computes types which the operators do not take; None: that of the module's class.
    parameter : str
        The name of its tensor.
    """
    eps_name, weight_offset, _, promotes, weighted = formula
    twice = rounding == "twice" and formula.rounding == "twice"

    def forward(self: Any, x: torch.Tensor) -> Any:
        weight, dtype = self.weight, x.dtype
        out_dtype = None
        if weight.dtype is not dtype or dtype not in TAKEN or not x.is_contiguous():
            if dtype not in TAKEN or weight.dtype not in TAKEN:
                return (original or type(self).forward)(self, x)
            out_dtype = torch.promote_types(dtype, weight.dtype) if promotes else None
            x = rows(x)
        eps = getattr(self, eps_name) if eps_name else _eps_of(self)
        return rms_norm(x, weight, eps, weight_offset=weight_offset, out_dtype=out_dtype, round_before_weight=twice)

    def forward_without_weight(self: Any, x: torch.Tensor) -> Any:
        if x.dtype not in TAKEN:
            return (original or type(self).forward)(self, x)
        return rms_norm(x if x.is_contiguous() else rows(x), None, getattr(self, eps_name))

    made = forward if weighted else forward_without_weight
    # A caller may name it.
    code = made.__code__
    made.__code__ = code.replace(co_varnames=("self", parameter, *code.co_varnames[2:]))
    made.formula = formula._replace(rounding="twice" if twice else "once")  # type: ignore[attr-defined]
    return made
