# SPDX-License-Identifier: Apache-2.0
"""key -> bytes on disk, shared by many processes. Knows no CUDA.

A file is written beside its final name and renamed, so that a reader sees all of it or nothing, and it is checked
whenever it is read: what is damaged, cut short or another key's is a miss, and the next write replaces it. Readers take
no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
import warnings
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .cache_entry import ENTRY_NAME, TEMPORARY_NAME, Entry, encode_entry, name_of, parse_entry, sha256
from .cache_folder import Folder, make_folders, own_path
from .cache_locks import close, held, open_held, write_file

if TYPE_CHECKING:
    from .companion import Companion

__all__ = ["DiskCache", "digest"]

# Lock files are never deleted, or two processes could hold "the" lock; so they are few: one for these digits of a key.
_LOCK_DIGITS = 3
_LOCK_SECONDS = 30.0  # longer than a compile takes on a host with more processes than cores
_TOUCH_SECONDS = 60.0  # how rarely a hit is noted, for what is evicted first
# What a writer leaves that was killed is told by its lock; by its age where there are none, or nobody looks at them.
_WRITING_SECONDS = 0.5  # far longer than a writer has its file before its lock
_ABANDONED_SECONDS = 3600.0


def digest(parts: Mapping[str, object]) -> str:
    """Return the key of everything that an entry depends on: SHA-256 of its JSON, in hexadecimal."""
    return sha256(json.dumps(parts, sort_keys=True).encode())


class DiskCache:
    """Entries in one folder, which is made when the first one is written; and those of a second one, only read.

    Parameters
    ----------
    folder : str or None
        None keeps nothing. In a sticky one that others may write to, a folder of the user's own is used.
    read_only_folder : str or None
        Where else an entry is looked for.
    max_bytes : int
        Of all entries together, about; what was not used for longest is deleted first. 0: without limit.
    lock_seconds : float
        For how long `claim` waits for another process.
    uses_companion : bool
        Whether the companion wheel is asked for what the folders have not.
    """

    def __init__(
        self,
        folder: str | None,
        read_only_folder: str | None = None,
        max_bytes: int = 0,
        lock_seconds: float = _LOCK_SECONDS,
        uses_companion: bool = False,
    ) -> None:
        self.folder = own_path(folder) if folder is not None else None
        self.max_bytes = max_bytes
        self._lock_seconds = lock_seconds
        self._uses_companion = uses_companion
        self._companion: Companion | None = None
        self._own = None if self.folder is None else Folder(self.folder, private=self.folder != folder)
        self.read_only = None if read_only_folder is None else Folder(read_only_folder, read_only=True)
        self._folders = [folder for folder in (self._own, self.read_only) if folder]
        self._writable = folder is not None
        self._bytes_until_prune = 0

    @property
    def companion(self) -> Companion | None:
        """The companion wheel; None: it is not asked. Imported for the first miss, which most processes have not."""
        # Made without a lock, which a fork could find held: twice does no harm.
        if self._uses_companion and self._companion is None:
            from .companion import Companion

            self._companion = Companion()
        return self._companion if self._uses_companion else None

    @companion.setter
    def companion(self, companion: Companion | None) -> None:
        self._companion, self._uses_companion = companion, companion is not None

    @property
    def writable(self) -> bool:
        """Whether there is a folder, and no write to it has failed yet."""
        return self._writable

    def path(self, stem: str, key: str) -> str:
        """Return where an entry lies: its stem, for people, and the start of its key."""
        return os.path.join(self.folder or "", name_of(stem, key))

    def get(self, stem: str, key: str) -> bytes | None:
        """Return an entry's bytes, or None."""
        name = name_of(stem, key)
        for folder in self._folders:
            read = folder.read(name)
            found = parse_entry(read[0]) if read else None
            if read and found and found[0]["key"] == key:
                self._note(folder, name, read[1])
                return found[1]
        return None

    def _note(self, folder: Folder, name: str, status: os.stat_result) -> None:
        """Note a hit, so that it is not deleted as unused."""
        if folder is self._own and time.time() - status.st_mtime > _TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(os.path.join(folder.path, name))

    def get_any(
        self, stem: str, source: str, own: bool = True, others: bool = True, without: Container[str] = ()
    ) -> bytes | None:
        """Return the bytes of an entry of the same source, whatever compiled it; None where there is none.

        Parameters
        ----------
        stem : str
            As for `get`.
        source : str
            What was given to `put` as ``about["source"]``: a key without the compiler.
        own, others : bool
            Whether the folder that is written is looked at, and the other one.
        without : container of str
            SHA-256 of what is not returned.
        """
        for folder in self._folders:
            candidates = []
            for name, status, about, payload in self._of_stem(folder, stem):
                if not (own if folder is self._own else others):
                    break
                if about.get("source") == source and (not without or sha256(payload) not in without):
                    # A cubin before PTX; and an older compiler's code is what more drivers take.
                    order = about.get("kind") == "ptx", _natural(str(about.get("compiler")))
                    candidates.append((order, name, status, payload))
            if candidates:
                _, name, status, payload = min(candidates)
                self._note(folder, name, status)
                return payload
        return None

    def abouts(self, stem: str) -> list[dict[str, Any]]:
        """Return what the entries of a stem say of themselves, whatever their keys are."""
        return [about for folder in self._folders for _, _, about, _ in self._of_stem(folder, stem)]

    def _of_stem(self, folder: Folder, stem: str) -> Iterator[tuple[str, os.stat_result, dict[str, Any], bytes]]:
        for name in folder.find(stem):
            read = folder.read(name)
            found = parse_entry(read[0]) if read else None
            if read and found and found[0]["stem"] == stem and found[0]["key"].startswith(name[-24:]):
                yield name, read[1], *found

    @contextlib.contextmanager
    def claim(self, stem: str, key: str) -> Iterator[bytes | None]:
        """Let one process at a time make an entry; what another one has meanwhile made is yielded, else None.

        The lock is the kernel's, which frees it when its owner dies, however it does. Who has waited for too long goes
        on without it, as everybody does where there is none: in a read-only folder, or a file system without locks.
        """
        descriptor = self._open_lock(key)
        if descriptor is None:
            yield None
            return
        try:
            yield self._wait(descriptor, stem, key)
        finally:
            if descriptor in held:
                with contextlib.suppress(OSError):
                    # A byte in the lock's file, which takes no room, tells others that they would wait for nothing.
                    if (os.fstat(descriptor).st_size > 0) == self._writable:
                        os.ftruncate(descriptor, 0 if self._writable else 1)
                close(descriptor)

    def _open_lock(self, key: str) -> int | None:
        if not self._writable or self._own is None:
            return None
        folder = os.path.join(self._own.path, "locks")
        try:
            make_folders(self._own.path)
            if not self._own.trusted():
                return None
            make_folders(folder)
            return open_held(os.path.join(folder, key[:_LOCK_DIGITS]), os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None

    def _wait(self, descriptor: int, stem: str, key: str) -> bytes | None:
        deadline, pause = time.monotonic() + self._lock_seconds, 0.002
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self.get(stem, key)
            except BlockingIOError:
                found = self.get(stem, key)
            except OSError:
                return None
            if found is not None or time.monotonic() >= deadline or os.fstat(descriptor).st_size > 0:
                return found
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def put(self, stem: str, key: str, payload: bytes, about: Mapping[str, object]) -> None:
        """Write an entry. A folder that cannot be made or written costs one warning, and no more is written.

        Parameters
        ----------
        stem, key : str
            As for `get`.
        payload : bytes
            The entry.
        about : mapping
            What a person may want to know of it, and ``"source"`` and ``"compiler"`` for `get_any`.
        """
        if not self._writable or self._own is None:
            return
        data = encode_entry({**about, "stem": stem, "key": key, "bytes": len(payload)}, payload)
        try:
            make_folders(self._own.path)
            if not self._own.trusted():
                self._writable = False
                return
            self._write(name_of(stem, key), data)
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"transformer_rtc cannot write its kernel cache, and compiles again in each process: {error}. Set "
                f"TRANSFORMER_RTC_CACHE_DIR to a folder that can be written, or to nothing to do without",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._bytes_until_prune -= len(data)
        if self._bytes_until_prune < 0:
            # The whole folder is looked at once in a process, and again when it may have grown by a part of its size.
            self._bytes_until_prune = self.max_bytes // 64 if self.max_bytes else 1 << 62
            self.prune()

    def _write(self, name: str, data: bytes) -> None:
        path = os.path.join(self.folder or "", name)
        try:
            write_file(path, data)
        except FileNotFoundError:  # another host, which sees no lock of ours, took us for dead
            write_file(path, data)

    def add(self, data: bytes) -> tuple[str, bool]:
        """Put an entry's file as another cache has it; return its name, and whether it was not there.

        Raises
        ------
        ValueError
            If it is no entry, or a damaged one.
        OSError
            If it cannot be written.
        """
        parsed = parse_entry(data)
        if parsed is None:
            raise ValueError("this is no entry of a cache")
        stem, key = parsed[0]["stem"], parsed[0]["key"]
        name = name_of(stem, key)
        reason = self.refusal()
        if self._own is None or reason:
            raise PermissionError(errno.EACCES, reason or "there is no folder", self.folder or "")
        if self.get(stem, key) is not None:
            return name, False
        make_folders(self._own.path)
        self._write(name, data)
        return name, True

    def refusal(self) -> str | None:
        """Return why the folder is not used, as others could have put there what would run; None: they could not."""
        try:
            return self._own.refusal() if self._own else None
        except OSError:
            return None

    def names(self) -> list[str]:
        """Return the names of the entries' files."""
        return sorted(name for _, _, name in self._files(ENTRY_NAME))

    def read(self, name: str) -> bytes | None:
        """Return an entry's file; None where there is none, it is damaged, or it lies under another's name."""
        return self._own.read_entry(name) if self._own else None

    def _files(self, pattern: str) -> list[tuple[float, int, str]]:
        return self._own.files(pattern) if self._own else []

    def size(self) -> tuple[int, int]:
        """Return how many entries there are in the folder, and their bytes."""
        return self._own.size() if self._own else (0, 0)

    def entries(self) -> list[Entry]:
        """Return every entry of the folder by its name, checked."""
        return self._own.entries() if self._own else []

    def remove(self, name: str) -> bool:
        """Delete an entry's file. Whoever reads it reads on. Returns whether it could be deleted."""
        if self.folder is None or not (re.fullmatch(ENTRY_NAME, name) or re.fullmatch(TEMPORARY_NAME, name)):
            return False
        try:
            os.unlink(os.path.join(self.folder, name))
        except OSError:
            return False
        return True

    def abandoned(self) -> list[str]:
        """Return what killed writers left half written. Takes half a second where it seems that there is something."""

        def found() -> set[str]:
            return {name for used, _, name in self._files(TEMPORARY_NAME) if self._has_no_writer(name, used)}

        seen = found()
        if seen:
            time.sleep(_WRITING_SECONDS)
            seen &= found()
        return sorted(seen)

    def _has_no_writer(self, name: str, used: float) -> bool:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(os.path.join(self.folder or "", name), flags)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # there are no locks
            return time.time() - used > _ABANDONED_SECONDS
        finally:
            os.close(descriptor)
        return True

    def prune(self, max_bytes: int | None = None, unused_seconds: float | None = None) -> list[str]:
        """Delete what killed writers left an hour ago, and the entries not used for longest; return the deleted names.

        Parameters
        ----------
        max_bytes : int, optional
            Of what stays; by default the cache's own limit, and an eighth less where it is exceeded. 0: without limit.
        unused_seconds : float, optional
            Entries that were not used for so long are deleted too.
        """
        now = time.time()
        doomed = [name for used, _, name in self._files(TEMPORARY_NAME) if now - used > _ABANDONED_SECONDS]
        entries = self._files(ENTRY_NAME)
        if unused_seconds is not None:
            doomed += [name for used, _, name in entries if now - used > unused_seconds]
            entries = [entry for entry in entries if now - entry[0] <= unused_seconds]
        total = sum(size for _, size, _ in entries)
        limit = self.max_bytes if max_bytes is None else max_bytes
        if limit and total > limit:
            target = limit if max_bytes is not None else limit - limit // 8
            # The newest stays: it has just been written.
            for _, size, name in entries[: None if max_bytes is not None else -1]:
                if total <= target:
                    break
                doomed.append(name)
                total -= size
        return [name for name in doomed if self.remove(name)]

    def clear(self) -> list[str]:
        """Delete every entry, and what killed writers left; return the deleted names. Other files stay."""
        names = [name for pattern in (ENTRY_NAME, TEMPORARY_NAME) for _, _, name in self._files(pattern)]
        return [name for name in names if self.remove(name)]


def _natural(text: str) -> list[tuple[int, str]]:
    """Return what orders version 9 before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]
