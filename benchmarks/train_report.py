# SPDX-License-Identifier: Apache-2.0
"""Tables and a plot of what train_step.py measured, made from its raw results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import common
import loss_curves
import whole_models

Result = Mapping[str, Any]


def _joined(results: Sequence[Result], part: str) -> list[Any]:
    return [found for result in results for found in result[part]]


def _median(model: Result, way: str) -> float | None:
    measured = model["ways"].get(way)
    return statistics.median(measured["ms"]) if measured and measured["ms"] else None


def _ratio(one: float | None, other: float | None) -> str | None:
    return None if one is None or other is None else f"{one / other:.3f}"


def print_model(model: Result) -> None:
    first = next(iter(model["ways"].values()), {})
    print(
        f"{model['model']}: {first.get('parameters', 0) / 1e6:.1f} million parameters, {model['batch']} x "
        f"{model['tokens']} tokens"
    )
    eager, compiled = (_median(model, way) for way in (whole_models.EAGER, whole_models.COMPILED))
    rows: list[tuple[object, ...]] = []
    for way, measured in model["ways"].items():
        times, median = common.spread(measured["ms"]), _median(model, way)
        peak, breaks = measured.get("peak_bytes"), measured.get("graph_breaks")
        rows.append(
            (
                way,
                f"{times['median']:.2f}",
                f"{times['p10']:.2f}-{times['p90']:.2f}",
                _ratio(median, eager),
                _ratio(median, compiled),
                None if peak is None else f"{peak / 2**30:.1f}",
                f"{measured['first_seconds']:.2f}",
                None if breaks is None else sum(breaks.values()),
                f"{measured['first_loss']:.4f}",
            )
        )
    headings = ("norms", "step, ms", "p10-p90", "/ eager", "/ compiled", "peak, GiB", "first step here, s")
    print(common.table((*headings, "graph breaks", "first loss"), rows))
    for way, measured in model["ways"].items():
        for reason, count in measured.get("graph_breaks", {}).items():
            print(f"{way}: {count} x {reason.splitlines()[0]}")
    for way, failure in model["failures"].items():
        print(f"{way} failed: {failure}")
    print()


def print_first_steps(found: Sequence[Result]) -> None:
    for name in dict.fromkeys(one["model"] for one in found):
        print(f"first step of {name} in a fresh process, s: median, and the least and most of its processes")
        rows: list[tuple[object, ...]] = []
        failures = []
        for way in dict.fromkeys(one["way"] for one in found):
            row: list[object] = [way]
            for state in dict.fromkeys(one["caches"] for one in found):
                runs = [one for one in found if (one["model"], one["way"], one["caches"]) == (name, way, state)]
                failures += [f"{way}, {state} caches, failed: {run['failure']}" for run in runs if "failure" in run]
                done = [run for run in runs if "failure" not in run]
                if not done:
                    row += [None] * 4
                    continue
                seconds = common.spread([run["seconds"] for run in done])
                row += [f"{seconds['median']:.2f}", f"{seconds['min']:.2f}-{seconds['max']:.2f}", len(done)]
                row.append(max(run["kernels_compiled"] for run in done))
            rows.append(tuple(row))
        columns = ("range", "processes", "ours compiled")
        print(common.table(("norms", "empty caches", *columns, "full caches", *columns), rows))
        print("\n".join(dict.fromkeys(failures)) + "\n")


def print_loss_curves(runs: Sequence[Result]) -> None:
    steps, seeds = len(runs[0]["losses"]), len({run["seed"] for run in runs})
    print(f"losses of {steps} steps, {seeds} seeds: the largest difference of means of {loss_curves.MEAN_OF} losses")
    reference = loss_curves.Run(loss_curves.FLOAT32, whole_models.EAGER)
    rows: list[tuple[object, ...]] = []
    for precision in (loss_curves.WEIGHTS, loss_curves.AUTOCAST):
        eager, ours = (loss_curves.Run(precision, way) for way in (whole_models.EAGER, whole_models.OURS))
        found = [loss_curves.largest_difference(runs, one, other) for one, other in ((ours, eager), (eager, reference))]
        last = [loss_curves.last_mean(runs, run) for run in (reference, eager, ours)]
        rows.append(
            (
                precision,
                *(f"{difference:.5f}" for difference in found),
                "yes" if found[0] <= found[1] else "no",
                *(f"{loss:.4f}" for loss in last),
            )
        )
    headings = ("precision", "ours to eager", "eager to float32", "within", "last: float32", "eager", "ours")
    print(common.table(headings, rows) + "\n")


def report(results: Sequence[Result], plot_path: str | None) -> None:
    """Print the tables of several runs as one, and draw them."""
    for result in results:
        common.print_environment(result["environment"])
        if result["tiny"]:
            print("Tiny models in the simulator: that the program runs is all that these figures say.\n")
    for model in _joined(results, "models"):
        print_model(model)
    first_steps, curves = _joined(results, "first_steps"), complete_seeds(_joined(results, "loss_curves"))
    if first_steps:
        print_first_steps(first_steps)
    if curves:
        print_loss_curves(curves)
    if plot_path:
        plot(_joined(results, "models"), first_steps, curves, plot_path)


def complete_seeds(runs: Sequence[Result]) -> list[Result]:
    """Return the runs of seeds of which every kind of run was made: a program may have been stopped."""
    kinds: dict[int, int] = {}
    for run in runs:
        kinds[run["seed"]] = kinds.get(run["seed"], 0) + 1
    return [run for run in runs if kinds[run["seed"]] == len(loss_curves.RUNS)]


def plot(models: Sequence[Result], first_steps: Sequence[Result], curves: Sequence[Result], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {way: f"C{number}" for number, way in enumerate(whole_models.WAYS)}
    figure, (steps, firsts, losses) = pyplot.subplots(3, 1, figsize=(12, 16))
    _draw_steps(steps, models, colors)
    _draw_first_steps(firsts, first_steps)
    _draw_losses(losses, curves)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _draw_steps(axis: Any, models: Sequence[Result], colors: Mapping[str, str]) -> None:
    width = 0.8 / len(colors)
    for number, (way, color) in enumerate(colors.items()):
        bars = []
        for place, model in enumerate(models):
            median = _median(model, way)
            if median is not None:
                times = common.spread(model["ways"][way]["ms"])
                bars.append((place + number * width, median, median - times["p10"], times["p90"] - median))
        if bars:
            places, heights, below, above = zip(*bars, strict=True)
            axis.bar(places, heights, width, yerr=(below, above), color=color, label=way, capsize=2)
            axis.bar_label(axis.containers[-1], fmt="%.1f", fontsize=7)
    middle = (len(colors) - 1) / 2 * width
    axis.set_xticks([place + middle for place in range(len(models))], [model["model"] for model in models])
    axis.set(ylabel="training step, ms", title="Median of alternating turns; lines are the 10th to 90th percentile")
    axis.grid(axis="y", alpha=0.3)
    if models:
        axis.legend(fontsize=8)


def _draw_first_steps(axis: Any, first_steps: Sequence[Result]) -> None:
    ways = list(dict.fromkeys(one["way"] for one in first_steps))
    states = list(dict.fromkeys(one["caches"] for one in first_steps))
    for number, state in enumerate(states):
        bars = []
        for place, way in enumerate(ways):
            seconds = [
                one["seconds"]
                for one in first_steps
                if (one["way"], one["caches"]) == (way, state) and "failure" not in one
            ]
            if seconds:
                bars.append((place + 0.4 * number, statistics.median(seconds)))
        if bars:
            axis.bar(*zip(*bars, strict=True), 0.4, label=f"{state} caches")
            axis.bar_label(axis.containers[-1], fmt="%.2f", fontsize=7)
    axis.set_xticks([place + 0.2 for place in range(len(ways))], ways)
    axis.set(ylabel="first step, s", yscale="log", title="First step of a fresh process")
    axis.grid(axis="y", alpha=0.3)
    if ways:
        axis.legend(fontsize=8)


def _draw_losses(axis: Any, curves: Sequence[Result]) -> None:
    seed = min((run["seed"] for run in curves), default=0)
    for number, run in enumerate(run for run in curves if run["seed"] == seed):
        found = loss_curves.means(run["losses"])
        places = [(place + 1) * loss_curves.MEAN_OF for place in range(len(found))]
        line = "--" if run["way"] == whole_models.OURS else "-"
        axis.plot(places, found, line, color=f"C{number}", label=f"{run['way']}, {run['precision']}")
    axis.set(xlabel="step", ylabel="loss", title=f"Means of {loss_curves.MEAN_OF} losses, seed {seed}")
    axis.grid(alpha=0.3)
    if curves:
        axis.legend(fontsize=8)
