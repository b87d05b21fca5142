# SPDX-License-Identifier: Apache-2.0
"""Normalization of rows: RMSNorm and LayerNorm, forward and backward, with what is fused into them."""

# Written by tests/tools/make_api.py: change declarations.py, and run it.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...operator import register
from ...views import viewed
from . import declarations

__all__ = [
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_add_backward",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_backward",
    "rms_norm_backward",
]

_rms_norm = register(declarations.RMS_NORM)
_layer_norm = register(declarations.LAYER_NORM)
_add_rms_norm = register(declarations.ADD_RMS_NORM)
_add_layer_norm = register(declarations.ADD_LAYER_NORM)
_rms_norm_add = register(declarations.RMS_NORM_ADD)
_layer_norm_add = register(declarations.LAYER_NORM_ADD)
_rms_norm_backward = register(declarations.RMS_NORM_BACKWARD)
_layer_norm_backward = register(declarations.LAYER_NORM_BACKWARD)
_add_rms_norm_backward = register(declarations.ADD_RMS_NORM_BACKWARD)
_add_layer_norm_backward = register(declarations.ADD_LAYER_NORM_BACKWARD)
_rms_norm_add_backward = register(declarations.RMS_NORM_ADD_BACKWARD)
_layer_norm_add_backward = register(declarations.LAYER_NORM_ADD_BACKWARD)
_rms_norm_viewed = viewed(declarations.RMS_NORM, _rms_norm)
_layer_norm_viewed = viewed(declarations.LAYER_NORM, _layer_norm)
_add_rms_norm_viewed = viewed(declarations.ADD_RMS_NORM, _add_rms_norm)
_add_layer_norm_viewed = viewed(declarations.ADD_LAYER_NORM, _add_layer_norm)
_rms_norm_add_viewed = viewed(declarations.RMS_NORM_ADD, _rms_norm_add)
_layer_norm_add_viewed = viewed(declarations.LAYER_NORM_ADD, _layer_norm_add)
_rms_norm_backward_viewed = viewed(declarations.RMS_NORM_BACKWARD, _rms_norm_backward)
_layer_norm_backward_viewed = viewed(declarations.LAYER_NORM_BACKWARD, _layer_norm_backward)
_add_rms_norm_backward_viewed = viewed(declarations.ADD_RMS_NORM_BACKWARD, _add_rms_norm_backward)
_add_layer_norm_backward_viewed = viewed(declarations.ADD_LAYER_NORM_BACKWARD, _add_layer_norm_backward)
_rms_norm_add_backward_viewed = viewed(declarations.RMS_NORM_ADD_BACKWARD, _rms_norm_add_backward)
_layer_norm_add_backward_viewed = viewed(declarations.LAYER_NORM_ADD_BACKWARD, _layer_norm_add_backward)


def rms_norm(
    x: Any,
    weight: Any = None,
    eps: float = 1e-06,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    round_before_weight: bool = False,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize each row by its root mean square.

    ``y = x * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(mean(x ** 2) + eps)`` over the last
    dimension (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). Arithmetic is in float32, and y is
    rounded once. Rows of numbers below 1e18 are right at every length. If the squares of larger numbers overflow, rstd
    is 0 and y is the bias. An eps below 7e-46 is 0 in float32. Then numbers below 1e-18 lose digits, a row of numbers
    below 1e-23 has an infinite rstd and y, and a row of zeros becomes NaN. A row's bits do not depend on the number of
    rows, nor on their addresses.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        An array on a GPU. An array on the host is copied to the current GPU, and y is copied back; without a GPU,
        the simulator computes y. The last dimension is contiguous and has 1 to 2**30 elements. The others collapse
        to at most two strides, as rows and heads of a packed qkv do.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One weight for all rows, or one for each head of an x of [..., heads, hidden], for up to 65535 heads. None:
        the factor is 1, whatever `weight_offset` is.
    eps : float
        Added to the mean of squares; not negative.
    normalized_shape : int or sequence of int, optional
        The last dimensions of x, which are normalized together, as in torch's layer_norm. They are viewed as one
        dimension; if x's strides do not allow that, pass ``x.contiguous()``. Weight, bias and their gradients have
        this shape, and mean and rstd have the other dimensions. None: the last dimension.
    bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        Of the weight's shape. None: 0.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array [..., hidden], optional
        Where y is written: x itself, or an array that shares no element with the inputs, of any type that
        `out_dtype` names.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    round_before_weight : bool
        Whether ``x * rstd`` is rounded to x's type before it is multiplied by the weight, and y is rounded once
        more. If rstd is equal, y has the bits of code with these two steps, such as Hugging Face's LlamaRMSNorm. It
        changes nothing if that type is float32. The gradient ignores this rounding.
    return_rstd : bool
        Whether to return rstd as well.
    scale : array of one float32, optional
        For an output of float8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8: it becomes the maximum of its value and of the magnitudes of y before the scale, or
        NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by its own scale, and the scales are returned:
        ``y = out * row_scale``. A scale is the row's largest magnitude divided by the largest number of the type.
        It is at least 2^-126, and 1 for a row of zeros.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    y : array [..., hidden]
        An array of x's framework and x's type, or as requested.
    rstd : array [...], float32
        Only if `return_rstd`. It has no gradient.
    row_scale : array [...], float32
        Only if `row_scaling`. It has no gradient.

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
    >>> from transformer_rtc import rms_norm
    >>> x = np.array([[4, 1, 1, 1, 1]], np.float32)  # the mean of its squares is 4
    >>> weight = np.array([1, 1, 1, 1, 10], np.float32)
    >>> rms_norm(x, weight, eps=0.0, return_rstd=True)
    (array([[2. , 0.5, 0.5, 0.5, 5. ]], dtype=float32), array([0.5], dtype=float32))
    """
    if normalized_shape is not None:
        return _rms_norm_viewed(
            normalized_shape,
            x,
            weight,
            bias,
            eps,
            weight_offset,
            out,
            out_dtype,
            round_before_weight,
            return_rstd,
            scale,
            amax,
            scale_inv,
            row_scaling,
            sm_margin,
            stream,
        )
    return _rms_norm(
        x,
        weight,
        bias,
        eps,
        weight_offset,
        out,
        out_dtype,
        round_before_weight,
        return_rstd,
        scale,
        amax,
        scale_inv,
        row_scaling,
        sm_margin,
        stream,
    )


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-05,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_mean: bool = False,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize each row to mean 0 and variance 1.

    ``y = (x - mean) * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(variance + eps)`` over the last
    dimension. The variance is that of the population (Ba, Kiros and Hinton, "Layer Normalization", 2016). It is
    computed in float32 about the mean, or about a value at most 1.4 standard deviations from it, for which it is
    corrected. So a row of large equal numbers with little noise keeps its accuracy. The rules of `rms_norm` for large
    numbers, and for an eps of 0, hold for deviations from the mean: if their squares overflow, y is the bias. If the
    sum of a row's numbers overflows, y is NaN.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        An array on a GPU. An array on the host is copied to the current GPU, and y is copied back; without a GPU,
        the simulator computes y. The last dimension is contiguous and has 1 to 2**30 elements. The others collapse
        to at most two strides, as rows and heads of a packed qkv do.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One weight for all rows, or one for each head of an x of [..., heads, hidden], for up to 65535 heads. None:
        the factor is 1, whatever `weight_offset` is.
    bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        Of the weight's shape. None: 0.
    eps : float
        Added to the variance; not negative.
    normalized_shape : int or sequence of int, optional
        The last dimensions of x, which are normalized together, as in torch's layer_norm. They are viewed as one
        dimension; if x's strides do not allow that, pass ``x.contiguous()``. Weight, bias and their gradients have
        this shape, and mean and rstd have the other dimensions. None: the last dimension.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array [..., hidden], optional
        Where y is written: x itself, or an array that shares no element with the inputs, of any type that
        `out_dtype` names.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    return_mean : bool
        Whether to return the mean as well.
    return_rstd : bool
        Whether to return rstd as well.
    scale : array of one float32, optional
        For an output of float8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8: it becomes the maximum of its value and of the magnitudes of y before the scale, or
        NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by its own scale, and the scales are returned:
        ``y = out * row_scale``. A scale is the row's largest magnitude divided by the largest number of the type.
        It is at least 2^-126, and 1 for a row of zeros.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    y : array [..., hidden]
        An array of x's framework and x's type, or as requested.
    mean : array [...], float32
        Only if `return_mean`. It has no gradient.
    rstd : array [...], float32
        Only if `return_rstd`. It has no gradient.
    row_scale : array [...], float32
        Only if `row_scaling`. It has no gradient.

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
    >>> from transformer_rtc import layer_norm
    >>> x = np.array([[6, 1, 1, 1, 1]], np.float32)  # the mean is 2, and the variance 4
    >>> weight, bias = np.full(5, 2, np.float32), np.ones(5, np.float32)
    >>> y, mean, rstd = layer_norm(x, weight, bias, eps=0.0, return_mean=True, return_rstd=True)
    >>> y
    array([[5., 0., 0., 0., 0.]], dtype=float32)
    >>> mean, rstd
    (array([2.], dtype=float32), array([0.5], dtype=float32))
    """
    if normalized_shape is not None:
        return _layer_norm_viewed(
            normalized_shape,
            x,
            weight,
            bias,
            eps,
            weight_offset,
            out,
            out_dtype,
            return_mean,
            return_rstd,
            scale,
            amax,
            scale_inv,
            row_scaling,
            sm_margin,
            stream,
        )
    return _layer_norm(
        x,
        weight,
        bias,
        eps,
        weight_offset,
        out,
        out_dtype,
        return_mean,
        return_rstd,
        scale,
        amax,
        scale_inv,
        row_scaling,
        sm_margin,
        stream,
    )


def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-06,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    residual_out: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    round_before_weight: bool = False,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Add a residual, then normalize: ``s = x + residual``, ``y = rms_norm(s, weight, eps)``.

    s is the sum in float32, rounded once to the residual's type or to `residual_dtype`. The rounded s is normalized,
    as by two calls. A pre-norm transformer passes s on as the next residual, and a post-norm one passes y on. The
    gradient is that of `add_rms_norm_backward`.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        As in `rms_norm`.
    residual : array [..., hidden], float32, float16 or bfloat16
        Of x's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One weight for all rows, or one for each head of an x of [..., heads, hidden], for up to 65535 heads. None:
        the factor is 1, whatever `weight_offset` is.
    eps : float
        Added to the mean of squares; not negative.
    normalized_shape : int or sequence of int, optional
        The last dimensions of x, which are normalized together, as in torch's layer_norm. They are viewed as one
        dimension; if x's strides do not allow that, pass ``x.contiguous()``. Weight, bias and their gradients have
        this shape, and mean and rstd have the other dimensions. None: the last dimension.
    bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        Of the weight's shape. None: 0.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array [..., hidden], optional
        Where y is written: x itself or residual itself, or an array that shares no element with the inputs, of any
        type that `out_dtype` names.
    residual_out : array [..., hidden], optional
        Where s is written, in any type that `residual_dtype` names. It may be x itself or residual itself: out=x
        and residual_out=residual is in place.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    residual_dtype : data type, optional
        The data type of s if `residual_out` is not given: float32, float16 or bfloat16, of any framework or by
        name; residual's by default. float32 begins a residual stream of float32 for inputs of 16 bits. y's type
        does not depend on it.
    round_before_weight : bool
        Whether ``x * rstd`` is rounded to the type of s before it is multiplied by the weight, and y is rounded
        once more. If rstd is equal, y has the bits of code with these two steps, such as Hugging Face's
        LlamaRMSNorm. It changes nothing if that type is float32. The gradient ignores this rounding.
    return_rstd : bool
        Whether to return rstd as well.
    scale : array of one float32, optional
        For an output of float8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8: it becomes the maximum of its value and of the magnitudes of y before the scale, or
        NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by its own scale, and the scales are returned:
        ``y = out * row_scale``. A scale is the row's largest magnitude divided by the largest number of the type.
        It is at least 2^-126, and 1 for a row of zeros.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    y : array [..., hidden]
        An array of x's framework and x's type, or as requested.
    s : array [..., hidden]
        The sum, of residual's type or as requested.
    rstd : array [...], float32
        Only if `return_rstd`. It has no gradient.
    row_scale : array [...], float32
        Only if `row_scaling`. It has no gradient.

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
    >>> from transformer_rtc import add_rms_norm
    >>> x, residual = np.array([[3, 0, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
    >>> y, s = add_rms_norm(x, residual, eps=0.0)
    >>> s  # the next residual: the mean of its squares is 4
    array([[4., 1., 1., 1., 1.]], dtype=float32)
    >>> y
    array([[2. , 0.5, 0.5, 0.5, 0.5]], dtype=float32)
    """
    if normalized_shape is not None:
        return _add_rms_norm_viewed(
            normalized_shape,
            x,
            residual,
            weight,
            bias,
            eps,
            weight_offset,
            out,
            residual_out,
            out_dtype,
            residual_dtype,
            round_before_weight,
            return_rstd,
            scale,
            amax,
            scale_inv,
            row_scaling,
            sm_margin,
            stream,
        )
    return _add_rms_norm(
        x,
        residual,
        weight,
        bias,
        eps,
        weight_offset,
        out,
        residual_out,
        out_dtype,
        residual_dtype,
        round_before_weight,
        return_rstd,
        scale,
        amax,
        scale_inv,
        row_scaling,
        sm_margin,
        stream,
    )


def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-05,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out: Any = None,
    residual_out: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    return_mean: bool = False,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Add a residual, then normalize: ``s = x + residual``, ``y = layer_norm(s, weight, bias, eps)``.

    Rounding is as in `add_rms_norm`. The gradient is that of `add_layer_norm_backward`.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        As in `rms_norm`.
    residual : array [..., hidden], float32, float16 or bfloat16
        Of x's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One weight for all rows, or one for each head of an x of [..., heads, hidden], for up to 65535 heads. None:
        the factor is 1, whatever `weight_offset` is.
    bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        Of the weight's shape. None: 0.
    eps : float
        Added to the variance; not negative.
    normalized_shape : int or sequence of int, optional
        The last dimensions of x, which are normalized together, as in torch's layer_norm. They are viewed as one
        dimension; if x's strides do not allow that, pass ``x.contiguous()``. Weight, bias and their gradients have
        this shape, and mean and rstd have the other dimensions. None: the last dimension.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array [..., hidden], optional
        Where y is written: x itself or residual itself, or an array that shares no element with the inputs, of any
        type that `out_dtype` names.
    residual_out : array [..., hidden], optional
        Where s is written, in any type that `residual_dtype` names. It may be x itself or residual itself: out=x
        and residual_out=residual is in place.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    residual_dtype : data type, optional
        The data type of s if `residual_out` is not given: float32, float16 or bfloat16, of any framework or by
        name; residual's by default. float32 begins a residual stream of float32 for inputs of 16 bits. y's type
        does not depend on it.
    return_mean : bool
        Whether to return the mean as well.
    return_rstd : bool
        Whether to return rstd as well.
    scale : array of one float32, optional
        For an output of float8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8: it becomes the maximum of its value and of the magnitudes of y before the scale, or
        NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by its own scale, and the scales are returned:
        ``y = out * row_scale``. A scale is the row's largest magnitude divided by the largest number of the type.
        It is at least 2^-126, and 1 for a row of zeros.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    y : array [..., hidden]
        An array of x's framework and x's type, or as requested.
    s : array [..., hidden]
        The sum, of residual's type or as requested.
    mean : array [...], float32
        Only if `return_mean`. It has no gradient.
    rstd : array [...], float32
        Only if `return_rstd`. It has no gradient.
    row_scale : array [...], float32
        Only if `row_scaling`. It has no gradient.

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
    >>> from transformer_rtc import add_layer_norm
    >>> x, residual = np.array([[5, 0, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
    >>> y, s = add_layer_norm(x, residual, eps=0.0)
    >>> s  # the next residual: its mean is 2, and its variance 4
    array([[6., 1., 1., 1., 1.]], dtype=float32)
    >>> y
    array([[ 2. , -0.5, -0.5, -0.5, -0.5]], dtype=float32)
    """
    if normalized_shape is not None:
        return _add_layer_norm_viewed(
            normalized_shape,
            x,
            residual,
            weight,
            bias,
            eps,
            weight_offset,
            out,
            residual_out,
            out_dtype,
            residual_dtype,
            return_mean,
            return_rstd,
            scale,
            amax,
            scale_inv,
            row_scaling,
            sm_margin,
            stream,
        )
    return _add_layer_norm(
        x,
        residual,
        weight,
        bias,
        eps,
        weight_offset,
        out,
        residual_out,
        out_dtype,
        residual_dtype,
        return_mean,
        return_rstd,
        scale,
        amax,
        scale_inv,
        row_scaling,
        sm_margin,
        stream,
    )


def rms_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-06,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize, then add a residual: ``y = residual + rms_norm(x, weight, eps)``, rounded once.

    Gemma 2 and OLMo 2 use this form. The gradient of residual is that of y. The other gradients are those of
    `rms_norm_add_backward`.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        As in `rms_norm`.
    residual : array [..., hidden], float32, float16 or bfloat16
        Of x's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One weight for all rows, or one for each head of an x of [..., heads, hidden], for up to 65535 heads. None:
        the factor is 1, whatever `weight_offset` is.
    eps : float
        Added to the mean of squares; not negative.
    normalized_shape : int or sequence of int, optional
        The last dimensions of x, which are normalized together, as in torch's layer_norm. They are viewed as one
        dimension; if x's strides do not allow that, pass ``x.contiguous()``. Weight, bias and their gradients have
        this shape, and mean and rstd have the other dimensions. None: the last dimension.
    bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        Of the weight's shape. None: 0.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array [..., hidden], optional
        Where y is written: x itself or residual itself, or an array that shares no element with the inputs, of any
        type that `out_dtype` names.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; residual's by default. float32, float16 or
        bfloat16.
    return_rstd : bool
        Whether to return rstd as well.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    y : array [..., hidden]
        An array of x's framework and residual's type, or as requested.
    rstd : array [...], float32
        Only if `return_rstd`. It has no gradient.

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
    >>> from transformer_rtc import rms_norm_add
    >>> x, residual = np.array([[4, 1, 1, 1, 1]], np.float32), np.full((1, 5), 10, np.float32)
    >>> rms_norm_add(x, residual, eps=0.0)  # the mean of x's squares is 4
    array([[12. , 10.5, 10.5, 10.5, 10.5]], dtype=float32)
    """
    if normalized_shape is not None:
        return _rms_norm_add_viewed(
            normalized_shape,
            x,
            residual,
            weight,
            bias,
            eps,
            weight_offset,
            out,
            out_dtype,
            return_rstd,
            sm_margin,
            stream,
        )
    return _rms_norm_add(x, residual, weight, bias, eps, weight_offset, out, out_dtype, return_rstd, sm_margin, stream)


def layer_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-05,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_mean: bool = False,
    return_rstd: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize, then add a residual: ``y = residual + layer_norm(x, weight, bias, eps)``, rounded once.

    Rounding is as in `rms_norm_add`. The gradients are those of `layer_norm_add_backward`.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        As in `rms_norm`.
    residual : array [..., hidden], float32, float16 or bfloat16
        Of x's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One weight for all rows, or one for each head of an x of [..., heads, hidden], for up to 65535 heads. None:
        the factor is 1, whatever `weight_offset` is.
    bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        Of the weight's shape. None: 0.
    eps : float
        Added to the variance; not negative.
    normalized_shape : int or sequence of int, optional
        The last dimensions of x, which are normalized together, as in torch's layer_norm. They are viewed as one
        dimension; if x's strides do not allow that, pass ``x.contiguous()``. Weight, bias and their gradients have
        this shape, and mean and rstd have the other dimensions. None: the last dimension.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array [..., hidden], optional
        Where y is written: x itself or residual itself, or an array that shares no element with the inputs, of any
        type that `out_dtype` names.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; residual's by default. float32, float16 or
        bfloat16.
    return_mean : bool
        Whether to return the mean as well.
    return_rstd : bool
        Whether to return rstd as well.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    y : array [..., hidden]
        An array of x's framework and residual's type, or as requested.
    mean : array [...], float32
        Only if `return_mean`. It has no gradient.
    rstd : array [...], float32
        Only if `return_rstd`. It has no gradient.

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
    >>> from transformer_rtc import layer_norm_add
    >>> x, residual = np.array([[6, 1, 1, 1, 1]], np.float32), np.full((1, 5), 10, np.float32)
    >>> layer_norm_add(x, residual, eps=0.0)  # x's mean is 2, and its variance 4
    array([[12. ,  9.5,  9.5,  9.5,  9.5]], dtype=float32)
    """
    if normalized_shape is not None:
        return _layer_norm_add_viewed(
            normalized_shape,
            x,
            residual,
            weight,
            bias,
            eps,
            weight_offset,
            out,
            out_dtype,
            return_mean,
            return_rstd,
            sm_margin,
            stream,
        )
    return _layer_norm_add(
        x,
        residual,
        weight,
        bias,
        eps,
        weight_offset,
        out,
        out_dtype,
        return_mean,
        return_rstd,
        sm_margin,
        stream,
    )


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-06,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    rstd: Any = None,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool = False,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `rms_norm`: dx, dweight and dbias, or those of them that are requested.

    With ``x' = x * rstd`` and ``g = dy * (weight + weight_offset)``::

        dx      = rstd * (g - x' * mean(g * x')) + dresidual     over the last dimension
        dweight = sum(dy * x')                                   over all others, except the heads
        dbias   = sum(dy)

    (Zhang and Sennrich, 2019, appendix.) Arithmetic and the sums over rows are in float32, and each result is rounded
    once. dweight and dbias have the same bits in every run: the device, the shape, `sm_margin` and whether all rows
    are aligned to 16 bytes fix the order of their sums. A row's dx depends on no other row. A gradient that is not
    requested costs nothing. For large numbers, and for an eps of 0, rstd is as in the forward. If it is 0, dx is
    dresidual and the row adds nothing to dweight. If it is infinite, neither is finite. Without `rstd`, ``g * x`` is
    summed before it is multiplied by rstd. If that sum overflows, dx is not finite.

    Parameters
    ----------
    dy : array [..., hidden], float32, float16 or bfloat16
        The gradient of y; as `rms_norm` takes x.
    x : array [..., hidden], float32, float16 or bfloat16
        What the forward call was given, of dy's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps : float
        The forward call's.
    normalized_shape : int or sequence of int, optional
        The forward call's.
    rstd : array [...], float32, optional
        The forward call's. It may have one more dimension of 1 at the end. None: computed again from x and eps, in
        the same launch.
    dresidual : array [..., hidden], float32, float16 or bfloat16, optional
        A gradient that is added to dx. It is not read if dx is not requested.
    weight_offset : float
        The forward call's.
    out : array [..., hidden], optional
        Where dx is written: dy, x or dresidual itself, or an array that shares no element with them; float32,
        float16 or bfloat16.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_dx : bool
        Whether to compute dx.
    return_dweight : bool, optional
        Whether to compute dweight; by default whether a weight is given.
    return_dbias : bool
        Whether to compute dbias.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`.
    dweight : array [hidden] or [heads, hidden]
        Only if `return_dweight`. Of the weight's shape; [hidden] where there is none.
    dbias : array [hidden] or [heads, hidden]
        Only if `return_dbias`. Of the weight's shape; [hidden] where there is none.

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
    >>> from transformer_rtc import rms_norm_backward
    >>> x = np.array([[4, 1, 1, 1, 1]], np.float32)  # x * rstd is [2, 0.5, 0.5, 0.5, 0.5]
    >>> dy = np.array([[0, 5, 0, 0, 0]], np.float32)
    >>> dx, dweight = rms_norm_backward(dy, x, np.ones(5, np.float32), eps=0.0)
    >>> dx
    array([[-0.5  ,  2.375, -0.125, -0.125, -0.125]], dtype=float32)
    >>> dweight
    array([0. , 2.5, 0. , 0. , 0. ], dtype=float32)
    """
    if normalized_shape is not None:
        return _rms_norm_backward_viewed(
            normalized_shape,
            dy,
            x,
            weight,
            eps,
            rstd,
            dresidual,
            weight_offset,
            out,
            out_dtype,
            return_dx,
            return_dweight,
            return_dbias,
            dweight_dtype,
            sm_margin,
            stream,
        )
    return _rms_norm_backward(
        dy,
        x,
        weight,
        eps,
        rstd,
        dresidual,
        weight_offset,
        out,
        out_dtype,
        return_dx,
        return_dweight,
        return_dbias,
        dweight_dtype,
        sm_margin,
        stream,
    )


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-05,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    mean: Any = None,
    rstd: Any = None,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool | None = None,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `layer_norm`: dx, dweight and dbias, or those of them that are requested.

    With ``x' = (x - mean) * rstd`` and ``g = dy * (weight + weight_offset)``::

        dx      = rstd * (g - mean(g) - x' * mean(g * x')) + dresidual     over the last dimension
        dweight = sum(dy * x')                                             over all others, except the heads
        dbias   = sum(dy)

    (Ba, Kiros and Hinton, 2016.) The other rules are those of `rms_norm_backward`.

    Parameters
    ----------
    dy : array [..., hidden], float32, float16 or bfloat16
        The gradient of y; as `rms_norm` takes x.
    x : array [..., hidden], float32, float16 or bfloat16
        What the forward call was given, of dy's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps : float
        The forward call's.
    normalized_shape : int or sequence of int, optional
        The forward call's.
    mean : array [...], float32, optional
        The forward call's. Give both mean and rstd, or neither. It may have one more dimension of 1 at the end.
        None: computed again from x and eps, in the same launch.
    rstd : array [...], float32, optional
        The forward call's. Give both mean and rstd, or neither. It may have one more dimension of 1 at the end.
        None: computed again from x and eps, in the same launch.
    dresidual : array [..., hidden], float32, float16 or bfloat16, optional
        A gradient that is added to dx. It is not read if dx is not requested.
    weight_offset : float
        The forward call's.
    out : array [..., hidden], optional
        Where dx is written: dy, x or dresidual itself, or an array that shares no element with them; float32,
        float16 or bfloat16.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_dx : bool
        Whether to compute dx.
    return_dweight : bool, optional
        Whether to compute dweight; by default whether a weight is given.
    return_dbias : bool, optional
        Whether to compute dbias; by default whether a weight is given.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`.
    dweight : array [hidden] or [heads, hidden]
        Only if `return_dweight`. Of the weight's shape; [hidden] where there is none.
    dbias : array [hidden] or [heads, hidden]
        Only if `return_dbias`. Of the weight's shape; [hidden] where there is none.

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
    >>> from transformer_rtc import layer_norm_backward
    >>> x = np.array([[6, 1, 1, 1, 1]], np.float32)  # (x - mean) * rstd is [2, -0.5, -0.5, -0.5, -0.5]
    >>> dy = np.array([[0, 5, 0, 0, 0]], np.float32)
    >>> dx, dweight, dbias = layer_norm_backward(dy, x, np.ones(5, np.float32), eps=0.0)
    >>> dx
    array([[ 0.   ,  1.875, -0.625, -0.625, -0.625]], dtype=float32)
    >>> dweight
    array([ 0. , -2.5,  0. ,  0. ,  0. ], dtype=float32)
    >>> dbias
    array([0., 5., 0., 0., 0.], dtype=float32)
    """
    if normalized_shape is not None:
        return _layer_norm_backward_viewed(
            normalized_shape,
            dy,
            x,
            weight,
            eps,
            mean,
            rstd,
            dresidual,
            weight_offset,
            out,
            out_dtype,
            return_dx,
            return_dweight,
            return_dbias,
            dweight_dtype,
            sm_margin,
            stream,
        )
    return _layer_norm_backward(
        dy,
        x,
        weight,
        eps,
        mean,
        rstd,
        dresidual,
        weight_offset,
        out,
        out_dtype,
        return_dx,
        return_dweight,
        return_dbias,
        dweight_dtype,
        sm_margin,
        stream,
    )


def add_rms_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    weight: Any = None,
    eps: float = 1e-06,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    rstd: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool = False,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `add_rms_norm`, whose outputs are y and s.

    x and residual have the same gradient, ``rms_norm_backward(dy, s, weight, eps, dresidual=ds)``: one launch adds
    ds.

    Parameters
    ----------
    dy : array [..., hidden], float32, float16 or bfloat16
        The gradient of y; as `rms_norm` takes x.
    ds : array [..., hidden], float32, float16 or bfloat16 or None
        The gradient of s. None: s is not used.
    s : array [..., hidden], float32, float16 or bfloat16
        What the forward call returned as s, of dy's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps : float
        The forward call's.
    normalized_shape : int or sequence of int, optional
        The forward call's.
    rstd : array [...], float32, optional
        The forward call's. It may have one more dimension of 1 at the end. None: computed again from x and eps, in
        the same launch.
    weight_offset : float
        The forward call's.
    out : array [..., hidden], optional
        Where dx is written: dy, ds or s itself, or an array that shares no element with them.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; s's by default.
    return_dx : bool
        Whether to compute dx.
    return_dweight : bool, optional
        Whether to compute dweight; by default whether a weight is given.
    return_dbias : bool
        Whether to compute dbias.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`; the gradient of x and of residual.
    dweight : array [hidden] or [heads, hidden]
        Only if `return_dweight`. Of the weight's shape; [hidden] where there is none.
    dbias : array [hidden] or [heads, hidden]
        Only if `return_dbias`. Of the weight's shape; [hidden] where there is none.

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
    >>> from transformer_rtc import add_rms_norm_backward
    >>> s = np.array([[4, 1, 1, 1, 1]], np.float32)  # s * rstd is [2, 0.5, 0.5, 0.5, 0.5]
    >>> dy, ds = np.array([[0, 5, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
    >>> dx, dweight = add_rms_norm_backward(dy, ds, s, np.ones(5, np.float32), eps=0.0)
    >>> dx  # that of rms_norm_backward, and ds
    array([[0.5  , 3.375, 0.875, 0.875, 0.875]], dtype=float32)
    >>> dweight
    array([0. , 2.5, 0. , 0. , 0. ], dtype=float32)
    """
    if normalized_shape is not None:
        return _add_rms_norm_backward_viewed(
            normalized_shape,
            dy,
            s,
            weight,
            eps,
            rstd,
            ds,
            weight_offset,
            out,
            out_dtype,
            return_dx,
            return_dweight,
            return_dbias,
            dweight_dtype,
            sm_margin,
            stream,
        )
    return _add_rms_norm_backward(
        dy,
        s,
        weight,
        eps,
        rstd,
        ds,
        weight_offset,
        out,
        out_dtype,
        return_dx,
        return_dweight,
        return_dbias,
        dweight_dtype,
        sm_margin,
        stream,
    )


def add_layer_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    weight: Any = None,
    eps: float = 1e-05,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    mean: Any = None,
    rstd: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool | None = None,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `add_layer_norm`, whose outputs are y and s.

    x and residual have the same gradient, ``layer_norm_backward(dy, s, weight, eps, dresidual=ds)``: one launch adds
    ds.

    Parameters
    ----------
    dy : array [..., hidden], float32, float16 or bfloat16
        The gradient of y; as `rms_norm` takes x.
    ds : array [..., hidden], float32, float16 or bfloat16 or None
        The gradient of s. None: s is not used.
    s : array [..., hidden], float32, float16 or bfloat16
        What the forward call returned as s, of dy's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps : float
        The forward call's.
    normalized_shape : int or sequence of int, optional
        The forward call's.
    mean : array [...], float32, optional
        The forward call's. Give both mean and rstd, or neither. It may have one more dimension of 1 at the end.
        None: computed again from x and eps, in the same launch.
    rstd : array [...], float32, optional
        The forward call's. Give both mean and rstd, or neither. It may have one more dimension of 1 at the end.
        None: computed again from x and eps, in the same launch.
    weight_offset : float
        The forward call's.
    out : array [..., hidden], optional
        Where dx is written: dy, ds or s itself, or an array that shares no element with them.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; s's by default.
    return_dx : bool
        Whether to compute dx.
    return_dweight : bool, optional
        Whether to compute dweight; by default whether a weight is given.
    return_dbias : bool, optional
        Whether to compute dbias; by default whether a weight is given.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`; the gradient of x and of residual.
    dweight : array [hidden] or [heads, hidden]
        Only if `return_dweight`. Of the weight's shape; [hidden] where there is none.
    dbias : array [hidden] or [heads, hidden]
        Only if `return_dbias`. Of the weight's shape; [hidden] where there is none.

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
    >>> from transformer_rtc import add_layer_norm_backward
    >>> s = np.array([[6, 1, 1, 1, 1]], np.float32)  # (s - mean) * rstd is [2, -0.5, -0.5, -0.5, -0.5]
    >>> dy, ds = np.array([[0, 5, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
    >>> dx, dweight, dbias = add_layer_norm_backward(dy, ds, s, np.ones(5, np.float32), eps=0.0)
    >>> dx  # that of layer_norm_backward, and ds
    array([[1.   , 2.875, 0.375, 0.375, 0.375]], dtype=float32)
    >>> dweight
    array([ 0. , -2.5,  0. ,  0. ,  0. ], dtype=float32)
    >>> dbias
    array([0., 5., 0., 0., 0.], dtype=float32)
    """
    if normalized_shape is not None:
        return _add_layer_norm_backward_viewed(
            normalized_shape,
            dy,
            s,
            weight,
            eps,
            mean,
            rstd,
            ds,
            weight_offset,
            out,
            out_dtype,
            return_dx,
            return_dweight,
            return_dbias,
            dweight_dtype,
            sm_margin,
            stream,
        )
    return _add_layer_norm_backward(
        dy,
        s,
        weight,
        eps,
        mean,
        rstd,
        ds,
        weight_offset,
        out,
        out_dtype,
        return_dx,
        return_dweight,
        return_dbias,
        dweight_dtype,
        sm_margin,
        stream,
    )


def rms_norm_add_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-06,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    rstd: Any = None,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool = False,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `rms_norm_add`, ``y = residual + rms_norm(x)``, except residual's, which is dy.

    They are those of `rms_norm`, by the same formulas: ``rms_norm_backward(dy, x, weight, eps, ...)``.

    Parameters
    ----------
    dy : array [..., hidden], float32, float16 or bfloat16
        The gradient of y; as `rms_norm` takes x.
    x : array [..., hidden], float32, float16 or bfloat16
        What was normalized, of dy's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps : float
        The forward call's.
    normalized_shape : int or sequence of int, optional
        The forward call's.
    rstd : array [...], float32, optional
        The forward call's. It may have one more dimension of 1 at the end. None: computed again from x and eps, in
        the same launch.
    dresidual : array [..., hidden], float32, float16 or bfloat16, optional
        A gradient that is added to dx, such as that of another use of x; not that of the forward call's residual.
        It is not read if dx is not requested.
    weight_offset : float
        The forward call's.
    out : array [..., hidden], optional
        Where dx is written: dy, x or dresidual itself, or an array that shares no element with them; float32,
        float16 or bfloat16.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_dx : bool
        Whether to compute dx.
    return_dweight : bool, optional
        Whether to compute dweight; by default whether a weight is given.
    return_dbias : bool
        Whether to compute dbias.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`.
    dweight : array [hidden] or [heads, hidden]
        Only if `return_dweight`. Of the weight's shape; [hidden] where there is none.
    dbias : array [hidden] or [heads, hidden]
        Only if `return_dbias`. Of the weight's shape; [hidden] where there is none.

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
    >>> from transformer_rtc import rms_norm_add_backward
    >>> x = np.array([[4, 1, 1, 1, 1]], np.float32)  # x * rstd is [2, 0.5, 0.5, 0.5, 0.5]
    >>> dy = np.array([[0, 5, 0, 0, 0]], np.float32)
    >>> dx, dweight = rms_norm_add_backward(dy, x, np.ones(5, np.float32), eps=0.0)
    >>> dx
    array([[-0.5  ,  2.375, -0.125, -0.125, -0.125]], dtype=float32)
    >>> dweight
    array([0. , 2.5, 0. , 0. , 0. ], dtype=float32)
    """
    if normalized_shape is not None:
        return _rms_norm_add_backward_viewed(
            normalized_shape,
            dy,
            x,
            weight,
            eps,
            rstd,
            dresidual,
            weight_offset,
            out,
            out_dtype,
            return_dx,
            return_dweight,
            return_dbias,
            dweight_dtype,
            sm_margin,
            stream,
        )
    return _rms_norm_add_backward(
        dy,
        x,
        weight,
        eps,
        rstd,
        dresidual,
        weight_offset,
        out,
        out_dtype,
        return_dx,
        return_dweight,
        return_dbias,
        dweight_dtype,
        sm_margin,
        stream,
    )


def layer_norm_add_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-05,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    mean: Any = None,
    rstd: Any = None,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool | None = None,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `layer_norm_add`, ``y = residual + layer_norm(x)``, except residual's, which is dy.

    They are those of `layer_norm`, by the same formulas: ``layer_norm_backward(dy, x, weight, eps, ...)``.

    Parameters
    ----------
    dy : array [..., hidden], float32, float16 or bfloat16
        The gradient of y; as `rms_norm` takes x.
    x : array [..., hidden], float32, float16 or bfloat16
        What was normalized, of dy's shape.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps : float
        The forward call's.
    normalized_shape : int or sequence of int, optional
        The forward call's.
    mean : array [...], float32, optional
        The forward call's. Give both mean and rstd, or neither. It may have one more dimension of 1 at the end.
        None: computed again from x and eps, in the same launch.
    rstd : array [...], float32, optional
        The forward call's. Give both mean and rstd, or neither. It may have one more dimension of 1 at the end.
        None: computed again from x and eps, in the same launch.
    dresidual : array [..., hidden], float32, float16 or bfloat16, optional
        A gradient that is added to dx, such as that of another use of x; not that of the forward call's residual.
        It is not read if dx is not requested.
    weight_offset : float
        The forward call's.
    out : array [..., hidden], optional
        Where dx is written: dy, x or dresidual itself, or an array that shares no element with them; float32,
        float16 or bfloat16.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_dx : bool
        Whether to compute dx.
    return_dweight : bool, optional
        Whether to compute dweight; by default whether a weight is given.
    return_dbias : bool, optional
        Whether to compute dbias; by default whether a weight is given.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin : int
        How many multiprocessors to leave free, such as for communication at the same time. The launch has no more
        CTAs than the remaining ones hold, and each CTA works on one row after another. Any number above 0 shares
        one further kernel.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the
        framework's current stream.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`.
    dweight : array [hidden] or [heads, hidden]
        Only if `return_dweight`. Of the weight's shape; [hidden] where there is none.
    dbias : array [hidden] or [heads, hidden]
        Only if `return_dbias`. Of the weight's shape; [hidden] where there is none.

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
    >>> from transformer_rtc import layer_norm_add_backward
    >>> x = np.array([[6, 1, 1, 1, 1]], np.float32)  # (x - mean) * rstd is [2, -0.5, -0.5, -0.5, -0.5]
    >>> dy = np.array([[0, 5, 0, 0, 0]], np.float32)
    >>> dx, dweight, dbias = layer_norm_add_backward(dy, x, np.ones(5, np.float32), eps=0.0)
    >>> dx
    array([[ 0.   ,  1.875, -0.625, -0.625, -0.625]], dtype=float32)
    >>> dweight
    array([ 0. , -2.5,  0. ,  0. ,  0. ], dtype=float32)
    >>> dbias
    array([0., 5., 0., 0., 0.], dtype=float32)
    """
    if normalized_shape is not None:
        return _layer_norm_add_backward_viewed(
            normalized_shape,
            dy,
            x,
            weight,
            eps,
            mean,
            rstd,
            dresidual,
            weight_offset,
            out,
            out_dtype,
            return_dx,
            return_dweight,
            return_dbias,
            dweight_dtype,
            sm_margin,
            stream,
        )
    return _layer_norm_add_backward(
        dy,
        x,
        weight,
        eps,
        mean,
        rstd,
        dresidual,
        weight_offset,
        out,
        out_dtype,
        return_dx,
        return_dweight,
        return_dbias,
        dweight_dtype,
        sm_margin,
        stream,
    )
