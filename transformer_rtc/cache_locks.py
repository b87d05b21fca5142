# SPDX-License-Identifier: Apache-2.0
"""Locks of the cache's files. The kernel frees a lock when its owner dies, however it does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

__all__ = ["close", "held", "open_held", "write_file"]

# Descriptors of files that are locked. A lock lasts until its last descriptor is closed: a forked child must not keep
# its parent's.
held: set[int] = set()


def open_held(path: str, flags: int) -> int:
    """Make or open a file that a forked child closes, and return its descriptor, which `close` takes."""
    # Never writable by others, whatever the umask; readable as far as it lets.
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
    held.add(descriptor)
    return descriptor


def close(descriptor: int) -> None:
    """Close a descriptor of `held`, once."""
    if descriptor in held:
        held.discard(descriptor)
        os.close(descriptor)


def _close_in_child() -> None:
    while held:
        os.close(held.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _lock_own(descriptor: int) -> None:
    """Lock a file that nobody else writes, but others may look at for a moment."""
    with contextlib.suppress(OSError):
        for _ in range(5):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)


def write_file(path: str, data: bytes) -> None:
    """Write a file beside its final name and rename it, so that a reader sees all of it or nothing.

    Until then the file is locked, which tells others that its writer lives.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    try:
        descriptor = open_held(beside, os.O_WRONLY | os.O_EXCL)
        opened = [descriptor]  # a number that was closed may be another thread's already
        try:
            lock = os.dup(descriptor)
            held.add(lock)
            opened.append(lock)
            _lock_own(lock)
            # Closed before it has its name, which other hosts of an NFS rely on.
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            close(opened.pop(0))
            os.replace(beside, path)
        finally:
            for descriptor in opened:
                close(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
