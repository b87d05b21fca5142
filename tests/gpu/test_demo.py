# SPDX-License-Identifier: Apache-2.0
"""The demonstration on a GPU."""

from __future__ import annotations

import json
import os

from processes import run


def test_every_result_is_right_and_timed_and_nothing_stays(tmp_path):
    folder = tmp_path / "cache"
    done = run("from transformer_rtc import demo; raise SystemExit(demo.run(True))", CACHE_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["right"] and len(found["speeds"]) == len(found["results"]) and not os.path.exists(folder)
    assert all(row["compile_milliseconds"] > 0 for row in found["results"])
    assert all(row["microseconds"] > 0 for row in found["speeds"])
    assert all((row["torch_microseconds"] is None) == bool(found["without_torch"]) for row in found["speeds"])
