# SPDX-License-Identifier: Apache-2.0
"""Values that are made once, however many threads ask, and a thread that makes one beside its caller."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

from .errors import TransformerRtcError

__all__ = ["Beside", "Once"]

_T = TypeVar("_T")


class _Made:
    """A value, or the error of making it, once it is there."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.maker = threading.get_ident()
        self.value: Any = None
        self.error: BaseException | None = None


class Once:
    """Makes each value once, however many threads ask; others are not blocked meanwhile. A failure is not kept.

    Beyond so many values, the one that was not asked for for longest is forgotten.
    """

    all: ClassVar[weakref.WeakSet[Once]] = weakref.WeakSet()

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[Hashable, _Made] = {}  # what was asked for last comes last
        self.after_fork()
        Once.all.add(self)

    def after_fork(self) -> None:
        """Forget, in a child, what the parent's other threads were at: they do not go on here."""
        self._lock = threading.Lock()
        mine = threading.get_ident()
        self._made = {key: made for key, made in self._made.items() if made.there.is_set() or made.maker == mine}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        while True:
            forgotten = None
            with self._lock:
                made = self._made.pop(key, None)
                mine = made is None
                if made is None:
                    made = _Made()
                    if len(self._made) >= self._most:
                        oldest = next((other for other, at in self._made.items() if at.there.is_set()), key)
                        forgotten = self._made.pop(oldest, None)
                self._made[key] = made
            del forgotten  # not under the lock: its end may let other threads run
            if mine:
                try:
                    made.value = make()
                except BaseException as error:
                    made.error = error
                    with self._lock:
                        self._made.pop(key, None)
                    raise
                finally:
                    made.there.set()
            if made.maker == threading.get_ident() and not made.there.is_set():
                raise TransformerRtcError("a callback asked for the kernel whose compile or load it is being told of")
            made.there.wait()
            if made.error is None:
                value: _T = made.value
                return value
            # Whoever waited gets the failure too, but not another thread's interrupt.
            if isinstance(made.error, Exception):
                raise made.error

    def forget(self, key: Hashable) -> None:
        """Have the next one who asks make a value anew."""
        with self._lock:
            self._made.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            made = self._made.get(key)
        return made is not None and made.there.is_set() and made.error is None


def _after_fork() -> None:
    for once in tuple(Once.all):
        once.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Beside:
    """A thread that does one thing, such as to compile one of a call's kernels, while its caller does another.

    Parameters
    ----------
    work : callable
        What it does.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="transformer_rtc")
        # There can be no more threads, as when the interpreter ends: the caller does that, too.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    def end(self) -> None:
        """Wait for it, and raise what it was refused for."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
