# SPDX-License-Identifier: Apache-2.0
"""Addition on a GPU: the simulator's checks, and sizes that the simulator is too slow for."""

from __future__ import annotations

import add_checks as checks
import numpy as np
import pytest
from norm_checks import first_of

import transformer_rtc
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, INT8, INT64

_PAIRS = list(checks.pairs())
_LARGE = (
    ((4, 33, 4096), (4, 33, 4096)), ((1, 1 << 20), (1, 1 << 20)), ((512, 11008), (11008,)), ((7, 50257), (7, 1)),
    ((100_003, 1), (1, 17)), ((33, 16, 72), (16, 1)),
)  # fmt: skip


@pytest.mark.parametrize(("x", "other", "out"), first_of(_PAIRS, 60, 1.0))
def test_types_and_shapes(x, other, out, rig, rng):
    checks.hold_types(rig, x, other, out, rng)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, INT8, INT64])
@pytest.mark.parametrize("case", checks.STRIDED, ids=str)
def test_strides(case, dtype, offset, rig, rng):
    checks.hold_strides(rig, case, dtype, offset, rng)


@pytest.mark.parametrize("dtype", [FLOAT16, INT64])
def test_in_place(dtype, rig, rng):
    checks.hold_in_place(rig, dtype, rng)


@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_special_numbers(dtype, rig):
    checks.hold_special(rig, dtype)


@pytest.mark.parametrize("types", [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (INT8, INT64)])
@pytest.mark.parametrize("shapes", _LARGE, ids=str)
def test_large_arrays(shapes, types, rig, rng):
    x, other = (checks.numbers(rng, shape, dtype) for shape, dtype in zip(shapes, types, strict=True))
    out = checks.promoted(*types)
    assert out is not None
    checks.assert_sum(rig("add", x, other), x, other, out, str(shapes))


def test_more_than_2_32_elements(implementation, torch):
    rows, columns = 65_600, 65_536
    x = torch.ones(rows, columns, device="cuda", dtype=torch.int8)
    other = torch.arange(rows, device="cuda").remainder(100).to(torch.int8)[:, None]
    y = transformer_rtc.add(x, other)
    for row in (0, 1, rows - 2, rows - 1):
        assert bool((y[row] == 1 + row % 100).all())
    dense = transformer_rtc.add(x, x)
    assert int(dense[-1].sum()) == 2 * columns
    del x, y, dense
    torch.cuda.empty_cache()


def test_tensors_share_no_element_with_what_is_captured(implementation, torch):
    from frameworks import capture

    x, other = torch.randn(64, 96, device="cuda"), torch.randn(96, device="cuda")
    transformer_rtc.add(x, other)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        y = transformer_rtc.add(x, other)
    x.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(y, x + other, rtol=0, atol=0)
    assert np.isfinite(y.sum().item())


def test_float16_of_large_integers(rig):
    x, other = np.full(8, 70000, np.int32), np.full(8, -10000.0, np.float16)
    np.testing.assert_array_equal(rig("add", x, other), np.full(8, 60000, np.float16))
    assert rig("add", x, other).dtype == checks.NUMPY_TYPES[FLOAT16]
