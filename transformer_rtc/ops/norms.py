"""Normalization of rows: RMSNorm and LayerNorm, forward and backward, with what is fused into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..dispatch import Argument, LaunchRule, Operator, Request, StaticKernel
from ..errors import ArgumentError
from ..spec import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    DeviceLimits,
    DType,
    Field,
    KernelSpec,
    Params,
)

__all__ = [
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_add_backward",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_backward",
    "rms_norm_backward",
]

_FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
_FLOAT8 = (FLOAT8_E4M3, FLOAT8_E5M2)
_QUANTIZED = (*_FLOATS, *_FLOAT8, INT8)


# ---- Configurations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormConfig:
    """How a row is divided.

    Attributes
    ----------
    threads_per_row : int
        Of one CTA: a power of two up to 32, or whole warps.
    rows_per_cta : int
        Rows that a CTA holds together.
    vector : int
        Elements of one memory access.
    steps : int
        Vectors of a row that one thread holds. A row of more is read again for each thing that is asked of it.
    ctas_per_row : int
        CTAs that share a row: a power of two.
    clusters : bool
        Whether they are a cluster, or meet in global memory in a cooperative launch.
    in_shared : bool
        Whether a row is held in shared memory rather than in registers.
    stages : int
        0: a CTA has one row, or one of each of its groups of threads. Else it takes rows in turn through a ring of so
        many slots in shared memory: one is worked on while the others are on their way.
    """

    threads_per_row: int
    rows_per_cta: int
    vector: int
    steps: int
    ctas_per_row: int = 1
    clusters: bool = False
    in_shared: bool = False
    stages: int = 0

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.threads_per_row * self.rows_per_cta

    @property
    def chunk(self) -> int:
        """Columns of a row that a CTA holds."""
        return self.threads_per_row * self.steps * self.vector

    @property
    def lag(self) -> int:
        """Rows whose sums are told while the row before is finished, so that nobody waits for them."""
        return int(self.ctas_per_row > 1 and self.stages > 2)

    def ragged(self, hidden: int) -> bool:
        """Whether all threads of a CTA bring a row to shared memory together, as no vector fits all rows."""
        return self.in_shared and self.rows_per_cta == 1 and hidden % self.vector != 0

    @property
    def exchange(self) -> str:
        """How the CTAs of a row meet."""
        return "none" if self.ctas_per_row == 1 else "cluster" if self.clusters else "grid"

    @property
    def symbol(self) -> str:
        """The part of a kernel's name."""
        parts = [f"t{self.threads_per_row}_r{self.rows_per_cta}_v{self.vector}_s{self.steps}"]
        if self.ctas_per_row > 1:
            parts.append(f"{self.exchange}{self.ctas_per_row}")
        if self.stages:
            parts.append(f"stages{self.stages}")
        elif self.in_shared:
            parts.append("shared")
        return "_".join(parts)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _threads(vectors: int, steps: int) -> int:
    """Return the fewest whole warps that hold so many vectors."""
    return 32 * math.ceil(vectors / (32 * steps))


# Shared memory that a kernel declares for its reductions, and the system's own.
_RESERVED_SHARED = 2048
# Of the largest multiprocessor.
_SHARED_OF_MULTIPROCESSOR = 228 * 1024
# Columns that a region of shared memory has beyond a CTA's: the word after a ragged row, and alignment.
_PADDING = 16


class _Entry(NamedTuple):
    """A line of a configuration table.

    Attributes
    ----------
    vectors : int
        The most that a row has, of 16 bytes of the widest array of rows.
    ctas, threads, steps : int
        CTAs of a row, threads of each for the longest such row, vectors of each.
    rows : int
        Of a CTA.
    in_shared : bool
        Whether rows are held in shared memory rather than in registers.
    stages : int
        As `NormConfig` has them.
    """

    vectors: int
    ctas: int
    threads: int
    steps: int
    rows: int = 1
    in_shared: bool = False
    stages: int = 0


# By the norm and the bytes of the widest element. Each line is the fastest of 10 to 60 configurations of its size on an
# H200 with the L2 flushed; behind it, the ratio to the best copy with as many reads and writes of the same run. What
# decides: few elements of a thread leave registers for more rows in flight, many make reductions cheap; a row in shared
# memory is in flight without registers; and from some length on, the CTAs of a cluster are held up by each other unless
# they take rows in turn.
_FORWARD = {
    ("rms_norm", 2): (
        _Entry(32, 1, 32, 1, 8),  # 256: 0.986
        _Entry(64, 1, 32, 2, 4),  # 512: 0.975
        _Entry(128, 1, 64, 2, 2),  # 1024: 0.999
        _Entry(256, 1, 128, 2),  # 2048: 0.989
        _Entry(512, 1, 256, 2),  # 4096: 0.984
        _Entry(1024, 1, 512, 2, in_shared=True),  # 8192: 0.994
        _Entry(2048, 1, 512, 4, in_shared=True),  # 16384: 0.966
        _Entry(4096, 1, 1024, 4, in_shared=True),  # 32768: 0.971
        _Entry(8192, 4, 512, 4, in_shared=True),  # 65536: 0.965
        _Entry(16384, 8, 1024, 2, in_shared=True, stages=4),  # 131072: 0.953; without turns 0.944
        _Entry(32768, 8, 1024, 4, in_shared=True, stages=3),  # 262144: 0.932; without turns 0.881
    ),
    ("rms_norm", 4): (
        _Entry(32, 1, 32, 1, 8),
        _Entry(64, 1, 32, 2, 4),  # 256: 0.976
        _Entry(128, 1, 64, 2, 2),  # 512: 0.995
        _Entry(256, 1, 128, 2),  # 1024: 0.993
        _Entry(512, 1, 256, 2),  # 2048: 0.959
        _Entry(1024, 1, 512, 2, in_shared=True),  # 4096: 0.978
        _Entry(2048, 1, 512, 4, in_shared=True),  # 8192: 0.965
        _Entry(4096, 1, 1024, 4, in_shared=True),  # 16384: 0.972
        _Entry(8192, 4, 512, 4, in_shared=True),  # 32768: 0.970
        _Entry(16384, 8, 1024, 2, in_shared=True, stages=4),  # 65536: 0.964; without turns 0.957
        _Entry(32768, 8, 1024, 4, in_shared=True, stages=3),  # 131072: 0.929; without turns 0.902
        _Entry(65536, 16, 1024, 4, in_shared=True, stages=3),  # 262144: 0.917; without turns 0.817
    ),
    ("layer_norm", 2): (
        _Entry(32, 1, 16, 2, 8),  # 256: 0.981
        _Entry(64, 1, 16, 4, 8, in_shared=True, stages=2),  # 512: 0.924; without turns 0.890
        _Entry(128, 1, 32, 4, 4),  # 1024: 0.941
        _Entry(256, 1, 64, 4),  # 2048: 0.930
        _Entry(512, 1, 64, 8, in_shared=True),  # 4096: 0.956
        _Entry(1024, 1, 256, 4, in_shared=True),  # 8192: 0.905
        _Entry(2048, 1, 256, 8, in_shared=True),  # 16384: 0.883
        _Entry(4096, 1, 1024, 4, in_shared=True, stages=2),  # 32768: 0.840; a cluster of 4 without turns 0.762
        _Entry(8192, 8, 128, 8, in_shared=True),  # 65536: 0.765
        _Entry(16384, 16, 128, 8, in_shared=True),  # 131072: 0.707
        _Entry(32768, 8, 1024, 4, in_shared=True, stages=3),  # 262144: 0.663
    ),
    ("layer_norm", 4): (
        _Entry(64, 1, 32, 2, 4),  # 256: 1.04
        _Entry(128, 1, 64, 2),  # 512: 0.942
        _Entry(256, 1, 64, 4, in_shared=True),  # 1024: 0.952
        _Entry(512, 1, 64, 8, in_shared=True),  # 2048: 0.953
        _Entry(1024, 1, 256, 4),  # 4096: 0.959
        _Entry(2048, 1, 256, 8, in_shared=True),  # 8192: 0.963
        _Entry(4096, 2, 512, 4, in_shared=True, stages=4),  # 16384: 0.946
        _Entry(8192, 2, 512, 8, in_shared=True),  # 32768: 0.904
        _Entry(16384, 4, 1024, 4, in_shared=True, stages=3),  # 65536: 0.932; without turns 0.821
        _Entry(32768, 8, 1024, 4, in_shared=True, stages=3),  # 131072: 0.922; without turns 0.739
        _Entry(65536, 16, 1024, 4, in_shared=True, stages=3),  # 262144: 0.889; without turns 0.646
    ),
}
# Rows that are no whole vectors. Longer ones of an odd number of 16-bit elements are ragged: bfloat16, 4093 and 5121,
# RMSNorm 0.825 and 0.787. Others are read in registers by what divides them.
_UNEVEN_VECTORS = 256
_ODD_FORWARD = (_Entry(2048, 1, 256, 8, in_shared=True),)
_UNEVEN_FORWARD = (
    _Entry(32, 1, 32, 1, 8),
    _Entry(128, 1, 64, 2, 2),
    _Entry(256, 1, 128, 2),
    _Entry(512, 1, 128, 4),
    _Entry(4096, 1, 1024, 4),  # float32, 4097: RMSNorm 0.94, LayerNorm 0.74
)
# Where what the tables say does not fit: few rows of an array, or a device with little shared memory or no clusters.
_FORWARD_ELSEWHERE = (
    _Entry(4096, 1, 1024, 4, in_shared=True),
    _Entry(8192, 4, 512, 4, in_shared=True),
    _Entry(16384, 4, 512, 8, in_shared=True),
    _Entry(32768, 4, 1024, 8, in_shared=True),
    _Entry(32768, 8, 512, 8, in_shared=True),
    _Entry(65536, 16, 512, 8, in_shared=True),
    _Entry(131072, 16, 1024, 8, in_shared=True),
)
# Two rows are read where a residual is added: rows that several CTAs share leave less room.
_FORWARD_RESIDUAL = (
    _Entry(8192, 8, 128, 8, in_shared=True),  # bfloat16, 65536: 0.926; a cluster of 4 0.88
    _Entry(16384, 16, 128, 8, in_shared=True),  # 131072: 0.877
    _Entry(32768, 16, 512, 4, in_shared=True),  # 262144: 0.829
)

_BACKWARD = {
    ("rms_norm", 2): (
        _Entry(32, 1, 16, 2, 16, True, 2),  # 256: 0.762
        _Entry(64, 1, 32, 2, 16, True, 3),  # 512: 0.834
        _Entry(128, 1, 64, 2, 2, True, 4),  # 1024: 0.885
        _Entry(256, 1, 128, 2, 2, True, 4),  # 2048: 0.921
        _Entry(512, 1, 128, 4, 1, True, 4),  # 4096: 0.914
        _Entry(1024, 1, 512, 2, 1, True, 4),  # 8192: 0.948
        _Entry(2048, 4, 128, 4, 1, True, 4),  # 16384: 0.926
        _Entry(4096, 8, 128, 4, 1, True, 4),  # 32768: 0.914
        _Entry(8192, 4, 1024, 2, 1, True, 3),  # 65536: 0.923
        _Entry(16384, 8, 1024, 2, 1, True, 3),  # 131072: 0.909
        _Entry(32768, 16, 512, 4, 1, True, 3),  # 262144: 0.838
    ),
    ("rms_norm", 4): (
        _Entry(64, 1, 32, 2, 8, True, 3),  # 256: 0.788
        _Entry(128, 1, 128, 1, 2, True, 3),  # 512: 0.841
        _Entry(256, 1, 128, 2, 2, True, 4),  # 1024: 0.886
        _Entry(512, 1, 256, 2, 1, True, 4),  # 2048: 0.923
        _Entry(1024, 1, 512, 2, 1, True, 3),  # 4096: 0.943
        _Entry(2048, 1, 1024, 2, 1, True, 2),  # 8192: 0.953
        _Entry(4096, 2, 512, 4, 1, True, 3),  # 16384: 0.946
        _Entry(8192, 8, 256, 4, 1, True, 3),  # 32768: 0.916
        _Entry(16384, 8, 512, 4, 1, True, 3),  # 65536: 0.912
        _Entry(32768, 16, 1024, 2, 1, True, 3),  # 131072: 0.866
        _Entry(65536, 16, 512, 8, 1, True, 1),  # 262144: 0.500
    ),
    ("layer_norm", 2): (
        _Entry(32, 1, 16, 2, 16, True, 3),  # 256: 0.709
        _Entry(64, 1, 16, 4, 8, True, 3),  # 512: 0.773
        _Entry(128, 1, 32, 4, 4, True, 3),  # 1024: 0.832
        _Entry(256, 1, 128, 2, 1, True, 2),  # 2048: 0.891
        _Entry(512, 1, 128, 4, 1, True, 2),  # 4096: 0.904
        _Entry(1024, 2, 128, 4, 1, True, 4),  # 8192: 0.926
        _Entry(2048, 4, 128, 4, 1, True, 3),  # 16384: 0.898
        _Entry(4096, 8, 128, 4, 1, True, 3),  # 32768: 0.872
        _Entry(8192, 16, 128, 4, 1, True, 3),  # 65536: 0.803
        _Entry(16384, 8, 512, 4, 1, True, 2),  # 131072: 0.747
        _Entry(32768, 16, 512, 4, 1, True, 2),  # 262144: 0.641
    ),
    ("layer_norm", 4): (
        _Entry(64, 1, 32, 2, 8, True, 3),  # 256: 0.706
        _Entry(128, 1, 64, 2, 4, True, 4),  # 512: 0.783
        _Entry(256, 1, 64, 4, 2, True, 4),  # 1024: 0.844
        _Entry(512, 1, 256, 2, 1, True, 3),  # 2048: 0.906
        _Entry(1024, 1, 512, 2, 1, True, 3),  # 4096: 0.932
        _Entry(2048, 1, 512, 4, 1, True, 3),  # 8192: 0.937
        _Entry(4096, 2, 512, 4, 1, True, 3),  # 16384: 0.921
        _Entry(8192, 4, 512, 4, 1, True, 3),  # 32768: 0.899
        _Entry(16384, 8, 1024, 2, 1, True, 3),  # 65536: 0.889
        _Entry(32768, 16, 1024, 2, 1, True, 3),  # 131072: 0.876
        _Entry(65536, 16, 512, 8, 1, True, 1),  # 262144: 0.461
    ),
}
# Rows that are no whole vectors. bfloat16, 4093, 4097 and 5121: RMSNorm 0.754, 0.653, 0.656, LayerNorm 0.603, 0.523 and
# 0.516; float32: RMSNorm 0.814, 0.768, 0.737, LayerNorm 0.769, 0.614 and 0.689.
_UNEVEN_BACKWARD = {2: _Entry(1024, 1, 512, 2, 1, True, 2), 4: _Entry(2048, 1, 512, 4, 1, True, 2)}
_BACKWARD_ELSEWHERE = (
    _Entry(1024, 1, 512, 2, 1, True, 3),
    _Entry(2048, 1, 1024, 2, 1, True, 2),
    _Entry(4096, 4, 512, 2, 1, True, 3),
    _Entry(8192, 8, 512, 2, 1, True, 3),
    _Entry(16384, 16, 512, 2, 1, True, 2),
    _Entry(32768, 16, 1024, 2, 1, True, 1),
)


class _Division:
    """A row in vectors of 16 bytes, as the tables count them, and in those that it is really read in.

    Where 16 bytes do not divide a row, its rows are not all aligned to them: smaller vectors do, neighbouring threads
    read neighbouring ones, and a thread has as many elements as it would have had.
    """

    def __init__(self, hidden: int, rows: Sequence[DType], output: DType | None) -> None:
        widest: int = max(dtype.bytes for dtype in (*rows, *((output,) if output else ())))
        self.hidden = hidden
        self.bytes = widest
        self.full = min(16 // widest, _power_of_two(hidden))
        self.vectors = math.ceil(hidden / self.full)
        # What is copied to shared memory, is so by 4 bytes at least.
        self._narrowest = min(dtype.bytes for dtype in rows)

    def config(self, entry: _Entry, clusters: bool) -> NormConfig:
        """Return a table's configuration for this row.

        A row in shared memory that only single elements divide is ragged where all threads of a CTA bring it together.
        """
        ctas, threads, steps, rows, in_shared = entry.ctas, entry.threads, entry.steps, entry.rows, entry.in_shared
        vector = min(self.full, self.hidden & -self.hidden)
        if in_shared and vector * self._narrowest < 4:
            vector = self.full if rows == 1 else min(self.full, 4 // self._narrowest)
        if steps == 8 and self._padded(ctas, 4) * 10 < self._padded(ctas, 8) * 9:
            steps, threads = 4, 2 * threads
        # Rows that do not fill a CTA are faster in registers (float32, 3000: 0.987 instead of 0.894).
        if steps == 2 and not entry.stages and vector == self.full and self._padded(1, 2) != self.vectors:
            in_shared = False
        steps *= self.full // vector
        share = math.ceil(math.ceil(self.hidden / vector) / ctas)
        if threads <= 32:
            # A CTA has as many threads whatever the row: more rows where they are short.
            fewer = min(threads, _power_of_two(math.ceil(share / steps)))
            rows *= threads // fewer
            threads = fewer
        else:
            threads = min(threads, 32 * math.ceil(share / (32 * steps)))
        if rows == 1 and (entry.stages or ctas > 1):
            threads = max(threads, 64)  # several warps, whose barriers order what CTAs tell each other
        return NormConfig(threads, rows, vector, steps, ctas, clusters and ctas > 1, in_shared, entry.stages)

    def _padded(self, ctas: int, steps: int) -> int:
        """Return the vectors of whole warps that hold a CTA's part of a row."""
        return 32 * steps * math.ceil(self.vectors / (32 * steps * ctas))


def _choose(
    entries: Sequence[_Entry],
    division: _Division,
    limits: DeviceLimits,
    least_stages: int,
    fits: Callable[[NormConfig], bool],
) -> NormConfig | None:
    """Return the first configuration that holds the row; without clusters, rather one CTA than several."""
    clusters = limits.max_cluster_size > 1 and limits.max_ctas_per_row > 1
    most_ctas = min(limits.max_ctas_per_row, limits.max_cluster_size) if clusters else limits.max_ctas_per_row
    for several in (True,) if clusters else (False, True):
        for entry in entries:
            if division.vectors > entry.vectors or entry.ctas > (most_ctas if several else 1):
                continue
            for stages in range(entry.stages, min(entry.stages, least_stages) - 1, -1):
                config = division.config(entry._replace(stages=stages), clusters)
                if config.chunk * entry.ctas >= division.hidden and fits(config):
                    return config
    return None


def configure(
    norm: str, hidden: int, rows: Sequence[DType], output: DType, limits: DeviceLimits, in_turn: bool = True
) -> NormConfig:
    """Choose how a forward kernel's rows are divided.

    Parameters
    ----------
    norm : str
        ``"rms_norm"`` or ``"layer_norm"``.
    hidden : int
        Columns.
    rows : sequence of DType
        Of the arrays of rows that are read.
    output : DType
        Of y.
    limits : DeviceLimits
        Of the device.
    in_turn : bool
        Whether a CTA may take rows in turn through a ring.
    """
    division = _Division(hidden, rows, output)

    def fits(config: NormConfig) -> bool:
        # A ragged sum with a residual has a place of its own.
        held = (*rows, rows[-1]) if config.ragged(hidden) and len(rows) > 1 else rows
        if config.stages:
            return in_turn and _Slot(config, hidden, held, output).bytes + _RESERVED_SHARED <= shared
        separate = config.ragged(hidden) or output.bytes != rows[-1].bytes
        staged = (config.chunk + _PADDING) * (sum(dtype.bytes for dtype in held) + output.bytes * separate)
        return not config.in_shared or staged + _RESERVED_SHARED <= shared

    shared = limits.shared_memory_per_cta
    entries: tuple[_Entry, ...] = _FORWARD[norm, division.bytes]
    if len(rows) > 1:
        entries = (*(entry for entry in entries if entry.ctas == 1), *_FORWARD_RESIDUAL)
    if hidden % division.full:
        odd = hidden % 2 == 1 and division.bytes == 2 and division.vectors > _UNEVEN_VECTORS
        entries = (*(_ODD_FORWARD if odd else _UNEVEN_FORWARD), *entries)
    found = _choose((*entries, *_FORWARD_ELSEWHERE), division, limits, 2, fits)
    if found is not None:
        return found
    # Too long to be held: chunks of four vectors a thread, read again.
    clusters = limits.max_cluster_size > 1 and limits.max_ctas_per_row > 1
    ctas = min(limits.max_ctas_per_row, limits.max_cluster_size) if clusters else limits.max_ctas_per_row
    share = math.ceil(division.vectors / ctas)
    chunks = math.ceil(share / (1024 * 4))
    threads = _threads(math.ceil(share / chunks), 4)
    for steps in (4, 2, 1):
        config = division.config(_Entry(0, ctas, threads, steps), clusters)
        # Outputs that no vector fits are put together in shared memory.
        staged = (config.chunk + _PADDING) * (output.bytes + (rows[-1].bytes if len(rows) > 1 else 0))
        if staged + _RESERVED_SHARED <= shared:
            break
    return config


def configure_backward(
    norm: str, hidden: int, rows: Sequence[DType], output: DType | None, limits: DeviceLimits
) -> NormConfig | None:
    """Choose how a backward kernel's rows are divided.

    Parameters
    ----------
    norm : str
        ``"rms_norm"`` or ``"layer_norm"``.
    hidden : int
        Columns.
    rows : sequence of DType
        Of the arrays of rows that are read.
    output : DType or None
        Of dx; None: it is not asked for.
    limits : DeviceLimits
        Of the device.

    Returns
    -------
    NormConfig or None
        None: a row and its partial sums do not fit on the chip.
    """
    division = _Division(hidden, rows, output)

    def fits(config: NormConfig) -> bool:
        return _Slot(config, hidden, rows, output).bytes + _RESERVED_SHARED <= limits.shared_memory_per_cta

    entries: tuple[_Entry, ...] = _BACKWARD[norm, division.bytes]
    if hidden % division.full and division.vectors > _UNEVEN_VECTORS:
        entries = (_UNEVEN_BACKWARD[division.bytes], *entries)
    return _choose((*entries, *_BACKWARD_ELSEWHERE), division, limits, 1, fits)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


class _Regions:
    """What a CTA keeps in dynamic shared memory, one region behind the other."""

    def __init__(self, config: NormConfig) -> None:
        self._columns = config.chunk * config.rows_per_cta + _PADDING
        self.bytes = 0

    def add(self, dtype: DType) -> int:
        """Return where a region begins that holds a row of each of the CTA's rows."""
        start = self.bytes
        self.bytes += -(-self._columns * dtype.bytes // 16) * 16
        return start


class _Slot:
    """Where a kernel that takes rows in turn keeps what a row needs, and its output where no vector fits that."""

    def __init__(self, config: NormConfig, hidden: int, rows: Sequence[DType], output: DType | None) -> None:
        slot = _Regions(config)
        self.at = [slot.add(dtype) for dtype in rows]
        self.slot_bytes = slot.bytes
        # In the place of the slot's first row, of which each thread has read its part; not so a ragged one's.
        self.out_in_slot = output is not None and not config.ragged(hidden) and output.bytes == rows[0].bytes
        self.out_at = config.stages * slot.bytes
        self.bytes = self.out_at
        if output is not None and not self.out_in_slot:
            other = _Regions(config)
            other.add(output)
            self.bytes += other.bytes
        if config.rows_per_cta > 1:  # partial sums are added up there
            self.bytes = max(self.bytes, 4 * config.chunk * config.rows_per_cta)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _RowSpec(KernelSpec):
    """A specialised kernel that works on rows."""

    hidden: int
    config: NormConfig

    @property
    def chunks(self) -> int:
        return math.ceil(self.hidden / (self.config.ctas_per_row * self.config.chunk))

    @property
    def options(self) -> tuple[str, ...]:
        return ("--minimal",)  # without what a program does not use: texture functions and the like; 3 ms of 20

    def _program(
        self, template: str, types: dict[str, DType], flags: dict[str, bool], numbers: dict[str, int], shared_bytes: int
    ) -> str:
        config = self.config
        flags |= {"clusters": config.clusters, "in_shared": config.in_shared, "ragged": self.config.ragged(self.hidden)}
        numbers |= {
            "hidden": self.hidden,
            "threads": config.threads_per_row,
            "rows_per_cta": config.rows_per_cta,
            "vector": config.vector,
            "steps": config.steps,
            "chunks": self.chunks,
            "ctas_per_row": config.ctas_per_row,
            "stages": config.stages,
            "lag": config.lag,
        }
        lines = [f"  using {name} = {dtype.text};" for name, dtype in types.items()]
        for kind, values in (("bool", flags), ("int", numbers)):
            lines.append(f"  enum : {kind} {{")
            lines += [f"    {name} = {_text(value)}," for name, value in values.items()]
            lines.append("  };")
        bounds = str(config.threads)
        # Else the compiler spills, or does with few registers, to fit one more CTA: in a cooperative grid, which is
        # held back by its barrier anyway, or where shared memory has no place for it.
        if config.exchange == "grid" or 2 * (shared_bytes + _RESERVED_SHARED) > _SHARED_OF_MULTIPROCESSOR:
            bounds += ", 1"
        text = "\n".join(lines)
        return (
            '#include "norms.cu"\n\n'
            f"{self.params.text('Params')}\n"
            f"struct Traits {{\n{text}\n}};\n\n"
            f"TRTC_ENTRY TRTC_LAUNCH_BOUNDS({bounds}) void {self.symbol}(TRTC_PARAMETER Params params) {{\n"
            f"  trtc::{template}<trtc::NormConfig<Traits>>(params);\n"
            "}\n"
        )

    def _rule(self, values: int, dynamic_shared_memory: int, partial_bytes: int, persistent: bool) -> LaunchRule:
        config = self.config
        return LaunchRule(
            threads=config.threads,
            rows_per_cta=config.rows_per_cta,
            ctas_per_row=config.ctas_per_row,
            clusters=config.clusters,
            dynamic_shared_memory=dynamic_shared_memory,
            # trtc::GridWorkspace: in each buffer, a counter and the values of each CTA.
            workspace_bytes=4 * (2 + 2 * config.lag) * (1 + values * config.ctas_per_row)
            if config.exchange == "grid"
            else 0,
            partial_bytes=partial_bytes,
            persistent=persistent,
        )


def _row_fields(*arrays: str) -> tuple[Field, ...]:
    """Return the fields of arrays of rows, (name in the kernel, array), that follow the pointers."""
    return tuple(
        Field(f"{name}_{stride}", "int64", f"{_ARRAYS.get(name, name)}.{stride}")
        for name in arrays
        for stride in ("outer_stride", "inner_stride")
    )


def _pointers(*arrays: str) -> tuple[Field, ...]:
    return tuple(Field(name, "pointer", f"{_ARRAYS.get(name, name)}.data") for name in arrays)


# Kernels' names of arrays that a call names otherwise.
_ARRAYS = {"dx": "out"}

_GEOMETRY = (
    Field("rows", "int64", "rows"),
    Field("inner_count", "uint32", "inner_count"),
    Field("inner_magic", "uint32", "inner_magic"),
    Field("inner_shift", "uint32", "inner_shift"),
)
_HEADS = (
    Field("heads", "uint32", "heads"),
    Field("heads_magic", "uint32", "heads_magic"),
    Field("heads_shift", "uint32", "heads_shift"),
)
_REALS = (Field("eps", "float32", "eps"), Field("weight_offset", "float32", "weight_offset"))
_WORKSPACE = (Field("workspace", "pointer", "workspace"),)


def _present(**flags: object) -> tuple[str, ...]:
    return tuple(name for name, value in flags.items() if value)


@dataclass(frozen=True)
class ForwardSpec(_RowSpec):
    """A specialised forward kernel.

    Attributes
    ----------
    norm : str
        ``"rms_norm"`` or ``"layer_norm"``.
    input, output : DType
        Of x and of y.
    weight, bias : DType or None
        None: there is none.
    residual : DType or None
        Of the residual, and of the sum where it is added before.
    adds : str
        ``"before"`` or ``"after"``: where the residual is added; else empty.
    stores : tuple of str
        What else is written: of ``"mean"``, ``"rstd"``, ``"amax"``, ``"scale_inv"`` and ``"row_scale"``.
    scale : bool
        Whether y is multiplied by a scale.
    per_head : bool
        Whether each head has a weight and bias of its own.
    repeats : bool
        Whether a CTA takes several rows in turn.
    hidden : int
        Columns.
    config : NormConfig
        How a row is divided.
    """

    norm: str
    input: DType
    weight: DType | None
    bias: DType | None
    residual: DType | None
    adds: str
    output: DType
    stores: tuple[str, ...]
    scale: bool
    per_head: bool
    repeats: bool
    hidden: int
    config: NormConfig

    @property
    def symbol(self) -> str:
        before, after = ("add_" if self.adds == "before" else ""), ("_add" if self.adds == "after" else "")
        parts = [f"{before}{self.norm}{after}_forward", self.input.symbol]
        if self.weight is not self.input:
            parts.append(f"weight_{self.weight.symbol}" if self.weight else "no_weight")
        if self.bias:
            parts.append("bias" if self.bias is self.input else f"bias_{self.bias.symbol}")
        if self.residual and self.residual is not self.input:
            parts.append(f"residual_{self.residual.symbol}")
        if self.output is not self.input:
            parts.append(f"out_{self.output.symbol}")
        parts += self.stores
        parts += _present(scale=self.scale, heads=self.per_head, persistent=self.repeats)
        parts.append(f"h{self.hidden}_{self.config.symbol}")
        return "_".join(parts)

    @property
    def params(self) -> Params:
        before, after = self.adds == "before", self.adds == "after"
        rows = _present(x=True, residual=before or after, out=True, residual_out=before)
        others = _present(weight=self.weight, bias=self.bias, scale=self.scale)
        return Params(
            (
                *_pointers(*rows, *others, *self.stores),
                *(_WORKSPACE if self.config.exchange == "grid" else ()),
                *_row_fields(*rows),
                *_GEOMETRY,
                *(_HEADS if self.per_head else ()),
                *_REALS,
            )
        )

    @property
    def _held(self) -> DType:
        return self.residual if self.residual and self.adds == "before" else self.input

    def _layout(self) -> tuple[dict[str, int], int]:
        """Return where things are in shared memory, and its bytes."""
        if self.config.stages:
            rows = [self.input, *((self.residual,) if self.residual else ())]
            sums = [self._held] if self.adds == "before" and self.config.ragged(self.hidden) else []
            slot = _Slot(self.config, self.hidden, [*rows, *sums], self.output)
            at = {"residual_at": slot.at[len(rows) - 1], "sum_at": slot.at[-1], "out_at": slot.out_at}
            return at | {"slot_bytes": slot.slot_bytes, "out_in_slot": int(slot.out_in_slot)}, slot.bytes
        regions = _Regions(self.config)
        residual_at = sum_at = 0
        if self.config.in_shared:
            regions.add(self.input)
            if self.residual:
                residual_at = sum_at = regions.add(self.residual)
            # In a ragged row, a thread's columns may still be read by its neighbour.
            if self.config.ragged(self.hidden) and self.adds == "before":
                sum_at = regions.add(self._held)
            out_at = sum_at if self.adds == "before" else 0
            if self.config.ragged(self.hidden) or self.output.bytes != self._held.bytes:
                out_at = regions.add(self.output)
        else:  # only for outputs that no vector fits
            if self.adds == "before":
                sum_at = regions.add(self._held)
            out_at = regions.add(self.output)
        return {"residual_at": residual_at, "sum_at": sum_at, "out_at": out_at}, regions.bytes

    @property
    def program(self) -> str:
        types = {
            "Input": self.input,
            "Residual": self.residual or self.input,
            "Held": self._held,
            "Weight": self.weight or self.input,
            "Bias": self.bias or self.input,
            "Output": self.output,
        }
        flags = {
            "centred": self.norm == "layer_norm",
            "added_before": self.adds == "before",
            "added_after": self.adds == "after",
            "has_weight": self.weight is not None,
            "has_bias": self.bias is not None,
            "per_head": self.per_head,
            "has_scale": self.scale,
            "row_scaled": "row_scale" in self.stores,
            "repeats": self.repeats or self.config.stages > 0 or self.config.exchange == "grid",
        }
        flags |= {f"has_{name}": name in self.stores for name in ("mean", "rstd", "amax", "scale_inv")}
        template = "norm_forward_in_turn" if self.config.stages else "norm_forward"
        return self._program(template, types, flags, *self._layout())

    @property
    def launch_rule(self) -> LaunchRule:
        values = 3 if self.norm == "layer_norm" else 1
        return self._rule(values, self._layout()[1], 0, self.repeats or self.config.stages > 0)


@dataclass(frozen=True)
class BackwardSpec(_RowSpec):
    """A specialised backward kernel: dx, and partial sums of the weight's gradients.

    Attributes
    ----------
    norm : str
        ``"rms_norm"`` or ``"layer_norm"``.
    gradient, input : DType
        Of dy and of x.
    weight, residual, output : DType or None
        Of the weight, of dresidual and of dx; None: there is none.
    dweight, dbias : bool
        Whether they are asked for.
    statistics : bool
        Whether rstd, and for LayerNorm the mean, are given.
    per_head : bool
        Whether each head has a weight of its own.
    hidden : int
        Columns.
    config : NormConfig
        How a row is divided.
    """

    norm: str
    gradient: DType
    input: DType
    weight: DType | None
    residual: DType | None
    output: DType | None
    dweight: bool
    dbias: bool
    statistics: bool
    per_head: bool
    hidden: int
    config: NormConfig

    @property
    def symbol(self) -> str:
        parts = [f"{self.norm}_backward", self.input.symbol]
        if self.gradient is not self.input:
            parts.append(f"dy_{self.gradient.symbol}")
        if self.weight is not self.input:
            parts.append(f"weight_{self.weight.symbol}" if self.weight else "no_weight")
        if self.residual:
            parts.append("dresidual" if self.residual is self.input else f"dresidual_{self.residual.symbol}")
        if self.output is not self.input:
            parts.append(f"dx_{self.output.symbol}" if self.output else "no_dx")
        parts += _present(dweight=self.dweight, dbias=self.dbias, statistics=self.statistics, heads=self.per_head)
        parts.append(f"h{self.hidden}_{self.config.symbol}")
        return "_".join(parts)

    @property
    def needs_x(self) -> bool:
        """Whether x is read at all: dbias is dy's sum."""
        return self.output is not None or self.dweight

    @property
    def _rows(self) -> dict[str, DType]:
        """The arrays of rows that are read."""
        rows = {"x": self.input} if self.needs_x else {}
        rows["dy"] = self.gradient
        if self.residual and self.output:
            rows["dresidual"] = self.residual
        return rows

    @property
    def params(self) -> Params:
        rows = (*self._rows, *_present(dx=self.output))
        others = _present(
            weight=self.weight,
            mean=self.statistics and self.norm == "layer_norm",
            rstd=self.statistics,
        )
        partials = (Field("partials", "pointer", "partials"),) if self.dweight or self.dbias else ()
        return Params(
            (
                *_pointers(*rows, *others),
                *partials,
                *(_WORKSPACE if self.config.exchange == "grid" else ()),
                *_row_fields(*rows),
                *_GEOMETRY,
                *(_HEADS if self.per_head else ()),
                *_REALS,
            )
        )

    @property
    def _slot(self) -> _Slot:
        return _Slot(self.config, self.hidden, tuple(self._rows.values()), self.output)

    @property
    def program(self) -> str:
        types = {
            "Gradient": self.gradient,
            "Input": self.input,
            "Residual": self.residual or self.input,
            "Weight": self.weight or self.input,
            "Output": self.output or self.input,
        }
        weight_bytes = self.config.steps * self.config.vector * (self.weight.bytes if self.weight else 0)
        flags = {
            "centred": self.norm == "layer_norm",
            "has_weight": self.weight is not None and self.output is not None,
            "weight_held": weight_bytes <= _HELD_WEIGHT_BYTES,
            "per_head": self.per_head,
            "needs_x": self.needs_x,
            "has_dx": self.output is not None,
            "has_dweight": self.dweight,
            "has_dbias": self.dbias,
            "has_dresidual": "dresidual" in self._rows,
            "has_statistics": self.statistics,
            "repeats": True,
        }
        slot = self._slot
        at = dict(zip(self._rows, slot.at, strict=True))
        flags["out_in_slot"] = slot.out_in_slot
        numbers = {
            "gradients": self.dweight + self.dbias,
            "slot_bytes": slot.slot_bytes,
            "dy_at": at["dy"],
            "residual_at": at.get("dresidual", 0),
            "out_at": slot.out_at,
        }
        return self._program("norm_backward", types, flags, numbers, slot.bytes)

    @property
    def rows_per_group(self) -> int:
        """Rows of partial sums that a group of CTAs leaves."""
        return self.config.rows_per_cta if self.per_head else 1

    @property
    def launch_rule(self) -> LaunchRule:
        finds = self.needs_x and not self.statistics
        values = (5 if finds else 2) if self.norm == "layer_norm" else 2 if finds else 1
        partials = _partial_bytes(self.hidden, self.dweight + self.dbias, self.rows_per_group)
        return self._rule(values, self._slot.bytes, partials, True)._replace(whole_heads=self.per_head)


# More of the weight than this, in bytes of a thread, is read again for each row, from the L1 or L2 cache.
_HELD_WEIGHT_BYTES = 64


def _partial_bytes(hidden: int, gradients: int, rows_per_group: int) -> int:
    """Return the bytes of a group's partial sums, as trtc::partial_offset lays them out."""
    return 4 * gradients * rows_per_group * (-(-hidden // 8) * 8)


_FINISH_FIELDS = (
    Field("partials", "pointer", "partials"),
    Field("hidden", "int32", "columns"),
    Field("groups", "int32", "groups"),
    Field("heads", "uint32", "heads"),
)
# The first one whose launches may begin before the one before them has ended.
_EARLY_ARCHITECTURE = 90
# A CTA of trtc::norm_backward_finish.
_FINISH_RULE = LaunchRule(threads=1024, columns_per_cta=32)


@dataclass(frozen=True)
class FinishSpec(KernelSpec):
    """The backward's second launch, for any hidden size.

    Attributes
    ----------
    dweight, dbias : DType or None
        None: it is not asked for.
    rows_per_group : int
        Rows of partial sums that each group of CTAs has left.
    early : bool
        Whether it may begin before the first launch has ended.
    """

    dweight: DType | None
    dbias: DType | None
    rows_per_group: int
    early: bool

    @property
    def symbol(self) -> str:
        parts = ["norm_backward_finish"]
        parts += [f"dweight_{self.dweight.symbol}"] if self.dweight else []
        parts += [f"dbias_{self.dbias.symbol}"] if self.dbias else []
        parts.append(f"r{self.rows_per_group}")
        return "_".join((*parts, *_present(early=self.early)))

    @property
    def options(self) -> tuple[str, ...]:
        return ("--minimal",)

    @property
    def params(self) -> Params:
        return Params((*_pointers(*_present(dweight=self.dweight, dbias=self.dbias)), *_FINISH_FIELDS))

    @property
    def program(self) -> str:
        types = [(dtype or FLOAT32).text for dtype in (self.dweight, self.dbias)]
        flags = [_text(dtype is not None) for dtype in (self.dweight, self.dbias)]
        arguments = ", ".join((*types, *flags, str(self.rows_per_group), _text(self.early)))
        return (
            '#include "norms.cu"\n\n'
            f"{self.params.text('Params')}\n"
            f"TRTC_ENTRY TRTC_LAUNCH_BOUNDS({_FINISH_RULE.threads}) void {self.symbol}"
            "(TRTC_PARAMETER Params params) {\n"
            f"  trtc::norm_backward_finish<{arguments}>(params);\n"
            "}\n"
        )


# ---- The general kernels ---------------------------------------------------------------------------------------------

# Rows of at most this many columns are held by a warp.
_NARROW = 1024
# Threads of a row, and rows of a CTA.
_GENERAL_SHAPES = {"narrow": (32, 8), "wide": (512, 1)}
# Rows that a backward CTA takes together.
_GENERAL_BATCH = 8


def _general_pointers(names: Sequence[str], arrays: Sequence[str]) -> tuple[Field, ...]:
    return _of_arrays(_pointers(*names), arrays)


def _general_rows(names: Sequence[str], arrays: Sequence[str]) -> tuple[Field, ...]:
    return (*_of_arrays(_row_fields(*names), arrays), *_general_dtypes(names, arrays))


def _general_dtypes(names: Sequence[str], arrays: Sequence[str]) -> tuple[Field, ...]:
    fields = (Field(f"{name}_dtype", "int32", f"{_ARRAYS.get(name, name)}.dtype") for name in names)
    return _of_arrays(tuple(fields), arrays)


def _of_arrays(fields: Sequence[Field], arrays: Sequence[str]) -> tuple[Field, ...]:
    """Return fields; those of arrays that the operator does not have are zero."""
    return tuple(
        field if field.source.partition(".")[0] in arrays else Field(field.name, field.type) for field in fields
    )


def _general_forward(arrays: Sequence[str]) -> Params:
    rows = ("x", "residual", "out", "residual_out")
    columns = ("weight", "bias")
    others = ("mean", "rstd", "scale", "amax", "scale_inv", "row_scale")
    return Params(
        (
            *_general_pointers((*rows, *columns, *others), arrays),
            *_general_rows(rows, arrays),
            *_GEOMETRY,
            *_HEADS,
            *_REALS,
            Field("hidden", "int32", "columns"),
            *_general_dtypes(columns, arrays),
        )
    )


def _general_backward(arrays: Sequence[str]) -> Params:
    rows = ("dy", "x", "dresidual", "dx")
    return Params(
        (
            *_general_pointers((*rows, "weight", "mean", "rstd"), arrays),
            Field("partials", "pointer", "partials"),
            *_general_rows(rows, arrays),
            *_GEOMETRY,
            *_HEADS,
            *_REALS,
            Field("hidden", "int32", "columns"),
            *_general_dtypes(("weight", "dweight", "dbias"), arrays),
        )
    )


def _general_finish() -> Params:
    gradients = ("dweight", "dbias")
    return Params((*_pointers(*gradients), *_FINISH_FIELDS, *_general_dtypes(gradients, gradients)))


def _general_entries() -> dict[str, tuple[Params, int, str]]:
    """Return the general kernels: the parameters, threads and template of each."""
    entries = {}
    for shape, (threads, rows) in _GENERAL_SHAPES.items():
        for norm in ("rms_norm", "layer_norm"):
            centred = _text(norm == "layer_norm")
            entries[f"{norm}_forward_{shape}"] = (
                _general_forward(()), threads * rows, f"norm_forward_rows<{centred}, {threads}, {rows}>"
            )  # fmt: skip
            for heads in (False, True):
                template = f"norm_backward_rows<{centred}, {threads}, {rows}, {_GENERAL_BATCH}, {_text(heads)}>"
                name = f"{norm}_backward_{shape}{'_heads' if heads else ''}"
                entries[name] = _general_backward(()), threads * rows, template
    for heads, per_group in ((False, 1), (True, _GENERAL_BATCH)):
        entries[f"norm_backward_finish{'_heads' if heads else ''}"] = (
            _general_finish(), _FINISH_RULE.threads, f"norm_backward_finish_rows<{per_group}>"
        )  # fmt: skip
    return entries


def _general_text(symbol: str, template: str, threads: int, params: str) -> str:
    return (
        f"\nTRTC_ENTRY TRTC_LAUNCH_BOUNDS({threads}) void {symbol}(TRTC_PARAMETER {params} params) {{\n"
        f"  trtc::{template}(params);\n"
        "}\n"
    )


def _general_program(symbols: Sequence[str]) -> str:
    entries = {symbol: entry for symbol, entry in _general_entries().items() if symbol in symbols}
    text, named = '#include "norms.cu"\n', dict[str, str]()
    for symbol, (params, threads, template) in entries.items():
        name = named.setdefault(params.text("Params"), f"Params{len(named)}")
        if name == f"Params{len(named) - 1}" and f"struct {name} " not in text:
            text += "\n" + params.text(name)
        text += _general_text(symbol, template, threads, name)
    return text


@dataclass(frozen=True)
class GeneralSpec(KernelSpec):
    """A general kernel compiled at run time: for rows that, with what belongs to them, do not fit on the chip.

    Attributes
    ----------
    name : str
        The kernel's.
    arrays : tuple of str
        What its operator has.
    """

    name: str
    arrays: tuple[str, ...]

    @property
    def symbol(self) -> str:
        return self.name

    @property
    def options(self) -> tuple[str, ...]:
        return ("--minimal",)

    @property
    def params(self) -> Params:
        return _general_params(self.name, self.arrays)

    @property
    def program(self) -> str:
        return _general_program((self.name,))


def _general_params(symbol: str, arrays: Sequence[str]) -> Params:
    if "finish" in symbol:
        return _general_finish()
    return _general_backward(arrays) if "backward" in symbol else _general_forward(arrays)


# ---- The family ------------------------------------------------------------------------------------------------------


def _check(request: Request) -> None:
    """Refuse what types and presence alone tell to be wrong."""
    dtypes, operator = request.dtypes, request.operator
    out = dtypes.get("out")

    def refuse(what: str) -> None:
        raise ArgumentError(f"{operator}: {what}")

    if "backward" in operator:
        if "mean" in dtypes and (dtypes["mean"] is None) != (dtypes["rstd"] is None):
            refuse("mean and rstd must be given together; one of them is None")
        return
    assert out is not None
    if dtypes.get("residual_out") not in (None, dtypes.get("residual")):
        found, wanted = dtypes["residual_out"], dtypes["residual"]
        assert found is not None and wanted is not None
        refuse(f"residual_out must be {wanted.name} like residual; it is {found.name}")
    quantized = out in _FLOAT8 or out is INT8
    if dtypes.get("row_scale") is not None:
        if not quantized:
            refuse(f"row_scaling needs an output of float8_e4m3fn, float8_e5m2 or int8; it is {out.name}")
        for name in ("scale", "amax", "scale_inv"):
            if dtypes[name] is not None:
                refuse(f"{name} and row_scaling exclude each other")
    elif out is INT8:
        refuse("an output of int8 needs row_scaling")
    for name in ("scale", "amax", "scale_inv"):
        if dtypes.get(name) is not None and out not in _FLOAT8:
            refuse(f"{name} needs an output of float8_e4m3fn or float8_e5m2; it is {out.name}")
    if dtypes.get("scale_inv") is not None and dtypes["scale"] is None:
        refuse("scale_inv needs a scale")


class _NormFamily:
    name = "norms"
    # Of each operator: the norm, and where it adds a residual.
    OPERATORS: ClassVar[dict[str, tuple[str, str]]] = {
        "rms_norm": ("rms_norm", ""),
        "layer_norm": ("layer_norm", ""),
        "add_rms_norm": ("rms_norm", "before"),
        "add_layer_norm": ("layer_norm", "before"),
        "rms_norm_add": ("rms_norm", "after"),
        "layer_norm_add": ("layer_norm", "after"),
        "rms_norm_backward": ("rms_norm", ""),
        "layer_norm_backward": ("layer_norm", ""),
    }

    def specialise(self, request: Request, limits: DeviceLimits) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        _check(request)
        if "backward" in request.operator:
            return self._backward(request, limits)
        spec = forward_spec(request, limits)
        return ((spec, spec.launch_rule),)

    def _backward(self, request: Request, limits: DeviceLimits) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        spec = backward_spec(request, limits)
        dweight, dbias = request.dtypes["dweight"], request.dtypes["dbias"]
        if spec is None:
            launches = self._general(request)
            arrays = tuple(request.dtypes)
            return tuple((GeneralSpec(symbol, arrays), rule) for symbol, rule in launches)
        first = (spec, spec.launch_rule)
        if dweight is None and dbias is None:
            return (first,)
        early = limits.architecture >= _EARLY_ARCHITECTURE
        finish = FinishSpec(dweight, dbias, spec.rows_per_group, early)
        return first, (finish, _FINISH_RULE._replace(early=early))

    def _general(self, request: Request) -> tuple[tuple[str, LaunchRule], ...]:
        """Return the general kernels of a call, and how they are launched."""
        norm, _ = self.OPERATORS[request.operator]
        shape = "narrow" if request.columns <= _NARROW else "wide"
        threads, rows = _GENERAL_SHAPES[shape]
        if "backward" not in request.operator:
            return ((f"{norm}_forward_{shape}", LaunchRule(threads * rows, rows, persistent=request.margin)),)
        heads = "_heads" if request.per_head else ""
        gradients = sum(request.dtypes[name] is not None for name in ("dweight", "dbias"))
        partials = _partial_bytes(request.columns, gradients, _GENERAL_BATCH if request.per_head else 1)
        rule = LaunchRule(
            threads * rows, _GENERAL_BATCH, partial_bytes=partials, persistent=True, whole_heads=request.per_head
        )
        first = (f"{norm}_backward_{shape}{heads}", rule)
        return (first, (f"norm_backward_finish{heads}", _FINISH_RULE)) if gradients else (first,)

    def static(self, request: Request) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        _check(request)
        arrays = tuple(request.dtypes)
        return tuple(
            (StaticKernel(symbol, _general_params(symbol, arrays)), rule) for symbol, rule in self._general(request)
        )

    def static_program(self) -> str:
        return _general_program(tuple(_general_entries()))


def forward_spec(request: Request, limits: DeviceLimits) -> ForwardSpec:
    """Return the kernel of a forward operator."""
    dtypes = request.dtypes
    norm, adds = _NormFamily.OPERATORS[request.operator]
    x, out, residual = dtypes["x"], dtypes["out"], dtypes.get("residual")
    assert x is not None and out is not None
    rows = (x, residual) if residual else (x,)
    # What a CTA that takes rows in turn keeps of the weight is of all rows; and it stores a row once.
    in_turn = not request.per_head and dtypes.get("row_scale") is None
    config = configure(norm, request.columns, rows, out, limits, in_turn)
    return ForwardSpec(
        norm=norm,
        input=x,
        weight=dtypes["weight"],
        bias=dtypes["bias"],
        residual=residual,
        adds=adds,
        output=out,
        stores=tuple(
            name for name in ("mean", "rstd", "amax", "scale_inv", "row_scale") if dtypes.get(name) is not None
        ),
        scale=dtypes.get("scale") is not None,
        per_head=request.per_head,
        # Where they do not anyway.
        repeats=request.margin and config.stages == 0 and config.exchange != "grid",
        hidden=request.columns,
        config=config,
    )


def backward_spec(request: Request, limits: DeviceLimits) -> BackwardSpec | None:
    """Return the first kernel of a backward operator; None: only the general one holds its rows."""
    dtypes = request.dtypes
    norm, _ = _NormFamily.OPERATORS[request.operator]
    dy, x, out = dtypes["dy"], dtypes["x"], dtypes["out"]
    assert dy is not None and x is not None
    dweight, dbias = dtypes["dweight"] is not None, dtypes["dbias"] is not None
    residual = dtypes["dresidual"] if out else None
    rows = (*((x,) if out or dweight else ()), dy, *((residual,) if residual else ()))
    config = configure_backward(norm, request.columns, rows, out, limits)
    if config is None:
        return None
    return BackwardSpec(
        norm=norm,
        gradient=dy,
        input=x,
        weight=dtypes["weight"] if out else None,
        residual=residual,
        output=out,
        dweight=dweight,
        dbias=dbias,
        statistics=dtypes["rstd"] is not None,
        per_head=request.per_head,
        hidden=request.columns,
        config=config,
    )


# ---- Operators -------------------------------------------------------------------------------------------------------

_FAMILY = _NormFamily()
_SCALING = (
    Argument("scale", "value", (FLOAT32,), optional=True),
    Argument("amax", "value_out", (FLOAT32,), optional=True),
    Argument("scale_inv", "value_out", (FLOAT32,), optional=True),
)
_LAST = (Argument("sm_margin", "sm_margin"), Argument("stream", "stream"))


def _forward_operator(name: str) -> Operator:
    norm, adds = _NormFamily.OPERATORS[name]
    types = _FLOATS if adds == "after" else _QUANTIZED
    arguments = [Argument("x", "rows", _FLOATS)]
    if adds:
        arguments.append(Argument("residual", "rows", _FLOATS))
    arguments += [
        Argument("weight", "columns", _FLOATS, optional=True),
        Argument("bias", "columns", _FLOATS, optional=True),
        Argument("eps", "real"),
        Argument("weight_offset", "real"),
        Argument("out", "rows_out", types, like="residual" if adds == "after" else ""),
        Argument("out_dtype", "dtype_out", types, of=("out",)),
    ]
    if adds == "before":
        arguments.append(Argument("residual_out", "rows_out", _FLOATS, like="residual"))
    if norm == "layer_norm":
        arguments.append(Argument("mean", "row_values", (FLOAT32,)))
    arguments.append(Argument("rstd", "row_values", (FLOAT32,)))
    if adds != "after":
        arguments += [*_SCALING, Argument("row_scale", "row_values", (FLOAT32,))]
    return Operator(name, _FAMILY, (*arguments, *_LAST))


def _backward_operator(name: str) -> Operator:
    norm, _ = _NormFamily.OPERATORS[name]
    statistics = ("mean", "rstd") if norm == "layer_norm" else ("rstd",)
    return Operator(
        name,
        _FAMILY,
        (
            Argument("dy", "rows", _FLOATS),
            Argument("x", "rows", _FLOATS),
            Argument("weight", "columns", _FLOATS, optional=True),
            Argument("eps", "real"),
            *(Argument(statistic, "row_inputs", (FLOAT32,), optional=True) for statistic in statistics),
            Argument("dresidual", "rows", _FLOATS, optional=True),
            Argument("weight_offset", "real"),
            Argument("out", "rows_out", _FLOATS, like="x"),
            Argument("out_dtype", "dtype_out", _FLOATS, of=("out",)),
            Argument("return_dx", "wanted", of=("out",)),
            Argument("dweight", "column_values", _FLOATS, like="weight"),
            Argument("dbias", "column_values", _FLOATS, like="weight"),
            Argument("dweight_dtype", "dtype_out", _FLOATS, of=("dweight", "dbias")),
            *_LAST,
        ),
    )


_rms_norm = _forward_operator("rms_norm").call
_layer_norm = _forward_operator("layer_norm").call
_add_rms_norm = _forward_operator("add_rms_norm").call
_add_layer_norm = _forward_operator("add_layer_norm").call
_rms_norm_add = _forward_operator("rms_norm_add").call
_layer_norm_add = _forward_operator("layer_norm_add").call
_rms_norm_backward = _backward_operator("rms_norm_backward").call
_layer_norm_backward = _backward_operator("layer_norm_backward").call


def rms_norm(
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize each row by its root mean square.

    ``y = x * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(mean(x ** 2) + eps)`` over the last
    dimension (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). Arithmetic is in float32, and y is
    rounded once. A row's bits do not depend on how many rows there are, nor on where they lie.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        On a GPU; an array on the host is staged through the current GPU, and so is y. The last dimension is contiguous
        and has 1 to 2**30 elements; the others collapse to at most two strides, as rows and heads of a packed qkv do.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        One for all rows, or one for each head of an x [..., heads, hidden]. None: 1, whatever `weight_offset`.
    eps : float
        Added to the mean of squares.
    bias : array like weight, optional
        None: 0.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array like x, optional
        Where y is written: x itself, or an array that shares no element with the inputs.
    out_dtype : data type, optional
        Of y where `out` is not given, of any framework or by name; x's by default. float32, float16, bfloat16;
        float8_e4m3fn, float8_e5m2 or int8, which saturate.
    return_rstd : bool
        Whether to return rstd as well.
    scale : array of one float32, optional
        For an output of float8: y is multiplied by it before it is rounded.
    amax : array of one float32, optional
        For an output of float8: becomes the maximum of what it holds and of the magnitudes of y before the scale; NaN
        if there is one.
    scale_inv : array of one float32, optional
        Becomes ``1 / scale``. These three are TransformerEngine's.
    row_scaling : bool
        For an output of float8 or int8: each row is divided by a scale of its own, its largest magnitude over the
        largest number of the type, 1 for a row of zeros; and these scales are returned: ``y = out * row_scale``.
    sm_margin : int
        Multiprocessors to leave to others, such as communication that runs beside: the launch has no more CTAs than the
        remaining ones hold, each of which takes rows in turn. A kernel of its own.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the framework's
        current stream.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    rstd : array [...], float32
        Only if `return_rstd`.
    row_scale : array [...], float32
        Only if `row_scaling`.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _rms_norm(
        x, weight, bias, eps, weight_offset, out, out_dtype, return_rstd, scale, amax, scale_inv, row_scaling,
        sm_margin, stream,
    )  # fmt: skip


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_mean: bool = False,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize each row to mean 0 and variance 1.

    ``y = (x - mean) * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(variance + eps)`` over the last
    dimension, the variance being that of the population (Ba, Kiros and Hinton, "Layer Normalization", 2016). It is
    computed about the mean, in float32: a row of large equal numbers with little noise keeps its accuracy.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        As `rms_norm` takes it.
    weight, bias : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        As `rms_norm` takes them.
    eps : float
        Added to the variance.
    weight_offset, out, out_dtype, scale, amax, scale_inv, row_scaling, sm_margin, stream
        As `rms_norm` takes them.
    return_mean, return_rstd : bool
        Whether to return them as well.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    mean, rstd, row_scale : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _layer_norm(
        x, weight, bias, eps, weight_offset, out, out_dtype, return_mean, return_rstd, scale, amax, scale_inv,
        row_scaling, sm_margin, stream,
    )  # fmt: skip


def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    residual_out: Any = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Add a residual, then normalize: ``s = x + residual``, ``y = rms_norm(s, weight, eps)``.

    s is rounded to the residual's type, and it is the rounded s that is normalized: the same bits as two calls give. A
    pre-norm transformer passes s on as the next residual, a post-norm one passes y. The gradient is that of
    `add_rms_norm_backward`.

    Parameters
    ----------
    x, residual : array [..., hidden], float32, float16 or bfloat16
        Of one shape.
    weight, eps, bias, weight_offset, out_dtype, return_rstd, scale, amax, scale_inv, row_scaling, sm_margin, stream
        As `rms_norm` takes them.
    out, residual_out : array like x and like residual, optional
        Where y and s are written. Either may be x itself or residual itself: out=x and residual_out=residual is in
        place.

    Returns
    -------
    y : array [..., hidden]
        Of x's type, or as asked for.
    s : array [..., hidden]
        Of residual's type.
    rstd, row_scale : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _add_rms_norm(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, residual_out, return_rstd, scale, amax,
        scale_inv, row_scaling, sm_margin, stream,
    )  # fmt: skip


def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out: Any = None,
    residual_out: Any = None,
    out_dtype: Any = None,
    return_mean: bool = False,
    return_rstd: bool = False,
    scale: Any = None,
    amax: Any = None,
    scale_inv: Any = None,
    row_scaling: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Add a residual, then normalize: ``s = x + residual``, ``y = layer_norm(s, weight, bias, eps)``.

    As `add_rms_norm` does it; the gradient is that of `add_layer_norm_backward`.

    Parameters
    ----------
    x, residual, out, residual_out
        As `add_rms_norm` takes them.
    weight, bias, eps, weight_offset, out_dtype, return_mean, return_rstd, scale, amax, scale_inv, row_scaling, \
sm_margin, stream
        As `layer_norm` takes them.

    Returns
    -------
    y, s : array [..., hidden]
        As `add_rms_norm` returns them.
    mean, rstd, row_scale : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _add_layer_norm(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, residual_out, return_mean, return_rstd, scale,
        amax, scale_inv, row_scaling, sm_margin, stream,
    )  # fmt: skip


def rms_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize, then add a residual: ``y = residual + rms_norm(x, weight, eps)``, rounded once.

    The form of Gemma 2 and OLMo 2. The gradient of residual is that of y, the others' are those of
    `rms_norm_add_backward`.

    Parameters
    ----------
    x, residual : array [..., hidden], float32, float16 or bfloat16
        Of one shape.
    weight, eps, bias, weight_offset, return_rstd, sm_margin, stream
        As `rms_norm` takes them.
    out : array like residual, optional
        Where y is written; it may be residual itself or x itself.
    out_dtype : data type, optional
        Of y where `out` is not given: float32, float16 or bfloat16; residual's by default.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    rstd : array [...], float32
        Only if `return_rstd`.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _rms_norm_add(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, return_rstd, sm_margin, stream
    )  # fmt: skip


def layer_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_mean: bool = False,
    return_rstd: bool = False,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Normalize, then add a residual: ``y = residual + layer_norm(x, weight, bias, eps)``, rounded once.

    As `rms_norm_add` does it; the gradients are those of `layer_norm_add_backward`.

    Parameters
    ----------
    x, residual, out, out_dtype
        As `rms_norm_add` takes them.
    weight, bias, eps, weight_offset, return_mean, return_rstd, sm_margin, stream
        As `layer_norm` takes them.

    Returns
    -------
    y : array [..., hidden]
        Of x's framework, or `out`.
    mean, rstd : array [...], float32
        Those that are asked for, in this order.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return _layer_norm_add(
        x, residual, weight, bias, eps, weight_offset, out, out_dtype, return_mean, return_rstd, sm_margin, stream
    )  # fmt: skip


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    rstd: Any = None,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool = False,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `rms_norm`: dx, dweight and dbias, or those of them that are asked for.

    With ``x' = x * rstd`` and ``g = dy * (weight + weight_offset)``::

        dx      = rstd * (g - x' * mean(g * x')) + dresidual     over the last dimension
        dweight = sum(dy * x')                                   over all others, but for the heads
        dbias   = sum(dy)

    (Zhang and Sennrich, 2019, appendix.) Arithmetic and the sums over rows are in float32, and each result is rounded
    once. dweight and dbias are added up in an order that the device and the shape fix: the same bits in every run. A
    row's dx depends on no other row. What is not asked for costs nothing.

    Parameters
    ----------
    dy, x : array [..., hidden], float32, float16 or bfloat16
        The gradient of y, and what the forward call was given; of one shape, as `rms_norm` takes x.
    weight : array [hidden] or [heads, hidden], float32, float16 or bfloat16, optional
        The forward call's.
    eps, weight_offset : float
        The forward call's.
    rstd : array [...], float32, optional
        The forward call's; None: computed again from x and eps, in the same launch.
    dresidual : array [..., hidden], float32, float16 or bfloat16, optional
        A gradient that is added to dx.
    out : array like x, optional
        Where dx is written: dy, x or dresidual itself, or an array that shares no element with them.
    out_dtype : data type, optional
        Of dx where `out` is not given: float32, float16 or bfloat16; x's by default.
    return_dx, return_dweight, return_dbias : bool
        Which gradients to compute. `return_dweight` is by default whether a weight is given.
    dweight_dtype : data type, optional
        Of dweight and dbias; the weight's by default, dy's where there is none.
    sm_margin, stream
        As `rms_norm` takes them.

    Returns
    -------
    dx : array [..., hidden]
        If `return_dx`.
    dweight, dbias : array like weight; [hidden] where there is none
        If `return_dweight`, if `return_dbias`.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    return _rms_norm_backward(
        dy, x, weight, eps, rstd, dresidual, weight_offset, out, out_dtype, return_dx, return_dweight, return_dbias,
        dweight_dtype, sm_margin, stream,
    )  # fmt: skip


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    eps: float = 1e-5,
    *,
    mean: Any = None,
    rstd: Any = None,
    dresidual: Any = None,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_dx: bool = True,
    return_dweight: bool | None = None,
    return_dbias: bool | None = None,
    dweight_dtype: Any = None,
    sm_margin: int = 0,
    stream: Any = None,
) -> Any:
    """Return the gradients of `layer_norm`: dx, dweight and dbias, or those of them that are asked for.

    With ``x' = (x - mean) * rstd`` and ``g = dy * (weight + weight_offset)``::

        dx      = rstd * (g - mean(g) - x' * mean(g * x')) + dresidual     over the last dimension
        dweight = sum(dy * x')                                             over all others, but for the heads
        dbias   = sum(dy)

    (Ba, Kiros and Hinton, 2016.) Otherwise as `rms_norm_backward` does it.

    Parameters
    ----------
    dy, x, weight, eps, dresidual, weight_offset, out, out_dtype, return_dx, dweight_dtype, sm_margin, stream
        As `rms_norm_backward` takes them.
    mean, rstd : array [...], float32, optional
        The forward call's, both or neither; None: computed again from x and eps, in the same launch.
    return_dweight, return_dbias : bool
        Whether to compute them; by default whether a weight is given.

    Returns
    -------
    dx, dweight, dbias
        As `rms_norm_backward` returns them.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    if return_dweight is None:
        return_dweight = weight is not None
    if return_dbias is None:
        return_dbias = weight is not None
    return _layer_norm_backward(
        dy, x, weight, eps, mean, rstd, dresidual, weight_offset, out, out_dtype, return_dx, return_dweight,
        return_dbias, dweight_dtype, sm_margin, stream,
    )  # fmt: skip


def add_rms_norm_backward(dy: Any, ds: Any, s: Any, weight: Any = None, eps: float = 1e-6, **options: Any) -> Any:
    """Return the gradients of `add_rms_norm`, whose outputs are y and s.

    x and residual have the same gradient, ``rms_norm_backward(dy, s, weight, eps, dresidual=ds)``: one launch adds ds.

    Parameters
    ----------
    dy, ds : array [..., hidden], float32, float16 or bfloat16
        The gradients of y and of s; ds is None where s is not used.
    s : array [..., hidden]
        What the forward call returned.
    weight, eps
        The forward call's.
    **options
        As `rms_norm_backward` takes them, but for dresidual.

    Returns
    -------
    dx, dweight, dbias
        As `rms_norm_backward` returns them; dx is the gradient of x and of residual.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return rms_norm_backward(dy, s, weight, eps, dresidual=ds, **options)


def add_layer_norm_backward(dy: Any, ds: Any, s: Any, weight: Any = None, eps: float = 1e-5, **options: Any) -> Any:
    """Return the gradients of `add_layer_norm`, whose outputs are y and s.

    x and residual have the same gradient, ``layer_norm_backward(dy, s, weight, eps, dresidual=ds)``.

    Parameters
    ----------
    dy, ds, s, weight, eps
        As `add_rms_norm_backward` takes them.
    **options
        As `layer_norm_backward` takes them, but for dresidual.

    Returns
    -------
    dx, dweight, dbias
        As `layer_norm_backward` returns them; dx is the gradient of x and of residual.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return layer_norm_backward(dy, s, weight, eps, dresidual=ds, **options)


def rms_norm_add_backward(dy: Any, x: Any, weight: Any = None, eps: float = 1e-6, **options: Any) -> Any:
    """Return the gradients of `rms_norm_add` but for residual's, which is dy: those of `rms_norm`.

    Parameters
    ----------
    dy, x, weight, eps
        As `rms_norm_backward` takes them.
    **options
        Likewise.

    Returns
    -------
    dx, dweight, dbias
        As `rms_norm_backward` returns them.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return rms_norm_backward(dy, x, weight, eps, **options)


def layer_norm_add_backward(dy: Any, x: Any, weight: Any = None, eps: float = 1e-5, **options: Any) -> Any:
    """Return the gradients of `layer_norm_add` but for residual's, which is dy: those of `layer_norm`.

    Parameters
    ----------
    dy, x, weight, eps
        As `layer_norm_backward` takes them.
    **options
        Likewise.

    Returns
    -------
    dx, dweight, dbias
        As `layer_norm_backward` returns them.

    Raises
    ------
    ArgumentError
        If an argument is not as described, before anything is launched.
    CompileError, CompilerNotFoundError, DeviceNotFoundError, DriverError, StaticKernelError
        If there is no way to run.
    """
    return layer_norm_backward(dy, x, weight, eps, **options)
