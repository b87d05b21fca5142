# SPDX-License-Identifier: Apache-2.0
"""Sums of another type than the residual's, and products that are rounded before the weight."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import calls
import numpy as np
import pytest
import reference
from cases import BY_ROW, DELAYED, FLOAT8, FLOATS, Case
from frameworks import bits
from norm_checks import LAYOUTS, case_of, covering
from reference import NUMPY_TYPES, random_rows, random_weight
from rigs import EVERY_ORDER, assert_same_bits, configured, hold, run, simulated

from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, INT8, DType

pytestmark = pytest.mark.usefixtures("kernels")

# Columns, and (threads, rows of a CTA, vector, steps, CTAs of a row) with how the row is held; None: as the rule says.
DIVISIONS: dict[str, tuple[int, NormConfig | None]] = {
    "warps": (64, None),
    "registers": (1000, NormConfig(64, 1, 8, 2)),
    "elements": (257, NormConfig(64, 1, 1, 5)),
    "chunks": (3000, NormConfig(64, 1, 8, 1, 2, clusters=True)),
    "shared": (1000, NormConfig(64, 1, 8, 2, in_shared=True)),
    "shared, by less than a vector": (1002, NormConfig(64, 1, 2, 8, in_shared=True)),
    "shared by a cluster": (2000, NormConfig(64, 1, 8, 2, 4, clusters=True, in_shared=True)),
    "shared by a grid": (2000, NormConfig(64, 1, 8, 2, 4, in_shared=True)),
    "in turn": (1000, NormConfig(64, 1, 8, 2, in_shared=True, stages=2)),
    "short, in turn": (120, NormConfig(16, 8, 8, 1, in_shared=True, stages=2)),
    "in turn in a cluster": (1003, NormConfig(64, 1, 4, 1, 4, clusters=True, in_shared=True, stages=3)),
    "in turn, kept in shared": (4000, NormConfig(64, 1, 8, 8, in_shared=True, stages=2)),
    "padded": (1001, NormConfig(64, 1, 8, 2)),
    "padded, in turn": (1001, NormConfig(64, 1, 8, 3, in_shared=True, stages=2)),
    "padded, in turn in a cluster": (701, NormConfig(64, 1, 8, 1, 4, clusters=True, in_shared=True, stages=2)),
}
# Sizes that are divided as the rule says.
CHOSEN = (64, 1001, 4096, 16384, 16385)
# Of x, of the residual, of the sum, and of y.
TYPES = (
    (BFLOAT16, BFLOAT16, FLOAT32, BFLOAT16),
    (BFLOAT16, BFLOAT16, FLOAT16, FLOAT32),
    (FLOAT16, FLOAT16, FLOAT32, FLOAT8_E4M3),
    (BFLOAT16, FLOAT16, FLOAT32, FLOAT16),
)
NARROWER = (
    (FLOAT32, FLOAT32, BFLOAT16, FLOAT32),
    (FLOAT32, FLOAT16, BFLOAT16, BFLOAT16),
    (BFLOAT16, FLOAT32, FLOAT16, FLOAT8_E4M3),
)
GENERAL = "general"
ADDS = ("add_rms_norm", "add_layer_norm")


def _case(operator: str, rows: int, hidden: int, types: tuple[DType, ...], **options: Any) -> Case:
    x, residual, sum_, out = types
    scaling = DELAYED if out in FLOAT8 else ()
    case = case_of(operator, rows, hidden, x, out, weight=FLOAT32, residual=residual, scaling=scaling)
    return case._replace(**{"sum": None if sum_ is residual else sum_, **options})


def _divided(operator: str, how: str) -> contextlib.AbstractContextManager[None]:
    config = DIVISIONS[how][1] if how in DIVISIONS else None
    return configured(operator, config) if config else contextlib.nullcontext()


@pytest.mark.parametrize(("how", "types", "operator"), covering([*DIVISIONS, GENERAL], TYPES, ADDS, share=0.3))
def test_a_sum_of_another_type_than_the_residuals(how, types, operator, rng):
    case = _case(operator, 21, DIVISIONS[how][0] if how in DIVISIONS else 1003, types)
    with _divided(operator, how):
        # More rows than CTAs: each has several where it takes them in turn.
        rigs = simulated(90, EVERY_ORDER[:2], static=how == GENERAL, multiprocessors=1)
        found = hold(rigs, case, rng, LAYOUTS)
    assert found["residual_out"].dtype == NUMPY_TYPES[types[2]]


@pytest.mark.parametrize(
    ("hidden", "types", "operator"), covering(CHOSEN, (*NARROWER, TYPES[0]), ADDS, share=0.3, first=4)
)
def test_a_sum_of_another_type_in_rows_that_are_divided_as_few_are(hidden, types, operator, rng):
    hold(simulated((90, 80)[hidden % 3 == 1]), _case(operator, 5, hidden, types), rng, LAYOUTS)


@pytest.mark.parametrize(("which", "hidden"), covering((GENERAL, "specialised"), (40, 4096, 1001), first=2))
def test_what_is_normalized_is_the_rounded_sum_and_may_lie_in_xs_place(which, hidden, rng):
    # x of float32 gives its place to a sum of float32, beside a residual of 16 bits.
    case = _case("add_rms_norm", 5, hidden, (FLOAT32, BFLOAT16, FLOAT32, BFLOAT16), scaling=())
    given = calls.make_inputs(rng, case)
    (rig,) = simulated(90, static=which == GENERAL)
    found = run(rig, case, given)
    for layout, in_place in itertools.product(
        LAYOUTS, ({"residual_out": "x"}, {"residual_out": "x", "out": "residual"})
    ):
        assert_same_bits(run(rig, case, given, layout, in_place), found, f"{layout}, {in_place}")
    for sum_ in FLOATS:
        ours = case._replace(sum=sum_)
        found = rig.on_host(rig.call(ours, rig.on_device(given)))
        # y is held to the norm of the rounded sum.
        calls.hold_within(ours, found, calls.expect(ours, given))
        exact = reference.added(given["x"], given["residual"], sum_)
        np.testing.assert_array_equal(bits(found["residual_out"]), bits(exact))


# ---- Rounded before the weight ---------------------------------------------------------------------------------------


# Of x, of the weight, and of y.
ROUNDED = (
    (BFLOAT16, BFLOAT16, BFLOAT16),
    (FLOAT16, FLOAT16, FLOAT16),
    (BFLOAT16, FLOAT32, FLOAT32),
    (FLOAT16, BFLOAT16, BFLOAT16),
)


def in_two_steps(x: np.ndarray, rstd: np.ndarray, weight: np.ndarray, offset: float, out: np.dtype[Any]) -> np.ndarray:
    """Return what code computes that rounds x * rstd to x's type, and then multiplies by the weight."""
    normal = (x.astype(np.float32) * rstd[..., None]).astype(x.dtype)
    return (normal.astype(np.float32) * (weight.astype(np.float32) + np.float32(offset))).astype(out)


@pytest.mark.parametrize(
    ("how", "types", "offset"),
    covering(
        [*DIVISIONS, GENERAL],
        ROUNDED,
        (0.0, 1.0),
        share=0.3,
    ),
)
def test_a_product_that_is_rounded_has_the_bits_of_two_steps(how, types, offset, rng):
    x, weight, out = types
    hidden = DIVISIONS[how][0] if how in DIVISIONS else 1003
    case = Case(21, hidden, x, weight, out, rstd=True, rounds=True, weight_offset=offset)
    with _divided("rms_norm", how):
        (rig,) = simulated(90, static=how == GENERAL, multiprocessors=1)
        given = calls.make_inputs(rng, case)
        found = hold([rig], case, rng, LAYOUTS, given)
    expected = in_two_steps(given["x"], found["rstd"], given["weight"], offset, NUMPY_TYPES[out])
    np.testing.assert_array_equal(bits(found["out"]), bits(expected))
    once = run(rig, case._replace(rounds=False), given)
    assert np.mean(bits(once["out"]) != bits(found["out"])) > 0.01


@pytest.mark.parametrize(
    ("which", "operator", "hidden", "out"),
    covering(
        (GENERAL, "specialised"), ("rms_norm", "add_rms_norm"), (40, 4096, 1001, 16384), (BFLOAT16, FLOAT8_E4M3, INT8),
        share=0.5, first=4,
    ),
)  # fmt: skip
def test_a_rounded_product_goes_with_a_bias_heads_and_outputs_of_8_bits(which, operator, hidden, out, rng):
    scaling = BY_ROW if out is INT8 else DELAYED if out in FLOAT8 else ()
    case = case_of(operator, 6, hidden, BFLOAT16, out=out, scaling=scaling, rounds=True, heads=3)
    hold(simulated(90, static=which == GENERAL), case, rng, LAYOUTS)


@pytest.mark.parametrize("which", [GENERAL, "specialised"])
def test_rounding_before_the_weight_is_to_the_type_of_what_is_normalized(which, rng):
    x, residual = (random_rows(rng, (7, 512), BFLOAT16) for _ in range(2))
    weight = random_weight(rng, 512, BFLOAT16)
    (rig,) = simulated(90, static=which == GENERAL)
    for sum_ in ("bfloat16", "float16", "float32"):
        options = {"residual_dtype": sum_, "return_rstd": True, "out_dtype": "bfloat16"}
        y, s, rstd = rig("add_rms_norm", x, residual, weight, round_before_weight=True, **options)
        if sum_ == "float32":  # there is nothing to round
            expected = rig("add_rms_norm", x, residual, weight, **options)[0]
        else:
            expected = in_two_steps(s, rstd, weight, 0.0, NUMPY_TYPES[BFLOAT16])
        np.testing.assert_array_equal(bits(y), bits(expected))


def test_a_flag_that_changes_no_bit_asks_for_no_other_kernel():
    for case, changes in (
        (Case(1, 256, FLOAT32, BFLOAT16, BFLOAT16), False),
        (Case(1, 256, BFLOAT16, None, BFLOAT16), False),
        (case_of("add_rms_norm", 1, 256, BFLOAT16, sum=FLOAT32), False),
        (Case(1, 256, BFLOAT16, None, FLOAT32), True),
        (case_of("rms_norm", 1, 256, BFLOAT16, weight=None), True),  # has a bias
        (Case(1, 256, BFLOAT16, BFLOAT16, BFLOAT16), True),
    ):
        ours = case._replace(rounds=True)
        for kernel, other in ((case.specialise(ARCHITECTURES[90]), ours.specialise(ARCHITECTURES[90])),
                              (case.general(), ours.general())):  # fmt: skip
            assert (kernel[0].symbol != other[0].symbol) == changes
            assert kernel[1] == other[1]  # launched alike
