# SPDX-License-Identifier: Apache-2.0
"""What a process keeps: kernels, plans and memory, over keys that come and go; on the fake driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment, shared

QUICK = """
import gc
from transformer_rtc.cache import DiskCache
from transformer_rtc.compiler import Compiled
from transformer_rtc.kernel_manager import MOST_KERNELS
from transformer_rtc.toolchain import NvrtcToolchain
compile_program = lambda symbol, *_: Compiled(b"\\x7fELF" + bytes(20000), "cubin", "", "quick")
loaded = lambda: (gc.collect(), driver.fake_modules())[1]
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
stream, text = stream_of(0, 0), 'extern "C" __global__ void mine() {}'
manager = t.KernelManager(DiskCache(None), compile_program, lambda: "quick", most_kernels=4)
get = lambda number: manager.compile(text, f"kernel_{number}", (), 0)
launch = lambda kernel: kernel.launch_plain((1, 1, 1), (32, 1, 1), b"", stream)
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # Those that were not asked for lately, with their last user; what is asked for again and again stays.
        (
            "held = get(0)\nfor number in range(1, 20): get(number)\nprint(loaded(), dict(manager.counts))\n"
            "launch(held)\ndel held\nprint(loaded())\n"
            "for number in range(20, 40): get('often'), get(number)\nprint(manager.counts['load'], loaded())",
            ["5 {'compile': 20, 'load': 20}", "4", "41 4"],
        ),
        # Those of a manager that is dropped, at once.
        ("gc.disable()\nget(0), get(1)\nprint(driver.fake_modules())\ndel manager\nprint(loaded())", ["2", "0"]),
        # None that a graph has captured.
        (
            "launch(get(0))\nbegin(stream)\nlaunch(get(1))\nprint(end(stream))\n"
            "for number in range(2, 20): launch(get(number))\nprint(loaded())",
            ["b'K'", "5"],
        ),
        # Beside a capture, which stays whole.
        ("for number in range(4): get(number)\nbegin(stream)\nget(4)\nprint(end(stream), loaded())", ["b'' 4"]),
    ],
    ids=["not asked for", "manager dropped", "captured", "beside a capture"],
)
def test_kernels_that_nobody_needs_are_unloaded(script, expected, fake_driver):
    assert fake_driver(f"{QUICK}\n{script}") == expected


@pytest.mark.parametrize("sizes", [4200, pytest.param(9000, marks=pytest.mark.thorough)])
def test_plans_and_kernels_of_hidden_sizes_that_vary_without_end_are_bounded(sizes, fake_driver):
    # Each size is a key; the memory of the first thousands is that of the last ones.
    script = f"""{QUICK}
t.manager._nvrtc = NvrtcToolchain(compile_program, lambda: "quick")
weight = array(64)
x, seen = array(2, 20000), []
for hidden in range(1, {sizes} + 1):
    t.rms_norm(t.DeviceArray(x._buffer, (2, hidden), x._dtype, 1))
    t.rms_norm(t.DeviceArray(x._buffer, (2, 64), x._dtype, 1))
    if hidden % ({sizes} // 3) == 0:
        seen.append((loaded(), resident()))
# Neither of the two tables holds more, and what one holds the other mostly does.
most = max(modules for modules, _ in seen)
print(most <= MOST_KERNELS + _native.MOST_PLANS, len(t.manager._images), len(t.manager._kernels))
print(t.manager.counts["load"], (seen[2][1] - seen[1][1]) >> 20)
"""
    bounded, loads = fake_driver(script, CACHE_DIR="")
    assert bounded == "True 512 512"
    # The size that is used all the time is looked up, and never made again.
    assert loads.split()[0] == str(sizes) and int(loads.split()[1]) <= 4


def test_calls_and_keys_leave_nothing(tmp_path):
    # By hand, and on a GPU: 10^6 calls and 10^4 keys.
    script = Path(__file__).parents[2] / "benchmarks" / "memory_growth.py"
    done = subprocess.run(
        [sys.executable, str(script), "--simulated", "--calls", "2000", "--keys", "200", "--allowed", str(2 << 20)],
        env=environment(**shared(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["phase"] for line in done.stdout.splitlines()] == ["calls", "keys"]
