# SPDX-License-Identifier: Apache-2.0
"""What a process that runs for days keeps: memory over many calls, and over many keys that come and go.

On a GPU the kernels are compiled once and kept on disk, and the calls are torch's. Without one (--simulated) the calls
are on the CPU, in the simulator. Prints a line of JSON for each phase; fails where memory grew by more than is allowed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import transformer_rtc as t
from transformer_rtc import manager

ROWS = (1, 7, 16, 100, 513, 1024)
HIDDEN = (64, 1000, 4096)
PARTS = 5  # memory is looked at so often; what the first part leaves is the allocators' own


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_device(torch: Any) -> int:
    """Return the bytes of the device that are in use, by whomever: loaded modules are in no framework's count."""
    if torch is None:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def watch(what: str, count: int, step: Callable[[int], None], torch: Any, allowed: int, warm: int = 1) -> bool:
    """Do `step` so often, and tell how memory grows from the end of the first `warm` parts on."""
    start, seen = time.perf_counter(), []
    for part in range(PARTS):
        for number in range(part * count // PARTS, (part + 1) * count // PARTS):
            step(number)
        gc.collect()
        seen.append((resident(), on_device(torch)))
    host, device = (seen[-1][place] - seen[warm - 1][place] for place in (0, 1))
    grew = host > allowed or device > allowed
    print(
        json.dumps(
            {
                "phase": what, "count": count, "seconds": round(time.perf_counter() - start, 1),
                "resident_bytes": [each[0] for each in seen], "device_bytes": [each[1] for each in seen],
                "host_growth": host, "device_growth": device, "grew": grew,
            }
        ),
        flush=True,
    )  # fmt: skip
    return grew


def calls_of_torch(torch: Any) -> Callable[[int], None]:
    inputs = {
        (rows, hidden): (
            torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16),
            torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
        )
        for rows in ROWS
        for hidden in HIDDEN
    }
    shapes = list(inputs)

    def step(number: int) -> None:
        x, weight = inputs[shapes[number % len(shapes)]]
        y = t.rms_norm(x, weight)
        if number % 4 == 0:
            t.rms_norm_backward(y, x, weight)
        if number % 4 == 1:
            t.softmax(x)
        if number % 1000 == 0:
            torch.cuda.synchronize()

    return step


def calls_of_numpy() -> Callable[[int], None]:
    import numpy as np

    inputs = [np.ones((rows, hidden), np.float32) for rows in (1, 3) for hidden in (64, 96)]

    def step(number: int) -> None:
        with t.using("simulator"):
            t.rms_norm(inputs[number % len(inputs)])

    return step


TEXT = 'extern "C" __global__ void evicted(Params p) { if (p.n == %d) asm volatile("trap;"); }'


def keys(device: int | t.SimulatedDevice, torch: Any) -> Callable[[int], None]:
    """Return a step that asks for a kernel that was not asked for lately, and launches it."""
    simulated = isinstance(device, t.SimulatedDevice)
    # More keys than are kept: each is compiled once, and loaded again whenever its turn comes.
    distinct = 16 if simulated else 128
    mine = t.KernelManager(manager.cache, most_kernels=distinct // 2)
    fields = (t.Field("n", "int32"),)
    text = TEXT if not simulated else 'extern "C" __global__ void evicted(Params p) { if (p.n == %d) __trap(); }'

    def step(number: int) -> None:
        key = number % distinct
        kernel = mine.compile(text % key, "evicted", fields, device)
        kernel.launch_plain((1, 1, 1), (32, 1, 1), {"n": -1})
        if torch is not None and number % 100 == 0:
            torch.cuda.synchronize()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=10_000, help="loads of kernels that were forgotten")
    parser.add_argument("--simulated", action="store_true", help="on the CPU, where there is no GPU")
    parser.add_argument("--allowed", type=int, default=8 << 20, help="bytes by which each may grow")
    arguments = parser.parse_args()
    if arguments.simulated:
        torch, device = None, t.SimulatedDevice()
        calls = calls_of_numpy()
    else:
        import torch  # type: ignore[no-redef]

        device = 0  # type: ignore[assignment]
        calls = calls_of_torch(torch)
    grew = watch("calls", arguments.calls, calls, torch, arguments.allowed)
    grew |= watch("keys", arguments.keys, keys(device, torch), torch, arguments.allowed, warm=2)
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
