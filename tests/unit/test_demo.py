# SPDX-License-Identifier: Apache-2.0
"""The demonstration: what it runs, how it checks that, and what it leaves."""

from __future__ import annotations

import json
import os

import kernel_cache
import numpy as np
import pytest

from transformer_rtc import cli, compiler, demo, demo_cases, demo_speed
from transformer_rtc.errors import CompilerNotFoundError
from transformer_rtc.kernel_manager import manager
from transformer_rtc.spec import FLOAT16

FAMILIES = {"norms", "softmax", "activations", "add"}


@pytest.fixture
def small(monkeypatch, without_driver):
    """Have the demonstration run few columns, with the kernels of the tests' folder."""
    cases = tuple(case._replace(columns=128) for case in demo_cases.CASES)
    monkeypatch.setattr(demo, "CASES", cases)
    monkeypatch.setattr(demo, "_cache", kernel_cache.disk_cache)


def test_every_family_is_shown_forward_and_backward():
    shown = {(case.family, case.is_backward) for case in demo_cases.CASES}
    assert shown == {(family, way) for family in FAMILIES for way in (False, True)} - {("add", True)}


def test_without_a_gpu_it_runs_in_the_simulator_and_says_what_is_right_and_what_to_do_next(small, capsys):
    before = manager.cache
    assert cli.main(["demo"]) == 0 and manager.cache is before
    told = capsys.readouterr().out
    assert "No GPU that can be used: no NVIDIA driver" in told and told.count(" right\n") == len(demo_cases.CASES)
    assert "all 11 operators are right. No kernel was run on a GPU, and none timed" in told
    assert told.index("Verdict") < told.index("What to do next:") < told.index(" info  #")
    assert "--architecture sm_90" in told and "transformer-rtc tune" not in told


def test_its_document_has_the_same(small, capsys):
    assert cli.main(["demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] is None and "no NVIDIA driver" in found["reason"] and found["right"] is True
    assert [row["operator"] for row in found["results"]] == [case.name for case in demo_cases.CASES]
    assert all(0 < row["error_of_allowed"] <= 1 and row["compile_milliseconds"] > 0 for row in found["results"])
    assert found["speeds"] == [] and any("warmup" in line for line in found["next"])


def test_a_wrong_result_is_told_and_exits_with_1(small, capsys, monkeypatch):
    first, second, *_ = demo.CASES
    wrong = first._replace(exact=lambda *given: (first.exact(*given)[0] * 1.02,))
    nothing = second._replace(exact=lambda *given: tuple(np.full_like(one, np.nan) for one in second.exact(*given)))
    monkeypatch.setattr(demo, "CASES", (wrong, nothing))
    assert cli.main(["demo"]) == 1
    told = capsys.readouterr().out
    assert told.count(" WRONG\n") == 2 and "no number" in told
    assert "Verdict: WRONG: rms_norm, rms_norm_backward; please report it" in told


def test_without_nvrtc_and_ml_dtypes_it_shows_what_there_is(small, capsys, monkeypatch):
    def missing():
        raise CompilerNotFoundError("there is no NVRTC")

    monkeypatch.setattr(compiler, "_open", missing)
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    monkeypatch.setattr(demo, "CASES", demo.CASES[:1])
    assert cli.main(["demo"]) == 0
    told = capsys.readouterr().out
    assert "no NVRTC" in told and "pip install ml_dtypes): float16 is taken" in told and "Simulator: float16" in told


def test_it_leaves_nothing_in_the_cache_and_checks_what_a_gpu_gives(fake_driver, tmp_path):
    # Kernels do nothing on this driver, and there is no torch to compare with.
    folder = tmp_path / "cache"
    *told, code = fake_driver(
        """
        sys.modules["torch"] = None
        from transformer_rtc import demo, demo_cases
        demo.CASES = [case for case in demo_cases.CASES if case.name in ("rms_norm", "softmax_backward", "add")]
        print(demo.run(True))
        """,
        CACHE_DIR=str(folder),
    )
    found = json.loads("\n".join(told))
    assert code == "1" and found["right"] is False and found["device"] == "fake, sm_90"
    assert [row["operator"] for row in found["speeds"]] == ["rms_norm", "softmax_backward", "add"]
    assert all(row["microseconds"] > 0 and row["torch_microseconds"] is None for row in found["speeds"])
    assert "torch cannot be imported" in found["without_torch"] and any("tune" in line for line in found["next"])
    assert not os.path.exists(folder)


def test_the_times_are_a_table_with_units():
    rows = [{"operator": "add", **demo_speed.Speed(4096, 76.4, 2879.2, theirs)._asdict()} for theirs in (None, 100.0)]
    header, without, beside = demo._speed_lines(rows)
    assert header.split("  ")[0] == "operator" and "memory traffic" in header and "speed over torch" in header
    assert without.split() == ["add", "4096", "76", "µs", "2879", "GB/s", "-", "-"]
    assert beside.split()[-4:] == ["100", "µs", "1.31", "times"]


def test_float16_is_held_to_its_own_rounding():
    exact = np.array([1.0, 1000.0])
    assert demo._off(exact.astype(np.float16), exact, demo._ROUNDING[FLOAT16] * exact) == 0
    assert demo._off(exact * (1 + 2.0**-10), exact, demo._ROUNDING[FLOAT16] * exact) == pytest.approx(2)
