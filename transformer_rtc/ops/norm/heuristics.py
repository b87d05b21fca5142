"""Which configuration a norm kernel has: the tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...spec import DeviceLimits
from ..division import has_clusters, most_ctas, power_of_two
from .config import BackwardRow, ForwardRow, NormConfig, RowVectors

__all__ = ["configure", "configure_backward", "configure_wide_backward"]


def _threads(vectors: int, steps: int) -> int:
    """Return the fewest whole warps that hold so many vectors."""
    return 32 * math.ceil(vectors / (32 * steps))


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
    stages, together : int
        As `NormConfig` has them.
    bulk, ahead : bool
        Likewise: `NormConfig.bulk` and `NormConfig.statistics_ahead`.
    alone : bool
        Whether the line is for rows of one array: those with a residual beside them are faster by another one.
    clusters : bool or None
        Whether the line is only for devices that have clusters, or only for others, to which forward counts rows of
        smaller vectors than 16 bytes; None: for both.
    """

    vectors: int
    ctas: int
    threads: int
    steps: int
    rows: int = 1
    in_shared: bool = False
    stages: int = 0
    together: int = 1
    bulk: bool = False
    ahead: bool = False
    alone: bool = False
    clusters: bool | None = None


# By the norm and the bytes of the widest element. Each line, unless it says another reason, is the fastest of 10 to 60
# configurations of its size on an H200 with the L2 flushed; behind it, the ratio to the best copy with as many reads
# and writes of the same run. What decides: few elements of a thread leave registers for more rows in flight, many make
# reductions cheap; a row in shared memory is in flight without registers; from some length on, the CTAs of a cluster
# are held up by each other unless they take rows in turn; and two long rows together read and unpack weight and bias
# once, which are as many bytes as a row and its y. Lines for where there are no clusters: a ring hides the exchange of
# a cooperative grid.
_FORWARD = {
    ("rms_norm", 2): (
        _Entry(32, 1, 16, 2, 8, True, 4),  # 256: 1.025; without turns 0.989
        _Entry(64, 1, 32, 2, 4),  # 512: 0.975
        _Entry(128, 1, 64, 2, 2),  # 1024: 0.999
        _Entry(256, 1, 128, 2),  # 2048: 0.989
        _Entry(512, 1, 256, 2),  # 4096: 0.984
        _Entry(1024, 1, 512, 2, in_shared=True),  # 8192: 0.994
        _Entry(2048, 1, 512, 4, in_shared=True),  # 16384: 0.966
        _Entry(4096, 1, 1024, 4, in_shared=True),  # 32768: 0.971
        _Entry(8192, 4, 512, 4, in_shared=True),  # 65536: 0.965
        _Entry(16384, 4, 512, 8, in_shared=True),  # 131072: 0.972; in turn 0.937
        # 262144, 196608: H100 0.997, 0.993; as the next line 0.951, 0.946
        _Entry(32768, 16, 256, 8, in_shared=True, clusters=True),
        _Entry(32768, 8, 1024, 4, in_shared=True, stages=3),  # clusters of 8 at most, or none; 262144: 0.932
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
        _Entry(8192, 4, 512, 4, in_shared=True),  # 32768: 0.980
        _Entry(16384, 8, 512, 4, in_shared=True, together=2, clusters=True),  # 65536: 0.976; in turn 0.949
        _Entry(16384, 8, 1024, 2, in_shared=True, stages=4, clusters=False),
        # 131072: H100 0.996, 16 rows take 6.9 us in a graph; two rows together 0.995, 7.5
        _Entry(32768, 16, 256, 8, in_shared=True, clusters=True),
        _Entry(32768, 16, 1024, 2, in_shared=True, stages=4, bulk=True, clusters=False),
        # 163840, 196608: H100 0.987, 0.989; in turn 0.953, 0.960
        _Entry(49152, 16, 512, 8, in_shared=True, clusters=True),
        _Entry(65536, 16, 1024, 4, in_shared=True, stages=3),  # 262144: 0.917; without turns 0.817
    ),
    ("layer_norm", 2): (
        _Entry(32, 1, 16, 2, 8),  # 256: 0.981
        # 512: 0.945; by 16 threads 0.90, and 16 rows 0.3 us more in a graph; with a residual before 0.98, by 16 0.94
        _Entry(64, 1, 32, 2, 4),
        _Entry(96, 1, 32, 3, in_shared=True, together=2, alone=True),  # 576: 0.85, 640: 0.895; with 4 steps 0.72, 0.78
        _Entry(128, 1, 32, 4, in_shared=True, together=2),  # 896: 0.92, 1024: 0.959; four rows apart 0.924
        _Entry(256, 1, 64, 4),  # 2048: 0.970
        _Entry(480, 1, 64, 8, in_shared=True),  # 3840: 0.969; by 128 threads 0.922
        # 4096: 0.968; in shared memory 0.965, but 16 rows take 2.1 us in a graph instead of 1.8
        _Entry(512, 1, 128, 4, alone=True),
        _Entry(512, 1, 128, 4, in_shared=True),  # with a residual: 0.998, in registers 0.942
        _Entry(1024, 1, 256, 4, in_shared=True),  # 8192: 0.997
        _Entry(2048, 1, 256, 8, in_shared=True),  # 16384: 0.992
        _Entry(4096, 2, 256, 8, in_shared=True),  # 32768: 0.990; two rows together 0.972
        _Entry(8192, 8, 128, 8, in_shared=True),  # 65536: 0.972; by a cluster of 4 0.945, two rows 0.917
        _Entry(16384, 8, 256, 8, in_shared=True, together=2),  # 131072: 0.918; one row 0.897, by a cluster of 4 0.891
        _Entry(32768, 16, 256, 8, in_shared=True, together=2),  # 262144: 0.861; in turn 0.799
    ),
    ("layer_norm", 4): (
        _Entry(64, 1, 32, 2, 4),  # 256: 1.04
        _Entry(128, 1, 64, 2),  # 512: 0.942
        _Entry(256, 1, 64, 4, in_shared=True),  # 1024: 0.976
        # 2048: 0.962; by 64 threads 0.952; in shared memory as much, but of few rows, and to compile, they take longer
        _Entry(512, 1, 128, 4, alone=True),
        _Entry(512, 1, 128, 4, in_shared=True),
        _Entry(1024, 1, 256, 4, alone=True),  # 4096: 0.978; likewise
        _Entry(1024, 1, 256, 4, in_shared=True),  # with a residual: 1.006, in registers 0.956
        _Entry(2048, 1, 256, 8, in_shared=True),  # 8192: 0.974
        _Entry(4096, 2, 256, 8, in_shared=True),  # 16384: 0.983
        _Entry(8192, 8, 128, 8, in_shared=True, clusters=True),  # 32768: 0.968; in turn 0.912
        _Entry(8192, 2, 1024, 4, in_shared=True, stages=3, clusters=False),
        # 65536: 0.945; in turn 0.920, one row 0.908
        _Entry(16384, 8, 256, 8, in_shared=True, together=2, clusters=True),
        _Entry(16384, 4, 1024, 4, in_shared=True, stages=3, clusters=False),
        _Entry(18432, 8, 288, 8, in_shared=True, together=2, clusters=True),  # 73728: 0.937; in turn 0.900
        _Entry(18432, 8, 1024, 4, in_shared=True, stages=3, clusters=False),
        _Entry(32768, 8, 1024, 4, in_shared=True, stages=3),  # 131072: 0.925; without turns 0.883
        # 135168: 0.839, 139264: 0.846; in turn 0.779, 0.876
        _Entry(36864, 16, 288, 8, in_shared=True, together=2, clusters=True),
        _Entry(36864, 16, 1024, 4, in_shared=True, stages=3, clusters=False),
        _Entry(65536, 16, 1024, 4, in_shared=True, stages=3),  # 262144: 0.938; without turns 0.788
    ),
}
# Rows of exactly so many vectors, as well-known models have them, those among them that TransformerEngine has tuned
# kernels for: most fill their threads. Behind each line, its ratio, and that of what would be taken else.
_FORWARD_SIZES = {
    ("rms_norm", 2): (
        _Entry(96, 1, 32, 3, in_shared=True),  # 768: 0.957, 0.859
        _Entry(288, 1, 96, 3),  # 2304: 0.980, 0.954
        _Entry(448, 1, 224, 2, in_shared=True),  # 3584: 0.979, 0.941
        _Entry(1536, 1, 512, 3, in_shared=True),  # 12288: 0.974, 0.951
        _Entry(1792, 2, 128, 7, in_shared=True),  # 14336: 0.964, 0.935
        _Entry(1920, 2, 160, 6, in_shared=True),  # 15360: 0.988, 0.947
        _Entry(3072, 1, 512, 6, in_shared=True),  # 24576: 0.975, 0.946
        _Entry(3200, 1, 640, 5, in_shared=True),  # 25600: 0.987, 0.817
        _Entry(3584, 1, 512, 7, in_shared=True),  # 28672: 0.973, 0.845
        _Entry(3840, 1, 640, 6, in_shared=True),  # 30720: 0.984, 0.865
        _Entry(5120, 4, 256, 5, in_shared=True),  # 40960: 0.930, 0.903
        _Entry(6144, 4, 256, 6, in_shared=True),  # 49152: 0.958, 0.917
        _Entry(7168, 4, 256, 7, in_shared=True),  # 57344: 0.958, 0.897
        _Entry(12288, 8, 256, 6, in_shared=True),  # 98304: 0.924, 0.870
    ),
    ("rms_norm", 4): (
        _Entry(1024, 1, 512, 2),  # 4096: 0.974, 0.960, of a run of their own
        _Entry(1792, 2, 128, 7, in_shared=True),  # 7168: 0.973, 0.898
        _Entry(2560, 2, 256, 5, in_shared=True),  # 10240: 0.974, 0.924
        _Entry(3200, 2, 320, 5, in_shared=True),  # 12800: 0.986, 0.771
        _Entry(3584, 2, 256, 7, in_shared=True),  # 14336: 0.949, 0.769
        _Entry(3840, 2, 480, 4, in_shared=True),  # 15360: 0.968, 0.784
        _Entry(4608, 2, 384, 6, in_shared=True),  # 18432: 0.961, 0.898
        _Entry(5120, 2, 640, 4, in_shared=True),  # 20480: 0.960, 0.920
        _Entry(6144, 8, 96, 8, in_shared=True, together=2),  # 24576: 0.981, 0.896
        _Entry(6400, 4, 320, 5, in_shared=True),  # 25600: 0.939, 0.864
        _Entry(7168, 8, 224, 4, in_shared=True, together=2),  # 28672: 0.980, 0.821
        _Entry(7680, 8, 192, 5, in_shared=True),  # 30720: 0.953, 0.936
    ),
    ("layer_norm", 2): (
        _Entry(96, 1, 32, 3),  # 768: 0.949, 0.845
        _Entry(128, 1, 32, 4, alone=True),  # 1024: 0.963, 0.959, and 16 rows 1.6 us in a graph instead of 2.4
        _Entry(192, 1, 64, 3, alone=True),  # 1536: 0.955; in shared memory 0.956, but 16 rows 2.0 us instead of 1.7
        _Entry(192, 1, 64, 3, in_shared=True),  # 1536: 0.961, 0.829; by 32 threads 0.945
        _Entry(288, 1, 96, 3, in_shared=True),  # 2304: 0.947, 0.751
        _Entry(320, 1, 64, 5, in_shared=True),  # 2560: 0.968, 0.836
        _Entry(384, 1, 96, 4, alone=True),  # 3072: 0.987, 0.987; 16 rows 1.8 us instead of 2.2
        _Entry(448, 1, 64, 7, in_shared=True),  # 3584: 0.971, 0.952
        _Entry(480, 1, 96, 5, in_shared=True),  # 3840: 0.983, 0.944
        _Entry(832, 1, 128, 7, in_shared=True),  # 6656: 0.965, 0.933
        _Entry(896, 1, 128, 7, in_shared=True),  # 7168: 0.968, 0.950
        _Entry(1280, 1, 320, 4, in_shared=True),  # 10240: 0.992, 0.814
        _Entry(1536, 1, 192, 8, in_shared=True),  # 12288: 0.978, 0.968
        _Entry(1600, 1, 320, 5, in_shared=True),  # 12800: 0.992, 0.882
        _Entry(1792, 1, 224, 8, in_shared=True),  # 14336: 0.986, 0.971
        _Entry(1920, 1, 320, 6, in_shared=True),  # 15360: 0.978, 0.929
        _Entry(2304, 1, 384, 6, in_shared=True),  # 18432: 0.992, 0.941
        _Entry(2560, 1, 320, 8, in_shared=True),  # 20480: 0.974, 0.937
        _Entry(2688, 2, 224, 6, in_shared=True, together=2),  # 21504: 0.968; by 192 threads, which spill, 0.973
        _Entry(3072, 2, 192, 8, in_shared=True),  # 24576: 0.990, 0.909
        _Entry(3200, 4, 160, 5, in_shared=True, together=2),  # 25600: 0.933, 0.922
        _Entry(3584, 2, 224, 8, in_shared=True),  # 28672: 0.972, 0.965
        _Entry(3840, 2, 320, 6, in_shared=True, together=2),  # 30720: 0.948, 0.872
        _Entry(5120, 4, 256, 5, in_shared=True, together=2),  # 40960: 0.903, 0.774
        _Entry(5376, 4, 224, 6, in_shared=True, together=2),  # 43008: 0.944, 0.925
        _Entry(6144, 8, 96, 8, in_shared=True),  # 49152: 0.975, 0.949
        _Entry(7168, 8, 128, 7, in_shared=True, together=2),  # 57344: 0.927, 0.792
        _Entry(10752, 8, 224, 6, in_shared=True, together=2),  # 86016: 0.896, 0.898
        _Entry(12288, 8, 192, 8, in_shared=True),  # 98304: 0.938, 0.801
        _Entry(16384, 16, 128, 8, in_shared=True, clusters=True),  # 131072: 0.935, 0.925; with 48 registers 0.893
        _Entry(24576, 16, 192, 8, in_shared=True),  # 196608: 0.893, 0.716
        _Entry(32768, 16, 256, 8, in_shared=True, clusters=True),  # 262144: 0.875, 0.861; with 48 registers 0.867
    ),
    ("layer_norm", 4): (
        _Entry(192, 1, 64, 3, in_shared=True),  # 768: 0.949, 0.882
        _Entry(256, 1, 128, 2),  # 1024: 0.982, 0.968, of a run of their own
        _Entry(576, 1, 192, 3, in_shared=True),  # 2304: 0.991, 0.958
        _Entry(960, 1, 256, 4, in_shared=True),  # 3840: 0.987, 0.974
        _Entry(1152, 1, 288, 4, in_shared=True),  # 4608: 0.998, 0.983
        _Entry(1280, 1, 320, 4, in_shared=True),  # 5120: 0.996, 0.786
        _Entry(1536, 1, 384, 4, in_shared=True),  # 6144: 0.986, 0.958; by 192 threads 0.975
        _Entry(1792, 1, 224, 8, in_shared=True),  # 7168: 0.977, 0.961
        _Entry(2560, 1, 320, 8, in_shared=True),  # 10240: 0.975, 0.792
        _Entry(3072, 2, 192, 8, in_shared=True),  # 12288: 0.977, 0.968
        _Entry(3200, 1, 640, 5, in_shared=True),  # 12800: 0.978, 0.886
        _Entry(3584, 2, 224, 8, in_shared=True),  # 14336: 0.974, 0.966
        _Entry(6400, 8, 160, 5, in_shared=True, together=2),  # 25600: 0.976, 0.874
        _Entry(7168, 8, 128, 7, in_shared=True, together=2),  # 28672: 0.966, 0.920
        _Entry(7680, 8, 192, 5, in_shared=True, together=2),  # 30720: 0.978, 0.973
    ),
}
# LayerNorm of rows of other sizes than those: up to so many vectors by one CTA; beyond, by clusters with two rows
# together. 20 sizes of 1152 to 53248 columns had 0.68 to 0.99 of the ceiling as the table divides longer rows; so, 0.91
# to 1.
_FITTED_VECTORS = range(129, 16384)
_MOST_VECTORS_OF_ONE = 2304  # 17408 of bfloat16: by one CTA 0.967, by two 0.963; 27648: by two 0.971, by one 0.902
_FITTED_STEPS = range(4, 9)
_MOST_THREADS_OF_ONE = 320
_LEAST_FILLED = 0.9
# Of a multiprocessor: the threads that LayerNorm's registers leave room for, and bytes.
_RESIDENT_THREADS = 1024
_ENOUGH_IN_FLIGHT = 216 * 1024
_BESIDE_ROWS = 1024  # of a CTA, about what it really has beside them; RESERVED_SHARED is the most
# Rows that vectors of 16 bytes do not divide, and those of 8 do (bfloat16, 4100: RMSNorm 0.93).
_UNEVEN_FORWARD = (
    _Entry(32, 1, 32, 1, 8),
    _Entry(128, 1, 64, 2, 2),
    _Entry(256, 1, 128, 2),
    _Entry(512, 1, 128, 4),
    _Entry(4096, 1, 1024, 4),
)
# Others have vectors of 16 bytes, the last one in part, and are copied to shared memory word by word. Many threads have
# many words in flight. Nothing was tuned for such rows, which no model has.
_PADDED_FORWARD = (
    _Entry(32, 1, 32, 1, 8),
    _Entry(128, 1, 64, 2, 2),
    _Entry(256, 1, 128, 2),
    _Entry(512, 1, 256, 2),
    _Entry(1024, 1, 512, 2),
    _Entry(4096, 1, 1024, 4, in_shared=True),
    _Entry(8192, 4, 512, 4, in_shared=True),
    _Entry(16384, 4, 512, 8, in_shared=True),
    _Entry(32768, 8, 512, 8, in_shared=True),
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
# Where each row has a scale, its threads keep y until they know that: 32 elements each, and LayerNorm's of 16 bits 64,
# in registers that other divisions have for more CTAs (H100, to e4m3, of the best copy of x; behind it by the lines
# above). Rows of more than 4096 columns, and LayerNorm's of just these sizes: what is not filled loses more (14336:
# 0.78, and 0.85).
_ROW_SCALED_LEAST = 4096
_ROW_SCALED_FORWARD = {
    ("rms_norm", 2): (_Entry(1024, 1, 256, 4),),  # 5120, 7168, 8192: 1.00, 1.00, 1.02; 0.96, 0.94, 0.99
    # 7168, 16384, 40960, 65536, 131072: 0.99, 1.00, 0.97, 0.99, 0.95; 0.92, 0.95, 0.87, 0.96, 0.92
    ("rms_norm", 4): tuple(_Entry(2048 * ctas, ctas, 256, 8, clusters=ctas > 1 or None) for ctas in (1, 2, 4, 8, 16)),
}
_ROW_SCALED_SIZES = {
    ("layer_norm", 2): (
        _Entry(512, 1, 64, 8, in_shared=True),  # 4096: 0.98; 0.92
        _Entry(768, 1, 96, 8, in_shared=True),  # 0.98; 0.91
        _Entry(1024, 1, 128, 8, in_shared=True),  # 1.01; 0.94
        _Entry(2048, 2, 128, 8, in_shared=True, clusters=True),  # 16384: 0.96; 0.90
        _Entry(4096, 4, 128, 8, in_shared=True, clusters=True),  # 0.90; 0.83
        _Entry(16384, 16, 128, 8, in_shared=True, clusters=True),  # 131072: 0.80; 0.69
    ),
    ("layer_norm", 4): (
        _Entry(2048, 2, 128, 8, in_shared=True, clusters=True),  # 8192: 0.96; 0.95
        _Entry(4096, 4, 128, 8, in_shared=True, clusters=True),  # 0.90; 0.85
    ),
}
# Two rows are read where a residual is added: rows that several CTAs share leave less room.
_FORWARD_RESIDUAL = (
    _Entry(8192, 8, 128, 8, in_shared=True),  # bfloat16, 65536: 0.926; a cluster of 4 0.88
    _Entry(16384, 16, 128, 8, in_shared=True),  # 131072: 0.877
    _Entry(32768, 16, 512, 4, in_shared=True),  # 262144: 0.829
)

# Where two devices are named, the ratios on an H200 and on an H100, means of 3 and of 2 placements: of 6 to 150
# divisions of such a size the best on both, by what each is behind its device's best, where 0.03 on an H100 are
# forgiven; of about as fast ones that which takes 16 and 128 rows less time in a graph. Where an H100 alone is named,
# behind it is what was taken before. What is fastest on an H100 alone, small CTAs of large clusters, had 0.68 to 0.88
# on an H200, whose memory is faster.
_BACKWARD = {
    ("rms_norm", 2): (
        _Entry(32, 1, 16, 2, 16, True, 2),  # 256: 0.818
        _Entry(64, 1, 32, 2, 4, True, 3),  # 512: 0.877
        _Entry(128, 1, 32, 4, 4, True, 4),  # 1024: 0.888
        _Entry(256, 1, 64, 4, 2, True, 4),  # 2048: 0.920; by 128 threads 0.864
        # 2304, 3072, 3328: H200 0.930, 0.942, 0.936, H100 0.939, 0.946, 0.937
        _Entry(448, 1, 224, 2, 1, True, 2, bulk=True, clusters=True),
        _Entry(512, 1, 128, 4, 1, True, 4),  # 4096: 0.914
        _Entry(640, 1, 320, 2, 1, True, 5, clusters=True),  # 4480: H200 0.955, H100 0.957
        _Entry(1024, 1, 256, 4, 1, True, 4),  # 5632, 6144, 6912: H200 0.966, 0.945, 0.918, H100 0.942, 0.942, 0.934
        _Entry(1280, 2, 160, 4, 1, True, 2, clusters=True),  # 8704, 8960: H200 0.958, 0.960, H100 0.942, 0.944
        # 11008, 11264, 13824: H200 0.944, 0.951, 0.940, H100 0.949, 0.946, 0.929
        _Entry(1792, 2, 224, 4, 1, True, 4, clusters=True),
        _Entry(2048, 4, 128, 4, 1, True, 4),  # 16384: 0.949
        # 16896, 17920, 22528: H200 0.930, 0.926, 0.923, H100 of the first two 0.933, 0.933
        _Entry(2880, 8, 128, 3, 1, True, 2, clusters=True),
        _Entry(3072, 2, 384, 4, 1, True, 3, clusters=True),  # 24576: H200 0.957, H100 0.945
        _Entry(3456, 4, 224, 4, 1, True, 3, clusters=True),  # 25088, 27648: H200 0.937, 0.951, H100 0.943, 0.941
        _Entry(3840, 16, 64, 4, 1, True, 2, clusters=True),  # 28672, 30720: H200 0.933, 0.927, H100 0.942, 0.937
        _Entry(4096, 2, 512, 4, 1, True, 3, bulk=True),  # 32768: 0.943
        _Entry(4608, 8, 160, 4, 1, True, 3, clusters=True),  # 35840: H200 0.945, H100 0.936
        _Entry(8192, 4, 512, 4, 1, True, 3, bulk=True),  # 65536: 0.946
        # 69632, 81920, 98304: H200 0.904, 0.893, 0.933, H100 0.931, 0.956, 0.941
        _Entry(12288, 8, 768, 2, 1, True, 3, clusters=True),
        _Entry(15360, 8, 512, 4, 1, True, 3, clusters=True),  # 114688: H200 0.947, H100 0.940
        _Entry(16384, 8, 1024, 2, 1, True, 3),  # 131072: 0.940
        _Entry(32768, 16, 512, 4, 1, True, 3),  # 262144: 0.945
    ),
    ("rms_norm", 4): (
        _Entry(64, 1, 32, 2, 8, True, 3),  # 256: 0.788
        _Entry(128, 1, 128, 1, 2, True, 3),  # 512: 0.841
        _Entry(256, 1, 128, 2, 2, True, 4),  # 1024: 0.886
        _Entry(512, 1, 128, 4, 2, True, 4),  # 2048: 0.922
        _Entry(1024, 1, 512, 2, 1, True, 4),  # 4096: 0.968
        _Entry(1792, 1, 1024, 2, 1, True, 2, clusters=True),  # 6656: H100 0.979; as the next line has it 0.956
        _Entry(2048, 2, 256, 4, 1, True, 4, clusters=True),  # 7424, 7936: H100 0.993, 0.993; 0.956, 0.962
        _Entry(2048, 1, 1024, 2, 1, True, 2),  # 8192: 0.953
        _Entry(2304, 2, 320, 4, 1, True, 4, clusters=True),  # 8208, 8704: H100 0.980, 0.984; 0.924, 0.954
        _Entry(4096, 2, 512, 4, 1, True, 3),  # 16384: 0.946
        # 16896, 17920, 20480: H200 0.970, 0.954, 0.950, H100 0.954, 0.952, 0.948
        _Entry(5120, 8, 160, 4, 1, True, 3, clusters=True),
        _Entry(8192, 4, 512, 4, 1, True, 3),  # 22528, 25088, 27648: H200 0.950, 0.967, 0.948, H100 0.963, 0.960, 0.950
        _Entry(16384, 8, 512, 4, 1, True, 3),  # 35840: H200 0.946, H100 0.960; 65536: 0.959
        _Entry(32768, 16, 1024, 2, 1, True, 3),  # 131072: 0.935
        _Entry(65536, 16, 512, 8, 1, True, 1),  # 196608, 262144: H200 0.640, 0.648; in bulk 0.583, 0.626
    ),
    ("layer_norm", 2): (
        _Entry(32, 1, 16, 2, 16, True, 4, ahead=True),  # 256: 0.739
        _Entry(64, 1, 32, 2, 8, True, 3, ahead=True),  # 512: 0.812
        _Entry(128, 1, 32, 4, 4, True, 3),  # 1024: 0.833
        _Entry(256, 1, 128, 2, 1, True, 3),  # 2048: 0.915, with two slots 0.904; ahead 0.881
        _Entry(512, 1, 256, 2, 1, True, 4, bulk=True),  # 3000: H200 0.863; ahead 0.767
        _Entry(640, 1, 160, 4, 1, True, 3, bulk=True, clusters=True),  # 4480: H200 0.935, H100 0.918
        _Entry(768, 1, 384, 2, 1, True, 3, ahead=True),  # 5632: H200 0.948, H100 0.943
        _Entry(1024, 1, 512, 2, 1, True, 4, bulk=True, ahead=True, clusters=True),  # 6912: H200 0.938, H100 0.931
        _Entry(1024, 1, 256, 4, 1, True, 4, bulk=True, ahead=True),  # 8192: 0.954; by 512 threads 0.921
        # 8704, 8960: H200 0.943, 0.917, H100 0.919, 0.929
        _Entry(1280, 1, 448, 3, 1, True, 3, bulk=True, ahead=True, clusters=True),
        # 11008, 11264: H200 0.927, 0.920, H100 0.914, 0.918
        _Entry(1536, 1, 384, 4, 1, True, 3, bulk=True, ahead=True, clusters=True),
        # 12800, 13824, 14336: H200 0.905, 0.908, 0.908, H100 0.927, 0.926, 0.927
        _Entry(1792, 1, 448, 4, 1, True, 2, bulk=True, ahead=True),
        _Entry(2048, 4, 128, 4, 1, True, 3, bulk=True, ahead=True),  # 16384: 0.939; four slots 0.882
        # 16896, 17920: H200 0.900, 0.881, H100 0.926, 0.930
        _Entry(2304, 2, 384, 3, 1, True, 4, ahead=True, clusters=True),
        # 22528, 24576: H200 0.917, 0.928, H100 0.936, 0.931
        _Entry(3072, 8, 96, 4, 1, True, 3, ahead=True, clusters=True),
        # 25088, 27648, 30720: H200 0.859, 0.910, 0.916, H100 0.935, 0.926, 0.918; by 8 CTAs 0.688, 0.753, 0.865, but
        # 16 rows of 28672 take 6 us in a graph instead of 12
        _Entry(3840, 2, 480, 4, 1, True, 2, bulk=True, ahead=True, clusters=True),
        _Entry(4096, 8, 128, 4, 1, True, 3, ahead=True),  # 32768: H200 0.928, H100 0.926
        _Entry(4608, 8, 192, 3, 1, True, 3, ahead=True, clusters=True),  # 35840: H200 0.822, H100 0.939
        _Entry(6144, 8, 192, 4, 1, True, 3, bulk=True, ahead=True),  # 49152: 0.899
        _Entry(8192, 4, 512, 4, 1, True, 2, bulk=True, ahead=True),  # 65536: 0.934; by a cluster of 8 0.926
        _Entry(9216, 8, 384, 3, 1, True, 4, ahead=True, clusters=True),  # 69632: H200 0.789, H100 0.949
        _Entry(12288, 16, 192, 4, 1, True, 2, clusters=True),  # 81920: H200 0.843, H100 0.936
        _Entry(16384, 8, 512, 4, 1, True, 2, bulk=True, ahead=True),  # 131072: 0.933; by one of 16 0.891
        _Entry(32768, 16, 512, 4, 1, True, 2, ahead=True),  # 262144: H200 0.864, H100 0.883
    ),
    ("layer_norm", 4): (
        _Entry(64, 1, 32, 2, 8, True, 3),  # 256: 0.706
        _Entry(128, 1, 64, 2, 4, True, 4),  # 512: 0.783
        _Entry(256, 1, 64, 4, 2, True, 4),  # 1024: 0.889
        _Entry(512, 1, 128, 4, 1, True, 1),  # 2048: 0.918
        _Entry(1024, 1, 512, 2, 1, True, 4),  # 4096: 0.942
        _Entry(1120, 1, 288, 4, 1, True, 3, clusters=True),  # 4480: H200 0.962, H100 0.980
        # 4608, 5632, 6912: H200 0.932, 0.950, 0.935, H100 0.935, 0.934, 0.964
        _Entry(2048, 4, 192, 3, 1, True, 4, bulk=True),
        # 8704, 9216: H200 0.941, 0.953, H100 0.949, 0.945
        _Entry(2304, 4, 160, 4, 1, True, 3, bulk=True, clusters=True),
        # 11008, 12288, 13824: H200 0.949, 0.945, 0.954, H100 0.946, 0.950, 0.951
        _Entry(4096, 8, 128, 4, 1, True, 2, bulk=True),
        # 16896, 17920, 20480: H200 0.940, 0.945, 0.940, H100 0.955, 0.949, 0.950
        _Entry(5120, 8, 160, 4, 1, True, 4, ahead=True, clusters=True),
        # 22528, 25088, 27648: H200 0.945, 0.922, 0.940, H100 0.938, 0.953, 0.947
        _Entry(8192, 16, 128, 4, 1, True, 3, bulk=True),
        _Entry(9216, 8, 288, 4, 1, True, 4, ahead=True, clusters=True),  # 35840: H200 0.962, H100 0.964
        _Entry(16384, 8, 1024, 2, 1, True, 3),  # 65536: 0.950
        # 69632, 81920, 98304: H200 0.917, 0.872, 0.917, H100 0.934, 0.961, 0.950
        _Entry(28672, 16, 608, 3, 1, True, 3, clusters=True),
        _Entry(32768, 16, 1024, 2, 1, True, 3),  # 131072: 0.960
        _Entry(65536, 16, 512, 8, 1, True, 1),  # 196608, 262144: H200 0.601, 0.597; in bulk 0.572, 0.596
    ),
}
# As _BACKWARD, beside which others are as in _FORWARD_SIZES. Lines for where there are no clusters: H200, where several
# CTAs were one.
_BACKWARD_SIZES = {
    ("rms_norm", 2): (
        _Entry(32, 1, 16, 2, 8, True, 2),  # 256: 0.839, 0.818
        _Entry(64, 1, 32, 2, 4, True, 2),  # 512: 0.896, 0.877
        _Entry(96, 1, 32, 3, 4, True, 4),  # 768: H200 0.893, H100 0.907
        _Entry(128, 1, 64, 2, 2, True, 2, ahead=True),  # 1024: H200 0.934, H100 0.928
        _Entry(160, 1, 96, 2, 1, True, 5, bulk=True),  # 1280: H200 0.927, H100 0.927
        _Entry(192, 1, 64, 3, 4, True, 3),  # 1536: 0.916, 0.885
        _Entry(320, 1, 160, 2, 1, True, 2),  # 2560: H200 0.926, H100 0.924
        _Entry(360, 1, 128, 3, 2, True, 3),  # 2880: 0.930, 0.917
        _Entry(448, 1, 224, 2, 1, True, 4),  # 3584: 0.937, 0.836
        _Entry(480, 1, 160, 3, 1, True, 5),  # 3840: H200 0.938, H100 0.982
        _Entry(512, 2, 64, 4, 1, True, 4),  # 4096: H200 0.956, H100 0.931
        _Entry(576, 1, 288, 2, 1, True, 5),  # 4608: H200 0.969, H100 0.951
        _Entry(640, 1, 160, 4, 1, True, 4),  # 5120: H200 0.970, H100 0.946
        _Entry(896, 2, 160, 3, 1, True, 4),  # 7168: H200 0.942, H100 0.937
        _Entry(1024, 1, 512, 2, 1, True, 4),  # 8192: H200 0.957, H100 0.977
        _Entry(1152, 1, 288, 4, 1, True, 4, clusters=False),  # 9216: 0.971, 0.846
        _Entry(1152, 2, 160, 4, 1, True, 3),  # 9216: H200 0.949, H100 0.939
        _Entry(1280, 2, 160, 4, 1, True, 4),  # 10240: H200 0.952, H100 0.948
        _Entry(1536, 8, 64, 3, 1, True, 3),  # 12288: H100 0.948, 0.935
        _Entry(1600, 2, 224, 4, 1, True, 3),  # 12800: H200 0.962, H100 0.932
        _Entry(1792, 8, 64, 4, 1, True, 3),  # 14336: H200 0.948, H100 0.934
        _Entry(1920, 4, 160, 3, 1, True, 4),  # 15360: H200 0.953, H100 0.928
        _Entry(2048, 8, 64, 4, 1, True, 4),  # 16384: H200 0.947, H100 0.935
        _Entry(2176, 8, 96, 3, 1, True, 3, bulk=True),  # 17408: 0.945, 0.922
        _Entry(2304, 4, 160, 4, 1, True, 2),  # 18432: H200 0.940, H100 0.943
        _Entry(2560, 4, 160, 4, 1, True, 3),  # 20480: H200 0.931, H100 0.933
        _Entry(4096, 8, 128, 4, 1, True, 4),  # 32768: H200 0.952, H100 0.939
        _Entry(5120, 8, 160, 4, 1, True, 3),  # 40960: H200 0.937, H100 0.934
        _Entry(6144, 16, 192, 2, 1, True, 2, ahead=True),  # 49152: H200 0.927, H100 0.932
        _Entry(7168, 8, 224, 4, 1, True, 3, bulk=True),  # 57344: 0.923, 0.912
        _Entry(8192, 8, 256, 4, 1, True, 4, ahead=True),  # 65536: H200 0.945, H100 0.943
        _Entry(16384, 8, 704, 3, 1, True, 3),  # 131072: H200 0.933, H100 0.918
    ),
    ("rms_norm", 4): (
        _Entry(192, 1, 96, 2, 2, True, 5, ahead=True),  # 768: H200 0.964, H100 0.959
        _Entry(256, 1, 128, 2, 1, True, 4),  # 1024: 0.940; two rows by 256 threads 0.914
        _Entry(384, 1, 96, 4, 1, True, 5),  # 1536: H200 0.980, H100 0.955
        _Entry(512, 1, 256, 2, 2, True, 4),  # 2048: 0.959, 0.946
        _Entry(576, 1, 192, 3, 1, True, 5),  # 2304: H200 0.990, H100 0.960
        _Entry(720, 4, 64, 3, 1, True, 3, bulk=True),  # 2880: 0.959, 0.942
        _Entry(2048, 2, 256, 4, 1, True, 4, bulk=True),  # 8192: H100 0.978, 0.963
        _Entry(2304, 2, 384, 3, 1, True, 4, bulk=True),  # 9216: 0.982, 0.952
        _Entry(3200, 8, 160, 3, 1, True, 4),  # 12800: H100 0.969, 0.960
        _Entry(3584, 16, 64, 4, 1, True, 3),  # 14336: H100 0.961, 0.957
        _Entry(4096, 8, 128, 4, 1, True, 3),  # 16384: H200 0.947, H100 0.960
        _Entry(6144, 8, 256, 3, 1, True, 2),  # 24576: H100 0.958, 0.942
        _Entry(7168, 8, 224, 4, 1, True, 2, bulk=True),  # 28672: H100 0.970, 0.966
        _Entry(7680, 8, 256, 4, 1, True, 4, ahead=True),  # 30720: H200 0.947, H100 0.964
        _Entry(8192, 8, 256, 4, 1, True, 4, ahead=True),  # 32768: H200 0.956, H100 0.955
        _Entry(16384, 16, 256, 4, 1, True, 4, bulk=True),  # 65536: 0.974, 0.959
        _Entry(32768, 16, 1024, 2, 1, True, 3, bulk=True),  # 131072: 0.951, 0.935
    ),
    ("layer_norm", 2): (
        _Entry(96, 1, 32, 3, 4, True, 3),  # 768: H200 0.863, H100 0.893
        _Entry(160, 1, 64, 3, 1, True, 2, ahead=True),  # 1280: H200 0.882, H100 0.895
        # 1536: on an H100 0.899, 0.887; 16, 128 and 512 rows take 3.6, 5.3 and 7.2 us in a graph, else 3.9, 5.5 and 7.9
        _Entry(192, 1, 96, 2, 1, True, 2),
        _Entry(224, 1, 128, 2, 1, True, 2),  # 1792: H100 0.922, 0.908
        _Entry(256, 1, 128, 2, 1, True, 2),  # 2048: H200 0.920, H100 0.918
        _Entry(288, 1, 96, 3, 1, True, 2),  # 2304: H100 0.934, 0.893
        # 2560: on an H100 0.920, 0.905; 16, 128 and 512 rows take 3.9, 5.4 and 8.5 us, else 4.3, 5.8 and 9.4
        _Entry(320, 1, 160, 2, 1, True, 2),
        _Entry(360, 1, 96, 4, 1, True, 2, bulk=True),  # 2880: H200 0.917, H100 0.905
        _Entry(384, 1, 192, 2, 1, True, 2),  # 3072: H200 0.929, H100 0.941
        _Entry(416, 1, 224, 2, 1, True, 4, bulk=True, ahead=True),  # 3328: H200 0.949, H100 0.917
        _Entry(448, 1, 224, 2, 1, True, 3, bulk=True, ahead=True),  # 3584: H200 0.934, H100 0.936
        _Entry(480, 1, 160, 3, 1, True, 4),  # 3840: H200 0.943, H100 0.922
        # 4096: H200 0.939, H100 0.932; 16, 128 rows take 4.0, 5.7 us in a graph
        _Entry(512, 2, 64, 4, 1, True, 4),
        _Entry(576, 1, 160, 4, 1, True, 2, bulk=True),  # 4608: H200 0.947, H100 0.930
        _Entry(640, 1, 320, 2, 1, True, 4),  # 5120: H200 0.932, H100 0.942
        _Entry(672, 1, 192, 4, 1, True, 3),  # 5376: H200 0.948, H100 0.935
        _Entry(768, 2, 96, 4, 1, True, 3),  # 6144: H200 0.946, H100 0.942
        _Entry(896, 1, 448, 2, 1, True, 3, ahead=True),  # 7168: H200 0.948, H100 0.933
        # 8192: H200 0.944, H100 0.925; by a cluster of 8 0.762, 0.937, and 16, 128 rows 4.4, 7.7 us instead of 6.8, 9.6
        _Entry(1024, 1, 352, 3, 1, True, 4, bulk=True, ahead=True),
        _Entry(1152, 2, 192, 3, 1, True, 4, ahead=True),  # 9216: H200 0.941, H100 0.919
        _Entry(1280, 1, 320, 4, 1, True, 3),  # 10240: H200 0.927, H100 0.944
        _Entry(1536, 4, 96, 4, 1, True, 3),  # 12288: H200 0.922, H100 0.931
        _Entry(1920, 8, 64, 4, 1, True, 3, bulk=True, ahead=True),  # 15360: H200 0.915, H100 0.932
        _Entry(2048, 8, 64, 4, 1, True, 3, ahead=True),  # 16384: H200 0.932, H100 0.925
        _Entry(2176, 2, 384, 3, 1, True, 4, bulk=True, ahead=True),  # 17408: 0.869, 0.677
        _Entry(2304, 8, 96, 3, 1, True, 3, bulk=True, ahead=True),  # 18432: 0.904, 0.738
        _Entry(2560, 2, 320, 4, 1, True, 3, ahead=True, clusters=False),  # 20480: 0.875, 0.826
        _Entry(2560, 4, 160, 4, 1, True, 2),  # 20480: H200 0.919, H100 0.917
        _Entry(5120, 8, 160, 4, 1, True, 2, ahead=True),  # 40960: H200 0.908, H100 0.939
        _Entry(7168, 4, 448, 4, 1, True, 2, ahead=True),  # 57344: H200 0.900, H100 0.914
        _Entry(8192, 16, 128, 4, 1, True, 3, ahead=True),  # 65536: H200 0.909, H100 0.912
        _Entry(12288, 16, 192, 4, 1, True, 3, ahead=True),  # 98304: H200 0.899, H100 0.922
        _Entry(24576, 16, 384, 4, 1, True, 3, bulk=True, ahead=True),  # 196608: 0.781, 0.716
    ),
    ("layer_norm", 4): (
        _Entry(192, 1, 64, 3, 1, True, 5),  # 768: H200 0.930, H100 0.933
        _Entry(256, 1, 128, 2, 1, True, 5),  # 1024: H200 0.958, H100 0.941
        _Entry(320, 1, 160, 2, 2, True, 3),  # 1280: 0.934, 0.855
        _Entry(384, 1, 96, 4, 1, True, 5),  # 1536: H200 0.972, H100 0.962
        _Entry(448, 1, 224, 2, 1, True, 1),  # 1792: H200 0.957, H100 0.940
        _Entry(512, 2, 64, 4, 1, True, 4),  # 2048: H200 0.965, H100 0.944
        _Entry(576, 1, 192, 3, 2, True, 4),  # 2304: 0.951, 0.921
        _Entry(720, 2, 128, 3, 1, True, 4),  # 2880: H200 0.977, H100 0.940
        _Entry(768, 1, 192, 4, 1, True, 2),  # 3072: H100 0.953, 0.945
        _Entry(896, 2, 224, 2, 1, True, 4),  # 3584: 0.971, 0.919
        _Entry(1280, 2, 224, 3, 1, True, 4),  # 5120: H200 0.964, H100 0.961
        _Entry(1344, 2, 224, 3, 1, True, 4, bulk=True),  # 5376: 0.976, 0.935
        _Entry(2048, 2, 256, 4, 1, True, 2),  # 8192: H200 0.950, H100 0.959
        _Entry(2304, 4, 160, 4, 1, True, 3, bulk=True, clusters=False),  # 9216: 0.958, 0.819
        _Entry(2560, 4, 320, 2, 1, True, 4, bulk=True),  # 10240: 0.933, 0.876
        _Entry(3200, 4, 288, 3, 1, True, 4, clusters=False),  # 12800: 0.969, 0.852
        _Entry(3200, 8, 160, 3, 1, True, 3),  # 12800: H200 0.962, H100 0.949
        _Entry(3584, 8, 128, 4, 1, True, 4),  # 14336: H100 0.966, 0.947
        _Entry(4096, 8, 128, 4, 1, True, 4),  # 16384: H200 0.968, H100 0.949
        _Entry(4352, 16, 96, 3, 1, True, 4, bulk=True),  # 17408: 0.944, 0.805
        _Entry(4608, 4, 288, 4, 1, True, 4, ahead=True),  # 18432: H200 0.947, H100 0.945
        _Entry(5120, 8, 320, 2, 1, True, 4, clusters=False),  # 20480: 0.930, 0.853
        _Entry(6144, 8, 192, 4, 1, True, 2, bulk=True, ahead=True),  # 24576: H100 0.969, 0.945
        _Entry(6400, 8, 288, 3, 1, True, 3),  # 25600: H200 0.961, H100 0.950
        _Entry(7168, 8, 224, 4, 1, True, 2, ahead=True),  # 28672: H100 0.970, 0.955
        _Entry(7680, 8, 256, 4, 1, True, 4, bulk=True, ahead=True),  # 30720: H100 0.965, 0.951
        _Entry(8192, 8, 256, 4, 1, True, 4, ahead=True),  # 32768: H200 0.951, H100 0.951
        _Entry(10240, 8, 448, 3, 1, True, 4, bulk=True, ahead=True),  # 40960: H200 0.942, H100 0.945
        _Entry(12288, 8, 384, 4, 1, True, 3),  # 49152: H200 0.958, H100 0.963
        _Entry(16384, 16, 256, 4, 1, True, 4, ahead=True),  # 65536: 0.965, 0.950
    ),
}
_UNEVEN_VECTORS = 256
_UNEVEN_BACKWARD = {2: _Entry(1024, 1, 512, 2, 1, True, 2), 4: _Entry(2048, 1, 512, 4, 1, True, 2)}
_BACKWARD_ELSEWHERE = (
    _Entry(1024, 1, 512, 2, 1, True, 3),
    _Entry(2048, 1, 1024, 2, 1, True, 2),
    _Entry(4096, 4, 512, 2, 1, True, 3),
    _Entry(4096, 2, 512, 4, 1, True, 2),  # where no more are resident together
    _Entry(8192, 8, 512, 2, 1, True, 3),
    _Entry(16384, 16, 512, 2, 1, True, 2),
    _Entry(32768, 16, 1024, 2, 1, True, 1),
)


class _Division(RowVectors):
    """A row, and how a table's line divides it."""

    def exactly(self, entries: Sequence[_Entry]) -> tuple[_Entry, ...]:
        """Return those that are for rows of just this size."""
        return tuple(entry for entry in entries if entry.vectors * self.full == self.hidden)

    def config(self, entry: _Entry, limits: DeviceLimits) -> NormConfig:
        """Return a table's configuration for this row."""
        ctas, threads, steps, rows, in_shared = entry.ctas, entry.threads, entry.steps, entry.rows, entry.in_shared
        vector = self.vector
        if steps == 8 and self._padded(ctas, 4) * 10 < self._padded(ctas, 8) * 9:
            steps, threads = 4, 2 * threads
        # Rows that do not fill a CTA are faster in registers (float32, 3000: 0.987 instead of 0.894).
        if steps == 2 and not entry.stages and vector == self.full and self._padded(1, 2) != self.vectors:
            in_shared = False
        steps *= self.full // vector
        share = math.ceil(math.ceil(self.hidden / vector) / ctas)
        if threads <= 32:
            # A CTA has as many threads whatever the row: more rows where they are short.
            fewer = min(threads, power_of_two(math.ceil(share / steps)))
            rows *= threads // fewer
            threads = fewer
        else:
            threads = min(threads, 32 * math.ceil(share / (32 * steps)))
        if rows == 1 and (entry.stages or ctas > 1):
            threads = max(threads, 64)  # several warps, whose barriers order what CTAs tell each other
        clusters = has_clusters(limits) and ctas > 1
        bulk = limits.architecture >= NormConfig.BULK_ARCHITECTURE and entry.bulk and vector == self.full
        # As many lanes as share a row bring statistics of as many turns, or of half as many.
        ahead = entry.ahead and threads >= 8
        return NormConfig(
            threads, rows, vector, steps, ctas, clusters, in_shared, entry.stages, entry.together, bulk, ahead
        )

    def fitted(self, limits: DeviceLimits, together: int, staged: int) -> tuple[_Entry, ...]:
        """Return divisions of a row of whole vectors that is in no table, the best first.

        One CTA: the most filled, with the fewest steps. Clusters, which have `together` rows and keep `staged` bytes of
        each column: what has most in flight, up to what is enough, and is filled; less for each doubling of the CTAs,
        which wait for each other, and for large ones. Of 24 lengths and types, none was more than 0.017 of the ceiling
        behind the best of their 3 to 20 divisions.
        """
        one = self.vectors <= _MOST_VECTORS_OF_ONE
        if self.hidden % self.full or self.vectors not in _FITTED_VECTORS or not (one or has_clusters(limits)):
            return ()
        divisions = []
        for ctas, steps in itertools.product((1,) if one else (2, 4, 8, 16), _FITTED_STEPS):
            threads = _threads(math.ceil(self.vectors / ctas), steps)
            filled = self.vectors / (ctas * threads * steps)
            if one and threads <= _MOST_THREADS_OF_ONE:
                divisions.append((filled, -steps, _Entry(self.vectors, 1, threads, steps, in_shared=True)))
            elif not one and threads >= 64 and filled >= _LEAST_FILLED:
                entry = _Entry(self.vectors, ctas, threads, steps, in_shared=True, together=together)
                held = together * threads * steps * self.full * staged + _BESIDE_ROWS
                resident = min(_RESIDENT_THREADS // threads, limits.shared_memory_per_cta // held)
                in_flight = min(1.0, resident * together * 16 * self.vectors / ctas / _ENOUGH_IN_FLIGHT)
                worth = in_flight + filled / 2 - 0.06 * math.log2(ctas) - abs(threads - 128) / 1700
                divisions.append((worth, -steps, entry))
        return tuple(entry for *_, entry in sorted(divisions, reverse=True))

    def _padded(self, ctas: int, steps: int) -> int:
        """Return the vectors of whole warps that hold a CTA's part of a row."""
        return 32 * steps * math.ceil(self.vectors / (32 * steps * ctas))


def _lines(table: Sequence[_Entry], clusters: bool) -> tuple[_Entry, ...]:
    """Return the lines that hold where there are clusters, or where there are none."""
    return tuple(entry for entry in table if entry.clusters in (None, clusters))


def _choose(
    entries: Sequence[_Entry],
    division: _Division,
    limits: DeviceLimits,
    least_stages: int,
    fits: Callable[[NormConfig, DeviceLimits], bool],
) -> NormConfig | None:
    """Return the first configuration that holds the row; without clusters, rather one CTA than several."""
    clusters = has_clusters(limits)
    most = most_ctas(limits)
    # One slot, to which nothing comes while a row is worked on, only where other lines do not help; without clusters
    # one CTA with it comes before several.
    passes = (2, least_stages) if least_stages < 2 else (least_stages,)
    for several, least in itertools.product((True,) if clusters else (False, True), passes):
        for entry in entries:
            if division.vectors > entry.vectors or entry.ctas > (most if several else 1):
                continue
            for stages in range(entry.stages, min(entry.stages, least) - 1, -1):
                config = division.config(entry._replace(stages=stages), limits)
                if config.chunk * entry.ctas >= division.hidden and fits(config, limits):
                    return config
    return None


def configure(row: ForwardRow, limits: DeviceLimits) -> NormConfig:
    """Choose how a forward kernel's rows are divided.

    Parameters
    ----------
    row : ForwardRow
        What is asked for.
    limits : DeviceLimits
        Of the device.
    """
    hidden, rows, output = row.hidden, row.rows, row.output
    division = _Division(hidden, rows, output)
    # RMSNorm with a bias has as much to hold as LayerNorm (as without one: float32, 16384: 0.73, bfloat16, 65536: 0.82;
    # by divisions of LayerNorm 0.97).
    table = ("layer_norm" if len(row.columns) > 1 else row.norm), division.bytes
    clusters = has_clusters(limits) and hidden % division.full == 0
    general = _lines(_FORWARD[table], clusters)
    # A row of two arrays is as much in flight as two rows, and one whose y is wider nearly so (bfloat16 to float32, 14
    # sizes of 20000 to 131072: 0.71 to 0.92, in pairs up to 0.09 less and never more).
    pairs = row.may_take_turns and len(rows) == 1 and output.bytes <= row.held.bytes and hidden % division.full == 0
    exact = division.exactly((*_lines(_FORWARD_SIZES[table], clusters), *general))
    if not exact and table[0] == "layer_norm" and len(rows) == 1:
        exact = division.fitted(limits, 2 if pairs else 1, row.staged_bytes)
    entries: tuple[_Entry, ...] = (*exact, *general)
    if len(rows) > 1:
        entries = (*(entry for entry in entries if entry.ctas == 1 and not entry.alone), *_FORWARD_RESIDUAL)
    if division.is_padded:
        entries = _PADDED_FORWARD
    elif division.is_narrow:
        entries = (*_UNEVEN_FORWARD, *entries)
    elif row.row_scaled and len(rows) == 1:
        long = _ROW_SCALED_FORWARD.get(table, ()) if hidden > _ROW_SCALED_LEAST else ()
        scaled = (*division.exactly(_ROW_SCALED_SIZES.get(table, ())), *long)
        entries = (*_lines(scaled, clusters), *entries)
    if not pairs:
        entries = tuple(entry._replace(together=1) for entry in entries)
    found = _choose((*entries, *_FORWARD_ELSEWHERE), division, limits, 2, row.fits)
    if found is not None:
        return found
    # Too long to be held: chunks of four vectors a thread, read again.
    ctas = most_ctas(limits)
    share = math.ceil(division.vectors / ctas)
    chunks = math.ceil(share / (1024 * 4))
    threads = _threads(math.ceil(share / chunks), 4)
    for steps in (4, 2, 1):
        config = division.config(_Entry(0, ctas, threads, steps), limits)
        # Four steps of sums of floats that become 8 bits would spill.
        few = config.steps <= 2 or len(rows) == 1 or (row.sum or row.held).bytes < 4 or output.bytes > 1
        if few and row.fits(config, limits):
            break
    return config


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
    division = _Division(row.hidden, row.rows, row.output)
    table = row.norm, division.bytes
    clusters = has_clusters(limits)
    exact = division.exactly(_lines(_BACKWARD_SIZES[table], clusters))
    entries = _lines(_BACKWARD[table], clusters)
    if not clusters:
        # Several CTAs were measured as clusters: where they meet in global memory, no more than other lines say.
        most = next((entry.ctas for entry in entries if division.vectors <= entry.vectors), 1)
        exact = tuple(entry for entry in exact if entry.ctas <= most)
    uneven = (_UNEVEN_BACKWARD[division.bytes],) if division.is_narrow and division.vectors > _UNEVEN_VECTORS else ()
    return _choose((*uneven, *exact, *entries, *_BACKWARD_ELSEWHERE), division, limits, 1, row.fits)


def configure_wide_backward(row: BackwardRow) -> NormConfig:
    """Choose how a backward kernel's rows are divided that do not fit on the chip: by vector, of one CTA."""
    vector = _Division(row.hidden, row.rows, row.output).vector
    return NormConfig(min(1024, _threads(math.ceil(row.hidden / vector), 1)), 1, vector, 1)
