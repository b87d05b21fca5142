# SPDX-License-Identifier: Apache-2.0
"""Activations, forward and backward: GELU, SiLU, squared ReLU, and gated ones."""

# Written by tests/tools/make_api.py: change declarations.py, and run it.

from typing import Literal, overload

from ...signatures import A, ArrayLike, DTypeLike

__all__ = [
    "gelu",
    "gelu_and_mul",
    "gelu_and_mul_backward",
    "gelu_backward",
    "relu_squared",
    "relu_squared_backward",
    "silu",
    "silu_and_mul",
    "silu_and_mul_backward",
    "silu_backward",
]

def gelu(
    x: A,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    stream: object = None,
) -> A: ...
def silu(
    x: A,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    stream: object = None,
) -> A: ...
def relu_squared(
    x: A,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    stream: object = None,
) -> A: ...
@overload
def gelu_and_mul(
    x: A,
    up: ArrayLike | None = None,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    row_scaling: Literal[False] = False,
    stream: object = None,
) -> A: ...
@overload
def gelu_and_mul(
    x: A,
    up: ArrayLike | None = None,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    row_scaling: Literal[True],
    stream: object = None,
) -> tuple[A, A]: ...
@overload
def gelu_and_mul(
    x: A,
    up: ArrayLike | None = None,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    row_scaling: bool = False,
    stream: object = None,
) -> A | tuple[A, A]: ...
@overload
def silu_and_mul(
    x: A,
    up: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    row_scaling: Literal[False] = False,
    stream: object = None,
) -> A: ...
@overload
def silu_and_mul(
    x: A,
    up: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    row_scaling: Literal[True],
    stream: object = None,
) -> tuple[A, A]: ...
@overload
def silu_and_mul(
    x: A,
    up: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    scale_inv: ArrayLike | None = None,
    row_scaling: bool = False,
    stream: object = None,
) -> A | tuple[A, A]: ...
def gelu_backward(
    dy: A,
    x: ArrayLike,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    stream: object = None,
) -> A: ...
def silu_backward(
    dy: A,
    x: ArrayLike,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    stream: object = None,
) -> A: ...
def relu_squared_backward(
    dy: A,
    x: ArrayLike,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    stream: object = None,
) -> A: ...
@overload
def gelu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: ArrayLike,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[True] | None = None,
    stream: object = None,
) -> tuple[A, A]: ...
@overload
def gelu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: ArrayLike,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[False],
    stream: object = None,
) -> A: ...
@overload
def gelu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: None = None,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[False] | None = None,
    stream: object = None,
) -> A: ...
@overload
def gelu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: None = None,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[True],
    stream: object = None,
) -> tuple[A, A]: ...
@overload
def gelu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: ArrayLike | None = None,
    *,
    approximate: Literal["tanh"] | None = None,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: bool | None = None,
    stream: object = None,
) -> A | tuple[A, A]: ...
@overload
def silu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: ArrayLike,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[True] | None = None,
    stream: object = None,
) -> tuple[A, A]: ...
@overload
def silu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: ArrayLike,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[False],
    stream: object = None,
) -> A: ...
@overload
def silu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: None = None,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[False] | None = None,
    stream: object = None,
) -> A: ...
@overload
def silu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: None = None,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: Literal[True],
    stream: object = None,
) -> tuple[A, A]: ...
@overload
def silu_and_mul_backward(
    dy: A,
    x: ArrayLike,
    up: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_dup: bool | None = None,
    stream: object = None,
) -> A | tuple[A, A]: ...
