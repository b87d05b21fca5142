# SPDX-License-Identifier: Apache-2.0
"""Scripts in Python processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kernel_cache

# `opened()` is what a process has opened of driver, compiler, bindings and frameworks.
OPENED = """
def opened():
    import re, sys
    maps = open("/proc/self/maps").read()
    found = {name for name in ("libnvrtc", "libcuda.so") if name in maps}
    return sorted(found | {name for name in sys.modules if re.match("(cuda[.]|torch|cupy|jax|ml_dtypes)", name)})
"""
# What scripts of calls begin with. told_by(call): what it gives, or what it was refused for. in_child(call): prints the
# same of a forked child, and how that ended; a child that hangs is killed.
CALLS = """
import os, signal, sys, threading, warnings
import numpy as np
import transformer_rtc as t
from transformer_rtc import _native
warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # beside threads, which is what is tested
host = np.ones((4, 64), np.float32)
right = lambda y: bool(abs(np.asarray(y) - 1).max() < 1e-5)
def told_by(call):
    try:
        return call()
    except t.TransformerRtcError as error:
        return f"{type(error).__name__} {error}"
def in_child(call):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            print(told_by(call), flush=True)
        finally:
            # As multiprocessing's children end, with the end of all objects before it.
            globals().clear()
            __import__("gc").collect()
            __import__("os")._exit(0)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status))
"""

SPAWN = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
t.rms_norm(host)
with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
    print([right(future.result()) for future in [pool.submit(t.rms_norm, host) for _ in range(4)]])
"""


def threads(count: int, keys: int) -> str:
    """Return a script of threads that need the same kernels; it prints how many compile at a time, on average."""
    return f"""
import time
spans, failures, start = [], [], threading.Barrier({count})
def told(event):
    if event.kind == "compile":
        spans.append((time.perf_counter() - event.milliseconds / 1e3, time.perf_counter()))
t.manager.on_event(told)
def work(i):
    try:
        start.wait(60)
        for j in range({keys}):
            assert right(t.rms_norm(np.full((2, 64 * (1 + (i + j) % {keys})), 3, np.float32)))
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range({count})]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures and t.manager.counts == {{"compile": {keys}, "load": {keys}}}, (failures, t.manager.counts)
print(sum(end - begin for begin, end in spans) / (max(end for _, end in spans) - min(begin for begin, _ in spans)))
"""


def environment(**settings: str) -> dict[str, str]:
    """Return this process's variables with these settings of ours alone: ``LOG`` is TRANSFORMER_RTC_LOG."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMER_RTC_")}
    return others | {f"TRANSFORMER_RTC_{name}": value for name, value in settings.items()}


def shared(otherwise: Path) -> dict[str, str]:
    """Return the settings for the folder of kernels that all tests share, which others keep small."""
    return {"CACHE_DIR": kernel_cache.folder or str(otherwise), "CACHE_SIZE": "0"}


def run(script: str, variables: dict[str, str] | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a script with settings of ours, and other variables."""
    return subprocess.run(
        [sys.executable, "-c", OPENED + script],
        env=environment(**settings) | (variables or {}),
        cwd=os.path.dirname(__file__),  # not a source tree: Python would import from it
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(script: str, variables: dict[str, str] | None = None, **settings: str) -> str:
    """Return what such a script prints; it must not fail."""
    done = run(script, variables, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
