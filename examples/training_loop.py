# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer whose norms and softmax are transformer_rtc's, in a plain torch loop.

It shows the modules `RMSNorm` and `AddRMSNorm`, which adds to the residual stream and normalises the sum in one kernel,
and the function `softmax`, which scales and masks in one kernel. Gradients are recorded by torch's autograd.

    python examples/training_loop.py          # on a GPU
    python examples/training_loop.py --tiny   # on the CPU, in the simulator, in seconds
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from torch import nn

from transformer_rtc import softmax, using
from transformer_rtc.torch import AddRMSNorm, RMSNorm


class Block(nn.Module):
    """Attention and an MLP. What a block returns is not yet added to the residual: the next norm does it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = AddRMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.query_norm, self.key_norm = RMSNorm(hidden // heads), RMSNorm(hidden // heads)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = AddRMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        y, residual = self.attention_norm(x, residual)
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [batch, tokens, heads, head size]
        q, k, v = (one.transpose(1, 2) for one in (self.query_norm(q), self.key_norm(k), v))
        scores = q @ k.transpose(2, 3)  # [batch, heads, queries, keys]
        attention = softmax(scores, scale=q.shape[-1] ** -0.5, causal="upper_triangular") @ v
        y, residual = self.mlp_norm(self.out(attention.transpose(1, 2).flatten(2)), residual)
        return self.down(nn.functional.silu(self.up(y))), residual


class Model(nn.Module):
    """Blocks between an embedding and the logits of the next token."""

    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = AddRMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, residual = self.embedding(tokens), None
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(self.norm(x, residual)[0])


def batch_of(batch: int, length: int, vocabulary: int, device: str) -> torch.Tensor:
    """Return sequences in which each token says which one is next."""
    first = torch.randint(vocabulary, (batch, 1), device=device)
    return (first + 3 * torch.arange(length + 1, device=device)) % vocabulary


def train(tiny: bool) -> list[float]:
    torch.manual_seed(0)
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    vocabulary, hidden, heads, layers = (16, 32, 2, 2) if tiny else (32000, 1024, 16, 12)
    batch, length, steps = (2, 12, 8) if tiny else (8, 1024, 100)
    model = Model(vocabulary, hidden, heads, layers).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if tiny else 3e-4)
    losses = []
    for step in range(steps):
        started = time.perf_counter()
        tokens = batch_of(batch, length, vocabulary, device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step:3}  loss {losses[-1]:7.4f}  {1e3 * (time.perf_counter() - started):8.1f} ms")
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU")
    tiny = parser.parse_args(arguments).tiny
    with using("simulator") if tiny else contextlib.nullcontext():
        return train(tiny)


if __name__ == "__main__":
    main()
