# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md, docs/performance.md and benchmarks/README.md from the runs in benchmarks/results.

A table stands between two comments of Markdown: ``<!-- table NAME -->`` and ``<!-- end -->``. benchmarks/README.md has
the commands of the runs. Tables of bandwidth.py's runs are here, and the others in other_tables.py.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import other_tables
from bandwidth_cases import COMPILED_HIDDEN, DRESIDUAL, FORMS, Case
from bandwidth_providers import COMPILED, OURS, STATIC, TE_KERNELS, TORCH
from bandwidth_report import Measured, joined
from other_tables import NAMES, ROOT, text

PAGES = ("README.md", "docs/performance.md", "benchmarks/README.md")
TYPES = (("bfloat16", "bf16"), ("float32", "fp32"))
NORMS = ("rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward")
LIGER, QUACK = "Liger", "quack"
PEER_OPERATORS = (*NORMS, "softmax")  # of the run beside every peer
# Of the README's table: those that torch.compile was measured for.
SPEED_COLUMNS = (1024, 4096, 8192, 32768)

PLOT_COLUMNS = 4096
# Of the README's plot, in its order; a name has its color whichever of the others a run measured.
PLOT_COLORS = {OURS: "C0", COMPILED: "C1", LIGER: "C2", QUACK: "C5", TE_KERNELS: "C4", TORCH: "C3"}
PLOT_LABELS = {TE_KERNELS: "TransformerEngine"}
# A peer is faster from here on; runs of one GPU differ by less.
BEHIND = 1.03


def measured(name: str, types: Sequence[str] = ("bf16", "fp32")) -> list[Measured]:
    """Return the cells of a run, of both types or of these."""
    files = [ROOT / "benchmarks" / "results" / f"h200-{name}-{short}.json" for short in types]
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [Measured(found) for found in joined(runs)["cases"]]


def of(cells: Iterable[Measured], **fields: object) -> list[Measured]:
    """Return the cells of cases that have these fields."""
    return [one for one in cells if all(getattr(one.case, name) == value for name, value in fields.items())]


def speedup(cell: Measured, peer: str) -> float | None:
    """Return our speed over a peer's."""
    ours, others = cell.speed(OURS), cell.speed(peer)
    return ours / others if ours and others else None


def ratio(cells: Sequence[Measured], peers: Sequence[str] = (TORCH,)) -> str:
    """Return a cell of a table: the speed over the best copy; in parentheses, over peers."""
    if not cells:
        return ""
    (cell,) = cells
    share = cell.ratio(OURS)
    over = [speedup(cell, peer) for peer in peers]
    assert share is not None
    return f"{share:.2f} ({', '.join('-' if one is None else f'{one:.1f}' for one in over)})"


def grid(
    first: str,
    cells: Sequence[Measured],
    columns: Sequence[tuple[str, Mapping[str, object]]],
    label: Callable[[Case], str] = lambda case: str(case.hidden),
    cell: Callable[[Sequence[Measured]], str] = ratio,
) -> str:
    """Return a table of cells: one row for each label, and in each of `columns` one cell for each measured type.

    A column is its name, and the fields of the cases that it shows.
    """
    rows: dict[str, list[Measured]] = {}
    for one in cells:
        rows.setdefault(label(one.case), []).append(one)
    types = [(dtype, short) for dtype, short in TYPES if of(cells, dtype=dtype)]
    head = [f"{name} {short}" if (dtype, short) == types[0] else short for name, _ in columns for dtype, short in types]
    head.insert(0, first)
    lines = (
        [name, *(cell(of(found, dtype=dtype, **fields)) for _, fields in columns for dtype, _ in types)]
        for name, found in rows.items()
    )
    return text(head, (line for line in lines if any(line[1:])))


def by_columns(run: str, operators: dict[str, str], first: str, *kinds: str) -> str:
    """Return a table of rows by their columns: those of each kind one after another."""
    found = [one for kind in kinds for one in of(measured(run), kind=kind) if one.case.operator in operators]
    return grid(first, found, [(name, {"operator": operator}) for operator, name in operators.items()])


def speed() -> str:
    """Return the README's table: four sizes, five operators, every peer of the run."""
    cells = of(measured("peers", ("bf16",)), kind="shape")
    peers = [name for name in (TORCH, COMPILED, LIGER, QUACK, TE_KERNELS) if any(one.speed(name) for one in cells)]
    rows = (
        [str(size), *(ratio(of(cells, hidden=size, operator=operator), peers) for operator in PEER_OPERATORS)]
        for size in SPEED_COLUMNS
    )
    return text(["columns", *(NAMES[operator] for operator in PEER_OPERATORS)], rows)


def peers() -> str:
    """Return the speed over the best copy of every provider of the run, where torch.compile was measured."""
    cells = of(measured("peers", ("bf16",)), kind="shape")
    names = [name for name in PLOT_COLORS if any(one.speed(name) for one in cells)]
    rows = []
    for operator in PEER_OPERATORS:
        for columns in COMPILED_HIDDEN:
            (cell,) = of(cells, operator=operator, hidden=columns)
            shares = (cell.ratio(name) for name in names)
            rows.append([NAMES[operator], str(columns), *("-" if one is None else f"{one:.2f}" for one in shares)])
    return text(["operator", "columns", *(PLOT_LABELS.get(name, name) for name in names)], rows)


def behind() -> str:
    """Return the cases in which a peer is faster by more than runs differ, the slowest of ours first."""
    found = {}  # by case and peer, of the last run that has both
    for one in (*measured("bandwidth"), *measured("models"), *measured("peers", ("bf16",))):
        peer, mine = one.best_peer, one.times(OURS)
        theirs = one.times(peer) if peer else None
        if mine and theirs and mine["median"] > BEHIND * theirs["median"]:
            share = theirs["median"] / mine["median"]
            found[str(one.case), peer] = (share, one.case, mine["median"], theirs["median"], peer)
    rows = []
    for share, case, mine_us, their_us, peer in sorted(found.values(), key=lambda one: one[0]):
        where = f"{case.shape}{', in a graph' if case.kind == 'small' else ''}"
        name, type_name = NAMES[case.operator], dict(TYPES)[case.dtype]
        rows.append([name, type_name, where, f"{mine_us:.1f}", f"{their_us:.1f}", f"{share:.2f}", str(peer)])
    return text(["operator", "type", "rows x columns", "µs", "peer's µs", "speed over the peer", "peer"], rows)


def few_rows() -> str:
    """Return µs of the device for each call inside a captured graph."""
    cells = of(measured("bandwidth"), kind="small")
    names = [name for name in PLOT_COLORS if any(one.times(name) for one in cells)]
    rows = []
    for one in cells:
        times = [one.times(name) for name in names]
        shown = ["-" if time is None else f"{time['median']:.1f}" for time in times]
        rows.append([NAMES[one.case.operator], str(one.case.rows), *shown])
    return text(["operator", "rows", *(PLOT_LABELS.get(name, name) for name in names)], rows)


def targets() -> str:
    """Return how many cells of each run have a target, and how many are below it."""
    rows = []
    for run in ("bandwidth", "models"):
        aimed = [one for one in measured(run) if one.case.target is not None]
        below = [one for one in aimed if (one.ratio(OURS) or 0.0) < (one.case.target or 0.0)]
        odd = sum(one.case.hidden % 2 for one in below)
        rows.append([f"`h200-{run}.txt`", *map(str, (len(aimed), len(below), odd))])
    return text(["run", "cells with a target", "below it", "of these, odd numbers of columns"], rows)


def matrices() -> str:
    """Return softmax's table of masked and causal matrices of as many queries as keys."""
    columns = (("softmax", "masked", ""), ("softmax", "causal", ""), ("softmax_backward", "causal", " backward"))
    found = [one for operator, kind, _ in columns for one in of(measured("bandwidth"), operator=operator, kind=kind)]
    named = [(f"{kind}{words}", {"operator": operator, "kind": kind}) for operator, kind, words in columns]
    return grid("keys", found, named)


def other_matrices() -> str:
    """Return softmax's table of what else matrices may have, by queries and keys."""
    kinds = ("window", "sink", "added mask", "own mask", "aligned")
    found = [one for kind in kinds for one in of(measured("bandwidth"), kind=kind)]
    return grid("queries x keys", found, _BOTH_WAYS, lambda case: f"{case.kind}, {case.rows}x{case.hidden}")


def heads() -> str:
    """Return the table of norms of heads inside a packed qkv, by their columns."""
    found = of(measured("bandwidth"), kind="packed")
    columns = [(NAMES[operator], {"operator": operator}) for operator in ("rms_norm", "rms_norm_backward")]
    weight = (", a weight for all", ", a weight for each head")
    return grid("heads", found, columns, lambda case: f"{case.part}, {case.hidden}{weight[case.per_head]}")


def types() -> str:
    """Return the table of outputs of other types: GB/s, and the speed over torch's expressions."""

    def cell(found: Sequence[Measured]) -> str:
        moved, over = (found[0].speed(OURS), speedup(found[0], TORCH)) if found else (None, None)
        return f"{moved:.0f} ({over:.1f})" if moved and over else ""

    found = [one for one in measured("types") if one.case.form in FORMS]
    columns = [(NAMES[operator], {"operator": operator}) for operator in NORMS[:2]]
    return grid("columns, y", found, columns, lambda case: f"{case.hidden} {case.form}", cell)


def dresidual() -> str:
    """Return the table of backward with a gradient that is added to dx."""
    found = [one for one in measured("types") if one.case.form == DRESIDUAL]
    return grid("columns", found, [(NAMES[operator], {"operator": operator}) for operator in NORMS[2:]])


def general() -> str:
    """Return what the general kernels cost: lowest, median and highest of all shapes."""
    cells = of(measured("bandwidth"), kind="shape")

    def spread(values: list[float], digits: int) -> str:
        return ", ".join(f"{one:.{digits}f}" for one in (min(values), statistics.median(values), max(values)))

    rows = []
    for operator, name in NAMES.items():
        row = [name]
        for peer, digits in ((OURS, 2), (TORCH, 1)):
            for dtype, _ in TYPES:
                found = of(cells, operator=operator, dtype=dtype)
                both = [(one.speed(STATIC), one.speed(peer)) for one in found]
                row.append(spread([static / other for static, other in both if static and other], digits))
        rows.append(row)
    return text(["", "bf16", "fp32", "over torch's, bf16", "fp32"], rows)


_OF_NORMS = {operator: NAMES[operator] for operator in NORMS}
_OF_SOFTMAX = {"softmax": "forward", "softmax_backward": "backward"}
_BOTH_WAYS = [(name, {"operator": operator}) for operator, name in _OF_SOFTMAX.items()]
_OF_SUMS = {name: NAMES[name] for name in ("add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add")}
_OF_LOGARITHMS = {"log_softmax": "forward", "log_softmax_backward": "backward"}

TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "norms": lambda: by_columns("bandwidth", _OF_NORMS, "hidden", "shape", "ragged"),
    "sums": lambda: by_columns("bandwidth", _OF_SUMS, "hidden", "shape"),
    "heads": heads,
    "softmax": lambda: by_columns("bandwidth", _OF_SOFTMAX, "keys", "shape", "ragged"),
    "log_softmax": lambda: by_columns("bandwidth", _OF_LOGARITHMS, "keys", "shape"),
    "matrices": matrices,
    "other matrices": other_matrices,
    "norms of models": lambda: by_columns("models", _OF_NORMS, "hidden", "shape", "ragged"),
    "softmax of other lengths": lambda: by_columns("models", _OF_SOFTMAX, "keys", "shape", "ragged"),
    "types": types,
    "dresidual": dresidual,
    "general kernels": general,
    "peers": peers,
    "behind": behind,
    "few rows": few_rows,
    "targets": targets,
    **other_tables.TABLES,
}


def written(page: str) -> str:
    """Return a page with the tables that it names."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}"

    return re.sub(r"(<!-- table ([\w ]+) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


def plot(path: str) -> None:
    """Draw each operator's speed over the best copy, and its peers', at one size, in a size that a README shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    cells = of(measured("peers", ("bf16",)), kind="shape", hidden=PLOT_COLUMNS)
    names = [name for name in PLOT_COLORS if any(one.speed(name) for one in cells)]
    figure, axis = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    width = 0.8 / len(names)
    for place, operator in enumerate(PEER_OPERATORS):
        (cell,) = of(cells, operator=operator)
        shown = [name for name in names if cell.ratio(name)]
        for number, name in enumerate(shown):
            at = place + (number - (len(shown) - 1) / 2) * width
            axis.bar(at, cell.ratio(name) or 0.0, width * 0.9, color=PLOT_COLORS[name])
    handles = [Patch(color=PLOT_COLORS[name], label=PLOT_LABELS.get(name, name)) for name in names]
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xticks(
        range(len(PEER_OPERATORS)), [NAMES[operator].replace(" ", "\n") for operator in PEER_OPERATORS], fontsize=10
    )
    axis.set_ylabel("bandwidth / best copy")
    axis.set_title(f"bfloat16, {PLOT_COLUMNS} columns, one NVIDIA H200", fontsize=11)
    # More than four names in one line would be wider than the plot.
    figure.legend(
        handles=handles, ncols=4 if len(names) < 5 else 3, loc="outside lower center", frameon=False, fontsize=10
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail where a table is another")
    parser.add_argument("--plot", metavar="FILE", help="draw the README's plot; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.plot)
    others = []
    for name in PAGES:
        file = ROOT / name
        page = file.read_text(encoding="utf-8")
        found = written(page)
        if found != page:
            others.append(name)
            if not arguments.check:
                file.write_text(found, encoding="utf-8")
    if others:
        print(f"{'differ from' if arguments.check else 'written from'} benchmarks/results: {', '.join(others)}")
        sys.exit(arguments.check)


if __name__ == "__main__":
    main()
