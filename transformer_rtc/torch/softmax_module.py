# SPDX-License-Identifier: Apache-2.0
"""Softmax as a module: that of torch.nn, computed by this package's operator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.nn import functional

from ..errors import ArgumentError, shown
from ..ops.softmax.api import softmax
from .modules import TAKEN, check_dtype, rows

__all__ = ["Causal", "Softmax"]

# The words that `transformer_rtc.softmax` takes.
Causal: TypeAlias = Literal["upper_triangular", "aligned"]


class Softmax(torch.nn.Softmax):  # type: ignore[misc]
    """`torch.nn.Softmax` by `transformer_rtc.softmax`: ``y = softmax(scale * x + mask)`` along a dimension.

    ``softmax(v) = exp(v - max(v)) / sum(exp(v - max(v)))``. It has no parameters and an empty state dict. x of another
    type than float32, float16 and bfloat16 is computed by torch, where nothing but x is given.

    Parameters
    ----------
    dim : int, optional
        Along which y sums to 1. Another than the last one is moved to the end and back: y is then a view, with the
        dimensions in memory in that order. None: the one that torch takes, with its warning.
    scale : float
        What x is multiplied by in float32.
    out_dtype : torch.dtype, optional
        Of y: float32, float16 or bfloat16. None: x's.

    Raises
    ------
    ArgumentError
        If an argument is not as described.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import Softmax
    >>> Softmax(-1, scale=0.125)(torch.zeros(1, 2, 2), causal="aligned")  # the first query sees one key
    tensor([[[1.0000, 0.0000],
             [0.5000, 0.5000]]])
    """

    scale: float = 1.0
    out_dtype: torch.dtype | None = None

    def __init__(self, dim: int | None = None, *, scale: float = 1.0, out_dtype: torch.dtype | None = None) -> None:
        check_dtype(out_dtype, "out_dtype")
        if not math.isfinite(scale):
            raise ArgumentError(f"scale is {shown(scale)}; it takes a finite number")
        super().__init__(dim)
        self.scale, self.out_dtype = scale, out_dtype

    def extra_repr(self) -> str:
        words = [super().extra_repr()]
        words += [f"scale={self.scale}"] if self.scale != 1 else []
        words += [f"out_dtype={self.out_dtype}"] if self.out_dtype is not None else []
        return ", ".join(words)

    def forward(
        self,
        input: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        mask_keeps: bool = False,
        causal: Causal | None = None,
        window: int | None = None,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return y.

        Parameters
        ----------
        input : Tensor
            Of any strides.
        mask, mask_keeps, causal, window, sink : optional
            As `transformer_rtc.softmax` takes them, along the last dimension only.

        Returns
        -------
        Tensor
            Of the input's shape, and of its type or `out_dtype`.

        Raises
        ------
        ArgumentError
            If one of them is given, and `dim` is not the last one.
        """
        x, dim = input, self.dim
        if dim is None:
            dim = functional._get_softmax_dim("softmax", x.ndim, 5)  # type: ignore[attr-defined]
        plain = mask is None and causal is None and sink is None and window is None
        if plain and (x.dtype not in TAKEN or x.ndim == 0):
            y = functional.softmax(x if self.scale == 1 else x * self.scale, dim)
            return y if self.out_dtype is None else y.to(self.out_dtype)
        moved = dim not in (-1, x.ndim - 1)
        if moved:
            if not plain:
                raise ArgumentError(
                    f"dim is {dim}; a mask, causal, window or sink is taken along the last dimension only"
                )
            x = x.movedim(dim, -1)
        y = softmax(
            x if x.is_contiguous() else rows(x),
            scale=self.scale,
            mask=mask,
            mask_keeps=mask_keeps,
            causal=causal,
            window=window,
            sink=sink,
            out_dtype=self.out_dtype,
        )
        return y.movedim(-1, dim) if moved else y

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(
            self,
            input: torch.Tensor,
            mask: torch.Tensor | None = None,
            *,
            mask_keeps: bool = False,
            causal: Causal | None = None,
            window: int | None = None,
            sink: torch.Tensor | None = None,
        ) -> torch.Tensor: ...
