# SPDX-License-Identifier: Apache-2.0
"""What stands for a compiler, a GPU, other threads and other processes in tests of what lies around them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from transformer_rtc import device
from transformer_rtc.cache import digest
from transformer_rtc.compiler import Compiled
from transformer_rtc.device import Gpu
from transformer_rtc.errors import DriverError
from transformer_rtc.spec import ARCHITECTURES

WAIT = 60  # seconds after which a test that hangs fails
KEYS = [digest({"n": number}) for number in range(4)]
CUBIN = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + b"code of a GPU"
HOST = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little") + b"code of a CPU"


class Compiler:
    """Counts compiles, and does what a test has it do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[str, ...]]] = []
        self.really = "nvrtc 1"
        self.during: Callable[[str], object] = lambda symbol: None

    @property
    def symbols(self) -> list[str]:
        return [symbol for symbol, _, _ in self.calls]

    def __call__(self, symbol, program, headers, options, architecture):
        self.calls.append((symbol, architecture, options))
        self.during(symbol)
        return Compiled(b"\x7fELF " + symbol.encode(), "cubin", "log", self.really)


class CubinCompiler(Compiler):
    """Makes cubins that say which compiler has made them."""

    def __call__(self, symbol, *others):
        return super().__call__(symbol, *others)._replace(image=CUBIN + symbol.encode() + self.really.encode())


class FakeKernel:
    """Stands for a loaded kernel."""

    loaded: ClassVar[list[tuple[str, int, bytes]]] = []

    def __init__(self, symbol, params, device, image) -> None:
        self.symbol, self.params, self.device, self.image = symbol, params, device, image
        FakeKernel.loaded.append((symbol, device, image))


def without_gpu(monkeypatch) -> None:
    """Have managers load kernels that do nothing: device 7 is an sm_100, the others are sm_90."""
    FakeKernel.loaded.clear()
    monkeypatch.setattr(Gpu, "load", lambda gpu, symbol, params, image: FakeKernel(symbol, params, gpu.given, image))
    monkeypatch.setattr(device, "device_limits", lambda ordinal: ARCHITECTURES[100 if ordinal == 7 else 90])


def refusing(monkeypatch, refused: bytes, what: str) -> None:
    """Have a driver refuse images that contain some bytes."""

    def load(gpu, symbol, params, image):
        if refused in image:
            raise DriverError(what)
        return FakeKernel(symbol, params, gpu.given, image)

    monkeypatch.setattr(Gpu, "load", load)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run work(i) in threads that start together; return results, or what they raised."""
    results, start = [None] * count, threading.Barrier(count)

    def run(i):
        start.wait(WAIT)
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "a thread hangs"
    return results


def _fork(work: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, such as xdist's
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(2 * WAIT)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def in_processes(count: int, work: Callable[[int], object]) -> list[int]:
    """Run work(i) in forked processes, which need no time to start; return how they ended."""
    children = [_fork(lambda i=i: work(i)) for i in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@contextlib.contextmanager
def until_killed(work: Callable[[Callable[[], None]], object]) -> Iterator[Callable[[], int]]:
    """Run work(pause) in a forked process until it calls pause(), and yield what kills it and returns its number."""
    reading, writing = os.pipe()

    def pause():
        os.write(writing, b"x")
        time.sleep(2 * WAIT)

    child, killed = _fork(lambda: work(pause)), []

    def kill() -> int:
        if not killed:
            os.kill(child, signal.SIGKILL)
            killed.append(os.waitpid(child, 0))
        return child

    try:
        os.close(writing)
        assert os.read(reading, 1) == b"x", "the process ended"
        yield kill
    finally:
        kill()
        os.close(reading)
