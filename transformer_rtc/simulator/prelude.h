// SPDX-License-Identifier: Apache-2.0
// CUDA C++ as the host's compiler sees it: what NVRTC knows without any header, in terms of the simulator's machine.
// Included before a kernel's text, which is what NVRTC gets, unchanged. No header of the system is.
#pragma once

#include "interface.h"

#ifdef __clang__
// Neither checked nor inlined: what it does is the machine's own work, or has been checked, and its caller is the
// kernel.
#define TRTC_RAW \
  __attribute__((noinline, nomerge, unused, disable_sanitizer_instrumentation, no_sanitize("undefined"))) static
#else
#define TRTC_RAW __attribute__((noinline, unused, no_sanitize_thread, no_sanitize_undefined)) static
#endif
#define TRTC_CALLER __builtin_return_address(0)
#define TRTC_INLINE inline __attribute__((always_inline))

#define __host__
#define __device__
#define __global__ __attribute__((visibility("hidden")))
#define __forceinline__ TRTC_INLINE
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
// Variables of a CTA cannot be plain variables of a process.
#define __shared__ the_simulator_needs_TRTC_SHARED_of_platform_cuh_for_shared_memory

#define TRTC_SIMULATOR 1
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
using size_t = unsigned long;

extern "C" {
int printf(const char*, ...);
float fmaf(float, float, float);
float sqrtf(float);
float expf(float);
float exp2f(float);
float logf(float);
float log2f(float);
float powf(float, float);
float tanhf(float);
float sinf(float);
float cosf(float);
float erff(float);
float floorf(float);
float ceilf(float);
float roundf(float);
float rintf(float);
float truncf(float);
float fabsf(float);
float fminf(float, float);
float fmaxf(float, float);
double fma(double, double, double);
double sqrt(double);
double exp(double);
double log(double);
double fabs(double);
}

namespace trtc_simulator {

static Machine* machine = nullptr;
static SharedVariable* shared_variables = nullptr;
extern "C" __attribute__((visibility("default"), used)) const Module trtc_module = {&machine, &shared_variables};

// ---- Memory --------------------------------------------------------------------------------------------------------

// One for each declaration in each instance of a template: `Tag` is a local class. Known when the module is loaded.
template <unsigned Bytes, unsigned Alignment, class Tag>
struct Registered {
  struct Slot : SharedVariable {
    Slot() {
      name = Tag::text();
      bytes = Bytes;
      alignment = Alignment;
      offset = 0;
      used = false;
      next = shared_variables;
      shared_variables = this;
    }
  };
  static inline Slot slot;
};

template <unsigned Bytes, unsigned Alignment, class Tag>
TRTC_RAW char* shared_variable() {
  auto& slot = Registered<Bytes, Alignment, Tag>::slot;
  slot.used = true;
  return machine->place->shared + slot.offset;
}

TRTC_RAW char* dynamic_shared() { return machine->place->dynamic_shared; }

// An access as one instruction makes it, aligned to its size.
template <class T>
TRTC_RAW T load(const void* address) {
#if TRTC_CHECKED
  machine->access(address, sizeof(T), sizeof(T), false, TRTC_CALLER);
#endif
  T value;
  __builtin_memcpy(&value, address, sizeof(T));
  return value;
}

template <class T>
TRTC_RAW void store(void* address, T value) {
#if TRTC_CHECKED
  machine->access(address, sizeof(T), sizeof(T), true, TRTC_CALLER);
#endif
  __builtin_memcpy(address, &value, sizeof(T));
}

// Of neighbouring elements, as many as fit the words, those from `first` to before `end`: one access each.
template <class T, int Words>
TRTC_RAW void load_each(unsigned (&word)[Words], const void* address, int first, int end) {
  constexpr int count = Words * 4 / static_cast<int>(sizeof(T));
  for (int i = first < 0 ? 0 : first; i < count && i < end; ++i) {
    const char* element = static_cast<const char*>(address) + i * static_cast<int>(sizeof(T));
#if TRTC_CHECKED
    machine->access(element, sizeof(T), sizeof(T), false, TRTC_CALLER);
#endif
    __builtin_memcpy(reinterpret_cast<char*>(word) + i * sizeof(T), element, sizeof(T));
  }
}

template <class T, int Words>
TRTC_RAW void store_each(void* address, const unsigned (&word)[Words], int first, int end) {
  constexpr int count = Words * 4 / static_cast<int>(sizeof(T));
  for (int i = first < 0 ? 0 : first; i < count && i < end; ++i) {
    char* element = static_cast<char*>(address) + i * static_cast<int>(sizeof(T));
#if TRTC_CHECKED
    machine->access(element, sizeof(T), sizeof(T), true, TRTC_CALLER);
#endif
    __builtin_memcpy(element, reinterpret_cast<const char*>(word) + i * sizeof(T), sizeof(T));
  }
}

// No template's parameter is deduced from a lambda's place: the change is a type with call().
template <class T, class Change>
TRTC_RAW T change_atomically(T* address, T operand, Order order) {
  machine->atomic(address, sizeof(T), Change::kind, order, TRTC_CALLER);
  T before, after;
  __builtin_memcpy(&before, address, sizeof(T));
  after = Change::of(before, operand);
  __builtin_memcpy(address, &after, sizeof(T));
  if (__builtin_memcmp(&before, &after, sizeof(T)) != 0) machine->changed();
  return before;
}

template <class T>
TRTC_RAW T compare_and_swap(T* address, T expected, T desired) {
  machine->atomic(address, sizeof(T), Atomic::change, Order::relaxed, TRTC_CALLER);
  T before;
  __builtin_memcpy(&before, address, sizeof(T));
  if (__builtin_memcmp(&before, &expected, sizeof(T)) == 0) {
    __builtin_memcpy(address, &desired, sizeof(T));
    machine->changed();
  }
  return before;
}

template <class T>
TRTC_RAW T load_atomically(const T* address, Order order) {
  machine->atomic(address, sizeof(T), Atomic::load, order, TRTC_CALLER);
  T value;
  __builtin_memcpy(&value, address, sizeof(T));
  return value;
}

// Wraps around.
TRTC_INLINE int sum(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }
template <class T>
TRTC_INLINE T sum(T a, T b) {
  return a + b;
}

#define TRTC_CHANGE(name, atomic, expression)              \
  struct name {                                            \
    static constexpr Atomic kind = Atomic::atomic;         \
    template <class T>                                     \
    __attribute__((always_inline)) static T of(T a, T b) { \
      return expression;                                   \
    }                                                      \
  };
TRTC_CHANGE(Add, change, sum(a, b))
TRTC_CHANGE(Exchange, exchange, (static_cast<void>(a), b))
TRTC_CHANGE(Minimum, change, b < a ? b : a)
TRTC_CHANGE(Maximum, change, a < b ? b : a)
TRTC_CHANGE(Increment, change, a >= b ? T() : static_cast<T>(a + 1))
TRTC_CHANGE(Decrement, change, a == 0 || a > b ? b : static_cast<T>(a - 1))
TRTC_CHANGE(And, change, a& b)
TRTC_CHANGE(Or, change, a | b)
TRTC_CHANGE(Xor, change, a ^ b)
#undef TRTC_CHANGE

// ---- Threads that meet ---------------------------------------------------------------------------------------------

TRTC_RAW unsigned cta_barrier(bool predicate) { return machine->cta_barrier(predicate, TRTC_CALLER); }
TRTC_RAW void warp_barrier(unsigned mask) { machine->collective(Collective::synchronise, mask, 0, 0, TRTC_CALLER); }
TRTC_RAW unsigned ballot(unsigned mask, bool predicate) {
  return static_cast<unsigned>(machine->collective(Collective::ballot, mask, predicate, 0, TRTC_CALLER));
}
template <class T>
TRTC_RAW T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof(T));
  word = machine->collective(Collective::shuffle, mask, word, source, TRTC_CALLER);
  __builtin_memcpy(&value, &word, sizeof(T));
  return value;
}
TRTC_RAW void fence(bool device) {
#if TRTC_CHECKED
  machine->fence(device, TRTC_CALLER);
#else
  asm volatile("" ::: "memory");  // a tick meets a loop of fences in the kernel, where its state shows
#endif
}
TRTC_RAW void spin() { machine->spin(TRTC_CALLER); }
TRTC_RAW void cluster_arrive(bool releases) { machine->cluster_arrive(releases, TRTC_CALLER); }
TRTC_RAW void cluster_wait() { machine->cluster_wait(TRTC_CALLER); }
TRTC_RAW void* cluster_address(const void* address, unsigned rank) {
  return machine->cluster_address(address, rank, TRTC_CALLER);
}
TRTC_RAW void copy_async(void* shared, const void* global, unsigned bytes) {
  machine->copy_async(shared, global, bytes, TRTC_CALLER);
}
TRTC_RAW void commit_copies() { machine->commit_copies(); }
TRTC_RAW void wait_copies(unsigned pending) { machine->wait_copies(pending, TRTC_CALLER); }
TRTC_RAW void barrier_init(void* barrier, unsigned arrivals) { machine->barrier_init(barrier, arrivals, TRTC_CALLER); }
TRTC_RAW void barrier_publish() { machine->barrier_publish(TRTC_CALLER); }
TRTC_RAW void barrier_arrive(void* barrier, unsigned expected_bytes) {
  machine->barrier_arrive(barrier, expected_bytes, TRTC_CALLER);
}
TRTC_RAW void barrier_wait(void* barrier, unsigned parity) { machine->barrier_wait(barrier, parity, TRTC_CALLER); }
TRTC_RAW void copy_bulk(void* shared, const void* global, unsigned bytes, void* barrier, unsigned first, unsigned end) {
  machine->copy_bulk(shared, global, bytes, barrier, first, end, TRTC_CALLER);
}
// Where CTA `rank` of the cluster has `to` and `barrier`.
TRTC_RAW void store_async(void* to, unsigned value, void* barrier, unsigned rank) {
  to = machine->cluster_address(to, rank, TRTC_CALLER);
  machine->store_async(to, value, 4, machine->cluster_address(barrier, rank, TRTC_CALLER), TRTC_CALLER);
}
[[noreturn]] TRTC_RAW void fault(const char* kind, const char* message) {
  machine->fault(kind, message, nullptr, 0, TRTC_CALLER);
  __builtin_unreachable();
}

// By value: a reference would be an access of the kernel's.
#define TRTC_PLACE(name, type, expression) \
  __attribute__((const)) TRTC_RAW type name() { return machine->place->expression; }
TRTC_PLACE(thread_index, Index, thread)
TRTC_PLACE(cta_index, Index, cta)
TRTC_PLACE(cta_size, Index, cta_size)
TRTC_PLACE(grid_size, Index, grid_size)
TRTC_PLACE(cluster_rank, unsigned, cluster_rank)
TRTC_PLACE(cluster_size, unsigned, cluster_size)
#undef TRTC_PLACE

TRTC_INLINE unsigned lane() {
  const Index thread = thread_index(), size = cta_size();
  return (thread.x + size.x * (thread.y + size.y * thread.z)) % 32;
}

// How an entry is run: all parameters are one struct by value, or there are none.
template <class Params>
TRTC_INLINE void run(void (*entry)(Params), const void* params) {
  Params copy = *static_cast<const Params*>(params);
  entry(copy);
}
TRTC_INLINE void run(void (*entry)(), const void*) { entry(); }
template <class Params>
constexpr unsigned parameter_bytes(void (*)(Params)) {
  return sizeof(Params);
}
constexpr unsigned parameter_bytes(void (*)()) { return 0; }

}  // namespace trtc_simulator

// A kernel, for the machine: its symbol, and the most threads of a CTA that its launch bounds allow.
#define TRTC_EXPORT(symbol, most_threads)                                                                       \
  extern "C" __attribute__((visibility("default"), used, no_sanitize("thread"), no_sanitize("undefined"))) void \
  trtc_run_##symbol(const void* params) {                                                                       \
    trtc_simulator::run(&symbol, params);                                                                       \
  }                                                                                                             \
  extern "C" __attribute__((visibility("default"), used)) const unsigned trtc_bytes_##symbol =                  \
      trtc_simulator::parameter_bytes(&symbol);                                                                 \
  extern "C" __attribute__((visibility("default"), used)) const unsigned trtc_threads_##symbol = most_threads;

// ---- Shared memory, as platform.cuh declares it --------------------------------------------------------------------

#define TRTC_SHARED(type, name, count)                    \
  struct trtc_tag_##name {                                \
    static const char* text() { return #name; }           \
  };                                                      \
  type(&name)[count] = *reinterpret_cast<type(*)[count]>( \
      trtc_simulator::shared_variable<sizeof(type) * (count), alignof(type), trtc_tag_##name>())
#define TRTC_DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(trtc_simulator::dynamic_shared())

// ---- What the compiler calls at each plain access, and where arithmetic goes wrong ---------------------------------

#if TRTC_CHECKED

#define TRTC_HOOK(name, bytes, alignment, writes)                                                                      \
  __attribute__((visibility("hidden"), no_sanitize_thread, no_sanitize_undefined)) void __tsan_##name(void* address) { \
    if (trtc_simulator::machine != nullptr) {                                                                          \
      trtc_simulator::machine->access(address, bytes, alignment, writes, TRTC_CALLER);                                 \
    }                                                                                                                  \
  }
// A volatile access is a relaxed atomic one.
#define TRTC_VOLATILE_HOOK(name, bytes, kind)                                                                          \
  __attribute__((visibility("hidden"), no_sanitize_thread, no_sanitize_undefined)) void __tsan_##name(void* address) { \
    trtc_simulator::machine->atomic(address, bytes, trtc_simulator::Atomic::kind, trtc_simulator::Order::relaxed,      \
                                    TRTC_CALLER);                                                                      \
  }
#define TRTC_HOOKS(bytes, alignment)                              \
  TRTC_HOOK(read##bytes, bytes, alignment, false)                 \
  TRTC_HOOK(write##bytes, bytes, alignment, true)                 \
  TRTC_HOOK(unaligned_read##bytes, bytes, 1, false)               \
  TRTC_HOOK(unaligned_write##bytes, bytes, 1, true)               \
  TRTC_VOLATILE_HOOK(volatile_read##bytes, bytes, load)           \
  TRTC_VOLATILE_HOOK(volatile_write##bytes, bytes, store)         \
  TRTC_VOLATILE_HOOK(unaligned_volatile_read##bytes, bytes, load) \
  TRTC_VOLATILE_HOOK(unaligned_volatile_write##bytes, bytes, store)

extern "C" {
TRTC_HOOKS(1, 1)
TRTC_HOOKS(2, 2)
TRTC_HOOKS(4, 4)
TRTC_HOOKS(8, 8)
TRTC_HOOKS(16, 8)

__attribute__((visibility("hidden"), no_sanitize_thread)) void __tsan_init() {}
__attribute__((visibility("hidden"), no_sanitize_thread)) void __tsan_func_entry(void*) {}
__attribute__((visibility("hidden"), no_sanitize_thread)) void __tsan_func_exit() {}
__attribute__((visibility("hidden"), no_sanitize_thread)) void __tsan_read_range(void* address, unsigned long bytes) {
  trtc_simulator::machine->access(address, static_cast<unsigned>(bytes), 1, false, TRTC_CALLER);
}
__attribute__((visibility("hidden"), no_sanitize_thread)) void __tsan_write_range(void* address, unsigned long bytes) {
  trtc_simulator::machine->access(address, static_cast<unsigned>(bytes), 1, true, TRTC_CALLER);
}
// A copy or fill that the compiler, or the kernel, leaves to the library: under both names, as compilers differ.
#define TRTC_UNCHECKED __attribute__((visibility("hidden"), used, noinline, no_sanitize_thread, no_sanitize_undefined))
TRTC_UNCHECKED void* memmove(void* to, const void* from, unsigned long bytes) {
  if (bytes == 0) return to;
  trtc_simulator::machine->access(from, static_cast<unsigned>(bytes), 1, false, TRTC_CALLER);
  trtc_simulator::machine->access(to, static_cast<unsigned>(bytes), 1, true, TRTC_CALLER);
  // Volatile, or the compiler would make a call of this function of it.
  auto* out = static_cast<volatile char*>(to);
  const auto* in = static_cast<const volatile char*>(from);
  if (out < in) {
    for (unsigned long i = 0; i < bytes; ++i) out[i] = in[i];
  } else {
    for (unsigned long i = bytes; i-- > 0;) out[i] = in[i];
  }
  return to;
}
TRTC_UNCHECKED void* memset(void* to, int value, unsigned long bytes) {
  if (bytes == 0) return to;
  trtc_simulator::machine->access(to, static_cast<unsigned>(bytes), 1, true, TRTC_CALLER);
  auto* out = static_cast<volatile char*>(to);
  for (unsigned long i = 0; i < bytes; ++i) out[i] = static_cast<char>(value);
  return to;
}
void* memcpy(void*, const void*, unsigned long) __attribute__((alias("memmove"), visibility("hidden"), used));
void* __tsan_memcpy(void*, const void*, unsigned long) __attribute__((alias("memmove"), visibility("hidden"), used));
void* __tsan_memmove(void*, const void*, unsigned long) __attribute__((alias("memmove"), visibility("hidden"), used));
void* __tsan_memset(void*, int, unsigned long) __attribute__((alias("memset"), visibility("hidden"), used));

// UndefinedBehaviorSanitizer's handlers. What they are given starts with the place in the source, but for a cast's.
struct trtc_source {
  const char* file;
  unsigned line, column;
};
#define TRTC_UNDEFINED(handler, kind, message)                                                                    \
  __attribute__((visibility("hidden"), no_sanitize_thread)) void __ubsan_handle_##handler(trtc_source* at, ...) { \
    trtc_simulator::machine->fault(kind, message, at->file, at->line, TRTC_CALLER);                               \
    __builtin_unreachable();                                                                                      \
  }
TRTC_UNDEFINED(add_overflow_abort, "overflow", "a signed addition overflows")
TRTC_UNDEFINED(sub_overflow_abort, "overflow", "a signed subtraction overflows")
TRTC_UNDEFINED(mul_overflow_abort, "overflow", "a signed multiplication overflows")
TRTC_UNDEFINED(negate_overflow_abort, "overflow", "a signed negation overflows")
TRTC_UNDEFINED(divrem_overflow_abort, "overflow", "a division by zero, or one that overflows")
TRTC_UNDEFINED(shift_out_of_bounds_abort, "overflow", "a shift by a negative count or by more than the type has bits")
TRTC_UNDEFINED(float_cast_overflow_abort, "overflow", "a float that the integer type cannot hold")
TRTC_UNDEFINED(out_of_bounds_abort, "out_of_bounds", "an index outside of its array")
TRTC_UNDEFINED(missing_return, "trap", "a function that returns a value ends without one")
TRTC_UNDEFINED(builtin_unreachable, "trap", "the kernel reaches a place that it calls unreachable")
TRTC_UNDEFINED(type_mismatch_v1_abort, "misaligned", "an access that is not aligned to its type")
#undef TRTC_UNDEFINED
}
#undef TRTC_HOOKS
#undef TRTC_HOOK
#undef TRTC_VOLATILE_HOOK

#endif

#include "cuda_names.h"
