# SPDX-License-Identifier: Apache-2.0
"""Run an operator of each family, forward and backward, check it against float64, and time it where there is a GPU."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import _native
from .cache import DiskCache
from .cli_output import table
from .demo_cases import CASES, Array, Case
from .demo_speed import gpu_torch, speed_of
from .device import device_of
from .errors import CompilerNotFoundError, DeviceNotFoundError
from .events import Event
from .kernel_manager import KernelManager, manager
from .recording import record
from .request import Asked
from .select import using
from .settings import settings
from .spec import ARCHITECTURES, BFLOAT16, FLOAT16, DType
from .warming import kernels_of

__all__ = ["run"]

_ROWS = 64
_SIMULATED_ROWS = 4
_ARCHITECTURE = 90  # what is compiled for where there is no GPU
_ROUNDING = {BFLOAT16: 2.0**-8, FLOAT16: 2.0**-11}  # half of a unit in the last place, of each value
_LINE = "{:22s} {:12s} {:>7s} {:>11s} {:>15s}  {}"


def _dtype() -> tuple[DType, str]:
    """Return the data type that is shown, and what there is to say of it."""
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        return FLOAT16, "numpy has no bfloat16 without ml_dtypes (pip install ml_dtypes): float16 is taken"
    return BFLOAT16, ""


def _storage(dtype: DType, values: Array) -> Array:
    if dtype is BFLOAT16:
        import ml_dtypes

        return values.astype(ml_dtypes.bfloat16)
    return values.astype(dtype.name)


def _cache() -> DiskCache:
    """Return the cache of the demonstration: it keeps nothing, so that each kernel is compiled, and stays nowhere."""
    return DiskCache(None)


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    before = manager.cache
    manager.cache = _cache()
    try:
        yield
    finally:
        manager.cache = before


def _off(actual: Array, exact: Array, allowed: Array) -> float:
    """Return the largest error, of what is allowed."""
    with np.errstate(invalid="ignore"):  # what is wrong may be no number
        off = np.abs(np.asarray(actual, np.float64) - exact) / allowed
    return float(np.where(np.isnan(off), np.inf, off).max())


def _checked(case: Case, dtype: DType, rows: int) -> dict[str, Any]:
    """Call a case, and return what it took and how right it is."""
    rng = np.random.default_rng(case.columns)
    shapes = [(rows, case.columns) if letter == "r" else (case.columns,) for letter in case.shapes]
    given = [_storage(dtype, rng.standard_normal(shape)) for shape in shapes]
    if case.name == "softmax_backward":
        given[1] = _storage(dtype, np.exp(given[1].astype(np.float64)) / case.columns)  # a y of softmax is positive
    events: list[Event] = []
    stop = manager.on_event(events.append)
    try:
        found = case.operator(*given)
    finally:
        stop()
    results = found if isinstance(found, tuple) else (found,)
    wide = [array.astype(np.float64) for array in given]
    off = max(
        _off(one, exact, _ROUNDING[dtype] * np.abs(exact) + case.arithmetic(wide, exact))
        for one, exact in zip(results, case.exact(*wide), strict=True)
    )
    return {
        "operator": case.name,
        "family": case.family,
        "rows": rows,
        "columns": case.columns,
        "dtype": dtype.name,
        "compile_milliseconds": sum(event.milliseconds for event in events if event.kind == "compile"),
        "error_of_allowed": off if math.isfinite(off) else None,
        "right": off <= 1,
    }


def _compiled(asked: object) -> float | None:
    """Return how many milliseconds NVRTC takes for what a call has asked for; None: there is no NVRTC."""
    assert isinstance(asked, Asked)
    events: list[Event] = []
    fresh = KernelManager(DiskCache(None))
    fresh.on_event(events.append)
    try:
        for spec in kernels_of(asked, ARCHITECTURES[_ARCHITECTURE]):
            fresh.image(spec, _ARCHITECTURE)
    except CompilerNotFoundError:
        return None
    return sum(event.milliseconds for event in events)


def _rows(dtype: DType, device: int | None) -> Iterator[dict[str, Any]]:
    for case in CASES:
        with record() as asked, using("simulator" if device is None else "rtc"):
            row = _checked(case, dtype, _SIMULATED_ROWS if device is None else _ROWS)
        if device is None:
            row["compile_milliseconds"] = _compiled(asked[-1])
        yield row


def _row_line(row: dict[str, Any]) -> str:
    elapsed = row["compile_milliseconds"]
    return _LINE.format(
        row["operator"],
        row["family"],
        str(row["columns"]),
        "no NVRTC" if elapsed is None else f"{elapsed:.0f} ms",
        "no number" if row["error_of_allowed"] is None else f"{row['error_of_allowed']:.2f}",
        "right" if row["right"] else "WRONG",
    )


def _speeds(dtype: DType, device: int) -> tuple[list[dict[str, Any]], str]:
    torch, why_not = gpu_torch()
    found = [{"operator": case.name, **speed_of(case, dtype, device, torch)._asdict()} for case in CASES]
    return found, why_not


def _speed_lines(speeds: list[dict[str, Any]]) -> list[str]:
    def cells(row: dict[str, Any]) -> list[str]:
        ours, theirs = row["microseconds"], row["torch_microseconds"]
        compared = ["-", "-"] if theirs is None else [f"{theirs:.0f} µs", f"{theirs / ours:.2f} times"]
        return [
            row["operator"],
            str(row["rows"]),
            f"{ours:.0f} µs",
            f"{row['gigabytes_per_second']:.0f} GB/s",
            *compared,
        ]

    return table(
        ("operator", ">rows", ">time", ">memory traffic", ">torch's time", ">speed over torch"),
        list(map(cells, speeds)),
    )


def _next(has_gpu: bool) -> list[str]:
    """Return what to do next, in commands and in Python."""
    architecture = "" if has_gpu else " --architecture sm_90"
    # An environment may not be active.
    command = "transformer-rtc" if shutil.which("transformer-rtc") else f"{sys.executable} -m transformer_rtc"
    tuned = [f"{command} tune rms_norm --dtype bf16 --hidden 4096  # measure configurations on this GPU"]
    return [
        f"{command} info  # what was found, what is missing, and the command that mends it",
        f"{command} warmup rms_norm --dtype bf16 --hidden 4096{architecture}  # compile before the first call",
        *(tuned if has_gpu else []),
        "python: from transformer_rtc import rms_norm; y = rms_norm(x, weight)",
        "python: import transformer_rtc; transformer_rtc.torch.patch(model)  # a whole model of torch",
    ]


def run(as_json: bool = False) -> int:
    """Run the demonstration and print its tables, or one JSON document; nothing of it stays in the disk cache.

    Returns
    -------
    int
        0: every result is right; 1: one is wrong.

    Raises
    ------
    TransformerRtcError
        If this machine cannot run it.
    """
    settings.check()
    # With a driver, NVRTC keeps a cache of its own, and the driver one of what it compiles.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    say = (lambda *_, **__: None) if as_json else print
    dtype, note = _dtype()
    device, reason, name = None, "", None
    try:
        ordinal = _native.current_device()
        architecture = device_of(ordinal).limits.architecture
        device, name = ordinal, f"{_native.device_name(ordinal)}, sm_{architecture}"
    except DeviceNotFoundError as error:
        reason = str(error)
    if device is None:
        say(f"No GPU that can be used: {reason}")
        say("So the kernels run on the CPU, in a simulator that is made for correctness and not for speed.")
    count = _SIMULATED_ROWS if device is None else _ROWS
    say(f"{name or 'Simulator'}: {dtype.name}, {count} rows; results beside those of numpy in float64")
    if note:
        say(note)
    compiled = "NVRTC" if device is not None else f"NVRTC sm_{_ARCHITECTURE}"
    say("\n" + _LINE.format("operator", "family", "columns", compiled, "error / allowed", "verdict"), flush=True)
    rows: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    why_not = ""
    with _own_cache():
        for row in _rows(dtype, device):
            rows.append(row)
            say(_row_line(row), flush=True)
        say("The gradients of add are dy itself: no kernel computes them.")
        if device is not None:
            speeds, why_not = _speeds(dtype, device)
    wrong = [row["operator"] for row in rows if not row["right"]]
    verdict = f"all {len(rows)} operators are right"
    if wrong:
        verdict = f"WRONG: {', '.join(wrong)}; please report it, with what transformer-rtc info --json prints"
    if as_json:
        document = {
            "device": name, "reason": reason or None, "results": rows, "right": not wrong, "speeds": speeds,
            "without_torch": why_not or None, "next": _next(device is not None),
        }  # fmt: skip
        print(json.dumps(document, indent=2))
    else:
        _tell_end(verdict, device is not None, speeds, why_not)
    return 1 if wrong else 0


def _tell_end(verdict: str, has_gpu: bool, speeds: list[dict[str, Any]], why_not: str) -> None:
    if has_gpu:
        print("\nSpeed, of calls one after the other:\n")
        for line in _speed_lines(speeds):
            print(line)
        if why_not:
            print(f"Not compared with torch: {why_not}")
    print(f"\nVerdict: {verdict}. " + ("" if has_gpu else "No kernel was run on a GPU, and none timed. "), end="")
    print("Nothing was left in the disk cache.\n\nWhat to do next:")
    for line in _next(has_gpu):
        print(f"  {line}")
