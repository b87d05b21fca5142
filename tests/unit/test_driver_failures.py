# SPDX-License-Identifier: Apache-2.0
"""Each call of the driver fails once, as one does without memory: the operator says so, and works the next time."""

from __future__ import annotations

import pytest

# Behind a script's work(). Each child does it for the first time: this process has used no driver.
FAILURES = """
import gc, multiprocessing
fork = multiprocessing.get_context("fork")
def state():
    gc.collect()
    mode = ctypes.c_int(0)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    before = mode.value
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return [driver.fake_allocations(), driver.fake_modules(), driver.fake_events(), driver.fake_depth(), before]
def failing(number):
    driver.fake_fail(number)
    error = None
    try:
        work()
    except t.TransformerRtcError as raised:
        error = f"{type(raised).__name__}: {raised}"
    driver.fake_fail(0)
    work()
    return driver.fake_called().decode().split(), error, state()
def beside(number):
    results = fork.SimpleQueue()
    child = fork.Process(target=lambda: results.put(failing(number)))
    child.start()
    child.join()
    assert child.exitcode == 0, number
    return results.get()
gc.collect()
gc.freeze()  # what is here already is no garbage of the children
names, error, expected = beside(1 << 30)
assert error is None, error
for number in numbers(names):
    called, error, found = beside(number)
    assert called == names[:number], (number, called, names)
    name = called[-1]
    if error is None and name in ("cuCtxGetCurrent", "cuCtxPushCurrent_v2"):
        found[:2] = map(min, found[:2], expected)  # what cannot be freed or unloaded, without its context, stays
    assert found == expected, (number, name, error, found, expected)
    print(name, error)
"""
NUMBERS = {
    "the first and last of each name": """
def numbers(names):
    return sorted({names.index(name) + 1 for name in names} | {len(names) - names[::-1].index(name) for name in names})
""",
    "all": "numbers = lambda names: range(1, len(names) + 1)\n",
}

WORK = {
    "host": """
def work():
    t.rms_norm(np.ones((4, 64), np.float32))
""",
    "device": """
def work():
    x, weight, stream = array(64, 4096), array(4096), stream_of(0, 0)
    t.rms_norm(x, weight, stream=stream)
    t.rms_norm_backward(x, x, weight, stream=stream)
""",
    "another stream's": """
def work():
    side = stream_of(0, 0)
    x = array(4, 64, made_on=side)
    y = t.softmax(x, stream=stream_of(0, 0))
    y.__dlpack__(stream=side)
    t.softmax(Interface(y, side))
""",
    "capture": """
def work():
    x, weight, stream = array(64, 4096), array(4096), stream_of(0, 0)
    begin(stream)
    try:
        t.rms_norm_backward(x, x, weight, stream=stream)
    finally:
        end(stream)
""",
    "cooperative": """
from transformer_rtc import device
limits_of = t.device_limits
device.device_limits = lambda ordinal: limits_of(ordinal)._replace(max_cluster_size=1)
def work():
    t.layer_norm(array(2, 262144), stream=stream_of(0, 0))
""",
    "cluster": """
def work():
    t.layer_norm(array(2, 262144), stream=stream_of(0, 0))
""",
}


# Of each, what must be among the calls that failed.
CALLS = {
    "host": {"cuInit", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2",
             "cuModuleLoadData", "cuFuncLoad", "cuLaunchKernelEx", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"},
    "device": {"cuMemAlloc_v2", "cuFuncSetAttribute", "cuLaunchKernelEx", "cuEventCreate", "cuEventRecord"},
    "another stream's": {"cuPointerGetAttribute", "cuStreamWaitEvent", "cuEventRecord"},
    "capture": {"cuMemAllocAsync", "cuStreamIsCapturing", "cuLaunchKernelEx"},
    "cooperative": {"cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuMemsetD8Async", "cuLaunchKernelEx"},
    "cluster": {"cuOccupancyMaxActiveClusters", "cuFuncSetAttribute", "cuLaunchKernelEx"},
}  # fmt: skip
# What is done without: a launch counts as captured then, and what cannot be freed stays.
NOT_TOLD = {"cuStreamIsCapturing", "cuCtxGetCurrent", "cuCtxPushCurrent_v2"}


@pytest.mark.parametrize("numbers", [next(iter(NUMBERS)), pytest.param("all", marks=pytest.mark.thorough(share=0.5))])
@pytest.mark.parametrize("work", WORK)
def test_a_call_of_the_driver_that_fails_is_told_of_and_leaves_nothing(work, numbers, fake_driver):
    fake_driver(WORK[work] + "work()\n")  # compiles
    told = [line.split(" ", 1) for line in fake_driver(WORK[work] + NUMBERS[numbers] + FAILURES)]
    assert {name for name, error in told if error == "None"} <= NOT_TOLD
    assert {name for name, error in told if error != "None"} >= CALLS[work]
    assert all(error == "None" or "fake" in error for _, error in told)  # the driver's own text


def test_a_gpu_that_is_too_old_is_refused_before_anything_is_compiled(fake_driver):
    told = fake_driver(
        """
        from transformer_rtc import device
        limits_of = t.device_limits
        device.device_limits = lambda ordinal: limits_of(ordinal)._replace(architecture=75)
        x = array(4, 64)
        calls = lambda: t.rms_norm(x), mine, lambda: t.warmup("rms_norm", "float32", 64)
        for call in (*calls, lambda: t.manager.is_compiled(t.TextSpec("", "x"), 0)):
            print(told_by(call))
        with t.using("static"):
            print(told_by(lambda: t.rms_norm(x)))
        print(t.implementations(t.rms_norm), dict(t.manager.counts))
        """
    )
    why = (
        "DeviceNotFoundError cuda:0 (fake) has compute capability 7.5; transformer_rtc needs 8.0 or newer, such as "
        "A100, L4, H100 and RTX 30 have"
    )
    assert [line.partition(". Without a GPU")[0] for line in told] == [why] * 5 + ["['simulator'] {}"]
