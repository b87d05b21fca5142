# SPDX-License-Identifier: Apache-2.0
"""The tuned kernels of the norms' backward: that over the rows, and the one that finishes the weight's gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...request import LaunchRule
from ...spec import BFLOAT16, FLOAT32, DeviceLimits, DType, Field, KernelSpec, Params
from ..programs import (
    GEOMETRY,
    HEADS,
    MINIMAL,
    WORKSPACE,
    definitions,
    entry,
    entry_rule,
    memoised_params,
    pointers,
    present,
    row_fields,
)
from .config import NormConfig, Slot
from .kernels import REALS, RowSpec

__all__ = [
    "FINISH_BOUNDS",
    "FINISH_FIELDS",
    "FINISH_THREADS",
    "BackwardSpec",
    "FinishSpec",
    "finish_columns",
    "finish_rule",
    "partial_bytes",
]


@dataclass(frozen=True)
class BackwardSpec(RowSpec):
    """A specialised backward kernel: dx, and partial sums of the weight's gradients.

    Rows come through a ring in shared memory (norm/backward.cu). Those that do not fit on the chip have a configuration
    without one: they are read again (norm/backward_wide.cu).

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
    unaligned : bool
        As `ForwardSpec` has it.
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
    unaligned: bool = False

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
        parts += present(dweight=self.dweight, dbias=self.dbias, statistics=self.statistics, heads=self.per_head)
        parts.append(f"h{self.hidden}_{self.config.symbol}")
        parts += present(unaligned=self.unaligned)
        return "_".join(parts)

    @property
    def _registers(self) -> int:
        config = self.config
        elements = config.vectors_per_thread * config.vec_size
        if self.unaligned or not (self.output and self.dweight):
            return 0
        if self.norm == "layer_norm":
            # Of the 128 that the compiler takes with no bound, a thread has fewer loads on their way.
            wide = self.input.bytes == 2 and elements == 32 and config.threads <= 128
            return 168 if wide and config.rows_per_cta == 1 else 0
        # The compiler takes 84 to 114 for some short rows, of which a multiprocessor has a CTA less, and is slower by
        # a twelfth. There is no room for a residual, and a weight of float16 spills.
        short = config.rows_per_cta > 1 and elements == 16 and not self.residual
        return 80 if short and self.statistics and self.weight is BFLOAT16 else 0

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
        rows = (*self._rows, *present(dx=self.output))
        others = present(
            weight=self.weight,
            mean=self.statistics and self.norm == "layer_norm",
            rstd=self.statistics,
        )
        partials = (Field("partials", "pointer", "partials"),) if self.dweight or self.dbias else ()
        return memoised_params(
            (
                *pointers(*rows, *others),
                *partials,
                *(WORKSPACE if self.config.exchange == "grid" else ()),
                *row_fields(*rows),
                *GEOMETRY,
                *(HEADS if self.per_head else ()),
                *REALS,
            )
        )

    @property
    def _slot(self) -> Slot:
        output = self.output if self.unaligned else None
        return Slot(self.config, tuple(self._rows.values()), output, sums=True)

    @property
    def _types(self) -> dict[str, DType]:
        return {
            "Gradient": self.gradient,
            "Input": self.input,
            "Residual": self.residual or self.input,
            "Weight": self.weight or self.input,
            "Output": self.output or self.input,
        }

    @property
    def _flags(self) -> dict[str, bool]:
        """What the kernel does and has, however a row is divided."""
        return {
            "CENTRED": self.norm == "layer_norm",
            "HAS_WEIGHT": self.weight is not None and self.output is not None,
            "PER_HEAD": self.per_head,
            "NEEDS_X": self.needs_x,
            "HAS_DX": self.output is not None,
            "HAS_DWEIGHT": self.dweight,
            "HAS_DBIAS": self.dbias,
            "HAS_DRESIDUAL": "dresidual" in self._rows,
            "HAS_STATISTICS": self.statistics,
        }

    @property
    def _is_wide(self) -> bool:
        return self.config.stages == 0

    @property
    def program(self) -> str:
        if self._is_wide:
            return self._plain_program("backward_wide", self._types, self._flags, {}, 0)
        weight_bytes = self.config.vectors_per_thread * self.config.vec_size * (self.weight.bytes if self.weight else 0)
        slot = self._slot
        flags = self._flags | {
            "WEIGHT_IN_REGISTERS": weight_bytes <= _HELD_WEIGHT_BYTES,
            "SEVERAL_ROWS": self.config.rows_per_cta > 1,
            "STATISTICS_AHEAD": self.config.statistics_ahead,
        }
        at = dict(zip(self._rows, slot.at, strict=True))
        numbers = {
            "SLOT_BYTES": slot.slot_bytes,
            "DY_AT": at["dy"],
            "DRESIDUAL_AT": at.get("dresidual", 0),
        }
        if self.unaligned:
            flags["OUT_IN_SLOT"] = slot.out_in_slot
            numbers["OUT_AT"] = 0 if slot.out_in_slot else slot.out_at
        return self._plain_program("backward", self._types, flags, numbers, slot.bytes)

    @property
    def rows_per_group(self) -> int:
        """The most rows of partial sums that a group of CTAs leaves (norm/partials.cuh)."""
        return self.config.rows_per_cta if self.per_head else 1

    @property
    def launch_rule(self) -> LaunchRule:
        partials = partial_bytes(self.hidden, self.dweight + self.dbias, self.rows_per_group)
        whole = "heads" if self.per_head else ""
        if self._is_wide:
            # A CTA's rows of one head are whole turns of the grid apart. Of others it has two, if there are so many, so
            # that partial sums take no more memory than the rows in float32 would.
            rule = self._rule(0, 0, partials, True)
            return rule._replace(whole=whole, rows_per_cta=1 if self.per_head else 2)
        finds = self.needs_x and not self.statistics
        values = (5 if finds else 2) if self.norm == "layer_norm" else 2 if finds else 1
        turn_bytes = _TURN_BYTES if self.hidden <= _MOST_COLUMNS_OF_TURNS else 0
        rule = self._rule(values, self._slot.bytes, partials, True)
        return rule._replace(whole=whole, turn_bytes=turn_bytes)


# LaunchRule.turn_bytes, and the longest rows for which it was measured: with few rows, as many groups as are resident
# leave so many partial sums that to add them up takes longer than the rows do.
_TURN_BYTES = 1_800_000
_MOST_COLUMNS_OF_TURNS = 65536
# More of the weight than this, in bytes of a thread, is read again for each row, from the L1 or L2 cache.
_HELD_WEIGHT_BYTES = 64


def partial_bytes(hidden: int, gradients: int, rows_per_group: int) -> int:
    """Return the bytes of a group's partial sums, as norm/partials.cuh lays them out."""
    return 4 * gradients * rows_per_group * (-(-hidden // 8) * 8)


def finish_columns(hidden: int) -> int:
    """Return how many columns a CTA of the second launch has.

    Few where else few CTAs would have many rows each; many where rows of partial sums are few and long. The numbers
    were the fastest on an H100 and an H200.
    """
    return 8 if hidden <= 512 else 16 if hidden <= 2048 else 32 if hidden <= 12288 else 128


FINISH_FIELDS = (
    Field("partials", "pointer", "partials"),
    Field("hidden", "int32", "columns"),
    Field("groups", "int32", "groups"),
    Field("heads", "uint32", "heads"),
)
# norm/backward_finish.cu has 8 warps. Its launch bounds leave room for 80 registers: else the compiler takes 32 or 44,
# and a thread waits for each load before the next one.
FINISH_THREADS = 256
FINISH_BOUNDS = f"{FINISH_THREADS}, 3"
# Programmatic dependent launch.
_EARLY_ARCHITECTURE = 90


@dataclass(frozen=True)
class FinishSpec(KernelSpec):
    """The backward's second launch, for any hidden size.

    Attributes
    ----------
    dweight, dbias : DType or None
        None: it is not asked for.
    rows_per_group : int
        The most rows of partial sums that a group of CTAs has left (norm/partials.cuh).
    columns : int
        Of a CTA.
    """

    dweight: DType | None
    dbias: DType | None
    rows_per_group: int
    columns: int

    @property
    def symbol(self) -> str:
        parts = ["norm_backward_finish"]
        parts += [f"dweight_{self.dweight.symbol}"] if self.dweight else []
        parts += [f"dbias_{self.dbias.symbol}"] if self.dbias else []
        parts.append(f"r{self.rows_per_group}_c{self.columns}")
        return "_".join(parts)

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def params(self) -> Params:
        return memoised_params((*pointers(*present(dweight=self.dweight, dbias=self.dbias)), *FINISH_FIELDS))

    @property
    def program(self) -> str:
        types = {"Dweight": self.dweight or FLOAT32, "Dbias": self.dbias or FLOAT32}
        flags = {"HAS_DWEIGHT": self.dweight is not None, "HAS_DBIAS": self.dbias is not None}
        numbers = {"ROWS_PER_GROUP": self.rows_per_group, "COLUMNS": self.columns}
        return (
            f"{definitions(types, flags, numbers)}\n"
            f"{self.params.text('Params')}\n"
            '#include "norm/backward_finish.cu"\n'
            f"{entry(self.symbol, 'norm_backward_finish', FINISH_BOUNDS)}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        return entry_rule(threads=FINISH_THREADS, columns_per_cta=self.columns, per="heads")


def finish_rule(spec: FinishSpec, hidden: int, per_head: bool, limits: DeviceLimits) -> LaunchRule:
    """Return how the second launch of rows of `hidden` columns is launched.

    The first one lets it begin early, but where there are weights of each head: both take about 5 % less then. Early,
    but wherever there is a place, they would take up to a fifth more.
    """
    rule = spec.launch_rule
    if per_head or limits.architecture < _EARLY_ARCHITECTURE:
        return rule
    half = limits.shared_memory_of_multiprocessor // 2
    return rule._replace(dynamic_shared_memory=half, spread_ctas=math.ceil(hidden / spec.columns))
