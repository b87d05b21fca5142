# SPDX-License-Identifier: Apache-2.0
"""How softmax kernels divide a row: the buckets of lengths, and the configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ...declaration import MOST_COLUMNS
from ...spec import DeviceLimits, DType
from ..division import RowDivision
from ..programs import present

__all__ = ["BUCKETS", "SoftmaxConfig", "SoftmaxRow"]

# Rows of up to so many columns are launched alike: a length is no part of a key. Long ones in steps of a quarter at
# most, as what is staged takes as much shared memory as the longest one needs.
BUCKETS = (
    *(32, 64, 128, 256, 512),
    *(quarters << shift for shift in range(7, 27) for quarters in (5, 6, 7, 8)),
    MOST_COLUMNS,
)
_MOST_CTAS = 16  # of a multiprocessor of compute capability 8.6, which has fewest; ptxas warns of more


@dataclass(frozen=True)
class SoftmaxConfig(RowDivision):
    """How a row is divided.

    Attributes
    ----------
    chunked : bool
        Whether a CTA's part of a row may be longer than its threads' registers: it is read twice then.
    staged : bool
        Whether a CTA's part of a row is in shared memory; else it is in registers. A kernel of such rows is launched
        with any number of warps up to `MOST_STAGED_THREADS`.
    persistent : bool
        Whether a CTA works on one row after another, and the next one comes to shared memory while a row is in
        registers. Backward kernels alone may be, where all columns take part.
    tiled : bool
        Whether a thread has a row, and a warp brings those of its threads through shared memory: where all columns take
        part.
    """

    MOST_STAGED_THREADS: ClassVar[int] = 512

    chunked: bool = False
    staged: bool = False
    persistent: bool = False
    tiled: bool = False

    @property
    def of_kernel(self) -> SoftmaxConfig:
        """What a kernel knows of it."""
        return self.replace(threads_per_row=self.MOST_STAGED_THREADS) if self.staged else self

    @property
    def grid_is_resident(self) -> bool:
        """Whether a launch has as many CTAs as are resident together."""
        return self.persistent or self.tiled

    def bounds(self, resident: int, bounds_short: bool = False) -> str:
        """Return a kernel's launch bounds: CTAs with rows in registers are so many threads of a multiprocessor.

        Staged rows need few registers, and so do those of fewer than 128 threads, but where `bounds_short`.
        """
        needs_few = self.staged or (self.threads_per_row < 128 and not bounds_short)
        ctas = min(max(1, resident // self.threads), _MOST_CTAS)
        return f"{self.threads}" if needs_few else f"{self.threads}, {ctas}"

    @property
    def symbol(self) -> str:
        return "_".join(
            (
                super().symbol,
                *present(chunked=self.chunked, staged=self.staged, persistent=self.persistent, tiled=self.tiled),
            )
        )

    def shared_memory(self, columns: int, staged: Sequence[DType]) -> int:
        """Return the bytes that a CTA needs for arrays of these types, of rows of so many columns."""
        if self.persistent:
            return sum(self.threads * self.vectors_per_thread * self.vec_size * dtype.bytes for dtype in staged)
        if self.tiled:
            return (
                2 * self.threads * self.vectors_per_thread * 16 * len(staged)
            )  # of each, what the widest array has, and the next
        if not self.staged:
            return 0
        unit = self.vec_size * self.ctas_per_row
        slice_columns = columns if self.ctas_per_row == 1 else -(-columns // unit) * self.vec_size
        # trtc::staged_bytes, at any shift.
        elements = (slice_columns + 2 * self.vec_size - 2) // self.vec_size * self.vec_size
        return sum(-(-elements * dtype.bytes // 16) * 16 for dtype in staged)


class SoftmaxRow(NamedTuple):
    """What a kernel's configuration depends on.

    Attributes
    ----------
    columns : int
        One of `BUCKETS`.
    rows : tuple of DType
        Of the arrays of rows.
    staged : tuple of DType
        Of those, and of a mask, that are read.
    backward, causal, masked : bool
        Whether it is the backward, and whether columns are excluded by a causal mode or by a mask.
    sums : bool
        Whether the backward leaves a sum of each row, for the gradient of a sink or of a mask.
    """

    columns: int
    rows: tuple[DType, ...]
    staged: tuple[DType, ...]
    backward: bool = False
    causal: bool = False
    masked: bool = False
    sums: bool = False

    @property
    def case(self) -> tuple[object, ...]:
        """What a configuration depends on: equal cases have equal configurations."""
        sizes = (tuple(dtype.bytes for dtype in group) for group in (self.rows, self.staged))
        return "softmax", *self._replace(rows=(), staged=()), *sizes

    @property
    def widest(self) -> int:
        """Bytes of the widest element."""
        return max(dtype.bytes for dtype in self.rows)

    @property
    def vec_size(self) -> int:
        """Elements of a vector."""
        return 16 // self.widest

    def fits(self, config: SoftmaxConfig, limits: DeviceLimits) -> bool:
        """Whether a CTA's shared memory has room, also for the values that its threads exchange."""
        return config.shared_memory(self.columns, self.staged) <= limits.shared_memory_per_cta - 4096
