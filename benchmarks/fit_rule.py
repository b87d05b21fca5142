# SPDX-License-Identifier: Apache-2.0
"""Fits the weights of the rules that choose configurations to what configurations.py has measured.

It tells how good the rules are: of each measured case, a rule's configuration is compared with the fastest one of the
run. A search starts at a regression, and changes one weight at a time: what counts is the loss of what a rule chooses.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import common
import configuration_times
import numpy as np
from configuration_times import Times

from transformer_rtc.ops.division import cost_of_few_rows
from transformer_rtc.ops.norm import heuristics as norm
from transformer_rtc.ops.softmax import heuristics as softmax
from transformer_rtc.spec import ARCHITECTURES, DeviceLimits

LIMITS = ARCHITECTURES[90]
ROUNDS, STARTS = 40_000, 4
NEAR, FAR = 0.06, 0.02  # how fast a regression forgets slow configurations, and what it counts of the slowest
# What a gain may be called a cost for: these weights may be negative.
GAINS = {
    "rows",
    "rows_layer_norm",
    "shared",
    "shared_other",
    "in_registers",
    "elements_other",
    "register_rows",
    "register_warps",
    "tiled",
    "persistent",
}

EXAMPLES = """example:
  python3 benchmarks/fit_rule.py benchmarks/results/h200-configurations-*.json.gz --search --json weights.json
"""


class Case(NamedTuple):
    """A measured case: of each configuration that a rule may choose, its terms, its cost for few rows, and its loss."""

    times: Times
    terms: np.ndarray[Any, Any]
    few: np.ndarray[Any, Any]
    loss: np.ndarray[Any, Any]
    configs: list[Any]


def comparable(times: Times, limits: DeviceLimits) -> dict[Any, float]:
    """Return the microseconds of the configurations that a rule may choose.

    Backward, a rule knows one ring for each division: another one stands for it where that was not measured.
    """
    if times.family == "softmax":
        return {
            config: times.microseconds(config)
            for config in times.of
            if softmax.may_be_chosen(config, times.row, limits)
        }
    if times.way == "norms, forward":
        chosen = (config for config in times.of if not config.stages and norm.may_be_chosen(config, times.row))
        return {config: times.microseconds(config) for config in chosen}
    found: dict[Any, dict[int, float]] = {}
    for config in times.of:
        division = config.replace(stages=1, bulk=False, statistics_ahead=False)
        ring = norm.with_slots(division, times.row, limits)
        rank = 0 if config == ring else 1 if config.stages == ring.stages else 2
        if rank < 2 or config.stages in (2, 3):
            found.setdefault(ring, {}).setdefault(rank, times.microseconds(config))
    return {ring: ranked[min(ranked)] for ring, ranked in found.items()}


def case_of(times: Times, terms: Callable[..., dict[str, float]]) -> Case | None:
    measured = comparable(times, LIMITS)
    if len(measured) < 2:
        return None
    rows = [list(terms(config, times.row, LIMITS).values()) for config in measured]
    few = np.array([cost_of_few_rows(config) for config in measured])
    taken = np.array(list(measured.values()))
    return Case(times, np.array(rows), few, np.log(taken / taken.min()), list(measured))


class Fit:
    """All cases of a rule, and the loss of weights."""

    def __init__(self, cases: list[Case], names: list[str]) -> None:
        self.terms, self.few, self.losses = (np.concatenate([case[part] for case in cases]) for part in (1, 2, 3))
        counts = [len(case.configs) for case in cases]
        self.counts, self.starts = np.array(counts), np.cumsum([0, *counts[:-1]])
        self.least = np.array([-1.0 if name in GAINS else 0.0 for name in names])
        self.cases = cases

    def chosen(self, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the loss of what weights choose in each case; of ties, the worst."""
        costs = self.terms @ weights + self.few
        least = np.repeat(np.minimum.reduceat(costs, self.starts), self.counts)
        return np.maximum.reduceat(np.where(costs <= least + 1e-9, self.losses, -1.0), self.starts)

    def loss(self, weights: np.ndarray[Any, Any]) -> float:
        chosen = self.chosen(weights)
        spread = 0.5 * math.sqrt((chosen**2).mean()) + 0.05 * chosen.max()
        return float(chosen.mean() + spread + 1e-4 * np.abs(weights).sum())

    def regression(self) -> np.ndarray[Any, Any]:
        """Return the weights that tell the losses of fast configurations best."""
        left, right = 0.0, 0.0
        for case in self.cases:
            counted = np.exp(-case.loss / NEAR) + FAR
            terms = case.terms - counted @ case.terms / counted.sum()
            weighted = terms.T * counted
            left, right = left + weighted @ terms, right + weighted @ (case.loss - counted @ case.loss / counted.sum())
        ridge = 1e-4 * np.diag(np.diag(left) + 1e-6)
        return np.clip(np.linalg.solve(left + ridge, right), self.least, 1.0)

    def search(self, seed: int) -> np.ndarray[Any, Any]:
        """Return better weights than the regression's: by random changes, of which few bad ones are kept at first."""
        random = np.random.default_rng(seed)
        weights = best = self.regression()
        loss = least = self.loss(weights)
        for number in range(ROUNDS):
            changed = weights.copy()
            place = random.integers(len(changed))
            size = min(abs(changed[place]), 0.3) + 0.005
            changed[place] += random.normal() * size * random.choice([0.05, 0.2, 0.6])
            changed = np.clip(changed, self.least, 1.0)
            after = self.loss(changed)
            if after < loss or random.random() < math.exp((loss - after) / (0.002 * (1 - number / ROUNDS) ** 2)):
                weights, loss = changed, after
            if loss < least:
                best, least = weights, loss
        return best


def summary(name: str, cases: list[Case], losses: Iterable[float]) -> tuple[object, ...]:
    speeds = np.exp(-np.array(list(losses)))
    return name, len(cases), f"{speeds.mean():.4f}", f"{speeds.min():.3f}", f"{(speeds < 0.97).sum()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="what configurations.py has written, plain or gzipped")
    parser.add_argument("--search", action="store_true", help="look for better weights than those there are: minutes")
    parser.add_argument("--json", metavar="FILE", help="write the weights that a search has found there")
    arguments = parser.parse_args()
    rules = {
        "norms, forward": (norm.forward_terms, norm.FORWARD_WEIGHTS, lambda run: run.way == "norms, forward"),
        "norms, backward": (norm.backward_terms, norm.BACKWARD_WEIGHTS, lambda run: run.way == "norms, backward"),
        "softmax": (softmax.terms, softmax.WEIGHTS, lambda run: run.family == "softmax"),
    }
    runs = [times for path in arguments.runs for times in configuration_times.read(path)]
    table, found = [], {}
    for name, (terms, weights, is_of) in rules.items():
        cases = [case for run in runs if is_of(run) and (case := case_of(run, terms)) is not None]
        if not cases:
            continue
        fit = Fit(cases, list(weights))
        values = np.array(list(weights.values()))
        table.append(summary(name, cases, fit.chosen(values)))
        if arguments.search:
            values = min((fit.search(seed) for seed in range(STARTS)), key=fit.loss)
            table.append(summary(f"{name}, searched", cases, fit.chosen(values)))
        found[name] = dict(zip(weights, (round(float(value), 4) for value in values), strict=True))
    print(common.table(("rule", "cases", "of the fastest, mean", "worst", "below 0.97"), table))
    if arguments.search:
        print(json.dumps(found, indent=1))
        common.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
