# SPDX-License-Identifier: Apache-2.0
"""Which configuration a norm kernel has: of those that there are, the one that a linear rule finds cheapest.

A cost estimates the logarithm of a kernel's time with many rows, up to a constant: a weighted sum of what makes
configurations slow, or fast where a weight is negative. `benchmarks/fit_rule.py` fits the weights to measured times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from ...spec import DeviceLimits
from ..division import cost_of, has_clusters, most_ctas, numbers_of_ctas, resident_ctas, threads_for
from ..shipped import shipped
from .candidates import backward_divisions, plain_candidates
from .config import RESERVED_SHARED, BackwardRow, ForwardRow, NormConfig, RowVectors, Slot

__all__ = [
    "BACKWARD_WEIGHTS",
    "FORWARD_WEIGHTS",
    "backward_cost",
    "backward_rule",
    "backward_terms",
    "configure",
    "configure_backward",
    "configure_wide_backward",
    "expected_cost",
    "forward_cost",
    "forward_rule",
    "forward_terms",
    "may_be_chosen",
    "with_slots",
]

FORWARD_WEIGHTS = {
    "unfilled": 0.296,
    "ctas": 0.1,
    "size": 0.0148,
    "rows": 0.0874,
    "short": 0.6935,
    "resident": 0.8666,
    "shared": 0.2901,
    "shared_other": 0.0462,
    "pairs": 0.1724,
    "ring": 0.0193,
    "in_registers": 0.1489,
    "elements_other": -0.219,
}
BACKWARD_WEIGHTS = {
    "ctas": 0.0863,
    "many_threads": 0.0751,
    "very_many_threads": 0.2527,
    "rows": -0.0827,
    "rows_layer_norm": 0.0746,
    "partials": 0.0084,
    "floats": 0.4038,
    "few_elements": 0.4563,
    "rows_unaligned": 0.25,
}
# What is counted in units of so much: a thread's elements, and the columns of which a multiprocessor has partial sums.
_MOST_ELEMENTS = 32
_PARTIAL_COLUMNS = 16 * 1024
# Bytes of rows on their way to a multiprocessor, beyond which more do not help; and the logarithm of the number of
# threads that the fastest CTAs have.
_ENOUGH_IN_FLIGHT = 64 * 1024
_LOG_OF_THREADS = 7.3
# Registers of a thread beside its elements; of RMSNorm whose rows are in shared memory, where LayerNorm needs twice as
# many; backward, for each element: LayerNorm has sums of two gradients.
_OTHER_REGISTERS = 24
_REGISTERS_IN_SHARED = 32
_BACKWARD_REGISTERS = {"rms_norm": 2.5, "layer_norm": 4.5}
_MOST_BACKWARD_REGISTERS = 168
# Slots of backward's ring, by whether statistics are given: each was the fastest on average. Bulk copies and statistics
# that are loaded ahead were faster in some cases, and slower in as many.
_SLOTS = {True: 3, False: 2}
_SLOTS_OF_GRID = (3, 2)
_OF_ANOTHER_RING = 0.03  # of a cost: about what another ring gains or loses
_MOST_PADDED_IN_REGISTERS = 1024  # vectors of 16 bytes
_VECTORS_OF_CHUNK = 4  # vectors of a thread, where a row is read again in chunks


def _unfilled(config: NormConfig, hidden: int) -> float:
    """Return the share of the threads' vectors that a row has no columns for."""
    return 1 - math.ceil(hidden / config.vec_size) / (
        config.ctas_per_row * config.threads_per_row * config.vectors_per_thread
    )


def forward_terms(config: NormConfig, row: ForwardRow, limits: DeviceLimits) -> dict[str, float]:
    """Return what a forward kernel's cost depends on, by the names of the weights."""
    elements = config.vectors_per_thread * config.vec_size
    registers = _OTHER_REGISTERS + elements * len(row.rows) * (1 if row.normalized.bytes == 4 else 0.75)
    shared = RESERVED_SHARED
    if config.stages:
        registers, shared = _REGISTERS_IN_SHARED, shared + Slot(config, row.rows, row.output).bytes
    elif config.in_shared:
        registers, shared = _REGISTERS_IN_SHARED, shared + config.chunk * config.rows_per_pass * row.staged_bytes
    if config.in_shared and row.norm == "layer_norm":
        registers *= 2
    resident = resident_ctas(config.threads, registers, shared, limits)
    rows = config.rows_per_cta * config.rows_per_pass * max(1, config.stages - 1)
    of_cta = row.hidden / config.ctas_per_row * sum(dtype.bytes for dtype in row.rows)
    # y that is stored in other bytes than what is read is put together in a part of shared memory of its own.
    is_other = row.output.bytes != row.normalized.bytes
    return {
        "unfilled": _unfilled(config, row.hidden),
        "ctas": math.log2(config.ctas_per_row),
        "size": (math.log2(config.threads) - _LOG_OF_THREADS) ** 2,
        "rows": math.log2(config.rows_per_cta),
        "short": max(0.0, 1 - resident * rows * of_cta / _ENOUGH_IN_FLIGHT),
        "resident": 1 / resident,
        "shared": float(config.in_shared and not config.stages and config.rows_per_pass == 1),
        "shared_other": float(config.in_shared and not config.stages and config.rows_per_pass == 1 and is_other),
        "pairs": float(config.rows_per_pass > 1),
        "ring": float(config.stages > 0),
        "in_registers": 0.0 if config.in_shared else elements / _MOST_ELEMENTS,
        "elements_other": elements / _MOST_ELEMENTS if is_other else 0.0,
    }


def backward_terms(config: NormConfig, row: BackwardRow, limits: DeviceLimits) -> dict[str, float]:
    """Return what a backward kernel's cost depends on, by the names of the weights."""
    elements = config.vectors_per_thread * config.vec_size
    registers = _OTHER_REGISTERS + elements * _BACKWARD_REGISTERS[row.norm]
    shared = RESERVED_SHARED + Slot(config, row.rows, row.output, sums=True).bytes
    resident = resident_ctas(config.threads, min(registers, _MOST_BACKWARD_REGISTERS), shared, limits)
    widest = max(dtype.bytes for dtype in row.rows)
    columns = resident * row.hidden / config.ctas_per_row  # of a multiprocessor's CTAs
    gradients = 1 if row.norm == "rms_norm" else 2
    threads, rows = math.log2(config.threads), math.log2(config.rows_per_cta)
    return {
        "ctas": math.log2(config.ctas_per_row),
        "many_threads": max(0.0, threads - 7),
        "very_many_threads": max(0.0, threads - 9),
        "rows": rows,
        "rows_layer_norm": rows if row.norm == "layer_norm" else 0.0,
        "partials": columns * gradients / _PARTIAL_COLUMNS,
        "floats": elements / _MOST_ELEMENTS if widest == 4 else 0.0,
        "few_elements": max(0.0, 0.5 - elements / _MOST_ELEMENTS),
        "rows_unaligned": rows if row.hidden % config.vec_size else 0.0,
    }


def forward_cost(config: NormConfig, row: ForwardRow, limits: DeviceLimits) -> float:
    """Return a forward kernel's cost."""
    return cost_of(forward_terms(config, row, limits), FORWARD_WEIGHTS, config)


def backward_cost(config: NormConfig, row: BackwardRow, limits: DeviceLimits) -> float:
    """Return a backward kernel's cost."""
    return cost_of(backward_terms(config, row, limits), BACKWARD_WEIGHTS, config)


@lru_cache(maxsize=1024)
def configure(row: ForwardRow, limits: DeviceLimits) -> NormConfig:
    """Choose how a forward kernel's rows are divided.

    Parameters
    ----------
    row : ForwardRow
        What is asked for.
    limits : DeviceLimits
        Of the device.
    """
    return shipped(row, limits, NormConfig) or forward_rule(row, limits)


def forward_rule(row: ForwardRow, limits: DeviceLimits) -> NormConfig:
    """Return a forward kernel's configuration by the rule alone."""
    vectors = RowVectors(row.hidden, row.rows, row.output)
    if vectors.is_padded:
        found = next((config for config in _padded(vectors, limits) if row.fits(config, limits)), None)
    else:
        configs = [config for config in plain_candidates(row, limits) if may_be_chosen(config, row)]
        if row.may_be_persistent:
            # CTAs exchange sums through global memory slowly: a persistent kernel hides that.
            others = [_persistent(config, row, limits) if config.exchange == "grid" else config for config in configs]
            configs = [config for config in others if config is not None] or configs
        found = min(configs, key=lambda config: forward_cost(config, row, limits), default=None)
    return found or _chunked(vectors, row, limits)


def may_be_chosen(config: NormConfig, row: ForwardRow) -> bool:
    """Whether the rule considers a configuration of a forward kernel that is not persistent.

    LayerNorm is slower in registers of several CTAs than in their shared memory: it exchanges twice.
    """
    in_registers = not config.in_shared and config.ctas_per_row > 1
    return not (in_registers and row.norm == "layer_norm")


def _persistent(config: NormConfig, row: ForwardRow, limits: DeviceLimits) -> NormConfig | None:
    """Return a configuration of a persistent kernel, with as many slots as there is room for; None: there is none."""
    rings = (config.replace(in_shared=True, rows_per_pass=1, stages=stages) for stages in _SLOTS_OF_GRID)
    return next((ring for ring in rings if row.fits(ring, limits)), None)


def _padded(vectors: RowVectors, limits: DeviceLimits) -> Iterator[NormConfig]:
    """Yield divisions of rows that are no whole vectors: many threads have many words on their way.

    Nothing was measured for them, as no model has such rows.
    """
    for ctas in numbers_of_ctas(limits):
        share = math.ceil(vectors.vectors / ctas)
        in_shared = ctas > 1 or share > _MOST_PADDED_IN_REGISTERS
        vectors_per_thread = 4 if in_shared else min(2, math.ceil(share / 32))
        threads = threads_for(share, vectors_per_thread)
        if threads <= (512 if ctas > 1 else 1024):
            rows = 1 if in_shared else max(1, 128 // threads)
            clusters = has_clusters(limits) and ctas > 1
            yield NormConfig(threads, rows, vectors.vec_size, vectors_per_thread, ctas, clusters, in_shared)


def _chunked(vectors: RowVectors, row: ForwardRow, limits: DeviceLimits) -> NormConfig:
    """Return the configuration of rows that are too long for the chip: they are read again, chunk by chunk."""
    ctas = most_ctas(limits)
    share = math.ceil(vectors.vectors / ctas)
    chunks = math.ceil(share / (1024 * _VECTORS_OF_CHUNK))
    threads = threads_for(math.ceil(share / chunks), _VECTORS_OF_CHUNK)
    vectors_per_thread = _VECTORS_OF_CHUNK * vectors.full // vectors.vec_size
    # Four vectors of sums of floats that become 8 bits would spill.
    if len(row.rows) > 1 and (row.sum or row.normalized).bytes == 4 and row.output.bytes == 1:
        vectors_per_thread //= 2
    return NormConfig(threads, 1, vectors.vec_size, vectors_per_thread, ctas, has_clusters(limits) and ctas > 1)


@lru_cache(maxsize=1024)
def configure_backward(row: BackwardRow, limits: DeviceLimits) -> NormConfig | None:
    """Choose how a backward kernel's rows are divided.

    Parameters
    ----------
    row : BackwardRow
        What is asked for.
    limits : DeviceLimits
        Of the device.

    Returns
    -------
    NormConfig or None
        None: a row and its partial sums do not fit on the chip.
    """
    return shipped(row, limits, NormConfig) or backward_rule(row, limits)


def backward_rule(row: BackwardRow, limits: DeviceLimits) -> NormConfig | None:
    """Return a backward kernel's configuration by the rule alone; None as `configure_backward`."""
    configs = (with_slots(division, row, limits) for division in backward_divisions(row, limits))
    # CTAs that meet in global memory come last, and before them one slot: nothing comes to it while a row is worked on.
    return min(
        configs,
        key=lambda config: (config.exchange == "grid", config.stages == 1, backward_cost(config, row, limits)),
        default=None,
    )


def with_slots(division: NormConfig, row: BackwardRow, limits: DeviceLimits) -> NormConfig:
    """Return a division of backward's rows with the slots that the rule gives it, as many of them as have room."""
    rings = (division.replace(stages=stages) for stages in range(_SLOTS[row.statistics], 1, -1))
    return next((ring for ring in rings if row.fits(ring, limits)), division)


def expected_cost(config: NormConfig, row: BackwardRow, limits: DeviceLimits) -> float:
    """Return a backward kernel's cost, and more for each choice of its ring that is not the rule's.

    A tuner measures the cheapest configurations: so it has few rings of many divisions, rather than many rings of few.
    """
    ring = with_slots(config.replace(stages=1), row, limits)
    others = (config.stages != ring.stages) + config.bulk + config.statistics_ahead
    return backward_cost(config, row, limits) + _OF_ANOTHER_RING * others


def configure_wide_backward(row: BackwardRow) -> NormConfig:
    """Choose how a backward kernel's rows are divided that do not fit on the chip: among the threads of one CTA."""
    vec_size = RowVectors(row.hidden, row.rows, row.output).vec_size
    threads = 32 * math.ceil(row.hidden / (32 * vec_size))
    return NormConfig(min(1024, threads), 1, vec_size, 1)
