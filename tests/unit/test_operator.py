# SPDX-License-Identifier: Apache-2.0
"""The native call with every role of arguments: what plans are asked for, what comes back, and launches by two kernels.

How many groups launches have is in test_grid.py, what is refused in test_bad_input.py, test_arguments.py and
test_overlap.py.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from native_calls import EVERY_KIND, FLOATS, ONE, PLACES, Recorder, arrays_of, declared, values_of, view
from native_calls import ROWS as OF_ROWS

from transformer_rtc import KernelManager, SimulatedDevice, _native, arrays, operator, rms_norm, using
from transformer_rtc.arguments import (
    Choice,
    Equal,
    Flag,
    Input,
    Integer,
    Output,
    OutputDType,
    Real,
    Result,
)
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import AllocationError, ArgumentError, LaunchError
from transformer_rtc.operator import native_operator
from transformer_rtc.request import LaunchRule, Request
from transformer_rtc.spec import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, INT8, Field, Params, TextSpec

Source = _native.Source

# ---- What a plan is asked for with, and what comes back --------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16,), (4, 16)])
def test_columns_are_of_all_rows_or_of_each_head(shape):
    recorder = Recorder()
    recorder(weight=view(shape, BFLOAT16), bias=view(shape, at=PLACES["bias"]), dweight=True, dbias=True)
    assert recorder.requests[0][3:] == (16, len(shape) == 2, False, 0)
    assert [made[:2] for made in recorder.made[1:]] == [(shape, BFLOAT16.id), (shape, FLOAT32.id)]
    for name in ("weight", "bias", "dweight", "dbias"):
        assert recorder.launches[0].memory[name][5] == math.prod(shape)


def test_one_head_and_one_column_have_any_stride():
    recorder = Recorder()
    recorder(x=view((6, 1, 16)), weight=view((1, 16), strides=(5, 1)), mean=view((6, 1), strides=(1, 9)))
    recorder(x=view((6, 4, 1)), weight=view((4, 1), strides=(1, 9)))
    assert [request[3:] for request in recorder.requests] == [(16, True, False, 0), (1, True, False, 0)]


def test_sums_of_columns_have_one_row_where_no_columns_are_given():
    recorder = Recorder()
    recorder(x=view(dtype=FLOAT16), dweight=True)
    assert recorder.made[1][:2] == ((16,), FLOAT16.id)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"out": FLOAT16}),
        ({"out_dtype": "float8_e4m3fn"}, {"out": FLOAT8_E4M3}),
        ({"out_dtype": np.int8}, {"out": INT8}),
        ({"return_residual": True}, {"out": FLOAT16, "residual_out": FLOAT16}),
        (
            {"return_residual": True, "residual": view(dtype=BFLOAT16, at=PLACES["residual"])},
            {"residual": BFLOAT16, "out": FLOAT16, "residual_out": BFLOAT16},
        ),
        ({"return_out": False, "rstd": True, "out_dtype": "int8"}, {"rstd": FLOAT32}),
        (
            {"dweight": True, "dbias": True, "grad_dtype": "bfloat16", "weight": view((16,))},
            {"weight": FLOAT32, "out": FLOAT16, "dweight": BFLOAT16, "dbias": BFLOAT16},
        ),
        ({"dbias": True, "grad_dtype": "float32"}, {"out": FLOAT16, "dbias": FLOAT32}),
        ({"scale": view(()), "amax": view((1,), at=PLACES["amax"])},
         {"scale": FLOAT32, "out": FLOAT16, "amax": FLOAT32}),
        ({"mean": view((6, 4), at=PLACES["mean"])}, {"mean": FLOAT32, "out": FLOAT16}),
    ],
)  # fmt: skip
def test_the_plan_gets_the_types_of_what_is_there_and_wanted(given, expected):
    recorder = Recorder()
    recorder(x=view(dtype=FLOAT16, at=PLACES["x"] << 20), **given)
    assert recorder.dtypes == {"x": FLOAT16.id, **{name: dtype.id for name, dtype in expected.items()}}
    assert set(recorder.launches[0].memory) == set(recorder.dtypes)


def test_results_are_in_the_order_of_the_descriptor_and_one_comes_bare():
    recorder = Recorder()
    given = view(at=PLACES["out"])
    assert recorder(out=given) is given
    out, rstd, dbias = recorder(out=given, rstd=True, dbias=True, amax=view((), at=PLACES["amax"]))
    assert out is given and (rstd.shape, dbias.shape) == ((6, 4), (16,))
    assert recorder(return_out=False, dweight=True).shape == (16,)
    out, residual = recorder(return_residual=True)
    assert out.shape == residual.shape == (6, 4, 16)


def test_a_plan_is_made_once_for_each_kind_of_call():
    recorder = Recorder()
    calls = [
        {}, {"sm_margin": 1}, {"weight": view((16,))}, {"weight": view((4, 16))}, {"x": view(dtype=FLOAT16)},
        {"x": view((6, 4, 8))}, {"x": view(device=1)}, {"dweight": True},
    ]  # fmt: skip
    for given in calls + calls[::-1]:
        recorder(**given)
    recorder(sm_margin=2)
    recorder(x=view((7, 4, 16)))
    assert len(recorder.requests) == len(set(recorder.requests)) == len(calls)


@pytest.mark.parametrize(
    ("given", "vec_size"),
    [
        ({}, 16),
        ({"x": view((6, 4, 16), at=PLACES["x"] + 16)}, 16),
        ({"x": view((6, 4, 16), at=PLACES["x"] + 8)}, 2),
        ({"x": view((6, 4, 12))}, 4),
        ({"x": view((6, 4, 17))}, 1),
        ({"x": view((6, 4, 16), strides=(66, 16, 1))}, 2),
        ({"x": view((1, 1, 16), strides=(66, 1, 1))}, 16),  # no row follows the first one
        ({"weight": view((16,), at=PLACES["weight"] + 4)}, 1),
        ({"residual": view(dtype=BFLOAT16, at=PLACES["residual"] + 8)}, 4),
        ({"scale": view((), at=PLACES["scale"] + 4)}, 16),
        ({"mean": view((6, 4), at=PLACES["mean"] + 4)}, 16),
        ({"out": view(dtype=FLOAT16, at=PLACES["out"] + 4)}, 2),
    ],
)  # fmt: skip
def test_the_plan_gets_the_largest_vector_that_all_rows_are_whole_ones_of(given, vec_size):
    recorder = Recorder()
    recorder(**given)
    assert recorder.vec_sizes == [vec_size]


def test_rows_that_are_no_whole_vectors_have_a_plan_of_their_own():
    class Of8(Recorder):
        def plan(self, *request):
            self.rule["vec_size"] = 8
            return super().plan(*request)

    recorder, asked = Of8(), []
    apart = {"x": view((6, 4, 16), strides=(68, 17, 1))}
    for given in ({}, {}, apart, {}, apart, {"weight": view((16,), at=PLACES["weight"] + 4)}, {"x": view((7, 4, 16))}):
        recorder(**given)
        asked.append(len(recorder.requests))
    assert asked == [1, 1, 2, 2, 2, 3, 3] and recorder.vec_sizes[:2] == [16, 1]
    # The unaligned ones may come first.
    recorder, asked = Of8(), []
    for given in (apart, apart, {}, apart, {}):
        recorder(**given)
        asked.append(len(recorder.requests))
    assert asked == [1, 1, 2, 2, 2]


def test_memory_that_no_vector_fits_is_refused():
    recorder = Recorder()
    recorder.allocate = lambda *request: (None, 8)
    with pytest.raises(AllocationError, match="allocated out at an address that is no multiple of 16 bytes"):
        recorder()


def test_a_plan_that_fails_is_asked_for_again():
    class Failing(Recorder):
        def plan(self, *request):
            made = super().plan(*request)
            if len(self.requests) == 1:
                raise ArgumentError("op: no such thing")
            return made

    recorder = Failing()
    with pytest.raises(ArgumentError, match=r"^op: no such thing$"):
        recorder()
    assert recorder().shape == (6, 4, 16) and len(recorder.requests) == 2


def test_plans_and_operators_that_cannot_be_are_refused():
    launcher = _native.PythonLauncher(print, print, 8)
    row = _native.Stage(launcher, ONE, ONE, 0, False, [])
    column = _native.Stage(launcher, ONE, ONE, 0, False, [], columns_per_cta=64)
    _native.Plan([row, column, column], multiprocessors=1)
    for stages in ([column], [row, row], [row, column, row]):
        with pytest.raises(ValueError, match="first launch is over rows"):
            _native.Plan(stages, multiprocessors=1)
    _native.Stage(launcher, ONE, ONE, 0, False, [(Source.DATA, 504, 0, 0)])
    with pytest.raises(ValueError, match="too many parameters"):
        _native.Stage(launcher, ONE, ONE, 0, False, [(Source.DATA, 512, 0, 0)])
    x, more = EVERY_KIND[0], [Input(f"x{i}", OF_ROWS, FLOATS) for i in range(12)]
    Recorder((x, *more[:11]))
    with pytest.raises(ValueError, match="first argument is an array of rows, and it has at most 12 arrays"):
        Recorder((x, *more))
    with pytest.raises(ValueError, match="first argument is an array of rows, and it has at most 12 arrays"):
        Recorder((Input("x", "4", FLOATS),))


X, OUT = Input("x", "... heads queries columns", FLOATS), Output("out", "... columns", FLOATS)
SAME = Equal("queries", "columns", "needs as many queries as columns")
NO_DECLARATIONS = [
    ((X, Output("out", "... columns", FLOATS, like="later")), "is not in"),
    ((X, Output("out", "... columns", FLOATS, like="out")), "out is like an array behind it"),
    ((X, Output("out", "... columns", ())), "out has no data type"),
    ((X, OUT, OutputDType("dtype", FLOATS, ("scale",)), Real("scale", 1.0)), "is not in"),
    ((X, Input("w", "1 | 2 | 3", FLOATS)), "w has no shape, or more than two"),
    ((X, Input("w", "1 2 3 4 5", FLOATS)), "w has too many dimensions"),
    ((X, Input("w", "... 2 2", FLOATS)), "w has too many dimensions"),
    ((X, Input("m", "...", FLOATS, broadcast=True)), "m has rows of no one width"),
    ((X, Input("m", "... columns | 1", FLOATS)), "m has rows of no one width"),
    ((Input("x", "... a b c d e", FLOATS),), "the first array names at most 4 dimensions"),
    ((X, Choice("one", {"a": SAME}), Choice("other", {"b": SAME})), "more than one choice asks for equal sizes"),
    ((X, *(Flag(f"flag{number}") for number in range(17))), "too many arguments that are no arrays"),
]


@pytest.mark.parametrize(("arguments", "message"), NO_DECLARATIONS)
def test_what_is_no_declaration_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Recorder(arguments)


@pytest.mark.parametrize(
    "fields",
    [
        (Source.SIZE, 3), (Source.MAGIC, -1), (Source.ARRAY_ROWS, 1), (Source.DATA, 12), (Source.FLAG, 16),
        (Source.STRIDE, 0, 4), (Source.DIFFERENCE, 0, -1),
    ],
)  # fmt: skip
def test_a_plan_of_what_an_operator_does_not_have_is_refused(fields):
    recorder = Recorder((X, OUT), fields=((fields,),))
    with pytest.raises(ValueError, match="a plan of arrays or symbols that op does not have"):
        recorder()
    assert not recorder.launches and not recorder.made


# ---- Shapes, numbers and words of declarations that no operator has yet ----------------------------------------------


WIDE = (
    Input("x", "... a b c columns", FLOATS), Input("four", "4", FLOATS, optional=True),
    Input("grid", "a columns", FLOATS, optional=True),
    Input("mask", "... columns", FLOATS, optional=True, broadcast=True),
    Output("out", "... 4*columns", FLOATS), Result("pairs", "b 2", (FLOAT32,)), Result("first", "... 3", (FLOAT32,)),
    Real("least", 1.0, minimum=1e-7), Integer("count"),
    Integer("some", minimum=2, largest=9, noun="a number from 2 on"),
    Choice("mode", {"same": Equal("a", "columns", "needs as many a as columns"), "other": None}),
)  # fmt: skip
OF_WIDE = [
    (Source.SIZE, 0), (Source.SIZE, 1), (Source.SIZE, 2), (Source.SIZE, 3), (Source.MAGIC, 3),
    (Source.DIFFERENCE, 3, 1), (Source.STRIDE, 3, 1), (Source.STRIDE, 3, 3), (Source.LEADING_STRIDE, 3),
    (Source.INTEGER, 0), (Source.INTEGER, 1), (Source.FLAG, 0),
]  # fmt: skip


def wide(**given) -> tuple[object, Recorder]:
    recorder = Recorder(WIDE, fields=(OF_WIDE,))
    shape = given.pop("shape", (2, 3, 5, 7, 8))
    return recorder(x=view(shape, at=PLACES["x"]), **given), recorder


def test_four_dimensions_have_names_and_sizes():
    mask = view((2, 3, 5, 1, 8), at=PLACES["weight"])
    (out, pairs, first), recorder = wide(
        mask=mask, four=view((4,), at=PLACES["bias"]), pairs=True, first=True, count=-5, some=99, mode="other"
    )
    assert [one.shape for one in (out, pairs, first)] == [(2, 3, 5, 7, 32), (5, 2), (2, 3, 5, 7, 3)]
    words = struct.unpack_from("<4I", b"".join(recorder.launches[0].params[8 * i : 8 * i + 4] for i in range(4)))
    assert words == (8, 7, 5, 3)
    tail = struct.unpack_from("<IxxxxixxxxqqqixxxxixxxxI", recorder.launches[0].params, 8 * 4)
    magic, *others = tail
    assert (magic * 300 >> 32) >> 1 == 100  # of 3
    assert others == [3 - 7, 0, 40, 120, -5, 9, 1]
    memory = recorder.launches[0].memory
    assert memory["out"][5] == 32 and memory["first"][5] == 3 and memory["pairs"][5] == 10


WIDE_REFUSES = [
    ({"four": view((5,))}, r"four must have the shape \(4,\); it has \(5,\)"),
    ({"grid": view((3, 7))}, r"grid must have the shape \(3, 8\); it has \(3, 7\)"),
    ({"shape": (7, 8), "grid": view((3, 8))}, r"grid must have the shape \[a, columns\] of the dimensions of x, whose"),
    ({"shape": (1, 2**28 + 1)}, r"x must have 1 to 268435456 elements in its last dimension; it has 268435457"),
    ({"least": 1e-8}, "least must be at least 1e-07; it is 1e-08"),
    ({"count": 2**31}, "count must be an integer of 32 bits; it is 2147483648"),
    ({"count": -(2**31) - 1}, "count must be an integer of 32 bits"),
    ({"count": "4"}, "count must be an integer of 32 bits; it is '4'"),
    ({"count": True}, "count must be an integer of 32 bits; it is True"),
    ({"some": 1}, "some must be a number from 2 on; it is 1"), ({"mode": "same"}, "mode='same' needs as many a as col"),
    ({"mode": "none"}, "mode must be 'same', 'other' or None; it is 'none'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WIDE_REFUSES)
def test_what_such_a_declaration_refuses(given, message):
    with pytest.raises(ArgumentError, match=f"^op: {message}"):
        wide(**given)


# ---- A family of two launches ----------------------------------------------------------------------------------------


class Idle:
    """Two kernels that do nothing, as launches over rows and over columns by rules that are given."""

    name = "idle"

    def __init__(self, rows: LaunchRule, columns: LaunchRule) -> None:
        self.rules, self.requests = {"rows": rows, "columns": columns}, []
        self.operator = operator.Operator(declared(EVERY_KIND, "idle", self))

    def check(self, request):
        if request.columns == 13:
            raise ArgumentError(f"{request.operator}: 13 columns bring bad luck")

    def specialise(self, request, limits, config=None):
        self.requests.append(request)
        self.check(request)
        text, fields = 'extern "C" __global__ void {}(Params p) {{}}', (Field("x", "pointer", "x.data"),)
        return tuple((TextSpec(text.format(name), name, fields), rule) for name, rule in self.rules.items())

    def __call__(self, columns=40, **given):
        with using(SimulatedDevice(multiprocessors=5)):
            return call_of_every_kind(self.operator.call, x=np.ones((70, columns), np.float32), dweight=True, **given)


def call_of_every_kind(call, **given):
    return call(*values_of(EVERY_KIND, {"return_residual": False, **given})[1])


# One CTA at a time on a multiprocessor.
ROWS = LaunchRule(threads=64, partial_bytes=4, persistent=True, dynamic_shared_memory=120 * 1024)
COLUMNS = LaunchRule(threads=32, columns_per_cta=32)


def test_the_groups_of_a_persistent_launch_are_those_that_are_resident(monkeypatch):
    grids = []
    launch = _native.PythonLauncher

    def spy(zero, run, size):
        return launch(zero, lambda grid, *rest: grids.append(grid) or run(grid, *rest), size)

    monkeypatch.setattr(_native, "PythonLauncher", spy)
    monkeypatch.setattr(operator, "manager", KernelManager(DiskCache(None)))  # it loads anew
    idle = Idle(ROWS, COLUMNS)
    for margin in (0, 2, 4):
        idle(sm_margin=margin)
    assert grids == [(5, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 1), (1, 1, 1), (2, 1, 1)]
    with pytest.raises(ArgumentError, match=r"^idle: sm_margin must leave at least one of 5 multiprocessors; it is 5"):
        idle(sm_margin=5)
    types = dict.fromkeys(arrays_of(EVERY_KIND)) | dict.fromkeys(("x", "out", "dweight"), FLOAT32)
    assert idle.requests == [Request("idle", types, 40, per_head=False, margin=margin) for margin in (False, True)]


def test_an_error_of_the_familys_surfaces_as_it_is_and_again():
    idle = Idle(ROWS, COLUMNS)
    for count in (1, 2):
        with pytest.raises(ArgumentError, match=r"^idle: 13 columns bring bad luck$"):
            idle(columns=13)
        assert len(idle.requests) == count


def test_a_later_launch_that_does_not_fit_is_refused():
    with pytest.raises(LaunchError, match="columns: 1048576 bytes of dynamic shared memory"):
        Idle(ROWS, COLUMNS._replace(dynamic_shared_memory=1 << 20))()


def test_the_default_type_must_be_one_that_the_output_may_have():
    recorder = Recorder((EVERY_KIND[0], Output("out", OF_ROWS, (FLOAT8_E4M3, INT8))))
    with pytest.raises(ArgumentError, match=r"^op: out must be one of float8_e4m3fn, int8; it is float32"):
        recorder()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8])
def test_outputs_of_eight_bits_are_of_numpy_s_own_types(dtype):
    x, out = np.ones((4, 64), np.float32), np.zeros((4, 64), dtype)
    with using(SimulatedDevice(static=True)):
        found, _ = rms_norm(x, out_dtype=dtype, row_scaling=True)
        assert rms_norm(x, out=out, row_scaling=True)[0] is out
    assert found.dtype == dtype and found.view(np.uint8).all()
    np.testing.assert_array_equal(out.view(np.uint8), found.view(np.uint8))


# ---- Arrays of the host on a GPU, and frameworks whose arrays are immutable -----------------------------------------


def test_what_is_written_in_place_comes_back_to_the_host(monkeypatch):
    class Buffer:
        """Device memory that is the host's."""

        def __init__(self, device, size):
            self.memory = np.zeros(max(size, 1), np.uint8)
            self.pointer = self.memory.ctypes.data

        def copy_from_host(self, offset, host, size, stream):
            ctypes.memmove(self.pointer + offset, host, size)

        def copy_to_host(self, offset, host, size, stream):
            ctypes.memmove(host, self.pointer + offset, size)

    monkeypatch.setattr(_native, "Buffer", Buffer)
    monkeypatch.setattr(_native, "synchronize_stream", lambda *stream: None)
    monkeypatch.setattr(_native, "current_device", lambda: 0)
    monkeypatch.setattr(_native, "own_stream", lambda device: 0)

    given = ("x", "scale", "out", "amax")

    def plan(*request):
        def launch(grid, block, cluster, shared, cooperative, params, stream, memory):
            x, scale, out, amax = (
                np.frombuffer((ctypes.c_float * size).from_address(at), np.float32)
                for at, size in zip(struct.unpack_from("<QQQQ", params), (12, 1, 12, 1), strict=True)
            )
            out[:] = x * scale
            amax[:] = max(amax[0], abs(x).max())

        names = arrays_of(EVERY_KIND)
        fields = [(Source.DATA, 8 * place, names.index(name), 0) for place, name in enumerate(given)]
        stage = _native.Stage(_native.PythonLauncher(print, launch, 32), (32, 1, 1), ONE, 0, False, fields)
        return _native.Plan([stage], multiprocessors=1)

    native = native_operator(declared(EVERY_KIND), plan, pytest.fail, pytest.fail)
    x, scale = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([2], np.float32)
    for out, amax in itertools.product((None, np.zeros_like(x)), (np.array(5, np.float32), np.full(3, 7, np.float32))):
        arrays_given = zip(given, (x, scale, out, amax if amax.ndim == 0 else amax[1:2]), strict=True)
        found = call_of_every_kind(
            lambda *values: arrays.call(native, declared(EVERY_KIND), values, lambda: None), **dict(arrays_given)
        )
        assert out is None or found is out
        np.testing.assert_array_equal(found, 2 * x)
        np.testing.assert_array_equal(amax, np.float32(11) if amax.ndim == 0 else np.array([7, 11, 7], np.float32))


@pytest.mark.parametrize("name", ["out", "amax"])
def test_immutable_arrays_cannot_be_written_in_place(name, monkeypatch):
    array_type = type("Array", (), {"__module__": "jaxlib.xla"})
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(Array=array_type))
    values = tuple(array_type() if argument.name in ("x", name) else None for argument in EVERY_KIND)
    with pytest.raises(ArgumentError, match=f"^op: {name} is a JAX array, and those are immutable"):
        arrays.call(Recorder().native, declared(EVERY_KIND), values, lambda: None)


def test_parameters_of_a_kernel_may_have_512_bytes():
    assert _native.MAX_PARAMETER_BYTES == 512
    assert Params([Field(f"f{i}", "pointer") for i in range(64)]).size == 512
