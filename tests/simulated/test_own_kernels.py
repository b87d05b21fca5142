# SPDX-License-Identifier: Apache-2.0
"""Kernels of the user's in the simulator: launches, their limits, the compiler, the cache."""

from __future__ import annotations

import os
import re
import time

import kernel_cache
import numpy as np
import pytest
import reference
from norm_checks import first_of
from processes import output, shared
from stubs import in_threads

import transformer_rtc
from transformer_rtc import Field, KernelManager, LaunchConfig, SimulatedDevice, errors, operator, rms_norm, using
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import ArgumentError, CompileError, LaunchError, SimulationError
from transformer_rtc.settings import read as read_settings
from transformer_rtc.simulator import toolchain
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, TextSpec

pytestmark = pytest.mark.usefixtures("kernels")
ONE = (1, 1, 1)
CHECKED = SimulatedDevice(checked=True)


# ---- A kernel of the user's ------------------------------------------------------------------------------------------

WRITES = """
extern "C" __global__ void writes(Params params) {
  static_cast<int*>(params.out)[blockIdx.x * blockDim.x + threadIdx.x] = params.value + static_cast<int>(threadIdx.x);
}
"""
OUT = Field("out", "pointer")
FIELDS = (OUT, Field("value", "int32"))


@pytest.fixture
def writes(kernels):
    """Return the kernel on a device."""
    return lambda device: kernels.compile(WRITES, "writes", FIELDS, device)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "fast"])
def test_a_kernel_of_ones_own(checked, writes):
    kernel = writes(SimulatedDevice(checked=checked))
    assert isinstance(kernel, transformer_rtc.Kernel)
    out = np.full(6 * 33, -1, np.int32)
    kernel.launch_plain((6, 1, 1), (33, 1, 1), {"out": out, "value": 7})
    np.testing.assert_array_equal(out.reshape(6, 33), np.tile(np.arange(7, 40), (6, 1)))
    if checked:
        with pytest.raises(SimulationError, match="out_of_bounds") as caught:
            kernel.launch_plain((7, 1, 1), (33, 1, 1), {"out": out, "value": 7})
        assert (caught.value.kind, caught.value.kernel, caught.value.file) == ("out_of_bounds", "writes", "writes.cu")
        assert caught.value.block == (6, 0, 0)
        out.flags.writeable = False
        with pytest.raises(SimulationError, match="read_only"):
            kernel.launch_plain(ONE, (33, 1, 1), {"out": out, "value": 7})


def test_what_lies_between_an_arrays_rows_is_not_touched(writes):
    kernel, memory = writes(CHECKED), np.zeros((4, 10), np.int32)

    def launch(out, threads):
        kernel.launch_plain(ONE, (threads, 1, 1), {"out": out, "value": 1})

    launch(memory[1:3, 2:7], 5)
    np.testing.assert_array_equal(memory[1, 2:7], np.arange(1, 6))
    assert memory.sum() == 15
    for out, threads in ((memory[1:3, 2:7], 6), (memory.reshape(2, 2, 10)[:, :, :1], 2), (memory[::2], 11)):
        with pytest.raises(SimulationError, match="out_of_bounds") as caught:
            launch(out, threads)
        assert caught.value.thread == (threads - 1, 0, 0)


def test_an_array_whose_elements_share_places_or_go_backwards_is_refused_and_any_other_is_taken(writes):
    kernel, memory = writes(CHECKED), np.zeros((4, 10), np.int32)

    def launch(out, threads):
        kernel.launch_plain(ONE, (threads, 1, 1), {"out": out, "value": 1})

    def launch_fast(out):
        writes(SimulatedDevice()).launch_plain(ONE, ONE, {"out": out, "value": 77})
        return out.ravel()[0] == 77

    windows = np.lib.stride_tricks.sliding_window_view(memory[0], 4)
    for view, why in (
        (memory[:0:-1], "a stride is negative"),
        (memory[0, ::-1], "a stride is negative"),
        (np.broadcast_to(memory[0], (3, 10)), "a stride is 0"),
        (windows, "elements overlap"),
    ):
        with pytest.raises(ArgumentError, match=rf"writes: out has the shape .*: {why}; it takes an array of which"):
            launch(view, 1)
    for view in (memory[0, ::2], memory[:, 0], memory[:, ::3]):
        launch(view, 1)
        with pytest.raises(SimulationError, match="out_of_bounds") as caught:
            launch(view, 2)
        assert caught.value.thread == (1, 0, 0), "what lies between the elements is not the kernel's"
        assert launch_fast(view)
    for view in (memory[1:3], memory[1:2, :], memory.T, memory[2], memory[:, None], memory[3:, 4:]):
        memory[:] = 0
        launch(view, view.size)
        assert memory.sum() == sum(range(1, view.size + 1))
        with pytest.raises(SimulationError, match="out_of_bounds"):
            launch(view, view.size + 1)


def test_a_symbol_that_the_text_lacks_is_refused_with_those_that_it_has(kernels):
    text = f'{WRITES}\nextern "C" __global__ __launch_bounds__(64) void other(const Params p) {{}}'
    for target in (CHECKED.target, SimulatedDevice().target, 90):
        message = r'the text has no extern "C" __global__ write; its entries are: (writes, other|other, writes)$'
        with pytest.raises(ArgumentError, match=message):
            kernels.image(TextSpec(text, "write", FIELDS), target)
    with pytest.raises(ArgumentError, match=r"its entries are: _Z\d+mangled6Params$"):
        kernels.image(TextSpec("__global__ void mangled(Params p) {}", "mangled", FIELDS), 90)


def test_parameters_of_another_size_and_a_stream_are_refused(writes, kernels):
    kernel, out = writes(SimulatedDevice()), np.zeros(32, np.int32)
    packed = kernel.params.pack(out=out.ctypes.data, value=3)
    kernel.launch_plain(ONE, (32, 1, 1), packed)
    assert out[0] == 3
    for wrong in (packed[:-1], packed + b"\0", b""):
        with pytest.raises(ArgumentError, match=f"takes 16 bytes of parameters; {len(wrong)} were"):
            kernel.launch_plain(ONE, (32, 1, 1), wrong)
    with pytest.raises(ArgumentError, match="stream is 5; the simulator has none but 0"):
        kernel.launch_plain(ONE, ONE, packed, stream=5)
    text = 'struct Mine { long long a, b, c; };\nextern "C" __global__ void mine(Mine mine) {}'
    with pytest.raises(LaunchError, match="mine takes 24 bytes of parameters, and its fields describe 16"):
        kernels.compile(text, "mine", FIELDS, SimulatedDevice())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_launches_beyond_the_limits_are_refused(architecture, writes):
    kernel, limits = writes(SimulatedDevice(architecture, multiprocessors=2)), ARCHITECTURES[architecture]
    most, resident = limits.max_cluster_size, 2 * kernel.max_active_ctas((256, 1, 1))
    out = np.zeros(1 << 16, np.int32)

    def launch(grid=ONE, block=ONE, cluster=ONE, dynamic=0, cooperative=False):
        kernel.launch(LaunchConfig(grid, block, cluster, dynamic, cooperative), {"out": out, "value": 1})

    multiple = "must be a multiple of the cluster"
    too_many = f"a cooperative grid of {resident + 1} CTAs .* the simulated sm_{architecture} can hold {resident} of"
    for message, options in (
        *(("block is", {"block": block}) for block in ((1025, 1, 1), (1, 1, 65), (0, 1, 1))),
        ("2048 threads of a CTA; it takes at most 1024", {"block": (1024, 2, 1)}),
        *(("grid is", {"grid": grid}) for grid in ((0, 1, 1), (1, 65536, 1))),
        ("dynamic shared memory", {"dynamic": limits.shared_memory_per_cta + 1}),
        ("can hold 0", {"grid": (2 * most, 1, 1), "cluster": (2 * most, 1, 1)}),
        *[(multiple, {"grid": (3, 1, 1), "cluster": (2, 1, 1)})] * (most > 1),
        *[(multiple, {"grid": (2, 3, 1), "cluster": (2, 2, 1)})] * (most > 1),
        (too_many, {"grid": (resident + 1, 1, 1), "block": (256, 1, 1), "cooperative": True}),
    ):
        with pytest.raises(LaunchError, match=message):
            launch(**options)
        assert not out.any(), "nothing ran"
    # What is just allowed runs.
    for options in (
        {"block": (1024, 1, 1)},
        {"grid": (resident, 1, 1), "block": (256, 1, 1), "cooperative": True},
        {"block": (32, 1, 1), "dynamic": limits.shared_memory_per_cta},
        {"grid": (2 * most, 1, 1), "block": (32, 1, 1), "cluster": (most, 1, 1)},
    ):
        out.fill(0)
        launch(**options)
        count = options.get("grid", ONE)[0] * options["block"][0]
        assert out[:count].all() and not out[count:].any(), options


def test_dynamic_shared_memory_beyond_48_kib_is_asked_for(writes):
    kernel = writes(SimulatedDevice(90))
    assert kernel.max_dynamic_shared_memory == 48 * 1024
    kernel.max_dynamic_shared_memory = 100_000
    assert kernel.max_dynamic_shared_memory == 100_000
    with pytest.raises(LaunchError, match="dynamic shared memory"):
        kernel.max_dynamic_shared_memory = 227 * 1024 + 1


SHARED = """
#include "platform.cuh"
extern "C" __global__ void shares(Params params) {
  TRTC_SHARED(char, first, 8);
  TRTC_SHARED(double, second, 5);
  TRTC_DYNAMIC_SHARED(int, third);
  first[0] = 1;
  second[0] = 2;
  third[0] = 3;
  static_cast<double*>(params.out)[0] = first[0] + second[0] + third[0];
}
"""


@pytest.mark.parametrize(
    ("architecture", "threads", "ctas"),
    [(80, 2048, 32), (89, 1536, 24), (90, 2048, 32), (100, 2048, 32), (120, 1536, 24)],
)
def test_attributes_and_occupancy_are_an_architectures(architecture, threads, ctas, kernels):
    out, limits = np.zeros(1), ARCHITECTURES[architecture]
    kernel = kernels.compile(SHARED, "shares", (OUT,), SimulatedDevice(architecture))
    static = kernel.static_shared_memory
    assert static == 48, "8 bytes and 5 doubles"
    assert (kernel.max_threads, kernel.registers, kernel.local_memory) == (1024, 0, 0)
    assert kernel.max_dynamic_shared_memory == 48 * 1024 - static
    for block, count in (
        (ONE, ctas), ((256, 1, 1), threads // 256), ((1000, 1, 1), threads // 1024), ((8, 8, 8), threads // 512),
        ((2048, 1, 1), 0),
    ):  # fmt: skip
        assert kernel.max_active_ctas(block) == count, block
    # A third of the memory, of which each CTA's own kilobyte is a part.
    most, third = limits.shared_memory_per_cta - static, (limits.shared_memory_per_cta + 1024) // 3 - 1024 - static
    for dynamic, count in ((most, 1), (most + 1, 0), (third, 3), (third + 1, 2)):
        assert kernel.max_active_ctas((32, 1, 1), dynamic) == count, dynamic
    most = limits.max_cluster_size
    assert kernel.max_active_clusters((threads, 1, 1), (2, 1, 1)) == 0
    assert kernel.max_active_clusters((512, 1, 1), (most, 1, 1)) == threads // 512 * 8 // most
    assert kernel.max_active_clusters((512, 1, 1), (2 * most, 1, 1)) == 0
    kernel.launch(LaunchConfig(ONE, ONE, dynamic_shared_memory=16), {"out": out})
    assert out[0] == 6


def test_static_shared_memory_and_launch_bounds_are_limits(kernels):
    text = '#include "platform.cuh"\nextern "C" __global__ void large() { TRTC_SHARED(char, all, 49153); all[0] = 1; }'
    with pytest.raises(LaunchError, match=r"49153 bytes of static shared memory .* takes at most 49152"):
        kernels.compile(text, "large", (), SimulatedDevice()).launch_plain(ONE, ONE, {})
    text = '#define WIDTH 2\nextern "C" __global__ __launch_bounds__(32 * WIDTH, 1) void bounded() {}'
    kernel = kernels.compile(text, "bounded", (), SimulatedDevice())
    assert kernel.max_threads == 64
    kernel.launch_plain(ONE, (64, 1, 1), {})
    with pytest.raises(LaunchError, match="65 threads of a CTA; it takes at most 64"):
        kernel.launch_plain(ONE, (65, 1, 1), {})


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "fast"])
def test_kernels_print(checked, kernels, capfd):
    text = r"""
    extern "C" __global__ void prints(Params params) {
      if (threadIdx.x % 2 == 1) printf("block %u thread %u: %.2f %s\n", blockIdx.x, threadIdx.x, 0.25f, "done");
    }
    """
    kernel = kernels.compile(text, "prints", FIELDS[1:], SimulatedDevice(checked=checked))
    kernel.launch_plain((2, 1, 1), (4, 1, 1), {"value": 0})
    assert capfd.readouterr().out.splitlines() == [
        f"block {block} thread {thread}: 0.25 done" for block in (0, 1) for thread in (1, 3)
    ]


# ---- The compiler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "fast"])
def test_a_compile_error_names_the_line(checked, kernels):
    text = 'extern "C" __global__ void broken(Params params) {\n  int a = 1;\n  undeclared_name = a;\n}\n'
    with pytest.raises(CompileError, match="the C\\+\\+ compiler could not compile broken") as caught:
        kernels.compile(text, "broken", FIELDS, SimulatedDevice(checked=checked))
    error = caught.value
    # A line of the text, whatever is put before it.
    assert "broken.cu:3:" in error.log and "undeclared_name" in error.log
    assert "  undeclared_name = a;" in str(error)
    assert "/tmp" not in error.log


# Those of the system are not found, either.
@pytest.mark.parametrize("header", ['"nonexistent.cuh"', "<cstdint>"])
def test_a_header_that_is_not_found_is_named(header, kernels):
    with pytest.raises(CompileError, match=re.escape(header.strip('"<>'))):
        kernels.compile(f"#include {header}\n{WRITES}", "writes", FIELDS, SimulatedDevice())


@pytest.mark.parametrize("declaration", ["%s float v[32]", "extern %s float v[]", "%s int one", "static %s int a[2]"])
def test_raw_shared_memory_is_a_clear_error(declaration, kernels):
    text = f'extern "C" __global__ void raw(Params params) {{\n  {declaration % "__shared__"};\n}}\n'
    with pytest.raises(CompileError) as caught:
        kernels.compile(text, "raw", FIELDS, SimulatedDevice())
    assert "TRTC_SHARED" in caught.value.log and "raw.cu:" in caught.value.log


def test_macros_among_the_options_are_taken(kernels):
    text = """
    extern "C" __global__ void defined(Params params) {
    #ifdef GONE
      static_cast<int*>(params.out)[0] = -1;
    #else
      static_cast<int*>(params.out)[0] = VALUE + OTHER + ONE + __CUDA_ARCH__;
    #endif
    }
    """
    options = ("-DVALUE=20", "--define-macro=OTHER=300", "-D", "ONE", "-DGONE", "-UGONE", "-lineinfo")
    options += ("--use_fast_math",)
    out = np.zeros(1, np.int32)
    kernels.compile(text, "defined", (OUT,), SimulatedDevice(89), options).launch_plain(ONE, ONE, {"out": out})
    assert out[0] == 20 + 300 + 1 + 890


@pytest.mark.parametrize("command", ["/nowhere/c++", "no-such-compiler -O2"])
def test_a_compiler_that_is_not_there_is_one_clear_error(command, tmp_path, monkeypatch):
    fresh = KernelManager(DiskCache(str(tmp_path)))
    for variable, value, message in (
        ("CXX", command, re.escape(f"CXX is {command!r}, which is not found: install one")),
        ("PATH", str(tmp_path), r"neither g\+\+ nor clang\+\+ is on PATH: install one"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("CXX", raising=False)
            patch.setenv(variable, value)
            with pytest.raises(errors.CompilerNotFoundError, match=message):
                fresh.compile(WRITES, "writes", FIELDS, SimulatedDevice())
    fresh.compile(WRITES, "writes", FIELDS, SimulatedDevice())


def test_a_compiler_may_have_options(kernels, monkeypatch):
    monkeypatch.setenv("CXX", " ".join(toolchain._command()) + " -DEXTRA=41")
    text = 'extern "C" __global__ void extra(Params params) { static_cast<int*>(params.out)[0] = EXTRA + 1; }'
    out = np.zeros(1, np.int32)
    kernels.compile(text, "extra", (OUT,), SimulatedDevice()).launch_plain(ONE, ONE, {"out": out})
    assert out[0] == 42


@pytest.mark.parametrize("checked", first_of([True, False]))
def test_both_compilers_give_the_same_numbers(checked, monkeypatch, rng):
    names = [name for name in ("g++", "clang++") if toolchain.shutil.which(name)]
    if len(names) < 2:
        pytest.skip("one of g++ and clang++ is not installed")
    x = reference.random_rows(rng, (5, 300), BFLOAT16)
    seen = []
    for number, name in enumerate(names):
        monkeypatch.setenv("CXX", name)
        fresh = kernel_cache.manager()
        monkeypatch.setattr(operator, "manager", fresh)
        # A device that no other test has: a plan keeps its kernel.
        with using(SimulatedDevice(checked=checked, seed=(1 << 40) + 2 * checked + number)):
            seen.append(rms_norm(x))
        assert fresh.counts["load"] == 1
        reference.assert_close(seen[-1], reference.rms_norm(x)[0], BFLOAT16)
    np.testing.assert_array_equal(*(y.view(np.uint16) for y in seen))


# ---- The cache -------------------------------------------------------------------------------------------------------


def test_modes_and_architectures_have_entries_of_their_own(tmp_path):
    cache = DiskCache(str(tmp_path))
    first = KernelManager(cache)
    spec = TextSpec(WRITES, "writes", FIELDS)
    devices = [SimulatedDevice(architecture, checked=checked) for architecture in (80, 90) for checked in (False, True)]
    for device in devices:
        assert not first.is_compiled(spec, device)
        first.image(spec, device.target)
        assert first.is_compiled(spec, device)
    assert first.counts["compile"] == len(devices) == cache.size()[0]
    names = sorted(os.listdir(tmp_path))
    for device in devices:
        assert any(name.startswith(f"writes.{device.target}.") for name in names)
    # How threads are ordered is no property of a module, nor is what the operators choose.
    for order in ("last_in", "random"):
        first.get(spec, SimulatedDevice(order=order, static=True, seed=3, multiprocessors=4))
    assert first.counts["compile"] == len(devices)


def test_a_warm_cache_needs_no_compile(tmp_path, monkeypatch):
    cache = DiskCache(str(tmp_path))
    KernelManager(cache).compile(WRITES, "writes", FIELDS, CHECKED)
    monkeypatch.setattr(toolchain, "compile_program", pytest.fail)
    strict = KernelManager(cache, options=read_settings({"TRANSFORMER_RTC_ON_COMPILE": "error"}))
    out = np.zeros(4, np.int32)
    strict.compile(WRITES, "writes", FIELDS, CHECKED).launch_plain(ONE, (4, 1, 1), {"out": out, "value": 1})
    np.testing.assert_array_equal(out, [1, 2, 3, 4])
    assert (strict.counts["compile"], strict.counts["load"]) == (0, 1)
    with pytest.raises(errors.UnexpectedCompileError, match=r"writes for sm_90.fast is not in the cache"):
        strict.compile(WRITES, "writes", FIELDS, SimulatedDevice())


def test_many_modules_cost_no_descriptors(writes):
    writes(SimulatedDevice())
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(40):
        writes(SimulatedDevice(order="random", seed=seed))
    assert len(os.listdir("/proc/self/fd")) <= before


# ---- Launches that end otherwise, and several at once ----------------------------------------------------------------


def test_an_interrupt_ends_a_long_launch_and_the_next_one_is_right(tmp_path):
    # A thread of the process interrupts it, in a time of its CPU.
    text = """
import signal, threading, time
import numpy as np
from transformer_rtc import Field, SimulatedDevice, manager
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
kernel = manager.compile(
    'extern "C" __global__ void waits(Params p) {'
    '  for (int i = 0; i < p.rounds; ++i) __syncthreads();'
    '  static_cast<int*>(p.out)[threadIdx.x] = p.rounds; }',
    "waits", (Field("out", "pointer"), Field("rounds", "int32")), SimulatedDevice(),
)
out = np.zeros(64, np.int32)
start = time.process_time()
threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
try:
    kernel.launch_plain((1, 1, 1), (64, 1, 1), {"out": out, "rounds": 2**31 - 1})
except KeyboardInterrupt:
    print("interrupted", out.any())
kernel.launch_plain((1, 1, 1), (64, 1, 1), {"out": out, "rounds": 5})
print((out == 5).all(), time.process_time() - start < 5)
"""
    assert output(text, **shared(tmp_path)).split() == ["interrupted", "False", "True", "True"]


FAULTS = {
    "out_of_bounds": "static_cast<int*>(p.out)[1000000] = 1;",
    "trap": "if (threadIdx.x == 3) __trap();",
    "deadlock": "while (atomicAdd(static_cast<int*>(p.out), 0) == 0) __nanosleep(1);",
    "divergent_barrier": "if (threadIdx.x < 3) return; __syncthreads();",
    "overflow": "static_cast<int*>(p.out)[threadIdx.x] = 2147483647 + static_cast<int>(threadIdx.x);",
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("order", first_of(["first_in", "last_in", "random"], 1, 0.3))
def test_a_fault_leaves_the_next_launch_right(kind, order, kernels, rng):
    device = SimulatedDevice(checked=True, order=order, seed=5)
    text = f'extern "C" __global__ void faults(Params p) {{ {FAULTS[kind]} }}'
    kernel = kernels.compile(text, "faults", (OUT,), device)
    x = reference.random_rows(rng, (4, 70_000), BFLOAT16)
    with using(device):
        expected = rms_norm(x)
        reference.assert_close(expected, reference.rms_norm(x)[0], BFLOAT16)
        for _ in range(3):
            start = time.process_time()
            with pytest.raises(SimulationError) as caught:
                kernel.launch_plain((2, 1, 1), (64, 1, 1), {"out": np.zeros(64, np.int32)})
            assert caught.value.kind == kind
            assert time.process_time() - start < 5
            np.testing.assert_array_equal(rms_norm(x).view(np.uint16), expected.view(np.uint16))


def test_threads_launch_at_once(rng):
    devices = [
        SimulatedDevice(80, order="random", checked=True),
        CHECKED,
        SimulatedDevice(checked=True, order="last_in"),
    ]
    inputs = [reference.random_rows(rng, (7, 1000), BFLOAT16) for _ in devices]

    def work(i):
        for _ in range(10):
            with using(devices[i]):
                reference.assert_close(rms_norm(inputs[i]), reference.rms_norm(inputs[i])[0], BFLOAT16)

    assert in_threads(3, work) == [None] * 3


def test_a_fault_of_one_thread_is_no_other_threads(writes, kernels):
    good = writes(CHECKED)
    text = f'extern "C" __global__ void faults(Params p) {{ {FAULTS["out_of_bounds"]} }}'
    bad = kernels.compile(text, "faults", (OUT,), CHECKED)

    def fail():
        for _ in range(30):
            with pytest.raises(SimulationError, match="out_of_bounds"):
                bad.launch_plain(ONE, (32, 1, 1), {"out": np.zeros(32, np.int32)})

    def succeed():
        for value in range(200):
            out = np.zeros(64, np.int32)
            good.launch_plain(ONE, (64, 1, 1), {"out": out, "value": value})
            np.testing.assert_array_equal(out, np.arange(value, value + 64))

    assert in_threads(2, lambda i: (fail, succeed)[i]()) == [None] * 2
