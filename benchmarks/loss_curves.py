# SPDX-License-Identifier: Apache-2.0
"""Losses of training runs that differ in nothing but the norms: a task that a model learns, and runs on it.

A run is of a small Llama on tokens of a Markov chain. Runs of one seed have the same weights at first and the same
batches. What rounding alone does to a curve is the difference of torch's own norms in bfloat16 to float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import whole_models

MODEL = "llama"
VOCABULARY, SUCCESSORS = 512, 4
FULL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
TINY = {"hidden_size": 32, "num_hidden_layers": 1}
BATCH, TOKENS = 16, 512
RAMP = 20
RATE, TINY_RATE = 3e-4, 1e-2
MEAN_OF = 10  # losses, so that one batch's chance does not count
FLOAT32, WEIGHTS, AUTOCAST = "float32", "bfloat16 weights", "float32 weights, autocast"


class Run(NamedTuple):
    precision: str
    way: str


# The first is what the others of the same seed are compared with.
RUNS = (
    Run(FLOAT32, whole_models.EAGER),
    *(Run(precision, way) for precision in (WEIGHTS, AUTOCAST) for way in (whole_models.EAGER, whole_models.OURS)),
)


def chain_of_tokens(steps: int, batch: int, tokens: int, vocabulary: int, seed: int) -> Any:
    """Return tokens, [steps, batch, tokens]: a token has few successors, which are the same for every seed.

    The best loss that there is, the entropy of a successor, is at most log(4) = 1.39.
    """
    import torch

    task = torch.Generator().manual_seed(0)
    successors = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=task)
    until = torch.rand(vocabulary, SUCCESSORS, generator=task).add(0.1).cumsum(1)
    until /= until[:, -1:].clone()
    generator = torch.Generator().manual_seed(1000 + seed)
    chains = steps * batch
    found = torch.empty(tokens, chains, dtype=torch.int64)
    found[0] = torch.randint(vocabulary, (chains,), generator=generator)
    for place in range(1, tokens):
        before = found[place - 1]
        drawn = (torch.rand(chains, 1, generator=generator) > until[before]).sum(1).clamp(max=SUCCESSORS - 1)
        found[place] = successors[before, drawn]
    return found.T.reshape(steps, batch, tokens).contiguous()


def train(run: Run, data: Any, vocabulary: int, seed: int, tiny: bool) -> list[float]:
    """Return the loss of each step."""
    import torch

    sizes = TINY if tiny else FULL
    model = whole_models.build(MODEL, tiny, torch.float32, seed, vocab_size=vocabulary, **sizes)
    if run.precision == WEIGHTS:
        # Not model.to(), which rounds the angles of the rotary embedding, too.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    whole_models.import_way(run.way)
    network = whole_models.prepare(run.way, model, tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TINY_RATE if tiny else RATE, fused=True)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RAMP))
    device = whole_models.device_of(tiny)
    data = data.to(device)
    losses = []
    for ids in data:
        autocast = torch.autocast(device, torch.bfloat16) if run.precision == AUTOCAST else contextlib.nullcontext()
        with autocast:
            loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        ramp.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    found: list[float] = torch.stack(losses).tolist()
    return found


def measure(steps: int, seeds: Sequence[int], tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield each run with its losses."""
    batch, tokens, vocabulary = (2, 6, 64) if tiny else (BATCH, TOKENS, VOCABULARY)
    for seed in seeds:
        data = chain_of_tokens(steps, batch, tokens, vocabulary, seed)
        for run in RUNS:
            with whole_models.kernels_on(tiny):
                losses = train(run, data, vocabulary, seed, tiny)
            yield {"precision": run.precision, "way": run.way, "seed": seed, "losses": losses}


def means(losses: Sequence[float], of: int = MEAN_OF) -> list[float]:
    """Return the means of so many losses each; those that are left over are a mean of fewer."""
    return [sum(part) / len(part) for part in (losses[at : at + of] for at in range(0, len(losses), of))]


def largest_difference(runs: Sequence[dict[str, Any]], one: Run, other: Run) -> float:
    """Return the largest difference of two kinds of run, over all seeds and means."""
    found = {(run["precision"], run["way"], run["seed"]): means(run["losses"]) for run in runs}
    differences = [
        abs(a - b)
        for (precision, way, seed), curve in found.items()
        if (precision, way) == one
        for a, b in zip(curve, found[(*other, seed)], strict=True)
    ]
    return max(differences)


def last_mean(runs: Sequence[dict[str, Any]], kind: Run) -> float:
    """Return the mean of the last losses, over all seeds."""
    found = [means(run["losses"])[-1] for run in runs if (run["precision"], run["way"]) == kind]
    return sum(found) / len(found)
