# SPDX-License-Identifier: Apache-2.0
"""The calls that the demonstration makes: arguments, what they give in float64, and what torch calls for the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .ops.activation.api import gelu, gelu_backward, silu_and_mul, silu_and_mul_backward
from .ops.arithmetic.api import add
from .ops.norm.api import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from .ops.softmax.api import softmax, softmax_backward

__all__ = ["CASES", "Array", "Case", "forward_of"]

Array = np.ndarray[Any, Any]
_RMS_EPS, _LAYER_EPS = 1e-6, 1e-5


class Case(NamedTuple):
    """A call of an operator.

    Attributes
    ----------
    operator : callable
        The public function.
    family : str
        For people.
    columns : int
        Of a row.
    shapes : str
        Of the arguments, a letter for each: ``r`` has rows, and ``c`` has one row's elements.
    arithmetic : callable
        From the arguments and a result in float64, to what arithmetic may be off before it is rounded.
    exact : callable
        From the arguments, in float64, to all results.
    torch : callable
        From torch, and the tensors of the forward operator, to torch's y.
    """

    operator: Callable[..., Any]
    family: str
    columns: int
    shapes: str
    arithmetic: Callable[[list[Array], Array], Array]
    exact: Callable[..., tuple[Array, ...]]
    torch: Callable[..., Any]

    @property
    def name(self) -> str:
        """What the operator is called."""
        return self.operator.__name__

    @property
    def is_backward(self) -> bool:
        """Whether it gives gradients; its first argument is y's, then, and torch's come from autograd."""
        return self.name.endswith("_backward")


def _by_sums(_: list[Array], exact: Array) -> Array:
    """Of sums of many terms in float32."""
    return np.asarray(2.0**-20 * np.abs(exact).max())


def _by_functions(_: list[Array], exact: Array) -> Array:
    """Of activations, whose functions have the digits that results of 16 bits need."""
    return np.asarray(2.0**-13 * np.abs(exact))


def _by_slopes(given: list[Array], _: Array) -> Array:
    """Of their derivatives, which are differences."""
    dy, x, *up = (np.abs(array) for array in given)
    return np.asarray(2.0**-12 * dy * np.maximum(x, 1) * np.maximum(up[0] if up else 1, 1))


def _mean(x: Array) -> Array:
    return np.asarray(x.mean(-1, keepdims=True))


def _rms_norm(x: Array, weight: Array) -> tuple[Array, ...]:
    return (x / np.sqrt(_mean(x**2) + _RMS_EPS) * weight,)


def _rms_norm_backward(dy: Array, x: Array, weight: Array) -> tuple[Array, ...]:
    rstd = 1 / np.sqrt(_mean(x**2) + _RMS_EPS)
    normal, gradient = x * rstd, dy * weight
    return rstd * (gradient - normal * _mean(gradient * normal)), (dy * normal).sum(0)


def _layer_norm(x: Array, weight: Array, bias: Array) -> tuple[Array, ...]:
    return ((x - _mean(x)) / np.sqrt(x.var(-1, keepdims=True) + _LAYER_EPS) * weight + bias,)


def _layer_norm_backward(dy: Array, x: Array, weight: Array) -> tuple[Array, ...]:
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + _LAYER_EPS)
    normal, gradient = (x - _mean(x)) * rstd, dy * weight
    dx = rstd * (gradient - _mean(gradient) - normal * _mean(gradient * normal))
    return dx, (dy * normal).sum(0), dy.sum(0)


def _softmax(x: Array) -> tuple[Array, ...]:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True),)


def _softmax_backward(dy: Array, y: Array) -> tuple[Array, ...]:
    return (y * (dy - (dy * y).sum(-1, keepdims=True)),)


def _normal_cdf(x: Array) -> Array:
    # numpy has no erf.
    return np.asarray(0.5 + 0.5 * np.vectorize(math.erf, [np.float64])(x / math.sqrt(2)))


def _gelu(x: Array) -> tuple[Array, ...]:
    return (x * _normal_cdf(x),)


def _gelu_backward(dy: Array, x: Array) -> tuple[Array, ...]:
    return (dy * (_normal_cdf(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)),)


def _silu_and_mul(x: Array, up: Array) -> tuple[Array, ...]:
    return (x / (1 + np.exp(-x)) * up,)


def _silu_and_mul_backward(dy: Array, x: Array, up: Array) -> tuple[Array, ...]:
    sigmoid = 1 / (1 + np.exp(-x))
    return dy * up * sigmoid * (1 + x * (1 - sigmoid)), dy * x * sigmoid


def _torch_rms_norm(torch: Any, x: Any, weight: Any) -> Any:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, _RMS_EPS)


def _torch_layer_norm(torch: Any, x: Any, weight: Any, bias: Any) -> Any:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, _LAYER_EPS)


def _torch_softmax(torch: Any, x: Any) -> Any:
    return torch.softmax(x, -1)


def _torch_gelu(torch: Any, x: Any) -> Any:
    return torch.nn.functional.gelu(x)


def _torch_silu_and_mul(torch: Any, x: Any, up: Any) -> Any:
    return torch.nn.functional.silu(x) * up


# Columns as Llama 3 8B has them: 4096, in its MLP 14336; and 2048 keys. The gradients of add are dy itself.
CASES = (
    Case(rms_norm, "norms", 4096, "rc", _by_sums, _rms_norm, _torch_rms_norm),
    Case(rms_norm_backward, "norms", 4096, "rrc", _by_sums, _rms_norm_backward, _torch_rms_norm),
    Case(layer_norm, "norms", 4096, "rcc", _by_sums, _layer_norm, _torch_layer_norm),
    Case(layer_norm_backward, "norms", 4096, "rrc", _by_sums, _layer_norm_backward, _torch_layer_norm),
    Case(softmax, "softmax", 2048, "r", _by_sums, _softmax, _torch_softmax),
    Case(softmax_backward, "softmax", 2048, "rr", _by_sums, _softmax_backward, _torch_softmax),
    Case(gelu, "activations", 14336, "r", _by_functions, _gelu, _torch_gelu),
    Case(gelu_backward, "activations", 14336, "rr", _by_slopes, _gelu_backward, _torch_gelu),
    Case(silu_and_mul, "activations", 14336, "rr", _by_functions, _silu_and_mul, _torch_silu_and_mul),
    Case(silu_and_mul_backward, "activations", 14336, "rrr", _by_slopes, _silu_and_mul_backward, _torch_silu_and_mul),
    Case(add, "add", 4096, "rr", _by_sums, lambda x, other: (x + other,), lambda torch, x, other: x + other),
)


def forward_of(case: Case) -> Case:
    """Return the case of the forward operator."""
    return next(other for other in CASES if other.name == case.name.removesuffix("_backward"))
