"""The simulator as users meet it: the environment, arrays of the host, their own kernels, and a launch's limits."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import reference

import transformer_rtc
from transformer_rtc import (
    Field,
    Kernel,
    KernelManager,
    LaunchConfig,
    SimulatedDevice,
    dispatch,
    implementations,
    rms_norm,
    settings,
    using,
)
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import (
    ArgumentError,
    CompileError,
    CompilerNotFoundError,
    DeviceNotFoundError,
    LaunchError,
    SettingsError,
    SimulationError,
    UnexpectedCompileError,
)
from transformer_rtc.simulator import toolchain
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32, TextSpec

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
ONE = (1, 1, 1)
_SEEDS = itertools.count(1 << 40)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def manager(cache: str) -> KernelManager:
    """Return a manager that has loaded nothing, and shares a cache with the other tests."""
    return KernelManager(DiskCache(cache))


@pytest.fixture
def operators(manager: KernelManager, monkeypatch: pytest.MonkeyPatch) -> KernelManager:
    """Give the operators that manager."""
    monkeypatch.setattr(dispatch, "manager", manager)
    return manager


def python(cache: str, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the user's in a process of its own, with the environment's own settings left out."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMER_RTC_")}
    given = {
        **inherited,
        "TRANSFORMER_RTC_CACHE_DIR": cache,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# ---- What the environment says -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "mode"), [("1", "fast"), ("checked", "checked")])
def test_the_environment_makes_operators_run_in_the_simulator(value, mode, cache):
    # Warnings are errors: who asks for the simulator knows what it is for.
    done = python(
        cache,
        """
        import warnings
        warnings.simplefilter("error")
        import numpy as np, reference, transformer_rtc
        from transformer_rtc import rms_norm
        from transformer_rtc.spec import FLOAT32
        targets = set()
        transformer_rtc.manager.on_event(lambda event: targets.add(str(event.target)))
        x = np.random.default_rng(0).standard_normal((5, 300), np.float32)
        reference.assert_close(rms_norm(x), reference.rms_norm(x)[0], FLOAT32)
        print(*targets)
        """,
        TRANSFORMER_RTC_SIMULATE=value,
    )
    assert printed(done) == [f"sm_90.{mode}"]


@pytest.mark.parametrize("value", ["yes", "2", "CHECKED"])
def test_another_value_of_the_variable_is_refused(value, cache):
    done = python(cache, "import transformer_rtc", TRANSFORMER_RTC_SIMULATE=value)
    assert done.returncode != 0
    assert f"TRANSFORMER_RTC_SIMULATE is {value!r}; it takes 0, 1, checked" in done.stderr


def test_static_kernels_and_the_simulator_cannot_both_be_forced(cache):
    for value in ("1", "checked"):
        both = {"TRANSFORMER_RTC_FORCE_STATIC": "1", "TRANSFORMER_RTC_SIMULATE": value}
        with pytest.raises(SettingsError, match=f"SIMULATE={value} contradicts TRANSFORMER_RTC_FORCE_STATIC=1"):
            settings.read(both)
        done = python(cache, "import transformer_rtc", **both)
        assert done.returncode != 0 and "SettingsError: TRANSFORMER_RTC_SIMULATE" in done.stderr
    assert settings.read({"TRANSFORMER_RTC_FORCE_STATIC": "1", "TRANSFORMER_RTC_SIMULATE": "0"}).simulate == ""
    done = python(
        cache,
        """
        import transformer_rtc
        for implementation in ("simulator", "rtc", transformer_rtc.SimulatedDevice()):
            try:
                with transformer_rtc.using(implementation):
                    pass
            except transformer_rtc.SettingsError as error:
                assert "contradicts TRANSFORMER_RTC_FORCE_STATIC=1" in str(error)
                print("refused")
        """,
        TRANSFORMER_RTC_FORCE_STATIC="1",
    )
    assert printed(done) == ["refused"] * 3


_FALLBACK = """
    import warnings
    import numpy as np
    from transformer_rtc import rms_norm
    x = np.ones((3, 100), np.float32)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            y = rms_norm(x)
    assert np.allclose(y, 1)
    for warning in told:
        print(warning.category.__name__, warning.filename == "<string>", "in a simulator" in str(warning.message))
"""


def test_without_a_driver_arrays_of_the_host_are_simulated_with_one_warning(cache, without_driver):
    # It points at the caller's line.
    assert printed(python(cache, _FALLBACK)) == ["RuntimeWarning", "True", "True"]


def test_without_a_driver_and_a_compiler_the_error_names_both(cache, without_driver):
    done = python(cache, _FALLBACK, PATH="", CXX="")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "DriverNotFoundError: rms_norm: x is on the host" in last
    assert "neither g++ nor clang++ is on PATH: install one" in last


def test_without_a_driver_other_implementations_are_not_replaced(operators, without_driver):
    with using("static"), pytest.raises(DeviceNotFoundError, match="x is on the host, and is staged through a GPU"):
        rms_norm(np.ones((3, 100), np.float32))


def test_the_simulator_is_an_implementation_where_a_compiler_is(monkeypatch):
    assert implementations(rms_norm)[-1] == "simulator"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with contextlib.suppress(DeviceNotFoundError):
        assert "simulator" not in implementations(rms_norm)


def test_without_a_driver_it_is_the_only_one(monkeypatch, without_driver):
    assert implementations(rms_norm) == implementations(transformer_rtc.add_rms_norm_backward) == ["simulator"]
    with pytest.raises(DeviceNotFoundError):
        implementations(rms_norm, 1)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(DeviceNotFoundError):
        implementations(rms_norm)


# ---- Arrays of the host --------------------------------------------------------------------------------------------


@pytest.fixture(params=["simulator", SimulatedDevice(checked=True), SimulatedDevice(80, static=True)], ids=str)
def simulator(request, operators) -> Iterator[None]:
    """Run a test on simulated devices, without a warning."""
    with using(request.param), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
def test_numpy_arrays(dtype, simulator, rng):
    x, weight = reference.random_rows(rng, (3, 4, 77), dtype), reference.random_weight(rng, 77, dtype)
    x.flags.writeable = False
    y, rstd = rms_norm(x, weight, return_rstd=True)
    expected, expected_rstd = reference.rms_norm(x, weight)
    assert (type(y), y.dtype, y.shape) == (np.ndarray, reference.NUMPY_TYPES[dtype], x.shape)
    assert (rstd.dtype, rstd.shape) == (np.float32, (3, 4))
    reference.assert_close(y, expected, dtype)
    reference.assert_close(rstd, expected_rstd, FLOAT32, "rstd")
    for out_type in FLOATS:
        numpy_type = reference.NUMPY_TYPES[out_type]
        y = rms_norm(x, weight, out_dtype=numpy_type)
        assert y.dtype == numpy_type
        out = np.full(x.shape, np.nan, numpy_type)
        assert rms_norm(x, weight, out=out) is out
        np.testing.assert_array_equal(out.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
def test_torch_tensors_of_the_host(dtype, simulator, rng):
    torch = pytest.importorskip("torch")
    integers, numpy_integers = (torch.int32, np.int32) if dtype is FLOAT32 else (torch.int16, np.int16)
    kind = getattr(torch, dtype.name)

    def tensor(host):  # torch knows no ml_dtypes: the bits travel as integers
        return torch.from_numpy(host.view(numpy_integers)).view(kind)

    x, weight = reference.random_rows(rng, (5, 77), dtype), reference.random_weight(rng, 77, dtype)
    y, rstd = rms_norm(tensor(x), tensor(weight), return_rstd=True)
    expected, expected_rstd = reference.rms_norm(x, weight)
    assert type(y) is torch.Tensor and y.dtype == kind and y.device.type == "cpu" and rstd.dtype == torch.float32
    reference.assert_close(y.view(integers).numpy().view(x.dtype), expected, dtype)
    reference.assert_close(rstd.numpy(), expected_rstd, FLOAT32, "rstd")
    out = torch.full_like(y, float("nan"))
    assert rms_norm(tensor(x), tensor(weight), out=out) is out
    assert torch.equal(out.view(integers), y.view(integers))
    in_place = tensor(x.copy())
    assert rms_norm(in_place, tensor(weight), out=in_place) is in_place
    assert torch.equal(in_place.view(integers), y.view(integers))
    with pytest.raises(ArgumentError, match="same framework"):
        rms_norm(tensor(x), weight)


def test_torch_tensors_that_require_grad_are_refused(simulator):
    torch = pytest.importorskip("torch")
    x, weight = torch.ones(4, 64), torch.nn.Parameter(torch.ones(64))
    with pytest.raises(ArgumentError, match="weight requires grad"):
        rms_norm(x, weight)
    with torch.no_grad():
        assert rms_norm(x, weight).shape == x.shape
    assert rms_norm(x, weight.detach()).shape == x.shape


def test_arrays_that_speak_dlpack(simulator, rng):
    x = reference.random_rows(rng, (4, 100), FLOAT32)

    class Other:
        def __dlpack__(self, *, stream=None, max_version=None, **options):
            assert stream is None
            return x.__dlpack__()

        def __dlpack_device__(self):
            return x.__dlpack_device__()

    y = rms_norm(Other())
    assert type(y) is np.ndarray
    reference.assert_close(y, reference.rms_norm(x)[0], FLOAT32)


def test_streams_are_refused(simulator):
    x = np.ones((3, 64), np.float32)
    for stream in (0, 1, type("Stream", (), {"cuda_stream": 7})()):
        with pytest.raises(ArgumentError, match=r"^rms_norm: stream must be None: the simulator has no streams"):
            rms_norm(x, stream=stream)


def test_outputs_that_overlap_or_cannot_be_written_are_refused(simulator):
    memory = np.zeros((5, 100), np.float32)
    with pytest.raises(ArgumentError, match="out must be x itself or not overlap it"):
        rms_norm(memory[:4], out=memory[1:])
    with pytest.raises(ArgumentError, match="rows that overlap each other"):
        rms_norm(memory, out=np.lib.stride_tricks.as_strided(np.zeros(199, np.float32), (5, 100), (4, 4)))
    out = np.zeros((5, 100), np.float32)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="out is read-only"):
        rms_norm(memory, out=out)


def test_using_is_left_as_it_was_found(operators):
    before = dispatch._chosen.get()
    with contextlib.suppress(KeyError), using(SimulatedDevice(architecture=120)):
        raise KeyError
    assert dispatch._chosen.get() == before
    for wrong in ("gpu", "sm_90", 90, None):
        with pytest.raises(ArgumentError, match="it takes rtc, static, simulator or a SimulatedDevice"), using(wrong):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": 75}, "architecture is 75; it takes 80, 89, 90, 100, 120"),
        ({"order": "fifo"}, "order is 'fifo'; it takes first_in, last_in, random"),
        ({"seed": -1}, "seed is -1; it takes an integer from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"multiprocessors": 0}, "multiprocessors is 0; it takes an integer from 1 to 1024"),
    ],
)
def test_devices_that_cannot_be_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        SimulatedDevice(**options)


# ---- A kernel of the user's ----------------------------------------------------------------------------------------

WRITES = """
extern "C" __global__ void writes(Params params) {
  static_cast<int*>(params.out)[blockIdx.x * blockDim.x + threadIdx.x] = params.value + static_cast<int>(threadIdx.x);
}
"""
FIELDS = (Field("out", "pointer"), Field("value", "int32"))


@pytest.fixture
def writes(manager):
    """Return the kernel on a device."""
    return lambda device: manager.compile(WRITES, "writes", FIELDS, device)


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_a_kernel_of_ones_own(checked, writes):
    kernel = writes(SimulatedDevice(checked=checked))
    assert isinstance(kernel, Kernel)
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
            kernel.launch_plain((1, 1, 1), (33, 1, 1), {"out": out, "value": 7})


def test_what_lies_between_an_arrays_rows_is_not_touched(writes):
    kernel = writes(SimulatedDevice(checked=True))
    memory = np.zeros((4, 10), np.int32)
    kernel.launch_plain(ONE, (5, 1, 1), {"out": memory[1:3, 2:7], "value": 1})
    np.testing.assert_array_equal(memory[1, 2:7], np.arange(1, 6))
    assert memory.sum() == 15
    with pytest.raises(SimulationError, match="out_of_bounds"):
        kernel.launch_plain(ONE, (6, 1, 1), {"out": memory[1:3, 2:7], "value": 1})
    kernel.launch_plain(ONE, (20, 1, 1), {"out": memory[1:3], "value": 1})
    with pytest.raises(SimulationError, match="out_of_bounds"):
        kernel.launch_plain(ONE, (21, 1, 1), {"out": memory[1:3], "value": 1})
    # In every other element, and backwards: the first access of the second thread is beyond, or before.
    for view in (memory[0, ::2], memory[:0:-1], memory.reshape(2, 2, 10)[:, :, :1]):
        with pytest.raises(SimulationError, match="out_of_bounds") as caught:
            kernel.launch_plain(ONE, (32, 1, 1), {"out": view, "value": 1})
        assert caught.value.thread == (10 if view.shape == (3, 10) else 1, 0, 0)


def test_parameters_of_another_size_are_refused(writes, manager):
    kernel = writes(SimulatedDevice())
    out = np.zeros(32, np.int32)
    packed = kernel.params.pack(out=out.ctypes.data, value=3)
    kernel.launch_plain(ONE, (32, 1, 1), packed)
    assert out[0] == 3
    for wrong in (packed[:-1], packed + b"\0", b""):
        with pytest.raises(ArgumentError, match=f"writes takes 16 bytes of parameters; {len(wrong)} were given"):
            kernel.launch_plain(ONE, (32, 1, 1), wrong)
    with pytest.raises(ArgumentError, match="values for out, value expected"):
        kernel.launch_plain(ONE, (32, 1, 1), {"out": out})
    with pytest.raises(ArgumentError, match="out must be an address or a numpy array"):
        kernel.launch_plain(ONE, (32, 1, 1), {"out": [1, 2], "value": 3})
    text = 'struct Mine { long long a, b, c; };\nextern "C" __global__ void mine(Mine mine) {}'
    with pytest.raises(LaunchError, match="mine takes 24 bytes of parameters, and its fields describe 16"):
        manager.compile(text, "mine", FIELDS, SimulatedDevice())


def test_a_stream_is_refused(writes):
    with pytest.raises(ArgumentError, match="stream is 5; the simulator has none but 0"):
        writes(SimulatedDevice()).launch_plain(ONE, ONE, {"out": np.zeros(1, np.int32), "value": 0}, stream=5)


def refused(kernel: Kernel, message: str, grid=ONE, block=ONE, cluster=ONE, dynamic=0, cooperative=False) -> None:
    out = np.zeros(4096, np.int32)
    with pytest.raises(LaunchError, match=message):
        kernel.launch(LaunchConfig(grid, block, cluster, dynamic, cooperative), {"out": out, "value": 1})
    assert not out.any(), "nothing ran"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_launches_beyond_the_limits_are_refused(architecture, writes):
    device = SimulatedDevice(architecture, multiprocessors=2)
    kernel = writes(device)
    limits = ARCHITECTURES[architecture]
    refused(kernel, "block is", block=(1025, 1, 1))
    refused(kernel, "block is", block=(1, 1, 65))
    refused(kernel, "block is", block=(0, 1, 1))
    refused(kernel, "2048 threads of a CTA; it takes at most 1024", block=(1024, 2, 1))
    refused(kernel, "grid is", grid=(0, 1, 1))
    refused(kernel, "grid is", grid=(1, 65536, 1))
    refused(kernel, "dynamic shared memory", dynamic=limits.shared_memory_per_cta + 1)
    most = limits.max_cluster_size
    refused(kernel, "can hold 0", grid=(2 * most, 1, 1), cluster=(2 * most, 1, 1))
    if most > 1:
        refused(kernel, "must be a multiple of the cluster", grid=(3, 1, 1), cluster=(2, 1, 1))
        refused(kernel, "must be a multiple of the cluster", grid=(2, 3, 1), cluster=(2, 2, 1))
    resident = 2 * kernel.max_active_ctas((256, 1, 1))
    refused(
        kernel, f"a cooperative grid of {resident + 1} CTAs must be resident; the simulated sm_{architecture} can hold "
        f"{resident} of them", grid=(resident + 1, 1, 1), block=(256, 1, 1), cooperative=True,
    )  # fmt: skip
    # What is just allowed runs.
    out = np.zeros(1 << 16, np.int32)
    for config in (
        LaunchConfig(ONE, (1024, 1, 1)),
        LaunchConfig((resident, 1, 1), (256, 1, 1), cooperative=True),
        LaunchConfig(ONE, (32, 1, 1), dynamic_shared_memory=limits.shared_memory_per_cta),
        LaunchConfig((2 * most, 1, 1), (32, 1, 1), (most, 1, 1)),
    ):
        out.fill(0)
        kernel.launch(config, {"out": out, "value": 1})
        count = config.grid[0] * config.block[0]
        assert out[:count].all() and not out[count:].any(), config


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


def test_attributes_and_occupancy_are_an_architectures(manager):
    out = np.zeros(1)
    for architecture, threads, ctas in (
        (80, 2048, 32),
        (89, 1536, 24),
        (90, 2048, 32),
        (100, 2048, 32),
        (120, 1536, 24),
    ):
        limits = ARCHITECTURES[architecture]
        kernel = manager.compile(SHARED, "shares", (Field("out", "pointer"),), SimulatedDevice(architecture))
        static = kernel.static_shared_memory
        assert static == 48, "8 bytes and 5 doubles"
        assert (kernel.max_threads, kernel.registers, kernel.local_memory) == (1024, 0, 0)
        assert kernel.max_dynamic_shared_memory == 48 * 1024 - static
        assert kernel.max_active_ctas(ONE) == ctas
        assert kernel.max_active_ctas((256, 1, 1)) == threads // 256
        assert kernel.max_active_ctas((1000, 1, 1)) == threads // 1024
        assert kernel.max_active_ctas((8, 8, 8)) == threads // 512
        assert kernel.max_active_ctas((2048, 1, 1)) == 0
        assert kernel.max_active_ctas((32, 1, 1), limits.shared_memory_per_cta - static) == 1
        assert kernel.max_active_ctas((32, 1, 1), limits.shared_memory_per_cta - static + 1) == 0
        # A third of the memory, of which each CTA's own kilobyte is a part.
        third = (limits.shared_memory_per_cta + 1024) // 3 - 1024 - static
        assert kernel.max_active_ctas((32, 1, 1), third) == 3
        assert kernel.max_active_ctas((32, 1, 1), third + 1) == 2
        most = limits.max_cluster_size
        assert kernel.max_active_clusters((threads, 1, 1), (2, 1, 1)) == 0
        assert kernel.max_active_clusters((512, 1, 1), (most, 1, 1)) == threads // 512 * 8 // most
        assert kernel.max_active_clusters((512, 1, 1), (2 * most, 1, 1)) == 0
        kernel.launch(LaunchConfig(ONE, ONE, dynamic_shared_memory=16), {"out": out})
        assert out[0] == 6
    text = '#include "platform.cuh"\nextern "C" __global__ void large() { TRTC_SHARED(char, all, 49153); all[0] = 1; }'
    with pytest.raises(LaunchError, match=r"49153 bytes of static shared memory .* takes at most 49152"):
        manager.compile(text, "large", (), SimulatedDevice()).launch_plain(ONE, ONE, {})


def test_launch_bounds_are_the_most_threads(manager):
    text = '#define WIDTH 2\nextern "C" __global__ __launch_bounds__(32 * WIDTH, 1) void bounded() {}'
    kernel = manager.compile(text, "bounded", (), SimulatedDevice())
    assert kernel.max_threads == 64
    kernel.launch_plain(ONE, (64, 1, 1), {})
    with pytest.raises(LaunchError, match="65 threads of a CTA; it takes at most 64"):
        kernel.launch_plain(ONE, (65, 1, 1), {})


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_kernels_print(checked, manager, capfd):
    text = r"""
    extern "C" __global__ void prints(Params params) {
      if (threadIdx.x % 2 == 1) printf("block %u thread %u: %.2f %s\n", blockIdx.x, threadIdx.x, 0.25f, "done");
    }
    """
    kernel = manager.compile(text, "prints", (Field("value", "int32"),), SimulatedDevice(checked=checked))
    kernel.launch_plain((2, 1, 1), (4, 1, 1), {"value": 0})
    assert capfd.readouterr().out.splitlines() == [
        f"block {block} thread {thread}: 0.25 done" for block in (0, 1) for thread in (1, 3)
    ]


# ---- The compiler --------------------------------------------------------------------------------------------------


def test_a_compile_error_names_the_line(manager):
    text = 'extern "C" __global__ void broken(Params params) {\n  int a = 1;\n  undeclared_name = a;\n}\n'
    for checked in (False, True):
        with pytest.raises(CompileError, match="the C\\+\\+ compiler could not compile broken") as caught:
            manager.compile(text, "broken", FIELDS, SimulatedDevice(checked=checked))
        error = caught.value
        # A line of the text, whatever is put before it.
        assert "broken.cu:3:" in error.log and "undeclared_name" in error.log
        assert "  undeclared_name = a;" in str(error)
        assert "/tmp" not in error.log
    with pytest.raises(CompileError, match=r"nonexistent\.cuh"):
        manager.compile('#include "nonexistent.cuh"\n' + WRITES, "writes", FIELDS, SimulatedDevice())


def test_headers_of_the_system_are_not_found(manager):
    with pytest.raises(CompileError, match="cstdint"):
        manager.compile("#include <cstdint>\n" + WRITES, "writes", FIELDS, SimulatedDevice())


@pytest.mark.parametrize(
    "declaration",
    [
        "__shared__ float values[32]",
        "extern __shared__ float values[]",
        "__shared__ int one",
        "static __shared__ int a[2]",
    ],
)
def test_raw_shared_memory_is_a_clear_error(declaration, manager):
    text = f'extern "C" __global__ void raw(Params params) {{\n  {declaration};\n}}\n'
    with pytest.raises(CompileError) as caught:
        manager.compile(text, "raw", FIELDS, SimulatedDevice())
    assert "TRTC_SHARED" in caught.value.log and "raw.cu:" in caught.value.log


def test_macros_among_the_options_are_taken(manager):
    text = """
    extern "C" __global__ void defined(Params params) {
    #ifdef GONE
      static_cast<int*>(params.out)[0] = -1;
    #else
      static_cast<int*>(params.out)[0] = VALUE + OTHER + ONE + __CUDA_ARCH__;
    #endif
    }
    """
    options = (
        "-DVALUE=20",
        "--define-macro=OTHER=300",
        "-D",
        "ONE",
        "-DGONE",
        "-UGONE",
        "-lineinfo",
        "--use_fast_math",
    )
    out = np.zeros(1, np.int32)
    kernel = manager.compile(text, "defined", (Field("out", "pointer"),), SimulatedDevice(89), options)
    kernel.launch_plain(ONE, ONE, {"out": out})
    assert out[0] == 20 + 300 + 1 + 890


@pytest.mark.parametrize("command", ["/nowhere/c++", "no-such-compiler -O2"])
def test_a_compiler_that_is_not_there_is_one_clear_error(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", command)
    fresh = KernelManager(DiskCache(str(tmp_path)))
    with pytest.raises(CompilerNotFoundError, match=re.escape(f"CXX is {command!r}, which is not found: install one")):
        fresh.compile(WRITES, "writes", FIELDS, SimulatedDevice())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFoundError, match=r"neither g\+\+ nor clang\+\+ is on PATH: install one"):
        fresh.compile(WRITES, "writes", FIELDS, SimulatedDevice())
    monkeypatch.undo()
    fresh.compile(WRITES, "writes", FIELDS, SimulatedDevice())


def test_a_compiler_may_have_options(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", " ".join(toolchain._command()) + " -DEXTRA=41")
    text = 'extern "C" __global__ void extra(Params params) { static_cast<int*>(params.out)[0] = EXTRA + 1; }'
    out = np.zeros(1, np.int32)
    fresh = KernelManager(DiskCache(str(tmp_path)))
    fresh.compile(text, "extra", (Field("out", "pointer"),), SimulatedDevice()).launch_plain(ONE, ONE, {"out": out})
    assert out[0] == 42


@pytest.mark.parametrize("name", ["g++", "clang++"])
@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_both_compilers_give_the_same_numbers(name, checked, tmp_path, monkeypatch, rng):
    if not toolchain.shutil.which(name):
        pytest.skip(f"{name} is not installed")
    x = reference.random_rows(rng, (5, 300), BFLOAT16)
    seen = []
    for command in dict.fromkeys((name, " ".join(toolchain._command()))):
        monkeypatch.setenv("CXX", command)
        fresh = KernelManager(DiskCache(str(tmp_path / str(len(seen)))))
        monkeypatch.setattr(dispatch, "manager", fresh)
        # A device that no other test has: a plan keeps its kernel.
        device = SimulatedDevice(checked=checked, seed=next(_SEEDS))
        with using(device):
            seen.append(rms_norm(x).view(np.uint16))
        assert fresh.counts["compile"] == 1
    for bits in seen[1:]:
        np.testing.assert_array_equal(bits, seen[0])
    reference.assert_close(seen[0].view(x.dtype), reference.rms_norm(x)[0], BFLOAT16)


# ---- The cache -----------------------------------------------------------------------------------------------------


def test_modes_and_architectures_have_entries_of_their_own(tmp_path):
    cache = DiskCache(str(tmp_path))
    first = KernelManager(cache)
    spec = TextSpec(WRITES, "writes", FIELDS)
    devices = [
        SimulatedDevice(architecture, checked=checked) for architecture in ARCHITECTURES for checked in (False, True)
    ]
    images = set()
    for device in devices:
        assert not first.is_compiled(spec, device)
        images.add(first.image(spec, device.target).data)
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
    KernelManager(cache).compile(WRITES, "writes", FIELDS, SimulatedDevice(checked=True))
    monkeypatch.setattr(toolchain, "compile_program", pytest.fail)
    strict = KernelManager(cache, options=settings.read({"TRANSFORMER_RTC_ON_COMPILE": "error"}))
    kernel = strict.compile(WRITES, "writes", FIELDS, SimulatedDevice(checked=True))
    out = np.zeros(4, np.int32)
    kernel.launch_plain(ONE, (4, 1, 1), {"out": out, "value": 1})
    np.testing.assert_array_equal(out, [1, 2, 3, 4])
    assert (strict.counts["compile"], strict.counts["load"]) == (0, 1)
    with pytest.raises(UnexpectedCompileError, match=r"writes for sm_90.fast is not in the cache"):
        strict.compile(WRITES, "writes", FIELDS, SimulatedDevice())


def test_a_damaged_entry_is_compiled_again(tmp_path):
    cache = DiskCache(str(tmp_path))
    KernelManager(cache).compile(WRITES, "writes", FIELDS, SimulatedDevice())
    (entry,) = tmp_path.glob("writes.*")
    entry.write_bytes(entry.read_bytes()[:-100])
    again = KernelManager(cache)
    again.compile(WRITES, "writes", FIELDS, SimulatedDevice())
    assert again.counts["compile"] == 1


def test_many_modules_cost_no_descriptors(writes):
    writes(SimulatedDevice())
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(40):
        writes(SimulatedDevice(order="random", seed=seed))
    assert len(os.listdir("/proc/self/fd")) <= before


# ---- Launches that end otherwise, and several at once --------------------------------------------------------------


def test_an_interrupt_ends_a_long_launch_and_the_next_one_is_right(cache):
    text = """
    import signal, time
    import numpy as np
    from transformer_rtc import Field, SimulatedDevice, manager
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    fields = (Field("out", "pointer"), Field("rounds", "int32"))
    kernel = manager.compile(
        'extern "C" __global__ void waits(Params p) {'
        '  for (int i = 0; i < p.rounds; ++i) __syncthreads();'
        '  static_cast<int*>(p.out)[threadIdx.x] = p.rounds; }',
        "waits", fields, SimulatedDevice(),
    )
    out = np.zeros(64, np.int32)
    print("ready", flush=True)
    start = time.monotonic()
    try:
        kernel.launch_plain((1, 1, 1), (64, 1, 1), {"out": out, "rounds": 2**31 - 1})
    except KeyboardInterrupt:
        print("interrupted", out.any(), flush=True)
    kernel.launch_plain((1, 1, 1), (64, 1, 1), {"out": out, "rounds": 5})
    print((out == 5).all())
    """
    environment = {**os.environ, "TRANSFORMER_RTC_CACHE_DIR": cache}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - start < 5
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "interrupted False\nTrue\n"), err


FAULTS = {
    "out_of_bounds": "static_cast<int*>(p.out)[1000000] = 1;",
    "trap": "if (threadIdx.x == 3) __trap();",
    "deadlock": "while (atomicAdd(static_cast<int*>(p.out), 0) == 0) __nanosleep(1);",
    "divergent_barrier": "if (threadIdx.x < 3) return; __syncthreads();",
    "overflow": "static_cast<int*>(p.out)[threadIdx.x] = 2147483647 + static_cast<int>(threadIdx.x);",
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("order", ["first_in", "last_in", "random"])
def test_a_fault_leaves_the_next_launch_right(kind, order, manager, operators, rng):
    device = SimulatedDevice(checked=True, order=order, seed=5)
    text = f'extern "C" __global__ void faults(Params p) {{ {FAULTS[kind]} }}'
    kernel = manager.compile(text, "faults", (Field("out", "pointer"),), device)
    x = reference.random_rows(rng, (4, 70_000), BFLOAT16)
    with using(device):
        expected = rms_norm(x)
        reference.assert_close(expected, reference.rms_norm(x)[0], BFLOAT16)
        for _ in range(3):
            start = time.monotonic()
            with pytest.raises(SimulationError) as caught:
                kernel.launch_plain((2, 1, 1), (64, 1, 1), {"out": np.zeros(64, np.int32)})
            assert caught.value.kind == kind
            assert time.monotonic() - start < 5
            np.testing.assert_array_equal(rms_norm(x).view(np.uint16), expected.view(np.uint16))


def test_threads_launch_at_once(operators, rng):
    devices = (
        SimulatedDevice(checked=True),
        SimulatedDevice(80, order="random"),
        SimulatedDevice(120),
        SimulatedDevice(),
    )
    inputs = [reference.random_rows(rng, (7, 1000 + 100 * i), BFLOAT16) for i in range(len(devices))]
    failures: list[BaseException] = []
    start = threading.Barrier(len(devices))

    def work(device, x):
        try:
            expected = reference.rms_norm(x)[0]
            start.wait()
            for _ in range(10):
                with using(device):
                    reference.assert_close(rms_norm(x), expected, BFLOAT16)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(devices, inputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures


def test_a_fault_of_one_thread_is_no_other_threads(manager):
    device = SimulatedDevice(checked=True)
    good = manager.compile(WRITES, "writes", FIELDS, device)
    text = 'extern "C" __global__ void faults(Params p) { static_cast<int*>(p.out)[1 << 20] = 1; }'
    bad = manager.compile(text, "faults", (Field("out", "pointer"),), device)
    faults: list[str] = []

    def fail():
        for _ in range(30):
            try:
                bad.launch_plain(ONE, (32, 1, 1), {"out": np.zeros(32, np.int32)})
            except SimulationError as error:
                faults.append(error.kind)

    other = threading.Thread(target=fail)
    other.start()
    for value in range(200):
        out = np.zeros(64, np.int32)
        good.launch_plain(ONE, (64, 1, 1), {"out": out, "value": value})
        np.testing.assert_array_equal(out, np.arange(value, value + 64))
    other.join(60)
    assert faults == ["out_of_bounds"] * 30


def test_the_public_names_are_there():
    assert {"SimulatedDevice", "SimulationError"} <= set(transformer_rtc.__all__)
    assert str(SimulatedDevice(120)) == "the simulated sm_120"
