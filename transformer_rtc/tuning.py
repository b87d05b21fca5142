# SPDX-License-Identifier: Apache-2.0
"""Tuning files: configurations that were measured to be faster than the default ones, on one device."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache_folder import Folder, distrust, make_folders, own_path
from .cache_locks import write_file
from .checks import is_integer
from .declaration import declaration_of
from .errors import ArgumentError, shown
from .request import Asked, Request
from .settings import Settings, settings
from .spec import DeviceLimits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "EMPTY",
    "Tuning",
    "TuningRow",
    "config_of",
    "file_for",
    "files_for",
    "forget",
    "read",
    "tuning_of",
    "values_of",
    "write",
]

FORMAT = 1  # of the file: its first line says it
_HEADER = {"tuning", "device", "architecture"}
_ROW = {"request", "config", "gain", "spread"}


class TuningRow(NamedTuple):
    """What was measured of one request.

    Attributes
    ----------
    request : Request
        What an operator was asked for.
    config : dict of str to object, or None
        The fastest configuration, by the values that are not its type's defaults. None: the default one is.
    gain : float
        How many times as fast as the default one it is, less 1.
    spread : float
        Half of what that differs by from one placement of the arrays to another.
    """

    request: Request
    config: dict[str, Any] | None
    gain: float = 0.0
    spread: float = 0.0


class Tuning:
    """The rows of one device, found by what a request's configuration depends on.

    Attributes
    ----------
    device : str
        Its name.
    architecture : int
        Its compute capability, 90 for 9.0.
    rows : tuple of TuningRow
        What was measured.
    """

    device: str
    architecture: int
    rows: tuple[TuningRow, ...]

    def __init__(self, device: str = "", architecture: int = 0, rows: Iterable[TuningRow] = ()) -> None:
        self.device, self.architecture, self.rows = device, architecture, tuple(rows)
        self._by_case = {_case(row.request): row for row in self.rows}

    def row(self, request: Request) -> TuningRow | None:
        """Return the row that holds for a request; None: there is none."""
        return self._by_case.get(_case(request)) if self._by_case else None

    def drop(self, request: Request) -> None:
        """Forget the row that holds for a request: its kernel cannot be launched on this device."""
        self._by_case.pop(_case(request), None)

    def config(self, request: Request, limits: DeviceLimits) -> Any:
        """Return a request's configuration.

        None: it has the default one, since there is no row, or what a row says is no configuration that fits.
        """
        row = self.row(request)
        return None if row is None or row.config is None else config_of(request, limits, row.config)


EMPTY = Tuning()


def _case(request: Request) -> tuple[object, ...]:
    family = declaration_of(request.operator).family
    return family.name, family.case(request)


def values_of(config: DataclassInstance) -> dict[str, Any]:
    """Return the values of a configuration that are not its type's defaults."""
    found = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {name: value for name, (value, default) in found.items() if value != default}


def config_of(request: Request, limits: DeviceLimits, values: dict[str, Any]) -> Any:
    """Return the configuration of such values that a request may have; None: there is none that fits."""
    configs = declaration_of(request.operator).family.configurations(request, limits)
    return next((config for config in configs if values_of(config) == values), None)


# ---- Files -----------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], content: bytes | None = None) -> Tuning:
    """Return a tuning file, of which the content may have been read already.

    Raises
    ------
    ArgumentError
        If it cannot be read, or is none; it says which line.
    """
    from . import manifest

    name = os.fspath(path)
    try:
        if content is None:
            with open(name, "rb") as file:
                content = file.read()
        lines = [line for line in enumerate(content.decode().split("\n"), 1) if line[1].strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the tuning file {name} cannot be read: {error}") from error
    found: list[dict[str, Any]] = []
    for number, text in lines:
        where, names = f"{name}:{number}", _ROW if found else _HEADER
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{where}: it is no JSON: {error}") from None
        if not isinstance(fields, dict) or fields.keys() != names:
            raise ArgumentError(f"{where}: it must be an object with {', '.join(sorted(names))}; it is {text[:200]}")
        found.append(fields)
    if not found or found[0]["tuning"] != FORMAT:
        raise ArgumentError(f"{name}: its first line must say 'tuning': {FORMAT}")
    if not is_integer(found[0]["architecture"], 1, 999) or not isinstance(found[0]["device"], str):
        raise ArgumentError(f"{name}:1: architecture must be a number such as 90, and device a name")
    rows = []
    for (number, _), fields in zip(lines[1:], found[1:], strict=True):
        asked = manifest.parse(json.dumps(fields["request"]), f"{name}:{number}")
        config = fields["config"]
        if not isinstance(asked, Asked) or not (config is None or isinstance(config, dict)):
            raise ArgumentError(f"{name}:{number}: it must have an operator's request, and a configuration or null")
        numbers = fields["gain"], fields["spread"]
        if not all(type(one) in (int, float) and math.isfinite(one) for one in numbers):
            raise ArgumentError(f"{name}:{number}: gain and spread must be numbers")
        rows.append(TuningRow(asked.request, config, fields["gain"], fields["spread"]))
    return Tuning(found[0]["device"], found[0]["architecture"], rows)


def write(path: str, tuning: Tuning) -> None:
    """Write a tuning file, in place of one that is there: readers see the one or the other.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    from .manifest import request_fields

    header = {"tuning": FORMAT, "device": tuning.device, "architecture": tuning.architecture}
    lines = [json.dumps(header)]
    for row in tuning.rows:
        measured = {"config": row.config, "gain": row.gain, "spread": row.spread}
        lines.append(json.dumps({"request": request_fields(row.request), **measured}))
    folder = os.path.dirname(os.path.abspath(path))
    make_folders(folder)
    if reason := distrust(os.stat(folder)):
        raise PermissionError(errno.EACCES, reason, folder)
    write_file(path, ("\n".join(lines) + "\n").encode())


def files_for(device: str, options: Settings | None = None) -> list[str]:
    """Return where a device's tuning files may be: the one that is written first, whose rows go first."""
    options = options or settings
    if options.tuning:
        return [] if options.tuning == "off" else [options.tuning]
    name = f"tuning.{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}.jsonl"
    own = options.cache_dir and own_path(options.cache_dir)
    return [os.path.join(folder, name) for folder in (own, options.read_only_cache_dir) if folder]


def file_for(device: str, options: Settings | None = None) -> str | None:
    """Return which tuning file is written for a device; None: files are ignored, or there is no folder."""
    options = options or settings
    if options.tuning == "off" or not (options.tuning or options.cache_dir):
        return None
    return files_for(device, options)[0]


_known: dict[str, Tuning] = {}
_reading = threading.Lock()


def tuning_of(device: str) -> Tuning:
    """Return what a device's tuning files say, read once; `EMPTY`, with a warning, where one cannot be used."""
    with _reading:
        if device in _known:
            return _known[device]
        found, problem = _read_for(device)
        _known[device] = found
    if problem:
        warnings.warn(f"transformer_rtc has its default configurations: {problem}", RuntimeWarning, stacklevel=2)
    return found


def forget() -> None:
    """Have files read again when they are asked for."""
    with _reading:
        _known.clear()


def _read_for(device: str) -> tuple[Tuning, str]:
    """Return what a device's files say, and what is wrong with one."""
    rows: list[TuningRow] = []
    architecture = 0
    for path in files_for(device):
        content = None
        if not settings.tuning:
            # As entries are read: not where others may write, nor from a pipe.
            folder, name = os.path.split(path)
            own = own_path(settings.cache_dir or "")
            in_cache = Folder(folder, private=own not in ("", settings.cache_dir) and folder == own)
            got = in_cache.read(name) if os.path.exists(path) else None
            if got is None:
                continue
            content = got[0]
        try:
            found = read(path, content)
            if found.device != device:
                raise ArgumentError(f"the tuning file {path} is of {shown(found.device)}, and this device is {device}")
        except ArgumentError as error:
            return EMPTY, str(error)
        rows = [*found.rows, *rows]  # the last row of a case holds
        architecture = found.architecture
    return (Tuning(device, architecture, rows) if rows else EMPTY), ""
