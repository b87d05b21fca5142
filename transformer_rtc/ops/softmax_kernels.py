"""The kernels of softmax: which are taken for rows of which length, their programs, and how they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .. import _native
from ..dispatch import OF_HEADS, LaunchRule, Request
from ..spec import BOOL, DeviceLimits, DType, Field, KernelSpec, Params
from .programs import (
    GEOMETRY,
    MINIMAL,
    WORKSPACE,
    GeneralKernel,
    RowDivision,
    dtypes,
    entry,
    general_program,
    literal,
    of_arrays,
    pointers,
    present,
    row_fields,
    traits,
)

__all__ = [
    "BUCKETS",
    "SoftmaxBackwardSpec",
    "SoftmaxConfig",
    "SoftmaxFinishSpec",
    "SoftmaxForwardSpec",
    "configure",
    "general_launches",
    "general_params",
    "static_program",
]

# Rows of up to so many columns have the same kernel: a length is no part of a key.
BUCKETS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072, 262144, _native.MOST_COLUMNS)


@dataclass(frozen=True)
class SoftmaxConfig(RowDivision):
    """How a row is divided.

    Attributes
    ----------
    chunked : bool
        Whether a CTA's part of a row may be longer than what its threads hold: it is read twice then.
    """

    chunked: bool = False

    @property
    def symbol(self) -> str:
        return "_".join((super().symbol, *present(chunked=self.chunked)))


class _Entry(NamedTuple):
    """A line of a table: vectors of 16 bytes of the widest array that a row may have, and how it is divided."""

    vectors: int
    ctas: int
    threads: int
    steps: int
    rows: int = 1


# By what fits, as the norms' tables have it: not measured yet.
_TABLE = (
    _Entry(8, 1, 8, 1, 16),
    _Entry(16, 1, 16, 1, 8),
    _Entry(32, 1, 32, 1, 4),
    _Entry(64, 1, 32, 2, 4),
    _Entry(128, 1, 64, 2, 2),
    _Entry(256, 1, 128, 2),
    _Entry(512, 1, 256, 2),
    _Entry(1024, 1, 512, 2),
    _Entry(2048, 1, 512, 4),
    _Entry(4096, 1, 1024, 4),
    _Entry(8192, 2, 1024, 4),
    _Entry(16384, 4, 1024, 4),
    _Entry(32768, 8, 1024, 4),
    _Entry(65536, 16, 1024, 4),
)


def configure(columns: int, rows: Sequence[DType], limits: DeviceLimits) -> SoftmaxConfig:
    """Choose how rows of up to so many columns are divided.

    Parameters
    ----------
    columns : int
        One of `BUCKETS`.
    rows : sequence of DType
        Of the arrays of rows.
    limits : DeviceLimits
        Of the device.
    """
    vector = 16 // max(dtype.bytes for dtype in rows)
    clusters = limits.max_cluster_size > 1 and limits.max_ctas_per_row > 1
    most = min(limits.max_ctas_per_row, limits.max_cluster_size) if clusters else limits.max_ctas_per_row
    for line in _TABLE:
        if columns <= line.vectors * vector and line.ctas <= most:
            return SoftmaxConfig(line.threads, line.rows, vector, line.steps, line.ctas, clusters and line.ctas > 1)
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

    def _program(self, source: str, template: str, types: dict[str, DType], flags: dict[str, bool]) -> str:
        config = self.config
        ways = {"clusters": config.clusters, "chunked": config.chunked, "repeats": config.exchange == "grid"}
        return (
            f'#include "{source}"\n\n'
            f"{self.params.text('Params')}\n"
            f"{traits(types, flags | ways, config.numbers)}"
            f"{entry(self.symbol, f'{template}<trtc::SoftmaxConfig<Traits>>', config.threads)}"
        )

    def _rule(self, values: int) -> LaunchRule:
        config = self.config
        return LaunchRule(
            threads=config.threads,
            rows_per_cta=config.rows_per_cta,
            ctas_per_row=config.ctas_per_row,
            clusters=config.clusters,
            workspace_bytes=config.workspace_bytes(values),
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
        return Params(
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
        return self._program("softmax_forward.cu", "softmax_forward", types, flags)

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
    sink : DType or None
        Of the heads' sinks, where their gradient is asked for.
    config : SoftmaxConfig
        How a row is divided.
    """

    gradient: DType
    input: DType
    output: DType
    logarithm: bool
    causal: bool
    sink: DType | None
    config: SoftmaxConfig

    @property
    def symbol(self) -> str:
        parts = ["log_softmax_backward" if self.logarithm else "softmax_backward", self.input.symbol]
        if self.gradient is not self.input:
            parts.append(f"dy_{self.gradient.symbol}")
        if self.output is not self.input:
            parts.append(f"dx_{self.output.symbol}")
        parts += present(causal=self.causal)
        parts += [f"sink_{self.sink.symbol}"] if self.sink else []
        return "_".join((*parts, self.config.symbol))

    @property
    def params(self) -> Params:
        return Params(
            (
                *pointers("y", "dy", "dx", *(("sink", "lse") if self.sink else ())),
                *(_ROW_PARTIALS if self.sink else ()),
                *(WORKSPACE if self.config.exchange == "grid" else ()),
                *row_fields("y", "dy", "dx"),
                *GEOMETRY,
                *_COLUMNS,
                *_SCALE,
                *(_QUERIES if self.causal or self.sink else ()),
                *(_CAUSAL if self.causal else ()),
                *(_MATRICES if self.sink else ()),
            )
        )

    @property
    def program(self) -> str:
        types = {
            "Gradient": self.gradient,
            "Input": self.input,
            "Output": self.output,
            "Sink": self.sink or self.input,
        }
        flags = {"logarithm": self.logarithm, "causal": self.causal, "has_dsink": self.sink is not None}
        return self._program("softmax_backward.cu", "softmax_backward", types, flags)

    @property
    def launch_rule(self) -> LaunchRule:
        return self._rule(1)._replace(row_bytes=_ROW_BYTES if self.sink else 0)


# A row's part of its sink's gradient.
_ROW_PARTIALS = (Field("row_partials", "pointer", "row_partials"),)
_ROW_BYTES = 4
_FINISH_FIELDS = (*_ROW_PARTIALS, Field("rows", "int64", "rows"), _QUERIES[0], _MATRICES[0])
# trtc::finish_threads.
_FINISH_RULE = LaunchRule(threads=256, columns_per_cta=OF_HEADS)


@dataclass(frozen=True)
class SoftmaxFinishSpec(KernelSpec):
    """The backward's second launch: a head's rows are added up.

    Attributes
    ----------
    dsink : DType
        Of the sinks' gradient.
    """

    dsink: DType

    @property
    def symbol(self) -> str:
        return f"softmax_backward_finish_{self.dsink.symbol}"

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def params(self) -> Params:
        return Params((*pointers("dsink"), *_FINISH_FIELDS))

    @property
    def program(self) -> str:
        template = f"softmax_backward_finish<{self.dsink.text}>"
        return (
            '#include "softmax_backward.cu"\n\n'
            f"{self.params.text('Params')}"
            f"{entry(self.symbol, template, _FINISH_RULE.threads)}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        return _FINISH_RULE


# ---- The general kernels ---------------------------------------------------------------------------------------------

# Rows of at most this many columns are held by a warp.
_NARROW = 1024
# Threads of a row, and rows of a CTA.
_SHAPES = {"narrow": (32, 8), "wide": (512, 1)}
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
        *pointers("y", "dy", "dx", "sink", "lse"),
        *_ROW_PARTIALS,
        *row_fields("y", "dy", "dx"),
        *dtypes("y", "dy", "dx", "sink"),
        *GEOMETRY,
        *_COLUMNS,
        *_SCALE,
        *_QUERIES,
        *_CAUSAL,
        *_MATRICES,
        _IS_CAUSAL,
    )
)
_FINISH = Params((*pointers("dsink"), *_FINISH_FIELDS, *dtypes("dsink")))


def _kernels() -> dict[str, GeneralKernel]:
    found = {}
    for shape, (threads, rows) in _SHAPES.items():
        for name, logarithm in (("softmax", False), ("log_softmax", True)):
            for direction, params in (("forward", _FORWARD), ("backward", _BACKWARD)):
                template = f"softmax_{direction}_rows<{literal(logarithm)}, {threads}, {rows}>"
                found[f"{name}_{direction}_{shape}"] = GeneralKernel(params, threads * rows, template)
    found["softmax_backward_finish"] = GeneralKernel(_FINISH, _FINISH_RULE.threads, "softmax_backward_finish_heads")
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
    shape = "narrow" if request.columns <= _NARROW else "wide"
    threads, rows = _SHAPES[shape]
    name = request.operator.removesuffix("_backward")
    direction = "backward" if request.operator.endswith("_backward") else "forward"
    first = f"{name}_{direction}_{shape}"
    if not request.dtypes.get("dsink"):
        return ((first, LaunchRule(threads * rows, rows)),)
    rule = LaunchRule(threads * rows, rows, row_bytes=_ROW_BYTES)
    return (first, rule), ("softmax_backward_finish", _FINISH_RULE)
