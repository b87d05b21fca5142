# SPDX-License-Identifier: Apache-2.0
"""Softmax on a GPU: the simulator's checks at full size, on torch's tensors, and what takes many rows or launches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import softmax_checks as checks
import softmax_reference as expected
import softmax_values
from frameworks import capture
from norm_checks import first_of
from rigs import Rig
from softmax_checks import FLOATS, MASKS, OF_TYPES, at, bits, call, hold_drawn, hold_gradient

import transformer_rtc
from transformer_rtc import softmax, softmax_backward
from transformer_rtc.ops.softmax.config import BUCKETS
from transformer_rtc.spec import BFLOAT16, FLOAT32

# TransformerEngine's and Apex's lengths, and what they do not have.
LENGTHS = (
    *(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384),
    *(1, 2, 3, 17, 33, 49, 63),
    *(127, 1000, 1023, 1025, 4097, 16385, 32769, 50257, 128256, 131072, 262144, 524289, 1 << 20, (1 << 22) + 5),
)
PLACES = (7, 17, 49, 64, 100, 512, 1001, 1024, 2048, 4096, 20_001, 70_001)
ABSENT = (5, 30, 100, 1001, 4096, 20_001, 70_001, 300_000)
# [batch, heads, queries, keys], and a mask's shape: of few rows and many, shared by every number of groups of threads.
BROADCAST = (
    ((16, 4, 60, 49), (4, 60, 49)), ((2, 8, 128, 1000), (1, 8, 128, 1000)), ((64, 8, 1, 4096), (64, 1, 1, 4096)),
    ((4, 8, 512, 512), (1, 1, 512, 512)), ((2, 8, 300, 2049), (2049,)), ((1, 2, 100, 70_001), (1, 1, 1, 70_001)),
    ((2, 3, 50, 333), (2, 3, 50, 333)),
)  # fmt: skip


def hold_large_matrices(on, rng, size) -> None:
    shape = (1, 2, max(1, (1 << 18) // size), size)
    mask = rng.random((1, 1, *shape[2:])) < 0.3
    regions = ({}, {"causal": "aligned"}, {"causal": "aligned", "window": 100})
    for dtype, region, masked in itertools.product((BFLOAT16, FLOAT32), regions, ({"mask": mask}, {})):
        hold_drawn(on, rng, shape, dtype, 0.5, **region, **masked)


def hold_gradient_of_many(on, rng, shapes, causal) -> None:
    lies = (((), ()), ((3, 1), (3, 1)))  # rows with gaps lie at every alignment
    for types, logarithm in (((BFLOAT16, BFLOAT16, FLOAT32), False), ((FLOAT32, FLOAT32, BFLOAT16), True)):
        hold_gradient(on, rng, shapes, types, logarithm, lies, causal=causal)


CALLS = [
    (checks.hold_length, LENGTHS[:-4], FLOATS), (checks.hold_length, LENGTHS[-4:], (BFLOAT16, FLOAT32)),
    (checks.hold_same_bits, PLACES, FLOATS), (checks.hold_same_bits, PLACES, (BFLOAT16,), (FLOAT32,)),
    (checks.hold_outputs, (1, 5, 8, 17, 24, 31, 32, 100, 1001), (BFLOAT16, FLOAT32)),
    (checks.hold_in_place, (17, 104, 1000, 4096, 4097, 70_000)), (checks.hold_types, (20, 300, 5000), OF_TYPES),
    (checks.hold_mask, MASKS, (False, True)), (hold_large_matrices, (64, 1000, 2048, 4097)),
    (checks.hold_added_mask, (33, 3000, 40_000), (BFLOAT16,), FLOATS), (checks.hold_sink, checks.SINKS, FLOATS),
    (hold_gradient_of_many, BROADCAST, (None, "aligned")),
    (softmax_values.hold_infinities, (9, 700, 40_000), FLOATS, (False, True)),
    (softmax_values.hold_what_took_no_part, ABSENT, tuple(itertools.product(FLOATS, repeat=3))),
    (softmax_values.hold_far_scores, (300, 70_000), (BFLOAT16,)),
]  # fmt: skip
EACH = [
    pytest.param(check, one.values, id=f"{check.__name__.removeprefix('hold_')}-{one.id}")
    for check, *axes in CALLS
    for one in first_of(list(itertools.product(*axes)))
]


@pytest.mark.parametrize(("check", "values"), EACH)
def test_what_the_simulator_holds(check, values, rig, rng):
    check(rig, rng, *values)


@pytest.mark.parametrize("columns", [17, 1000, 50257])
def test_arrays_of_the_host_are_staged(columns, implementation, rng):
    for dtype in FLOATS:
        hold_drawn(Rig(implementation), rng, (2, 3, columns), dtype, 0.3, mask=rng.random((3, columns)) < 0.3)


@pytest.mark.parametrize("columns", [1, 6, 17, 24, 32])
@pytest.mark.parametrize("gap", [0, 3, 8])
def test_many_short_rows_take_turns(columns, gap, implementation, torch):
    rows = 1_000_003
    memory, other = (torch.randn(rows, columns + gap, device="cuda").bfloat16() for _ in range(2))
    x, dy = memory[:, :columns], other[:, :columns]
    y = softmax(x, scale=2.0)
    wanted = torch.softmax(2 * x.double(), -1)
    assert bool(((y.double() - wanted).abs() <= wanted * 2**-8).all())
    dx = softmax_backward(dy, y, scale=2.0)
    of_y, of_dy = y.double(), dy.double()
    wanted = 2 * of_y * (of_dy - (of_y * of_dy).sum(-1, keepdim=True))
    # What the differences lose in float32 is far below what rounding to bfloat16 does.
    scale = 2 * of_y * (of_dy.abs() + (of_y * of_dy).abs().sum(-1, keepdim=True))
    assert bool(((dx.double() - wanted).abs() <= wanted.abs() * 2**-8 + scale * 2**-18).all())


@pytest.mark.parametrize("columns", [4096, 4097, 70_000])
def test_a_hundred_runs_have_the_same_bits_in_place_too(columns, implementation, torch):
    x = torch.randn(max(1, (1 << 22) // columns), columns, device="cuda").bfloat16()
    first = softmax(x)
    for _ in range(100):
        assert torch.equal(softmax(x), first)
    held = x.clone()
    assert softmax(held, out=held) is held and torch.equal(held, first)
    dy = torch.randn_like(x)
    dx = softmax_backward(dy, first)
    assert torch.equal(softmax_backward(dy, first, out=dy), dx)


def test_y_and_all_gradients_in_a_captured_graph_and_in_a_hundred_runs_have_the_same_bits(implementation, torch):
    x = torch.randn(4, 8, 128, 1024, device="cuda").bfloat16()
    mask, sink = torch.randn(8, 128, 1024, device="cuda"), torch.randn(8, device="cuda")
    y, lse = softmax(x, mask=mask, sink=sink, return_lse=True)
    dy = torch.randn_like(y)

    def run():
        given = {"mask": mask, "sink": sink}
        gradients = softmax_backward(dy, y, **given, lse=lse)
        return (*gradients, *softmax(x, **given, return_lse=True), softmax(x))

    first = run()
    for _ in range(100):
        assert all(torch.equal(one, other) for one, other in zip(run(), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        made = run()
    for one in made:
        one.fill_(77)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(made, first, strict=True))
    assert first[2].dtype == mask.dtype and first[2].shape == mask.shape and first[2].is_contiguous()


def test_a_new_length_in_a_bucket_compiles_nothing(gpu, rng):
    rig = Rig("rtc", gpu)
    # Each of a bucket's two kernels, that of whole rows and that of others, by its first call.
    for shift in (0, 1):
        call(rig, "softmax", at(rig, expected.drawn(rng, (3, BUCKETS[2]), FLOAT32), shift))
    before = transformer_rtc.manager.counts["compile"]
    for columns in range(BUCKETS[1] + 1, BUCKETS[2] + 1, 17):
        call(rig, "softmax", at(rig, expected.drawn(rng, (3, columns), FLOAT32), columns % 5))
    assert transformer_rtc.manager.counts["compile"] == before
    assert bits(call(rig, "softmax", np.zeros((1, 4), np.float32))).any()
