"""A folder of the cache: who may write to it, and reading from one that is trusted.

What is read there runs as the caller's code. So a folder or a file that other users may write to is not read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import warnings

from .cache_entry import name_start

__all__ = ["Folder", "distrust", "make_folders"]


def distrust(status: os.stat_result) -> str | None:
    """Return why others could have put what is there, which would run as the caller; None: they could not."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w mends it)"
    return None


def make_folders(path: str) -> None:
    """Make a folder, and those above it, in which nobody else may write."""
    # os.makedirs gives its mode to the last one only: under umask 0, others could write to those above.
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        if above and above != path:
            make_folders(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


class Folder:
    """A folder whose entries are read, if nobody else could have put them there.

    Parameters
    ----------
    path : str
        Where it is.
    expected : bool
        Whether it is a mistake that there is none, which is told once.
    """

    def __init__(self, path: str, expected: bool = False) -> None:
        self.path = path
        self._expected = expected
        self._trusted: bool | None = None

    def trusted(self) -> bool:
        """Whether it is there, and none but the caller and root may write to it; a refusal is told once."""
        if self._trusted is None:
            try:
                reason = distrust(os.stat(self.path))
            except OSError as error:
                if self._expected:
                    self._expected = False
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
                    f"user's code: {reason}",
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
