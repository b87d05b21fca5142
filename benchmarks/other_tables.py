# SPDX-License-Identifier: Apache-2.0
"""The tables of tables.py that come from other programs' runs than bandwidth.py's on an H200."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import activations
from bandwidth_cases import PLAIN

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = Sequence[str]

HOST = {"transformer_rtc": "transformer_rtc", "torch": "torch", "floor": "bare calls"}
NAMES = {
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "add_rms_norm": "add + RMSNorm",
    "add_layer_norm": "add + LayerNorm",
    "rms_norm_add": "RMSNorm + add",
    "layer_norm_add": "LayerNorm + add",
    "rms_norm_backward": "RMSNorm backward",
    "layer_norm_backward": "LayerNorm backward",
    "softmax": "softmax",
    "softmax_backward": "softmax backward",
}
H100_COLUMNS = {
    **{(operator, "bfloat16"): NAMES[operator] for operator in PLAIN},
    ("rms_norm", "float32"): f"{NAMES['rms_norm']} fp32",
}


def text(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["--:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "--:" else f"|{'|'.join(line)}|" for line in lines)


def loaded(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def printed(name: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a report that a run of bandwidth.py printed."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("operator "))
    # A column ends where its line of dashes ends; columns but the first are aligned to the right.
    ends = [found.end() for found in re.finditer("-+", lines[first + 1])]
    spans = list(zip((0, *ends[:-1]), ends, strict=True))
    rows = []
    for line in (lines[first], *lines[first + 2 :]):
        if not line:
            break
        rows.append([line[start:end].strip() for start, end in spans])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def h100() -> str:
    """Return the H100's run: the speed over the best copy, and over torch's."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in printed("h100-bandwidth.txt"):
        sizes = re.fullmatch(r"\d+x(\d+)", row["shape"])
        if sizes and row["GB/s"] != "-":
            cell = f"{float(row['/ ceiling']):.2f} ({float(row['GB/s']) / float(row['torch']):.1f})"
            cells.setdefault(sizes[1], {})[row["operator"], row["dtype"]] = cell
    rows = ([size, *(found.get(column, "") for column in H100_COLUMNS)] for size, found in cells.items())
    return text(["columns", *H100_COLUMNS.values()], (row for row in rows if any(row[1:])))


def of_activations() -> str:
    """Return the mean over large shapes of the speed over the best copy, and over torch's."""
    means: dict[tuple[str, str, bool], str] = {}
    found: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for one in loaded("h200-activations.json")["cases"]:
        ours, copied, theirs = (activations.best(one, name) for name in ("transformer_rtc", "copy by", "torch"))
        if one["rows"] > 1 and ours and copied and theirs:
            key = (one["function"], one["dtype"], one["backward"])
            found.setdefault(key, []).append((copied / ours, theirs / ours))
    for key, ratios in found.items():
        share, over = (statistics.mean(values) for values in zip(*ratios, strict=True))
        means[key] = f"{share:.2f} ({over:.1f})"
    columns = [(dtype, backward) for dtype in ("bfloat16", "float32") for backward in (False, True)]
    names = dict.fromkeys(name for name, *_ in means)
    rows = ([name, *(means.get((name, *column), "-") for column in columns)] for name in names)
    return text(["function", "bf16", "backward", "fp32", "backward"], rows)


def median(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f}"


def host() -> str:
    """Return µs of the host for each call, beside torch's and beside calls that only launch empty kernels."""
    run = loaded("h200-host.json")
    rows = (
        [f"RMSNorm{words}", *(median(run[way]["host_us"][name]) for name in HOST)]
        for way, words in (("forward", ""), ("backward", " backward"))
    )
    return text(["call", *HOST.values()], rows)


def host_training() -> str:
    """Return µs of the host for each call, without a gradient and with one."""
    found = loaded("h200-host-training.json")["host_us"]
    rows = (
        [f"{NAMES[operator]}, {way}", *(median(times[name]) for name in ("transformer_rtc", "torch", "liger"))]
        for operator, ways in found.items()
        for way, times in ways.items()
    )
    return text(["call", "transformer_rtc", "torch", "Liger"], rows)


def training() -> str:
    """Return ms of a step by the model and its norms."""
    files = ("llama", "other-models", "gpt2")
    models = [one for file in files for one in loaded(f"h200-train/{file}.json")["models"]]
    ways = list(dict.fromkeys(way for one in models for way in one["ways"]))
    rows = ([one["model"], *(median(one["ways"][way]["ms"]) if way in one["ways"] else "-" for way in ways)]
            for one in models)  # fmt: skip
    return text(["model", *ways], rows)


def decode() -> str:
    """Return µs of decoding a token for each sequence of a batch."""
    batches = loaded("h200-decode.json")["batches"]
    ways = list(batches[0]["us"])
    rows = ([str(one["batch"]), *(median(one["us"][way], 0) for way in ways)] for one in batches)
    return text(["batch", *ways], rows)


def compiles() -> str:
    """Return the median and the highest CPU time of a compile, as multiples of an empty kernel's."""
    (run,) = loaded("cpu-compile.json")["compiles"]
    classes = {NAMES[name]: {name} for name in PLAIN}
    classes["all of the run"] = {kernel["class"] for kernel in run["kernels"]}
    rows = []
    for name, members in classes.items():
        row = [name]
        for kind in ("whole", "unaligned"):
            of_kind = [one for one in run["kernels"] if one["class"] in members and kind in one["rows"]]
            found = [statistics.median(one["multiples"]) for one in of_kind]
            row += [str(len(found)), median(found), f"{max(found):.1f}"]
        rows.append(row)
    of = [f"{kind}: {what}" for kind in ("whole rows", "unaligned") for what in ("kernels", "median", "highest")]
    return text(["class", *of], rows)


TABLES: dict[str, Callable[[], str]] = {
    "h100": h100,
    "activations": of_activations,
    "host": host,
    "host training": host_training,
    "training": training,
    "decode": decode,
    "compiles": compiles,
}
