# SPDX-License-Identifier: Apache-2.0
"""Two GPUs in one process."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from cases import Case
from frameworks import FRAMEWORKS, bits, inputs
from on_gpu import current_context, in_threads

from transformer_rtc import ArgumentError, Field, _native, device_limits, rms_norm, rms_norm_backward
from transformer_rtc.spec import BFLOAT16, FLOAT32

CASE = Case(64, 4096, BFLOAT16, BFLOAT16, BFLOAT16, False)


@pytest.fixture(autouse=True)
def two():
    if _native.device_count() < 2:
        pytest.skip("this machine has one GPU")
    yield
    # JAX makes its array's device current, and the next test makes its streams on the first.
    pytest.importorskip("torch").cuda.set_device(0)


@pytest.fixture
def given(gpu, rng):
    """Return x and weight on both devices, and what becomes of them."""
    x, weight = (gpu.array(host) for host in inputs(rng, CASE))
    gpu.module.cuda.set_device(0)
    return {device: (x.to(f"cuda:{device}"), weight.to(f"cuda:{device}")) for device in (0, 1)}


def test_each_device_has_one_load_and_one_compile_is_of_both(implementation, cold, gpu, given):
    torch = gpu.module
    loads = []
    cold.on_event(lambda event: loads.append(event.device) if event.kind == "load" else None)
    results = {}
    for device in (0, 1, 0, 1):
        before = current_context()
        results[device] = rms_norm(*given[device])
        assert results[device].device.index == device
        assert torch.cuda.current_device() == 0 and current_context() == before
    assert loads == [0, 1]
    alike = device_limits(0) == device_limits(1)
    assert cold.counts["compile"] == {"static": 0, "rtc": 1 if alike else 2}[implementation]
    if alike:
        np.testing.assert_array_equal(bits(gpu.host(results[0])), bits(gpu.host(results[1])))
    reference.assert_close(
        gpu.host(results[1]), reference.rms_norm(gpu.host(given[1][0]), gpu.host(given[1][1]))[0], CASE.out
    )


@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_is_the_same_after_calls_and_loads_on_another(current, implementation, cold, gpu, given):
    torch = gpu.module
    with torch.cuda.device(current):
        before = current_context()
        for device in (1 - current, current):
            x, weight = given[device]
            y = rms_norm(x, weight)
            dx, dweight = rms_norm_backward(x, x, weight)
            assert {array.device.index for array in (y, dx, dweight)} == {device}
            assert torch.cuda.current_device() == current and current_context() == before
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)


def test_arrays_of_the_host_go_to_the_current_device(cold, gpu, rng):
    host, weight = inputs(rng, CASE)
    devices = []
    cold.on_event(lambda event: devices.append(event.device) if event.kind == "load" else None)
    found = []
    for device in (0, 1):
        with gpu.module.cuda.device(device):
            gpu.module.ones(1, device="cuda")  # torch makes a device current when it uses it
            found.append(bits(rms_norm(host, weight)))
    assert devices == [0, 1]
    np.testing.assert_array_equal(*found)


def test_rows_shared_by_ctas_and_own_kernels_run_on_the_second_device(limited, manager, gpu, rng):
    torch = gpu.module
    call, family = limited
    case = Case(20, 262145, FLOAT32, FLOAT32, FLOAT32, False)
    x, weight = (gpu.array(host).to("cuda:1") for host in inputs(rng, case))
    y = call(x, weight)
    assert y.device.index == 1 and family.rules[-1].ctas_per_row > 1 and torch.cuda.current_device() == 0
    reference.assert_close(gpu.host(y), reference.rms_norm(gpu.host(x), gpu.host(weight))[0], case.out)
    text = 'extern "C" __global__ void own(Params p) { static_cast<float*>(p.out)[threadIdx.x] = threadIdx.x; }'
    kernel = manager.compile(text, "own", (Field("out", "pointer"),), 1)
    out = torch.zeros(32, device="cuda:1")
    kernel.launch_plain((1, 1, 1), (32, 1, 1), {"out": out.data_ptr()}, torch.cuda.current_stream(1).cuda_stream)
    torch.cuda.synchronize(1)
    assert out.tolist() == list(range(32)) and torch.cuda.current_device() == 0
    with pytest.raises(ArgumentError, match="own: stream belongs to another device or context than cuda:1"):
        kernel.launch_plain((1, 1, 1), (32, 1, 1), {"out": out.data_ptr()}, torch.cuda.Stream(0).cuda_stream)
    assert torch.cuda.current_device() == 0 and int(out.sum()) == sum(range(32))


def test_threads_with_devices_of_their_own_do_not_disturb_each_other(cold, gpu, given):
    torch = gpu.module
    expected = bits(gpu.host(rms_norm(*given[0])))
    torch.cuda.synchronize(0)

    def work(i):
        device = i % 2
        torch.cuda.set_device(device)
        for number in range(40):
            y = rms_norm(*given[(device + number) % 2])
            torch.cuda.synchronize((device + number) % 2)
            np.testing.assert_array_equal(bits(gpu.host(y)), expected)
            assert torch.cuda.current_device() == device

    in_threads(8, work)
    assert cold.counts["load"] == 2 and torch.cuda.current_device() == 0


def test_a_cold_call_is_captured_on_the_second_device(cold, gpu, given):
    torch = gpu.module
    x, weight = given[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        # torch's own stream for captures is of the device that was captured first.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            y = rms_norm(x, weight)
            dx, dweight = rms_norm_backward(x, x, weight)
        graph.replay()
        torch.cuda.synchronize()
    assert cold.counts["load"] >= 3
    assert torch.cuda.current_device() == 0
    for found, expected in zip((y, dx, dweight), (rms_norm(x, weight), *rms_norm_backward(x, x, weight)), strict=True):
        np.testing.assert_array_equal(bits(gpu.host(found)), bits(gpu.host(expected)))


def test_cupy_and_jax_on_the_second_device(cold):
    host = np.ones((4, 64), np.float32)
    cupy = FRAMEWORKS["cupy"]().module
    with cupy.cuda.Device(1):
        x = cupy.asarray(host)
    y = rms_norm(x)
    assert y.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        np.testing.assert_allclose(cupy.asnumpy(y), host, rtol=1e-5)
    jax = FRAMEWORKS["jax"]().module
    x = jax.device_put(host, jax.devices()[1])
    before = current_context()
    y = rms_norm(x)
    assert current_context() == before
    assert y.devices() == {jax.devices()[1]}
    np.testing.assert_allclose(np.asarray(y), host, rtol=1e-5)
    assert cold.counts["load"] == 1
