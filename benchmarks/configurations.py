# SPDX-License-Identifier: Apache-2.0
"""How fast every configuration that a request may have is, on this GPU: what the default one and a tuner's choice lose.

Each configuration is timed at two placements of the arrays, the fastest ones, the default one and the rule's again at
others, in an order at random, with the L2 flushed before every call. Ratios are of the fastest one's median time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
from configuration_times import Times
from tqdm import tqdm

from transformer_rtc import ArgumentError
from transformer_rtc.declaration import declaration_of
from transformer_rtc.device import Gpu
from transformer_rtc.manifest import request_fields
from transformer_rtc.request import Request
from transformer_rtc.tuner_bench import GpuBench
from transformer_rtc.tuning import Tuning, read, values_of
from transformer_rtc.warming import requests_of

FIRST = (2, 3)  # placements, and calls at each
AGAIN = (3, 9)
KEPT = 12
FEW_ROWS = (1, 16, 128)
FEW_CALLS = 15

EXAMPLES = """examples:
  python3 benchmarks/configurations.py rms_norm layer_norm --dtype bfloat16 float32 --hidden 5376 21504 --json all.json
  python3 benchmarks/configurations.py softmax softmax_backward --hidden 17 300 577 1001 --json lengths.json
  python3 benchmarks/configurations.py --manifest manifest.jsonl --tuning ~/.cache/transformer_rtc/tuning.X.jsonl
"""


def measure(request: Request, columns: int) -> dict[str, Any]:
    """Return the times of every configuration of a request with rows of so many columns, in microseconds."""
    start = time.monotonic()
    bench = GpuBench(request, 0, columns=columns)
    found: dict[Any, dict[str, Any]] = {
        config: {"config": values_of(config), "first_us": [], "again_us": [], "few_us": {}} for config in bench.configs
    }

    def time_at(placements: int, calls: int, configs: list[Any], name: str) -> None:
        for _ in range(placements):
            for config, times in bench.times(configs, calls).items():
                found[config][name].append(times)

    time_at(*FIRST, list(bench.configs), "first_us")
    by_speed = sorted(found, key=lambda config: median(found[config]["first_us"]))
    by_rule = Times("", request, {}, {}).by_rule(Gpu(0).limits)
    best = list(dict.fromkeys((bench.configs[0], *({by_rule} & found.keys()), *by_speed[:KEPT])))
    time_at(*AGAIN, best, "again_us")
    for rows in FEW_ROWS:
        for config, times in bench.times(best, FEW_CALLS, rows).items():
            found[config]["few_us"][rows] = times
    bench.close()
    return {
        "request": request_fields(request),
        "length": columns,
        "seconds": time.monotonic() - start,
        "configurations": list(found.values()),
    }


def median(placements: list[list[float]]) -> float:
    return statistics.median(statistics.median(times) for times in placements)


def row_of(measured: dict[str, Any], request: Request, tuning: Tuning) -> tuple[object, ...]:
    """Return a row of the table: how fast the default and the tuned configuration are, of the fastest one."""
    again = [one for one in measured["configurations"] if one["again_us"]]
    best = min(again, key=lambda one: median(one["again_us"]))
    default, tuned = measured["configurations"][0], None
    row = tuning.row(request)
    if row is not None:
        config = row.config or default["config"]
        tuned = next((one for one in measured["configurations"] if one["config"] == config), None)

    def of_best(one: dict[str, Any] | None) -> str | None:
        if one is None:
            return None
        name = "again_us" if one["again_us"] else "first_us"
        return f"{median(best[name]) / median(one[name]):.3f}"

    types = "/".join(dict.fromkeys(dtype.name for dtype in request.dtypes.values() if dtype))
    return (
        f"{request.operator} {measured['length']} {types}{' per head' if request.per_head else ''}",
        len(measured["configurations"]),
        of_best(default),
        of_best(tuned),
        " ".join(f"{name}={value}" for name, value in best["config"].items()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operator", nargs="*")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--hidden", nargs="+", type=int, default=[])
    parser.add_argument("--manifest", metavar="FILE", help="requests of a run, or of a file that this one is given")
    parser.add_argument("--per-head", action="store_true")
    parser.add_argument(
        "--argument", nargs="+", default=[], metavar="NAME=VALUE", help="as transformer-rtc tune has it"
    )
    parser.add_argument("--tuning", metavar="FILE", help="what transformer-rtc tune has written")
    parser.add_argument("--minutes", type=float, default=10.0, help="no measurement begins after so many")
    parser.add_argument("--json", metavar="FILE", help="write every time there, after each request")
    arguments = parser.parse_args()
    problem = common.gpu_problem()
    if problem:
        sys.exit(f"this benchmark needs a GPU: {problem}")
    words = {"true": True, "false": False, "none": None}
    given = {name: words.get(value, value) for name, _, value in (text.partition("=") for text in arguments.argument)}
    dtypes = arguments.dtype if arguments.operator else []
    try:
        # Of an operator that has a kernel for many lengths, each size is timed, and not the longest alone.
        asked = [
            (request, size)
            for size in arguments.hidden
            for request in requests_of(
                arguments.operator, dtypes, [size], manifest=None, per_head=arguments.per_head, **given
            )
        ]
        if arguments.manifest:
            asked += [
                (request, request.columns)
                for request in requests_of([], [], [], manifest=arguments.manifest, per_head=False)
            ]
        tuning = read(Path(arguments.tuning).expanduser()) if arguments.tuning else Gpu(0).tuning
    except ArgumentError as error:
        sys.exit(str(error))
    if not asked:
        sys.exit("name operators and --hidden sizes, or a --manifest")
    result: dict[str, Any] = {"environment": common.environment(), "requests": []}
    rows, start = [], time.monotonic()
    # At random: what the time does not suffice for is no particular kind.
    for request, columns in tqdm(random.sample(asked, len(asked)), unit="request"):
        if time.monotonic() - start > 60 * arguments.minutes:
            break
        if len(declaration_of(request.operator).family.configurations(request, Gpu(0).limits)) > 1:
            measured = measure(request, columns)
            result["requests"].append(measured)
            rows.append(row_of(measured, request, tuning))
            common.write_json(arguments.json, result)
    common.print_environment(result["environment"])
    print(common.table(("request", "configurations", "default", "tuned", "fastest"), sorted(rows)))
    print(f"{len(rows)} of {len(asked)} requests in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
