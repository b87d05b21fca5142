# SPDX-License-Identifier: Apache-2.0
"""Vectors of which a row has only a part, in softmax: a GPU reads them whole where the arrays go on beside the row.

The simulator's own text does not, so that the checks hold a kernel to its rows. Here it does, and may read what lies
between an input's rows, but nothing before the first or behind the last one. NaN is there, and in every other row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import kernel_cache
import numpy as np
import pytest
import softmax_reference as expected
from frameworks import Guarded, bits
from norm_checks import covering
from rigs import Rig
from softmax_checks import DTYPE_OF, WAYS, call, capacity, held, poisoned

from transformer_rtc import SimulationError, operator, sources
from transformer_rtc.simulator.kernel import Rows, SimulatedFunction
from transformer_rtc.spec import BFLOAT16, FLOAT32, INT8

pytestmark = pytest.mark.usefixtures("kernels", poisoned.__name__)
HEADS, QUERIES = 2, 3
HELD = ("chunks", "staged", "few threads", "warps", "CTAs", "chunks of CTAs", "staged by CTAs")


def with_gaps(rows: Rows) -> Rows:
    """Return the memory of an input's rows and of what lies between them."""
    address, writable, initialised, name, size, columns, outer, outer_stride, inner, inner_stride = rows
    if writable:
        return rows
    ways = ((outer - 1) * outer_stride, (inner - 1) * inner_stride)
    low, high = sum(min(0, way) for way in ways), sum(max(0, way) for way in ways)
    return address + low * size, writable, initialised, name, size, high - low + columns, 1, 0, 1, 0


@contextlib.contextmanager
def reading_whole_vectors(of_gaps: bool = True) -> Iterator[None]:
    """Have kernels read vectors whole; `of_gaps`: whether they may read what lies between rows."""
    texts, launch = dict(sources.texts()), cast(Any, SimulatedFunction.launch)
    of_gpu, own = (f"reads_whole_blocks = {value} }};)" for value in ("true", "false"))
    assert texts["ptx.cuh"].count(own) == 1
    texts["ptx.cuh"] = texts["ptx.cuh"].replace(own, of_gpu)

    def launch_with_gaps(function: SimulatedFunction, *given: Any) -> None:
        launch(function, *given[:-1], [with_gaps(rows) for rows in given[-1]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "texts", lambda: texts)
        # On disk, a kernel's key has the texts; in memory, it is the spec: so these are another manager's.
        patch.setattr(operator, "manager", kernel_cache.manager())
        if of_gaps:
            patch.setattr(SimulatedFunction, "launch", launch_with_gaps)
        yield


def placed(on: Rig, host: np.ndarray, offset: int, lie: tuple[int, int]) -> Any:
    """Put an array behind an aligned address and an offset, its heads and its queries so many elements apart."""
    is_byte, strides, host = host.itemsize == 1, (*lie, 1)[-host.ndim :], host.copy()
    if not is_byte and abs(lie[1]) >= host.shape[-1]:
        host[..., 1::2, :] = np.nan
    place = Guarded(on.arrays, host.shape, INT8 if is_byte else DTYPE_OF[host.dtype.name], offset, strides)
    return place.fill(host).array.view(host.dtype)


def lies_of(columns: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return how x (and y) lies, and the mask (and dy): alike, or one with gaps between its rows."""
    apart, far = columns + 3, 8 * (columns + 3)  # any two heads are aligned alike
    gaps, reverse, dense = (far, apart), (far, -apart), (QUERIES * columns, columns)
    others = [reverse, dense, (-far, apart), (far, 1), (far, 0), (QUERIES, 1)]  # of which some overlap
    return [(gaps, gaps), (reverse, gaps), *((lie, lie) for lie in others), *((gaps, lie) for lie in others)]


def results(on: Rig, rows: tuple[np.ndarray, ...], offset: int, lies: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    """Return the bits of the rows that have no NaN: forward without and with masks, and backward."""
    of_x, of_dy, mask = rows
    x, dy = placed(on, of_x, offset, lies[0]), placed(on, of_dy, offset, lies[1])
    masks = [{}, *({"mask": placed(on, one, offset, lies[1])} for one in (mask, (mask > 1).astype(np.uint8)))]
    found = [one for given in masks for one in call(on, "softmax", x, return_lse=True, **given)]
    return [bits(one[:, ::2]) for one in (*found, call(on, "softmax_backward", dy, x))]


@pytest.mark.parametrize(("way", "dtype"), covering(HELD, (BFLOAT16, FLOAT32), share=0.2, first=2))
def test_vectors_beside_rows_are_read_where_they_may_be_and_change_nothing(way, dtype, rng):
    config, vector, given = WAYS[way][0], 16 // dtype.bytes, []
    chunk = config.threads_per_row * config.vectors_per_thread * config.ctas_per_row * vector
    lengths = (2, vector - 1, vector, vector + 1, 2 * vector - 2, chunk - 1, chunk + vector - 2)
    for columns in (one for one in lengths if one <= capacity(way, dtype)):
        shapes = (HEADS, QUERIES, columns), (HEADS, QUERIES, columns), (QUERIES, columns)
        rows = tuple(expected.drawn(rng, shape, dtype) for shape in shapes)
        every = [(rows, offset, lies) for lies in lies_of(columns) for offset in range(vector)]
        given += every[:: 1 if columns < 2 * vector else 3]
    with held(way) as on:
        wanted = [results(on, *one) for one in given]
    with reading_whole_vectors(), held(way) as on:
        for one, of_one in zip(given, wanted, strict=True):
            for number, (found, right) in enumerate(zip(results(on, *one), of_one, strict=True)):
                np.testing.assert_array_equal(found, right, f"{number}: {one[0][0].shape[-1]}, {one[1:]}")
    # It is these vectors that are read.
    with reading_whole_vectors(False), held(way) as on, pytest.raises(SimulationError, match="out_of_bounds"):
        for one in given:
            results(on, *one)
