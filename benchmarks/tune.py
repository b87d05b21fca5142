# SPDX-License-Identifier: Apache-2.0
"""Makes the configurations that are shipped, `transformer_rtc/tuning.json`, of runs of configurations.py.

A case gets one where at least two runs have timed it and the rule's, and it is faster by 3 % and by twice the spread
in each, for each request of that case, and not slower by more than 10 % for 16 rows; of an architecture and a family,
the 60 cases that gain most. A line has such a request, and the least gain of each run.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import common
import configuration_times
from configuration_times import Times

from transformer_rtc.manifest import request_fields
from transformer_rtc.ops.shipped import FILE, case_key
from transformer_rtc.spec import ARCHITECTURES
from transformer_rtc.tuner import MOST_OF_FEW
from transformer_rtc.tuning import values_of

LEAST_GAIN, LEAST_SPREADS, LEAST_RUNS, MOST_ROWS = 0.03, 2, 2, 60

EXAMPLES = """example:
  python3 benchmarks/tune.py benchmarks/results/h200-configurations-*.json.gz --architecture 90
"""


class Row(NamedTuple):
    """A case, its configuration, the rule's, and what it gained in each run."""

    times: Times
    config: Any
    rule: Any
    gains: dict[str, float]


def row_of(runs: list[Times], architecture: int) -> Row | None:
    """Return what is shipped for a case that these runs have measured; None: the rule's configuration."""
    rule = runs[0].by_rule(ARCHITECTURES[architecture])
    runs = [run for run in runs if rule in run.of]
    found = []
    for config in dict.fromkeys(config for run in runs for config in run.of if config != rule):
        gains: dict[str, float] = {}
        enough = True
        for run in runs:
            if config not in run.of:
                continue
            gain, spread = run.gain(config, rule)
            enough = enough and gain >= max(LEAST_GAIN, LEAST_SPREADS * spread)
            if config in run.few and rule in run.few:
                enough = enough and run.few[config] <= MOST_OF_FEW * run.few[rule]
            gains[run.run] = min(round(gain, 3), gains.get(run.run, math.inf))
        if enough and len(gains) >= LEAST_RUNS:
            found.append(Row(runs[0], config, rule, gains))
    return max(found, key=lambda row: min(row.gains.values()), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="what configurations.py has written, plain or gzipped")
    parser.add_argument("--architecture", type=int, default=90, choices=list(ARCHITECTURES))
    parser.add_argument("--out", metavar="FILE", default=FILE, help="default: what the package ships")
    arguments = parser.parse_args()
    by_case = collections.defaultdict[str, list[Times]](list)
    for path in arguments.runs:
        for times in configuration_times.read(path):
            by_case[case_key(times.row.case)].append(times)
    of_family = collections.defaultdict[str, list[Row]](list)
    for runs in by_case.values():
        if row := row_of(runs, arguments.architecture):
            of_family[row.times.family].append(row)
    kept = []
    for rows in of_family.values():
        kept += sorted(rows, key=lambda row: -min(row.gains.values()))[:MOST_ROWS]
    kept.sort(key=lambda row: (row.times.request.operator, row.times.request.columns))
    path = Path(arguments.out)
    shipped = json.loads(path.read_text()) if path.exists() else {}
    shipped[f"sm_{arguments.architecture}"] = {
        case_key(row.times.row.case): {
            "request": request_fields(row.times.request),
            "config": values_of(row.config),
            "gains": row.gains,
        }
        for row in kept
    }
    path.write_text(dump(shipped))
    table = [
        (
            f"{row.times.request.operator} {row.times.request.columns} {row.times.types}",
            row.rule.symbol,
            row.config.symbol,
            f"{min(row.gains.values()):.3f}",
        )
        for row in kept
    ]
    print(common.table(("case", "by the rule", "shipped", "gains at least"), table))
    print(f"{len(kept)} of {len(by_case)} cases; {path} is written")


def dump(shipped: dict[str, dict[str, Any]]) -> str:
    """Return the file's text, a line for each case."""
    architectures = []
    for name, rows in sorted(shipped.items()):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        architectures.append(f" {json.dumps(name)}: {{\n{lines}\n }}" if rows else f" {json.dumps(name)}: {{}}")
    return "{\n" + ",\n".join(architectures) + "\n}\n"


if __name__ == "__main__":
    main()
