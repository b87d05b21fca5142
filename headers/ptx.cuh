// Inline PTX, one instruction a helper. No other header and no kernel contains any.
#pragma once

#include "platform.cuh"

namespace trtc {

// ---- Conversions -------------------------------------------------------------------------------------------------

TRTC_DEVICE float float_from_float16_bits(uint16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two values in one word, `low` in the low half.
TRTC_DEVICE uint32 float16_bits_from_floats(float low, float high) {
  uint32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

TRTC_DEVICE uint32 bfloat16_bits_from_floats(float low, float high) {
  uint32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// 1 / sqrt(x) within 2 ulp.
TRTC_DEVICE float approximate_rsqrt(float value) {
  float result;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// ---- Global or shared memory ---------------------------------------------------------------------------------------
// Volatile and clobbering memory, so that no load moves past a store of an in-place call.
// clang-format off

// Naturally aligned.
TRTC_DEVICE void load_2(uint32& a, const void* address) {
  asm volatile("{.reg .b16 h; ld.b16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(a) : "l"(address) : "memory");
}

TRTC_DEVICE void load_4(uint32& a, const void* address) {
  asm volatile("ld.b32 %0, [%1];" : "=r"(a) : "l"(address) : "memory");
}

TRTC_DEVICE void load_8(uint32& a, uint32& b, const void* address) {
  asm volatile("ld.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(address) : "memory");
}

TRTC_DEVICE void load_16(uint32& a, uint32& b, uint32& c, uint32& d, const void* address) {
  asm volatile("ld.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(address) : "memory");
}

// The first `count` elements of 2 or 4 bytes (0 or less: none), aligned to an element, and zeros. Predicated, and one
// statement: branches, and one statement for each access, cost the compiler more than the rest of a kernel.
TRTC_DEVICE void load_2_each(uint32& a, const void* address, int count) {
  asm volatile(
      "{.reg .pred p0, p1; .reg .b16 h0, h1; mov.b16 h0, 0; mov.b16 h1, 0;"
      "setp.gt.s32 p0, %2, 0; @p0 ld.b16 h0, [%1]; setp.gt.s32 p1, %2, 1; @p1 ld.b16 h1, [%1+2]; mov.b32 %0, {h0, h1};}"
      : "=r"(a) : "l"(address), "r"(count) : "memory");
}

TRTC_DEVICE void load_2_each(uint32& a, uint32& b, uint32& c, uint32& d, const void* address, int count) {
  asm volatile(
      "{.reg .pred p<8>; .reg .b16 h<8>; mov.b16 h0, 0; mov.b16 h1, 0; mov.b16 h2, 0; mov.b16 h3, 0;"
      "mov.b16 h4, 0; mov.b16 h5, 0; mov.b16 h6, 0; mov.b16 h7, 0;"
      "setp.gt.s32 p0, %5, 0; @p0 ld.b16 h0, [%4];    setp.gt.s32 p1, %5, 1; @p1 ld.b16 h1, [%4+2];"
      "setp.gt.s32 p2, %5, 2; @p2 ld.b16 h2, [%4+4];  setp.gt.s32 p3, %5, 3; @p3 ld.b16 h3, [%4+6];"
      "setp.gt.s32 p4, %5, 4; @p4 ld.b16 h4, [%4+8];  setp.gt.s32 p5, %5, 5; @p5 ld.b16 h5, [%4+10];"
      "setp.gt.s32 p6, %5, 6; @p6 ld.b16 h6, [%4+12]; setp.gt.s32 p7, %5, 7; @p7 ld.b16 h7, [%4+14];"
      "mov.b32 %0, {h0, h1}; mov.b32 %1, {h2, h3}; mov.b32 %2, {h4, h5}; mov.b32 %3, {h6, h7};}"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(address), "r"(count) : "memory");
}

TRTC_DEVICE void load_4_each(uint32& a, const void* address, int count) {
  asm volatile("{.reg .pred p; mov.b32 %0, 0; setp.gt.s32 p, %2, 0; @p ld.b32 %0, [%1];}"
      : "=&r"(a) : "l"(address), "r"(count) : "memory");
}

TRTC_DEVICE void load_4_each(uint32& a, uint32& b, uint32& c, uint32& d, const void* address, int count) {
  asm volatile(
      "{.reg .pred p<4>; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      "setp.gt.s32 p0, %5, 0; @p0 ld.b32 %0, [%4];   setp.gt.s32 p1, %5, 1; @p1 ld.b32 %1, [%4+4];"
      "setp.gt.s32 p2, %5, 2; @p2 ld.b32 %2, [%4+8]; setp.gt.s32 p3, %5, 3; @p3 ld.b32 %3, [%4+12];}"
      : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d) : "l"(address), "r"(count) : "memory");
}

TRTC_DEVICE void store_2(void* address, uint32 a, bool valid) {
  asm volatile("{.reg .pred p; .reg .b16 h; setp.ne.b32 p, %2, 0; cvt.u16.u32 h, %1; @p st.b16 [%0], h;}" ::"l"(address), "r"(a), "r"(int32{valid}) : "memory");
}

TRTC_DEVICE void store_4(void* address, uint32 a, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.b32 [%0], %1;}" ::"l"(address), "r"(a), "r"(int32{valid}) : "memory");
}

TRTC_DEVICE void store_8(void* address, uint32 a, uint32 b, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.v2.b32 [%0], {%1, %2};}" ::"l"(address), "r"(a), "r"(b), "r"(int32{valid}) : "memory");
}

TRTC_DEVICE void store_16(void* address, uint32 a, uint32 b, uint32 c, uint32 d, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d), "r"(int32{valid}) : "memory");
}

// clang-format on

// ---- Asynchronous copies from global to shared memory: 4, 8 or 16 bytes, aligned ------------------------------------
// They pass through no register, so that many can be in flight. A thread may read what it copied once it has waited.

template <int Bytes>
TRTC_DEVICE void copy_async(void* shared, const void* global) {
  const uint32 to = static_cast<uint32>(__cvta_generic_to_shared(shared));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  if constexpr (Bytes == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
  if constexpr (Bytes == 4) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

TRTC_DEVICE void wait_async() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Between the CTAs of a grid ----------------------------------------------------------------------------------

// Adds with release semantics: what this thread wrote, and what it saw others write, is visible to whoever acquires.
TRTC_DEVICE void add_release_global(uint32* address, uint32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

TRTC_DEVICE uint32 load_acquire_global(const uint32* address) {
  uint32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Served by the L2 cache, which all CTAs share.
TRTC_DEVICE float load_relaxed_global(const float* address) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

TRTC_DEVICE void store_relaxed_global(float* address, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// ---- Between the CTAs of a cluster (sm_90 and newer) -------------------------------------------------------------
#if TRTC_ARCHITECTURE >= 90

// Says that this CTA has come here, and waits until all have. The arrival orders no memory: a release there is a
// MEMBAR.ALL.GPU, which cost a fifth of the bandwidth (H200, hidden 32768).
TRTC_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
TRTC_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A barrier in shared memory for one phase: it completes when `bytes` have been stored by store_cluster_async, from
// this CTA or another of the cluster. Initialised by one thread; others of the cluster use it after cluster_wait().
TRTC_DEVICE void transaction_barrier_init(uint64* barrier, uint32 bytes) {
  const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}

// Whoever has waited sees what was stored.
TRTC_DEVICE void transaction_barrier_wait(uint64* barrier) {
  const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(barrier));
  uint32 done = 0;
  while (done == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(address)
                 : "memory");
  }
}

// Stores `value` where CTA `rank` of the cluster has the shared variable that this CTA has at `to`, and tells the
// barrier there.
TRTC_DEVICE void store_cluster_async(float* to, uint64* barrier, int rank, float value) {
  uint32 remote, remote_barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(static_cast<uint32>(__cvta_generic_to_shared(to))), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote_barrier)
               : "r"(static_cast<uint32>(__cvta_generic_to_shared(barrier))), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
               "r"(bits_from_float(value)), "r"(remote_barrier)
               : "memory");
}

#endif

}  // namespace trtc
