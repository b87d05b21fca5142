# SPDX-License-Identifier: Apache-2.0
"""Tiers, samples, the folder of compiled kernels, and what tests of several folders share.

CONTRIBUTING.md says what each tier is for and how long it takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import random
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import kernel_cache
import numpy as np
import pytest

from transformer_rtc import _native
from transformer_rtc.errors import DeviceNotFoundError, DriverNotFoundError, TransformerRtcError

HERE = Path(__file__).parent
SAMPLE_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of random data; drawn afresh by default")
    parser.addoption(
        "--sample-seed", type=int, help="of the share of thorough tests that runs; the hash of git's tree by default"
    )
    parser.addoption("--everything", action="store_true", help="run all thorough tests, not a sample of them")


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--sample-seed")
    config.stash[SAMPLE_SEED] = _tree_hash(config.rootpath) if given is None else given
    if hasattr(config, "cache"):
        kernel_cache.folder = str(config.cache.mkdir("kernels"))


def _tree_hash(root: Path) -> int:
    """Return a number of the commit's tree: 0 where there is no git."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    with contextlib.suppress(OSError, ValueError):
        return int(subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout[:8], 16)
    return 0


@functools.cache
def missing_gpu() -> str:
    """Return why there is no GPU; an empty text where there is one."""
    try:
        _native.current_device()
    except DeviceNotFoundError as error:
        # Only this: a driver that is too old, or that fails, is a failure.
        return str(error)
    return ""


def missing_torch() -> str:
    """Return why there is no torch; an empty text where there is."""
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


# Folders whose tests need what a machine may not have.
_NEEDS = {"gpu": ("a GPU", missing_gpu), "with_torch": ("torch", missing_torch)}


def _missing(path: Path) -> bool:
    """Whether a path is in a folder whose need is not met."""
    folder = path.relative_to(HERE).parts[:1] if path.is_relative_to(HERE) else ()
    return any(_NEEDS[name][1]() != "" for name in folder if name in _NEEDS)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if _missing(collection_path) else None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return how many workers `-n auto` has: on a GPU, each has a context and memory of its own."""
    return None if missing_gpu() else min(os.cpu_count() or 1, 12)


# Of the shares that tests ask for, what the 25 minutes of CI have time for; a test that asks for none runs whole.
SAMPLED = 0.6


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and thorough tests that the sample does not have."""
    whole, seed = config.getoption("--everything"), config.stash[SAMPLE_SEED]
    named = [os.path.basename(file) + test for file, test in (arg.split("::", 1) for arg in config.args if "::" in arg)]

    def is_left_out(item: pytest.Item) -> bool:
        shares = [SAMPLED * mark.kwargs.get("share", 1 / SAMPLED) for mark in item.iter_markers("thorough")]
        file, _, test = item.nodeid.partition("::")
        is_named = (os.path.basename(file) + test).startswith(tuple(named))
        drawn = whole or is_named or zlib.crc32(f"{seed} {item.nodeid}".encode()) / 2**32 < min(shares, default=1)
        return not drawn or _missing(item.path)  # a path that is named is collected whatever it needs

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for folder, (what, missing) in _NEEDS.items():
        with contextlib.suppress(TransformerRtcError):  # a driver that fails: the tests say so
            if missing():
                terminalreporter.write_line(f"tests/{folder} did not run, as it needs {what}: {missing()}")
    if not config.getoption("markexpr") and not config.getoption("--everything"):
        terminalreporter.write_line(f"a sample of the thorough tests ran: --sample-seed {config.stash[SAMPLE_SEED]}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Let a test that is marked `alone` run while no other worker runs one or sets one up."""
    if "PYTEST_XDIST_WORKER" not in os.environ or kernel_cache.folder is None:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    folder = Path(kernel_cache.folder).parent
    with open(folder / "turn.lock", "w") as turn, open(folder / "running.lock", "w") as running:
        # Whoever waits for all others has the turn meanwhile, so that no worker begins another test.
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    print(f"random data of --seed {seed}")  # pytest shows it where the test fails
    return np.random.default_rng(seed)


@pytest.fixture
def without_driver() -> None:
    """Skip where there is a GPU: what the test expects is what a machine without one says."""
    try:
        _native.driver_version()
    except DriverNotFoundError:
        return
    pytest.skip("this machine has a driver")
