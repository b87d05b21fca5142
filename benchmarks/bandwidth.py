"""RMSNorm forward's bandwidth, beside the best copy of the run and every peer that can be imported.

GB/s counts each input and the weight read once, and the output written once. Every provider allocates its output, as
not all can be given one; the caching allocator makes that cheap, and puts all outputs of a placement in one place.

The L2 is flushed before every launch and providers are rotated. Bandwidth depends on where arrays lie, so all of it is
repeated at several placements; a provider's figure, and the copy's, is the median at its best one.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
from tqdm import tqdm

import transformer_rtc

EPS = 1e-6
OURS = "transformer_rtc"
STATIC = "static"
COPY = "copy"
COMPILED = "torch.compile"
CHECKED_ROWS = 32
WARM_UP = 3
AWAKE = 5000  # flushes before anything is measured: a third of a second, in which an idle GPU raises its clocks
# Of the norm of the error to the norm of the result; a peer may round x * rstd before it multiplies by the weight.
TOLERANCES = {"bfloat16": 5e-3, "float32": 1e-5}

# As in shared/reference/peers-h200.md. float32 has half the rows: the same bytes.
SHAPES = (
    *((32768, hidden) for hidden in (256, 512, 1024, 2048, 4096, 8192)),
    *((2**28 // hidden, hidden) for hidden in (16384, 32768, 65536, 131072, 262144)),
)
RAGGED = ((32768, 3000), (32768, 4097), (32768, 5121))
# Query and key heads inside a packed qkv: name, heads, head_dim; 32 query, 8 key and 8 value heads.
PACKED_TOKENS, PACKED_HEADS = 32768, 48
PACKED = (("q", 32, 64), ("k", 8, 64), ("q", 32, 128), ("k", 8, 128))
COMPILED_HIDDEN = (1024, 4096, 8192, 32768, 131072)

EXAMPLES = """examples:
  python3 benchmarks/bandwidth.py --json bandwidth.json --plot bandwidth.png
  python3 benchmarks/bandwidth.py --quick
  python3 benchmarks/bandwidth.py --compile            # torch.compile too, on a few shapes
  python3 benchmarks/bandwidth.py --from-json bandwidth.json --plot bandwidth.png   # measures nothing
"""

Call = Callable[[Any, Any], Any]  # (x, weight) -> y


class Case(NamedTuple):
    """A shape. `kind` is "peers", "ragged" or "packed"; a row of a packed one is a token, with heads in it."""

    kind: str
    name: str
    dtype: str
    rows: int
    hidden: int
    heads: int = 0

    @property
    def compiled(self) -> bool:
        return self.kind == "peers" and self.dtype == "bfloat16" and self.hidden in COMPILED_HIDDEN


def cases() -> list[Case]:
    found = []
    for dtype, divisor in (("bfloat16", 1), ("float32", 2)):
        for kind, shapes in (("peers", SHAPES), ("ragged", RAGGED)):
            for rows, hidden in shapes:
                found.append(Case(kind, f"{rows // divisor}x{hidden}", dtype, rows // divisor, hidden))
    for name, heads, head_dim in PACKED:
        title = f"{name} of packed qkv, {PACKED_TOKENS}x{heads}x{head_dim}"
        found.append(Case("packed", title, "bfloat16", PACKED_TOKENS, head_dim, heads))
    return found


# ---- Providers: each returns (hidden, dtype) -> Call, or raises ImportError ------------------------------------------


def ours(hidden: int, dtype: Any) -> Call:
    return lambda x, weight: transformer_rtc.rms_norm(x, weight, EPS)


def ours_static(hidden: int, dtype: Any) -> Call:
    def call(x: Any, weight: Any) -> Any:
        with transformer_rtc.using("static"):
            return transformer_rtc.rms_norm(x, weight, EPS)

    return call


def torch_eager(hidden: int, dtype: Any) -> Call:
    from torch.nn import functional

    return lambda x, weight: functional.rms_norm(x, (hidden,), weight, EPS)


def torch_compiled(hidden: int, dtype: Any) -> Call:
    import torch

    torch._dynamo.reset()  # else the compiles of earlier shapes count against its limit of recompiles
    compiled: Call = torch.compile(torch_eager(hidden, dtype), dynamic=False)
    return compiled


def liger(hidden: int, dtype: Any) -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def quack(hidden: int, dtype: Any) -> Call:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def transformer_engine(hidden: int, dtype: Any) -> Call:
    from transformer_engine.pytorch import RMSNorm

    module = RMSNorm(hidden, eps=EPS, dtype=dtype, device="cuda")

    def call(x: Any, weight: Any) -> Any:
        module.weight.data = weight
        return module(x)

    return call


PROVIDERS: dict[str, Callable[[int, Any], Call]] = {
    OURS: ours,
    STATIC: ours_static,
    "torch": torch_eager,
    COMPILED: torch_compiled,
    "Liger": liger,
    "quack": quack,
    "TE": transformer_engine,
}


# ---- Measurement -----------------------------------------------------------------------------------------------------


class Arrays(NamedTuple):
    x: Any
    weight: Any
    contiguous: Any  # x's elements without gaps: what a copy of as many bytes reads


def make_arrays(torch: Any, case: Case) -> Arrays:
    dtype = getattr(torch, case.dtype)
    weight = torch.randn(case.hidden, device="cuda").to(dtype)
    if not case.heads:
        x = torch.empty(case.rows, case.hidden, dtype=dtype, device="cuda").normal_()
        return Arrays(x, weight, x)
    qkv = torch.empty(case.rows, PACKED_HEADS, case.hidden, dtype=dtype, device="cuda").normal_()
    first = 0 if case.name.startswith("q") else 32
    x = qkv[:, first : first + case.heads]
    return Arrays(x, weight, x.contiguous())


def moved_bytes(arrays: Arrays) -> int:
    weight = arrays.weight
    return int(2 * arrays.x.numel() * arrays.x.element_size() + weight.numel() * weight.element_size())


def copy(torch: Any, source: Any) -> Any:
    return torch.empty_like(source).copy_(source)


def poison_next_output(torch: Any, like: Any) -> None:
    """Leave NaNs in the memory that the allocator hands out next for an array of this size."""
    torch.full_like(like, math.nan)


def check(torch: Any, call: Call, case: Case, arrays: Arrays) -> str | None:
    """Return what is wrong with a provider's result, or None."""
    x, weight, contiguous = arrays
    poison_next_output(torch, contiguous)
    try:
        y = call(x, weight)
        torch.cuda.synchronize()
    except Exception as error:  # a peer may refuse a shape in any way
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if y.shape != x.shape or y.dtype != x.dtype:
        return f"{tuple(y.shape)} {y.dtype} returned for {tuple(x.shape)} {x.dtype}"
    if not bool(torch.isfinite(y).all()):
        return "elements that are not finite"
    some = torch.linspace(0, case.rows - 1, CHECKED_ROWS, device="cuda").long()
    exact = x[some].double()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * weight.double()
    deviation = float((y[some].double() - exact).norm() / exact.norm())
    return None if deviation <= TOLERANCES[case.dtype] else f"a relative error of {deviation:.1e}"


def importable(torch: Any, with_compile: bool) -> tuple[dict[str, Callable[[int, Any], Call]], dict[str, str]]:
    """Return the providers that this machine has, and why the others are absent."""
    found, absent = {}, {}
    for name, make in PROVIDERS.items():
        if name == STATIC and STATIC not in transformer_rtc.implementations(transformer_rtc.rms_norm):
            absent[name] = "this installation has no static kernels for this GPU"
        elif name == COMPILED and not with_compile:
            absent[name] = "measured with --compile"
        else:
            try:
                make(256, torch.bfloat16)
                found[name] = make
            except Exception as error:  # of an import, that can fail in any way
                absent[name] = f"{type(error).__name__}: {error}"
    return found, absent


def measure(
    torch: Any,
    case: Case,
    makers: dict[str, Callable[[int, Any], Call]],
    placements: int,
    repetitions: int,
    flush: common.L2Flush,
) -> dict[str, Any]:
    dtype = getattr(torch, case.dtype)
    calls = {name: make(case.hidden, dtype) for name, make in makers.items() if name != COMPILED or case.compiled}
    failures: dict[str, str] = {}
    measured = []
    held = []
    for placement in range(placements):
        arrays = make_arrays(torch, case)
        if placement == 0:
            found = {name: check(torch, call, case, arrays) for name, call in calls.items()}
            failures = {name: problem for name, problem in found.items() if problem}
            calls = {name: call for name, call in calls.items() if name not in failures}
        x, weight, contiguous = arrays
        providers: dict[str, Callable[[], object]] = {
            name: functools.partial(call, x, weight) for name, call in calls.items()
        }
        providers[COPY] = functools.partial(copy, torch, contiguous)
        common.time_rotated(torch, providers, WARM_UP, flush)
        times = common.time_rotated(torch, providers, repetitions, flush)
        measured.append({name: common.spread(values) for name, values in times.items()})
        # Keeps this placement's inputs, and takes the memory its outputs had: the next one is elsewhere.
        held.append((arrays, torch.empty_like(contiguous)))
    result = {
        "case": case._asdict(),
        "bytes": moved_bytes(arrays),
        "copy_bytes": 2 * contiguous.numel() * contiguous.element_size(),
        "us_by_placement": measured,
        "failures": failures,
    }
    del arrays, x, weight, contiguous, providers, held
    torch.cuda.empty_cache()
    return result


# ---- Report ----------------------------------------------------------------------------------------------------------


def best(measured: dict[str, Any], provider: str) -> dict[str, float] | None:
    """Return a provider's times at its best placement."""
    found = [placement[provider] for placement in measured["us_by_placement"] if provider in placement]
    return min(found, key=lambda times: times["median"]) if found else None


def gigabytes_per_second(measured: dict[str, Any], provider: str) -> float | None:
    times = best(measured, provider)
    moved = measured["copy_bytes" if provider == COPY else "bytes"]
    return moved / times["median"] / 1e3 if times else None


def ratio(measured: dict[str, Any], provider: str, other: str = COPY) -> float | None:
    mine, theirs = gigabytes_per_second(measured, provider), gigabytes_per_second(measured, other)
    return mine / theirs if mine and theirs else None


def names_measured(result: dict[str, Any]) -> list[str]:
    seen = {name for measured in result["cases"] for placement in measured["us_by_placement"] for name in placement}
    return [name for name in PROVIDERS if name in seen]


def print_report(result: dict[str, Any]) -> None:
    common.print_environment(result["environment"])
    names = names_measured(result)
    peers = [name for name in names if name not in (OURS, STATIC)]
    others = [name for name in names if name != OURS]

    def text(value: float | None, form: str) -> str | None:
        return None if value is None else format(value, form)

    rows = []
    for measured in result["cases"]:
        mine = best(measured, OURS)
        fastest = max(peers, key=lambda name: gigabytes_per_second(measured, name) or 0.0)
        rows.append(
            (
                f"{measured['case']['dtype']} {measured['case']['name']}",
                text(gigabytes_per_second(measured, COPY), ".0f"),
                text(gigabytes_per_second(measured, OURS), ".0f"),
                mine and f"{(mine['p90'] - mine['p10']) / mine['median']:.1%}",
                text(ratio(measured, OURS), ".3f"),
                text(ratio(measured, OURS, fastest), ".3f"),
                *(text(gigabytes_per_second(measured, name), ".0f") for name in others),
            )
        )
    print(common.table(("GB/s", COPY, OURS, "p10-p90", "/ copy", "/ best peer", *others), rows))
    copies = [gigabytes_per_second(measured, COPY) or 0.0 for measured in result["cases"]]
    print(
        f"\nbest copy of the run: {max(copies):.0f} GB/s\n"
        f"of each provider and shape: the median of {result['repetitions']} at the best of {result['placements']} "
        "placements; the L2 flushed before every launch; every provider allocates its output"
    )
    for name, reason in result["absent"].items():
        print(f"not measured: {name}: {reason}")
    for measured in result["cases"]:
        for name, problem in measured["failures"].items():
            print(f"FAILED: {name}: {measured['case']['dtype']} {measured['case']['name']}: {problem}")


def plot(result: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = names_measured(result)
    colors = {name: f"C{index}" for index, name in enumerate(PROVIDERS)}
    figure, axes = pyplot.subplots(3, 1, figsize=(10, 13))
    for axis, dtype in zip(axes, TOLERANCES, strict=False):
        shapes = [one for one in result["cases"] if (one["case"]["kind"], one["case"]["dtype"]) == ("peers", dtype)]
        hidden = [one["case"]["hidden"] for one in shapes]
        for name in names:
            points = [(size, ratio(one, name)) for size, one in zip(hidden, shapes, strict=True) if ratio(one, name)]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colors[name], label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(hidden, [str(size) for size in hidden], rotation=30)
        axis.set(xlabel="hidden size", title=f"rms_norm forward, {dtype}")
    odd = [one for one in result["cases"] if one["case"]["kind"] != "peers"]
    for index, name in enumerate(names):
        width = 0.8 / len(names)
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(odd))]
        axes[2].bar(places, [ratio(one, name) or 0.0 for one in odd], width, color=colors[name], label=name)
    labels = [f"{one['case']['dtype']}\n{one['case']['name'].replace(', ', chr(10))}" for one in odd]
    axes[2].set_xticks(range(len(odd)), labels, fontsize=7)
    axes[2].set_title("ragged rows, and heads inside a packed qkv")
    for axis in axes:
        axis.axhline(1.0, color="black", linestyle="--", linewidth=1)
        axis.set(ylabel="bandwidth / best copy of the shape", ylim=(0, None))
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(result: dict[str, Any], plot_path: str | None) -> None:
    print_report(result)
    if plot_path:
        plot(result, plot_path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, at fewer placements")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, on a few shapes: a minute more")
    parser.add_argument("--json", metavar="FILE", help="write every median and spread there")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratio to the copy; needs matplotlib")
    parser.add_argument("--from-json", metavar="FILE", help="report on what --json wrote, and measure nothing")
    arguments = parser.parse_args()
    if arguments.from_json:
        report(json.loads(Path(arguments.from_json).read_text(encoding="utf-8")), arguments.plot)
        return
    torch = common.torch_on_gpu()
    placements, repetitions = (2, 10) if arguments.quick else (4, 40)
    with torch.no_grad():
        makers, absent = importable(torch, arguments.compile)
        flush = common.L2Flush(torch)
        for value in range(AWAKE):
            flush(value)
        result: dict[str, Any] = {
            "environment": common.environment(),
            "placements": placements,
            "repetitions": repetitions,
            "absent": absent,
            "cases": [
                measure(torch, case, makers, placements, repetitions, flush)
                for case in tqdm(cases(), desc="bandwidth", unit="shape")
            ],
        }
    common.write_json(arguments.json, result)
    report(result, arguments.plot)
    if any(name in measured["failures"] for measured in result["cases"] for name in (OURS, STATIC)):
        sys.exit(1)


main()
