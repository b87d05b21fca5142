# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host: rms_norm and rms_norm_backward beside torch's operators and the bare floors: a call that
views two arrays, allocates an output and launches an empty kernel; and for the gradient one that views four, allocates
two outputs and a workspace and launches twice. And what small calls cost the device, inside a captured graph.

All is on a bfloat16 torch tensor and weight. Host times are of asynchronous calls that allocate their outputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import timeit
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import common
from tqdm import tqdm

import transformer_rtc
from transformer_rtc.spec import Field, TextSpec

OURS = "transformer_rtc"
AUTOGRAD = "torch.autograd.grad"
FRAMED = "floor, Python frame"
DIRECTIONS = {"forward": False, "backward": True}
HIDDEN = 4096
HOST_ROWS = 16
GRAPH_ROWS = (1, 16, 128)
CALLS = 200  # of a round: fewer than the launches that the driver queues before it makes the host wait
GRAPH_CALLS = 100
GRAPH_REPLAYS = 50
EPS = 1e-6

# 88 bytes, as many as RMSNorm with a weight takes: host_floor.cpp fills them.
EMPTY = TextSpec(
    'extern "C" __global__ void host_floor(const __grid_constant__ Params params) {}\n',
    "host_floor",
    tuple(Field(f"word{index}", "int64") for index in range(11)),
)

EXAMPLES = """examples:
  python3 benchmarks/host_overhead.py
  python3 benchmarks/host_overhead.py --rounds 1000 --json host.json
  CXX=clang++ python3 benchmarks/host_overhead.py      # what builds the floor; g++ by default
"""


def build_floor(folder: str) -> ModuleType:
    """Compile and import host_floor.cpp."""
    here = Path(__file__).resolve().parent
    library = Path(folder) / f"host_floor{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = (sysconfig.get_path("include"), here.parent / "transformer_rtc" / "native")
    command = [os.environ.get("CXX") or "g++", "-O2", "-std=c++17", "-shared", "-fPIC"]
    command += [f"-I{header}" for header in headers]
    command += [str(here / "host_floor.cpp"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    spec = importlib.util.spec_from_file_location("host_floor", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_floor(torch: Any) -> tuple[Any, str]:
    """Return the floor's module, or None and the reason why there is none."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        return None, f"torch {torch.__version__} has no DLPack exchange table"
    with tempfile.TemporaryDirectory() as folder:
        try:
            floor = build_floor(folder)
        except FileNotFoundError as error:
            return None, f"there is no C++ compiler: {error.filename}; set CXX"
        except subprocess.CalledProcessError as error:
            return None, f"host_floor.cpp does not compile: {error.stderr.strip().splitlines()[0]}"
    architecture = transformer_rtc.device_limits(0).architecture
    torch.empty(1, device="cuda")  # makes a context current
    floor.load(table, transformer_rtc.manager.image(EMPTY, architecture).data, EMPTY.symbol)
    return floor, ""


def framed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the floor in a Python function with the signature of rms_norm: what a public name costs."""

    def rms_norm(
        x: Any,
        weight: Any = None,
        eps: float = 1e-6,
        *,
        bias: Any = None,
        weight_offset: float = 0.0,
        out: Any = None,
        out_dtype: Any = None,
        return_rstd: bool = False,
        scale: Any = None,
        amax: Any = None,
        scale_inv: Any = None,
        row_scaling: bool = False,
        sm_margin: int = 0,
        stream: Any = None,
    ) -> Any:
        return call(
            x, weight, bias, eps, weight_offset, out, out_dtype, return_rstd, scale, amax, scale_inv, row_scaling,
            sm_margin, stream,
        )  # fmt: skip

    return rms_norm


def framed_backward(call: Callable[..., Any]) -> Callable[..., Any]:
    """Likewise, with the signature of rms_norm_backward."""

    def rms_norm_backward(
        dy: Any,
        x: Any,
        weight: Any = None,
        eps: float = 1e-6,
        *,
        rstd: Any = None,
        dresidual: Any = None,
        weight_offset: float = 0.0,
        out: Any = None,
        out_dtype: Any = None,
        return_dx: bool = True,
        return_dweight: bool | None = None,
        return_dbias: bool = False,
        dweight_dtype: Any = None,
        sm_margin: int = 0,
        stream: Any = None,
    ) -> Any:
        return call(
            dy, x, weight, rstd, eps, dresidual, weight_offset, out, out_dtype, return_dx, return_dweight,
            return_dbias, dweight_dtype, sm_margin, stream,
        )  # fmt: skip

    return rms_norm_backward


def timers(torch: Any, backward: bool, rows: int, floor: Any) -> dict[str, timeit.Timer]:
    """Return a loop over each provider's call, as a user would write it."""
    x = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
    weight = torch.randn(HIDDEN, device="cuda").to(torch.bfloat16)
    names = {"x": x, "weight": weight, "shape": (HIDDEN,), "eps": EPS}
    if backward:
        return backward_timers(torch, names, floor)
    found = {
        OURS: ("f(x, weight)", transformer_rtc.rms_norm),
        "torch": ("f(x, shape, weight, eps)", torch.nn.functional.rms_norm),
    }
    if floor is not None:
        found["floor"] = ("f(x, weight)", floor.call)
        found[FRAMED] = ("f(x, weight)", framed(floor.call))
    return {name: timeit.Timer(text, globals={**names, "f": call}) for name, (text, call) in found.items()}


def backward_timers(torch: Any, names: dict[str, Any], floor: Any) -> dict[str, timeit.Timer]:
    x, weight = names["x"], names["weight"]
    _, rstd = transformer_rtc.rms_norm(x, weight, EPS, return_rstd=True)
    leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
    names = {
        **names,
        "dy": torch.randn_like(x),
        "rstd": rstd,
        "column": rstd.unsqueeze(-1),
        "both": [True, True],
        "leaves": leaves,
        "y": torch.nn.functional.rms_norm(leaves[0], (HIDDEN,), leaves[1], EPS),
    }
    found = {
        OURS: ("f(dy, x, weight, eps, rstd=rstd)", transformer_rtc.rms_norm_backward),
        AUTOGRAD: ("f(y, leaves, dy, retain_graph=True)", torch.autograd.grad),
    }
    with suppress(AttributeError, RuntimeError):  # a torch without this operator
        operator = torch.ops.aten._fused_rms_norm_backward
        operator(*(names[name] for name in ("dy", "x", "shape", "column", "weight", "both")))
        found["torch"] = ("f(dy, x, shape, column, weight, both)", operator)
    if floor is not None:
        found["floor"] = ("f(dy, x, weight, rstd)", floor.call_backward)
        found[FRAMED] = ("f(dy, x, weight, eps, rstd=rstd)", framed_backward(floor.call_backward))
    return {name: timeit.Timer(text, globals={**names, "f": call}) for name, (text, call) in found.items()}


def measure_host(torch: Any, backward: bool, floor: Any, rounds: int) -> dict[str, list[float]]:
    """Return us per call of each round."""
    loops = timers(torch, backward, HOST_ROWS, floor)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.timeit(CALLS)
    for repetition in tqdm(range(rounds), desc="host time", unit="round"):
        for name, loop in common.rotated(loops, repetition):
            # The launch queue is empty when a round begins, and never full in it: the host waits for nothing.
            torch.cuda.synchronize()
            times[name].append(loop.timeit(CALLS) / CALLS * 1e6)
    torch.cuda.synchronize()
    return times


def capture(torch: Any, loop: timeit.Timer) -> Any:
    loop.timeit(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.timeit(GRAPH_CALLS)
    return graph


def measure_graph(torch: Any, backward: bool, rows: int, floor: Any) -> dict[str, list[float]]:
    """Return device us per call of each replay. Nothing is flushed: in a graph of small calls, the L2 is warm."""
    loops = timers(torch, backward, rows, floor)
    # The same kernels as the floor's; and nodes of autograd, that are not captured.
    graphs = {}
    for name, loop in loops.items():
        if name not in (FRAMED, AUTOGRAD):
            try:
                graphs[name] = capture(torch, loop)
            except RuntimeError as error:
                print(f"{name} cannot be captured: {error}", file=sys.stderr)
    for graph in graphs.values():
        graph.replay()
    replays = {name: graph.replay for name, graph in graphs.items()}
    times = common.time_rotated(torch, replays, GRAPH_REPLAYS, lambda _: torch.cuda.synchronize())
    return {name: [time / GRAPH_CALLS for time in values] for name, values in times.items()}


def print_times(title: str, times: Mapping[str, list[float]]) -> None:
    found = {name: common.spread(values) for name, values in times.items()}

    def ratio(name: str, other: str) -> str | None:
        return f"{found[name]['median'] / found[other]['median']:.2f}" if other in found else None

    rows = [
        (
            name,
            *(f"{one[key]:.2f}" for key in ("median", "p10", "p90")),
            *(ratio(name, other) for other in ("torch", "floor", FRAMED)),
        )
        for name, one in found.items()
    ]
    print(title)
    print(common.table(("provider", "us", "p10", "p90", "x torch", "x floor", "x framed floor"), rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=common.positive, default=300, help=f"rounds of {CALLS} calls (default: 300)")
    parser.add_argument("--json", metavar="FILE", help="write every measurement there")
    arguments = parser.parse_args()
    torch = common.torch_on_gpu()
    floor, skipped = load_floor(torch)
    result: dict[str, Any] = {"environment": common.environment(), "calls_of_a_round": CALLS}
    if skipped:
        result["floor_skipped"] = skipped
    for name, backward in DIRECTIONS.items():
        result[name] = {
            "host_us": measure_host(torch, backward, floor, arguments.rounds),
            "graph_us": {rows: measure_graph(torch, backward, rows, floor) for rows in GRAPH_ROWS},
        }
    common.write_json(arguments.json, result)

    common.print_environment(result["environment"])
    if skipped:
        print(f"the floor is skipped: {skipped}\n")
    for name in DIRECTIONS:
        print_times(f"{name}: host time per call, {HOST_ROWS}x{HIDDEN} bf16", result[name]["host_us"])
        for rows, times in result[name]["graph_us"].items():
            what = f"device time per call in a captured graph, {rows}x{HIDDEN} bf16 (floor: empty kernels)"
            print_times(f"{name}: {what}", times)


main()
