"""Softmax on a GPU: the simulator's checks at full size, on arrays that are staged, and torch's where they lie."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import softmax_reference as expected
from frameworks import capture
from reference import NUMPY_TYPES, assert_within
from softmax_calls import MASKS, at, bits, hold, hold_what_took_no_part

import transformer_rtc
from transformer_rtc import log_softmax, log_softmax_backward, softmax, softmax_backward
from transformer_rtc.ops.softmax_kernels import BUCKETS
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
# TransformerEngine's and Apex's lengths, and what they do not have.
LENGTHS = (
    *(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384),
    *(1, 2, 3, 17, 33, 49, 63),
    *(127, 1000, 1023, 1025, 4097, 16385, 32769, 50257, 128256, 131072, 262144, 524289, 1 << 20, (1 << 22) + 5),
)


@pytest.mark.parametrize("columns", LENGTHS)
def test_every_length_is_within_the_bound(columns, implementation, rng):
    rows = max(1, min(130, (1 << 20) // columns))
    for dtype in FLOATS if columns < 200_000 else (BFLOAT16, FLOAT32):
        x, dy = (expected.drawn(rng, (rows, columns), dtype) for _ in range(2))
        hold(x, dy, dtype, scale=0.3)


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


@pytest.mark.parametrize("columns", [7, 49, 64, 100, 512, 1001, 1024, 2048, 4096, 20_001, 70_001])
def test_a_row_has_the_same_bits_wherever_it_lies(columns, implementation, torch, rng):
    row = torch.tensor(rng.standard_normal(columns) * 3, device="cuda").bfloat16()
    gradient = torch.randn(columns, device="cuda").bfloat16()
    results = []
    for offset in range(9):
        memory, other = (torch.full((offset + 3 * columns + 20,), 7.0, device="cuda").bfloat16() for _ in range(2))
        x, dy = (array[offset : offset + 3 * columns].view(3, columns) for array in (memory, other))
        x[:], dy[:] = row, gradient
        y, lse = softmax(x, return_lse=True)
        dx = softmax_backward(dy, y)
        for result in (y, lse, dx, log_softmax(x)):
            assert (result == result[0]).all()
        results.append((y[0], lse[0], dx[0]))
        assert (memory[offset + 3 * columns :] == 7).all()
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_mask_is_broadcast(shape, keeps, implementation, rng):
    for dtype in FLOATS:
        x, dy = (expected.drawn(rng, (2, 3, 17, 40), dtype) for _ in range(2))
        mask = rng.random(shape) < 0.3
        within = expected.taking_part(x.shape, mask, keeps)
        hold(x, dy, dtype, 0.5, within, mask=mask.astype(np.uint8) * 3, mask_keeps=keeps)


@pytest.mark.parametrize("size", [64, 1000, 2048, 4097])
def test_masks_and_causal_modes_of_large_matrices(size, implementation, rng):
    for dtype, causal, window in itertools.product((BFLOAT16, FLOAT32), (None, "aligned"), (None, 100)):
        if window and not causal:
            continue
        x, dy = (expected.drawn(rng, (1, 2, max(1, (1 << 18) // size), size), dtype) for _ in range(2))
        mask = rng.random((1, 1, *x.shape[2:])) < 0.3
        within = expected.taking_part(x.shape, mask, causal=causal, window=window)
        hold(x, dy, dtype, 0.5, within, mask=mask, causal=causal, window=window)
        within = expected.taking_part(x.shape, causal=causal, window=window)
        hold(x, dy, dtype, 0.5, within, causal=causal, window=window)


def test_masks_of_floats_and_sinks(implementation, rng):
    for dtype, keys in itertools.product(FLOATS, (33, 3000, 40_000)):
        x, dy = (expected.drawn(rng, (2, 4, 6, keys), dtype) for _ in range(2))
        mask = expected.drawn(rng, (4, 6, keys), BFLOAT16)
        mask[rng.random(mask.shape) < 0.3] = -np.inf
        sink = np.array([0.5, -np.inf, 20, -3], NUMPY_TYPES[dtype])
        hold(x, dy, dtype, 0.6, np.broadcast_to(mask != -np.inf, x.shape), added=mask, mask=mask, sink=sink)


# [batch, heads, queries, keys], and a mask's shape: of few rows and many, shared by every number of groups of threads.
BROADCAST = [
    ((2, 8, 128, 1000), (1, 8, 128, 1000)),
    ((16, 4, 60, 49), (4, 60, 49)),
    ((64, 8, 1, 4096), (64, 1, 1, 4096)),
    ((4, 8, 512, 512), (1, 1, 512, 512)),
    ((2, 8, 300, 2049), (2049,)),
    ((1, 2, 100, 70_001), (1, 1, 1, 70_001)),
    ((2, 3, 50, 333), (2, 3, 50, 333)),
]


@pytest.mark.parametrize(("shape", "of_mask"), BROADCAST, ids=str)
@pytest.mark.parametrize("causal", [None, "aligned"])
def test_the_gradient_of_a_mask_is_within_the_bound(shape, of_mask, causal, implementation, rng):
    for dtype, of_type, logarithm in ((BFLOAT16, FLOAT32, False), (FLOAT32, BFLOAT16, True)):
        within = expected.taking_part(shape, rng.random(of_mask) < 0.3, causal=causal)
        y = rng.random(shape, np.float32) / shape[-1]
        y = np.where(within, np.log(y) if logarithm else y, -np.inf if logarithm else 0).astype(NUMPY_TYPES[dtype])
        dy = expected.drawn(rng, shape, dtype)
        dy[~within] = np.nan
        mask = np.zeros(of_mask, NUMPY_TYPES[of_type])
        back = log_softmax_backward if logarithm else softmax_backward
        for offset, gap in ((0, 0), (3, 1)):
            given = (at(array.reshape(-1, shape[-1]), offset, gap) for array in (dy, y))
            if gap:  # rows with gaps, which lie at every alignment
                strides = [shape[-1] + gap]
                for extent in shape[-2:0:-1]:
                    strides.insert(0, strides[0] * extent)
                size = NUMPY_TYPES[dtype].itemsize
                strides = [size * stride for stride in (*strides, 1)]
                given = (np.lib.stride_tricks.as_strided(array, shape, strides) for array in given)
            else:
                given = (array.reshape(shape) for array in given)
            _, dmask = back(*given, causal=causal, mask=mask)
            assert_within(dmask, expected.mask_gradient(dy, y, of_mask, within, logarithm), of_type, "dmask")


def test_infinities_nan_and_rows_of_nothing(implementation, rng):
    for dtype, columns in itertools.product(FLOATS, (9, 700, 40_000)):
        x = expected.drawn(rng, (5, columns), dtype)
        x[0], x[1, : columns // 2], x[2, 3], x[3, 5] = -np.inf, -np.inf, np.inf, np.nan
        x[4, 1], x[4, 2] = -np.inf, np.nan
        found = expected.forward(x, out=dtype)
        y = softmax(x)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(found["y"].value))
        assert (y[0] == 0).all() and (softmax_backward(x, y)[0] == 0).all()


@pytest.mark.parametrize("columns", [5, 30, 100, 1001, 4096, 20_001, 70_001, 300_000])
def test_what_took_no_part_is_told_by_y_alone(columns, implementation, rng):
    for of_y, of_dy, out in itertools.product(FLOATS, FLOATS, FLOATS):
        hold_what_took_no_part(columns, of_y, of_dy, out, rng)


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


def test_a_captured_graph_gives_the_same(implementation, torch):
    x = torch.randn(128, 4096, device="cuda").bfloat16()
    wanted = softmax(x)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        y = softmax(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, wanted)


def test_all_gradients_in_a_captured_graph_and_in_a_hundred_runs_have_the_same_bits(implementation, torch):
    x = torch.randn(4, 8, 128, 1024, device="cuda").bfloat16()
    mask, sink = torch.randn(8, 128, 1024, device="cuda"), torch.randn(8, device="cuda")
    y, lse = softmax(x, mask=mask, sink=sink, return_lse=True)
    dy = torch.randn_like(y)
    first = softmax_backward(dy, y, mask=mask, sink=sink, lse=lse)
    for _ in range(100):
        made = softmax_backward(dy, y, mask=mask, sink=sink, lse=lse)
        assert all(torch.equal(one, other) for one, other in zip(made, first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        made = softmax_backward(dy, y, mask=mask, sink=sink, lse=lse)
    for one in made:
        one.fill_(77)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(made, first, strict=True))
    assert first[2].dtype == mask.dtype and first[2].shape == mask.shape and first[2].is_contiguous()


def test_a_new_length_in_a_bucket_compiles_nothing(rng):
    softmax(expected.drawn(rng, (3, BUCKETS[2]), FLOAT32))
    before = transformer_rtc.manager.counts["compile"]
    for columns in range(BUCKETS[1] + 1, BUCKETS[2] + 1, 17):
        softmax(at(expected.drawn(rng, (3, columns), FLOAT32), columns % 5))
    assert transformer_rtc.manager.counts["compile"] == before
    assert bits(softmax(np.zeros((1, 4), np.float32))).any()
