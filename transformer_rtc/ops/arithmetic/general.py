# SPDX-License-Identifier: Apache-2.0
"""The general kernel of addition, for every length and type. It is compiled when the package is built."""

from __future__ import annotations

from ...request import LaunchRule, StaticKernel
from ...spec import Params
from ..general import GeneralKernel, general_program
from ..programs import dtypes, entry_rule
from .kernels import FIELDS

__all__ = ["KERNELS", "launch", "program"]

_THREADS = 256
_ELEMENTS = 4 * _THREADS
KERNELS = {"add": GeneralKernel(Params((*FIELDS, *dtypes("x", "other", "out"))), _THREADS, "add_any")}


def program() -> str:
    """Return the text of its module."""
    return general_program("arithmetic_general.cu", KERNELS)


def launch() -> tuple[StaticKernel, LaunchRule]:
    """Return the kernel, and how it is launched."""
    return StaticKernel("add", KERNELS["add"].params), entry_rule(_THREADS, elements_per_cta=_ELEMENTS)
