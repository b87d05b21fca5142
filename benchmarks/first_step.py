# SPDX-License-Identifier: Apache-2.0
"""The first step of a model in this process, from after its construction to the end of the step.

train_step.py runs this program in fresh processes, with empty and with full caches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import whole_models

import transformer_rtc

EMPTY, FULL = "empty", "full"
CACHES = {
    "TRANSFORMER_RTC_CACHE_DIR": "transformer_rtc",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "driver",  # NVRTC keeps what it compiled there
}


def measure(name: str, way: str, warm_up: bool, tiny: bool) -> dict[str, Any]:
    """Return the seconds of the parts of a first step. All of it but the imports is timed in `seconds`."""
    import torch

    model = whole_models.build(name, tiny, torch.bfloat16)
    batch = whole_models.random_batch(name, model, tiny)
    optimizer = whole_models.optimizer_of(model)
    start = time.perf_counter()
    whole_models.import_way(way)
    imported = time.perf_counter() - start
    with whole_models.kernels_on(tiny):
        whole_models.synchronize(tiny)
        start = time.perf_counter()
        network = whole_models.prepare(way, model, tiny)
        prepared = time.perf_counter()
        if warm_up:
            whole_models.warm_up(model, tiny)
        warmed = time.perf_counter()
        loss = network(**batch).loss
        loss.backward()
        optimizer.step()
        whole_models.synchronize(tiny)
        end = time.perf_counter()
    return {
        "seconds": end - start,
        "import_seconds": imported,
        "prepare_seconds": prepared - start,
        "warmup_seconds": warmed - prepared,
        "kernels_compiled": transformer_rtc.manager.counts["compile"],
        "loss": loss.item(),
    }


def in_fresh_process(name: str, way: str, warm_up: bool, folder: str, tiny: bool) -> dict[str, Any]:
    """Return what a fresh process measures whose caches are in a folder."""
    command = [sys.executable, str(Path(__file__).resolve()), name, way]
    command += ["--warmup"] * warm_up + ["--tiny"] * tiny
    environment = os.environ | {variable: str(Path(folder) / cache) for variable, cache in CACHES.items()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cases_of(name: str, ways: Sequence[str], tiny: bool) -> list[tuple[str, bool]]:
    """Return the ways, and whether a warm-up comes before the step."""
    found = [(way, False) for way in whole_models.ways_of(name, ways, tiny)]
    return found + [(way, True) for way, _ in found if way == whole_models.OURS]


def measure_all(
    name: str, ways: Sequence[str], repetitions: int, compiled_repetitions: int, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Yield first steps in fresh processes: in each repetition all ways with empty caches, then with what these left.

    The ways are rotated: none always follows the same one. The processes of torch.compile take longer than all others
    together, so they have a number of repetitions of their own.
    """
    cases = {
        f"{way}, after warmup()" if warm_up else way: (way, warm_up) for way, warm_up in cases_of(name, ways, tiny)
    }
    with tempfile.TemporaryDirectory() as unused:
        # Not counted: it reads torch's libraries from the disk into memory.
        in_fresh_process(name, whole_models.EAGER, False, unused, tiny)
    for repetition in range(max(repetitions, compiled_repetitions)):
        with tempfile.TemporaryDirectory() as folder:
            for state in (EMPTY, FULL):
                for label, (way, warm_up) in common.rotated(cases, repetition):
                    if repetition < (compiled_repetitions if way in whole_models.COMPILED_WAYS else repetitions):
                        caches = str(Path(folder) / label.replace(" ", "_"))
                        found = in_fresh_process(name, way, warm_up, caches, tiny)
                        yield {"model": name, "way": label, "caches": state, "repetition": repetition, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(whole_models.MODELS))
    parser.add_argument("way", choices=whole_models.WAYS)
    parser.add_argument(
        "--warmup", action="store_true", help="call transformer_rtc.torch.warmup(model) before the step"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, in the simulator")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, arguments.way, arguments.warmup, arguments.tiny)))


if __name__ == "__main__":
    main()
