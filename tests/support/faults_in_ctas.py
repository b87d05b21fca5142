# SPDX-License-Identifier: Apache-2.0
"""Kernels whose CTAs do without each other, and their faults: shared memory, warps, bounds, asynchronous copies."""

from __future__ import annotations

import numpy as np
from faults import PTX, Subject, floats, relaxed_cells

BINS = (np.arange(256) * 11 % 40).astype(np.int32)
THREADS, SMALL = np.arange(32), floats(32).astype(np.int32)
POSITIVE = (np.arange(96) % 5 - 2).astype(np.int32)
# Of four tiles, as they are read: from half a tile on.
STAGED = np.roll(floats(512).reshape(4, 128), -64, axis=1).reshape(4, 32, 4).sum(axis=(0, 2))

# fmt: off
SUBJECTS = {
    "block_sum": Subject({"out": np.add.reduceat(floats(150), [0, 64, 128])}, {"x": floats(150)}, scalars={"n": 150},
        grid=3, block=64, at="sums[thread] +=", text="""
  TRTC_SHARED(float, sums, 64);
  const int i = block * 64 + thread;
  sums[thread] = i < n ? x[i] : 0.0f;
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (thread < half) sums[thread] += sums[thread + half];
    __syncthreads();
  }
  if (thread == 0) out[block] = sums[0];
""", faults=r"""
early: no barrier between the writes and another thread's reads | -__syncthreads(); after : 0.0f;
    @ sums[thread] = i < n | ...
race: no barrier between the steps of a reduction | -__syncthreads(); after + half];
race: every thread writes the result | if (thread == 0) out => out @ +
out_of_bounds: a read without a guard | i < n ? x[i] : 0.0f => x[i] @ +
out_of_bounds: a CTA too many | launch grid=4 @ out[block] =
uninitialised: a ragged end is never written | sums[thread] = i < n ? x[i] : 0.0f; => if (i < n) sums[thread] = x[i];
divergent_barrier: an early return before a barrier | sums[thread] = i < => if (i >= n) return;\n  sums[thread] = i <
    @ __syncthreads();\n  for
divergent_barrier: a barrier in a branch | + half];\n    __syncthreads(); => + half], __syncthreads();
"""),
    "stencil": Subject({"out": relaxed_cells(floats(96), 4)}, {"x": floats(96)}, block=96, text="""
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
""", faults=r"""
race: no barrier between the reads and the next writes | -__syncthreads(); after % 96];
    @ const float left | const float right | = left + right;
early: no barrier between the writes and the next reads | -__syncthreads(); after ++step) {
    @ cells[thread] = x[thread] | const float left | const float right | = left + right;
out_of_bounds: one element past shared memory | (thread + 1) % 96 => thread + 1
out_of_bounds: one element before shared memory | thread == 0 ? 95 : thread - 1 => thread - 1
"""),
    "double_buffer": Subject({"out": 5 * floats(64) + 4 * floats(64)[::-1]}, {"x": floats(64)}, block=64,
        at="row[thread] = value; | value +=", text="""
  TRTC_SHARED(float, rows, 2 * 64);
  float value = x[thread];
  for (int step = 0; step < 2; ++step) {
    float* row = rows + step % 2 * 64;
    row[thread] = value;
    __syncthreads();
    value += 2.0f * row[63 - thread];
  }
  out[thread] = value;
""", faults=r"""
race: one buffer where one barrier a step needs two | step % 2 * 64 => 0
early: a barrier of the warp where the CTA's is needed | __syncthreads => __syncwarp
"""),
    "warp_staging": Subject({"out": 2 * floats(64) + 2 * floats(64)[np.arange(64) ^ 17]}, {"x": floats(64)}, block=64,
        at="mine[lane] = value | value += mine", text="""
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
""", faults=r"""
early: no barrier of the warp before others' values are read | -// the first
race: no barrier of the warp before values are overwritten | -// the second
race: a shuffle taken for a fence | __syncwarp();  // the first => __shfl_xor_sync(0xffffffffu, value, 1);
race: a vote taken for a fence | __syncwarp();  // the second => __any_sync(0xffffffffu, 1);
early: a barrier of half the warp | __syncwarp();  // the first => __syncwarp(lane < 16 ? 0x0000ffffu : 0xffff0000u);
divergent_barrier deadlock race: a barrier of the warp in a branch
    | __syncwarp();  // the second => if (lane < 31) __syncwarp();  // the second @ // the first | // the second | ...
"""),
    "warp_synchronous": Subject({"out": floats(32).sum(keepdims=True)}, {"x": floats(32)}, text="""
  TRTC_SHARED(float, staging, 32);
  volatile float* sums = staging;
  sums[thread] = x[thread];
  __syncwarp();
  for (int half = 16; half > 0; half /= 2) {
    if (thread < half) sums[thread] = sums[thread] + sums[thread + half];
    __syncwarp();  // of a step
  }
  if (thread == 0) out[0] = sums[0];
""", faults=r"""
race: a warp's reduction without barriers | volatile float* sums => float* sums | -// of a step
race: a warp's reduction that trusts in volatile | -// of a step
    | missed volatile accesses are relaxed atomic ones in CUDA's memory model: no race, but an order by luck @ *
"""),
    "histogram": Subject({"out": np.bincount(BINS, minlength=40).astype(np.int32)}, {"x": BINS},
        {"out": np.zeros(40, np.int32)}, grid=2, at="atomicAdd(&bins | atomicAdd(&out", text="""
  TRTC_SHARED(int, bins, 40);
  for (int i = thread; i < 40; i += 32) bins[i] = 0;
  __syncthreads();  // zeroed
  for (int i = block * 32 + thread; i < 256; i += 64) atomicAdd(&bins[x[i]], 1);
  __syncthreads();  // counted
  for (int i = thread; i < 40; i += 32) atomicAdd(&out[i], bins[i]);
""", faults=r"""
early: bins are counted before they are zeroed | -// zeroed @ bins[i] = 0 | atomicAdd(&bins
race: bins are read while others still count | -// counted
race: CTAs add without atomics | atomicAdd(&out[i], bins[i]) => out[i] += bins[i] @ +
out_of_bounds: a value past the last bin | &bins[x[i]] => bins + 1 + x[i] @ +
uninitialised: bins are never zeroed | -for (int i = thread; i < 40; i += 32) bins[i] = 0; @ atomicAdd(&bins
uninitialised: the last bins are never zeroed | for (int i = thread; i < 40; i += 32) bins[i] = 0; => bins[thread] = 0;
"""),
    "counter": Subject({"out": np.repeat((POSITIVE.reshape(3, 32) > 0).sum(axis=1), 32).astype(np.int32)},
        {"x": POSITIVE}, text="""
  TRTC_SHARED(int, found, 1);
  for (int tile = 0; tile < 3; ++tile) {
    if (thread == 0) found[0] = 0;
    __syncthreads();  // reset
    if (x[tile * 32 + thread] > 0) atomicAdd(found, 1);
    __syncthreads();  // counted
    out[tile * 32 + thread] = found[0];
    __syncthreads();  // read
  }
""", faults=r"""
race: a count is reset while others still read it | -// read @ found[0] = 0; | = found[0];
race: a count is read while others still add | -// counted @ atomicAdd(found, 1) | = found[0];
race: every thread resets the count | if (thread == 0) found => found
race: a count without an atomic addition | atomicAdd(found, 1) => found[0] += 1
"""),
    "transpose": Subject({"out": np.ascontiguousarray(floats(960).reshape(40, 24).T).reshape(-1)}, {"x": floats(960)},
        grid=(2, 3, 1), block=(16, 16, 1), at="= tile[tx * 17 + ty]", text="""
  TRTC_SHARED(float, tile, 16 * 17);
  const int tx = thread, ty = static_cast<int>(threadIdx.y);
  const int column = block * 16 + tx, row = static_cast<int>(blockIdx.y) * 16 + ty;
  if (row < 40 && column < 24) tile[ty * 17 + tx] = x[row * 24 + column];
  __syncthreads();
  const int to_column = static_cast<int>(blockIdx.y) * 16 + tx, to_row = block * 16 + ty;
  if (to_row < 24 && to_column < 40) out[to_row * 40 + to_column] = tile[tx * 17 + ty];
""", faults=r"""
early: a tile is transposed without a barrier | -__syncthreads(); @ tile[ty * 17 + tx] = | ...
early: rows of a tile overlap | tile[ty * 17 + tx] => tile[ty * 15 + tx] @ tile[ty * 15 + tx] = | ...
out_of_bounds uninitialised: a pitch beyond a tile | tile[ty * 17 + tx] = => tile[ty * 18 + tx] =
    @ tile[ty * 18 + tx] = | ...
out_of_bounds uninitialised: rows and columns of a guard exchanged | row < 40 && column < 24 => row < 24 && column < 40
out_of_bounds uninitialised: half a guard | to_row < 24 && to_column < 40 => to_row < 24
uninitialised: a pitch of writes and another of reads | tile[ty * 17 + tx] => tile[ty * 16 + tx]
"""),
    "branches": Subject({"out": (floats(64) + np.repeat(np.float32([1, -1]), 32))[::-1]}, {"x": floats(64)}, block=64,
        text="""
  TRTC_SHARED(float, values, 64);
  float* mine = values;
  if (thread < 32) {
    mine[thread] = x[thread] + 1.0f;
  } else {
    mine[thread] = x[thread] - 1.0f;
  }
  __syncthreads();
  out[thread] = mine[63 - thread];
""", faults=r"""
divergent_barrier: different barriers in two branches | + 1.0f; => + 1.0f;\n    __syncthreads();  // low
    | ] - 1.0f; => ] - 1.0f;\n    __syncthreads();  // high | -__syncthreads(); after // high @ // low | // high
"""),
    "pipeline": Subject({"out": floats(96).reshape(3, 32).sum(axis=0)[::-1]}, {"x": floats(96)}, block=64, text="""
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
""", faults=r"""
race: a producer goes on before the consumer has read | -// empty @ slot[thread] = | sum += slot
divergent_barrier: a consumer that does a tile less | tiles = 3 => tiles = produces ? 3 : 2 @ // full
"""),
    "two_parts": Subject({"out": floats(32)[::-1] + 2 * np.roll(floats(32), -7)}, {"x": floats(32)}, dynamic=256,
        text="""
  TRTC_DYNAMIC_SHARED(float, memory);
  float* lows = memory;
  float* highs = memory + 32;
  lows[thread] = x[thread];
  highs[thread] = 2.0f * x[thread];
  __syncthreads();
  out[thread] = lows[31 - thread] + highs[(thread + 7) % 32];
""", faults=r"""
race: two parts of shared memory overlap | memory + 32 => memory + 31 @ lows[thread] = | highs[thread] =
out_of_bounds: one element past dynamic shared memory | (thread + 7) % 32 => thread + 1
out_of_bounds: one element before dynamic shared memory | lows[31 - thread] => lows[30 - thread]
out_of_bounds: an index that leaves one array and meets another | lows[31 - thread] => lows[63 - thread]
    | missed it is an element of the same dynamic shared memory: only the kernel knows of its parts @ *
"""),
    "shared_flag": Subject({"out": np.float32([9])}, {"x": np.float32([8])}, block=64,
        at="data[0] = x[0] | out[0] = data[0]", text="""
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
""", faults=r"""
race: no fence before a flag in shared memory | -// before the flag
race: no fence behind a flag in shared memory | -// behind the flag
race: a flag in shared memory is set by a plain store | atomicExch(ready, 1u) => *ready = 1u
    @ *ready = 1u | atomicAdd(ready, 0u)
"""),
    "scan": Subject(
        {"out": np.concatenate([np.cumsum(part) for part in np.split(BINS[:120], [32, 64, 96])]).astype(np.int32)},
        {"x": BINS[:120]}, scalars={"n": 120}, grid=2, block=64, at="__shfl_up_sync", text="""
  const int i = block * 64 + thread, lane = thread % 32;
  int value = i < n ? x[i] : 0;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  if (i < n) out[i] = value;
""", faults=r"""
divergent_barrier deadlock: a shuffle in a branch | -const int below = __shfl_up_sync(0xffffffffu, value, distance);
    | value += below => value += __shfl_up_sync(0xffffffffu, value, distance)
divergent_barrier: lanes that have left are waited for | int value = i < n => if (i >= n) return;\n  int value = i < n
divergent_barrier: a mask that does not name its caller | __shfl_up_sync(0xffffffffu => __shfl_up_sync(0x0fffffffu
divergent_barrier: a lane outside of the mask is read
    | __shfl_up_sync(0xffffffffu => __shfl_up_sync(lane < 16 ? 0xffffu : 0xffff0000u
divergent_barrier: different shuffles in two branches | const int below = => int below;\n    if (lane < 16) below =
    | distance);\n => distance);  // low\n    else below = __shfl_up_sync(0xffffffffu, value, distance);  // high\n
    @ // low | // high
"""),
    "vectors": Subject({"out": floats(130)}, {"x": floats(130)}, scalars={"n": 130}, grid=2, text="""
  const long long i = (block * 32 + thread) * 4;
  if (i + 4 <= n) {
    *reinterpret_cast<float4*>(out + i) = *reinterpret_cast<const float4*>(x + i);
  } else {
    for (long long k = i; k < n; ++k) out[k] = x[k];
  }
""", faults=r"""
out_of_bounds: a vector straddles the end | i + 4 <= n => i < n @ float4*>(out + i) =
out_of_bounds: one element past the end | k < n => k <= n
out_of_bounds: a vector before the beginning | const float4*>(x + i) => const float4*>(x + i - 4)
misaligned: a vector load from one element on | const float4*>(x + i) => const float4*>(x + 1 + i)
misaligned: a vector store to two elements on | float4*>(out + i) => float4*>(out + 2 + i)
"""),
    "offset": Subject({"out": np.arange(0, 32 * 70000, 70000).astype(np.int32)},
        {"x": np.arange(32 * 70000, dtype=np.int32)}, scalars={"first_row": 70000, "stride": 70000}, text="""
  const int row = static_cast<int>(first_row) + thread, width = static_cast<int>(stride);
  const long long at = static_cast<long long>(row) * width;
  out[thread] = x[at - first_row * stride];
""", faults=r"""
out_of_bounds: an index of 32 bits wraps around | long long>(row) => unsigned>(row) @ = x[at
overflow: an index of 32 bits overflows | static_cast<long long>(row) * width => row * width
"""),
    "padded_rows": Subject({"out": floats(144).reshape(3, 48)[:, :40]},
        {"x": np.ascontiguousarray(floats(144).reshape(3, 48)[:, :40]).reshape(-1)}, scalars={"stride": 48}, grid=3,
        padding=8, text="""
  for (int column = thread; column < 40; column += 32) out[block * stride + column] = x[block * 40 + column];
""", faults=r"""
out_of_bounds: a write between the rows of an array | column < 40; => column < 40 + (block == 1);
    | x[block * 40 + column] => 1.0f
"""),
    "arithmetic": Subject({"out": (SMALL * 8 // (THREADS % 3 + 1) + 10 ** (THREADS % 4)).astype(np.int32)},
        {"x": floats(32), "divisor": (THREADS % 3 + 1).astype(np.int32), "bits": np.full(32, 20, np.int32)}, text="""
  const int steps[4] = {1, 10, 100, 1000};
  const int level = static_cast<int>(x[thread] * 8.0f);
  const int share = level / divisor[thread];
  const unsigned word = static_cast<unsigned>(share + steps[thread % 4]) << bits[thread];
  if (share < 0) __trap();
  out[thread] = static_cast<int>(word >> bits[thread]);
""", faults=r"""
overflow: a shift by more bits than there are | ) << bits[thread]; => ) << (bits[thread] + 12);
overflow: a float that no int holds | x[thread] * 8.0f => x[thread] * 8e9f
overflow: a NaN as an int | x[thread] * 8.0f => x[thread] / x[thread]
overflow: a division by zero | / divisor[thread] => / (divisor[thread] - 1)
overflow: a sum that overflows | share + steps => share + 2147483000 + steps
out_of_bounds: an index past a local array | steps[thread % 4] => steps[thread % 5]
trap: what must not be | x[thread] * 8.0f => x[thread] * -8.0f @ __trap();
"""),
    "strided_loop": Subject({"out": floats(128).reshape(4, 32).sum(axis=0)}, {"x": floats(128)}, text="""
  float sum = 0.0f;
  int i = thread;
  while (i < 128) {
    sum += x[i];
    i += 32;
  }
  out[thread] = sum;
""", faults=r"""
uninitialised: a sum that does not begin at zero | float sum = 0.0f; => float sum;
    | missed a register holds a pattern, and nobody asks whether it was set: the sum is wrong @ *
endless: a loop that does not count | -i += 32; | orders first_in
"""),
    "copy_async": Subject({"out": floats(256).reshape(2, 128)[:, ::-1].reshape(-1)}, {"x": floats(256)}, grid=2,
        dynamic=512, head=PTX, at="trtc::copy_async<16>( | = staged[127 - i]", text="""
  TRTC_DYNAMIC_SHARED(float, staged);
  trtc::copy_async<16>(staged + thread * 4, x + block * 128 + thread * 4);
  trtc::wait_async();
  __syncthreads();
  for (int i = thread; i < 128; i += 32) out[block * 128 + i] = staged[127 - i];
""", faults=r"""
race: a copy is read without a wait | -trtc::wait_async();
early: others' copies are read without a barrier | -__syncthreads();
race: a barrier before the wait | trtc::wait_async();\n  __syncthreads(); => __syncthreads();\n  trtc::wait_async();
race: one thread waits for the copies of all | trtc::wait_async => if (thread == 0) trtc::wait_async
out_of_bounds: a copy past the source's end | x + block * 128 => x + 4 + block * 128 @ +
out_of_bounds: a copy past the end of dynamic shared memory | launch dynamic=508 @ trtc::copy_async<16>
misaligned: a copy to half its alignment | staged + thread * 4, x => staged + thread * 2, x @ +
misaligned: copies of 16 bytes to an array of floats
    | TRTC_DYNAMIC_SHARED(float, staged) => TRTC_SHARED(float, staged, 128) @ trtc::copy_async<16>
"""),
    "copy_ring": Subject({"out": STAGED}, {"x": floats(640)}, dynamic=1024, head=PTX,
        at="trtc::copy_async<16>(ring + thread | if (next < 4) | sum += now", text="""
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
""", faults=r"""
race: a ring of one buffer | ring + next % 2 * 128 => ring @ if (next < 4) | sum += now
early: a copy into a buffer that others still read | -__syncthreads(); | % 128]; => % 128];\n    __syncthreads();
race: a ring without a wait | -trtc::wait_async();
unfinished_copy: a copy that nobody waits for | if (next < 4) => if (next < 5) @ +
"""),
    "copy_in_place": Subject({"out": 3 * floats(32)[::-1]}, {}, {"out": floats(32)}, head=PTX, text="""
  TRTC_SHARED(float, staged, 32);
  trtc::copy_async<4>(staged + thread, out + (31 - thread));
  trtc::wait_async();
  __syncthreads();
  out[thread] = 3.0f * staged[thread];
""", faults=r"""
race: the source of a copy is overwritten by others | -__syncthreads(); @ trtc::copy_async<4> | out[thread] = 3.0f
race: the source of a copy is overwritten before the wait
    | trtc::wait_async(); => __syncthreads();\n  out[thread] = 0.0f;\n  trtc::wait_async();
    @ trtc::copy_async<4> | out[thread] = 0.0f
"""),
    "copy_own": Subject({"out": floats(32)[::-1]}, {}, {"out": floats(32)}, head=PTX, text="""
  TRTC_SHARED(float, staged, 32);
  trtc::copy_async<4>(staged + thread, out + thread);
  trtc::wait_async();
  out[thread] = 0.0f;
  __syncthreads();
  out[thread] = staged[31 - thread];
""", faults=r"""
race: a thread overwrites the source of its own copy before the wait
    | trtc::wait_async();\n  out[thread] = 0.0f; => out[thread] = 0.0f;\n  trtc::wait_async();
    @ trtc::copy_async<4> | out[thread] = 0.0f
"""),
    "copy_bulk": Subject({"out": STAGED}, {"x": floats(640)}, dynamic=1024, head=PTX,
        at="trtc::copy_bulk | sum += now", text="""
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
""", faults=r"""
race: a bulk copy is read without a wait | if (turn > 0) => if (turn < 0)
early: a bulk copy into a buffer that others still read | -// all have read
early deadlock: a barrier that expects less than a bulk copy brings
    | expect(here + turn % 2, 512) => expect(here + turn % 2, turn == 1 ? 0 : 512)
out_of_bounds: a bulk copy past the source's end | x + turn * 128 => x + 256 + turn * 128 @ +
misaligned: a bulk copy from an element on | x + turn * 128 => x + 1 + turn * 128 @ +
"""),
}
