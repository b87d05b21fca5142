# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the machine's description, statistics, tables, JSON, and rotated timing on a GPU."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import transformer_rtc
from transformer_rtc import compiler

_T = TypeVar("_T")


def environment() -> dict[str, Any]:
    """Describe the machine and the versions, importing no framework."""
    versions = compiler.versions()
    for distribution in (
        "numpy",
        "torch",
        "triton",
        "transformers",
        "quack-kernels",
        "liger-kernel",
        "transformer-engine",
    ):
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python3", *sys.argv]),
        "machine": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def print_environment(found: Mapping[str, Any]) -> None:
    print(f"{found['date']}  {found['command']}")
    print(f"{found['machine']}, {found['cpus']} x {found['cpu']}; GPUs: {'; '.join(found['gpus']) or 'none'}")
    print(", ".join(f"{name} {version}" for name, version in found["versions"].items()) + "\n")


def gpu_problem() -> str | None:
    """Return why no GPU can be used, or None."""
    try:
        transformer_rtc.device_limits(0)
    except (transformer_rtc.DeviceNotFoundError, transformer_rtc.DriverError) as error:
        return str(error)
    return None


def torch_on_gpu() -> Any:
    """Return torch, or end the program with the reason why the GPU part cannot run."""
    problem = gpu_problem()
    if problem:
        sys.exit(f"this benchmark needs a GPU: {problem}")
    try:
        import torch
    except ImportError:
        sys.exit("this benchmark needs torch")
    if not torch.cuda.is_available():
        sys.exit(f"this benchmark needs torch with CUDA; torch {torch.__version__} sees no GPU")
    return torch


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 10th and 90th percentile and the extremes."""
    deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]]
    return {
        "median": statistics.median(values),
        "p10": deciles[0],
        "p90": deciles[-1],
        "min": min(values),
        "max": max(values),
    }


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out a text table: the first column left, the others right; None is a dash."""
    cells = [list(headings)] + [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    cells.insert(1, ["-" * width for width in widths])

    def line(row: list[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([row[0].ljust(len(first)), *others]).rstrip()

    return "\n".join(map(line, cells))


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def rotated(providers: Mapping[str, _T], repetition: int) -> list[tuple[str, _T]]:
    """Return the providers in an order that gives each every place: none always follows the same one."""
    items = list(providers.items())
    start = repetition % max(1, len(items))
    return items[start:] + items[:start]


class L2Flush:
    """Writes a buffer that is larger than the L2 cache."""

    def __init__(self, torch: Any, least: int = 256 << 20) -> None:
        # Four times the L2, so that whatever its replacement policy nothing of before is left; and at least 256 MiB,
        # whose 60 us hide what the host needs to put the timed launch on the stream.
        size = max(least, 4 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")

    def __call__(self, value: int) -> None:
        self._buffer.fill_(value % 251 + 1)


def time_rotated(
    torch: Any, providers: Mapping[str, Callable[[], object]], repetitions: int, before: Callable[[int], None]
) -> dict[str, list[float]]:
    """Return each provider's device times in us, providers rotated; `before` runs, untimed, before each."""
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in providers}
    for repetition in range(repetitions):
        for name, provider in rotated(providers, repetition):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before(repetition)
            start.record()
            provider()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 for start, end in pairs] for name, pairs in events.items()}


# ---- A copy ----------------------------------------------------------------------------------------------------------

STREAM_THREADS = 256


def stream_kernel(reads: int, writes: int, vectors: int) -> Any:
    """Return a kernel that reads arrays, and writes their first and their sum; a thread moves so many 16 bytes."""
    from transformer_rtc import Field, manager

    names = [f"in{index}" for index in range(reads)] + [f"out{index}" for index in range(writes)]
    each = f"#pragma unroll\n  for (int v = 0; v < {vectors}; ++v) if (at + v * {STREAM_THREADS} < params.vectors)"
    index = f"[at + v * {STREAM_THREADS}]"
    body = [f"  {each} a{number}[v] = ((const uint4*)params.in{number}){index};" for number in range(reads)]
    sums = (" + ".join(f"a{number}[v].{part}" for number in range(reads)) for part in "xyzw")
    body.append(f"  {each} ((uint4*)params.out0){index} = make_uint4({', '.join(sums)});")
    body += [f"  {each} ((uint4*)params.out{number}){index} = a0[v];" for number in range(1, writes)]
    name = f"stream_{reads}r{writes}w_{vectors}"
    text = "\n".join(
        (
            f'extern "C" __global__ void __launch_bounds__({STREAM_THREADS})',
            f"{name}(const __grid_constant__ Params params) {{",
            f"  const long long at = (long long)blockIdx.x * {STREAM_THREADS * vectors} + threadIdx.x;",
            f"  uint4 {', '.join(f'a{number}[{vectors}]' for number in range(reads))};",
            *body,
            "}\n",
        )
    )
    fields = (*(Field(name, "pointer") for name in names), Field("vectors", "int64"))
    return manager.compile(text, name, fields, device=0)
