# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and gated MLPs of a whole model, swapped in place for those of this package."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, shown
from .activations import GELU, SiLU
from .formulas import Formula, find, forward_of, parameter_of
from .gates import (
    Activation,
    Gate,
    activation_of,
    forward_of_activation,
    forward_of_gate,
    gate_of,
    may_be_activation,
)
from .modules import ROUNDINGS, LayerNorm, Norm, RMSNorm

__all__ = ["Patch", "Swap", "found_of", "may_be_norm", "patch", "patched_class"]

_OF_TORCH: dict[Any, Any] = {torch.nn.RMSNorm: RMSNorm, torch.nn.LayerNorm: LayerNorm}
_ACTIVATIONS_OF_TORCH: dict[Any, Any] = {torch.nn.GELU: GELU, torch.nn.SiLU: SiLU}
_WORDS = ("rmsnorm", "layernorm")


class Swap(NamedTuple):
    """A module that was swapped.

    Attributes
    ----------
    name : str
        Its name in the model.
    original : type
        Its class before.
    formula : str
        What it computes.
    """

    name: str
    original: type
    formula: str


class Patch:
    """What `patch` did to a model. As a context manager it undoes it at the end of the block.

    Attributes
    ----------
    swapped : list of Swap
        The modules that this package computes now, in the model's order.
    left : dict of str to str
        The modules that look like norms or activations and were left alone: why, by their names.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import Patch, patch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> made = patch(model)
    >>> isinstance(made, Patch), [(swap.name, swap.formula) for swap in made.swapped], made.left
    (True, [('1', 'as torch.nn.LayerNorm')], {})
    >>> made.undo()
    >>> type(model[1]) is torch.nn.LayerNorm
    True
    """

    def __init__(self) -> None:
        self.swapped: list[Swap] = []
        self.left: dict[str, str] = {}
        self._changed: list[tuple[torch.nn.Module, type, type]] = []

    def undo(self) -> None:
        """Give the modules their classes back. Parameters keep their values. A second call does nothing.

        Raises
        ------
        ArgumentError
            If a module's class was changed since, such as by FSDP: it stays what it is, and the others are undone.
        """
        changed, self._changed = self._changed, []
        stay = []
        for (module, before, after), swap in zip(changed, self.swapped, strict=True):
            if type(module) is after:
                module.__class__ = before
            else:
                stay.append(swap.name)
        self.swapped = []
        if stay:
            raise ArgumentError(f"{', '.join(stay)}: the class was changed after patch(), and cannot be given back")

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        counts = Counter((swap.original.__name__, swap.formula) for swap in self.swapped)
        lines = [f"  {count} {name}: {formula}" for (name, formula), count in counts.items()]
        lines += [f"  left {name or 'the model'}: {why}" for name, why in self.left.items()]
        return "\n".join([f"Patch of {len(self.swapped)} modules", *lines])


def patch(model: torch.nn.Module, *, rounding: str = "once", activations: bool = True) -> Patch:
    """Have this package compute the norms and activations of a model, in place.

    The norms are `torch.nn.RMSNorm` and `torch.nn.LayerNorm`, with their subclasses that have no forward of their own;
    and classes with RMSNorm in their name, such as Hugging Face's, whose forward computes ``x * rstd * weight``,
    ``x * rstd * (1 + weight)`` or ``x * rstd``. Which of these it is, where it rounds and of which type y is, is found
    out by running the forward on a little data on the CPU. What computes anything else is left alone, and listed.

    The activations are modules that compute GELU, exact or by tanh, SiLU or the squared ReLU of each element, such as
    `torch.nn.GELU` and Hugging Face's NewGELUActivation; and MLPs such as LlamaMLP and Phi3MLP, which compute
    ``down_proj(f(gate_proj(x)) * up_proj(x))``: the product is one launch, and its backward another. These, too, are
    found out by running them.

    A swapped module stays the same object with the same parameters, buffers, hooks and flags. It becomes of a subclass
    of its class. A model may be patched before or after it is moved, on the meta device, and more than once.

    Parameters
    ----------
    model : Module
        The model, or one norm.
    rounding : {"once", "twice"}
        ``"once"``: y is rounded once, from float32. ``"twice"`` keeps the bits of classes that round ``x * rstd`` to
        x's type before the weight is multiplied, such as Hugging Face's Llama and Qwen.
    activations : bool
        Whether activations and gated MLPs are swapped, too. Their y is rounded once, where f and the product of two
        launches are rounded each.

    Returns
    -------
    Patch
        What was swapped and what was left alone, with ``undo()``; a context manager.

    Raises
    ------
    ArgumentError
        If an argument is not as described.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import patch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
    >>> patch(model)
    Patch of 2 modules
      1 LayerNorm: as torch.nn.LayerNorm
      1 GELU: as torch.nn.GELU
    >>> model(torch.ones(2, 8)).shape  # the norm and the activation are this package's
    torch.Size([2, 8])
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model is {shown(model)}; it takes a torch.nn.Module")
    if rounding not in ROUNDINGS:
        raise ArgumentError(f"rounding is {shown(rounding)}; it takes {', '.join(ROUNDINGS)}")
    made = Patch()
    known: dict[Any, Formula | str] = {}
    within: set[torch.nn.Module | None] = set()  # activations that a gated MLP has in its launch
    for name, module in model.named_modules():
        before = type(module)
        found: Formula | Activation | Gate | type | str | None = None
        if may_be_norm(before):
            found = found_of(module, known)
        elif activations and module not in within and not issubclass(before, (_Patched, GELU, SiLU)):
            found = _activation_of(module)
        gate = found if isinstance(found, Gate) else getattr(getattr(module, "forward", None), "gate", None)
        if isinstance(gate, Gate):
            within.add(module._modules[gate.function_name])
        if found is None:
            continue
        if isinstance(found, str):
            made.left[name] = found
            continue
        after = patched_class(before, found, rounding)
        module.__class__ = after
        made._changed.append((module, before, after))
        made.swapped.append(Swap(name, before, _words(found, rounding)))
    return made


def may_be_norm(class_: type) -> bool:
    """Whether a module is swapped, or is said to be left alone."""
    if issubclass(class_, (Norm, _Patched)):  # it is this package's already
        return False
    return issubclass(class_, tuple(_OF_TORCH)) or any(word in class_.__name__.lower() for word in _WORDS)


def found_of(module: torch.nn.Module, known: dict[Any, Formula | str]) -> Formula | type | str:
    """Return what a module computes, the class of torch whose forward it has, or why it is left alone."""
    if "forward" in module.__dict__:
        return "its forward was replaced, in the module itself"
    for class_ in _OF_TORCH:
        if type(module).forward is class_.forward:
            of_torch: type = class_
            return of_torch
    if "rmsnorm" not in type(module).__name__.lower():
        return "it has a forward of its own"
    return find(module, known)


def _activation_of(module: torch.nn.Module) -> Activation | Gate | type | str | None:
    """Return what an activation or a gated MLP computes, or why what looks like one is left alone; None: it is none."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    for class_ in _ACTIVATIONS_OF_TORCH:
        if type(module).forward is class_.forward and "forward" not in module.__dict__:
            of_torch: type = class_
            return of_torch
    return activation_of(module) if may_be_activation(type(module)) else gate_of(module)


def _words(found: Formula | Activation | Gate | type, rounding: str) -> str:
    if isinstance(found, type):
        return f"as torch.nn.{found.__name__}"
    if not isinstance(found, Formula):
        return str(found)
    twice = rounding == "twice" and found.rounding == "twice"
    times = "" if not found.weighted else " * (weight + 1)" if found.weight_offset else " * weight"
    return f"x * rstd{times}, rounded {'twice' if twice else 'once'}"


# ---- Classes ---------------------------------------------------------------------------------------------------------


class _Patched:
    """What classes have that are made for swapped modules: a copy or a pickle of a module is of the same class."""

    _made_of: tuple[type, Formula | Activation | Gate | type, str]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # From protocol 2 on, the class and what its __new__ takes come first.
        made: Any = super().__reduce_ex__(max(2, protocol))
        return _rebuild, self._made_of, *made[2:]

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "by transformer_rtc")))  # type: ignore[misc]


def _rebuild(*made_of: Any) -> Any:
    return object.__new__(patched_class(*made_of))


def patched_class(class_: type, found: Formula | Activation | Gate | type, rounding: str) -> type:
    """Return the subclass of a module's class that this package computes, which is made once.

    Parameters
    ----------
    class_ : type
        The module's.
    found : Formula, Activation, Gate or type
        What it computes, or the class of torch whose forward it has.
    rounding : str
        As `patch` takes it.
    """
    of_torch = _OF_TORCH | _ACTIVATIONS_OF_TORCH
    if class_ in of_torch:
        own: type = of_torch[class_]
        return own
    made_of = (class_, found, rounding)
    subclasses: list[type] = class_.__subclasses__()
    for made in subclasses:
        if made.__dict__.get("_made_of") == made_of:
            return made
    namespace: dict[str, Any] = {"__module__": class_.__module__, "__doc__": class_.__doc__, "_made_of": made_of}
    bases: tuple[type, ...] = (_Patched, class_)
    if isinstance(found, type):
        # After the class, whose own methods go before those of this package's module.
        bases = (_Patched, class_, of_torch[found])
    elif isinstance(found, Activation):
        namespace["forward"] = forward_of_activation(found, class_)
    elif isinstance(found, Gate):
        namespace["forward"] = forward_of_gate(found, class_)
    else:
        parameter = parameter_of(class_)
        assert parameter is not None
        namespace["forward"] = forward_of(found, rounding, class_.forward, parameter)  # type: ignore[attr-defined]
    # Of the same name: Hugging Face's initialisation and many tools look for it.
    return type(class_)(class_.__name__, bases, namespace)
