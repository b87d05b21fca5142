"""Compile, run and check the operators at the shapes of well-known models."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import _native, spec
from .cache import DiskCache
from .device import device_limits
from .errors import DeviceNotFoundError
from .kernel_manager import KernelManager
from .ops.norm.api import rms_norm
from .ops.norm.family import forward_spec
from .ops.norm.kernels import ForwardSpec
from .request import Request
from .select import using
from .simulator import SimulatedDevice

# Hidden sizes, and whose they are; the last is longer than a CTA holds.
_MODELS = {
    768: "GPT-2, BERT-base",
    2048: "Llama 3.2 1B",
    4096: "Llama 3 8B",
    5120: "Qwen3 32B",
    8192: "Llama 3 70B",
    16384: "Llama 3 405B",
    131072: "none: a row of several CTAs",
}
_ROWS = 64
_SIMULATED_ROWS = 8


def _storage(dtype: spec.DType, values: np.ndarray) -> np.ndarray:
    if dtype is spec.BFLOAT16:
        import ml_dtypes

        return values.astype(ml_dtypes.bfloat16)
    return values.astype(dtype.name)


def _dtypes() -> list[spec.DType]:
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        print("numpy has no bfloat16 without ml_dtypes (pip install ml_dtypes): it is left out", file=sys.stderr)
        return [spec.FLOAT32, spec.FLOAT16]
    return [spec.FLOAT32, spec.FLOAT16, spec.BFLOAT16]


def _kernel(dtype: spec.DType, hidden: int, limits: spec.DeviceLimits) -> ForwardSpec:
    dtypes = {"x": dtype, "weight": dtype, "bias": None, "out": dtype}
    return forward_spec(Request("rms_norm", dtypes, hidden, per_head=False, margin=False), limits)


def _error(dtype: spec.DType, hidden: int, rows: int = _ROWS) -> float:
    """Return the largest error of y against float64, in units of y's type in the last place."""
    random = np.random.default_rng(hidden)
    x = _storage(dtype, random.standard_normal((rows, hidden)))
    weight = _storage(dtype, random.standard_normal(hidden))
    y = np.asarray(rms_norm(x, weight), dtype=np.float64)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    mantissa = {"float32": 23, "float16": 10, "bfloat16": 7}[dtype.name]
    smallest = -14 if dtype is spec.FLOAT16 else -126
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))), smallest)
    return float(np.max(np.abs(y - exact) / np.exp2(exponent - mantissa)))


def _milliseconds(work: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - start) * 1e3


def _with_device(device: int, dtypes: list[spec.DType]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel: compiled, loaded and run on a GPU."""
    limits = device_limits(device)
    for hidden in _MODELS:
        for dtype in dtypes:
            kernel_spec = _kernel(dtype, hidden, limits)
            with tempfile.TemporaryDirectory() as folder:
                cold = KernelManager(DiskCache(folder))
                cold_time = _milliseconds(cold.get, kernel_spec, device)
                warm = KernelManager(DiskCache(folder))
                warm_time = _milliseconds(warm.get, kernel_spec, device)
                hot_time = _milliseconds(warm.get, kernel_spec, device) * 1e3
                size = len(warm.image(kernel_spec, limits.architecture).data)
            yield {
                "kernel": kernel_spec.symbol,
                "cold_milliseconds": cold_time,
                "warm_milliseconds": warm_time,
                "hot_microseconds": hot_time,
                "error_ulp": _error(dtype, hidden),
                "cubin_bytes": size,
                "registers": warm.get(kernel_spec, device).registers,
            }


def _without_device(dtypes: list[spec.DType]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel: compiled for several architectures, and run in the simulator."""
    simulated = SimulatedDevice()
    for hidden in _MODELS:
        for dtype in dtypes:
            times: dict[str, float] = {}
            size, symbol = 0, ""
            for architecture in sorted(spec.ARCHITECTURES):
                kernel_spec = _kernel(dtype, hidden, spec.ARCHITECTURES[architecture])
                fresh = KernelManager(DiskCache(None))
                times[f"sm_{architecture}"] = _milliseconds(fresh.image, kernel_spec, architecture)
                if architecture == simulated.architecture:
                    size, symbol = len(fresh.image(kernel_spec, architecture).data), kernel_spec.symbol
            with using(simulated):
                error = _error(dtype, hidden, _SIMULATED_ROWS)
                x = _storage(dtype, np.ones((_SIMULATED_ROWS, hidden)))
                elapsed = _milliseconds(rms_norm, x, x[0])
            yield {
                "kernel": symbol,
                "compile_milliseconds": times,
                "cubin_bytes": size,
                "run_milliseconds": elapsed,
                "error_ulp": error,
            }


def _print_with_device(name: str, rows: Iterator[dict[str, Any]]) -> None:
    print(f"{name}: compiled, loaded and run; y against float64 numpy, {_ROWS} rows\n")
    print("cold: compile and load   warm: a new process's, from disk   hot: found in memory\n")
    print(
        f"{'kernel':66s} {'cold ms':>8s} {'warm ms':>8s} {'hot µs':>7s} {'error ulp':>9s} {'cubin B':>8s} {'regs':>5s}"
    )
    for row in rows:
        print(
            f"{row['kernel']:66s} {row['cold_milliseconds']:8.1f} {row['warm_milliseconds']:8.2f} "
            f"{row['hot_microseconds']:7.1f} {row['error_ulp']:9.2f} {row['cubin_bytes']:8d} {row['registers']:5d}"
        )


def _print_without_device(reason: Exception, rows: Iterator[dict[str, Any]]) -> None:
    print(f"No GPU: {reason}")
    print(
        "So the demo compiles for several architectures with NVRTC, and runs the same texts on the CPU, in a\n"
        f"simulator that is made for correctness and not for speed: y against float64 numpy, {_SIMULATED_ROWS} rows\n"
    )
    print(
        f"{'kernel (its configuration for sm_90)':66s} "
        + " ".join(f"{f'sm_{number} ms':>10s}" for number in sorted(spec.ARCHITECTURES))
        + f" {'cubin B':>8s} {'run ms':>7s} {'error ulp':>9s}"
    )
    for row in rows:
        times = " ".join(f"{elapsed:10.1f}" for elapsed in row["compile_milliseconds"].values())
        print(
            f"{row['kernel']:66s} {times} {row['cubin_bytes']:8d} {row['run_milliseconds']:7.1f} "
            f"{row['error_ulp']:9.2f}"
        )
    print("\nNot done: no kernel was loaded or run on a GPU.")


def run(as_json: bool = False) -> int:
    """Run the demo and print its table, or one JSON document. Returns 0: all that this machine can do was done.

    Raises
    ------
    TransformerRtcError
        If it was not.
    """
    dtypes = _dtypes()
    # With a driver, NVRTC keeps a cache of its own, and a second cold compile would not be one.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    try:
        device = _native.current_device()
    except DeviceNotFoundError as error:
        rows = _without_device(dtypes)
        if as_json:
            print(json.dumps({"device": None, "reason": str(error), "kernels": list(rows)}, indent=2))
        else:
            _print_without_device(error, rows)
    else:
        rows = _with_device(device, dtypes)
        name = _native.device_name(device)
        if as_json:
            print(json.dumps({"device": name, "kernels": list(rows)}, indent=2))
        else:
            _print_with_device(name, rows)
    return 0
