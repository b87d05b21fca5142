# SPDX-License-Identifier: Apache-2.0
"""The configurations that a norm kernel may have: what a tuner measures, and what a tuning row may say."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...spec import DeviceLimits
from ..division import has_clusters, numbers_of_ctas, threads_for
from .config import BackwardRow, ForwardRow, NormConfig, RowVectors

__all__ = ["backward_candidates", "backward_divisions", "forward_candidates", "plain_candidates"]

_MOST_THREADS = 1024
# Of its threads' vectors, those that a row has; and of a short one.
_LEAST_FILLED, _LEAST_FILLED_SHORT, _SHORT = 0.8, 0.5, 256
# Elements of a row that a thread may have in registers: of each array, and of all arrays together in CTAs of more
# threads than that, which have 64 registers or less.
_MOST_IN_REGISTERS, _MOST_THREADS_OF_EACH = 32, 512
# Elements of a CTA, backward: each needs registers for three floats.
_MOST_OF_CTA_BACKWARD = 16384
# Elements of a CTA whose row is in shared memory and has a scale: until that is known, threads keep y in registers.
_MOST_OF_CTA_ROW_SCALED = 32768
# Bytes of a thread, of all arrays, where two rows are worked on together: more would spill.
_MOST_BYTES_IN_PAIRS = 128
# Vectors of a thread, of 16 bytes, and slots of a ring.
_MOST_VECTORS, _MOST_STAGES = 8, 5
# Threads of a CTA that has several rows.
_MOST_THREADS_OF_ROWS = 512
_LEAST_OF_RING = 64  # warps whose barriers order what CTAs exchange, and who fetches a row
_LANES_FOR_STATISTICS = 8


def _divisions(vectors: RowVectors, limits: DeviceLimits) -> Iterator[NormConfig]:
    """Yield how one row may be divided among CTAs and threads, in registers."""
    of_row = math.ceil(vectors.hidden / vectors.vec_size)
    clusters = has_clusters(limits)
    least = _LEAST_FILLED if of_row >= _SHORT else _LEAST_FILLED_SHORT
    for ctas in numbers_of_ctas(limits):
        for vectors_per_thread in range(1, _MOST_VECTORS * vectors.full // vectors.vec_size + 1):
            threads = threads_for(of_row, ctas * vectors_per_thread)
            if ctas > 1:
                threads = max(threads, _LEAST_OF_RING)
            enough = of_row >= least * ctas * threads * vectors_per_thread or (ctas == 1 and vectors_per_thread == 1)
            if threads <= _MOST_THREADS and enough:
                yield NormConfig(threads, 1, vectors.vec_size, vectors_per_thread, ctas, clusters and ctas > 1)


def _rows_of_cta(config: NormConfig, least: int) -> Iterator[NormConfig]:
    """Yield a division with each number of rows that a CTA of at least so many threads may have together."""
    rows = 1
    while rows == 1 or config.threads_per_row * rows <= _MOST_THREADS_OF_ROWS:
        if config.threads_per_row * rows >= least:
            yield config.replace(rows_per_cta=rows)
        if config.ctas_per_row > 1:
            return
        rows *= 2


def _bulk(config: NormConfig, vectors: RowVectors, limits: DeviceLimits) -> tuple[bool, ...]:
    # One thread of a CTA fetches its row.
    can = limits.architecture >= NormConfig.BULK_ARCHITECTURE and config.rows_per_cta == 1 and not vectors.is_narrow
    return (False, True) if can else (False,)


def plain_candidates(row: ForwardRow, limits: DeviceLimits) -> Iterator[NormConfig]:
    """Yield the configurations of a forward kernel that is not persistent."""
    for division in _divisions(RowVectors(row.hidden, row.rows, row.output), limits):
        found = list[NormConfig]()
        elements = division.vectors_per_thread * division.vec_size
        arrays = 1 if division.threads <= _MOST_THREADS_OF_EACH else len(row.rows)
        if elements * arrays <= _MOST_IN_REGISTERS:
            found += _rows_of_cta(division, 32)
        of_thread = elements * max(dtype.bytes for dtype in (*row.rows, row.output)) * len(row.rows)
        is_too_long = row.row_scaled and division.chunk > _MOST_OF_CTA_ROW_SCALED
        if division.threads >= 32 and not is_too_long:
            found.append(division.replace(in_shared=True))
            if row.may_be_persistent and of_thread <= _MOST_BYTES_IN_PAIRS:
                found.append(division.replace(in_shared=True, rows_per_pass=2))
        yield from (config for config in found if row.fits(config, limits))


def forward_candidates(row: ForwardRow, limits: DeviceLimits) -> Iterator[NormConfig]:
    """Yield the configurations that a forward kernel may have."""
    yield from plain_candidates(row, limits)
    if not row.may_be_persistent:
        return
    vectors = RowVectors(row.hidden, row.rows, row.output)
    for division in _divisions(vectors, limits):
        for several in _rows_of_cta(division, _LEAST_OF_RING):
            for bulk in _bulk(several, vectors, limits):
                for stages in range(2, _MOST_STAGES + 1):
                    config = several.replace(in_shared=True, stages=stages, bulk=bulk)
                    if row.fits(config, limits):
                        yield config


def backward_divisions(row: BackwardRow, limits: DeviceLimits) -> Iterator[NormConfig]:
    """Yield how a backward kernel's rows may be divided that fit on the chip, with one slot for them."""
    for division in _divisions(RowVectors(row.hidden, row.rows, row.output), limits):
        elements = division.vectors_per_thread * division.vec_size
        if elements > _MOST_IN_REGISTERS:
            continue
        for several in _rows_of_cta(division, _LEAST_OF_RING):
            config = several.replace(in_shared=True, stages=1)
            if config.threads * elements <= _MOST_OF_CTA_BACKWARD and row.fits(config, limits):
                yield config


def backward_candidates(row: BackwardRow, limits: DeviceLimits) -> Iterator[NormConfig]:
    """Yield the configurations that a backward kernel may have whose rows fit on the chip."""
    vectors = RowVectors(row.hidden, row.rows, row.output)
    for division in backward_divisions(row, limits):
        can_load_ahead = row.statistics and division.threads_per_row >= _LANES_FOR_STATISTICS
        for bulk in _bulk(division, vectors, limits):
            for ahead in (False, True) if can_load_ahead else (False,):
                for stages in range(1, _MOST_STAGES + 1):
                    config = division.replace(stages=stages, bulk=bulk, statistics_ahead=ahead)
                    if row.fits(config, limits):
                        yield config
