"""Normalization of rows: `rms_norm`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dispatch import Argument, LaunchRule, Operator, StaticKernel
from ..spec import BFLOAT16, FLOAT16, FLOAT32, DeviceLimits, DType, Field, KernelSpec, Params

__all__ = ["rms_norm"]

_FLOATS = (FLOAT32, FLOAT16, BFLOAT16)


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
        Vectors of a row that one thread holds. A row of more is read twice.
    ctas_per_row : int
        CTAs that share a row: a power of two.
    clusters : bool
        Whether they are a cluster, or meet in global memory in a cooperative launch.
    in_shared : bool
        Whether a row is held in shared memory rather than in registers.
    """

    threads_per_row: int
    rows_per_cta: int
    vector: int
    steps: int
    ctas_per_row: int = 1
    clusters: bool = False
    in_shared: bool = False


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


# By the vectors of 16 bytes in a row: (at most, steps, rows of a CTA, in shared memory). The fastest of 5 to 30
# configurations of each size on an H200, L2 flushed; behind each, its ratio to the best copy of the run, bfloat16 and
# float32. More threads and a row in shared memory leave registers for more rows in flight.
_ONE_CTA = (
    (64, 2, 4, False),  # hidden 512: 0.955, hidden 256: 0.986
    (128, 2, 2, False),  # hidden 1024: 0.983, hidden 512: 0.994
    (256, 2, 1, False),  # hidden 2048: 0.999, hidden 1024: 0.979
    (512, 2, 1, False),  # hidden 4096: 0.984, hidden 2048: 0.956
    (1024, 2, 1, True),  # hidden 8192: 0.996, hidden 4096: 0.968
    (2048, 4, 1, True),  # hidden 16384: 0.966, hidden 8192: 0.973
    (4096, 4, 1, True),  # hidden 32768: 0.972, hidden 16384: 0.970
)

# Rows that several CTAs share: (CTAs, threads of each, steps), the first one that holds the row. Two CTAs were slower
# than one or four at every size, and a cluster of 16 leaves an eighth of the multiprocessors without one.
_SHARED_ROW = (
    (4, 512, 4),  # hidden 65536: 0.974, hidden 32768: 0.962
    (4, 512, 8),  # hidden 131072: 0.949, hidden 65536: 0.970
    (4, 1024, 8),  # hidden 262144: 0.876
    (8, 512, 8),
    (16, 512, 8),  # hidden 262144 in float32: 0.835
    (16, 1024, 8),
)


def configure(hidden: int, input_bytes: int, output_bytes: int, limits: DeviceLimits) -> NormConfig:
    """Choose how rows are divided.

    Parameters
    ----------
    hidden : int
        Columns.
    input_bytes, output_bytes : int
        Of an element.
    limits : DeviceLimits
        Of the device.
    """
    vector = min(16 // max(input_bytes, output_bytes), _power_of_two(hidden))
    vectors = math.ceil(hidden / vector)
    if vectors <= 32:
        threads = _power_of_two(vectors)
        return NormConfig(threads, 256 // threads, vector, 1)
    for most, steps, rows, in_shared in _ONE_CTA:
        if vectors <= most:
            return NormConfig(_threads(vectors, steps), rows, vector, steps, in_shared=in_shared)
    clusters = limits.max_cluster_size > 1 and limits.max_ctas_per_row > 1
    most_ctas = min(limits.max_ctas_per_row, limits.max_cluster_size) if clusters else limits.max_ctas_per_row
    for ctas, threads, steps in _SHARED_ROW:
        share = math.ceil(vectors / ctas)
        # Two rows where input and output elements differ in size, beside 1 KiB of static and the system's own.
        fits = threads * steps * vector * (input_bytes + output_bytes * (input_bytes != output_bytes)) + 2048
        if ctas <= most_ctas and share <= threads * steps and fits <= limits.shared_memory_per_cta:
            return NormConfig(_threads(share, steps), 1, vector, steps, ctas, clusters, in_shared=True)
    # Too long to be held: chunks of four vectors a thread, read twice.
    share = math.ceil(vectors / most_ctas)
    chunks = math.ceil(share / (1024 * 4))
    return NormConfig(_threads(math.ceil(share / chunks), 4), 1, vector, 4, most_ctas, clusters)


def _threads(vectors: int, steps: int) -> int:
    """Return the fewest whole warps that hold so many vectors."""
    return 32 * math.ceil(vectors / (32 * steps))


@dataclass(frozen=True)
class NormSpec(KernelSpec):
    """A specialised norm kernel.

    Attributes
    ----------
    operator : str
        ``"rms_norm_forward"``: the kernel's template.
    input, output : DType
        Of x and of y.
    weight : DType or None
        Of the weight; None: there is none.
    rstd : bool
        Whether the reciprocal standard deviations are stored.
    hidden : int
        Columns.
    config : NormConfig
        How a row is divided.
    """

    operator: str
    input: DType
    weight: DType | None
    output: DType
    rstd: bool
    hidden: int
    config: NormConfig

    @property
    def exchange(self) -> str:
        return "none" if self.config.ctas_per_row == 1 else "cluster" if self.config.clusters else "grid"

    @property
    def chunks(self) -> int:
        config = self.config
        return math.ceil(self.hidden / (config.ctas_per_row * config.threads_per_row * config.vector * config.steps))

    @property
    def symbol(self) -> str:
        config = self.config
        parts = [self.operator, self.input.symbol]
        if self.weight is not self.input:
            parts.append(f"weight_{self.weight.symbol}" if self.weight else "no_weight")
        if self.output is not self.input:
            parts.append(f"out_{self.output.symbol}")
        if self.rstd:
            parts.append("rstd")
        parts.append(
            f"h{self.hidden}_t{config.threads_per_row}_r{config.rows_per_cta}_v{config.vector}_s{config.steps}"
        )
        if config.ctas_per_row > 1:
            parts.append(f"{self.exchange}{config.ctas_per_row}")
        if config.in_shared:
            parts.append("shared")
        return "_".join(parts)

    @property
    def options(self) -> tuple[str, ...]:
        return ("--minimal",)  # without what a program does not use: texture functions and the like; 3 ms of 20

    @property
    def params(self) -> Params:
        return Params(
            (
                *_fields(weight=self.weight is not None, rstd=self.rstd),
                *((Field("workspace", "pointer", "workspace"),) if self.exchange == "grid" else ()),
            )
        )

    @property
    def program(self) -> str:
        config = self.config
        parameters = (
            self.input.text,
            (self.weight or self.input).text,
            self.output.text,
            str(self.weight is not None).lower(),
            str(self.rstd).lower(),
            self.hidden,
            config.threads_per_row,
            config.rows_per_cta,
            config.vector,
            config.steps,
            self.chunks,
            config.ctas_per_row,
            f"trtc::Exchange::{self.exchange}",
            str(config.in_shared).lower(),
        )
        bounds = str(config.threads_per_row * config.rows_per_cta)
        if self.exchange == "grid":
            bounds += (
                ", 1"  # else the compiler spills to fit one more CTA, and the grid is held back by its barrier anyway
            )
        return (
            '#include "norms.cu"\n\n'
            f"{self.params.text('Params')}\n"
            f"using Config = trtc::NormConfig<{', '.join(map(str, parameters))}>;\n\n"
            f"TRTC_ENTRY TRTC_LAUNCH_BOUNDS({bounds}) void {self.symbol}("
            "TRTC_PARAMETER Params params) {\n"
            f"  trtc::{self.operator}<Config>(params);\n"
            "}\n"
        )

    @property
    def _staged_bytes(self) -> int:
        """Bytes of dynamic shared memory for each element that a CTA holds."""
        if not self.config.in_shared:
            return self.output.bytes  # for an output that no vector fits
        return self.input.bytes + (self.output.bytes if self.input.bytes != self.output.bytes else 0)

    @property
    def launch_rule(self) -> LaunchRule:
        config = self.config
        threads = config.threads_per_row * config.rows_per_cta
        return LaunchRule(
            threads=threads,
            rows_per_cta=config.rows_per_cta,
            ctas_per_row=config.ctas_per_row,
            clusters=config.clusters,
            dynamic_shared_memory=threads * config.steps * config.vector * self._staged_bytes,
            # trtc::GridWorkspace: a counter, and two buffers of a partial sum of each CTA.
            workspace_bytes=4 + 8 * config.ctas_per_row if self.exchange == "grid" else 0,
        )


def _fields(weight: bool, rstd: bool) -> tuple[Field, ...]:
    return (
        Field("x", "pointer", "x.data"),
        *((Field("weight", "pointer", "weight.data"),) if weight else ()),
        Field("out", "pointer", "out.data"),
        *((Field("rstd", "pointer", "rstd.data"),) if rstd else ()),
        Field("x_outer_stride", "int64", "x.outer_stride"),
        Field("x_inner_stride", "int64", "x.inner_stride"),
        Field("out_outer_stride", "int64", "out.outer_stride"),
        Field("out_inner_stride", "int64", "out.inner_stride"),
        Field("rows", "int64", "rows"),
        Field("inner_count", "uint32", "inner_count"),
        Field("inner_magic", "uint32", "inner_magic"),
        Field("inner_shift", "uint32", "inner_shift"),
        Field("eps", "float32", "eps"),
        Field("weight_offset", "float32", "weight_offset"),
    )


def norm_spec(
    x: DType, weight: DType | None, out: DType, hidden: int, limits: DeviceLimits, rstd: bool = False
) -> NormSpec:
    """Return the kernel of `rms_norm` for arrays of these types."""
    config = configure(hidden, x.bytes, out.bytes, limits)
    return NormSpec("rms_norm_forward", x, weight, out, rstd, hidden, config)


class _NormFamily:
    name = "norms"

    # Rows of at most this many columns are held by a warp in the general kernel.
    _GENERAL_NARROW = 1024
    # Threads of a row, and rows of a CTA.
    _GENERAL_SHAPES: ClassVar[dict[str, tuple[int, int]]] = {"narrow": (32, 8), "wide": (512, 1)}

    def specialise(
        self, dtypes: dict[str, DType | None], columns: int, limits: DeviceLimits
    ) -> tuple[KernelSpec, LaunchRule]:
        x, out = dtypes["x"], dtypes["out"]
        assert x is not None and out is not None
        spec = norm_spec(x, dtypes["weight"], out, columns, limits, dtypes["rstd"] is not None)
        return spec, spec.launch_rule

    _general_params = Params(
        (
            *_fields(weight=True, rstd=True),
            Field("hidden", "int32", "columns"),
            Field("weight_dtype", "int32", "weight.dtype"),
            Field("out_dtype", "int32", "out.dtype"),
        )
    )

    @staticmethod
    def _general_symbol(dtype: DType, shape: str) -> str:
        return f"rms_norm_forward_{dtype.symbol}_{shape}"

    def static(self, dtypes: dict[str, DType | None], columns: int) -> tuple[StaticKernel, LaunchRule]:
        x = dtypes["x"]
        assert x is not None
        shape = "narrow" if columns <= self._GENERAL_NARROW else "wide"
        threads, rows = self._GENERAL_SHAPES[shape]
        entry = StaticKernel(self._general_symbol(x, shape), self._general_params)
        return entry, LaunchRule(threads=threads * rows, rows_per_cta=rows)

    def static_program(self) -> str:
        entries = "".join(
            f"\nTRTC_ENTRY TRTC_LAUNCH_BOUNDS({threads * rows}) void {self._general_symbol(dtype, shape)}("
            "TRTC_PARAMETER Params params) {\n"
            f"  trtc::rms_norm_forward_rows<{dtype.text}, {threads}, {rows}>(params);\n"
            "}\n"
            for dtype in _FLOATS
            for shape, (threads, rows) in self._GENERAL_SHAPES.items()
        )
        return f'#include "norms.cu"\n\n{self._general_params.text("Params")}{entries}'


_RMS_NORM = Operator(
    "rms_norm",
    _NormFamily(),
    (
        Argument("x", "rows", _FLOATS),
        Argument("weight", "columns", _FLOATS, optional=True),
        Argument("eps", "real"),
        Argument("weight_offset", "real"),
        Argument("out", "rows_out", _FLOATS),
        Argument("out_dtype", "dtype_out", _FLOATS),
        Argument("rstd", "row_values", (FLOAT32,)),
        Argument("stream", "stream"),
    ),
)
_call = _RMS_NORM.call


def rms_norm(
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    return_rstd: bool = False,
    stream: Any = None,
) -> Any:
    """Normalize each row by its root mean square.

    ``y = x * rstd * (weight + weight_offset)`` with ``rstd = 1 / sqrt(mean(x ** 2) + eps)`` over the last dimension
    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). Arithmetic is in float32, and y is rounded once.
    A row's bits do not depend on how many rows there are, nor on where they lie.

    Parameters
    ----------
    x : array [..., hidden], float32, float16 or bfloat16
        On a GPU; an array on the host is staged through the current GPU, and so is y. The last dimension is contiguous
        and has 1 to 2**30 elements; the others collapse to at most two strides, as rows and heads of a packed qkv do.
    weight : array [hidden], float32, float16 or bfloat16, optional
        None: y = x * rstd.
    eps : float
        Added to the mean of squares.
    weight_offset : float
        Added to the weight in float32; 1.0 for a weight that is stored around zero, as Gemma's is.
    out : array like x, optional
        Where y is written: x itself, or an array that shares no element with x and weight.
    out_dtype : data type, optional
        Of y where `out` is not given: float32, float16 or bfloat16, of any framework or by name; x's by default.
    return_rstd : bool
        Whether to return rstd as well.
    stream : optional
        An int handle, or an object with ``__cuda_stream__``, ``.cuda_stream`` or ``.ptr``; by default the framework's
        current stream.

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
    return _call(x, weight, eps, weight_offset, out, out_dtype, return_rstd, stream)
