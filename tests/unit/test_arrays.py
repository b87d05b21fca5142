# SPDX-License-Identifier: Apache-2.0
"""Arrays of every framework but torch, which is in tests/with_torch: what they are, and what comes back."""

from __future__ import annotations

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from bad_values import interface, stream_object
from hypothesis import given
from hypothesis import strategies as st

from transformer_rtc import _native, rms_norm, using
from transformer_rtc.arrays import DeviceArray, dtype_id, staged
from transformer_rtc.arrays.dtypes import storage_dtype
from transformer_rtc.arrays.framework import RawView, element_strides
from transformer_rtc.arrays.numpy import Numpy, host_array
from transformer_rtc.arrays.protocols import Protocol
from transformer_rtc.arrays.streams import stream_handle
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, DTYPES, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8

ACCEPTED = {"x": (FLOAT32, FLOAT16, BFLOAT16)}
NUMPY = Numpy(ACCEPTED)


def protocol_view(array: object, stream: int | None = None) -> RawView:
    return Protocol(ACCEPTED).view(array, "x", stream)


def view_of(array: np.ndarray) -> RawView:
    return NUMPY.view(array, "x", None)


# ---- Data types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", FLOAT32), ("float16", FLOAT16), ("bfloat16", BFLOAT16), ("f4", FLOAT32), ("half", FLOAT16),
        (np.float32, FLOAT32), (np.float16, FLOAT16), (np.dtype(np.float32), FLOAT32),
        (ml_dtypes.bfloat16, BFLOAT16), (np.dtype(ml_dtypes.bfloat16), BFLOAT16), ("int8", INT8), (np.int8, INT8),
        (ml_dtypes.float8_e4m3fn, FLOAT8_E4M3), ("float8_e4m3fn", FLOAT8_E4M3), (ml_dtypes.float8_e5m2, FLOAT8_E5M2),
    ],
)  # fmt: skip
def test_a_data_type_of_numpy_or_a_name_is_known(dtype, expected):
    assert dtype_id(dtype) == expected.id


def test_ids_are_dlpacks_and_the_native_modules_names_agree():
    for number, dtype in DTYPES.items():
        assert _native.dtype_name(number) == dtype.name
        assert number & 0xFF == 8 * dtype.bytes
    array = np.zeros(1, np.float32)
    assert _native.read_dlpack(array.__dlpack__())[3] == FLOAT32.id


# ---- Streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0), (1, 1), (2**48, 2**48), (stream_object(__cuda_stream__=lambda _: (0, 77)), 77),
        (stream_object(__cuda_stream__=(0, 5)), 5),
        (stream_object(cuda_stream=7), 7), (stream_object(ptr=9), 9), (stream_object(cuda_stream=0), 0),
        (stream_object(__cuda_stream__=(0, 5), cuda_stream=7, ptr=9), 5),
        (stream_object(__cuda_stream__=(1, 5), ptr=9), 9),
    ],
)  # fmt: skip
def test_a_stream_gives_its_handle(stream, handle):
    assert stream_handle(stream, "test") == handle


# ---- Views ---------------------------------------------------------------------------------------------------------


@st.composite
def slices_of_arrays(draw):
    """Draw a numpy array with strides of any sign, zero among them, into a larger one."""
    types = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.int8]
    dtype = np.dtype(draw(st.sampled_from(types)))
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    array = np.arange(int(np.prod(shape, dtype=int))).astype(dtype).reshape(shape)
    for axis, extent in enumerate(shape):
        step = draw(st.sampled_from([1, 2, -1, -2]))
        start = draw(st.integers(0, extent - 1))
        array = array[(slice(None),) * axis + (slice(start, None, step),)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape))
    return array


@given(slices_of_arrays())
def test_the_span_of_a_view_is_from_its_first_byte_to_its_last(array):
    addresses = [
        array.ctypes.data + sum(i * stride for i, stride in zip(index, array.strides, strict=True))
        for index in itertools.product(*(range(extent) for extent in array.shape))
    ]
    assert staged._Mirror._span(view_of(array)) == (min(addresses), max(addresses) + array.itemsize)


@given(slices_of_arrays())
def test_a_view_back_to_numpy_is_the_same_memory(array):
    back = host_array(view_of(array))
    storage = {ml_dtypes.bfloat16: np.uint16, ml_dtypes.float8_e5m2: np.uint8}.get(array.dtype.type, array.dtype)
    assert back.shape == array.shape and back.dtype == storage and back.ctypes.data == array.ctypes.data
    np.testing.assert_array_equal(back, np.ascontiguousarray(array).view(storage).reshape(array.shape))


def test_a_view_back_to_numpy_writes_through_and_read_only_stays_so():
    array = np.zeros((4, 6), np.float32)
    host_array(view_of(array[::2, 1:3]))[...] = 5
    expected = np.zeros((4, 6), np.float32)
    expected[::2, 1:3] = 5
    np.testing.assert_array_equal(array, expected)
    array.flags.writeable = False
    assert view_of(array).read_only and not host_array(view_of(array)).flags.writeable


def test_a_view_of_numpy_tells_what_the_array_is():
    array = np.zeros((6, 8), ml_dtypes.bfloat16)[::-2, 3:]
    assert view_of(array) == RawView(array.ctypes.data, (3, 5), (-16, 1), BFLOAT16.id, 1, 0, False)


@given(st.lists(st.integers(0, 5), max_size=5))
def test_strides_that_are_not_told_are_row_major(shape):
    array = np.empty(shape, np.float16)
    strides = element_strides(None, tuple(shape), 2, "x")
    if array.size:
        assert strides == tuple(stride // 2 for stride in array.strides)
    assert len(strides) == len(shape)


@given(slices_of_arrays().filter(lambda array: array.dtype.type.__module__ == "numpy"))
def test_a_dlpack_capsule_of_numpy_is_read_and_stays_whole(array):
    if not array.flags.writeable:
        array = array.copy()  # the protocol's first version cannot tell
    capsules = [array.__dlpack__()]
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        capsules.append(array.__dlpack__(max_version=(1, 0)))
    for capsule in capsules:
        for _ in range(2):
            found = RawView(*_native.read_dlpack(capsule))
            expected = view_of(array)
            # Strides of dimensions of one element, and the place of nothing, are the producer's choice.
            assert found._replace(strides=()) == expected._replace(strides=())
            for extent, mine, other in zip(array.shape, found.strides, expected.strides, strict=True):
                assert extent == 1 or mine == other


def test_a_read_only_capsule_is_known_for_one():
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this numpy does not speak DLPack 1")
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    assert _native.read_dlpack(array.__dlpack__(max_version=(1, 0)))[6] is True


def test_what_is_no_capsule_and_no_view_is_refused():
    with pytest.raises(TypeError):
        _native.read_dlpack(np.zeros(3))
    with pytest.raises(ValueError, match="as many strides as dimensions"):
        _native.View(0, (1, 2), (1,), FLOAT32.id, 0, False)


class Producer:
    """An array of the protocol's first version, whose export takes no max_version."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


def test_a_producer_of_the_first_version_is_read_and_its_capsule_is_held():
    array = np.zeros((2, 3), np.float32)
    framework = Protocol(ACCEPTED)
    assert framework.view(Producer(array), "x", None) == view_of(array)
    assert len(framework._held) == 1  # the capsule, as long as the view


def test_an_array_interface_is_viewed(monkeypatch):
    ordered = []
    monkeypatch.setattr(_native, "pointer_device", lambda pointer: 3)
    monkeypatch.setattr(_native, "order_streams", lambda *streams: ordered.append(streams))
    array = interface(shape=(2, 3), strides=(24, 4), stream=7, data=(4096, True))
    found = protocol_view(array, 9)
    assert found == RawView(4096, (2, 3), (6, 1), FLOAT32.id, 2, 3, True)
    assert ordered == [(3, 7, 9)]  # what makes the array comes before what reads it
    protocol_view(interface(shape=(2, 3), stream=9), 9)
    protocol_view(interface(shape=(2, 3), stream=None), 9)
    protocol_view(interface(shape=(2, 3)), 9)
    assert len(ordered) == 1
    with pytest.raises(ArgumentError, match=r"^x must have strides that are multiples"):
        protocol_view(interface(shape=(2, 3), strides=(24, 6)), 9)


class FakeBuffer:
    pointer, device = 4096, 3


@pytest.mark.parametrize(
    ("dtype", "typestr"), [(FLOAT32, "<f4"), (FLOAT16, "<f2"), (BFLOAT16, None), (FLOAT8_E4M3, None), (INT8, "|i1")]
)
def test_our_own_array_speaks_the_protocols_that_can_name_its_type(dtype, typestr):
    array = DeviceArray(FakeBuffer(), (2, 3), dtype.id, 7)
    assert (array.shape, array.dtype, array.device) == ((2, 3), dtype.name, 3)
    assert array.__dlpack_device__() == (2, 3)
    if typestr is None:
        assert not hasattr(array, "__cuda_array_interface__")
    else:
        assert array.__cuda_array_interface__ == {
            "shape": (2, 3), "typestr": typestr, "data": (4096, False), "strides": None, "stream": 7, "version": 3
        }  # fmt: skip


def test_a_message_names_our_own_array_by_the_package_and_not_by_a_file_in_it():
    known = r"as the numpy\.ndarray before it; it is a transformer_rtc\.arrays\.DeviceArray$"
    with pytest.raises(ArgumentError, match=known):
        rms_norm(np.zeros((2, 4), np.float32), DeviceArray(FakeBuffer(), (4,), FLOAT32.id, 7))


def test_our_own_arrays_consumer_waits_for_what_makes_it_unless_it_says_not_to(monkeypatch):
    ordered = []

    class FakeEvent:
        def __init__(self, *moment):
            self.moment = moment

        def precede(self, stream):
            ordered.append((*self.moment, stream))

    monkeypatch.setattr(_native, "Event", FakeEvent)
    monkeypatch.setattr(_native, "to_dlpack", lambda *arguments: arguments)
    array = DeviceArray(FakeBuffer(), (2, 3), FLOAT32.id, 7)
    Protocol(ACCEPTED).finish((array,), 7, [])
    for stream, expected in ((None, [(3, 7, 1)]), (5, [(3, 7, 5)]), (-1, [])):
        ordered.clear()
        exported = array.__dlpack__(stream=stream, max_version=(1, 0), dl_device=None, copy=None)
        assert exported[1:] == ((2, 3), FLOAT32.id) and ordered == expected


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_host_results_become_the_frameworks_own(dtype, rng):
    bits = rng.integers(0, 2 ** (8 * dtype.bytes), (3, 5), np.uint64).astype(f"u{dtype.bytes}")
    host = bits.view(storage_dtype(dtype.id))
    found = NUMPY.from_host(host, dtype.id)
    assert found.dtype.name == dtype.name
    np.testing.assert_array_equal(found.view(bits.dtype), bits)


def test_the_callers_context_stays_current_whatever_jax_makes_current(fake_driver):
    script = """
    import types
    class Array:
        __module__ = "jaxlib.xla"
        __dlpack_device__ = lambda self: (2, 0)
        def __dlpack__(self, **options):
            _native.set_current_context(other)
            return x.__dlpack__(**options)
    def from_dlpack(array):
        assert _native.current_context() == before
        _native.set_current_context(other)
        made.append(array)
        return array
    jax = sys.modules["jax"] = types.ModuleType("jax")
    jax.Array, jax.core = Array, types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    jax.dlpack = types.SimpleNamespace(from_dlpack=from_dlpack)
    contexts = [ctypes.c_size_t(), ctypes.c_size_t()]
    for device, context in enumerate(contexts):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    first, other = (context.value for context in contexts)
    x, made = array(4, 64), []
    for before in (0, first, other):
        _native.set_current_context(before)
        t.rms_norm(Array())
        print(_native.current_context() == before, len(made))
    """
    assert fake_driver(script) == ["True 1", "True 2", "True 3"]


def test_numpy_has_no_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = np.ones((2, 8), np.float32)
    refusal = "rms_norm: out_dtype is bfloat16, of which numpy has arrays only with ml_dtypes: pip install ml_dtypes"
    with using("simulator"), pytest.raises(ArgumentError, match=refusal):
        rms_norm(x, x[0], out_dtype="bfloat16")
