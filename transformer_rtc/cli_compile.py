# SPDX-License-Identifier: Apache-2.0
"""``transformer-rtc compile``: a kernel of the user's own, from a file."""

from __future__ import annotations

import argparse
import json
import os
import re
import time

from . import _native, compiler, includes
from .cli_output import Failure, emit
from .cli_parser import told_of
from .device import OLDEST_ARCHITECTURE, device_of
from .errors import ArgumentError, CompileError, DeviceNotFoundError
from .settings import settings
from .sources import NOWHERE
from .spec import Field, TextSpec

__all__ = ["resources", "run"]

# What people are shown for names of the document, and the units.
_SHOWN = {
    "bytes": ("size", "bytes"),
    "milliseconds": ("compile time", "ms"),
    "registers": ("registers", "for each thread"),
    "static_shared_memory": ("static shared memory", "bytes"),
    "stack": ("stack", "bytes"),
    "spill_stores": ("spill stores", "bytes"),
    "spill_loads": ("spill loads", "bytes"),
}


def _architecture(name: str | None) -> int:
    if name is None:
        try:
            return device_of(_native.current_device()).target.architecture
        except DeviceNotFoundError as error:
            raise type(error)(f"{error}. --architecture names another one, such as sm_90") from error
    match = re.fullmatch(r"sm_(\d{2,3})", name, re.ASCII)
    if not match:
        raise ArgumentError(f"--architecture is {name!r}; it takes one such as sm_90")
    architecture = int(match[1])
    if architecture < OLDEST_ARCHITECTURE:
        raise ArgumentError(f"--architecture is {name!r}; it takes sm_{OLDEST_ARCHITECTURE} or newer")
    return architecture


def _field(text: str) -> Field:
    name, _, kind = text.partition(":")
    return Field(name, kind)


def resources(log: str, symbol: str) -> dict[str, int]:
    """Return what the compiler's report says that a kernel takes; nothing where it does not mention it."""
    _, _, after = log.partition(f"Compiling entry function '{symbol}'")
    mine, _, _ = after.partition("Compiling entry function")
    patterns = {
        "registers": r"Used (\d+) registers",
        "static_shared_memory": r"(\d+) bytes smem",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    found = {name: re.search(pattern, mine) for name, pattern in patterns.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()} if mine else {}


def _made(path: str, spec: TextSpec, architecture: int) -> compiler.Compiled:
    """Return what the compiler makes of a file's text; what it refuses names the file, as its user knows it."""
    options = (*spec.options, compiler.REPORT)
    try:
        found = includes.read(spec, of_cuda=True)
        with includes.explained(found, of_cuda=True):
            return compiler.compile_program(
                spec.symbol, found.program, includes.headers_of(found), options, architecture
            )
    except (ArgumentError, CompileError) as error:
        hint = ""
        if isinstance(error, CompileError) and '"Params"' in error.log:
            fields = ", ".join(f"{field.name}:{field.type}" for field in spec.fields) or "none"
            hint = f"\nParams has the fields that --field names, such as --field x:pointer n:int64; given: {fields}"
        told = told_of(error).replace(f"{NOWHERE}{spec.symbol}.cu", path)  # which the end of NVRTC's log names
        raise Failure(f"{path}: {told}{hint}", error) from error


def run(arguments: argparse.Namespace) -> int:
    """Compile a file, and print what the kernel takes."""
    path = arguments.file
    settings.check()
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    try:
        fields = tuple(map(_field, arguments.field))
        # The compiler's messages name the file. So does JSON quote it: as a string of C++.
        named = f"#line 1 {json.dumps(path, ensure_ascii=False)}\n{text}"
        folders = (os.path.dirname(path) or ".", *arguments.include)
        spec = TextSpec(named, arguments.symbol, fields, tuple(arguments.option), folders)
    except ArgumentError as error:
        raise Failure(f"{path}: {told_of(error)}", error) from error
    architecture = _architecture(arguments.architecture)
    start = time.perf_counter()
    made = _made(path, spec, architecture)
    elapsed = (time.perf_counter() - start) * 1e3
    entries = compiler.entries_of(made.image)
    if spec.symbol not in entries:
        which = ", ".join(entries) or "none"
        raise Failure(f'{path} has no extern "C" __global__ {spec.symbol}; its entries are: {which}')
    if arguments.output:
        try:
            with open(arguments.output, "wb") as output:
                output.write(made.image)
        except OSError as error:
            raise Failure(f"{arguments.output} cannot be written: {error}") from error
    document = {
        "symbol": spec.symbol,
        "architecture": f"sm_{architecture}",
        "kind": made.kind,
        "bytes": len(made.image),
        "milliseconds": elapsed,
        "compiler": made.compiler,
        **resources(made.log, spec.symbol),
        "output": arguments.output,
    }
    told = []
    for name, value in document.items():
        if value is not None:
            label, unit = _SHOWN.get(name, (name, ""))
            text = f"{value:.1f}" if isinstance(value, float) else value
            told.append(f"{label:21s} {text} {unit}".rstrip())
    emit(arguments, document, told)
    return 0
