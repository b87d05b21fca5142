"""What the programs of kernels over rows have in common: their parameters and their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from ..request import LaunchRule
from ..spec import DType, Field, Params

__all__ = [
    "GEOMETRY",
    "HEADS",
    "MINIMAL",
    "ROW_SHAPES",
    "WORKSPACE",
    "GeneralKernel",
    "GeneralShape",
    "RowDivision",
    "dtypes",
    "entry",
    "entry_rule",
    "general_program",
    "literal",
    "memoised_params",
    "of_arrays",
    "pointers",
    "present",
    "row_fields",
    "shape_of",
    "traits",
]

# Without what a program does not use, texture functions and the like: 3 ms of 20.
MINIMAL = ("--minimal",)

# Kernels' names of arrays that a call names otherwise.
_ARRAYS = {"dx": "out"}

# As trtc::row_offset and trtc::head_of take them.
GEOMETRY = (
    Field("rows", "int64", "rows"),
    Field("inner_count", "uint32", "inner_count"),
    Field("inner_magic", "uint32", "inner_magic"),
    Field("inner_shift", "uint32", "inner_shift"),
)
HEADS = (
    Field("heads", "uint32", "heads"),
    Field("heads_magic", "uint32", "heads_magic"),
    Field("heads_shift", "uint32", "heads_shift"),
)
WORKSPACE = (Field("workspace", "pointer", "workspace"),)


@dataclass(frozen=True)
class RowDivision:
    """How a row is divided among threads.

    Attributes
    ----------
    threads_per_row : int
        Of one CTA: a power of two up to 32, or whole warps.
    rows_per_cta : int
        Rows that a CTA holds together.
    vector : int
        Elements of one memory access.
    steps : int
        Vectors of a row that one thread holds.
    ctas_per_row : int
        CTAs that share a row: a power of two.
    clusters : bool
        Whether they are a cluster, or meet in global memory in a cooperative launch.
    """

    threads_per_row: int
    rows_per_cta: int
    vector: int
    steps: int
    ctas_per_row: int = 1
    clusters: bool = False

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.threads_per_row * self.rows_per_cta

    @property
    def exchange(self) -> str:
        """How the CTAs of a row meet."""
        return "none" if self.ctas_per_row == 1 else "cluster" if self.clusters else "grid"

    @property
    def symbol(self) -> str:
        """The part of a kernel's name."""
        shared = f"_{self.exchange}{self.ctas_per_row}" if self.ctas_per_row > 1 else ""
        return f"t{self.threads_per_row}_r{self.rows_per_cta}_v{self.vector}_s{self.steps}{shared}"

    @property
    def numbers(self) -> dict[str, int]:
        """What a kernel's traits say of it."""
        return {
            "threads": self.threads_per_row,
            "rows_per_cta": self.rows_per_cta,
            "vector": self.vector,
            "steps": self.steps,
            "ctas_per_row": self.ctas_per_row,
        }

    def workspace_bytes(self, values: int, buffers: int = 2) -> int:
        """Return those of trtc::GridWorkspace: in each buffer, a counter and the values of each CTA."""
        return 4 * buffers * (1 + values * self.ctas_per_row) if self.exchange == "grid" else 0


def present(**flags: object) -> tuple[str, ...]:
    """Return the names of what is true."""
    return tuple(name for name, value in flags.items() if value)


# The same at every size; and each kernel is asked for them several times until it is loaded.
@lru_cache(maxsize=256)
def _fields(names: tuple[str, ...], type_: str, *properties: str) -> tuple[Field, ...]:
    return tuple(
        Field(name if what == "data" else f"{name}_{what}", type_, f"{_ARRAYS.get(name, name)}.{what}")
        for name in names
        for what in properties
    )


def pointers(*names: str) -> tuple[Field, ...]:
    """Return the pointers of arrays, by their names in the kernel."""
    return _fields(names, "pointer", "data")


def row_fields(*names: str) -> tuple[Field, ...]:
    """Return the strides of arrays of rows."""
    return _fields(names, "int64", "outer_stride", "inner_stride")


def dtypes(*names: str) -> tuple[Field, ...]:
    """Return the data types of arrays, as trtc::Dtype has them."""
    return _fields(names, "int32", "dtype")


@lru_cache(maxsize=256)
def memoised_params(fields: tuple[Field, ...]) -> Params:
    """Return the parameters that have these fields."""
    return Params(fields)


def of_arrays(fields: Sequence[Field], arrays: Sequence[str]) -> tuple[Field, ...]:
    """Return fields; those of arrays that an operator does not have are zero."""
    return tuple(
        field if "." not in field.source or field.source.partition(".")[0] in arrays else Field(field.name, field.type)
        for field in fields
    )


def literal(value: object) -> str:
    """Return a value as C++ writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def traits(types: Mapping[str, DType], flags: Mapping[str, bool], numbers: Mapping[str, int]) -> str:
    """Return the struct Traits that says what a kernel is specialised for."""
    lines = [f"  using {name} = {dtype.text};" for name, dtype in types.items()]
    for kind, values in (("bool", flags), ("int", numbers)):
        if not values:
            continue  # an enum of nothing is warned of
        lines.append(f"  enum : {kind} {{")
        lines += [f"    {name} = {literal(value)}," for name, value in values.items()]
        lines.append("  };")
    text = "\n".join(lines)
    return f"struct Traits {{\n{text}\n}};\n"


# How a kernel of entry() is launched: it waits for the launch before it by itself.
entry_rule = partial(LaunchRule, early=True)


def entry(symbol: str, template: str, bounds: object, params: str = "Params") -> str:
    """Return a kernel that calls a template of the namespace trtc, once the launch before it has ended."""
    return (
        f"\nTRTC_ENTRY TRTC_LAUNCH_BOUNDS({bounds}) void {symbol}(TRTC_PARAMETER {params} params) {{\n"
        "  trtc::wait_for_last_launch();\n"
        f"  trtc::{template}(params);\n"
        "}\n"
    )


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


# Threads of a multiprocessor that there are registers for, so that none waits for one row alone (H100, LayerNorm of
# 2048 columns of bfloat16: 0.72 of a copy, with registers for 768 threads, of which none is spilled, 0.64).
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
# when they are read again. RMSNorm of a copy, on an H100: bfloat16 of 2 and 4 KB by a warp 0.84 and 0.83, 4 KB by 256
# threads 0.57; float32 of 8 KB by a warp 0.68, by 256 threads 0.85; of 32 KB by 256 threads 0.94, of 64 KB 0.68, by 512
# 0.93. On an H200: bfloat16 of 256 bytes by 8 threads 0.51, by a warp 0.22.
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
