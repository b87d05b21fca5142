# SPDX-License-Identifier: Apache-2.0
"""Keeps what operators are asked for while a program runs, and writes it as a manifest."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator

from . import usage
from .checks import path_of
from .errors import ArgumentError
from .manifest import ManifestEntry, line
from .operator import forget_plans
from .settings import settings

__all__ = ["record"]


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

    The manifest has all calls until the block ends, of all threads, even if a call is not the first of its kind. Calls
    in the simulator count like those on a GPU. ``TRANSFORMER_RTC_RECORD=path`` records a whole process.

    Parameters
    ----------
    path : str or path, optional
        A file to which lines are added. Several processes may add to one file. None: only the list is yielded.

    Yields
    ------
    list of ManifestEntry
        The entries of all calls up to now. `warmup` takes the list as its manifest.

    Raises
    ------
    ArgumentError
        If the file cannot be written.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import record, rms_norm, warmup
    >>> with record() as entries:
    ...     for rows in (1, 2, 3):
    ...         y = rms_norm(np.ones((rows, 8), np.float32))
    >>> len(entries)  # one kernel serves any number of rows
    1
    >>> [made.error for made in warmup(manifest=entries, architectures="sm_90", unaligned=False)]
    ['']
    """
    recorder = _Recorder(None if path is None else path_of(path, "path"))
    try:
        recorder.open()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"path is {path!r}, which cannot be written: {error}") from error
    usage.observers.append(recorder.add)
    try:
        forget_plans()  # else what was called before would not be told of again
        yield recorder.entries
    finally:
        usage.observers.remove(recorder.add)


if settings.record:
    usage.observers.append(_Recorder(settings.record).add)
