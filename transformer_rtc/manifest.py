"""What operators were asked for, and callers' own kernels, as lines of JSON: written by a run, read by a warm-up."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from . import _native, dispatch, usage
from .checks import path_of
from .dispatch import operators
from .errors import ArgumentError, shown
from .request import Argument, Asked, Request
from .settings import settings
from .spec import DTYPES, DeviceLimits, Field, TextSpec

__all__ = ["ManifestEntry", "arrays_of", "check_request", "columns_of", "line", "parse", "read", "record"]

_MOST_CTAS: int = DeviceLimits._field_defaults["max_ctas_per_row"]
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}
_KERNEL_FIELDS = {"kernel", "text", "fields", "options"}
_FIELDS = {"operator", "dtypes", "columns", "per_head", "margin", "flags", "max_ctas_per_row"}


# A line of a manifest: what an operator was asked for, or a caller's own kernel.
ManifestEntry = Asked | TextSpec


def arrays_of(operator: str) -> tuple[Argument, ...]:
    """Return an operator's arguments that are arrays: those whose data types a request has, in its order."""
    return tuple(argument for argument in operators()[operator].arguments if argument.role not in dispatch._NO_ARRAYS)


def line(entry: ManifestEntry) -> str:
    """Return an entry's line, without what is absent."""
    if isinstance(entry, TextSpec):
        pairs = [[field.name, field.type] for field in entry.fields]
        return json.dumps({"kernel": entry.name, "text": entry.text, "fields": pairs, "options": list(entry.options)})
    request = entry.request
    fields: dict[str, object] = {
        "operator": request.operator,
        "dtypes": {name: dtype.name for name, dtype in request.dtypes.items() if dtype},
        "columns": request.columns,
        "per_head": request.per_head,
        "margin": request.margin,
    }
    if request.flags:
        fields["flags"] = sorted(request.flags)
    if entry.max_ctas_per_row != _MOST_CTAS:
        fields["max_ctas_per_row"] = entry.max_ctas_per_row
    return json.dumps(fields)


def columns_of(operator: str, columns: int) -> int:
    """Return with which number of columns rows of so many are asked for.

    Raises
    ------
    ArgumentError
        If no row may have so many.
    """
    if not 1 <= columns <= _native.MOST_COLUMNS:
        raise ArgumentError(f"{operator}: a hidden size is {columns}; it must be from 1 to {_native.MOST_COLUMNS}")
    return next((bucket for bucket in operators()[operator].buckets if bucket >= columns), columns)


def check_request(request: Request) -> None:
    """Refuse what no call of the operator could ask for.

    Raises
    ------
    ArgumentError
        If it is so.
    """
    name = request.operator
    may_be_unwanted = [of for a in operators()[name].arguments if a.role == "wanted" for of in a.of]
    for argument in arrays_of(name):
        dtype = request.dtypes[argument.name]
        if dtype is None:
            if argument.role in ("rows", "rows_out") and not argument.optional and argument.name not in may_be_unwanted:
                raise ArgumentError(f"{name}: {argument.name} must have a data type")
        elif dtype not in argument.dtypes:
            accepted = ", ".join(other.name for other in argument.dtypes)
            raise ArgumentError(f"{name}: {argument.name} must be one of {accepted}; it is {dtype.name}")
    if request.per_head and not any(request.dtypes[a.name] for a in arrays_of(name) if a.role == "columns"):
        raise ArgumentError(f"{name}: per_head needs a weight or a bias, which each head has of its own")


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
    if isinstance(fields, dict) and fields.keys() == _KERNEL_FIELDS:
        return _parse_kernel(fields, refuse)
    if not isinstance(fields, dict) or not {"operator", "dtypes", "columns"} <= fields.keys() <= _FIELDS:
        raise refuse(
            "it must be an object with operator, dtypes and columns, and perhaps per_head, margin, flags and "
            f"max_ctas_per_row; or with {', '.join(sorted(_KERNEL_FIELDS))}; it is {text.strip()[:200]}"
        )
    name, given = fields["operator"], fields["dtypes"]
    if not isinstance(name, str) or name not in operators():
        raise refuse(f"operator is {name!r}; it must be one of {', '.join(operators())}")
    names = [argument.name for argument in arrays_of(name)]
    if not isinstance(given, dict) or not given.keys() <= set(names):
        raise refuse(f"dtypes is {given!r}; it must have data types of {', '.join(names)}")
    for array, dtype in given.items():
        if dtype is not None and not (isinstance(dtype, str) and dtype in _BY_NAME):
            raise refuse(f"the data type of {array} is {dtype!r}; it must be one of {', '.join(_BY_NAME)}")
    flags = {flag: fields.get(flag, False) for flag in ("per_head", "margin")}
    numbers = {"columns": fields["columns"], "max_ctas_per_row": fields.get("max_ctas_per_row", _MOST_CTAS)}
    for field, value, kind in (
        *((field, value, bool) for field, value in flags.items()),
        *((field, value, int) for field, value in numbers.items()),
    ):
        if type(value) is not kind:
            raise refuse(f"{field} is {value!r}; it must be {'true or false' if kind is bool else 'an integer'}")
    if not 1 <= numbers["max_ctas_per_row"] <= _MOST_CTAS:
        raise refuse(f"max_ctas_per_row is {numbers['max_ctas_per_row']}; it must be from 1 to {_MOST_CTAS}")
    dtypes = {array: _BY_NAME[given[array]] if given.get(array) else None for array in names}
    known = [argument.name for argument in operators()[name].arguments if argument.role == "flag"]
    flagged = fields.get("flags", [])
    if not isinstance(flagged, list) or not all(flag in known for flag in flagged):
        raise refuse(f"flags is {flagged!r}; it must be some of: {', '.join(known) or 'none'}")
    try:
        columns = columns_of(name, numbers["columns"])
        request = Request(name, dtypes, columns, flags["per_head"], flags["margin"], frozenset(flagged))
        check_request(request)
    except ArgumentError as error:
        raise refuse(str(error)) from None
    return Asked(request, numbers["max_ctas_per_row"])


def _parse_kernel(fields: dict[str, Any], refuse: Callable[[str], ArgumentError]) -> TextSpec:
    name, text, pairs, options = (fields[field] for field in ("kernel", "text", "fields", "options"))
    if not isinstance(options, list):
        raise refuse(f"options is {options!r}; it must be strings")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs
    ):
        raise refuse(f"fields is {pairs!r}; it must be pairs of a name and a type")
    try:
        return TextSpec(text, name, tuple(Field(*pair) for pair in pairs), tuple(options))
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


class _Recorder:
    """Keeps each entry once, and adds its line to a file as soon as it is seen: a run may be killed."""

    def __init__(self, path: str | None) -> None:
        self.entries: list[ManifestEntry] = []
        self._seen: set[str] = set()
        self._path = path
        self._in_file: set[str] | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Find out what is in the file already, and whether it can be written."""
        self._in_file = set()
        if self._path is not None:
            with open(self._path, "a+", encoding="utf-8") as file:
                file.seek(0)
                text = file.read()
                if text and not text.endswith("\n"):  # its writer was killed
                    file.write("\n")
            self._in_file.update(text.split("\n"))

    def add(self, what: object) -> None:
        assert isinstance(what, ManifestEntry)
        text = line(what)
        with self._lock:
            if text in self._seen:
                return
            self._seen.add(text)
            self.entries.append(what)
            try:
                if self._in_file is None:
                    self.open()
                self._write(text)
            except (OSError, UnicodeDecodeError) as error:
                self._path = None
                warnings.warn(f"transformer_rtc cannot write its manifest: {error}", RuntimeWarning, stacklevel=2)

    def _write(self, text: str) -> None:
        if self._path is not None and self._in_file is not None and text not in self._in_file:
            # One write at the end of the file: other processes write there too.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, f"{text}\n".encode())
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def record(path: str | os.PathLike[str] | None = None) -> Iterator[list[ManifestEntry]]:
    """Write the manifest of what operators are asked for, and of callers' own kernels, for `warmup`.

    That is all that this process has used until the block ends, also before it began (of that, the last 4096 that were
    needed): a warm-up of too much costs little. Calls on the CPU, in the simulator, count like those on a GPU.
    ``TRANSFORMER_RTC_RECORD=path`` records a whole process.

    Parameters
    ----------
    path : str or path, optional
        A file; lines are added to it, by several processes if need be. None: only what is yielded.

    Yields
    ------
    list of ManifestEntry
        What was asked for, up to now; `warmup` takes it as its manifest.

    Raises
    ------
    ArgumentError
        If the file cannot be written.
    """
    recorder = _Recorder(None if path is None else path_of(path, "path"))
    try:
        recorder.open()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"path is {path!r}, which cannot be written: {error}") from error
    usage.observers.append(recorder.add)
    try:
        # A plan, and a kernel, is made once in a process: what was asked for before is asked for no more.
        for what in tuple(usage.asked):
            recorder.add(what)
        yield recorder.entries
    finally:
        usage.observers.remove(recorder.add)


if settings.record:
    usage.observers.append(_Recorder(settings.record).add)
