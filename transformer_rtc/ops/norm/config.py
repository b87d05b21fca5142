"""How norm kernels divide a row, and what a CTA keeps of it in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...spec import DType
from ..division import RowDivision
from ..programs import present

__all__ = ["RESERVED_SHARED", "SHARED_OF_MULTIPROCESSOR", "NormConfig", "Regions", "Slot"]

# Shared memory that a kernel declares for its reductions, and the system's own.
RESERVED_SHARED = 2048
# Of the largest multiprocessor.
SHARED_OF_MULTIPROCESSOR = 228 * 1024


@dataclass(frozen=True)
class NormConfig(RowDivision):
    """How a row is divided. A row of more vectors than it has steps is read again for each thing that is asked of it.

    Attributes
    ----------
    in_shared : bool
        Whether a row is held in shared memory rather than in registers.
    stages : int
        0: a CTA has one row, or one of each of its groups of threads. Else it takes rows in turn through a ring of so
        many slots in shared memory: one is worked on while the others are on their way.
    together : int
        Rows in shared memory that the same threads work on at a time: they share what is loaded of the weight and bias.
    bulk : bool
        Whether a row that is taken in turn is sent for by one thread, which a device of sm_90 can: more instructions
        for others, and a later start.
    statistics_ahead : bool
        Whether statistics that are given are sent for many turns ahead, rather than waited for
        (norm/backward_rows.cuh).
    """

    in_shared: bool = False
    stages: int = 0
    together: int = 1
    bulk: bool = False
    statistics_ahead: bool = False

    @property
    def chunk(self) -> int:
        """Columns of a row that a CTA holds."""
        return self.threads_per_row * self.steps * self.vector

    def is_unaligned(self, hidden: int, asked: bool) -> bool:
        """Return whether rows are no whole vectors: as `asked`, or of so many columns. Of one element, all are."""
        return hidden % self.vector != 0 or (asked and self.vector > 1)

    @property
    def reserved_shared(self) -> int:
        """About the most shared memory, in bytes, that a kernel declares for its reductions, beside dynamic one.

        Warps tell each other up to 6 sums, in 4 bytes each, and CTAs up to 5, through as many buffers as rows are told
        at a time.
        """
        told = 4 * 6 * 2 * self.threads // 32
        if self.ctas_per_row > 1:
            told += (4 * 5 * self.ctas_per_row + 8) * (2 + 2 * self.lag)
        return max(RESERVED_SHARED, told + 8 * self.stages)

    @property
    def lag(self) -> int:
        """For how many rows sums are told while the row before is finished, so that nobody waits for them."""
        return int(self.ctas_per_row > 1 and self.stages > 2)

    @property
    def symbol(self) -> str:
        held = f"_stages{self.stages}" if self.stages else "_shared" if self.in_shared else ""
        together = f"_together{self.together}" if self.together > 1 else ""
        ways = "".join(f"_{way}" for way in present(bulk=self.bulk, statistics_ahead=self.statistics_ahead))
        return f"{super().symbol}{held}{together}{ways}"


class Regions:
    """What a CTA keeps in dynamic shared memory, one region behind the other."""

    def __init__(self, config: NormConfig, start: int = 0) -> None:
        self._columns = config.chunk * config.rows_per_cta
        self.bytes = start

    def add(self, dtype: DType) -> int:
        """Return where a region begins that holds a row of each of the CTA's rows."""
        start = self.bytes
        self.bytes += -(-self._columns * dtype.bytes // 16) * 16
        return start


class Slot:
    """Where a kernel that takes rows in turn keeps what a row needs, and its output where no vector fits that.

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
