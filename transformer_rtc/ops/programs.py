# SPDX-License-Identifier: Apache-2.0
"""What the programs of kernels over rows have in common: parameters, definitions or traits, and entry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

from ..request import LaunchRule
from ..spec import DType, Field, Params

__all__ = [
    "GEOMETRY",
    "HEADS",
    "MINIMAL",
    "WORKSPACE",
    "column_strides",
    "definitions",
    "dtypes",
    "entry",
    "entry_rule",
    "literal",
    "memoised_params",
    "pointers",
    "present",
    "row_fields",
    "traits",
]

# Without what a program does not use, texture functions and the like: a seventh of an empty kernel's compile.
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


def column_strides(*names: str) -> tuple[Field, ...]:
    """Return the strides of elements in rows: 1, or 0 where one element is broadcast to the whole row."""
    return _fields(names, "int32", "column_stride")


def dtypes(*names: str) -> tuple[Field, ...]:
    """Return the data types of arrays, as trtc::Dtype has them."""
    return _fields(names, "int32", "dtype")


@lru_cache(maxsize=256)
def memoised_params(fields: tuple[Field, ...]) -> Params:
    """Return the parameters that have these fields."""
    return Params(fields)


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


def definitions(types: Mapping[str, DType], macros: Mapping[str, object], numbers: Mapping[str, int]) -> str:
    """Return what a kernel of plain text is specialised for: types, numbers, and macros, flags 0 or 1."""
    lines = ['#include "types.cuh"']
    lines += [f"#define {name} {int(value) if isinstance(value, bool) else value}" for name, value in macros.items()]
    lines.append("namespace trtc {")
    lines += [f"using {name} = {dtype.text};" for name, dtype in types.items()]
    # An enum: a constexpr of a namespace is a variable in global memory, which a load of the kernel would fill.
    lines += ["enum : int {", *(f"  {name} = {value}," for name, value in numbers.items()), "};", "}", ""]
    return "\n".join(lines)


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
