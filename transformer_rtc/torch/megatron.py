# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's softmax of attention scores, on our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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

_MASK_TYPES = ("padding", "causal", "no_mask", "arbitrary")


class FusedScaleMaskSoftmax(ScaleMaskSoftmax):
    """The softmax of scaled and masked attention scores, with the constructor and the call of Megatron-LM's module.

    ``y = exp(v - max(v)) / sum(exp(v - max(v)))`` with ``v = scale * input``, over the keys that no mask excludes; with
    an offset, ``exp(offset)`` is one more term of the sum. Masks, window and offset are part of one kernel, for any
    number of queries and keys, float32, float16 and bfloat16, forward and backward; a window that has keys after a
    query's own becomes a mask first. Arithmetic is in float32, and y is rounded once.

    It differs from Megatron's module in these points:

    - What is excluded is 0; Megatron's path through torch gives it a score of -10000. A row of which everything is
      excluded becomes zeros, as in Megatron's kernels, and has a gradient of zeros; Megatron's path through torch
      gives 1 / keys.
    - `window_size` is joined to the mask that is given; Megatron's path through torch applies the window alone, so
      that padding takes part, and its kernels ignore the window. -1 is no limit, as Megatron's configuration says.
    - Where the mask type is causal and a mask is given for as many queries as keys, Megatron's kernel ignores the mask
      and its path through torch ignores the mask type. Here both are applied if `scaled_masked_softmax_fusion`; if
      not, the mask alone, as in that path.

    Parameters
    ----------
    input_in_fp16, input_in_bf16 : bool
        The data type of y if `softmax_in_fp32`: float16 or bfloat16. If neither is set, or not `softmax_in_fp32`, it
        is the input's, whatever that of the offset.
    attn_mask_type : Megatron's AttnMaskType or str
        ``"causal"``; or ``"padding"``, ``"arbitrary"`` or ``"no_mask"``, which all apply the mask that is given.
        Others are refused: Megatron leaves them to TransformerEngine.
    scaled_masked_softmax_fusion : bool
        Which of Megatron's two paths is meant where they differ, as said above. Both use the same kernel here.
    mask_func : callable or None
        Called as ``mask_func(scaled_scores, mask)``, whose softmax is then taken, in a kernel of its own. The mask is
        part of the kernel instead if it is None, or Megatron's, TransformerEngine's or this module's
        `attention_mask_func`. Megatron's writes -10000 to the scores: where they are the input itself, which is neither
        scaled nor of 16 bits, and requires no grad, it is called for that. y does not depend on it.
    softmax_in_fp32 : bool
        Whether y has the data type that the flags say; and whether `mask_func`, if it is called, gets float32. All
        arithmetic is in float32 in any case.
    scale : float or None
        What the input is multiplied by.
    window_size : tuple of two int, optional
        How many keys before its own and after its own a query sees, whatever the mask type; the last query's own key
        is the last key.

    Raises
    ------
    ArgumentError
        If an argument is not as described; where Megatron has an assert, the error is an AssertionError, too.

    Examples
    --------
    >>> import torch
    >>> from transformer_rtc.torch.megatron import FusedScaleMaskSoftmax
    >>> attend = FusedScaleMaskSoftmax(False, True, "causal", True, None, True, None)
    >>> attend(torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16), None)  # the first query sees one key
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]], dtype=torch.bfloat16)
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[..., Any] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(mask_func)
        if input_in_fp16 and input_in_bf16:
            raise AssertedArgumentError("input_in_fp16 and input_in_bf16 must not both be set")
        if scale is not None and not softmax_in_fp32:
            raise AssertedArgumentError(f"softmax_in_fp32 must be set where there is a scale; scale is {shown(scale)}")
        self.input_in_fp16, self.input_in_bf16 = input_in_fp16, input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size
        self._is_causal()
        self._window_limits()

    def forward(self, input: Any, mask: Any, softmax_offset: Any = None) -> Any:
        """Return the softmax over the keys.

        Parameters
        ----------
        input : tensor [batch, heads, queries, keys], float32, float16 or bfloat16
            The attention scores.
        mask : tensor broadcast to [batch, heads, queries, keys], bool or uint8, or None
            Which scores are excluded. It is read as it is, [batch, 1, queries, keys] too. If None and the mask type is
            causal, query i sees the keys up to i, and there must be as many queries as keys; a single query sees all
            keys.
        softmax_offset : tensor [heads], float32, float16 or bfloat16, optional
            One more logit for each row of a head, which only adds to the sum. It has a gradient.

        Returns
        -------
        y : tensor [batch, heads, queries, keys]
            Of the data type that the constructor's flags say.

        Raises
        ------
        ArgumentError
            If an argument is not as described; where Megatron has an assert, the error is an AssertionError, too.
        """
        check_scores("input", input)
        window = None
        offset = input.size(3) - input.size(2)
        if self.window_size is None:
            causal = self._causal_mode(input, mask)
        else:
            before, after = self._window_limits()
            causal = "aligned" if after == 0 else None
            if after == 0:
                window = None if before is None else before + 1
            elif before is not None or after is not None:
                first = None if before is None else offset - before
                mask = joined(mask, hidden_keys(input, first, None if after is None else offset + after))
        sink = None if softmax_offset is None else softmax_offset.to(input.device).reshape(-1)
        dtype = input.dtype
        in_float32 = self.input_in_float16 and self.softmax_in_fp32
        if in_float32:
            dtype = torch.float16 if self.input_in_fp16 else torch.bfloat16
        # Callers of Megatron's module may look at what its mask function has written to their scores.
        shows = self._writes_scores and not (self.input_in_float16 or input.requires_grad) and self.scale is None
        if (self._calls_mask_func or shows) and not (mask is None and causal is None):
            excluded = mask
            if causal is not None:
                excluded = joined(mask, hidden_keys(input, None if window is None else offset - window + 1, offset))
            scores = self._apply_mask_func(input, excluded, self.scale, in_float32)
            if self._calls_mask_func:
                return masked_softmax(scores, None, sink=sink, out_dtype=dtype)
        return masked_softmax(input, mask, scale=self.scale, causal=causal, window=window, sink=sink, out_dtype=dtype)

    def _causal_mode(self, scores: Any, mask: Any) -> Causal | None:
        """Return how the mask type limits the keys that a query sees, where there is no window."""
        queries, keys = scores.size(2), scores.size(3)
        if not self._is_causal():
            return None
        if mask is not None:
            return "upper_triangular" if self.scaled_masked_softmax_fusion and queries == keys else None
        if queries == 1:  # of a cache of keys, all of which it sees
            return None
        if queries != keys:
            raise AssertedArgumentError(
                f"a causal mask needs as many queries as keys; the input has {queries} queries and {keys} keys: pass "
                "a mask"
            )
        return "upper_triangular"

    def _is_causal(self) -> bool:
        mask_type = getattr(self.attn_mask_type, "name", self.attn_mask_type)
        if mask_type not in _MASK_TYPES:
            raise ArgumentError(
                f"attn_mask_type must be one of {', '.join(_MASK_TYPES)}; it is {shown(self.attn_mask_type)}"
            )
        return bool(mask_type == "causal")

    def _window_limits(self) -> tuple[int | None, int | None]:
        """Return how many keys before and after its own a query sees, None for all."""
        window = self.window_size
        if window is None:
            return None, None
        if not isinstance(window, (tuple, list)) or len(window) != 2 or min(window) < -1:
            raise ArgumentError(
                "window_size must be two numbers, of keys before and after a query's own, or -1 for all of them; it "
                f"is {shown(window)}"
            )
        before, after = window
        return None if before == -1 else before, None if after == -1 else after

    def extra_repr(self) -> str:
        mask_type = getattr(self.attn_mask_type, "name", self.attn_mask_type)
        window = "" if self.window_size is None else f", window_size={self.window_size}"
        return f"{mask_type}, scale={self.scale}{window}"
