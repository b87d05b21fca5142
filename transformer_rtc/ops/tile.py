# SPDX-License-Identifier: Apache-2.0
"""What the kernels whose CTAs have tiles of elements have in common (kernel_sources/arithmetic/vector_tile.cuh)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..request import LaunchRule
from ..spec import DType, Field
from .programs import entry_rule

__all__ = ["COLUMNS", "TileConfig", "vec_size_of"]

COLUMNS = (Field("columns", "int32", "columns"),)
# Vectors of one element, of a thread for each of 16 bytes: rows that begin anywhere need more of them.
_UNALIGNED_VECTORS = 2


@dataclass(frozen=True)
class TileConfig:
    """What a CTA has: so many threads, and each so many vectors of each array."""

    threads: int
    vectors_per_thread: int

    @property
    def symbol(self) -> str:
        """The part of a kernel's name."""
        return f"t{self.threads}_s{self.vectors_per_thread}"

    def numbers(self, vec_size: int) -> dict[str, int]:
        """Return what a program defines of its tiles."""
        return {"THREADS": self.threads, "VECTORS_PER_THREAD": self._vectors(vec_size), "VEC_SIZE": vec_size}

    def _vectors(self, vec_size: int) -> int:
        return self.vectors_per_thread * (_UNALIGNED_VECTORS if vec_size == 1 else 1)

    def rule(self, vec_size: int) -> LaunchRule:
        """Return how a kernel is launched whose CTAs have a tile each."""
        elements = self.threads * self._vectors(vec_size) * vec_size
        return entry_rule(self.threads, elements_per_cta=elements, vec_size=vec_size)


def vec_size_of(dtypes: Iterable[DType], unaligned: bool) -> int:
    """Return the elements of a vector of rows of these types: those of 16 bytes of the widest; 1 of unaligned rows."""
    return 1 if unaligned else 16 // max(dtype.bytes for dtype in dtypes)
