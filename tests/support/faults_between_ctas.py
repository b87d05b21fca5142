# SPDX-License-Identifier: Apache-2.0
"""Kernels whose CTAs meet, kernels of this package, and their faults: grids, locks, clusters, headers."""

from __future__ import annotations

import numpy as np
from faults import PTX, Norm, Subject, floats, relaxed_cells

from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.spec import FLOAT16

ZERO = np.zeros(1, np.uint32)
LOCKS = """
__device__ void lock(unsigned* mutex) {
  while (atomicCAS(mutex, 0u, 1u) != 0u) __nanosleep(20);
  __threadfence();  // behind the lock
}
__device__ void unlock(unsigned* mutex) {
  __threadfence();  // before the unlock
  atomicExch(mutex, 0u);
}"""

# fmt: off
SUBJECTS = {
    "shift": Subject({"out": np.roll(floats(96), -1) + 1}, {"x": floats(96)}, {"out": np.ones(96, np.float32)}, grid=3,
        text="""
  const int i = block * 32 + thread;
  out[i] = x[(i + 1) % 96] + 1.0f;
""", faults=r"""
race: CTAs read what others overwrite | x[(i + 1) % 96] => out[(i + 1) % 96]
race: CTAs write one element | out[i] = => out[thread] =
read_only: an input is written | out[i] = => x[i] =
"""),
    "last_block": Subject({"out": np.full(32, floats(128).sum())}, {"x": floats(128)},
        {"partials": np.zeros(4, np.float32), "ticket": ZERO}, grid=4, at="partials[block] = sum | total += partials",
        text="""
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
""", faults=r"""
race: CTAs write one partial sum | partials[block] => partials[0] @ +
race: no fence before a ticket | -// before the ticket
race: no fence behind a ticket | -// behind the ticket
race: a fence of the CTA before a ticket of the grid | __threadfence();  // before the ticket => __threadfence_block();
race: a fence of the CTA behind a ticket of the grid | __threadfence();  // behind the ticket => __threadfence_block();
race: a ticket that is no atomic | atomicAdd(ticket, 1u) => (*ticket)++ @ +
race: a partial sum is written behind its ticket | -partials[block] = sum;
    | __syncthreads(); => if (thread == 0) partials[block] = sum;\n  __syncthreads();
race: every CTA takes itself for the last one | if (last[0]) => if (thread >= 0) @ out[thread] = total | ...
early: a CTA reads whether it is the last before it knows | -__syncthreads(); @ last[0] = | if (last[0]
"""),
    "mailbox": Subject({"out": 2 * floats(32)[::-1]}, {"x": floats(32)},
        {"data": np.zeros(32, np.float32), "flag": ZERO}, grid=2, cooperative=True,
        at="data[thread] = | out[thread] = data", text="""
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
""", faults=r"""
race: no fence before a flag | -// before the flag
race: no fence behind a flag | -// behind the flag
race: a flag is set before other threads have written | -__syncthreads(); after x[thread];
race: threads do not wait for the one that waits | -__syncthreads(); after // behind the flag
race: nobody waits for a flag | -while (atomicAdd(flag, 0u) == 0u) __nanosleep(20);
race: a flag is set by a plain store | atomicExch(flag, 1u) => *flag = 1u @ *flag = 1u | atomicAdd(flag, 0u)
race: a flag is read by a plain load | atomicAdd(flag, 0u) == 0u => *flag == 0u @ *flag == 0u | atomicExch(flag, 1u)
race: a fence of the CTA before a flag of the grid | __threadfence();  // before the flag => __threadfence_block();
deadlock: a flag that nobody sets | -atomicExch(flag, 1u); @ __nanosleep
deadlock: a CTA waits for another one in a launch that is not cooperative | launch cooperative=0 | orders last_in
    @ __nanosleep
"""),
    "volatile_mailbox": Subject({"out": np.float32([5])}, {"x": np.float32([5])},
        {"data": np.zeros(1, np.float32), "flag": ZERO}, grid=2, cooperative=True,
        at="data[0] = x[0] | out[0] = data[0]", text="""
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
""", faults=r"""
race: no fence before a volatile flag | -// before the flag
race: no fence behind a volatile flag | -// behind the flag
race: a fence that comes before the data
    | data[0] = x[0];\n    __threadfence(); => __threadfence();\n    data[0] = x[0];
"""),
    "turns": Subject({"out": floats(96).reshape(3, 32).sum(axis=0)}, {"x": floats(96)},
        {"out": np.zeros(32, np.float32), "turn": ZERO}, grid=3, cooperative=True, head=PTX,
        at="out[thread] +=", text="""
  if (thread == 0) {
    while (trtc::load_acquire_global(turn) != static_cast<unsigned>(block)) trtc::spin_hint();
  }
  __syncthreads();
  out[thread] += x[block * 32 + thread];
  __syncthreads();
  if (thread == 0) trtc::add_release_global(turn, 1u);
""", faults=r"""
race: a turn is passed on without a release | trtc::add_release_global(turn, 1u) => atomicAdd(turn, 1u)
race: a turn is taken without an acquire | trtc::load_acquire_global(turn) => *static_cast<volatile unsigned*>(turn)
race: a turn is passed on before all threads are done | -__syncthreads(); after out[thread] +=
race: only one thread waits for its turn | -__syncthreads(); after trtc::spin_hint();
deadlock: a turn that never comes | static_cast<unsigned>(block) => static_cast<unsigned>(block + 1) @ +
"""),
    "grid_barrier": Subject(
        {"out": relaxed_cells(floats(128), 3)}, {},
        {"cells": np.concatenate([floats(128), np.zeros(128, np.float32)]), "arrived": ZERO}, grid=4, cooperative=True,
        at="to[i] = from | out[i] = from", head="""
__device__ void grid_barrier(unsigned* arrived, unsigned round) {
  __syncthreads();  // before the arrival
  if (threadIdx.x == 0) {
    __threadfence();  // before the arrival
    atomicAdd(arrived, 1u);
    while (*static_cast<volatile unsigned*>(arrived) < (round + 1u) * gridDim.x) __nanosleep(20);
    __threadfence();  // behind the wait
  }
  __syncthreads();  // behind the wait
}""", text="""
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
""", faults=r"""
race: a grid barrier without one of the CTA before | -__syncthreads();  // before the arrival
race: a grid barrier without one of the CTA behind | -__syncthreads();  // behind the wait
race: a grid barrier without a release | -__threadfence();  // before the arrival
race: a grid barrier without an acquire | -__threadfence();  // behind the wait
race: a grid barrier that one CTA may miss | * gridDim.x) => * (gridDim.x - 1))
race: a grid barrier that is met once | (round + 1u) * gridDim.x => gridDim.x | orders first_in random
race: a grid barrier a step, and one buffer | float* to = cells + 128 => float* to = cells
deadlock: a grid barrier for a CTA too many | * gridDim.x) => * (gridDim.x + 1)) @ +
deadlock: a grid barrier in a launch that is not cooperative | launch cooperative=0 @ __nanosleep
"""),
    "lock": Subject({"out": np.int32([120])}, {"x": np.int32([10, 20, 30])},
        {"out": np.zeros(1, np.int32), "mutexes": ZERO}, grid=3, cooperative=True, head=LOCKS,
        at="before = out[0] | out[0] = before", text="""
  if (thread == 0) {
    for (int k = 0; k < 2; ++k) {
      lock(mutexes);
      const int before = out[0];
      __nanosleep(20);
      out[0] = before + x[block];
      unlock(mutexes);
    }
  }
""", faults=r"""
race: a lock without a fence behind it | -// behind the lock
race: an unlock without a fence before it | -// before the unlock
race: an unlock by a plain store | atomicExch(mutex, 0u) => *mutex = 0u @ *mutex = 0u | atomicCAS
race: no lock | -unlock(mutexes); | -lock(mutexes);
race: CTAs with different locks | unlock(mutexes); => unlock(mutexes + block % 2);
    | lock(mutexes); => lock(mutexes + block % 2); | launch mutexes=2
deadlock: a lock that is not given back | -unlock(mutexes); @ atomicCAS
"""),
    "two_locks": Subject({"out": np.int32([102, 102])}, {},
        {"out": np.full(2, 100, np.int32), "mutexes": np.zeros(2, np.uint32)}, grid=2, cooperative=True, head=LOCKS,
        text="""
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
""", faults=r"""
deadlock: two locks, each taken first by one CTA
    | min(from, to), second = max(from, to) => from, second = to @ atomicCAS
deadlock: two locks, each taken first by one CTA at once | min(from, to), second = max(from, to) => from, second = to
    | -__nanosleep(20); after if (thread == 0) {
    | missed a thread goes on until it waits: no order stops one between its locks @ *
"""),
    "cluster_ring": Subject({"out": np.roll(floats(256).reshape(2, 4, 32), -1, axis=1)[..., ::-1].reshape(-1)},
        {"x": floats(256)}, grid=8, cluster=4, at="mine[thread] = x | = theirs[31 - thread]", text="""
  TRTC_SHARED(float, mine, 32);
  const unsigned rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
  mine[thread] = x[block * 32 + thread];
  __cluster_barrier_arrive();  // all have written
  __cluster_barrier_wait();  // all have written
  const float* theirs = static_cast<const float*>(__cluster_map_shared_rank(mine, (rank + 1) % size));
  out[block * 32 + thread] = theirs[31 - thread];
  __cluster_barrier_arrive();  // all have read
  __cluster_barrier_wait();  // all have read
""", faults=r"""
remote: no cluster barrier before a neighbour's shared memory is read
    | -arrive();  // all have written | -// all have written
race: an arrival that does not release | arrive();  // all have written => arrive_relaxed();
remote: a barrier of the CTA before a neighbour's shared memory is read
    | __cluster_barrier_arrive();  // all have written => __syncthreads(); | -// all have written
exited_shared_memory: a CTA leaves while a neighbour reads its shared memory
    | -arrive();  // all have read | -// all have read @ = theirs[31 - thread]
exited_shared_memory: a barrier of the CTA before it leaves, where the cluster's is needed
    | __cluster_barrier_arrive();  // all have read => __syncthreads(); | -// all have read @ = theirs[31 - thread]
out_of_bounds: a neighbour of the last rank | (rank + 1) % size => rank + 1 @ +
out_of_bounds: a CTA's index taken for its rank | (rank + 1) % size => blockIdx.x @ +
out_of_bounds: one element past a neighbour's shared memory | theirs[31 - thread] => theirs[32 - thread] @ +
divergent_barrier deadlock: one thread arrives for its CTA
    | __cluster_barrier_arrive();  // all have written => if (thread == 0) __cluster_barrier_arrive();
    @ __cluster_barrier_wait();  // all have written
divergent_barrier: an arrival without a wait | -__cluster_barrier_wait();  // all have read @ *
divergent_barrier: a wait without an arrival | -__cluster_barrier_arrive();  // all have read
    @ __cluster_barrier_wait();  // all have read
"""),
    "cluster_push": Subject({"out": floats(64).reshape(2, 32)[::-1, ::-1].reshape(-1)}, {"x": floats(64)}, grid=2,
        cluster=2, at="theirs[thread] = x | = inbox[31 - thread]", text="""
  TRTC_SHARED(float, inbox, 32);
  const unsigned rank = __clusterRelativeBlockRank();
  float* theirs = static_cast<float*>(__cluster_map_shared_rank(inbox, rank ^ 1u));
  __cluster_barrier_arrive_relaxed();  // all have started
  __cluster_barrier_wait();  // all have started
  theirs[thread] = x[block * 32 + thread];
  __cluster_barrier_arrive();  // all have written
  __cluster_barrier_wait();  // all have written
  out[block * 32 + thread] = inbox[31 - thread];
""", faults=r"""
remote: no cluster barrier before what a neighbour has written is read
    | -arrive();  // all have written | -// all have written
race: what a neighbour has written is not released | arrive();  // all have written => arrive_relaxed();
race: every CTA writes to the same one | (inbox, rank ^ 1u) => (inbox, 0) @ theirs[thread] = x
race: a neighbour's shared memory is written before it is known to have started
    | -arrive_relaxed();  // all have started | -// all have started @ *
"""),
    "async_push": Subject({"out": floats(32).reshape(2, 4, 4).sum(axis=1).reshape(-1)}, {"x": floats(32)}, grid=8,
        cluster=4, head=PTX, at="trtc::store_cluster_async | sums[0] +", text="""
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
""", faults=r"""
remote: asynchronous stores are read without a wait | -trtc::transaction_barrier_wait(all_here);
remote: a barrier that expects too few bytes | 4 * sizeof(float) => 3 * sizeof(float)
race: asynchronous stores to one place | (sums + rank, => (sums, @ +
early: a barrier is used before all know that it is there | -trtc::cluster_wait(); | -trtc::cluster_arrive_relaxed();
    @ trtc::store_cluster_async | trtc::transaction_barrier_init | trtc::transaction_barrier_wait
race: a barrier whose initialisation is not fenced | -TRTC_PORTABLE(trtc_simulator::barrier_publish();)
    @ trtc::store_cluster_async | trtc::transaction_barrier_init | trtc::transaction_barrier_wait
remote: a wait for the wrong parity | barrier_wait(barrier, parity) => barrier_wait(barrier, 1 - parity)
exited_shared_memory: a CTA leaves while a store to it is on its way
    | trtc::transaction_barrier_wait(all_here); => if (rank == 0) trtc::transaction_barrier_wait(all_here);
    | if (thread == 0) out => if (thread == 0 && rank == 0) out @ trtc::store_cluster_async
out_of_bounds: a store to a CTA that there is not | all_here, thread, => all_here, thread + 1, @ +
deadlock: a barrier that expects too many bytes | 4 * sizeof(float) => 5 * sizeof(float)
    @ trtc::transaction_barrier_wait
deadlock exited_shared_memory: a CTA that nobody stores to | if (thread < 4) => if (thread < 3)
    @ trtc::transaction_barrier_wait
"""),
    # One row in each of a few CTAs or groups of them: two warps, four vectors a thread and an end that is not filled.
    "norm": Norm(3, 252, NormConfig(64, 1, 4, 1), groups=3, rstd=True, faults=r"""
early: sums of warps are read without a barrier | -cta_barrier(); after warps + warp] = values[i];
    @ if (thread % group == 0) of_group | place < warps_here ? of_group
race: a row's sum is stored by every thread | const bool is_row_leader = thread == 0 && => const bool is_row_leader =
out_of_bounds: an end that is not filled is loaded as if it were
    | is_there = is_filled(k) || column < columns; => is_there = true; @ word, from + column, is_there);
"""),
    "norm_rows": Norm(7, 28, NormConfig(8, 4, 4, 1), groups=2, rstd=True, faults=r"""
out_of_bounds: rows past the last one | exists = ROWS_PER_CTA == 1 || row < params.rows; => exists = true;
"""),
    "norm_padded": Norm(3, 250, NormConfig(64, 1, 2, 2), groups=3, padding=6, faults=r"""
out_of_bounds: a vector of the output behind a row's end | word, EXACT || column < columns); => word, true);
"""),
    "norm_staged": Norm(3, 252, NormConfig(32, 1, 4, 2, in_shared=True), groups=3, faults=r"""
race: a row is read from shared memory without a wait | wait_async();\n#if UNALIGNED => \n#if UNALIGNED
out_of_bounds: an end that is not filled is copied as if it were
    | column < columns ? from + column : from, 0, column < columns ? bytes : 0); => from + column, 0, bytes);
    @ copy_async_part<bytes>
"""),
    "norm_rows_per_pass": Norm(5, 256, NormConfig(64, 1, 4, 1, in_shared=True, rows_per_pass=2), groups=3, rstd=True,
        faults=r"""
out_of_bounds: a row past the last one beside the last | min(first_row + r, params.rows - 1) => first_row + r
    @ copy_async<bytes>
race: rows of one pass share their slot | stage + r * STAGE_BYTES; => stage;
"""),
    "layer_norm": Norm(3, 1000, NormConfig(64, 1, 8, 2, in_shared=True), groups=3, dtype=FLOAT16, norm="layer_norm",
        faults=r"""
early: a row's shift is read without a barrier | -cta_barrier(); after of_row[i] = values[i];
    @ if (is_first) of_row[i] = values[i] | values[i] = of_row[i]
"""),
    # Rows that are not aligned go through shared memory.
    "norm_misaligned": Norm(3, 251, NormConfig(32, 1, 8, 1), groups=3, dtype=FLOAT16, weight=False, shift=1, faults=r"""
early: a row is read from shared memory before others have copied it
    | -cta_barrier(); after copy_to_stage(staged, from, columns, thread);
early: y is copied from shared memory before others have stored it
    | if (stores) {\n          cta_barrier(); => if (stores) { @ *
out_of_bounds: elements behind a row are read | if (first + i * THREADS_PER_ROW < columns) element[i] = => element[i] =
out_of_bounds race: elements behind a row are stored
    | column < columns; column += THREADS_PER_ROW) to[ => column < CHUNK; column += THREADS_PER_ROW) to[
misaligned: vectors that begin between two of those that were copied
    | Space::shared>(word[k], staged + => Space::shared>(word[k], staged + 1 +
"""),
    "norm_shifted": Norm(3, 248, NormConfig(32, 1, 8, 1), groups=3, dtype=FLOAT16, weight=False, shift=1, faults=r"""
misaligned: every row is taken to be aligned | launch whole=1 @ word, from + column, is_there);
"""),
    "norm_chunks": Norm(2, 451, NormConfig(32, 1, 4, 2), groups=2, dtype=FLOAT16, faults=r"""
race: the next chunk overwrites the last one
    | -cta_barrier();  // others have read what was staged last\n  copy_to_stage @ *
"""),
    "norm_cluster": Norm(2, 1000, NormConfig(64, 1, 4, 1, 4, True, True), groups=2, rstd=True, faults=r"""
remote: the cluster's sums are read without a wait | -transaction_barrier_wait(barrier, parity);
early: the cluster's barriers are used without a wait | -if (exchange.sent == 0) cluster_wait();
    | -cluster_arrive_relaxed();
remote: the cluster's barrier expects a sum too few
    | (barriers + i, Count * Ctas * sizeof => (barriers + i, (Count * Ctas - 1) * sizeof
deadlock: the cluster's barrier expects a sum too many
    | (barriers + i, Count * Ctas * sizeof => (barriers + i, (Count * Ctas + 1) * sizeof
    @ transaction_barrier_wait(barrier, parity)
"""),
    "norm_grid": Norm(7, 1000, NormConfig(64, 1, 4, 1, 4, False, True), groups=2, rstd=True, faults=r"""
race: the grid's sums are not acquired | Order::acquire) => Order::relaxed)
race: the grid's sums are not released | Order::release) => Order::relaxed)
race: threads do not wait for the one that meets the grid | -cta_barrier(); after - target) < 0) spin_hint();
race: a row's target is the one before | (times + 1u) * => times *
race: the rows of a grid share a counter
    | exchange.arrived + buffer_index, exchange.rank) => exchange.arrived, exchange.rank)
    | exchange.arrived + buffer_index, times) => exchange.arrived, times)
race: CTAs store their sums to one place
    | store_relaxed_global(buffer + i * Ctas + rank, => store_relaxed_global(buffer + i * Ctas,
race: groups of CTAs share a workspace | cta_index() / CTAS_PER_ROW * grid_workspace_words => 0 * grid_workspace_words
deadlock: the grid waits for a CTA too many | static_cast<uint32>(Ctas); => static_cast<uint32>(Ctas + 1);
    @ spin_hint();\n  }
"""),
}
