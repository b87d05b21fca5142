"""The configurations that a softmax kernel may have: what a tuner measures, and what a tuning row may say."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...spec import DeviceLimits
from ..division import has_clusters, most_ctas, power_of_two
from .config import SoftmaxConfig, SoftmaxRow

__all__ = ["candidates"]

_MOST_THREADS = 1024
_LEAST_FILLED = 0.5  # of its threads' vectors, those that the longest row of a bucket has
# Vectors of a thread that holds them, of how many elements at most, and of each array backward: more would spill.
_STEPS = (2, 4, 8)
_MOST_IN_REGISTERS = 32
_MOST_STEPS_BACKWARD = 4
_MOST_OF_CTA = 16384  # elements: many threads have few registers each
_STAGED_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_LEAST_STAGED = 2  # vectors of a thread, else it had better hold them
# Threads of a CTA that holds several rows.
_LEAST_OF_ROWS, _MOST_OF_ROWS = 64, 256
# A thread that has a row of up to so many columns, as many of them as a CTA has threads.
_TILED_COLUMNS, _TILED_ROWS = 32, (128, 256)


def candidates(row: SoftmaxRow, limits: DeviceLimits) -> Iterator[SoftmaxConfig]:
    """Yield the configurations that a kernel may have whose rows are read once."""
    plain = not (row.causal or row.masked)
    of_row = math.ceil(row.columns / row.vector)
    if plain and row.columns <= _TILED_COLUMNS:
        yield from (SoftmaxConfig(1, rows, row.vector, of_row, tiled=True) for rows in _TILED_ROWS)
    for ctas in (1 << shift for shift in range(most_ctas(limits).bit_length())):
        clusters = has_clusters(limits) and ctas > 1
        share = math.ceil(of_row / ctas)
        found = list[SoftmaxConfig]()
        for steps in _STEPS:
            needed = math.ceil(share / steps)
            threads = power_of_two(needed) if needed < 32 else 32 * math.ceil(needed / 32)
            if steps > _MOST_STEPS_BACKWARD and row.backward:
                continue
            if power_of_two(threads) * steps * row.vector > _MOST_OF_CTA:
                continue
            if steps * row.vector > _MOST_IN_REGISTERS or threads > _MOST_THREADS or (ctas > 1 and threads < 64):
                continue
            if share < _LEAST_FILLED * threads * steps:
                continue
            held = SoftmaxConfig(threads, 1, row.vector, steps, ctas, clusters)
            rows = 1
            while (ctas == 1 and threads * rows <= _MOST_OF_ROWS) or rows == 1:
                if threads * rows >= _LEAST_OF_ROWS or threads == 32:
                    found.append(held.replace(rows_per_cta=rows))
                rows *= 2
            if row.backward and plain and steps > 2 and ctas > 1:
                found.append(held.replace(in_turn=True))
        found += (
            SoftmaxConfig(32 * warps, 1, row.vector, 1, ctas, clusters, staged=True)
            for warps in _STAGED_WARPS
            if share >= _LEAST_STAGED * 32 * warps and (ctas == 1 or warps > 1)
        )
        yield from (config for config in found if row.fits(config, limits))
