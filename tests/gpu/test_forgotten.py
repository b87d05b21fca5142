# SPDX-License-Identifier: Apache-2.0
"""Kernels that a process forgets, and what many calls and keys leave on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment, output, shared

# fill(number, memory, stream): a kernel of its own for each number, of a manager that keeps only the last one.
FORGETFUL = """
import numpy as np
import transformer_rtc as t
from transformer_rtc import _native
manager = t.KernelManager(t.manager.cache, most_kernels=1)
TEXT = (
    'extern "C" __global__ void fill_%d(Params params) {'
    "  const long long start = clock64();"
    "  while (clock64() - start < params.cycles) {}"
    "  static_cast<int*>(params.out)[threadIdx.x] = %d;"
    "}"
)
FIELDS = (t.Field("out", "pointer"), t.Field("cycles", "int64"))
spec = lambda number: t.TextSpec(TEXT % (number, number), f"fill_{number}", FIELDS)
def fill(number, buffer, stream, cycles=0):
    kernel = manager.get(spec(number), 0)
    kernel.launch_plain((1, 1, 1), (32, 1, 1), {"out": buffer.pointer, "cycles": cycles}, stream)
def read(buffer):
    found = np.zeros(32, np.int32)
    buffer.copy_to_host(0, found.ctypes.data, found.nbytes, 0)
    _native.synchronize_stream(0, 0)
    return set(found.tolist())
buffers, stream = [_native.Buffer(0, 128) for _ in range(6)], _native.own_stream(0)
for number in range(6):  # compiled before they are needed
    manager.image(spec(number), t.device_limits(0).architecture)
"""


def test_a_kernel_that_is_forgotten_while_it_runs_ends_its_work(tmp_path):
    script = f"""{FORGETFUL}
fill(0, buffers[0], stream, 1_000_000_000)
running = _native.Event(0, stream)
print(running.done())  # else it was too fast to show anything
for number in range(1, 6):
    fill(number, buffers[number], stream)
_native.synchronize_stream(0, stream)
print([read(buffer) for buffer in buffers], manager.counts["load"])
"""
    assert output(script, **shared(tmp_path)).splitlines() == ["False", "[{0}, {1}, {2}, {3}, {4}, {5}] 6"]


def test_a_graph_replays_kernels_that_were_forgotten(tmp_path):
    script = f"""{FORGETFUL}
from cuda.bindings import driver as cuda
def done(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) > 1 else None
done(cuda.cuCtxPushCurrent(done(cuda.cuDevicePrimaryCtxRetain(done(cuda.cuDeviceGet(0))))))
handle = cuda.CUstream(stream)
done(cuda.cuStreamBeginCapture(handle, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
for number in range(6):  # each forgets the one before it, within the capture
    fill(number, buffers[number], stream)
graph = done(cuda.cuGraphInstantiate(done(cuda.cuStreamEndCapture(handle)), 0))
for number in range(6):
    fill(5 - number, buffers[number], stream)
_native.synchronize_stream(0, stream)
print([read(buffer) for buffer in buffers])
done(cuda.cuGraphLaunch(graph, handle))
_native.synchronize_stream(0, stream)
print([read(buffer) for buffer in buffers])
"""
    assert output(script, **shared(tmp_path)).splitlines() == [
        "[{5}, {4}, {3}, {2}, {1}, {0}]",
        "[{0}, {1}, {2}, {3}, {4}, {5}]",
    ]


@pytest.mark.alone
def test_many_calls_and_keys_leave_nothing(torch, tmp_path):
    # By hand: 10^6 calls and 10^4 keys, which are the script's defaults.
    script, allowed = Path(__file__).parents[2] / "benchmarks" / "memory_growth.py", 8 << 20
    done = subprocess.run(
        [sys.executable, str(script), "--calls", "20000", "--keys", "1000", "--allowed", str(allowed)],
        env=environment(**shared(tmp_path)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    # No other worker runs a test meanwhile: what is counted of the GPU, where all processes are, is this one's.
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["phase"] for line in done.stdout.splitlines()] == ["calls", "keys"]
