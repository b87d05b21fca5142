# SPDX-License-Identifier: Apache-2.0
"""What operators were asked for, and callers' own kernels, as lines of JSON: written by a run, read by a warm-up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from .checks import path_of
from .declaration import check_request, columns_of, declaration_of, operator_names
from .errors import ArgumentError, choices, shown
from .request import Asked, Request
from .spec import DTYPES, DeviceLimits, Field, TextSpec

__all__ = ["ManifestEntry", "line", "parse", "read", "request_fields"]

_MOST_CTAS: int = DeviceLimits._field_defaults["max_ctas_per_row"]
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}
_KERNEL_FIELDS = {"kernel", "text", "fields", "options"}
_TRUTHS = ("per_head", "margin", "unaligned")
_FIELDS = {"operator", "dtypes", "columns", *_TRUTHS, "flags", "max_ctas_per_row", "config"}


ManifestEntry = Asked | TextSpec
"""A line of a manifest: what an operator was asked for, or a caller's own kernel, which is a `TextSpec`.

`record` yields them, and `warmup` takes them.

Examples
--------
>>> import numpy as np
>>> from transformer_rtc import ManifestEntry, record, rms_norm
>>> with record() as entries:
...     y = rms_norm(np.ones((2, 8), np.float32))
>>> isinstance(entries[0], ManifestEntry), entries[0].request.operator, entries[0].request.columns
(True, 'rms_norm', 8)
"""


def request_fields(request: Request) -> dict[str, object]:
    """Return a request as a line has it, without what is absent."""
    fields: dict[str, object] = {
        "operator": request.operator,
        "dtypes": {name: dtype.name for name, dtype in request.dtypes.items() if dtype},
        "columns": request.columns,
        "per_head": request.per_head,
        "margin": request.margin,
    }
    if request.unaligned:
        fields["unaligned"] = True
    if request.flags:
        fields["flags"] = sorted(request.flags)
    return fields


def line(entry: ManifestEntry) -> str:
    """Return an entry's line, without what is absent."""
    if isinstance(entry, TextSpec):
        pairs = [[field.name, field.type] for field in entry.fields]
        kernel = {"kernel": entry.name, "text": entry.text, "fields": pairs, "options": list(entry.options)}
        if entry.include_folders:
            kernel["include_folders"] = list(entry.include_folders)
        return json.dumps(kernel)
    fields = request_fields(entry.request)
    if entry.max_ctas_per_row != _MOST_CTAS:
        fields["max_ctas_per_row"] = entry.max_ctas_per_row
    if entry.config is not None:
        fields["config"] = entry.config
    return json.dumps(fields)


def parse(text: str, where: str = "a manifest's line") -> ManifestEntry:
    """Return the entry of a line.

    Parameters
    ----------
    text : str
        The line.
    where : str
        What a message calls it.

    Raises
    ------
    ArgumentError
        If it is no line of a manifest.
    """

    def refuse(what: str) -> ArgumentError:
        return ArgumentError(f"{where}: {what}")

    if not isinstance(text, str):
        raise refuse(f"it is {shown(text)}, and no text")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is no JSON: {error}") from None
    if isinstance(fields, dict) and _KERNEL_FIELDS <= fields.keys() <= _KERNEL_FIELDS | {"include_folders"}:
        return _parse_kernel(fields, refuse)
    if not isinstance(fields, dict) or not {"operator", "dtypes", "columns"} <= fields.keys() <= _FIELDS:
        raise refuse(
            f"it must be an object with operator, dtypes and columns, and perhaps {', '.join(_TRUTHS)}, flags, "
            f"max_ctas_per_row and config; or with {', '.join(sorted(_KERNEL_FIELDS))}; it is {text.strip()[:200]}"
        )
    name, given = fields["operator"], fields["dtypes"]
    if not isinstance(name, str) or name not in operator_names():
        raise refuse(f"operator is {name!r}{choices(name, operator_names())}")
    declaration = declaration_of(name)
    names = [array.name for array in declaration.arrays]
    if not isinstance(given, dict) or not given.keys() <= set(names):
        raise refuse(f"dtypes is {given!r}; it must have data types of {', '.join(names)}")
    for array, dtype in given.items():
        if dtype is not None and not (isinstance(dtype, str) and dtype in _BY_NAME):
            raise refuse(f"the data type of {array} is {dtype!r}; it must be one of {', '.join(_BY_NAME)}")
    truths = {name: fields.get(name, False) for name in _TRUTHS}
    numbers = {"columns": fields["columns"], "max_ctas_per_row": fields.get("max_ctas_per_row", _MOST_CTAS)}
    for field, value, kind in (
        *((field, value, bool) for field, value in truths.items()),
        *((field, value, int) for field, value in numbers.items()),
    ):
        if type(value) is not kind:
            raise refuse(f"{field} is {value!r}; it must be {'true or false' if kind is bool else 'an integer'}")
    if not 1 <= numbers["max_ctas_per_row"] <= _MOST_CTAS:
        raise refuse(f"max_ctas_per_row is {numbers['max_ctas_per_row']}; it must be from 1 to {_MOST_CTAS}")
    dtypes = {array: _BY_NAME[given[array]] if given.get(array) else None for array in names}
    flagged = fields.get("flags", [])
    if not isinstance(flagged, list) or not all(flag in declaration.flags for flag in flagged):
        raise refuse(f"flags is {flagged!r}; it must be some of: {', '.join(declaration.flags) or 'none'}")
    config = fields.get("config")
    if config is not None and not isinstance(config, dict):
        raise refuse(f"config is {config!r}; it must be an object with the values of a configuration")
    try:
        columns = columns_of(name, numbers["columns"])
        request = Request(name, dtypes, columns, flags=frozenset(flagged), **truths)
        check_request(request)
    except ArgumentError as error:
        raise refuse(str(error)) from None
    return Asked(request, numbers["max_ctas_per_row"], config)


def _parse_kernel(fields: dict[str, Any], refuse: Callable[[str], ArgumentError]) -> TextSpec:
    name, text, pairs, options = (fields[field] for field in ("kernel", "text", "fields", "options"))
    folders = fields.get("include_folders", [])
    for field, value in (("options", options), ("include_folders", folders)):
        if not isinstance(value, list):
            raise refuse(f"{field} is {value!r}; it must be strings")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs
    ):
        raise refuse(f"fields is {pairs!r}; it must be pairs of a name and a type")
    try:
        return TextSpec(text, name, tuple(Field(*pair) for pair in pairs), tuple(options), tuple(folders))
    except ArgumentError as error:
        raise refuse(str(error)) from None


def read(path: str | os.PathLike[str]) -> list[ManifestEntry]:
    """Return a manifest's entries, each once.

    Raises
    ------
    ArgumentError
        If it cannot be read, or a line is none of a manifest; it says which one.
    """
    name = path_of(path, "manifest")
    try:
        with open(name, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the manifest {name} cannot be read: {error}") from error
    found: dict[str, ManifestEntry] = {}
    for number, text in enumerate(lines, 1):
        if text.strip():
            entry = parse(text, f"{name}:{number}")
            found[line(entry)] = entry
    return list(found.values())
