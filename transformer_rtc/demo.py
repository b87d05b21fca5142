"""Compile, run and check the operators at the shapes of well-known models."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

from . import _native, spec
from .cache import DiskCache
from .dispatch import Request, using
from .errors import CompilerNotFoundError, DeviceNotFoundError, TransformerRtcError
from .launch import device_limits
from .manager import KernelManager
from .ops.norm_kernels import ForwardSpec
from .ops.norms import forward_spec, rms_norm
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
        print("numpy has no bfloat16 without ml_dtypes (pip install ml_dtypes): the demo leaves it out\n")
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


def _with_device(device: int, dtypes: list[spec.DType]) -> None:
    limits = device_limits(device)
    print(f"{_native.device_name(device)}: compiled, loaded and run; y against float64 numpy, {_ROWS} rows\n")
    print("cold: compile and load   warm: a new process's, from disk   hot: found in memory\n")
    print(
        f"{'kernel':66s} {'cold ms':>8s} {'warm ms':>8s} {'hot µs':>7s} {'error ulp':>9s} {'cubin B':>8s} {'regs':>5s}"
    )
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
            registers = warm.get(kernel_spec, device).registers
            print(
                f"{kernel_spec.symbol:66s} {cold_time:8.1f} {warm_time:8.2f} {hot_time:7.1f} "
                f"{_error(dtype, hidden):9.2f} {size:8d} {registers:5d}"
            )


def _without_device(reason: Exception, dtypes: list[spec.DType]) -> None:
    print(f"No GPU: {reason}")
    print(
        "So the demo compiles for several architectures with NVRTC, and runs the same texts on the CPU, in a\n"
        f"simulator that is made for correctness and not for speed: y against float64 numpy, {_SIMULATED_ROWS} rows\n"
    )
    simulated = SimulatedDevice()
    architectures = sorted(spec.ARCHITECTURES)
    print(
        f"{'kernel (its configuration for sm_90)':66s} "
        + " ".join(f"{f'sm_{number} ms':>10s}" for number in architectures)
        + f" {'cubin B':>8s} {'run ms':>7s} {'error ulp':>9s}"
    )
    for hidden in _MODELS:
        for dtype in dtypes:
            row, size, symbol = [], 0, ""
            for architecture in architectures:
                kernel_spec = _kernel(dtype, hidden, spec.ARCHITECTURES[architecture])
                fresh = KernelManager(DiskCache(None))
                row.append(_milliseconds(fresh.image, kernel_spec, architecture))
                if architecture == simulated.architecture:
                    size, symbol = len(fresh.image(kernel_spec, architecture).data), kernel_spec.symbol
            with using(simulated):
                error = _error(dtype, hidden, _SIMULATED_ROWS)
                x = _storage(dtype, np.ones((_SIMULATED_ROWS, hidden)))
                elapsed = _milliseconds(rms_norm, x, x[0])
            times = " ".join(f"{elapsed:10.1f}" for elapsed in row)
            print(f"{symbol:66s} {times} {size:8d} {elapsed:7.1f} {error:9.2f}")
    print("\nNot done: no kernel was loaded or run on a GPU.")


def run() -> int:
    """Run the demo. Returns 0 if everything that this machine can do was done."""
    dtypes = _dtypes()
    # With a driver, NVRTC keeps a cache of its own, and a second cold compile would not be one.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    try:
        try:
            device = _native.current_device()
        except DeviceNotFoundError as error:
            _without_device(error, dtypes)
        else:
            _with_device(device, dtypes)
    except CompilerNotFoundError as error:
        print(error)
        return 1
    except TransformerRtcError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0
