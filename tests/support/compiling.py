"""Kernels that are compiled together, by as many processes as there are cores, before the tests ask for them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from transformer_rtc import manager
from transformer_rtc.spec import DeviceLimits, KernelSpec


def _compile(spec: KernelSpec, architecture: int) -> None:
    manager.image(spec, architecture)


def compile_together(cases: Iterable, limits: DeviceLimits) -> int:
    """Put the specialised kernels of cases into the disk cache; return how many they are."""
    specs = list(dict.fromkeys(spec for case in cases for spec, _ in case.stages(limits)))
    if manager.cache.folder is None or not specs:
        return 0
    workers = min(len(os.sched_getaffinity(0)), 32, len(specs))
    # Not forked: a process that has a CUDA context, or threads, cannot be.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, specs, [limits.architecture] * len(specs), chunksize=2))
    return len(specs)
