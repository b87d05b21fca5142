"""The specs of activations' kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ...request import LaunchRule
from ...spec import DType, Field, KernelSpec, Params
from ..programs import GEOMETRY, MINIMAL, definitions, entry, entry_rule, memoised_params, pointers, present, row_fields

__all__ = ["COLUMNS", "ROWS", "ActivationConfig", "ActivationSpec"]

COLUMNS = (Field("columns", "int32", "columns"),)
# The arrays of rows, and the types of a program that are theirs.
ROWS = {"dy": "Gradient", "x": "Input", "up": "Up", "out": "Output", "dx": "Output", "dup": "UpOutput"}
# Vectors of one element, of a thread for each of 16 bytes: rows that begin anywhere need more of them.
_UNALIGNED_VECTORS = 2


@dataclass(frozen=True)
class ActivationConfig:
    """What a CTA has: so many threads, and each so many vectors of each array."""

    threads: int
    vectors_per_thread: int

    @property
    def symbol(self) -> str:
        """The part of a kernel's name."""
        return f"t{self.threads}_s{self.vectors_per_thread}"


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
    config : ActivationConfig
        What a CTA has.
    unaligned : bool
        Whether rows may have any length and begin anywhere. Else they are whole vectors at aligned addresses.
    """

    kernel: str
    function: str
    gated: bool
    packed: bool
    arrays: tuple[tuple[str, DType], ...]
    config: ActivationConfig
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
        """Return the elements of a vector: those of 16 bytes of the widest array of rows."""
        return 1 if self.unaligned else 16 // max(dtype.bytes for name, dtype in self.arrays if name in ROWS)

    @property
    def params(self) -> Params:
        names = tuple(name for name, _ in self.arrays)
        rows = tuple(name for name in names if name in ROWS)
        return memoised_params((*pointers(*names), *row_fields(*rows), *GEOMETRY, *COLUMNS))

    @property
    def _vectors(self) -> int:
        return self.config.vectors_per_thread * (_UNALIGNED_VECTORS if self.unaligned else 1)

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
        numbers = {
            "THREADS": self.config.threads,
            "VECTORS_PER_THREAD": self._vectors,
            "VEC_SIZE": self.vec_size,
        }
        return (
            f"{definitions(types, flags, numbers)}\n"
            f"{self.params.text('Params')}\n"
            f'#include "activation/{self.kernel}.cu"\n'
            f"{entry(self.symbol, f'activation_{self.kernel}', self.config.threads)}"
        )

    @property
    def launch_rule(self) -> LaunchRule:
        threads = self.config.threads
        elements = 0 if self.kernel == "row_scaled" else threads * self._vectors * self.vec_size
        return entry_rule(threads, elements_per_cta=elements, vec_size=self.vec_size)
