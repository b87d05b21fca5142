// SPDX-License-Identifier: Apache-2.0
// What kernels ask of the machine: each function is one of interface.h's Machine.
#pragma once

#include "machine.hpp"

namespace simulator {

struct Calls {
  // In calls.cpp.
  static void access(const void* address, unsigned bytes, unsigned alignment, bool writes, const void* caller);
  // In place of the one above where a tick has come: what trtc_look has seen is the thread's state.
  static void access_after_tick(const void* address, unsigned bytes, unsigned alignment, bool writes,
                                const void* caller);
  static void atomic(const void* address, unsigned bytes, Atomic kind, Order order, const void* caller);
  static void changed();
  static void fence(bool device, const void*);
  static void spin(const void* caller);
  static void* cluster_address(const void* address, unsigned rank, const void* caller);
  static void fault(const char* kind, const char* message, const char* file, unsigned line, const void* caller);

  // In meetings.cpp.
  static unsigned cta_barrier(bool predicate, const void* caller);
  static unsigned long long collective(Collective kind, unsigned mask, unsigned long long value, unsigned source,
                                       const void* caller);
  static void cluster_arrive(bool releases, const void* caller);
  static void cluster_wait(const void* caller);

  // In asynchronous.cpp.
  static void copy_async(void* shared, const void* global, unsigned bytes, const void* caller);
  static void commit_copies();
  static void wait_copies(unsigned pending, const void*);
  static void barrier_init(void* address, unsigned arrivals, const void* caller);
  static void barrier_publish(const void*);
  static void barrier_arrive(void* address, unsigned expected_bytes, const void* caller);
  static void barrier_wait(void* address, unsigned parity, const void* caller);
  static void copy_bulk(void* shared, const void* global, unsigned bytes, void* address, unsigned first, unsigned end,
                        const void* caller);
  static void store_async(void* to, unsigned long long value, unsigned bytes, void* address, const void* caller);

 private:
  static void endless_poll(const void* caller);
};

}  // namespace simulator
