# SPDX-License-Identifier: Apache-2.0
"""Replace the softmax in Megatron-LM's attention.

The module has Megatron's constructor and call, and one kernel does its work for any number of queries and keys, with a
window and an offset, too. In Megatron it is put in place before the model is built:

    from megatron.core.transformer import dot_product_attention
    from transformer_rtc.torch.megatron import FusedScaleMaskSoftmax
    dot_product_attention.FusedScaleMaskSoftmax = FusedScaleMaskSoftmax

This program needs no Megatron. It runs an attention written as Megatron's with this module, and with the operations of
torch that Megatron falls back to, and compares results, gradients and times.

    python examples/megatron_softmax.py          # on a GPU
    python examples/megatron_softmax.py --tiny   # on the CPU, in the simulator, in seconds
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from torch import nn

from transformer_rtc import using
from transformer_rtc.torch.megatron import FusedScaleMaskSoftmax, attention_mask_func


class SoftmaxOfTorch(nn.Module):
    """What Megatron does where its kernels do not serve: a causal window, and an offset for each head."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, scores: torch.Tensor, mask: None, offset: torch.Tensor) -> torch.Tensor:
        batch, _, queries, keys = scores.shape
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril().triu(-self.window)
        logits = attention_mask_func(scores.float(), ~seen)
        offsets = offset.view(1, -1, 1, 1).expand(batch, -1, queries, 1)
        return torch.softmax(torch.cat([logits, offsets.float()], -1), -1)[..., :-1].to(scores.dtype)


class Attention(nn.Module):
    """The part of Megatron's attention between the projections."""

    def __init__(self, heads: int, scale_mask_softmax: nn.Module) -> None:
        super().__init__()
        self.scale_mask_softmax = scale_mask_softmax
        self.softmax_offset = nn.Parameter(torch.linspace(-1.0, 1.0, heads))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # [tokens, batch, heads, head size] -> [batch, heads, tokens, head size]
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        context = self.scale_mask_softmax(scores, None, self.softmax_offset) @ value
        return context.permute(2, 0, 1, 3).flatten(2)


def run(attention: Attention, qkv: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of q, k, v and of the offset."""
    qkv = qkv.detach().requires_grad_()
    y = attention(*qkv.unbind())
    return [y.detach(), *torch.autograd.grad(y, [qkv, attention.softmax_offset], dy)]


def milliseconds(attention: Attention, qkv: torch.Tensor, dy: torch.Tensor, times: int = 10) -> float:
    """Return how long a forward and a backward take."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        run(attention, qkv, dy)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / times


def compare(tiny: bool) -> list[float]:
    torch.manual_seed(0)
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    # Megatron's own kernels take neither a number of keys that is no multiple of 4, nor a window, nor an offset.
    tokens, batch, heads, size, window = (13, 1, 2, 8, 5) if tiny else (4098, 2, 16, 128, 1023)
    qkv = torch.randn(3, tokens, batch, heads, size, device=device, dtype=dtype)
    dy = torch.randn(tokens, batch, heads * size, device=device, dtype=dtype)
    fused = FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=dtype == torch.bfloat16,
        attn_mask_type="causal",
        scaled_masked_softmax_fusion=True,
        mask_func=attention_mask_func,
        softmax_in_fp32=True,
        scale=None,
        window_size=(window, 0),
    )
    ours, torchs = (Attention(heads, one).to(device, dtype) for one in (fused, SoftmaxOfTorch(window)))
    errors = []
    names = ("y", "gradient of q, k, v", "gradient of the offset")
    for name, one, other in zip(names, run(ours, qkv, dy), run(torchs, qkv, dy), strict=True):
        errors.append(((one - other).abs().max() / other.abs().max()).item())
        print(f"{name}: largest difference {errors[-1]:.1e} of the largest value")
    if not tiny:
        print(
            f"forward and backward: {milliseconds(ours, qkv, dy):.2f} ms, torch {milliseconds(torchs, qkv, dy):.2f} ms"
        )
    return errors


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny attention, on the CPU")
    tiny = parser.parse_args(arguments).tiny
    with using("simulator") if tiny else contextlib.nullcontext():
        return compare(tiny)


if __name__ == "__main__":
    main()
