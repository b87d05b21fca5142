# SPDX-License-Identifier: Apache-2.0
"""Masks, causal modes and sinks of softmax, and their gradients, in the simulator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import softmax_checks as checks
import softmax_reference as expected
from norm_checks import covering
from processes import output, shared
from reference import assert_within
from softmax_checks import (
    CHOSEN,
    DIVIDED,
    FLOATS,
    MASKS,
    at,
    call,
    calls_of,
    held,
    hold_drawn,
    hold_gradient,
    simulated,
)

from transformer_rtc import LaunchConfig
from transformer_rtc.errors import ArgumentError
from transformer_rtc.ops.softmax.config import SoftmaxConfig
from transformer_rtc.ops.softmax.kernels import MaskGradientSpec
from transformer_rtc.spec import BFLOAT16, FLOAT32

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")
poisoned = checks.poisoned
SOME = ("staged", "warps", "chunks", "staged by CTAs")
OF_SHARED = [way for way in DIVIDED if "chunks" in way or "CTAs" in way or way == "staged"]
BOTH = (False, True)


def hold_mask_of_more_bytes(on, rng) -> None:
    """Hold a mask whose vectors, longer than those of x, would begin before its memory does."""
    x, mask = expected.drawn(rng, (1, 304), BFLOAT16), np.zeros((1, 304), np.float32)
    for offset in range(8):  # 32 bytes of the mask belong to 16 of x, of which `offset` elements are before the row
        y = call(on, "softmax", at(on, x, offset), mask=mask)
        assert_within(y, expected.forward(x, out=BFLOAT16)["y"], BFLOAT16)


def hold_mask_and_causal(on, rng, keys=31) -> None:
    mask = rng.random((2, 1, 21, keys)) < 0.4
    hold_drawn(on, rng, (2, 3, 21, keys), FLOAT32, 0.7, mask=mask, causal="aligned", window=keys // 2)


def hold_far_window(on, rng, keys, window, dtype) -> None:
    """Hold what takes part far behind a row's first turn of its threads: in one, two, or the third's first Vec."""
    mask = rng.random((3, keys)) < 0.4
    hold_drawn(on, rng, (2, 3, keys), dtype, -0.7, mask=mask, causal="aligned", window=window)


def hold_sink_of_shared_rows(on, rng) -> None:
    # The last one makes y so small that 2^-24 of what terms are multiplied by has not all its digits.
    hold_drawn(on, rng, (3, 20, 1000), FLOAT32, sink=np.array([3.0, 9.0, 80.0], np.float32))


def hold_gradient_of_a_region(on, rng, of_mask, logarithm, window) -> None:
    region = {} if window == 0 else {"causal": "aligned", "window": window}
    hold_gradient(on, rng, ((2, 3, 17, 40), of_mask), logarithm=logarithm, **region)


def hold_gradient_of_rows(on, rng, rows, kind) -> None:
    """Hold rows that are batches, heads or queries: of one group, of several, of all, in one block and in several."""
    of = {"batches": ((rows, 1, 3, 37), (3, 37)), "heads": ((1, rows, 2, 37), (2, 37)), "queries": ((rows, 37), (37,))}
    hold_gradient(on, rng, of[kind])


def hold_gradient_of_types(on, rng, *types) -> None:
    hold_gradient(on, rng, ((3, 2, 5, 45), (2, 5, 45)), types)


def hold_gradient_of_length(on, rng, columns, logarithm) -> None:
    hold_gradient(on, rng, ((3, 2, 4, columns), (4, columns)), (BFLOAT16,) * 3, logarithm)


def hold_gradient_anywhere(on, rng, shapes) -> None:
    """Hold it wherever rows lie: behind an address, with elements between them, and rows between their matrices."""
    lies = [(0, 0), (3, 0), (4, 3), (0, 27), *([(0, 0, 2), (0, 0, 1)] if len(shapes[0]) > 2 else [])]
    lies = list(itertools.product(lies, repeat=2))
    hold_gradient(on, rng, shapes, (BFLOAT16, BFLOAT16, FLOAT32), lies=lies, causal="aligned")


def hold_gradient_of_no_rows(on, rng, shape) -> None:
    none = np.zeros(shape, np.float32)
    for of_mask in ((1, 1, shape[2], 8), (shape[1], 1, 8), (8,), shape):
        dx, dmask = call(on, "softmax_backward", none, none, mask=np.ones(of_mask, np.float16))
        assert dx.shape == shape and dmask.shape == of_mask and dmask.dtype == np.float16 and (dmask == 0).all()
    if shape[2] == 0:
        lse, sink = np.zeros(shape[:3], np.float32), np.zeros(shape[1], np.float32)
        dx, dsink = call(on, "softmax_backward", none, none, sink=sink, lse=lse)
        assert dx.shape == shape and (dsink == 0).all()


def hold_gradients_alone(on, rng) -> None:
    """Hold the gradients of a mask and of a sink to what they are whatever else is asked for."""
    dy, y = (rng.random((2, 3, 7, 40), np.float32) for _ in range(2))
    sink, lse = np.array([0.5, -np.inf, 2], np.float32), rng.standard_normal((2, 3, 7)).astype(np.float32)
    given = {"causal": "aligned", "sink": sink, "lse": lse, "mask": np.zeros((7, 40), np.float32)}
    everything = call(on, "softmax_backward", dy, y, **given)
    for asked in itertools.product(BOTH, repeat=2):
        made = call(on, "softmax_backward", dy, y, **given, return_dsink=asked[0], return_dmask=asked[1])
        wanted = [everything[0], *itertools.compress(everything[1:], asked)]
        for one, other in zip(made if any(asked) else [made], wanted, strict=True):
            np.testing.assert_array_equal(one, other)


SHAPES = ((33, 33), (17, 129), (40, 9), (1, 50), (130, 130))
ROWS = (100, 1, 15, 16, 31, 513, 1100, 9000)
PLACES = (((30, 61), (61,)), ((2, 3, 5, 40), (1, 3, 5, 40)), ((30, 40), (40,)), ((2, 3, 5, 40), (2, 1, 1, 40)))
CALLS = [
    *calls_of(checks.hold_mask, MASKS, [True, False], ways=("general", *SOME, CHOSEN), first=1, share=0.2),
    *calls_of(checks.hold_added_mask, [133], FLOATS[::-1], [FLOAT32, BFLOAT16], first=1, share=0.5),
    *calls_of(hold_mask_of_more_bytes, ways=SOME, first=1, share=0.5),
    *calls_of(checks.hold_causal, SHAPES, (7, None, 1, 1000), first=1),
    *calls_of(hold_mask_and_causal, ways=("general", CHOSEN, *DIVIDED)),
    *calls_of(hold_mask_and_causal, [299], ways=("general", CHOSEN, *SOME, "CTAs", "chunks of CTAs")),
    *calls_of(hold_far_window, [4500, 4000, 4099], [2100, 1000, 2], [BFLOAT16, FLOAT32], ways=["general"]),
    *calls_of(checks.hold_sink, checks.SINKS, FLOATS, share=0.2),
    *calls_of(hold_sink_of_shared_rows, ways=OF_SHARED, share=0.5),
    *calls_of(hold_gradient_of_a_region, MASKS, BOTH, (9, 0, None), share=0.15),
    *calls_of(hold_gradient_of_rows, ROWS, ["batches", "heads", "queries"], first=3),
    *calls_of(hold_gradient_of_types, FLOATS, FLOATS, FLOATS, share=0.1),
    *calls_of(hold_gradient_of_length, [300, 31, 64, 5000, 70_000], BOTH, ways=[CHOSEN]),
    *calls_of(hold_gradient_anywhere, PLACES, share=0.5),
    *calls_of(hold_gradient_of_no_rows, [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8)]),
    *calls_of(hold_gradients_alone),
]


@pytest.mark.parametrize(("check", "way", "values"), CALLS)
def test_masks_causal_modes_and_sinks(check, way, values, rng):
    with held(way) as on:
        check(on, rng, *values)


@pytest.mark.thorough(share=0.4)
@pytest.mark.parametrize("way", OF_SHARED)
def test_a_sink_of_rows_that_take_turns(way, rng):
    with held(way, multiprocessors=1) as on:
        hold_sink_of_shared_rows(on, rng)


# The rows, of an odd number of keys, begin anywhere.
@pytest.mark.thorough(share=0.3)
@pytest.mark.parametrize("threads", [96, 32, 160, 512])
@pytest.mark.parametrize("window", [1000, 2, 2100])
def test_a_window_far_behind_the_first_columns_of_staged_rows(threads, window, rng):
    with checks.configured(SoftmaxConfig(threads, 1, 8, 1, staged=True)):
        for dtype in (BFLOAT16, FLOAT32):
            hold_drawn(simulated(), rng, (3, 3, 4099), dtype, 0.7, causal="aligned", window=window)


@pytest.mark.thorough  # of gigabytes; what it needs of a Vec is held in test_vector.py, too
def test_a_window_that_begins_far_behind_the_first_chunk():
    keys = 2**27 + 2**20  # the window begins further than bits can be counted: trtc::Vec::keep
    memory = np.ones(keys + 8, np.float16)
    x = memory[(3 - memory.ctypes.data // 2) % 8 :][:keys].reshape(1, keys)
    on = simulated(checked=False)
    y = call(on, "softmax", x, causal="aligned", window=1)
    assert y[0, -1] == 1 and not y[0, :-1].any()
    assert not call(on, "softmax_backward", x, x, causal="aligned", window=1).any()


def test_a_row_alone_is_the_last_query(rng):
    x, on = expected.drawn(rng, (1, 40), FLOAT32), simulated(static=True)
    # Within the bound: causal rows are divided, and so summed, in another way.
    assert_within(call(on, "softmax", x[0], causal="aligned"), expected.forward(x)["y"][0], FLOAT32, "y")
    y = call(on, "softmax", x[0], causal="aligned", window=np.int64(7))
    assert (y[:-7] == 0).all() and (y[-7:] > 0).all()


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

with using(SimulatedDevice(static={static}, checked=True)):
    x = unreadable_but_for_the_window()
    y = softmax(x, causal="aligned", window=WINDOW)
    assert abs(y.sum() - 1) < 1e-6 and (y[0, -WINDOW:] > 0).all() and not y[0, :-WINDOW].any()
    dy, y = unreadable_but_for_the_window(), unreadable_but_for_the_window()
    dx = softmax_backward(dy, y, causal="aligned", window=WINDOW)
    assert dx[0, -WINDOW:].any() and not dx[0, :-WINDOW].any()
"""


@pytest.mark.parametrize("static", [False, True], ids=[CHOSEN, "general"])
def test_no_page_of_keys_that_a_window_excludes_is_read(static, tmp_path):
    output(READS_A_WINDOW.replace("{static}", str(static)), **shared(tmp_path))


# ---- The gradient of a mask of floats --------------------------------------------------------------------------------

_RANKS = (
    ((5, 3, 1, 61), (5, 1, 1, 61)),  # one query
    ((5, 3, 1, 61), (3, 1, 61)),
    ((3, 1, 7, 16), (1, 1, 7, 16)),  # one head
    ((2, 3, 4, 5, 33), (2, 3, 1, 5, 33)),  # batches of two dimensions
    ((2, 3, 4, 5, 33), (4, 1, 33)),
    ((40, 33), (33,)),
    ((33,), (33,)),
    ((2, 3, 9, 1), (9, 1)),  # one key
    ((2, 3, 9, 1), (1,)),
)


# 80 has no clusters.
@pytest.mark.parametrize(
    ("architecture", "shapes"),
    [*covering([90], _RANKS, share=0.5), *covering([80], _RANKS, share=0.3, first=1)],
)
def test_a_mask_s_gradient_of_every_rank(architecture, shapes, rng):
    for on in (simulated(architecture), simulated(static=True)):
        hold_gradient(on, rng, shapes)


def test_a_mask_s_gradient_takes_the_mask_s_shape_and_not_its_strides(rng):
    y, dy = rng.random((2, 3, 5, 33), np.float32), rng.random((2, 3, 5, 33), np.float32)
    for mask in (
        np.zeros((2, 3, 9, 50), np.float16)[:, :, 1:6, 3:36],
        np.zeros((5, 3, 2, 33), np.float16).transpose(2, 1, 0, 3)[:, ::-1],
        np.broadcast_to(np.zeros(33, np.float16), (5, 33)),
    ):
        on = simulated(static=True)
        _, found = call(on, "softmax_backward", dy, y, mask=mask)
        _, dense = call(on, "softmax_backward", dy, y, mask=np.ascontiguousarray(mask))
        np.testing.assert_array_equal(found, dense)


@pytest.mark.parametrize(("clusters", "queries"), covering([True, False], [5, 40], share=0.5, first=1))
def test_a_mask_s_gradient_of_more_rows_than_a_grid_has_ctas_for(queries, clusters, kernels, rng):
    # As many CTAs as a grid may have are too many here: fewer, of 32 groups of threads, or clusters of 256.
    keys = 45
    y, dy = (rng.random((36, queries, keys), np.float32) for _ in range(2))
    dy[rng.random(dy.shape) < 0.3] = np.nan
    within = np.isfinite(dy)
    y[~within] = 0
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
    kernel, rule = kernels.get(spec, simulated().implementation), spec.launch_rule
    of_all = [(-(-queries * sharers // 256), sharers) for sharers in (64, 128, 256) if clusters]  # of several CTAs each
    for ctas, sharers in [*itertools.product((1, 2, 7), (1, 2, 32)), *of_all]:
        dmask[...] = 77
        grid, cluster = (2, ctas * rule.ctas_per_row, 1), (1, rule.ctas_per_row, 1)
        kernel.launch(LaunchConfig(grid, (rule.threads, 1, 1), cluster), {**values, "sharers": sharers})
        assert_within(dmask, expected.mask_gradient(dy, y, dmask.shape, within), FLOAT32, "dmask")


@pytest.mark.parametrize("name", ["dy", "y"])
def test_an_output_in_place_is_refused_where_the_rows_are_read_again(name, rng):
    given, mask = {one: rng.random((3, 4, 8), np.float32) for one in ("dy", "y")}, np.zeros((4, 8), np.float32)
    on, before = simulated(static=True), given[name].copy()
    with pytest.raises(ArgumentError, match=f"^softmax_backward: out must not overlap {name}, which is read again"):
        call(on, "softmax_backward", **given, mask=mask, out=given[name])
    np.testing.assert_array_equal(before, given[name])
    call(on, "softmax_backward", **given, mask=mask, return_dmask=False, out=given[name])


def test_a_device_that_holds_no_cluster_makes_a_masks_gradient_by_single_ctas(rng):
    y, mask = rng.random((2, 2, 3, 16), np.float32), np.zeros((3, 16), np.float32)
    found = [call(simulated(120, multiprocessors=count), "softmax_backward", y, y, mask=mask) for count in (8, 1)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
