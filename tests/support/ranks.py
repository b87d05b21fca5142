# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of a group of torch.distributed: on the CPU, joined by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import processes

# Of all cases together. A rank that waits for one that has failed is ended earlier.
SECONDS = 300


def run_cases(path: str, ranks: int, folder: Path) -> None:
    """Run the cases of a test's file, each in all ranks; none may fail.

    Parameters
    ----------
    path : str
        The file. As a program it calls `serve`.
    ranks : int
        How many.
    folder : Path
        An empty one.
    """
    variables = processes.environment(**processes.shared(folder)) | {
        "PYTHONPATH": str(Path(__file__).parent),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    commands = [[sys.executable, path, str(rank), str(ranks), str(folder / "meeting")] for rank in range(ranks)]
    logs = [(folder / f"rank{rank}").open("w+") for rank in range(ranks)]
    started = [
        subprocess.Popen(command, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        for command, log in zip(commands, logs, strict=True)
    ]
    try:
        end = time.monotonic() + SECONDS
        while None in (codes := [process.poll() for process in started]) and time.monotonic() < end:
            if any(codes):
                end = min(end, time.monotonic() + 5)  # others may fail by themselves, and say why
            time.sleep(0.02)
    finally:
        for process in started:
            process.kill()
            process.wait()
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read())
        log.close()
    assert codes == [0] * ranks, "\n".join(f"rank {rank}: {codes[rank]}\n{texts[rank]}" for rank in range(ranks))


def serve(names: Mapping[str, Any]) -> None:
    """Run this rank's part of all functions whose names begin with `case_`, with the simulator."""
    import torch
    from torch import distributed

    from transformer_rtc import using

    rank, ranks, meeting = sys.argv[1:]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=SECONDS),
    )
    with using("simulator"):
        for name, case in list(names.items()):  # Dynamo adds to a module's names
            if name.startswith("case_"):
                start = time.monotonic()
                torch.manual_seed(31)  # all ranks have the same numbers
                case()
                print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which may fail where another rank has ended
