# SPDX-License-Identifier: Apache-2.0
"""The tables of the pages are those that the benchmarks' program writes from the runs."""

from __future__ import annotations

import pytest

pytest.importorskip("tqdm")


def test_every_table_is_written_from_the_runs(benchmark_modules):
    tables = benchmark_modules("tables")
    named = []
    for name in tables.PAGES:
        page = (tables.ROOT / name).read_text(encoding="utf-8")
        assert tables.written(page) == page, f"{name}: run benchmarks/tables.py"
        named += [line[11:-4] for line in page.splitlines() if line.startswith("<!-- table ")]
    assert sorted(named) == sorted(tables.TABLES)
