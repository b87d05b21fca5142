"""What compiling costs: every class of kernel at well-known sizes beside an empty kernel, loads and first calls on a
GPU, and the kernels that were compiled when the package was built. Softmax has one kernel for the lengths of a bucket.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
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
FINISH = "finish"  # the launches that follow a backward call's first one: few kernels for all hidden sizes
EMPTY = 'extern "C" __global__ void empty() {}\n'

EXAMPLES = """examples:
  python3 benchmarks/compile_cost.py
  python3 benchmarks/compile_cost.py --arch sm_80 --arch sm_90 --repeat 10
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
    spec: KernelSpec

    @property
    def description(self) -> dict[str, Any]:
        return {"symbol": self.spec.symbol, "hidden": self.hidden, "class": self.kind, "dtypes": self.dtypes}


def specialisations(limits: DeviceLimits, hidden_sizes: Sequence[int] = HIDDEN_SIZES) -> list[Kernel]:
    """Return every class of kernel at each hidden size; kernels that serve several once."""
    found: dict[str, Kernel] = {}
    for hidden in hidden_sizes:
        for kind, (name, arrays, others, flags, per_head) in CLASSES.items():
            if per_head and hidden > LONGEST_HEAD:
                continue
            operator = declaration_of(name)
            # Rows of up to so many columns have one kernel.
            columns = next((bucket for bucket in operator.buckets if hidden <= bucket), hidden)
            for dtypes, dtype in TYPES.items():
                given: dict[str, DType | None] = dict.fromkeys(array.name for array in operator.arrays)
                given |= dict.fromkeys(arrays.split(), dtype) | dict(others)
                request = Request(name, given, columns, per_head, False, flags)
                first, *later = operator.family.specialise(request, limits)
                found.setdefault(first[0].symbol, Kernel(hidden, kind, dtypes, first[0]))
                for spec, _ in later:
                    found.setdefault(spec.symbol, Kernel(None, FINISH, dtypes, spec))
    return list(found.values())


def compile_once(symbol: str, program: str, architecture: int, *options: str) -> tuple[float, compiler.Compiled]:
    headers = sources.included(program)
    start = time.perf_counter()
    compiled = compiler.compile_program(symbol, program, headers, options, architecture)
    return (time.perf_counter() - start) * 1e3, compiled


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


def measure_compiles(architecture: int, repeat: int) -> dict[str, Any]:
    cases = specialisations(ARCHITECTURES[architecture])
    cold: list[list[float]] = [[] for _ in cases]
    empty: list[float] = []
    reports: dict[str, dict[str, Any]] = {}
    with tqdm(total=len(cases) * repeat, desc=f"compiling for sm_{architecture}", unit="kernel") as progress:
        # The repetitions of a kernel lie far apart, and an empty one goes before each: the machine's moods reach all.
        for _ in range(repeat):
            for times, (_, _, _, spec) in zip(cold, cases, strict=True):
                empty.append(compile_once("empty", EMPTY, architecture)[0])
                # The options that users get, and ptxas's report, which takes 2 % at most.
                options = (*spec.options, compiler.REPORT)
                milliseconds, compiled = compile_once(spec.symbol, spec.program, architecture, *options)
                times.append(milliseconds)
                size = len(compiled.image)
                reports[spec.symbol] = {"kind": compiled.kind, "bytes": size, **resources(compiled.log)}
                progress.update()
    kernels = [
        {**case.description, "cold_ms": times, **reports[case.spec.symbol]}
        for case, times in zip(cases, cold, strict=True)
    ]
    return {"architecture": architecture, "empty_ms": empty, "kernels": kernels}


def measure_loads() -> dict[str, Any]:
    """Time a fresh manager on a warm cache folder: the entry is read and checked, and the cubin is loaded."""
    limits = transformer_rtc.device_limits(0)
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        for case in tqdm(specialisations(limits, LOADED_SIZES), desc="loading on cuda:0", unit="kernel"):
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


def print_compiles(measured: dict[str, Any], loads: dict[str, Any] | None) -> None:
    load_ms = {}
    if loads and loads["architecture"] == measured["architecture"]:
        load_ms = {kernel["symbol"]: f"{statistics.median(kernel['load_ms']):.2f}" for kernel in loads["kernels"]}
    rows = []
    for kernel in measured["kernels"]:
        cold = kernel["cold_ms"]
        spills = [kernel["spill_store_bytes"], kernel["spill_load_bytes"]]
        rows.append(
            (
                kernel["symbol"],
                f"{statistics.median(cold):.1f}",
                f"{max(cold):.1f}",
                load_ms.get(kernel["symbol"]),
                kernel["bytes"],
                kernel["registers"],
                None if None in spills else sum(spills),
            )
        )
    print(f"sm_{measured['architecture']}")
    print(common.table(("kernel", "cold ms", "worst", "warm load ms", "bytes", "registers", "spill bytes"), rows))
    print("\n" + common.table(("class", "kernels", "median ms", "worst ms", "of", "spilling"), summary(measured)))
    empty = common.spread(measured["empty_ms"])
    print(f"\nempty kernel: median {empty['median']:.1f} ms ({empty['p10']:.1f} to {empty['p90']:.1f})\n")


def summary(measured: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return a row for each class and data type, and one for all: over the kernels' medians."""
    groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for kernel in measured["kernels"]:
        groups[f"{kernel['class']}, {kernel['dtypes']}"].append(kernel)
    groups = {name: groups[name] for name in sorted(groups, key=lambda name: name.startswith(FINISH))}
    groups["all"] = measured["kernels"]
    rows: list[tuple[object, ...]] = []
    for name, kernels in groups.items():
        medians = {kernel["symbol"]: statistics.median(kernel["cold_ms"]) for kernel in kernels}
        worst = max(medians, key=lambda symbol: medians[symbol])
        spilling = sum(bool(kernel["spill_store_bytes"] or kernel["spill_load_bytes"]) for kernel in kernels)
        median = statistics.median(medians.values())
        rows.append((name, len(kernels), f"{median:.1f}", f"{medians[worst]:.1f}", worst, spilling))
    return rows


def print_first_compiles(found: list[list[float]]) -> None:
    milliseconds = statistics.median(times[0] for times in found)
    ratio = statistics.median(times[0] / statistics.median(times[1:]) for times in found)
    print(
        f"first compile of a new process, an empty kernel, NVRTC's opening with it: median {milliseconds:.1f} ms, "
        f"{ratio:.2f} of its later ones\n"
    )


def print_first_calls(found: dict[str, Any]) -> None:
    for part in ("loads", "first_calls"):
        if f"{part}_skipped" in found:
            print(f"{part.replace('_', ' ')}: not measured: {found[f'{part}_skipped']}")
    if "first_calls" not in found:
        print()
        return
    cold, warm = found["first_calls"]["cold"], found["first_calls"]["warm"]
    first = common.spread([run["first_ms"] for run in warm])
    second = statistics.median(run["second_ms"] for run in warm)
    opened = sum(run["nvrtc_after"] and not run["nvrtc_before"] for run in warm)
    print(
        "first call of a new process on bf16 16x4096, beyond imports and the context's creation:\n"
        f"with a cold cache {cold['first_ms']:.1f} ms; with a warm one {first['median']:.2f} ms "
        f"({first['min']:.2f} to {first['max']:.2f}), where the second call takes {second:.3f} ms\n"
        f"libnvrtc was opened by {opened} of {len(warm)} warm processes"
    )
    if any(run["nvrtc_before"] for run in warm):
        print("torch had opened a libnvrtc of its own before the call: whether the call opens one cannot be told here")
    print()


def print_static(manifest: dict[str, Any]) -> None:
    if not manifest:
        print("static kernels: this installation has none")
        return
    families: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for file in manifest["files"]:
        families[file["family"]].append(file)
    rows: list[tuple[object, ...]] = []
    for family, files in families.items():
        rows += [(file["file"], f"{file['seconds']:.2f}", file["bytes"]) for file in files]
        rows.append((f"{family}: all", f"{sum(f['seconds'] for f in files):.2f}", sum(f["bytes"] for f in files)))
    print("static kernels, compiled when the package was built")
    print(common.table(("file", "seconds", "bytes"), rows))
    print(f"\nall of them took {manifest['seconds']:.2f} s of CPU time")


def plot(result: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = result["compiles"]
    figure, axes = pyplot.subplots(len(measured), len(TYPES), figsize=(18, 7 * len(measured)), squeeze=False)
    # Ten colours, each with several lines.
    styles = {
        name: {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10]}
        for number, name in enumerate(CLASSES)
    }
    for row, one in zip(axes, measured, strict=True):
        for axis, dtypes in zip(row, TYPES, strict=True):
            kernels = [kernel for kernel in one["kernels"] if kernel["dtypes"] == dtypes and kernel["hidden"]]
            sizes = sorted({kernel["hidden"] for kernel in kernels})
            for name in CLASSES:
                points = [
                    (sizes.index(kernel["hidden"]), statistics.median(kernel["cold_ms"]))
                    for kernel in kernels
                    if kernel["class"] == name
                ]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name, **styles[name])
            empty = statistics.median(one["empty_ms"])
            axis.axhline(empty, color="black", linestyle="--", linewidth=1, label=f"empty kernel, {empty:.0f} ms")
            axis.set_xticks(range(len(sizes)), [str(size) for size in sizes], rotation=60, ha="right")
            axis.set(xlabel="hidden size, or keys", ylabel="cold compile, ms", ylim=(0, None))
            axis.set_title(f"{dtypes}, to a cubin for sm_{one['architecture']}")
            axis.grid(axis="y", alpha=0.3)
            axis.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(result: dict[str, Any], plot_path: str | None) -> None:
    common.print_environment(result["environment"])
    for one in result["compiles"]:
        print_compiles(one, result["gpu"].get("loads"))
    if "first_compiles" in result:  # which older files lack
        print_first_compiles(result["first_compiles"])
    print_first_calls(result["gpu"])
    print_static(result["static"])
    if plot_path:
        plot(result, plot_path)


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
    result["compiles"] = [measure_compiles(arch, arguments.repeat) for arch in arguments.arch or [90]]
    result["gpu"] = measure_on_gpu()
    result["static"] = static.manifest()
    common.write_json(arguments.json, result)
    report(result, arguments.plot)


main()
