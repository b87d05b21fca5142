# SPDX-License-Identifier: Apache-2.0
"""What the softmax modules of Megatron-LM and TransformerEngine have in common: how a mask is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, shown
from ..ops.softmax.api import softmax
from .softmax_module import Causal

__all__ = [
    "AssertedArgumentError",
    "ScaleMaskSoftmax",
    "attention_mask_func",
    "check_scores",
    "hidden_keys",
    "joined",
    "masked_softmax",
]

# Projects whose `attention_mask_func` excludes what a mask says, and does nothing else. Others gave that name to
# functions that read a mask the other way round, so that the name alone says nothing.
_KNOWN = ("megatron", "transformer_engine")


class AssertedArgumentError(ArgumentError, AssertionError):
    """An argument that is refused where the project whose module is replaced has an ``assert``."""


def attention_mask_func(attention_scores: Any, attention_mask: Any) -> Any:
    """Return the scores with -10000 where the mask is True.

    The modules know this function, and that of this name of Megatron-LM and TransformerEngine: they do not call it, but
    exclude what the mask says.

    Parameters
    ----------
    attention_scores : tensor [batch, heads, queries, keys]
        The scaled scores. They are not changed.
    attention_mask : tensor broadcast to [batch, heads, queries, keys], bool
        Which scores are excluded.

    Returns
    -------
    tensor [batch, heads, queries, keys]
        Of the scores' data type.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch.megatron import FusedScaleMaskSoftmax, attention_mask_func
    >>> scores, mask = torch.zeros(1, 1, 1, 2), torch.tensor([False, True])
    >>> attention_mask_func(scores, mask)
    tensor([[[[     0., -10000.]]]])
    >>> FusedScaleMaskSoftmax(False, False, "padding", True, attention_mask_func, True, None)(scores, mask)
    tensor([[[[1., 0.]]]])
    """
    return attention_scores.masked_fill(attention_mask, -10000.0)


def check_scores(name: str, scores: Any) -> None:
    """Refuse scores that are not ``[batch, heads, queries, keys]``."""
    if not isinstance(scores, torch.Tensor):
        raise ArgumentError(f"{name} must be a tensor; it is {shown(scores)}")
    if scores.dim() != 4:
        raise AssertedArgumentError(
            f"{name} must be [batch, heads, queries, keys]; its shape is {shown(tuple(scores.shape))}"
        )


def hidden_keys(scores: Any, first: int | None, last: int | None) -> Any:
    """Return a mask bool [queries, keys] that is True where a query does not see a key.

    Query i sees the keys from ``i + first`` to ``i + last``, both included; None is no limit.
    """
    queries, keys = scores.size(2), scores.size(3)
    distance = torch.arange(keys, device=scores.device) - torch.arange(queries, device=scores.device)[:, None]
    if first is None:
        return distance > last
    return distance < first if last is None else (distance < first) | (distance > last)


def check_mask(mask: Any) -> None:
    """Refuse a mask that is not of bool or uint8: one of floats would be added."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        given = f"of {mask.dtype}" if isinstance(mask, torch.Tensor) else shown(mask)
        raise ArgumentError(
            f"the mask must be a tensor of bool or uint8, not 0 where a score is excluded; it is {given}"
        )


def joined(mask: Any, other: Any) -> Any:
    """Return a mask that excludes what one of two does; the first may be None."""
    if mask is None:
        return other
    check_mask(mask)
    return torch.logical_or(mask, other)


class ScaleMaskSoftmax(torch.nn.Module):  # type: ignore[misc]
    """A module that knows whether a mask function has to be called.

    Parameters
    ----------
    mask_func : callable or None
        As the modules take it.
    """

    def __init__(self, mask_func: Callable[..., Any] | None) -> None:
        super().__init__()
        self.mask_func = mask_func

    @property
    def mask_func(self) -> Callable[..., Any] | None:
        """The mask function that was given."""
        mask_func: Callable[..., Any] | None = self._mask_func
        return mask_func

    @mask_func.setter
    def mask_func(self, mask_func: Callable[..., Any] | None) -> None:
        project = str(getattr(mask_func, "__module__", "")).partition(".")[0]
        known = project in _KNOWN and getattr(mask_func, "__name__", "") == "attention_mask_func"
        self._mask_func: Any = mask_func
        # Kept, as torch.compile cannot trace a question for a function's module.
        self._writes_scores = known and project == "megatron"
        self._calls_mask_func = not (mask_func is None or mask_func is attention_mask_func or known)

    def _apply_mask_func(self, scores: Any, mask: Any, scale: float | None, in_float32: bool) -> Any:
        """Return what the mask function makes of the scaled scores, called as the projects' own modules call it."""
        scores = scores.float() if in_float32 and scores.dtype in (torch.float16, torch.bfloat16) else scores
        return self._mask_func(scores if scale is None else scores * scale, mask)

    @staticmethod
    def is_kernel_available(mask: Any, b: int, np: int, sq: int, sk: int) -> bool:
        """Return True: there is a kernel for every shape. The projects' own modules have this method."""
        return True


def masked_softmax(
    scores: Any,
    mask: Any,
    *,
    scale: float | None = None,
    causal: Causal | None = None,
    window: int | None = None,
    sink: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Return the softmax over the keys, for scores and masks of any strides.

    Parameters
    ----------
    scores : tensor [batch, heads, queries, keys]
        Copied where its strides are not those that `transformer_rtc.softmax` takes.
    mask : tensor broadcast to [batch, heads, queries, keys], bool or uint8, optional
        Which scores are excluded. Copied only where its last dimension is broadcast or not contiguous.
    scale : float, optional
        1 by default.
    causal, window, sink, out_dtype
        As `transformer_rtc.softmax` takes them.
    """
    if mask is not None:
        check_mask(mask)
        keys = scores.size(3)
        if not mask.dim() or mask.size(-1) == 1 != keys:
            mask = mask.expand(*mask.shape[:-1], keys)
        mask = mask if keys == 1 or mask.stride(-1) == 1 else mask.contiguous()
    # The batches and heads are one dimension of rows for the kernel, and the queries another one.
    if scores.stride(3) != 1 or scores.stride(0) != scores.size(1) * scores.stride(1):
        scores = scores.contiguous()
    return softmax(
        scores,
        scale=1.0 if scale is None else scale,
        mask=mask,
        causal=causal,
        window=window,
        sink=sink,
        out_dtype=None if out_dtype == scores.dtype else out_dtype,
    )
