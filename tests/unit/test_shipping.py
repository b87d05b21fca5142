# SPDX-License-Identifier: Apache-2.0
"""Which configurations benchmarks/tune.py ships: those that are faster than the rule's wherever they were timed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from transformer_rtc import warming
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.spec import ARCHITECTURES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def tune():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("shipping", BENCHMARKS / "tune.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


FASTER = NormConfig(128, 1, 8, 2, 2, clusters=True)


def request_of(dtype: str):
    (request,) = warming.requests_of(["rms_norm"], [dtype], [4096], manifest=None, per_head=False)
    return request


def times(tune, run: str, speed: float, spread: float = 0.0, dtype: str = "bfloat16", few: float = 1.0):
    """Return a run in which a configuration has such a speed, beside the rule's, and takes so much of 16 rows' time."""
    empty = tune.Times(run, request_of(dtype), {}, {})
    rule = empty.by_rule(ARCHITECTURES[90])
    assert rule != FASTER
    here = [100.0, 101.0, 102.0]
    there = [time / (speed + shift) for time, shift in zip(here, (-spread, 0, spread), strict=True)]
    return empty._replace(of={rule: here, FASTER: there}, few={rule: 5.0, FASTER: 5.0 * few})


def test_what_is_faster_in_two_runs_is_shipped_with_its_least_gains(tune):
    row = tune.row_of([times(tune, "a", 1.05), times(tune, "b", 1.04), times(tune, "b", 1.06, dtype="float16")], 90)
    assert row.config == FASTER and row.gains == {"a": 0.05, "b": 0.04}
    assert tune.row_of([times(tune, "a", 1.05), times(tune, "b", 1.04)], 90).times.request == request_of("bfloat16")


@pytest.mark.parametrize(
    "runs",
    [
        [("a", 1.05)],
        [("a", 1.05), ("b", 1.02)],
        [("a", 1.05), ("b", 1.05, 0.03)],
        [("a", 1.05), ("b", 1.05), ("b", 0.98, 0.0, "float16")],
        [("a", 1.05), ("b", 1.05, 0.0, "bfloat16", 1.2)],
    ],
    ids=["one run", "too little", "within the spread", "another request of the case is slower", "few rows are slower"],
)
def test_else_the_rules_stays(tune, runs):
    assert tune.row_of([times(tune, *run) for run in runs], 90) is None


def test_the_file_is_what_the_runs_beside_it_give(tune, tmp_path, monkeypatch, capsys):
    out = tmp_path / "tuning.json"
    runs = sorted(map(str, (BENCHMARKS / "results").glob("h200-configurations-*.json.gz")))
    monkeypatch.setattr(sys, "argv", ["tune.py", *runs, "--out", str(out)])
    tune.main()
    assert out.read_text() == Path(tune.FILE).read_text()
    assert f"{out.read_text().count('gains')} of " in capsys.readouterr().out
