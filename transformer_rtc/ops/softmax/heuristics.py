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

__all__ = ["WEIGHTS", "configure", "cost", "rule", "terms"]

WEIGHTS = {
    "ctas": 0.042,
    "resident": 0.3828,
    "staged_vectors": 0.0058,
    "staged_short": 0.0347,
    "register_rows": -0.0195,
    "register_lanes": 0.0027,
    "persistent": -0.0202,
}
# Registers of a thread beside its elements, and of one whose row is staged.
_REGISTERS, _REGISTERS_STAGED = 24, 40
# Bytes of staged rows that are enough, and the logarithm of the best number of vectors of a thread.
_ENOUGH_IN_FLIGHT = 160 * 1000
_LOG_OF_VECTORS = 2.4
_MOST_REGISTER_THREADS = 32


def terms(config: SoftmaxConfig, row: SoftmaxRow, limits: DeviceLimits) -> dict[str, float]:
    """Return what a kernel's cost depends on, by the names of the weights."""
    arrays = 1 + row.backward
    share = math.ceil(math.ceil(row.columns / row.vec_size) / config.ctas_per_row)
    in_registers = not (config.staged or config.tiled)
    elements = config.vectors_per_thread * row.vec_size * arrays
    registers = _REGISTERS_STAGED if config.staged else _REGISTERS + elements * (1 if row.widest == 4 else 0.8)
    resident = resident_ctas(config.threads, registers, config.shared_memory(row.columns, row.staged), limits)
    in_flight = resident * share * 16 * arrays
    vectors = math.log2(share / config.threads_per_row)
    return {
        "ctas": math.log2(config.ctas_per_row),
        "resident": 1 / resident,
        "staged_vectors": (vectors - _LOG_OF_VECTORS) ** 2 if config.staged else 0.0,
        "staged_short": max(0.0, 1 - in_flight / _ENOUGH_IN_FLIGHT) if config.staged else 0.0,
        "register_rows": math.log2(config.rows_per_cta) if in_registers else 0.0,
        "register_lanes": max(0.0, 5 - math.log2(config.threads_per_row)) if in_registers else 0.0,
        "persistent": float(config.persistent),
    }


def cost(config: SoftmaxConfig, row: SoftmaxRow, limits: DeviceLimits) -> float:
    """Return a kernel's cost."""
    return cost_of(terms(config, row, limits), WEIGHTS, config)


def _is_of_few(config: SoftmaxConfig, limits: DeviceLimits) -> bool:
    """Whether the rule considers a configuration.

    A kernel with rows in shared memory takes many lengths, and one with rows in registers few. So only short rows are
    in registers, and only the longest ones that fit clusters are taken by a persistent kernel.
    """
    if config.persistent:
        elements = config.threads_per_row * config.vectors_per_thread * config.vec_size
        return config.clusters and config.ctas_per_row == most_ctas(limits) and 2 * elements > MOST_OF_PERSISTENT_CTA
    return config.staged or (config.ctas_per_row == 1 and config.threads_per_row <= _MOST_REGISTER_THREADS)


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
    few = (_of_few_kernels(config) for config in candidates(row, limits) if _is_of_few(config, limits))
    fitting = (config for config in few if row.fits(config, limits))
    found = min(fitting, key=lambda config: cost(config, row, limits), default=None)
    if found is not None:
        return found
    most = most_ctas(limits)
    # Half of what a thread has registers for: with more, what two passes need would spill.
    return SoftmaxConfig(1024, 1, row.vec_size, 2, most, has_clusters(limits) and most > 1, chunked=True)
