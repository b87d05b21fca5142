# SPDX-License-Identifier: Apache-2.0
"""Addition in the simulator: kernels for whole rows and unaligned ones, and the general kernel."""

from __future__ import annotations

import add_checks as checks
import numpy as np
import pytest
from norm_checks import first_of
from rigs import simulated

import transformer_rtc
from transformer_rtc import operator, warming
from transformer_rtc.declaration import declaration_of
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, INT8, INT64, UINT16

pytestmark = pytest.mark.usefixtures("kernels")
_PAIRS = list(checks.pairs())
_MIXED = [_PAIRS[number * 31 % len(_PAIRS)] for number in range(len(_PAIRS))]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("x", "other", "out"), first_of(_MIXED, 16, 0.2))
def test_types_and_shapes(x, other, out, static, rng):
    (rig,) = simulated(80, static=static)
    checks.hold_types(rig, x, other, out, rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, INT8, INT64])
@pytest.mark.parametrize("case", checks.STRIDED, ids=str)
def test_strides(case, dtype, offset, static, rng):
    (rig,) = simulated(static=static)
    checks.hold_strides(rig, case, dtype, offset, rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT16, INT64])
def test_in_place(dtype, static, rng):
    (rig,) = simulated(static=static)
    checks.hold_in_place(rig, dtype, rng)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_special_numbers(dtype, static):
    (rig,) = simulated(static=static)
    checks.hold_special(rig, dtype)


@pytest.mark.parametrize(("shape", "unaligned"), [((16, 37), False), ((15, 37), True)])
def test_rows_without_gaps_are_one_row(shape, unaligned, rng, monkeypatch):
    # Of whole vectors, though the rows themselves are none.
    (rig,), asked = simulated(), []
    monkeypatch.setattr(operator.usage, "observe", asked.append)
    add = operator.Operator(declaration_of("add")).call
    with transformer_rtc.using(rig.implementation):
        add(*(checks.numbers(rng, shape, FLOAT32) for _ in range(2)), None, None, None)
    assert [one.request.unaligned for one in asked] == [unaligned]


def test_inputs_may_share_memory(rng):
    (rig,) = simulated()
    x = checks.numbers(rng, (3, 8), FLOAT32)
    for first, second in ((x[:, :1], x), (x, x[:, :1]), (x[0, 0, ...], x), (x[:, :4], x[:, 2:6]), (x[1:], x[:2])):
        with transformer_rtc.using(rig.implementation):
            np.testing.assert_array_equal(transformer_rtc.add(first, second), first + second)


def refused(message, *arguments, **options):
    with transformer_rtc.using("simulator"), pytest.raises(transformer_rtc.ArgumentError, match=message):
        transformer_rtc.add(*arguments, **options)


def test_what_is_refused():
    x, ints = np.ones((3, 4), np.float32), np.ones((3, 4), np.int32)
    refused(r"add: other must have a shape that is broadcast with that of x, \(3, 4\); it has \(3,\)", x, x[:, 0])
    refused("x must have at least one dimension", np.array(1, np.float32), np.array(1, np.float32))
    refused("other must be an array", x, 2.0)
    refused("x and other are uint16 and int32, which torch promotes to no type: give the data type of out",
            ints.astype(np.uint16), ints)  # fmt: skip
    refused("an output of int32 cannot hold a sum of float32 and int32", x, ints, out_dtype="int32")
    refused("an output of bool cannot hold a sum of int32 and int32", ints, ints, out_dtype="bool")
    refused(r"out must have the shape that the inputs are broadcast to, \(3, 4\); it has \(4,\)", x, x[0], out=x[0])
    refused("x must be contiguous in its last dimension", np.ones((3, 8), np.float32)[:, ::2], x)
    refused("out must be x itself or not overlap it", x[:, :1], x, out=x)
    deep = np.ones((2, 2, 2, 2, 4), np.float32)
    refused(
        "must have leading dimensions that collapse to at most two strides", deep[:, :, :1, :, :], deep[:1, :, :, :1]
    )


def test_an_element_is_no_place_for_a_row():
    row = np.ones(5, np.float32)
    refused("out must be x itself or not overlap it", row[:1], np.ones(5, np.float32), out=row)


def test_a_warm_up_promotes_types():
    (request,) = warming._requests("add", "bfloat16", 4096, False, False, {"other": "float32"})
    assert request.dtypes == {"x": BFLOAT16, "other": FLOAT32, "out": FLOAT32}
    with pytest.raises(transformer_rtc.ArgumentError):
        transformer_rtc.warmup("add", "float32", 64, architectures="sm_90", out_dtype="int32")
    (request,) = warming._requests("add", "uint16", 64, False, False, {})
    assert request.dtypes["out"] is UINT16
