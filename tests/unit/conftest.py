# SPDX-License-Identifier: Apache-2.0
"""What tests of several files here share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from fake_driver import fake_driver  # noqa: F401
from native_calls import check  # noqa: F401

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_modules(monkeypatch):
    """Return what imports a module of benchmarks by its name; after the test, all of benchmarks are forgotten.

    Their names are short, and others may have them.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]
