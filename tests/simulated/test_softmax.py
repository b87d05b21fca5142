"""Softmax in the simulator: every way to hold a row, at every alignment, with masks, causal modes, infinities, NaN."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
import softmax_reference as expected
from reference import NUMPY_TYPES, U, assert_within
from softmax_calls import MASKS, at, bits, configured, hold, hold_same_bits, hold_what_took_no_part

import transformer_rtc
from transformer_rtc import (
    LaunchConfig,
    SimulatedDevice,
    _native,
    arrays,
    dispatch,
    log_softmax,
    log_softmax_backward,
    softmax,
    softmax_backward,
    using,
)
from transformer_rtc.errors import ArgumentError
from transformer_rtc.ops import softmax as module
from transformer_rtc.ops import softmax_kernels as kernels
from transformer_rtc.ops.softmax_kernels import BUCKETS, MaskGradientSpec, SoftmaxConfig
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, BOOL, FLOAT16, FLOAT32

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
BOTH = pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
# A row in a few threads, in a warp, in a CTA, in chunks, and in several CTAs with and without.
CONFIGS = {
    "few threads": SoftmaxConfig(2, 32, 8, 4),
    "warp": SoftmaxConfig(8, 16, 8, 2),
    "warps": SoftmaxConfig(64, 2, 8, 3),
    "four warps": SoftmaxConfig(128, 1, 8, 2),
    "chunks": SoftmaxConfig(64, 1, 8, 3, chunked=True),
    "CTAs": SoftmaxConfig(64, 1, 8, 2, 4, True),
    "chunks of CTAs": SoftmaxConfig(64, 1, 8, 1, 2, True, chunked=True),
    "staged": SoftmaxConfig(64, 1, 8, 1, staged=True),
    "staged by a warp": SoftmaxConfig(32, 1, 8, 1, staged=True),
    "staged by three warps": SoftmaxConfig(96, 1, 8, 1, staged=True),
    "staged by CTAs": SoftmaxConfig(64, 1, 8, 1, 2, True, staged=True),
    "in turn": SoftmaxConfig(64, 1, 8, 2, 4, True, in_turn=True),
}


def capacity(config: SoftmaxConfig, vector: int = 4) -> int:
    """Return the columns of the longest row."""
    if config.chunked or config.staged:
        return 1 << 30
    return config.threads_per_row * config.steps * config.ctas_per_row * vector


def simulated(architecture=90, static=False, checked=True, multiprocessors=4, **options) -> SimulatedDevice:
    return SimulatedDevice(architecture, checked=checked, static=static, multiprocessors=multiprocessors, **options)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch) -> None:
    """Have NaN in outputs, and in what launches leave for others, before anything is written."""
    empty = arrays._host_memory

    def filled(shape, dtype):
        made = empty(shape, dtype)
        made.reshape(-1).view(np.uint8).fill(0xFF)
        return made

    monkeypatch.setattr(arrays, "_host_memory", filled)


@pytest.fixture
def held() -> Iterator[Callable[[SoftmaxConfig], None]]:
    """Have rows divided by one configuration, and then by the next."""
    with contextlib.ExitStack() as stack:
        yield lambda config: stack.enter_context(configured(config))


# ---- Lengths, ways to hold a row, types ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 17, 64, 65, 127, 1000, 1023, 1024, 4097])
def test_every_length_is_within_the_bound(columns, dtype, static, rng):
    rows = 5 if columns > 600 else 37
    x, dy = (expected.drawn(rng, (rows, columns), dtype) for _ in range(2))
    with using(simulated(static=static)):
        hold(x, dy, dtype, scale=0.3)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_rows_of_a_thread_are_within_the_bound_wherever_they_lie(rows, dtype, rng):
    for columns, (offset, gap) in itertools.product(range(1, 34), ((0, 0), (1, 0), (0, 3), (8, 8))):
        if rows == 300 and columns % 8 != 1:
            continue
        x, dy = (expected.drawn(rng, (rows, columns), dtype) for _ in range(2))
        with using(simulated()):
            hold(at(x, offset, gap), at(dy, offset, gap), dtype, scale=-0.4)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("columns", [33, 40, 49, 57, 63, 64])
def test_rows_of_few_threads_are_within_the_bound_wherever_they_lie(columns, dtype, rng):
    for rows, (offset, gap) in itertools.product((1, 67), ((0, 0), (1, 0), (0, 3), (7, 8))):
        x, dy = (expected.drawn(rng, (rows, columns), dtype) for _ in range(2))
        with using(simulated()):
            hold(at(x, offset, gap), at(dy, offset, gap), dtype, scale=0.7)


@pytest.mark.parametrize("output", [BFLOAT16, FLOAT32], ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("columns", [1, 5, 8, 12, 17, 20, 24, 31, 32])
def test_rows_of_a_thread_are_written_wherever_the_output_lies_and_nothing_else(columns, output, rng):
    x, dy = (expected.drawn(rng, (37, columns), FLOAT16) for _ in range(2))
    found = expected.forward(x, 1.0, None, output)["y"]
    for offset, gap in ((0, 0), (1, 0), (0, 3), (8, 8), (4, -columns % 8 + 8)):
        y = at(np.zeros((37, columns), NUMPY_TYPES[output]), offset, gap)
        dx = at(np.zeros_like(y), offset + 2, gap)
        around = [np.lib.stride_tricks.as_strided(array[:, -1:], (36, gap + 1))[:, 1:] for array in (y, dx)]
        with using(simulated()):
            softmax(x, out=y)
            softmax_backward(dy, y, out=dx)
        assert_within(y, found, output, "y")
        assert_within(dx, expected.backward(dy, np.array(y), 1.0, None, False, output), output, "dx")
        assert all((between == 77).all() for between in around)


@pytest.mark.parametrize("columns", [3, 8, 17, 32])
def test_rows_of_a_thread_take_turns(columns, rng):
    # A multiprocessor has 2048 threads.
    for dtype, rows in itertools.product((FLOAT32, BFLOAT16), (2048, 4100, 6200)):
        x, dy = (expected.drawn(rng, (rows, columns), dtype) for _ in range(2))
        with using(simulated(multiprocessors=1)):
            hold(x, dy, dtype)


@pytest.mark.parametrize("columns", [17, 24, 31, 32])
def test_a_row_of_a_thread_has_the_same_bits_wherever_it_lies(columns, rng):
    x, dy = (expected.drawn(rng, (1, columns), BFLOAT16) for _ in range(2))
    with using(simulated()):
        hold_same_bits(x, dy, (0, 1, 2, 5, 7))


@pytest.mark.parametrize("columns", [17, 20, 32])
def test_rows_of_a_thread_may_be_of_heads_and_of_several_types(columns, rng):
    sink = np.zeros(9, np.float32)
    for input, output in itertools.permutations(FLOATS, 2):
        qkv = expected.drawn(rng, (9, 3, 4, columns), input)
        x, given = qkv[:, 1], expected.drawn(rng, (9, 4, columns), output)
        with using(simulated()):
            y, lse = softmax(x, sink=sink, out_dtype=output.name, return_lse=True)
            dx = softmax_backward(given, y, out_dtype=input.name)
        found = expected.forward(x, 1.0, None, output, None, sink)
        assert_within(y, found["y"], output, "y")
        assert_within(lse, found["lse"], FLOAT32, "lse")
        assert_within(dx, expected.backward(given, y, 1.0, None, False, input), input, "dx")


@pytest.mark.parametrize("columns", [16385, 50257, 131072])
def test_long_rows_are_shared_by_ctas(columns, rng):
    x, dy = (expected.drawn(rng, (2, columns), BFLOAT16) for _ in range(2))
    for architecture in (90, 80):
        with using(simulated(architecture, checked=False, multiprocessors=16)):
            hold(x, dy, BFLOAT16)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("columns", [1, 40, 383, 700, 1021, 3000])
def test_every_way_to_hold_a_row_is_within_the_bound_at_every_alignment(name, columns, held, rng):
    config = CONFIGS[name]
    for dtype, (offset, gap) in itertools.product((FLOAT32, BFLOAT16), ((0, 0), (3, 0), (0, 1), (8, 24))):
        vector = 16 // dtype.bytes
        if columns > capacity(config, vector):
            continue
        held(config)
        x, dy = (expected.drawn(rng, (5, columns), dtype) for _ in range(2))
        with using(simulated()):
            hold(at(x, offset, gap), at(dy, offset, gap), dtype, scale=-0.4)


@BOTH
def test_float32_is_within_two_ulp_and_one_more_for_each_unit_below_the_largest(static, rng):
    for columns, spread in itertools.product((10, 1000, 4097), (0.01, 1, 5, 30)):
        x = expected.drawn(rng, (4, columns), FLOAT32, spread)
        with using(simulated(static=static, checked=False)):
            y = softmax(x).astype(float)
        below = x.max(axis=-1, keepdims=True).astype(float) - x
        p = np.exp(-below)
        exact = p / p.sum(axis=-1, keepdims=True)
        far = exact < 2.0**-126  # no longer normal
        assert ((np.abs(y - exact) <= exact * (2 + below) * 2 * U) | far).all()
        assert np.abs(y.sum(axis=-1) - 1).max() <= 8 * U


@BOTH
@pytest.mark.parametrize("slope", [1e-6, 1e-3, 0.02, 0.3, 3.0])
def test_rows_that_grow_or_fall_are_within_the_bound(slope, static, rng):
    # What terms are about moves with each Vec, chunk or CTA, a little or by much, or never again.
    for columns, reverse in itertools.product((900, 40_000, 300_000), (1, -1)):
        x = (slope * np.arange(columns) + rng.standard_normal(columns) * slope).astype(np.float32)[None, ::reverse]
        x = np.ascontiguousarray(np.concatenate([x, x]))
        x[1, rng.integers(0, columns)] = x[1].max() + 3  # dominates its row
        with using(simulated(static=static, checked=False, multiprocessors=16)):
            hold(x, expected.drawn(rng, x.shape, FLOAT32), FLOAT32)


def test_full_slots_hold_a_row_at_every_alignment(held, rng):
    # As many columns as there are slots: those before the first one have the last ones.
    for offset in range(9):
        held(CONFIGS["warps"])
        x, dy = (expected.drawn(rng, (3, 64 * 3 * 8), BFLOAT16) for _ in range(2))
        with using(simulated()):
            hold(at(x, offset), at(dy, offset), BFLOAT16)


@BOTH
@pytest.mark.parametrize("columns", [20, 300, 3000, 70_000])
def test_scores_may_be_far_from_zero(columns, static, rng):
    # What rounding leaves of the largest one times the scale must not be in y, and equal ones have equal y.
    for dtype, (far, scale) in itertools.product(
        (FLOAT16, BFLOAT16), ((1000, 0.01), (-1000, 1.0), (30_000, 1e4), (-6e4, 1e30), (0, 1e-30), (1e-3, 1e37))
    ):
        x, dy = (expected.drawn(rng, (3, columns), dtype) for _ in range(2))
        x = (x.astype(np.float32) + np.float32(far)).astype(x.dtype)
        x[1, ::7] = x[1].max()
        x[2] = far
        with using(simulated(static=static, checked=False, multiprocessors=16)):
            hold(x, dy, dtype, scale)


@BOTH
@pytest.mark.parametrize("columns", [300, 3000])
def test_a_mask_of_floats_may_be_far_from_zero(columns, static, rng):
    # As of a query that takes no part, with scores so far apart that they are seen beside it.
    for dtype, mask_type, far in itertools.product(FLOATS, (FLOAT32, BFLOAT16), (-1e9, -3e7, 1e8)):
        x, dy = (expected.drawn(rng, (3, columns), dtype, 40) for _ in range(2))
        mask = np.full((3, columns), far, NUMPY_TYPES[mask_type])
        with using(simulated(static=static)):
            hold(x, dy, dtype, added=mask, mask=mask)


@BOTH
@pytest.mark.parametrize("columns", [20, 300, 5000, 70_000])
def test_an_element_alone_is_exactly_one(columns, static, rng):
    for dtype, scale in itertools.product(FLOATS, (0.7, 30.0, 1000.0)):
        x = np.full((40, columns), -np.inf, NUMPY_TYPES[dtype])
        places = np.arange(40), rng.integers(0, columns, 40)
        x[places] = expected.drawn(rng, (40,), dtype)
        with using(simulated(static=static, checked=False, multiprocessors=16)):
            y, log_y = softmax(x, scale=scale), log_softmax(x, scale=scale)
        np.testing.assert_array_equal(y[places].astype(float), 1)
        np.testing.assert_array_equal(log_y[places].astype(float), 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_wherever_it_lies(name, held, rng):
    config = CONFIGS[name]
    columns = min(1000, capacity(config))  # the output is float32
    held(config)
    x, dy = (expected.drawn(rng, (1, columns), BFLOAT16) for _ in range(2))
    with using(simulated(checked=False)):
        hold_same_bits(x, dy, (0, 1, 2, 5, 7))


@pytest.mark.parametrize(("x_type", "out"), list(itertools.permutations(FLOATS, 2)), ids=lambda dtype: dtype.symbol)
def test_the_output_s_type_is_chosen_apart(x_type, out, rng):
    x = expected.drawn(rng, (4, 300), x_type)
    with using(simulated()):
        y = softmax(x, out_dtype=out.name)
        assert_within(y, expected.forward(x, out=out)["y"], out)
        dy = expected.drawn(rng, (4, 300), x_type)
        dx = transformer_rtc.softmax_backward(dy, y)
        assert_within(dx, expected.backward(dy, y, out=out), out)


@BOTH
def test_in_place(static, rng):
    with using(simulated(static=static)):
        for columns, offset in ((17, 3), (100, 3), (1001, 3), (104, 0), (1000, 0), (2600, 0)):
            x = at(expected.drawn(rng, (5, columns), BFLOAT16), offset)
            found = expected.forward(x, out=BFLOAT16)["y"]
            assert softmax(x, out=x) is x
            assert_within(x, found, BFLOAT16)
            dy = expected.drawn(rng, x.shape, BFLOAT16)
            gradient = expected.backward(dy, x, out=BFLOAT16)
            assert_within(transformer_rtc.softmax_backward(dy, x, out=dy), gradient, BFLOAT16)


# One array at an address that no vector fits, or of another type, among arrays of one type.
@pytest.mark.parametrize(("operator", "names"), [("softmax", ("x", "out")), ("softmax_backward", ("dy", "y", "out"))])
def test_a_general_kernel_looks_at_every_array(operator, names, rng):
    drawn = {name: rng.random((20, 40)) for name in names}

    def found(types: dict[str, type], offsets: dict[str, int]) -> np.ndarray:
        arrays = {name: at(drawn[name].astype(types.get(name, np.float16)), offsets.get(name, 0)) for name in names}
        with using(simulated(static=True)):
            return getattr(transformer_rtc, operator)(**arrays)

    for name in names:
        for types, offsets in (({name: np.float32}, {}), ({}, {name: 1})):
            elsewhere = found(types, dict.fromkeys(names, 1))
            np.testing.assert_array_equal(found(types, offsets), elsewhere, f"{name}, {types}")


# ---- What does not take part -----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_mask_is_broadcast(shape, keeps, static, rng):
    x, dy = (expected.drawn(rng, (2, 3, 17, 40), FLOAT16) for _ in range(2))
    mask = rng.random(shape) < 0.3
    if mask.ndim > 1:
        mask[..., 0, :] = not keeps  # a row of which nothing takes part
    for given in (mask, mask.astype(np.uint8) * 7):
        with using(simulated(static=static)):
            within = expected.taking_part(x.shape, mask, keeps)
            hold(x, dy, FLOAT16, 0.5, within, mask=given, mask_keeps=keeps)


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["warps", "chunks", "staged", "staged by CTAs"])
def test_a_mask_is_broadcast_however_a_row_is_held(name, shape, held, rng):
    held(CONFIGS[name])
    for dtype, keeps in ((FLOAT32, False), (BFLOAT16, True)):
        x, dy = (expected.drawn(rng, (2, 3, 17, 40), dtype) for _ in range(2))
        mask = rng.random(shape) < 0.3
        with using(simulated()):
            within = expected.taking_part(x.shape, mask, keeps)
            given = mask * rng.integers(1, 256, shape, np.uint8)  # any bit says it
            hold(x, dy, dtype, 0.5, within, mask=given, mask_keeps=keeps)


def test_a_mask_may_have_gaps(rng):
    x, dy = (expected.drawn(rng, (2, 3, 5, 33), FLOAT32) for _ in range(2))
    mask = (rng.random((2, 3, 9, 50)) < 0.5)[:, ::2, 1:6, 3:36][:, :1]
    with using(simulated()):
        hold(x, dy, FLOAT32, within=expected.taking_part(x.shape, mask), mask=mask)


@BOTH
@pytest.mark.parametrize("added", FLOATS, ids=lambda dtype: dtype.symbol)
def test_a_mask_of_floats_is_added(added, static, rng):
    for x_type in (FLOAT32, BFLOAT16):
        x, dy = (expected.drawn(rng, (2, 3, 9, 133), x_type) for _ in range(2))
        mask = expected.drawn(rng, (3, 9, 133), added)
        mask[rng.random(mask.shape) < 0.3] = -np.inf
        mask[1, 4] = -np.inf
        within = np.broadcast_to(mask != -np.inf, x.shape)
        with using(simulated(static=static)):
            hold(x, dy, x_type, 0.6, within, added=mask, mask=mask)


@BOTH
def test_a_sink_is_one_more_term_of_the_sum(static, rng):
    for dtype, keys in itertools.product(FLOATS, (5, 400)):
        x, dy = (expected.drawn(rng, (2, 4, 6, keys), dtype) for _ in range(2))
        sink = np.array([0.5, -np.inf, 20, -3], NUMPY_TYPES[dtype])
        mask = rng.random((1, 1, 6, keys)) < 0.3
        mask[..., 2, :] = True
        within = expected.taking_part(x.shape, mask)
        with using(simulated(static=static)):
            hold(x, dy, dtype, 1.3, within, mask=mask, sink=sink)


def test_a_sink_of_rows_that_ctas_share(held, rng):
    # The last one makes y so small that 2^-24 of what terms are multiplied by has not all its digits.
    sink = np.array([3.0, 9.0, 80.0], np.float32)
    names = ("CTAs", "chunks of CTAs", "chunks", "staged", "staged by CTAs")
    for name, architecture in itertools.product(names, (90, 80)):
        held(CONFIGS[name])
        x, dy = (expected.drawn(rng, (3, 3, 1000), FLOAT32) for _ in range(2))
        with using(simulated(architecture, multiprocessors=8)):
            hold(x, dy, FLOAT32, sink=sink)


@BOTH
def test_a_sink_far_above_or_below_the_others(static, rng):
    # Where exponentials about the others' largest one are infinite, or 0.
    x, dy = (expected.drawn(rng, (2, 3, 5, 40), FLOAT32) for _ in range(2))
    with using(simulated(static=static)):
        hold(x, dy, FLOAT32, sink=np.array([200, -200, 95], np.float32))


@pytest.mark.parametrize("architecture", [90, 80])
@pytest.mark.parametrize("logarithm", [False, True])
def test_rows_that_come_before_their_turn_have_the_bits_of_others(logarithm, architecture, held, rng):
    # One multiprocessor holds 8 groups of CTAs: each has two or three turns. Rows that are no whole vectors, or not
    # aligned, do not come before theirs.
    backward = log_softmax_backward if logarithm else softmax_backward
    device = simulated(architecture, multiprocessors=1)
    for columns, dtype in itertools.product((1024, 1020, 1021, 516, 8), (FLOAT32, BFLOAT16)):
        gap = -columns % 8  # aligned, though they may be no whole vectors
        y, dy = (expected.drawn(rng, (20, columns), dtype) for _ in range(2))
        with using(device):
            y = (log_softmax if logarithm else softmax)(y)
        found = expected.backward(dy, y, out=dtype, logarithm=logarithm, scale=-0.3)
        results = []
        for name, offset, apart in (("CTAs", 0, 0), ("in turn", 0, 0), ("in turn", 0, gap), ("in turn", 3, 0)):
            held(CONFIGS[name])
            with using(device):
                results.append(bits(backward(at(dy, 0, apart), at(y, offset, apart), scale=-0.3)))
                given = dy.copy()
                assert backward(given, at(y, offset), scale=-0.3, out=given) is given
            assert_within(results[-1].view(dy.dtype), found, dtype)
            np.testing.assert_array_equal(bits(given), results[0])
            np.testing.assert_array_equal(results[-1], results[0])


@pytest.mark.parametrize("name", ["CTAs", "chunks of CTAs", "staged by CTAs", "in turn"])
def test_ctas_of_a_cooperative_grid_take_several_rows_in_turn(name, held, rng):
    # One multiprocessor holds 8 or 16 groups of CTAs.
    held(CONFIGS[name])
    x, dy = (expected.drawn(rng, (2, 20, 1000), FLOAT32) for _ in range(2))
    with using(simulated(80, multiprocessors=1)):
        hold(x, dy, FLOAT32, sink=np.array([3.0, 9.0], np.float32))


@BOTH
def test_a_sink_of_more_rows_than_threads_that_add_them_up(static, rng):
    x, dy = (expected.drawn(rng, (2, 2, 600, 5), FLOAT32) for _ in range(2))
    with using(simulated(static=static)):
        hold(x, dy, FLOAT32, sink=np.array([1.0, -1.0], np.float32))


@BOTH
@pytest.mark.parametrize("shape", [(5, 3, 1, 61), (3, 1, 7, 16), (4, 1, 1, 9)])
def test_one_query_or_one_head(shape, static, rng):
    x, dy = (expected.drawn(rng, shape, FLOAT32) for _ in range(2))
    mask = rng.random(shape) < 0.3
    sink = np.linspace(-1, 2, shape[1], dtype=np.float32)
    with using(simulated(static=static)):
        hold(
            x,
            dy,
            FLOAT32,
            within=expected.taking_part(shape, mask, causal="aligned"),
            mask=mask,
            sink=sink,
            causal="aligned",
        )


@BOTH
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (17, 129), (40, 9), (1, 50), (130, 130)])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_causal_modes(queries, keys, window, static, rng):
    for causal in ("aligned", "upper_triangular")[: 2 if queries == keys else 1]:
        x, dy = (expected.drawn(rng, (2, 2, queries, keys), BFLOAT16) for _ in range(2))
        within = expected.taking_part(x.shape, causal=causal, window=window)
        # What is excluded is not used.
        x[~within] = np.nan
        dy[~within] = np.nan
        with using(simulated(static=static)):
            hold(x, dy, BFLOAT16, 1.5, within, causal=causal, window=window)


# All that takes part is behind the first turn of a row's threads: in one, in two, and in the first Vec of the third.
@pytest.mark.parametrize("keys, window", [(4000, 1000), (4500, 2100), (4099, 2)])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_a_window_far_behind_the_first_columns_in_the_general_kernels(keys, window, dtype, rng):
    x, dy = (expected.drawn(rng, (2, 3, keys), dtype) for _ in range(2))
    mask = rng.random((3, keys)) < 0.4
    within = expected.taking_part(x.shape, mask, causal="aligned", window=window)
    x[~within] = np.nan
    dy[~within] = np.nan
    with using(simulated(static=True)):
        hold(x, dy, dtype, -0.7, within, mask=mask, causal="aligned", window=window)


# The rows, of an odd number of keys, begin anywhere.
@pytest.mark.parametrize("threads", [32, 96, 160, 512])
@pytest.mark.parametrize("window", [2, 1000, 2100])
def test_a_window_far_behind_the_first_columns_of_staged_rows(threads, window, held, rng):
    held(SoftmaxConfig(threads, 1, 8, 1, staged=True))
    for dtype in (BFLOAT16, FLOAT32):
        x, dy = (expected.drawn(rng, (3, 3, 4099), dtype) for _ in range(2))
        within = expected.taking_part(x.shape, causal="aligned", window=window)
        x[~within] = np.nan
        dy[~within] = np.nan
        with using(simulated()):
            hold(x, dy, dtype, 0.7, within, causal="aligned", window=window)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mask_and_a_causal_mode_however_a_row_is_held(name, held, rng):
    config = CONFIGS[name]
    keys = min(300, capacity(config)) - 1
    held(config)
    x, dy = (expected.drawn(rng, (2, 3, 21, keys), FLOAT32) for _ in range(2))
    mask = rng.random((2, 1, 21, keys)) < 0.4
    within = expected.taking_part(x.shape, mask, causal="aligned", window=keys // 2)
    with using(simulated()):
        hold(x, dy, FLOAT32, 0.7, within, mask=mask, causal="aligned", window=keys // 2)


def test_a_window_that_begins_far_behind_the_first_chunk():
    keys = 2**27 + 2**20  # the window begins further than bits can be counted: trtc::Vec::keep
    held = np.ones(keys + 8, np.float16)
    x = held[(3 - held.ctypes.data // 2) % 8 :][:keys].reshape(1, keys)
    with using(simulated(checked=False)):
        y = softmax(x, causal="aligned", window=1)
        dx = softmax_backward(x, x, causal="aligned", window=1)
    assert y[0, -1] == 1 and not y[0, :-1].any()
    assert not dx.any()


@BOTH
def test_infinities_and_nan(static, rng):
    for dtype, columns in itertools.product(FLOATS, (9, 700)):
        x = expected.drawn(rng, (7, columns), dtype)
        x[0] = -np.inf
        x[1, : columns // 2] = -np.inf
        x[2, 3] = np.inf
        x[3, 5] = np.nan
        x[4, 1], x[4, 2] = -np.inf, np.nan
        x[5, 1], x[5, 2] = np.inf, -np.inf
        for scale in (1.0, -0.5):  # what is -inf does not take part whatever the scale
            found = expected.forward(x, scale, out=dtype)
            with using(simulated(static=static)):
                y, lse = softmax(x, scale=scale, return_lse=True)
                log_y = log_softmax(x, scale=scale)
            assert_within(y, found["y"], dtype)
            assert_within(log_y, found["log_y"], dtype, "log_y")
            assert_within(lse, found["lse"], FLOAT32, "lse")
            assert (y[0] == 0).all() and lse[0] == -np.inf


def test_infinities_and_nan_where_a_thread_has_learnt_a_largest_before(rng):
    # The general kernel reads a long row once for the sum: a thread's later elements change what its earlier are about,
    # those of this Vec's block of 32 and, at `last`, those of the block before.
    threads, vector = 512, 8
    later, last = 5 * threads * vector, 32 * threads * vector
    for dtype in (FLOAT32, BFLOAT16):
        lowest = ml_dtypes.finfo(NUMPY_TYPES[dtype]).min
        x = expected.drawn(rng, (12, last + 100), dtype)
        x[0, last + 3] = np.inf
        x[1, last + 3] = np.nan
        x[2, 3], x[2, last + 3] = np.inf, 7
        x[3, 3], x[3, last + 3] = np.nan, 7
        x[4, 3], x[4, later + 3], x[4, last + 3] = np.nan, np.inf, 7
        x[5, :later], x[5, last:] = -np.inf, -np.inf
        x[6] = lowest
        x[7], x[7, last + 3] = lowest, 5
        x[8], x[8, 3] = -np.inf, lowest
        x[9] = -np.inf
        x[10, :vector] = np.nan  # a thread's first Vec: nothing of it is the largest
        x[11, later + 3], x[11, last + 3] = 15, 30
        found = expected.forward(x, out=dtype)
        with using(simulated(static=True, checked=False)):
            y, lse = softmax(x, return_lse=True)
            log_y = log_softmax(x)
        assert_within(y, found["y"], dtype)
        assert_within(log_y, found["log_y"], dtype, "log_y")
        assert_within(lse, found["lse"], FLOAT32, "lse")


@pytest.mark.parametrize("name", CONFIGS)
def test_infinities_and_nan_however_a_row_is_held(name, held, rng):
    columns = min(500, capacity(CONFIGS[name]))
    held(CONFIGS[name])
    for dtype, masked in itertools.product((FLOAT32, BFLOAT16), (False, True)):
        x = expected.drawn(rng, (6, columns), dtype)
        x[0] = -np.inf
        x[1, 2::3] = -np.inf
        x[2, 3] = np.inf
        x[3, 5] = np.nan
        x[4, 1], x[4, 2], x[4, 6] = -np.inf, np.nan, -np.inf
        mask = rng.random(x.shape) < 0.4
        mask[:, 2:6] = False
        within = ~mask if masked else None
        for scale in (1.5, 0.0, -0.7):
            found = expected.forward(x, scale, within, dtype)
            with using(simulated()):
                y, lse = softmax(x, scale=scale, return_lse=True, mask=mask if masked else None)
                log_y = log_softmax(x, scale=scale, mask=mask if masked else None)
            if masked:  # -infinity beside what is excluded takes no part either, in a row of NaN
                out = mask[4] | (x[4] == -np.inf)
                np.testing.assert_array_equal(np.isnan(y[4].astype(float)), ~out)
                np.testing.assert_array_equal(np.isnan(log_y[4].astype(float)), ~out)
                assert (y[4][out] == 0).all() and (log_y[4][out] == -np.inf).all()
            rows = [0, 1, 2, 3] if masked else [0, 1, 2, 3, 4, 5]
            for result, of in ((y, "y"), (log_y, "log_y"), (lse, "lse")):
                kept = type(found[of])(found[of].value[rows], found[of].bound[rows])
                assert_within(result[rows], kept, FLOAT32 if of == "lse" else dtype, of)


@BOTH
def test_masked_elements_are_zero_even_in_a_row_of_nan(static, rng):
    x = expected.drawn(rng, (3, 4, 50), FLOAT32)
    x[0, 1, 3], x[1, 2, 4] = np.nan, np.inf
    mask = rng.random(x.shape) < 0.5
    mask[0, 1, 3] = mask[1, 2, 4] = False
    with using(simulated(static=static)):
        y, log_y = softmax(x, mask=mask), log_softmax(x, mask=mask)
    assert (y[mask] == 0).all() and (log_y[mask] == -np.inf).all()
    assert np.isnan(y[0, 1][~mask[0, 1]]).all() and np.isnan(log_y[1, 2][~mask[1, 2]]).all()


@BOTH
def test_no_gradient_where_nothing_took_part(static, rng):
    x = expected.drawn(rng, (6, 90), FLOAT16)
    mask = rng.random(x.shape) < 0.5
    mask[2] = True
    with using(simulated(static=static)):
        for call in (softmax, log_softmax):
            back = getattr(transformer_rtc, f"{call.__name__}_backward")
            y = call(x, mask=mask)
            dy = expected.drawn(rng, x.shape, FLOAT16)
            dy[mask] = np.where(rng.random(mask.sum()) < 0.5, np.nan, np.inf)
            dx = back(dy, y)
            assert (dx[mask] == 0).all() and np.isfinite(dx).all()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_row_that_fills_its_slots_has_the_same_bits_beside_any_alignment(dtype, held, rng):
    config = CONFIGS["warps"]
    held(config)
    columns = capacity(config, 16 // dtype.bytes)
    with using(simulated()):
        y, dy = softmax(expected.drawn(rng, (3, columns), dtype)), expected.drawn(rng, (3, columns), dtype)
        y[:, 5:9], dy[:, 5:9] = 0, np.nan  # what took no part
        wanted = softmax_backward(dy, y)
        assert (wanted[:, 5:9] == 0).all() and np.isfinite(wanted.astype(np.float32)).all()
        for of_dy, of_y in ((1, 0), (0, 1), (1, 1), (3, 8)):
            found = softmax_backward(at(dy, of_dy), at(y, of_y))
            np.testing.assert_array_equal(bits(found), bits(wanted))
        # Few terms make a row's sum, which is about 1: its last bit shows in lse.
        x = expected.drawn(rng, (40, columns), dtype)
        x -= x.max(-1, keepdims=True)
        outputs = (*softmax(x, scale=2.0, return_lse=True), log_softmax(x, scale=2.0))
        for offset in (1, 3, 8):
            moved = at(x, offset)
            again = (*softmax(moved, scale=2.0, return_lse=True), log_softmax(moved, scale=2.0))
            for found, wanted in zip(again, outputs, strict=True):
                np.testing.assert_array_equal(bits(found), bits(wanted))


@pytest.mark.parametrize("name", ["warps", "staged", None])
def test_what_took_no_part_is_told_by_y_alone(name, held, rng):
    if name:
        held(CONFIGS[name])
    # Where y and what is made 0 both have 16 bits, two at a time.
    types = [(one, one, one) for one in FLOATS] + [(BFLOAT16, FLOAT32, FLOAT16), (FLOAT32, BFLOAT16, FLOAT16)]
    with using(simulated(static=name is None)):
        for of_y, of_dy, out in types:
            hold_what_took_no_part(37, of_y, of_dy, out, rng)


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_small_numbers_beside_parts_of_nothing(static, rng):
    # exp(88.8) is infinite: a CTA of which nothing takes part must not be weighed against the others.
    for architecture, size, columns in itertools.product((90, 80), (-200.0, -1000.0), (8, 40_000, 300_000)):
        x = np.full((1, 1, columns), -np.inf, np.float32)
        x[..., :5] = size + rng.standard_normal(5)
        with using(simulated(architecture, static=static, checked=False, multiprocessors=16)):
            for sink in (None, np.array([-150.0], np.float32)):
                if sink is not None:
                    x, given = x.reshape(1, 1, 1, columns), {"sink": sink}
                else:
                    given = {}
                found = expected.forward(x, sink=sink)
                y, lse = softmax(x, return_lse=True, **given)
                assert_within(y, found["y"], FLOAT32)
                assert_within(lse, found["lse"], FLOAT32, "lse")
                assert_within(log_softmax(x, **given), found["log_y"], FLOAT32, "log_y")


@BOTH
def test_a_sink_below_a_row_of_nothing(static):
    x = np.full((2, 1, 8), -np.inf, np.float32)
    with using(simulated(static=static)):
        y, lse = softmax(x[None], sink=np.array([-200, 90], np.float32), return_lse=True)
    assert (y == 0).all()
    np.testing.assert_array_equal(lse, [[[-200], [90]]])


@pytest.mark.parametrize("name", ["warps", "chunks", "staged", None])
def test_minus_infinity_takes_no_part_whatever_is_added(name, held):
    if name:
        held(CONFIGS[name])
    x = np.array([[1, 2, -np.inf, 3, -np.inf, 0, 0, 0]], np.float32)
    mask = np.array([[0, 0, np.inf, 0, np.nan, 0, 0, 0]], np.float32)
    with using(simulated(static=name is None)):
        np.testing.assert_array_equal(softmax(x, mask=mask), softmax(x))


@pytest.mark.parametrize("name", ["warps", "chunks", "staged", "staged by CTAs"])
def test_a_mask_of_more_bytes_than_a_vector_may_begin_where_its_memory_does(name, held, rng):
    held(CONFIGS[name])
    for offset in range(8):  # 32 bytes of the mask belong to 16 of x, of which `offset` elements are before the row
        x = at(expected.drawn(rng, (2, 304), BFLOAT16), offset, 8)[:1]
        mask = np.zeros((1, 304), np.float32)
        with using(simulated()):
            assert_within(softmax(x, mask=mask), expected.forward(x, out=BFLOAT16)["y"], BFLOAT16)


def test_excluded_elements_are_zeros_without_a_sign(held, rng):
    x = expected.drawn(rng, (40, 300), FLOAT32)
    mask = np.broadcast_to(np.arange(300) % 3 == 0, x.shape)
    for config in CONFIGS.values():
        if capacity(config) < x.shape[1]:
            continue
        held(config)
        with using(simulated(checked=False)):
            assert not np.signbit(softmax(x, mask=mask.copy())).any()


@pytest.mark.parametrize("name", ["chunks", "chunks of CTAs"])
def test_equal_largest_elements_that_later_chunks_exceed_have_the_same_bits_at_every_alignment(name, held, rng):
    held(CONFIGS[name])
    half = 1536
    drawn = (
        rng.choice(np.array([0, 0.7], np.float32), (6, half)),
        rng.choice(np.array([0, 0.9, 1.8], np.float32), (6, half)),
    )
    x = np.concatenate(drawn, axis=1)
    with using(simulated(checked=False)):
        first = softmax(at(x, 0))
        for offset in (1, 2, 3):
            np.testing.assert_array_equal(softmax(at(x, offset)), first)


@BOTH
def test_what_a_mask_of_floats_excludes_may_be_anything(static):
    x = np.zeros((1, 1, 10), np.float32)
    x[..., 7:] = np.nan, np.inf, -np.inf
    mask = np.zeros((1, 10), np.float32)
    mask[:, 7:] = -np.inf
    with using(simulated(static=static)):
        np.testing.assert_allclose(softmax(x, mask=mask)[0, 0], [1 / 7] * 7 + [0] * 3, 1e-6)


@BOTH
def test_minus_infinity_in_a_row_of_nan(static):
    # As torch has it where nothing is excluded; zero beside what is.
    x = np.array([[np.nan, -np.inf, 0, 1]], np.float32)
    with using(simulated(static=static)):
        assert np.isnan(softmax(x)).all() and np.isnan(log_softmax(x)).all()
        for mask in (np.zeros(4, bool), np.zeros(4, np.float32)):
            np.testing.assert_array_equal(softmax(x, mask=mask), [[np.nan, 0, np.nan, np.nan]])
            np.testing.assert_array_equal(log_softmax(x, mask=mask), [[np.nan, -np.inf, np.nan, np.nan]])


# ---- The gradient of a mask of floats --------------------------------------------------------------------------------

BACKWARD = {False: softmax_backward, True: log_softmax_backward}


def of_masked(rng, shape, mask_shape, dtype=FLOAT32, causal=None, window=None, logarithm=False):
    """Return dy, y and which elements take part; dy is no number where y says that it does not count, or beyond."""
    within = expected.taking_part(shape, rng.random(mask_shape) < 0.3, causal=causal, window=window)
    x = expected.drawn(rng, shape, FLOAT32)
    y = expected.forward(x, within=within)["log_y" if logarithm else "y"].value.astype(NUMPY_TYPES[dtype])
    dy = expected.drawn(rng, shape, dtype)
    dy[~within] = rng.choice([np.nan, np.inf, -np.inf], (~within).sum())
    y[~expected.taking_part(shape, causal=causal, window=window)] = np.nan
    return dy, y, within


def hold_gradient(dy, y, shape, within, dtype=FLOAT32, logarithm=False, **options) -> np.ndarray:
    """Hold the gradient of a mask of a shape against float64, with dx beside it."""
    mask = np.full(shape, np.nan, NUMPY_TYPES[dtype])  # its elements are not read
    dx, dmask = BACKWARD[logarithm](dy, y, mask=mask, out_dtype="float32", **options)
    assert dmask.shape == mask.shape and dmask.dtype == mask.dtype and dmask.flags.c_contiguous
    assert_within(dmask, expected.mask_gradient(dy, y, shape, within, logarithm), dtype, "dmask")
    assert_within(dx, expected.backward(dy, y, 1.0, within, logarithm), FLOAT32, "dx")
    return dmask


@BOTH
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("logarithm", [False, True])
def test_a_mask_s_gradient_is_added_up_over_what_it_was_broadcast_to(shape, logarithm, static, rng):
    for causal, window in ((None, None), ("aligned", None), ("aligned", 9)):
        dy, y, within = of_masked(rng, (2, 3, 17, 40), shape, FLOAT32, causal, window, logarithm)
        with using(simulated(static=static)):
            hold_gradient(dy, y, shape, within, FLOAT32, logarithm, causal=causal, window=window)


@BOTH
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ((5, 3, 1, 61), (5, 1, 1, 61)),  # one query
        ((5, 3, 1, 61), (3, 1, 61)),
        ((3, 1, 7, 16), (1, 1, 7, 16)),  # one head
        ((2, 3, 4, 5, 33), (2, 3, 1, 5, 33)),  # batches of two dimensions
        ((2, 3, 4, 5, 33), (4, 1, 33)),
        ((40, 33), (33,)),
        ((33,), (33,)),
        ((2, 3, 9, 1), (9, 1)),  # one key
        ((2, 3, 9, 1), (1,)),
    ],
    ids=str,
)
def test_a_mask_s_gradient_of_every_rank(rows, shape, static, rng):
    dy, y, within = of_masked(rng, rows, shape)
    with using(simulated(static=static)):
        hold_gradient(dy, y, shape, within)


@BOTH
@pytest.mark.parametrize("rows", [1, 15, 16, 31, 100, 513, 1100, 9000])
def test_a_mask_s_gradient_of_as_many_rows_as_groups_share(rows, static, rng):
    # Of one group, of several, of all, in one block and in several; of rows that are batches, heads and queries.
    for shape, of_mask in (((rows, 1, 3, 37), (3, 37)), ((1, rows, 2, 37), (2, 37)), ((rows, 37), (37,))):
        if rows > 2000 and len(shape) > 2:
            continue
        dy, y, within = of_masked(rng, shape, of_mask)
        with using(simulated(static=static, checked=rows < 1000)):
            hold_gradient(dy, y, of_mask, within)


@BOTH
def test_a_mask_s_gradient_in_every_type(static, rng):
    for y_type, dy_type, of_mask in list(itertools.product(FLOATS, repeat=3))[::2]:
        dy, y, within = of_masked(rng, (3, 2, 5, 45), (2, 5, 45), y_type)
        dy = dy.astype(NUMPY_TYPES[dy_type])
        with using(simulated(static=static)):
            hold_gradient(dy, y, (2, 5, 45), within, of_mask)


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("columns", [31, 64, 300, 5000, 70_000])
def test_a_mask_s_gradient_however_a_row_is_held(columns, logarithm, rng):
    dy, y, within = of_masked(rng, (3, 2, 4, columns), (4, columns), BFLOAT16, logarithm=logarithm)
    for architecture in (80, 90):
        with using(simulated(architecture, checked=columns < 1000, multiprocessors=16)):
            hold_gradient(dy, y, (4, columns), within, BFLOAT16, logarithm)


def test_a_mask_s_gradient_has_the_same_bits_wherever_the_rows_lie(rng):
    for columns in (40, 61):
        dy, y, within = of_masked(rng, (30, columns), (columns,), BFLOAT16, "aligned")
        found = []
        for (offset, gap), (of_dy, gap_of_dy) in itertools.product(((0, 0), (3, 0), (4, 3), (0, 27)), repeat=2):
            with using(simulated()):
                given = at(dy, of_dy, gap_of_dy), at(y, offset, gap)
                found.append(hold_gradient(*given, (columns,), within, causal="aligned"))
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)


@BOTH
def test_a_mask_s_gradient_of_matrices_with_gaps_between_them(static, rng):
    for of_mask in ((1, 3, 5, 40), (2, 1, 1, 40)):
        dy, y, within = of_masked(rng, (2, 3, 5, 40), of_mask, causal="aligned")
        given = (np.concatenate([array, array[:, :, :more]], axis=2)[:, :, :5] for array, more in ((dy, 2), (y, 1)))
        with using(simulated(static=static)):
            hold_gradient(*given, of_mask, within, causal="aligned")


def test_a_mask_s_gradient_takes_the_mask_s_shape_and_not_its_strides(rng):
    dy, y, _ = of_masked(rng, (2, 3, 5, 33), (33,))
    for mask in (
        np.zeros((2, 3, 9, 50), np.float16)[:, :, 1:6, 3:36],
        np.broadcast_to(np.float16(0), (2, 3, 5, 66))[..., ::2],
        np.zeros((5, 3, 2, 33), np.float16).transpose(2, 1, 0, 3)[:, ::-1],
        np.broadcast_to(np.zeros(33, np.float16), (5, 33)),
    ):
        if mask.strides[-1] != 2:
            continue
        with using(simulated()):
            _, found = softmax_backward(dy, y, mask=mask)
            _, dense = softmax_backward(dy, y, mask=np.ascontiguousarray(mask))
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, dense)


@BOTH
def test_the_gradients_of_a_mask_and_of_a_sink_together(static, rng):
    dy, y, within = of_masked(rng, (2, 3, 7, 40), (7, 40), causal="aligned")
    sink, lse = np.array([0.5, -np.inf, 2], np.float32), rng.standard_normal((2, 3, 7)).astype(np.float32)
    given = {"causal": "aligned", "sink": sink, "lse": lse, "mask": np.zeros((7, 40), np.float16)}
    with using(simulated(static=static)):
        dx, dsink, dmask = softmax_backward(dy, y, **given)
        alone = softmax_backward(dy, y, **given, return_dsink=False, return_dmask=False)
        np.testing.assert_array_equal(alone, dx)
        np.testing.assert_array_equal(softmax_backward(dy, y, **given, return_dmask=False)[1], dsink)
        np.testing.assert_array_equal(softmax_backward(dy, y, **given, return_dsink=False)[1], dmask)
    assert_within(dsink, expected.sink_gradient(dy, y, sink, lse, within), FLOAT32, "dsink")
    assert_within(dmask, expected.mask_gradient(dy, y, (7, 40), within), FLOAT16, "dmask")


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("queries", [5, 40])
def test_a_mask_s_gradient_of_more_rows_than_a_grid_has_ctas_for(queries, clusters, rng):
    # As many CTAs as a grid may have are too many here: fewer, of 32 groups of threads, or clusters of 256.
    keys = 45
    dy, y, within = of_masked(rng, (36, queries, keys), (queries, keys))
    spec = MaskGradientSpec(FLOAT32, FLOAT32, FLOAT32, False, False, clusters)
    dmask = np.full((queries, keys), 77, np.float32)
    sums = np.where(within, dy, 0).astype(np.float64) * y
    values = {
        "y": y, "dy": dy, "dmask": dmask, "row_sums": sums.sum(axis=-1).astype(np.float32),
        "y_outer_stride": keys, "y_inner_stride": 0, "dy_outer_stride": keys, "dy_inner_stride": 0,
        "dmask_head_stride": 0, "dmask_query_stride": keys, "mask_rows": queries,
        "columns": keys, "rows": 36 * queries, "inner_count": 1, "inner_magic": 0, "inner_shift": 0,
        "queries": queries, "queries_magic": 0, "queries_shift": 0,
        "matrix_heads": 36, "matrix_heads_magic": 0, "matrix_heads_shift": 0,
    }  # fmt: skip
    kernel = transformer_rtc.manager.get(spec, simulated())
    rule = spec.launch_rule
    of_all = [(-(-queries * sharers // 256), sharers) for sharers in (64, 128, 256) if clusters]  # of several CTAs each
    for ctas, sharers in [*itertools.product((1, 2, 7), (1, 2, 32)), *of_all]:
        dmask[...] = 77
        grid, cluster = (2, ctas * rule.ctas_per_row, 1), (1, rule.ctas_per_row, 1)
        config = LaunchConfig(grid, (rule.threads, 1, 1), cluster)
        kernel.launch(config, {**values, "sharers": sharers})
        assert_within(dmask, expected.mask_gradient(dy, y, dmask.shape, within), FLOAT32, "dmask")


@BOTH
@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8)])
def test_a_mask_s_gradient_of_no_rows_is_zero(shape, static):
    none = np.zeros(shape, np.float32)
    for of_mask in ((1, 1, shape[2], 8), (shape[1], 1, 8), (8,), shape):
        with using(simulated(static=static)):
            dx, dmask = softmax_backward(none, none, mask=np.ones(of_mask, np.float16))
        assert dx.shape == shape and dmask.shape == of_mask and dmask.dtype == np.float16 and (dmask == 0).all()


@pytest.mark.parametrize("logarithm", [False, True])
def test_what_has_no_mask_s_gradient_is_refused_by_name(logarithm):
    call = BACKWARD[logarithm]
    for rows in (2, 0):
        x, mask = np.zeros((rows, 3, 4, 8), np.float32), np.zeros((4, 8), np.float32)
        for given, message in (
            ({"mask": np.zeros((4, 8), bool)}, "only a mask of floats has a gradient; mask is bool"),
            ({"mask": np.zeros((4, 8), np.uint8)}, "only a mask of floats has a gradient; mask is uint8"),
            (
                {"mask": np.zeros((4, 8), bool), "return_dmask": False},
                "only a mask of floats has a gradient; mask is bool",
            ),
            ({"mask": np.zeros((4, 8), np.int8)}, "mask must be one of float32, float16, bfloat16, bool, uint8; it is"),
            ({"return_dmask": True}, "return_dmask needs mask; it is None"),
            ({"mask": mask[:, :7]}, r"mask must have the shape of dy, .*; it has \(4, 7\)"),
            ({"mask": mask, "return_dmask": 1}, "return_dmask must be True or False; it is 1"),
            ({"mask": np.zeros((4, 16), np.float32)[:, ::2]}, "mask must be contiguous in its last dimension"),
        ):
            with using(simulated()), pytest.raises(ArgumentError, match=f"^{call.__name__}: {message}"):
                call(x, x, **given)
    # Batches of which some are broadcast and others are not have no one stride, though the mask's own are 0.
    x, mask = np.zeros((2, 3, 2, 4, 8), np.float32), np.broadcast_to(np.float32(0), (2, 1, 2, 4, 8))
    mask = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), mask.shape, (0, 0, 0, 0, 4))
    with using(simulated()):
        assert call(x, x, mask=mask, return_dmask=False).shape == x.shape
        with pytest.raises(ArgumentError, match=f"^{call.__name__}: mask must have dimensions before the heads that"):
            call(x, x, mask=mask)


@pytest.mark.parametrize("name", ["dy", "y"])
def test_an_output_in_place_is_refused_where_the_rows_are_read_again(name, rng):
    dy, y, _ = of_masked(rng, (3, 4, 8), (4, 8))
    given, mask = {"dy": dy, "y": y}, np.zeros((4, 8), np.float32)
    with using(simulated()):
        before = given[name].copy()
        with pytest.raises(ArgumentError, match=f"^softmax_backward: out must not overlap {name}, which is read again"):
            softmax_backward(dy, y, mask=mask, out=given[name])
        np.testing.assert_array_equal(before, given[name])
        assert softmax_backward(dy, y, mask=mask, return_dmask=False, out=given[name]) is given[name]


# ---- Keys and arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["softmax", "softmax_backward"])
def test_few_kernels_serve_every_length(operator):
    options = itertools.product((FLOAT32, BFLOAT16), ARCHITECTURES, (None, BOOL, FLOAT32), (False, True))
    for dtype, architecture, mask, causal in options:
        arrays_of = {"y": dtype, "dy": dtype, "dsink": None} if "backward" in operator else {"x": dtype, "mask": mask}
        dtypes = {"out": dtype, "sink": None, "lse": None, **arrays_of}
        flags = frozenset({"causal"} if causal else ())
        limits = ARCHITECTURES[architecture]
        symbols: dict[str, int] = {}  # the fewest columns of each
        for columns in BUCKETS:
            request = dispatch.Request(operator, dtypes, columns, False, False, flags)
            ((spec, rule),) = module._FAMILY.specialise(request, limits)
            symbols.setdefault(spec.symbol, columns)
            config = spec.config
            slots = config.threads_per_row * config.steps * config.vector * config.ctas_per_row
            assert config.chunked or config.staged or slots >= columns
            assert (config.staged or config.takes_turns) == (rule.dynamic_shared_memory > 0)
            assert rule.dynamic_shared_memory <= limits.shared_memory_per_cta - 4096
            assert rule.threads % 32 == 0 and rule.threads <= config.threads <= 1024
            assert config.staged or rule.threads == config.threads
        # Rows that shared memory cannot hold have one more, on some devices from less than 1 Mi columns on.
        small = limits.shared_memory_per_cta < 128 * 1024
        assert len(symbols) <= 13 and sum(columns <= 1 << 20 for columns in symbols.values()) <= (13 if small else 12)


TABLES = {
    "forward": kernels._FORWARD_TABLE,
    "masked": kernels._FORWARD_MASKED_TABLE,
    "causal": kernels._FORWARD_CAUSAL_TABLE,
    "backward": kernels._BACKWARD_TABLE,
    "causal backward": kernels._BACKWARD_CAUSAL_TABLE,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_line_of_a_table_divides_rows_that_no_other_would_so(name, monkeypatch):
    table, backward = TABLES[name], "backward" in name
    devices = [
        limits._replace(max_cluster_size=size)
        for limits in ARCHITECTURES.values()
        for size in {limits.max_cluster_size, min(limits.max_cluster_size, 8), 1}
    ]

    def divisions(lines):
        monkeypatch.setattr(kernels, "_table", lambda *_: lines)
        return [
            kernels.configure(columns, (dtype,) * (2 + backward), (dtype,) * (1 + backward), limits, backward)
            for dtype, limits in itertools.product((BFLOAT16, FLOAT32), devices)
            for columns in BUCKETS
        ]

    found = divisions(table)
    assert [line for i, line in enumerate(table) if divisions(table[:i] + table[i + 1 :]) == found] == []


@pytest.mark.parametrize("operator", ["softmax", "softmax_backward"])
def test_a_shorter_row_has_no_more_ctas_where_there_are_no_clusters(operator):
    for limits, dtype, causal in itertools.product(ARCHITECTURES.values(), (FLOAT32, BFLOAT16), (False, True)):
        without, arrays_read = limits._replace(max_cluster_size=1), (dtype,) * (2 if "backward" in operator else 1)
        ctas = [
            kernels.configure(
                columns, (dtype, *arrays_read), arrays_read, without, backward="backward" in operator, causal=causal
            ).ctas_per_row
            for columns in BUCKETS
        ]
        assert ctas == sorted(ctas)


@pytest.mark.parametrize("operator", ["softmax_backward", "log_softmax_backward"])
def test_one_kernel_makes_a_gradient_of_every_length(operator):
    of_rows, others = dict.fromkeys(("dy", "y", "out"), BFLOAT16), dict.fromkeys(("mask", "dmask"), FLOAT16)
    dtypes = {**of_rows, **others, "sink": FLOAT32, "dsink": FLOAT32, "lse": FLOAT32}
    for flags in (frozenset(), frozenset({"causal"})):
        requests = [dispatch.Request(operator, dtypes, columns, False, False, flags) for columns in BUCKETS]
        stages = [module._FAMILY.specialise(request, ARCHITECTURES[90]) for request in requests]
        assert all(first.row_bytes == 4 and first.columns_per_cta == 0 for (_, first), *_ in stages)
        assert len({(of_sink[0].symbol, of_mask[0].symbol) for _, of_sink, of_mask in stages}) == 1
        general = [module._FAMILY.static(request) for request in requests]
        assert len({(of_sink[0].symbol, of_mask[0].symbol) for _, of_sink, of_mask in general}) == 1


def test_a_new_length_in_a_bucket_makes_no_plan(monkeypatch, rng):
    asked = []
    operator = dispatch.operators()["softmax"]
    plan = operator._plan
    made = dispatch.Operator("softmax", operator.family, operator.arguments, BUCKETS)
    try:
        monkeypatch.setattr(made, "_plan", None)
        native = _native.Operator(
            "softmax", dispatch.native_arguments(operator.arguments),
            lambda *request: asked.append(request[3]) or plan(*request), operator._check,
            lambda values: arrays.call(native, operator.arguments, values, dispatch._simulating_on_host),
            arrays.framework_of, dispatch._chosen, BUCKETS,
        )  # fmt: skip
        monkeypatch.setattr(module, "_softmax", native.entry())
        with using(simulated()):
            for columns in (65, 100, 256, 257, 100, 512):
                softmax(expected.drawn(rng, (2, columns), FLOAT32))
    finally:
        dispatch._operators["softmax"] = operator
    assert asked == [128, 256, 512]


@pytest.mark.parametrize("name", [name for name, made in dispatch.operators().items() if made.family is module._FAMILY])
def test_a_function_passes_each_argument_on_in_its_place(name, monkeypatch):
    call = getattr(transformer_rtc, name)
    named = {parameter: f"the {parameter}" for parameter in inspect.signature(call).parameters}
    x = np.zeros((2, 3, 4))
    given = {**named, "x": x, "y": x, "causal": "aligned", "window": 5, "mask_keeps": True}
    passed: list[object] = []
    monkeypatch.setattr(module, f"_{name}", lambda *arguments: passed.extend(arguments))
    call(**{parameter: given[parameter] for parameter in named})
    returned = {} if "backward" in name else {"lse": "the return_lse"}
    renamed = {
        **returned,
        "dsink": "the return_dsink",
        "dmask": "the return_dmask",
        "causal": True,
        "upper_triangular": False,
        "window": 5,
        "mask_keeps": True,
        "x": x,
        "y": x,
    }
    for argument, value in zip(dispatch.operators()[name].arguments, passed, strict=True):
        wanted = renamed.get(argument.name, f"the {argument.name}")
        assert value is wanted or value == wanted, argument.name


X = np.zeros((2, 3, 4, 8), np.float32)
REFUSED = {
    "an unknown mode": ({"causal": "lower"}, "causal must be 'upper_triangular', 'aligned' or None; it is 'lower'"),
    "more keys": (
        {"causal": "upper_triangular"},
        r"causal='upper_triangular' needs as many queries as keys; the shape of x is \(2, 3, 4, 8\)",
    ),
    "a window without a mode": ({"window": 3}, "window needs a causal mode; it is 3 and causal is None"),
    "a window of none": ({"causal": "aligned", "window": 0}, "window must be a number of keys of at least 1; it is 0"),
    "half a window": ({"causal": "aligned", "window": 0.5}, "window must be a number of keys of at least 1; it is 0.5"),
    "a true window": (
        {"causal": "aligned", "window": True},
        "window must be a number of keys of at least 1; it is True",
    ),
    "a mask of integers": ({"mask": np.zeros((4, 8), np.int8)}, "mask must be one of bool, uint8, float32, float16, b"),
    "a mask that adds what it keeps": (
        {"mask": np.zeros((4, 8), np.float32), "mask_keeps": True},
        "mask_keeps needs a mask of bool or uint8; it is",
    ),
    "no mask to keep by": ({"mask_keeps": True}, "mask_keeps needs a mask of bool or uint8; there is none"),
    "a sink of another number of heads": (
        {"sink": np.zeros(2, np.float32)},
        "sink must have one element for each",
    ),
    "a sink of each batch": ({"sink": np.zeros((2, 3), np.float32)}, r"sink must have one element for each head"),
    "a strided sink": ({"sink": np.zeros(6, np.float32)[::2]}, r"sink must be contiguous"),
    "a mask of fewer keys": (
        {"mask": np.zeros((4, 7), bool)},
        r"mask must have the shape of x, \(2, 3, 4, 8\), or one",
    ),
    "a mask of one key": ({"mask": np.zeros((4, 1), bool)}, r"mask must have the shape of x, .*; it has \(4, 1\)"),
    "a mask of more dimensions": ({"mask": np.zeros((1, 2, 3, 4, 8), bool)}, "mask must have the shape of x"),
    "a mask of strided keys": ({"mask": np.zeros((4, 16), bool)[:, ::2]}, "mask must be contiguous in its last dim"),
    "a mask that is overwritten": ({"mask": "out"}, "out must not overlap mask"),
    "a scale of nothing": ({"scale": float("nan")}, "scale must be finite; it is nan in float32"),
    "a scale beyond all floats": ({"scale": 10**400}, "scale must be finite in float32; it is 10000"),
    "an output of float64": (
        {"out_dtype": "float64"},
        "out_dtype must be one of float32, float16, bfloat16; it is 'float64'",
    ),
    "an output of bytes": ({"out_dtype": "int8"}, "out_dtype must be one of float32, float16, bfloat16; it is int8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(name):
    options, message = REFUSED[name]
    if isinstance(options.get("mask"), str):
        out = np.zeros_like(X)
        options = {"out": out, "mask": out.view(np.uint8).reshape(2, 3, 4, 32)[..., :8]}
    with using(simulated()), pytest.raises(ArgumentError, match=f"^(softmax: )?{message}"):
        softmax(X, **options)


def test_a_mask_of_some_batches_is_expanded_along_these_alone():
    x, mask = np.zeros((2, 5, 3, 4, 8), np.float32), np.ones((2, 1, 1, 4, 8), bool)
    message = r"mask must have dimensions before the heads that collapse.*contiguous array of \(2, 5, 1, 4, 8\)$"
    with using(simulated()):
        with pytest.raises(ArgumentError, match=message):
            softmax(x, mask=mask)
        with pytest.raises(ArgumentError, match=r"array of \(2, 5, 1, 1, 8\)$"):
            softmax(x, mask=np.ones((5, 1, 1, 8), bool))
        assert (softmax(x, mask=np.ones((2, 5, 1, 4, 8), bool)) == 0).all()


def test_a_sink_s_gradient_needs_the_sink_and_lse():
    lse, sink = np.zeros((2, 3, 4), np.float32), np.zeros(3, np.float32)
    with using(simulated()):
        with pytest.raises(ArgumentError, match=r"^softmax_backward: return_dsink needs sink and lse; lse is None"):
            transformer_rtc.softmax_backward(X, X, sink=sink)
        with pytest.raises(ArgumentError, match=r"^softmax_backward: return_dsink needs sink and lse; sink is None"):
            transformer_rtc.softmax_backward(X, X, lse=lse, return_dsink=True)
        assert transformer_rtc.softmax_backward(X, X, sink=sink, return_dsink=False).shape == X.shape
        none = np.zeros((2, 3, 0, 4), np.float32)
        dx, dsink = transformer_rtc.softmax_backward(none, none, sink=sink, lse=lse[:, :, :0])
    assert dx.shape == none.shape and (dsink == 0).all()


def test_a_row_alone_is_the_last_query(rng):
    x = expected.drawn(rng, (1, 40), FLOAT32)
    with using(simulated()):
        # Within the bound: causal rows are divided, and so summed, in another way.
        whole = expected.forward(x, 1.0, None, FLOAT32)["y"][0]
        assert_within(softmax(x[0], causal="aligned"), whole, FLOAT32, "y")
        y = softmax(x[0], causal="aligned", window=np.int64(7))
    assert (y[:-7] == 0).all() and (y[-7:] > 0).all()


def test_a_mask_whose_batches_have_two_strides_is_refused():
    x = np.zeros((2, 3, 2, 4, 8), np.float32)
    mask = np.zeros((2, 1, 2, 4, 8), bool)
    with using(simulated()), pytest.raises(ArgumentError, match=r"^softmax: mask must have dimensions before the"):
        softmax(x, mask=mask)


# ---- What is excluded, and small devices -----------------------------------------------------------------------------

READS_A_WINDOW = """
import ctypes, mmap
import numpy as np
from transformer_rtc import SimulatedDevice, softmax, softmax_backward, using

PAGE, KEYS, WINDOW = mmap.PAGESIZE, 65536, 64
libc = ctypes.CDLL(None, use_errno=True)

def unreadable_but_for_the_window():
    memory = mmap.mmap(-1, 4 * KEYS)
    row = np.frombuffer(memory, np.float32).reshape(1, KEYS)
    row[:] = np.linspace(0, 1, KEYS)
    readable = 4 * (KEYS - WINDOW) // PAGE * PAGE
    assert libc.mprotect(ctypes.c_void_p(row.ctypes.data), ctypes.c_size_t(readable), 0) == 0
    return row

with using(SimulatedDevice(static={static})):
    x = unreadable_but_for_the_window()
    y = softmax(x, causal="aligned", window=WINDOW)
    assert abs(y.sum() - 1) < 1e-6 and (y[0, -WINDOW:] > 0).all() and not y[0, :-WINDOW].any()
    dy, y = unreadable_but_for_the_window(), unreadable_but_for_the_window()
    dx = softmax_backward(dy, y, causal="aligned", window=WINDOW)
    assert dx[0, -WINDOW:].any() and not dx[0, :-WINDOW].any()
"""


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_no_page_of_keys_that_a_window_excludes_is_read(static):
    done = subprocess.run([sys.executable, "-c", READS_A_WINDOW.replace("{static}", str(static))], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_device_that_holds_no_cluster_makes_a_masks_gradient_by_single_ctas(rng):
    y = rng.random((2, 2, 3, 16), np.float32)
    mask = np.zeros((3, 16), np.float32)
    found = []
    for multiprocessors in (8, 1):
        with using(SimulatedDevice(120, multiprocessors=multiprocessors)):
            found.append(softmax_backward(y, y, mask=mask, return_dmask=True))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
