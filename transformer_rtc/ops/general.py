# SPDX-License-Identifier: Apache-2.0
"""What the families' general kernels have in common: their shapes, and the program of all that a family has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..spec import DType, Field, Params
from .programs import entry

__all__ = ["ROW_SHAPES", "GeneralKernel", "GeneralShape", "general_program", "of_arrays", "shape_of"]


class GeneralKernel(NamedTuple):
    """A kernel with sizes and types at run time.

    Attributes
    ----------
    params : Params
        Of an operator with every array.
    bounds : int or str
        Its launch bounds: the threads of a CTA; and, behind a comma, how many CTAs a multiprocessor has registers for.
    template : str
        What it calls.
    """

    params: Params
    bounds: int | str
    template: str


# Threads of a multiprocessor that there are registers for, so that none waits for one row alone: more spill, and fewer
# are slower though nothing is spilled.
_GENERAL_THREADS = 1024


class GeneralShape(NamedTuple):
    """How a general kernel divides rows.

    Attributes
    ----------
    name : str
        Of the shape, in the kernel's symbol.
    bytes : int or None
        The most of a row, in the arrays that `shape_of` is given, if there are longer shapes.
    threads, rows : int
        Threads of a row, and rows of a CTA.
    """

    name: str
    bytes: int | None
    threads: int
    rows: int

    @property
    def bounds(self) -> str:
        """The launch bounds of its kernels."""
        threads = self.threads * self.rows
        return f"{threads}, {_GENERAL_THREADS // threads}"


# Of kernels that add nothing up over rows. What decides is whether the rows of a multiprocessor are in its L1 cache
# when they are read again: few rows of many bytes, or many of few. Each limit was measured on an H100 or an H200.
ROW_SHAPES = (
    GeneralShape("short", 512, 8, 32),
    GeneralShape("narrow", 4 << 10, 32, 8),
    GeneralShape("wide", 32 << 10, 256, 1),
    GeneralShape("long", None, 512, 1),
)


def shape_of(columns: int, dtypes: Iterable[DType | None], shapes: Iterable[GeneralShape]) -> GeneralShape:
    """Return the first of these shapes, which are in order of their lengths, that takes such rows of these types."""
    size = columns * sum(dtype.bytes for dtype in dtypes if dtype)
    return next(shape for shape in shapes if shape.bytes is None or size <= shape.bytes)


def general_program(source: str, kernels: Mapping[str, GeneralKernel]) -> str:
    """Return the program of general kernels, by their symbols; those with the same parameters share their struct."""
    structs: dict[tuple[tuple[str, str], ...], str] = {}
    declared, entries = [], []
    for symbol, kernel in kernels.items():
        members = tuple((field.name, field.type) for field in kernel.params.fields)
        if members not in structs:
            structs[members] = f"Params{len(structs)}"
            declared.append("\n" + kernel.params.text(structs[members]))
        entries.append(entry(symbol, kernel.template, kernel.bounds, structs[members]))
    return f'#include "{source}"\n{"".join(declared)}{"".join(entries)}'


def of_arrays(fields: Sequence[Field], arrays: Sequence[str]) -> tuple[Field, ...]:
    """Return fields; those of arrays that an operator does not have are zero."""
    return tuple(
        field if "." not in field.source or field.source.partition(".")[0] in arrays else Field(field.name, field.type)
        for field in fields
    )
