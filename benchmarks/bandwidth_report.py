# SPDX-License-Identifier: Apache-2.0
"""What bandwidth.py says of its measurements: tables, the cases below their targets, and a plot."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import common
from bandwidth_cases import PLAIN, SHAPES, Case
from bandwidth_providers import COMPILED, COPY, NAMES, OURS, STATIC, TE_KERNELS, TORCH
from bandwidth_timing import GRAPH_CALLS


class Measured:
    """A case's times, and what follows from them."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.case = Case(**found["case"])
        self.failures: dict[str, str] = found["failures"]
        self._placements: list[dict[str, dict[str, float]]] = found["us_by_placement"]
        self.names = list(dict.fromkeys(name for placement in self._placements for name in placement))

    def times(self, provider: str) -> dict[str, float] | None:
        """Return a provider's times at its best placement."""
        found = [placement[provider] for placement in self._placements if provider in placement]
        return min(found, key=lambda times: times["median"]) if found else None

    def speed(self, provider: str) -> float | None:
        """Return GB/s."""
        times, case = self.times(provider), self.case
        moved = case.copied_bytes if provider.startswith(COPY) else case.moved_bytes
        return moved / times["median"] / 1e3 if times else None

    @property
    def ceiling(self) -> float | None:
        return max((self.speed(name) or 0.0 for name in self.names if name.startswith(COPY)), default=None)

    @property
    def best_peer(self) -> str | None:
        peers = [name for name in self.names if name not in (OURS, STATIC) and not name.startswith(COPY)]
        return max(peers, key=lambda name: self.speed(name) or 0.0, default=None)

    def ratio(self, provider: str) -> float | None:
        """Return the speed to the ceiling's."""
        speed, ceiling = self.speed(provider), self.ceiling
        return speed / ceiling if speed and ceiling else None


def form(value: float | None, how: str) -> str | None:
    return None if value is None else format(value, how)


def spread_of(times: dict[str, float] | None) -> str | None:
    return times and f"{(times['p90'] - times['p10']) / times['median']:.1%}"


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return runs that measured alike, such as of one dtype each, as one; of a case, what its last run measured."""
    first, *others = results
    for other in others:
        if any(other[name] != first[name] for name in ("placements", "repetitions")):
            raise SystemExit("--from-json: the runs have other numbers of placements or repetitions")
    environments = [environment for result in results for environment in result["environments"]]
    cases = {str(found["case"]): found for result in results for found in result["cases"]}
    absent = {name: why for result in results for name, why in result["absent"].items()}
    return {**first, "environments": environments, "absent": absent, "cases": list(cases.values())}


def print_report(result: dict[str, Any]) -> None:
    for environment in result["environments"]:
        common.print_environment(environment)
    every = [Measured(found) for found in result["cases"]]
    large = [one for one in every if one.case.kind != "small"]
    small = [one for one in every if one.case.kind == "small"]
    extra = [name for name in NAMES if name not in (OURS, TORCH) and any(name in one.names for one in every)]
    rows: list[tuple[object, ...]] = []
    for one in large:
        peer, mine = one.best_peer, one.speed(OURS)
        theirs = one.speed(peer) if peer else None
        rows.append(
            (
                one.case.operator,
                one.case.dtype,
                one.case.shape,
                form(mine, ".0f"),
                form(one.ratio(OURS), ".3f"),
                form(mine / theirs if mine and theirs else None, ".2f"),
                peer,
                spread_of(one.times(OURS)),
                form(one.ceiling, ".0f"),
                *(form(one.speed(name), ".0f") for name in (TORCH, *extra)),
            )
        )
    if rows:
        headings = ("operator", "dtype", "shape", "GB/s", "/ ceiling", "/ best peer", "best peer", "p10-p90")
        print(common.table((*headings, "ceiling", TORCH, *extra), rows))
        print(
            f"\nof each provider and case: the median of {result['repetitions']} at the best of {result['placements']} "
            "placements; the L2 flushed before every launch; every provider allocates its outputs\n"
        )
    rows = []
    for one in small:
        mine, theirs = one.times(OURS), one.times(TORCH)
        rows.append(
            (
                one.case.operator,
                one.case.dtype,
                one.case.shape,
                *(form((one.times(name) or {}).get("median"), ".2f") for name in (OURS, TORCH, *extra)),
                form(theirs["median"] / mine["median"] if mine and theirs else None, ".2f"),
                spread_of(mine),
            )
        )
    if rows:
        print(common.table(("operator", "dtype", "shape", OURS, TORCH, *extra, "x torch", "p10-p90"), rows))
        print(f"\nus of the device per call, of {GRAPH_CALLS} in a captured graph, the L2 warm\n")
    print_verdict(large, result["absent"])
    failed: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for one in every:
        for failure in one.failures.items():
            failed[failure].append(f"{one.case.operator} {one.case.dtype} {one.case.shape}")
    for (name, problem), where in failed.items():
        print(f"FAILED: {name}: {problem}\n  {'; '.join(where)}")


def print_verdict(measured: Sequence[Measured], absent: Mapping[str, str]) -> None:
    aimed = [(one, one.case.target, one.ratio(OURS)) for one in measured if one.case.target]
    below = [(one.case, target, ratio) for one, target, ratio in aimed if ratio is None or ratio < (target or 0.0)]
    rows = [
        (case.operator, case.dtype, case.shape, form(ratio, ".3f"), target)
        for case, target, ratio in sorted(below, key=lambda row: (row[2] or 0.0) - (row[1] or 0.0))
    ]
    print(f"below the target: {len(below)} of {len(aimed)} cases")
    if rows:
        print(common.table(("operator", "dtype", "shape", "/ ceiling", "target"), rows))
    print()
    for name, why in absent.items():
        print(f"not measured: {name}: {why}")


def plot(result: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = [Measured(found) for found in result["cases"]]
    colors = {name: f"C{index}" for index, name in enumerate(NAMES)}
    figure, axes = pyplot.subplot_mosaic(
        [
            ["rms_norm", "layer_norm"],
            ["rms_norm_backward", "layer_norm_backward"],
            ["softmax", "softmax_backward"],
            ["others", "others"],
        ],
        figsize=(14, 21),
    )
    sizes = [hidden for _, hidden in SHAPES]
    for operator in PLAIN:
        axis = axes[operator]
        for dtype, line in (("bfloat16", "-"), ("float32", "--")):
            shapes = [
                one for one in every if (one.case.operator, one.case.kind, one.case.dtype) == (operator, "shape", dtype)
            ]
            for name in (OURS, TORCH, COMPILED, TE_KERNELS):
                points = [(one.case.hidden, one.ratio(name)) for one in shapes if one.ratio(name)]
                if points:
                    label = f"{name}, {dtype}"
                    axis.plot(
                        *zip(*points, strict=True), line, marker="o", markersize=4, color=colors[name], label=label
                    )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes], rotation=30)
        axis.set(xlabel="hidden size", title=operator)
    axis = axes["others"]
    drawn = [("shape", operator) for operator in PLAIN]
    others = [one for one in every if one.case.kind != "small" and (one.case.kind, one.case.operator) not in drawn]
    names = [name for name in (OURS, TORCH, COMPILED, TE_KERNELS) if any(name in one.names for one in others)]
    for index, name in enumerate(names):
        width = 0.8 / len(names)
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(others))]
        axis.bar(places, [one.ratio(name) or 0.0 for one in others], width, color=colors[name], label=name)
    labels = [f"{one.case.operator}, {one.case.dtype}, {one.case.shape}" for one in others]
    axis.set_xticks(range(len(others)), labels, fontsize=6, rotation=90)
    axis.margins(x=0.01)
    axis.set_title("ragged rows, heads inside a packed qkv, residuals, log_softmax, softmax of matrices")
    for axis in axes.values():
        axis.axhline(1.0, color="black", linewidth=1, alpha=0.5)
        axis.set(ylabel="bandwidth / best copy", ylim=(0, None))
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report(result: dict[str, Any], plot_path: str | None) -> None:
    print_report(result)
    if plot_path:
        plot(result, plot_path)
