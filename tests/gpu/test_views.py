# SPDX-License-Identifier: Apache-2.0
"""Softmax along another dimension and norms over several, on a GPU: the bits of moved and of flat arrays."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import FRAMEWORKS, bits
from reference import random_rows, random_weight

from transformer_rtc import layer_norm, layer_norm_backward, softmax, softmax_backward
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32


def assert_same(kind, found, expected) -> None:
    np.testing.assert_array_equal(bits(kind.host(found)), bits(kind.host(expected)))


@pytest.mark.parametrize("framework", ["torch", "cupy", "numpy"])
def test_softmax_along_another_dimension_has_the_bits_of_moved_arrays(framework, implementation, rng):
    kind = FRAMEWORKS[framework]()
    for dtype in (FLOAT32, FLOAT16):
        x, dy = (kind.array(random_rows(rng, (3, 17, 1000), dtype)) for _ in range(2))
        y, lse = softmax(x.swapaxes(1, 2), dim=1, return_lse=True)
        assert tuple(y.shape) == (3, 1000, 17) and tuple(lse.shape) == (3, 17)
        expected, expected_lse = softmax(x, return_lse=True)
        assert_same(kind, y.swapaxes(1, 2), expected)
        assert_same(kind, lse, expected_lse)
        dx = softmax_backward(dy.swapaxes(1, 2), y, dim=1)
        assert_same(kind, dx.swapaxes(1, 2), softmax_backward(dy, expected))
        assert softmax(x.swapaxes(1, 2), dim=1, out=(out := x.swapaxes(1, 2))) is out
        assert_same(kind, x, expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_norms_over_several_dimensions_have_the_bits_of_flat_arrays(framework, implementation, rng):
    kind = FRAMEWORKS[framework]()
    shape = (5, 40, 24)
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        x, dy = (kind.array(random_rows(rng, shape, dtype)) for _ in range(2))
        weight, bias = (kind.array(random_weight(rng, shape[1:], dtype)) for _ in range(2))
        found = layer_norm(x, weight, bias, normalized_shape=shape[1:], return_mean=True)
        assert [tuple(one.shape) for one in found] == [shape, shape[:1]]
        flat = layer_norm(x.reshape(5, -1), weight.reshape(-1), bias.reshape(-1), return_mean=True)
        gradients = layer_norm_backward(dy, x, weight, normalized_shape=shape[1:])
        assert [tuple(one.shape) for one in gradients] == [shape, shape[1:], shape[1:]]
        of_flat = layer_norm_backward(dy.reshape(5, -1), x.reshape(5, -1), weight.reshape(-1))
        for one, other in zip((*found, *gradients), (*flat, *of_flat), strict=True):
            assert_same(kind, one.reshape(other.shape), other)
