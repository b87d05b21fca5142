# SPDX-License-Identifier: Apache-2.0
"""What the family of norms promises besides its numbers: where outputs may lie, what is asked for, and edge values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import calls
import norm_values
import numpy as np
import pytest
import reference
from cases import BACKWARD, BY_ROW, DELAYED, FLOAT8, NORMS, Case
from frameworks import bits
from norm_checks import LAYOUTS, calls_of, case_of, covering, first_of
from rigs import (
    ALIGNED,
    EVERY_ARCHITECTURE,
    EVERY_ORDER,
    MISALIGNED,
    SECOND_MISALIGNED,
    WITH_CLUSTERS,
    assert_same_bits,
    configured,
    hold,
    run,
    simulated,
)

from transformer_rtc import Kernel, LaunchConfig
from transformer_rtc.ops.norm.config import BackwardRow, NormConfig
from transformer_rtc.ops.norm.heuristics import configure_backward
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8

pytestmark = pytest.mark.usefixtures("kernels")
EACH = ("general", "specialised")


def plain(operator: str, rows: int, hidden: int, dtype=FLOAT32, **options) -> Case:
    """Return a case without a bias; backward, mean and rstd are given."""
    return case_of(operator, rows, hidden, dtype, **{"bias": None, "rstd": True, **options})


# ---- What a GPU is held to as well -----------------------------------------------------------------------------------

# Rows of 2000 columns are divided among several CTAs.
IN_GRID = NormConfig(64, 1, 4, 2, 4, in_shared=True)
IN_CLUSTER = dataclasses.replace(IN_GRID, clusters=True)


def _checks() -> Iterator[Any]:
    for check, first, share, *axes in norm_values.CHECKS:
        shorter = [[value for value in axis if not isinstance(value, int) or value < 34_000] for axis in axes]
        yield from calls_of(check, EACH, *shorter, first=first, share=share)


@pytest.mark.parametrize(("check", "arguments"), list(_checks()))
def test_norms(check, arguments, rng, request):
    which, *others = arguments
    drawn = zlib.crc32(request.node.name.encode())  # always the same one for a test
    architecture = EVERY_ARCHITECTURE[drawn % len(EVERY_ARCHITECTURE)]
    with contextlib.ExitStack() as stack:
        for operator in NORMS if 2000 in others else ():
            config = IN_CLUSTER if architecture in WITH_CLUSTERS else IN_GRID
            config = dataclasses.replace(config, stages=3 if operator in BACKWARD else 0)
            stack.enter_context(configured(operator, config))
        check(*simulated(architecture, static=which == "general", multiprocessors=4), *others, rng)


# ---- Rows that are divided as few are --------------------------------------------------------------------------------


class Held(NamedTuple):
    """A case that is held to float64, and to the same bits wherever it lies.

    `uneven`: whether its rows must be no whole vectors, as the rule divides them.
    """

    case: Case
    config: NormConfig | None = None
    architecture: int = 90
    multiprocessors: int = 8
    layouts: tuple[tuple[int, ...], ...] = (MISALIGNED,)
    orders: tuple[str, ...] = ("first_in",)
    uneven: bool = False
    static: bool = False


# The operator, its rows and columns, the type of x and of the output, and (threads, rows of a CTA, vector, steps, CTAs,
# stages). What is taken in turn is long, or many rows: other tests have one turn of it.
PERSISTENT = (
    ("add_rms_norm", 300, 252, FLOAT32, FLOAT16, (32, 8, 4, 2, 1, 2)),
    ("add_layer_norm", 25, 1003, BFLOAT16, FLOAT32, (64, 1, 4, 1, 4, 3)),
    ("layer_norm", 300, 120, BFLOAT16, BFLOAT16, (16, 8, 8, 1, 1, 2)),
    ("rms_norm", 25, 1024, FLOAT32, FLOAT8_E4M3, (256, 1, 4, 1, 1, 3)),
    ("layer_norm_add", 25, 900, FLOAT16, FLOAT16, (256, 1, 4, 1, 1, 2)),
    ("add_layer_norm", 25, 1001, FLOAT16, BFLOAT16, (256, 1, 2, 2, 1, 3)),
    ("rms_norm_add", 25, 999, BFLOAT16, FLOAT32, (256, 1, 4, 1, 1, 2)),
    ("layer_norm", 33, 2000, FLOAT32, FLOAT32, (64, 1, 4, 8, 1, 2)),
    ("layer_norm_add", 17, 4000, BFLOAT16, BFLOAT16, (64, 1, 8, 8, 1, 2)),
    ("add_layer_norm", 25, 1020, FLOAT32, FLOAT32, (64, 1, 4, 1, 4, 2)),
    ("rms_norm_add", 25, 1001, FLOAT16, FLOAT16, (64, 1, 4, 1, 4, 2)),
    ("add_rms_norm", 25, 1024, BFLOAT16, BFLOAT16, (64, 1, 4, 1, 4, 3)),
)
_PADDED = NormConfig(64, 1, 4, 2, 8, True, in_shared=True, stages=2)
_TWICE = (ALIGNED, MISALIGNED)


def _held() -> Iterator[tuple[str, Held]]:
    """Yield what is held, by the behaviour that it shows."""
    for operator, rows, hidden, dtype, out, (threads, rows_per_cta, vector, steps, ctas, stages) in PERSISTENT:
        residual = {"residual": dtype} if "add" in operator else {}
        scaling = DELAYED if out in FLOAT8 else ()
        case = case_of(operator, rows, hidden, dtype, out, weight=FLOAT32, scaling=scaling, **residual)
        for architecture in (90, 80)[: 1 + (ctas > 1)]:
            clusters = ctas > 1 and architecture == 90
            config = NormConfig(threads, rows_per_cta, vector, steps, ctas, clusters, in_shared=True, stages=stages)
            yield "forward rows in turn where each cta has several", Held(case, config, architecture, 1, LAYOUTS)
    for hidden in (576, 640):
        case, pairs = (
            case_of("layer_norm", 37, hidden, BFLOAT16),
            NormConfig(32, 1, 8, 3, in_shared=True, rows_per_pass=2),
        )
        yield "an odd number of rows in pairs that do not fill their warp", Held(case, pairs, orders=EVERY_ORDER)
    for operator in BACKWARD:
        # 8 columns for each of 8 CTAs: of 33 the last three have none.
        yield "ctas that have nothing of a misaligned row", Held(plain(operator, 2, 33), _PADDED, layouts=_TWICE)
        # So long rows are several CTAs', which without clusters are resident together: here one row's.
        for options in ({}, {"dweight": None, "dbias": None}):
            case = plain(operator, 10, 32768, heads=5, **options)
            assert not case.specialise(ARCHITECTURES[80])[0].config.stages
            yield "more heads than rows that a cooperative grid holds", Held(case, None, 80, 1, (ALIGNED,))
    for operator in ("layer_norm_backward", "add_rms_norm", "layer_norm_add", "rms_norm_backward"):
        case = plain(operator, 7 * 5, 2000, heads=5, rstd=False, mean=False)
        for config in (IN_GRID, IN_CLUSTER):
            config = dataclasses.replace(config, stages=3 if case.backward else 0)
            yield "heads of rows that several ctas share", Held(case, config, multiprocessors=4)
    for (operator, hidden), given in itertools.product(
        (("rms_norm_backward", 2057), ("layer_norm_backward", 4094)), (False, True)
    ):
        # So few groups that a CTA's rows do not all begin alike: the weight and the sums of its gradient move along.
        case = plain(operator, 30, hidden, BFLOAT16, rstd=given, residual=BFLOAT16, weight_offset=1.0)
        yield "uneven rows of one cta at every shift", Held(case, None, 90, 1, LAYOUTS, EVERY_ORDER, uneven=True)
    for hidden, operator, on in itertools.product(
        (1001, 257, 701, 2001, 2047), (*BACKWARD, "layer_norm", "rms_norm"), (90, 80)
    ):
        case = plain(operator, 70, hidden, BFLOAT16)
        yield "short uneven rows at every shift", Held(case, None, on, 1, LAYOUTS, uneven=True)
    layouts = (SECOND_MISALIGNED, (0, 0, 1, 1), (1, 0, 0, 1), MISALIGNED)
    for hidden, operator in itertools.product((673, 1001, 2501), ("add_layer_norm", "add_rms_norm", "layer_norm_add")):
        case = plain(operator, 9, hidden, BFLOAT16)
        yield "an uneven output that lies unlike the input", Held(case, None, 90, 1, layouts, EVERY_ORDER, uneven=True)
    for architecture, hidden in ((89, 14501), (120, 98501)):
        # Without dx no output is put together.
        case = plain("rms_norm_backward", 30, hidden, BFLOAT16, out=None, dbias=None)
        assert case.specialise(ARCHITECTURES[architecture])[0].config.stages == 1
        yield "uneven rows through one slot are read before the next", Held(case, None, architecture, 2, uneven=True)
    for operator, dtype in (("rms_norm_backward", FLOAT32), ("add_rms_norm", FLOAT32), ("layer_norm", BFLOAT16)):
        # The last CTA's part is one column.
        vector = 16 // dtype.bytes
        config = dataclasses.replace(_PADDED, vec_size=vector, ctas_per_row=4)
        case = plain(operator, 3, 3 * 4 * vector + 1, dtype)
        yield "a part that is shorter than a vector", Held(case, config, layouts=_TWICE)
    for hidden, (operator, stages) in itertools.product(
        (72, 8, 520, 1032, 2560, 4088), (("layer_norm_backward", 2), ("layer_norm", 3), ("layer_norm", 0))
    ):
        # Of 8 CTAs, some have nothing where there are few columns; where there are more, their threads could have more.
        config = NormConfig(64, 1, 8, 1, 8, True, in_shared=True, stages=stages)
        yield "ctas with nothing or less than threads hold", Held(plain(operator, 5, hidden, BFLOAT16), config)
    # A thread of the second launch reads 8 rows of partial sums at a time, 2 of the last columns that no vector fits:
    # more than one such batch, of 128 and of 32 columns, and no multiple of it.
    for operator, rows, hidden, dtype, multiprocessors, others in (
        ("layer_norm_backward", 70, 4097, FLOAT32, 70, {"dbias": None}),
        ("layer_norm_backward", 90, 16384, BFLOAT16, 800, {}),
        ("rms_norm_backward", 90, 13004, FLOAT32, 200, {"dweight": None}),
        ("rms_norm_backward", 300, 3000, BFLOAT16, 400, {}),
    ):
        case = plain(operator, rows, hidden, dtype, **others)
        yield "partial sums of many groups", Held(case, multiprocessors=multiprocessors)
    # Lanes bring statistics of many turns at once: here are more rows than two such batches, the last one not whole.
    for hidden, rows, dtype in (
        (512, 1100, BFLOAT16), (100, 3300, FLOAT16), (256, 2100, BFLOAT16), (8192, 50, FLOAT16), (14848, 130, BFLOAT16)
    ):  # fmt: skip
        division = configure_backward(BackwardRow("layer_norm", hidden, (dtype,) * 3, dtype), ARCHITECTURES[90])
        assert division is not None
        case = plain("layer_norm_backward", rows, hidden, dtype, residual=dtype)
        ahead = division.replace(statistics_ahead=True)
        yield "statistics of rows that a cta takes in turn", Held(case, ahead, multiprocessors=1)
    # A general kernel takes 8 rows at a time, or 4 or 2 where its CTAs, two of a wide one and 8 of another, would not
    # all have so many: fewer than that, more, and no multiple of them.
    for (hidden, dtype), operator, (rows, multiprocessors) in itertools.product(
        ((40, BFLOAT16), (2056, FLOAT32)), BACKWARD, ((13, 1), (2, 1), (7, 1), (20, 1), (33, 1), (70, 1), (9, 2))
    ):
        case = plain(operator, rows, hidden, dtype)
        assert case.general()[0].symbol.endswith("wide") == (hidden > 40)
        yield "general batches take all rows", Held(case, None, 90, multiprocessors, _TWICE, static=True)
    # Rows that do not fit on the chip are taken 8 at a time, each several chunks of vectors: fewer rows, more, and no
    # multiple; more vectors of a thread than are added up by themselves; and heads of which a CTA has one.
    for operator, hidden, dtype, (rows, multiprocessors), options in (
        ("rms_norm_backward", 2056, FLOAT32, (1, 1), {"rstd": False}),
        ("rms_norm_backward", 1032, BFLOAT16, (33, 1), {"residual": BFLOAT16, "weight": FLOAT32}),
        ("rms_norm_backward", 1031, FLOAT16, (20, 2), {"out": None}),
        ("rms_norm_backward", 518, BFLOAT16, (7, 2), {"weight": None, "dweight": None, "weight_offset": 1.0}),
        ("rms_norm_backward", 260, FLOAT32, (24, 1), {"heads": 3, "weight": BFLOAT16, "rstd": False}),
        ("layer_norm_backward", 20_008, BFLOAT16, (9, 1), {"rstd": False, "mean": False}),
        ("layer_norm_backward", 8197, FLOAT32, (5, 1), {"rstd": False, "mean": False, "residual": FLOAT32}),
        ("layer_norm_backward", 2056, FLOAT32, (70, 2), {"dbias": FLOAT32, "residual": FLOAT32}),
        ("layer_norm_backward", 1000, FLOAT16, (13, 1), {"residual": FLOAT32, "dbias": FLOAT16, "dy": FLOAT32}),
        ("layer_norm_backward", 1000, BFLOAT16, (13, 1), {"out": None, "dweight": None, "dbias": FLOAT32}),
        ("layer_norm_backward", 2000, BFLOAT16, (13, 1), {"out": None, "rstd": False, "mean": False}),
        ("layer_norm_backward", 1001, FLOAT16, (40, 3), {"heads": 5, "dbias": FLOAT16, "rstd": False, "mean": False}),
    ):
        case = plain(operator, rows, hidden, dtype, **options)
        widest = max(of.bytes for name, of in case.types.items() if of and name in ("dy", "x", "dresidual", "out"))
        config = NormConfig(64, 1, 16 // widest, 1)
        yield "rows that do not fit on the chip", Held(case, config, 90, multiprocessors, LAYOUTS)
    # More rows than there are groups of CTAs, which are no multiple of the heads.
    for static, heads, hidden in itertools.product((True, False), (3, 1, 8, 10), (64, 1500)):
        name = "each head has a weight and gradients of its own"
        case = plain("layer_norm_backward", 29 * heads, hidden, heads=heads, rstd=False, weight_offset=1.0)
        for out, sums, multiprocessors in itertools.product((FLOAT32, None), (FLOAT32, None), (1, 7)):
            if out or sums:
                ours = case._replace(out=out, dweight=sums, dbias=sums)
                yield name, Held(ours, None, 80, multiprocessors, orders=("last_in",), static=static)
        case = plain("layer_norm", 29 * heads, hidden, BFLOAT16, bias=FLOAT16, heads=heads, margin=1)
        yield name, Held(case, None, 80, 3, static=static)
    # Lengths that leave a part of their CTAs without columns, and rows in turn of CTAs that share each.
    for operator, hidden, dtype, options in (
        ("rms_norm", 5000, BFLOAT16, {"weight": FLOAT32}),
        ("rms_norm", 8200, FLOAT32, {"weight": None}),
        ("rms_norm", 8201, FLOAT32, {"weight": BFLOAT16, "heads": 3}),
        ("rms_norm", 20_008, FLOAT32, {"weight": FLOAT16, "margin": 1}),
        ("layer_norm", 16_384, BFLOAT16, {"bias": FLOAT32, "margin": 1}),
        ("add_layer_norm", 8192, FLOAT32, {"weight": None, "bias": FLOAT32}),
        ("add_layer_norm", 2048, BFLOAT16, {"weight": FLOAT32, "bias": FLOAT32}),
        ("layer_norm", 1024, BFLOAT16, {"weight": FLOAT32, "bias": FLOAT32}),
    ):
        for out, rows in ((FLOAT8_E4M3, 6), (INT8, 15)):
            case = plain(operator, rows, hidden, dtype, out=out, scaling=BY_ROW, **options)
            yield "rows with scales that leave threads idle or come in turn", Held(case, multiprocessors=3)
    for static, operator, (rows, hidden, dtype) in itertools.product(
        (True, False), NORMS, ((1, 1, FLOAT16), (259, 1, BFLOAT16), (1, 33, FLOAT32))
    ):
        yield "one row and one column", Held(plain(operator, rows, hidden, dtype), static=static)


def _params() -> list[Any]:
    found, seen = [], set()
    for number, (name, held) in enumerate(_held()):
        marks = [pytest.mark.thorough(share=0.35)] if name in seen else []
        found.append(pytest.param(held, marks=marks, id=f"{name.replace(' ', '_')}-{number}-{held.case.name}"))
        seen.add(name)
    return found


@pytest.mark.parametrize("held", _params())
def test_rows_that_are_divided_as_few_are(held, rng):
    if held.uneven:
        assert held.case.specialise(ARCHITECTURES[held.architecture])[0].unaligned
    on = simulated(
        held.architecture, held.orders, static=held.static, multiprocessors=held.multiprocessors,
        # What checked mode sees, it sees in fewer elements.
        checked=held.case.rows * held.case.hidden < 1 << 20,
    )  # fmt: skip
    with configured(held.case.operator, held.config) if held.config else contextlib.nullcontext():
        hold(on, held.case, rng, held.layouts)


# ---- Several rows per pass -------------------------------------------------------------------------------------------

# The operator, its columns, the types of x and of the output, (threads, vec_size, vectors of each, CTAs), rows per
# pass, and options.
ROWS_PER_PASS = (
    ("layer_norm", 2048, FLOAT16, FLOAT16, (64, 4, 2, 4), 2, {"bias": FLOAT16}),
    ("layer_norm", 4096, BFLOAT16, BFLOAT16, (64, 8, 8, 1), 2, {"weight_offset": 1.0}),
    ("layer_norm", 1000, BFLOAT16, FLOAT32, (64, 8, 2, 1), 2, {"weight": FLOAT32, "bias": FLOAT16}),
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


@pytest.mark.parametrize(
    ("row", "architecture"),
    first_of([*((n, 90) for n in range(12)), *((n, 80) for n in range(12) if ROWS_PER_PASS[n][4][3] > 1)], share=0.5),
)
def test_rows_of_one_pass_have_the_bits_that_each_has_alone(row, architecture, rng):
    operator, hidden, dtype, out, (threads, vector, steps, ctas), together, options = ROWS_PER_PASS[row]
    clusters = ctas > 1 and architecture == 90
    config = NormConfig(threads, 1, vector, steps, ctas, clusters, in_shared=True, rows_per_pass=together)
    (rig,) = simulated(architecture, multiprocessors=2)
    # The last ones of the rows are whole, or fewer; and more than the CTAs take at once, where they take turns.
    for rows in (1, 2 * together, 14 * together - 1):
        case = plain(operator, rows, hidden, dtype, **{"out": out, **options})
        given = calls.make_inputs(rng, case)
        with configured(operator, config):
            found = hold([rig], case, rng, LAYOUTS, given)
            for layout in LAYOUTS if out is dtype else ():
                assert_same_bits(run(rig, case, given, layout, {"out": "x"}), found, f"in place, {layout}")
        with configured(operator, dataclasses.replace(config, rows_per_pass=1)):
            assert_same_bits(run(rig, case, given), found, f"{rows} rows, each alone")


def test_rows_share_a_pass_only_where_they_share_a_weight_and_vectors_fit_them():
    case = plain("layer_norm", 4, 57344, BFLOAT16, bias=BFLOAT16)
    alone = {
        "heads": {"heads": 2},
        "a scale of each row": {"out": INT8, "scaling": BY_ROW},
        "no vector": {"hidden": 57343},
    }
    assert case.specialise(ARCHITECTURES[90])[0].config.rows_per_pass == 2
    for what, change in alone.items():
        assert case._replace(**change).specialise(ARCHITECTURES[90])[0].config.rows_per_pass == 1, what


# ---- What is read, and what is asked for -----------------------------------------------------------------------------

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
    (rig,) = simulated(static=True, multiprocessors=1)

    def found(types: dict, offsets: dict[str, int]) -> dict[str, np.ndarray]:
        of = {name: types.get(name, FLOAT16) for name in names}
        given = {
            name: rig.guarded((20, 40), of[name], offsets.get(name, 0)).fill(
                drawn[name].astype(reference.NUMPY_TYPES[of[name]])
            )
            for name in names
        }
        arrays = {name: place.array[0] if name in ("weight", "bias") else place.array for name, place in given.items()}
        outputs = {name: arrays.pop(name) for name in ("out", "residual_out") if name in arrays}
        case = case_of(operator, 20, 40, FLOAT16, residual=of.get("residual"), rstd=False, out=of["out"])
        return {name: array.copy() for name, array in rig.call(case, arrays, outputs).items()}

    for name in names:
        sums = ("residual", "residual_out")  # of one type
        types = dict.fromkeys(sums if name in sums else (name,), FLOAT32)
        for given in ((types, {}), ({}, {name: 1})):
            elsewhere = found(given[0], dict.fromkeys(names, 1))
            assert_same_bits(found(*given), elsewhere, str((name, given)))


@pytest.mark.parametrize("operator", ["add_layer_norm", "layer_norm_add"])
def test_a_residual_of_another_type_beside_q_k_and_v_of_one_array(operator, rng):
    case = plain(operator, 5 * 4, 80, FLOAT16, residual=FLOAT32, out=FLOAT32, heads=4)
    given = calls.make_inputs(rng, case)
    packed = np.full((5, 3, 4, 80), np.nan, np.float16)
    packed[:, 1] = given["x"]
    (rig,) = simulated(90)
    calls.hold_within(case, rig.call(case, {**given, "x": packed[:, 1]}), calls.expect(case, given))
    assert np.isnan(packed[:, ::2]).all()


@pytest.mark.parametrize(
    ("division", "finds", "which"),
    covering((("rms_norm_backward", 200), ("layer_norm_backward", 1000)), ("given", "found"), EACH, first=1),
)
def test_each_gradient_has_the_same_bits_whatever_else_is_asked_for(division, finds, which, rng):
    # More rows than the groups of CTAs take at once.
    case = plain(division[0], 75, division[1], BFLOAT16, residual=FLOAT32, rstd=finds == "given", dbias=FLOAT16)
    case = case._replace(dweight=FLOAT16)
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    checked, last_in = simulated(90, EVERY_ORDER[:2], static=which == "general", multiprocessors=1)
    everything = run(checked, case, given)
    calls.hold_within(case, everything, expected)
    for asked in itertools.product((True, False), repeat=3):
        wanted = dict(zip(everything, asked, strict=True))
        if not any(asked):
            continue
        ours = case._replace(**{name: None for name in wanted if not wanted[name]})
        results = run(last_in, ours, given)
        calls.hold_within(ours, results, expected)
        assert set(results) == {name for name in wanted if wanted[name]}
        # Without dx a kernel may divide its rows among others: the sums are added up in another order.
        if wanted["out"]:
            assert_same_bits(results, {name: everything[name] for name in results}, f"{wanted}")


@pytest.mark.parametrize("hidden", first_of([100, 4096]))
def test_statistics_of_the_forward_call_are_those_that_backward_finds(hidden, rng):
    case = plain("layer_norm_backward", 9, hidden)
    given = calls.make_inputs(rng, case)
    (rig,) = simulated(90)
    _, mean, rstd = rig("layer_norm", given["x"], eps=calls.EPS, return_mean=True, return_rstd=True)
    found = reference.forward(True, given["x"], eps=calls.EPS)
    reference.assert_within(mean, found["mean"], FLOAT32, "mean")
    reference.assert_within(rstd, found["rstd"], FLOAT32, "rstd")
    saved = run(rig, case, {**given, "mean": mean, "rstd": rstd})
    again = run(rig, case._replace(rstd=False), {name: given[name] for name in ("dy", "x", "weight")})
    for name, array in saved.items():
        np.testing.assert_allclose(array, again[name], rtol=1e-4, atol=1e-4 * np.abs(array).max(), err_msg=name)
    # As keepdim=True leaves them.
    kept = run(rig, case, {**given, "mean": mean[..., None], "rstd": rstd[..., None]})
    assert_same_bits(kept, saved, "[rows, 1]")


@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm"])
def test_thin_wrappers_are_the_backward_operator(operator, rng):
    case = plain(f"{operator}_backward", 5, 300, residual=FLOAT32, rstd=False)
    given = calls.make_inputs(rng, case)
    dy, x, weight, ds = (given[name] for name in ("dy", "x", "weight", "dresidual"))
    (rig,) = simulated(static=True)
    backward, before, after = f"{operator}_backward", f"add_{operator}_backward", f"{operator}_add_backward"
    for found, wanted in (
        (rig(before, dy, ds, x, weight, 1e-3), rig(backward, dy, x, weight, 1e-3, dresidual=ds)),
        (rig(before, dy, None, x, weight), rig(backward, dy, x, weight)),
        (rig(after, dy, x, weight, weight_offset=1.0), rig(backward, dy, x, weight, weight_offset=1.0)),
    ):
        assert len(found) == len(wanted) == 2 + (operator == "layer_norm")
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))


_DEVICES = ((90, 60), (80, 132), (90, 132), (120, 170))


@pytest.mark.parametrize(("device", "hidden"), covering(_DEVICES, (40, 4096, 5120), share=0.5, first=1))
def test_no_more_ctas_of_the_second_launch_share_a_multiprocessor_than_must(device, hidden, rng, monkeypatch):
    architecture, multiprocessors = device
    asked = {}

    def prepare(kernel: Kernel, config: LaunchConfig) -> int:
        asked[kernel.symbol] = config.dynamic_shared_memory
        return prepare_as_before(kernel, config)

    prepare_as_before = Kernel.prepare
    monkeypatch.setattr(Kernel, "prepare", prepare)
    hold(simulated(architecture, multiprocessors=multiprocessors), plain("layer_norm_backward", 2, hidden), rng)
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
    _, (_, rule) = plain("rms_norm_backward", 6, 64, heads=3).stages(ARCHITECTURES[90])
    assert rule.spread_ctas == rule.dynamic_shared_memory == 0


# ---- Rows of large numbers -------------------------------------------------------------------------------------------


def test_the_bound_for_a_large_mean_would_see_a_mean_of_one_float(rng):
    # What keeping the mean as a pair is for: one float32 is not enough.
    x = (1e4 + rng.standard_normal((4, 1000)) * 1e-2).astype(np.float32)
    wide = x.astype(np.float64)
    mean = wide.mean(axis=-1, keepdims=True)
    cut = (wide - np.float64(np.float32(mean))) / np.sqrt(((wide - mean) ** 2).mean(axis=-1, keepdims=True) + 1e-12)
    expected = reference.forward(True, x, eps=1e-12)["out"]
    with pytest.raises(AssertionError, match="times what its arithmetic"):
        reference.assert_within(cut.astype(np.float32), expected, FLOAT32)


@pytest.mark.parametrize(
    ("hidden", "dtype", "out", "operator"),
    first_of(
        [
            (*row, operator)
            for row in (
                (4096, BFLOAT16, FLOAT8_E4M3), (1024, BFLOAT16, BFLOAT16), (4096, FLOAT16, FLOAT16),
                (4097, BFLOAT16, BFLOAT16), (5121, FLOAT16, BFLOAT16), (16384, BFLOAT16, BFLOAT16),
                (32768, FLOAT16, FLOAT16), (65536, BFLOAT16, BFLOAT16), (262144, BFLOAT16, FLOAT16),
                (1024, FLOAT32, FLOAT32), (4096, FLOAT32, BFLOAT16), (6656, FLOAT32, FLOAT32),
                (32768, FLOAT32, FLOAT32), (65536, FLOAT32, FLOAT16),
            )
            for operator in ("layer_norm", "add_layer_norm")
        ],
        share=0.3,
    ),
)  # fmt: skip
def test_what_a_thread_has_first_may_be_far_from_its_other_elements(hidden, dtype, out, operator, rng):
    # Kernels that take a row's moments in one pass begin with a shift from the first Vec; where that is far from the
    # mean, they take them again.
    config = plain(operator, 1, hidden, dtype, out=out).specialise(ARCHITECTURES[90])[0].config
    first = np.arange(hidden) < config.threads_per_row * config.vec_size
    other = np.arange(hidden) % config.vec_size == 0
    x = rng.standard_normal((9, hidden))
    x[:6] += np.array([[1e3], [1e4], [-3e4], [0], [0], [0]]) * first
    x[:6] *= np.where(np.array([[0], [1], [1], [0], [0], [0]]) & ~first, 1e-2, 1)
    x[3] *= np.where(other, 1e3, 1)
    x[4] *= np.where(first, 1e-4, 1)
    x[5, 0] = 3e4
    x[6, : config.vec_size] += 3e4
    x[7, : config.vec_size // 2] -= 3e4
    x[8, 1 : config.vec_size] += 1e2
    x = x.astype(reference.NUMPY_TYPES[dtype])
    # Many CTAs about one level have terms of one size, whose errors are not independent in any kernel.
    x = x[[3, 4, 6, 7, 8]] if config.ctas_per_row > 2 else x
    weight, bias = (reference.random_weight(rng, hidden, dtype) for _ in range(2))
    expected = reference.forward(True, x, weight, bias, out=out)
    given = [x] if operator == "layer_norm" else [x, np.zeros_like(x)]
    options = {"return_mean": True, "return_rstd": True, "out_dtype": out.name}
    if out is FLOAT8_E4M3:
        options["scale"] = np.ones(1, np.float32)
    (rig,) = simulated(90, checked=hidden < 1 << 16)
    found = rig(operator, *given, weight, bias, 1e-6, **options)
    for name, array, of in (("out", found[0], out), ("mean", found[-2], FLOAT32), ("rstd", found[-1], FLOAT32)):
        reference.assert_within(array, expected[name], of, name)
