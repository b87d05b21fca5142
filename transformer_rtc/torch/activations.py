# SPDX-License-Identifier: Apache-2.0
"""Activations as modules: those of torch.nn, and gated ones, computed by this package's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from ..errors import ArgumentError, shown
from ..ops.activation.api import gelu, gelu_and_mul, silu, silu_and_mul
from .modules import TAKEN, rows

__all__ = ["GEGLU", "GELU", "SiLU", "SwiGLU", "is_taken", "of_each"]

_MOST_COLUMNS = 1 << 30
# torch's words, and the operators'.
_APPROXIMATE: dict[str, Literal["tanh"] | None] = {"none": None, "tanh": "tanh"}


def is_taken(x: torch.Tensor) -> bool:
    """Whether the operators take a tensor, perhaps in other strides; the rest is torch's."""
    return x.dtype in TAKEN and x.ndim > 0 and 0 < x.shape[-1] <= _MOST_COLUMNS


def of_each(call: Callable[..., Any], x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return a function of each element. y is in memory as x is, where that has no gaps, such as channels last."""
    if x.is_contiguous():
        return call(x, **options)
    order = sorted(range(x.ndim), key=lambda dim: -x.stride(dim))
    dense = x.permute(order)
    if not dense.is_contiguous():
        return call(rows(x), **options)
    back = sorted(range(x.ndim), key=lambda place: order[place])
    return call(dense, **options).permute(back)


class GELU(torch.nn.GELU):  # type: ignore[misc]
    """`torch.nn.GELU` by `transformer_rtc.gelu`, in a constructor of the same arguments.

    ``y = x * (1 + erf(x / sqrt(2))) / 2``, or what approximates it by a tanh. Arithmetic is in float32 and y is rounded
    once. x of any strides is taken; it is copied where its rows do not collapse to two strides. Another type than
    float32, float16 and bfloat16 is computed by torch.

    Parameters
    ----------
    approximate : {"none", "tanh"}
        Whether it is exact, or approximated by a tanh.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import GELU
    >>> GELU()(torch.tensor([[-1.0, 0.0, 1.0]]))
    tensor([[-0.1587,  0.0000,  0.8413]])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return y, of the input's shape and type."""
        if not is_taken(input) or self.approximate not in _APPROXIMATE:
            return functional.gelu(input, approximate=self.approximate)
        return of_each(gelu, input, approximate=_APPROXIMATE[self.approximate])

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(self, input: torch.Tensor) -> torch.Tensor: ...


class SiLU(torch.nn.SiLU):  # type: ignore[misc]
    """`torch.nn.SiLU` by `transformer_rtc.silu`: ``y = x / (1 + exp(-x))``.

    What `GELU` says of types and strides holds.

    Parameters
    ----------
    inplace : bool
        Whether y takes the place of x: then torch computes it.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import SiLU
    >>> SiLU()(torch.tensor([[-1.0, 0.0, 1.0]]))
    tensor([[-0.2689,  0.0000,  0.7311]])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return y, of the input's shape and type."""
        if not is_taken(input) or self.inplace:
            return functional.silu(input, inplace=self.inplace)
        return of_each(silu, input)

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(self, input: torch.Tensor) -> torch.Tensor: ...


class SwiGLU(torch.nn.Module):  # type: ignore[misc]
    """``y = silu(x) * up`` by `transformer_rtc.silu_and_mul`, of two tensors or of the halves of each row of one.

    It has no parameters. y is rounded once, and what the backward needs is x and `up` alone.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import SwiGLU
    >>> x, up = torch.tensor([[0.0, 1.0]]), torch.tensor([[5.0, 10.0]])
    >>> SwiGLU()(x, up)
    tensor([[0.0000, 7.3106]])
    >>> SwiGLU()(torch.cat([x, up], dim=-1))
    tensor([[0.0000, 7.3106]])
    """

    def forward(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Return y.

        Parameters
        ----------
        x : Tensor [..., columns] or [..., 2 * columns]
            The argument of the function; without `up`, followed by it in each row.
        up : Tensor [..., columns], optional
            The second factor.

        Returns
        -------
        Tensor [..., columns]
            Of x's type.
        """
        return silu_and_mul(_rows(x), None if up is None else _rows(up))

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor: ...


class GEGLU(torch.nn.Module):  # type: ignore[misc]
    """``y = gelu(x) * up`` by `transformer_rtc.gelu_and_mul`; otherwise as `SwiGLU`.

    Parameters
    ----------
    approximate : {"none", "tanh"}
        Whether the function is exact, or approximated by a tanh.

    Raises
    ------
    ArgumentError
        If `approximate` is neither.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch import GEGLU
    >>> GEGLU()(torch.tensor([[0.0, 1.0]]), torch.tensor([[5.0, 10.0]]))
    tensor([[0.0000, 8.4134]])
    """

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in _APPROXIMATE:
            raise ArgumentError(f"approximate is {shown(approximate)}; it takes {', '.join(_APPROXIMATE)}")
        super().__init__()
        self.approximate = approximate

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"

    def forward(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Return y. Arguments are those of `SwiGLU`."""
        approximate = _APPROXIMATE[self.approximate]
        return gelu_and_mul(_rows(x), None if up is None else _rows(up), approximate=approximate)

    if TYPE_CHECKING:  # torch says that it returns Any

        def __call__(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor: ...


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else rows(x)
