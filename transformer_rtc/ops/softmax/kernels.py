# SPDX-License-Identifier: Apache-2.0
"""The tuned kernels of softmax: what each is specialised for, its program, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...request import LaunchRule
from ...spec import BOOL, FLOAT32, DType, Field, KernelSpec, Params
from ..programs import (
    GEOMETRY,
    MINIMAL,
    WORKSPACE,
    definitions,
    entry,
    entry_rule,
    memoised_params,
    pointers,
    present,
    row_fields,
    traits,
)
from .config import SoftmaxConfig

__all__ = [
    "CAUSAL",
    "COLUMNS",
    "MASK",
    "MASK_GRADIENT_ARRAYS",
    "MASK_GRADIENT_FIELDS",
    "MASK_GRADIENT_RULE",
    "MATRICES",
    "QUERIES",
    "ROW_BYTES",
    "ROW_SUMS",
    "SCALE",
    "SINK_GRADIENT_FIELDS",
    "SINK_GRADIENT_RULE",
    "MaskGradientSpec",
    "SinkGradientSpec",
    "SoftmaxBackwardSpec",
    "SoftmaxForwardSpec",
]

SCALE = (Field("scale", "float32", "scale"),)
COLUMNS = (Field("columns", "int32", "columns"),)
QUERIES = tuple(Field(name, "uint32", name) for name in ("queries", "queries_magic", "queries_shift"))
CAUSAL = (Field("diagonal", "int32", "keys - queries"), Field("window", "int32", "window"))
MATRICES = tuple(Field(f"matrix_{name}", "uint32", name) for name in ("heads", "heads_magic", "heads_shift"))
MASK = (
    Field("mask_batch_stride", "int64", "mask.leading_stride"),
    Field("mask_head_stride", "int64", "mask.heads_stride"),
    Field("mask_query_stride", "int64", "mask.queries_stride"),
)


class _SoftmaxSpec(KernelSpec):
    """A specialised kernel of rows of any length in a bucket."""

    config: SoftmaxConfig
    unaligned: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    def _program(
        self,
        function: str,
        types: dict[str, DType],
        flags: dict[str, bool],
        resident: int = 1024,
        bounds_short: bool = False,
    ) -> str:
        config = self.config
        direction = function.removeprefix("softmax_")
        file = "staged" if config.staged else f"{direction}_tiled" if config.tiled else direction
        ways = {
            "BACKWARD": function == "softmax_backward",
            "COUNTS_ONES": types["Output"] is FLOAT32,
            "CHUNKED": config.chunked,
            "PREFETCHED": config.persistent and not self.unaligned,
            "UNALIGNED": self.unaligned,
            "CLUSTER": config.exchange == "cluster",
            "GRID": config.exchange == "grid",
            "PERSISTENT": config.grid_is_resident or config.exchange == "grid",
        }
        numbers = {
            "THREADS_PER_ROW": config.threads_per_row,
            "ROWS_PER_CTA": config.rows_per_cta,
            "VEC_SIZE": config.vec_size,
            "VECTORS_PER_THREAD": config.vectors_per_thread,
            "CTAS_PER_ROW": config.ctas_per_row,
            "EXCHANGED": 2 if function == "softmax_forward" else 1,
        }
        macros = {name.upper(): value for name, value in flags.items()} | ways
        return (
            f"{definitions(types, macros, numbers)}\n"
            f"{self.params.text('Params')}\n"
            f'#include "softmax/{file}.cu"\n'
            f"{entry(self.symbol, function, config.bounds(resident, bounds_short))}"
        )

    def _rule(self, values: int) -> LaunchRule:
        config = self.config
        return entry_rule(
            threads=config.threads,
            rows_per_cta=config.rows_per_cta,
            ctas_per_row=config.ctas_per_row,
            clusters=config.clusters,
            workspace_bytes=config.workspace_bytes(values),
            persistent=config.grid_is_resident,
            vec_size=1 if self.unaligned else config.vec_size,
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
    unaligned : bool
        Whether rows may have any length and begin anywhere. Else they are whole vectors at aligned addresses.
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
    unaligned: bool = False

    @property
    def symbol(self) -> str:
        parts = ["log_softmax_forward" if self.logarithm else "softmax_forward", self.input.symbol]
        if self.output is not self.input:
            parts.append(f"out_{self.output.symbol}")
        parts += present(causal=self.causal, lse=self.lse, keeps=self.keeps)
        for name, dtype in (("mask", self.mask), ("sink", self.sink)):
            parts += [f"{name}_{dtype.symbol}"] if dtype else []
        return "_".join((*parts, self.config.symbol, *present(unaligned=self.unaligned)))

    @property
    def params(self) -> Params:
        return memoised_params(
            (
                *pointers("x", "out", *present(mask=self.mask, sink=self.sink, lse=self.lse)),
                *(WORKSPACE if self.config.exchange == "grid" else ()),
                *row_fields("x", "out"),
                *GEOMETRY,
                *COLUMNS,
                *SCALE,
                *(QUERIES if self.causal or self.mask or self.sink else ()),
                *(CAUSAL if self.causal else ()),
                *(MATRICES if self.mask or self.sink else ()),
                *(MASK if self.mask else ()),
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
        # 16 values need 48 registers a thread, instead of 64.
        holds_few = self.config.vectors_per_thread * self.config.vec_size <= 16 and not (self.logarithm or self.mask)
        return self._program("softmax_forward", types, flags, 1280 if holds_few else 1024)

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
    unaligned : bool
        As `SoftmaxForwardSpec` has it.
    """

    gradient: DType
    input: DType
    output: DType
    logarithm: bool
    causal: bool
    sums: bool
    config: SoftmaxConfig
    unaligned: bool = False

    @property
    def symbol(self) -> str:
        parts = ["log_softmax_backward" if self.logarithm else "softmax_backward", self.input.symbol]
        if self.gradient is not self.input:
            parts.append(f"dy_{self.gradient.symbol}")
        if self.output is not self.input:
            parts.append(f"dx_{self.output.symbol}")
        parts += present(causal=self.causal, sums=self.sums)
        return "_".join((*parts, self.config.symbol, *present(unaligned=self.unaligned)))

    @property
    def params(self) -> Params:
        return memoised_params(
            (
                *pointers("y", "dy", "dx"),
                *(ROW_SUMS if self.sums else ()),
                *(WORKSPACE if self.config.exchange == "grid" else ()),
                *row_fields("y", "dy", "dx"),
                *GEOMETRY,
                *COLUMNS,
                *SCALE,
                *(QUERIES if self.causal else ()),
                *(CAUSAL if self.causal else ()),
            )
        )

    @property
    def program(self) -> str:
        types = {"Gradient": self.gradient, "Input": self.input, "Output": self.output}
        flags = {"logarithm": self.logarithm, "causal": self.causal, "leaves_sums": self.sums}
        if not self.unaligned or self.config.tiled:
            return self._program("softmax_backward", types, flags)
        # The compiler takes a few registers more than there are for as many CTAs as could be resident.
        return self._program(
            "softmax_backward", types, flags, 1024 if self.config.vectors_per_thread <= 4 else 640, True
        )

    @property
    def launch_rule(self) -> LaunchRule:
        return self._rule(1)._replace(row_bytes=ROW_BYTES if self.sums else 0)


# What dx of a row needs the whole row for: sum(dy * y), or sum(dy).
ROW_SUMS = (Field("row_sums", "pointer", "row_partials"),)
ROW_BYTES = 4
SINK_GRADIENT_FIELDS = (
    *pointers("sink", "lse", "dsink"), *ROW_SUMS, Field("rows", "int64", "rows"), QUERIES[0], MATRICES[0],
)  # fmt: skip
# trtc::finish_threads.
SINK_GRADIENT_RULE = entry_rule(threads=256, per="heads")


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
        return memoised_params(SINK_GRADIENT_FIELDS)

    @property
    def program(self) -> str:
        template = f"softmax_backward_sink_gradient<{self.sink.text}, {self.dsink.text}>"
        return (
            '#include "softmax/gradients.cu"\n\n'
            f"{self.params.text('Params')}"
            f"{entry(self.symbol, template, SINK_GRADIENT_RULE.threads)}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        return SINK_GRADIENT_RULE


MASK_GRADIENT_ARRAYS = (*pointers("y", "dy", "dmask"), *ROW_SUMS, *row_fields("y", "dy"))
MASK_GRADIENT_FIELDS = (
    Field("dmask_head_stride", "int64", "dmask.heads_stride"),
    Field("dmask_query_stride", "int64", "dmask.queries_stride"),
    Field("mask_rows", "int64", "dmask.rows"),
    Field("sharers", "int32", "sharers"),
    *COLUMNS,
    *GEOMETRY,
    *QUERIES,
    *MATRICES,
)
# trtc::mask_threads, mask_columns and mask_groups.
MASK_GRADIENT_RULE = entry_rule(threads=256, columns_per_cta=32, rows_of="dmask", row_groups=32)


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

    # A mask of one row has few columns for many rows: without clusters, few threads add them up.
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
        return memoised_params((*MASK_GRADIENT_ARRAYS, *MASK_GRADIENT_FIELDS, *(CAUSAL if self.causal else ())))

    @property
    def program(self) -> str:
        types = {"Gradient": self.gradient, "Input": self.input, "Output": self.output}
        flags = {"logarithm": self.logarithm, "causal": self.causal}
        # A fourth resident CTA is worth a quarter of the time; where there is more to do, it spills.
        resident = 3 if self.logarithm or self.causal else 4
        return (
            '#include "softmax/gradients.cu"\n\n'
            f"{self.params.text('Params')}\n"
            f"{traits(types, flags, {'ctas': self.launch_rule.ctas_per_row})}"
            f"{entry(self.symbol, 'softmax_backward_mask_gradient<Traits>', f'{self.launch_rule.threads}, {resident}')}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        if not self.clusters:
            return MASK_GRADIENT_RULE
        groups = self.CTAS * MASK_GRADIENT_RULE.row_groups
        return MASK_GRADIENT_RULE._replace(ctas_per_row=self.CTAS, clusters=True, row_groups=groups)
