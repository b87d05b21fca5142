# SPDX-License-Identifier: Apache-2.0
"""What tests of several files here share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bad_values
import pytest
from fake_driver import fake_driver  # noqa: F401
from native_calls import check  # noqa: F401

from transformer_rtc import cli, operator, using

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


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run operators where a plan, which a launch needs, is a failure."""

    def plan(self: object, *_: object) -> Any:
        pytest.fail("it was accepted")

    monkeypatch.setattr(operator.Operator, "_native_plan", plan)
    monkeypatch.setattr(operator, "manager", None)
    with using(bad_values.DEVICE):
        yield


@pytest.fixture
def run(capsys) -> Callable[..., tuple[int, str, str]]:
    """Return what runs a command for its exit code, what it prints, and its errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run
