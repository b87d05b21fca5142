"""The native call with every role of arguments and plans of several launches: no operator's kernel, and no GPU."""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
import sys
import types
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from transformer_rtc import KernelManager, _native, arrays, dispatch, using
from transformer_rtc.cache import DiskCache
from transformer_rtc.dispatch import Argument, LaunchRule, Request
from transformer_rtc.errors import ArgumentError, LaunchError
from transformer_rtc.simulator import SimulatedDevice
from transformer_rtc.spec import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    Field,
    Params,
    TextSpec,
)

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
EVERY_ROLE = (
    Argument("x", "rows", FLOATS),
    Argument("residual", "rows", FLOATS, optional=True),
    Argument("weight", "columns", FLOATS, optional=True),
    Argument("bias", "columns", FLOATS, optional=True),
    Argument("scale", "value", (FLOAT32,), optional=True),
    Argument("mean", "row_inputs", (FLOAT32,), optional=True),
    Argument("eps", "real"),
    Argument("out", "rows_out", (*FLOATS, FLOAT8_E4M3, FLOAT8_E5M2, INT8)),
    Argument("return_out", "wanted", of=("out",)),
    Argument("residual_out", "rows_out", FLOATS, like="residual"),
    Argument("return_residual", "wanted", of=("residual_out",)),
    Argument("out_dtype", "dtype_out", (*FLOATS, FLOAT8_E4M3, FLOAT8_E5M2, INT8), of=("out",)),
    Argument("amax", "value_out", (FLOAT32,)),
    Argument("rstd", "row_values", (FLOAT32,)),
    Argument("dweight", "column_values", FLOATS, like="weight"),
    Argument("dbias", "column_values", FLOATS, like="bias"),
    Argument("grad_dtype", "dtype_out", FLOATS, of=("dweight", "dbias")),
    Argument("sm_margin", "sm_margin"),
    Argument("stream", "stream"),
)
ARRAYS = [argument.name for argument in EVERY_ROLE if argument.role not in dispatch._NO_ARRAYS]
DEFAULTS = {
    "eps": 1e-6, "return_out": True, "return_residual": False, "out_dtype": None, "rstd": False, "dweight": False,
    "dbias": False, "grad_dtype": None, "sm_margin": 0, "stream": None,
}  # fmt: skip
BASE = 1 << 32
PLACES = {name: BASE << number for number, name in enumerate(ARRAYS)}  # far from each other
ONE = (1, 1, 1)


def view(shape=(6, 4, 16), dtype=FLOAT32, at=BASE, strides=None, device=0, read_only=False) -> _native.View:
    """Return a view of memory that is not there."""
    dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return _native.View(at, shape, dense if strides is None else strides, dtype.id, device, read_only)


class Made(NamedTuple):
    shape: tuple[int, ...]
    dtype: int
    pointer: int


class Launch(NamedTuple):
    stage: int
    grid: tuple[int, int, int]
    params: bytes
    memory: dict[str, tuple[Any, ...]]


class Recorder:
    """A native operator whose plans record what they would launch."""

    def __init__(self, arguments=EVERY_ROLE, fields=((),), columns_per_cta=8, row_groups=0, **rule) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self.checked: list[tuple[Any, ...]] = []
        self.zeroed: list[tuple[int, int]] = []
        self.launches: list[Launch] = []
        self.made: list[Made] = []
        self.fields, self.columns_per_cta, self.row_groups = fields, columns_per_cta, row_groups
        self.cooperative = rule.pop("cooperative", False)
        self.rule = {
            "rows_per_cta": 1, "ctas_per_row": 1, "max_groups": _native.Plan.ANY_GROUPS, "workspace_bytes": 0,
            "partial_bytes": 0, "whole_heads": False, "multiprocessors": 132, **rule,
        }  # fmt: skip
        self.names = [argument.name for argument in arguments]
        self.arrays = [argument.name for argument in arguments if argument.role not in dispatch._NO_ARRAYS]
        self.native = _native.Operator(
            "op", dispatch.native_arguments(arguments), self.plan, self.check, pytest.fail, arrays.framework_of,
            dispatch._chosen,
        )  # fmt: skip

    def check(self, *request: Any) -> int:
        self.checked.append(request)
        return self.rule["multiprocessors"]

    def plan(self, *request: Any) -> _native.Plan:
        self.requests.append(request)
        stages = []
        for number, fields in enumerate(self.fields):

            def launch(grid, block, cluster, shared, cooperative, params, stream, memory, stage=number):
                assert (block, cluster, stream) == ((32, 1, 1), ONE, 0)
                self.launches.append(Launch(stage, grid, params, {row[3]: row for row in memory}))

            launcher = _native.PythonLauncher(lambda *request: self.zeroed.append(request), launch, 512)
            filled = [(source, index, 8 * place) for place, (source, index) in enumerate(fields)]
            stages.append(
                _native.Stage(
                    launcher, (32, 1, 1), ONE, 0, self.cooperative and number == 0, filled,
                    self.columns_per_cta if number else 0, False, self.row_groups if number else 0,
                )
            )  # fmt: skip
        return _native.Plan(stages, **self.rule)

    def allocate(self, shape, dtype, device):
        made = Made(shape, dtype, (BASE << 16) + (len(self.made) << 24))
        self.made.append(made)
        return made, made.pointer

    def __call__(self, **given: Any) -> Any:
        given = {"x": view(), **given}
        views = [(given[name], name) if isinstance(given.get(name), _native.View) else None for name in self.arrays]
        values = [given.get(name, DEFAULTS.get(name)) for name in self.names]
        return self.native.run_views(views, values, self.allocate, 0)

    @property
    def dtypes(self) -> dict[str, int]:
        """What the last plan was asked for with, without what is absent."""
        return {name: dtype for name, dtype in zip(self.arrays, self.requests[-1][2], strict=True) if dtype}


# ---- Shapes and places ---------------------------------------------------------------------------------------------

SHAPE = r"\(6, 4, 16\)"
REFUSED = {
    "a residual of another shape": (
        {"residual": view((6, 4, 8), at=PLACES["residual"])},
        rf"residual must have the shape of x, {SHAPE}; it has \(6, 4, 8\)",
    ),
    "a weight of other heads": (
        {"weight": view((6, 16))},
        r"weight must have the shape \(16,\), one element for each column of x, or \(4, 16\), such a row for each "
        r"head; it has \(6, 16\)",
    ),
    "a weight of heads where x has none": (
        {"x": view((16,)), "weight": view((1, 16))},
        r"weight must have the shape \(16,\), one element for each column of x; it has \(1, 16\)",
    ),
    "a bias of another shape than the weight": (
        {"weight": view((4, 16)), "bias": view((16,))},
        r"bias must have the shape of weight, \(4, 16\); it has \(16,\)",
    ),
    "a bias of heads beside a weight of none": (
        {"weight": view((16,)), "bias": view((4, 16))},
        r"bias must have the shape of weight, \(16,\); it has \(4, 16\)",
    ),
    "a lone bias": ({"bias": view((4, 15))}, r"bias must have the shape \(16,\)"),
    "heads with gaps": ({"weight": view((4, 16), strides=(17, 1))}, "weight must be contiguous"),
    "transposed heads": ({"weight": view((4, 16), strides=(1, 4))}, "weight must be contiguous"),
    "expanded heads": ({"weight": view((4, 16), strides=(0, 1))}, "weight must be contiguous"),
    "too many heads": (
        {"x": view((1, 65536, 16)), "weight": view((65536, 16))},
        "weight may have a row for each head up to 65535 heads",
    ),
    "heads of too many rows": (
        {"x": view((1 << 29, 4, 16)), "weight": view((4, 16))},
        r"weight may have a row for each head up to 65535 heads and 2\^31 - 1 rows of x; there are 4 heads and "
        r"2147483648 rows",
    ),
    "a mean of every element": (
        {"mean": view()},
        rf"mean must have the shape \(6, 4\), one element for each row of x; it has {SHAPE}",
    ),
    "a flat mean": ({"mean": view((24,))}, r"mean must have the shape \(6, 4\)"),
    "a transposed mean": ({"mean": view((6, 4), strides=(1, 6))}, "mean must be contiguous"),
    "a mean of float16": ({"mean": view((6, 4), FLOAT16)}, "mean must be one of float32; it is float16"),
    "a scale of two": ({"scale": view((2,))}, r"scale must have the shape \(\) or \(1,\); it has \(2,\)"),
    "a scale of rank 2": ({"scale": view((1, 1))}, r"scale must have the shape \(\) or \(1,\); it has \(1, 1\)"),
    "a scale of none": ({"scale": view((0,))}, r"scale must have the shape \(\) or \(1,\); it has \(0,\)"),
    "a scale of another device": ({"scale": view((), device=1)}, "scale must be on the device of x, cuda:0"),
    "a scale at an odd address": ({"scale": view((), at=BASE + 2)}, "scale must be aligned"),
    "a scale without memory": ({"scale": view((), at=0)}, "scale has elements but no memory"),
    "an amax of two": ({"amax": view((2,))}, r"amax must have the shape \(\) or \(1,\)"),
    "an amax of int8": ({"amax": view((), INT8)}, "amax must be one of float32; it is int8"),
    "a read-only amax": ({"amax": view((), read_only=True)}, "amax is read-only"),
    "an out of another type than asked for": (
        {"out": view(at=PLACES["out"]), "out_dtype": "int8"},
        "out is float32 where int8 was asked for",
    ),
    "an unwanted output": (
        {"residual_out": view(at=PLACES["residual_out"])},
        "residual_out was given, but return_residual is False",
    ),
    "an out that is not to be returned": (
        {"out": view(at=PLACES["out"]), "return_out": False, "rstd": True},
        "out was given, but return_out is False",
    ),
    "sums of float8": ({"dweight": True, "grad_dtype": "float8_e5m2"}, "grad_dtype must be one of float32, float16"),
    "a negative margin": ({"sm_margin": -1}, "sm_margin must be a non-negative integer; it is -1"),
    "a margin of a very negative number": ({"sm_margin": -(10**30)}, "sm_margin must be a non-negative integer"),
    "half a margin": ({"sm_margin": 0.5}, r"sm_margin must be a non-negative integer; it is 0\.5"),
    "a boolean margin": ({"sm_margin": True}, "sm_margin must be a non-negative integer; it is True"),
    "a margin of None": ({"sm_margin": None}, "sm_margin must be a non-negative integer; it is None"),
    "a margin of everything": (
        {"sm_margin": 132},
        "sm_margin must leave at least one of 132 multiprocessors; it is 132",
    ),
    "a margin beyond all numbers": ({"sm_margin": 10**30}, "sm_margin must leave at least one of 132 multiprocessors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name):
    given, message = REFUSED[name]
    recorder = Recorder()
    with pytest.raises(ArgumentError, match=f"^op: {message}"):
        recorder(**given)
    assert not recorder.made and not recorder.launches


def test_nothing_asked_for_is_refused():
    recorder = Recorder()
    with pytest.raises(ArgumentError, match=r"^op: nothing is asked for; one of return_out.* must be True$"):
        recorder(return_out=False)
    with pytest.raises(ArgumentError, match=r"^op: nothing is asked for; one of return_out.* must be True$"):
        recorder(return_out=False, amax=view((), at=PLACES["amax"]))


class Index:
    def __index__(self):
        return 3


@pytest.mark.parametrize("shape", [(1 << 32, 1), (2, 1 << 32, 3, 1)])
def test_more_rows_than_a_number_of_32_bits_has(shape):
    # Where rows are not told apart by their query, nothing is divided by how many there are.
    recorder = Recorder(rows_per_cta=64)
    recorder(x=view(shape))
    assert recorder.launches[0].grid == (math.prod(shape) // 64, 1, 1)


@pytest.mark.parametrize("margin", [3, np.int64(3), Index()])
def test_whatever_is_an_index_is_a_margin(margin):
    recorder = Recorder(max_groups=264)
    recorder(x=view((1000, 16)), sm_margin=margin)
    assert recorder.launches[0].grid == (264 * 129 // 132, 1, 1)
    assert recorder.requests[0][4:] == (False, True, 0)


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
    assert recorder(out=given) == "out"
    out, rstd, dbias = recorder(out=given, rstd=True, dbias=True, amax=view((), at=PLACES["amax"]))
    assert (out, rstd.shape, dbias.shape) == ("out", (6, 4), (16,))
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


# ---- Overlap -------------------------------------------------------------------------------------------------------

OUT, RESIDUAL_OUT = PLACES["out"], PLACES["residual_out"]
BYTES = 6 * 4 * 16 * 4
OVERLAPS = {
    "two outputs that are one": (
        {"out": view(at=OUT), "residual_out": view(at=OUT)},
        "residual_out must not overlap out",
    ),
    "two outputs that share a row": (
        {"out": view(at=OUT), "residual_out": view(at=OUT + BYTES - 64)},
        "residual_out must not overlap out",
    ),
    "two outputs in place of one input": ({"out": view(), "residual_out": view()}, "residual_out must not overlap out"),
    "an output on a part of the residual": (
        {"residual": view(at=OUT), "out": view(at=OUT + 64)},
        "out must be residual itself or not overlap it",
    ),
    "an output in place of x and on a part of the residual": (
        {"residual": view(at=BASE + 64), "out": view()},
        "out must be residual itself or not overlap it",
    ),
    "an output on the mean": ({"out": view(at=OUT), "mean": view((6, 4), at=OUT + 4)}, "out must not overlap mean"),
    "an output on the scale": ({"out": view(at=OUT), "scale": view((), at=OUT + 8)}, "out must not overlap scale"),
    "an output on a head's weight": (
        {"out": view(at=OUT), "weight": view((4, 16), at=OUT - 4 * 64 + 4)},
        "out must not overlap weight",
    ),
    "amax in an output": ({"out": view(at=OUT), "amax": view((), at=OUT + 4)}, "amax must not overlap out"),
    "amax in x": ({"amax": view((), at=BASE)}, "amax must not overlap x"),
    "amax in the weight": (
        {"weight": view((16,), at=OUT), "amax": view((1,), at=OUT + 60)},
        "amax must not overlap weight",
    ),
    "amax in the mean": (
        {"mean": view((6, 4), at=OUT), "amax": view((), at=OUT + 92)},
        "amax must not overlap mean",
    ),
    "amax that is the scale": ({"scale": view((), at=OUT), "amax": view((1,), at=OUT)}, "amax must not overlap scale"),
    "overlapping rows of the second output": (
        {"residual_out": view(at=OUT, strides=(60, 15, 1))},
        "residual_out has rows that overlap each other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_is_written_overlaps_nothing_else(name):
    given, message = OVERLAPS[name]
    given = {"return_residual": "residual_out" in given, **given}
    with pytest.raises(ArgumentError, match=f"^op: {message}"):
        Recorder()(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"out": view()},
        {"out": view(at=OUT), "residual": view(at=OUT)},
        {"out": view(), "residual": view()},
        {"out": view(), "residual_out": view(at=OUT), "residual": view(at=OUT)},
        {"out": view(at=OUT), "residual_out": view(at=OUT + BYTES)},
        {"out": view(at=OUT, strides=(128, 32, 1)), "residual_out": view(at=OUT + 64, strides=(128, 32, 1))},
        {"amax": view((), at=BASE - 4), "scale": view((), at=BASE + BYTES)},
        {"weight": view((16,)), "mean": view((6, 4)), "scale": view(())},
    ],
)
def test_neighbours_and_arrays_in_place_are_taken(given):
    Recorder()(return_residual="residual_out" in given, **given)


# ---- Plans of several launches -------------------------------------------------------------------------------------

Source = _native.Source
SHARED = [
    (Source.WORKSPACE, 0), (Source.PARTIALS, 0), (Source.GROUPS, 0), (Source.HEADS, 0), (Source.HEADS_MAGIC, 0),
    (Source.HEADS_SHIFT, 0), (Source.DATA, ARRAYS.index("scale")), (Source.DTYPE, ARRAYS.index("scale")),
    (Source.DATA, ARRAYS.index("amax")), (Source.OUTER_STRIDE, ARRAYS.index("residual")), (Source.ROWS, 0),
]  # fmt: skip


class Shared(NamedTuple):
    workspace: int
    partials: int
    groups: int
    heads: int
    magic: int
    shift: int
    scale: int
    scale_dtype: int
    amax: int
    residual_stride: int
    rows: int


def shared(launch: Launch) -> Shared:
    return Shared(*struct.unpack_from("<QQi4xI4xI4xI4xQi4xQqq", launch.params))


def test_a_later_launch_is_over_the_columns_and_reads_the_partial_sums():
    recorder = Recorder(fields=(SHARED, SHARED), workspace_bytes=5, partial_bytes=64, max_groups=10)
    recorder(amax=view((), at=PLACES["amax"]))
    first, second = recorder.launches
    assert (first.stage, first.grid, second.stage, second.grid) == (0, (10, 1, 1), 1, (2, 1, 1))
    allocated = recorder.made[-1]
    assert allocated[:2] == ((256 + 640,), 1 << 8 | 8)
    assert recorder.zeroed == [(allocated.pointer, 50)]
    for launch in (first, second):
        assert shared(launch) == (
            allocated.pointer, allocated.pointer + 256, 10, 1, 0, 0, 0, 0, PLACES["amax"], 0, 24,
        )  # fmt: skip
        assert launch.memory["the workspace"][1:6] == (True, True, "the workspace", 1, 50)
        assert launch.memory["amax"][1:6] == (True, True, "amax", 4, 1)
        assert launch.memory["out"][1:3] == (True, False)
    partials = [launch.memory["the partial sums"] for launch in (first, second)]
    assert partials[0][:6] == (allocated.pointer + 256, True, False, "the partial sums", 4, 160)
    assert partials[1][:6] == (allocated.pointer + 256, True, True, "the partial sums", 4, 160)


@pytest.mark.parametrize(("workspace", "partial"), [(0, 0), (4, 0), (0, 8), (64, 8), (65, 8)])
def test_one_allocation_holds_what_is_zeroed_and_the_partial_sums(workspace, partial):
    recorder = Recorder(fields=(SHARED,), workspace_bytes=workspace, partial_bytes=partial)
    recorder(x=view((4, 16)))
    found = shared(recorder.launches[0])
    if workspace == partial == 0:
        assert len(recorder.made) == 1 and found.workspace == found.partials == 0
        return
    begin = 4 * workspace if partial == 0 else -(-4 * workspace // 256) * 256
    allocated = recorder.made[-1]
    assert allocated.shape == (begin + 4 * partial,)
    assert found.workspace == allocated.pointer and found.partials == allocated.pointer + begin
    assert recorder.zeroed == ([(allocated.pointer, 4 * workspace)] if workspace else [])
    assert ("the workspace" in recorder.launches[0].memory) == (workspace > 0)
    assert ("the partial sums" in recorder.launches[0].memory) == (partial > 0)


@pytest.mark.parametrize(
    ("rows", "heads", "rows_per_cta", "most", "expected"),
    [
        (24, 4, 1, 10, 8),  # down to whole heads
        (24, 4, 2, 10, 10),  # 12 groups of two rows: two of them make the heads
        (24, 4, 4, 10, 6),
        (24, 4, 8, 10, 3),
        (24, 4, 3, 10, 8),
        (24, 4, 6, 10, 4),
        (30, 5, 1, 3, 5),  # but at least once
        (30, 5, 2, 3, 5),
        (4, 4, 4, 10, 1),
        (4, 4, 8, 10, 1),
        (12, 12, 8, 10, 3),
        (24, 1, 1, 10, 10),
    ],
)
def test_groups_that_keep_sums_of_heads_see_the_same_heads_again_and_again(rows, heads, rows_per_cta, most, expected):
    given = {"x": view((rows // heads, heads, 16)), "weight": view((heads, 16))}
    rule = {"rows_per_cta": rows_per_cta, "max_groups": most}
    recorder = Recorder(fields=(SHARED, SHARED), partial_bytes=4, whole_heads=True, **rule)
    recorder(**given)
    assert recorder.launches[0].grid == (expected, 1, 1)
    assert recorder.launches[1].grid == (2, heads, 1)
    assert expected * rows_per_cta % heads == 0
    found = shared(recorder.launches[1])
    assert (found.groups, found.heads) == (expected, heads)
    if heads > 1:
        assert [(n * found.magic >> 32) >> found.shift for n in range(100)] == [n // heads for n in range(100)]
    # Where nothing is kept, the heads do not matter.
    recorder = Recorder(**rule)
    recorder(**given)
    assert recorder.launches[0].grid == (min(most, -(-rows // rows_per_cta)), 1, 1)


@pytest.mark.parametrize(
    ("rows", "most", "launched"), [(5, 10, 5), (10, 10, 10), (100, 22, 16), (9, 7, 7), (100, 8, 8)]
)
def test_groups_that_take_rows_in_turn_are_a_multiple_of_their_unit(rows, most, launched):
    recorder = Recorder(max_groups=most, group_unit=8)
    recorder(x=view((rows, 16)))
    assert recorder.launches[0].grid == (launched, 1, 1)


@pytest.mark.parametrize(
    ("rows", "partial", "most", "launched"),
    [
        (64, 32768, 396, 64),
        (128, 32768, 396, 64),  # two rows each: the sums of as many again would take longer
        (256, 32768, 396, 128),
        (512, 32768, 396, 128),  # three would be 171, of which some of the 132 multiprocessors had two
        (1024, 32768, 396, 256),  # four; five would be 205
        (512, 32768, 100, 100),  # what is resident is fewer
        (32768, 32768, 396, 396),
        (128, 8192, 396, 128),  # short rows have small sums
        (3, 2**27, 10, 1),
        (2**30, 4, 2**20, 2**20),
        (512, 0, 396, 396),  # none are left
    ],
)
def test_groups_are_fewer_where_their_partial_sums_take_longer_than_rows_in_turn(rows, partial, most, launched):
    recorder = Recorder(max_groups=most, partial_bytes=partial, turn_bytes=1_800_000)
    recorder(x=view((rows, 16)))
    assert recorder.launches[0].grid == (launched, 1, 1)
    # Rows that a CTA has together are one turn; and groups are fewer only where a rule says what a turn is worth.
    recorder = Recorder(max_groups=most, partial_bytes=partial, turn_bytes=1_800_000, rows_per_cta=2)
    recorder(x=view((2 * rows, 16)))
    assert recorder.launches[0].grid == (launched, 1, 1)
    recorder = Recorder(max_groups=most, partial_bytes=partial)
    recorder(x=view((rows, 16)))
    assert recorder.launches[0].grid == (min(rows, most), 1, 1)


@pytest.mark.parametrize(("rows", "most", "launched"), [(30, 396, 16), (100, 22, 16), (7, 396, 7), (4, 396, 4)])
def test_groups_that_are_fewer_are_a_multiple_of_their_unit_too(rows, most, launched):
    recorder = Recorder(max_groups=most, group_unit=8, partial_bytes=200_000, turn_bytes=1_800_000)
    recorder(x=view((rows, 16)))
    assert recorder.launches[0].grid == (launched, 1, 1)


@pytest.mark.parametrize(
    ("ctas_per_row", "margin", "launched"), [(1, 0, 128), (1, 4, 128), (1, 5, 171), (2, 0, 171), (8, 0, 171)]
)
def test_groups_take_one_more_row_each_only_if_none_is_beside_another_then(ctas_per_row, margin, launched):
    recorder = Recorder(max_groups=396, partial_bytes=32768, turn_bytes=1_800_000, ctas_per_row=ctas_per_row)
    recorder(x=view((512, 16)), sm_margin=margin)
    assert recorder.launches[0].grid == (launched * ctas_per_row, 1, 1)


@pytest.mark.parametrize(("rows", "unit", "launched"), [(512, 8, 128), (513, 8, 176), (528, 1, 132), (134, 1, 134)])
def test_groups_that_take_one_more_row_are_counted_in_their_units(rows, unit, launched):
    # 513 rows would be 136 groups of four; 134 rows have one each, and two would be twice the time.
    partial = 32768 if rows > 200 else 16384
    recorder = Recorder(max_groups=396, partial_bytes=partial, turn_bytes=1_800_000, group_unit=unit)
    recorder(x=view((rows, 16)))
    assert recorder.launches[0].grid == (launched, 1, 1)


def test_groups_are_no_fewer_than_heads_however_large_their_partial_sums():
    rule = {"whole_heads": True, "ctas_per_row": 2, "cooperative": True, "partial_bytes": 2**27, "turn_bytes": 1}
    recorder = Recorder(max_groups=6, **rule)
    recorder(x=view((50, 6, 16)), weight=view((6, 16)))
    assert recorder.launches[0].grid == (12, 1, 1)


@pytest.mark.parametrize(
    ("margin", "expected"), [(0, 264), (1, 262), (66, 132), (131, 2)]
)  # of two CTAs on each multiprocessor
def test_a_margin_leaves_multiprocessors_free(margin, expected):
    recorder = Recorder(max_groups=264)
    recorder(x=view((10000, 16)), sm_margin=margin)
    assert recorder.launches[0].grid == (expected, 1, 1)
    recorder(x=view((1, 16)), sm_margin=margin)
    assert recorder.launches[1].grid == ONE


def test_a_margin_leaves_at_least_one_group():
    recorder = Recorder(max_groups=2, ctas_per_row=8, cooperative=True)
    recorder(x=view((10000, 16)), sm_margin=131)
    assert recorder.launches[0].grid == (8, 1, 1)


def test_a_grid_that_is_not_persistent_has_a_group_for_all_rows():
    recorder = Recorder()
    recorder(x=view((1 << 30, 16)))
    assert recorder.launches[0].grid == (1 << 30, 1, 1)
    with pytest.raises(ArgumentError, match=r"^op: x has more rows than a grid can hold"):
        recorder(x=view((1 << 31, 16)))
    recorder = Recorder(max_groups=100, ctas_per_row=2)
    recorder(x=view((1 << 31, 16)))
    assert recorder.launches[0].grid == (200, 1, 1)


MASKED = (
    Argument("x", "rows", FLOATS),
    Argument("mask", "mask", FLOATS, optional=True),
    Argument("out", "rows_out", FLOATS),
    Argument("dmask", "mask_sums", FLOATS, like="mask"),
)
OF_MASK = (
    (Source.BATCH_STRIDE, 3), (Source.HEAD_STRIDE, 3), (Source.QUERY_STRIDE, 3), (Source.MASK_ROWS, 0),
    (Source.SHARERS, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "mask", "expected", "grid"),
    [
        # Strides of batches, heads and queries of what is dense, its rows, and how many groups share a row's.
        ((2, 3, 5, 40), (2, 3, 5, 40), (600, 200, 40, 30, 1), (2, 8)),
        ((2, 3, 5, 40), (2, 1, 5, 40), (200, 0, 40, 10, 1), (2, 3)),
        ((2, 3, 5, 40), (1, 1, 5, 40), (0, 0, 40, 5, 1), (2, 2)),
        ((4, 4, 5, 40), (5, 40), (0, 0, 40, 5, 2), (2, 3)),
        ((4, 4, 5, 40), (4, 1, 1, 40), (40, 0, 0, 4, 2), (2, 2)),
        ((40, 9, 7, 40), (40,), (0, 0, 0, 1, 4), (2, 1)),
        ((3, 2, 4, 5, 40), (3, 2, 1, 5, 40), (200, 0, 40, 30, 1), (2, 8)),
        ((1 << 20, 40), (1 << 20, 40), (0, 0, 40, 1 << 20, 1), (2, 65535)),
        ((1 << 20, 1, 2, 40), (1 << 20, 1, 1, 40), (40, 0, 0, 1 << 20, 1), (2, 65535)),
        ((7, 40), (1, 40), (0, 0, 0, 1, 1), (2, 1)),
        ((40,), (40,), (0, 0, 0, 1, 1), (2, 1)),
    ],
    ids=str,
)
def test_sums_of_a_mask_s_shape_have_a_launch_over_its_columns_and_rows(rows, mask, expected, grid):
    recorder = Recorder(MASKED, ((), OF_MASK), columns_per_cta=32, row_groups=4, row_bytes=4)
    given = {"x": view(rows), "mask": view(mask, BFLOAT16, at=1 << 45), "dmask": True}
    _, dmask = recorder(**given)
    assert (dmask.shape, dmask.dtype) == (mask, BFLOAT16.id)
    first, second = recorder.launches
    assert first.grid == (math.prod(rows[:-1]), 1, 1) and second.grid == (*grid, 1)
    assert struct.unpack_from("<5q", second.params)[:4] == expected[:4]
    assert struct.unpack_from("<i", second.params, 32) == expected[4:]
    for launch in (first, second):
        assert launch.memory["dmask"][:6] == (dmask.pointer, True, False, "dmask", 2, math.prod(mask))


def test_sums_of_a_mask_s_shape_over_no_rows_are_zero():
    for rows, mask in (((0, 3, 4, 16), (3, 4, 16)), ((0, 3, 4, 16), (16,)), ((2, 0, 4, 16), (2, 1, 1, 16))):
        recorder = Recorder(MASKED, ((), OF_MASK), row_groups=4, row_bytes=4)
        _, dmask = recorder(x=view(rows, at=0), mask=view(mask, FLOAT16), dmask=True)
        assert recorder.zeroed == [(dmask.pointer, 2 * math.prod(mask))] and not recorder.launches


def test_rows_that_are_read_again_are_not_written_in_place():
    given = {"x": view((4, 16)), "out": view((4, 16)), "mask": view((16,), at=1 << 45)}
    for out in (view((4, 16)), view((4, 16), at=BASE + 64)):
        recorder = Recorder(MASKED, ((), OF_MASK), row_groups=4, row_bytes=4)
        with pytest.raises(ArgumentError, match=r"^op: out must not overlap x, which is read again for dmask$"):
            recorder(**{**given, "out": out}, dmask=True)
        assert not recorder.made and not recorder.launches
    recorder(**given, dmask=False)
    assert len(recorder.launches) == 2


@pytest.mark.parametrize("heads", [0, 4])
def test_sums_over_no_rows_are_zero(heads):
    recorder = Recorder(fields=((), ()), workspace_bytes=4, partial_bytes=4)
    weight = view((heads, 16))
    x = view((0, heads, 16), at=0)
    recorder(x=x, weight=weight, rstd=True)
    assert not recorder.requests
    out, dweight, dbias = recorder(x=x, weight=weight, dweight=True, dbias=True, grad_dtype="bfloat16")
    assert (out.shape, dweight.shape, dbias.shape) == ((0, heads, 16), (heads, 16), (heads, 16))
    assert recorder.zeroed == [(made.pointer, heads * 16 * 2) for made in (dweight, dbias) if heads]
    assert not recorder.launches and len(recorder.requests) == (heads > 0)


def test_plans_and_operators_that_cannot_be_are_refused():
    launcher = _native.PythonLauncher(print, print, 8)
    row = _native.Stage(launcher, ONE, ONE, 0, False, [], 0, False, 0)
    column = _native.Stage(launcher, ONE, ONE, 0, False, [], 64, False, 0)
    _native.Plan([row, column, column], 1, 1, 1, 0, 0, False, 1)
    for stages in ([column], [row, row], [row, column, row]):
        with pytest.raises(ValueError, match="first launch is over rows"):
            _native.Plan(stages, 1, 1, 1, 0, 0, False, 1)
    _native.Stage(launcher, ONE, ONE, 0, False, [(Source.DATA, 0, 504)], 0, False, 0)
    with pytest.raises(ValueError, match="too many parameters"):
        _native.Stage(launcher, ONE, ONE, 0, False, [(Source.DATA, 0, 512)], 0, False, 0)
    x, more = EVERY_ROLE[0], [Argument(f"x{i}", "rows", FLOATS) for i in range(12)]
    Recorder((x, *more[:11]))
    for arguments in ((), (x, *more), (x._replace(optional=True),), (Argument("w", "columns", FLOATS),)):
        with pytest.raises(ValueError, match="first argument is an array of rows, and it has at most 12 arrays"):
            Recorder(arguments)
    for wrong in ({"like": "later"}, {"like": "out"}, {"of": ("eps",)}):
        with pytest.raises(ValueError, match="not in"):
            Recorder((x, Argument("eps", "real"), Argument("out", "rows_out", FLOATS, **wrong)))


# ---- A family of two launches, in the simulator ----------------------------------------------------------------------

SUMS = """
#include "platform.cuh"
extern "C" __global__ void sums(Params p) {
  const float* x = static_cast<const float*>(p.x);
  float* out = static_cast<float*>(p.out);
  float* partials = static_cast<float*>(p.partials) + static_cast<long long>(blockIdx.x) * ROWS * p.columns;
  for (int place = 0; place < ROWS; ++place) {
    for (int column = threadIdx.x; column < p.columns; column += blockDim.x) {
      float sum = 0.0f;
      for (long long row = static_cast<long long>(blockIdx.x) * ROWS + place; row < p.rows; row += p.groups * ROWS) {
        const float value = x[row * p.stride + column];
        sum += value;
        out[row * p.columns + column] = p.scale ? value * *static_cast<const float*>(p.scale) : value;
      }
      partials[place * p.columns + column] = sum;
    }
  }
  if (p.amax && blockIdx.x == 0 && threadIdx.x == 0) *static_cast<float*>(p.amax) += 1.0f;
}
"""
ADD = """
#include "platform.cuh"
extern "C" __global__ void add(Params p) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= p.columns) return;
  float sum = 0.0f;
  for (unsigned row = 0; row < p.groups * ROWS; ++row) {
    const unsigned outer = p.heads > 1 ? trtc::multiply_high(row, p.heads_magic) >> p.heads_shift : row;
    if (row - outer * p.heads != blockIdx.y) continue;
    sum += static_cast<const float*>(p.partials)[row * p.columns + column];
  }
  static_cast<float*>(p.sum)[blockIdx.y * p.columns + column] = sum;
}
"""
SUM_ARGUMENTS = (
    Argument("x", "rows", (FLOAT32,)),
    Argument("weight", "columns", (FLOAT32,), optional=True),
    Argument("scale", "value", (FLOAT32,), optional=True),
    Argument("out", "rows_out", (FLOAT32,)),
    Argument("amax", "value_out", (FLOAT32,)),
    Argument("sum", "column_values", (FLOAT32,)),
    Argument("sm_margin", "sm_margin"),
    Argument("stream", "stream"),
)
SUMS_FIELDS = (
    Field("x", "pointer", "x.data"), Field("out", "pointer", "out.data"), Field("scale", "pointer", "scale.data"),
    Field("amax", "pointer", "amax.data"), Field("partials", "pointer", "partials"),
    Field("stride", "int64", "x.outer_stride"), Field("rows", "int64", "rows"), Field("columns", "int32", "columns"),
    Field("groups", "int32", "groups"),
)  # fmt: skip
ADD_FIELDS = (
    Field("partials", "pointer", "partials"), Field("sum", "pointer", "sum.data"),
    Field("columns", "int32", "columns"), Field("groups", "int32", "groups"), Field("heads", "uint32", "heads"),
    Field("heads_magic", "uint32", "heads_magic"), Field("heads_shift", "uint32", "heads_shift"),
)  # fmt: skip


class Sums:
    """Copies rows, and adds them up: partial sums by persistent groups, and a launch over columns."""

    name = "sums"

    def __init__(self, rows_per_cta: int = 1, columns_per_cta: int = 32, text: str = ADD) -> None:
        self.rows_per_cta, self.columns_per_cta, self.text = rows_per_cta, columns_per_cta, text
        self.requests: list[Request] = []

    def check(self, request):
        if request.columns == 13:
            raise ArgumentError(f"{request.operator}: 13 columns bring bad luck")

    def specialise(self, request, limits):
        self.requests.append(request)
        self.check(request)
        size = 4 * self.rows_per_cta * request.columns
        options = (f"-DROWS={self.rows_per_cta}",)
        # One CTA at a time on a multiprocessor: the simulated device of 8 then has 8 groups.
        rows = LaunchRule(
            threads=64, rows_per_cta=self.rows_per_cta, partial_bytes=size, persistent=True,
            dynamic_shared_memory=120 * 1024, whole_heads=True,
        )  # fmt: skip
        columns = LaunchRule(threads=self.columns_per_cta, columns_per_cta=self.columns_per_cta)
        first = (TextSpec(SUMS, "sums", SUMS_FIELDS, options), rows)
        if request.dtypes["sum"] is None:
            return (first,)
        return first, (TextSpec(self.text, "add", ADD_FIELDS, options), columns)


class Summing:
    def __init__(self, family: Sums, device: SimulatedDevice) -> None:
        self.family, self.device = family, device
        self.operator = dispatch.Operator("sums", family, SUM_ARGUMENTS)

    def __call__(self, x, weight=None, scale=None, out=None, amax=None, sum_=True, sm_margin=0):
        with using(self.device):
            return self.operator.call(x, weight, scale, out, amax, sum_, sm_margin, None)


@pytest.fixture
def summing():
    """Return a way to make that operator."""
    yield lambda rows_per_cta=1, family=Sums, **options: Summing(
        family(rows_per_cta), SimulatedDevice(checked=True, multiprocessors=options.pop("multiprocessors", 8))
    )
    dispatch._operators.pop("sums", None)


def whole(rng, *shape):
    """Return small whole numbers, whose sums are exact."""
    return rng.integers(-8, 8, shape).astype(np.float32)


@pytest.mark.parametrize("rows_per_cta", [1, 2])
@pytest.mark.parametrize("margin", [0, 5])
def test_two_launches_add_up_the_rows_in_the_checked_simulator(rows_per_cta, margin, summing, rng):
    op = summing(rows_per_cta)
    for shape in ((1, 40), (5, 40), (70, 40), (3, 5, 40)):
        x = whole(rng, *shape)
        out, found = op(x, sm_margin=margin)
        np.testing.assert_array_equal(out, x)
        np.testing.assert_array_equal(found, x.reshape(-1, 40).sum(0))
    assert {request._replace(dtypes=None) for request in op.family.requests} == {
        Request("sums", None, 40, per_head=False, margin=margin > 0)
    }
    assert op.family.requests[0].dtypes == {
        "x": FLOAT32, "weight": None, "scale": None, "out": FLOAT32, "amax": None, "sum": FLOAT32
    }  # fmt: skip


@pytest.mark.parametrize(("rows_per_cta", "heads"), [(1, 3), (2, 3), (2, 6), (4, 6), (1, 8), (1, 11), (2, 1)])
def test_sums_of_each_head_add_up_its_rows(rows_per_cta, heads, summing, rng):
    op = summing(rows_per_cta)
    for batch in (1, 2, 9):
        x = whole(rng, batch, heads, 40)
        out, found = op(x, np.ones((heads, 40), np.float32))
        np.testing.assert_array_equal(out, x)
        np.testing.assert_array_equal(found, x.sum(0))
    assert all(request.per_head for request in op.family.requests)


def test_the_groups_of_a_persistent_launch_are_those_that_are_resident(summing, rng, monkeypatch):
    grids = []
    launch = _native.PythonLauncher

    def spy(zero, run, size):
        def counted(grid, *rest):
            grids.append(grid)
            return run(grid, *rest)

        return launch(zero, counted, size)

    monkeypatch.setattr(_native, "PythonLauncher", spy)
    monkeypatch.setattr(dispatch, "manager", KernelManager(DiskCache(None)))  # it loads anew
    op = summing(multiprocessors=5)
    for margin in (0, 2, 4):
        op(whole(rng, 70, 40), sm_margin=margin)
    assert [grid[0] for grid in grids[::2]] == [5, 3, 1]
    with pytest.raises(ArgumentError, match=r"^sums: sm_margin must leave at least one of 5 multiprocessors; it is 5"):
        op(whole(rng, 70, 40), sm_margin=5)


def test_sums_over_no_rows_are_zero_in_the_simulator(summing):
    op = summing()
    out, found = op(np.empty((0, 40), np.float32))
    assert out.shape == (0, 40)
    np.testing.assert_array_equal(found, np.zeros(40, np.float32))
    out, found = op(np.empty((0, 3, 40), np.float32), np.ones((3, 40), np.float32))
    np.testing.assert_array_equal(found, np.zeros((3, 40), np.float32))


def test_an_error_of_the_familys_surfaces_as_it_is_and_again(summing, rng):
    op = summing()
    for count in (1, 2):
        with pytest.raises(ArgumentError, match=r"^sums: 13 columns bring bad luck$"):
            op(whole(rng, 4, 13))
        assert len(op.family.requests) == count


def test_a_later_launch_that_does_not_fit_is_refused(summing, rng):
    class TooLarge(Sums):
        def specialise(self, request, limits):
            first, (spec, rule) = super().specialise(request, limits)
            return first, (spec, rule._replace(dynamic_shared_memory=1 << 20))

    with pytest.raises(LaunchError, match="add: 1048576 bytes of dynamic shared memory"):
        summing(family=TooLarge)(whole(rng, 4, 40))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_values_go_in_and_are_written_in_place(shape, summing, rng):
    op, x = summing(), whole(rng, 4, 40)
    amax = np.full(shape, 3, np.float32)
    out = np.empty_like(x)
    assert op(x, scale=np.full(shape, 2, np.float32), out=out, amax=amax, sum_=False) is out
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(amax, np.full(shape, 4, np.float32))
    torch = pytest.importorskip("torch")
    amax = torch.full(shape, 3.0)
    found = op(torch.from_numpy(x), scale=torch.full(shape, 2.0), amax=amax, sum_=False)
    np.testing.assert_array_equal(found.numpy(), 2 * x)
    assert amax.shape == shape and amax.item() == 4
    with pytest.raises(ArgumentError, match=r"^sums: amax must be of the same framework"):
        op(x, amax=amax)
    with pytest.raises(ArgumentError, match=r"^sums: scale must be an array"):
        op(x, scale=2.0)


# ---- 8-bit outputs -------------------------------------------------------------------------------------------------

BITS = """
extern "C" __global__ void bits(Params p) {
  for (int column = threadIdx.x; column < p.columns; column += blockDim.x) {
    const long long at = blockIdx.x * static_cast<long long>(p.columns) + column;
    static_cast<unsigned char*>(p.out)[at] = static_cast<unsigned char>(static_cast<const float*>(p.x)[at]);
  }
}
"""


class Bits:
    """Writes x's numbers as bytes, whatever the output's type is."""

    name = "bits"

    def specialise(self, request, limits):
        fields = (
            Field("x", "pointer", "x.data"), Field("out", "pointer", "out.data"), Field("columns", "int32", "columns")
        )  # fmt: skip
        return ((TextSpec(BITS, "bits", fields), LaunchRule(threads=32)),)


@pytest.fixture
def bits():
    operator = dispatch.Operator(
        "bits",
        Bits(),
        (
            Argument("x", "rows", (FLOAT32,)),
            Argument("out", "rows_out", (FLOAT8_E4M3, FLOAT8_E5M2, INT8)),
            Argument("out_dtype", "dtype_out", (FLOAT8_E4M3, FLOAT8_E5M2, INT8), of=("out",)),
        ),
    )

    def call(x, out=None, out_dtype=None):
        with using(SimulatedDevice(checked=True)):
            return operator.call(x, out, out_dtype)

    yield call
    del dispatch._operators["bits"]


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8])
def test_outputs_of_eight_bits_are_of_the_frameworks_own_types(dtype, bits):
    x = np.arange(256, dtype=np.float32).reshape(4, 64)
    expected = np.arange(256, dtype=np.uint8).reshape(4, 64)
    found = bits(x, out_dtype=dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.view(np.uint8), expected)
    out = np.zeros((4, 64), dtype)
    assert bits(x, out) is out
    np.testing.assert_array_equal(out.view(np.uint8), expected)
    torch = pytest.importorskip("torch")
    of_torch = getattr(torch, np.dtype(dtype).name)
    found = bits(torch.from_numpy(x), out_dtype=of_torch)
    assert found.dtype == of_torch
    np.testing.assert_array_equal(found.view(torch.uint8).numpy(), expected)
    out = torch.zeros(4, 64, dtype=of_torch)
    assert bits(torch.from_numpy(x), out) is out
    np.testing.assert_array_equal(out.view(torch.uint8).numpy(), expected)


def test_the_default_type_must_be_one_that_the_output_may_have(bits):
    with pytest.raises(ArgumentError, match=r"^bits: out must be one of float8_e4m3fn, .*, int8; it is float32"):
        bits(np.zeros((4, 64), np.float32))


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

    def plan(*request):
        def launch(grid, block, cluster, shared, cooperative, params, stream, memory):
            x, scale, out, amax = (
                np.frombuffer((ctypes.c_float * size).from_address(at), np.float32) if at else None
                for at, size in zip(struct.unpack_from("<QQQQ", params), (12, 1, 12, 1), strict=True)
            )
            out[:] = x * scale
            amax[:] = max(amax[0], abs(x).max())

        names = [argument.name for argument in SUM_ARGUMENTS if argument.role not in dispatch._NO_ARRAYS]
        fields = [
            (Source.DATA, names.index(name), 8 * place) for place, name in enumerate(("x", "scale", "out", "amax"))
        ]
        stage = _native.Stage(_native.PythonLauncher(print, launch, 32), (32, 1, 1), ONE, 0, False, fields, 0, False, 0)
        return _native.Plan([stage], 1, 1, _native.Plan.ANY_GROUPS, 0, 0, False, 1)

    native = _native.Operator(
        "op", dispatch.native_arguments(SUM_ARGUMENTS), plan, pytest.fail, pytest.fail, arrays.framework_of,
        dispatch._chosen,
    )  # fmt: skip
    x, scale = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([2], np.float32)
    for out, amax in itertools.product((None, np.zeros_like(x)), (np.array(5, np.float32), np.full(3, 7, np.float32))):
        of_amax = amax if amax.ndim == 0 else amax[1:2]
        values = (x, None, scale, out, of_amax, False, 0, None)
        found = arrays.call(native, SUM_ARGUMENTS, values, lambda: None)
        assert out is None or found is out
        np.testing.assert_array_equal(found, 2 * x)
        np.testing.assert_array_equal(amax, np.float32(11) if amax.ndim == 0 else np.array([7, 11, 7], np.float32))


def test_immutable_arrays_cannot_be_written_in_place(monkeypatch):
    class Array:
        __module__ = "jaxlib.xla"

    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(Array=Array))
    for name in ("out", "amax"):
        values = tuple(Array() if argument.name in ("x", name) else None for argument in SUM_ARGUMENTS)
        with pytest.raises(ArgumentError, match=f"^op: {name} is a JAX array, and those are immutable"):
            arrays.call(Recorder(SUM_ARGUMENTS).native, SUM_ARGUMENTS, values, lambda: None)


def test_parameters_of_a_kernel_may_have_512_bytes():
    assert _native.MAX_PARAMETER_BYTES == 512
    assert Params([Field(f"f{i}", "pointer") for i in range(64)]).size == 512
