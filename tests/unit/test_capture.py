"""Calls while a stream is captured, on a driver that ends a capture at the first thing that it forbids."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("implementation", ["rtc", "static"])
def test_a_cold_call_in_a_capture_is_captured(mode, implementation, fake_driver):
    script = f"""
    x, stream = array(64, 4096), stream_of(0, 0)
    begin(stream, {mode})
    with t.using("{implementation}"):
        y = t.rms_norm(x, stream=stream)
        dx, dweight = t.rms_norm_backward(x, x, array(4096), stream=stream)
    print(end(stream).decode(), t.manager.counts["load"], type(dweight).__name__)
    """
    (line,) = fake_driver(script)
    nodes, loads, kind = line.split()
    # The workspace of the backward is the graph's own, from before its first launch to after its last one. All launches
    # may begin early.
    assert nodes == "EAEEF" and loads == "3" and kind == "DeviceArray"


def test_what_was_compiled_for_an_architecture_without_early_launches_is_not_launched_early(fake_driver):
    script = """
    x, stream = array(64, 4096), stream_of(0, 0)
    begin(stream)
    t.rms_norm(x, stream=stream)
    print(end(stream).decode())
    """
    assert fake_driver(script, FAKE_PTX_VERSION="80") == ["K"]


@pytest.mark.parametrize(("largest_cluster", "nodes"), [(16, "E"), (1, "AZKF")], ids=["cluster", "cooperative"])
def test_a_cold_call_of_rows_that_ctas_share_is_captured(largest_cluster, nodes, fake_driver):
    script = f"""
    from transformer_rtc import dispatch
    limits = t.device_limits(0)._replace(max_cluster_size={largest_cluster})
    dispatch.device_limits = lambda device: limits
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
    kernel = t.manager.compile('extern "C" __global__ void mine() {}', "mine", (), 0)
    kernel.max_dynamic_shared_memory = 65536
    kernel.launch(t.LaunchConfig((1, 1, 1), (32, 1, 1), (4, 1, 1), 65536, True), b"", stream)
    print(end(stream).decode())
    """
    assert fake_driver(script) == ["K"]


def test_another_threads_capture_goes_on_beside_loads_allocations_and_waits(fake_driver):
    script = """
    stream, host, x = stream_of(0, 0), np.ones((4, 64), np.float32), array(4, 64)
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


def test_arrays_of_the_host_are_no_part_of_a_capture(fake_driver):
    # Their call is done when it returns, as always; on the captured stream it is refused before anything is put there.
    script = """
    stream, host = stream_of(0, 0), np.ones((4, 64), np.float32)
    begin(stream)
    t.rms_norm(host)
    try:
        t.rms_norm(host, stream=stream)
    except t.ArgumentError as error:
        print(error)
    print(end(stream))
    """
    refusal, nodes = fake_driver(script)
    assert refusal.startswith("rms_norm: x is on the host, which cannot be part of the graph that the stream is being")
    assert nodes == "b''"


def test_jax_arrays_are_no_part_of_a_capture(fake_driver):
    script = """
    import types
    jax = sys.modules["jax"] = types.ModuleType("jax")
    jax.core = types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    class Array:
        __module__ = "jaxlib.xla"
        __dlpack_device__ = lambda self: (2, 0)
        def __dlpack__(self, **options):
            raise AssertionError("the stream was touched")
    jax.Array = Array
    stream = stream_of(0, 0)
    begin(stream)
    try:
        t.rms_norm(Array(), stream=stream)
    except t.ArgumentError as error:
        print(error)
    print(end(stream))
    """
    refusal, nodes = fake_driver(script)
    assert "x is a jaxlib.xla.Array, which cannot be part of the graph" in refusal and nodes == "b''"


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


def test_the_legacy_stream_beside_the_capture_of_a_blocking_one_is_refused(fake_driver):
    script = """
    stream, x = stream_of(0, 1), array(4, 64)
    t.rms_norm(x)
    begin(stream)
    try:
        t.rms_norm(x)
    except t.ArgumentError as error:
        print(error)
    print(end(stream))
    t.rms_norm(x)
    """
    refusal, nodes = fake_driver(script)
    assert "legacy default stream" in refusal and nodes == "b''"


def test_a_failed_load_in_a_capture_leaves_it_whole(fake_driver):
    script = """
    stream = stream_of(0, 0)
    begin(stream)
    for symbol, image in (("missing", b"\\x7fELF"), ("mine", b"junk")):
        try:
            _native.Function(0, image, symbol)
        except t.DriverError as error:
            print(error)
    print(end(stream), driver.fake_modules())
    """
    assert fake_driver(script) == [
        "looking up the entry missing: FAKE_ERROR_500 (500): fake",
        "loading mine: FAKE_ERROR_200 (200): fake",
        "b'' 0",
    ]


def test_the_threads_capture_mode_is_what_it_was(fake_driver):
    script = """
    mode = lambda to: (driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(to)), to.value)[1]
    x, stream = array(4, 64), stream_of(0, 0)
    mode(ctypes.c_int(1))
    begin(stream)
    t.rms_norm(x, stream=stream)
    try:
        _native.Function(0, b"junk", "mine")
    except t.DriverError:
        pass
    t.rms_norm(np.ones((4, 64), np.float32))
    print(mode(ctypes.c_int(0)), driver.fake_depth())
    """
    assert fake_driver(script) == ["1 0"]
