# SPDX-License-Identifier: Apache-2.0
"""A folder of the cache: who may write to it, and reading from one that is trusted.

What is read there runs as the caller's code. So a folder or a file that other users may write to is not read. Where the
folder is sticky, as /tmp is, nobody can put another one in the place of a folder in it: one of the user's own is used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import warnings

from .cache_entry import ENTRY_NAME, Entry, name_of, name_start, parse_entry

__all__ = ["ADVICE", "Folder", "distrust", "make_folders", "own_path"]

ADVICE = (
    "Where this user may not change that, as in a pod, set TRANSFORMER_RTC_CACHE_DIR to a folder of its own; if all "
    "who may write there are trusted, to a new one in it, made by mkdir -m 700"
)


def distrust(status: os.stat_result) -> str | None:
    """Return why others could have put what is there, which would run as the caller; None: they could not."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w mends it)"
    return None


def own_path(path: str) -> str:
    """Return the folder that is used where one is named: one of the user's own in a sticky one, else itself."""
    try:
        status = os.stat(path)
    except OSError:
        return path
    # Who owns a sticky folder may rename what is in it.
    if _is_shared(status) and status.st_uid in (os.geteuid(), 0):
        return os.path.join(path, f"transformer_rtc-{os.geteuid()}")
    return path


def _is_shared(status: os.stat_result) -> bool:
    """Whether it is a sticky folder that others may write to."""
    return bool(status.st_mode & stat.S_ISVTX and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def make_folders(path: str) -> None:
    """Make a folder, and those above it, in which nobody else may write; in a sticky one, for the user alone."""
    # os.makedirs gives its mode to the last one only: under umask 0, others could write to those above.
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        if above and above != path:
            make_folders(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700 if _is_shared(os.stat(above or ".")) else 0o755)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


class Folder:
    """A folder whose entries are read, if nobody else could have put them there.

    Parameters
    ----------
    path : str
        Where it is.
    read_only : bool
        Whether it is only read: then it is a mistake that there is none, which is told once.
    private : bool
        Whether others may write to the folder that it is in: it is looked at again at each opening, must be no link,
        and nobody else may read it.
    """

    def __init__(self, path: str, read_only: bool = False, private: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        self._told = False
        self._private = private
        self._trusted: bool | None = None

    def refusal(self) -> str | None:
        """Return why it is not used; None: nobody else could have put there what would run.

        Raises
        ------
        OSError
            If it is not there.
        """
        if not self._private:
            return distrust(os.stat(self.path))
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode):
            return "it is no folder"
        if status.st_uid != os.geteuid():
            return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
        if status.st_mode & 0o077:
            return f"it is not this user's alone (mode {stat.S_IMODE(status.st_mode):04o}; chmod 700 mends it)"
        return None

    def trusted(self) -> bool:
        """Whether it is there, and none but the caller and root may write to it; a refusal is told once."""
        if self._trusted is None or (self._private and self._trusted):
            try:
                reason = self.refusal()
            except OSError as error:
                if self._read_only and not self._told:
                    self._told = True
                    warnings.warn(
                        f"transformer_rtc finds no read-only kernel cache: {error}. Set or unset "
                        f"TRANSFORMER_RTC_READ_ONLY_CACHE_DIR",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                return False
            self._trusted = reason is None
            if reason:
                warnings.warn(
                    f"transformer_rtc does not use the kernel cache {self.path}, as what is in it would run as this "
                    f"user's code: {reason}{'' if self._read_only else f'. {ADVICE}'}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return self._trusted

    def read(self, name: str) -> tuple[bytes, os.stat_result] | None:
        """Return a file's bytes; None where there is none, or others may write to it."""
        if not self.trusted():
            return None
        try:
            # A pipe of that name would else be waited for.
            descriptor = os.open(os.path.join(self.path, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or distrust(status):
                    return None
                # A regular file is read at once; were it cut short, its digest would tell.
                return os.read(descriptor, status.st_size), status
            finally:
                os.close(descriptor)
        except OSError:
            return None

    def find(self, stem: str) -> list[str]:
        """Return the names of a stem's entries."""
        if not self.trusted():
            return []
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        start = name_start(stem)
        return [name for name in names if name.startswith(start) and len(name) == len(start) + 24]

    def read_entry(self, name: str) -> bytes | None:
        """Return an entry's file; None where there is none, it is damaged, or it lies under another's name."""
        read = self.read(name)
        parsed = parse_entry(read[0]) if read else None
        return read[0] if read and parsed and name_of(parsed[0]["stem"], parsed[0]["key"]) == name else None

    def files(self, pattern: str) -> list[tuple[float, int, str]]:
        """Return when each file was last used, its bytes and its name; the oldest first."""
        found = []
        try:
            with os.scandir(self.path) as files:
                for file in files:
                    if re.fullmatch(pattern, file.name):
                        with contextlib.suppress(OSError):  # deleted meanwhile
                            if file.is_file(follow_symlinks=False):
                                status = file.stat(follow_symlinks=False)
                                found.append((status.st_mtime, status.st_size, file.name))
        except OSError:
            return []
        return sorted(found)

    def size(self) -> tuple[int, int]:
        """Return how many entries there are, and their bytes."""
        sizes = [size for _, size, _ in self.files(ENTRY_NAME)]
        return len(sizes), sum(sizes)

    def entries(self) -> list[Entry]:
        """Return every entry by its name, checked."""
        found = []
        for used, size, name in self.files(ENTRY_NAME):
            data = self.read_entry(name)
            parsed = parse_entry(data) if data else None
            found.append(Entry(name, size, used, parsed[0] if parsed else None))
        return sorted(found, key=lambda entry: entry.name)
