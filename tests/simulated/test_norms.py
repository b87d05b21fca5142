"""What the family of norms promises besides its numbers: where outputs may lie, what is asked for, and edge values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math

import calls
import numpy as np
import pytest
import reference
from cases import BACKWARD, BY_ROW, DELAYED, FLOAT8, FLOATS, FORWARD, Case
from rigs import ALIGNED, MISALIGNED, SECOND_MISALIGNED, assert_same_bits, bits, configured, devices, hold, run
from softmax_calls import at

import transformer_rtc
from transformer_rtc import Kernel, LaunchConfig, SimulatedDevice, using
from transformer_rtc.ops.norm_configurations import NormConfig, configure_backward
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8

pytestmark = pytest.mark.usefixtures("kernels")

# Rows of part of a warp, of a CTA, of a CTA where no vector fits, and of several CTAs that are told.
SIZES = (7, 4096, 4097, 2000)
IN_GRID = NormConfig(64, 1, 4, 2, 4, in_shared=True)
IN_CLUSTER = dataclasses.replace(IN_GRID, clusters=True)


def divided(operator: str, hidden: int, config: NormConfig) -> contextlib.AbstractContextManager[None]:
    """Divide rows of 2000 columns among several CTAs."""
    config = dataclasses.replace(config, stages=3 if operator in BACKWARD else 0)
    return configured(operator, config) if hidden == 2000 else contextlib.nullcontext()


BOTH = pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
OPERATORS = pytest.mark.parametrize("operator", ["rms_norm", "layer_norm"])


def forward_case(operator: str, rows: int, hidden: int, dtype=FLOAT32, **options) -> Case:
    residual = dtype if "add" in operator else None
    case = Case(rows, hidden, dtype, dtype, dtype, True, operator, residual=residual, mean="layer" in operator)
    return case._replace(**options)


def backward_case(operator: str, rows: int, hidden: int, dtype=FLOAT32, **options) -> Case:
    case = Case(rows, hidden, dtype, dtype, dtype, True, operator, dy=dtype, dweight=dtype, dbias=dtype)
    return case._replace(**options)


# ---- Where outputs lie ---------------------------------------------------------------------------------------------

IN_PLACE = {
    "layer_norm": ({"out": "x"},),
    "add_rms_norm": (
        {"out": "x", "residual_out": "residual"}, {"out": "residual", "residual_out": "x"}, {"out": "x"},
        {"out": "residual"}, {"residual_out": "residual"}, {"residual_out": "x"},
    ),
    "rms_norm_add": ({"out": "x"}, {"out": "residual"}),
    "layer_norm_backward": ({"out": "x"}, {"out": "dy"}, {"out": "dresidual"}),
    "rms_norm_backward": ({"out": "x"}, {"out": "dy"}, {"out": "dresidual"}),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("operator", IN_PLACE)
@pytest.mark.parametrize("hidden", SIZES)
def test_in_place_gives_the_same_bits(hidden, operator, static, rng):
    dtype = FLOATS[hidden % 3]
    make = backward_case if operator in BACKWARD else forward_case
    case = make(operator, 5, hidden, dtype)
    if operator in BACKWARD:
        case = case._replace(residual=dtype, rstd=hidden % 2 == 0)
    given = calls.make_inputs(rng, case)
    on = devices(80, seeds=(), static=static, multiprocessors=2)
    with divided(operator, hidden, IN_GRID):
        expected = run(on[0], case, given)
        for device, layout, in_place in itertools.product(on, (ALIGNED, MISALIGNED), IN_PLACE[operator]):
            assert_same_bits(run(device, case, given, layout, in_place), expected, f"{in_place}, {layout}, {device!r}")


_OF_ROWS = {
    "add_layer_norm": ("x", "residual", "weight", "bias", "out", "residual_out"),
    "layer_norm_add": ("x", "residual", "weight", "bias", "out"),
    "layer_norm_backward": ("dy", "x", "weight", "dresidual", "out"),
}


# One array at an address that no vector fits, or of another type, among arrays of one type: the kernels must not read
# any of them as the others.
@pytest.mark.parametrize("operator", _OF_ROWS)
def test_a_general_kernel_looks_at_every_array(operator, rng):
    names = _OF_ROWS[operator]
    drawn = {name: rng.standard_normal((20, 40)) for name in names}

    def found(types: dict[str, type], offsets: dict[str, int]) -> list[np.ndarray]:
        arrays = {name: at(drawn[name].astype(types.get(name, np.float16)), offsets.get(name, 0)) for name in names}
        arrays |= {name: arrays[name][0] for name in names if name in ("weight", "bias")}
        with using(SimulatedDevice(90, static=True, checked=True, multiprocessors=1)):
            results = getattr(transformer_rtc, operator)(**arrays)
        return list(results) if isinstance(results, tuple) else [results]

    for name in names:
        sums = ("residual", "residual_out")  # of one type
        types = dict.fromkeys(sums if name in sums else (name,), np.float32)
        for given in ((types, {}), ({}, {name: 1})):
            elsewhere = found(given[0], dict.fromkeys(names, 1))
            for one, other in zip(found(*given), elsewhere, strict=True):
                np.testing.assert_array_equal(one, other, str((name, given)))


@pytest.mark.parametrize("adds", ["before", "after"])
def test_a_residual_of_another_type_beside_q_k_and_v_of_one_array(adds, rng):
    operator = "add_layer_norm" if adds == "before" else "layer_norm_add"
    case = forward_case(operator, 5 * 4, 80, FLOAT16, residual=FLOAT32, out=FLOAT32, heads=4)
    given = calls.make_inputs(rng, case)
    packed = np.full((5, 3, 4, 80), np.nan, np.float16)
    packed[:, 1] = given["x"]
    expected = calls.expect(case, given)
    for device in devices(90, seeds=()):
        with using(device):
            results = calls.call(case, {**given, "x": packed[:, 1]})
        calls.hold_within(case, results, expected)
    assert np.isnan(packed[:, ::2]).all()


# ---- What is asked for ---------------------------------------------------------------------------------------------

_SUBSETS = [wanted for wanted in itertools.product((True, False), repeat=3) if any(wanted)]


@BOTH
@pytest.mark.parametrize("given_statistics", [False, True], ids=["found", "given"])
@pytest.mark.parametrize(("operator", "hidden"), [("rms_norm_backward", 200), ("layer_norm_backward", 1000)])
def test_each_gradient_has_the_same_bits_whatever_else_is_asked_for(operator, hidden, given_statistics, static, rng):
    # More rows than the groups of CTAs take at once.
    case = backward_case(operator, 75, hidden, BFLOAT16, residual=FLOAT32, rstd=given_statistics, dbias=FLOAT16)
    case = case._replace(dweight=FLOAT16)
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    checked, last_in = devices(90, seeds=(), static=static, multiprocessors=1)
    everything = run(checked, case, given)
    calls.hold_within(case, everything, expected)
    for wanted in _SUBSETS:
        changes = zip(everything, wanted, strict=True)
        ours = case._replace(**{name: None for name, asked in changes if not asked})
        results = run(last_in, ours, given)
        calls.hold_within(ours, results, expected)
        assert set(results) == {name for name, asked in zip(everything, wanted, strict=True) if asked}
        # Without dx a kernel may divide its rows among others: the sums are added up in another order.
        if wanted[0]:
            assert_same_bits(results, {name: everything[name] for name in results}, f"{wanted}")


@pytest.mark.parametrize(
    ("hidden", "rows", "dtype"),
    [(100, 3300, FLOAT16), (256, 2100, BFLOAT16), (512, 1100, BFLOAT16), (8192, 50, FLOAT16), (14848, 130, BFLOAT16)],
)
def test_statistics_are_those_of_their_rows_however_many_a_cta_takes_in_turn(hidden, rows, dtype, rng):
    # Lanes bring those of many turns at once: here are more rows than two such batches, and the last one is not whole.
    case = backward_case("layer_norm_backward", rows, hidden, dtype, rstd=True, residual=dtype)
    division = configure_backward("layer_norm", hidden, (dtype,) * 3, (dtype,), dtype, ARCHITECTURES[90])
    assert division is not None and division.statistics_ahead
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    for device in devices(90, seeds=(), multiprocessors=1)[: 1 if hidden < 8192 else 2]:
        calls.hold_within(case, run(device, case, given), expected)


@pytest.mark.parametrize("operator", ["rms_norm_backward", "layer_norm_backward"])
def test_ctas_that_have_nothing_of_a_misaligned_row_write_and_read_none_of_it(operator, rng):
    # 8 columns for each of 8 CTAs: of 33 the last three have none.
    case = backward_case(operator, 2, 33, FLOAT32, rstd=True)
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    ragged = NormConfig(64, 1, 4, 2, 8, True, in_shared=True, stages=2, bulk=True, ragged=True)
    with configured(operator, ragged):
        for device, layout in itertools.product(devices(90, seeds=(), multiprocessors=8), (ALIGNED, MISALIGNED)):
            calls.hold_within(case, run(device, case, given, layout), expected)


@pytest.mark.parametrize("hidden", [100, 4096])
def test_statistics_of_the_forward_call_are_those_that_backward_finds(hidden, rng):
    case = backward_case("layer_norm_backward", 9, hidden, FLOAT32)
    given = calls.make_inputs(rng, case)
    with using(SimulatedDevice(90)):
        _, mean, rstd = transformer_rtc.layer_norm(given["x"], eps=calls.EPS, return_mean=True, return_rstd=True)
    found = reference.forward(True, given["x"], eps=calls.EPS)
    reference.assert_within(mean, found["mean"], FLOAT32, "mean")
    reference.assert_within(rstd, found["rstd"], FLOAT32, "rstd")
    saved = run(SimulatedDevice(90), case, {**given, "mean": mean, "rstd": rstd})
    again = run(SimulatedDevice(90), case._replace(rstd=False), {name: given[name] for name in ("dy", "x", "weight")})
    for name, array in saved.items():
        np.testing.assert_allclose(array, again[name], rtol=1e-4, atol=1e-4 * np.abs(array).max(), err_msg=name)


@OPERATORS
def test_thin_wrappers_are_the_backward_operator(operator, rng):
    case = backward_case(f"{operator}_backward", 5, 300, FLOAT32, residual=FLOAT32, rstd=False)
    given = calls.make_inputs(rng, case)
    dy, x, weight, ds = (given[name] for name in ("dy", "x", "weight", "dresidual"))
    backward, before, after = (
        getattr(transformer_rtc, name)
        for name in (f"{operator}_backward", f"add_{operator}_backward", f"{operator}_add_backward")
    )
    with using(SimulatedDevice(90)):
        pairs = [
            (before(dy, ds, x, weight, 1e-3), backward(dy, x, weight, 1e-3, dresidual=ds)),
            (before(dy, None, x, weight), backward(dy, x, weight)),
            (after(dy, x, weight, weight_offset=1.0), backward(dy, x, weight, weight_offset=1.0)),
        ]
    for found, wanted in pairs:
        assert len(found) == len(wanted) == 2 + (operator == "layer_norm")
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))


@BOTH
@pytest.mark.parametrize("operator", (*FORWARD, *BACKWARD))
def test_a_margin_leaves_the_bits_as_they_are(operator, static, rng):
    make = backward_case if operator in BACKWARD else forward_case
    # dx, which depends on no other row; sums over rows are added up by other CTAs.
    options = {"dweight": None, "dbias": None} if operator in BACKWARD else {}
    for hidden, rows in ((300, 131), (4097, 37)):
        case = make(operator, rows, hidden, BFLOAT16, **options)
        given = calls.make_inputs(rng, case)
        plain = run(SimulatedDevice(90, order="last_in", static=static), case, given)
        for margin in (1, 3):
            for device in devices(90, seeds=(), static=static, multiprocessors=4):
                found = run(device, case._replace(margin=margin), given)
                assert_same_bits(found, plain, f"a margin of {margin} on {device!r}")


# ---- Rows in turn ----------------------------------------------------------------------------------------------------

# The operator, its rows and columns, the type of x and of the output, and (threads, rows of a CTA, vector, steps, CTAs,
# stages). What the tables take in turn is long, or many rows: other tests have one turn of it.
IN_TURN = (
    ("layer_norm", 300, 120, BFLOAT16, BFLOAT16, (16, 8, 8, 1, 1, 2)),
    ("add_rms_norm", 300, 252, FLOAT32, FLOAT16, (32, 8, 4, 2, 1, 2)),
    ("rms_norm", 25, 1024, FLOAT32, FLOAT8_E4M3, (256, 1, 4, 1, 1, 3)),
    ("layer_norm_add", 25, 900, FLOAT16, FLOAT16, (256, 1, 4, 1, 1, 2)),
    ("add_layer_norm", 25, 1001, FLOAT16, BFLOAT16, (256, 1, 2, 2, 1, 3)),
    ("rms_norm_add", 25, 999, BFLOAT16, FLOAT32, (256, 1, 4, 1, 1, 2)),
    ("layer_norm", 33, 2000, FLOAT32, FLOAT32, (64, 1, 4, 8, 1, 2)),
    ("layer_norm_add", 17, 4000, BFLOAT16, BFLOAT16, (64, 1, 8, 8, 1, 2)),
    ("add_layer_norm", 25, 1020, FLOAT32, FLOAT32, (64, 1, 4, 1, 4, 2)),
    ("rms_norm_add", 25, 1001, FLOAT16, FLOAT16, (64, 1, 4, 1, 4, 2)),
    ("add_layer_norm", 25, 1003, BFLOAT16, FLOAT32, (64, 1, 4, 1, 4, 3)),
    ("add_rms_norm", 25, 1024, BFLOAT16, BFLOAT16, (64, 1, 4, 1, 4, 3)),
)


@pytest.mark.parametrize(("operator", "rows", "hidden", "dtype", "out", "divided_by"), IN_TURN)
def test_forward_rows_in_turn_where_each_cta_has_several(operator, rows, hidden, dtype, out, divided_by, rng):
    threads, rows_per_cta, vector, steps, ctas, stages = divided_by
    config = NormConfig(threads, rows_per_cta, vector, steps, ctas, in_shared=True, stages=stages)
    scaling = DELAYED if out in FLOAT8 else ()
    case = forward_case(operator, rows, hidden, dtype, weight=FLOAT32, bias=dtype, out=out, scaling=scaling)
    layouts = (ALIGNED, MISALIGNED, SECOND_MISALIGNED)
    for architecture, clusters in ((90, ctas > 1), *(((80, False),) if ctas > 1 else ())):
        with configured(operator, dataclasses.replace(config, clusters=clusters)):
            hold(devices(architecture, seeds=(), multiprocessors=1), case, rng, layouts)


# ---- Rows together ---------------------------------------------------------------------------------------------------

# The operator, its columns, the types of x and of the output, (threads, vector, steps, CTAs) and together, and options.
TOGETHER = (
    ("layer_norm", 4096, BFLOAT16, BFLOAT16, (64, 8, 8, 1), 2, {"weight_offset": 1.0}),
    ("layer_norm", 1000, BFLOAT16, FLOAT32, (64, 8, 2, 1), 2, {"weight": FLOAT32, "bias": FLOAT16}),
    ("layer_norm", 2048, FLOAT16, FLOAT16, (64, 4, 2, 4), 2, {"bias": FLOAT16}),
    ("layer_norm", 2000, FLOAT32, FLOAT32, (64, 4, 2, 4), 3, {"bias": FLOAT32, "weight": None}),
    ("layer_norm", 1024, BFLOAT16, FLOAT8_E4M3, (64, 8, 1, 2), 2, {"bias": BFLOAT16, "scaling": DELAYED}),
    ("rms_norm", 1000, FLOAT32, FLOAT8_E5M2, (64, 4, 4, 1), 2, {"scaling": DELAYED}),
    ("layer_norm", 1000, BFLOAT16, INT8, (64, 8, 1, 2), 2, {"scaling": BY_ROW}),
    ("add_layer_norm", 1000, FLOAT16, FLOAT16, (64, 8, 2, 1), 2, {"bias": FLOAT32}),
    ("layer_norm_add", 1000, BFLOAT16, FLOAT32, (64, 4, 2, 2), 2, {"weight": FLOAT32}),
    ("add_rms_norm", 998, BFLOAT16, BFLOAT16, (64, 2, 8, 1), 2, {}),
    ("layer_norm", 998, FLOAT16, FLOAT16, (64, 2, 4, 2), 2, {"bias": FLOAT16}),
    ("layer_norm", 1000, BFLOAT16, BFLOAT16, (64, 8, 2, 1), 2, {"margin": 1}),
)


@pytest.mark.parametrize(("operator", "hidden", "dtype", "out", "divided_by", "together", "options"), TOGETHER)
def test_rows_together_have_the_bits_that_each_has_alone(
    operator, hidden, dtype, out, divided_by, together, options, rng
):
    threads, vector, steps, ctas = divided_by
    layouts = (ALIGNED, MISALIGNED, SECOND_MISALIGNED)
    for architecture, clusters in ((90, ctas > 1), *(((80, False),) if ctas > 1 else ())):
        config = NormConfig(threads, 1, vector, steps, ctas, clusters, in_shared=True, together=together)
        on = devices(architecture, seeds=(), multiprocessors=2)
        # The last ones of the rows are whole, or fewer; and more than the CTAs take at once, where they take turns.
        for rows in (1, 2 * together, 14 * together - 1):
            case = forward_case(operator, rows, hidden, dtype, out=out, **options)
            given = calls.make_inputs(rng, case)
            with configured(operator, config):
                found = hold(on, case, rng, layouts, given)
                if out is dtype:
                    for device, layout in itertools.product(on, layouts):
                        assert_same_bits(run(device, case, given, layout, {"out": "x"}), found, f"in place, {layout}")
            with configured(operator, dataclasses.replace(config, together=1)):
                assert_same_bits(run(on[1], case, given), found, f"{rows} rows, each alone")


def test_rows_are_together_only_where_they_share_a_weight_and_vectors_fit_them():
    case = forward_case("layer_norm", 4, 57344, BFLOAT16, bias=BFLOAT16)
    alone = {
        "heads": {"heads": 2},
        "a scale of each row": {"out": INT8, "scaling": BY_ROW},
        "a residual": {"operator": "add_layer_norm", "residual": BFLOAT16},
        "no vector": {"hidden": 57343},
    }
    assert case.specialise(ARCHITECTURES[90])[0].config.together == 2
    for what, change in alone.items():
        assert case._replace(**change).specialise(ARCHITECTURES[90])[0].config.together == 1, what


# ---- Heads ---------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("heads", [1, 3, 8, 10])
@pytest.mark.parametrize("hidden", [64, 1500])
def test_each_head_has_a_weight_and_gradients_of_its_own(hidden, heads, static, rng):
    # More rows than there are groups of CTAs, which are no multiple of the heads.
    for multiprocessors, wanted in itertools.product((1, 7), ((True, True), (True, False), (False, True))):
        case = backward_case(
            "layer_norm_backward", 29 * heads, hidden, FLOAT32, heads=heads, rstd=False, weight_offset=1.0
        )
        sums = FLOAT32 if wanted[1] else None
        case = case._replace(out=FLOAT32 if wanted[0] else None, dweight=sums, dbias=sums)
        hold([SimulatedDevice(80, order="last_in", static=static, multiprocessors=multiprocessors)], case, rng)
    case = forward_case("layer_norm", 29 * heads, hidden, BFLOAT16, bias=FLOAT16, heads=heads, margin=1)
    hold(devices(80, seeds=(), static=static, multiprocessors=3), case, rng)


@pytest.mark.parametrize("clusters", [False, True], ids=["grid", "cluster"])
@pytest.mark.parametrize("operator", ["add_rms_norm", "layer_norm_add", "rms_norm_backward", "layer_norm_backward"])
def test_heads_of_rows_that_several_ctas_share(operator, clusters, rng):
    back = operator in BACKWARD
    case = (backward_case if back else forward_case)(operator, 7 * 5, 2000, FLOAT32, heads=5, rstd=False, mean=False)
    with divided(operator, 2000, IN_CLUSTER if clusters else IN_GRID):
        hold(devices(90, seeds=(), multiprocessors=4), case, rng)


@pytest.mark.parametrize(("operator", "hidden"), [("rms_norm_backward", 2057), ("layer_norm_backward", 4094)])
@pytest.mark.parametrize("given", [False, True], ids=["finds", "statistics"])
def test_ragged_rows_of_one_cta_lie_at_every_shift(operator, hidden, given, rng):
    # So few groups that a CTA's rows do not all begin alike: the weight and the sums of its gradient move along.
    layer = operator.startswith("layer")
    case = backward_case(
        operator, 30, hidden, BFLOAT16, rstd=given, mean=given and layer, residual=BFLOAT16, weight_offset=1.0
    )
    spec, _ = case.specialise(ARCHITECTURES[90])
    assert spec.config.ragged
    hold(devices(90, multiprocessors=1), case, rng, (ALIGNED, MISALIGNED, SECOND_MISALIGNED))


@pytest.mark.parametrize("hidden", [257, 701, 1001, 2001, 2047])
@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"])
def test_short_ragged_rows_lie_at_every_shift(operator, hidden, rng):
    back = operator.endswith("backward")
    case = (backward_case if back else forward_case)(operator, 70, hidden, BFLOAT16)
    for architecture in (90, 80):
        spec, _ = case.specialise(ARCHITECTURES[architecture])
        assert spec.config.ragged == (back or 700 < hidden < 2040)
        layouts = (ALIGNED, MISALIGNED, SECOND_MISALIGNED)
        hold(devices(architecture, seeds=(), multiprocessors=1), case, rng, layouts)


# A general kernel takes 8 rows at a time, or 4 or 2 where its CTAs, two of a wide one and 8 of another, would not all
# have so many: fewer than that, more, and no multiple of them.
@pytest.mark.parametrize(("hidden", "dtype"), [(40, BFLOAT16), (2056, FLOAT32)])
@pytest.mark.parametrize("operator", ["rms_norm_backward", "layer_norm_backward"])
def test_general_batches_take_all_rows(operator, hidden, dtype, rng):
    assert backward_case(operator, 2, hidden, dtype).general()[0].symbol.endswith("wide") == (hidden > 40)
    for rows, multiprocessors in ((2, 1), (7, 1), (13, 1), (20, 1), (33, 1), (70, 1), (9, 2)):
        case = backward_case(operator, rows, hidden, dtype)
        on = [SimulatedDevice(90, static=True, multiprocessors=multiprocessors)]
        hold(on, case, rng, (ALIGNED, MISALIGNED))


# A thread of the second launch reads 8 rows of partial sums at a time, 2 of the last columns that no vector fits: more
# than one such batch, of 128 and of 32 columns, and no multiple of it.
@pytest.mark.parametrize(
    ("operator", "rows", "hidden", "dtype", "multiprocessors", "others"),
    [
        ("layer_norm_backward", 90, 16384, BFLOAT16, 800, {}),
        ("rms_norm_backward", 90, 13004, FLOAT32, 200, {"dweight": None}),
        ("rms_norm_backward", 300, 3000, BFLOAT16, 400, {}),
        ("layer_norm_backward", 70, 4097, FLOAT32, 70, {"dbias": None}),
    ],
)
def test_the_second_launch_takes_partial_sums_of_many_groups(
    operator, rows, hidden, dtype, multiprocessors, others, rng
):
    case = backward_case(operator, rows, hidden, dtype)._replace(**others)
    hold([SimulatedDevice(90, checked=True, multiprocessors=multiprocessors)], case, rng)


def test_short_rows_of_pairs_are_ragged_only_where_that_is_faster():
    for operator in ("layer_norm", "rms_norm_backward"):
        for hidden, ragged in ((282, False), (1002, False), (1362, True), (2002, True), (2004, False)):
            case = (backward_case if operator in BACKWARD else forward_case)(operator, 4, hidden, BFLOAT16)
            assert case.specialise(ARCHITECTURES[90])[0].config.ragged == ragged, (operator, hidden)


@pytest.mark.parametrize("hidden", [673, 1001, 2501])
@pytest.mark.parametrize("operator", ["add_layer_norm", "add_rms_norm", "layer_norm_add"])
def test_a_ragged_output_that_lies_unlike_the_input_takes_only_what_was_put_there(operator, hidden, rng):
    case = forward_case(operator, 9, hidden, BFLOAT16, residual=BFLOAT16)
    assert case.specialise(ARCHITECTURES[90])[0].config.ragged
    layouts = (SECOND_MISALIGNED, (0, 0, 1, 1), (1, 0, 0, 1), MISALIGNED)
    hold(devices(90, multiprocessors=1), case, rng, layouts)


@pytest.mark.parametrize(("architecture", "hidden"), [(89, 14015), (120, 92097)])
def test_ragged_rows_through_one_slot_are_read_before_the_next_comes(architecture, hidden, rng):
    # Without dx no output is put together.
    case = backward_case("rms_norm_backward", 30, hidden, BFLOAT16, out=None, dbias=None, rstd=True)
    spec, _ = case.specialise(ARCHITECTURES[architecture])
    assert spec.config.stages == 1 and spec.config.ragged
    hold(devices(architecture, seeds=(), multiprocessors=2), case, rng)


@pytest.mark.parametrize(
    ("operator", "dtype"), [("rms_norm_backward", FLOAT32), ("add_rms_norm", FLOAT32), ("layer_norm", BFLOAT16)]
)
def test_a_ragged_part_that_is_shorter_than_a_vector_is_stored(operator, dtype, rng):
    # The last CTA's part is one column, which begins its Vec where rows are aligned.
    vector = 16 // dtype.bytes
    hidden = 3 * 4 * vector + 1
    case = (backward_case if operator.endswith("backward") else forward_case)(operator, 3, hidden, dtype)
    ragged = NormConfig(64, 1, vector, 2, 4, True, in_shared=True, stages=2, bulk=True, ragged=True)
    with configured(operator, ragged):
        hold(devices(90, seeds=()), case, rng, (ALIGNED, MISALIGNED))


@pytest.mark.parametrize(("operator", "stages"), [("layer_norm", 0), ("layer_norm", 3), ("layer_norm_backward", 2)])
@pytest.mark.parametrize("hidden", [8, 72, 520, 1032, 2560, 4088])
def test_ctas_may_have_nothing_or_less_than_their_threads_hold(operator, stages, hidden, rng):
    # Of 8 CTAs, some have nothing where there are few columns; where there are more, their threads could have more.
    case = (backward_case if operator.endswith("backward") else forward_case)(operator, 5, hidden, BFLOAT16)
    with configured(operator, NormConfig(64, 1, 8, 1, 8, True, in_shared=True, stages=stages)):
        hold(devices(90, seeds=(), multiprocessors=8), case, rng)


# ---- Rows of large numbers, of equal ones, and of zeros ------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("hidden", [3, 1000, 4097, 2000])
def test_a_large_mean_costs_no_accuracy(hidden, static, rng):
    rows = 5
    contexts = [divided(operator, hidden, IN_CLUSTER) for operator in ("layer_norm", "layer_norm_backward")]
    with contexts[0], contexts[1]:
        hold_large_mean(rows, hidden, static, rng)


def hold_large_mean(rows, hidden, static, rng):
    for dtype, eps in itertools.product(FLOATS, (1e-5, 1e-12)):
        kind = reference.NUMPY_TYPES[dtype]
        noise = rng.standard_normal((rows, hidden)) * np.array([[1e-2], [1], [30], [0], [0]])
        x = (np.array([[1e4], [-1e4], [3e4], [1e4], [1 / 3]]) + noise).astype(kind)
        weight, bias = (reference.random_weight(rng, hidden, dtype) for _ in range(2))
        dy = reference.random_rows(rng, x.shape, dtype)
        found = reference.forward(True, x, weight, bias, eps, out=dtype)
        gradients = reference.backward(True, dy, x, weight, eps)
        equal = x.min(axis=-1) == x.max(axis=-1)
        assert equal[3:].all()
        for device in devices(90, seeds=(), static=static):
            with using(device):
                y, mean, rstd = transformer_rtc.layer_norm(x, weight, bias, eps, return_mean=True, return_rstd=True)
                dx, dweight, dbias = transformer_rtc.layer_norm_backward(dy, x, weight, eps)
            reference.assert_within(mean, found["mean"], FLOAT32, "mean")
            reference.assert_within(rstd, found["rstd"], FLOAT32, "rstd")
            reference.assert_within(y, found["out"], dtype)
            reference.assert_within(dx, gradients["out"], dtype, "dx")
            reference.assert_within(dweight, gradients["dweight"], dtype, "dweight")
            reference.assert_within(dbias, gradients["dbias"], dtype, "dbias")
            # Not by a bound that a large rstd blows up.
            of_equal = np.broadcast_to(bias, x.shape)[equal].astype(float)
            np.testing.assert_allclose(y[equal].astype(float), of_equal, 0.01, 0.01)


@pytest.mark.parametrize(
    "hidden, dtype, out",
    [
        (1024, BFLOAT16, BFLOAT16), (4096, FLOAT16, FLOAT16), (4096, BFLOAT16, FLOAT8_E4M3), (4097, BFLOAT16, BFLOAT16),
        (5121, FLOAT16, BFLOAT16), (16384, BFLOAT16, BFLOAT16), (32768, FLOAT16, FLOAT16), (65536, BFLOAT16, BFLOAT16),
        (262144, BFLOAT16, FLOAT16), (1024, FLOAT32, FLOAT32), (4096, FLOAT32, BFLOAT16), (6656, FLOAT32, FLOAT32),
        (32768, FLOAT32, FLOAT32), (65536, FLOAT32, FLOAT16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("operator", ["layer_norm", "add_layer_norm"])
def test_what_a_thread_has_first_may_be_far_from_its_other_elements(operator, hidden, dtype, out, rng):
    # Kernels that take a row's moments in one pass begin with a shift from the first Vec; where that is far from the
    # mean, they take them again.
    config = forward_case(operator, 1, hidden, dtype, out=out).specialise(ARCHITECTURES[90])[0].config
    first = np.arange(hidden) < config.threads_per_row * config.vector
    other = np.arange(hidden) % config.vector == 0
    x = rng.standard_normal((9, hidden))
    x[:6] += np.array([[1e3], [1e4], [-3e4], [0], [0], [0]]) * first
    x[:6] *= np.where(np.array([[0], [1], [1], [0], [0], [0]]) & ~first, 1e-2, 1)
    x[3] *= np.where(other, 1e3, 1)
    x[4] *= np.where(first, 1e-4, 1)
    x[5, 0] = 3e4
    x[6, : config.vector] += 3e4
    x[7, : config.vector // 2] -= 3e4
    x[8, 1 : config.vector] += 1e2
    x = x.astype(reference.NUMPY_TYPES[dtype])
    # Many CTAs about one level have terms of one size, whose errors are not independent in any kernel.
    x = x[[3, 4, 6, 7, 8]] if config.ctas_per_row > 2 else x
    weight, bias = (reference.random_weight(rng, hidden, dtype) for _ in range(2))
    expected = reference.forward(True, x, weight, bias, out=out)
    given = [x] if operator == "layer_norm" else [x, np.zeros_like(x)]
    options = {"return_mean": True, "return_rstd": True, "out_dtype": reference.NUMPY_TYPES[out]}
    if out is FLOAT8_E4M3:
        options["scale"] = np.ones(1, np.float32)
    with using(devices(90, seeds=())[0]):
        found = getattr(transformer_rtc, operator)(*given, weight, bias, 1e-6, **options)
    for name, array, of in (("out", found[0], out), ("mean", found[-2], FLOAT32), ("rstd", found[-1], FLOAT32)):
        reference.assert_within(array, expected[name], of, name)


@BOTH
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("hidden", [1024, 4096, 4097, 65536])
def test_squares_that_are_too_large_about_the_first_elements_are_not_so_about_the_mean(hidden, dtype, static, rng):
    x = rng.standard_normal((2, hidden)) * 1e14
    x[:, :8] += 3e17 * np.sqrt(65536 / hidden)
    x = x.astype(reference.NUMPY_TYPES[dtype])
    # The variance is a float; the sum of squares about the first Vec's mean is not.
    wide = x.astype(float)
    assert hidden * wide.var(axis=1).max() < 3e38 < 4e38 < ((wide - wide[:, :1]) ** 2).sum(axis=1).min()
    expected = reference.forward(True, x, out=dtype)
    with using(devices(90, seeds=(), static=static)[0]):
        y, rstd = transformer_rtc.layer_norm(x, return_rstd=True)
    reference.assert_within(y, expected["out"], dtype)
    reference.assert_within(rstd, expected["rstd"], FLOAT32, "rstd")


@BOTH
# 4 % of 12289 floats had a mean that rounding had moved; 4096 are in one pass about one that is not theirs
@pytest.mark.parametrize("hidden", [3, 2000, 4096, 12289])
def test_rows_of_equal_elements_have_no_variance_whatever_their_size(hidden, static, rng):
    for dtype, eps in itertools.product((FLOAT32, BFLOAT16), (1e-5, 1e-30)):
        sizes = 10.0 ** rng.uniform(-10, 18, (100, 1)) * rng.choice([-1, 1], (100, 1))
        x = np.broadcast_to(sizes, (100, hidden)).astype(reference.NUMPY_TYPES[dtype])
        bias = reference.random_weight(rng, hidden, dtype)
        with divided("layer_norm", hidden, IN_CLUSTER):
            for device in devices(90, seeds=(), static=static):
                with using(device):
                    y, mean, rstd = transformer_rtc.layer_norm(x, None, bias, eps, return_mean=True, return_rstd=True)
                np.testing.assert_array_equal(mean, x[:, 0].astype(np.float32))
                np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))
                np.testing.assert_allclose(rstd, eps**-0.5, 1e-6)


def test_the_bound_for_a_large_mean_would_see_a_mean_of_one_float(rng):
    # What keeping the mean as a pair is for: one float32 is not enough.
    x = (1e4 + rng.standard_normal((4, 1000)) * 1e-2).astype(np.float32)
    wide = x.astype(np.float64)
    mean = wide.mean(axis=-1, keepdims=True)
    cut = (wide - np.float64(np.float32(mean))) / np.sqrt(((wide - mean) ** 2).mean(axis=-1, keepdims=True) + 1e-12)
    expected = reference.forward(True, x, eps=1e-12)["out"]
    with pytest.raises(AssertionError, match="times what its arithmetic"):
        reference.assert_within(cut.astype(np.float32), expected, FLOAT32)


# ---- Quantized outputs ---------------------------------------------------------------------------------------------


@BOTH
@OPERATORS
@pytest.mark.parametrize("dtype", (*FLOAT8, INT8), ids=lambda dtype: dtype.symbol)
def test_a_row_is_scaled_to_the_largest_number_and_a_row_of_zeros_by_one(dtype, operator, static, rng):
    for hidden in (5, 1000, 4097, 33_000):
        case = forward_case(operator, 6, hidden, FLOAT32, weight=FLOAT32, out=dtype, scaling=BY_ROW)
        given = calls.make_inputs(rng, case)
        given["x"][[1, 4]] = 0
        given["x"][4] = -0.0
        for device in devices(80, seeds=(), static=static):
            results = run(device, case, given)
            calls.hold_within(case, results, calls.expect(case, given))
            largest = np.abs(results["out"].astype(np.float64)).max(axis=-1)
            np.testing.assert_array_equal(largest, [reference.LARGEST[dtype] * (row not in (1, 4)) for row in range(6)])
            np.testing.assert_array_equal(results["row_scale"][[1, 4]], 1)


# Lengths that leave a part of their CTAs without columns, and rows in turn of CTAs that share each.
@pytest.mark.parametrize(
    ("operator", "hidden", "dtype", "options"),
    [
        ("rms_norm", 5000, BFLOAT16, {"weight": FLOAT32}),
        ("rms_norm", 8200, FLOAT32, {"weight": None}),
        ("rms_norm", 8201, FLOAT32, {"weight": BFLOAT16, "heads": 3}),
        ("rms_norm", 20_008, FLOAT32, {"weight": FLOAT16, "margin": 1}),
        ("layer_norm", 16_384, BFLOAT16, {"bias": FLOAT32, "margin": 1}),
        ("add_layer_norm", 8192, FLOAT32, {"weight": None, "bias": FLOAT32}),
        ("add_layer_norm", 2048, BFLOAT16, {"weight": FLOAT32, "bias": FLOAT32}),
        ("layer_norm", 1024, BFLOAT16, {"weight": FLOAT32, "bias": FLOAT32}),
    ],
)
def test_rows_with_scales_that_leave_threads_idle_or_come_in_turn(operator, hidden, dtype, options, rng):
    for out, rows in ((FLOAT8_E4M3, 6), (INT8, 15)):
        case = forward_case(operator, rows, hidden, dtype, out=out, scaling=BY_ROW, **options)
        given = calls.make_inputs(rng, case)
        for device in devices(90, seeds=(), multiprocessors=3):
            results = run(device, case, given)
            calls.hold_within(case, results, calls.expect(case, given))


@BOTH
@OPERATORS
@pytest.mark.parametrize("dtype", (*FLOAT8, INT8), ids=lambda dtype: dtype.symbol)
def test_a_scaled_row_of_the_smallest_numbers_is_what_its_scale_says(dtype, operator, static, rng):
    # The largest number over the row's largest overflows, or the scale is no normal number.
    case = forward_case(operator, 7, 1000, FLOAT32, weight=FLOAT32, out=dtype, scaling=BY_ROW)
    given = calls.make_inputs(rng, case)
    for magnitude in (2.0**-149, 1e-43, 1e-40, 2.0**-126, 1e-37, 1e-36, 1e-35, 1e-34, 1e-33):
        weight = (rng.choice([-1.0, -0.5, 0.25, 1.0], 1000) * magnitude).astype(np.float32)
        given["weight"], given["bias"] = weight, np.zeros_like(weight)
        for device in devices(90, seeds=(), static=static):
            with using(device):
                results = calls.call(case, given)
                y = calls.call(case._replace(out=FLOAT32, scaling=()), given)["out"].astype(np.float64)
            scale, out = (results[name].astype(np.float64) for name in ("row_scale", "out"))
            assert (scale >= 2.0**-126).all() and np.isfinite(out).all()
            # Half a unit of the type, in the largest of the row and of the smallest numbers; and y is rounded.
            unit = {FLOAT8_E4M3: 16, FLOAT8_E5M2: 4096, INT8: 0.50001}[dtype]
            wrong = np.abs(out * scale[:, None] - y)
            assert (wrong <= unit * scale[:, None] + 2.0**-149).all(), (magnitude, (wrong / scale[:, None]).max())


@BOTH
@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda dtype: dtype.symbol)
def test_amax_is_the_largest_magnitude_so_far_and_keeps_a_nan(dtype, static, rng):
    case = forward_case("layer_norm", 37, 1000, BFLOAT16, out=dtype, scaling=DELAYED)
    on = devices(90, seeds=(), static=static, multiprocessors=2)
    for device, before in itertools.product(on, (0.0, 1e9, np.nan)):
        given = calls.make_inputs(rng, case)
        outputs = {name: np.full(1, before, np.float32) for name in ("amax", "scale_inv")}
        with using(device):
            calls.call(case, given, outputs)
            unscaled = {name: array for name, array in given.items() if name != "scale"}
            y = calls.expect(case._replace(scaling=()), unscaled)["out"]
            reference.assert_within(outputs["amax"], reference.largest_magnitude(y, before), FLOAT32, "amax")
            np.testing.assert_array_equal(outputs["scale_inv"], np.float32(1) / given["scale"])
            # Where the largest one is, it is found.
            for row, column in ((0, 0), (36, 999), (17, 500)):
                given["weight"][:] = 0
                given["weight"][column] = 1
                outputs["amax"][:] = 0
                given["x"][:] = 0
                given["x"][row, column] = -1
                calls.call(case, given, outputs)
                np.testing.assert_allclose(outputs["amax"], np.sqrt(1000), rtol=0.02)
            # One NaN among numbers, in whatever order they are compared.
            for place in (0, 1, 500, 999):
                given["weight"][:] = 1
                given["weight"][place] = np.nan
                outputs["amax"][:] = 0
                calls.call(case, given, outputs)
                assert np.isnan(outputs["amax"]).all()


@BOTH
def test_what_a_type_of_8_bits_cannot_hold_becomes_its_largest_number(static):
    x = np.array([[1, -1, 1, -1]], np.float32)
    weight = np.array([1, 1e30, np.inf, np.nan], np.float32)
    for device, dtype in itertools.product(devices(90, seeds=(), static=static), FLOAT8):
        kind, most = reference.NUMPY_TYPES[dtype], reference.LARGEST[dtype]
        scale = np.full(1, 2.0**20, np.float32)
        with using(device):
            y = transformer_rtc.rms_norm(x, weight, 0.0, out_dtype=kind, scale=scale).astype(float)
            np.testing.assert_array_equal(y, [[most, -most, most, np.nan]])
            y = transformer_rtc.rms_norm(x, weight, 0.0, out_dtype=kind).astype(float)
            np.testing.assert_array_equal(y, [[1, -most, most, np.nan]])
            y, scale = transformer_rtc.rms_norm(x, weight, 0.0, out_dtype=np.int8, row_scaling=True)
            # A row with a NaN has no scale, and int8 no NaN.
            assert np.isnan(scale).all() and not y.any()
            y, scale = transformer_rtc.rms_norm(x, weight[:2].repeat(2), 0.0, out_dtype=np.int8, row_scaling=True)
            np.testing.assert_array_equal(y, [[0, 0, 127, -127]])


def test_every_number_of_8_bits_is_reached_and_ties_go_to_even(rng):
    # Numbers and the middles between neighbours, as the one that is not the row's largest.
    for dtype in (FLOAT8_E4M3, FLOAT8_E5M2):
        kind = reference.NUMPY_TYPES[dtype]
        numbers = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
        numbers = np.unique(numbers[np.isfinite(numbers)])
        middles = (numbers[1:] + numbers[:-1]) / 2
        weight = np.concatenate([numbers, middles])
        with np.errstate(all="ignore"):
            expected = weight.astype(kind)
        for device in devices(90, seeds=()):
            with using(device):
                y = transformer_rtc.rms_norm(np.ones((2, weight.size), np.float32), weight, 0.0, out_dtype=kind)
            np.testing.assert_array_equal(y.astype(float), np.broadcast_to(expected, y.shape).astype(float))


# ---- Rows and columns at their ends --------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("operator", (*FORWARD, *BACKWARD))
def test_one_row_and_one_column(operator, static, rng):
    make = backward_case if operator in BACKWARD else forward_case
    for rows, hidden, dtype in ((1, 1, FLOAT16), (1, 33, FLOAT32), (259, 1, BFLOAT16)):
        hold(devices(90, seeds=(), static=static), make(operator, rows, hidden, dtype), rng)


@BOTH
@pytest.mark.parametrize("operator", (*FORWARD, *BACKWARD))
@pytest.mark.parametrize("leading", [(0,), (3, 0, 2)])
def test_no_rows_give_empty_outputs_and_sums_of_zero(leading, operator, static):
    make = backward_case if operator in BACKWARD else forward_case
    case = make(operator, 0, 300, FLOAT16)
    given = {
        name: np.zeros((*leading, 300) if calls.shape_of(case, name) == (0, 300) else leading, np.float16)
        for name in calls.input_types(case)
        if name not in ("weight", "mean", "rstd")
    }
    given["weight"] = np.ones(300, np.float16)
    given |= {name: np.ones(leading, np.float32) for name in ("mean", "rstd") if name in calls.input_types(case)}
    for device in devices(90, seeds=(), static=static):
        with using(device):
            results = calls.call(case, given)
        for name, array in results.items():
            if name in ("dweight", "dbias"):
                assert array.shape == (300,) and not array.any()
            else:
                assert array.shape in ((*leading, 300), leading)


# ---- The second launch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture, multiprocessors", [(90, 60), (90, 132), (120, 170), (80, 132)])
@pytest.mark.parametrize("hidden", [40, 4096, 5120])
def test_no_more_ctas_of_the_second_launch_share_a_multiprocessor_than_must(
    hidden, architecture, multiprocessors, rng, monkeypatch
):
    device = SimulatedDevice(architecture, multiprocessors=multiprocessors)
    asked = {}

    def prepare(kernel: Kernel, config: LaunchConfig) -> int:
        asked[kernel.symbol] = config.dynamic_shared_memory
        return prepare_as_before(kernel, config)

    prepare_as_before = Kernel.prepare
    monkeypatch.setattr(Kernel, "prepare", prepare)
    hold([device], backward_case("layer_norm_backward", 2, hidden), rng)
    (shared,) = (shared for symbol, shared in asked.items() if "finish" in symbol)
    if architecture < 90:
        assert shared == 0  # it never begins early
        return
    columns = {40: 8, 4096: 32, 5120: 32}[hidden]
    must = math.ceil(math.ceil(hidden / columns) / multiprocessors)
    # The kernel declares up to 2 KiB, and the system's own is 1 KiB.
    of_multiprocessor = ARCHITECTURES[architecture].shared_memory_per_cta + 1024
    assert must * (shared + 3 * 1024) <= of_multiprocessor < (must + 1) * (shared + 1024)


def test_the_second_launch_of_each_heads_weights_goes_anywhere():
    _, (_, rule) = backward_case("rms_norm_backward", 6, 64, heads=3).stages(ARCHITECTURES[90])
    assert rule.spread_ctas == rule.dynamic_shared_memory == 0


@pytest.mark.parametrize("operator", BACKWARD)
def test_there_may_be_more_heads_than_rows_that_a_cooperative_grid_holds(operator, rng):
    # Rows of 8704 floats are several CTAs', which without clusters are resident together: here one row's.
    case = backward_case(operator, 10, 8704, heads=5)
    device = SimulatedDevice(80, multiprocessors=1)
    hold([device], case, rng, (ALIGNED,))
    hold([device], case._replace(dweight=None, dbias=None), rng, (ALIGNED,))
