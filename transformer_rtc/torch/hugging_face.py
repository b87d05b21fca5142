# SPDX-License-Identifier: Apache-2.0
"""Norms of Hugging Face's models through its own ways: `kernelize` and `register_patch_mapping`."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, shown
from .formulas import Formula, forward_of
from .modules import ROUNDINGS
from .patching import found_of, may_be_norm, patched_class

__all__ = ["kernel_mapping", "patch_mapping"]


class _Layer(NamedTuple):
    """What the `kernels` package takes for a repository: it has `load`, and may be compared, hashed and copied."""

    weight_offset: float
    rounding: str

    def load(self) -> type:
        """Return the class whose forward a norm is given. It has nothing else, which kernelize checks."""
        formula = Formula("", self.weight_offset, self.rounding)
        members = {
            "__doc__": "A norm of Hugging Face, by transformer_rtc.",
            "__module__": __name__,
            "forward": forward_of(formula, self.rounding),
            "has_backward": True,
            "can_torch_compile": True,
        }
        return type("RMSNorm", (torch.nn.Module,), members)


def kernel_mapping(*, rounding: str = "once") -> dict[str, dict[str, Any]]:
    """Return the mapping of kernels that the package `kernels` takes: for training and inference, also compiled.

    It is for the layers ``RMSNorm`` and ``RMSNormZeroCentered``. y has x's type.

    Parameters
    ----------
    rounding : {"once", "twice"}
        ``"twice"`` rounds ``x * rstd`` to x's type before the weight is multiplied, as most classes of the layer
        ``RMSNorm`` do. Which do, this mapping cannot know; `patch` finds it out.

    Returns
    -------
    dict
        For ``kernels.use_kernel_mapping`` and ``kernels.register_kernel_mapping``.

    Raises
    ------
    ArgumentError
        If `rounding` is neither.

    Examples
    --------
    >>> from transformer_rtc.torch import kernel_mapping
    >>> {layer: sorted(devices) for layer, devices in kernel_mapping(rounding="twice").items()}
    {'RMSNorm': ['cuda'], 'RMSNormZeroCentered': ['cuda']}
    """
    _check_rounding(rounding)
    return {
        "RMSNorm": {"cuda": _Layer(0.0, rounding)},
        "RMSNormZeroCentered": {"cuda": _Layer(1.0, "once")},
    }


def patch_mapping(*classes: type[torch.nn.Module], rounding: str = "once") -> dict[str, type[torch.nn.Module]]:
    """Return a mapping for ``transformers.monkey_patching.register_patch_mapping``.

    Models that ``from_config`` and ``from_pretrained`` make are then made of this package's norms.

    Parameters
    ----------
    *classes : type
        Classes of norms, or classes of models: those that are defined in the same file. LayerNorm is that of torch,
        which a mapping of transformers does not reach: `patch` does.
    rounding : {"once", "twice"}
        As `patch` takes it.

    Returns
    -------
    dict of str to type
        Subclasses of the norms' classes, by the names of these. Each was run on a little data to find out what it
        computes, as `patch` does it; classes that compute something else are not in the mapping.

    Raises
    ------
    ArgumentError
        If an argument is not as described, or there is no norm that this package can compute.

    Examples
    --------
    >>> from transformers import LlamaForCausalLM
    >>> from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping
    >>> from transformer_rtc.torch import patch_mapping
    >>> mapping = patch_mapping(LlamaForCausalLM)
    >>> list(mapping)
    ['LlamaRMSNorm']
    >>> register_patch_mapping(mapping)  # from here on models are made of the new class
    >>> unregister_patch_mapping(list(mapping))
    """
    _check_rounding(rounding)
    for class_ in classes:
        if not isinstance(class_, type) or not issubclass(class_, torch.nn.Module):
            raise ArgumentError(f"classes has {shown(class_)}; it takes classes of modules")
    made: dict[str, type[torch.nn.Module]] = {}
    for norm in dict.fromkeys(norm for class_ in classes for norm in _norms(class_)):
        try:
            module = norm(_COLUMNS)
        except Exception:  # it is made otherwise than by a hidden size
            continue
        found = found_of(module, {})
        if isinstance(found, Formula):
            made[norm.__name__] = patched_class(norm, found, rounding)
    if not made:
        raise ArgumentError(f"classes is {shown(classes)}; none of these, nor of their files, is a known RMSNorm")
    return made


# Of the norms that are run.
_COLUMNS = 32


def _norms(class_: type) -> list[type]:
    """Return a class if it is a norm, or the norms that are defined where it is."""
    if may_be_norm(class_):
        return [class_]
    module = sys.modules[class_.__module__]
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, torch.nn.Module)
        and one.__module__ == module.__name__
        and may_be_norm(one)
    ]


def _check_rounding(rounding: object) -> None:
    if rounding not in ROUNDINGS:
        raise ArgumentError(f"rounding is {shown(rounding)}; it takes {', '.join(ROUNDINGS)}")
