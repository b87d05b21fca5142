# SPDX-License-Identifier: Apache-2.0
"""The tables of the pages are those that the benchmarks' program writes from the runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tqdm")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import tables

    yield tables
    for name in set(sys.modules) - before:  # the modules of benchmarks have short names that others may have
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == ROOT / "benchmarks":
            del sys.modules[name]


def test_every_table_is_written_from_the_runs(tables):
    named = []
    for name in tables.PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        assert tables.written(page) == page, f"{name}: run benchmarks/tables.py"
        named += [line[11:-4] for line in page.splitlines() if line.startswith("<!-- table ")]
    assert sorted(named) == sorted(tables.TABLES)
