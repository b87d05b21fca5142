# SPDX-License-Identifier: Apache-2.0
"""Loops without an end are told soon, and loops that merely take long are not."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

from transformer_rtc import Field, LaunchConfig, SimulatedDevice, simulator
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
    for _ in range(3):  # looks may meet other states each time, and then the time decides
        start = time.process_time()
        with pytest.raises(SimulationError, match="endless: threads meet again and again") as caught:
            launch(kernels, MEETING[name], SimulatedDevice(checked=checked, endless_seconds=1 if checked else 5))
        if time.process_time() - start < 2.5:
            break
    else:
        pytest.fail("it was told late each time")
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


# ---- Threads that wait for each other --------------------------------------------------------------------------------

# The classic barrier of a cooperative grid: it waits by volatile reads.
BARRIER = """
  for (int i = 1; i <= p.count; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(static_cast<int*>(p.x), 1);
      while (*static_cast<volatile int*>(p.x) < i * static_cast<int>(gridDim.x)) {}
      __threadfence();
    }
    __syncthreads();
  }"""
LATE = """
  if (threadIdx.x == 63) {
    for (int i = 0; i < p.count; ++i) __nanosleep(10);
    __threadfence();
    atomicExch(static_cast<int*>(p.x), 1);
  } else {
    while (*static_cast<volatile int*>(p.x) == 0) {}
  }"""


@MODES
@pytest.mark.parametrize("known", [True, False], ids=["arrays", "addresses"])
@pytest.mark.parametrize("order", ["first_in", "last_in", "random"])
def test_a_volatile_loop_waits_for_another_thread(order, known, checked, kernels):
    if checked and not known:
        pytest.skip("checked mode takes arrays only")
    device = SimulatedDevice(checked=checked, order=order)

    def values(x):
        return {"x": x if known else x.ctypes.data, "zero": 0}

    program = f'#include "platform.cuh"\nextern "C" __global__ void loops(const Params p) {{\n  {BARRIER}\n}}\n'
    x = np.zeros(64, np.int32)
    kernel = kernels.compile(program, "loops", FIELDS, device)
    kernel.launch(LaunchConfig((4, 1, 1), (64, 1, 1), cooperative=True), {**values(x), "count": 10})
    assert x[0] == 40
    kernel = kernels.compile(program.replace(BARRIER, LATE), "loops", FIELDS, device)
    x[:] = 0
    kernel.launch_plain((1, 1, 1), (64, 1, 1), {**values(x), "count": 0 if checked else 1000})
    assert x[0] == 1


@MODES
def test_a_thread_that_spins_is_told_when_the_others_have_left_or_wait_for_it(checked, kernels):
    for wait in ("__syncthreads();", "static_cast<int*>(p.x)[threadIdx.x] = 1;"):
        text = f"if (threadIdx.x == 3) {{ while (*static_cast<volatile int*>(p.x + 128) == 0) {{}} }} {wait}"
        text = text.replace("p.x + 128", "static_cast<int*>(p.x) + 128")
        with pytest.raises(SimulationError) as caught:
            launch(kernels, text, SimulatedDevice(checked=checked))
        assert caught.value.kind in ("endless", "deadlock") and caught.value.thread == (3, 0, 0)


# ---- Memory of which nothing is known --------------------------------------------------------------------------------

COUNTS_IN_MEMORY = """
  if (threadIdx.x > 0) return;
  volatile unsigned* sum = static_cast<volatile unsigned*>(%s);
  for (sum[0] = 0; sum[0] != p.count; sum[0] = sum[0] + 1) {
    if (sum[1] == 5 || sum[1] == 5 || sum[1] == 5 || sum[1] == 5 || sum[1] == 5 || sum[1] == 5) return;
  }"""


@pytest.mark.parametrize("way", ["an int64", "a table", "a struct"])
def test_memory_that_is_reached_through_other_addresses_is_not_taken_for_unchanged(way, kernels):
    x = np.zeros(2, np.uint32)
    table = np.array([x.ctypes.data], np.uint64)
    text, field, value = {
        "an int64": ("reinterpret_cast<void*>(p.a)", "int64", x.ctypes.data),
        "a table": ("static_cast<void**>(p.a)[0]", "pointer", table),
        "a struct": ("static_cast<void**>(p.a)[0]", "pointer", table.view([("low", "u4"), ("high", "u4")])),
    }[way]
    program = f'extern "C" __global__ void counts(const Params p) {{{COUNTS_IN_MEMORY % text}}}'
    kernel = kernels.compile(program, "counts", (Field("a", field), Field("count", "uint32")), SimulatedDevice())
    kernel.launch_plain((1, 1, 1), (1, 1, 1), {"a": value, "count": 10**9})
    assert x[0] == 10**9


@pytest.mark.parametrize("size", [64, 5_000_000], ids=["an address", "a large array"])
@pytest.mark.parametrize("name", [*MEETING, "clusters"])
def test_threads_that_meet_for_ever_are_told_after_a_time_where_memory_is_not_compared(name, size, kernels):
    text = (
        "while (true) { trtc::cluster_arrive_relaxed(); trtc::cluster_wait(); }"
        if name == "clusters"
        else MEETING[name]
    )
    program = f'#include "ptx.cuh"\nextern "C" __global__ void loops(const Params p) {{ {text} }}'
    x = np.zeros(size, np.int32)
    kernel = kernels.compile(program, "loops", FIELDS, SimulatedDevice(endless_seconds=1))
    start = time.process_time()
    with pytest.raises(SimulationError, match="endless: threads meet again and again, and none leaves the kernel"):
        kernel.launch(
            LaunchConfig((1, 1, 1), (64, 1, 1)), {"x": x.ctypes.data if size == 64 else x, "zero": 0, "count": 0}
        )
    assert 3.5 < time.process_time() - start < 6


# ---- What a look sees ------------------------------------------------------------------------------------------------


def test_a_look_keeps_each_register_that_a_switch_keeps():
    path = Path(simulator.__file__).parent / "native" / "fiber.cpp"
    looks = re.findall(r"^trtc_(switch|look):\n(.*?)\n\.size", path.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in looks] == ["switch", "look"] * 2
    for (_, switch), (_, look) in (looks[:2], looks[2:]):
        kept = set(re.findall(r"pushq %(\w+)|stp (\w+), (\w+)", switch))
        stored = set(re.findall(r"\b([xdr]\d+|rb[xp])\b", look))
        assert {register for registers in kept for register in registers if register} <= stored
