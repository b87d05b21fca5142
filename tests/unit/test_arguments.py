from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import FAMILY
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_rtc
from transformer_rtc import _native, dispatch, rms_norm, using
from transformer_rtc.errors import AllocationError, ArgumentError, DriverNotFoundError
from transformer_rtc.ops import norms
from transformer_rtc.spec import (
    ARCHITECTURES,
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT8_E4M3,
    FLOAT16,
    FLOAT32,
    INT8,
    UINT8,
    DType,
)

FLOAT64 = 2 << 8 | 64
INT32 = 32
BASE = 1 << 32  # an address, far from the others
NAMES = "float32, float16, bfloat16"
OUTPUTS = ", ".join(dtype.name for dtype in DTYPES.values() if dtype not in (BOOL, UINT8))


def dense(shape):
    return tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))


def view(shape=(4, 64), strides=None, dtype=BFLOAT16.id, at=BASE, device=0, read_only=False) -> _native.View:
    """Return a view of memory that is not there: no check may read it."""
    return _native.View(at, shape, dense(shape) if strides is None else strides, dtype, device, read_only)


def weight(shape=(64,), strides=None, dtype=BFLOAT16.id, at=BASE << 1, device=0) -> _native.View:
    return view(shape, strides, dtype, at, device)


def out(*arguments: Any, at=BASE << 2, **options: Any) -> _native.View:
    return view(*arguments, at=at, **options)


def arrays_of(operator: str) -> list[str]:
    arguments = dispatch.operators()[operator].arguments
    return [argument.name for argument in arguments if argument.role not in dispatch._NO_ARRAYS]


def ids(operator: str, types: dict[str, DType]) -> tuple[int, ...]:
    """Return what a plan is told of the data types of arrays; 0 where there is none."""
    return tuple(types[name].id if name in types else 0 for name in arrays_of(operator))


# ---- What the native call refuses ---------------------------------------------------------------------------------

REFUSED = {
    "a scalar": ({"x": view(())}, "x must have at least one dimension"),
    "no columns": (
        {"x": view((4, 0)), "weight": None},
        r"x must have 1 to 2\^30 elements in its last dimension; it has 0",
    ),
    "too many columns": (
        {"x": view((1, 2**30 + 1)), "weight": None},
        r"x must have 1 to 2\^30 elements.*; it has 1073741825",
    ),
    "no columns and no rows": ({"x": view((0, 0)), "weight": None}, r"x must have 1 to 2\^30 elements"),
    "x of float64": ({"x": view(dtype=FLOAT64)}, f"x must be one of {NAMES}; it is float64"),
    "x of int32": ({"x": view(dtype=INT32)}, f"x must be one of {NAMES}; it is int32"),
    "x of complex64": ({"x": view(dtype=5 << 8 | 64)}, f"x must be one of {NAMES}; it is complex64"),
    "x of bool": ({"x": view(dtype=6 << 8 | 8)}, f"x must be one of {NAMES}; it is bool"),
    "x of fp8": ({"x": view(dtype=10 << 8 | 8)}, f"x must be one of {NAMES}; it is float8_e4m3fn"),
    "x of an unknown type": ({"x": view(dtype=99 << 8 | 4)}, f"x must be one of {NAMES}; it is type 99 of 4 bits"),
    "weight of float64": ({"weight": weight(dtype=FLOAT64)}, f"weight must be one of {NAMES}; it is float64"),
    "out of float64": ({"out": out(dtype=FLOAT64)}, f"out must be one of {OUTPUTS}; it is float64"),
    "a short weight": ({"weight": weight((63,))}, r"weight must have the shape \(64,\).*; it has \(63,\)"),
    "a long weight": ({"weight": weight((65,))}, r"weight must have the shape \(64,\).*; it has \(65,\)"),
    "a weight of rank 2": ({"weight": weight((1, 64))}, r"weight must have the shape \(64,\).*; it has \(1, 64\)"),
    "a weight of rank 0": ({"weight": weight(())}, r"weight must have the shape \(64,\).*; it has \(\)"),
    "an empty weight": ({"weight": weight((0,))}, r"weight must have the shape \(64,\).*; it has \(0,\)"),
    "a strided weight": ({"weight": weight(strides=(2,))}, "weight must be contiguous"),
    "a reversed weight": ({"weight": weight(strides=(-1,))}, "weight must be contiguous"),
    "an expanded weight": ({"weight": weight(strides=(0,))}, "weight must be contiguous"),
    "strided columns": ({"x": view(strides=(128, 2))}, r"x must be contiguous.*stride is 2: pass x\.contiguous\(\)"),
    "a transposed x": ({"x": view((64, 64), (1, 64))}, "x must be contiguous in its last dimension.*stride is 64"),
    "expanded columns": ({"x": view(strides=(64, 0))}, "x must be contiguous in its last dimension.*stride is 0"),
    "strided columns of out": ({"out": out(strides=(128, 2))}, r"out must be contiguous.*pass out\.contiguous\(\)"),
    "three strides": ({"x": view((2, 3, 4, 64), (8192, 1024, 100, 1))}, "x must have leading dimensions.*two strides"),
    "five strides": (
        {"x": view((2, 2, 2, 2, 64), (0, 1000, 640, 0, 1))},
        "x must have leading dimensions that collapse to at most two strides",
    ),
    "three strides of out": (
        {"x": view((2, 3, 4, 64)), "out": out((2, 3, 4, 64), (8192, 1024, 100, 1))},
        "x and out must have leading dimensions that collapse to at most two strides.*pass a contiguous array",
    ),
    "two strides of each, and three together": (
        {"x": view((2, 3, 4, 8), (1000, 32, 8, 1)), "out": out((2, 3, 4, 8), (300, 100, 8, 1)), "weight": None},
        "x and out must have leading dimensions that collapse",
    ),
    "an out of another shape": ({"out": out((5, 64))}, r"out must have the shape of x, \(4, 64\); it has \(5, 64\)"),
    "an out of other columns": ({"out": out((4, 65))}, r"out must have the shape of x, \(4, 64\); it has \(4, 65\)"),
    "an out of another rank": (
        {"out": out((1, 4, 64))},
        r"out must have the shape of x, \(4, 64\); it has \(1, 4, 64\)",
    ),
    "an out of rank 1": ({"out": out((64,))}, r"out must have the shape of x, \(4, 64\); it has \(64,\)"),
    "a read-only out": ({"out": out(read_only=True)}, "out is read-only"),
    "expanded rows of out": ({"out": out(strides=(0, 1))}, "out has rows that overlap each other"),
    "overlapping rows of out": ({"out": out(strides=(63, 1))}, "out has rows that overlap each other"),
    "overlapping heads of out": (
        {"x": view((4, 2, 64)), "out": out((4, 2, 64), (256, 63, 1))},
        "out has rows that overlap each other",
    ),
    "overlapping outer rows of out": (
        {"x": view((4, 2, 64)), "out": out((4, 2, 64), (127, 64, 1))},
        "out has rows that overlap each other",
    ),
    "a weight of another device": (
        {"weight": weight(device=1)},
        r"weight must be on the device of x, cuda:0; it is on cuda:1",
    ),
    "an out of another device": ({"out": out(device=3)}, r"out must be on the device of x, cuda:0; it is on cuda:3"),
    "x without memory": ({"x": view(at=0)}, "x has elements but no memory: it is a fake or meta tensor"),
    "a weight without memory": ({"weight": weight(at=0)}, "weight has elements but no memory"),
    "an out without memory": ({"out": out(at=0)}, "out has elements but no memory"),
    "x at an odd address": ({"x": view(at=BASE + 1)}, "x must be aligned to its elements of 2 bytes"),
    "fp32 between elements": (
        {"x": view(dtype=FLOAT32.id, at=BASE + 2)},
        "x must be aligned to its elements of 4 bytes",
    ),
    "a weight at an odd address": (
        {"weight": weight(at=BASE + 3)},
        "weight must be aligned to its elements of 2 bytes",
    ),
    "an out at an odd address": ({"out": out(at=BASE * 4 + 1)}, "out must be aligned to its elements of 2 bytes"),
    "out one element after x": ({"out": out(at=BASE + 2)}, "out must be x itself or not overlap it"),
    "out one row after x": ({"out": out(at=BASE + 128)}, "out must be x itself or not overlap it"),
    "out before x into it": ({"out": out(at=BASE - 4 * 64 * 2 + 2)}, "out must be x itself or not overlap it"),
    "out of another type on x": ({"out": out(dtype=FLOAT16.id, at=BASE)}, "out must be x itself or not overlap it"),
    "a wider out on x": ({"out": out(dtype=FLOAT32.id, at=BASE)}, "out must be x itself or not overlap it"),
    "other strides on x": (
        {"x": view(strides=(128, 1)), "out": out(at=BASE)},
        "out must be x itself or not overlap it",
    ),
    "out over an expanded x": (
        {"x": view(strides=(0, 1)), "out": out(at=BASE)},
        "out must be x itself or not overlap it",
    ),
    "out on the weight": ({"weight": weight(at=BASE << 2), "out": out()}, "out must not overlap weight"),
    "out's end on the weight": (
        {"weight": weight(at=(BASE << 2) + 4 * 128 - 2), "out": out()},
        "out must not overlap weight",
    ),
    "the weight's end on out": ({"weight": weight(at=(BASE << 2) - 126), "out": out()}, "out must not overlap weight"),
    "in place over the weight": ({"out": view(), "weight": weight(at=BASE + 128)}, "out must not overlap weight"),
    "eps of NaN": ({"eps": float("nan")}, "eps must be finite; it is nan"),
    "eps of infinity": ({"eps": float("inf")}, "eps must be finite; it is inf"),
    "eps of a string": ({"eps": "1e-6"}, "eps must be a real number; it is of type str"),
    "eps of None": ({"eps": None}, "eps must be a real number; it is of type NoneType"),
    "a complex eps": ({"eps": 1j}, "eps must be a real number; it is of type complex"),
    "a list of eps": ({"eps": [1e-6]}, "eps must be a real number; it is of type list"),
    "weight_offset of NaN": ({"weight_offset": float("-nan")}, "weight_offset must be finite"),
    "weight_offset of a string": ({"weight_offset": "1"}, "weight_offset must be a real number; it is of type str"),
    "out_dtype of float64": ({"out_dtype": "float64"}, f"out_dtype must be one of {OUTPUTS}; it is 'float64'"),
    "out_dtype of int": ({"out_dtype": np.int32}, f"out_dtype must be one of {OUTPUTS}"),
    "out_dtype of nonsense": ({"out_dtype": "nonsense"}, f"out_dtype must be one of {OUTPUTS}; it is 'nonsense'"),
    "an unhashable out_dtype": ({"out_dtype": {}}, f"out_dtype must be one of {OUTPUTS}"),
    "out and another out_dtype": (
        {"out": out(), "out_dtype": "float32"},
        "out is bfloat16 where float32 was asked for",
    ),
}


def test_a_call_without_faults_reaches_its_plan(check):
    types = {"x": BFLOAT16, "weight": BFLOAT16, "out": BFLOAT16, "rstd": FLOAT32}
    assert check(view(), weight(), out(), rstd=True) == (0, 0, ids("rms_norm", types), 64, False, False, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(check, name):
    changes, message = REFUSED[name]
    arguments = {"x": view(), "weight": weight(), "out": None, **changes}
    with pytest.raises(ArgumentError, match=f"^rms_norm: {message}"):
        check(**arguments)


# ---- What it accepts ----------------------------------------------------------------------------------------------

QKV = (5, 3, 2, 64)  # tokens of q, k, v with two heads each
_PACKED = (3 * 2 * 64, 64, 1)


def head(part: int) -> dict[str, Any]:
    return {"shape": (5, 2, 64), "strides": _PACKED, "at": BASE + part * 2 * 64 * 2}


ACCEPTED = {
    "one row of rank 1": {"x": view((64,))},
    "rank 7": {"x": view((2, 1, 3, 1, 2, 2, 64))},
    "one column": {"x": view((4, 1)), "weight": weight((1,))},
    "one column of any stride": {"x": view((4, 1), (3, 7)), "weight": weight((1,), (5,))},
    "the most columns": {"x": view((1, 2**30)), "weight": weight((2**30,))},
    "two strides that collapse together": {
        "x": view((2, 3, 4, 8), (1000, 32, 8, 1)),
        "out": out((2, 3, 4, 8), (96, 32, 8, 1)),
    },
    "many rows": {"x": view((2**33, 64))},
    "padded rows": {"x": view(strides=(100, 1))},
    "expanded rows": {"x": view(strides=(0, 1))},
    "overlapping rows": {"x": view(strides=(1, 1))},
    "reversed rows": {"x": view(strides=(-64, 1))},
    "heads inside rows": {"x": view(**head(1))},
    "permuted heads": {"x": view((2, 5, 64), (64, 384, 1))},
    "dimensions of one element with any stride": {"x": view((1, 4, 1, 64), (7, 64, -3, 1))},
    "the least alignment": {"x": view(at=BASE + 2), "weight": weight(at=BASE * 2 + 6)},
    "no weight": {"weight": None},
    "a weight of another type": {"weight": weight(dtype=FLOAT32.id)},
    "an out": {"out": out()},
    "an out with other strides": {"out": out(strides=(65, 1))},
    "an out with reversed rows": {"out": out(strides=(-64, 1))},
    "a wider out": {"out": out(dtype=FLOAT32.id)},
    "in place": {"out": view()},
    "in place with strides": {"x": view(**head(0)), "out": view(**head(0))},
    "q into k": {"x": view(**head(0)), "out": view(**head(1))},
    "v into q": {"x": view(**head(2)), "out": view(**head(0))},
    "one column beside another": {
        "x": view((4, 32), (64, 1)),
        "out": view((4, 32), (64, 1), at=BASE + 64),
        "weight": None,
    },
    "out right after x": {"out": out(at=BASE + 4 * 128)},
    "out right before x": {"out": out(at=BASE - 4 * 128)},
    "out right after the weight": {"weight": weight(at=(BASE << 2) - 128), "out": out()},
    "out right before the weight": {"weight": weight(at=(BASE << 2) + 4 * 128), "out": out()},
    "x as weight": {"x": view((1, 64)), "weight": weight(at=BASE)},
    "a read-only x": {"x": view(read_only=True)},
    "an integer eps": {"eps": 0},
    "a numpy eps": {"eps": np.float32(1e-5)},
    "an offset": {"weight_offset": -1},
    "out_dtype": {"out_dtype": "float16"},
    "out_dtype of numpy": {"out_dtype": np.dtype(ml_dtypes.bfloat16)},
    "out and its out_dtype": {"out": out(), "out_dtype": "bfloat16"},
    "another device": {"x": view(device=3), "weight": weight(device=3), "out": out(device=3)},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_good_arguments_reach_the_plan(check, name):
    arguments = {"x": view(), "weight": None, "out": None, **ACCEPTED[name]}
    implementation, _, dtypes, *_ = check(**arguments)
    assert implementation == 0 and len(dtypes) == len(arrays_of("rms_norm"))


def test_the_plan_gets_the_types_of_what_is_there(check):
    x, w, y = (view(dtype=FLOAT32.id), weight(dtype=FLOAT16.id), out(dtype=BFLOAT16.id, device=0))
    types = {"x": FLOAT32, "weight": FLOAT16, "out": BFLOAT16}
    assert check(x, w, y) == (0, 0, ids("rms_norm", types), 64, False, False, 0)
    assert check(x)[2] == ids("rms_norm", {"x": FLOAT32, "out": FLOAT32})
    types = {"x": FLOAT32, "out": FLOAT16, "rstd": FLOAT32}
    assert check(x, out_dtype="float16", rstd=True)[2] == ids("rms_norm", types)


@pytest.mark.parametrize("name", ["using static", "using rtc"])
def test_the_chosen_implementation_reaches_the_plan(check, name):
    implementation = name.split()[1]
    with using(implementation):
        assert dispatch.IMPLEMENTATIONS[check(view())[0]] == implementation


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64), (2, 0, 3, 64), (3, 5, 0, 7, 64)])
def test_no_rows_need_no_plan_and_no_memory_but_an_output_of_their_shape(check, shape):
    made = []

    def allocate(*request):
        made.append(request)
        return f"array {len(made)}", 0

    x = view(shape, at=0)
    assert check(x, allocate=allocate) == ("array 1",)
    assert check(x, allocate=allocate, rstd=True) == (("array 2", "array 3"),)
    assert made[0] == (shape, BFLOAT16.id, 0) and made[2] == (shape[:-1], FLOAT32.id, 0)
    y = out(shape, at=0)
    assert check(x, out=y) == (y,)
    with pytest.raises(ArgumentError, match="weight must have the shape"):
        check(x, weight((63,)), allocate=allocate)


def test_a_call_of_another_number_of_arguments_is_refused():
    for name, operator in dispatch.operators().items():
        expected = len(operator.arguments)
        for count in (0, 1, expected - 1, expected + 1):
            with pytest.raises(ArgumentError, match=f"^{name}: {expected} arguments expected, {count} given"):
                operator.call(*[None] * count)


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
@pytest.mark.parametrize("number", [1e300, -1e39, 3.5e38, 10**400])
def test_a_number_beyond_float32_is_refused(check, name, number):
    with pytest.raises(ArgumentError, match=f"^rms_norm: {name} must be "):
        check(view(), **{name: number})
    assert check(view(), **{name: 3.4e38})


@pytest.mark.parametrize("dtype", ["f4,{", [("a", "f4"), ("a", "f4")]])
def test_an_out_dtype_that_numpy_cannot_read_is_refused(check, dtype):
    with pytest.raises(ArgumentError, match=f"^rms_norm: out_dtype must be one of {OUTPUTS}"):
        check(view(), out_dtype=dtype)


# ---- The other operators' arguments ----------------------------------------------------------------------------------

HEADS = (6, 4, 64)
FP8 = FLOAT8_E4M3.id
RESIDUAL = BASE << 3
ARRAY, FOUR = view(HEADS), view(HEADS, at=RESIDUAL)


def value(at=BASE << 5, dtype=FLOAT32.id, shape=(1,)) -> _native.View:
    return view(shape, dtype=dtype, at=at)


def rows(at=BASE << 6, shape=HEADS[:-1], dtype=FLOAT32.id, **options) -> _native.View:
    return view(shape, dtype=dtype, at=at, **options)


# What only a plan can tell is refused by the family, below.
REFUSED_OF = {
    "a weight of other heads": (
        "rms_norm",
        {"weight": weight((3, 64))},
        r"weight must have the shape \(64,\).*, or \(4, 64\).*; it has \(3, 64\)",
    ),
    "a bias of none beside a weight of heads": (
        "layer_norm",
        {"weight": weight((4, 64)), "bias": weight((64,), at=RESIDUAL)},
        r"bias must have the shape of weight, \(4, 64\); it has \(64,\)",
    ),
    "a bias of float64": ("layer_norm", {"bias": weight(dtype=FLOAT64)}, f"bias must be one of {NAMES}; it is float64"),
    "a residual of other columns": (
        "add_rms_norm",
        {"residual": view((6, 4, 65), at=RESIDUAL)},
        r"residual must have the shape of x, \(6, 4, 64\); it has \(6, 4, 65\)",
    ),
    "a residual of fp8": (
        "layer_norm_add",
        {"residual": view(HEADS, dtype=FP8, at=RESIDUAL)},
        f"residual must be one of {NAMES}; it is float8",
    ),
    "an out on the residual's middle": (
        "rms_norm_add",
        {"residual": FOUR, "out": view(HEADS, at=RESIDUAL + 128)},
        "out must be residual itself or not overlap it",
    ),
    "a residual_out on the residual's middle": (
        "add_rms_norm",
        {"residual": FOUR, "residual_out": view(HEADS, at=RESIDUAL + 128)},
        "residual_out must be residual itself or not overlap it",
    ),
    "one array for both outputs": (
        "add_layer_norm",
        {"residual": FOUR, "out": view(HEADS, at=BASE << 7), "residual_out": view(HEADS, at=BASE << 7)},
        "residual_out must not overlap out",
    ),
    "an out of fp8 after which is added": (
        "rms_norm_add",
        {"residual": FOUR, "out": view(HEADS, dtype=FP8, at=BASE << 7)},
        f"out must be one of {NAMES}; it is float8",
    ),
    "a scale of two elements": ("rms_norm", {"scale": value(shape=(2,))}, r"scale must have the shape \(\) or \(1,\)"),
    "a scale of float16": (
        "rms_norm",
        {"scale": value(dtype=FLOAT16.id)},
        "scale must be one of float32; it is float16",
    ),
    "a scale for rows": ("rms_norm", {"scale": value(shape=(6, 4))}, r"scale must have the shape \(\) or \(1,\)"),
    "an amax in x": ("layer_norm", {"amax": value(at=BASE + 64)}, "amax must not overlap x"),
    "an amax that is the scale": ("layer_norm", {"scale": value(), "amax": value()}, "amax must not overlap scale"),
    "a scale_inv that is amax": (
        "layer_norm",
        {"amax": value(), "scale_inv": value()},
        "scale_inv must not overlap amax",
    ),
    "a negative margin": ("rms_norm", {"sm_margin": -1}, "sm_margin must be a non-negative integer; it is -1"),
    "half a margin": ("layer_norm", {"sm_margin": 0.5}, "sm_margin must be a non-negative integer"),
    "a dy of other rows": (
        "rms_norm_backward",
        {"x": view((6, 5, 64))},
        r"x must have the shape of dy, \(6, 4, 64\); it has \(6, 5, 64\)",
    ),
    "an rstd of every element": (
        "rms_norm_backward",
        {"rstd": rows(shape=HEADS)},
        r"rstd must have the shape \(6, 4\), one element for each row of dy",
    ),
    "an rstd of float16": ("rms_norm_backward", {"rstd": rows(dtype=FLOAT16.id)}, "rstd must be one of float32"),
    "a strided rstd": ("rms_norm_backward", {"rstd": rows(strides=(8, 1))}, "rstd must be contiguous"),
    "a mean with gaps": ("layer_norm_backward", {"mean": rows(strides=(5, 1))}, "mean must be contiguous"),
    "an out on a part of dresidual": (
        "rms_norm_backward",
        {"dresidual": FOUR, "out": view(HEADS, at=RESIDUAL + 2)},
        "out must be dresidual itself or not overlap it",
    ),
    "an out on the rstd": (
        "rms_norm_backward",
        {"rstd": rows(), "out": view(HEADS, at=(BASE << 6) + 16)},
        "out must not overlap rstd",
    ),
    "an out that is not to be returned": (
        "rms_norm_backward",
        {"out": view(HEADS, at=BASE << 7), "return_dx": False},
        "out was given, but return_dx is False",
    ),
    "nothing asked for": ("layer_norm_backward", {"return_dx": False, "dweight": False}, "nothing is asked for"),
    "gradients of the weight in fp8": (
        "layer_norm_backward",
        {"dweight_dtype": "float8_e4m3fn"},
        f"dweight_dtype must be one of {NAMES}",
    ),
    "a gradient of fp8": (
        "layer_norm_backward",
        {"dy": view(HEADS, dtype=FP8)},
        f"dy must be one of {NAMES}; it is float8",
    ),
}


def arguments_of(operator: str, changes: dict[str, Any]) -> dict[str, Any]:
    needs = {"x": ARRAY}
    if "add" in operator:
        needs["residual"] = FOUR
    if operator.endswith("backward"):
        needs = {"dy": ARRAY, "x": view(HEADS, at=BASE << 8)}
    return {**needs, "operator": operator, **changes}


@pytest.mark.parametrize("name", REFUSED_OF)
def test_bad_arguments_of_every_operator_are_refused_by_name(check, name):
    operator, changes, message = REFUSED_OF[name]
    with pytest.raises(ArgumentError, match=f"^{operator}: {message}"):
        check(**arguments_of(operator, changes))


@pytest.mark.parametrize(
    ("operator", "changes"),
    [
        ("rms_norm", {"weight": weight((4, 64)), "bias": weight((4, 64), at=RESIDUAL)}),
        ("layer_norm", {"bias": weight((4, 64))}),
        ("layer_norm", {"scale": value(shape=()), "amax": value(BASE << 6), "out_dtype": "float8_e5m2"}),
        ("add_rms_norm", {"out": ARRAY, "residual_out": FOUR}),
        ("add_rms_norm", {"out": FOUR, "residual_out": ARRAY}),
        ("rms_norm_add", {"out": FOUR}),
        ("rms_norm_backward", {"out": ARRAY}),
        ("rms_norm_backward", {"dresidual": FOUR, "out": FOUR, "rstd": rows(), "dweight_dtype": "float32"}),
        ("layer_norm_backward", {"mean": rows(), "rstd": rows(BASE << 7), "return_dx": False, "dbias": True}),
        ("layer_norm", {"sm_margin": np.int64(5)}),
    ],
)
def test_good_arguments_of_every_operator_reach_the_plan(check, operator, changes):
    implementation, _, dtypes, columns, *_ = check(**arguments_of(operator, changes))
    assert (implementation, len(dtypes), columns) == (0, len(arrays_of(operator)), 64)


NO_PLAN = {
    "a scale without fp8": (
        "rms_norm",
        {"out": BFLOAT16, "scale": FLOAT32},
        "scale needs an output of float8_e4m3fn or float8_e5m2; it is bfloat16",
    ),
    "an amax of int8": (
        "rms_norm",
        {"out": INT8, "row_scale": FLOAT32, "amax": FLOAT32},
        "amax and row_scaling exclude each other",
    ),
    "an amax without fp8": ("layer_norm", {"out": FLOAT16, "amax": FLOAT32}, "amax needs an output of float8"),
    "a scale_inv without a scale": (
        "layer_norm",
        {"out": FLOAT8_E4M3, "scale_inv": FLOAT32},
        "scale_inv needs a scale, of which it is the inverse; scale is None",
    ),
    "int8 without row scaling": (
        "add_rms_norm",
        {"out": INT8},
        "an output of int8 needs row_scaling=True; it is False",
    ),
    "row scaling of 16 bits": (
        "rms_norm",
        {"out": FLOAT16, "row_scale": FLOAT32},
        "row_scaling needs an output of float8_e4m3fn, float8_e5m2 or int8; it is float16",
    ),
    "row scaling and a scale": (
        "rms_norm",
        {"out": FLOAT8_E4M3, "row_scale": FLOAT32, "scale": FLOAT32},
        "scale and row_scaling exclude each other",
    ),
    "a sum of another type": (
        "add_layer_norm",
        {"out": FLOAT16, "residual": FLOAT32, "residual_out": FLOAT16},
        "residual_out must be float32 like residual; it is float16",
    ),
    "a mean without rstd": (
        "layer_norm_backward",
        {"mean": FLOAT32},
        "mean and rstd must be given together, or neither; rstd is None",
    ),
    "an rstd without mean": (
        "layer_norm_backward",
        {"rstd": FLOAT32},
        "mean and rstd must be given together, or neither; mean is None",
    ),
}


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize("name", NO_PLAN)
def test_types_that_do_not_go_together_are_refused(name, static):
    operator, types, message = NO_PLAN[name]
    given: dict[str, Any] = dict.fromkeys(arrays_of(operator))
    given |= {"x": FLOAT16, "dy": FLOAT16} | types
    request = dispatch.Request(operator, given, 64, per_head=False, margin=False)
    family = dispatch.operators()[operator].family
    with pytest.raises(ArgumentError, match=f"^{operator}: {message}$|^{operator}: {message}.*; it is"):
        family.static(request) if static else family.specialise(request, ARCHITECTURES[90])


@pytest.mark.parametrize("rows", [4, 0])
def test_what_a_user_meets_is_the_familys_refusal_with_rows_and_without(rows):
    x = np.ones((rows, 64), np.float32)
    one = np.ones(1, np.float32)
    with using("simulator"):
        for call, message in (
            (lambda: rms_norm(x, scale=one), "rms_norm: scale needs an output of float8"),
            (lambda: rms_norm(x, out_dtype="int8"), "rms_norm: an output of int8 needs row_scaling"),
            (lambda: rms_norm(x, row_scaling=True), "rms_norm: row_scaling needs an output of float8"),
            (
                lambda: transformer_rtc.add_rms_norm(x, x.astype(np.float16), residual_out=x.copy()),
                "add_rms_norm: residual_out must be float16 like residual; it is float32",
            ),
            (
                lambda: transformer_rtc.layer_norm_backward(x, x, rstd=np.ones(rows, np.float32)),
                "layer_norm_backward: mean and rstd must be given together",
            ),
            (
                lambda: transformer_rtc.rms_norm_backward(x, x, out=x.copy(), return_dx=False, return_dbias=True),
                "rms_norm_backward: out was given, but return_dx is False",
            ),
            (
                lambda: transformer_rtc.rms_norm_backward(x, x, return_dx=False),
                "rms_norm_backward: nothing is asked for; one of return_dx, return_dweight, return_dbias must be True",
            ),
            (lambda: rms_norm(x, sm_margin=10**6), "rms_norm: sm_margin must leave at least one of"),
            (
                lambda: transformer_rtc.softmax(x, mask_keeps=True),
                "softmax: mask_keeps needs a mask of bool or uint8; there is none",
            ),
            (
                lambda: transformer_rtc.softmax(x, causal="upper_triangular"),
                "softmax: causal='upper_triangular' needs as many queries as keys",
            ),
            (
                lambda: transformer_rtc.softmax_backward(x, x, return_dsink=True),
                "softmax_backward: return_dsink needs sink and lse; sink is None",
            ),
            (
                lambda: transformer_rtc.softmax_backward(x, x, return_dmask=True),
                "softmax_backward: return_dmask needs mask; it is None",
            ),
            (
                lambda: transformer_rtc.log_softmax_backward(x, x, mask=x.astype(bool)),
                "log_softmax_backward: only a mask of floats has a gradient; mask is bool",
            ),
            (
                lambda: rms_norm(x, scale=one, amax=one, out_dtype="float8_e4m3fn"),
                "rms_norm: amax must not overlap scale",
            ),
        ):
            with pytest.raises(ArgumentError, match=f"^{message}"):
                call()


# ---- The functions and their operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [name for name, made in dispatch.operators().items() if made.family is FAMILY])
def test_a_function_passes_each_argument_on_in_its_place(operator, monkeypatch):
    call = getattr(transformer_rtc, operator)
    parameters = inspect.signature(call).parameters
    of = {argument.keyword: argument.name for argument in dispatch.operators()[operator].arguments}
    assert of.keys() == parameters.keys()
    passed: list[Any] = []
    monkeypatch.setattr(norms, f"_{operator}", lambda *arguments: passed.extend(arguments))
    call(**{name: f"the {of[name]}" for name in parameters})
    assert passed == [f"the {argument.name}" for argument in dispatch.operators()[operator].arguments]


# ---- Overlap and strides against a list of every element -----------------------------------------------------------

SIZES = {BFLOAT16.id: 2, FLOAT32.id: 4}


@st.composite
def row_arrays(draw, shape):
    """Draw (strides, offset in bytes, type): small, so that arrays meet often."""
    strides = tuple(draw(st.integers(-40, 40)) for _ in shape[:-1])
    dtype = draw(st.sampled_from(sorted(SIZES)))
    return (*strides, 1), draw(st.integers(-60, 60)) * SIZES[dtype], dtype


def rows_of(shape, array):
    """Return the bytes of each row."""
    strides, offset, dtype = array
    size = SIZES[dtype]
    return [
        range(start, start + shape[-1] * size)
        for index in itertools.product(*(range(extent) for extent in shape[:-1]))
        for start in [offset + size * sum(i * stride for i, stride in zip(index, strides, strict=False))]
    ]


def overlap(rows) -> bool:
    seen: set[int] = set()
    for row in rows:
        if not seen.isdisjoint(row):
            return True
        seen.update(row)
    return False


def passes(check, shape, x, y, w=None) -> str:
    """Return what is refused, or nothing."""
    views = [view(shape, strides, dtype, BASE + offset) for strides, offset, dtype in (x, y)]
    try:
        check(views[0], None if w is None else view((shape[-1],), (1,), BFLOAT16.id, BASE + w), views[1])
    except ArgumentError as error:
        return str(error)
    return ""


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=2).flatmap(
    lambda leading: st.integers(1, 9).map(lambda columns: (*leading, columns))
)


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_an_out_that_passes_shares_no_element_with_anything_else(data):
    shape = data.draw(SHAPES)
    x, y = data.draw(row_arrays(shape)), data.draw(row_arrays(shape))
    w = data.draw(st.none() | st.integers(-80, 80).map(lambda i: 2 * i))
    if passes(_check, shape, x, y, w):
        return
    rows = {"x": rows_of(shape, x), "out": rows_of(shape, y), "weight": []}
    if w is not None:
        rows["weight"] = [range(w, w + 2 * shape[-1])]
    assert not overlap(rows["out"])
    assert not overlap(rows["weight"] + rows["out"])
    in_place = x[2] == y[2] and rows["x"] == rows["out"]
    assert in_place or not {byte for row in rows["x"] for byte in row} & {byte for row in rows["out"] for byte in row}


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_an_out_whose_extent_is_apart_is_refused_only_for_its_own_rows(data):
    shape = data.draw(SHAPES)
    x, (strides, _, dtype) = data.draw(row_arrays(shape)), data.draw(row_arrays(shape))
    y = (strides, 1 << 20, dtype)
    # Nested strides: each spans what lies within it, in either order of the dimensions.
    reach = sorted((abs(s), n) for s, n in zip(strides, shape[:-1], strict=False) if n > 1)
    span, nested = shape[-1], True
    for stride, extent in reach:
        nested &= stride >= span
        span += stride * (extent - 1)
    error = passes(_check, shape, x, y)
    assert (error == "") == nested, error


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_an_array_collapses_exactly_where_two_strides_say_where_each_row_is(data):
    leading = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    unit = data.draw(st.integers(1, 3))
    strides = tuple(data.draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24])) * unit for _ in leading)
    starts = [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*(range(extent) for extent in leading))
    ]

    def two_strides(inner: int) -> bool:
        step = starts[1] - starts[0] if inner > 1 else 0
        outer = starts[inner] - starts[0] if inner < len(starts) else 0
        return all(start == i // inner * outer + i % inner * step for i, start in enumerate(starts))

    expected = any(two_strides(inner) for inner in range(1, len(starts) + 1))
    try:
        _check(view((*leading, 1), (*strides, 1)))
        accepted = True
    except ArgumentError as error:
        assert "collapse to at most two strides" in str(error)
        accepted = False
    assert accepted == expected


@pytest.fixture(autouse=True)
def _checked(check):
    # Hypothesis runs one function for many examples; the fixture holds no state.
    global _check
    _check = check


# ---- What arrays.call refuses, and where it goes on ------------------------------------------------------------------


def host(shape=(4, 64), dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("x", [None, 1.0, "x", [1.0, 2.0], (1.0,), object(), np.float32(1), {}, bytes(4)])
def test_what_is_no_array_is_refused(x):
    with pytest.raises(ArgumentError, match=r"^rms_norm: x must be an array"):
        rms_norm(x)


@pytest.mark.parametrize("name", ["weight", "out"])
def test_an_argument_that_is_no_array_is_refused_by_name(name):
    with pytest.raises(ArgumentError, match=rf"^rms_norm: {name} must be an array.*; it is a builtins\.list"):
        rms_norm(host(), **{name: [1.0] * 64})


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32, np.uint16, np.complex64, np.bool_, "S4", object])
def test_a_numpy_array_of_another_type_is_refused(dtype):
    with (
        using("simulator"),
        pytest.raises(ArgumentError, match=f"^rms_norm: x must be one of {NAMES}; it is {np.dtype(dtype)}"),
    ):
        rms_norm(np.zeros((4, 64), dtype))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_another_type_of_ml_dtypes_is_refused(dtype):
    with pytest.raises(ArgumentError, match=f"^rms_norm: x must be one of {NAMES}"):
        rms_norm(np.zeros((4, 64), dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_byte_swapped_array_is_refused(dtype):
    with pytest.raises(ArgumentError, match=r"^rms_norm: x must have the machine's byte order; it is >f[24]"):
        rms_norm(host(dtype=np.dtype(dtype).newbyteorder(">")))


def test_strides_between_elements_are_refused():
    packed = np.zeros((4, 64), np.dtype([("pad", "u1"), ("x", "f4")]))["x"]
    with pytest.raises(ArgumentError, match=r"^rms_norm: x must have strides that are multiples of its elements' size"):
        rms_norm(packed)


@pytest.mark.parametrize("stream", [object(), "stream", -1, 1.5, True, [], np.float32(1)])
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(ArgumentError, match=r"^rms_norm: stream must be a handle"):
        rms_norm(host(), stream=stream)


def test_an_unknown_keyword_is_pythons_own_error():
    with pytest.raises(TypeError, match="gain"):
        rms_norm(host(), gain=1)
    with pytest.raises(TypeError, match="positional"):
        rms_norm(host(), host((64,)), 1e-6, 0.0)


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_good_host_array_needs_a_driver_unless_it_is_simulated(dtype):
    with (
        using("static"),
        pytest.raises(
            DriverNotFoundError, match=r"^rms_norm: x is on the host, and is staged through a GPU: no NVIDIA driver"
        ),
    ):
        rms_norm(host(dtype=dtype), host((64,), dtype))
    assert rms_norm(host(dtype=dtype), host((64,), dtype)).dtype == dtype


class Dlpack:
    """What another framework's array looks like."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        return self.array.__dlpack__()


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize(
    "x", [Dlpack(host()), host()[::-1], host()[::2], host((64,)), host((0, 64)), host((2, 3, 4, 64))]
)
def test_any_array_of_the_host_is_taken(x):
    with using("static"), pytest.raises(DriverNotFoundError, match="staged through a GPU"):
        rms_norm(x)
    like = x.array if isinstance(x, Dlpack) else x
    assert np.asarray(rms_norm(x)).shape == like.shape


def test_an_array_of_an_unknown_device_is_refused():
    with pytest.raises(
        ArgumentError, match=r"^rms_norm: x must be on a CUDA GPU or the host; its DLPack device type is 8"
    ):
        rms_norm(Dlpack(host(), (8, 0)))


def test_arrays_of_two_frameworks_are_refused():
    torch = pytest.importorskip("torch")
    for x, other in ((host(), torch.ones(64)), (torch.ones(4, 64), host((64,))), (host(), Dlpack(host((64,))))):
        for name in ("weight", "out"):
            with pytest.raises(
                ArgumentError, match=f"^rms_norm: {name} must be of the same framework as the .* before it"
            ):
                rms_norm(x, **{name: other})


# ---- torch ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.usefixtures("without_driver")
def test_a_plain_tensor_a_parameter_and_a_buffer_are_taken(torch):
    with torch.no_grad():
        for x in (torch.ones(4, 64), torch.nn.Parameter(torch.ones(4, 64)), torch.nn.Buffer(torch.ones(4, 64))):
            assert rms_norm(x, torch.nn.Parameter(torch.ones(64))).shape == x.shape


def test_a_tensor_that_requires_grad_is_refused_only_while_grad_mode_is_on(torch):
    x = torch.ones(4, 64, requires_grad=True)
    for name, arguments in {"x": (x,), "weight": (torch.ones(4, 64), torch.nn.Parameter(torch.ones(64)))}.items():
        with pytest.raises(ArgumentError, match=f"^rms_norm: {name} requires grad.*torch.no_grad"):
            rms_norm(*arguments)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert rms_norm(x).shape == x.shape


def test_a_subclass_of_tensor_is_refused(torch):
    class Mine(torch.Tensor):
        pass

    with pytest.raises(ArgumentError, match=r"^rms_norm: x is a .*Mine, a subclass.*as_subclass\(torch\.Tensor\)"):
        rms_norm(torch.ones(4, 64).as_subclass(Mine))
    with pytest.raises(ArgumentError, match=r"weight is a .*Mine, a subclass"):
        rms_norm(torch.ones(4, 64), torch.ones(64).as_subclass(Mine))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_fake_tensor_is_refused(torch, device):
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 64, device=device)
    with pytest.raises(
        ArgumentError, match=r"^rms_norm: x is a torch\._subclasses\.fake_tensor\.FakeTensor, a subclass"
    ):
        rms_norm(x)


def test_meta_and_sparse_tensors_are_refused(torch):
    for x in (torch.ones(4, 64, device="meta"), torch.ones(4, 64).to_sparse()):
        with pytest.raises(ArgumentError, match=r"^rms_norm: x (must be a strided tensor|is a tensor without memory)"):
            rms_norm(x)


def test_what_else_torch_has_is_no_array(torch):
    for x in (torch.float32, torch.nn.Linear(2, 2), torch.Size((4, 64)), torch.device("cpu"), torch.Tensor):
        with pytest.raises(ArgumentError, match=r"^rms_norm: x must be an array"):
            rms_norm(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_or_quantized_tensor_is_refused(torch):
    with pytest.raises(ArgumentError, match=r"^rms_norm: x "):
        rms_norm(torch.nested.nested_tensor([torch.ones(4), torch.ones(8)]))
    with pytest.raises(ArgumentError, match=r"^rms_norm: x is a tensor without memory of its own: .*QInt types[^\n]*$"):
        rms_norm(torch.quantize_per_tensor(torch.ones(4, 64), 0.1, 0, torch.qint8))


@pytest.mark.parametrize("name", ["float64", "int32", "complex64", "bool", "float8_e4m3fn"])
def test_a_tensor_of_another_type_is_refused(torch, name):
    with pytest.raises(ArgumentError, match=rf"^rms_norm: x must be one of {NAMES}; it is (torch\.)?{name}"):
        rms_norm(torch.zeros(4, 64).to(getattr(torch, name)))


def test_every_message_names_the_operator_and_the_argument():
    for changes, message in REFUSED.values():
        assert re.match(r"(x|weight|out|eps|weight_offset|out_dtype|x and out)\b", message), changes
    for operator, _, message in (*REFUSED_OF.values(), *NO_PLAN.values()):
        names = [argument.name for argument in dispatch.operators()[operator].arguments]
        assert re.match(rf"({'|'.join(names)}|row_scaling|an output|nothing)\b", message), message


def test_the_typed_errors_are_what_callers_catch():
    assert issubclass(ArgumentError, ValueError) and issubclass(AllocationError, MemoryError)
