# SPDX-License-Identifier: Apache-2.0
"""Norms as modules: those of torch.nn, computed by this package's operators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from ..checks import is_integer
from ..errors import ArgumentError, shown
from ..ops.norm.api import layer_norm, rms_norm

__all__ = [
    "DEFAULT_EPS",
    "ROUNDINGS",
    "TAKEN",
    "LayerNorm",
    "Norm",
    "RMSNorm",
    "check_dtype",
    "flat",
    "rows",
]


# What the operators take; the rest is torch's.
TAKEN = frozenset((torch.float32, torch.float16, torch.bfloat16))
ROUNDINGS = ("once", "twice")


# ---- What modules share ----------------------------------------------------------------------------------------------


def _rms_norm_eps() -> dict[torch.dtype, float]:
    """Return the eps of a `torch.nn.RMSNorm` that is given none: versions of torch differ for types of 16 bits."""
    with _disable_current_modes():
        least = torch.full((1,), 2.0**-7, dtype=torch.bfloat16, device="cpu")
        of_type = float(functional.rms_norm(least, (1,))) < 0.5
    return {dtype: torch.finfo(dtype if of_type else torch.float32).eps for dtype in TAKEN}


DEFAULT_EPS = _rms_norm_eps()


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with strides that the operators take: the last is 1, and the others collapse to two."""
    if x.ndim == 0 or x.stride(-1) != 1:
        return x.contiguous()
    if x.ndim <= 3:
        return x
    dims = [(x.size(dim), x.stride(dim)) for dim in range(x.ndim - 1) if x.size(dim) != 1]
    breaks = sum(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(dims))
    return x if breaks <= 1 else x.contiguous()


class Norm:
    """What the norms have beside torch's attributes. Those of the class are what a module of torch becomes by `patch`.

    Attributes
    ----------
    weight_offset : float
        Added to the weight.
    sequence_parallel : bool
        Whether the parameters are marked so.
    sm_margin : int
        Multiprocessors to leave to others.
    out_dtype : torch.dtype or None
        Of y; None: x's.
    """

    weight_offset: float = 0.0
    sequence_parallel: bool = False
    sm_margin: int = 0
    out_dtype: torch.dtype | None = None
    normalized_shape: tuple[int, ...]
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def _configure(
        self,
        weight_offset: float,
        zero_centered_gamma: bool,
        sequence_parallel: bool,
        sm_margin: int,
        out_dtype: torch.dtype | None,
    ) -> None:
        """Set the attributes. Called before torch's constructor, which initialises the parameters."""
        if zero_centered_gamma:
            if weight_offset not in (0, 1):
                raise ArgumentError(
                    f"weight_offset is {shown(weight_offset)} beside zero_centered_gamma=True, which is weight_offset=1"
                )
            weight_offset = 1.0
        if not is_integer(sm_margin, 0, 2**31 - 1):
            raise ArgumentError(f"sm_margin is {shown(sm_margin)}; it takes an integer that is not negative")
        check_dtype(out_dtype, "out_dtype")
        self.weight_offset, self.sequence_parallel = float(weight_offset), bool(sequence_parallel)
        self.sm_margin, self.out_dtype = sm_margin, out_dtype

    def reset_parameters(self) -> None:
        """Initialise the parameters: the weight so that it is 1 with its offset, and the bias to 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.weight_offset and self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.sequence_parallel:
            for parameter in self.parameters(recurse=False):  # type: ignore[attr-defined]
                parameter.sequence_parallel = True

    def extra_repr(self) -> str:
        words = [super().extra_repr()]  # type: ignore[misc]
        for name in ("weight_offset", "rounding", "residual_dtype", "sm_margin", "out_dtype"):
            value = getattr(self, name, None)
            if value != getattr(type(self), name, None):
                words.append(f"{name}={value!r}")
        return ", ".join(words)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with one normalised dimension, of strides that the operators take."""
        shape = self.normalized_shape
        if tuple(x.shape[-len(shape) :]) != tuple(shape):
            raise ArgumentError(
                f"x has the shape {list(x.shape)}; its last dimensions must be normalized_shape, {list(shape)}"
            )
        return rows(x if len(shape) == 1 else x.flatten(-len(shape)))

    def _offset_weight(self) -> torch.Tensor | None:
        weight = self.weight
        return weight + self.weight_offset if weight is not None and self.weight_offset else weight


def check_dtype(dtype: object, name: str) -> None:
    if dtype is not None and dtype not in TAKEN:
        accepted = ", ".join(sorted(map(str, TAKEN)))
        raise ArgumentError(f"{name} is {shown(dtype)}; it takes {accepted} or None")


def flat(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.flatten()


# ---- Norms -----------------------------------------------------------------------------------------------------------


class RMSNorm(Norm, torch.nn.RMSNorm):  # type: ignore[misc]
    """`torch.nn.RMSNorm` by `transformer_rtc.rms_norm`: ``y = x * rstd * (weight + weight_offset)``.

    ``rstd = 1 / sqrt(mean(x ** 2) + eps)``. Constructor and state dict are torch's. Arithmetic is in float32 and y is
    rounded once, to x's type, whatever the weight's type. torch's autocast is ignored: `out_dtype` gives an output of
    another type. x of any strides is taken; it is copied where its rows do not collapse to two strides. An x of another
    type than float32, float16 and bfloat16, such as float64, is computed by torch.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The last dimensions of x, over which it is normalised together.
    eps : float, optional
        Added to the mean of squares. None: what torch takes, `torch.finfo(torch.float32).eps` (before torch 2.13, that
        of x's type).
    elementwise_affine : bool
        Whether there is a weight.
    device, dtype : optional
        Of the weight.
    weight_offset : float
        Added to the weight in float32. The weight is initialised to ``1 - weight_offset``.
    zero_centered_gamma : bool
        TransformerEngine's name for ``weight_offset=1``.
    sequence_parallel : bool
        Sets ``sequence_parallel`` of the parameters, which Megatron sums over the ranks of tensor parallelism.
    sm_margin : int
        Multiprocessors to leave to others, in forward and backward.
    out_dtype : torch.dtype, optional
        Of y: float32, float16 or bfloat16. None: x's.
    rounding : {"once", "twice"}
        ``"twice"`` rounds ``x * rstd`` to x's type before the weight is multiplied, as Hugging Face's LlamaRMSNorm
        does.

    Raises
    ------
    ArgumentError
        If an argument is not as described.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import RMSNorm
    >>> norm = RMSNorm(5, eps=0.0)
    >>> y = norm(torch.tensor([[4.0, 1.0, 1.0, 1.0, 1.0]]))  # the mean of x's squares is 4
    >>> y.tolist()
    [[2.0, 0.5, 0.5, 0.5, 0.5]]
    >>> y.sum().backward()
    >>> norm.weight.grad
    tensor([2.0000, 0.5000, 0.5000, 0.5000, 0.5000])
    """

    rounding: str = "once"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
        sm_margin: int = 0,
        out_dtype: torch.dtype | None = None,
        rounding: str = "once",
    ) -> None:
        if rounding not in ROUNDINGS:
            raise ArgumentError(f"rounding is {shown(rounding)}; it takes {', '.join(ROUNDINGS)}")
        self._configure(weight_offset, zero_centered_gamma, sequence_parallel, sm_margin, out_dtype)
        self.rounding = rounding
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y.

        Parameters
        ----------
        x : Tensor [..., *normalized_shape]
            Of any strides.

        Returns
        -------
        Tensor
            Of x's shape, and of x's type or `out_dtype`.
        """
        weight, shape = self.weight, None
        if weight is None or x.dtype not in TAKEN or not x.is_contiguous() or len(self.normalized_shape) != 1:
            if x.dtype not in TAKEN:
                return self._in_torch(x)
            x, shape, weight = self._rows(x), x.shape, flat(weight)
        eps = self.eps if self.eps is not None else DEFAULT_EPS[x.dtype]
        y = rms_norm(
            x,
            weight,
            eps,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            round_before_weight=self.rounding == "twice",
            sm_margin=self.sm_margin,
        )
        return y if shape is None else y.view(shape)

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def _in_torch(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.rms_norm(x, self.normalized_shape, self._offset_weight(), self.eps)
        return y if self.out_dtype is None else y.to(self.out_dtype)


class LayerNorm(Norm, torch.nn.LayerNorm):  # type: ignore[misc]
    """`torch.nn.LayerNorm` by `transformer_rtc.layer_norm`.

    ``y = (x - mean) * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(variance + eps)``. Otherwise as
    `RMSNorm`.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The last dimensions of x, over which it is normalised together.
    eps : float
        Added to the variance.
    elementwise_affine : bool
        Whether there is a weight.
    bias : bool
        Whether there is a bias beside the weight.
    device, dtype : optional
        Of the parameters.
    weight_offset, zero_centered_gamma, sequence_parallel, sm_margin, out_dtype
        As `RMSNorm` takes them.

    Raises
    ------
    ArgumentError
        If an argument is not as described.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import LayerNorm
    >>> norm = LayerNorm(5, eps=0.0)
    >>> y = norm(torch.tensor([[6.0, 1.0, 1.0, 1.0, 1.0]]))  # x's mean is 2, and its variance 4
    >>> y.tolist()
    [[2.0, -0.5, -0.5, -0.5, -0.5]]
    >>> y.sum().backward()
    >>> norm.weight.grad, norm.bias.grad
    (tensor([ 2.0000, -0.5000, -0.5000, -0.5000, -0.5000]), tensor([1., 1., 1., 1., 1.]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
        sm_margin: int = 0,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._configure(weight_offset, zero_centered_gamma, sequence_parallel, sm_margin, out_dtype)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return y.

        Parameters
        ----------
        input : Tensor [..., *normalized_shape]
            Of any strides.

        Returns
        -------
        Tensor
            Of the input's shape, and of its type or `out_dtype`.
        """
        x, weight, bias, shape = input, self.weight, self.bias, None
        if weight is None or x.dtype not in TAKEN or not x.is_contiguous() or len(self.normalized_shape) != 1:
            if x.dtype not in TAKEN:
                return self._in_torch(x)
            x, shape, weight, bias = self._rows(x), x.shape, flat(weight), flat(bias)
        y = layer_norm(
            x,
            weight,
            bias,
            self.eps,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            sm_margin=self.sm_margin,
        )
        return y if shape is None else y.view(shape)

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(self, input: torch.Tensor) -> torch.Tensor: ...

    def _in_torch(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.layer_norm(x, self.normalized_shape, self._offset_weight(), self.bias, self.eps)
        return y if self.out_dtype is None else y.to(self.out_dtype)
