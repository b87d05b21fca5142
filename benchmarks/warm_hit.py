"""What a kernel costs that is on disk: from its spec to the loaded kernel, beside few entries and beside many."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

import transformer_rtc as t
from transformer_rtc.cache import DiskCache
from transformer_rtc.dispatch import Request, operators
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, DeviceLimits, KernelSpec


def spec_of(hidden: int, limits: DeviceLimits) -> KernelSpec:
    operator = operators()["rms_norm"]
    given = {"x": BFLOAT16, "weight": BFLOAT16, "out": BFLOAT16}
    dtypes = {name: given.get(name) for name in operator._arrays}
    return operator.family.specialise(Request("rms_norm", dtypes, hidden, False, False), limits)[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--architecture", type=int, help="without a GPU: up to the machine code, not loaded")
    arguments = parser.parse_args()
    on_gpu = arguments.architecture is None
    limits = t.device_limits(0) if on_gpu else ARCHITECTURES[arguments.architecture]
    specs = [spec_of(hidden, limits) for hidden in (1024, 2048, 4096, 8192)]
    with tempfile.TemporaryDirectory() as folder:
        for entries in (len(specs), 1000):
            cache = DiskCache(folder)
            for spec in specs:
                t.KernelManager(cache).image(spec, limits.architecture)
            for number in range(cache.size()[0], entries):
                cache.put(f"other_{number}", f"{number:064x}", os.urandom(20000), {"symbol": "other"})
            milliseconds = []
            for number in range(arguments.repeats):
                manager, spec = t.KernelManager(cache), specs[number % len(specs)]
                start = time.perf_counter()
                if on_gpu:
                    manager.get(spec, 0)
                else:
                    manager.image(spec, limits.architecture)
                milliseconds.append((time.perf_counter() - start) * 1e3)
                assert "compile" not in manager.counts
            print(
                json.dumps(
                    {
                        "entries": entries, "loaded": on_gpu, "median_ms": round(statistics.median(milliseconds), 4),
                        "worst_ms": round(max(milliseconds), 4),
                    }
                )
            )  # fmt: skip


if __name__ == "__main__":
    main()
