"""Normalization of rows: RMSNorm and LayerNorm, forward and backward, with what is fused into them."""

from __future__ import annotations

from typing import Any

from ...dispatch import Operator, add_form
from ...request import Argument
from ...spec import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8
from .family import OPERATORS, NormFamily

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

_FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
_FLOAT8 = (FLOAT8_E4M3, FLOAT8_E5M2)
_QUANTIZED = (*_FLOATS, *_FLOAT8, INT8)

_FAMILY = NormFamily()
_SCALING = (
    Argument("scale", "value", (FLOAT32,), optional=True),
    Argument("amax", "value_out", (FLOAT32,), optional=True),
    Argument("scale_inv", "value_out", (FLOAT32,), optional=True),
)
_LAST = (Argument("sm_margin", "sm_margin"), Argument("stream", "stream"))


def _forward_operator(name: str) -> Operator:
    norm, adds, _ = OPERATORS[name]
    types = _FLOATS if adds == "after" else _QUANTIZED
    arguments = [Argument("x", "rows", _FLOATS)]
    if adds:
        arguments.append(Argument("residual", "rows", _FLOATS))
    arguments += [
        Argument("weight", "columns", _FLOATS, optional=True),
        Argument("bias", "columns", _FLOATS, optional=True),
        Argument("eps", "non_negative"),
        Argument("weight_offset", "real"),
        Argument("out", "rows_out", types, like="residual" if adds == "after" else ""),
        Argument("out_dtype", "dtype_out", types, of=("out",)),
    ]
    if adds == "before":
        arguments.append(Argument("residual_out", "rows_out", _FLOATS, like="residual"))
    if norm == "layer_norm":
        arguments.append(Argument("mean", "row_values", (FLOAT32,)))
    arguments.append(Argument("rstd", "row_values", (FLOAT32,)))
    if adds != "after":
        arguments += [*_SCALING, Argument("row_scale", "row_values", (FLOAT32,), called="row_scaling")]
    return Operator(name, _FAMILY, (*arguments, *_LAST))


def _backward_operator(norm: str, form: str = "{}_backward", x: str = "", dresidual: str = "") -> Operator:
    """Return a backward operator, or a form of it that calls x and dresidual by other names."""
    name, of = form.format(norm), f"{norm}_backward"
    if name != of:
        add_form(name, of, *(["dresidual"] if dresidual else []))
    statistics = ("mean", "rstd") if norm == "layer_norm" else ("rstd",)
    return Operator(
        name,
        _FAMILY,
        (
            Argument("dy", "rows", _FLOATS),
            Argument("x", "rows", _FLOATS, called=x),
            Argument("weight", "columns", _FLOATS, optional=True),
            Argument("eps", "non_negative"),
            *(Argument(statistic, "row_inputs", (FLOAT32,), optional=True) for statistic in statistics),
            Argument("dresidual", "rows", _FLOATS, optional=True, called=dresidual),
            Argument("weight_offset", "real"),
            Argument("out", "rows_out", _FLOATS, like="x"),
            Argument("out_dtype", "dtype_out", _FLOATS, of=("out",)),
            Argument("return_dx", "wanted", of=("out",)),
            Argument("dweight", "column_values", _FLOATS, like="weight"),
            Argument("dbias", "column_values", _FLOATS, like="weight"),
            Argument("dweight_dtype", "dtype_out", _FLOATS, of=("dweight", "dbias")),
            *_LAST,
        ),
        form_of="" if name == of else of,
    )


_rms_norm = _forward_operator("rms_norm").call
_layer_norm = _forward_operator("layer_norm").call
_add_rms_norm = _forward_operator("add_rms_norm").call
_add_layer_norm = _forward_operator("add_layer_norm").call
_rms_norm_add = _forward_operator("rms_norm_add").call
_layer_norm_add = _forward_operator("layer_norm_add").call
_rms_norm_backward = _backward_operator("rms_norm").call
_layer_norm_backward = _backward_operator("layer_norm").call
_add_rms_norm_backward = _backward_operator("rms_norm", "add_{}_backward", x="s", dresidual="ds").call
_add_layer_norm_backward = _backward_operator("layer_norm", "add_{}_backward", x="s", dresidual="ds").call
_rms_norm_add_backward = _backward_operator("rms_norm", "{}_add_backward").call
_layer_norm_add_backward = _backward_operator("layer_norm", "{}_add_backward").call


def rms_norm(
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
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
    rounded once: a row whose mean square is no float32, of numbers above 1e19, becomes 0. A row's bits do not depend on
    how many rows there are, nor on where they lie.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        On a GPU; an array on the host is staged through the current GPU, and so is y. The last dimension is contiguous
        and has 1 to 2**30 elements; the others collapse to at most two strides, as rows and heads of a packed qkv do.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One for all rows, or one for each head of an x [..., heads, hidden], up to 65535. None: 1, whatever
        `weight_offset`.
    eps : float
        Added to the mean of squares; not negative.
    bias : array like weight, optional
        None: 0.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array [..., hidden], optional
        Where y is written: x itself, or an array that shares no element with the inputs, of any type that `out_dtype`
        names.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16, bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    return_rstd : bool
        Whether to return rstd as well.
    scale : array of one float32, optional
        For an output of float8: y is multiplied by it before it is rounded.
    amax : array of one float32, optional
        For an output of float8: becomes the maximum of what it holds and of the magnitudes of y before the scale; NaN
        if there is one.
    scale_inv : array of one float32, optional
        Becomes ``1 / scale``; without rows it stays what it is. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by a scale of its own, its largest magnitude over the
        largest number of the type, 2^-126 where that is less and 1 for a row of zeros; and these scales are
        returned: ``y = out * row_scale``.
    sm_margin : int
        Multiprocessors to leave to others, such as communication that runs beside: the launch has no more CTAs than the
        remaining ones hold, each of which takes rows in turn. A kernel of its own.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the framework's
        current stream.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    rstd : array [...], float32
        Only if `return_rstd`.
    row_scale : array [...], float32
        Only if `row_scaling`.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _rms_norm(
        x, weight, bias, eps, weight_offset, out, out_dtype, return_rstd, scale, amax, scale_inv, row_scaling,
        sm_margin, stream,
    )  # fmt: skip


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
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
    dimension, the variance being that of the population (Ba, Kiros and Hinton, "Layer Normalization", 2016). It is
    computed in float32 about the mean, or about a value at most 1.4 standard deviations from it, for which it is
    corrected: a row of large equal numbers with little noise keeps its accuracy.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        As `rms_norm` takes it.
    weight, bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        As `rms_norm` takes them.
    eps : float
        Added to the variance.
    weight_offset, out, out_dtype, scale, amax, scale_inv, row_scaling, sm_margin, stream
        As `rms_norm` takes them.
    return_mean, return_rstd : bool
        Whether to return them as well.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    mean, rstd, row_scale : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _layer_norm(
        x, weight, bias, eps, weight_offset, out, out_dtype, return_mean, return_rstd, scale, amax, scale_inv,
        row_scaling, sm_margin, stream,
    )  # fmt: skip


def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    residual_out: Any = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Add a residual, then normalize: ``s = x + residual``, ``y = rms_norm(s, weight, eps)``.

    s is rounded to the residual's type, and it is the rounded s that is normalized: the same bits as two calls give. A
    pre-norm transformer passes s on as the next residual, a post-norm one passes y. The gradient is that of
    `add_rms_norm_backward`.

    Parameters
    ----------
    x, residual : array [..., hidden], float32, float16 or bfloat16
        Of one shape.
    weight, eps, bias, weight_offset, out_dtype, return_rstd, scale, amax, scale_inv, row_scaling, sm_margin, stream
        As `rms_norm` takes them.
    out, residual_out : array [..., hidden], optional
        Where y and s are written, s in residual's type, y in any that `out_dtype` names. Either may be x itself or
        residual itself: out=x and residual_out=residual is in place.

    Returns
    -------
    y : array [..., hidden]
        Of x's type, or as asked for.
    s : array [..., hidden]
        Of residual's type.
    rstd, row_scale : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _add_rms_norm(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, residual_out, return_rstd, scale, amax,
        scale_inv, row_scaling, sm_margin, stream,
    )  # fmt: skip


def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out: Any = None,
    residual_out: Any = None,
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
    """Add a residual, then normalize: ``s = x + residual``, ``y = layer_norm(s, weight, bias, eps)``.

    As `add_rms_norm` does it; the gradient is that of `add_layer_norm_backward`.

    Parameters
    ----------
    x, residual, out, residual_out
        As `add_rms_norm` takes them.
    weight, bias, eps, weight_offset, out_dtype, return_mean, return_rstd, scale, amax, scale_inv, row_scaling, \
sm_margin, stream
        As `layer_norm` takes them.

    Returns
    -------
    y, s : array [..., hidden]
        As `add_rms_norm` returns them.
    mean, rstd, row_scale : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _add_layer_norm(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, residual_out, return_mean, return_rstd, scale,
        amax, scale_inv, row_scaling, sm_margin, stream,
    )  # fmt: skip


def rms_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize, then add a residual: ``y = residual + rms_norm(x, weight, eps)``, rounded once.

    The form of Gemma 2 and OLMo 2. The gradient of residual is that of y, the others' are those of
    `rms_norm_add_backward`.

    Parameters
    ----------
    x, residual : array [..., hidden], float32, float16 or bfloat16
        Of one shape.
    weight, eps, bias, weight_offset, return_rstd, sm_margin, stream
        As `rms_norm` takes them.
    out : array [..., hidden], optional
        Where y is written, float32, float16 or bfloat16; it may be residual itself or x itself.
    out_dtype : data type, optional
        Of y where `out` is not given: float32, float16 or bfloat16; residual's by default.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    rstd : array [...], float32
        Only if `return_rstd`.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _rms_norm_add(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, return_rstd, sm_margin, stream
    )  # fmt: skip


def layer_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_mean: bool = False,
    return_rstd: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize, then add a residual: ``y = residual + layer_norm(x, weight, bias, eps)``, rounded once.

    As `rms_norm_add` does it; the gradients are those of `layer_norm_add_backward`.

    Parameters
    ----------
    x, residual, out, out_dtype
        As `rms_norm_add` takes them.
    weight, bias, eps, weight_offset, return_mean, return_rstd, sm_margin, stream
        As `layer_norm` takes them.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    mean, rstd : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _layer_norm_add(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, return_mean, return_rstd, sm_margin, stream
    )  # fmt: skip


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
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
    """Return the gradients of `rms_norm`: dx, dweight and dbias, or those of them that are asked for.

    With ``x' = x * rstd`` and ``g = dy * (weight + weight_offset)``::

        dx      = rstd * (g - x' * mean(g * x')) + dresidual     over the last dimension
        dweight = sum(dy * x')                                   over all others, but for the heads
        dbias   = sum(dy)

    (Zhang and Sennrich, 2019, appendix.) Arithmetic and the sums over rows are in float32, and each result is rounded
    once. dweight and dbias are added up in an order that the device, the shape and `sm_margin` fix: the same bits in
    every run. A row's dx depends on no other row. What is not asked for costs nothing.

    Parameters
    ----------
    dy, x : array [..., hidden], float32, float16 or bfloat16
        The gradient of y, and what the forward call was given; of one shape, as `rms_norm` takes x.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps, weight_offset : float
        The forward call's.
    rstd : array [...], float32, optional
        The forward call's; None: computed again from x and eps, in the same launch.
    dresidual : array [..., hidden], float32, float16 or bfloat16, optional
        A gradient that is added to dx; not read where dx is not asked for.
    out : array [..., hidden], optional
        Where dx is written: dy, x or dresidual itself, or an array that shares no element with them; float32, float16
        or bfloat16.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_dx, return_dweight, return_dbias : bool
        Which gradients to compute. `return_dweight` is by default whether a weight is given.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin, stream
        As `rms_norm` takes them.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`.
    dweight, dbias : array like weight; [hidden] where there is none
        If `return_dweight`, if `return_dbias`.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    return _rms_norm_backward(
        dy, x, weight, eps, rstd, dresidual, weight_offset, out, out_dtype, return_dx, return_dweight, return_dbias,
        dweight_dtype, sm_margin, stream,
    )  # fmt: skip


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-5,
    *,
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
    """Return the gradients of `layer_norm`: dx, dweight and dbias, or those of them that are asked for.

    With ``x' = (x - mean) * rstd`` and ``g = dy * (weight + weight_offset)``::

        dx      = rstd * (g - mean(g) - x' * mean(g * x')) + dresidual     over the last dimension
        dweight = sum(dy * x')                                             over all others, but for the heads
        dbias   = sum(dy)

    (Ba, Kiros and Hinton, 2016.) Otherwise as `rms_norm_backward` does it.

    Parameters
    ----------
    dy, x, weight, eps, dresidual, weight_offset, out, out_dtype, return_dx, dweight_dtype, sm_margin, stream
        As `rms_norm_backward` takes them.
    mean, rstd : array [...], float32, optional
        The forward call's, both or neither; None: computed again from x and eps, in the same launch.
    return_dweight, return_dbias : bool
        Whether to compute them; by default whether a weight is given.

    Returns
    -------
    dx, dweight, dbias
        As `rms_norm_backward` returns them.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    if return_dbias is None:
        return_dbias = weight is not None
    return _layer_norm_backward(
        dy, x, weight, eps, mean, rstd, dresidual, weight_offset, out, out_dtype, return_dx, return_dweight,
        return_dbias, dweight_dtype, sm_margin, stream,
    )  # fmt: skip


def add_rms_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
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

    x and residual have the same gradient, ``rms_norm_backward(dy, s, weight, eps, dresidual=ds)``: one launch adds ds.

    Parameters
    ----------
    dy, ds : array [..., hidden], float32, float16 or bfloat16
        The gradients of y and of s; ds is None where s is not used.
    s : array [..., hidden], float32, float16 or bfloat16
        What the forward call returned.
    weight, eps
        The forward call's.
    rstd, weight_offset, out_dtype, return_dx, return_dweight, return_dbias, dweight_dtype, sm_margin, stream
        As `rms_norm_backward` takes them, of which s is the x.
    out : array [..., hidden], optional
        Where dx is written: dy, ds or s itself, or an array that shares no element with them.

    Returns
    -------
    dx, dweight, dbias
        As `rms_norm_backward` returns them; dx is the gradient of x and of residual.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    return _add_rms_norm_backward(
        dy, s, weight, eps, rstd, ds, weight_offset, out, out_dtype, return_dx, return_dweight, return_dbias,
        dweight_dtype, sm_margin, stream,
    )  # fmt: skip


def add_layer_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    weight: Any = None,
    eps: float = 1e-5,
    *,
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

    x and residual have the same gradient, ``layer_norm_backward(dy, s, weight, eps, dresidual=ds)``.

    Parameters
    ----------
    dy, ds, s, weight, eps, out
        As `add_rms_norm_backward` takes them.
    mean, rstd, weight_offset, out_dtype, return_dx, return_dweight, return_dbias, dweight_dtype, sm_margin, stream
        As `layer_norm_backward` takes them, of which s is the x.

    Returns
    -------
    dx, dweight, dbias
        As `layer_norm_backward` returns them; dx is the gradient of x and of residual.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    if return_dbias is None:
        return_dbias = weight is not None
    return _add_layer_norm_backward(
        dy, s, weight, eps, mean, rstd, ds, weight_offset, out, out_dtype, return_dx, return_dweight,
        return_dbias, dweight_dtype, sm_margin, stream,
    )  # fmt: skip


def rms_norm_add_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
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
    """Return the gradients of `rms_norm_add`, ``y = residual + rms_norm(x)``, but for residual's, which is dy.

    They are those of `rms_norm`, by the same formulas: ``rms_norm_backward(dy, x, weight, eps, ...)``.

    Parameters
    ----------
    dy, x : array [..., hidden], float32, float16 or bfloat16
        The gradient of y, and what was normalized; of one shape.
    dresidual : array [..., hidden], float32, float16 or bfloat16, optional
        A gradient that is added to dx, such as that of another use of x; not that of the forward call's residual.
    weight, eps, rstd, weight_offset, out, out_dtype, return_dx, return_dweight, return_dbias, dweight_dtype
        As `rms_norm_backward` takes them.
    sm_margin, stream
        Likewise.

    Returns
    -------
    dx, dweight, dbias
        As `rms_norm_backward` returns them.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    return _rms_norm_add_backward(
        dy, x, weight, eps, rstd, dresidual, weight_offset, out, out_dtype, return_dx, return_dweight, return_dbias,
        dweight_dtype, sm_margin, stream,
    )  # fmt: skip


def layer_norm_add_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-5,
    *,
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
    """Return the gradients of `layer_norm_add`, ``y = residual + layer_norm(x)``, but for residual's, which is dy.

    They are those of `layer_norm`, by the same formulas: ``layer_norm_backward(dy, x, weight, eps, ...)``.

    Parameters
    ----------
    dy, x, dresidual
        As `rms_norm_add_backward` takes them.
    weight, eps, mean, rstd, weight_offset, out, out_dtype, return_dx, return_dweight, return_dbias, dweight_dtype
        As `layer_norm_backward` takes them.
    sm_margin, stream
        Likewise.

    Returns
    -------
    dx, dweight, dbias
        As `layer_norm_backward` returns them.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    if return_dbias is None:
        return_dbias = weight is not None
    return _layer_norm_add_backward(
        dy, x, weight, eps, mean, rstd, dresidual, weight_offset, out, out_dtype, return_dx, return_dweight,
        return_dbias, dweight_dtype, sm_margin, stream,
    )  # fmt: skip
