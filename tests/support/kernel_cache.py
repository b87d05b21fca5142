# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels that all tests, all workers of a run and later runs share."""

from __future__ import annotations

import inspect
import json

from transformer_rtc import KernelManager, compiler, sources
from transformer_rtc.cache import DiskCache, digest
from transformer_rtc.compiler import Compiled

# Set by tests/conftest.py: a folder of pytest's own cache. None: no disk cache.
folder: str | None = None


_MOST_BYTES = 2 << 30


def disk_cache() -> DiskCache:
    """Return the shared folder."""
    return DiskCache(folder, max_bytes=_MOST_BYTES)


def manager() -> KernelManager:
    """Return a manager on the shared folder."""
    return KernelManager(disk_cache())


def compile_with_report(symbol: str, program: str, options: tuple[str, ...], architecture: int) -> Compiled:
    """Compile by NVRTC with ptxas's resource report, unless a run before has compiled the same."""
    cache, headers = disk_cache(), sources.included(program)
    options = (*options, compiler.REPORT)
    parts = {
        "program": program, "headers": headers, "options": [*compiler.OPTIONS, *options], "architecture": architecture,
        "compiler": [compiler.compiler_identity(), inspect.getsource(compiler)],
    }  # fmt: skip
    key, stem = digest(parts), f"report.{symbol}.sm_{architecture}"
    found = cache.get(stem, key)
    if found is not None:
        about, _, image = found.partition(b"\n")
        return Compiled(image, *json.loads(about))
    compiled = compiler.compile_program(symbol, program, headers, options, architecture)
    about = json.dumps([compiled.kind, compiled.log, compiled.compiler]).encode()
    cache.put(stem, key, about + b"\n" + compiled.image, {"symbol": symbol})
    return compiled
