# SPDX-License-Identifier: Apache-2.0
"""The specs of activations' kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ...request import LaunchRule
from ...spec import DType, KernelSpec, Params
from ..programs import GEOMETRY, MINIMAL, definitions, entry, memoised_params, pointers, present, row_fields
from ..tile import COLUMNS, TileConfig, vec_size_of

__all__ = ["ROWS", "ActivationSpec"]

# The arrays of rows, and the types of a program that are theirs.
ROWS = {"dy": "Gradient", "x": "Input", "up": "Up", "out": "Output", "dx": "Output", "dup": "UpOutput"}


@dataclass(frozen=True)
class ActivationSpec(KernelSpec):
    """A specialised kernel.

    Attributes
    ----------
    kernel : str
        The file of `kernel_sources/activation`: ``"forward"``, ``"backward"`` or ``"row_scaled"``.
    function : str
        As `trtc::Function` names it.
    gated, packed : bool
        Whether there is a second factor, and whether it is the second half of each row of x.
    arrays : tuple of (str, DType)
        The kernel's names of the arrays that are there, and their data types.
    config : TileConfig
        What a CTA has.
    unaligned : bool
        Whether rows may have any length and begin anywhere. Else they are whole vectors at aligned addresses.
    """

    kernel: str
    function: str
    gated: bool
    packed: bool
    arrays: tuple[tuple[str, DType], ...]
    config: TileConfig
    unaligned: bool = False

    @property
    def symbol(self) -> str:
        types = (f"{name}_{dtype.symbol}" for name, dtype in self.arrays)
        how = present(packed=self.packed, unaligned=self.unaligned)
        gated = "_and_mul" if self.gated else ""
        return "_".join((self.function + gated, self.kernel, *types, self.config.symbol, *how))

    @property
    def options(self) -> tuple[str, ...]:
        return MINIMAL

    @property
    def vec_size(self) -> int:
        """Return the elements of a vector."""
        return vec_size_of((dtype for name, dtype in self.arrays if name in ROWS), self.unaligned)

    @property
    def params(self) -> Params:
        names = tuple(name for name, _ in self.arrays)
        rows = tuple(name for name in names if name in ROWS)
        return memoised_params((*pointers(*names), *row_fields(*rows), *GEOMETRY, *COLUMNS))

    @property
    def program(self) -> str:
        there = dict(self.arrays)
        types = {ROWS[name]: dtype for name, dtype in self.arrays if name in ROWS}
        types = {"Up": there["x"], "Gradient": there["x"], "UpOutput": types["Output"]} | types
        types["Widest"] = max(types["Output"], types["UpOutput"], key=lambda dtype: dtype.bytes)
        flags = {
            "FUNCTION": f"Function::{self.function}",
            "GATED": self.gated,
            "PACKED": self.packed,
            **{f"HAS_{name.upper()}": name in there for name in ("scale", "amax", "scale_inv", "dup")},
        }
        return (
            f"{definitions(types, flags, self.config.numbers(self.vec_size))}\n"
            f"{self.params.text('Params')}\n"
            f'#include "activation/{self.kernel}.cu"\n'
            f"{entry(self.symbol, f'activation_{self.kernel}', self.config.threads)}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        rule = self.config.rule(self.vec_size)
        return rule._replace(elements_per_cta=0) if self.kernel == "row_scaled" else rule
