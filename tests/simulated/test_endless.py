# SPDX-License-Identifier: Apache-2.0
"""Loops without an end are told soon, and loops that merely take long are not."""

from __future__ import annotations

import time

import numpy as np
import pytest

from transformer_rtc import Field, SimulatedDevice
from transformer_rtc.errors import SimulationError

pytestmark = pytest.mark.usefixtures("kernels")
MODES = pytest.mark.parametrize("checked", [True, False], ids=["checked", "fast"])
CHECKED = SimulatedDevice(checked=True)
FIELDS = (Field("x", "pointer"), Field("zero", "int32"), Field("count", "int32"))
FLAG = "TRTC_SHARED(int, flag, 1); if (threadIdx.x == 0) flag[0] = 0; __syncthreads(); "
ENDLESS = {
    "nothing": "while (true) {}",
    "nothing in one thread": "if (threadIdx.x == 3) for (;;) {}",
    "a flag": "while (static_cast<int*>(p.x)[0] == 0) {}",
    "a volatile flag": "while (static_cast<volatile int*>(p.x)[0] == 0) {}",
    "an atomic flag": "while (atomicAdd(static_cast<int*>(p.x), 0) == 0) {}",
    "a sleeping thread's flag": "while (atomicAdd(static_cast<int*>(p.x), 0) == 0) __nanosleep(10);",
    "a flag in shared memory": FLAG + "while (flag[0] == 0) {}",
    "a volatile flag in shared memory": FLAG + "while (static_cast<volatile int*>(flag)[0] == 0) {}",
    "a step of zero": "for (int i = threadIdx.x; i < 100; i += p.zero) static_cast<int*>(p.x)[1 + threadIdx.x] = 1;",
    "a lock that nobody frees": "while (atomicExch(static_cast<int*>(p.x), 1) == 1) {}",
    "a fence": "while (static_cast<volatile int*>(p.x)[0] == 0) __threadfence();",
}
MEETING = {
    "barriers": "while (true) __syncthreads();",
    "warps": "while (true) __syncwarp();",
    "votes": "while (__any_sync(0xffffffffu, static_cast<int*>(p.x)[0] == 0)) {}",
}
# Registers change for longer than a test can wait.
COUNTS = "unsigned long long i = 1; while (i != 0) { i = i * 6364136223846793005u + 1442695040888963407u; %s }"
# Of 10^8 steps, but for those of which each is a call of the machine's.
LONG = {
    "a thread computes": """
      if (threadIdx.x > 0) return;
      unsigned sum = 1;
      for (int i = 0; i < p.count; ++i) sum = sum * 1664525u + 1013904223u;
      static_cast<unsigned*>(p.x)[0] = sum;""",
    "a thread counts in memory": """
      if (threadIdx.x > 0) return;
      volatile unsigned* sum = static_cast<volatile unsigned*>(p.x);
      for (sum[0] = 0; sum[0] != p.count / 10; sum[0] = sum[0] + 1) {}""",
    "a thread reads": """
      if (threadIdx.x > 0) return;
      unsigned sum = 1;
      for (int i = 0; i < p.count / 10; ++i) sum += static_cast<unsigned*>(p.x)[0];
      static_cast<unsigned*>(p.x)[1] = sum;""",
    "threads meet": """
      for (int i = 0; i < p.count / 500; ++i) __syncthreads();
      static_cast<unsigned*>(p.x)[threadIdx.x] = p.count;""",
    "warps vote": """
      int i = 0;
      while (__any_sync(0xffffffffu, i < p.count / 500)) ++i;
      static_cast<unsigned*>(p.x)[threadIdx.x] = p.count;""",
}


def launch(kernels, text, device, size=256, **values) -> np.ndarray:
    program = f'#include "platform.cuh"\nextern "C" __global__ void loops(const Params p) {{\n  {text}\n}}\n'
    x = np.zeros(size, np.int32)
    kernel = kernels.compile(program, "loops", FIELDS, device)
    kernel.launch_plain((1, 1, 1), (64, 1, 1), {"x": x, "zero": 0, "count": 10**8, **values})
    return x


@MODES
@pytest.mark.parametrize("name", ENDLESS)
def test_a_loop_without_an_end_is_told_in_a_second(name, checked, kernels):
    device = SimulatedDevice(checked=checked)
    start = time.process_time()
    with pytest.raises(SimulationError) as caught:
        launch(kernels, ENDLESS[name], device)
    assert time.process_time() - start < 2
    assert caught.value.kind in ("endless", "deadlock")
    assert caught.value.file in ("loops.cu", None)
    # The machine is of use afterwards.
    assert (launch(kernels, "static_cast<int*>(p.x)[threadIdx.x] = 7;", device)[:64] == 7).all()


@MODES
def test_a_loop_of_which_memory_alone_changes_ends(checked, kernels):
    # At most places of this loop, registers and flags are the same each time. It lasts for many ticks.
    text = """
      if (threadIdx.x > 0) return;
      volatile unsigned* sum = static_cast<volatile unsigned*>(p.x);
      for (sum[0] = 0; sum[0] != p.count; sum[0] = sum[0] + 1) {
        if (sum[1] == 5 || sum[1] == 5 || sum[1] == 5 || sum[1] == 5 || sum[1] == 5 || sum[1] == 5) return;
      }"""
    count = 2 * 10**6 if checked else 2 * 10**9
    assert launch(kernels, text, SimulatedDevice(checked=checked), count=count)[0] == count


def test_checked_mode_needs_no_look_at_a_large_array(kernels):
    start = time.process_time()
    with pytest.raises(SimulationError, match="endless: the thread does the same for ever"):
        launch(kernels, ENDLESS["a flag"], CHECKED, 5_000_000)
    assert time.process_time() - start < 2


@MODES
@pytest.mark.parametrize("name", LONG)
def test_a_loop_that_takes_long_ends(name, checked, kernels):
    assert launch(kernels, LONG[name], SimulatedDevice(checked=checked)).any()


@MODES
@pytest.mark.parametrize("name", MEETING)
def test_threads_that_meet_for_ever_are_told(name, checked, kernels):
    start = time.process_time()
    with pytest.raises(SimulationError, match="endless: threads meet again and again") as caught:
        launch(kernels, MEETING[name], SimulatedDevice(checked=checked, endless_seconds=1 if checked else 5))
    assert time.process_time() - start < 2.5
    assert checked or "do the same for ever" in str(caught.value)


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_a_loop_that_nothing_proves_endless_is_told_after_the_time_that_is_given(checked, kernels):
    text = COUNTS % "" + " static_cast<unsigned*>(p.x)[0] = static_cast<unsigned>(i);"
    expected = 4 if checked else 1
    start = time.process_time()
    with pytest.raises(SimulationError, match="endless: the thread runs on and on without meeting another"):
        launch(kernels, text, SimulatedDevice(checked=checked, endless_seconds=1))
    assert expected - 0.5 < time.process_time() - start < expected + 1


@pytest.mark.parametrize("order", ["first_in", "last_in", "random"])
def test_threads_that_meet_and_change_registers_only_are_told_after_the_time(order, kernels):
    start = time.process_time()
    with pytest.raises(SimulationError, match="endless: threads meet again and again, and none changes memory"):
        launch(kernels, COUNTS % "__syncthreads();", SimulatedDevice(order=order, endless_seconds=1))
    assert 0.5 < time.process_time() - start < 2.5
