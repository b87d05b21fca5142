"""Bugs of our own, and the right kernels that they were made from: checked mode reports the ones and not the others.

A bug is one change of a right kernel's text, of a header's, or of the launch.
"""

from __future__ import annotations

import functools
import pickle
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import reference

from transformer_rtc import Field, Kernel, KernelManager, LaunchConfig, SimulatedDevice, SimulationError, sources
from transformer_rtc.cache import DiskCache
from transformer_rtc.ops.norm_configurations import NormConfig
from transformer_rtc.ops.norm_kernels import ForwardSpec
from transformer_rtc.simulator.device import ORDERS
from transformer_rtc.spec import FLOAT16, FLOAT32, DType, KernelSpec, TextSpec

MANAGER = KernelManager(DiskCache(None))
C_TYPES = {"f4": "float", "i4": "int", "u4": "unsigned"}


@functools.cache
def device(order: str = "first_in") -> SimulatedDevice:
    return SimulatedDevice(checked=True, order=order, seed=1)


def guarded(array: np.ndarray) -> np.ndarray:
    """Return a copy that is aligned to 64 bytes, and far from other arrays."""
    memory = np.zeros(array.nbytes + 4096, np.uint8)
    start = 2048 + -(memory.ctypes.data + 2048) % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# ---- Right kernels -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """A right kernel, and a launch of it. Its arrays and scalars are variables of their names in `body`.

    Attributes
    ----------
    outputs : dict of str to array
        What it must write.
    inputs : dict of str to array
        What it may only read.
    start : dict of str to array
        What outputs and scratch memory hold before.
    """

    body: str
    outputs: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    start: Mapping[str, np.ndarray] = field(default_factory=dict)
    scalars: Mapping[str, int] = field(default_factory=dict)
    head: str = ""
    grid: int | tuple[int, int, int] = 1
    block: int | tuple[int, int, int] = 32
    cluster: int = 1
    dynamic: int = 0
    cooperative: bool = False
    padding: int = 0  # elements between the rows of outputs of two dimensions

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {**self.inputs, **self.outputs, **self.start}

    @property
    def spec(self) -> KernelSpec:
        fields = [Field(name, "pointer") for name in self._arrays]
        fields += [Field(name, "int64") for name in self.scalars]
        pointers = "".join(
            f"  {C_TYPES[array.dtype.str[1:]]}* {name} = static_cast<{C_TYPES[array.dtype.str[1:]]}*>(params.{name});\n"
            for name, array in self._arrays.items()
        )
        scalars = "".join(f"  const long long {name} = params.{name};\n" for name in self.scalars)
        text = (
            f'{self.head}\nextern "C" __global__ void kernel(Params params) {{\n{pointers}{scalars}'
            "  const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);\n"
            f"{self.body}}}\n"
        )
        return TextSpec(text, "kernel", tuple(fields))

    @property
    def config(self) -> LaunchConfig:
        grid, block = (size if isinstance(size, tuple) else (size, 1, 1) for size in (self.grid, self.block))
        return LaunchConfig(grid, block, (self.cluster, 1, 1), self.dynamic, self.cooperative)

    def values(self) -> dict[str, Any]:
        """Return the arguments of a launch."""
        values: dict[str, Any] = {}
        for name, array in self._arrays.items():
            before = self.start.get(name, np.full_like(array, 77)) if name in self.outputs else array
            if self.padding and array.ndim == 2:
                before = np.pad(before, ((0, 0), (0, self.padding)))
            values[name] = guarded(before)[..., : array.shape[-1]]
            values[name].setflags(write=name not in self.inputs)
        return values | self.scalars

    def check(self, values: Mapping[str, Any]) -> None:
        for name, expected in self.outputs.items():
            np.testing.assert_array_equal(values[name], expected, name)


class Case(NamedTuple):
    rows: int
    hidden: int
    x: DType
    weight: DType | None
    out: DType
    rstd: bool


@dataclass(frozen=True, eq=False)
class Norm:
    """A kernel of this package on rows of random numbers, divided as no dispatch would, so that little does."""

    case: Case
    norm_config: NormConfig
    groups: int = 1  # of CTAs, where rows are fewer than these there are several to each
    shift: int = 0  # elements of x beyond an aligned address
    padding: int = 0  # elements between rows of y
    norm: str = "rms_norm"

    @property
    def spec(self) -> KernelSpec:
        case = self.case
        return ForwardSpec(
            norm=self.norm, input=case.x, weight=case.weight, bias=None, residual=None, adds="", output=case.out,
            stores=("rstd",) if case.rstd else (), scale=False, per_head=False, repeats=False, hidden=case.hidden,
            config=self.norm_config,
        )  # fmt: skip

    @property
    def config(self) -> LaunchConfig:
        rule = self.spec.launch_rule
        grid = rule.ctas_per_row * self.groups
        cluster = rule.ctas_per_row if rule.clusters else 1
        cooperative = rule.ctas_per_row > 1 and not rule.clusters
        return LaunchConfig(
            (grid, 1, 1), (rule.threads, 1, 1), (cluster, 1, 1), rule.dynamic_shared_memory, cooperative
        )

    @functools.cached_property
    def _random(self) -> tuple[np.ndarray, np.ndarray]:
        rng, case = np.random.default_rng(7), self.case
        x = reference.random_rows(rng, (case.rows, case.hidden), case.x)
        return x, reference.random_weight(rng, case.hidden, case.weight or case.x)

    def values(self) -> dict[str, Any]:
        case, rule = self.case, self.spec.launch_rule
        x, weight = self._random
        shifted = guarded(np.zeros(x.size + self.shift, x.dtype))[self.shift :].reshape(x.shape)
        shifted[...] = x
        weight = guarded(weight)
        for array in (shifted, weight):
            array.setflags(write=False)
        out = guarded(np.zeros((case.rows, case.hidden + self.padding), reference.NUMPY_TYPES[case.out]))
        values = {
            "x": shifted, "out": out[:, : case.hidden], "x_outer_stride": case.hidden, "x_inner_stride": 0,
            "out_outer_stride": case.hidden + self.padding, "out_inner_stride": 0, "rows": case.rows,
            "inner_count": 1, "inner_magic": 0, "inner_shift": 0, "eps": 1e-6, "weight_offset": 0.0,
        }  # fmt: skip
        if case.weight:
            values["weight"] = weight
        if case.rstd:
            values["rstd"] = guarded(np.zeros(case.rows, np.float32))
        if rule.workspace_bytes:
            values["workspace"] = guarded(np.zeros(rule.workspace_bytes * self.groups, np.uint8))
        return values

    def check(self, values: Mapping[str, Any]) -> None:
        x, weight = self._random
        if self.norm == "layer_norm":
            expected = reference.forward(True, x, weight if self.case.weight else None, out=self.case.out)
            reference.assert_within(values["out"], expected["out"], self.case.out)
            return
        y, rstd = reference.rms_norm(x, weight if self.case.weight else None)
        reference.assert_close(values["out"], y, self.case.out)
        if self.case.rstd:
            reference.assert_close(values["rstd"], rstd, FLOAT32)


def floats(count: int) -> np.ndarray:
    """Return small integers: every order of additions gives the same sum."""
    return (np.arange(count) * 7 % 23).astype(np.float32)


def scan(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, 32).cumsum(axis=1, dtype=x.dtype).reshape(-1)[: x.size]


def relaxed_cells(cells: np.ndarray, rounds: int) -> np.ndarray:
    for _ in range(rounds):
        cells = np.roll(cells, 1) + np.roll(cells, -1)
    return cells


def staged_sums() -> np.ndarray:
    tiles = floats(512).reshape(4, 128)
    return sum(np.roll(tile, -64).reshape(32, 4).sum(axis=1) for tile in tiles)  # type: ignore[return-value]


ZERO = np.zeros(1, np.uint32)
BINS = (np.arange(256) * 11 % 40).astype(np.int32)
POSITIVE = (np.arange(96) % 5 - 2).astype(np.int32)

SUBJECTS: dict[str, Subject | Norm] = {
    "block_sum": Subject(
        """
  TRTC_SHARED(float, sums, 64);
  const int i = block * 64 + thread;
  sums[thread] = i < n ? x[i] : 0.0f;
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (thread < half) sums[thread] += sums[thread + half];
    __syncthreads();
  }
  if (thread == 0) out[block] = sums[0];
""",
        {"out": np.add.reduceat(floats(150), [0, 64, 128])},
        {"x": floats(150)},
        scalars={"n": 150},
        grid=3,
        block=64,
    ),
    "stencil": Subject(
        """
  TRTC_SHARED(float, row, 96);
  float* cells = row;
  cells[thread] = x[thread];
  for (int step = 0; step < 4; ++step) {
    __syncthreads();
    const float left = cells[thread == 0 ? 95 : thread - 1];
    const float right = cells[(thread + 1) % 96];
    __syncthreads();
    cells[thread] = left + right;
  }
  out[thread] = cells[thread];
""",
        {"out": relaxed_cells(floats(96), 4)},
        {"x": floats(96)},
        block=96,
    ),
    "double_buffer": Subject(
        """
  TRTC_SHARED(float, rows, 2 * 64);
  float value = x[thread];
  for (int step = 0; step < 2; ++step) {
    float* row = rows + step % 2 * 64;
    row[thread] = value;
    __syncthreads();
    value += 2.0f * row[63 - thread];
  }
  out[thread] = value;
""",
        {"out": 5 * floats(64) + 4 * floats(64)[::-1]},
        {"x": floats(64)},
        block=64,
    ),
    "warp_staging": Subject(
        """
  TRTC_SHARED(float, staging, 64);
  const int lane = thread % 32;
  float* mine = staging + thread / 32 * 32;
  float value = x[thread];
  for (int step = 0; step < 2; ++step) {
    mine[lane] = value;
    __syncwarp();  // the first
    value += mine[lane ^ 17];
    __syncwarp();  // the second
  }
  out[thread] = value;
""",
        {"out": 2 * floats(64) + 2 * floats(64)[np.arange(64) ^ 17]},
        {"x": floats(64)},
        block=64,
    ),
    "warp_synchronous": Subject(
        """
  TRTC_SHARED(float, staging, 32);
  volatile float* sums = staging;
  sums[thread] = x[thread];
  __syncwarp();
  for (int half = 16; half > 0; half /= 2) {
    if (thread < half) sums[thread] = sums[thread] + sums[thread + half];
    __syncwarp();  // of a step
  }
  if (thread == 0) out[0] = sums[0];
""",
        {"out": floats(32).sum(keepdims=True)},
        {"x": floats(32)},
    ),
    "histogram": Subject(
        """
  TRTC_SHARED(int, bins, 40);
  for (int i = thread; i < 40; i += 32) bins[i] = 0;
  __syncthreads();  // zeroed
  for (int i = block * 32 + thread; i < 256; i += 64) atomicAdd(&bins[x[i]], 1);
  __syncthreads();  // counted
  for (int i = thread; i < 40; i += 32) atomicAdd(&out[i], bins[i]);
""",
        {"out": np.bincount(BINS, minlength=40).astype(np.int32)},
        {"x": BINS},
        {"out": np.zeros(40, np.int32)},
        grid=2,
    ),
    "counter": Subject(
        """
  TRTC_SHARED(int, found, 1);
  for (int tile = 0; tile < 3; ++tile) {
    if (thread == 0) found[0] = 0;
    __syncthreads();  // reset
    if (x[tile * 32 + thread] > 0) atomicAdd(found, 1);
    __syncthreads();  // counted
    out[tile * 32 + thread] = found[0];
    __syncthreads();  // read
  }
""",
        {"out": np.repeat((POSITIVE.reshape(3, 32) > 0).sum(axis=1), 32).astype(np.int32)},
        {"x": POSITIVE},
    ),
    "transpose": Subject(
        """
  TRTC_SHARED(float, tile, 16 * 17);
  const int tx = thread, ty = static_cast<int>(threadIdx.y);
  const int column = block * 16 + tx, row = static_cast<int>(blockIdx.y) * 16 + ty;
  if (row < 40 && column < 24) tile[ty * 17 + tx] = x[row * 24 + column];
  __syncthreads();
  const int to_column = static_cast<int>(blockIdx.y) * 16 + tx, to_row = block * 16 + ty;
  if (to_row < 24 && to_column < 40) out[to_row * 40 + to_column] = tile[tx * 17 + ty];
""",
        {"out": np.ascontiguousarray(floats(960).reshape(40, 24).T).reshape(-1)},
        {"x": floats(960)},
        grid=(2, 3, 1),
        block=(16, 16, 1),
    ),
    "branches": Subject(
        """
  TRTC_SHARED(float, values, 64);
  float* mine = values;
  if (thread < 32) {
    mine[thread] = x[thread] + 1.0f;
  } else {
    mine[thread] = x[thread] - 1.0f;
  }
  __syncthreads();
  out[thread] = mine[63 - thread];
""",
        {"out": (floats(64) + np.repeat(np.float32([1, -1]), 32))[::-1]},
        {"x": floats(64)},
        block=64,
    ),
    "pipeline": Subject(
        """
  TRTC_SHARED(float, slot, 32);
  float sum = 0.0f;
  const bool produces = thread < 32;
  const int tiles = 3;
  for (int tile = 0; tile < tiles; ++tile) {
    if (produces) slot[thread] = x[tile * 32 + thread];
    __syncthreads();  // full
    if (!produces) sum += slot[63 - thread];
    __syncthreads();  // empty
  }
  if (!produces) out[thread - 32] = sum;
""",
        {"out": floats(96).reshape(3, 32).sum(axis=0)[::-1]},
        {"x": floats(96)},
        block=64,
    ),
    "two_parts": Subject(
        """
  TRTC_DYNAMIC_SHARED(float, memory);
  float* lows = memory;
  float* highs = memory + 32;
  lows[thread] = x[thread];
  highs[thread] = 2.0f * x[thread];
  __syncthreads();
  out[thread] = lows[31 - thread] + highs[(thread + 7) % 32];
""",
        {"out": floats(32)[::-1] + 2 * np.roll(floats(32), -7)},
        {"x": floats(32)},
        dynamic=256,
    ),
    "shared_flag": Subject(
        """
  TRTC_SHARED(float, data, 1);
  TRTC_SHARED(unsigned, ready, 1);
  if (thread == 0) ready[0] = 0u;
  __syncthreads();
  if (thread == 0) {
    data[0] = x[0];
    __threadfence_block();  // before the flag
    atomicExch(ready, 1u);
  }
  if (thread == 32) {
    while (atomicAdd(ready, 0u) == 0u) __nanosleep(20);
    __threadfence_block();  // behind the flag
    out[0] = data[0] + 1.0f;
  }
""",
        {"out": np.float32([9])},
        {"x": np.float32([8])},
        block=64,
    ),
    "shift": Subject(
        """
  const int i = block * 32 + thread;
  out[i] = x[(i + 1) % 96] + 1.0f;
""",
        {"out": np.roll(floats(96), -1) + 1},
        {"x": floats(96)},
        {"out": np.ones(96, np.float32)},
        grid=3,
    ),
    "last_block": Subject(
        """
  TRTC_SHARED(int, last, 1);
  float sum = x[block * 32 + thread];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (thread == 0) {
    partials[block] = sum;
    __threadfence();  // before the ticket
    last[0] = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __threadfence();  // behind the ticket
  }
  __syncthreads();
  if (last[0]) {
    float total = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i) total += partials[i];
    out[thread] = total;
  }
""",
        {"out": np.full(32, floats(128).sum())},
        {"x": floats(128)},
        {"partials": np.zeros(4, np.float32), "ticket": ZERO},
        grid=4,
    ),
    "mailbox": Subject(
        """
  if (block == 0) {
    data[thread] = 2.0f * x[thread];
    __syncthreads();
    if (thread == 0) {
      __threadfence();  // before the flag
      atomicExch(flag, 1u);
    }
  } else {
    if (thread == 0) {
      while (atomicAdd(flag, 0u) == 0u) __nanosleep(20);
      __threadfence();  // behind the flag
    }
    __syncthreads();
    out[thread] = data[31 - thread];
  }
""",
        {"out": 2 * floats(32)[::-1]},
        {"x": floats(32)},
        {"data": np.zeros(32, np.float32), "flag": ZERO},
        grid=2,
        cooperative=True,
    ),
    "volatile_mailbox": Subject(
        """
  volatile unsigned* signal = flag;
  if (thread == 0 && block == 0) {
    data[0] = x[0];
    __threadfence();  // before the flag
    *signal = 1u;
  } else if (thread == 0) {
    while (*signal == 0u) __nanosleep(20);
    __threadfence();  // behind the flag
    out[0] = data[0];
  }
""",
        {"out": np.float32([5])},
        {"x": np.float32([5])},
        {"data": np.zeros(1, np.float32), "flag": ZERO},
        grid=2,
        cooperative=True,
    ),
    "turns": Subject(
        """
  if (thread == 0) {
    while (trtc::load_acquire_global(turn) != static_cast<unsigned>(block)) trtc::spin_hint();
  }
  __syncthreads();
  out[thread] += x[block * 32 + thread];
  __syncthreads();
  if (thread == 0) trtc::add_release_global(turn, 1u);
""",
        {"out": floats(96).reshape(3, 32).sum(axis=0)},
        {"x": floats(96)},
        {"out": np.zeros(32, np.float32), "turn": ZERO},
        head='#include "ptx.cuh"',
        grid=3,
        cooperative=True,
    ),
    "grid_barrier": Subject(
        """
  const int i = block * 32 + thread;
  float* from = cells;
  float* to = cells + 128;
  for (unsigned round = 0; round < 3; ++round) {
    to[i] = from[(i + 127) % 128] + from[(i + 1) % 128];
    grid_barrier(arrived, round);
    float* swap = from;
    from = to;
    to = swap;
  }
  out[i] = from[i];
""",
        {"out": relaxed_cells(floats(128), 3)},
        {},
        {"cells": np.concatenate([floats(128), np.zeros(128, np.float32)]), "arrived": ZERO},
        head="""
__device__ void grid_barrier(unsigned* arrived, unsigned round) {
  __syncthreads();  // before the arrival
  if (threadIdx.x == 0) {
    __threadfence();  // before the arrival
    atomicAdd(arrived, 1u);
    while (*static_cast<volatile unsigned*>(arrived) < (round + 1u) * gridDim.x) __nanosleep(20);
    __threadfence();  // behind the wait
  }
  __syncthreads();  // behind the wait
}""",
        grid=4,
        cooperative=True,
    ),
    "lock": Subject(
        """
  if (thread == 0) {
    for (int k = 0; k < 2; ++k) {
      lock(mutexes);
      const int before = out[0];
      __nanosleep(20);
      out[0] = before + x[block];
      unlock(mutexes);
    }
  }
""",
        {"out": np.int32([120])},
        {"x": np.int32([10, 20, 30])},
        {"out": np.zeros(1, np.int32), "mutexes": ZERO},
        head=(
            LOCKS := """
__device__ void lock(unsigned* mutex) {
  while (atomicCAS(mutex, 0u, 1u) != 0u) __nanosleep(20);
  __threadfence();  // behind the lock
}
__device__ void unlock(unsigned* mutex) {
  __threadfence();  // before the unlock
  atomicExch(mutex, 0u);
}"""
        ),
        grid=3,
        cooperative=True,
    ),
    "two_locks": Subject(
        """
  const int from = block, to = 1 - block;
  const int first = min(from, to), second = max(from, to);
  if (thread == 0) {
    lock(mutexes + first);
    __nanosleep(20);
    lock(mutexes + second);
    out[from] -= 5;
    out[to] += 7;
    unlock(mutexes + second);
    unlock(mutexes + first);
  }
""",
        {"out": np.int32([102, 102])},
        {},
        {"out": np.full(2, 100, np.int32), "mutexes": np.zeros(2, np.uint32)},
        head=LOCKS,
        grid=2,
        cooperative=True,
    ),
    "cluster_ring": Subject(
        """
  TRTC_SHARED(float, mine, 32);
  const unsigned rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
  mine[thread] = x[block * 32 + thread];
  __cluster_barrier_arrive();  // all have written
  __cluster_barrier_wait();  // all have written
  const float* theirs = static_cast<const float*>(__cluster_map_shared_rank(mine, (rank + 1) % size));
  out[block * 32 + thread] = theirs[31 - thread];
  __cluster_barrier_arrive();  // all have read
  __cluster_barrier_wait();  // all have read
""",
        {"out": np.roll(floats(256).reshape(2, 4, 32), -1, axis=1)[..., ::-1].reshape(-1)},
        {"x": floats(256)},
        grid=8,
        cluster=4,
    ),
    "cluster_push": Subject(
        """
  TRTC_SHARED(float, inbox, 32);
  const unsigned rank = __clusterRelativeBlockRank();
  float* theirs = static_cast<float*>(__cluster_map_shared_rank(inbox, rank ^ 1u));
  __cluster_barrier_arrive_relaxed();  // all have started
  __cluster_barrier_wait();  // all have started
  theirs[thread] = x[block * 32 + thread];
  __cluster_barrier_arrive();  // all have written
  __cluster_barrier_wait();  // all have written
  out[block * 32 + thread] = inbox[31 - thread];
""",
        {"out": floats(64).reshape(2, 32)[::-1, ::-1].reshape(-1)},
        {"x": floats(64)},
        grid=2,
        cluster=2,
    ),
    "async_push": Subject(
        """
  TRTC_SHARED(float, sums, 4);
  TRTC_SHARED(trtc::uint64, all_here, 1);
  const int rank = block % 4;
  if (thread == 0) {
    trtc::transaction_barrier_init(all_here);
    trtc::transaction_barrier_expect(all_here, 4 * sizeof(float));
  }
  trtc::cluster_arrive_relaxed();
  trtc::cluster_wait();
  if (thread < 4) trtc::store_cluster_async(sums + rank, all_here, thread, x[block * 4 + thread]);
  trtc::transaction_barrier_wait(all_here);
  if (thread == 0) out[block] = sums[0] + sums[1] + sums[2] + sums[3];
""",
        {"out": floats(32).reshape(2, 4, 4).sum(axis=1).reshape(-1)},
        {"x": floats(32)},
        head='#include "ptx.cuh"',
        grid=8,
        cluster=4,
    ),
    "copy_bulk": Subject(
        """
  TRTC_DYNAMIC_SHARED(float, ring);
  TRTC_SHARED(trtc::uint64, here, 2);
  if (thread < 2) trtc::transaction_barrier_init(here + thread);
  __syncthreads();  // all know of them
  float sum = 0.0f;
  for (int turn = 0; turn < 5; ++turn) {
    if (turn > 0) trtc::transaction_barrier_wait(here + (turn - 1) % 2, (turn - 1) / 2 % 2);
    __syncthreads();  // all have read
    if (turn < 4 && thread == 0) {
      trtc::transaction_barrier_expect(here + turn % 2, 512);
      trtc::copy_bulk(ring + turn % 2 * 128, x + turn * 128, 512, here + turn % 2, 0, 512);
    }
    const float* now = ring + (turn + 1) % 2 * 128;
    for (int i = 0; turn > 0 && i < 4; ++i) sum += now[(thread * 4 + i + 64) % 128];
  }
  out[thread] = sum;
""",
        {"out": staged_sums()},
        {"x": floats(640)},
        head='#include "ptx.cuh"',
        dynamic=1024,
    ),
    "copy_async": Subject(
        """
  TRTC_DYNAMIC_SHARED(float, staged);
  trtc::copy_async<16>(staged + thread * 4, x + block * 128 + thread * 4);
  trtc::wait_async();
  __syncthreads();
  for (int i = thread; i < 128; i += 32) out[block * 128 + i] = staged[127 - i];
""",
        {"out": floats(256).reshape(2, 128)[:, ::-1].reshape(-1)},
        {"x": floats(256)},
        head='#include "ptx.cuh"',
        grid=2,
        dynamic=512,
    ),
    "copy_ring": Subject(
        """
  TRTC_DYNAMIC_SHARED(float, ring);
  trtc::copy_async<16>(ring + thread * 4, x + thread * 4);
  float sum = 0.0f;
  for (int tile = 0; tile < 4; ++tile) {
    trtc::wait_async();
    __syncthreads();
    const int next = tile + 1;
    if (next < 4) trtc::copy_async<16>(ring + next % 2 * 128 + thread * 4, x + next * 128 + thread * 4);
    const float* now = ring + tile % 2 * 128;
    for (int i = 0; i < 4; ++i) sum += now[(thread * 4 + i + 64) % 128];
  }
  out[thread] = sum;
""",
        {"out": staged_sums()},
        {"x": floats(640)},
        head='#include "ptx.cuh"',
        dynamic=1024,
    ),
    "copy_in_place": Subject(
        """
  TRTC_SHARED(float, staged, 32);
  trtc::copy_async<4>(staged + thread, out + (31 - thread));
  trtc::wait_async();
  __syncthreads();
  out[thread] = 3.0f * staged[thread];
""",
        {"out": 3 * floats(32)[::-1]},
        {},
        {"out": floats(32)},
        head='#include "ptx.cuh"',
    ),
    "copy_own": Subject(
        """
  TRTC_SHARED(float, staged, 32);
  trtc::copy_async<4>(staged + thread, out + thread);
  trtc::wait_async();
  out[thread] = 0.0f;
  __syncthreads();
  out[thread] = staged[31 - thread];
""",
        {"out": floats(32)[::-1]},
        {},
        {"out": floats(32)},
        head='#include "ptx.cuh"',
    ),
    "vectors": Subject(
        """
  const long long i = (block * 32 + thread) * 4;
  if (i + 4 <= n) {
    *reinterpret_cast<float4*>(out + i) = *reinterpret_cast<const float4*>(x + i);
  } else {
    for (long long k = i; k < n; ++k) out[k] = x[k];
  }
""",
        {"out": floats(130)},
        {"x": floats(130)},
        scalars={"n": 130},
        grid=2,
    ),
    "offset": Subject(
        """
  const int row = static_cast<int>(first_row) + thread, width = static_cast<int>(stride);
  const long long at = static_cast<long long>(row) * width;
  out[thread] = x[at - first_row * stride];
""",
        {"out": np.arange(0, 32 * 70000, 70000).astype(np.int32)},
        {"x": np.arange(32 * 70000, dtype=np.int32)},
        scalars={"first_row": 70000, "stride": 70000},
    ),
    "padded_rows": Subject(
        """
  for (int column = thread; column < 40; column += 32) out[block * stride + column] = x[block * 40 + column];
""",
        {"out": floats(144).reshape(3, 48)[:, :40]},
        {"x": np.ascontiguousarray(floats(144).reshape(3, 48)[:, :40]).reshape(-1)},
        scalars={"stride": 48},
        grid=3,
        padding=8,
    ),
    "arithmetic": Subject(
        """
  const int steps[4] = {1, 10, 100, 1000};
  const int level = static_cast<int>(x[thread] * 8.0f);
  const int share = level / divisor[thread];
  const unsigned word = static_cast<unsigned>(share + steps[thread % 4]) << bits[thread];
  if (share < 0) __trap();
  out[thread] = static_cast<int>(word >> bits[thread]);
""",
        {
            "out": (floats(32).astype(np.int32) * 8 // (np.arange(32) % 3 + 1) + 10 ** (np.arange(32) % 4)).astype(
                np.int32
            )
        },
        {"x": floats(32), "divisor": (np.arange(32) % 3 + 1).astype(np.int32), "bits": np.full(32, 20, np.int32)},
    ),
    "scan": Subject(
        """
  const int i = block * 64 + thread, lane = thread % 32;
  int value = i < n ? x[i] : 0;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  if (i < n) out[i] = value;
""",
        {"out": np.concatenate([np.cumsum(part) for part in np.split(BINS[:120], [32, 64, 96])]).astype(np.int32)},
        {"x": BINS[:120]},
        scalars={"n": 120},
        grid=2,
        block=64,
    ),
    "strided_loop": Subject(
        """
  float sum = 0.0f;
  int i = thread;
  while (i < 128) {
    sum += x[i];
    i += 32;
  }
  out[thread] = sum;
""",
        {"out": floats(128).reshape(4, 32).sum(axis=0)},
        {"x": floats(128)},
    ),
}

# One row in each of a few CTAs or groups of them: two warps, four vectors a thread and a ragged end.
NORMS = {
    "norm": Norm(Case(3, 250, FLOAT32, FLOAT32, FLOAT32, True), NormConfig(64, 1, 4, 1), groups=3),
    "norm_rows": Norm(Case(7, 30, FLOAT32, FLOAT32, FLOAT32, True), NormConfig(8, 4, 4, 1), groups=2),
    "norm_padded": Norm(Case(3, 250, FLOAT32, FLOAT32, FLOAT32, False), NormConfig(64, 1, 2, 2), groups=3, padding=6),
    "norm_staged": Norm(
        Case(3, 252, FLOAT32, FLOAT32, FLOAT32, False), NormConfig(32, 1, 4, 2, in_shared=True), groups=3
    ),
    "norm_together": Norm(
        Case(5, 256, FLOAT32, FLOAT32, FLOAT32, True), NormConfig(64, 1, 4, 1, in_shared=True, together=2), groups=3
    ),
    "layer_norm": Norm(
        Case(3, 1000, FLOAT16, FLOAT16, FLOAT16, False),
        NormConfig(64, 1, 8, 2, in_shared=True),
        groups=3,
        norm="layer_norm",
    ),
    "norm_misaligned": Norm(Case(3, 251, FLOAT16, None, FLOAT16, False), NormConfig(32, 1, 8, 1), groups=3, shift=1),
    "norm_shifted": Norm(Case(3, 248, FLOAT16, None, FLOAT16, False), NormConfig(32, 1, 8, 1), groups=3, shift=1),
    "norm_chunks": Norm(Case(2, 451, FLOAT16, FLOAT16, FLOAT16, False), NormConfig(32, 1, 4, 2), groups=2),
    "norm_cluster": Norm(
        Case(2, 1000, FLOAT32, FLOAT32, FLOAT32, True), NormConfig(64, 1, 4, 1, 4, True, True), groups=2
    ),
    "norm_grid": Norm(
        Case(7, 1000, FLOAT32, FLOAT32, FLOAT32, True), NormConfig(64, 1, 4, 1, 4, False, True), groups=2
    ),
}
SUBJECTS |= NORMS


# ---- Bugs --------------------------------------------------------------------------------------------------------

Change = tuple[str, str]  # what is there exactly once, and what takes its place


@dataclass(frozen=True, eq=False)
class Bug:
    """What is changed in a right kernel, and what checked mode must say.

    Attributes
    ----------
    name : str
        What is wrong.
    subject : str
        The right kernel.
    changes : tuple of Change
        Of its text, or of the header `file`.
    kinds : str
        Any of these kinds of SimulationError: where a barrier is missing, a thread may read before another one has
        written, or race with it.
    at : tuple of str
        Lines of the changed texts: the reported one is one of them, and so is the other party's.
    races : bool
        Whether it is a race or a missing fence.
    file : str
        The text that is changed; by default the kernel's.
    launch : dict of str to Any
        What is changed of the subject besides.
    orders : tuple of str
        Those that show it.
    missed : str
        Why checked mode does not show it.
    """

    name: str
    subject: str
    changes: tuple[Change, ...]
    kinds: str
    at: tuple[str, ...]
    races: bool
    file: str = ""
    launch: Mapping[str, Any] = field(default_factory=dict)
    orders: tuple[str, ...] = ORDERS
    missed: str = ""


def race(name: str, subject: str, *changes: Change, at: tuple[str, ...] = (), kinds: str = "race", **more: Any) -> Bug:
    return Bug(name, subject, changes, kinds, at, True, **more)


def fault(kinds: str, name: str, subject: str, *changes: Change, at: tuple[str, ...] = (), **more: Any) -> Bug:
    return Bug(name, subject, changes, kinds, at, False, **more)


EARLY = "race uninitialised"
# Elsewhere, CTAs run so far ahead that others hear of all they did: no race, but wrong numbers.
ORDERED = ("first_in", "random")
WARP_LINES = ("mine[lane] = value", "value += mine")
MAIL_LINES = ("data[thread] = ", "out[thread] = data")
GRID_LINES = ("to[i] = from", "out[i] = from")
LAST_LINES = ("partials[block] = sum", "total += partials")
RING_LINES = ("mine[thread] = x", "= theirs[31 - thread]")
STAGE_LINES = ("trtc::copy_async<16>(", "= staged[127 - i]")
SUM_LINES = ("if (thread % group == 0) of_group", "slot < here ? of_group")

BUGS = (
    # Barriers of a CTA.
    race(
        "no barrier between the writes and another thread's reads",
        "block_sum",
        (": 0.0f;\n  __syncthreads();", ": 0.0f;"),
        at=("sums[thread] = i < n", "sums[thread] += "),
        kinds=EARLY,
    ),
    race(
        "no barrier between the steps of a reduction",
        "block_sum",
        ("+ half];\n    __syncthreads();", "+ half];"),
        at=("sums[thread] += ",),
    ),
    race(
        "every thread writes the result",
        "block_sum",
        ("if (thread == 0) out", "out"),
        at=("out[block] = sums[0];",),
    ),
    race(
        "no barrier between the reads and the next writes",
        "stencil",
        ("% 96];\n    __syncthreads();", "% 96];"),
        at=("const float left", "const float right", "= left + right;"),
    ),
    race(
        "no barrier between the writes and the next reads",
        "stencil",
        ("++step) {\n    __syncthreads();", "++step) {"),
        at=("cells[thread] = x[thread]", "const float left", "const float right", "= left + right;"),
        kinds=EARLY,
    ),
    race(
        "one buffer where one barrier a step needs two",
        "double_buffer",
        ("step % 2 * 64", "0"),
        at=("row[thread] = value;", "value += "),
    ),
    race(
        "a barrier of the warp where the CTA's is needed",
        "double_buffer",
        ("__syncthreads", "__syncwarp"),
        at=("row[thread] = value;", "value += "),
        kinds=EARLY,
    ),
    race(
        "a count is reset while others still read it",
        "counter",
        ("    __syncthreads();  // read\n", ""),
        at=("found[0] = 0;", "= found[0];"),
    ),
    race(
        "a count is read while others still add",
        "counter",
        ("    __syncthreads();  // counted\n", ""),
        at=("atomicAdd(found, 1)", "= found[0];"),
    ),
    race("every thread resets the count", "counter", ("if (thread == 0) found", "found"), at=("found[0] = 0;",)),
    race(
        "a count without an atomic addition",
        "counter",
        ("atomicAdd(found, 1)", "found[0] += 1"),
        at=("found[0] += 1",),
    ),
    race(
        "a tile is transposed without a barrier",
        "transpose",
        ("  __syncthreads();\n", ""),
        kinds=EARLY,
        at=("tile[ty * 17 + tx] =", "= tile[tx * 17 + ty]"),
    ),
    race(
        "rows of a tile overlap",
        "transpose",
        ("tile[ty * 17 + tx]", "tile[ty * 15 + tx]"),
        at=("tile[ty * 15 + tx] =", "= tile[tx * 17 + ty]"),
        kinds=EARLY,
    ),
    race(
        "a producer goes on before the consumer has read",
        "pipeline",
        ("    __syncthreads();  // empty\n", ""),
        at=("slot[thread] =", "sum += slot"),
    ),
    race(
        "two parts of shared memory overlap",
        "two_parts",
        ("memory + 32", "memory + 31"),
        at=("lows[thread] =", "highs[thread] ="),
    ),
    race(
        "bins are counted before they are zeroed",
        "histogram",
        ("  __syncthreads();  // zeroed\n", ""),
        at=("bins[i] = 0", "atomicAdd(&bins"),
        kinds=EARLY,
    ),
    race(
        "bins are read while others still count",
        "histogram",
        ("  __syncthreads();  // counted\n", ""),
        at=("atomicAdd(&bins", "atomicAdd(&out"),
    ),
    race(
        "no fence before a flag in shared memory",
        "shared_flag",
        ("    __threadfence_block();  // before the flag\n", ""),
        at=("data[0] = x[0]", "out[0] = data[0]"),
    ),
    race(
        "no fence behind a flag in shared memory",
        "shared_flag",
        ("    __threadfence_block();  // behind the flag\n", ""),
        at=("data[0] = x[0]", "out[0] = data[0]"),
    ),
    race(
        "a flag in shared memory is set by a plain store",
        "shared_flag",
        ("atomicExch(ready, 1u)", "*ready = 1u"),
        at=("*ready = 1u", "atomicAdd(ready, 0u)"),
    ),
    # Warps.
    race(
        "no barrier of the warp before others' values are read",
        "warp_staging",
        ("    __syncwarp();  // the first\n", ""),
        at=WARP_LINES,
        kinds=EARLY,
    ),
    race(
        "no barrier of the warp before values are overwritten",
        "warp_staging",
        ("    __syncwarp();  // the second\n", ""),
        at=WARP_LINES,
    ),
    race(
        "a shuffle taken for a fence",
        "warp_staging",
        ("__syncwarp();  // the first", "__shfl_xor_sync(0xffffffffu, value, 1);"),
        at=WARP_LINES,
    ),
    race(
        "a vote taken for a fence",
        "warp_staging",
        ("__syncwarp();  // the second", "__any_sync(0xffffffffu, 1);"),
        at=WARP_LINES,
    ),
    race(
        "a barrier of half the warp",
        "warp_staging",
        ("__syncwarp();  // the first", "__syncwarp(lane < 16 ? 0x0000ffffu : 0xffff0000u);"),
        at=WARP_LINES,
        kinds=EARLY,
    ),
    race(
        "a warp's reduction without barriers",
        "warp_synchronous",
        ("volatile float* sums", "float* sums"),
        ("    __syncwarp();  // of a step\n", ""),
        at=("sums[thread] = sums[thread] + ",),
    ),
    fault(
        "race",
        "a warp's reduction that trusts in volatile",
        "warp_synchronous",
        ("    __syncwarp();  // of a step\n", ""),
        missed="volatile accesses are relaxed atomic ones in CUDA's memory model: no race, but an order by luck",
    ),
    # CTAs.
    race("CTAs read what others overwrite", "shift", ("x[(i + 1) % 96]", "out[(i + 1) % 96]"), at=("out[i] = out",)),
    race("CTAs write one element", "shift", ("out[i] =", "out[thread] ="), at=("out[thread] =",)),
    race(
        "CTAs add without atomics",
        "histogram",
        ("atomicAdd(&out[i], bins[i])", "out[i] += bins[i]"),
        at=("out[i] += bins[i]",),
    ),
    race("CTAs write one partial sum", "last_block", ("partials[block]", "partials[0]"), at=("partials[0] = sum",)),
    race("no fence before a ticket", "last_block", ("    __threadfence();  // before the ticket\n", ""), at=LAST_LINES),
    race("no fence behind a ticket", "last_block", ("    __threadfence();  // behind the ticket\n", ""), at=LAST_LINES),
    race(
        "a fence of the CTA before a ticket of the grid",
        "last_block",
        ("__threadfence();  // before the ticket", "__threadfence_block();"),
        at=LAST_LINES,
    ),
    race(
        "a fence of the CTA behind a ticket of the grid",
        "last_block",
        ("__threadfence();  // behind the ticket", "__threadfence_block();"),
        at=LAST_LINES,
    ),
    race("a ticket that is no atomic", "last_block", ("atomicAdd(ticket, 1u)", "(*ticket)++"), at=("(*ticket)++",)),
    race(
        "a partial sum is written behind its ticket",
        "last_block",
        ("    partials[block] = sum;\n", ""),
        ("  __syncthreads();\n", "  if (thread == 0) partials[block] = sum;\n  __syncthreads();\n"),
        at=LAST_LINES,
    ),
    race(
        "every CTA takes itself for the last one",
        "last_block",
        ("if (last[0])", "if (thread >= 0)"),
        at=("out[thread] = total", *LAST_LINES),
    ),
    race(
        "a CTA reads whether it is the last before it knows",
        "last_block",
        ("  __syncthreads();\n", ""),
        at=("last[0] = ", "if (last[0]"),
        kinds=EARLY,
    ),
    race("no fence before a flag", "mailbox", ("      __threadfence();  // before the flag\n", ""), at=MAIL_LINES),
    race("no fence behind a flag", "mailbox", ("      __threadfence();  // behind the flag\n", ""), at=MAIL_LINES),
    race(
        "a flag is set before other threads have written",
        "mailbox",
        ("x[thread];\n    __syncthreads();", "x[thread];"),
        at=MAIL_LINES,
    ),
    race(
        "threads do not wait for the one that waits", "mailbox", ("    }\n    __syncthreads();", "    }"), at=MAIL_LINES
    ),
    race(
        "nobody waits for a flag",
        "mailbox",
        ("      while (atomicAdd(flag, 0u) == 0u) __nanosleep(20);\n", ""),
        at=MAIL_LINES,
    ),
    race(
        "a flag is set by a plain store",
        "mailbox",
        ("atomicExch(flag, 1u)", "*flag = 1u"),
        at=("*flag = 1u", "atomicAdd(flag, 0u)"),
    ),
    race(
        "a flag is read by a plain load",
        "mailbox",
        ("atomicAdd(flag, 0u) == 0u", "*flag == 0u"),
        at=("*flag == 0u", "atomicExch(flag, 1u)"),
    ),
    race(
        "a fence of the CTA before a flag of the grid",
        "mailbox",
        ("__threadfence();  // before the flag", "__threadfence_block();"),
        at=MAIL_LINES,
    ),
    race(
        "no fence before a volatile flag",
        "volatile_mailbox",
        ("    __threadfence();  // before the flag\n", ""),
        at=("data[0] = x[0]", "out[0] = data[0]"),
    ),
    race(
        "no fence behind a volatile flag",
        "volatile_mailbox",
        ("    __threadfence();  // behind the flag\n", ""),
        at=("data[0] = x[0]", "out[0] = data[0]"),
    ),
    race(
        "a fence that comes before the data",
        "volatile_mailbox",
        ("data[0] = x[0];\n    __threadfence();", "__threadfence();\n    data[0] = x[0];"),
        at=("data[0] = x[0]", "out[0] = data[0]"),
    ),
    race(
        "a turn is passed on without a release",
        "turns",
        ("trtc::add_release_global(turn, 1u)", "atomicAdd(turn, 1u)"),
        at=("out[thread] +=",),
    ),
    race(
        "a turn is taken without an acquire",
        "turns",
        ("trtc::load_acquire_global(turn)", "*static_cast<volatile unsigned*>(turn)"),
        at=("out[thread] +=",),
    ),
    race(
        "a turn is passed on before all threads are done",
        "turns",
        ("  __syncthreads();\n  if (thread == 0) trtc::add", "  if (thread == 0) trtc::add"),
        at=("out[thread] +=",),
    ),
    race("only one thread waits for its turn", "turns", ("  }\n  __syncthreads();", "  }"), at=("out[thread] +=",)),
    race(
        "a grid barrier without one of the CTA before",
        "grid_barrier",
        ("  __syncthreads();  // before the arrival\n", ""),
        at=GRID_LINES,
    ),
    race(
        "a grid barrier without one of the CTA behind",
        "grid_barrier",
        ("  __syncthreads();  // behind the wait\n", ""),
        at=GRID_LINES,
    ),
    race(
        "a grid barrier without a release",
        "grid_barrier",
        ("    __threadfence();  // before the arrival\n", ""),
        at=GRID_LINES,
    ),
    race(
        "a grid barrier without an acquire",
        "grid_barrier",
        ("    __threadfence();  // behind the wait\n", ""),
        at=GRID_LINES,
    ),
    race("a grid barrier that one CTA may miss", "grid_barrier", ("* gridDim.x)", "* (gridDim.x - 1))"), at=GRID_LINES),
    race(
        "a grid barrier that is met once",
        "grid_barrier",
        ("(round + 1u) * gridDim.x", "gridDim.x"),
        at=GRID_LINES,
        orders=ORDERED,
    ),
    race(
        "a grid barrier a step, and one buffer",
        "grid_barrier",
        ("float* to = cells + 128", "float* to = cells"),
        at=GRID_LINES,
    ),
    race(
        "a lock without a fence behind it",
        "lock",
        ("  __threadfence();  // behind the lock\n", ""),
        at=("before = out[0]", "out[0] = before"),
    ),
    race(
        "an unlock without a fence before it",
        "lock",
        ("  __threadfence();  // before the unlock\n", ""),
        at=("before = out[0]", "out[0] = before"),
    ),
    race(
        "an unlock by a plain store", "lock", ("atomicExch(mutex, 0u)", "*mutex = 0u"), at=("*mutex = 0u", "atomicCAS")
    ),
    race(
        "no lock",
        "lock",
        ("      lock(mutexes);\n", ""),
        ("      unlock(mutexes);\n", ""),
        at=("before = out[0]", "out[0] = before"),
    ),
    race(
        "CTAs with different locks",
        "lock",
        ("      lock(mutexes);", "      lock(mutexes + block % 2);"),
        ("unlock(mutexes);", "unlock(mutexes + block % 2);"),
        at=("before = out[0]", "out[0] = before"),
        launch={"start": {"out": np.zeros(1, np.int32), "mutexes": np.zeros(2, np.uint32)}},
    ),
    # Clusters.
    race(
        "no cluster barrier before a neighbour's shared memory is read",
        "cluster_ring",
        ("  __cluster_barrier_arrive();  // all have written\n", ""),
        ("  __cluster_barrier_wait();  // all have written\n", ""),
        at=RING_LINES,
        kinds=EARLY + " exited_shared_memory",
    ),
    race(
        "an arrival that does not release",
        "cluster_ring",
        ("__cluster_barrier_arrive();  // all have written", "__cluster_barrier_arrive_relaxed();"),
        at=RING_LINES,
    ),
    race(
        "a barrier of the CTA before a neighbour's shared memory is read",
        "cluster_ring",
        ("  __cluster_barrier_arrive();  // all have written\n", "__syncthreads();"),
        ("  __cluster_barrier_wait();  // all have written\n", ""),
        at=RING_LINES,
        kinds=EARLY + " exited_shared_memory",
    ),
    race(
        "no cluster barrier before what a neighbour has written is read",
        "cluster_push",
        ("  __cluster_barrier_arrive();  // all have written\n", ""),
        ("  __cluster_barrier_wait();  // all have written\n", ""),
        at=("theirs[thread] = x", "= inbox[31 - thread]"),
        kinds=EARLY + " exited_shared_memory",
    ),
    race(
        "what a neighbour has written is not released",
        "cluster_push",
        ("__cluster_barrier_arrive();  // all have written", "__cluster_barrier_arrive_relaxed();"),
        at=("theirs[thread] = x", "= inbox[31 - thread]"),
    ),
    race(
        "every CTA writes to the same one",
        "cluster_push",
        ("(inbox, rank ^ 1u)", "(inbox, 0)"),
        at=("theirs[thread] = x",),
    ),
    race(
        "asynchronous stores are read without a wait",
        "async_push",
        ("  trtc::transaction_barrier_wait(all_here);\n", ""),
        at=("trtc::store_cluster_async", "sums[0] +"),
        kinds=EARLY + " exited_shared_memory",
    ),
    race(
        "a barrier that expects too few bytes",
        "async_push",
        ("4 * sizeof(float)", "3 * sizeof(float)"),
        at=("trtc::store_cluster_async", "sums[0] +"),
        kinds=EARLY + " exited_shared_memory",
    ),
    race(
        "asynchronous stores to one place", "async_push", ("(sums + rank,", "(sums,"), at=("trtc::store_cluster_async",)
    ),
    race(
        "a barrier is used before all know that it is there",
        "async_push",
        ("  trtc::cluster_wait();\n", ""),
        ("  trtc::cluster_arrive_relaxed();\n", ""),
        at=("trtc::store_cluster_async", "trtc::transaction_barrier_init", "trtc::transaction_barrier_wait"),
        kinds=EARLY,
    ),
    race(
        "a barrier whose initialisation is not fenced",
        "async_push",
        ("  TRTC_PORTABLE(trtc_simulator::barrier_publish();)\n", ""),
        file="ptx.cuh",
        at=("trtc::store_cluster_async", "trtc::transaction_barrier_init", "trtc::transaction_barrier_wait"),
    ),
    race(
        "a wait for the wrong parity",
        "async_push",
        ("trtc_simulator::barrier_wait(barrier, parity)", "trtc_simulator::barrier_wait(barrier, 1 - parity)"),
        file="ptx.cuh",
        at=("trtc::store_cluster_async", "sums[0] +"),
        kinds=EARLY + " exited_shared_memory",
    ),
    fault(
        "exited_shared_memory",
        "a CTA leaves while a neighbour reads its shared memory",
        "cluster_ring",
        ("  __cluster_barrier_arrive();  // all have read\n", ""),
        ("  __cluster_barrier_wait();  // all have read\n", ""),
        at=("= theirs[31 - thread]",),
    ),
    fault(
        "exited_shared_memory",
        "a barrier of the CTA before it leaves, where the cluster's is needed",
        "cluster_ring",
        ("  __cluster_barrier_arrive();  // all have read\n", "  __syncthreads();\n"),
        ("  __cluster_barrier_wait();  // all have read\n", ""),
        at=("= theirs[31 - thread]",),
    ),
    fault(
        "exited_shared_memory",
        "a CTA leaves while a store to it is on its way",
        "async_push",
        ("trtc::transaction_barrier_wait(all_here);", "if (rank == 0) trtc::transaction_barrier_wait(all_here);"),
        ("if (thread == 0) out", "if (thread == 0 && rank == 0) out"),
        at=("trtc::store_cluster_async",),
    ),
    fault(
        "race",
        "a neighbour's shared memory is written before it is known to have started",
        "cluster_push",
        ("  __cluster_barrier_arrive_relaxed();  // all have started\n", ""),
        ("  __cluster_barrier_wait();  // all have started\n", ""),
    ),
    fault(
        "out_of_bounds",
        "a neighbour of the last rank",
        "cluster_ring",
        ("(rank + 1) % size", "rank + 1"),
        at=("__cluster_map_shared_rank",),
    ),
    fault(
        "out_of_bounds",
        "a CTA's index taken for its rank",
        "cluster_ring",
        ("(rank + 1) % size", "blockIdx.x"),
        at=("__cluster_map_shared_rank",),
    ),
    fault(
        "out_of_bounds",
        "one element past a neighbour's shared memory",
        "cluster_ring",
        ("theirs[31 - thread]", "theirs[32 - thread]"),
        at=("= theirs[32 - thread]",),
    ),
    fault(
        "out_of_bounds",
        "a store to a CTA that there is not",
        "async_push",
        ("all_here, thread,", "all_here, thread + 1,"),
        at=("trtc::store_cluster_async",),
    ),
    fault(
        "deadlock",
        "a barrier that expects too many bytes",
        "async_push",
        ("4 * sizeof(float)", "5 * sizeof(float)"),
        at=("trtc::transaction_barrier_wait",),
    ),
    fault(
        "deadlock exited_shared_memory",
        "a CTA that nobody stores to",
        "async_push",
        ("if (thread < 4)", "if (thread < 3)"),
        at=("trtc::transaction_barrier_wait",),
    ),
    fault(
        "divergent_barrier deadlock",
        "one thread arrives for its CTA",
        "cluster_ring",
        ("  __cluster_barrier_arrive();  // all have written", "  if (thread == 0) __cluster_barrier_arrive();"),
        at=("__cluster_barrier_wait();  // all have written",),
    ),
    fault(
        "divergent_barrier",
        "an arrival without a wait",
        "cluster_ring",
        ("  __cluster_barrier_wait();  // all have read\n", ""),
    ),
    fault(
        "divergent_barrier",
        "a wait without an arrival",
        "cluster_ring",
        ("  __cluster_barrier_arrive();  // all have read\n", ""),
        at=("__cluster_barrier_wait();  // all have read",),
    ),
    # Asynchronous copies.
    race("a copy is read without a wait", "copy_async", ("  trtc::wait_async();\n", ""), at=STAGE_LINES),
    race(
        "others' copies are read without a barrier",
        "copy_async",
        ("  __syncthreads();\n", ""),
        at=STAGE_LINES,
        kinds=EARLY,
    ),
    race(
        "a barrier before the wait",
        "copy_async",
        ("  trtc::wait_async();\n  __syncthreads();\n", "  __syncthreads();\n  trtc::wait_async();\n"),
        at=STAGE_LINES,
    ),
    race(
        "one thread waits for the copies of all",
        "copy_async",
        ("trtc::wait_async", "if (thread == 0) trtc::wait_async"),
        at=STAGE_LINES,
    ),
    race(
        "a bulk copy is read without a wait",
        "copy_bulk",
        ("if (turn > 0) trtc::transaction_barrier_wait", "if (turn < 0) trtc::transaction_barrier_wait"),
        at=("trtc::copy_bulk", "sum += now"),
    ),
    race(
        "a bulk copy into a buffer that others still read",
        "copy_bulk",
        ("    __syncthreads();  // all have read\n", ""),
        at=("trtc::copy_bulk", "sum += now"),
        kinds=EARLY,
    ),
    race(
        "a barrier that expects less than a bulk copy brings",
        "copy_bulk",
        ("expect(here + turn % 2, 512)", "expect(here + turn % 2, turn == 1 ? 0 : 512)"),
        at=("trtc::copy_bulk", "sum += now"),
        kinds=EARLY + " deadlock",
    ),
    race("a ring of one buffer", "copy_ring", ("ring + next % 2 * 128", "ring"), at=("if (next < 4)", "sum += now")),
    race(
        "a copy into a buffer that others still read",
        "copy_ring",
        ("    __syncthreads();\n", ""),
        (
            "sum += now[(thread * 4 + i + 64) % 128];\n",
            "sum += now[(thread * 4 + i + 64) % 128];\n    __syncthreads();\n",
        ),
        at=("trtc::copy_async<16>(ring + thread", "if (next < 4)", "sum += now"),
        kinds=EARLY,
    ),
    race(
        "a ring without a wait",
        "copy_ring",
        ("    trtc::wait_async();\n", ""),
        at=("trtc::copy_async<16>(ring + thread", "if (next < 4)", "sum += now"),
    ),
    race(
        "the source of a copy is overwritten by others",
        "copy_in_place",
        ("  __syncthreads();\n", ""),
        at=("trtc::copy_async<4>", "out[thread] = 3.0f"),
    ),
    race(
        "the source of a copy is overwritten before the wait",
        "copy_in_place",
        (
            "  trtc::wait_async();\n  __syncthreads();\n",
            "  __syncthreads();\n  out[thread] = 0.0f;\n  trtc::wait_async();\n  __syncthreads();\n",
        ),
        at=("trtc::copy_async<4>", "out[thread] = 0.0f"),
    ),
    race(
        "a thread overwrites the source of its own copy before the wait",
        "copy_own",
        ("  trtc::wait_async();\n  out[thread] = 0.0f;\n", "  out[thread] = 0.0f;\n  trtc::wait_async();\n"),
        at=("trtc::copy_async<4>", "out[thread] = 0.0f"),
    ),
    fault(
        "unfinished_copy",
        "a copy that nobody waits for",
        "copy_ring",
        ("if (next < 4)", "if (next < 5)"),
        at=("if (next < 5)",),
    ),
    fault(
        "out_of_bounds",
        "a copy past the source's end",
        "copy_async",
        ("x + block * 128", "x + 4 + block * 128"),
        at=("x + 4 +",),
    ),
    fault(
        "out_of_bounds",
        "a copy past the end of dynamic shared memory",
        "copy_async",
        launch={"dynamic": 508},
        at=("trtc::copy_async<16>",),
    ),
    fault(
        "out_of_bounds",
        "a bulk copy past the source's end",
        "copy_bulk",
        ("x + turn * 128", "x + 256 + turn * 128"),
        at=("trtc::copy_bulk",),
    ),
    fault(
        "misaligned",
        "a bulk copy from an element on",
        "copy_bulk",
        ("x + turn * 128", "x + 1 + turn * 128"),
        at=("trtc::copy_bulk",),
    ),
    fault(
        "misaligned",
        "a copy to half its alignment",
        "copy_async",
        ("staged + thread * 4, x", "staged + thread * 2, x"),
        at=("staged + thread * 2",),
    ),
    fault(
        "misaligned",
        "copies of 16 bytes to an array of floats",
        "copy_async",
        ("TRTC_DYNAMIC_SHARED(float, staged)", "TRTC_SHARED(float, staged, 128)"),
        at=("trtc::copy_async<16>",),
    ),
    # Bounds.
    fault("out_of_bounds", "a read without a guard", "block_sum", ("i < n ? x[i] : 0.0f", "x[i]"), at=("= x[i];",)),
    fault("out_of_bounds", "a CTA too many", "block_sum", launch={"grid": 4}, at=("out[block] = ",)),
    fault(
        "out_of_bounds",
        "one element past shared memory",
        "stencil",
        ("(thread + 1) % 96", "thread + 1"),
        at=("const float right",),
    ),
    fault(
        "out_of_bounds",
        "one element before shared memory",
        "stencil",
        ("thread == 0 ? 95 : thread - 1", "thread - 1"),
        at=("const float left",),
    ),
    fault(
        "out_of_bounds uninitialised",
        "a pitch beyond a tile",
        "transpose",
        ("tile[ty * 17 + tx] =", "tile[ty * 18 + tx] ="),
        at=("tile[ty * 18 + tx] =", "= tile[tx * 17 + ty]"),
    ),
    fault(
        "out_of_bounds uninitialised",
        "rows and columns of a guard exchanged",
        "transpose",
        ("row < 40 && column < 24", "row < 24 && column < 40"),
        at=("= tile[tx * 17 + ty]",),
    ),
    fault(
        "out_of_bounds uninitialised",
        "half a guard",
        "transpose",
        ("to_row < 24 && to_column < 40", "to_row < 24"),
        at=("out[to_row * 40 + to_column]",),
    ),
    fault(
        "out_of_bounds",
        "a value past the last bin",
        "histogram",
        ("&bins[x[i]]", "bins + 1 + x[i]"),
        at=("atomicAdd(bins + 1",),
    ),
    fault(
        "out_of_bounds",
        "one element past dynamic shared memory",
        "two_parts",
        ("(thread + 7) % 32", "thread + 1"),
        at=("highs[thread + 1]",),
    ),
    fault(
        "out_of_bounds",
        "one element before dynamic shared memory",
        "two_parts",
        ("lows[31 - thread]", "lows[30 - thread]"),
        at=("lows[30 - thread]",),
    ),
    fault(
        "out_of_bounds", "a vector straddles the end", "vectors", ("i + 4 <= n", "i < n"), at=("float4*>(out + i) =",)
    ),
    fault("out_of_bounds", "one element past the end", "vectors", ("k < n", "k <= n"), at=("out[k] = x[k]",)),
    fault(
        "out_of_bounds",
        "a vector before the beginning",
        "vectors",
        ("const float4*>(x + i)", "const float4*>(x + i - 4)"),
        at=("x + i - 4",),
    ),
    fault(
        "out_of_bounds",
        "an index of 32 bits wraps around",
        "offset",
        ("static_cast<long long>(row) * width", "static_cast<unsigned>(row) * width"),
        at=("= x[at",),
    ),
    fault(
        "overflow",
        "an index of 32 bits overflows",
        "offset",
        ("static_cast<long long>(row) * width", "row * width"),
        at=("const long long at",),
    ),
    fault(
        "out_of_bounds",
        "a write between the rows of an array",
        "padded_rows",
        ("column < 40;", "column < 40 + (block == 1);"),
        ("x[block * 40 + column]", "1.0f"),
        at=("out[block * stride",),
    ),
    fault(
        "out_of_bounds",
        "an index that leaves one array and meets another",
        "two_parts",
        ("lows[31 - thread]", "lows[63 - thread]"),
        missed="it is an element of the same dynamic shared memory: only the kernel knows of its parts",
    ),
    fault("read_only", "an input is written", "shift", ("out[i] =", "x[i] ="), at=("x[i] = x",)),
    fault(
        "misaligned",
        "a vector load from one element on",
        "vectors",
        ("const float4*>(x + i)", "const float4*>(x + 1 + i)"),
        at=("x + 1 + i",),
    ),
    fault(
        "misaligned",
        "a vector store to two elements on",
        "vectors",
        ("float4*>(out + i)", "float4*>(out + 2 + i)"),
        at=("out + 2 + i",),
    ),
    # Uninitialised shared memory.
    fault(
        "uninitialised",
        "bins are never zeroed",
        "histogram",
        ("  for (int i = thread; i < 40; i += 32) bins[i] = 0;\n", ""),
        at=("atomicAdd(&bins",),
    ),
    fault(
        "uninitialised",
        "the last bins are never zeroed",
        "histogram",
        ("for (int i = thread; i < 40; i += 32) bins[i] = 0;", "bins[thread] = 0;"),
        at=("atomicAdd(&bins", "atomicAdd(&out"),
    ),
    fault(
        "uninitialised",
        "a ragged end is never written",
        "block_sum",
        ("  sums[thread] = i < n ? x[i] : 0.0f;", "  if (i < n) sums[thread] = x[i];"),
        at=("sums[thread] += ",),
    ),
    fault(
        "uninitialised",
        "a pitch of writes and another of reads",
        "transpose",
        ("tile[ty * 17 + tx]", "tile[ty * 16 + tx]"),
        at=("= tile[tx * 17 + ty]",),
    ),
    # Divergence.
    fault(
        "divergent_barrier",
        "an early return before a barrier",
        "block_sum",
        ("  sums[thread] = i <", "  if (i >= n) return;\n  sums[thread] = i <"),
        at=("__syncthreads();\n  for",),
    ),
    fault(
        "divergent_barrier",
        "a barrier in a branch",
        "block_sum",
        ("+ half];\n    __syncthreads();", "+ half], __syncthreads();"),
        at=("], __syncthreads();",),
    ),
    fault(
        "divergent_barrier",
        "different barriers in two branches",
        "branches",
        ("+ 1.0f;\n", "+ 1.0f;\n    __syncthreads();  // low\n"),
        ("- 1.0f;\n", "- 1.0f;\n    __syncthreads();  // high\n"),
        ("  }\n  __syncthreads();\n", "  }\n"),
        at=("// low", "// high"),
    ),
    fault(
        "divergent_barrier",
        "a consumer that does a tile less",
        "pipeline",
        ("tiles = 3", "tiles = produces ? 3 : 2"),
        at=("// full",),
    ),
    fault(
        "divergent_barrier deadlock",
        "a shuffle in a branch",
        "scan",
        ("    const int below = __shfl_up_sync(0xffffffffu, value, distance);\n", ""),
        ("value += below", "value += __shfl_up_sync(0xffffffffu, value, distance)"),
        at=("value += __shfl_up_sync",),
    ),
    fault(
        "divergent_barrier",
        "lanes that have left are waited for",
        "scan",
        ("  int value = i < n", "  if (i >= n) return;\n  int value = i < n"),
        at=("__shfl_up_sync",),
    ),
    fault(
        "divergent_barrier",
        "a mask that does not name its caller",
        "scan",
        ("__shfl_up_sync(0xffffffffu", "__shfl_up_sync(0x0fffffffu"),
        at=("__shfl_up_sync",),
    ),
    fault(
        "divergent_barrier",
        "a lane outside of the mask is read",
        "scan",
        ("__shfl_up_sync(0xffffffffu", "__shfl_up_sync(lane < 16 ? 0xffffu : 0xffff0000u"),
        at=("__shfl_up_sync",),
    ),
    fault(
        "divergent_barrier",
        "different shuffles in two branches",
        "scan",
        (
            "    const int below = __shfl_up_sync(0xffffffffu, value, distance);\n",
            "    int below;\n"
            "    if (lane < 16) below = __shfl_up_sync(0xffffffffu, value, distance);  // low\n"
            "    else below = __shfl_up_sync(0xffffffffu, value, distance);  // high\n",
        ),
        at=("// low", "// high"),
    ),
    fault(
        "divergent_barrier deadlock race",
        "a barrier of the warp in a branch",
        "warp_staging",
        ("__syncwarp();  // the second", "if (lane < 31) __syncwarp();  // the second"),
        at=("// the first", "// the second", *WARP_LINES),
    ),
    # Deadlocks.
    fault("deadlock", "a flag that nobody sets", "mailbox", ("      atomicExch(flag, 1u);\n", ""), at=("__nanosleep",)),
    fault(
        "deadlock",
        "a turn that never comes",
        "turns",
        ("static_cast<unsigned>(block)", "static_cast<unsigned>(block + 1)"),
        at=("trtc::spin_hint",),
    ),
    fault(
        "deadlock",
        "a grid barrier for a CTA too many",
        "grid_barrier",
        ("* gridDim.x)", "* (gridDim.x + 1))"),
        at=("__nanosleep",),
    ),
    fault(
        "deadlock",
        "a grid barrier in a launch that is not cooperative",
        "grid_barrier",
        launch={"cooperative": False},
        at=("__nanosleep",),
    ),
    fault(
        "deadlock",
        "a CTA waits for another one in a launch that is not cooperative",
        "mailbox",
        launch={"cooperative": False},
        orders=("last_in",),
        at=("__nanosleep",),
    ),
    fault("deadlock", "a lock that is not given back", "lock", ("      unlock(mutexes);\n", ""), at=("atomicCAS",)),
    fault(
        "deadlock",
        "two locks, each taken first by one CTA",
        "two_locks",
        ("first = min(from, to), second = max(from, to)", "first = from, second = to"),
        at=("atomicCAS",),
    ),
    fault(
        "deadlock",
        "two locks, each taken first by one CTA at once",
        "two_locks",
        ("first = min(from, to), second = max(from, to)", "first = from, second = to"),
        ("    __nanosleep(20);\n", ""),
        missed="a thread goes on until it waits: no order stops one between its locks",
    ),
    fault(
        "uninitialised",
        "a sum that does not begin at zero",
        "strided_loop",
        ("float sum = 0.0f;", "float sum;"),
        missed="a register holds a pattern, and nobody asks whether it was set: the sum is wrong",
    ),
    fault(
        "endless",
        "a loop that does not count",
        "strided_loop",
        ("    i += 32;\n", ""),
        at=("sum += x[i]",),
        orders=("first_in",),  # half a second each
    ),
    # Arithmetic.
    fault(
        "overflow",
        "a shift by more bits than there are",
        "arithmetic",
        (") << bits[thread];", ") << (bits[thread] + 12);"),
        at=("+ 12);",),
    ),
    fault(
        "overflow", "a float that no int holds", "arithmetic", ("x[thread] * 8.0f", "x[thread] * 8e9f"), at=("8e9f",)
    ),
    fault(
        "overflow",
        "a NaN as an int",
        "arithmetic",
        ("x[thread] * 8.0f", "x[thread] / x[thread]"),
        at=("const int level",),
    ),
    fault(
        "overflow",
        "a division by zero",
        "arithmetic",
        ("/ divisor[thread]", "/ (divisor[thread] - 1)"),
        at=("const int share",),
    ),
    fault(
        "overflow",
        "a sum that overflows",
        "arithmetic",
        ("share + steps", "share + 2147483000 + steps"),
        at=("2147483000",),
    ),
    fault(
        "out_of_bounds",
        "an index past a local array",
        "arithmetic",
        ("steps[thread % 4]", "steps[thread % 5]"),
        at=("steps[thread % 5]",),
    ),
    fault("trap", "what must not be", "arithmetic", ("x[thread] * 8.0f", "x[thread] * -8.0f"), at=("__trap();",)),
    # The library's own text.
    race(
        "sums of warps are read without a barrier",
        "norm",
        ("in_row / 32] = values[i];\n        }\n        cta_barrier();", "in_row / 32] = values[i];\n        }"),
        file="reduce.cuh",
        at=SUM_LINES,
        kinds=EARLY,
    ),
    race(
        "a row's shift is read without a barrier",
        "layer_norm",
        ("of_row[i] = values[i];\n      }\n      cta_barrier();", "of_row[i] = values[i];\n      }"),
        file="reduce.cuh",
        at=("if (in_row == 0) of_row[i] = values[i]", "values[i] = of_row[i]"),
        kinds=EARLY,
    ),
    race(
        "a row's sum is stored by every thread",
        "norm",
        ("const bool tells = place.thread == 0 &&", "const bool tells ="),
        file="norm_forward.cu",
    ),
    race(
        "a vector that others put together is copied without a barrier",
        "norm_misaligned",
        ("    if (N == 1 || aligned) return;\n    cta_barrier();", "    if (N == 1 || aligned) return;"),
        file="rows.cuh",
        kinds=EARLY,
    ),
    race("the next chunk overwrites the last one", "norm_chunks", ("if (again) cta_barrier();", ""), file="rows.cuh"),
    race(
        "the grid's sums are not acquired",
        "norm_grid",
        (
            "trtc_simulator::load_atomically(address, trtc_simulator::Order::acquire)",
            "trtc_simulator::load_atomically(address, trtc_simulator::Order::relaxed)",
        ),
        file="ptx.cuh",
    ),
    race(
        "the grid's sums are not released",
        "norm_grid",
        ("(address, value, trtc_simulator::Order::release)", "(address, value, trtc_simulator::Order::relaxed)"),
        file="ptx.cuh",
    ),
    race(
        "threads do not wait for the one that meets the grid",
        "norm_grid",
        (
            "      cta_barrier();\n#pragma unroll\n      for (int i = 0; i < Most; ++i) {\n        values[i] = load_r",
            "#pragma unroll\n      for (int i = 0; i < Most; ++i) {\n        values[i] = load_r",
        ),
        file="reduce.cuh",
    ),
    race(
        "a row's target is the one before",
        "norm_grid",
        ("(received / Buffers + 1u) *", "(received / Buffers) *"),
        file="reduce.cuh",
    ),
    race(
        "the rows of a grid share a counter",
        "norm_grid",
        ("add_release_global(workspace->arrived + buffer, 1u)", "add_release_global(workspace->arrived, 1u)"),
        ("load_acquire_global(workspace->arrived + buffer)", "load_acquire_global(workspace->arrived)"),
        file="reduce.cuh",
    ),
    race(
        "CTAs store their sums to one place",
        "norm_grid",
        (
            "i * CtasPerRow + rank, values[i]);\n        }\n        add",
            "i * CtasPerRow, values[i]);\n        }\n        add",
        ),
        file="reduce.cuh",
    ),
    race(
        "groups of CTAs share a workspace",
        "norm_grid",
        (" + cta_index() / CtasPerRow;", ";"),
        file="reduce.cuh",
    ),
    race(
        "the cluster's sums are read without a wait",
        "norm_cluster",
        ("      transaction_barrier_wait(all_here + buffer, received / Buffers % 2);\n", ""),
        file="reduce.cuh",
        kinds=EARLY + " exited_shared_memory",
    ),
    race(
        "the cluster's barriers are used without a wait",
        "norm_cluster",
        ("      if (sent == 0) cluster_wait();\n      if (thread < CtasPerRow)", "      if (thread < CtasPerRow)"),
        ("      cluster_arrive_relaxed();  //", "      //"),
        file="reduce.cuh",
        kinds=EARLY,
    ),
    race(
        "the cluster's barrier expects a sum too few",
        "norm_cluster",
        ("(all_here + i, exchanged * sizeof", "(all_here + i, (exchanged - 1) * sizeof"),
        file="reduce.cuh",
        kinds=EARLY + " exited_shared_memory",
    ),
    race(
        "a row is read from shared memory without a wait",
        "norm_staged",
        ("    wait_async();\n\n    // ---- Each row's", "\n    // ---- Each row's"),
        file="norm_forward.cu",
    ),
    fault(
        "deadlock",
        "the cluster's barrier expects a sum too many",
        "norm_cluster",
        ("(all_here + i, exchanged * sizeof", "(all_here + i, (exchanged + 1) * sizeof"),
        file="reduce.cuh",
        at=("transaction_barrier_wait(all_here + buffer",),
    ),
    fault(
        "deadlock",
        "the grid waits for a CTA too many",
        "norm_grid",
        ("static_cast<uint32>(CtasPerRow);\n", "static_cast<uint32>(CtasPerRow + 1);\n"),
        file="reduce.cuh",
        at=("spin_hint();\n      }",),
    ),
    fault(
        "out_of_bounds",
        "a ragged end is loaded as if it were whole",
        "norm",
        (
            "value[k].load_elements(from + k * stride, left - k * stride);",
            "value[k].load_elements(from + k * stride, N);",
        ),
        file="rows.cuh",
    ),
    fault(
        "out_of_bounds",
        "a ragged end is copied as if it were whole",
        "norm_staged",
        ("const int end = min(max(left - k * stride, 0), static_cast<int>(N));", "const int end = N;"),
        file="rows.cuh",
        at=("copy_async_part<Vec<T, N>::bytes>",),
    ),
    fault(
        "out_of_bounds",
        "a vector of the output straddles a row's end",
        "norm_padded",
        ("Config::exact || slot < columns)", "true)"),
        file="rows.cuh",
    ),
    fault(
        "out_of_bounds",
        "rows past the last one",
        "norm_rows",
        ("return Config::rows_per_cta == 1 || row < rows;", "return true;"),
        file="rows.cuh",
    ),
    fault(
        "out_of_bounds",
        "a row past the last one beside the last",
        "norm_together",
        ("min(first_row + r, params.rows - 1)", "first_row + r"),
        file="norm_forward.cu",
        at=("copy_async<Vec<T, N>::bytes>",),
    ),
    race(
        "rows that are together share their slot",
        "norm_together",
        ("shared + r * Config::slot_bytes;", "shared;"),
        file="norm_forward.cu",
    ),
    fault(
        "misaligned",
        "every row is taken to be aligned",
        "norm_shifted",
        ("  return bits % vec_alignment<T, N>() == 0;", "  return true;"),
        file="rows.cuh",
    ),
    fault(
        "misaligned",
        "words of an output that begins between two",
        "norm_misaligned",
        ("count > 0 ? static_cast<int>(reinterpret_cast<uint64>(global) % 4 / sizeof(T)) : 0", "0"),
        file="rows.cuh",
        at=("*reinterpret_cast<uint32*>",),
    ),
)


BY_NAME = {bug.name: bug for bug in BUGS}


def changed(bug: Bug) -> tuple[Subject | Norm, dict[str, str]]:
    """Return a bug's launch, and the texts of which its program is made: the kernel's is first."""
    subject = replace(SUBJECTS[bug.subject], **bug.launch)
    program = subject.spec.program
    texts = {f"{subject.spec.symbol}.cu": program, **sources.included(program)}
    file = bug.file or next(iter(texts))
    for old, new in bug.changes:
        assert texts[file].count(old) == 1, f"{old!r} is in {file} {texts[file].count(old)} times"
        assert old != new
        texts[file] = texts[file].replace(old, new)
    return subject, texts


class Changed(KernelSpec):
    """A spec with another program."""

    def __init__(self, spec: KernelSpec, program: str) -> None:
        self._spec, self._program = spec, program

    symbol = property(lambda self: self._spec.symbol)
    params = property(lambda self: self._spec.params)
    options = property(lambda self: self._spec.options)
    program = property(lambda self: self._program)


@functools.cache
def load(bug: Bug, order: str) -> Kernel:
    _, texts = changed(bug)
    manager, spec = managers(bug)
    with mock.patch.object(sources, "texts", lambda: texts):
        return manager.get(spec, device(order))


@functools.cache
def managers(bug: Bug) -> tuple[KernelManager, KernelSpec]:
    # Of a bug's own: what an image is made of is its spec, whose headers a manager takes to be the same for ever.
    subject, texts = changed(bug)
    return KernelManager(DiskCache(None)), Changed(subject.spec, next(iter(texts.values())))


@functools.cache
def report(bug: Bug, order: str) -> SimulationError | None:
    subject, _ = changed(bug)
    kernel, values = load(bug, order), subject.values()
    try:
        kernel.launch(subject.config, values)
    except SimulationError as error:
        return error
    return None


def line_of(text: str, at: int) -> int:
    """Return the line of an offset, as a compiler counts: the last #line before it says where."""
    before = text[:at]
    start = before.rfind("\n#line ") + 1
    said = int(before[start:].split()[1]) - 2 if start else 0
    return said + before[start:].count("\n") + 1


def lines_of(bug: Bug) -> set[tuple[str, int]]:
    _, texts = changed(bug)
    found = set()
    for wanted in bug.at:
        places = [(file, line_of(text, text.index(wanted))) for file, text in texts.items() if wanted in text]
        assert len(places) == 1 and sum(text.count(wanted) for text in texts.values()) == 1, f"{wanted!r}: {places}"
        found.add(places[0])
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_right_kernel_runs_without_a_report(name):
    subject = SUBJECTS[name]
    for order in ORDERS:
        values = subject.values()
        MANAGER.get(subject.spec, device(order)).launch(subject.config, values)
        subject.check(values)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug,
            marks=[pytest.mark.xfail(strict=True, reason=bug.missed)] if bug.missed else [],
            id=re.sub(r"\W+", "_", bug.name),
        )
        for bug in BUGS
    ],
)
def test_a_bug_is_reported_where_it_is(bug):
    lines = lines_of(bug)
    for order in bug.orders:
        error = report(bug, order)
        assert error is not None, f"no report in the order {order}"
        assert error.kind in bug.kinds.split(), f"{order}: {error}"
        for frames in (error.frames, error.other_frames):
            places = {(file, line) for _, file, line in frames}
            assert not lines or not places or places & lines, f"{order}: {error}\nis at none of {lines}"
        assert not lines or error.frames or error.other_frames, f"{order}: {error}\nis nowhere"


def test_almost_every_bug_is_reported_and_every_race():
    assert len(BY_NAME) == len(BUGS) >= 75
    assert sum(bug.races for bug in BUGS) >= 32
    missed = []
    for bug in BUGS:
        error = report(bug, bug.orders[0])
        if error is None or error.kind not in bug.kinds.split():
            missed.append(bug)
    print(f"{len(BUGS) - len(missed)} of {len(BUGS)} bugs, {sum(bug.races for bug in BUGS)} of them races and fences")
    assert not [bug.name for bug in missed if bug.races]
    assert len(missed) <= 0.05 * len(BUGS), [bug.name for bug in missed]


@pytest.mark.parametrize(
    "name",
    [
        "no barrier between the steps of a reduction",
        "a barrier in a branch",
        "a flag that nobody sets",
        "CTAs write one element",
        "one element past the end",
    ],
    ids=["a_missing_barrier", "a_divergent_barrier", "a_deadlock", "a_race", "an_overrun"],
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_fault_takes_less_than_a_second_and_does_no_harm(name, order):
    bug = BY_NAME[name]
    subject, right = changed(bug)[0], SUBJECTS[bug.subject]
    kernel = load(bug, order)
    right_kernel = MANAGER.get(right.spec, device(order))
    for _ in range(3):
        values = subject.values()
        start = time.perf_counter()
        with pytest.raises(SimulationError) as raised:
            kernel.launch(subject.config, values)
        assert time.perf_counter() - start < 1.0
        assert raised.value.kind in bug.kinds.split()
        # Neither is anything left of the launch that failed, nor is the kernel itself of no more use.
        values = right.values()
        right_kernel.launch(right.config, values)
        right.check(values)


def test_a_report_names_both_parties_and_survives_a_pickle():
    (line,) = lines_of(BY_NAME["CTAs write one element"])
    error = report(BY_NAME["CTAs write one element"], "first_in")
    assert (error.kernel, error.kind, (error.file, error.line)) == ("kernel", "race", line)
    assert (error.block, error.thread) == ((1, 0, 0), (0, 0, 0))
    assert (error.other_block, error.other_thread) == ((0, 0, 0), (0, 0, 0))
    assert error.other_frames == error.frames == [("kernel", *line)]
    assert "out" in error.what
    for part in ("kernel: race", error.what, "block (1, 0, 0) thread (0, 0, 0)", "block (0, 0, 0) thread (0, 0, 0)"):
        assert part in str(error)
    assert str(error).count(f"{line[0]}:{line[1]}") == 2

    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is SimulationError
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_a_report_in_a_header_says_who_called_it():
    error = report(BY_NAME["sums of warps are read without a barrier"], "first_in")
    assert (error.file, error.line) in lines_of(BY_NAME["sums of warps are read without a barrier"])
    assert [file for _, file, _ in error.frames][-2:] == ["norm_forward.cu", f"{SUBJECTS['norm'].spec.symbol}.cu"]
    assert ", called from norm_forward.cu:" in str(error)
