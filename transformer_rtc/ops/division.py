# SPDX-License-Identifier: Apache-2.0
"""How a row is divided among threads and CTAs: what the families' configurations have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..spec import RESIDENT, SYSTEM_SHARED_MEMORY, DeviceLimits

__all__ = [
    "RowDivision",
    "cost_of",
    "cost_of_few_rows",
    "has_clusters",
    "most_ctas",
    "numbers_of_ctas",
    "power_of_two",
    "resident_ctas",
    "threads_for",
]

# Of a multiprocessor: registers, which threads get by eights; and threads and CTAs, where the table does not know it.
_REGISTERS, _REGISTER_UNIT = 65536, 8
_OF_OTHERS = 1536, 16
# What a call of few rows takes longer: for each vector of a thread, and each doubling of a CTA's threads and of the
# CTAs that share a row (a regression over calls of norms with 16 rows). Where these meet in
# global memory, which was not measured, so much more that a row has as few as fit it. A configuration is chosen for
# many rows, of whose time so small a part is counted.
_OF_VECTOR, _OF_THREADS, _OF_CTAS, _OF_GRID_CTAS, _COUNTED = 0.045, 0.055, 0.03, 10.0, 0.15

_Division = TypeVar("_Division", bound="RowDivision")


def power_of_two(value: int) -> int:
    """Return the least one that is no less than a number."""
    return 1 << max(0, value - 1).bit_length()


def has_clusters(limits: DeviceLimits) -> bool:
    """Whether the CTAs of a row are a cluster."""
    return limits.max_cluster_size > 1 and limits.max_ctas_per_row > 1


def most_ctas(limits: DeviceLimits) -> int:
    """Return how many CTAs may share a row."""
    return min(limits.max_ctas_per_row, limits.max_cluster_size) if has_clusters(limits) else limits.max_ctas_per_row


def resident_ctas(threads: int, registers: float, shared_bytes: int, limits: DeviceLimits) -> int:
    """Return about how many CTAs a multiprocessor has at a time, at least one."""
    of_thread = _REGISTER_UNIT * math.ceil(registers / _REGISTER_UNIT)
    threads_of_all, ctas_of_all = RESIDENT.get(limits.architecture, _OF_OTHERS)
    by_shared = limits.shared_memory_of_multiprocessor // (shared_bytes + SYSTEM_SHARED_MEMORY)
    return max(1, min(threads_of_all // threads, _REGISTERS // (threads * of_thread), by_shared, ctas_of_all))


def threads_for(vectors: int, vectors_per_thread: int) -> int:
    """Return the fewest threads for so many vectors, `vectors_per_thread` of each: a power of two, or whole warps."""
    needed = math.ceil(vectors / vectors_per_thread)
    return power_of_two(needed) if needed < 32 else 32 * math.ceil(needed / 32)


def numbers_of_ctas(limits: DeviceLimits) -> list[int]:
    """Return how many CTAs may share a row: the powers of two up to `most_ctas`."""
    return [1 << shift for shift in range(most_ctas(limits).bit_length())]


def cost_of(terms: Mapping[str, float], weights: Mapping[str, float], config: RowDivision) -> float:
    """Return a configuration's cost: its terms by their weights, and what few rows add."""
    return sum(weights[name] * value for name, value in terms.items()) + cost_of_few_rows(config)


def cost_of_few_rows(config: RowDivision) -> float:
    """Return what few rows add to the cost of a configuration."""
    threads, ctas = math.log2(config.threads), math.log2(config.ctas_per_row)
    of_ctas = _OF_GRID_CTAS if config.exchange == "grid" else _OF_CTAS
    return _COUNTED * (_OF_VECTOR * config.vectors_per_thread + _OF_THREADS * threads + of_ctas * ctas)


@dataclass(frozen=True)
class RowDivision:
    """How a row is divided among threads.

    Attributes
    ----------
    threads_per_row : int
        Of one CTA: a power of two up to 32, or whole warps.
    rows_per_cta : int
        Rows of a CTA at a time.
    vec_size : int
        Elements of one memory access.
    vectors_per_thread : int
        Vectors of a row that one thread has.
    ctas_per_row : int
        CTAs that share a row: a power of two.
    clusters : bool
        Whether they are a cluster, or meet in global memory in a cooperative launch.
    """

    threads_per_row: int
    rows_per_cta: int
    vec_size: int
    vectors_per_thread: int
    ctas_per_row: int = 1
    clusters: bool = False

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.threads_per_row * self.rows_per_cta

    @property
    def exchange(self) -> str:
        """How the CTAs of a row meet."""
        return "none" if self.ctas_per_row == 1 else "cluster" if self.clusters else "grid"

    @property
    def symbol(self) -> str:
        """The part of a kernel's name."""
        shared = f"_{self.exchange}{self.ctas_per_row}" if self.ctas_per_row > 1 else ""
        return f"t{self.threads_per_row}_r{self.rows_per_cta}_v{self.vec_size}_s{self.vectors_per_thread}{shared}"

    def replace(self: _Division, **changes: Any) -> _Division:
        """Return it with other values of some attributes."""
        return dataclasses.replace(self, **changes)

    def workspace_bytes(self, values: int, buffers: int = 2) -> int:
        """Return a cooperative grid's (headers/row_reduce.cuh): in each buffer, a counter and each CTA's values."""
        return 4 * buffers * (1 + values * self.ctas_per_row) if self.exchange == "grid" else 0
