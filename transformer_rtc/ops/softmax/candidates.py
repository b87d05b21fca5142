"""The configurations that a softmax kernel may have: what a tuner measures, and what a tuning row may say."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...spec import DeviceLimits
from ..division import has_clusters, numbers_of_ctas, power_of_two, threads_for
from .config import SoftmaxConfig, SoftmaxRow

__all__ = ["MOST_OF_CTA_IN_TURN", "candidates"]

_MOST_THREADS = 1024
_LEAST_FILLED = 0.5  # of its threads' vectors, those that the longest row of a bucket has
# Vectors of a thread that holds them, of how many elements at most: more would spill, and so would many vectors
# backward, or in CTAs of so many threads, which are told how many registers they have.
_STEPS = (2, 4, 8)
_MOST_IN_REGISTERS = 32
_MANY_STEPS, _MANY_THREADS = 8, 128
# Elements of a CTA: many threads have few registers each, of which rows in turn need fewer.
_MOST_OF_CTA, MOST_OF_CTA_IN_TURN = 8192, 16384
_STAGED_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_LEAST_STAGED = 2  # vectors of a thread, else it had better hold them
# Threads of a CTA that holds several rows.
_LEAST_OF_ROWS, _MOST_OF_ROWS = 64, 256
# A thread that has a row of up to so many columns, as many of them as a CTA has threads.
_TILED_COLUMNS, _TILED_ROWS = 32, (128, 256)


def _rows_of_cta(held: SoftmaxConfig) -> Iterator[SoftmaxConfig]:
    """Yield a configuration with each number of rows that a CTA may have."""
    rows = 1
    while rows == 1 or (held.ctas_per_row == 1 and held.threads_per_row * rows <= _MOST_OF_ROWS):
        if held.threads_per_row * rows >= _LEAST_OF_ROWS or held.threads_per_row == 32:
            yield held.replace(rows_per_cta=rows)
        rows *= 2


def candidates(row: SoftmaxRow, limits: DeviceLimits) -> Iterator[SoftmaxConfig]:
    """Yield the configurations that a kernel may have whose rows are read once."""
    plain = not (row.causal or row.masked)
    of_row = math.ceil(row.columns / row.vector)
    if plain and row.columns <= _TILED_COLUMNS:
        yield from (SoftmaxConfig(1, rows, row.vector, of_row, tiled=True) for rows in _TILED_ROWS)
    for ctas in numbers_of_ctas(limits):
        clusters = has_clusters(limits) and ctas > 1
        share = math.ceil(of_row / ctas)
        found = list[SoftmaxConfig]()
        for steps in _STEPS:
            threads = threads_for(share, steps)
            if steps >= _MANY_STEPS and (row.backward or power_of_two(threads) >= _MANY_THREADS):
                continue
            of_cta = power_of_two(threads) * steps * row.vector
            if of_cta > MOST_OF_CTA_IN_TURN:
                continue
            if steps * row.vector > _MOST_IN_REGISTERS or threads > _MOST_THREADS or (ctas > 1 and threads < 64):
                continue
            if share < _LEAST_FILLED * threads * steps:
                continue
            held = SoftmaxConfig(threads, 1, row.vector, steps, ctas, clusters)
            if of_cta <= _MOST_OF_CTA:
                found += _rows_of_cta(held)
            if row.backward and plain and steps > 2 and ctas > 1:
                found.append(held.replace(in_turn=True))
        found += (
            SoftmaxConfig(32 * warps, 1, row.vector, 1, ctas, clusters, staged=True)
            for warps in _STAGED_WARPS
            if share >= _LEAST_STAGED * 32 * warps and (ctas == 1 or warps > 1)
        )
        yield from (config for config in found if row.fits(config, limits))
