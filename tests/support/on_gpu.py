# SPDX-License-Identifier: Apache-2.0
"""Texts, memory and threads that tests on a GPU share."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from transformer_rtc import Field, LaunchConfig, _native

FIELDS = (Field("out", "pointer"), Field("value", "float32"), Field("count", "int32"))
# Every CTA waits for all others: without co-residency it never ends, so it gives up in the end.
MEET = """
extern "C" __global__ void meet(Params params) {
  unsigned* arrived = static_cast<unsigned*>(params.out);
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    const long long start = clock64();
    while (*static_cast<volatile unsigned*>(arrived) < gridDim.x && clock64() - start < 4000000000ll) {}
    if (*static_cast<volatile unsigned*>(arrived) == gridDim.x) atomicAdd(arrived + 1, 1u);
  }
}
"""
CLUSTER = """
extern "C" __global__ void ranks(Params params) {
  unsigned rank, size;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  static_cast<unsigned*>(params.out)[blockIdx.x] = size * 100 + rank;
}
"""


class Memory:
    """Device memory of our own, filled with ones in every bit."""

    def __init__(self, count: int, value: int = -1) -> None:
        self.host = np.full(count, value, np.int32)
        self.buffer = _native.Buffer(0, self.host.nbytes)
        self.buffer.copy_from_host(0, self.host.ctypes.data, self.host.nbytes, 0)
        self.pointer = self.buffer.pointer

    def read(self, dtype=np.int32) -> np.ndarray:
        self.buffer.copy_to_host(0, self.host.ctypes.data, self.host.nbytes, 0)
        _native.synchronize_stream(0, 0)
        return self.host.view(dtype)


def resident(kernel, threads: int) -> int:
    return kernel.prepare(LaunchConfig((1, 1, 1), (threads, 1, 1), cooperative=True))


def in_threads(count, work):
    errors, start = [], threading.Barrier(count)

    def run(i):
        try:
            start.wait(60)
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def current_context() -> int | None:
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value
