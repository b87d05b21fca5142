# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host in training: without a gradient, forward where autograd records one, and with backward.

rms_norm, layer_norm and softmax beside torch's own, and Liger's where it is installed, on bfloat16 rows. Host times are
of asynchronous calls; providers are rotated, and ratios are of medians in one run.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from typing import Any

import common
from tqdm import tqdm

import transformer_rtc

OURS, TORCH, LIGER = "transformer_rtc", "torch", "liger"
CALLS = 100  # of a round: fewer than the launches that the driver queues before it makes the host wait
ROWS, HIDDEN, EPS = 16, 4096, 1e-6
# What is timed of a call f, whether its inputs require grad.
WAYS = {
    "no grad": ("f()", False),
    "forward": ("f()", True),
    "forward and backward": ("grad(f(), leaves, dy)", True),
}
EXAMPLES = """examples:
  python3 benchmarks/host_training.py
  python3 benchmarks/host_training.py --rounds 1000 --json host_training.json
"""


def liger_functions() -> dict[str, Any]:
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return {}
    return {name: getattr(functional, f"liger_{name}") for name in ("rms_norm", "layer_norm", "softmax")}


def calls(torch: Any, operator: str, x: Any, weight: Any, bias: Any) -> dict[str, Callable[[], Any]]:
    """Return each provider's call of an operator."""
    ours, functional, liger = transformer_rtc, torch.nn.functional, liger_functions()
    shape = (HIDDEN,)
    if operator == "rms_norm":
        found = {
            OURS: lambda: ours.rms_norm(x, weight, EPS),
            TORCH: lambda: functional.rms_norm(x, shape, weight, EPS),
            LIGER: lambda: liger[operator](x, weight, EPS),
        }
    elif operator == "layer_norm":
        found = {
            OURS: lambda: ours.layer_norm(x, weight, bias, EPS),
            TORCH: lambda: functional.layer_norm(x, shape, weight, bias, EPS),
            LIGER: lambda: liger[operator](x, weight, bias, EPS),
        }
    else:
        found = {
            OURS: lambda: ours.softmax(x),
            TORCH: lambda: torch.softmax(x, -1),
            LIGER: lambda: liger[operator](x),
        }
    if not liger:
        del found[LIGER]
    return found


def measure(torch: Any, operator: str, way: str, rounds: int) -> dict[str, list[float]]:
    """Return us per call of each round."""
    text, requires_grad = WAYS[way]

    def leaf(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16).requires_grad_(requires_grad)

    x, weight, bias = leaf(ROWS, HIDDEN), leaf(HIDDEN), leaf(HIDDEN)
    leaves = {"rms_norm": (x, weight), "layer_norm": (x, weight, bias), "softmax": (x,)}[operator]
    names = {"leaves": leaves, "dy": torch.randn_like(x), "grad": torch.autograd.grad}
    loops = {
        name: timeit.Timer(text, globals={**names, "f": call})
        for name, call in calls(torch, operator, x, weight, bias).items()
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.timeit(CALLS)
    for repetition in tqdm(range(rounds), desc=f"{operator}, {way}", unit="round"):
        for name, loop in common.rotated(loops, repetition):
            torch.cuda.synchronize()
            times[name].append(loop.timeit(CALLS) / CALLS * 1e6)
    torch.cuda.synchronize()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=common.positive, default=200, help=f"rounds of {CALLS} calls (default: 200)")
    parser.add_argument("--json", metavar="FILE", help="write every measurement there")
    arguments = parser.parse_args()
    torch = common.torch_on_gpu()
    result: dict[str, Any] = {"environment": common.environment(), "calls_of_a_round": CALLS, "host_us": {}}
    for operator in ("rms_norm", "layer_norm", "softmax"):
        result["host_us"][operator] = {way: measure(torch, operator, way, arguments.rounds) for way in WAYS}
    common.write_json(arguments.json, result)

    common.print_environment(result["environment"])
    rows = []
    for operator, ways in result["host_us"].items():
        for way, times in ways.items():
            found = {name: common.spread(values) for name, values in times.items()}
            for name, one in found.items():
                ratio = one["median"] / found[TORCH]["median"]
                rows.append(
                    (
                        f"{operator}, {way}",
                        name,
                        *(f"{one[key]:.2f}" for key in ("median", "p10", "p90")),
                        f"{ratio:.2f}",
                    )
                )
    print(f"host time per call, {ROWS}x{HIDDEN} bf16")
    print(common.table(("call", "provider", "us", "p10", "p90", "x torch"), rows))


main()
