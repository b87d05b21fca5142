# SPDX-License-Identifier: Apache-2.0
"""What compiling costs: every class of kernel at well-known sizes, for whole rows and for unaligned ones, beside an
empty kernel; loads and first calls on a GPU; and the kernels that were compiled when the package was built. Softmax has
one kernel for the lengths of a bucket.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
from compile_report import FINISH, ROWS, report
from tqdm import tqdm

import transformer_rtc
from transformer_rtc import compiler, sources, static
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import declaration_of
from transformer_rtc.request import Request
from transformer_rtc.spec import (
    ARCHITECTURES,
    BFLOAT16,
    BOOL,
    FLOAT8_E4M3,
    FLOAT32,
    INT8,
    DeviceLimits,
    DType,
    KernelSpec,
)

# Those that TransformerEngine has tuned kernels for; then one column, a head of queries, an odd row, and long rows.
HIDDEN_SIZES = (
    *(512, 768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 14336, 15360, 16384),
    *(18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536),
    *(1, 128, 4097, 262144, 1048576),
)
LOADED_SIZES = (1024, 4096, 16384, 65536)
GPU_REPEAT = 5  # loads of each kernel, and processes of which the first call is timed
FIRST_COMPILES = 11  # processes of which the first compile is
TYPES = {"bf16": BFLOAT16, "fp32": FLOAT32}


class Class(NamedTuple):
    """A class of kernel: its operator, the arrays of the operator's one data type, those of others, and flags.

    Those with a weight for each head are of heads, which are short.
    """

    operator: str
    arrays: str
    others: Mapping[str, DType] = {}
    flags: frozenset[str] = frozenset()
    per_head: bool = False


LONGEST_HEAD = 512
STATISTICS = {"mean": FLOAT32, "rstd": FLOAT32}
CAUSAL = frozenset({"causal"})
CLASSES = {
    "rms_norm": Class("rms_norm", "x weight out"),
    "layer_norm": Class("layer_norm", "x weight bias out"),
    "rms_norm, heads": Class("rms_norm", "x weight out", per_head=True),
    "add_rms_norm": Class("add_rms_norm", "x residual weight out residual_out"),
    "add_layer_norm": Class("add_layer_norm", "x residual weight bias out residual_out"),
    "rms_norm_add": Class("rms_norm_add", "x residual weight out"),
    "layer_norm_add": Class("layer_norm_add", "x residual weight bias out"),
    "rms_norm to fp8, scaled, amax": Class(
        "rms_norm", "x weight", {"out": FLOAT8_E4M3, "scale": FLOAT32, "amax": FLOAT32}
    ),
    "layer_norm to int8, scaled by row": Class("layer_norm", "x weight bias", {"out": INT8, "row_scale": FLOAT32}),
    "rms_norm_backward": Class("rms_norm_backward", "dy x weight out dweight", {"rstd": FLOAT32}),
    "rms_norm_backward, heads": Class("rms_norm_backward", "dy x weight out dweight", {"rstd": FLOAT32}, per_head=True),
    "rms_norm_backward, dresidual": Class("rms_norm_backward", "dy x weight dresidual out dweight", {"rstd": FLOAT32}),
    "layer_norm_backward": Class("layer_norm_backward", "dy x weight out dweight dbias", STATISTICS),
    "layer_norm_backward, dresidual": Class(
        "layer_norm_backward", "dy x weight dresidual out dweight dbias", STATISTICS
    ),
    "softmax": Class("softmax", "x out"),
    "softmax, causal": Class("softmax", "x out", {}, CAUSAL),
    "softmax, masked": Class("softmax", "x out", {"mask": BOOL}),
    "softmax, a mask of floats": Class("softmax", "x mask out"),
    "softmax, causal, a sink, lse": Class("softmax", "x sink out", {"lse": FLOAT32}, CAUSAL),
    "log_softmax": Class("log_softmax", "x out"),
    "softmax_backward": Class("softmax_backward", "dy y out"),
    "softmax_backward, causal": Class("softmax_backward", "dy y out", {}, CAUSAL),
    "softmax_backward, a mask's gradient": Class("softmax_backward", "dy y mask out dmask"),
    "softmax_backward, causal, a sink's": Class("softmax_backward", "dy y sink out dsink", {"lse": FLOAT32}, CAUSAL),
    "log_softmax_backward": Class("log_softmax_backward", "dy y out"),
}
EMPTY = 'extern "C" __global__ void empty() {}\n'

EXAMPLES = """examples:
  python3 benchmarks/compile_cost.py
  python3 benchmarks/compile_cost.py --arch sm_80 --arch sm_90 --repeat 10
  python3 benchmarks/compile_cost.py --size 2048 --size 4096 --repeat 5
  python3 benchmarks/compile_cost.py --json cost.json --plot cost.png
  python3 benchmarks/compile_cost.py --from-json cost.json --plot cost.png   # measures nothing
"""

# A new process: imports, the context, the allocator and the arrays come before the clock starts.
FIRST_CALL = """
import json, time, torch, transformer_rtc
x = torch.randn(16, 4096, device="cuda").to(torch.bfloat16)
weight = torch.randn(4096, device="cuda").to(torch.bfloat16)
(x + x).sum().item()

def nvrtc_is_open():
    return "libnvrtc.so" in open("/proc/self/maps").read()

def milliseconds():
    start = time.perf_counter()
    transformer_rtc.rms_norm(x, weight)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3

before = nvrtc_is_open()
first, second = milliseconds(), milliseconds()
counts = transformer_rtc.manager.counts
print(json.dumps({"first_ms": first, "second_ms": second, "compiles": counts["compile"], "loads": counts["load"],
                  "nvrtc_before": before, "nvrtc_after": nvrtc_is_open()}))
"""

# A new process, too: its first compile opens NVRTC, which the later ones find open.
FIRST_COMPILE = f"""
import json, time
from transformer_rtc import compiler

def milliseconds():
    start = time.perf_counter()
    compiler.compile_program("empty", {EMPTY!r}, {{}}, (), 90)
    return (time.perf_counter() - start) * 1e3

print(json.dumps([milliseconds() for _ in range(6)]))
"""


class Kernel(NamedTuple):
    hidden: int | None
    kind: str
    dtypes: str
    rows: tuple[str, ...]
    spec: KernelSpec

    @property
    def description(self) -> dict[str, Any]:
        of = {"hidden": self.hidden, "class": self.kind, "dtypes": self.dtypes, "rows": self.rows}
        return {"symbol": self.spec.symbol, **of}


def specialisations(limits: DeviceLimits, hidden_sizes: Sequence[int] = HIDDEN_SIZES) -> list[Kernel]:
    """Return every class of kernel at each hidden size; kernels that serve several, or both kinds of rows, once."""
    found: dict[str, Kernel] = {}

    def add(kernel: Kernel) -> None:
        known = found.setdefault(kernel.spec.symbol, kernel)
        found[kernel.spec.symbol] = known._replace(rows=tuple(dict.fromkeys((*known.rows, *kernel.rows))))

    for rows, hidden, kind in itertools.product(ROWS, hidden_sizes, CLASSES):
        name, arrays, others, flags, per_head = CLASSES[kind]
        if per_head and hidden > LONGEST_HEAD:
            continue
        operator = declaration_of(name)
        # Rows of up to so many columns have one kernel.
        columns = next((bucket for bucket in operator.buckets if hidden <= bucket), hidden)
        if columns % 2 and rows == "whole":  # an odd number of columns is no whole vectors
            continue
        for dtypes, dtype in TYPES.items():
            given: dict[str, DType | None] = dict.fromkeys(array.name for array in operator.arrays)
            given |= dict.fromkeys(arrays.split(), dtype) | dict(others)
            request = Request(name, given, columns, per_head, False, flags, rows == "unaligned")
            (first, _), *later = operator.family.specialise(request, limits)
            add(Kernel(hidden, kind, dtypes, (rows,), first))
            for spec, _ in later:
                add(Kernel(None, FINISH, dtypes, (rows,), spec))
    return list(found.values())


def compile_once(symbol: str, program: str, architecture: int, *options: str) -> tuple[float, compiler.Compiled]:
    """Return the milliseconds of CPU time, which are those of an idle machine: NVRTC has one thread."""
    headers = sources.included(program)
    start = time.process_time()
    compiled = compiler.compile_program(symbol, program, headers, options, architecture)
    return (time.process_time() - start) * 1e3, compiled


def resources(log: str) -> dict[str, int | None]:
    """Read ptxas's report; None where there is none, as for PTX."""

    def read(pattern: str) -> int | None:
        found = re.findall(pattern, log)
        return max(map(int, found)) if found else None

    return {
        "registers": read(r"Used (\d+) registers"),
        "spill_store_bytes": read(r"(\d+) bytes spill stores"),
        "spill_load_bytes": read(r"(\d+) bytes spill loads"),
        "stack_bytes": read(r"(\d+) bytes stack frame"),
    }


def measure_compiles(architecture: int, repeat: int, hidden_sizes: Sequence[int]) -> dict[str, Any]:
    cases = specialisations(ARCHITECTURES[architecture], hidden_sizes)
    found: list[dict[str, Any]] = [{**case.description, "cold_ms": [], "multiples": []} for case in cases]
    empty: list[float] = []

    def compile_empty() -> float:
        empty.append(compile_once("empty", EMPTY, architecture)[0])
        return empty[-1]

    with tqdm(total=len(cases) * repeat, desc=f"compiling for sm_{architecture}", unit="kernel") as progress:
        # The repetitions of a kernel lie far apart, and an empty one goes before each and behind it, by which it is
        # divided: the machine's moods reach all.
        for _ in range(repeat):
            before = compile_empty()
            for kernel, case in zip(found, cases, strict=True):
                # The options that users get, and ptxas's report, which takes 2 % at most.
                options = (*case.spec.options, compiler.REPORT)
                milliseconds, compiled = compile_once(case.spec.symbol, case.spec.program, architecture, *options)
                after = compile_empty()
                kernel["cold_ms"].append(milliseconds)
                kernel["multiples"].append(2 * milliseconds / (before + after))
                kernel |= {"kind": compiled.kind, "bytes": len(compiled.image), **resources(compiled.log)}
                before = after
                progress.update()
    return {"architecture": architecture, "empty_ms": empty, "kernels": found}


def measure_loads() -> dict[str, Any]:
    """Time a fresh manager on a warm cache folder: the entry is read and checked, and the cubin is loaded."""
    limits = transformer_rtc.device_limits(0)
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in specialisations(limits, LOADED_SIZES) if "whole" in case.rows]
        for case in tqdm(cases, desc="loading on cuda:0", unit="kernel"):
            spec = case.spec
            transformer_rtc.KernelManager(DiskCache(folder)).image(spec, limits.architecture)
            times = []
            for _ in range(GPU_REPEAT):
                fresh = transformer_rtc.KernelManager(DiskCache(folder))
                start = time.perf_counter()
                fresh.get(spec, 0)
                times.append((time.perf_counter() - start) * 1e3)
                assert fresh.counts["compile"] == 0, f"{spec.symbol} was not in the warm cache"
            kernels.append({**case.description, "load_ms": times})
    return {"architecture": limits.architecture, "kernels": kernels}


def in_new_process(script: str, folder: str, **variables: str) -> Any:
    """Return what a script prints.

    It runs in a folder, because -c imports from the working directory: in a source tree, a package that is not built.
    """
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    if answer.returncode != 0:
        sys.exit(f"a process that times what it does first failed:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])


def measure_first_compiles() -> list[list[float]]:
    """Time empty kernels in new processes: the first one, then others."""
    with tempfile.TemporaryDirectory() as folder:
        return [in_new_process(FIRST_COMPILE, folder) for _ in range(FIRST_COMPILES)]


def measure_first_calls() -> dict[str, Any]:
    """Time the first call in new processes: one fills the cache, and the others find it full."""

    def run(folder: str, on_compile: str) -> dict[str, Any]:
        settings = {"TRANSFORMER_RTC_CACHE_DIR": folder, "TRANSFORMER_RTC_ON_COMPILE": on_compile}
        result = in_new_process(FIRST_CALL, folder, **settings)
        assert isinstance(result, dict)
        return result

    with tempfile.TemporaryDirectory() as folder:
        cold = run(folder, "allow")
        warm = [
            run(folder, "error") for _ in tqdm(range(GPU_REPEAT), desc="first calls of new processes", unit="process")
        ]
    return {"cold": cold, "warm": warm}


def measure_on_gpu() -> dict[str, Any]:
    problem = common.gpu_problem()
    if problem:
        return {"loads_skipped": problem, "first_calls_skipped": problem}
    found: dict[str, Any] = {"loads": measure_loads()}
    try:
        import torch

        usable = torch.cuda.is_available()
    except ImportError:
        usable = False
    if usable:
        found["first_calls"] = measure_first_calls()
    else:
        found["first_calls_skipped"] = "they are timed on torch's arrays, and there is no torch that sees a GPU"
    return found


def architecture(text: str) -> int:
    number = text.removeprefix("sm_")
    if not number.isdecimal() or int(number) not in ARCHITECTURES:
        known = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}")
    return int(number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=architecture, action="append", help="default: sm_90; may be given several times")
    parser.add_argument("--repeat", type=common.positive, default=1, help="compiles of each kernel (default: 1)")
    parser.add_argument("--size", type=common.positive, action="append", help="default: 32 hidden sizes; likewise")
    parser.add_argument("--json", metavar="FILE", help="write every measurement there")
    parser.add_argument("--plot", metavar="FILE", help="draw cold compile times by hidden size; needs matplotlib")
    parser.add_argument("--from-json", metavar="FILE", help="report on what --json wrote, and measure nothing")
    arguments = parser.parse_args()
    if arguments.from_json:
        report(json.loads(Path(arguments.from_json).read_text(encoding="utf-8")), arguments.plot)
        return
    # NVRTC keeps a cache of its own where there is a driver, and would answer a repeated compile from it.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    result: dict[str, Any] = {"environment": common.environment()}
    result["first_compiles"] = measure_first_compiles()
    compile_once("empty", EMPTY, 90)  # opens NVRTC
    result["compiles"] = [
        measure_compiles(arch, arguments.repeat, arguments.size or HIDDEN_SIZES) for arch in arguments.arch or [90]
    ]
    result["gpu"] = measure_on_gpu()
    result["static"] = static.manifest()
    common.write_json(arguments.json, result)
    report(result, arguments.plot)


main()
