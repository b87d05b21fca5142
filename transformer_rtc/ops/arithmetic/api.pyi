# SPDX-License-Identifier: Apache-2.0
"""Arithmetic: the sum of two arrays."""

# Written by tests/tools/make_api.py: change declarations.py, and run it.

from ...signatures import A, ArrayLike, DTypeLike

__all__ = [
    "add",
]

def add(
    x: A,
    other: ArrayLike,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    stream: object = None,
) -> A: ...
