"""Every kernel of this package on the CPU: checked in one order, then fast in others, against float64.

What a row gives must depend on nothing else: every test that runs one case in several ways wants the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
from typing import Any

import calls
import numpy as np
import pytest
import reference
from cases import (
    BACKWARD,
    BY_ROW,
    CASES,
    DELAYED,
    FLOAT8,
    FLOATS,
    FORWARD,
    Case,
    division_of,
    features,
    layout_of,
)
from rigs import (
    ALIGNED,
    BITS,
    EVERY_ARCHITECTURE,
    MISALIGNED,
    WITH_CLUSTERS,
    WITHOUT_CLUSTERS,
    Guarded,
    assert_same_bits,
    bits,
    compile_together,
    configured,
    devices,
    few,
    hold,
    reconfigured,
    run,
)

from transformer_rtc import LaunchConfig, SimulatedDevice, layer_norm, rms_norm, using
from transformer_rtc.ops.norm_configurations import NormConfig
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32, INT8, DType

pytestmark = pytest.mark.usefixtures("kernels")

# ---- The table of cases --------------------------------------------------------------------------------------------


def _small(case: Case) -> Case:
    """Return a case of fewer rows than a GPU gets: what many rows can show, few of a small grid do."""
    return case.shorter(1 << 13, 37)


def _chosen() -> dict[str, tuple[Case, int]]:
    # Every type and option, every operator with every way to hold a row, and all that the table of configurations has,
    # each on some architecture; and a size of TransformerEngine for each of its divisions.
    found: dict[str, tuple[Case, int]] = {}
    seen: set[tuple[Any, ...]] = set()
    for number, case in enumerate(reversed(CASES)):
        architecture = EVERY_ARCHITECTURE[number % len(EVERY_ARCHITECTURE)]
        limits = ARCHITECTURES[architecture]
        layout, division = layout_of(case, limits), division_of(case, limits)
        new = {*features(case), (layout, case.operator), division}
        if not new <= seen and case.hidden < (50_000 if case.backward else 300_000):
            seen |= new
            found[f"sm_{architecture}-{case.name}"] = _small(case), architecture
    return found


CHOSEN = _chosen()


def test_what_is_chosen_is_every_operator_type_option_and_layout():
    seen = {feature for case, _ in CHOSEN.values() for feature in features(case)}
    assert seen == {feature for case in CASES for feature in features(case)}
    found = {(layout_of(case, ARCHITECTURES[on]), case.operator) for case, on in CHOSEN.values()}
    layouts = ("warps", "shared", "ragged", "shared cluster", "shared grid", "ragged cluster", "ragged grid")
    assert found >= set(itertools.product(layouts, BACKWARD)) and len(found) > 40


@pytest.mark.parametrize("name", CHOSEN)
def test_every_case_is_within_the_bound_and_has_the_same_bits_in_every_order(name, kernels, rng):
    case, architecture = CHOSEN[name]
    compile_together(kernels, case.stages(ARCHITECTURES[architecture]), architecture)
    checked, *fast = devices(architecture)
    # What checked mode sees, it sees in shorter rows.
    hold([checked, *fast[: 1 if case.hidden > 1 << 14 else 2]] if case.hidden < 1 << 16 else fast, case, rng)


@pytest.mark.parametrize("hidden", [576, 640])
def test_an_odd_number_of_rows_in_pairs_that_do_not_fill_their_warp(hidden, kernels, rng):
    # No size of the table is divided so.
    case = Case(37, hidden, BFLOAT16, BFLOAT16, BFLOAT16, True, "layer_norm", bias=BFLOAT16, mean=True)
    config = case.stages(ARCHITECTURES[90])[0][0].config
    assert (config.threads, config.steps, config.together) == (32, 3, 2)
    compile_together(kernels, case.stages(ARCHITECTURES[90]), 90)
    hold(devices(90), case, rng)


def _general() -> list[Case]:
    # The general kernels know nothing of layouts: every operator, type and option with every kernel; on long rows that
    # the simulator would take minutes for, every operator.
    found, seen = [], set()
    for case in CASES:
        kernel = case.general()[0].symbol
        long = case.hidden >= (10_000 if case.backward else 5_000)
        new = {(kernel, case.operator)} if long else {(kernel, *feature) for feature in features(case)}
        if case.hidden < 20_000 and not new <= seen:
            seen |= new
            found.append(_small(case))
    return found


GENERAL = _general()


@pytest.mark.parametrize("operator", (*FORWARD, *BACKWARD))
def test_the_general_kernels_are_within_the_bound_in_every_order(operator, rng):
    # Rows of one type that are aligned are read in another way.
    on = devices(90, seeds=(), static=True)
    for case in GENERAL:
        if case.operator == operator:
            hold(on, case, rng, (ALIGNED, MISALIGNED) if case.hidden % 8 == 0 else (MISALIGNED,))


def test_the_general_kernels_run_on_an_architecture_without_clusters(rng):
    case = Case(3, 1500, FLOAT32, FLOAT16, FLOAT8[0], operator="layer_norm", bias=FLOAT32, scaling=DELAYED)
    hold([SimulatedDevice(80, order="last_in", static=True)], case, rng)


@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm", "layer_norm_backward"])
@pytest.mark.parametrize("hidden", [7, 1000, 16384])
def test_every_architecture_gives_the_same_bits_where_a_row_is_one_ctas(hidden, operator, kernels, rng):
    case = Case(3, hidden, BFLOAT16, FLOAT32, BFLOAT16, operator in FORWARD, operator)
    by_division: dict[Any, list[int]] = {}
    for architecture, limits in ARCHITECTURES.items():
        by_division.setdefault(case.specialise(limits)[0].config, []).append(architecture)
    same = max(by_division.values(), key=len)
    assert len(same) >= 2
    for architecture in same:
        compile_together(kernels, case.stages(ARCHITECTURES[architecture]), architecture)
    hold([device for architecture in same for device in devices(architecture, seeds=())], case, rng)


# ---- Configurations that only small rows can try -------------------------------------------------------------------

# (threads of a row, rows of a CTA, vector, steps, in shared memory, chunks, how far the last chunk is filled).
ONE_CTA = (
    (1, 64, 1, 1, False, 1, "whole"),
    (1, 32, 2, 3, False, 3, "one"),
    (2, 48, 4, 1, False, 4, "less_one"),
    (4, 24, 8, 2, False, 1, "less_one"),
    (8, 12, 2, 5, False, 3, "half"),
    (16, 6, 4, 7, False, 2, "one"),
    (32, 3, 8, 1, False, 4, "whole"),
    (32, 1, 8, 4, False, 3, "less_one"),
    (32, 8, 1, 6, False, 5, "half"),
    (64, 3, 4, 2, False, 3, "whole"),
    (96, 2, 8, 3, False, 1, "half"),
    (160, 1, 2, 8, False, 3, "one"),
    (288, 1, 4, 1, False, 3, "less_one"),
    (544, 1, 8, 1, False, 1, "less_one"),
    (1024, 1, 1, 1, False, 5, "half"),
    (32, 1, 8, 2, True, 1, "whole"),
    (64, 1, 4, 2, True, 1, "less_one"),
    (96, 1, 8, 3, True, 1, "half"),
    (128, 1, 8, 4, True, 1, "one"),
    (160, 1, 8, 5, True, 1, "whole"),
    (224, 1, 4, 6, True, 1, "less_one"),
    (512, 1, 8, 7, True, 1, "half"),
    (1024, 1, 4, 8, True, 1, "less_one"),
)
# (CTAs of a row, threads, vector, steps, in shared memory, chunks, how far the last chunk is filled).
MANY_CTAS = (
    (2, 64, 8, 1, False, 1, "whole"),
    (2, 64, 8, 2, False, 1, "whole"),
    (2, 96, 4, 2, True, 1, "less_one"),
    (2, 64, 2, 3, False, 3, "one"),
    (4, 64, 4, 1, False, 5, "half"),
    (4, 160, 8, 8, True, 1, "half"),
    (4, 256, 8, 4, False, 3, "whole"),
    (8, 96, 8, 2, True, 1, "one"),
    (8, 96, 4, 5, True, 1, "whole"),
    (8, 64, 8, 4, False, 4, "less_one"),
    (16, 96, 4, 6, True, 1, "less_one"),
    (16, 64, 8, 8, True, 1, "half"),
    (16, 64, 8, 4, False, 3, "one"),
    (8, 544, 1, 1, False, 2, "half"),
)
# Backward: (CTAs of a row, threads of each, rows of a CTA, vector, steps, stages, how far the row is filled).
IN_TURN = (
    (1, 1, 32, 1, 1, 4, "whole"),
    (1, 2, 16, 8, 2, 3, "less_one"),
    (1, 8, 12, 4, 3, 2, "half"),
    (1, 32, 3, 8, 2, 1, "whole"),
    (1, 32, 8, 2, 5, 3, "one"),
    (1, 64, 1, 8, 2, 3, "whole"),
    (1, 96, 1, 4, 3, 2, "less_one"),
    (1, 160, 1, 2, 4, 1, "half"),
    (1, 544, 1, 8, 1, 4, "less_one"),
    (1, 1024, 1, 4, 2, 2, "whole"),
    (2, 64, 1, 8, 2, 3, "whole"),
    (2, 96, 1, 4, 3, 2, "less_one"),
    (4, 64, 1, 2, 5, 1, "half"),
    (8, 96, 1, 8, 2, 4, "less_one"),
    (16, 64, 1, 4, 1, 3, "half"),
)


def _drawn(number: int, operator: str, heads: int) -> Case:
    """Return a case of every type and option in turn, without rows and columns."""
    # Steps that share no factor with what they step through.
    x, weight, bias, residual, dy = (FLOATS[number // 3**power % 3] for power in range(5))
    out = (*FLOATS, *FLOAT8, INT8)[number % (3 if operator in BACKWARD or operator.endswith("_add") else 6)]
    case = Case(1, 1, x, weight if number % 4 else None, out, number % 3 > 0, operator, heads=heads, weight_offset=0.5)
    if operator in BACKWARD:
        wanted = ((1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 0), (0, 0, 1))[number % 5]
        return case._replace(
            dy=dy, residual=residual if number % 2 else None, out=out if wanted[0] else None, bias=None,
            dweight=weight if wanted[1] else None, dbias=weight if wanted[2] else None,
            heads=heads if case.weight else 0,
        )  # fmt: skip
    scaling = BY_ROW if out is INT8 or (out in FLOAT8 and number % 5 == 0) else DELAYED if out in FLOAT8 else ()
    return case._replace(
        bias=bias if number % 2 else None, residual=residual if case.adds else None, mean=case.centred,
        scaling=scaling, heads=heads if number % 4 or number % 2 else 0,
    )  # fmt: skip


def _shaped(number: int, operator: str, ctas: int, threads: int, rows: int, shape: tuple[Any, ...]) -> Any:
    vector, steps, in_shared, chunks, filled, stages = shape
    case = _drawn(number, operator, (0, 0, 3)[number % 3])
    of_rows = [dtype for name, dtype in case.types.items() if dtype and calls.shape_of(case, name) == case.shape]
    vector = min(vector, 16 // max(dtype.bytes for dtype in of_rows))
    if in_shared:  # no copy to shared memory is shorter
        brought = [case.types[name] for name in ("dy", "x", "residual", "dresidual") if case.types.get(name)]
        vector = max(vector, 4 // min(dtype.bytes for dtype in brought))
    capacity = ctas * threads * vector * steps
    last = {"whole": capacity, "less_one": capacity - 1, "half": capacity // 2 + 1, "one": 1}[filled]
    heads = max(1, case.heads)
    hidden = capacity * (chunks - 1) + last
    alone = stages > 0 and rows == 1
    ragged = alone and hidden % vector != 0
    bulk = ragged or (alone and number % 2 == 0)
    config = NormConfig(
        threads, rows, vector, steps, ctas, in_shared=in_shared, stages=stages, bulk=bulk, ragged=ragged
    )
    if ragged:  # whose CTAs hold less
        hidden = min(hidden, ctas * config.most_columns - 1)
    return case._replace(rows=(3 * rows + heads) // heads * heads, hidden=hidden), config


def _all_shaped() -> dict[str, tuple[Case, NormConfig]]:
    found = []
    for number, (threads, rows, vector, steps, in_shared, chunks, filled) in enumerate(ONE_CTA):
        shape = (vector, steps, in_shared, chunks, filled, 0)
        found.append(_shaped(number * 7, FORWARD[number % len(FORWARD)], 1, threads, rows, shape))
    for number, (ctas, threads, vector, steps, in_shared, chunks, filled) in enumerate(MANY_CTAS):
        shape = (vector, steps, in_shared, chunks, filled, 0)
        found.append(_shaped(number * 7 + 3, FORWARD[number % len(FORWARD)], ctas, threads, 1, shape))
    for number, (ctas, threads, rows, vector, steps, stages, filled) in enumerate(IN_TURN):
        shape = (vector, steps, True, 1, filled, stages)
        found.append(_shaped(number * 7 + 1, BACKWARD[number % len(BACKWARD)], ctas, threads, rows, shape))
    return {f"{config.symbol}-{case.name}": (case, config) for case, config in found}


SHAPED = _all_shaped()
SMALL = {name: shaped for name, shaped in SHAPED.items() if shaped[1].ctas_per_row == 1}
SHARED = {name: shaped for name, shaped in SHAPED.items() if shaped[1].ctas_per_row > 1}


def stages_of(case: Case, config: NormConfig, architecture: int) -> Any:
    return reconfigured(case.stages(ARCHITECTURES[architecture]), config)


@pytest.mark.parametrize("name", SMALL)
def test_one_cta_with_any_number_of_chunks_steps_warps_and_rows(name, kernels, rng):
    case, config = SMALL[name]
    turn = list(SMALL).index(name)
    # Rows in shared memory are longer than some architectures have.
    able = [
        architecture
        for architecture, limits in ARCHITECTURES.items()
        if stages_of(case, config, architecture)[0][1].dynamic_shared_memory + 2048 <= limits.shared_memory_per_cta
    ]
    architecture = able[turn % len(able)]
    compile_together(kernels, stages_of(case, config, architecture), architecture)
    # Backward, two groups or so take all rows in turn.
    with configured(case.operator, config):
        hold(devices(architecture, seeds=(2,), multiprocessors=1), case, rng, (ALIGNED, MISALIGNED))


@pytest.mark.parametrize("name", SHARED)
def test_ctas_that_share_a_row_give_the_same_bits_in_a_cluster_and_in_a_grid(name, kernels, rng):
    case, config = SHARED[name]
    turn = list(SHARED).index(name)
    in_grid = (*WITHOUT_CLUSTERS, *WITH_CLUSTERS)[turn % len(EVERY_ARCHITECTURE)]
    able = [
        architecture for architecture in WITH_CLUSTERS
        if ARCHITECTURES[architecture].max_cluster_size >= config.ctas_per_row
    ]  # fmt: skip
    in_cluster = able[turn % len(able)]
    heads = max(1, case.heads)
    given = calls.make_inputs(rng, case._replace(rows=heads))
    answers = []
    for architecture, clusters in ((in_cluster, True), (in_grid, False)):
        ours = dataclasses.replace(config, clusters=clusters)
        stages = stages_of(case, ours, architecture)
        compile_together(kernels, stages, architecture)
        spec, rule = stages[0]
        multiprocessors = few(architecture, rule)
        on = devices(architecture, seeds=(2,), multiprocessors=multiprocessors)
        resident = multiprocessors * kernels.get(spec, on[0]).max_active_ctas(
            (rule.threads, 1, 1), rule.dynamic_shared_memory
        )
        # In a grid, each group of CTAs takes four rows, one after the other, or one more than another group does.
        rows = 5 if clusters else 3 * (resident // config.ctas_per_row) + 1
        rows = -(-rows // heads) * heads
        with configured(case.operator, ours):
            hold(on, case._replace(rows=rows), rng, (ALIGNED, MISALIGNED))
            answers.append(run(on[0], case._replace(rows=heads), given))
    assert_same_bits(answers[1], answers[0], "a grid instead of a cluster")


def test_a_grid_with_workspace_launched_by_hand(kernels, rng):
    # One group of two CTAs takes seven rows of five chunks, and the caller is the one who zeroes the workspace.
    config = NormConfig(64, 1, 4, 2, 2)
    rows, hidden = 7, 4 * 64 * 8 * 2 + 100
    case = Case(rows, hidden, FLOAT32, FLOAT32, FLOAT32, True, "layer_norm", mean=True, weight_offset=0.25)
    ((spec, rule),) = stages_of(case, config, 80)
    given = calls.make_inputs(rng, case)
    launch = LaunchConfig((2, 1, 1), (64, 1, 1), (1, 1, 1), rule.dynamic_shared_memory, cooperative=True)
    seen = []
    for device in devices(80):
        results = {"out": np.full_like(given["x"], np.nan)}
        results |= {name: np.full(rows, np.nan, np.float32) for name in ("mean", "rstd")}
        workspace = np.zeros(rule.workspace_bytes, np.uint8)
        kernels.get(spec, device).launch(
            launch,
            {
                **given, **results, "x_outer_stride": hidden, "x_inner_stride": 0, "out_outer_stride": hidden,
                "out_inner_stride": 0, "rows": rows, "inner_count": 1, "inner_magic": 0, "inner_shift": 0,
                "eps": calls.EPS, "weight_offset": 0.25, "workspace": workspace,
            },
        )  # fmt: skip
        arrived = workspace[:8].view(np.uint32)  # for each of two buffers, used in turn
        assert list(arrived) == [2 * 4, 2 * 3], "each CTA has arrived once for each row"
        seen.append(results)
    calls.hold_within(case, seen[0], calls.expect(case, given))
    for results in seen[1:]:
        assert_same_bits(results, seen[0], "another order")


_IN_GRID = NormConfig(64, 1, 4, 2, 4, in_shared=True, stages=3)
_IN_CLUSTER = dataclasses.replace(_IN_GRID, clusters=True)


@pytest.mark.parametrize(
    ("architecture", "hidden", "operator", "config"),
    [
        (80, 257, "rms_norm", None),
        (80, 33_000, "layer_norm", None),
        (90, 33_000, "rms_norm", None),
        (120, 65_537, "layer_norm", None),
        (90, 1000, "layer_norm_backward", None),
        (89, 2000, "layer_norm_backward", _IN_GRID),
        (100, 2000, "rms_norm_backward", _IN_CLUSTER),
    ],
)
def test_twenty_random_orders(architecture, hidden, operator, config, rng):
    weights = BFLOAT16 if operator in BACKWARD else None
    case = Case(23, hidden, FLOAT32, BFLOAT16, FLOAT16, True, operator, dweight=weights, dbias=weights)
    # Fewer multiprocessors than rows: one group has several.
    with contextlib.nullcontext() if config is None else configured(operator, config):
        hold(devices(architecture, seeds=range(20), multiprocessors=2 if config else 8), case.shorter(1 << 18), rng)


# ---- Where rows lie ------------------------------------------------------------------------------------------------

_SOME_HIDDEN = (1, 2, 3, 7, 8, 31, 64, 129, 256, 1000, 1021, 4096, 4097, 16384, 16411)


def _anywhere(number: int, hidden: int) -> Case:
    """Return a case of an operator that reads and writes several arrays of rows, of one type or of two."""
    operator = ("add_layer_norm", "rms_norm_backward", "rms_norm_add", "layer_norm_backward", "rms_norm")[number % 5]
    x = FLOATS[number % 3]
    other = FLOATS[(number // 2) % 3]
    back = operator in BACKWARD
    return Case(
        3, hidden, x, other, other, not back, operator, bias=None if back else x, dy=other if back else None,
        residual=None if operator == "rms_norm" else other, dweight=x if back else None, weight_offset=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize("number", range(len(_SOME_HIDDEN)), ids=lambda number: str(_SOME_HIDDEN[number]))
def test_every_alignment_gives_the_same_bits_and_writes_nothing_else(number, static, kernels, rng):
    hidden = _SOME_HIDDEN[number]
    case = _anywhere(number, hidden)
    on = devices(80, seeds=(), static=static)
    if not static:
        compile_together(kernels, case.stages(ARCHITECTURES[80]), 80)
    # Offsets of rows, columns and outputs, each alone and together, and rows padded by an odd number of elements.
    layouts = [ALIGNED]
    for offset in range(1, 9):
        layouts += [(offset, 0, 0, 16), (0, offset, 0, 16), (0, 0, offset, 16), (offset, offset, offset, 1)]
        layouts += [(offset, 0, 8 - offset, 7)]
    hold(on, case, rng, layouts if hidden < 4000 else layouts[::4])


@pytest.mark.parametrize("out_type", (*FLOATS, *FLOAT8, INT8), ids=lambda dtype: f"out_{dtype.symbol}")
@pytest.mark.parametrize("x_type", FLOATS, ids=lambda dtype: dtype.symbol)
def test_a_misaligned_output_of_another_type(x_type, out_type, rng):
    scaling = BY_ROW if out_type is INT8 else DELAYED if out_type in FLOAT8 else ()
    for hidden in (127, 4096):
        case = Case(3, hidden, x_type, x_type, out_type, scaling=scaling)
        layouts = [ALIGNED, *((0, 0, offset, hidden + offset) for offset in (1, 2, 3, 5))]
        hold(devices(90, seeds=()), case, rng, layouts)


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize(("hidden", "dtype"), [(64, BFLOAT16), (80, FLOAT16), (96, BFLOAT16), (127, FLOAT32)])
def test_heads_inside_a_packed_qkv(hidden, dtype, static, rng):
    tokens, heads = 5, 3
    case = Case(tokens * 3 * heads, hidden, dtype, FLOAT32, dtype, True, heads=3 * heads)
    given = calls.make_inputs(rng, case)
    x, weight = given["x"], given["weight"][:heads]
    expected = reference.forward(False, x.reshape(tokens, 3, heads, hidden), weight, out=dtype)["out"]
    q_of, k_of, v_of = (slice(part * heads, (part + 1) * heads) for part in range(3))
    results = []
    for device in devices(89, seeds=(), static=static):
        packed = Guarded(x.shape, dtype, 1).fill(x)
        q, k, v = (packed.array[:, part] for part in (q_of, k_of, v_of))
        with using(device):
            y, rstd = rms_norm(k, weight, return_rstd=True)
            assert y.flags.c_contiguous and rstd.shape == (tokens, heads)
            reference.assert_within(y, expected[:, 1], dtype)
            # From v into k, and in place: q stays as it is.
            assert rms_norm(v, weight, out=k) is k
            rms_norm(v, weight, out=v)
        np.testing.assert_array_equal(bits(q), bits(x[:, q_of]))
        np.testing.assert_array_equal(bits(k), bits(v))
        reference.assert_within(v, expected[:, 2], dtype)
        results.append({"out": y})
        packed.assert_intact_around()
    for found in results[1:]:
        assert_same_bits(found, results[0], "another order")


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_two_strides_in_any_order_backwards_and_without_end(static, rng):
    x = reference.random_rows(rng, (6, 10, 7, 200), FLOAT32)
    weight = reference.random_weight(rng, 200, FLOAT32)
    views = {
        "every seventh": x[:, :, 3],
        "a block": x[2:, 1:9],
        "permuted": x.transpose(1, 2, 0, 3)[..., 2, :],
        "transposed": x[:, 4].transpose(1, 0, 2),
        "every other": x[::2, None],
        "one row": x[0, 0, 0],
        "backwards": x[::-1, 2, 1],
        "backwards in both": x[::-2, ::-3, 4],
        "backwards in one": x[:, ::-1, 4],
        "expanded outside": np.broadcast_to(x[:1], (5, 10, 7, 200)),
        "expanded inside": np.broadcast_to(x[:, :1, 0], (6, 9, 200)),
        "all one row": np.broadcast_to(x[3, 3, 3], (4, 5, 200)),
    }
    for name, view in views.items():
        expected = reference.forward(True, view, weight)["out"]
        answers = []
        for device in devices(100, seeds=(), static=static):
            out = Guarded(view.shape, FLOAT32)
            with using(device):
                y = layer_norm(view, weight, eps=1e-6)
                assert layer_norm(view, weight, eps=1e-6, out=out.array) is out.array
            assert y.shape == view.shape and y.flags.c_contiguous, name
            np.testing.assert_array_equal(bits(out.array), bits(y), err_msg=name)
            out.assert_intact_around()
            answers.append(y)
        reference.assert_within(answers[0], expected, FLOAT32, name)
        for y in answers[1:]:
            np.testing.assert_array_equal(bits(y), bits(answers[0]), err_msg=name)


def test_outputs_of_any_strides(rng):
    x = reference.random_rows(rng, (5, 6, 100), FLOAT32)
    expected = reference.forward(False, x)["out"]
    memory = np.empty((5, 9, 111), np.float32)
    for place in (
        (slice(None), slice(2, 8), slice(7, 107)),
        (slice(None, None, -1), slice(1, 7), slice(3, 103)),
        (slice(None), slice(7, 1, -1), slice(3, 103)),
    ):
        for device in devices(120, seeds=()):
            memory.fill(np.nan)
            out = memory[place]
            with using(device):
                assert rms_norm(x, out=out) is out
            reference.assert_within(out, expected, FLOAT32)
            out.fill(np.nan)
            assert np.isnan(memory).all()


def sparse(elements: int, dtype: DType) -> np.ndarray:
    """Return memory that costs what is touched of it."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        memory = mmap.mmap(-1, elements * dtype.bytes, flags=flags)
    except OSError as error:
        pytest.skip(f"this machine gives no {elements * dtype.bytes >> 30} GiB of sparse memory: {error}")
    return np.frombuffer(memory, reference.NUMPY_TYPES[dtype])


_FAR = (2**31 + 24, 2**32 + 8, 2**32 + 1)
# What a row of 1000 columns is for kernels of one CTA, of a cluster and of a grid, of several rows in a CTA, and in
# shared memory; and backward.
_FAR_CONFIGS = {
    "narrow": NormConfig(8, 4, 8, 16),
    "shared": NormConfig(64, 1, 8, 2, in_shared=True),
    "cluster": NormConfig(64, 1, 4, 2, 2, clusters=True),
    "grid": NormConfig(64, 1, 4, 2, 2),
    "general": None,
    "backward": NormConfig(64, 1, 8, 2, in_shared=True, stages=2),
    "general backward": None,
}


@pytest.mark.parametrize("name", _FAR_CONFIGS)
@pytest.mark.parametrize("stride", _FAR)
def test_rows_and_heads_farther_apart_than_32_bits_reach(stride, name, rng):
    config, rows, heads, hidden = _FAR_CONFIGS[name], 4, 3, 1000
    dtype = BFLOAT16 if name != "grid" else FLOAT16
    operator = "rms_norm_backward" if "backward" in name else "rms_norm"
    case = Case(rows * heads, hidden, dtype, None, dtype, operator=operator, dy=dtype if "backward" in name else None)
    given = calls.make_inputs(rng, case)
    size = dtype.bytes
    on = devices(90 if name != "grid" else 80, seeds=(), static="general" in name)
    with contextlib.nullcontext() if config is None else configured(operator, config):
        for shape, strides in (
            ((rows, hidden), (stride, 1)),
            # Far heads of rows that are near to each other, and the other way round.
            ((rows, heads, hidden), (2 * hidden, stride, 1)),
            ((rows, heads, hidden), (stride, 2 * hidden, 1)),
        ):
            reach = sum((extent - 1) * way for extent, way in zip(shape, strides, strict=True)) + 1
            count = math.prod(shape[:-1])
            near = {key: array[:count].reshape(shape) for key, array in given.items()}
            there = {
                key: np.lib.stride_tricks.as_strided(sparse(reach, dtype), shape, [way * size for way in strides])
                for key in (*given, "out")
            }
            for key, array in near.items():
                there[key][...] = array
            for device, backwards in itertools.product(on, (False, True)):
                way = slice(None, None, -1 if backwards else None)
                there["out"][...] = np.nan
                ours = {key: array[way] for key, array in near.items()}
                far = {key: array[way] for key, array in there.items()}
                with using(device):
                    found = calls.call(case, ours)["out"]
                    calls.call(case, {key: far[key] for key in given}, {"out": far["out"]})
                reference.assert_within(found, calls.expect(case, ours)["out"], dtype)
                np.testing.assert_array_equal(bits(far["out"]), bits(found))


# ---- Values that are no ordinary numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", (1, 3, 64, 129, 1000, 4096, 16385))
@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"])
def test_infinity_nan_and_zeros_stay_in_their_rows(hidden, operator, rng):
    dtype = FLOATS[hidden % 3]
    back = operator in BACKWARD
    case = Case(
        8, hidden, dtype, dtype, dtype, not back, operator, bias=None if back else dtype, mean=operator == "layer_norm",
        dy=dtype if back else None,
    )  # fmt: skip
    given = calls.make_inputs(rng, case)
    x = given["x"]
    # The last element too: where a row ends, loads differ.
    x[1, rng.integers(hidden)], x[2, -1] = np.inf, -np.inf
    x[3, rng.integers(hidden)], x[4, -1] = np.nan, np.nan
    x[5] = 0
    x[6] = -0.0
    expected = calls.expect(case, given)
    for device in (*devices(80, seeds=()), *devices(80, seeds=(), static=True)):
        calls.hold_within(case, run(device, case, given), expected, f" on {device!r}")


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_values_at_the_ends_of_the_types(static, rng):
    for device in devices(90, seeds=(), static=static):
        with using(device):
            y, rstd = rms_norm(np.zeros((3, 100), np.float32), eps=0.0, return_rstd=True)
            assert np.isnan(y).all() and np.isposinf(rstd).all(), "zero times infinity"
            x, weight = np.ones((2, 40), np.float32), np.full(40, 1e6, np.float32)
            weight[1::2] *= -1
            y = rms_norm(x, weight, out_dtype="float16")
            np.testing.assert_array_equal(y, np.sign(weight) * np.full((2, 40), np.inf))
            # Subnormals of each type, as inputs, as weights and as outputs.
            for dtype in FLOATS:
                kind = reference.NUMPY_TYPES[dtype]
                smallest = np.arange(1, 258, dtype=BITS[dtype.bytes])
                x = np.stack([smallest.view(kind), -smallest.view(kind), np.ones(257, kind)])
                weight = smallest[::-1].copy().view(kind)
                for eps in (1e-6, 1e-30):
                    reference.assert_close(rms_norm(x, eps=eps), reference.rms_norm(x, eps=eps)[0], dtype)
                    reference.assert_close(rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps)[0], dtype)


@pytest.mark.parametrize("exponent", [-130, -60, -20, 40, 55])
@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_tiny_and_huge_rows(static, exponent, rng):
    # Squares of up to 2^126 are no overflow; those below the smallest number vanish beside eps.
    for dtype in (FLOAT32, BFLOAT16):
        x = (rng.standard_normal((6, 257)) * 2.0**exponent).astype(reference.NUMPY_TYPES[dtype])
        for device in devices(90, seeds=(), static=static):
            with using(device):
                reference.assert_within(rms_norm(x), reference.forward(False, x, out=dtype)["out"], dtype)
                y = layer_norm(x, eps=1e-6)
            reference.assert_within(y, reference.forward(True, x, out=dtype)["out"], dtype)


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_eps_and_the_weights_offset_are_the_callers(static, rng):
    for dtype in FLOATS:
        x = reference.random_rows(rng, (9, 300), dtype)
        weight = reference.random_weight(rng, 300, dtype)
        for device in devices(90, seeds=(), static=static):
            with using(device):
                for eps, offset in itertools.product((0.0, 1e-6, 0.1, 3), (0.0, 1.0, -0.5, 0.1)):
                    y = rms_norm(x, weight, eps, weight_offset=offset)
                    expected = reference.forward(False, x, weight, None, eps, offset, out=dtype)["out"]
                    reference.assert_within(y, expected, dtype)
                np.testing.assert_array_equal(bits(rms_norm(x, weight_offset=1.0)), bits(rms_norm(x)))


def test_a_nan_in_the_weight_reaches_its_column_and_no_other(rng):
    case = Case(8, 1000, BFLOAT16, BFLOAT16, BFLOAT16, operator="layer_norm", bias=BFLOAT16)
    given = calls.make_inputs(rng, case)
    given["weight"][[0, 500, 999]] = np.nan
    given["bias"][[7, 998]] = np.nan
    for device in (*devices(90, seeds=()), *devices(90, seeds=(), static=True)):
        y = run(device, case, given)["out"]
        assert set(np.flatnonzero(np.isnan(y).any(axis=0))) == {0, 7, 500, 998, 999}
        reference.assert_within(y, calls.expect(case, given)["out"], BFLOAT16)


# ---- A row's bits do not depend on the others ----------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize(
    ("hidden", "architecture", "operator"),
    [
        (1, 80, "rms_norm"), (5, 120, "layer_norm_backward"), (64, 89, "add_layer_norm"),
        (129, 100, "rms_norm_backward"), (1000, 90, "layer_norm_backward"), (4097, 80, "layer_norm"),
        (65536, 80, "rms_norm"), (33_001, 90, "layer_norm_backward"),
    ],
)  # fmt: skip
def test_a_rows_bits_are_the_same_alone_and_among_many(hidden, architecture, operator, static, rng):
    dtype = FLOATS[hidden % 3]
    back = operator in BACKWARD
    case = Case(
        1, hidden, dtype, dtype, dtype, not back, operator, residual=dtype if operator.startswith("add") else None,
        dy=dtype if back else None, dweight=dtype if back else None,
    )  # fmt: skip
    probe = calls.make_inputs(rng, case)
    checked, last_in, shuffled = devices(architecture, static=static, multiprocessors=8)
    alone = run(checked, case, probe)
    for rows in (1, 2, 7, 129, 517):
        if rows * hidden > 1 << 18:
            continue
        among = case._replace(rows=rows)
        given = calls.make_inputs(rng, among) | {name: probe[name] for name in ("weight",)}
        places = sorted({0, 1 % rows, rows // 2, rows - 1, int(rng.integers(rows))})
        for name in given:
            if given[name].shape == among.shape:
                given[name][places] = probe[name][0]
        for device in (checked, last_in, shuffled) if rows * hidden < 1 << 17 else (last_in, shuffled):
            found = run(device, among, given)
            for name in set(found) - {"dweight"}:
                for place in places:
                    np.testing.assert_array_equal(
                        bits(found[name][place]), bits(alone[name][0]), err_msg=f"row {place} of {rows}, {device!r}"
                    )


@pytest.mark.parametrize("leading", [(0,), (0, 3), (3, 0, 2)])
def test_no_rows_give_an_empty_output_and_sums_of_zero(leading):
    for device in (SimulatedDevice(checked=True), SimulatedDevice(static=True)):
        x = np.zeros((*leading, 300), np.float16)
        with using(device):
            y, mean, rstd = layer_norm(x, return_mean=True, return_rstd=True)
            dx, dweight, dbias = calls.transformer_rtc.layer_norm_backward(x, x, np.ones(300, np.float16))
        assert (y.shape, y.dtype, rstd.shape, rstd.dtype) == ((*leading, 300), np.float16, leading, np.float32)
        assert mean.shape == leading and dx.shape == x.shape
        for gradient in (dweight, dbias):
            assert gradient.shape == (300,) and not gradient.any() and not np.signbit(gradient).any()
