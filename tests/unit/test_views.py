# SPDX-License-Identifier: Apache-2.0
"""Calls that select dimensions: what of them is viewed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transformer_rtc.arguments import Dimension, Input, Output, Result, RowShape
from transformer_rtc.declaration import Declaration
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import FLOAT32
from transformer_rtc.views import viewed


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_what_is_viewed_is_read_from_the_declaration():
    arrays = (
        Input("first", "... inner row", (FLOAT32,)),
        Input("shared", "row | inner row", (FLOAT32,), optional=True),
        Input("scalar", "() | 1", (FLOAT32,), optional=True),
        Output("second", "... row", (FLOAT32,)),
        Result("count", "...", (FLOAT32,)),
    )
    first = ones(3, 4, 5)
    by_dim = Declaration("op", None, arrays, positional=("first",), selector=Dimension("axis"))  # type: ignore[arg-type]
    moved = np.swapaxes(first, 1, 2)
    call = viewed(by_dim, lambda *given: (given[0], given[0][..., 0]))
    found, count = call(1, moved, None, None, None, True)
    assert found.strides == moved.strides and found.shape == (3, 5, 4) and count.shape == (3, 4)
    with pytest.raises(ArgumentError, match=r"^op: shared needs rows in the last dimension; axis is 1$"):
        call(1, moved, ones(5), None, None, True)
    by_shape = Declaration("op", None, arrays, positional=("first",), selector=RowShape("tail"))  # type: ignore[arg-type]
    given: list[Any] = []
    assert (
        viewed(by_shape, lambda *values: given.extend(values) or values[3])(
            (4, 5), first, ones(4, 5), scalar := ones(1), out := ones(3, 4, 5), False
        )
        is out
    )
    assert [one.shape for one in given[:2]] == [(3, 20), (20,)] and given[2] is scalar and given[3].shape == (3, 20)
    assert given[3].base is out and np.shares_memory(given[0], first)
