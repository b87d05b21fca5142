"""What a process keeps: kernels, plans and memory, over keys that come and go; on the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

QUICK = """
import gc
from transformer_rtc.cache import DiskCache
from transformer_rtc.compiler import Compiled
from transformer_rtc.manager import KernelManager, MOST_KERNELS
compile_program = lambda symbol, *_: Compiled(b"\\x7fELF" + bytes(20000), "cubin", "", "quick")
loaded = lambda: (gc.collect(), driver.fake_modules())[1]
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""
MANAGER = """
manager = KernelManager(DiskCache(None), compile_program, lambda: "quick", most_kernels=4)
get = lambda number: manager.compile('extern "C" __global__ void mine() {}', f"kernel_{number}", (), 0)
"""


def test_kernels_that_were_not_asked_for_lately_are_unloaded_with_their_last_user(fake_driver):
    script = f"""{QUICK}{MANAGER}
held = get(0)
for number in range(1, 20):
    get(number)
print(loaded(), dict(manager.counts))
held.launch_plain((1, 1, 1), (32, 1, 1), b"")
del held
print(loaded())
# Asked for again and again, it stays.
for number in range(20, 40):
    get("often"), get(number)
print(manager.counts["load"], loaded())
"""
    assert fake_driver(script) == ["5 {'compile': 20, 'load': 20}", "4", "41 4"]


def test_the_kernels_of_a_manager_that_is_dropped_are_unloaded_at_once(fake_driver):
    script = f"""{QUICK}
gc.disable()
{MANAGER}
get(0), get(1)
print(driver.fake_modules())
del manager
print(driver.fake_modules())
"""
    assert fake_driver(script) == ["2", "0"]


def test_a_kernel_that_a_graph_has_captured_stays_loaded(fake_driver):
    script = f"""{QUICK}{MANAGER}
stream = stream_of(0, 0)
get(0).launch_plain((1, 1, 1), (32, 1, 1), b"", stream)
begin(stream)
get(1).launch_plain((1, 1, 1), (32, 1, 1), b"", stream)
print(end(stream))
for number in range(2, 20):
    get(number).launch_plain((1, 1, 1), (32, 1, 1), b"", stream)
print(loaded())
"""
    assert fake_driver(script) == ["b'K'", "5"]


def test_an_unload_beside_a_capture_leaves_it_whole(fake_driver):
    script = f"""{QUICK}{MANAGER}
stream = stream_of(0, 0)
for number in range(4):
    get(number)
begin(stream)
get(4)
print(end(stream), loaded())
"""
    assert fake_driver(script) == ["b'' 4"]


def test_plans_and_kernels_of_hidden_sizes_that_vary_without_end_are_bounded(fake_driver):
    # Each size is a key; the memory of the first thousands is that of the last ones.
    script = f"""{QUICK}
from transformer_rtc import usage
t.manager._compile_program, weight = compile_program, array(64)
x, at = array(2, 20000), []
seen = []
for hidden in range(1, 6001):
    t.rms_norm(t.DeviceArray(x._buffer, (2, hidden), x._dtype, 1))
    t.rms_norm(t.DeviceArray(x._buffer, (2, 64), x._dtype, 1))
    if hidden % 1500 == 0:
        seen.append((loaded(), resident()))
# Neither of the two tables holds more, and what one holds the other mostly does.
most = max(modules for modules, _ in seen)
print(most <= MOST_KERNELS + _native.MOST_PLANS, len(t.manager._images), len(t.manager._kernels), len(usage.asked))
print(t.manager.counts["load"], (seen[-1][1] - seen[1][1]) >> 20)
"""
    bounded, loads = fake_driver(script, TRANSFORMER_RTC_CACHE_DIR="")
    assert bounded == "True 512 512 4096"
    # The size that is used all the time is looked up, and never made again.
    assert loads.split()[0] == "6000" and int(loads.split()[1]) <= 4


def test_calls_and_keys_leave_nothing(tmp_path):
    # By hand, and on a GPU: 10^6 calls and 10^4 keys.
    script = Path(__file__).parents[2] / "benchmarks" / "memory_growth.py"
    done = subprocess.run(
        [sys.executable, str(script), "--simulated", "--calls", "2000", "--keys", "200", "--allowed", str(2 << 20)],
        env={**os.environ, "TRANSFORMER_RTC_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["phase"] for line in done.stdout.splitlines()] == ["calls", "keys"]
