# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows and its logarithm, forward and backward, scaled, masked and causal."""

# Written by tests/tools/make_api.py: change declarations.py, and run it.

from __future__ import annotations

from typing import Any

from ...operator import register
from ...views import LAST, viewed
from . import declarations

__all__ = [
    "log_softmax",
    "log_softmax_backward",
    "softmax",
    "softmax_backward",
]

_softmax = register(declarations.SOFTMAX)
_log_softmax = register(declarations.LOG_SOFTMAX)
_softmax_backward = register(declarations.SOFTMAX_BACKWARD)
_log_softmax_backward = register(declarations.LOG_SOFTMAX_BACKWARD)
_softmax_viewed = viewed(declarations.SOFTMAX, _softmax)
_log_softmax_viewed = viewed(declarations.LOG_SOFTMAX, _log_softmax)
_softmax_backward_viewed = viewed(declarations.SOFTMAX_BACKWARD, _softmax_backward)
_log_softmax_backward_viewed = viewed(declarations.LOG_SOFTMAX_BACKWARD, _log_softmax_backward)


def softmax(
    x: Any,
    *,
    dim: int = -1,
    scale: float = 1.0,
    mask: Any = None,
    mask_keeps: bool = False,
    causal: str | None = None,
    window: int | None = None,
    sink: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    stream: Any = None,
) -> Any:
    """Return the softmax of each row: ``y = exp(v - max(v)) / sum(exp(v - max(v)))`` with ``v = scale * x``.

    The sums are over `dim`. Arithmetic is in float32, and y is rounded once. If y is float32 or a mask of floats is
    added, v is rounded to float32; otherwise differences of x are scaled. An excluded element has v = -inf, and its y
    is 0. A row whose elements are all excluded becomes zeros. Elements that a mask or a causal mode excludes are 0
    even if the rest of the row is NaN. A row's bits do not depend on the number of rows, nor on their addresses. At
    most 14 kernels serve all lengths, so few new lengths compile a kernel.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., keys], float32, float16 or bfloat16
        As in `rms_norm`. With a mask, a sink or a causal mode, the dimensions are [..., heads, queries, keys]. An
        element of -inf is excluded, whatever the scale's sign. A row with NaN, or with an infinite v above all
        others, becomes NaN.
    dim : int
        The dimension of a row. If it is not the last, arrays and a mask are viewed with it at the end, and results
        are viewed back. lse does not have it. The elements of a row must be next to each other in memory, and the
        other dimensions must collapse to two strides. In a contiguous array only the last dimension is so: for
        dim=1 call ``softmax(x.movedim(1, -1).contiguous()).movedim(-1, 1)``, without `dim`, and with numpy
        ``np.moveaxis(softmax(np.ascontiguousarray(np.moveaxis(x, 1, -1))), -1, 1)``. `causal`, `window` and `sink`
        need the last dimension.
    scale : float
        The factor of x, in float32, before the maximum. For a y of 16 bits, differences of x and scale * log2(e)
        must be finite in float32: magnitudes of x are at most 1.7e38, and of scale 2.3e38. In the general kernels,
        and in lse, v itself must be finite.
    mask : array broadcast to [..., keys], bool, uint8, float32, float16 or bfloat16, optional
        A mask of bool or uint8 excludes elements where it is not 0, as Megatron's does. A mask of floats is added,
        ``v = scale * x + mask``, and v is rounded once; -inf excludes an element. The mask has x's shape, or is
        broadcast to it along dimensions before the last. Its dimensions before the heads must collapse to one
        stride.
    mask_keeps : bool
        Whether a mask of bool or uint8 excludes elements where it is 0 instead, as in torch's
        scaled_dot_product_attention.
    causal : {"upper_triangular", "aligned"}, optional
        Which keys a query of x [..., queries, keys] sees. "upper_triangular": query i sees keys 0 to i, and there
        are as many queries as keys. "aligned": the last query sees the last key, so query i sees keys 0 to i + keys
        - queries. Other keys are not read, and y is 0 there.
    window : int, optional
        How many keys a query sees: the last ones of those that the causal mode leaves.
    sink : array [heads], float32, float16 or bfloat16, optional
        One more logit for every row of a head. It only adds to the sum: ``y = exp(v) / (sum(exp(v)) + exp(sink))``.
    out : array [..., keys], optional
        Where y is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_lse : bool
        Whether to return ``log(sum(exp(v)))`` as well.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., keys]
        An array of x's framework, or `out`.
    lse : array [...], float32
        Only if `return_lse`. It has no gradient. It includes the sink's term, and is -inf for a row whose elements
        are all excluded.

    Several results are a tuple in this order. One result is not a tuple.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    AllocationError
        If there is no memory for an output.
    UnexpectedCompileError
        If a kernel must be compiled, and `freeze` or the environment forbids it.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, ForkError, SettingsError, StaticKernelError
        If there is no way to run the call.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import softmax
    >>> x = np.log(np.array([[1, 2, 5]], np.float32))
    >>> y, lse = softmax(x, return_lse=True)
    >>> np.round(y, 3), np.round(np.exp(lse), 3)
    (array([[0.125, 0.25 , 0.625]], dtype=float32), array([8.], dtype=float32))
    >>> softmax(np.zeros((1, 2, 2), np.float32), causal="upper_triangular")  # the first query sees one key
    array([[[1. , 0. ],
            [0.5, 0.5]]], dtype=float32)
    """
    if dim is not LAST:
        return _softmax_viewed(
            dim,
            x,
            scale,
            mask,
            mask_keeps,
            causal,
            window,
            sink,
            out,
            out_dtype,
            return_lse,
            stream,
        )
    return _softmax(x, scale, mask, mask_keeps, causal, window, sink, out, out_dtype, return_lse, stream)


def log_softmax(
    x: Any,
    *,
    dim: int = -1,
    scale: float = 1.0,
    mask: Any = None,
    mask_keeps: bool = False,
    causal: str | None = None,
    window: int | None = None,
    sink: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    stream: Any = None,
) -> Any:
    """Return the logarithm of the softmax of each row: ``y = v - log(sum(exp(v)))`` with ``v = scale * x``.

    The rules are those of `softmax`, except that y is -inf for excluded elements. In float16, a y below -65504 is
    -inf, too, and the backward treats it as excluded.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., keys], float32, float16 or bfloat16
        As in `rms_norm`. With a mask, a sink or a causal mode, the dimensions are [..., heads, queries, keys]. An
        element of -inf is excluded, whatever the scale's sign. A row with NaN, or with an infinite v above all
        others, becomes NaN.
    dim : int
        The dimension of a row. If it is not the last, arrays and a mask are viewed with it at the end, and results
        are viewed back. lse does not have it. The elements of a row must be next to each other in memory, and the
        other dimensions must collapse to two strides. In a contiguous array only the last dimension is so: for
        dim=1 call ``log_softmax(x.movedim(1, -1).contiguous()).movedim(-1, 1)``, without `dim`, and with numpy
        ``np.moveaxis(log_softmax(np.ascontiguousarray(np.moveaxis(x, 1, -1))), -1, 1)``. `causal`, `window` and
        `sink` need the last dimension.
    scale : float
        The factor of x, in float32, before the maximum. For a y of 16 bits, differences of x and scale * log2(e)
        must be finite in float32: magnitudes of x are at most 1.7e38, and of scale 2.3e38. In the general kernels,
        and in lse, v itself must be finite.
    mask : array broadcast to [..., keys], bool, uint8, float32, float16 or bfloat16, optional
        A mask of bool or uint8 excludes elements where it is not 0, as Megatron's does. A mask of floats is added,
        ``v = scale * x + mask``, and v is rounded once; -inf excludes an element. The mask has x's shape, or is
        broadcast to it along dimensions before the last. Its dimensions before the heads must collapse to one
        stride.
    mask_keeps : bool
        Whether a mask of bool or uint8 excludes elements where it is 0 instead, as in torch's
        scaled_dot_product_attention.
    causal : {"upper_triangular", "aligned"}, optional
        Which keys a query of x [..., queries, keys] sees. "upper_triangular": query i sees keys 0 to i, and there
        are as many queries as keys. "aligned": the last query sees the last key, so query i sees keys 0 to i + keys
        - queries. Other keys are not read, and y is -inf there.
    window : int, optional
        How many keys a query sees: the last ones of those that the causal mode leaves.
    sink : array [heads], float32, float16 or bfloat16, optional
        One more logit for every row of a head. It only adds to the sum: ``y = v - log(sum(exp(v)) + exp(sink))``.
    out : array [..., keys], optional
        Where y is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_lse : bool
        Whether to return ``log(sum(exp(v)))`` as well.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., keys]
        An array of x's framework, or `out`.
    lse : array [...], float32
        Only if `return_lse`. It has no gradient. It includes the sink's term, and is -inf for a row whose elements
        are all excluded.

    Several results are a tuple in this order. One result is not a tuple.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    AllocationError
        If there is no memory for an output.
    UnexpectedCompileError
        If a kernel must be compiled, and `freeze` or the environment forbids it.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, ForkError, SettingsError, StaticKernelError
        If there is no way to run the call.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import log_softmax
    >>> y = log_softmax(np.log(np.array([[1, 2, 5]], np.float32)))
    >>> np.round(np.exp(y), 3)
    array([[0.125, 0.25 , 0.625]], dtype=float32)
    """
    if dim is not LAST:
        return _log_softmax_viewed(
            dim,
            x,
            scale,
            mask,
            mask_keeps,
            causal,
            window,
            sink,
            out,
            out_dtype,
            return_lse,
            stream,
        )
    return _log_softmax(x, scale, mask, mask_keeps, causal, window, sink, out, out_dtype, return_lse, stream)


def softmax_backward(
    dy: Any,
    y: Any,
    *,
    dim: int = -1,
    scale: float = 1.0,
    causal: str | None = None,
    window: int | None = None,
    sink: Any = None,
    lse: Any = None,
    mask: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    return_dsink: bool | None = None,
    return_dmask: bool | None = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `softmax` for x: ``dx = scale * y * (dy - sum(dy * y))``.

    The gradient for x needs no mask: where y is 0, dx is 0, even if dy is NaN or infinite there. A mask of floats has
    a gradient of its own: ``dmask = sum(y * (dy - sum(dy * y)))``. The outer sum is over the rows that an element of
    the mask was broadcast to.

    Parameters
    ----------
    dy : array [..., keys], float32, float16 or bfloat16
        The gradient of y.
    y : array [..., keys], float32, float16 or bfloat16
        y as the forward call returned it, of dy's shape.
    dim : int
        The forward call's.
    scale : float
        The forward call's.
    causal : {"upper_triangular", "aligned"}, optional
        The forward call's. Elements that it excludes are not read, and dx is 0 there.
    window : int, optional
        The forward call's.
    sink : array [heads], float32, float16 or bfloat16, optional
        The forward call's, for its own gradient, which also needs lse.
    lse : array [...], float32, optional
        The forward call's result. It may have one more dimension of 1 at the end.
    mask : array broadcast to [..., keys], float32, float16 or bfloat16, optional
        The forward call's mask of floats, for its own gradient. Its elements are not read.
    out : array [..., keys], optional
        Where dx is written: dy or y itself, or an array that shares no element with the inputs. If dmask is
        returned, it may not be dy or y, which are read again.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; y's by default.
    return_dsink : bool, optional
        Whether to return the sink's gradient, ``-sum(exp(sink - lse) * sum(dy * y))`` over the batches and queries,
        in an order that the shape fixes; by default whether a sink is given.
    return_dmask : bool, optional
        Whether to return the mask's gradient, added up in float32 in an order that the shape fixes; by default
        whether a mask is given.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    dx : array [..., keys]
        An array of dy's framework, or `out`.
    dsink : array [heads]
        Only if `return_dsink`. Of the sink's data type.
    dmask : array like mask
        Only if `return_dmask`. Of the mask's data type; contiguous.

    Several results are a tuple in this order. One result is not a tuple.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    AllocationError
        If there is no memory for an output.
    UnexpectedCompileError
        If a kernel must be compiled, and `freeze` or the environment forbids it.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, ForkError, SettingsError, StaticKernelError
        If there is no way to run the call.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import softmax_backward
    >>> y = np.array([[0.25, 0.75]], np.float32)
    >>> dy = np.array([[4, 0]], np.float32)  # sum(dy * y) is 1
    >>> softmax_backward(dy, y)
    array([[ 0.75, -0.75]], dtype=float32)
    """
    if dim is not LAST:
        return _softmax_backward_viewed(
            dim,
            dy,
            y,
            scale,
            causal,
            window,
            sink,
            lse,
            mask,
            out,
            out_dtype,
            return_dsink,
            return_dmask,
            stream,
        )
    return _softmax_backward(
        dy,
        y,
        scale,
        causal,
        window,
        sink,
        lse,
        mask,
        out,
        out_dtype,
        return_dsink,
        return_dmask,
        stream,
    )


def log_softmax_backward(
    dy: Any,
    y: Any,
    *,
    dim: int = -1,
    scale: float = 1.0,
    causal: str | None = None,
    window: int | None = None,
    sink: Any = None,
    lse: Any = None,
    mask: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    return_dsink: bool | None = None,
    return_dmask: bool | None = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `log_softmax` for x: ``dx = scale * (dy - exp(y) * sum(dy))``.

    Where y is -inf, dx is 0 and dy is ignored. The gradient of a mask of floats is ``sum(dy - exp(y) * sum(dy))``. The
    outer sum is over the rows that an element of the mask was broadcast to.

    Parameters
    ----------
    dy : array [..., keys], float32, float16 or bfloat16
        The gradient of y.
    y : array [..., keys], float32, float16 or bfloat16
        y as the forward call returned it, of dy's shape.
    dim : int
        The forward call's.
    scale : float
        The forward call's.
    causal : {"upper_triangular", "aligned"}, optional
        The forward call's. Elements that it excludes are not read, and dx is 0 there.
    window : int, optional
        The forward call's.
    sink : array [heads], float32, float16 or bfloat16, optional
        The forward call's, for its own gradient, which also needs lse.
    lse : array [...], float32, optional
        The forward call's result. It may have one more dimension of 1 at the end.
    mask : array broadcast to [..., keys], float32, float16 or bfloat16, optional
        The forward call's mask of floats, for its own gradient. Its elements are not read.
    out : array [..., keys], optional
        Where dx is written: dy or y itself, or an array that shares no element with the inputs. If dmask is
        returned, it may not be dy or y, which are read again.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; y's by default.
    return_dsink : bool, optional
        Whether to return the sink's gradient, ``-sum(exp(sink - lse) * sum(dy))`` over the batches and queries, in
        an order that the shape fixes; by default whether a sink is given.
    return_dmask : bool, optional
        Whether to return the mask's gradient, added up in float32 in an order that the shape fixes; by default
        whether a mask is given.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    dx : array [..., keys]
        An array of dy's framework, or `out`.
    dsink : array [heads]
        Only if `return_dsink`. Of the sink's data type.
    dmask : array like mask
        Only if `return_dmask`. Of the mask's data type; contiguous.

    Several results are a tuple in this order. One result is not a tuple.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    AllocationError
        If there is no memory for an output.
    UnexpectedCompileError
        If a kernel must be compiled, and `freeze` or the environment forbids it.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, ForkError, SettingsError, StaticKernelError
        If there is no way to run the call.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import log_softmax_backward
    >>> y = np.log(np.array([[0.25, 0.75]], np.float32))
    >>> dy = np.array([[4, 0]], np.float32)
    >>> np.round(log_softmax_backward(dy, y), 3)
    array([[ 3., -3.]], dtype=float32)
    """
    if dim is not LAST:
        return _log_softmax_backward_viewed(
            dim,
            dy,
            y,
            scale,
            causal,
            window,
            sink,
            lse,
            mask,
            out,
            out_dtype,
            return_dsink,
            return_dmask,
            stream,
        )
    return _log_softmax_backward(
        dy,
        y,
        scale,
        causal,
        window,
        sink,
        lse,
        mask,
        out,
        out_dtype,
        return_dsink,
        return_dmask,
        stream,
    )
