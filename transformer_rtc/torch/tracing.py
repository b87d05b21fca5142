# SPDX-License-Identifier: Apache-2.0
"""The public functions under torch.compile: Dynamo traces calls of the operators instead of the native ones.

Imported with torch._dynamo: an eager process has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .operators import dispatched, dtype_of

__all__ = ["substitute"]


def substitute(calls: Mapping[str, Callable[..., Any]]) -> None:
    """Have Dynamo trace the operators of public functions, whose native calls are given by their names."""
    # What it does with numpy's data types cannot be traced.
    torch.compiler.assume_constant_result(dtype_of)
    for name, call in calls.items():
        torch.compiler.substitute_in_graph(call, skip_signature_check=True)(dispatched(name))
