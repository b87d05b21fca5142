# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the norm family on the CPU, in checked mode, against float64.

What a row gives must depend on nothing else: every test that runs one case in several ways wants the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
import random
from typing import Any

import calls
import numpy as np
import pytest
import reference
from cases import (
    BACKWARD,
    CASES,
    DELAYED,
    FAMILY,
    FLOAT8,
    FORWARD,
    NORMS,
    Case,
    division_of,
    draw,
    features,
    layout_of,
)
from frameworks import bits
from norm_checks import covering, first_of
from rigs import (
    ALIGNED,
    EVERY_ARCHITECTURE,
    EVERY_ORDER,
    MISALIGNED,
    WITH_CLUSTERS,
    WITHOUT_CLUSTERS,
    assert_same_bits,
    configured,
    few,
    hold,
    run,
    simulated,
)

from transformer_rtc import LaunchConfig
from transformer_rtc.declaration import declaration_of, operator_names
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32, STATIC_ARCHITECTURES, DType

pytestmark = pytest.mark.usefixtures("kernels")
EACH = ("specialised", "general")


def divided(case: Case, config: NormConfig | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if config is None else configured(case.operator, config)


# ---- The table of cases --------------------------------------------------------------------------------------------


def _small(case: Case) -> Case:
    """Return a case of fewer rows than a GPU gets: what many rows can show, few of a small grid do."""
    return case.shorter(1 << 13, 37)


_LONG = 1 << 15


def _shrunk(case: Case, architecture: int) -> tuple[Case, NormConfig | None]:
    """Return a case of a row that is held as a long one is, by fewer threads and CTAs."""
    spec, _ = case.specialise(ARCHITECTURES[architecture])
    if case.hidden <= _LONG:
        return _small(case), None
    config = spec.config
    config = dataclasses.replace(
        config,
        threads_per_row=64,
        vectors_per_thread=min(config.vectors_per_thread, 2),
        ctas_per_row=min(config.ctas_per_row, 4),
    )
    capacity = config.ctas_per_row * config.chunk
    hidden = capacity * (min(getattr(spec, "chunks", 1), 3) - 1) + capacity // 2
    return _small(case._replace(hidden=hidden // 16 * 16 + case.hidden % 16)), config


def _ways() -> dict[str, tuple[Case, int]]:
    """Return the shortest case of each operator with each way to hold a row, on the architectures in turn."""
    found: dict[str, tuple[Case, int]] = {}
    shortest = sorted(CASES, key=lambda case: case.hidden)
    for (number, case), shift in itertools.product(enumerate(shortest), range(len(EVERY_ARCHITECTURE))):
        architecture = EVERY_ARCHITECTURE[(number + shift) % len(EVERY_ARCHITECTURE)]
        layout = layout_of(case, ARCHITECTURES[architecture])
        found.setdefault(f"{case.operator} {layout}".replace(" ", "-"), (case, architecture))
    return found


def _chosen() -> dict[str, tuple[Case, int]]:
    # Every type and option, every operator with every way to hold a row, and every division of a row that there is,
    # each on some architecture; and a size of TransformerEngine for each of its divisions.
    found: dict[str, tuple[Case, int]] = {}
    seen: set[tuple[Any, ...]] = set()
    for number, case in enumerate(reversed(CASES)):
        architecture = EVERY_ARCHITECTURE[number % len(EVERY_ARCHITECTURE)]
        limits = ARCHITECTURES[architecture]
        new = {*features(case), (layout_of(case, limits), case.operator), division_of(case, limits)}
        if not new <= seen and case.hidden < (50_000 if case.backward else 300_000):
            seen |= new
            found[f"sm_{architecture}-{case.name}"] = _small(case), architecture
    return found


WAYS, CHOSEN = _ways(), _chosen()


def test_the_cases_are_of_every_operator_of_the_family():
    family = {name for name in operator_names() if declaration_of(name).family is FAMILY}
    assert family == {case.operator for case in CASES} == set(NORMS)


def test_what_is_chosen_is_every_operator_type_option_and_layout():
    seen = {feature for case, _ in CHOSEN.values() for feature in features(case)}
    assert seen == {feature for case in CASES for feature in features(case)}
    ways = {(case.operator, layout_of(case, ARCHITECTURES[on])) for case, on in WAYS.values()}
    assert ways == {
        (case.operator, layout_of(case, limits)) for case in CASES for limits in STATIC_ARCHITECTURES.values()
    }
    layouts = ("warps", "shared", "padded", "shared cluster", "shared grid", "padded cluster", "padded grid")
    assert ways >= {*itertools.product(NORMS, layouts), *itertools.product(FORWARD, ("registers", "chunked grid"))}
    assert ways >= set(itertools.product(("rms_norm", "layer_norm"), ("in turn grid", "together cluster")))


@pytest.mark.parametrize("name", WAYS)
def test_every_operator_is_within_the_bound_however_its_rows_are_held(name, rng):
    case, architecture = WAYS[name]
    small, config = _shrunk(case, architecture)
    if config is not None:
        (spec, _), *_ = small.stages(ARCHITECTURES[architecture], config)
        assert ("chunked" in name) == (getattr(spec, "chunks", 1) > 1)
    with divided(small, config):
        hold(simulated(architecture), small, rng)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHOSEN)
def test_every_case_is_within_the_bound_and_has_the_same_bits_in_every_order(name, rng):
    case, architecture = CHOSEN[name]
    # What checked mode sees, it sees in shorter rows.
    orders = EVERY_ORDER if case.hidden <= 1 << 14 else EVERY_ORDER[1:]
    hold(simulated(architecture, orders, checked=case.hidden < 1 << 16), case, rng)


@pytest.mark.thorough(share=0.1)
@pytest.mark.parametrize("name", CHOSEN)
def test_fast_mode_gives_the_bits_of_checked_mode(name, rng):
    case, architecture = CHOSEN[name]
    modes = (True, False) if case.hidden < 1 << 16 else (False,)
    hold([rig for checked in modes for rig in simulated(architecture, checked=checked)], case, rng)


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


GENERAL = {case.name: case for case in _general()}


@pytest.mark.parametrize("name", first_of(list(GENERAL), 16))
def test_the_general_kernels_are_within_the_bound(name, rng):
    # Rows of one type that are aligned are read in another way.
    case = GENERAL[name]
    layouts = (ALIGNED, MISALIGNED) if case.hidden % 8 == 0 else (MISALIGNED,)
    hold(simulated(90, EVERY_ORDER[:2], static=True), case, rng, layouts)


@pytest.mark.thorough
def test_the_general_kernels_run_on_an_architecture_without_clusters(rng):
    case = Case(3, 1500, FLOAT32, FLOAT16, FLOAT8[0], operator="layer_norm", bias=FLOAT32, scaling=DELAYED)
    (rig,) = simulated(static=True)
    rig.implementation = dataclasses.replace(rig.implementation, architecture=80)
    hold([rig], case, rng)


@pytest.mark.parametrize(
    ("hidden", "operator"),
    first_of(list(itertools.product([7, 1000, 16384], ["layer_norm_backward", "rms_norm", "layer_norm"])), share=0.4),
)
def test_every_architecture_gives_the_same_bits_where_a_row_is_one_ctas(hidden, operator, rng):
    case = Case(3, hidden, BFLOAT16, FLOAT32, BFLOAT16, operator in FORWARD, operator)
    by_division: dict[Any, list[int]] = {}
    for architecture, limits in STATIC_ARCHITECTURES.items():
        by_division.setdefault(case.specialise(limits)[0].config, []).append(architecture)
    same = max(by_division.values(), key=len)
    assert len(same) >= 2
    hold([rig for architecture in same for rig in simulated(architecture)], case, rng)


# ---- Configurations that only small rows can try -------------------------------------------------------------------

# (CTAs of a row, threads of each, rows of a CTA, vector, steps, in shared memory, chunks, how far the last is filled).
AT_ONCE = (
    (1, 1, 64, 1, 1, False, 1, "whole"), (1, 1, 32, 2, 3, False, 3, "one"), (1, 2, 48, 4, 1, False, 4, "less_one"),
    (1, 4, 24, 8, 2, False, 1, "less_one"), (1, 8, 12, 2, 5, False, 3, "half"), (1, 16, 6, 4, 7, False, 2, "one"),
    (1, 32, 3, 8, 1, False, 4, "whole"), (1, 32, 1, 8, 4, False, 3, "less_one"), (1, 32, 8, 1, 6, False, 5, "half"),
    (1, 64, 3, 4, 2, False, 3, "whole"), (1, 96, 2, 8, 3, False, 1, "half"), (1, 160, 1, 2, 8, False, 3, "one"),
    (1, 288, 1, 4, 1, False, 3, "less_one"), (1, 544, 1, 8, 1, False, 1, "less_one"),
    (1, 1024, 1, 1, 1, False, 5, "half"), (1, 32, 1, 8, 2, True, 1, "whole"), (1, 64, 1, 4, 2, True, 1, "less_one"),
    (1, 96, 1, 8, 3, True, 1, "half"), (1, 128, 1, 8, 4, True, 1, "one"), (1, 160, 1, 8, 5, True, 1, "whole"),
    (1, 224, 1, 4, 6, True, 1, "less_one"), (1, 512, 1, 8, 7, True, 1, "half"),
    (1, 1024, 1, 4, 8, True, 1, "less_one"), (2, 64, 1, 8, 1, False, 1, "whole"), (2, 64, 1, 8, 2, False, 1, "whole"),
    (2, 96, 1, 4, 2, True, 1, "less_one"), (2, 64, 1, 2, 3, False, 3, "one"), (4, 64, 1, 4, 1, False, 5, "half"),
    (4, 160, 1, 8, 8, True, 1, "half"), (4, 256, 1, 8, 4, False, 3, "whole"), (8, 96, 1, 8, 2, True, 1, "one"),
    (8, 96, 1, 4, 5, True, 1, "whole"), (8, 64, 1, 8, 4, False, 4, "less_one"),
    (16, 96, 1, 4, 6, True, 1, "less_one"), (16, 64, 1, 8, 8, True, 1, "half"), (16, 64, 1, 8, 4, False, 3, "one"),
    (8, 544, 1, 1, 1, False, 2, "half"),
)  # fmt: skip
# Backward: (CTAs of a row, threads of each, rows of a CTA, vector, steps, stages, how far the row is filled).
PERSISTENT = (
    (1, 1, 32, 1, 1, 4, "whole"), (1, 2, 16, 8, 2, 3, "less_one"), (1, 8, 12, 4, 3, 2, "half"),
    (1, 32, 3, 8, 2, 1, "whole"), (1, 32, 8, 2, 5, 3, "one"), (1, 64, 1, 8, 2, 3, "whole"),
    (1, 96, 1, 4, 3, 2, "less_one"), (1, 160, 1, 2, 4, 1, "half"), (1, 544, 1, 8, 1, 4, "less_one"),
    (1, 1024, 1, 4, 2, 2, "whole"), (2, 64, 1, 8, 2, 3, "whole"), (2, 96, 1, 4, 3, 2, "less_one"),
    (4, 64, 1, 2, 5, 1, "half"), (8, 96, 1, 8, 2, 4, "less_one"), (16, 64, 1, 4, 1, 3, "half"),
)  # fmt: skip


def _shaped(number: int, backward: bool, config: NormConfig, chunks: int, filled: str) -> tuple[Case, NormConfig]:
    """Return a case of drawn types and options, whose rows that configuration divides, with vectors of its types."""
    case = draw(1, backward, random.Random(number))
    of_rows = [dtype for name, dtype in case.types.items() if dtype and calls.shape_of(case, name) == case.shape]
    vector = min(config.vec_size, 16 // max(dtype.bytes for dtype in of_rows))
    if config.in_shared:  # no copy to shared memory is shorter
        brought = [case.types[name] for name in ("dy", "x", "residual", "dresidual") if case.types.get(name)]
        vector = max(vector, 4 // min(dtype.bytes for dtype in brought))
    capacity = config.ctas_per_row * config.threads_per_row * vector * config.vectors_per_thread
    last = {"whole": capacity, "less_one": capacity - 1, "half": capacity // 2 + 1, "one": 1}[filled]
    hidden = capacity * (chunks - 1) + last
    alone = config.stages > 0 and config.rows_per_cta == 1
    config = dataclasses.replace(config, vec_size=vector, bulk=alone and number % 2 == 0)
    heads = max(1, case.heads)
    return case._replace(rows=(3 * config.rows_per_cta + heads) // heads * heads, hidden=hidden, margin=0), config


def _all_shaped() -> dict[str, tuple[Case, NormConfig]]:
    found = []
    for number, (ctas, *divided_by, in_shared, chunks, filled) in enumerate(AT_ONCE):
        config = NormConfig(*divided_by, ctas, in_shared=in_shared)
        found.append(_shaped(number, False, config, chunks, filled))
    for number, (ctas, *divided_by, stages, filled) in enumerate(PERSISTENT):
        config = NormConfig(*divided_by, ctas, in_shared=True, stages=stages)
        found.append(_shaped(number, True, config, 1, filled))
    return {f"{config.symbol}-{case.name}": (case, config) for case, config in found}


SHAPED = _all_shaped()
SMALL = {name: shaped for name, shaped in SHAPED.items() if shaped[1].ctas_per_row == 1}
SHARED = {name: shaped for name, shaped in SHAPED.items() if shaped[1].ctas_per_row > 1}


def _mixed(names: Any) -> list[str]:
    """Return names in an order in which forward and backward, and short and long ones, are mixed."""
    return sorted(names, key=lambda name: list(SHAPED).index(name) * 7 % len(SHAPED))


def stages_of(case: Case, config: NormConfig, architecture: int) -> Any:
    return case.stages(ARCHITECTURES[architecture], config)


@pytest.mark.parametrize("name", first_of(_mixed(SMALL), 3, share=0.5))
def test_one_cta_with_any_number_of_chunks_steps_warps_and_rows(name, rng):
    case, config = SMALL[name]
    # Rows in shared memory are longer than some architectures have.
    able = [
        architecture
        for architecture, limits in STATIC_ARCHITECTURES.items()
        if stages_of(case, config, architecture)[0][1].dynamic_shared_memory + 2048 <= limits.shared_memory_per_cta
    ]
    architecture = able[list(SMALL).index(name) % len(able)]
    # Backward, two groups or so take all rows in turn.
    with configured(case.operator, config):
        hold(simulated(architecture, EVERY_ORDER, multiprocessors=1), case, rng, (ALIGNED, MISALIGNED))


@pytest.mark.parametrize("name", first_of(_mixed(SHARED), 2, share=0.5))
def test_ctas_that_share_a_row_give_the_same_bits_in_a_cluster_and_in_a_grid(name, kernels, rng):
    case, config = SHARED[name]
    turn = list(SHARED).index(name)
    in_grid = (*WITHOUT_CLUSTERS, *WITH_CLUSTERS)[turn % len(EVERY_ARCHITECTURE)]
    able = [
        architecture for architecture in WITH_CLUSTERS
        if ARCHITECTURES[architecture].max_cluster_size >= config.ctas_per_row
    ]  # fmt: skip
    heads = max(1, case.heads)
    given = calls.make_inputs(rng, case._replace(rows=heads))
    answers = []
    for architecture, clusters in ((able[turn % len(able)], True), (in_grid, False)):
        ours = dataclasses.replace(config, clusters=clusters)
        spec, rule = stages_of(case, ours, architecture)[0]
        multiprocessors = few(architecture, rule)
        on = simulated(architecture, EVERY_ORDER, multiprocessors=multiprocessors)
        resident = multiprocessors * kernels.get(spec, on[0].implementation).max_active_ctas(
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
    for rig in simulated(80, EVERY_ORDER):
        results = {"out": np.full_like(given["x"], np.nan)}
        results |= {name: np.full(rows, np.nan, np.float32) for name in ("mean", "rstd")}
        workspace = np.zeros(rule.workspace_bytes, np.uint8)
        kernels.get(spec, rig.implementation).launch(
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
    first_of(
        [
            (89, 2000, "layer_norm_backward", _IN_GRID),
            (80, 257, "rms_norm", None),
            (80, 33_000, "layer_norm", None),
            (90, 33_000, "rms_norm", None),
            (120, 65_537, "layer_norm", None),
            (90, 1000, "layer_norm_backward", None),
            (100, 2000, "rms_norm_backward", _IN_CLUSTER),
        ],
        share=0.5,
    ),
)
def test_twenty_random_orders(architecture, hidden, operator, config, rng):
    weights = BFLOAT16 if operator in BACKWARD else None
    case = Case(23, hidden, FLOAT32, BFLOAT16, FLOAT16, True, operator, dweight=weights, dbias=weights)
    # Fewer multiprocessors than rows: one group has several. Fast mode, as this is about orders alone.
    on = simulated(architecture, EVERY_ORDER, range(20), multiprocessors=2 if config else 8, checked=False)
    with divided(case, config):
        hold(on, case.shorter(1 << 18), rng)


# ---- Where rows lie ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("name", "stride"), covering(tuple(_FAR_CONFIGS), _FAR, share=0.5))
def test_rows_and_heads_farther_apart_than_32_bits_reach(stride, name, rng):
    config, rows, heads, hidden = _FAR_CONFIGS[name], 4, 3, 1000
    dtype = BFLOAT16 if name != "grid" else FLOAT16
    operator = "rms_norm_backward" if "backward" in name else "rms_norm"
    case = Case(rows * heads, hidden, dtype, None, dtype, operator=operator, dy=dtype if "backward" in name else None)
    given = calls.make_inputs(rng, case)
    size = dtype.bytes
    (rig,) = simulated(90 if name != "grid" else 80, static="general" in name)
    with divided(case, config):
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
            for backwards in (False, True):
                way = slice(None, None, -1 if backwards else None)
                there["out"][...] = np.nan
                ours = {key: array[way] for key, array in near.items()}
                far = {key: array[way] for key, array in there.items()}
                found = rig.call(case, ours)["out"]
                rig.call(case, {key: far[key] for key in given}, {"out": far["out"]})
                reference.assert_within(found, calls.expect(case, ours)["out"], dtype)
                np.testing.assert_array_equal(bits(far["out"]), bits(found))
