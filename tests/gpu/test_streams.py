# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import reference
from cases import Case
from frameworks import FRAMEWORKS, bits, capture, inputs
from on_gpu import current_context, in_threads

from transformer_rtc import (
    _native,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
)
from transformer_rtc.arrays.torch import Torch
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT32, Field

HIDDEN = 4096
CASE = Case(64, HIDDEN, BFLOAT16, BFLOAT16, BFLOAT16, False)


@pytest.fixture
def delay(manager):
    """Return a call that keeps a stream busy for about a tenth of a second."""
    text = (
        'extern "C" __global__ void delay(Params params) {\n  const long long start = clock64();\n'
        "  while (clock64() - start < params.cycles) {}\n}"
    )
    kernel = manager.compile(text, "delay", (Field("cycles", "int64"),), 0)
    return lambda stream: kernel.launch_plain((1, 1, 1), (1, 1, 1), {"cycles": 200_000_000}, stream)


class Protocol:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@pytest.fixture
def work(gpu, rng):
    """Return (x of NaN, what it becomes, weight, bits of the output): who reads x too early sees NaN."""
    x, weight = (gpu.array(host) for host in inputs(rng, CASE))
    expected = bits(gpu.host(rms_norm(x, weight)))
    early = gpu.module.full_like(x, float("nan"))
    gpu.module.cuda.synchronize()
    return early, x, weight, expected


@pytest.mark.parametrize(
    "form", [lambda s: s.cuda_stream, lambda s: s, lambda s: Protocol(s.cuda_stream)], ids=["int", "Stream", "protocol"]
)
def test_an_explicit_stream_of_torch_is_where_the_kernel_runs(form, gpu, work, delay):
    early, x, weight, expected = work
    side = gpu.module.cuda.Stream()
    with gpu.module.cuda.stream(side):
        delay(side.cuda_stream)
        early.copy_(x)
    y = rms_norm(early, weight, stream=form(side))
    assert not side.query(), "the producer was too fast to show anything"
    side.synchronize()
    np.testing.assert_array_equal(bits(gpu.host(y)), expected)


def test_the_current_stream_of_torch_is_where_the_kernel_runs(gpu, work, delay):
    early, x, weight, expected = work
    side = gpu.module.cuda.Stream()
    with gpu.module.cuda.stream(side):
        delay(side.cuda_stream)
        early.copy_(x)
        y = rms_norm(early, weight)
        assert not side.query(), "the producer was too fast to show anything"
        side.synchronize()
    np.testing.assert_array_equal(bits(gpu.host(y)), expected)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_stream_of_cupy_is_where_the_kernel_runs(explicit, rng, delay):
    kind = FRAMEWORKS["cupy"]()
    cupy = kind.module
    host, weight = inputs(rng, CASE)
    x, weight = kind.array(host), kind.array(weight)
    expected = bits(kind.host(rms_norm(x, weight)))
    early = kind.array(np.full_like(host, np.nan))
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    delay(side.ptr)
    early.data.copy_from_device_async(x.data, x.nbytes, side)
    if explicit:
        y = rms_norm(early, weight, stream=side)
    else:
        with side:
            y = rms_norm(early, weight)
    assert not side.done, "the producer was too fast to show anything"
    side.synchronize()
    np.testing.assert_array_equal(bits(kind.host(y)), expected)


@pytest.mark.parametrize("handle", [1, 2], ids=["legacy", "per thread"])
def test_the_default_streams_handles_are_streams(handle, gpu, work):
    _, x, weight, expected = work
    y = rms_norm(x, weight, stream=handle)
    gpu.module.cuda.synchronize()
    np.testing.assert_array_equal(bits(gpu.host(y)), expected)


def test_an_output_is_allocated_for_the_stream_that_writes_it(gpu):
    # The allocator gives memory again to whom it belongs: a wrong stream there is a race later.
    torch = gpu.module
    framework = Torch({"x": (FLOAT32,)})
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()
    for current in (default, side):
        with torch.cuda.stream(current):
            for wanted in (default, side):
                with framework.allocating(0, wanted.cuda_stream):
                    assert torch.cuda.current_stream().cuda_stream == wanted.cuda_stream
                assert torch.cuda.current_stream() == current


def test_a_stream_of_another_device_is_refused(gpu):
    torch = gpu.module
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    foreign = torch.cuda.Stream(device=1)
    with pytest.raises(ArgumentError, match="stream belongs to another device or context than cuda:0"):
        rms_norm(torch.ones(4, 64, device="cuda:0"), stream=foreign)
    with pytest.raises(ArgumentError, match="weight must be on the device of x, cuda:0; it is on cuda:1"):
        rms_norm(torch.ones(4, 64, device="cuda:0"), torch.ones(64, device="cuda:1"))


def test_a_call_on_another_device_leaves_the_current_one(gpu):
    torch = gpu.module
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    x = torch.ones(4, 64, device="cuda:1")
    y = rms_norm(x, eps=0.0)
    assert y.device == x.device and torch.cuda.current_device() == 0
    assert (y == 1).all()
    kind = FRAMEWORKS["cupy"]()
    with kind.module.cuda.Device(1):
        x = kind.module.ones((4, 64), np.float32)
    assert rms_norm(x).device.id == 1 and kind.module.cuda.runtime.getDevice() == 0


# ---- Captured graphs ------------------------------------------------------------------------------------------------


def assert_captured_calls_follow_their_inputs(gpu, rng, call, case):
    torch = gpu.module
    x, weight = (gpu.array(host) for host in inputs(rng, case))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        first = call(x, weight)
        second = call(first, weight)
    for _ in range(3):
        host, _ = inputs(rng, case)
        x.copy_(gpu.array(host))
        # Twice in a row: what a launch leaves in a workspace must not reach the next one.
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        expected = call(x, weight)
        np.testing.assert_array_equal(bits(gpu.host(first)), bits(gpu.host(expected)))
        np.testing.assert_array_equal(bits(gpu.host(second)), bits(gpu.host(call(expected, weight))))
        reference.assert_close(gpu.host(first), reference.rms_norm(host, gpu.host(weight))[0], case.out)


@pytest.mark.parametrize("hidden", [64, 4096, 4097, 65536])
def test_a_captured_graph_replays_with_new_inputs(hidden, implementation, gpu, rng):
    assert_captured_calls_follow_their_inputs(gpu, rng, rms_norm, CASE._replace(hidden=hidden))


def test_a_captured_graph_of_rows_shared_by_ctas_replays_with_new_inputs(limited, gpu, rng):
    call, family = limited
    assert_captured_calls_follow_their_inputs(gpu, rng, call, Case(70, 262145, BFLOAT16, BFLOAT16, BFLOAT16, False))
    assert family.rules[-1].ctas_per_row > 1


# ---- Threads and contexts --------------------------------------------------------------------------------------------


def test_two_threads_with_two_streams_do_not_disturb_each_other(limited, gpu, rng):
    torch = gpu.module
    call, _ = limited
    case = Case(40, 131071, FLOAT32, FLOAT32, FLOAT32, False)
    data = [tuple(gpu.array(host) for host in inputs(rng, case)) for _ in range(2)]
    expected = [bits(gpu.host(call(*arrays))) for arrays in data]
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            for _ in range(20):
                results = [call(*data[i]) for _ in range(5)]
                torch.cuda.current_stream().synchronize()
                for result in results:
                    np.testing.assert_array_equal(bits(gpu.host(result)), expected[i])

    in_threads(2, work)


def test_a_thread_without_a_context_has_none_after_a_call(rng):
    host, weight = inputs(rng, CASE)
    expected = bits(rms_norm(host, weight))
    before, after = [], []

    def work(i):
        before.append(current_context())
        result = rms_norm(host, weight)
        after.append(current_context())
        np.testing.assert_array_equal(bits(result), expected)

    in_threads(3, work)
    assert before == after == [None] * 3


def test_the_callers_context_is_current_after_a_call(gpu, rng):
    x, weight = (gpu.array(host) for host in inputs(rng, CASE))
    before = current_context()
    rms_norm(x, weight)
    rms_norm(gpu.host(x), gpu.host(weight))
    assert before is not None and current_context() == before


def test_a_tensor_that_another_thread_made_is_taken(gpu, rng):
    host, weight = inputs(rng, CASE)
    x, weight = gpu.array(host), gpu.array(weight)
    expected = bits(gpu.host(rms_norm(x, weight)))
    gpu.module.cuda.synchronize()
    in_threads(4, lambda i: np.testing.assert_array_equal(bits(gpu.host(rms_norm(x, weight))), expected))


def test_events_and_own_streams_are_the_devices():
    stream = _native.own_stream(0)
    assert stream == _native.own_stream(0) != 0
    assert _native.stream_on_device(0, stream)
    event = _native.Event(0, stream)
    _native.synchronize_stream(0, stream)
    assert event.done()


# ---- Launches that may begin before the one before them has ended ---------------------------------------------------


def chain(torch, x, weight, settle):
    """Return what calls give each of which reads, or writes over, what the last one wrote or read."""
    found = []
    for _ in range(12):
        rms_norm(x, weight, out=x)
        settle()
        y = layer_norm(x, weight, weight)
        settle()
        dx, dweight, dbias = layer_norm_backward(x, y, weight)
        settle()
        torch.add(y, dx, out=x)  # another's kernel behind ours, and before ours
        settle()
        add_rms_norm(x, y, weight, out=y, residual_out=x)
        settle()
        y = softmax(x, out=y)
        settle()
        softmax_backward(x, y, out=x)
        settle()
        dx, dweight_too = rms_norm_backward(x, y, weight, out=y)
        settle()
        x.copy_(dx)
        settle()
        found += [dweight, dbias, dweight_too]
    return [x, *found]


@pytest.fixture
def late(manager, gpu):
    """Return a copy of a tensor that lets the next launch begin at once, and writes a tenth of a millisecond later."""
    text = """
extern "C" __global__ void late(Params params) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const long long start = clock64();
  while (clock64() - start < 200000) {}
  for (long long i = threadIdx.x; i < params.bytes; i += blockDim.x) {
    static_cast<char*>(params.to)[i] = static_cast<const char*>(params.of)[i];
  }
}
"""
    kernel = manager.compile(text, "late", (Field("to", "pointer"), Field("of", "pointer"), Field("bytes", "int64")), 0)

    def copy(to, of):
        values = {"to": to.data_ptr(), "of": of.data_ptr(), "bytes": of.nbytes}
        kernel.launch_plain((1, 1, 1), (1024, 1, 1), values, gpu.module.cuda.current_stream().cuda_stream)

    return copy


@pytest.mark.parametrize("hidden", [24, 64, 1001, 4096, 131072])
def test_a_launch_waits_for_one_that_lets_it_begin_at_once(hidden, implementation, late, gpu, rng):
    torch = gpu.module
    case = CASE._replace(rows=3, hidden=hidden)
    (x, weight), (other, _) = (map(gpu.array, inputs(rng, case)) for _ in range(2))
    calls = (
        lambda x: (rms_norm(x, weight),),
        lambda x: (layer_norm(x, weight, weight),),
        lambda x: add_rms_norm(other, x, weight),
        lambda x: (softmax(x),),
        lambda x: rms_norm_backward(x, other, weight),
        lambda x: layer_norm_backward(other, x, weight),
        lambda x: (softmax_backward(x, other),),
        lambda x: (rms_norm(other, x[0]),),
    )
    for number, call in enumerate(calls):
        expected = call(x)
        early = torch.full_like(x, float("nan"))
        torch.cuda.synchronize()
        late(early, x)
        found = call(early)
        torch.cuda.synchronize()
        for one, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(bits(gpu.host(one)), bits(gpu.host(wanted)), err_msg=f"call {number}")


# One CTA; a few; several waves of them; rows in turn; clusters; rows that no vector fits.
@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, 4096), (16, 4096), (9000, 1024), (3000, 16384), (40, 131072), (700, 1001)]
)
@pytest.mark.parametrize("captured", [False, True])
def test_a_launch_waits_for_the_one_before_it_however_early_it_begins(rows, hidden, captured, implementation, gpu, rng):
    torch = gpu.module
    case = CASE._replace(rows=rows, hidden=hidden)
    first, weight = (gpu.array(host) for host in inputs(rng, case))
    expected = chain(torch, first.clone(), weight, torch.cuda.synchronize)
    x = first.clone()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            found = chain(torch, x, weight, lambda: None)
    for _ in range(5):
        x.copy_(first)
        if captured:
            graph.replay()
        else:
            found = chain(torch, x, weight, lambda: None)
        torch.cuda.synchronize()
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(bits(gpu.host(one)), bits(gpu.host(other)))
