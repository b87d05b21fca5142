# SPDX-License-Identifier: Apache-2.0
"""The tuned kernels of norms: what all of them share, and the forward: its program, and how it is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...request import LaunchRule
from ...spec import DType, Field, KernelSpec, Params
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
from .config import SHARED_OF_MULTIPROCESSOR, NormConfig, Regions, Slot

__all__ = ["REALS", "ForwardSpec", "RowSpec"]

# Each quarter of a multiprocessor has registers for as many warps as have so many of a thread together.
_REGISTERS_OF_QUARTER = 512
# Of a multiprocessor. Those of sm_89 and sm_120 hold 24: there the compiler ignores what a few kernels of one warp ask
# for.
_MOST_CTAS = 32
# Threads, and vectors of each, of LayerNorm's 16-bit rows, weight and bias for which the compiler spills to fit in 40
# registers, where one CTA stores rstd. With launch bounds for 48 it does not, and all but two of them are faster.
_SPILLED_DIVISIONS = {(64, 5), (96, 5), (192, 4), (192, 5), (256, 6), (288, 4), (288, 5), (288, 6), (288, 7)}


class RowSpec(KernelSpec):
    """A specialised kernel that works on rows."""

    hidden: int
    config: NormConfig
    unaligned: bool = False

    @property
    def vec_size(self) -> int:
        """Return the elements of a vector that every row is whole ones of; 1: rows may lie anywhere."""
        return 1 if self.unaligned else self.config.vec_size

    @property
    def chunks(self) -> int:
        return math.ceil(self.hidden / (self.config.ctas_per_row * self.config.chunk))

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def _registers(self) -> int:
        """The registers of a thread that the launch bounds leave room for; 0: the compiler chooses well by itself."""
        return 0

    def _bounds(self, shared_bytes: int) -> str:
        """Return the launch bounds of a kernel with so many bytes of dynamic shared memory."""
        config = self.config
        bounds = str(config.threads)
        resident = SHARED_OF_MULTIPROCESSOR // (shared_bytes + config.reserved_shared)
        # Else the compiler spills, or does with few registers, to fit one more CTA: in a cooperative grid, which is
        # held back by its barrier anyway, or where shared memory has no room for it.
        if config.exchange == "grid" or resident < 2:
            bounds += ", 1"
        elif self._registers:
            warps = 4 * (_REGISTERS_OF_QUARTER // self._registers)
            ctas = max(1, min(resident, 32 * warps // config.threads))
            if ctas <= _MOST_CTAS:  # more would be ignored, with a warning
                bounds += f", TRTC_RESIDENT({config.threads}, {ctas})"
        return bounds

    def _plain_program(
        self,
        kernel: str,
        types: dict[str, DType],
        flags: dict[str, bool],
        numbers: dict[str, int],
        shared_bytes: int,
    ) -> str:
        """Return a program of plain text: what it is specialised for comes before the kernel's file."""
        config = self.config
        sizes = {
            "HIDDEN": self.hidden,
            "THREADS_PER_ROW": config.threads_per_row,
            "ROWS_PER_CTA": config.rows_per_cta,
            "VEC_SIZE": config.vec_size,
            "VECTORS_PER_THREAD": config.vectors_per_thread,
            "CTAS_PER_ROW": config.ctas_per_row,
            "CHUNKS": self.chunks,
            "STAGES": config.stages,
            "LAG": config.lag,
            "ROWS_PER_PASS": config.rows_per_pass,
        }
        macros = flags | {
            # A power of two, at most 32 / hidden (norm/statistics.cuh).
            "SQUARES_SCALE": f"0x1p-{max(0, (self.hidden - 1).bit_length() - 5)}f",
            "UNALIGNED": self.unaligned,
            "CLUSTER": config.exchange == "cluster",
            "GRID": config.exchange == "grid",
            "BULK": config.bulk,
        }
        return (
            f"{definitions(types, macros, sizes | numbers)}\n"
            f"{self.params.text('Params')}\n"
            f'#include "norm/{kernel}.cu"\n'
            f"{entry(self.symbol, f'norm_{kernel}', self._bounds(shared_bytes))}"
        )

    def _rule(self, values: int, dynamic_shared_memory: int, partial_bytes: int, persistent: bool) -> LaunchRule:
        config = self.config
        return entry_rule(
            threads=config.threads,
            rows_per_cta=config.rows_per_cta * config.rows_per_pass,
            ctas_per_row=config.ctas_per_row,
            clusters=config.clusters,
            dynamic_shared_memory=dynamic_shared_memory,
            workspace_bytes=config.workspace_bytes(values, 2 + 2 * config.lag),
            partial_bytes=partial_bytes,
            persistent=persistent,
            vec_size=self.vec_size,
        )


REALS = (Field("eps", "float32", "eps"), Field("weight_offset", "float32", "weight_offset"))


@dataclass(frozen=True)
class ForwardSpec(RowSpec):
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
        Of the residual.
    adds : str
        ``"before"`` or ``"after"``: where the residual is added; else empty.
    sum : DType or None
        Of the sum of x and the residual, where it is added before.
    rounds : bool
        Whether x * rstd is rounded to the type of what is normalized before it is multiplied by the weight.
    stores : tuple of str
        What else is written: of ``"mean"``, ``"rstd"``, ``"amax"``, ``"scale_inv"`` and ``"row_scale"``.
    scale : bool
        Whether y is multiplied by a scale.
    per_head : bool
        Whether each head has a weight and bias of its own.
    repeats : bool
        Whether a CTA works on several rows, one after another.
    hidden : int
        Columns.
    config : NormConfig
        How a row is divided.
    unaligned : bool
        Whether rows may begin anywhere. Else they are whole vectors at aligned addresses.
    """

    norm: str
    input: DType
    weight: DType | None
    bias: DType | None
    residual: DType | None
    adds: str
    sum: DType | None
    rounds: bool
    output: DType
    stores: tuple[str, ...]
    scale: bool
    per_head: bool
    repeats: bool
    hidden: int
    config: NormConfig
    unaligned: bool = False

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
        if self.sum and self.sum is not self.residual:
            parts.append(f"sum_{self.sum.symbol}")
        if self.output is not self.input:
            parts.append(f"out_{self.output.symbol}")
        parts += present(rounds=self.rounds)
        parts += self.stores
        parts += present(scale=self.scale, heads=self.per_head, persistent=self.repeats)
        parts.append(f"h{self.hidden}_{self.config.symbol}")
        parts += present(unaligned=self.unaligned)
        return "_".join(parts)

    @property
    def params(self) -> Params:
        before, after = self.adds == "before", self.adds == "after"
        rows = present(x=True, residual=before or after, out=True, residual_out=before)
        others = present(weight=self.weight, bias=self.bias, scale=self.scale)
        return memoised_params(
            (
                *pointers(*rows, *others, *self.stores),
                *(WORKSPACE if self.config.exchange == "grid" else ()),
                *row_fields(*rows),
                *GEOMETRY,
                *(HEADS if self.per_head else ()),
                *REALS,
            )
        )

    @property
    def _registers(self) -> int:
        config = self.config
        if self.unaligned and config.in_shared and not config.stages:
            return 48  # two vectors of the weight and bias are on their way (norm/forward_shared.cu)
        if "row_scale" in self.stores:
            # What a thread keeps of y needs as many; the compiler takes fewer, and spills. It keeps none beside weights
            # that are wider than the row (norm/forward_shared.cu).
            if config.in_shared and self._has_wide_columns:
                return 0
            if config.in_shared:
                return 96 if config.chunk * config.ctas_per_row == self.hidden else 112
            if config.vec_size >= 4 and config.vectors_per_thread * config.vec_size >= 32:
                return 88 if self.norm == "layer_norm" else 80
        staged = self.output.bytes != self._replaced.bytes
        pairs = config.rows_per_pass > 1
        # RMSNorm with a bias is divided as LayerNorm is; of it, pairs of rows alone spill.
        tight = self.norm == "layer_norm" or (pairs and self.bias is not None)
        if staged and config.in_shared and not (config.stages or self._columns_ahead) and tight:
            # The compiler takes 32 for some, for pairs of rows 48, and spills; or 96 of the 112 that it may have, and
            # spills.
            if not pairs:
                return 64 if len(self.stores) < 2 else 72
            if self.input.bytes == 4:
                return 96 if config.chunk * config.ctas_per_row == self.hidden and config.threads <= 256 else 104
            return 96 if self.output.bytes == 1 else 72
        if staged and tight and not config.in_shared and 16 < config.vectors_per_thread * config.vec_size <= 32:
            return 96  # likewise
        if pairs and config.chunk * config.ctas_per_row != self.hidden:
            return 56 if config.vectors_per_thread * config.vec_size <= 32 else 96  # likewise
        if self._spills:
            return 48  # likewise
        if not (config.stages or self._columns_ahead or pairs) and self.chunks == 1:
            return self._fewest_registers(staged)
        # With the 91 that the compiler takes, LayerNorm of bfloat16, 65536, had 0.95 of its speed; with 73, 0.82.
        if staged or not self._columns_ahead:
            return 0
        columns = sum(dtype.bytes for dtype in (self.weight, self.bias) if dtype)
        return max(80, 5 * config.vec_size * columns // 2) + (16 if self.residual else 0)

    def _fewest_registers(self, staged: bool) -> int:
        """Return how many a row needs, where the compiler takes more so that a thread has more loads in flight."""
        config = self.config
        elements = config.vectors_per_thread * config.vec_size
        if self.repeats or self.unaligned or config.rows_per_cta > 1:
            return 0
        if self.norm == "rms_norm" and not self.residual:
            # In shared memory only where one CTA fewer is half of them, or much is stored.
            few = config.threads >= 1024 or (staged and elements <= 16) if config.in_shared else elements <= 16
            return 32 if few and (config.in_shared or config.vectors_per_thread <= 2) and len(self.stores) < 2 else 0
        whole = config.in_shared and not staged and config.ctas_per_row == 1 and not self._has_wide_columns
        return 48 if whole and self.norm == "layer_norm" and elements < 64 else 0

    @property
    def _has_wide_columns(self) -> bool:
        """Whether the weight or the bias has more bytes than x."""
        return any(dtype is not None and dtype.bytes > self.input.bytes for dtype in (self.weight, self.bias))

    @property
    def _spills(self) -> bool:
        """Whether the compiler spills without launch bounds for more registers."""
        config = self.config
        narrow = all(column and column.bytes == 2 for column in (self.weight, self.bias)) and not self.residual
        alone = config.in_shared and config.ctas_per_row == 1 and config.vec_size == 8 and not config.stages
        listed = (config.threads, config.vectors_per_thread) in _SPILLED_DIVISIONS
        return listed and alone and narrow and self.norm == "layer_norm" and "rstd" in self.stores

    @property
    def _repeats(self) -> bool:
        """Whether a CTA has more rows than those that it works on together."""
        return self.repeats or self.config.stages > 0 or self.config.exchange == "grid"

    @property
    def _columns_ahead(self) -> bool:
        """Whether all of a thread's weight and bias is on its way at once (norm/forward_shared.cu)."""
        config = self.config
        ahead = (
            config.in_shared and config.rows_per_pass == 1 and config.vectors_per_thread == 8 and config.threads <= 256
        )
        return ahead and self.norm == "layer_norm" and not (self._repeats or self.unaligned)

    @property
    def _held(self) -> DType:
        """Of what is normalized."""
        return self.sum or self.input

    @property
    def _replaced(self) -> DType:
        """Of the row in shared memory in whose place y is put together, if it has as many bytes."""
        return self.residual if self.residual and self.adds == "before" else self.input

    def _layout(self) -> tuple[dict[str, int], int]:
        """Return where a row's things are in its part of shared memory, and the bytes of all."""
        if self.config.stages:
            rows = [self.input, *((self.residual,) if self.residual else ())]
            slot = Slot(self.config, rows, self.output if self.unaligned else None)
            at = {"RESIDUAL_AT": slot.at[-1], "SLOT_BYTES": slot.slot_bytes}
            if self.unaligned:
                at |= {"OUT_AT": slot.out_at, "OUT_IN_SLOT": int(slot.out_in_slot)}
            return at, slot.bytes
        regions = Regions(self.config)
        residual_at = 0
        if self.config.in_shared:
            regions.add(self.input)
            if self.residual:
                residual_at = regions.add(self.residual)
            out_at = residual_at if self.adds == "before" else 0
            if self.unaligned and self.output.bytes != self._replaced.bytes:
                out_at = regions.add(self.output)
        elif self.unaligned:
            # Rows travel through it one array at a time.
            arrays = (self.input, self.output, self.residual or self.input, self._held)
            regions.add(max(arrays, key=lambda dtype: dtype.bytes))
            return {}, regions.bytes
        else:
            return {}, 0
        at = {"RESIDUAL_AT": residual_at, "STAGE_BYTES": regions.bytes}
        if self.unaligned:
            at["OUT_AT"] = out_at
        return at, self.config.rows_per_pass * regions.bytes

    @property
    def _types(self) -> dict[str, DType]:
        return {
            "Input": self.input,
            "Residual": self.residual or self.input,
            "NormInput": self._held,
            "Weight": self.weight or self.input,
            "Bias": self.bias or self.input,
            "Output": self.output,
        }

    @property
    def program(self) -> str:
        flags = {
            "CENTRED": self.norm == "layer_norm",
            "ADDED_BEFORE": self.adds == "before",
            "ADDED_AFTER": self.adds == "after",
            "HAS_WEIGHT": self.weight is not None,
            "HAS_BIAS": self.bias is not None,
            "PER_HEAD": self.per_head,
            "ROUNDS": self.rounds,
            "HAS_SCALE": self.scale,
            "ROW_SCALED": "row_scale" in self.stores,
            "PERSISTENT": self._repeats,
            "LOADS_ALL_AFFINE": self._columns_ahead,
        }
        flags |= {f"HAS_{name.upper()}": name in self.stores for name in ("mean", "rstd", "amax", "scale_inv")}
        way = "persistent" if self.config.stages else "shared" if self.config.in_shared else "registers"
        return self._plain_program(f"forward_{way}", self._types, flags, *self._layout())

    @property
    def launch_rule(self) -> LaunchRule:
        values = self.config.rows_per_pass * (3 if self.norm == "layer_norm" else 1)
        return self._rule(values, self._layout()[1], 0, self.repeats or self.config.stages > 0)
