# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: records which texts each test runs, or runs the tests on a text that is broken.

mutate.py starts pytest with ``-p mutated`` and says by environment variables which of the two it wants.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from typing import Any

import kernel_cache
import pytest

from transformer_rtc import KernelManager, sources
from transformer_rtc.cache import DiskCache
from transformer_rtc.simulator.kernel import SimulatedFunction

# A mutant may loop forever: no test takes so many seconds on the texts as they are, with its compiles.
TIMEOUT = 120


def pytest_configure(config: pytest.Config) -> None:
    if "MUTATION_RECORD" in os.environ:
        config.pluginmanager.register(Recorder(os.environ["MUTATION_RECORD"]))
    if "MUTATION_MUTANT" in os.environ:
        with open(os.environ["MUTATION_MUTANT"], encoding="utf-8") as file:
            config.pluginmanager.register(Judge(**json.load(file)))


def lines_of(image: bytes) -> list[tuple[str, int]]:
    """Return the (file, line) that a simulated module has code of."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(image)
        file.flush()
        command = ["objdump", "--dwarf=decodedline", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:\S*/)?(\S+\.cuh?)\s+(\d+)\s+0x", text, re.MULTILINE)
    return sorted({(name, int(line)) for name, line in found})


class Recorder:
    """Writes for each test its seconds, the texts that it compiles or runs, and the modules that it launches."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.test = ""
        self.seconds: dict[str, float] = {}
        self.files: dict[str, set[str]] = defaultdict(set)
        self.modules: dict[str, set[str]] = defaultdict(set)
        self.images: dict[str, bytes] = {}
        self.texts_of: dict[str, set[str]] = {}
        self.patch = pytest.MonkeyPatch()
        included, image, launch = sources.included, KernelManager._image, SimulatedFunction.launch

        def record_included(program: str) -> dict[str, str]:
            found = included(program)
            self.files[self.test].update(found)
            return found

        def record_image(manager: KernelManager, spec: Any, *arguments: Any) -> Any:
            found = image(manager, spec, *arguments)
            self.texts_of[hashlib.sha256(found.data).hexdigest()] = set(included(spec.program))
            return found

        def record_launch(function: SimulatedFunction, *arguments: Any, **options: Any) -> None:
            name = hashlib.sha256(function._image).hexdigest()
            self.images[name] = function._image
            self.modules[self.test].add(name)
            launch(function, *arguments, **options)

        self.patch.setattr(sources, "included", record_included)
        self.patch.setattr(KernelManager, "_image", record_image)
        self.patch.setattr(SimulatedFunction, "launch", record_launch)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.test, start = item.nodeid, time.perf_counter()
        found = yield
        self.seconds[item.nodeid] = time.perf_counter() - start
        return found

    def pytest_sessionfinish(self) -> None:
        if not self.seconds:
            return
        tests = {
            test: {
                "seconds": seconds,
                "files": sorted(set().union(self.files[test], *(self.texts_of.get(m, ()) for m in self.modules[test]))),
                "modules": sorted(self.modules[test]),
            }
            for test, seconds in self.seconds.items()
        }
        lines = {name: lines_of(image) for name, image in self.images.items()}
        with open(os.path.join(self.folder, f"{os.getpid()}.json"), "w", encoding="utf-8") as file:
            json.dump({"tests": tests, "lines": lines}, file)


class Judge:
    """Runs tests in the order of their names on a text that is broken, until one fails; writes which one and how.

    Parameters
    ----------
    file, text : str
        The text's name, and what it is now.
    tests : list of str
        The tests' ids; others do not run.
    result : str
        The file to write.
    """

    def __init__(self, file: str, text: str, tests: list[str], result: str) -> None:
        sources.texts()[file] = text
        self.order = {test: number for number, test in enumerate(tests)}
        self.result = result
        self.folder = tempfile.TemporaryDirectory()
        self.ran = 0

    def pytest_sessionstart(self) -> None:
        # What the mutant compiles is of no use to others.
        shared, own = kernel_cache.folder, self.folder.name
        kernel_cache.disk_cache = lambda: DiskCache(own, read_only_folder=shared)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.ran += 1
        signal.signal(signal.SIGALRM, lambda *_: self._end("checks", item.nodeid, "timeout"))
        signal.alarm(TIMEOUT)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is None or call.excinfo.errisinstance((pytest.skip.Exception, pytest.xfail.Exception)):
            return
        name = call.excinfo.typename
        self._write("compile" if name == "CompileError" else "checks", item.nodeid, f"{name}: {call.excinfo.value}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # Another status is a failure of pytest's own, such as a test file that cannot be imported.
        if not os.path.exists(self.result) and exitstatus == pytest.ExitCode.OK:
            self._write("survived", "", f"{self.ran} tests ran")
        self.folder.cleanup()

    def _write(self, outcome: str, test: str, detail: str) -> None:
        if not os.path.exists(self.result):
            found = {"outcome": outcome, "test": test, "detail": " ".join(detail.split())[:200]}
            with open(self.result, "w", encoding="utf-8") as file:
                json.dump(found, file)

    def _end(self, *found: str) -> None:
        self._write(*found)
        self.folder.cleanup()
        os._exit(1)
