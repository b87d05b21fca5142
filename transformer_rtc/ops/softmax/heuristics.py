# SPDX-License-Identifier: Apache-2.0
"""Which configuration a softmax kernel has: of those that there are, the one that a linear rule finds cheapest.

A cost is as in `ops/norm/heuristics.py`. It is that of a bucket's longest rows.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ...spec import DeviceLimits
from ..division import cost_of, has_clusters, most_ctas, power_of_two, resident_ctas
from ..shipped import shipped
from .candidates import MOST_OF_PERSISTENT_CTA, candidates
from .config import SoftmaxConfig, SoftmaxRow

__all__ = ["WEIGHTS", "configure", "cost", "may_be_chosen", "rule", "terms"]

WEIGHTS = {
    "ctas": 0.05,
    "resident": 0.3828,
    "staged_vectors": 0.0058,
    "staged_short": 0.0347,
    "staged_few": 0.002,
    "register_rows": -0.0195,
    "register_lanes": 0.0027,
    "register_pairs": 0.1,
    "register_vectors": 0.04,
    "register_warps": -0.1,
    "tiled": -0.2,
    "persistent": -0.012,
}
# Registers of a thread beside its elements, and of one whose row is staged; and of an element of 16 bits.
_REGISTERS, _REGISTERS_STAGED, _NARROW = 24, 40, 0.5
# Bytes of staged rows that are enough, and the logarithm of the best number of vectors of a thread.
_ENOUGH_IN_FLIGHT = 160 * 1000
_LOG_OF_VECTORS = 2.4
# Of rows in registers: the best number of a thread's vectors, of rows of so few vectors or with a mask, and of others.
_SHORT_ROW, _LOG_OF_FEW_VECTORS, _LOG_OF_MANY_VECTORS = 16, 2, 3
_WARP, _MOST_REGISTER_THREADS = 32, 128
# CTAs of a row with a mask or backward: where these were the fastest, two or eight are nearly so, and save a kernel.
_SKIPPED_CTAS = 4


def terms(config: SoftmaxConfig, row: SoftmaxRow, limits: DeviceLimits) -> dict[str, float]:
    """Return what a kernel's cost depends on, by the names of the weights.

    A bucket has rows that are no whole vectors. The fewer vectors a thread has of these, the more of its time it spends
    at their ends.
    """
    arrays = 1 + row.backward
    share = math.ceil(math.ceil(row.columns / row.vec_size) / config.ctas_per_row)
    elements = config.vectors_per_thread * row.vec_size * arrays
    of_elements = elements * (1 if row.widest == 4 else _NARROW)
    registers = _REGISTERS_STAGED if config.staged else _REGISTERS + of_elements
    resident = resident_ctas(config.threads, registers, config.shared_memory(row.columns, row.staged), limits)
    found = dict.fromkeys(WEIGHTS, 0.0)
    found |= {
        "ctas": math.log2(config.ctas_per_row),
        "resident": 1 / resident,
        "tiled": float(config.tiled),
        "persistent": float(config.persistent),
    }
    if config.staged:
        in_flight = resident * share * 16 * arrays
        vectors = share / config.threads_per_row
        found["staged_vectors"] = (math.log2(vectors) - _LOG_OF_VECTORS) ** 2
        found["staged_short"] = max(0.0, 1 - in_flight / _ENOUGH_IN_FLIGHT)
        found["staged_few"] = 0.0 if row.causal else vectors
    elif not config.tiled:
        is_short = row.masked or share <= _SHORT_ROW
        best = _LOG_OF_FEW_VECTORS if is_short else _LOG_OF_MANY_VECTORS
        found["register_rows"] = math.log2(config.rows_per_cta)
        found["register_lanes"] = max(0.0, math.log2(_WARP / config.threads_per_row))
        found["register_pairs"] = float(row.backward and config.threads_per_row <= 2)
        if not row.causal:  # as rows have few columns that take part, the ends of rows cost less than registers
            found["register_vectors"] = abs(best - math.log2(config.vectors_per_thread))
        has_warps = config.threads_per_row > _WARP and config.rows_per_cta == 1
        found["register_warps"] = float(has_warps and config.vectors_per_thread == 1 << _LOG_OF_FEW_VECTORS)
    return found


def cost(config: SoftmaxConfig, row: SoftmaxRow, limits: DeviceLimits) -> float:
    """Return a kernel's cost."""
    return cost_of(terms(config, row, limits), WEIGHTS, config)


def may_be_chosen(config: SoftmaxConfig, row: SoftmaxRow, limits: DeviceLimits) -> bool:
    """Whether the rule considers a configuration.

    A kernel with rows in shared memory takes many lengths, and one with rows in registers few. So a row is in registers
    of several warps where it fills them, and only the longest ones that fit clusters are taken by a persistent kernel.
    """
    elements = config.threads_per_row * config.vectors_per_thread * config.vec_size
    if config.persistent:
        return config.clusters and config.ctas_per_row == most_ctas(limits) and 2 * elements > MOST_OF_PERSISTENT_CTA
    if config.staged or config.tiled:
        return config.ctas_per_row != _SKIPPED_CTAS or row.causal or not (row.masked or row.backward)
    if config.ctas_per_row > 1 or config.threads_per_row == 1:
        return False
    fills = row.columns == elements and not row.causal
    return config.threads_per_row <= (_MOST_REGISTER_THREADS if fills else _WARP)


def _of_few_kernels(config: SoftmaxConfig) -> SoftmaxConfig:
    """Return a configuration like this one: rows in registers have a kernel for each number of threads."""
    return config if config.staged else config.replace(threads_per_row=power_of_two(config.threads_per_row))


@lru_cache(maxsize=1024)
def configure(row: SoftmaxRow, limits: DeviceLimits) -> SoftmaxConfig:
    """Choose how rows of up to so many columns are divided.

    Parameters
    ----------
    row : SoftmaxRow
        What is asked for.
    limits : DeviceLimits
        Of the device.
    """
    return shipped(row, limits, SoftmaxConfig) or rule(row, limits)


def rule(row: SoftmaxRow, limits: DeviceLimits) -> SoftmaxConfig:
    """Return a kernel's configuration by the rule alone."""
    few = (_of_few_kernels(config) for config in candidates(row, limits) if may_be_chosen(config, row, limits))
    fitting = (config for config in few if row.fits(config, limits))
    found = min(fitting, key=lambda config: cost(config, row, limits), default=None)
    if found is not None:
        return found
    most = most_ctas(limits)
    # Half of what a thread has registers for: with more, what two passes need would spill.
    return SoftmaxConfig(1024, 1, row.vec_size, 2, most, has_clusters(limits) and most > 1, chunked=True)
