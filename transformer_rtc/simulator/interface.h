// SPDX-License-Identifier: Apache-2.0
// What the machine (native/) and a kernel compiled for it (prelude.h) know of each other. Both include this text.
#pragma once

namespace trtc_simulator {

struct Index {
  unsigned x, y, z;
};

// Where the running thread is.
struct Place {
  Index thread, cta, cta_size, grid_size;  // threadIdx, blockIdx, blockDim, gridDim
  unsigned cluster_rank, cluster_size;     // among the CTAs of its cluster
  char* shared;                            // its CTA's shared memory: static variables at their offsets
  char* dynamic_shared;                    // the launch's
};

enum class Order : unsigned { relaxed, acquire, release, acquire_release };
enum class Atomic : unsigned { load, store, change, exchange };
enum class Collective : unsigned { synchronise, shuffle, ballot };

// What a kernel asks of the machine. `caller` is an address in the kernel's code: it tells the line.
struct Machine {
  const Place* place;

  // Before a plain access; `alignment` is what the access needs.
  void (*access)(const void* address, unsigned bytes, unsigned alignment, bool writes, const void* caller);
  // Before an atomic one, and after one that changed what was there.
  void (*atomic)(const void* address, unsigned bytes, Atomic kind, Order order, const void* caller);
  void (*changed)();
  void (*fence)(bool device, const void* caller);  // or of its CTA only

  // Every thread of the CTA; returns how many came with `predicate`.
  unsigned (*cta_barrier)(bool predicate, const void* caller);
  // The lanes of `mask`. A shuffle returns the value of the lane `source`, a ballot the lanes that came with one.
  unsigned long long (*collective)(Collective kind, unsigned mask, unsigned long long value, unsigned source,
                                   const void* caller);
  void (*cluster_arrive)(bool releases, const void* caller);
  void (*cluster_wait)(const void* caller);
  // Where CTA `rank` of the cluster has the shared variable that this CTA has at `address`.
  void* (*cluster_address)(const void* address, unsigned rank, const void* caller);

  // Asynchronous copies from global to shared memory. A thread closes groups of its own copies, and waits for all
  // groups but the last `pending` ones.
  void (*copy_async)(void* shared, const void* global, unsigned bytes, const void* caller);
  void (*commit_copies)();
  void (*wait_copies)(unsigned pending, const void* caller);

  // Barriers in shared memory (PTX's mbarrier).
  void (*barrier_init)(void* barrier, unsigned arrivals, const void* caller);
  void (*barrier_publish)(const void* caller);  // fence.mbarrier_init
  void (*barrier_arrive)(void* barrier, unsigned expected_bytes, const void* caller);
  void (*barrier_wait)(void* barrier, unsigned parity, const void* caller);
  // Copies `bytes` from global to the CTA's shared memory some time later, those from `first` to before `end`, and
  // tells the barrier; of the others both memories must only be there.
  void (*copy_bulk)(void* shared, const void* global, unsigned bytes, void* barrier, unsigned first, unsigned end,
                    const void* caller);
  // Stores 4 or 8 bytes some time later, in any CTA of the cluster, and tells the barrier beside them.
  void (*store_async)(void* to, unsigned long long value, unsigned bytes, void* barrier, const void* caller);

  // A turn of a polling loop.
  void (*spin)(const void* caller);
  // Ends the launch with a fault. `file` is null where only the caller is known.
  void (*fault)(const char* kind, const char* message, const char* file, unsigned line, const void* caller);
};

// A static shared variable of a kernel.
struct SharedVariable {
  const char* name;
  unsigned bytes, alignment;
  unsigned offset;  // the machine's choice
  bool used;        // by a kernel that has run
  SharedVariable* next;
};

// What a module exports as `trtc_module`.
struct Module {
  Machine** machine;
  SharedVariable** shared_variables;
};

}  // namespace trtc_simulator
