# SPDX-License-Identifier: Apache-2.0
"""Entries of a cache as one file, to carry them to another machine.

A pack is a line that says what it is; for each entry a line with its length, and the entry as it lies in the folder;
and a line that ends it. It holds no names: an entry is filed under what its own checked header says, so that nothing
can escape the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import BinaryIO

from .cache import DiskCache
from .cache_entry import parse_entry
from .checks import check_type, path_of
from .companion import index_record
from .errors import PackError

__all__ = ["index", "pack", "unpack"]

_FORMAT = b"transformer_rtc pack 1\n"
_END = b"end\n"
_LENGTH = re.compile(rb"[1-9][0-9]{0,11}\n")
_ELF, _ELF_MACHINE_CUDA = b"\x7fELF", 190


def _is_device_code(payload: bytes) -> bool:
    """Whether it is a cubin or PTX: the simulator's modules are code of the host, and fit no other machine."""
    return not payload.startswith(_ELF) or int.from_bytes(payload[18:20], "little") == _ELF_MACHINE_CUDA


def pack(cache: DiskCache, path: str) -> tuple[list[str], dict[str, str]]:
    """Write every entry of a cache into one file.

    Parameters
    ----------
    cache : DiskCache
        Its own folder is meant.
    path : str
        The file; one of that name is replaced.

    Returns
    -------
    packed : list of str
        The names of the entries.
    left_out : dict of str to str
        Why others are not packed, by their names: they are damaged, or modules of the simulator, which fit no other
        machine.

    Raises
    ------
    PackError
        If the file cannot be written.
    ArgumentError
        If `cache` or `path` is none.
    """
    check_type(cache, DiskCache, "cache")
    path = path_of(path, "path")
    packed: list[str] = []
    left_out: dict[str, str] = {}
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    try:
        with open(beside, "xb") as file:
            file.write(_FORMAT)
            for name in cache.names():
                data = cache.read(name)
                found = parse_entry(data) if data else None
                if data and found and _is_device_code(found[1]):
                    file.write(b"%d\n%b" % (len(data), data))
                    packed.append(name)
                else:
                    left_out[name] = "a module of the simulator" if found else "damaged"
            file.write(_END)
        os.replace(beside, path)
    except OSError as error:
        raise PackError(f"the pack {path} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)
    return packed, left_out


def _entries(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield a pack's entries, checked."""

    def refuse(number: int, what: str) -> PackError:
        return PackError(f"the pack {path} is damaged at entry {number}, and nothing of it is used: {what}")

    if file.readline(len(_FORMAT)) != _FORMAT:
        raise PackError(f"{path} is no pack of transformer_rtc")
    size = os.fstat(file.fileno()).st_size
    number = 0
    while (length := file.readline(16)) != _END:
        number += 1
        if not _LENGTH.fullmatch(length) or int(length) > size - file.tell():
            raise refuse(number, "it is cut short, or its length is none")
        data = file.read(int(length))
        found = parse_entry(data)
        if found is None:
            raise refuse(number, "its digest is another")
        if not _is_device_code(found[1]):
            raise refuse(number, "it is no code for a GPU")
        yield data
    if file.read(1):
        raise refuse(number, "something follows its end")


def unpack(cache: DiskCache, path: str) -> tuple[list[str], list[str]]:
    """Put a pack's entries into a cache; all of them, or none if any is damaged.

    Digests tell damage, not who made it: take packs only from those whose code you would run.

    Parameters
    ----------
    cache : DiskCache
        Where to put them.
    path : str
        The file.

    Returns
    -------
    added, kept : list of str
        The names of the entries; kept are those that were there already.

    Raises
    ------
    PackError
        If the file is no pack or damaged, or the cache cannot be written.
    ArgumentError
        If `cache` or `path` is none.
    """
    check_type(cache, DiskCache, "cache")
    path = path_of(path, "path")
    added: list[str] = []
    kept: list[str] = []
    try:
        with open(path, "rb") as file:
            for _ in _entries(file, path):
                pass
            file.seek(0)
            for data in _entries(file, path):
                name, is_new = cache.add(data)
                (added if is_new else kept).append(name)
    except OSError as error:
        raise PackError(f"the pack {path} cannot be unpacked: {error}") from error
    cache.prune()
    return added, kept


def index(path: str) -> bytes:
    """Return the index of a pack of kernels, by which the companion wheel finds an entry.

    Raises
    ------
    PackError
        If the file is no pack, or damaged, or cannot be read.
    """
    found = []
    try:
        with open(path, "rb") as file:
            for data in _entries(file, path):
                parsed = parse_entry(data)
                assert parsed is not None
                found.append(index_record(parsed[0]["source"], file.tell() - len(data), len(data)))
    except OSError as error:
        raise PackError(f"the pack {path} cannot be read: {error}") from error
    return b"".join(found)
