# SPDX-License-Identifier: Apache-2.0
"""What a kernel costs that is on disk, from its spec to the loaded kernel, and its parts; beside few entries and many,
and in a companion wheel beside an empty cache.

A line of JSON for each place, in microseconds. The places take turns, so that what changes in the course of the run
changes all. The parts are medians of their own: what only `hit` has is `rest`.

- key: the program's text and the digests of all that the machine code depends on
- entry: it is read and checked; of a companion wheel, without the cache's miss before, which is part of `rest`
- load: the driver loads the machine code and looks the kernel up, which no library could do without
- queries: what else the driver is asked: the device's limits, the kernel's shared memory and parameters
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import transformer_rtc as t
from transformer_rtc import _native, archive
from transformer_rtc.cache import DiskCache
from transformer_rtc.companion import INDEX, PACK, Companion
from transformer_rtc.compiler import compiler_identity
from transformer_rtc.declaration import declaration_of
from transformer_rtc.device import Gpu
from transformer_rtc.request import Request
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, DeviceLimits, KernelSpec, Target

MANY = 1000


def spec_of(hidden: int, limits: DeviceLimits) -> KernelSpec:
    operator = declaration_of("rms_norm")
    given = {"x": BFLOAT16, "weight": BFLOAT16, "out": BFLOAT16}
    dtypes = {array.name: given.get(array.name) for array in operator.arrays}
    return operator.family.specialise(Request("rms_norm", dtypes, hidden, False, False), limits)[0][0]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work()
    return (time.perf_counter() - start) * 1e6, found


def hit(cache: DiskCache, spec: KernelSpec, architecture: int, on_gpu: bool) -> tuple[dict[str, float], list[Any]]:
    """Return the microseconds of a hit and of its parts, and the kernels that were loaded."""
    manager, companion, target, took = t.KernelManager(cache), cache.companion, Target(architecture), {}
    took["hit"], whole = timed(lambda: manager.get(spec, 0) if on_gpu else manager.image(spec, architecture))
    assert "compile" not in manager.counts
    took["key"], key = timed(lambda: manager.key(spec, target, compiler_identity()))
    if companion is None:
        took["entry"], image = timed(lambda: cache.get(f"{spec.symbol}.{target}", key))
    else:
        source = manager.key(spec, target, "")
        took["entry"], image = timed(lambda: companion.get(str(target), source))
    if not on_gpu:
        return took, []
    took["load"], function = timed(lambda: _native.Function(0, image, spec.symbol))

    def query() -> t.Kernel:
        t.device_limits(0)
        return t.Kernel(spec.symbol, spec.params, Gpu(0), function, function)

    took["queries"], again = timed(query)
    return took, [whole, again]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--architecture", type=int, help="without a GPU: up to the machine code, not loaded")
    parser.add_argument("--keep", action="store_true", help="unload nothing, as a process that uses many kernels")
    arguments = parser.parse_args()
    on_gpu = arguments.architecture is None
    limits = t.device_limits(0) if on_gpu else ARCHITECTURES[arguments.architecture]
    specs = [spec_of(hidden, limits) for hidden in (1024, 2048, 4096, 8192)]
    with tempfile.TemporaryDirectory() as folder:
        caches = [DiskCache(os.path.join(folder, name)) for name in ("few", "many")]
        for cache in caches:
            for spec in specs:
                t.KernelManager(cache).image(spec, limits.architecture)
        for number in range(MANY - len(specs)):
            caches[1].put(f"other_{number}", f"{number:064x}", os.urandom(20000), {"symbol": "other"})
        pack = os.path.join(folder, PACK.format(Target(limits.architecture)))
        archive.pack(caches[0], pack)
        with open(os.path.join(folder, INDEX.format(Target(limits.architecture))), "wb") as index:
            index.write(archive.index(pack))
        caches.append(DiskCache(os.path.join(folder, "empty")))
        caches[-1].companion = Companion(lambda: folder)
        # As in a process that has kernels already: the first one makes the driver set up more than itself.
        kept: list[Any] = [t.KernelManager(caches[0]).get(spec, 0) for spec in specs] if on_gpu else []
        seen: list[list[dict[str, float]]] = [[] for _ in caches]
        for number in range(arguments.repeats):
            spec, turn = specs[number % len(specs)], number // len(specs)
            for which in ((turn + number) % len(caches) for number in range(len(caches))):
                # A spec of its own, as every call's is.
                took, kernels = hit(caches[which], dataclasses.replace(spec), limits.architecture, on_gpu)
                seen[which].append(took)
                kept += kernels if arguments.keep else []
                del kernels  # unloaded here, not while the next one is timed
        for cache, runs in zip(caches, seen, strict=True):
            median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            median["rest"] = 2 * median["hit"] - sum(median.values())
            parts = {name: round(value, 1) for name, value in median.items() if name != "hit"}
            where = "companion" if cache.companion else "disk"
            print(
                json.dumps(
                    {
                        "from": where, "entries": cache.size()[0], "loaded": on_gpu, "kept": arguments.keep,
                        "median_us": round(median["hit"], 1), "worst_us": round(max(run["hit"] for run in runs), 1),
                        "parts": parts,
                    }
                )
            )  # fmt: skip


if __name__ == "__main__":
    main()
