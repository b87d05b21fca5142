"""How a row is divided among threads and CTAs: what the families' configurations have in common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from ..spec import DeviceLimits

__all__ = ["RowDivision", "has_clusters", "most_ctas", "power_of_two"]

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


@dataclass(frozen=True)
class RowDivision:
    """How a row is divided among threads.

    Attributes
    ----------
    threads_per_row : int
        Of one CTA: a power of two up to 32, or whole warps.
    rows_per_cta : int
        Rows that a CTA holds together.
    vector : int
        Elements of one memory access.
    steps : int
        Vectors of a row that one thread holds.
    ctas_per_row : int
        CTAs that share a row: a power of two.
    clusters : bool
        Whether they are a cluster, or meet in global memory in a cooperative launch.
    """

    threads_per_row: int
    rows_per_cta: int
    vector: int
    steps: int
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
        return f"t{self.threads_per_row}_r{self.rows_per_cta}_v{self.vector}_s{self.steps}{shared}"

    def replace(self: _Division, **changes: Any) -> _Division:
        """Return it with other values of some attributes."""
        return dataclasses.replace(self, **changes)

    def workspace_bytes(self, values: int, buffers: int = 2) -> int:
        """Return a cooperative grid's (headers/row_reduce.cuh): in each buffer, a counter and each CTA's values."""
        return 4 * buffers * (1 + values * self.ctas_per_row) if self.exchange == "grid" else 0
