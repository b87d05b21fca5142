# SPDX-License-Identifier: Apache-2.0
"""Training steps of whole models, in which only the norms differ.

A step is forward, loss, backward and AdamW, of a model in bfloat16 with random weights. The ways to run the norms are
those of the model's own code ("eager"), torch.nn.RMSNorm, torch.compile of the model, Liger's norms, ours by
transformer_rtc.torch.patch(model), and the latter within torch.compile. LayerNorm is torch.nn's in eager mode.

All ways of a model are in memory together and take turns in a random order, so that the machine's moods reach all of
them alike: a way's figure is the median of its turns. Memory is that of one way alone. First steps are of fresh
processes. Loss curves are of a small Llama that learns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import first_step
import loss_curves
import train_report
import whole_models
from tqdm import tqdm

UNTIMED_STEPS = 3  # of a way before anything is timed, the first step not counted
# A way whose first loss is farther from that of eager mode computes something else.
LOSS_TOLERANCE = 2e-2

EXAMPLES = """examples:
  python3 benchmarks/train_step.py --first-steps 3 --loss-curves 3 --json train.json --plot train.png
  python3 benchmarks/train_step.py --models llama,gpt2 --ways eager,ours --rounds 5
  python3 benchmarks/train_step.py --models none --loss-curves 3
  python3 benchmarks/train_step.py --from-json one.json two.json --plot train.png   # measures nothing: two runs as one
  python3 benchmarks/train_step.py --tiny --first-steps 1 --loss-curves 1           # without a GPU, in the simulator
"""


class Trained:
    """A model as one of the ways runs it, and its optimizer."""

    def __init__(self, name: str, way: str, tiny: bool) -> None:
        import torch

        self.way, self.tiny = way, tiny
        model = whole_models.build(name, tiny, torch.bfloat16)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._batch = whole_models.random_batch(name, model, tiny)
        whole_models.import_way(way)
        self._network = whole_models.prepare(way, model, tiny)
        self._optimizer = whole_models.optimizer_of(model)

    def step(self) -> Any:
        loss = self._network(**self._batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def milliseconds(self, steps: int) -> float:
        """Return the time of a step, host and device, of so many one after the other."""
        whole_models.synchronize(self.tiny)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        whole_models.synchronize(self.tiny)
        return (time.perf_counter() - start) * 1e3 / steps


def started(name: str, way: str, tiny: bool) -> tuple[Trained, dict[str, Any]]:
    """Return a way of a model after its first steps, and what these showed."""
    import torch

    gc.collect()
    before = 0 if tiny else torch.cuda.memory_allocated()
    breaks = graph_breaks() if way in whole_models.COMPILED_WAYS else {}
    one = Trained(name, way, tiny)
    whole_models.synchronize(tiny)
    start = time.perf_counter()
    loss = one.step().item()
    first = time.perf_counter() - start
    for _ in range(UNTIMED_STEPS - 1):
        one.step()
    found: dict[str, Any] = {"first_seconds": first, "first_loss": loss, "parameters": one.parameters}
    if not tiny:
        torch.cuda.reset_peak_memory_stats()
    one.step()
    if not tiny:
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    if way in whole_models.COMPILED_WAYS:
        found["graph_breaks"] = dict(graph_breaks() - breaks)
    return one, found


def graph_breaks() -> Counter[str]:
    """Return how often this process's compiled graphs were broken, by reason."""
    import torch._dynamo.utils

    return Counter(torch._dynamo.utils.counters["graph_break"])


def measure_model(name: str, ways: Sequence[str], rounds: int, steps: int, tiny: bool) -> dict[str, Any]:
    """Return what was measured of each way of a model, and why others failed."""
    batch, tokens = whole_models.shape_of(name, tiny)
    result: dict[str, Any] = {"model": name, "batch": batch, "tokens": tokens, "steps_of_a_turn": steps}
    result |= {"ways": {}, "failures": {}}
    running: list[Trained] = []
    with tqdm(desc=name, total=len(ways) + rounds, unit="turn") as progress, whole_models.kernels_on(tiny):
        for way in ways:
            try:
                one, found = started(name, way, tiny)
            except Exception as error:
                result["failures"][way] = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                running.append(one)
                result["ways"][way] = {**found, "ms": []}
            progress.update()
        for one in running:
            # Compiled ways share their models' code, and what the last one compiled may have an earlier one look again.
            one.step()
        order = random.Random(0)
        for _ in range(rounds):
            for one in order.sample(running, len(running)):
                result["ways"][one.way]["ms"].append(one.milliseconds(steps))
            progress.update()
    return result


def other_losses(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each way whose first loss is not that of eager mode."""
    found = []
    for model in models:
        losses = {way: measured["first_loss"] for way, measured in model["ways"].items()}
        expected = losses.get(whole_models.EAGER)
        for way, loss in losses.items():
            if expected is not None and not abs(loss - expected) <= LOSS_TOLERANCE:
                found.append(f"{model['model']}: the first loss of {way} is {loss:.4f}, that of eager {expected:.4f}")
    return found


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and write what was found by now after each part, so that what stops one loses no other."""
    result: dict[str, Any] = {"environment": common.environment(), "tiny": arguments.tiny}
    result |= {"models": [], "first_steps": [], "loss_curves": []}
    for name in arguments.models:
        ways = whole_models.ways_of(name, arguments.ways, arguments.tiny)
        result["models"].append(measure_model(name, ways, arguments.rounds, arguments.steps, arguments.tiny))
        gc.collect()
        common.write_json(arguments.json, result)
    if arguments.first_steps:
        found = first_step.measure_all(
            arguments.first_steps_of,
            arguments.ways,
            arguments.first_steps,
            arguments.compiled_first_steps,
            arguments.tiny,
        )
        for one in tqdm(found, desc="first steps", unit="process"):
            result["first_steps"].append(one)
            common.write_json(arguments.json, result)
    if arguments.loss_curves:
        runs = loss_curves.measure(arguments.loss_steps, range(arguments.loss_curves), arguments.tiny)
        total = arguments.loss_curves * len(loss_curves.RUNS)
        for run in tqdm(runs, desc="loss curves", total=total, unit="run"):
            result["loss_curves"].append(run)
            common.write_json(arguments.json, result)
    return result


def names_from(known: Sequence[str]) -> Any:
    """Return what reads names with commas between them. A comma in a name is left out; "none" is no name."""
    by_word = {name.replace(", ", "-").casefold(): name for name in known}

    def read(text: str) -> list[str]:
        words = [] if text == "none" else text.casefold().split(",")
        for word in words:
            if word not in by_word:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(by_word)}")
        return [by_word[word] for word in words]

    return read


def natural(text: str) -> int:
    return 0 if text == "0" else common.positive(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models, ways = list(whole_models.MODELS), list(whole_models.WAYS)
    parser.add_argument(
        "--models", type=names_from(models), default=models, help="whose steps are timed (default: all)"
    )
    parser.add_argument(
        "--ways", type=names_from(ways), default=ways, help="such as eager,ours-compiled (default: all)"
    )
    parser.add_argument("--rounds", type=common.positive, default=15, help="turns of each way (default: 15)")
    parser.add_argument("--steps", type=common.positive, default=4, help="of a turn (default: 4)")
    parser.add_argument("--first-steps", type=natural, default=0, help="repetitions of fresh processes (default: 0)")
    parser.add_argument("--first-steps-of", choices=models, default="llama", help="the model (default: llama)")
    parser.add_argument(
        "--compiled-first-steps", type=natural, default=0, help="likewise, of the ways with torch.compile (default: 0)"
    )
    parser.add_argument("--loss-curves", type=natural, default=0, metavar="SEEDS", help="seeds (default: 0)")
    parser.add_argument("--loss-steps", type=common.positive, default=200, help="steps of a loss curve (default: 200)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, in the simulator")
    parser.add_argument("--json", metavar="FILE", help="write every measurement there")
    parser.add_argument("--plot", metavar="FILE", help="draw steps, first steps and losses; needs matplotlib")
    parser.add_argument("--from-json", nargs="+", metavar="FILE", help="report on what --json wrote; measure nothing")
    arguments = parser.parse_args()
    if arguments.from_json:
        results = [json.loads(Path(file).read_text(encoding="utf-8")) for file in arguments.from_json]
        train_report.report(results, arguments.plot)
        return
    if not arguments.tiny:
        common.torch_on_gpu()
    with tempfile.TemporaryDirectory() as folder:
        # What Inductor has kept would hide what a first step takes.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        result = measure_all(arguments)
    train_report.report([result], arguments.plot)
    wrong = other_losses(result["models"])
    if wrong or any(model["failures"] for model in result["models"]):
        sys.exit("\n".join(wrong) or 1)


if __name__ == "__main__":
    main()
