# SPDX-License-Identifier: Apache-2.0
"""What goes together and what does not, and what a plan is asked for with: each argument alone is in test_bad_input.py.

Operators' native calls run on views of memory that is not there.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bad_values import SHAPE, Protocol, Stub
from native_calls import BASE, PLACES, Recorder, arrays_of, required_views
from native_calls import view as any_view

import transformer_rtc
from transformer_rtc import SimulatedDevice, rms_norm, select, using
from transformer_rtc.declaration import declaration_of, declarations
from transformer_rtc.errors import AllocationError, ArgumentError, DriverNotFoundError
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

HEADS = (6, 4, 64)
view = functools.partial(any_view, shape=(4, 64), dtype=BFLOAT16)  # of x, by default
out = functools.partial(view, at=BASE << 2)
heads = functools.partial(any_view, shape=HEADS, dtype=BFLOAT16)
value = functools.partial(any_view, shape=(1,), at=BASE << 5)
rows = functools.partial(any_view, shape=HEADS[:-1], at=BASE << 6)


def weight(*shape: int, dtype=BFLOAT16, at=BASE << 1, **options):
    return any_view(shape or (64,), dtype, at, **options)


# ---- What does not go together ---------------------------------------------------------------------------------------

FAR = PLACES["out"]
EVERY_ROLE_REFUSES = [
    ({"x": any_view((2, 3, 4, 64)), "out": any_view((2, 3, 4, 64), at=FAR, strides=(8192, 1024, 100, 1))},
     "x and out must have leading dimensions that collapse to at most two strides.*pass a contiguous array"),
    # Two strides of each, and three together.
    ({"x": any_view((2, 3, 4, 8), strides=(1000, 32, 8, 1)),
      "out": any_view((2, 3, 4, 8), at=FAR, strides=(300, 100, 8, 1))},
     "x and out must have leading dimensions that collapse"),
    ({"x": any_view(dtype=BFLOAT16, at=BASE + 1)}, "x must be aligned to its elements of 2 bytes"),
    ({"out": any_view(at=FAR), "out_dtype": "int8"}, "out is float32 where int8 was asked for"),
    ({"x": any_view((16,)), "weight": any_view((1, 16))},
     r"weight must have the shape \(16,\), one element for each column of x; it has \(1, 16\)"),
    ({"weight": any_view((4, 16)), "bias": any_view((16,))},
     r"bias must have the shape of weight, \(4, 16\); it has \(16,\)"),
    ({"weight": any_view((16,)), "bias": any_view((4, 16))},
     r"bias must have the shape of weight, \(16,\); it has \(4, 16\)"),
    ({"x": any_view((1, 65536, 16)), "weight": any_view((65536, 16))},
     "weight may have a row for each head up to 65535 heads"),
    ({"x": any_view((1 << 29, 4, 16)), "weight": any_view((4, 16))},
     r"weight may have .* up to 65535 heads and 2\^31 - 1 rows of x; there are 4 heads and 2147483648 rows"),
    ({"residual_out": any_view(at=FAR)}, "residual_out was given, but return_residual is False"),
    ({"out": any_view(at=FAR), "return_out": False, "rstd": True}, "out was given, but return_out is False"),
    ({"return_out": False}, "nothing is asked for; one of return_out.* must be True$"),
    ({"return_out": False, "amax": any_view((), at=FAR)}, "nothing is asked for; one of return_out.* must be True$"),
    ({"sm_margin": 132}, "sm_margin must leave at least one of 132 multiprocessors; it is 132"),
    ({"sm_margin": 10**30}, "sm_margin must leave at least one of 132 multiprocessors"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), EVERY_ROLE_REFUSES)
def test_what_does_not_fit_is_refused_by_name(given, message):
    recorder = Recorder()
    with pytest.raises(ArgumentError, match=f"^op: {message}"):
        recorder(**given)
    assert not recorder.made and not recorder.launches


ONE = np.ones(1, np.float32)
FUNCTIONS_REFUSE = [
    ("rms_norm", lambda x: {"scale": ONE}, "scale needs an output of float8_e4m3fn or float8_e5m2; it is float32"),
    ("rms_norm", lambda x: {"out_dtype": "int8", "row_scaling": True, "amax": ONE},
     "amax and row_scaling exclude each other"),
    ("layer_norm", lambda x: {"out_dtype": "float16", "amax": ONE}, "amax needs an output of float8.*; it is float16"),
    ("layer_norm", lambda x: {"out_dtype": "float8_e4m3fn", "scale_inv": ONE},
     "scale_inv needs a scale, of which it is the inverse; scale is None"),
    ("rms_norm", lambda x: {"out_dtype": "int8"}, "an output of int8 needs row_scaling=True; it is False"),
    ("add_rms_norm", lambda x: {"residual": x, "out_dtype": "int8"}, "an output of int8 needs row_scaling=True; it"),
    ("rms_norm", lambda x: {"row_scaling": True},
     "row_scaling needs an output of float8_e4m3fn, float8_e5m2 or int8; it is float32"),
    ("rms_norm", lambda x: {"out_dtype": "float8_e4m3fn", "row_scaling": True, "scale": ONE},
     "scale and row_scaling exclude each other"),
    ("rms_norm", lambda x: {"scale": ONE, "amax": ONE, "out_dtype": "float8_e4m3fn"}, "amax must not overlap scale"),
    ("add_layer_norm", lambda x: {"residual": x, "residual_out": x.astype(np.int8)},
     "residual_out must be one of float32, float16, bfloat16; it is int8"),
    ("add_rms_norm", lambda x: {"residual": x, "residual_out": x.copy(), "residual_dtype": "float16"},
     "residual_out is float32 where float16 was asked for"),
    ("rms_norm", lambda x: {"round_before_weight": 1}, "round_before_weight must be"),
    ("layer_norm_backward", lambda x: {"x": x, "mean": x[:, 0].copy()},
     "mean and rstd must be given together, or neither; rstd is None"),
    ("layer_norm_backward", lambda x: {"x": x, "rstd": x[:, 0].copy()},
     "mean and rstd must be given together, or neither; mean is None"),
    ("rms_norm_backward", lambda x: {"x": x, "out": x.copy(), "return_dx": False, "return_dbias": True},
     "out was given, but return_dx is False"),
    ("rms_norm_backward", lambda x: {"x": x, "return_dx": False},
     "nothing is asked for; one of return_dx, return_dweight, return_dbias must be True"),
    ("softmax", lambda x: {"mask_keeps": True}, "mask_keeps needs a mask of bool or uint8; there is none"),
    ("softmax", lambda x: {"mask": x, "mask_keeps": True}, "mask_keeps needs a mask of bool or uint8; it is float32"),
    ("softmax", lambda x: {"window": 3}, "window needs a causal mode; it is 3 and causal is None"),
    ("softmax", lambda x: {"causal": "upper_triangular"},
     "causal='upper_triangular' needs as many queries as keys; the shape of x is "),
    ("softmax_backward", lambda x: {"y": x, "return_dsink": True}, "return_dsink needs sink and lse; sink is None"),
    ("softmax_backward", lambda x: {"y": x, "return_dmask": True}, "return_dmask needs mask; it is None"),
    ("log_softmax_backward", lambda x: {"y": x, "mask": x.astype(bool)},
     "only a mask of floats has a gradient; mask is bool"),
]  # fmt: skip


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize(("name", "given", "message"), FUNCTIONS_REFUSE)
def test_what_does_not_go_together_is_refused_with_rows_and_without(name, given, message, static):
    for count in (4, 0):
        x = np.ones((count, 64), np.float32)
        with using(SimulatedDevice(static=static)), pytest.raises(ArgumentError, match=f"^{name}: {message}"):
            getattr(transformer_rtc, name)(x, **given(x))


def test_a_margin_of_everything_is_refused_without_rows():
    with using("simulator"), pytest.raises(ArgumentError, match=r"^rms_norm: sm_margin must leave at least one of"):
        rms_norm(np.ones((0, 64), np.float32), sm_margin=10**6)


NAMES = "float32, float16, bfloat16"
ALL_OUTPUTS = f"{NAMES}, float8_e4m3fn, float8_e5m2, int8"


@pytest.mark.parametrize(
    ("operator", "name", "accepted"),
    [
        ("rms_norm", "x", NAMES), ("rms_norm", "weight", NAMES), ("rms_norm", "out", ALL_OUTPUTS),
        ("rms_norm", "scale", "float32"), ("rms_norm", "amax", "float32"), ("add_rms_norm", "residual", NAMES),
        ("rms_norm_add", "out", NAMES), ("layer_norm_backward", "dy", NAMES), ("softmax", "sink", NAMES),
        ("layer_norm_backward", "mean", "float32"), ("softmax", "mask", f"bool, uint8, {NAMES}"),
        ("softmax_backward", "out", NAMES), ("softmax", "out_dtype", NAMES), ("rms_norm", "out_dtype", ALL_OUTPUTS),
        ("layer_norm_backward", "dweight_dtype", NAMES),
    ],
)  # fmt: skip
def test_the_types_that_an_argument_may_have(check, operator, name, accepted):
    given = "float64" if name.endswith("dtype") else Stub(dtype="complex64").view(BASE << 20)
    with pytest.raises(
        ArgumentError, match=f"^{operator}: {name} must be one of {accepted}; it is '?(float|complex)64"
    ):
        check(operator=operator, **{**required_views(operator, SHAPE), name: given})


def test_a_call_of_another_number_of_arguments_is_refused():
    for name, declaration in declarations().items():
        expected = len(declaration.arguments)
        for count in (0, 1, expected - 1, expected + 1):
            with pytest.raises(ArgumentError, match=f"^{name}: {expected} arguments expected, {count} given"):
                getattr(transformer_rtc, name).__globals__[f"_{name}"](*[None] * count)


# ---- What is accepted ------------------------------------------------------------------------------------------------

# Strides and outputs in place are in test_overlap.py.
# Of rms_norm, on an x of 4 rows of 64, unless an operator is named: then on 6 x 4 rows of 64.
ACCEPTED: dict[str, dict[str, Any]] = {
    "one row of rank 1": {"x": view(shape=(64,))},
    "rank 7": {"x": view(shape=(2, 1, 3, 1, 2, 2, 64))},
    "many rows": {"x": view(shape=(2**33, 64))},
    "the most columns": {"x": view(shape=(1, 2**30)), "weight": weight(2**30)},
    "dimensions of one element with any stride": {"x": view(shape=(1, 4, 1, 64), strides=(7, 64, -3, 1))},
    "a read-only x": {"x": view(read_only=True)},
    "one column": {"x": view(shape=(4, 1)), "weight": weight(1)},
    "one column of any stride": {"x": view(shape=(4, 1), strides=(3, 7)), "weight": weight(1, strides=(5,))},
    "strides that collapse together": {"x": view(shape=(2, 3, 4, 8), strides=(1000, 32, 8, 1)),
                                       "out": out(shape=(2, 3, 4, 8), strides=(96, 32, 8, 1))},
    "the least alignment": {"x": view(at=BASE + 2), "weight": weight(at=BASE * 2 + 6)},
    "a weight of another type": {"weight": weight(dtype=FLOAT32)},
    "a wider output": {"out": out(dtype=FLOAT32)},
    "integers as numbers": {"eps": 0, "weight_offset": -1},
    "numbers of numpy": {"eps": np.float32(1e-5), "sm_margin": np.int64(5)},
    "the largest numbers": {"eps": 3.4e38, "weight_offset": -3.4e38},
    "a type": {"out_dtype": "float16"},
    "a type of numpy": {"out_dtype": np.dtype(ml_dtypes.bfloat16)},
    "an output and its type": {"out": out(), "out_dtype": "bfloat16"},
    "another device": {"x": view(device=3), "weight": weight(device=3), "out": out(device=3)},
    "of heads": {"operator": "rms_norm", "weight": weight(4, 64), "bias": weight(4, 64, at=BASE << 3)},
    "a bias alone": {"operator": "layer_norm", "bias": weight(4, 64)},
    "values of either shape": {"operator": "layer_norm", "scale": value(shape=()), "amax": value(at=BASE << 6),
                               "out_dtype": "float8_e5m2"},
    "both in the other's place": {"operator": "add_rms_norm", "out": heads(at=BASE << 3), "residual_out": heads()},
    "dx in place of dresidual": {"operator": "rms_norm_backward", "dresidual": heads(at=BASE << 4), "rstd": rows(),
                                 "out": heads(at=BASE << 4), "dweight_dtype": "float32"},
    "no dx": {"operator": "layer_norm_backward", "mean": rows(), "rstd": rows(at=BASE << 7), "return_dx": False,
              "dbias": True},
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_good_arguments_reach_the_plan(check, name):
    operator = ACCEPTED[name].get("operator", "rms_norm")
    base: dict[str, Any] = {"x": view()}
    if "operator" in ACCEPTED[name]:
        base = {one: heads(at=BASE << 3 * place) for place, one in enumerate(required_views(operator, HEADS))}
    implementation, _, dtypes, *_ = check(**{**base, **ACCEPTED[name]})
    assert implementation == 0 and len(dtypes) == len(arrays_of(declaration_of(operator).arguments))


# ---- What a plan is asked for with -----------------------------------------------------------------------------------


def test_the_plan_gets_the_types_of_what_is_there(check):
    names = arrays_of(declaration_of("rms_norm").arguments)
    given = check(view(dtype=FLOAT32), weight(dtype=FLOAT16), out(), rstd=True)
    types = {"x": FLOAT32, "weight": FLOAT16, "out": BFLOAT16, "rstd": FLOAT32}
    assert given == (0, 0, tuple(types[name].id if name in types else 0 for name in names), 64, False, False, 0)


@pytest.mark.parametrize("implementation", ["static", "rtc"])
def test_the_chosen_implementation_reaches_the_plan(check, implementation):
    with using(implementation):
        assert select.IMPLEMENTATIONS[check(view())[0]] == implementation


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64), (2, 0, 3, 64), (3, 5, 0, 7, 64)])
def test_no_rows_need_no_plan_and_no_memory_but_an_output_of_their_shape(check, shape):
    made = []

    def allocate(*request):
        made.append(request)
        return f"array {len(made)}", 0

    x = view(shape=shape, at=0)
    assert check(x, allocate=allocate) == ("array 1",)
    assert check(x, allocate=allocate, rstd=True) == (("array 2", "array 3"),)
    assert made[0] == (shape, BFLOAT16.id, 0) and made[2] == (shape[:-1], FLOAT32.id, 0)
    y = out(shape=shape, at=0)
    assert check(x, out=y) == (y,)
    with pytest.raises(ArgumentError, match="weight must have the shape"):
        check(x, weight(63), allocate=allocate)


@pytest.mark.parametrize("name", declarations())
def test_a_function_passes_each_argument_on_in_its_place(name, monkeypatch):
    function, declaration = getattr(transformer_rtc, name), declarations()[name]
    parameters = inspect.signature(function).parameters
    keywords = [argument.keyword for argument in declaration.arguments]
    selector = [declaration.selector.keyword] if declaration.selector else []
    assert parameters.keys() == {*selector, *keywords}
    passed: list[Any] = []
    for called in (f"_{name}", f"_{name}_viewed"):
        monkeypatch.setitem(function.__globals__, called, lambda *arguments: passed.extend(arguments))
    # The native call knows nothing of what selects dimensions: a call that is given it goes another way.
    for given in (keywords, selector + keywords):
        passed.clear()
        function(**{keyword: f"the {keyword}" for keyword in given})
        assert passed == [f"the {keyword}" for keyword in given]


# ---- Arrays of numpy, and of nobody's --------------------------------------------------------------------------------


def test_an_unknown_keyword_is_pythons_own_error():
    x = np.ones((4, 64), np.float32)
    with pytest.raises(TypeError, match="gain"):
        rms_norm(x, gain=1)
    with pytest.raises(TypeError, match="positional"):
        rms_norm(x, np.ones(64, np.float32), 1e-6, 0.0)


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_good_host_array_needs_a_driver_unless_it_is_simulated(dtype):
    x, w = np.ones((4, 64), dtype), np.ones(64, dtype)
    message = r"^rms_norm: x is on the host, and is staged through a GPU: no NVIDIA driver"
    with using("static"), pytest.raises(DriverNotFoundError, match=message):
        rms_norm(x, w)
    assert rms_norm(x, w).dtype == dtype


HOST = np.ones((4, 64), np.float32)
HOST_ARRAYS = [HOST, HOST[::-1], HOST[::2], HOST[0], HOST[:0], np.ones((2, 3, 4, 64), np.float16)]
TAKEN = [(x, x.shape) for x in HOST_ARRAYS] + [(Protocol(capsule=HOST.__dlpack__()), HOST.shape)]


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize(("x", "shape"), TAKEN)
def test_any_array_of_the_host_is_taken(x, shape):
    with using("static"), pytest.raises(DriverNotFoundError, match="staged through a GPU"):
        rms_norm(x)
    assert np.asarray(rms_norm(x)).shape == shape


def test_the_typed_errors_are_what_callers_catch():
    assert issubclass(ArgumentError, ValueError) and issubclass(AllocationError, MemoryError)
