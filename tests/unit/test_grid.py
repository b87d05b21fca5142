# SPDX-License-Identifier: Apache-2.0
"""How many groups of CTAs a launch has, and what it tells them of rows and heads."""

from __future__ import annotations

import math
import struct
from collections import namedtuple
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import BASE, FLOATS, PLACES, Launch, Recorder, arrays_of, view

from transformer_rtc import _native
from transformer_rtc.arguments import Input, Output, Result
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT16

Source = _native.Source

# ---- Groups of CTAs --------------------------------------------------------------------------------------------------

TURNS = {"max_groups": 396, "partial_bytes": 32768, "turn_bytes": 1_800_000}
LARGE_SUMS = {"partial_bytes": 200_000, "turn_bytes": 1_800_000}
MARGINS = ((0, 264), (1, 262), (66, 132), (131, 2))
GRIDS = {
    "where rows are not told apart by their query, nothing is divided by how many there are": [
        ({"rows_per_cta": 64}, shape, {}, math.prod(shape) // 64) for shape in ((1 << 32, 1), (2, 1 << 32, 3, 1))
    ],
    "a grid that is not persistent has a group for all rows": [
        ({}, (1 << 30, 16), {}, 1 << 30), ({"max_groups": 100, "ctas_per_row": 2}, (1 << 31, 16), {}, 200),
    ],
    "a margin leaves multiprocessors free, of two CTAs on each": [
        ({"max_groups": 264}, (rows, 16), {"sm_margin": margin}, min(rows, launched))
        for margin, launched in MARGINS for rows in (10000, 1)
    ],
    "and at least one group": [
        ({"max_groups": 2, "ctas_per_row": 8, "cooperative": True}, (10000, 16), {"sm_margin": 131}, 8)
    ],
    "groups that take rows in turn are no more than are resident": [
        ({"max_groups": most}, (rows, 16), {}, launched) for rows, most, launched in ((10, 10, 10), (100, 22, 22))
    ],
    "and fewer for what their partial sums cost": [
        ({"max_groups": most, **LARGE_SUMS}, (rows, 16), {}, launched)
        for rows, most, launched in ((30, 396, 15), (100, 22, 22), (7, 396, 7))
    ],
    "groups take one more row each only if none is beside another then": [
        ({**TURNS, "ctas_per_row": ctas}, (512, 16), {"sm_margin": margin}, launched * ctas)
        for ctas, margin, launched in ((1, 0, 128), (1, 4, 128), (1, 5, 171), (2, 0, 171), (8, 0, 171))
    ],
    # 134 rows have one group each: two rows would be twice the time.
    "and one more row only of several": [
        ({**TURNS, "partial_bytes": partial}, (rows, 16), {}, launched)
        for rows, partial, launched in ((512, 32768, 128), (528, 32768, 132), (134, 16384, 134))
    ],
    "groups are no fewer than heads however large their partial sums": [
        ({"max_groups": 6, "whole": 1, "ctas_per_row": 2, "cooperative": True, "partial_bytes": 2**27,
          "turn_bytes": 1}, (50, 6, 16), {"weight": view((6, 16))}, 12),
    ],
}  # fmt: skip


@pytest.mark.parametrize("why", GRIDS)
def test_a_grid_has_as_many_ctas_as_its_rule_and_rows_say(why):
    for rule, shape, options, launched in GRIDS[why]:
        assert Recorder(**rule).grid(*shape, **options) == (launched, 1, 1), (rule, shape, options)


def test_more_rows_than_a_grid_can_hold_are_refused():
    with pytest.raises(ArgumentError, match=r"^op: x has more rows than a grid can hold"):
        Recorder().grid(1 << 31, 16)


class Index:
    def __index__(self):
        return 3


@pytest.mark.parametrize("margin", [3, np.int64(3), Index()])
def test_whatever_is_an_index_is_a_margin(margin):
    recorder = Recorder(max_groups=264)
    assert recorder.grid(1000, 16, sm_margin=margin) == (264 * 129 // 132, 1, 1)
    assert recorder.requests[0][4:] == (False, True, 0)


@pytest.mark.parametrize(
    ("rows", "partial", "most", "launched"),
    [
        (64, 32768, 396, 64),
        (128, 32768, 396, 64),  # two rows each: the sums of as many again would take longer
        (256, 32768, 396, 128),
        (512, 32768, 396, 128),  # three would be 171, of which some of the 132 multiprocessors had two
        (1024, 32768, 396, 256),  # four; five would be 205
        (512, 32768, 100, 100),  # what is resident is fewer
        (32768, 32768, 396, 396),
        (128, 8192, 396, 128),  # short rows have small sums
        (3, 2**27, 10, 1),
        (2**30, 4, 2**20, 2**20),
        (512, 0, 396, 396),  # none are left
    ],
)
def test_groups_are_fewer_where_their_partial_sums_take_longer_than_rows_in_turn(rows, partial, most, launched):
    rule = {"max_groups": most, "partial_bytes": partial}
    assert Recorder(**rule, turn_bytes=1_800_000).grid(rows, 16) == (launched, 1, 1)
    # Rows that a CTA has together are one turn; and groups are fewer only where a rule says what a turn is worth.
    assert Recorder(**rule, turn_bytes=1_800_000, rows_per_cta=2).grid(2 * rows, 16) == (launched, 1, 1)
    assert Recorder(**rule).grid(rows, 16) == (min(rows, most), 1, 1)


# ---- Division by multiplication --------------------------------------------------------------------------------------

DIVIDES = Recorder(
    (Input("x", "... queries columns", FLOATS), Output("out", "... columns", FLOATS)),
    fields=([(Source.MAGIC, 1), (Source.SHIFT, 1)],),
    max_groups=1,
)


def quotient_by(d: int) -> Callable[[int], int]:
    """Return how kernels divide by d, as row_offset of rows.cuh does, with what a launch tells them."""
    DIVIDES.grid(d, 1)
    magic, shift = struct.unpack_from("<I4xI", DIVIDES.launches[0].params)
    assert shift < 32
    return lambda n: (n * magic >> 32) >> shift


@settings(max_examples=3000, deadline=None)
@given(n=st.integers(0, 2**31 - 1), d=st.integers(2, 2**31 - 1))
def test_rows_are_divided_exactly(n, d):
    quotient = quotient_by(d)
    # n, and the numbers around the multiple of d next to it, where a wrong magic shows first.
    for dividend in (n, n // d * d, n // d * d - 1, 2**31 - 1):
        assert dividend < 0 or quotient(dividend) == dividend // d


def test_rows_are_divided_exactly_by_every_small_number_and_around_powers_of_two():
    for d in {*range(2, 3000), *(2**k + i for k in range(2, 31) for i in (-1, 0, 1)), 2**31 - 1}:
        quotient, largest = quotient_by(d), (2**31 - 1) // d * d
        for n in (0, 1, d - 1, d, d + 1, largest - 1, largest, 2**31 - 1):
            assert quotient(n) == n // d


# ---- Launches over columns -------------------------------------------------------------------------------------------

ARRAYS = arrays_of(Recorder().arguments)
SHARED = [
    (Source.WORKSPACE, 0), (Source.PARTIALS, 0), (Source.GROUPS, 0), (Source.SIZE, 1), (Source.MAGIC, 1),
    (Source.SHIFT, 1), (Source.DATA, ARRAYS.index("scale")), (Source.DTYPE, ARRAYS.index("scale")),
    (Source.DATA, ARRAYS.index("amax")), (Source.OUTER_STRIDE, ARRAYS.index("residual")), (Source.ROWS, 0),
]  # fmt: skip


Shared = namedtuple("Shared", "workspace partials groups heads magic shift scale scale_dtype amax residual_stride rows")


def shared(launch: Launch) -> Shared:
    return Shared(*struct.unpack_from("<QQi4xI4xI4xI4xQi4xQqq", launch.params))


def test_a_later_launch_is_over_the_columns_and_reads_the_partial_sums():
    recorder = Recorder(fields=(SHARED, SHARED), workspace_bytes=5, partial_bytes=64, max_groups=10)
    recorder(amax=view((), at=PLACES["amax"]))
    first, second = recorder.launches
    assert (first.stage, first.grid, second.stage, second.grid) == (0, (10, 1, 1), 1, (2, 1, 1))
    allocated = recorder.made[-1]
    assert allocated[:2] == ((256 + 640,), 1 << 8 | 8)
    assert recorder.zeroed == [(allocated.pointer, 50)]
    workspace, partials = allocated.pointer, allocated.pointer + 256
    for launch in (first, second):
        assert shared(launch) == (workspace, partials, 10, 1, 0, 0, 0, 0, PLACES["amax"], 0, 24)
        assert launch.memory["the workspace"][1:6] == (True, True, "the workspace", 1, 50)
        assert launch.memory["amax"][1:6] == (True, True, "amax", 4, 1)
        assert launch.memory["out"][1:3] == (True, False)
        read = launch is second
        assert launch.memory["the partial sums"][:6] == (partials, True, read, "the partial sums", 4, 160)


@pytest.mark.parametrize(("workspace", "partial"), [(0, 0), (4, 0), (0, 8), (64, 8), (65, 8)])
def test_one_allocation_holds_what_is_zeroed_and_the_partial_sums(workspace, partial):
    recorder = Recorder(fields=(SHARED,), workspace_bytes=workspace, partial_bytes=partial)
    recorder(x=view((4, 16)))
    found = shared(recorder.launches[0])
    if workspace == partial == 0:
        assert len(recorder.made) == 1 and found.workspace == found.partials == 0
        return
    begin = 4 * workspace if partial == 0 else -(-4 * workspace // 256) * 256
    allocated = recorder.made[-1]
    assert allocated.shape == (begin + 4 * partial,)
    assert found.workspace == allocated.pointer and found.partials == allocated.pointer + begin
    assert recorder.zeroed == ([(allocated.pointer, 4 * workspace)] if workspace else [])
    assert ("the workspace" in recorder.launches[0].memory) == (workspace > 0)
    assert ("the partial sums" in recorder.launches[0].memory) == (partial > 0)


@pytest.mark.parametrize(
    ("rows", "heads", "rows_per_cta", "most", "expected"),
    [
        (24, 4, 1, 10, 8),  # down to whole heads
        (24, 4, 2, 10, 10),  # 12 groups of two rows: two of them make the heads
        (24, 4, 4, 10, 6),
        (24, 4, 8, 10, 3),
        (24, 4, 3, 10, 8),
        (24, 4, 6, 10, 4),
        (30, 5, 1, 3, 5),  # but at least once
        (30, 5, 2, 3, 5),
        (4, 4, 4, 10, 1),
        (4, 4, 8, 10, 1),
        (12, 12, 8, 10, 3),
        (24, 1, 1, 10, 10),
    ],
)
def test_groups_that_keep_sums_of_heads_see_the_same_heads_again_and_again(rows, heads, rows_per_cta, most, expected):
    shape, weight = (rows // heads, heads, 16), view((heads, 16))
    rule = {"rows_per_cta": rows_per_cta, "max_groups": most}
    recorder = Recorder(fields=(SHARED, SHARED), partial_bytes=4, whole=1, **rule)
    assert recorder.grid(*shape, weight=weight) == (expected, 1, 1)
    assert recorder.launches[1].grid == (2, heads, 1)
    assert expected * rows_per_cta % heads == 0
    found = shared(recorder.launches[1])
    assert (found.groups, found.heads) == (expected, heads)
    if heads > 1:
        assert [(n * found.magic >> 32) >> found.shift for n in range(100)] == [n // heads for n in range(100)]
    # Where nothing is kept, the heads do not matter.
    assert Recorder(**rule).grid(*shape, weight=weight) == (min(most, -(-rows // rows_per_cta)), 1, 1)


@pytest.mark.parametrize("heads", [0, 4])
def test_sums_over_no_rows_are_zero(heads):
    recorder = Recorder(fields=((), ()), workspace_bytes=4, partial_bytes=4)
    given = {"x": view((0, heads, 16), at=0), "weight": view((heads, 16))}
    recorder(**given, rstd=True)
    assert not recorder.requests
    out, dweight, dbias = recorder(**given, dweight=True, dbias=True, grad_dtype="bfloat16")
    assert (out.shape, dweight.shape, dbias.shape) == ((0, heads, 16), (heads, 16), (heads, 16))
    assert recorder.zeroed == [(made.pointer, heads * 16 * 2) for made in (dweight, dbias) if heads]
    assert not recorder.launches and len(recorder.requests) == (heads > 0)


# ---- Sums of a mask's shape ------------------------------------------------------------------------------------------

MASKED = (
    Input("x", "... heads queries columns", FLOATS),
    Input("mask", "... columns", FLOATS, optional=True, broadcast=True),
    Output("out", "... columns", FLOATS),
    Result("dmask", "... columns", FLOATS, like="mask", shape_of="mask", rereads=True),
)
OF_MASK = (
    (Source.LEADING_STRIDE, 3), (Source.STRIDE, 3, 2), (Source.STRIDE, 3, 1), (Source.ARRAY_ROWS, 3),
    (Source.SHARERS, 0),
)  # fmt: skip


def masked(**options) -> Recorder:
    return Recorder(MASKED, ((), OF_MASK), row_groups=4, row_bytes=4, **options)


@pytest.mark.parametrize(
    ("rows", "mask", "expected", "grid"),
    [
        # Strides of batches, heads and queries of what is dense, its rows, and how many groups share a row's.
        ((2, 3, 5, 40), (2, 3, 5, 40), (600, 200, 40, 30, 1), (2, 8)),
        ((2, 3, 5, 40), (2, 1, 5, 40), (200, 0, 40, 10, 1), (2, 3)),
        ((2, 3, 5, 40), (1, 1, 5, 40), (0, 0, 40, 5, 1), (2, 2)),
        ((4, 4, 5, 40), (5, 40), (0, 0, 40, 5, 2), (2, 3)),
        ((4, 4, 5, 40), (4, 1, 1, 40), (40, 0, 0, 4, 2), (2, 2)),
        ((40, 9, 7, 40), (40,), (0, 0, 0, 1, 4), (2, 1)),
        ((3, 2, 4, 5, 40), (3, 2, 1, 5, 40), (200, 0, 40, 30, 1), (2, 8)),
        ((1 << 20, 40), (1 << 20, 40), (0, 0, 40, 1 << 20, 1), (2, 65535)),
        ((1 << 20, 1, 2, 40), (1 << 20, 1, 1, 40), (40, 0, 0, 1 << 20, 1), (2, 65535)),
        ((7, 40), (1, 40), (0, 0, 0, 1, 1), (2, 1)),
        ((40,), (40,), (0, 0, 0, 1, 1), (2, 1)),
    ],
    ids=str,
)
def test_sums_of_a_mask_s_shape_have_a_launch_over_its_columns_and_rows(rows, mask, expected, grid):
    recorder = masked(columns_per_cta=32)
    _, dmask = recorder(x=view(rows), mask=view(mask, BFLOAT16, at=1 << 45), dmask=True)
    assert (dmask.shape, dmask.dtype) == (mask, BFLOAT16.id)
    first, second = recorder.launches
    assert first.grid == (math.prod(rows[:-1]), 1, 1) and second.grid == (*grid, 1)
    assert struct.unpack_from("<5q", second.params)[:4] == expected[:4]
    assert struct.unpack_from("<i", second.params, 32) == expected[4:]
    for launch in (first, second):
        assert launch.memory["dmask"][:6] == (dmask.pointer, True, False, "dmask", 2, math.prod(mask))


def test_sums_of_a_mask_s_shape_over_no_rows_are_zero():
    for rows, mask in (((0, 3, 4, 16), (3, 4, 16)), ((0, 3, 4, 16), (16,)), ((2, 0, 4, 16), (2, 1, 1, 16))):
        recorder = masked()
        _, dmask = recorder(x=view(rows, at=0), mask=view(mask, FLOAT16), dmask=True)
        assert recorder.zeroed == [(dmask.pointer, 2 * math.prod(mask))] and not recorder.launches


def test_rows_that_are_read_again_are_not_written_in_place():
    given = {"x": view((4, 16)), "out": view((4, 16)), "mask": view((16,), at=1 << 45)}
    for out in (view((4, 16)), view((4, 16), at=BASE + 64)):
        recorder = masked()
        with pytest.raises(ArgumentError, match=r"^op: out must not overlap x, which is read again for dmask$"):
            recorder(**{**given, "out": out}, dmask=True)
        assert not recorder.made and not recorder.launches
    recorder(**given, dmask=False)
    assert len(recorder.launches) == 2
