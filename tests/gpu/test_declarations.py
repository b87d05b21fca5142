# SPDX-License-Identifier: Apache-2.0
"""An operator that is declared and no more, on a GPU: its output is half as wide as its input."""

from __future__ import annotations

import numpy as np
import pytest
from trial import on_trial

torch = pytest.importorskip("torch")


@pytest.fixture
def multiply_halves():
    with on_trial() as function:
        yield function


@pytest.mark.parametrize("shape", [(5, 14), (14,), (2, 3, 140), (1, 2), (0, 8), (2, 3, 4, 6)])
def test_an_output_is_half_as_wide_as_its_input(multiply_halves, shape):
    x = torch.randn(shape, device="cuda")
    first, second = x.chunk(2, -1)
    y = multiply_halves(x)
    assert y.shape == first.shape and y.device == x.device
    assert torch.equal(y, first * second)


def test_outputs_and_results_have_widths_and_strides_of_their_own(multiply_halves):
    x = torch.randn(3, 9, 2, 8, device="cuda")[:, ::3]
    memory = torch.full((3, 3, 2, 7), torch.nan, device="cuda")
    y, widest = multiply_halves(x, out=memory[..., :4], return_widest=True)
    assert torch.equal(y, x[..., :4] * x[..., 4:]) and y.data_ptr() == memory.data_ptr()
    assert memory[..., 4:].isnan().all()
    assert torch.equal(widest, torch.full((3, 3, 2, 12), 2.0, device="cuda"))


def test_an_array_of_the_host_is_staged(multiply_halves):
    x = np.random.default_rng(5).standard_normal((70, 34)).astype(np.float32)
    np.testing.assert_array_equal(multiply_halves(x), x[:, :17] * x[:, 17:])
