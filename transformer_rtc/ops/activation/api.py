# SPDX-License-Identifier: Apache-2.0
"""Activations, forward and backward: GELU, SiLU, squared ReLU, and gated ones."""

# Written by tests/tools/make_api.py: change declarations.py, and run it.

from __future__ import annotations

from typing import Any

from ...operator import register
from . import declarations

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

_gelu = register(declarations.GELU)
_silu = register(declarations.SILU)
_relu_squared = register(declarations.RELU_SQUARED)
_gelu_and_mul = register(declarations.GELU_AND_MUL)
_silu_and_mul = register(declarations.SILU_AND_MUL)
_gelu_backward = register(declarations.GELU_BACKWARD)
_silu_backward = register(declarations.SILU_BACKWARD)
_relu_squared_backward = register(declarations.RELU_SQUARED_BACKWARD)
_gelu_and_mul_backward = register(declarations.GELU_AND_MUL_BACKWARD)
_silu_and_mul_backward = register(declarations.SILU_AND_MUL_BACKWARD)


def gelu(
    x: Any,
    *,
    approximate: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    stream: Any = None,
) -> Any:
    """Return the Gaussian error linear unit.

    ``y = x * P(x)`` with ``P(x) = (1 + erf(x / sqrt(2))) / 2`` or, approximated, ``P(x) = (1 + tanh(sqrt(2 / pi) *
    (x + 0.044715 * x ** 3))) / 2`` (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016). Arithmetic is in
    float32, and y is rounded once. A y below the smallest normal number may become 0. If x is -infinity, y is NaN,
    and 0 in the exact GELU. An element's bits depend on no other element, nor on its address.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., columns], float32, float16 or bfloat16
        As in `rms_norm`.
    approximate : {"tanh"}, optional
        ``'tanh'``: P is approximated by tanh. None: P is exact.
    out : array [..., columns], optional
        Where y is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    scale : array of one float32, optional
        For an output of float8 or int8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8 or int8: it becomes the maximum of its value and of the magnitudes of y before the
        scale, or NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., columns]
        An array of x's framework and type, or as requested.

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
    >>> from transformer_rtc import gelu
    >>> x = np.array([[-1, 0, 1]], np.float32)
    >>> np.round(gelu(x), 4)
    array([[-0.1587,  0.    ,  0.8413]], dtype=float32)
    """
    return _gelu(x, approximate, out, out_dtype, scale, amax, scale_inv, stream)


def silu(
    x: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    stream: Any = None,
) -> Any:
    """Return the sigmoid linear unit.

    ``y = x * sigmoid(x)`` with ``sigmoid(x) = 1 / (1 + exp(-x))`` (Elfwing, Uchibe and Doya, "Sigmoid-weighted
    linear units", 2017). Arithmetic is in float32, and y is rounded once. A y below the smallest normal number may
    become 0. If x is -infinity, y is NaN, and 0 in the exact GELU. An element's bits depend on no other element,
    nor on its address.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., columns], float32, float16 or bfloat16
        As in `rms_norm`.
    out : array [..., columns], optional
        Where y is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    scale : array of one float32, optional
        For an output of float8 or int8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8 or int8: it becomes the maximum of its value and of the magnitudes of y before the
        scale, or NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., columns]
        An array of x's framework and type, or as requested.

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
    >>> from transformer_rtc import silu
    >>> x = np.array([[-1, 0, 1]], np.float32)
    >>> np.round(silu(x), 4)
    array([[-0.2689,  0.    ,  0.7311]], dtype=float32)
    """
    return _silu(x, out, out_dtype, scale, amax, scale_inv, stream)


def relu_squared(
    x: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    stream: Any = None,
) -> Any:
    """Return the squared rectified linear unit.

    ``y = max(x, 0) ** 2`` (So and others, "Primer: Searching for Efficient Transformers", 2021). Arithmetic is in
    float32, and y is rounded once; of NaN it is NaN.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., columns], float32, float16 or bfloat16
        As in `rms_norm`.
    out : array [..., columns], optional
        Where y is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    scale : array of one float32, optional
        For an output of float8 or int8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8 or int8: it becomes the maximum of its value and of the magnitudes of y before the
        scale, or NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., columns]
        An array of x's framework and type, or as requested.

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
    >>> from transformer_rtc import relu_squared
    >>> relu_squared(np.array([[-2, 0, 3]], np.float32))
    array([[0., 0., 9.]], dtype=float32)
    """
    return _relu_squared(x, out, out_dtype, scale, amax, scale_inv, stream)


def gelu_and_mul(
    x: Any,
    up: Any = None,
    *,
    approximate: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    stream: Any = None,
) -> Any:
    """Return the gated Gaussian error linear unit.

    ``y = x * P(x) * up`` with ``P(x) = (1 + erf(x / sqrt(2))) / 2`` or, approximated, ``P(x) = (1 + tanh(sqrt(2 /
    pi) * (x + 0.044715 * x ** 3))) / 2`` (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016) (Shazeer, "GLU
    Variants Improve Transformer", 2020: GEGLU). Arithmetic is in float32, and y is rounded once. A y below the
    smallest normal number may become 0. If x is -infinity, y is NaN, and 0 in the exact GELU. An element's bits
    depend on no other element, nor on its address.

    x and `up` are two arrays, or the halves of each row of one.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., 2*columns], or with `up` [..., columns], float32, float16 or bfloat16
        As in `rms_norm`. Without `up` its last dimension has the argument of f and then `up`, each as long as y's.
    up : array [..., columns], float32, float16 or bfloat16, optional
        The second factor, of x's shape. None: x has both.
    approximate : {"tanh"}, optional
        ``'tanh'``: P is approximated by tanh. None: P is exact.
    out : array [..., columns], optional
        Where y is written: x itself or up itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    scale : array of one float32, optional
        For an output of float8 or int8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8 or int8: it becomes the maximum of its value and of the magnitudes of y before the
        scale, or NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by its own scale, and the scales are returned:
        ``y = out * row_scale``. A scale is the row's largest magnitude divided by the largest number of the type.
        It is at least 2^-126, and 1 for a row of zeros.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., columns]
        An array of x's framework and type, or as requested.
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
    >>> from transformer_rtc import gelu_and_mul
    >>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
    >>> np.round(gelu_and_mul(x, up), 3)
    array([[0.   , 8.413]], dtype=float32)
    >>> np.round(gelu_and_mul(np.concatenate([x, up], axis=-1)), 3)  # of the halves of each row
    array([[0.   , 8.413]], dtype=float32)
    """
    return _gelu_and_mul(x, up, approximate, out, out_dtype, scale, amax, scale_inv, row_scaling, stream)


def silu_and_mul(
    x: Any,
    up: Any = None,
    *,
    out: Any = None,
    out_dtype: Any = None,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    stream: Any = None,
) -> Any:
    """Return the gated sigmoid linear unit.

    ``y = x * sigmoid(x) * up`` with ``sigmoid(x) = 1 / (1 + exp(-x))`` (Elfwing, Uchibe and Doya, "Sigmoid-weighted
    linear units", 2017) (Shazeer, "GLU Variants Improve Transformer", 2020: SwiGLU). Arithmetic is in float32, and
    y is rounded once. A y below the smallest normal number may become 0. If x is -infinity, y is NaN, and 0 in the
    exact GELU. An element's bits depend on no other element, nor on its address.

    x and `up` are two arrays, or the halves of each row of one.

    torch's autograd records the gradient.

    Parameters
    ----------
    x : array [..., 2*columns], or with `up` [..., columns], float32, float16 or bfloat16
        As in `rms_norm`. Without `up` its last dimension has the argument of f and then `up`, each as long as y's.
    up : array [..., columns], float32, float16 or bfloat16, optional
        The second factor, of x's shape. None: x has both.
    out : array [..., columns], optional
        Where y is written: x itself or up itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16 or bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    scale : array of one float32, optional
        For an output of float8 or int8: y is multiplied by `scale` before y is rounded.
    amax : array of one float32, optional
        For an output of float8 or int8: it becomes the maximum of its value and of the magnitudes of y before the
        scale, or NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.
    scale_inv : array of one float32, optional
        It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by its own scale, and the scales are returned:
        ``y = out * row_scale``. A scale is the row's largest magnitude divided by the largest number of the type.
        It is at least 2^-126, and 1 for a row of zeros.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    y : array [..., columns]
        An array of x's framework and type, or as requested.
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
    >>> from transformer_rtc import silu_and_mul
    >>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
    >>> np.round(silu_and_mul(x, up), 3)
    array([[0.   , 7.311]], dtype=float32)
    >>> np.round(silu_and_mul(np.concatenate([x, up], axis=-1)), 3)  # of the halves of each row
    array([[0.   , 7.311]], dtype=float32)
    """
    return _silu_and_mul(x, up, out, out_dtype, scale, amax, scale_inv, row_scaling, stream)


def gelu_backward(
    dy: Any,
    x: Any,
    *,
    approximate: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `gelu`.

    ``dx = dy * f'(x)``, as `gelu` has f. Each is rounded once.

    Parameters
    ----------
    dy : array [..., columns], float32, float16 or bfloat16
        The gradient of y.
    x : array [..., columns], float32, float16 or bfloat16
        What the forward call was given.
    approximate : {"tanh"}, optional
        The forward call's.
    out : array [..., columns], optional
        Where dx is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of dx where `out` is not given; x's by default.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    dx : array [..., columns]
        An array of dy's framework, or `out`.

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
    >>> from transformer_rtc import gelu_backward
    >>> x = np.array([[0, 1]], np.float32)
    >>> np.round(gelu_backward(np.ones_like(x), x), 4)
    array([[0.5   , 1.0833]], dtype=float32)
    """
    return _gelu_backward(dy, x, approximate, out, out_dtype, stream)


def silu_backward(
    dy: Any,
    x: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `silu`.

    ``dx = dy * f'(x)``, as `silu` has f. Each is rounded once.

    Parameters
    ----------
    dy : array [..., columns], float32, float16 or bfloat16
        The gradient of y.
    x : array [..., columns], float32, float16 or bfloat16
        What the forward call was given.
    out : array [..., columns], optional
        Where dx is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of dx where `out` is not given; x's by default.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    dx : array [..., columns]
        An array of dy's framework, or `out`.

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
    >>> from transformer_rtc import silu_backward
    >>> x = np.array([[0, 1]], np.float32)
    >>> np.round(silu_backward(np.ones_like(x), x), 4)
    array([[0.5   , 0.9277]], dtype=float32)
    """
    return _silu_backward(dy, x, out, out_dtype, stream)


def relu_squared_backward(
    dy: Any,
    x: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `relu_squared`.

    ``dx = dy * f'(x)``, as `relu_squared` has f. Each is rounded once.

    Parameters
    ----------
    dy : array [..., columns], float32, float16 or bfloat16
        The gradient of y.
    x : array [..., columns], float32, float16 or bfloat16
        What the forward call was given.
    out : array [..., columns], optional
        Where dx is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of dx where `out` is not given; x's by default.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    dx : array [..., columns]
        An array of dy's framework, or `out`.

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
    >>> from transformer_rtc import relu_squared_backward
    >>> x = np.array([[-2, 0, 3]], np.float32)
    >>> relu_squared_backward(np.ones_like(x), x)
    array([[0., 0., 6.]], dtype=float32)
    """
    return _relu_squared_backward(dy, x, out, out_dtype, stream)


def gelu_and_mul_backward(
    dy: Any,
    x: Any,
    up: Any = None,
    *,
    approximate: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    return_dup: bool | None = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `gelu_and_mul`.

    ``dx = dy * up * f'(x)`` and ``dup = dy * f(x)``, as `gelu_and_mul` has f. Each is rounded once.

    Parameters
    ----------
    dy : array [..., columns], float32, float16 or bfloat16
        The gradient of y.
    x : array [..., 2*columns], or with `up` [..., columns], float32, float16 or bfloat16
        What the forward call was given.
    up : array [..., columns], float32, float16 or bfloat16, optional
        The second factor, of x's shape. None: x has both.
    approximate : {"tanh"}, optional
        The forward call's.
    out : array [..., 2*columns], or with `up` [..., columns], optional
        Where dx is written: x itself, or an array that shares no element with the inputs. Without `up`, both
        halves' gradients.
    out_dtype : data type, optional
        Of dx where `out` is not given; x's by default.
    return_dup : bool, optional
        Whether to return the gradient of `up`; by default whether it is given.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    dx : array [..., 2*columns], or with `up` [..., columns]
        An array of dy's framework, or `out`.
    dup : array [..., columns]
        Only if `return_dup`. Of up's data type.

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
    >>> from transformer_rtc import gelu_and_mul_backward
    >>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
    >>> dx, dup = gelu_and_mul_backward(np.ones_like(x), x, up)
    >>> np.round(dx, 3)
    array([[ 2.5  , 10.833]], dtype=float32)
    >>> np.round(dup, 4)
    array([[0.    , 0.8413]], dtype=float32)
    """
    return _gelu_and_mul_backward(dy, x, up, approximate, out, out_dtype, return_dup, stream)


def silu_and_mul_backward(
    dy: Any,
    x: Any,
    up: Any = None,
    *,
    out: Any = None,
    out_dtype: Any = None,
    return_dup: bool | None = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `silu_and_mul`.

    ``dx = dy * up * f'(x)`` and ``dup = dy * f(x)``, as `silu_and_mul` has f. Each is rounded once.

    Parameters
    ----------
    dy : array [..., columns], float32, float16 or bfloat16
        The gradient of y.
    x : array [..., 2*columns], or with `up` [..., columns], float32, float16 or bfloat16
        What the forward call was given.
    up : array [..., columns], float32, float16 or bfloat16, optional
        The second factor, of x's shape. None: x has both.
    out : array [..., 2*columns], or with `up` [..., columns], optional
        Where dx is written: x itself, or an array that shares no element with the inputs. Without `up`, both
        halves' gradients.
    out_dtype : data type, optional
        Of dx where `out` is not given; x's by default.
    return_dup : bool, optional
        Whether to return the gradient of `up`; by default whether it is given.
    stream : optional
        As in `rms_norm`.

    Returns
    -------
    dx : array [..., 2*columns], or with `up` [..., columns]
        An array of dy's framework, or `out`.
    dup : array [..., columns]
        Only if `return_dup`. Of up's data type.

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
    >>> from transformer_rtc import silu_and_mul_backward
    >>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
    >>> dx, dup = silu_and_mul_backward(np.ones_like(x), x, up)
    >>> np.round(dx, 3)
    array([[2.5  , 9.277]], dtype=float32)
    >>> np.round(dup, 4)
    array([[0.    , 0.7311]], dtype=float32)
    """
    return _silu_and_mul_backward(dy, x, up, out, out_dtype, return_dup, stream)
