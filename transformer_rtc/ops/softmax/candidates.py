# SPDX-License-Identifier: Apache-2.0
"""The configurations that a softmax kernel may have: what a tuner measures, and what a tuning row may say."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...spec import DeviceLimits
from ..division import has_clusters, numbers_of_ctas, power_of_two, threads_for
from .config import SoftmaxConfig, SoftmaxRow

__all__ = ["MOST_OF_PERSISTENT_CTA", "candidates"]

_MOST_THREADS = 1024
_LEAST_FILLED = 0.5  # of its threads' vectors, those that the longest row of a bucket has
# Vectors of a thread in registers, and elements at most, of rows of few threads and of others: more would spill, and so
# would many vectors backward, or in CTAs of so many threads, whose launch bounds limit the registers.
_VECTORS_PER_THREAD = (2, 4, 8)
_FEW_THREADS, _MOST_OF_FEW, _MOST_IN_REGISTERS = 16, 64, 32
_MANY_VECTORS, _MOST_OF_MANY_VECTORS = 8, 64
# Elements of a CTA: many threads have few registers each, of which a persistent kernel needs fewer.
_MOST_OF_CTA, MOST_OF_PERSISTENT_CTA = 8192, 16384
_STAGED_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_LEAST_STAGED = 2  # vectors of a thread: fewer are faster in registers
# Threads of a CTA that has several rows.
_LEAST_OF_ROWS, _MOST_OF_ROWS = 64, 256
# A thread that has a row of up to so many columns, as many of them as a CTA has threads.
_TILED_COLUMNS, _TILED_ROWS = 32, (128, 256)


def _rows_of_cta(division: SoftmaxConfig) -> Iterator[SoftmaxConfig]:
    """Yield a configuration with each number of rows that a CTA may have."""
    rows = 1
    while rows == 1 or (division.ctas_per_row == 1 and division.threads_per_row * rows <= _MOST_OF_ROWS):
        if division.threads_per_row * rows >= _LEAST_OF_ROWS or division.threads_per_row == 32:
            yield division.replace(rows_per_cta=rows)
        rows *= 2


def candidates(row: SoftmaxRow, limits: DeviceLimits) -> Iterator[SoftmaxConfig]:
    """Yield the configurations that a kernel may have whose rows are read once."""
    plain = not (row.causal or row.masked)
    of_row = math.ceil(row.columns / row.vec_size)
    if plain and row.columns <= _TILED_COLUMNS:
        yield from (SoftmaxConfig(1, rows, row.vec_size, of_row, tiled=True) for rows in _TILED_ROWS)
    for ctas in numbers_of_ctas(limits):
        clusters = has_clusters(limits) and ctas > 1
        share = math.ceil(of_row / ctas)
        found = list[SoftmaxConfig]()
        for vectors_per_thread in _VECTORS_PER_THREAD:
            threads = threads_for(share, vectors_per_thread)
            most = _MOST_OF_FEW if plain and power_of_two(threads) <= _FEW_THREADS else _MOST_IN_REGISTERS
            few = _FEW_THREADS if row.backward else _MOST_OF_MANY_VECTORS
            if vectors_per_thread >= _MANY_VECTORS and power_of_two(threads) > few:
                continue
            of_cta = power_of_two(threads) * vectors_per_thread * row.vec_size
            if of_cta > MOST_OF_PERSISTENT_CTA:
                continue
            if vectors_per_thread * row.vec_size > most or threads > _MOST_THREADS or (ctas > 1 and threads < 64):
                continue
            if share < _LEAST_FILLED * threads * vectors_per_thread:
                continue
            division = SoftmaxConfig(threads, 1, row.vec_size, vectors_per_thread, ctas, clusters)
            if of_cta <= _MOST_OF_CTA:
                found += _rows_of_cta(division)
            if row.backward and plain and vectors_per_thread > 2 and ctas > 1:
                found.append(division.replace(persistent=True))
        found += (
            SoftmaxConfig(32 * warps, 1, row.vec_size, 1, ctas, clusters, staged=True)
            for warps in _STAGED_WARPS
            if share >= _LEAST_STAGED * 32 * warps and (ctas == 1 or warps > 1)
        )
        yield from (config for config in found if row.fits(config, limits))
