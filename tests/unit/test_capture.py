# SPDX-License-Identifier: Apache-2.0
"""Calls while a stream is captured, on a driver that ends a capture at the first thing that it forbids."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("implementation", ["rtc", "static"])
def test_a_cold_call_in_a_capture_is_captured(implementation, fake_driver):
    script = f"""
    def work(mode):
        x, stream = array(64, 4096), stream_of(0, 0)
        begin(stream, mode)
        with t.using("{implementation}"):
            y = t.rms_norm(x, stream=stream)
            dx, dweight = t.rms_norm_backward(x, x, array(4096), stream=stream)
        return end(stream).decode(), t.manager.counts["load"], type(dweight).__name__
    for mode in (0, 1, 2):  # global, thread_local, relaxed
        in_child(lambda: work(mode))  # where nothing is loaded yet
    """
    # The workspace of the backward is the graph's own, from before its first launch to after its last one. All launches
    # may begin early.
    assert fake_driver(script) == ["('EAEEF', 3, 'DeviceArray')", "ended 0"] * 3


def test_what_was_compiled_for_an_architecture_without_early_launches_is_not_launched_early(fake_driver):
    script = """
    x, stream = array(64, 4096), stream_of(0, 0)
    begin(stream)
    t.rms_norm(x, stream=stream)
    print(end(stream).decode())
    """
    assert fake_driver(script, ptx_version="80") == ["K"]


@pytest.mark.parametrize(("largest_cluster", "nodes"), [(16, "E"), (1, "AZKF")], ids=["cluster", "cooperative"])
def test_a_cold_call_of_rows_that_ctas_share_is_captured(largest_cluster, nodes, fake_driver):
    script = f"""
    from transformer_rtc import device
    limits = t.device_limits(0)._replace(max_cluster_size={largest_cluster})
    device.device_limits = lambda ordinal: limits
    x, stream = array(2, 262144), stream_of(0, 0)
    begin(stream)
    t.rms_norm(x, stream=stream)
    print(end(stream).decode())
    """
    assert fake_driver(script) == [nodes]


def test_a_kernel_of_ones_own_is_loaded_and_launched_in_a_capture(fake_driver):
    script = """
    stream = stream_of(0, 0)
    begin(stream)
    kernel = mine()
    kernel.max_dynamic_shared_memory = 65536
    kernel.launch(t.LaunchConfig((1, 1, 1), (32, 1, 1), (4, 1, 1), 65536, True), b"", stream)
    print(end(stream).decode())
    """
    assert fake_driver(script) == ["K"]


def test_another_threads_capture_goes_on_beside_loads_allocations_and_waits(fake_driver):
    script = """
    stream, x = stream_of(0, 0), array(4, 64)
    captured, over = threading.Event(), threading.Event()
    def capture():
        begin(stream)
        captured.set()
        over.wait(60)
        print(end(stream))
    thread = threading.Thread(target=capture)
    thread.start()
    captured.wait(60)
    t.rms_norm(host)
    y = t.rms_norm(x, stream=stream_of(0, 0))
    print(_native.Event(0, _native.own_stream(0)).done())
    del y
    over.set()
    thread.join()
    """
    assert fake_driver(script) == ["True", "b''"]


def test_what_cannot_be_captured_is_refused_before_the_capture_is_touched(fake_driver):
    # Calls of arrays of the host are done when they return, as always; beside a capture on other streams they go on.
    script = """
    import types
    stream, blocking, x = stream_of(0, 0), stream_of(0, 1), array(4, 64)
    t.rms_norm(x)
    begin(blocking)
    print(told_by(lambda: t.rms_norm(x)), end(blocking))
    t.rms_norm(x)
    begin(stream)
    t.rms_norm(host)
    print(told_by(lambda: t.rms_norm(host, stream=stream)))
    jax = sys.modules["jax"] = types.ModuleType("jax")
    jax.core = types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    class Array:
        __module__ = "jaxlib.xla"
        __dlpack_device__ = lambda self: (2, 0)
        def __dlpack__(self, **options):
            raise AssertionError("the stream was touched")
    jax.Array = Array
    print(told_by(lambda: t.rms_norm(Array(), stream=stream)))
    print(end(stream))
    """
    legacy, of_host, of_jax, nodes = fake_driver(script)
    assert legacy.startswith("ArgumentError ") and "legacy default stream" in legacy and legacy.endswith(" b''")
    refusal = "which cannot be part of the graph that the stream is being"
    assert of_host.startswith(f"ArgumentError rms_norm: x is on the host, {refusal}")
    assert f"x is a jaxlib.xla.Array, {refusal}" in of_jax and nodes == "b''"


def test_a_capture_waits_for_nothing_outside(fake_driver):
    # Events of work that is not captured, recorded by whoever made the inputs, would end the capture.
    script = """
    stream, side = stream_of(0, 0), stream_of(0, 0)
    x, weight = array(4, 64, made_on=side), Interface(array(64), side)
    begin(stream)
    y = t.rms_norm(x, weight=None, stream=stream)
    z = t.rms_norm(Interface(x, side), weight, stream=stream)
    t.rms_norm(y, stream=stream)
    print(end(stream).decode())
    # What the capture made has no moment at which it is done: whoever replays knows.
    begin(side)
    y.__dlpack__(stream=side)
    print(end(side), y.__cuda_array_interface__["stream"])
    """
    assert fake_driver(script) == ["EEE", "b'' None"]


def test_failed_loads_leave_a_capture_whole_and_the_threads_mode_is_what_it_was(fake_driver):
    script = """
    def mode(to):
        found = ctypes.c_int(to)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(found))
        return found.value
    x, stream = array(4, 64), stream_of(0, 0)
    begin(stream)
    for symbol, image in (("missing", b"\\x7fELF"), ("mine", b"junk")):
        print(told_by(lambda: _native.Function(0, image, symbol)))
    print(end(stream), driver.fake_modules())
    mode(1)
    begin(stream)
    t.rms_norm(x, stream=stream)
    told_by(lambda: _native.Function(0, b"junk", "mine"))
    t.rms_norm(host)
    print(mode(0), driver.fake_depth(), end(stream))
    """
    assert fake_driver(script) == [
        "DriverError looking up the entry missing: FAKE_ERROR_500 (500): fake",
        "DriverError loading mine: FAKE_ERROR_200 (200): fake",
        "b'' 0",
        "1 0 b'E'",
    ]
