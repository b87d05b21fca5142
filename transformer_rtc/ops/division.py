"""How a row is divided among threads and CTAs: what the families' configurations have in common."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RowDivision"]


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

    def workspace_bytes(self, values: int, buffers: int = 2) -> int:
        """Return a cooperative grid's (headers/row_reduce.cuh): in each buffer, a counter and each CTA's values."""
        return 4 * buffers * (1 + values * self.ctas_per_row) if self.exchange == "grid" else 0
