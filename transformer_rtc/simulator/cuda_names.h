// SPDX-License-Identifier: Apache-2.0
// CUDA's own names, in terms of the simulator's machine. The prelude includes it last.
#pragma once

struct dim3 {
  unsigned x, y, z;
};
#define threadIdx (trtc_simulator::thread_index())
#define blockIdx (trtc_simulator::cta_index())
#define blockDim (trtc_simulator::cta_size())
#define gridDim (trtc_simulator::grid_size())
constexpr int warpSize = 32;

#define TRTC_VECTOR(type, name)                                                                           \
  struct __attribute__((aligned(2 * sizeof(type)))) name##2 { type x, y; };                               \
  struct name##3 { type x, y, z; };                                                                       \
  struct __attribute__((aligned(sizeof(type) < 4 ? 4 * sizeof(type) : 16))) name##4 { type x, y, z, w; }; \
  TRTC_INLINE name##2 make_##name##2(type x, type y) { return {x, y}; }                                   \
  TRTC_INLINE name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                        \
  TRTC_INLINE name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
TRTC_VECTOR(char, char)
TRTC_VECTOR(unsigned char, uchar)
TRTC_VECTOR(short, short)
TRTC_VECTOR(unsigned short, ushort)
TRTC_VECTOR(int, int)
TRTC_VECTOR(unsigned, uint)
TRTC_VECTOR(float, float)
TRTC_VECTOR(long long, longlong)
TRTC_VECTOR(unsigned long long, ulonglong)
TRTC_VECTOR(double, double)
#undef TRTC_VECTOR

TRTC_INLINE void __syncthreads() { trtc_simulator::cta_barrier(false); }
TRTC_INLINE int __syncthreads_count(int predicate) {
  return static_cast<int>(trtc_simulator::cta_barrier(predicate != 0));
}
TRTC_INLINE int __syncthreads_or(int predicate) { return trtc_simulator::cta_barrier(predicate != 0) != 0; }
TRTC_INLINE int __syncthreads_and(int predicate) { return trtc_simulator::cta_barrier(predicate == 0) == 0; }
TRTC_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { trtc_simulator::warp_barrier(mask); }
TRTC_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
  return trtc_simulator::ballot(mask, predicate != 0);
}
TRTC_INLINE int __any_sync(unsigned mask, int predicate) { return trtc_simulator::ballot(mask, predicate != 0) != 0; }
TRTC_INLINE int __all_sync(unsigned mask, int predicate) { return trtc_simulator::ballot(mask, predicate == 0) == 0; }

// A source lane outside of the segment of `width` lanes is the lane itself.
template <class T>
TRTC_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = trtc_simulator::lane(), segment = static_cast<unsigned>(width);
  return trtc_simulator::shuffle(mask, value,
                                 (lane & ~(segment - 1)) | (static_cast<unsigned>(source) & (segment - 1)));
}
template <class T>
TRTC_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const unsigned lane = trtc_simulator::lane(), segment = static_cast<unsigned>(width);
  const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
  return trtc_simulator::shuffle(mask, value, source < (lane | (segment - 1)) + 1 ? source : lane);
}
template <class T>
TRTC_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = trtc_simulator::lane(), in_segment = lane & (static_cast<unsigned>(width) - 1);
  return trtc_simulator::shuffle(mask, value, delta <= in_segment ? lane - delta : lane);
}
template <class T>
TRTC_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = trtc_simulator::lane(), segment = static_cast<unsigned>(width);
  return trtc_simulator::shuffle(mask, value, (lane & (segment - 1)) + delta < segment ? lane + delta : lane);
}

TRTC_INLINE void __threadfence() { trtc_simulator::fence(true); }
TRTC_INLINE void __threadfence_block() { trtc_simulator::fence(false); }
TRTC_INLINE void __threadfence_system() { trtc_simulator::fence(true); }
TRTC_INLINE void __nanosleep(unsigned) { trtc_simulator::spin(); }
[[noreturn]] TRTC_INLINE void __trap() { trtc_simulator::fault("trap", "the kernel trapped"); }

#define assert(condition) \
  ((condition) ? void() : trtc_simulator::fault("trap", "the kernel asserts what does not hold: " #condition))

TRTC_INLINE void __cluster_barrier_arrive() { trtc_simulator::cluster_arrive(true); }
TRTC_INLINE void __cluster_barrier_arrive_relaxed() { trtc_simulator::cluster_arrive(false); }
TRTC_INLINE void __cluster_barrier_wait() { trtc_simulator::cluster_wait(); }
TRTC_INLINE unsigned __clusterRelativeBlockRank() { return trtc_simulator::cluster_rank(); }
TRTC_INLINE unsigned __clusterSizeInBlocks() { return trtc_simulator::cluster_size(); }
TRTC_INLINE void* __cluster_map_shared_rank(const void* address, unsigned rank) {
  return trtc_simulator::cluster_address(address, rank);
}

#define TRTC_ATOMIC(name, change, type)                                                                     \
  TRTC_INLINE type name(type* address, type value) {                                                        \
    return trtc_simulator::change_atomically<type, trtc_simulator::change>(address, value,                  \
                                                                           trtc_simulator::Order::relaxed); \
  }
#define TRTC_ATOMICS(name, change)    \
  TRTC_ATOMIC(name, change, int)      \
  TRTC_ATOMIC(name, change, unsigned) \
  TRTC_ATOMIC(name, change, unsigned long long)
TRTC_ATOMICS(atomicAdd, Add)
TRTC_ATOMIC(atomicAdd, Add, float)
TRTC_ATOMIC(atomicAdd, Add, double)
TRTC_ATOMICS(atomicExch, Exchange)
TRTC_ATOMIC(atomicExch, Exchange, float)
TRTC_ATOMICS(atomicMin, Minimum)
TRTC_ATOMICS(atomicMax, Maximum)
TRTC_ATOMIC(atomicInc, Increment, unsigned)
TRTC_ATOMIC(atomicDec, Decrement, unsigned)
TRTC_ATOMICS(atomicAnd, And)
TRTC_ATOMICS(atomicOr, Or)
TRTC_ATOMICS(atomicXor, Xor)
#undef TRTC_ATOMICS
#undef TRTC_ATOMIC
TRTC_INLINE int atomicCAS(int* address, int expected, int desired) {
  return trtc_simulator::compare_and_swap(address, expected, desired);
}
TRTC_INLINE unsigned atomicCAS(unsigned* address, unsigned expected, unsigned desired) {
  return trtc_simulator::compare_and_swap(address, expected, desired);
}
TRTC_INLINE unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                                         unsigned long long desired) {
  return trtc_simulator::compare_and_swap(address, expected, desired);
}
TRTC_INLINE int atomicSub(int* address, int value) {
  return atomicAdd(address, static_cast<int>(0u - static_cast<unsigned>(value)));
}
TRTC_INLINE unsigned atomicSub(unsigned* address, unsigned value) { return atomicAdd(address, 0u - value); }

template <class T>
TRTC_INLINE T __ldg(const T* address) {
  return *address;
}

#define TRTC_MINIMUM(type)                                                 \
  constexpr TRTC_INLINE type min(type a, type b) { return b < a ? b : a; } \
  constexpr TRTC_INLINE type max(type a, type b) { return a < b ? b : a; }
TRTC_MINIMUM(int)
TRTC_MINIMUM(unsigned)
TRTC_MINIMUM(long)
TRTC_MINIMUM(unsigned long)
TRTC_MINIMUM(long long)
TRTC_MINIMUM(unsigned long long)
#undef TRTC_MINIMUM
TRTC_INLINE int abs(int a) { return a < 0 ? -a : a; }
TRTC_INLINE bool isnan(float a) { return a != a; }
TRTC_INLINE bool isinf(float a) { return __builtin_isinf(a) != 0; }
TRTC_INLINE bool isfinite(float a) { return __builtin_isfinite(a) != 0; }
TRTC_INLINE float min(float a, float b) { return fminf(a, b); }
TRTC_INLINE float max(float a, float b) { return fmaxf(a, b); }

TRTC_INLINE float __uint_as_float(unsigned bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
TRTC_INLINE unsigned __float_as_uint(float value) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
TRTC_INLINE float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
TRTC_INLINE int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }

TRTC_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TRTC_INLINE float __fadd_rn(float a, float b) { return a + b; }
TRTC_INLINE float __fsub_rn(float a, float b) { return a - b; }
TRTC_INLINE float __fmul_rn(float a, float b) { return a * b; }
TRTC_INLINE float __fdiv_rn(float a, float b) { return a / b; }
TRTC_INLINE float __frcp_rn(float a) { return 1.0f / a; }
TRTC_INLINE float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
TRTC_INLINE float __fdividef(float a, float b) { return a / b; }
TRTC_INLINE float __expf(float a) { return expf(a); }
TRTC_INLINE float __logf(float a) { return logf(a); }
TRTC_INLINE float rsqrtf(float a) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(a))); }

TRTC_INLINE unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
TRTC_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
TRTC_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31) >> 32);
}
TRTC_INLINE int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
TRTC_INLINE int __popc(unsigned a) { return __builtin_popcount(a); }
TRTC_INLINE int __clz(int a) { return a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)); }
TRTC_INLINE int __ffs(int a) { return __builtin_ffs(a); }
