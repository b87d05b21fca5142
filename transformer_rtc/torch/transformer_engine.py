# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's softmax of attention scores, on our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, shown
from .scale_mask_softmax import (
    AssertedArgumentError,
    ScaleMaskSoftmax,
    attention_mask_func,
    check_scores,
    hidden_keys,
    joined,
    masked_softmax,
)
from .softmax_module import Causal

__all__ = ["FusedScaleMaskSoftmax", "attention_mask_func"]

# Those whose causal part is in the mask that is given, where each sequence of a batch has a length of its own.
_IN_MASK = ("padding_causal", "padding_causal_bottom_right")
_MASK_TYPES = ("no_mask", "padding", "causal", "causal_bottom_right", "arbitrary", *_IN_MASK)


class FusedScaleMaskSoftmax(ScaleMaskSoftmax):
    """The softmax of scaled and masked attention scores, with TransformerEngine's constructor and call.

    ``y = exp(v - max(v)) / sum(exp(v - max(v)))`` with ``v = scale * inp``, over the keys that no mask excludes. The
    mask is part of one kernel, for any number of queries and keys, float32, float16 and bfloat16, forward and backward.
    Arithmetic is in float32, and y is rounded once, to the input's data type.

    What is excluded is 0. A row of which everything is excluded becomes zeros and has a gradient of zeros, as in
    TransformerEngine's kernels; its path through torch gives 1 / keys. The causal mask types exclude keys for every
    shape and data type.

    Parameters
    ----------
    mask_func : callable or None
        Called as ``mask_func(scaled_scores, mask)``, whose softmax is then taken, in a kernel of its own. It is not
        called, and the mask is part of the kernel, if it is None, or Megatron's, TransformerEngine's or this module's
        `attention_mask_func`.
    softmax_in_fp32 : bool
        Whether `mask_func`, if it is called, gets float32. All arithmetic is in float32 in any case.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch.transformer_engine import FusedScaleMaskSoftmax
    >>> attend = FusedScaleMaskSoftmax(None)
    >>> attend(torch.zeros(1, 1, 2, 3), None, "causal_bottom_right", 0.125)  # the last query sees the last key
    tensor([[[[0.5000, 0.5000, 0.0000],
              [0.3333, 0.3333, 0.3333]]]])
    """

    def __init__(self, mask_func: Callable[..., Any] | None, softmax_in_fp32: bool = True) -> None:
        super().__init__(mask_func)
        self.softmax_in_fp32 = softmax_in_fp32

    def forward(self, inp: Any, mask: Any, attn_mask_type: str, scale: float | None = None) -> Any:
        """Return the softmax over the keys.

        Parameters
        ----------
        inp : tensor [batch, heads, queries, keys], float32, float16 or bfloat16
            The attention scores.
        mask : tensor broadcast to [batch, heads, queries, keys], bool or uint8, or None
            Which scores are excluded. It is read as it is, [batch, 1, queries, keys] too.
        attn_mask_type : str
            ``"no_mask"``: all keys, whatever the mask. ``"padding"``, ``"arbitrary"``: those that the mask leaves.
            ``"padding_causal"``, ``"padding_causal_bottom_right"``: likewise, and the mask must be there, as it has
            the causal part, too. ``"causal"``: of what a mask leaves, query i sees the keys up to i.
            ``"causal_bottom_right"``: likewise, the keys up to i + keys - queries.
        scale : float, optional
            What the input is multiplied by; 1 by default.

        Returns
        -------
        y : tensor [batch, heads, queries, keys]
            Of the input's data type.

        Raises
        ------
        ArgumentError
            If an argument is not as described; where TransformerEngine has an assert, the error is an AssertionError,
            too.
        """
        check_scores("inp", inp)
        if scale is not None and not self.softmax_in_fp32:
            raise AssertedArgumentError(f"softmax_in_fp32 must be set where there is a scale; scale is {shown(scale)}")
        if attn_mask_type not in _MASK_TYPES:
            raise ArgumentError(f"attn_mask_type must be one of {', '.join(_MASK_TYPES)}; not {shown(attn_mask_type)}")
        if mask is None and attn_mask_type in _IN_MASK:
            raise ArgumentError(f"{attn_mask_type} needs a mask, which has the causal part, too; the mask is None")
        if attn_mask_type == "no_mask":
            mask = None
        causal: Causal | None = None
        if attn_mask_type in ("causal", "causal_bottom_right"):
            queries, keys = inp.size(2), inp.size(3)
            aligned = attn_mask_type == "causal_bottom_right" or queries == keys
            if aligned and not self._calls_mask_func:
                causal = "aligned"
            else:
                mask = joined(mask, hidden_keys(inp, None, keys - queries if aligned else 0))
        if not self._calls_mask_func or mask is None:
            return masked_softmax(inp, mask, scale=scale, causal=causal)
        scores = self._apply_mask_func(inp, mask, scale, self.softmax_in_fp32)
        return masked_softmax(scores, None, out_dtype=inp.dtype)
