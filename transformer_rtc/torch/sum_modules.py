# SPDX-License-Identifier: Apache-2.0
"""Norms of a sum as modules: a residual is added in the same launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..ops.norm.api import add_layer_norm, add_rms_norm
from .modules import DEFAULT_EPS, TAKEN, LayerNorm, Norm, RMSNorm, check_dtype, flat

__all__ = ["AddLayerNorm", "AddNorm", "AddRMSNorm"]


class AddNorm(Norm):
    """What the norms of a sum share.

    Attributes
    ----------
    residual_dtype : torch.dtype or None
        Of the sum; None: the residual's.
    """

    residual_dtype: torch.dtype | None = None

    def __init__(self, *arguments: Any, residual_dtype: torch.dtype | None = None, **others: Any) -> None:
        check_dtype(residual_dtype, "residual_dtype")
        self.residual_dtype = residual_dtype
        super().__init__(*arguments, **others)

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual where there is none yet."""
        return x if self.residual_dtype is None else x.to(self.residual_dtype)

    def _usual(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        """Whether the operators take both as they are, and check their shapes."""
        contiguous: bool = x.is_contiguous() and residual.is_contiguous()
        return contiguous and self.weight is not None and len(self.normalized_shape) == 1

    def _sum_in_torch(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = (x + residual).to(self.residual_dtype or residual.dtype)
        y = self._in_torch(s)  # type: ignore[attr-defined]
        return y.to(self.out_dtype or x.dtype), s


class AddRMSNorm(AddNorm, RMSNorm):
    """Adds a residual, then normalises: ``s = x + residual``, ``y = rms_norm(s)``, by `transformer_rtc.add_rms_norm`.

    A pre-norm block passes s on as the next residual. The state dict is that of `RMSNorm`.

    Parameters
    ----------
    residual_dtype : torch.dtype, optional
        Of s, such as float32 beside an x of 16 bits. None: the residual's; x's where there is none.
    normalized_shape, eps, elementwise_affine, device, dtype, **others
        As `RMSNorm` takes them.

    Raises
    ------
    ArgumentError
        If an argument is not as described.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import AddRMSNorm
    >>> norm = AddRMSNorm(5, eps=0.0)
    >>> y, s = norm(torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0]]), torch.ones(1, 5))
    >>> s.tolist(), y.tolist()
    ([[4.0, 1.0, 1.0, 1.0, 1.0]], [[2.0, 0.5, 0.5, 0.5, 0.5]])
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y, and the sum.

        Parameters
        ----------
        x : Tensor [..., *normalized_shape]
            Of any strides.
        residual : Tensor, optional
            Of x's shape. None: x itself is the sum, in `residual_dtype`.

        Returns
        -------
        y : Tensor
            Of x's type, or `out_dtype`.
        s : Tensor
            The next residual.
        """
        if residual is None:
            return super().forward(x), self._first(x)
        weight, shape = self.weight, None
        if not {x.dtype, residual.dtype} <= TAKEN:
            return self._sum_in_torch(x, residual)
        if not self._usual(x, residual):
            x, residual, shape, weight = self._rows(x), self._rows(residual), x.shape, flat(weight)
        eps = self.eps if self.eps is not None else DEFAULT_EPS[x.dtype]
        y, s = add_rms_norm(
            x,
            residual,
            weight,
            eps,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            round_before_weight=self.rounding == "twice",
            residual_dtype=self.residual_dtype,
            sm_margin=self.sm_margin,
        )
        return (y, s) if shape is None else (y.view(shape), s.view(shape))

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(
            self, x: torch.Tensor, residual: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]: ...


class AddLayerNorm(AddNorm, LayerNorm):
    """Adds a residual, then normalises: ``s = x + residual``, ``y = layer_norm(s)``.

    By `transformer_rtc.add_layer_norm`; otherwise as `AddRMSNorm`. The state dict is that of `LayerNorm`.

    Parameters
    ----------
    residual_dtype : torch.dtype, optional
        Of s. None: the residual's; x's where there is none.
    normalized_shape, eps, elementwise_affine, bias, device, dtype, **others
        As `LayerNorm` takes them.

    Raises
    ------
    ArgumentError
        If an argument is not as described.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import AddLayerNorm
    >>> norm = AddLayerNorm(5, eps=0.0)
    >>> y, s = norm(torch.tensor([[5.0, 0.0, 0.0, 0.0, 0.0]]), torch.ones(1, 5))
    >>> s.tolist(), y.tolist()
    ([[6.0, 1.0, 1.0, 1.0, 1.0]], [[2.0, -0.5, -0.5, -0.5, -0.5]])
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y, and the sum, as `AddRMSNorm` does.

        Parameters
        ----------
        x : Tensor [..., *normalized_shape]
            Of any strides.
        residual : Tensor, optional
            Of x's shape. None: x itself is the sum, in `residual_dtype`.

        Returns
        -------
        y : Tensor
            Of x's type, or `out_dtype`.
        s : Tensor
            The next residual.
        """
        if residual is None:
            return super().forward(x), self._first(x)
        weight, bias, shape = self.weight, self.bias, None
        if not {x.dtype, residual.dtype} <= TAKEN:
            return self._sum_in_torch(x, residual)
        if not self._usual(x, residual):
            x, residual, shape = self._rows(x), self._rows(residual), x.shape
            weight, bias = flat(weight), flat(bias)
        y, s = add_layer_norm(
            x,
            residual,
            weight,
            bias,
            self.eps,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            residual_dtype=self.residual_dtype,
            sm_margin=self.sm_margin,
        )
        return (y, s) if shape is None else (y.view(shape), s.view(shape))

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(
            self, x: torch.Tensor, residual: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]: ...
