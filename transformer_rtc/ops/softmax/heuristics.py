"""Which configuration a softmax kernel has: the tables."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import DeviceLimits
from ..division import has_clusters, most_ctas
from .config import SoftmaxConfig, SoftmaxRow

__all__ = ["configure"]


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
# are the fastest where it fills them, and few rows of theirs take half the time; staged rows lose less where it does
# not, the less the better their blocks fill the last turn of their threads. Held rows have a kernel for each division,
# staged ones one for each number of CTAs.
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
    _Entry(64, 8, 8, 8),  # 300: 0.77, 512: 0.98; float32 201: 0.86; by 16 threads 0.67, 0.97, 0.77
)
_ANY = 1 << 30


def _of_clusters(line: _Entry) -> tuple[_Entry, ...]:
    """Return lines like one for elements of any size, which are for clusters alone."""
    return tuple(line._replace(bytes=size) for size in (2, 4))


_FORWARD_TABLE = (
    *_TILED,
    _Entry(8, 2, 4, 32, bytes=2),  # 64: 0.97, with 64 rows 0.94; by four threads 1.01, but 63: 0.84 of this
    _SHORT[1],
    *_SHORT_OF_ALL,
    _Entry(128, 32, 4),  # 600, 1000, 1024: 0.89, 1.01, 0.99; float32 512: 1.00
    # 1100, 1500, 1792: 0.88, 0.98, 1.02; held by 64 threads 0.61, 0.81, 0.98, but 16 rows take 1.9 us in a graph, not 3
    _Entry(224, 32, bytes=2),
    _Entry(256, 64, 4, bytes=2),  # 2000, 2048: 1.00, 1.00
    _Entry(320, 32, bytes=2),  # 2100, 2500: 0.97, 0.97; by 64 threads 0.84, 0.97, held by 128 0.65, 0.75
    _Entry(384, 96, bytes=2),  # 3000: 1.00
    _Entry(512, 128, 4, bytes=2),  # 3584, 4093, 4096: 1.01, 0.98, 0.97; staged alike, 16 rows 2.6 us, not 1.7
    _Entry(640, 96, bytes=2),  # 4097: 0.98
    _Entry(768, 128, bytes=2),  # 5121, 6144: 0.97, 0.98
    _Entry(896, 224, bytes=2),  # 7000: 0.97
    _Entry(1024, 320, bytes=2),  # 8192: 0.99, by 128 threads 0.98
    _Entry(1280, 256, bytes=2),  # 9001, 10000: 0.98, 0.99
    _Entry(1536, 192, bytes=2),  # 12288: 0.97
    # float32 513, 600, 768: 0.80, 1.01, 1.02; held 0.63, 0.84, 0.95
    _Entry(224, 32, bytes=4),
    _Entry(256, 32, 8, bytes=4),  # float32 1000, 1023, 1024: 1.00, 0.94, 1.00; staged by 64 threads 0.99, 0.84, 0.98
    _Entry(320, 64, bytes=4),  # float32 1100: 0.96
    _Entry(384, 96, bytes=4),  # float32 1300, 1500: 0.97, 0.97
    _Entry(448, 128, bytes=4),  # float32 1792: 1.01
    _Entry(640, 160, bytes=4),  # float32 2000, 2048, 2100, 2500: 0.97 to 0.98, by 64 threads 16 rows 1 us more
    _Entry(896, 192, bytes=4),  # float32 3000, 3584: 0.99, 0.98
    _Entry(1024, 256, 4, bytes=4),  # float32 4093, 4096: 0.96, 0.97; staged 0.97, 0.98, 16 rows of 4096 2.8 us, not 2.2
    _Entry(1280, 160, bytes=4),  # float32 4097: 0.97
    _Entry(1536, 192, bytes=4),  # float32 5121, 6144: 0.97, 0.96
    _Entry(1792, 224, bytes=4),  # float32 7000: 0.99
    _Entry(1792, 192, ctas=2, bytes=2),  # 14336: 0.99
    *_of_clusters(_Entry(2048, 224, ctas=2)),  # 16384: 0.98; float32 8192: 0.98
    # 16385, 20000: 0.97, 0.99, by 256 threads 0.88, 0.99; float32 9001, 10000: 0.96, 1.00
    *_of_clusters(_Entry(2560, 160, ctas=2)),
    *_of_clusters(_Entry(3072, 192, ctas=2)),  # float32 12288: 0.98
    _Entry(4096, 320, ctas=2, bytes=2),  # 28672, 32768: 0.98, 0.97, by four CTAs 0.98
    _Entry(4096, 224, ctas=2, bytes=4),  # float32 14336, 16384: 0.97, 0.98
    _Entry(4096, 512),  # without clusters
    _Entry(5120, 448, ctas=2, bytes=2),  # 40000: 0.99
    _Entry(5120, 320, ctas=2, bytes=4),  # float32 16385, 20000: 0.96, 0.99
    # 50257: 0.95; float32 28672: 0.96, by four CTAs, a kernel too many, 0.97, and of 16 rows a launch 1.3 us less
    *_of_clusters(_Entry(7168, 384, ctas=2)),
    *_of_clusters(_Entry(8192, 128, ctas=8)),  # 65536: 0.98, by four CTAs 0.97; float32 32768: 0.97
    _Entry(8192, 512, ctas=2),  # without clusters
    _Entry(14336, 256, ctas=8, bytes=2),  # 80000, 100000: 1.01, 0.96, by four CTAs 0.98, 0.90
    _Entry(16384, 384, ctas=8, bytes=2),  # 128256, 131072: 0.98, 0.97, by four CTAs 0.95, 0.93
    _Entry(14336, 192, ctas=8, bytes=4),  # float32 40000, 50257: 0.99, 0.94, by four CTAs 0.97, 0.90
    _Entry(16384, 224, ctas=8, bytes=4),  # float32 65536: 0.97, by four CTAs 0.94
    _Entry(20480, 320, ctas=8, bytes=4),  # float32 80000: 0.97, by sixteen CTAs 0.90
    _Entry(28672, 192, ctas=16, bytes=4),  # float32 100000: 0.94
    _Entry(32768, 256, ctas=16),  # 200000, 262144: 0.94, 0.97; float32 128256, 131072: 0.98, 0.96
    _Entry(_ANY, 320, ctas=16),  # float32 200000, 262144: 0.84, 0.91, by 384 threads 0.83, 0.89
    _Entry(32768, 256, ctas=8),  # where a cluster has no more
)
# A row has more shared memory.
_FORWARD_MASKED_TABLE = (
    # On an H100 33, 49, 64: 0.45, 0.60, 0.80, by 4 threads 0.26, 0.41 and 0.60; float32 0.54, 0.68, 0.90, by 8 threads
    # 0.31, 0.48 and 0.68
    *_SHORT,
    _Entry(80, 32, bytes=2),  # 600: 0.67, held 0.61
    _Entry(128, 32, 4, 2),  # 1001: 0.71; 1024: 0.98; float32 512: 0.95
    _Entry(192, 32),  # 1500: 0.77, held 0.67; float32 600: 0.82, held 0.65
    # By 32 threads that hold eight vectors 0.76 to 0.96 of it; float32 1024 with one row a CTA 0.94
    _Entry(256, 64, 4, bytes=2),  # 2048
    _Entry(256, 64, 4, 2, bytes=4),  # float32 1024
    _Entry(512, 64, bytes=2),  # 3000, 4096: 0.89, 0.92; by 128 threads 0.80, 0.89
    _Entry(448, 64, bytes=4),  # float32 1500: 0.87, by 96 threads 0.82, held 0.75
    _Entry(512, 128, 4, bytes=4),  # float32 2048
    _Entry(768, 64, bytes=4),  # float32 3000: 0.91, by 96 threads 0.91
    _Entry(1024, 96, bytes=4),  # float32 4096: 0.92
    _Entry(768, 128),  # 6000: 0.90
    _Entry(1536, 192),  # 8192: 0.87; float32 6000: 0.88, by 128 threads 0.87
    _Entry(2048, 224, bytes=4),  # float32 8192: 0.86, by 128 threads 0.84
    _Entry(2048, 448),  # 16384: 0.82, by 128 threads 0.81
    _Entry(4096, 192, ctas=2, bytes=2),  # 32768: 0.81, by four CTAs 0.81
    _Entry(4096, 224, ctas=2, bytes=4),  # float32 16384: 0.89
    _Entry(8192, 192, ctas=4),  # float32 32768: 0.84, by 128 threads 0.83; without clusters from 16 KiB of a row on
    _Entry(32768, 256, ctas=8),
    _Entry(_ANY, 256, ctas=16),
)
# Where little of a row is read, more CTAs are resident than without. The numbers are of the line's own speed.
_FORWARD_CAUSAL_TABLE = (
    *_SHORT[1:],
    _Entry(128, 32, 4, bytes=2),  # 1024: 1.04 of staged
    _Entry(256, 32),  # 1500, 2048: by 64 threads 0.68 and 0.97 of it; float32 600, 1024: 0.71 and 0.91
    _Entry(512, 64),  # float32 1500, 2048: by 32 threads 0.98 and 0.99 of it
    _Entry(1024, 96),  # 6000: by 128 threads 0.99 of it; float32 3000, 4096: by 64 threads 1.00 and 0.99
    _Entry(1536, 192),  # float32 6000: by 256 threads 0.98 of it
    # 16384, 32768: by 256 and 512 threads 0.98 and 1.00 of it; float32 8192, 16384: by 512 threads 0.98 and 0.99
    _Entry(4096, 448),
    _Entry(8192, 384, ctas=2),  # float32 32768: by 256 threads 0.99 of it
    _Entry(32768, 256, ctas=8),
    _Entry(_ANY, 256, ctas=16),
)
_BACKWARD_TABLE = (
    # By half as many warps, whose tiles of two arrays share a CTA: 17: 0.74; 32: 0.96; float32 17: 0.95, 32: 0.98
    *(line._replace(rows=128) for line in _TILED),
    # 127: 0.79. On an H100 33: 0.48, 49: 0.76, 64: 1.01; by 2 threads, a kernel too many, 0.85, 0.96 and 0.98
    _SHORT[1]._replace(bytes=2),
    *_SHORT_OF_ALL,  # 200: 0.94; 300: 0.89; 512: 0.98; float32 63: 0.95, 128: 1.05
    _Entry(128, 32, 4, 2),  # 600, 1024: 0.96, 0.99; float32 512: 1.00
    _Entry(160, 32, bytes=2),  # 1100: 0.88, held by 64 threads 0.73
    _Entry(256, 64, 4, bytes=2),  # 1300, 1500, 2048: 0.89, 0.97, 0.99; staged 0.92, 0.93, 0.97
    _Entry(320, 64, bytes=2),  # 2100, 2500: 0.88, 0.93; held by 128 threads 0.76, 0.86
    _Entry(512, 128, 4, bytes=2),  # 3000, 4093, 4096: 0.99, 0.98, 0.99; staged 0.95, 0.93, 0.97
    _Entry(640, 96, bytes=2),  # 4097: 0.96
    _Entry(768, 128, bytes=2),  # 5121: 0.94
    _Entry(256, 64, 4, bytes=4),  # float32 600, 1023, 1024: 1.00, 0.99, 1.00
    _Entry(320, 192, bytes=4),  # float32 1100: 0.95
    _Entry(384, 224, bytes=4),  # float32 1500: 0.96
    _Entry(768, 192, 4, bytes=4),  # float32 1792, 2048, 2500, 3000: 1.00; staged 0.98, 0.96, 0.95, 0.96
    _Entry(1536, 192, 4, ctas=2, bytes=4),  # float32 4096 to 6144: 0.99 to 1.00; staged 0.95 to 0.98
    _Entry(1024, 256, 4, bytes=4),  # without clusters
    _Entry(2048, 160, ctas=4, bytes=4),  # float32 7000, 8192: 0.96, 0.98
    _Entry(2560, 320, bytes=4),  # float32 10000: 0.95, 9001: by four CTAs 0.82
    # float32 12288, 16384: 0.98, 0.97; 16385, 28672, 32768: 0.95, 0.97, 0.97
    _Entry(8192, 256, ctas=4, bytes=4),
    _Entry(896, 256, bytes=2),  # 7000: 0.96
    _Entry(1024, 320, ctas=2, bytes=2),  # 8192: 0.998, by one CTA 0.984; held by 512 threads, a kernel too many, 0.999
    _Entry(1792, 256),  # 9001, 12288: 0.94, 0.97
    _Entry(2048, 512, ctas=2, bytes=2),  # 16384: 0.995, by one CTA 0.988; by four CTAs, a kernel too many, 0.995
    _Entry(2048, 256),
    _Entry(4096, 256, ctas=2, bytes=2),  # 16385, 28672, 32768: 0.94, 0.97, 0.97
    _Entry(7168, 384, ctas=2, bytes=2),  # 40000, 50257: 0.94, 0.90, by 256 threads 0.93, 0.90
    _Entry(4096, 256, 4, ctas=4),  # without clusters
    _Entry(14336, 224, ctas=16, bytes=4),  # float32 50257: 0.92, by 256 threads 0.89
    _Entry(8192, 224, ctas=8, bytes=2),  # 65536: 0.96
    _Entry(10240, 256, ctas=8, bytes=2),  # 80000: 0.93
    _Entry(14336, 192, ctas=16, bytes=2),  # 100000: 0.93, by eight CTAs 0.91
    _Entry(16384, 448, ctas=8, bytes=2),  # 128256, 131072: 0.95, 0.96
    # float32 65536, 80000, 100000: 0.97, 0.93, 0.92; held 1.00, 0.73, 0.84
    _Entry(28672, 256, ctas=16, bytes=4),
    # 200000, 262144: 0.87, 0.93. 327680, 393216, 458752: 0.81, 0.82, 0.83, of which a multiprocessor has two CTAs, and
    # 524288: 0.61; in turn, a kernel too many for bfloat16, 0.78, 0.89, 0.89 and 0.91
    _Entry(_ANY, 448, ctas=16, bytes=2),
    # float32 128256, 131072: 0.91, 0.95, held, a kernel too many, 0.95, 0.98
    _Entry(32768, 512, ctas=16, bytes=4),
    # float32 200000, 262144: 0.85, 0.92, not in turn 262144 0.79, staged 0.84, 0.64
    _Entry(65536, 1024, 4, ctas=16, in_turn=True),
)
_BACKWARD_CAUSAL_TABLE = (
    *_SHORT[1:],
    _Entry(256, 32, bytes=2),  # 1024: by 64 threads 0.77 of it; 1500, 2048: 0.77 and 1.00
    _Entry(192, 32),  # float32 600: by 64 threads 0.95 of it
    _Entry(512, 64),  # 4096; float32 1024, 2048: by 32 threads 0.99 and 1.00 of it
    _Entry(1024, 128),  # 6000, 8192; float32 4096
    _Entry(1536, 320, bytes=4),  # float32 6000: by two CTAs 0.99 of it
    _Entry(2048, 128, ctas=2, bytes=4),  # float32 8192: by one CTA at most as fast
    _Entry(2048, 256),  # 16384: by 128 threads 0.99 of it; float32 without clusters
    _Entry(4096, 256, ctas=2),  # 32768; float32 16384: by four CTAs 0.99 of it
    _Entry(8192, 256, ctas=8, bytes=4),  # float32 32768
    _Entry(8192, 256, ctas=4),
    _Entry(16384, 256, ctas=8),
    _Entry(_ANY, 256, ctas=16),
)


def _table(row: SoftmaxRow) -> tuple[_Entry, ...]:
    if row.backward:
        return _BACKWARD_CAUSAL_TABLE if row.causal else _BACKWARD_TABLE
    return _FORWARD_CAUSAL_TABLE if row.causal else _FORWARD_MASKED_TABLE if row.masked else _FORWARD_TABLE


def configure(row: SoftmaxRow, limits: DeviceLimits) -> SoftmaxConfig:
    """Choose how rows of up to so many columns are divided.

    Parameters
    ----------
    row : SoftmaxRow
        What is asked for.
    limits : DeviceLimits
        Of the device.
    """
    clusters = has_clusters(limits)
    most = most_ctas(limits)
    for line in _table(row):
        fits = not line.bytes or (line.bytes == row.widest and (clusters or line.ctas == 1))
        if fits and row.columns <= line.vectors * row.vector and line.ctas <= most:
            shared = clusters and line.ctas > 1
            config = SoftmaxConfig(
                line.threads,
                line.rows,
                row.vector,
                line.steps or 1,
                line.ctas,
                shared,
                staged=not line.steps,
                in_turn=line.in_turn,
                tiled=line.tiled,
            )
            if row.fits(config, limits):
                return config
            if config.in_turn:
                return config.replace(in_turn=False)
    # Half of what a thread could hold: what two passes need beside it spills else.
    return SoftmaxConfig(1024, 1, row.vector, 2, most, clusters and most > 1, chunked=True)
