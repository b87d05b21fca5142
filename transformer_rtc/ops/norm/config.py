# SPDX-License-Identifier: Apache-2.0
"""How norm kernels divide a row, and what a CTA keeps of it in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ...spec import DeviceLimits, DType
from ..division import RowDivision, power_of_two
from ..programs import present

__all__ = [
    "RESERVED_SHARED",
    "SHARED_OF_MULTIPROCESSOR",
    "BackwardRow",
    "ForwardRow",
    "NormConfig",
    "Regions",
    "RowVectors",
    "Slot",
]

# Shared memory that a kernel declares for its reductions, and the system's own.
RESERVED_SHARED = 2048
# Of the largest multiprocessor.
SHARED_OF_MULTIPROCESSOR = 228 * 1024
# Rows that vectors of 16 bytes do not divide are read by those of 8 where these do.
NARROWEST_BYTES = 8


@dataclass(frozen=True)
class NormConfig(RowDivision):
    """How a row is divided among threads and CTAs.

    A row of more vectors than its threads have is read again for each thing that is asked of it.

    Attributes
    ----------
    in_shared : bool
        Whether a row is in shared memory rather than in registers.
    stages : int
        0: a CTA has one row, or one for each of its groups of threads. Else the kernel is persistent: a CTA works on
        one row after another, which come through a ring of so many slots in shared memory. While it works on the row
        of one slot, the rows of the others are loaded.
    rows_per_pass : int
        Rows in shared memory that the same threads work on in one pass: they share what is loaded of the weight and
        bias.
    bulk : bool
        Whether one thread loads a slot's row by a bulk copy, which a device from `BULK_ARCHITECTURE` on has. Other
        threads issue more instructions then, and the first row is worked on later.
    statistics_ahead : bool
        Whether statistics that are given are loaded many rows before they are used (norm/backward_rows.cuh).
    """

    BULK_ARCHITECTURE: ClassVar[int] = 90

    in_shared: bool = False
    stages: int = 0
    rows_per_pass: int = 1
    bulk: bool = False
    statistics_ahead: bool = False

    @property
    def chunk(self) -> int:
        """Columns of a row that a CTA has at a time."""
        return self.threads_per_row * self.vectors_per_thread * self.vec_size

    def is_unaligned(self, hidden: int, asked: bool) -> bool:
        """Return whether rows are no whole vectors: as `asked`, or of so many columns. Of one element, all are."""
        return hidden % self.vec_size != 0 or (asked and self.vec_size > 1)

    @property
    def reserved_shared(self) -> int:
        """About the most static shared memory, in bytes, that a kernel declares for its reductions.

        Warps publish up to 6 sums of 4 bytes each, and CTAs up to 5. There are two buffers for each row whose sums are
        published at a time.
        """
        published = 4 * 6 * 2 * self.threads // 32
        if self.ctas_per_row > 1:
            published += (4 * 5 * self.ctas_per_row + 8) * (2 + 2 * self.lag)
        return max(RESERVED_SHARED, published + 8 * self.stages)

    @property
    def lag(self) -> int:
        """By how many rows y comes after its row's sums are published, so that no CTA waits for those of others."""
        return int(self.ctas_per_row > 1 and self.stages > 2)

    @property
    def symbol(self) -> str:
        where = f"_stages{self.stages}" if self.stages else "_shared" if self.in_shared else ""
        per_pass = f"_pass{self.rows_per_pass}" if self.rows_per_pass > 1 else ""
        ways = "".join(f"_{way}" for way in present(bulk=self.bulk, statistics_ahead=self.statistics_ahead))
        return f"{super().symbol}{where}{per_pass}{ways}"


class Regions:
    """What a CTA keeps in dynamic shared memory, one region behind the other."""

    def __init__(self, config: NormConfig, start: int = 0) -> None:
        self._columns = config.chunk * config.rows_per_cta
        self.bytes = start

    def add(self, dtype: DType) -> int:
        """Return the offset of a new region, which has room for each of the CTA's rows."""
        start = self.bytes
        self.bytes += -(-self._columns * dtype.bytes // 16) * 16
        return start


class Slot:
    """The layout of a persistent kernel's slots: the arrays of a row, and its output if rows are unaligned.

    Parameters
    ----------
    config : NormConfig
        How a row is divided.
    rows : sequence of DType
        Of the arrays of rows that are read.
    output : DType or None
        Of the rows that are written; None: there are none.
    sums : bool
        Whether sums over a CTA's rows are added up there in the end.
    """

    def __init__(
        self,
        config: NormConfig,
        rows: Sequence[DType],
        output: DType | None,
        sums: bool = False,
    ) -> None:
        slot = Regions(config)
        self.at = [slot.add(dtype) for dtype in rows]
        self.slot_bytes = slot.bytes
        # In the place of the slot's first row, of which each thread has read its part.
        self.out_in_slot = output is not None and output.bytes == rows[0].bytes
        self.out_at = config.stages * slot.bytes
        others = Regions(config, self.out_at)
        if output is not None and not self.out_in_slot:
            others.add(output)
        self.bytes = others.bytes
        if sums and config.rows_per_cta > 1:
            self.bytes = max(self.bytes, 4 * config.chunk * config.rows_per_cta)


class RowVectors:
    """A row in vectors of 16 bytes, and in those that it is really read in.

    Where 16 bytes do not divide a row, its rows are not all aligned to them: smaller vectors do, neighbouring threads
    read neighbouring ones, and a thread has as many elements as it would have had. Where only vectors of less than 8
    bytes do, those of 16 bytes take the row nevertheless, the last one in part.
    """

    def __init__(self, hidden: int, rows: Sequence[DType], output: DType | None) -> None:
        widest: int = max(dtype.bytes for dtype in (*rows, *((output,) if output else ())))
        self.hidden = hidden
        self.bytes = widest
        self.full = min(16 // widest, power_of_two(hidden))
        self.vectors = math.ceil(hidden / self.full)
        self.vec_size = min(self.full, hidden & -hidden)
        if self.vec_size * min(dtype.bytes for dtype in rows) < NARROWEST_BYTES:
            self.vec_size = self.full

    @property
    def is_narrow(self) -> bool:
        """Whether it is read in smaller vectors."""
        return self.vec_size < self.full

    @property
    def is_padded(self) -> bool:
        """Whether its last vector is there in part."""
        return self.hidden % self.vec_size != 0


class ForwardRow(NamedTuple):
    """What a forward kernel's configuration depends on.

    Attributes
    ----------
    norm : str
        ``"rms_norm"`` or ``"layer_norm"``.
    hidden : int
        Columns.
    rows, columns : tuple of DType
        Of the arrays of rows that are read, and of the weight and bias.
    normalized, output : DType
        Of the row that is normalized, which is of the residual's type where that is added before and else of x's, and
        of y.
    several : bool
        Whether a CTA may have several rows, one after another or in one pass: they have one weight.
    row_scaled : bool
        Whether each row of y has a scale: it is stored once, when that is known.
    sum : DType or None
        Of the sum of x and the residual; None: it is not stored beside y.
    """

    norm: str
    hidden: int
    rows: tuple[DType, ...]
    columns: tuple[DType, ...]
    normalized: DType
    output: DType
    several: bool = True
    row_scaled: bool = False
    sum: DType | None = None

    @property
    def case(self) -> tuple[object, ...]:
        """What a configuration depends on: equal cases have equal configurations."""
        types = ((self.normalized,), (self.output,), self.rows, self.columns, (self.sum,) if self.sum else ())
        sizes = (tuple(dtype.bytes for dtype in group) for group in types)
        return "norm", self.norm, self.hidden, self.several, self.row_scaled, *sizes

    @property
    def may_be_persistent(self) -> bool:
        """Whether a kernel may be persistent, or work on several rows in one pass."""
        return self.several and not self.row_scaled

    @property
    def staged_bytes(self) -> int:
        """Of a column, where rows are in shared memory."""
        return sum(dtype.bytes for dtype in self.rows) + self.output.bytes * (
            self.output.bytes != self.normalized.bytes
        )

    def fits(self, config: NormConfig, limits: DeviceLimits) -> bool:
        """Whether a CTA's shared memory has room."""
        if config.stages:
            slots = Slot(config, self.rows, self.output).bytes
            return self.may_be_persistent and slots + config.reserved_shared <= limits.shared_memory_per_cta
        # Where rows are in registers, unaligned ones travel through shared memory one array at a time.
        put_together = max(dtype.bytes for dtype in (*self.rows, self.output, self.normalized))
        kept = config.rows_per_pass * self.staged_bytes if config.in_shared else config.rows_per_cta * put_together
        return config.chunk * kept + RESERVED_SHARED <= limits.shared_memory_per_cta


class BackwardRow(NamedTuple):
    """What a backward kernel's configuration depends on.

    Attributes
    ----------
    norm : str
        ``"rms_norm"`` or ``"layer_norm"``.
    hidden : int
        Columns.
    rows : tuple of DType
        Of the arrays of rows that are read.
    output : DType or None
        Of dx; None: it is not asked for.
    statistics : bool
        Whether they are given.
    per_head : bool
        Whether each head has a weight of its own.
    """

    norm: str
    hidden: int
    rows: tuple[DType, ...]
    output: DType | None
    statistics: bool = False
    per_head: bool = False

    @property
    def case(self) -> tuple[object, ...]:
        """What a configuration depends on: equal cases have equal configurations."""
        sizes = (dtype.bytes for dtype in (*self.rows, *((self.output,) if self.output else ())))
        return "norm backward", *self._replace(rows=(), output=None), self.output is None, *sizes

    def fits(self, config: NormConfig, limits: DeviceLimits) -> bool:
        """Whether a CTA's shared memory has room."""
        slots = Slot(config, self.rows, self.output, sums=True).bytes
        return slots + config.reserved_shared <= limits.shared_memory_per_cta
