"""Softmax of rows and its logarithm, forward and backward, scaled, masked and causal."""

from __future__ import annotations

from operator import index
from typing import Any

from ... import _native
from ...dispatch import Operator
from ...errors import ArgumentError, shown
from ...request import Argument
from ...spec import BFLOAT16, BOOL, FLOAT16, FLOAT32, UINT8
from .family import SoftmaxFamily
from .heuristics import BUCKETS

__all__ = ["log_softmax", "log_softmax_backward", "softmax", "softmax_backward"]

_FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
_SQUARE = "upper_triangular"
_CAUSAL_MODES = (_SQUARE, "aligned")


_FAMILY = SoftmaxFamily()
_CAUSAL = (
    Argument("causal", "flag", words=_CAUSAL_MODES),
    Argument("upper_triangular", "square", called="causal"),
    Argument("window", "integer"),
)


def _forward_operator(name: str) -> Operator:
    return Operator(
        name,
        _FAMILY,
        (
            Argument("x", "rows", _FLOATS),
            Argument("scale", "real"),
            Argument("mask", "mask", (BOOL, UINT8, *_FLOATS), optional=True),
            Argument("mask_keeps", "flag"),
            Argument("sink", "head_values", _FLOATS, optional=True),
            *_CAUSAL,
            Argument("out", "rows_out", _FLOATS),
            Argument("out_dtype", "dtype_out", _FLOATS, of=("out",)),
            Argument("lse", "row_values", (FLOAT32,)),
            Argument("stream", "stream"),
        ),
        BUCKETS,
    )


def _backward_operator(name: str) -> Operator:
    return Operator(
        name,
        _FAMILY,
        (
            Argument("dy", "rows", _FLOATS),
            Argument("y", "rows", _FLOATS),
            Argument("scale", "real"),
            *_CAUSAL,
            Argument("sink", "head_values", _FLOATS, optional=True),
            Argument("lse", "row_inputs", (FLOAT32,), optional=True),
            # Masks of bytes are refused by the family, which says why.
            Argument("mask", "mask", (*_FLOATS, BOOL, UINT8), optional=True),
            Argument("out", "rows_out", _FLOATS, like="y"),
            Argument("out_dtype", "dtype_out", _FLOATS, of=("out",)),
            Argument("dsink", "head_sums", _FLOATS, like="sink"),
            Argument("dmask", "mask_sums", (*_FLOATS, BOOL, UINT8), like="mask"),
            Argument("stream", "stream"),
        ),
        BUCKETS,
    )


_softmax = _forward_operator("softmax").call
_log_softmax = _forward_operator("log_softmax").call
_softmax_backward = _backward_operator("softmax_backward").call
_log_softmax_backward = _backward_operator("log_softmax_backward").call


def _region(name: str, causal: str | None, window: int | None) -> tuple[bool, bool, int]:
    """Return whether there is a causal mode, whether it is that of a square, and the window; 0: none."""
    if causal is None:
        if window is not None:
            raise ArgumentError(f"{name}: window needs a causal mode; it is {shown(window)} and causal is None")
        return False, False, 0
    if not isinstance(causal, str) or causal not in _CAUSAL_MODES:
        modes = ", ".join(map(repr, _CAUSAL_MODES))
        raise ArgumentError(f"{name}: causal must be {modes} or None; it is {shown(causal)}")
    if window is not None:
        try:
            keys = 0 if isinstance(window, bool) else index(window)
        except (TypeError, ValueError, RuntimeError):  # it is no integer; a tensor of several raises one of the others
            keys = 0
        if keys < 1:
            raise ArgumentError(f"{name}: window must be a number of keys of at least 1; it is {shown(window)}")
        window = min(keys, _native.MOST_COLUMNS)
    return True, causal == _SQUARE, window or 0


def softmax(
    x: Any,
    *,
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

    Over the last dimension. Arithmetic is in float32, and y is rounded once; v is rounded to float32 where y is float32
    or a mask of floats is added, else differences of x are scaled. What does not take part has v = -inf: y is 0 there.
    A row of which nothing takes part becomes zeros. What a mask or a causal mode excludes is 0 even in a row that is
    NaN otherwise. A row's bits do not depend on how many rows there are, nor on where they lie. At most 13 kernels
    serve all lengths: few new lengths compile anything.

    Parameters
    ----------
    x : array [..., keys] or [..., heads, queries, keys], float32, float16 or bfloat16
        As `rms_norm` takes it. -inf does not take part, whatever the scale's sign; a row with NaN, or with an infinite
        v above all others, becomes NaN.
    scale : float
        What x is multiplied by, in float32, before the maximum. For a y of 16 bits, differences of x and
        scale * log2(e) must be finite in float32: magnitudes of x up to 1.7e38, and of scale up to 2.3e38; in the
        general kernels, and in lse, v itself.
    mask : array of bool, uint8, float32, float16 or bfloat16, optional
        Of bool or uint8: which elements do not take part, those where it is not 0, as Megatron has it. Of floats: what
        is added to v, ``v = scale * x + mask``, rounded once; -inf does not take part. It has x's shape, or one that is
        broadcast to it along dimensions before the last; those before the heads must collapse to one stride.
    mask_keeps : bool
        Whether a mask of bool or uint8 says which elements take part, as torch's scaled_dot_product_attention has it.
    causal : {"upper_triangular", "aligned"}, optional
        Which keys a query of x [..., queries, keys] sees: as many as its own number, for as many queries as keys; or so
        that the last query sees the last key (query i sees keys up to i + keys - queries). The others are not read, and
        y is 0 there.
    window : int, optional
        Of the keys that a causal mode leaves, only the last so many.
    sink : array [heads], float32, float16 or bfloat16, optional
        One more logit for every row of a head, which only adds to the sum: ``y = exp(v) / (sum(exp(v)) + exp(sink))``.
    out : array like x, optional
        Where y is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_lse : bool
        Whether to return ``log(sum(exp(v)))`` as well.
    stream : optional
        As `rms_norm` takes it.

    Returns
    -------
    y : array [..., keys]
        Of x's framework, or `out`.
    lse : array [...], float32
        Only if `return_lse`, with the sink's term; -inf where nothing takes part.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    region = _region("softmax", causal, window)
    return _softmax(x, scale, mask, mask_keeps, sink, *region, out, out_dtype, return_lse, stream)


def log_softmax(
    x: Any,
    *,
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

    As `softmax` does it; y is -inf where something does not take part. In float16, so is what is below -65504, and the
    backward takes it for the same.

    Parameters
    ----------
    x, scale, mask, mask_keeps, causal, window, sink, out, out_dtype, return_lse, stream
        As `softmax` takes them.

    Returns
    -------
    y, lse
        As `softmax` returns them.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    region = _region("log_softmax", causal, window)
    return _log_softmax(x, scale, mask, mask_keeps, sink, *region, out, out_dtype, return_lse, stream)


def softmax_backward(
    dy: Any,
    y: Any,
    *,
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

    It needs no mask: where y is 0, dx is 0, even if dy is NaN or infinite there. A mask of floats, which was added, has
    a gradient of its own: ``dmask = sum(y * (dy - sum(dy * y)))``, of which the outer sum is over the rows that an
    element of the mask was broadcast to.

    Parameters
    ----------
    dy, y : array [..., keys], float32, float16 or bfloat16
        The gradient of y, and y as the forward call returned it; of one shape.
    scale : float
        The forward call's.
    causal, window
        The forward call's: what they exclude is not read, and dx is 0 there.
    sink : array [heads], float32, float16 or bfloat16, optional
        The forward call's, for its gradient, which needs lse, too.
    lse : array [...], float32, optional
        What the forward call returned.
    mask : array of float32, float16 or bfloat16, optional
        The forward call's, for its gradient: its elements are not read.
    out : array like y, optional
        Where dx is written: dy or y itself, unless dmask is returned, for which they are read again; or an array that
        shares no element with the inputs.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; y's by default.
    return_dsink : bool
        Whether to return the sink's gradient, ``-sum(exp(sink - lse) * sum(dy * y))`` over the batches and queries, in
        an order that the shape fixes; by default whether a sink is given.
    return_dmask : bool
        Whether to return the mask's gradient, added up in float32 in an order that the shape fixes; by default whether
        a mask is given.
    stream : optional
        As `rms_norm` takes it.

    Returns
    -------
    dx : array [..., keys]
        Of dy's framework, or `out`.
    dsink : array like sink
        If `return_dsink`.
    dmask : array like mask
        If `return_dmask`; contiguous.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    region = _region("softmax_backward", causal, window)
    if return_dsink is None:
        return_dsink = sink is not None
    if return_dmask is None:
        return_dmask = mask is not None
    return _softmax_backward(dy, y, scale, *region, sink, lse, mask, out, out_dtype, return_dsink, return_dmask, stream)


def log_softmax_backward(
    dy: Any,
    y: Any,
    *,
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

    Where y is -inf, dx is 0 and dy does not count.

    Parameters
    ----------
    dy, y, scale, causal, window, sink, lse, mask, out, out_dtype, return_dsink, return_dmask, stream
        As `softmax_backward` takes them; y is what `log_softmax` returned.

    Returns
    -------
    dx, dsink, dmask
        As `softmax_backward` returns them; dsink is ``-sum(exp(sink - lse) * sum(dy))``, and dmask
        ``sum(dy - exp(y) * sum(dy))``.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    region = _region("log_softmax_backward", causal, window)
    if return_dsink is None:
        return_dsink = sink is not None
    if return_dmask is None:
        return_dmask = mask is not None
    return _log_softmax_backward(
        dy, y, scale, *region, sink, lse, mask, out, out_dtype, return_dsink, return_dmask, stream
    )
