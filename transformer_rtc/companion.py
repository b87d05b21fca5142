# SPDX-License-Identifier: Apache-2.0
"""Kernels that the companion wheel, transformer-rtc-kernels, has compiled: found where it is installed.

For each target it has a pack of cache entries, such as ``sm_90.pack``, and an index that says where in it an entry of
a source lies. Neither is trusted to be whole: what is read is an entry with a digest, of the source that was asked for,
or a miss. It is code that its user has installed, as the modules are that Python imports beside it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from .cache_entry import parse_entry

if TYPE_CHECKING:
    from mmap import mmap

__all__ = ["INDEX", "MANIFEST", "PACK", "PACKAGE", "Companion", "index_record", "installed"]

PACKAGE = "transformer_rtc_kernels"
MANIFEST = "kernels.jsonl"  # what was asked for of its kernels
PACK, INDEX = "{}.pack", "{}.index"  # of a target
# A record of the index: the start of a source's digest, then the entry's place in the pack.
_DIGITS = 32
_PLACE = struct.Struct("<QI")


def index_record(source: str, start: int, size: int) -> bytes:
    """Return what the index says of an entry: where in the pack it starts, and its bytes."""
    return bytes.fromhex(source[:_DIGITS]) + _PLACE.pack(start, size)


def installed() -> str | None:
    """Return the folder of the companion wheel; None where it is not installed. Nothing of it is imported."""
    from importlib.util import find_spec  # not at import

    found = find_spec(PACKAGE)
    folders = found and found.submodule_search_locations
    return next(iter(folders), None) if folders else None


class Companion:
    """What a companion wheel has.

    Parameters
    ----------
    find : callable
        Returns its folder, or None. Called when something is first asked for, which most processes never do.
    """

    def __init__(self, find: Callable[[], str | None] = installed) -> None:
        self._find = find
        self._found: tuple[str | None, ...] = ()  # of one
        self._packs: dict[str, tuple[bytes, mmap | bytes]] = {}

    @property
    def folder(self) -> str | None:
        """Where it is; None where it is not installed."""
        # Found without a lock, which a fork could find held: twice does no harm.
        if not self._found:
            self._found = (self._find(),)
        return self._found[0]

    def count(self, target: str) -> int:
        """Return how many entries there are for a target."""
        return len(self._pack(target)[0]) // (_DIGITS // 2 + _PLACE.size)

    def get(self, target: str, source: str, compiler: str | None = None) -> bytes | None:
        """Return the machine code of a source; None where there is none, or it is damaged.

        Parameters
        ----------
        target : str
            Such as ``"sm_90"``.
        source : str
            A key without the compiler, as `DiskCache.get_any` takes it.
        compiler : str, optional
            What must have compiled it.
        """
        index, pack = self._pack(target)
        at = index.find(bytes.fromhex(source[:_DIGITS]))
        place = index[at + _DIGITS // 2 :][: _PLACE.size] if at >= 0 else b""
        if len(place) < _PLACE.size:
            return None
        start, size = _PLACE.unpack(place)
        found = parse_entry(pack[start : start + size])
        if found is None or found[0].get("source") != source:
            return None
        return found[1] if compiler in (None, found[0].get("compiler")) else None

    def _pack(self, target: str) -> tuple[bytes, mmap | bytes]:
        """Return a target's index and its pack."""
        found = self._packs.get(target)
        if found is None:
            # They stay open: what they said when they were opened fits together, whatever is installed meanwhile.
            found = self._packs[target] = self._map(INDEX.format(target))[:], self._map(PACK.format(target))
        return found

    def _map(self, name: str) -> mmap | bytes:
        """Return a file's content; nothing where it cannot be read."""
        if self.folder is None:
            return b""
        from mmap import ACCESS_READ, mmap  # not at import

        try:
            with open(os.path.join(self.folder, name), "rb") as file:
                return mmap(file.fileno(), 0, access=ACCESS_READ)
        except (OSError, ValueError):  # a file of no bytes cannot be mapped
            return b""
