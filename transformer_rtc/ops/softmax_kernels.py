"""The kernels of softmax: which are taken for rows of which length, their programs, and how they are launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .. import _native
from ..dispatch import OF_HEADS, LaunchRule, Request
from ..spec import BOOL, DeviceLimits, DType, Field, KernelSpec, Params
from .programs import (
    GEOMETRY,
    MINIMAL,
    ROW_SHAPES,
    WORKSPACE,
    GeneralKernel,
    RowDivision,
    dtypes,
    entry,
    entry_rule,
    general_program,
    literal,
    memoised_params,
    of_arrays,
    pointers,
    present,
    row_fields,
    shape_of,
    traits,
)

__all__ = [
    "BUCKETS",
    "MaskGradientSpec",
    "SinkGradientSpec",
    "SoftmaxBackwardSpec",
    "SoftmaxConfig",
    "SoftmaxForwardSpec",
    "configure",
    "general_launches",
    "general_params",
    "static_program",
]

# Rows of up to so many columns are launched alike: a length is no part of a key. Long ones in steps of a quarter at
# most, as what is staged takes as much shared memory as the longest one needs.
BUCKETS = (
    *(32, 64, 128, 256, 512, 1024, 2048),
    *(quarters << shift for shift in range(9, 27) for quarters in (5, 6, 7, 8)),
    _native.MOST_COLUMNS,
)


@dataclass(frozen=True)
class SoftmaxConfig(RowDivision):
    """How a row is divided.

    Attributes
    ----------
    chunked : bool
        Whether a CTA's part of a row may be longer than what its threads hold: it is read twice then.
    staged : bool
        Whether a CTA's part of a row is in shared memory; else its threads hold it.
    in_turn : bool
        Whether CTAs take rows in turn, the next of which comes to shared memory while their threads hold one: of the
        backward alone, and where all columns take part.
    tiled : bool
        Whether a thread has a row, and a warp brings those of its threads through shared memory: where all columns take
        part.
    """

    chunked: bool = False
    staged: bool = False
    in_turn: bool = False
    tiled: bool = False

    @property
    def takes_turns(self) -> bool:
        """Whether a launch has as many CTAs as are resident together."""
        return self.in_turn or self.tiled

    @property
    def bounds(self) -> str:
        """A kernel's launch bounds: whole CTAs whose threads hold a row have 64 registers, and are 1024 threads."""
        few = self.staged or self.threads_per_row < 128
        return f"{self.threads}" if few else f"{self.threads}, {max(1, 1024 // self.threads)}"

    @property
    def symbol(self) -> str:
        return "_".join(
            (super().symbol, *present(chunked=self.chunked, staged=self.staged, in_turn=self.in_turn, tiled=self.tiled))
        )

    def shared_memory(self, columns: int, staged: Sequence[DType]) -> int:
        """Return the bytes that a CTA needs for arrays of these types, of rows of so many columns."""
        if self.in_turn:
            return sum(self.threads * self.steps * self.vector * dtype.bytes for dtype in staged)
        if self.tiled:
            return 2 * self.threads * self.steps * 16 * len(staged)  # of each, what the widest array has, and the next
        if not self.staged:
            return 0
        unit = self.vector * self.ctas_per_row
        slice_columns = columns if self.ctas_per_row == 1 else -(-columns // unit) * self.vector
        # trtc::Blocks::room and trtc::staged_bytes.
        elements = (slice_columns + 2 * self.vector - 2) // self.vector * self.vector
        return sum(-(-elements * dtype.bytes // 16) * 16 for dtype in staged)


class _Entry(NamedTuple):
    """A line of a table: vectors of 16 bytes of the widest array that a row may have, and how it is divided.

    Where there are no `steps`, the row is staged in shared memory. A line with `bytes` is for elements of so many
    alone, and where it has several CTAs, for clusters. `in_turn`: where shared memory has room for the next row.
    `tiled`: as `SoftmaxConfig` has it.
    """

    vectors: int
    threads: int
    steps: int = 0
    rows: int = 1
    ctas: int = 1
    bytes: int = 0
    in_turn: bool = False
    tiled: bool = False


# Of the bandwidth of the best copy, on an H200, in bfloat16 and float32 rows of as many bytes. Threads that hold a row
# are the fastest where it fills them; staged rows lose less where it does not, the less the better their blocks fill
# the last turn of their threads. But few rows that are held take half the time of staged ones.
_TILED = (
    # 17: 0.64; 24: 0.92; 32: 0.93; by 4 threads a row 0.18, 0.36 and 0.48. float32 17: 0.74; 32: 0.91
    _Entry(4, 1, 4, 256, bytes=2, tiled=True),
    _Entry(8, 1, 8, 256, bytes=4, tiled=True),
)
_SHORT = (
    # On an H100 33: 0.70, 49: 0.79, 50: 0.93, 64: 0.99; by 4 threads 0.38, 0.61, 0.62 and 0.95
    _Entry(8, 2, 4, 64, bytes=2),
    # 127: 0.84; 128: 0.97. Float32, on an H100, 33: 0.72, 49: 0.92, 64: 1.00; with 8 steps 0.48, 0.65 and 0.95
    _Entry(16, 4, 4, 32),
    _Entry(32, 8, 4, 16),  # 201: 0.81; 256: 0.97
    _Entry(64, 16, 4, 8),  # masked 300: 0.51, 512: 0.80; by 8 threads 0.51 and 0.76
)
_SHORT_OF_ALL = (
    _SHORT[2]._replace(bytes=2),
    _Entry(32, 4, 8, 32, bytes=4),  # float32 127: 0.92, 128: 0.97; by 8 threads 0.87 and 0.97
    _Entry(64, 8, 8, 8),  # 300: 0.77, 512: 0.97; float32 201: 0.86; by 16 threads 0.67, 0.97, 0.77
)
_ANY = 1 << 30
_FORWARD_TABLE = (
    *_TILED,
    *_SHORT[:2],
    *_SHORT_OF_ALL,
    _Entry(128, 32, 4),  # 1001: 0.99; 1024: 0.99; by 16 threads 0.95 and 0.98; 601: 0.71, and 0.75
    # On an H100 1100, 1500, 2048: 0.78, 0.97, 1.00; staged by 32 threads 0.98, 0.98 and 1.00, but 16 rows take 3.0, 3.2
    # and 3.1 us in a graph instead of 2.1, 2.1 and 1.7
    _Entry(256, 64, 4, bytes=2),
    # On an H100 2100, 2500: 0.90, 0.95; staged by 32 threads 0.98 and 0.98, but 16 rows take 3.9 and 4.1 us, not 2.0
    _Entry(320, 128, 4, bytes=2),
    _Entry(384, 128, bytes=2),  # 2600, 3000: 0.95; by 32 threads 0.94; held by 128 0.84, 0.92
    _Entry(512, 128, 4, bytes=2),  # 3600, 4096: 0.97, 0.97; 4093: 0.98, staged 0.91, of 16 rows a launch 0.7 us more
    # float32 2048: 0.98, 2300: 0.96; by 128 threads 2048: 0.90. On an H100 600, 1024: 1.00, 1.00, as by 32 threads, by
    # which 16 rows of 1024 take 3.1 us in a graph instead of 2.6
    _Entry(640, 64, bytes=4),
    _Entry(768, 192, bytes=4),  # float32 3000: on an H100 0.99, held by 256 threads 0.95
    # float32 3600, 4093, 4096: on an H100 1.01, staged by 192 threads 0.99 to 1.01; 1, 16, 128 rows of 4096 take 2.2,
    # 2.4 and 2.9 us in a graph instead of 3.1, 3.3, 3.6
    _Entry(1024, 256, 4, bytes=4),
    # 4097, 5120: 0.90, 0.98, by 64 threads 0.92, 0.98; 8192: 0.99; 9001: 0.95, by 512 threads 0.75; 12288: 0.96
    _Entry(1536, 128, bytes=2),
    _Entry(1536, 192, bytes=4),  # float32 4097: 0.94, 5121: 0.96; by 64 threads 0.92 and 0.92
    # On an H100 14000, 16384, 32768: 0.98, 0.98, 0.98, by one CTA of 512 threads 0.99, 0.97, 0.97; float32 6200, 8192,
    # 16384: 0.99, 0.98, 0.98, and 1.00, 0.97, 0.97. 16 rows of 16384 and 32768 take 3.6 and 4.6 us in a graph, not 3.9
    # and 5.4, float32 8192 and 16384 3.5 and 4.7, not 3.9 and 5.6
    _Entry(4096, 256, ctas=2, bytes=2),
    _Entry(4096, 256, ctas=2, bytes=4),
    _Entry(4096, 512),  # without clusters
    # 40000, 65536: as by two CTAs of 512 threads; 100000: 0.92, 128256: 0.98, 131072: 0.97, by eight CTAs 0.01 to 0.04
    # more, for which bfloat16 has one kernel too many
    _Entry(16384, 256, ctas=4, bytes=2),
    _Entry(_ANY, 256, ctas=16, bytes=2),  # 160000, 262144: 0.99, by eight 0.98, 0.96
    # float32 20000, 32768, 50257, 65536: on an H100 1.00, 1.00, 0.98, 1.00, as by two CTAs of 512 threads and by eight;
    # 16 rows of 32768 take 4.6 us in a graph, by two 6.8
    _Entry(16384, 256, ctas=4, bytes=4),
    _Entry(8192, 512, ctas=2),  # without clusters
    # float32 80000, 98304: on an H100 1.00, 0.99, as by eight CTAs; 131072: 0.99, by 128 threads 0.97; 262144: 0.90
    _Entry(_ANY, 256, ctas=16),
    _Entry(32768, 256, ctas=8),  # where a cluster has no more
)
# A row has more shared memory.
_FORWARD_MASKED_TABLE = (
    # On an H100 33, 49, 64: 0.45, 0.60, 0.80, by 4 threads 0.26, 0.41 and 0.60; float32 0.54, 0.68, 0.90, by 8 threads
    # 0.31, 0.48 and 0.68
    *_SHORT,
    _Entry(128, 32, 4, 2),  # 600: 0.65; 1001: 0.71; 1024: 0.90; float32 512: 0.98
    # 2048: 0.94, staged 0.92; float32 600: 0.85, staged 0.77, by 64 threads a row 0.69; 1024: 0.97
    _Entry(256, 32, 8, 2),
    _Entry(512, 64, bytes=2),  # 2500: 0.75, 3000: 0.83, 4096: 0.93; by 128 threads 0.61, 0.80 and 0.92
    # float32 3600: 0.89, 4096: 0.95; by 64 threads 0.85 and 0.91. On an H100 1100, 1500, 2048: 0.88, 0.88, 0.89, and
    # 16 rows of 1100 and 2048 2.7 and 3.5 us in a graph; held by 64 threads 0.66, 0.80, 0.90, and 2.8 and 2.7 us, for
    # which float32 has one kernel too many
    _Entry(1024, 96, bytes=4),
    # 6000: 0.88; 8192: 0.97; 9001 to 16384: at most 0.02 behind 256 threads; float32 5000 to 7000: 0.90, by these 0.85
    _Entry(2048, 128),
    _Entry(4096, 128, ctas=4, bytes=2),  # 24576: as by two CTAs of 256 threads; 32768: 0.99, by two 0.88
    _Entry(4096, 256, ctas=2, bytes=4),  # float32 16384: 0.96, by one CTA 0.88
    _Entry(8192, 128, ctas=4),  # float32 32768: 0.95, by two CTAs 0.90; without clusters from 16 KiB of a row on
    _Entry(32768, 256, ctas=8),
    _Entry(_ANY, 256, ctas=16),
)
# Where little of a row is read, more CTAs are resident than without.
_FORWARD_CAUSAL_TABLE = (
    *_SHORT[1:],
    _Entry(128, 32, 4, bytes=2),  # 1024: 0.92, staged 0.88
    _Entry(512, 64, bytes=2),  # 2048, 4096: 0.95, 0.93; by 32 threads 0.94, 0.92, by 128 4096: 0.90
    _Entry(512, 32, bytes=4),  # float32 1024, 2048: 0.93, 0.92; by 64 threads 0.92, 0.93
    _Entry(1024, 64, bytes=4),  # float32 4096: 0.90, by 128 threads 0.89
    _Entry(1024, 128),  # 8192: 0.94
    _Entry(1536, 256),
    _Entry(4096, 512),  # 16384: 0.95, by 256 threads 0.93; 32768: 0.95
    _Entry(8192, 256, ctas=2),  # float32 32768: 0.92
    _Entry(32768, 256, ctas=8),
    _Entry(_ANY, 256, ctas=16),
)
_BACKWARD_TABLE = (
    # By half as many warps, whose tiles of two arrays share a CTA: 17: 0.74; 32: 0.96; float32 17: 0.95, 32: 0.98
    *(line._replace(rows=128) for line in _TILED),
    # 127: 0.79. On an H100 33: 0.48, 49: 0.76, 64: 1.01; by 2 threads, a kernel too many, 0.85, 0.96 and 0.98
    _SHORT[1]._replace(bytes=2),
    *_SHORT_OF_ALL,  # 200: 0.94; 300: 0.86; 512: 0.99; float32 63: 0.95, 128: 1.05
    _Entry(128, 32, 4, 2),  # 1024: 0.98
    _Entry(256, 96, bytes=2),  # 2048: 0.97, held 1.00, for which bfloat16 has one kernel too many
    # 2100, 2500: on an H100 1.02 and 1.02; staged by 96 threads 0.99 and 0.98, and of 16 rows a launch 0.6 us more
    # 3000, 4093, 4096: 0.98, by 96 threads, staged, 0.95, 0.93, 0.96, and of 16 rows a launch 0.7 us more; 2600: 0.93
    _Entry(512, 128, 4, bytes=2),
    _Entry(768, 96, bytes=2),  # 4097, 5121: 0.94, by 256 threads 0.80, 0.89; held 0.81, 0.93
    _Entry(256, 64, 4, bytes=4),  # float32 1024: 1.00
    _Entry(512, 256, bytes=4),  # float32 2048: 0.97, held 0.98, for which float32 has one kernel too many
    _Entry(1024, 256, 4, bytes=4),  # float32 2500 to 4096: 0.99, 2100: 0.95; staged 0.95 to 0.97, 0.94
    _Entry(1536, 256, bytes=4),  # float32 4097, 6144: 0.95, 0.98; held 0.87, 1.00
    # float32 8192: 0.97, by one CTA 0.94; 10001: 0.97, held 0.91; 14001: 0.95, 1.01; 16384: 1.00, 1.00; 20000: 0.94,
    # 0.87; 32768: 1.03, by eight CTAs 1.03, held 1.07, for which float32 has one kernel too many
    _Entry(8192, 256, ctas=4, bytes=4),
    _Entry(2048, 256),  # 8192, 16384: 0.96; 10001, 14001: 0.94, by 96 threads 0.90, by four CTAs 0.77
    # 16385, 28672: 0.93, 0.97, by four CTAs 0.72, 0.97; 40000: 0.96, 0.97; 50257: 0.94, 0.93; 57344: 0.92, 0.99
    _Entry(7168, 256, ctas=2, bytes=2),
    _Entry(4096, 256, 4, ctas=4),  # without clusters
    _Entry(14336, 256, ctas=16, bytes=4),  # float32 40000, 50257: 0.93, 0.91; by four CTAs 0.90, 0.89
    # 65536: 0.95, by 512 threads 0.89; 80001: 0.89, 0.79; 100000: 0.89, 0.90; 128256: 0.92; 131072: 0.95
    _Entry(28672, 320, ctas=8, bytes=2),
    # float32 65536: 0.97, held 1.00, for which float32 has one kernel too many; 80000, 100000: 0.92, 0.90; held 0.73,
    # 0.84
    _Entry(28672, 256, ctas=16, bytes=4),
    # 262144: 0.92, held 0.87, in turn 0.90; 327680, 393216, 458752: 0.81, 0.82, 0.83, of which a multiprocessor has two
    # CTAs, and 524288: 0.61; in turn, a kernel too many for bfloat16, 0.78, 0.89, 0.89 and 0.91
    _Entry(_ANY, 512, ctas=16, bytes=2),
    _Entry(32768, 512, 4, ctas=16),  # float32 131072: 0.97, staged 0.93
    # float32 262144: 0.93, not in turn 0.79, staged 0.63; 160000: 0.88, 0.60 and 0.85
    _Entry(65536, 1024, 4, ctas=16, in_turn=True),
)
_BACKWARD_CAUSAL_TABLE = (
    *_SHORT[1:],
    _Entry(256, 32),  # 1024: 0.93; 2048: 0.93
    _Entry(512, 64, bytes=2),  # 4096: 0.91, by 128 threads 0.90
    _Entry(512, 32, bytes=4),  # float32 2048: 0.93, by 128 threads 0.90
    _Entry(1024, 128, bytes=4),  # float32 4096: 0.91, by 256 threads 0.90
    _Entry(2048, 128, ctas=2, bytes=4),  # float32 8192: 0.92, by one CTA 0.89
    _Entry(4096, 128, ctas=4, bytes=4),  # float32 16384: 0.92, by two CTAs 0.90
    _Entry(8192, 256, ctas=8, bytes=4),  # float32 32768: 0.90, by four CTAs 0.87
    _Entry(2048, 128),  # 8192: 0.91; 16384: 0.93, by 256 threads 0.91
    _Entry(4096, 256, ctas=2),  # 32768: 0.88, by four CTAs 0.86
    _Entry(8192, 256, ctas=4),
    _Entry(16384, 256, ctas=8),
    _Entry(_ANY, 256, ctas=16),
)


def _table(backward: bool, causal: bool, masked: bool) -> tuple[_Entry, ...]:
    if backward:
        return _BACKWARD_CAUSAL_TABLE if causal else _BACKWARD_TABLE
    return _FORWARD_CAUSAL_TABLE if causal else _FORWARD_MASKED_TABLE if masked else _FORWARD_TABLE


def configure(
    columns: int,
    rows: Sequence[DType],
    staged: Sequence[DType],
    limits: DeviceLimits,
    backward: bool = False,
    causal: bool = False,
    masked: bool = False,
) -> SoftmaxConfig:
    """Choose how rows of up to so many columns are divided.

    Parameters
    ----------
    columns : int
        One of `BUCKETS`.
    rows : sequence of DType
        Of the arrays of rows.
    staged : sequence of DType
        Of those, and of a mask, that are read.
    limits : DeviceLimits
        Of the device.
    backward, causal, masked : bool
        Whether it is the backward, and whether columns are excluded by a causal mode or by a mask.
    """
    widest = max(dtype.bytes for dtype in rows)
    vector = 16 // widest
    clusters = limits.max_cluster_size > 1 and limits.max_ctas_per_row > 1
    most = min(limits.max_ctas_per_row, limits.max_cluster_size) if clusters else limits.max_ctas_per_row
    for line in _table(backward, causal, masked):
        fits = not line.bytes or (line.bytes == widest and (clusters or line.ctas == 1))
        if fits and columns <= line.vectors * vector and line.ctas <= most:
            shared = clusters and line.ctas > 1
            config = SoftmaxConfig(
                line.threads,
                line.rows,
                vector,
                line.steps or 1,
                line.ctas,
                shared,
                staged=not line.steps,
                in_turn=line.in_turn,
                tiled=line.tiled,
            )
            # The values that its threads exchange are in shared memory too.
            if config.shared_memory(columns, staged) <= limits.shared_memory_per_cta - 4096:
                return config
            if config.in_turn:
                return dataclasses.replace(config, in_turn=False)
    # Half of what a thread could hold: what two passes need beside it spills else.
    return SoftmaxConfig(1024, 1, vector, 2, most, clusters and most > 1, chunked=True)


_SCALE = (Field("scale", "float32", "scale"),)
_COLUMNS = (Field("columns", "int32", "columns"),)
_QUERIES = tuple(Field(name, "uint32", name) for name in ("queries", "queries_magic", "queries_shift"))
_CAUSAL = (Field("diagonal", "int32", "diagonal"), Field("window", "int32", "window"))
_MATRICES = tuple(Field(name, "uint32", name) for name in ("matrix_heads", "matrix_heads_magic", "matrix_heads_shift"))
_MASK = (*(Field(f"mask_{name}", "int64", f"mask.{name}") for name in ("batch_stride", "head_stride", "query_stride")),)


class _SoftmaxSpec(KernelSpec):
    """A specialised kernel of rows of any length in a bucket."""

    config: SoftmaxConfig

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    def _program(self, template: str, types: dict[str, DType], flags: dict[str, bool]) -> str:
        config = self.config
        source = "softmax_staged.cu" if config.staged else f"{template}.cu"
        template += "_staged" if config.staged else ""
        ways = {
            "clusters": config.clusters,
            "chunked": config.chunked,
            "in_turn": config.in_turn,
            "tiled": config.tiled,
            "repeats": config.takes_turns or config.exchange == "grid",
        }
        return (
            f'#include "{source}"\n\n'
            f"{self.params.text('Params')}\n"
            f"{traits(types, flags | ways, config.numbers)}"
            f"{entry(self.symbol, f'{template}<trtc::SoftmaxConfig<Traits>>', config.bounds)}"
        )

    def _rule(self, values: int) -> LaunchRule:
        config = self.config
        return entry_rule(
            threads=config.threads,
            rows_per_cta=config.rows_per_cta,
            ctas_per_row=config.ctas_per_row,
            clusters=config.clusters,
            workspace_bytes=config.workspace_bytes(values),
            persistent=config.takes_turns,
        )


@dataclass(frozen=True)
class SoftmaxForwardSpec(_SoftmaxSpec):
    """A specialised forward kernel.

    Attributes
    ----------
    input, output : DType
        Of x and of y.
    logarithm : bool
        Whether it is the logarithm of softmax.
    causal : bool
        Whether a row's range of columns depends on its query.
    mask : DType or None
        Of the mask: BOOL for bytes of either type; of floats, which are added.
    keeps : bool
        Whether a mask of bytes says which elements take part.
    sink : DType or None
        Of the heads' sinks; None: there are none.
    lse : bool
        Whether the logarithm of the sum of exponentials is written.
    config : SoftmaxConfig
        How a row is divided.
    """

    input: DType
    output: DType
    logarithm: bool
    causal: bool
    mask: DType | None
    keeps: bool
    sink: DType | None
    lse: bool
    config: SoftmaxConfig

    @property
    def symbol(self) -> str:
        parts = ["log_softmax_forward" if self.logarithm else "softmax_forward", self.input.symbol]
        if self.output is not self.input:
            parts.append(f"out_{self.output.symbol}")
        parts += present(causal=self.causal, lse=self.lse, keeps=self.keeps)
        for name, dtype in (("mask", self.mask), ("sink", self.sink)):
            parts += [f"{name}_{dtype.symbol}"] if dtype else []
        return "_".join((*parts, self.config.symbol))

    @property
    def params(self) -> Params:
        return memoised_params(
            (
                *pointers("x", "out", *present(mask=self.mask, sink=self.sink, lse=self.lse)),
                *(WORKSPACE if self.config.exchange == "grid" else ()),
                *row_fields("x", "out"),
                *GEOMETRY,
                *_COLUMNS,
                *_SCALE,
                *(_QUERIES if self.causal or self.mask or self.sink else ()),
                *(_CAUSAL if self.causal else ()),
                *(_MATRICES if self.mask or self.sink else ()),
                *(_MASK if self.mask else ()),
            )
        )

    @property
    def program(self) -> str:
        flags = {
            "logarithm": self.logarithm,
            "causal": self.causal,
            "has_mask": self.mask is not None,
            "mask_keeps": self.keeps,
            "mask_is_added": self.mask is not None and self.mask is not BOOL,
            "has_sink": self.sink is not None,
            "has_lse": self.lse,
        }
        types = {
            "Input": self.input,
            "Output": self.output,
            "Mask": self.mask or BOOL,
            "Sink": self.sink or self.input,
        }
        return self._program("softmax_forward", types, flags)

    @property
    def launch_rule(self) -> LaunchRule:
        return self._rule(2)


@dataclass(frozen=True)
class SoftmaxBackwardSpec(_SoftmaxSpec):
    """A specialised backward kernel.

    Attributes
    ----------
    gradient, input, output : DType
        Of dy, y and dx.
    logarithm, causal : bool
        As `SoftmaxForwardSpec` has them.
    sums : bool
        Whether it leaves each row's sum, for what follows.
    config : SoftmaxConfig
        How a row is divided.
    """

    gradient: DType
    input: DType
    output: DType
    logarithm: bool
    causal: bool
    sums: bool
    config: SoftmaxConfig

    @property
    def symbol(self) -> str:
        parts = ["log_softmax_backward" if self.logarithm else "softmax_backward", self.input.symbol]
        if self.gradient is not self.input:
            parts.append(f"dy_{self.gradient.symbol}")
        if self.output is not self.input:
            parts.append(f"dx_{self.output.symbol}")
        parts += present(causal=self.causal, sums=self.sums)
        return "_".join((*parts, self.config.symbol))

    @property
    def params(self) -> Params:
        return memoised_params(
            (
                *pointers("y", "dy", "dx"),
                *(_ROW_SUMS if self.sums else ()),
                *(WORKSPACE if self.config.exchange == "grid" else ()),
                *row_fields("y", "dy", "dx"),
                *GEOMETRY,
                *_COLUMNS,
                *_SCALE,
                *(_QUERIES if self.causal else ()),
                *(_CAUSAL if self.causal else ()),
            )
        )

    @property
    def program(self) -> str:
        types = {"Gradient": self.gradient, "Input": self.input, "Output": self.output}
        flags = {"logarithm": self.logarithm, "causal": self.causal, "leaves_sums": self.sums}
        return self._program("softmax_backward", types, flags)

    @property
    def launch_rule(self) -> LaunchRule:
        return self._rule(1)._replace(row_bytes=_ROW_BYTES if self.sums else 0)


# What dx of a row needs the whole row for: sum(dy * y), or sum(dy).
_ROW_SUMS = (Field("row_sums", "pointer", "row_partials"),)
_ROW_BYTES = 4
_SINK_GRADIENT_FIELDS = (
    *pointers("sink", "lse", "dsink"), *_ROW_SUMS, Field("rows", "int64", "rows"), _QUERIES[0], _MATRICES[0],
)  # fmt: skip
# trtc::finish_threads.
_SINK_GRADIENT_RULE = entry_rule(threads=256, columns_per_cta=OF_HEADS)


@dataclass(frozen=True)
class SinkGradientSpec(KernelSpec):
    """A launch behind the backward's first one: what a head's rows add to its sink's gradient.

    Attributes
    ----------
    sink, dsink : DType
        Of the sinks and of their gradient.
    """

    sink: DType
    dsink: DType

    @property
    def symbol(self) -> str:
        parts = ["softmax_backward_sink_gradient", self.sink.symbol]
        if self.dsink is not self.sink:
            parts.append(f"dsink_{self.dsink.symbol}")
        return "_".join(parts)

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def params(self) -> Params:
        return memoised_params(_SINK_GRADIENT_FIELDS)

    @property
    def program(self) -> str:
        template = f"softmax_backward_sink_gradient<{self.sink.text}, {self.dsink.text}>"
        return (
            '#include "softmax_backward.cu"\n\n'
            f"{self.params.text('Params')}"
            f"{entry(self.symbol, template, _SINK_GRADIENT_RULE.threads)}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        return _SINK_GRADIENT_RULE


_MASK_GRADIENT_ARRAYS = (*pointers("y", "dy", "dmask"), *_ROW_SUMS, *row_fields("y", "dy"))
_MASK_GRADIENT_FIELDS = (
    *(Field(f"dmask_{name}", "int64", f"dmask.{name}") for name in ("head_stride", "query_stride")),
    Field("mask_rows", "int64", "mask_rows"),
    Field("sharers", "int32", "sharers"),
    *_COLUMNS,
    *GEOMETRY,
    *_QUERIES,
    *_MATRICES,
)
# trtc::mask_threads, mask_columns and mask_groups.
_MASK_GRADIENT_RULE = entry_rule(threads=256, columns_per_cta=32, row_groups=32)


@dataclass(frozen=True)
class MaskGradientSpec(KernelSpec):
    """A launch behind the backward's first one: the gradient of a mask of floats.

    Attributes
    ----------
    gradient, input, output : DType
        Of dy, y and the mask's gradient.
    logarithm, causal : bool
        As `SoftmaxForwardSpec` has them.
    clusters : bool
        Whether CTAs of a cluster share the rows that a row of the mask was broadcast to.
    """

    # A mask of one row has few columns for many rows: of 1024 and 131072, 2.4 ms without clusters.
    CTAS: ClassVar[int] = 8

    gradient: DType
    input: DType
    output: DType
    logarithm: bool
    causal: bool
    clusters: bool

    @property
    def symbol(self) -> str:
        parts = [
            "log_softmax_backward_mask_gradient" if self.logarithm else "softmax_backward_mask_gradient",
            self.input.symbol,
        ]
        if self.gradient is not self.input:
            parts.append(f"dy_{self.gradient.symbol}")
        if self.output is not self.input:
            parts.append(f"dmask_{self.output.symbol}")
        return "_".join((*parts, *present(causal=self.causal, clusters=self.clusters)))

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def params(self) -> Params:
        return memoised_params((*_MASK_GRADIENT_ARRAYS, *_MASK_GRADIENT_FIELDS, *(_CAUSAL if self.causal else ())))

    @property
    def program(self) -> str:
        types = {"Gradient": self.gradient, "Input": self.input, "Output": self.output}
        flags = {"logarithm": self.logarithm, "causal": self.causal}
        # A fourth resident CTA is worth a quarter (695 us for 550); where there is more to do, it spills.
        resident = 3 if self.logarithm or self.causal else 4
        return (
            '#include "softmax_backward.cu"\n\n'
            f"{self.params.text('Params')}\n"
            f"{traits(types, flags, {'ctas': self.launch_rule.ctas_per_row})}"
            f"{entry(self.symbol, 'softmax_backward_mask_gradient<Traits>', f'{self.launch_rule.threads}, {resident}')}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        if not self.clusters:
            return _MASK_GRADIENT_RULE
        groups = self.CTAS * _MASK_GRADIENT_RULE.row_groups
        return _MASK_GRADIENT_RULE._replace(ctas_per_row=self.CTAS, clusters=True, row_groups=groups)


# ---- The general kernels ---------------------------------------------------------------------------------------------

_IS_CAUSAL = Field("causal", "int32", "causal")
_FORWARD = Params(
    (
        *pointers("x", "out", "mask", "sink", "lse"),
        *row_fields("x", "out"),
        *dtypes("x", "out", "mask", "sink"),
        *GEOMETRY,
        *_COLUMNS,
        *_SCALE,
        *_QUERIES,
        *_CAUSAL,
        *_MATRICES,
        *_MASK,
        Field("mask_keeps", "int32", "mask_keeps"),
        _IS_CAUSAL,
    )
)
_BACKWARD = Params(
    (
        *pointers("y", "dy", "dx"),
        *_ROW_SUMS,
        *row_fields("y", "dy", "dx"),
        *dtypes("y", "dy", "dx"),
        *GEOMETRY,
        *_COLUMNS,
        *_SCALE,
        *_QUERIES,
        *_CAUSAL,
        _IS_CAUSAL,
    )
)
_SINK_GRADIENT = Params((*_SINK_GRADIENT_FIELDS, *dtypes("sink", "dsink")))
_MASK_GRADIENT = Params(
    (*_MASK_GRADIENT_ARRAYS, *dtypes("y", "dy", "dmask"), *_MASK_GRADIENT_FIELDS, *_CAUSAL, _IS_CAUSAL)
)


def _kernels() -> dict[str, GeneralKernel]:
    found = {}
    for shape in ROW_SHAPES:
        for name, logarithm in (("softmax", False), ("log_softmax", True)):
            for direction, params in (("forward", _FORWARD), ("backward", _BACKWARD)):
                template = f"softmax_{direction}_rows<{literal(logarithm)}, {shape.threads}, {shape.rows}>"
                found[f"{name}_{direction}_{shape.name}"] = GeneralKernel(params, shape.bounds, template)
    for name, logarithm in (("softmax", False), ("log_softmax", True)):
        template = f"softmax_backward_any_mask_gradient<{literal(logarithm)}>"
        found[f"{name}_backward_mask_gradient"] = GeneralKernel(_MASK_GRADIENT, _MASK_GRADIENT_RULE.threads, template)
    found["softmax_backward_sink_gradient"] = GeneralKernel(
        _SINK_GRADIENT, _SINK_GRADIENT_RULE.threads, "softmax_backward_any_sink_gradient"
    )
    return found


_KERNELS = _kernels()


def static_program() -> str:
    """Return the text of the module of general kernels."""
    return general_program("softmax_general.cu", _KERNELS)


def general_params(symbol: str, arrays: Sequence[str]) -> Params:
    """Return a general kernel's parameters as an operator with these arrays fills them."""
    return Params(of_arrays(_KERNELS[symbol].params.fields, arrays))


def general_launches(request: Request) -> tuple[tuple[str, LaunchRule], ...]:
    """Return the general kernels of a call, and how they are launched."""
    read = (request.dtypes.get(array) for array in ("x", "y", "dy"))
    shape = shape_of(request.columns, read, ROW_SHAPES)
    name = request.operator.removesuffix("_backward")
    direction = "backward" if request.operator.endswith("_backward") else "forward"
    first = f"{name}_{direction}_{shape.name}"
    followed = []
    if request.dtypes.get("dsink"):
        followed.append(("softmax_backward_sink_gradient", _SINK_GRADIENT_RULE))
    if request.dtypes.get("dmask"):
        followed.append((f"{name}_backward_mask_gradient", _MASK_GRADIENT_RULE))
    rule = entry_rule(shape.threads * shape.rows, shape.rows, row_bytes=_ROW_BYTES if followed else 0)
    return (first, rule), *followed
