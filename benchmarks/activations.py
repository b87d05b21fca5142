# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the activations and of add, beside the best copy with as many reads and writes, torch and Liger.

A call allocates its outputs, or torch's autograd does. The L2 cache is flushed before every launch, providers are
rotated, and all of it is repeated at several placements of the arrays: a figure is the median at a provider's best one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import common
from tqdm import tqdm

import transformer_rtc
from transformer_rtc import LaunchConfig

OURS, TORCH, LIGER, COPY = "transformer_rtc", "torch", "liger", "copy"
FUNCTIONS = ("gelu", "gelu tanh", "silu", "relu_squared", "gelu_and_mul", "gelu_and_mul tanh", "silu_and_mul",
             "add")  # fmt: skip
DTYPES = ("bfloat16", "float32")
# Elements in one row, and the activations of models: tokens by columns of Llama 2 7B and 3 8B, GPT-2 XL and BERT.
SHAPES = (
    *((1, mebi << 20) for mebi in (1, 2, 4, 8, 16)),
    *((8192, 11008), (8192, 14336), (8192, 6400), (16384, 3072)),
)
# A thread's 16 bytes of the copies.
VECTORS = (2, 4)
FLUSH_BYTES = 1 << 30
WARM_UP = 3
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}

EXAMPLES = """examples:
  python3 benchmarks/activations.py --json activations.json
  python3 benchmarks/activations.py --only silu_and_mul --dtype bfloat16
  python3 benchmarks/activations.py --from-json activations.json --plot activations.png   # measures nothing
"""


class Case(NamedTuple):
    """A function, forward or backward, on rows of one type. The gradient of a sum is no kernel."""

    function: str
    backward: bool
    dtype: str
    rows: int
    columns: int

    @property
    def gated(self) -> bool:
        return "_and_mul" in self.function

    @property
    def reads(self) -> int:
        return 1 + (self.gated or self.function == "add") + self.backward

    @property
    def writes(self) -> int:
        return 2 if self.gated and self.backward else 1

    @property
    def options(self) -> dict[str, str]:
        return {"approximate": "tanh"} if self.function.endswith("tanh") else {}

    @property
    def operator(self) -> str:
        return self.function.split()[0] + ("_backward" if self.backward else "")


def cases(only: list[str], dtypes: list[str]) -> Iterator[Case]:
    for dtype, function, backward, (rows, columns) in itertools.product(dtypes, only, (False, True), SHAPES):
        if function != "add" or not backward:
            yield Case(function, backward, dtype, rows, columns)


def in_torch(torch: Any, case: Case) -> Callable[..., Any]:
    functional = torch.nn.functional
    if case.function == "add":
        return torch.add  # type: ignore[no-any-return]
    activation: Callable[[Any], Any]
    if case.function.startswith("gelu"):
        approximate = "tanh" if case.options else "none"
        activation = lambda x: functional.gelu(x, approximate=approximate)  # noqa: E731
    elif case.function.startswith("silu"):
        activation = functional.silu
    else:
        activation = lambda x: functional.relu(x).square()  # noqa: E731
    return (lambda x, up: activation(x) * up) if case.gated else activation


def in_liger(case: Case) -> Callable[..., Any] | None:
    if not case.gated:
        return None
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return None
    if case.function == "gelu_and_mul":
        return None  # Liger's is the approximated one
    function = (LigerGELUMulFunction if case.options else LigerSiLUMulFunction).apply
    # Rows of more than 64 Ki elements are refused.
    return lambda *arrays: function(*(one if case.rows > 1 else one.view(-1, 4096) for one in arrays)).view(
        case.rows, case.columns
    )


def recorded(torch: Any, function: Callable[..., Any], inputs: list[Any], dy: Any) -> Callable[[], Any]:
    """Return the backward of a function, whose forward has been called."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    y = function(*leaves)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def copy(torch: Any, case: Case, arrays: list[Any], vectors: int) -> Callable[[], Any]:
    kernel = common.stream_kernel(case.reads, case.writes, vectors)
    count = arrays[0].numel() * arrays[0].element_size() // 16
    threads = common.STREAM_THREADS
    launch = LaunchConfig((-(-count // (threads * vectors)), 1, 1), (threads, 1, 1))
    read = {f"in{number}": one.data_ptr() for number, one in enumerate(arrays)}

    def call() -> Any:
        outputs = [torch.empty_like(arrays[0]) for _ in range(case.writes)]
        written = {f"out{number}": one.data_ptr() for number, one in enumerate(outputs)}
        kernel.launch(launch, {**read, **written, "vectors": count}, torch.cuda.current_stream().cuda_stream)
        return outputs

    return call


def calls_of(torch: Any, case: Case) -> dict[str, Callable[[], Any]]:
    """Return every provider's call, with arrays of their own."""
    dtype = getattr(torch, case.dtype)
    arrays = [torch.randn(case.rows, case.columns, device="cuda").to(dtype) for _ in range(case.reads)]
    public = getattr(transformer_rtc, case.operator)
    inputs = arrays[1:] if case.backward else arrays
    found = {OURS: lambda: public(*arrays, **case.options)}
    for name, function in ((TORCH, in_torch(torch, case)), (LIGER, in_liger(case))):
        if function is not None:
            plain = recorded(torch, function, inputs, arrays[0]) if case.backward else lambda f=function: f(*inputs)
            found[name] = plain
    for vectors in VECTORS:
        found[f"{COPY} by {vectors}"] = copy(torch, case, arrays, vectors)
    return found


def problem_of(torch: Any, case: Case, calls: dict[str, Callable[[], Any]]) -> str | None:
    """Return what is wrong with our results; None: nothing."""

    def several(found: Any) -> tuple[Any, ...]:
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    for one, other in zip(several(calls[OURS]()), several(calls[TORCH]()), strict=True):
        # Liger's and torch's are rounded in between.
        off = (one.double() - other.double()).norm() / other.double().norm()
        if not float(off) <= TOLERANCE[case.dtype]:
            return f"{case}: off by {float(off):.2e}"
    return None


def measure(torch: Any, case: Case, placements: int, repetitions: int, flush: common.L2Flush) -> dict[str, Any]:
    measured, held = [], []
    for placement in range(placements):
        calls = calls_of(torch, case)
        problem = problem_of(torch, case, calls) if placement == 0 else None
        if problem:
            sys.exit(problem)
        common.time_rotated(torch, calls, WARM_UP, flush)
        times = common.time_rotated(torch, calls, repetitions, flush)
        measured.append({name: common.spread(values) for name, values in times.items()})
        # The next arrays are elsewhere.
        held.append((calls, torch.empty((3 + placement) << 20, dtype=torch.uint8, device="cuda")))
    return {**case._asdict(), "us_by_placement": measured}


def best(one: dict[str, Any], name: str) -> float | None:
    """Return a provider's median in us at its best placement; of copies, the best one's."""
    found = [
        times["median"] for placed in one["us_by_placement"] for key, times in placed.items() if key.startswith(name)
    ]
    return min(found, default=None)


def report(result: dict[str, Any]) -> None:
    common.print_environment(result["environment"])
    print("speed over the best copy with as many reads and writes; in parentheses, over torch's, and over Liger's\n")
    rows, ratios = [], []
    for one in result["cases"]:
        case = Case(*(one[name] for name in Case._fields))
        ours, copied = best(one, OURS), best(one, COPY)
        assert ours is not None and copied is not None
        ratios.append(copied / ours)
        beside = [None if best(one, name) is None else f"{best(one, name) / ours:.2f}" for name in (TORCH, LIGER)]
        spread = max(placed[OURS]["p90"] / placed[OURS]["median"] - 1 for placed in one["us_by_placement"])
        rows.append((case.operator + (" tanh" if case.options else ""), case.dtype, f"{case.rows}x{case.columns}",
                     f"{ours:.1f}", f"{copied / ours:.2f}", *beside, f"{spread:.2f}"))  # fmt: skip
    print(common.table(("operator", "type", "shape", "us", "of a copy", "torch", "Liger", "spread"), rows))
    if ratios:
        print(f"\n{len(ratios)} cells: mean {statistics.mean(ratios):.3f}, least {min(ratios):.3f}, "
              f"{sum(ratio < 0.95 for ratio in ratios)} below 0.95")  # fmt: skip


def plot(result: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(DTYPES), figsize=(12, 5), sharey=True, layout="constrained")
    for axis, dtype in zip(axes, DTYPES, strict=True):
        for function, backward in itertools.product(FUNCTIONS, (False, True)):
            found = [one for one in result["cases"]
                     if (one["function"], one["backward"], one["dtype"]) == (function, backward, dtype)]  # fmt: skip
            if not found:
                continue
            points = [best(one, COPY) / best(one, OURS) for one in found]  # type: ignore[operator]
            labels = [f"{one['rows']}x{one['columns']}" if one["rows"] > 1 else f"{one['columns'] >> 20} Mi"
                      for one in found]  # fmt: skip
            label = f"{function}{' backward' if backward else ''}"
            style = {"linestyle": "--" if backward else "-", "color": f"C{FUNCTIONS.index(function)}"}
            axis.plot(labels, points, marker="o", markersize=3, label=label, **style)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_title(dtype)
        axis.set_xlabel("shape")
        axis.tick_params("x", rotation=45)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("speed over the best copy")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(FUNCTIONS), choices=FUNCTIONS, metavar="FUNCTION")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--placements", type=common.positive, default=2)
    parser.add_argument("--repetitions", type=common.positive, default=11)
    parser.add_argument("--json", metavar="FILE", help="write every median and spread there")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratio to the copy; needs matplotlib")
    parser.add_argument("--from-json", metavar="FILE", help="report on what a run has written; measure nothing")
    arguments = parser.parse_args()
    if arguments.from_json:
        import json
        from pathlib import Path

        result = json.loads(Path(arguments.from_json).read_text())
    else:
        torch = common.torch_on_gpu()
        flush = common.L2Flush(torch, FLUSH_BYTES)
        for value in range(1000):  # an idle GPU raises its clocks
            flush(value)
        result = {"environment": common.environment(), "cases": []}
        for case in tqdm(list(cases(arguments.only, arguments.dtype)), unit="case"):
            result["cases"].append(measure(torch, case, arguments.placements, arguments.repetitions, flush))
            common.write_json(arguments.json, result)
    report(result)
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
