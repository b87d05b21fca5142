# SPDX-License-Identifier: Apache-2.0
"""Train a Hugging Face Llama whose norms are transformer_rtc's.

It shows `patch`, which swaps the norms of a model that exists and keeps its parameters, and `warmup`, which compiles
the kernels that the model will need before its first step. The model is made from a configuration, with random weights:
nothing is downloaded. It needs the package `transformers`.

    python examples/hugging_face.py          # on a GPU: 12 layers, hidden size 2048, bfloat16
    python examples/hugging_face.py --tiny   # on the CPU, in the simulator, in seconds
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from transformer_rtc import using
from transformer_rtc.torch import patch, warmup


def llama(tiny: bool) -> LlamaForCausalLM:
    sizes = (
        {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        if tiny
        else {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12}
    )
    heads = 2 if tiny else 16
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads, use_cache=False)
    model = LlamaForCausalLM(config)
    return model if tiny else model.to("cuda", torch.bfloat16)


def train(tiny: bool) -> list[float]:
    torch.manual_seed(0)
    model = llama(tiny)

    swapped = patch(model)  # rounding="twice" has the bits of the model's own norms
    print(swapped)
    warmup(model, architectures="sm_90" if tiny else None)  # by default for the GPU that there is

    batch, length, steps = (2, 8, 3) if tiny else (4, 2048, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if tiny else 1e-4)
    tokens = torch.randint(model.config.vocab_size, (batch, length), device=model.device)  # learnt by heart
    losses = []
    for step in range(steps):
        started = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:2}  loss {losses[-1]:7.4f}  {1e3 * (time.perf_counter() - started):8.1f} ms")

    swapped.undo()  # the model has its own norms again, and what its weights have learnt
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU")
    tiny = parser.parse_args(arguments).tiny
    with using("simulator") if tiny else contextlib.nullcontext():
        return train(tiny)


if __name__ == "__main__":
    main()
