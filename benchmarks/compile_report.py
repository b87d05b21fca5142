# SPDX-License-Identifier: Apache-2.0
"""What compile_cost.py has measured, as tables and a plot."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any

import common

ROWS = ("whole", "unaligned")  # the kinds of rows, of which each has kernels of its own
FINISH = "finish"  # the launches that follow a backward call's first one: few kernels for all hidden sizes
MAIN = (
    ("rms_norm", 4096, "bf16"),
    ("layer_norm", 4096, "bf16"),
    ("softmax", 2048, "bf16"),
    ("layer_norm_backward, dresidual", 4096, "bf16"),
    ("layer_norm_backward, dresidual", 4096, "fp32"),
)


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
                f"{multiple(kernel):.1f}",
                load_ms.get(kernel["symbol"]),
                kernel["bytes"],
                kernel["registers"],
                None if None in spills else sum(spills),
            )
        )
    headings = ("kernel", "cold ms", "worst", "of empty", "warm load ms", "bytes", "registers", "spill bytes")
    print(f"sm_{measured['architecture']}")
    print(common.table(headings, rows))
    empty = common.spread(measured["empty_ms"])
    print(f"\nempty kernel: median {empty['median']:.1f} ms ({empty['p10']:.1f} to {empty['p90']:.1f})\n")
    for kind in ROWS:
        kernels = [kernel for kernel in measured["kernels"] if kind in kernel["rows"]]
        of_kind = (f"{kind} rows", "kernels", "median, of empty", "worst", "of", "spilling")
        print(common.table(of_kind, summary(kernels)) + "\n")
        if kind == "whole":
            print(common.table(("main kernels", "ms", "of empty", "registers"), main_kernels(kernels)) + "\n")


def multiple(kernel: dict[str, Any]) -> float:
    """Return how many times as long as an empty kernel one takes to compile."""
    return float(statistics.median(kernel["multiples"]))


def main_kernels(kernels: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return a row for each kernel that has a figure of its own."""
    rows: list[tuple[object, ...]] = []
    for name, hidden, dtypes in MAIN:
        same = [kernel for kernel in kernels if (kernel["class"], kernel["dtypes"]) == (name, dtypes)]
        # Of softmax, the size's bucket has the name of its first size.
        found = max((one for one in same if one["hidden"] <= hidden), key=lambda one: one["hidden"], default=None)
        if found is not None:
            milliseconds = statistics.median(found["cold_ms"])
            size = f"{name}, {dtypes}, {found['hidden']}"
            rows.append((size, f"{milliseconds:.1f}", f"{multiple(found):.2f}", found["registers"]))
    return rows


def summary(kernels: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return a row for each class and data type, and one for all: over the kernels' medians."""
    groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for kernel in kernels:
        groups[f"{kernel['class']}, {kernel['dtypes']}"].append(kernel)
    groups = {name: groups[name] for name in sorted(groups, key=lambda name: name.startswith(FINISH))}
    groups["all"] = list(kernels)
    rows: list[tuple[object, ...]] = []
    for name, group in groups.items():
        worst = max(group, key=multiple)
        of = f"{worst['class']}: {worst['symbol']}" if name == "all" else worst["symbol"]
        spilling = sum(bool(kernel["spill_store_bytes"] or kernel["spill_load_bytes"]) for kernel in group)
        median = statistics.median(map(multiple, group))
        rows.append((name, len(group), f"{median:.2f}", f"{multiple(worst):.2f}", of, spilling))
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
    panels = [(one, rows) for one in measured for rows in ROWS]
    types = list(dict.fromkeys(kernel["dtypes"] for one in measured for kernel in one["kernels"]))
    names = list(dict.fromkeys(kernel["class"] for one in measured for kernel in one["kernels"] if kernel["hidden"]))
    figure, axes = pyplot.subplots(len(panels), len(types), figsize=(18, 7 * len(panels)), squeeze=False)
    # Ten colours, each with several lines.
    styles = {
        name: {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10]}
        for number, name in enumerate(names)
    }
    for line, (one, rows) in zip(axes, panels, strict=True):
        shown = [kernel for kernel in one["kernels"] if rows in kernel["rows"] and kernel["hidden"]]
        for axis, dtypes in zip(line, types, strict=True):
            kernels = [kernel for kernel in shown if kernel["dtypes"] == dtypes]
            sizes = sorted({kernel["hidden"] for kernel in kernels})
            for name in names:
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
            axis.set_title(f"{rows} rows, {dtypes}, to a cubin for sm_{one['architecture']}")
            axis.grid(axis="y", alpha=0.3)
            axis.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(result: dict[str, Any], plot_path: str | None) -> None:
    common.print_environment(result["environment"])
    for one in result["compiles"]:
        empty = statistics.median(one["empty_ms"])
        for kernel in one["kernels"]:  # older files have one kernel for all rows, and no multiples
            kernel.setdefault("rows", ROWS)
            kernel.setdefault("multiples", [milliseconds / empty for milliseconds in kernel["cold_ms"]])
        print_compiles(one, result["gpu"].get("loads"))
    if "first_compiles" in result:  # which older files lack
        print_first_compiles(result["first_compiles"])
    print_first_calls(result["gpu"])
    print_static(result["static"])
    if plot_path:
        plot(result, plot_path)
