# SPDX-License-Identifier: Apache-2.0
"""Calls that are captured into graphs of torch, CuPy and the driver: cold ones, and several in flight together."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import reference
from cases import Case
from frameworks import FRAMEWORKS, bits, capture, inputs
from on_gpu import CLUSTER, FIELDS, MEET, Memory, resident

from transformer_rtc import (
    ArgumentError,
    DeviceArray,
    LaunchConfig,
    _native,
    device_limits,
    layer_norm_backward,
    operator,
    rms_norm,
    rms_norm_backward,
)
from transformer_rtc.cache import DiskCache
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.spec import BFLOAT16, FLOAT32

CASE = Case(64, 4096, BFLOAT16, BFLOAT16, BFLOAT16, False)


def driver():
    return pytest.importorskip("cuda.bindings.driver")


@pytest.fixture(autouse=True)
def context():
    """Make the device's context current, as cuda-bindings leaves that to its caller."""
    cuda = driver()
    done(cuda.cuInit(0))
    device = done(cuda.cuDeviceGet(0))
    done(cuda.cuCtxPushCurrent(done(cuda.cuDevicePrimaryCtxRetain(device))))
    yield
    done(cuda.cuCtxPopCurrent())
    done(cuda.cuDevicePrimaryCtxRelease(device))


def done(result):
    """Return what a call of cuda-bindings gave."""
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None


class Graph:
    """What is put on a stream within a ``with`` block, captured by the driver alone.

    A test of the mode GLOBAL is marked `without_jax`: a thread of JAX ends such a capture.
    """

    def __init__(self, stream: int, mode: str = "THREAD_LOCAL") -> None:
        self.cuda, self.mode = driver(), mode
        self.stream = self.cuda.CUstream(stream)

    def __enter__(self):
        mode = getattr(self.cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{self.mode}")
        done(self.cuda.cuStreamBeginCapture(self.stream, mode))
        return self

    def __exit__(self, kind, *_):
        ended = self.cuda.cuStreamEndCapture(self.stream)
        if kind is None:
            self.graph = done(ended)
            self.executable = done(self.cuda.cuGraphInstantiate(self.graph, 0))

    def replay(self, stream: int | None = None) -> None:
        done(self.cuda.cuGraphLaunch(self.executable, self.stream if stream is None else self.cuda.CUstream(stream)))


def data(gpu, rng, case=CASE):
    """Return x, weight and dy on the GPU."""
    (x, weight), (dy, _) = inputs(rng, case), inputs(rng, case)
    return gpu.array(x), gpu.array(weight), gpu.array(dy)


def assert_same(gpu, found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(gpu.host(one)), bits(gpu.host(other)))


def all_of(x, weight, dy, **options):
    """Return a plain launch's result, and those of two launches that share a workspace."""
    return (
        rms_norm(x, weight, **options),
        *rms_norm_backward(dy, x, weight, **options),
        *layer_norm_backward(dy, x, weight, **options),
    )


# ---- Cold calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [pytest.param("global", marks=pytest.mark.without_jax), "thread_local", "relaxed"])
def test_a_cold_call_in_a_graph_of_torch(mode, implementation, cold, gpu, rng):
    torch = gpu.module
    x, weight, dy = data(gpu, rng)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        found = all_of(x, weight, dy)
    assert cold.counts["load"] >= 4  # they were cold
    for _ in range(3):
        x.copy_(gpu.array(inputs(rng, CASE)[0]))
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(gpu, found, all_of(x, weight, dy))
    want = reference.rms_norm(gpu.host(x), gpu.host(weight))[0]
    reference.assert_close(gpu.host(found[0]), want, CASE.out)


def test_a_cold_call_with_the_captured_stream_of_torch_as_its_argument(cold, gpu, rng):
    torch = gpu.module
    x, weight, dy = data(gpu, rng)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with capture(graph, stream=side):
        found = all_of(x, weight, dy, stream=side)
    assert cold.counts["compile"] >= 4
    graph.replay()
    torch.cuda.synchronize()
    assert_same(gpu, found, all_of(x, weight, dy))


@pytest.mark.parametrize("mode", [pytest.param("GLOBAL", marks=pytest.mark.without_jax), "THREAD_LOCAL", "RELAXED"])
def test_a_cold_call_in_a_graph_of_the_driver_with_tensors_of_torch(mode, implementation, cold, gpu, rng):
    torch = gpu.module
    x, weight, dy = data(gpu, rng)
    torch.cuda.synchronize()
    side, pool = torch.cuda.Stream(), torch.cuda.MemPool()
    # Whoever captures without torch must keep what torch allocates meanwhile from being used again.
    with torch.cuda.stream(side), torch.cuda.use_mem_pool(pool), Graph(side.cuda_stream, mode) as graph:
        found = all_of(x, weight, dy)
    assert cold.counts["load"] >= 4
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert_same(gpu, found, all_of(x, weight, dy))


def test_a_cold_call_of_rows_shared_by_ctas_in_a_graph(monkeypatch, manager, limited, gpu, rng):
    torch = gpu.module
    monkeypatch.setattr(operator, "manager", manager)
    call, _ = limited
    x, weight, _ = data(gpu, rng, Case(40, 131071, FLOAT32, FLOAT32, FLOAT32, False))
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        found = call(x, weight)
    assert manager.counts["load"] >= 1
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_same(gpu, (found,), (call(x, weight),))


def test_cold_kernels_of_ones_own_in_a_graph_of_the_driver(manager):
    stream = _native.own_stream(0)
    plain, met, ranked = Memory(64), Memory(2, 0), Memory(8)
    _native.synchronize_stream(0, 0)  # which the stream of our own does not wait for
    text = (
        'extern "C" __global__ void own(Params params) {\n'
        "  static_cast<int*>(params.out)[threadIdx.x] = 3 * threadIdx.x;\n}"
    )
    with Graph(stream) as graph:
        kernel = manager.compile(text, "own", FIELDS[:1], 0)
        kernel.launch_plain((1, 1, 1), (64, 1, 1), {"out": plain.pointer}, stream)
        meet = manager.compile(MEET, "meet", FIELDS[:1], 0)
        ctas = resident(meet, 256)
        meet.launch_cooperative((ctas, 1, 1), (256, 1, 1), {"out": met.pointer}, stream)
        if device_limits(0).max_cluster_size >= 4:
            ranks = manager.compile(CLUSTER, "ranks", FIELDS[:1], 0)
            ranks.launch(LaunchConfig((8, 1, 1), (64, 1, 1), cluster=(4, 1, 1)), {"out": ranked.pointer}, stream)
    assert (plain.read() == -1).all(), "a launch was not captured"
    graph.replay()
    _native.synchronize_stream(0, stream)
    np.testing.assert_array_equal(plain.read(), 3 * np.arange(64))
    np.testing.assert_array_equal(met.read(), [ctas, ctas])
    if device_limits(0).max_cluster_size >= 4:
        np.testing.assert_array_equal(ranked.read(), [400, 401, 402, 403] * 2)


def test_a_captured_launch_may_begin_before_the_one_before_it_has_ended(gpu, rng, implementation):
    torch = gpu.module
    cuda, side = driver(), torch.cuda.Stream()
    x, weight, _ = data(gpu, rng)
    y, z = torch.empty_like(x), torch.empty_like(x)
    rms_norm(x, weight, out=y)
    torch.cuda.synchronize()
    with torch.cuda.stream(side), Graph(side.cuda_stream) as graph:
        rms_norm(x, weight, out=y)
        rms_norm(y, weight, out=z)
    edges = getattr(cuda, "cuGraphGetEdges_v2", None) or cuda.cuGraphGetEdges
    status, _, _, kinds, count = edges(graph.graph, 8)
    assert int(status) == 0 and count == 1
    programmatic = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    assert kinds[0].type == (programmatic if device_limits(0).architecture >= 90 else 0)
    graph.replay()
    side.synchronize()
    assert_same(gpu, (z,), (rms_norm(rms_norm(x, weight), weight),))


def test_a_failure_in_a_capture_leaves_it_whole(cold, gpu):
    torch = gpu.module
    x = torch.ones(4, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        y = x + 1
        with pytest.raises(ArgumentError, match="weight must have the shape"):
            rms_norm(x, torch.empty(32, device="cuda"))
        z = rms_norm(y, eps=0.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (z == 1).all()


# ---- Arrays that no framework's graphs know -------------------------------------------------------------------------


def device_array(host):
    buffer = _native.Buffer(0, host.nbytes)
    buffer.copy_from_host(0, host.ctypes.data, host.nbytes, 0)
    _native.synchronize_stream(0, 0)
    return DeviceArray(buffer, host.shape, FLOAT32.id, 1)


def host_of(array):
    host = np.empty(array.shape, np.float32)
    array._buffer.copy_to_host(0, host.ctypes.data, host.nbytes, 0)
    _native.synchronize_stream(0, 0)
    return host


def streams(count):
    cuda = driver()
    return [int(done(cuda.cuStreamCreate(1))) for _ in range(count)]  # 1: not ordered with the legacy default stream


def test_two_graphs_of_the_driver_in_flight_have_workspaces_of_their_own(cold, rng):
    shape = (300, 4096)
    given = [[rng.standard_normal(shape, dtype=np.float32) for _ in range(2)] for _ in range(2)]
    weight = rng.standard_normal(shape[-1], dtype=np.float32)
    expected = [rms_norm_backward(dy, x, weight) for dy, x in given]
    on_device = [[device_array(host) for host in (dy, x, weight)] for dy, x in given]
    graphs, results = [], []
    for stream, arrays in zip(streams(2), on_device, strict=True):
        with Graph(stream) as graph:
            results.append(rms_norm_backward(*arrays, stream=stream))
        graphs.append(graph)
    for _ in range(50):
        for graph in graphs:
            graph.replay()
    for graph in graphs:
        _native.synchronize_stream(0, int(graph.stream))
    for found, want in zip(results, expected, strict=True):
        for one, other in zip(found, want, strict=True):
            np.testing.assert_array_equal(host_of(one), other)


def test_a_cold_call_in_a_graph_of_the_driver_without_a_framework(cold, rng):
    (stream,), x = streams(1), rng.standard_normal((64, 4096), dtype=np.float32)
    on_device = device_array(x)
    with Graph(stream) as graph:
        y = rms_norm(on_device, stream=stream)
        z = rms_norm(y, stream=stream)
    assert cold.counts == {"compile": 1, "load": 1}
    graph.replay()
    _native.synchronize_stream(0, stream)
    expected = rms_norm(x)
    np.testing.assert_array_equal(host_of(y), expected)
    np.testing.assert_array_equal(host_of(z), rms_norm(expected))


def test_a_graph_of_cupy_has_a_workspace_that_cupy_does_not_give_again(cold, rng):
    kind = FRAMEWORKS["cupy"]()
    cupy = kind.module
    case = Case(300, 4096, FLOAT32, FLOAT32, FLOAT32, False)
    (x, weight), (dy, _) = inputs(rng, case), inputs(rng, case)
    x, weight, dy = kind.array(x), kind.array(weight), kind.array(dy)
    expected = [kind.host(array) for array in rms_norm_backward(dy, x, weight)]
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with side:
        side.begin_capture()
        found = rms_norm_backward(dy, x, weight)
        graph = side.end_capture()
        # Whatever CuPy has free is given to others, which replays must not write to.
        others = [cupy.full(1 << size, 7, cupy.uint8) for size in range(9, 25)]
        for _ in range(5):
            graph.launch(side)
        side.synchronize()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(kind.host(one), other)
    assert all((cupy.asnumpy(other) == 7).all() for other in others)


def test_arrays_of_the_host_are_computed_at_once_and_refused_on_the_captured_stream(cold, gpu, rng):
    torch = gpu.module
    host, weight = inputs(rng, CASE)
    x = torch.ones(4, 64, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with capture(graph, stream=side):
        y = x + 1
        found = rms_norm(host, weight)
        for array in (host, torch.ones(4, 64)):
            with pytest.raises(ArgumentError, match="on the host, which cannot be part of the graph"):
                rms_norm(array, stream=side)
        z = rms_norm(y, eps=0.0)
    np.testing.assert_array_equal(bits(found), bits(rms_norm(host, weight)))
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 2).all() and (z == 1).all()


def test_arrays_of_jax_are_refused_on_a_captured_stream(gpu):
    x = FRAMEWORKS["jax"]().array(np.ones((4, 64), np.float32))
    torch = gpu.module
    tensor = torch.ones(4, 64, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with capture(graph, stream=side):
        y = tensor + 1
        with pytest.raises(ArgumentError, match="which cannot be part of the graph"):
            rms_norm(x, stream=side)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 2).all()


# ---- Beside a capture, and after it ---------------------------------------------------------------------------------


@pytest.mark.without_jax
def test_another_threads_cold_calls_do_not_end_a_capture(cold, gpu, rng):
    torch = gpu.module
    x, weight, dy = data(gpu, rng)
    host, of_host = inputs(rng, CASE._replace(hidden=1000))
    failures = []

    def work():
        try:
            rms_norm(host, of_host)
            kernel = cold.compile('extern "C" __global__ void other() {}', "other", (), 0)
            kernel.launch_plain((1, 1, 1), (32, 1, 1), b"", _native.own_stream(0))
            _native.synchronize_stream(0, _native.own_stream(0))
        except BaseException as error:
            failures.append(error)

    thread, graph = threading.Thread(target=work), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = all_of(x, weight, dy)
        thread.start()
        thread.join(60)
    assert not failures and not thread.is_alive()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(gpu, found, all_of(x, weight, dy))


@pytest.mark.without_jax
def test_what_is_freed_in_a_capture_does_not_end_it(tmp_path, gpu):
    torch = gpu.module
    buffer = _native.Buffer(0, 1 << 20)
    garbage = [buffer, KernelManager(DiskCache(str(tmp_path)))]
    kernel = garbage[1].compile('extern "C" __global__ void freed() {}', "freed", (), 0)
    kernel.launch_plain((1, 1, 1), (32, 1, 1), b"", _native.own_stream(0))
    _native.synchronize_stream(0, _native.own_stream(0))
    freed = weakref.ref(garbage[1])
    garbage += [kernel, garbage]
    x = torch.ones(4, 64, device="cuda")
    gc.collect()  # what others left would end the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, eps=0.0)
        del buffer, kernel, garbage
        gc.collect()
        assert freed() is None
        y = y + y
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 2).all()


def test_two_graphs_of_torch_in_flight_on_two_streams(limited, gpu, rng):
    torch = gpu.module
    call, _ = limited
    case = Case(40, 131071, FLOAT32, FLOAT32, FLOAT32, False)
    graphs, results, given, sides = [], [], [], [torch.cuda.Stream() for _ in range(2)]
    for _ in sides:
        x, weight, dy = data(gpu, rng, case)
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            results.append((call(x, weight), *rms_norm_backward(dy, x, weight)))
        graphs.append(graph)
        given.append((x, weight, dy))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, side in zip(graphs, sides, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
    torch.cuda.synchronize()
    for found, (x, weight, dy) in zip(results, given, strict=True):
        assert_same(gpu, found, (call(x, weight), *rms_norm_backward(dy, x, weight)))
