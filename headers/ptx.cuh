// SPDX-License-Identifier: Apache-2.0
// Inline PTX, an instruction or a few a helper, and beside it what does the same in the simulator. No other header and
// no kernel contains any.
#pragma once

#include "formats.cuh"

#ifdef TRTC_SIMULATOR
#define TRTC_PTX(...)
#define TRTC_PORTABLE(...) __VA_ARGS__
#else
#define TRTC_PTX(...) __VA_ARGS__
#define TRTC_PORTABLE(...)
#endif

namespace trtc {

// clang-format off

// ---- Conversions -------------------------------------------------------------------------------------------------

TRTC_DEVICE float float_from_float16_bits(uint16 bits) {
  float value;
  TRTC_PTX(asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));)
  TRTC_PORTABLE(value = float_from_float16(bits);)
  return value;
}

// Two values in one word, `low` in the low half.
TRTC_DEVICE uint32 float16_bits_from_floats(float low, float high) {
  uint32 bits;
  TRTC_PTX(asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));)
  TRTC_PORTABLE(bits = float16_from_float(low) | float16_from_float(high) << 16;)
  return bits;
}

TRTC_DEVICE uint32 bfloat16_bits_from_floats(float low, float high) {
  uint32 bits;
  TRTC_PTX(asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));)
  TRTC_PORTABLE(bits = bfloat16_from_float(low) | bfloat16_from_float(high) << 16;)
  return bits;
}

// Two values in the low half of a word, `low` in its low byte. What the format cannot hold becomes its largest number.
TRTC_DEVICE uint32 float8_e4m3_bits_from_floats(float low, float high) {
#if !defined(TRTC_SIMULATOR) && TRTC_ARCHITECTURE >= 89
  uint16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return float8_e4m3_from_float(low) | float8_e4m3_from_float(high) << 8;
#endif
}

TRTC_DEVICE uint32 float8_e5m2_bits_from_floats(float low, float high) {
#if !defined(TRTC_SIMULATOR) && TRTC_ARCHITECTURE >= 89
  uint16 bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return float8_e5m2_from_float(low) | float8_e5m2_from_float(high) << 8;
#endif
}

// Rounded to nearest even, saturated; NaN gives 0.
TRTC_DEVICE uint32 int8_bits_from_float(float value) {
  int32 bits;
  TRTC_PTX(asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(bits) : "f"(value));)
  TRTC_PORTABLE(bits = int8_from_float(value);)
  return static_cast<uint32>(bits) & 0xffu;
}

// 1 / sqrt(x) within 2 ulp.
TRTC_DEVICE float approximate_rsqrt(float value) {
  float result;
  TRTC_PTX(asm("rsqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(value));)
  TRTC_PORTABLE(result = rsqrtf(value);)
  return result;
}

// 2^x within 2^-22 of it, and 0 where that is less than 2^-126.
TRTC_DEVICE float approximate_exp2(float value) {
  float result;
  TRTC_PTX(asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));)
  TRTC_PORTABLE(result = value < -126.0f ? 0.0f : exp2f(value);)
  return result;
}

// The larger one; NaN where one is NaN.
TRTC_DEVICE float larger_or_nan(float a, float b) {
  float result;
  TRTC_PTX(asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));)
  TRTC_PORTABLE(result = a != a ? a : b > a ? b : a;)
  return result;
}

// Of both halves of a word the larger one; the other one where one is NaN.
TRTC_DEVICE uint32 larger_float16s(uint32 a, uint32 b) {
  uint32 bits;
  TRTC_PTX(asm("max.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));)
  TRTC_PORTABLE(bits = larger_halves(a, b, float_from_float16);)
  return bits;
}

TRTC_DEVICE uint32 larger_bfloat16s(uint32 a, uint32 b) {
  uint32 bits;
  TRTC_PTX(asm("max.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));)
  TRTC_PORTABLE(bits = larger_halves(a, b, [](uint32 half) { return float_from_bits(half << 16); });)
  return bits;
}

// Byte i has the top bit of the byte that digit i of `bytes`, in base 16, names, in all its bits.
TRTC_DEVICE uint32 spread_signs(uint32 word, uint32 bytes) {
  uint32 bits = 0;
  TRTC_PTX(asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bits) : "r"(word), "r"(bytes | 0x8888u));)
  TRTC_PORTABLE(
      for (int i = 0; i < 4; ++i) bits |= (word >> (bytes >> 4 * i & 3) * 8 & 0x80u) != 0 ? 0xffu << 8 * i : 0u;)
  return bits;
}

// All bits of each half of a word that is not that of `value`, which has one half twice; where it is 0, neither a 0
// below zero.
TRTC_DEVICE uint32 halves_unlike(uint32 word, uint32 value) {
  const uint32 differing = value == 0 ? word & 0x7fff7fffu : word ^ value;
  return spread_signs(((differing & 0x7fff7fffu) + 0x7fff7fffu) | differing, 0x3311u);
}

// The same of two float16s or bfloat16s, none of which is NaN in `value`.
TRTC_DEVICE uint32 float16s_unlike(uint32 word, uint32 value) {
  uint32 bits;
  TRTC_PTX(asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(word), "r"(value));)
  TRTC_PORTABLE(bits = halves_unlike(word, value);)
  return bits;
}

TRTC_DEVICE uint32 bfloat16s_unlike(uint32 word, uint32 value) {
#if TRTC_ARCHITECTURE >= 90
  uint32 bits;
  TRTC_PTX(asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(word), "r"(value));)
  TRTC_PORTABLE(bits = halves_unlike(word, value);)
  return bits;
#else
  return halves_unlike(word, value);
#endif
}

// 1 / x within 1 ulp, of x that is no less than 2^-126 and no more than 2^126.
TRTC_DEVICE float approximate_reciprocal(float value) {
  float result;
  TRTC_PTX(asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));)
  TRTC_PORTABLE(result = 1.0f / value;)
  return result;
}

// log2(x) within 2^-22.
TRTC_DEVICE float approximate_log2(float value) {
  float result;
  TRTC_PTX(asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(value));)
  TRTC_PORTABLE(result = log2f(value);)
  return result;
}

// ---- Global and shared memory --------------------------------------------------------------------------------------
// Volatile and clobbering memory, so that no load moves past a store of an in-place call. Naturally aligned.

enum class Space {
  global,
  shared,
};

#ifndef TRTC_SIMULATOR
TRTC_DEVICE uint32 shared_address(const void* address) { return static_cast<uint32>(__cvta_generic_to_shared(address)); }
#endif

TRTC_DEVICE float load_float(const void* address) {
  float value;
  TRTC_PTX(asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");)
  TRTC_PORTABLE(value = trtc_simulator::load<float>(address);)
  return value;
}

// Whether an aligned vector may be read of which only some elements belong to a row: what is beside them is of no use,
// and belongs to the same array's rows or lies between them. The simulator refuses it.
TRTC_PTX(enum : bool { reads_whole_blocks = true };)
TRTC_PORTABLE(enum : bool { reads_whole_blocks = false };)

// If `valid`; else 0.
TRTC_DEVICE void load_1(uint32& a, const void* address, bool valid) {
  TRTC_PTX(asm volatile("{.reg .pred p; mov.b32 %0, 0; setp.ne.b32 p, %2, 0; @p ld.global.u8 %0, [%1];}" : "=&r"(a) : "l"(address), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(a = valid ? trtc_simulator::load<unsigned char>(address) : 0;)
}

template <Space From>
TRTC_DEVICE void load_2(uint32& a, const void* address, bool valid) {
  TRTC_PTX(if constexpr (From == Space::global) asm volatile("{.reg .pred p; .reg .b16 h; mov.b16 h, 0; setp.ne.b32 p, %2, 0; @p ld.global.b16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(a) : "l"(address), "r"(int32{valid}) : "memory");)
  TRTC_PTX(if constexpr (From == Space::shared) asm volatile("{.reg .pred p; .reg .b16 h; mov.b16 h, 0; setp.ne.b32 p, %2, 0; @p ld.shared.b16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(a) : "r"(shared_address(address)), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(a = valid ? trtc_simulator::load<uint16>(address) : 0;)
}

TRTC_DEVICE void load_4(uint32& a, const void* address, bool valid) {
  TRTC_PTX(asm volatile("{.reg .pred p; mov.b32 %0, 0; setp.ne.b32 p, %2, 0; @p ld.global.b32 %0, [%1];}" : "=&r"(a) : "l"(address), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(a = valid ? trtc_simulator::load<uint32>(address) : 0;)
}

// Of the four elements at an address, which are a Vec's from `At` on, its elements from `first` to before `end`; the
// others' bits stay. One statement: one for each access, and what decides about it, cost the compiler more.
template <int At>
TRTC_DEVICE void load_4_each(uint32& a, uint32& b, uint32& c, uint32& d, const void* address, int first, int end) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p<4>;"
      "setp.lt.s32 p0, %5, %8; setp.gt.and.s32 p0, %6, %7, p0; setp.lt.s32 p1, %5, %9; setp.gt.and.s32 p1, %6, %8, p1;"
      "setp.lt.s32 p2, %5, %10; setp.gt.and.s32 p2, %6, %9, p2; setp.lt.s32 p3, %5, %11; setp.gt.and.s32 p3, %6, %10, p3;"
      "@p0 ld.global.b32 %0, [%4];   @p1 ld.global.b32 %1, [%4+4];"
      "@p2 ld.global.b32 %2, [%4+8]; @p3 ld.global.b32 %3, [%4+12];}"
      : "+r"(a), "+r"(b), "+r"(c), "+r"(d) : "l"(address), "r"(first), "r"(end), "n"(At), "n"(At + 1), "n"(At + 2), "n"(At + 3), "n"(At + 4) : "memory");)
  TRTC_PORTABLE(
      uint32 word[4] = {a, b, c, d};
      trtc_simulator::load_each<uint32>(word, address, first - At, end - At);
      a = word[0]; b = word[1]; c = word[2]; d = word[3];)
}

// The same of 16 bits each.
template <int At>
TRTC_DEVICE void load_2_each(uint32& a, uint32& b, const void* address, int first, int end) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p<4>; .reg .b16 h<4>; mov.b32 {h0, h1}, %0; mov.b32 {h2, h3}, %1;"
      "setp.lt.s32 p0, %3, %6; setp.gt.and.s32 p0, %4, %5, p0; setp.lt.s32 p1, %3, %7; setp.gt.and.s32 p1, %4, %6, p1;"
      "setp.lt.s32 p2, %3, %8; setp.gt.and.s32 p2, %4, %7, p2; setp.lt.s32 p3, %3, %9; setp.gt.and.s32 p3, %4, %8, p3;"
      "@p0 ld.global.b16 h0, [%2];   @p1 ld.global.b16 h1, [%2+2];"
      "@p2 ld.global.b16 h2, [%2+4]; @p3 ld.global.b16 h3, [%2+6]; mov.b32 %0, {h0, h1}; mov.b32 %1, {h2, h3};}"
      : "+r"(a), "+r"(b) : "l"(address), "r"(first), "r"(end), "n"(At), "n"(At + 1), "n"(At + 2), "n"(At + 3), "n"(At + 4) : "memory");)
  TRTC_PORTABLE(
      uint32 word[2] = {a, b};
      trtc_simulator::load_each<uint16>(word, address, first - At, end - At);
      a = word[0]; b = word[1];)
}

// The same of bytes.
template <int At>
TRTC_DEVICE void load_1_each(uint32& a, const void* address, int first, int end) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p<4>; .reg .b32 r<4>;"
      "setp.lt.s32 p0, %2, %5; setp.gt.and.s32 p0, %3, %4, p0; setp.lt.s32 p1, %2, %6; setp.gt.and.s32 p1, %3, %5, p1;"
      "setp.lt.s32 p2, %2, %7; setp.gt.and.s32 p2, %3, %6, p2; setp.lt.s32 p3, %2, %8; setp.gt.and.s32 p3, %3, %7, p3;"
      "@p0 ld.global.u8 r0, [%1];   @p1 ld.global.u8 r1, [%1+1];"
      "@p2 ld.global.u8 r2, [%1+2]; @p3 ld.global.u8 r3, [%1+3];"
      "@p0 prmt.b32 %0, %0, r0, 0x3214; @p1 prmt.b32 %0, %0, r1, 0x3240;"
      "@p2 prmt.b32 %0, %0, r2, 0x3410; @p3 prmt.b32 %0, %0, r3, 0x4210;}"
      : "+r"(a) : "l"(address), "r"(first), "r"(end), "n"(At), "n"(At + 1), "n"(At + 2), "n"(At + 3), "n"(At + 4) : "memory");)
  TRTC_PORTABLE(
      uint32 word[1] = {a};
      trtc_simulator::load_each<unsigned char>(word, address, first - At, end - At);
      a = word[0];)
}

template <Space From>
TRTC_DEVICE void load_4(uint32& a, const void* address) {
  TRTC_PTX(if constexpr (From == Space::global) asm volatile("ld.global.b32 %0, [%1];" : "=r"(a) : "l"(address) : "memory");)
  TRTC_PTX(if constexpr (From == Space::shared) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(shared_address(address)) : "memory");)
  TRTC_PORTABLE(a = trtc_simulator::load<uint32>(address);)
}

template <Space From>
TRTC_DEVICE void load_8(uint32& a, uint32& b, const void* address) {
  TRTC_PTX(if constexpr (From == Space::global) asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(address) : "memory");)
  TRTC_PTX(if constexpr (From == Space::shared) asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(shared_address(address)) : "memory");)
  TRTC_PORTABLE(const uint2 value = trtc_simulator::load<uint2>(address); a = value.x; b = value.y;)
}

template <Space From>
TRTC_DEVICE void load_16(uint32& a, uint32& b, uint32& c, uint32& d, const void* address) {
  TRTC_PTX(if constexpr (From == Space::global) asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(address) : "memory");)
  TRTC_PTX(if constexpr (From == Space::shared) asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(shared_address(address)) : "memory");)
  TRTC_PORTABLE(const uint4 value = trtc_simulator::load<uint4>(address); a = value.x; b = value.y; c = value.z; d = value.w;)
}

// From global memory, or zeros.
TRTC_DEVICE void load_16(uint32& a, uint32& b, uint32& c, uint32& d, const void* address, bool valid) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      "setp.ne.b32 p, %5, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d) : "l"(address), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(const uint4 value = valid ? trtc_simulator::load<uint4>(address) : uint4{0, 0, 0, 0}; a = value.x; b = value.y; c = value.z; d = value.w;)
}

// From global memory, or else `fill` in every word.
TRTC_DEVICE void load_8(uint32& a, uint32& b, const void* address, bool valid, uint32 fill) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p; mov.b32 %0, %4; mov.b32 %1, %4; setp.ne.b32 p, %3, 0; @p ld.global.v2.b32 {%0, %1}, [%2];}"
      : "=&r"(a), "=&r"(b) : "l"(address), "r"(int32{valid}), "r"(fill) : "memory");)
  TRTC_PORTABLE(const uint2 value = valid ? trtc_simulator::load<uint2>(address) : uint2{fill, fill}; a = value.x; b = value.y;)
}

TRTC_DEVICE void load_16(uint32& a, uint32& b, uint32& c, uint32& d, const void* address, bool valid, uint32 fill) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p; mov.b32 %0, %6; mov.b32 %1, %6; mov.b32 %2, %6; mov.b32 %3, %6;"
      "setp.ne.b32 p, %5, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d) : "l"(address), "r"(int32{valid}), "r"(fill) : "memory");)
  TRTC_PORTABLE(const uint4 value = valid ? trtc_simulator::load<uint4>(address) : uint4{fill, fill, fill, fill}; a = value.x; b = value.y; c = value.z; d = value.w;)
}

// Nothing where not `valid`.
template <Space To>
TRTC_DEVICE void store_1(void* address, uint32 a, bool valid) {
  TRTC_PTX(if constexpr (To == Space::global) asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b8 [%0], %1;}" ::"l"(address), "r"(a), "r"(int32{valid}) : "memory");)
  TRTC_PTX(if constexpr (To == Space::shared) asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.b8 [%0], %1;}" ::"r"(shared_address(address)), "r"(a), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(if (valid) trtc_simulator::store(address, static_cast<unsigned char>(a));)
}

template <Space To>
TRTC_DEVICE void store_2(void* address, uint32 a, bool valid) {
  TRTC_PTX(if constexpr (To == Space::global) asm volatile("{.reg .pred p; .reg .b16 h; setp.ne.b32 p, %2, 0; cvt.u16.u32 h, %1; @p st.global.b16 [%0], h;}" ::"l"(address), "r"(a), "r"(int32{valid}) : "memory");)
  TRTC_PTX(if constexpr (To == Space::shared) asm volatile("{.reg .pred p; .reg .b16 h; setp.ne.b32 p, %2, 0; cvt.u16.u32 h, %1; @p st.shared.b16 [%0], h;}" ::"r"(shared_address(address)), "r"(a), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(if (valid) trtc_simulator::store(address, static_cast<uint16>(a));)
}

template <Space To>
TRTC_DEVICE void store_4(void* address, uint32 a, bool valid) {
  TRTC_PTX(if constexpr (To == Space::global) asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(address), "r"(a), "r"(int32{valid}) : "memory");)
  TRTC_PTX(if constexpr (To == Space::shared) asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.b32 [%0], %1;}" ::"r"(shared_address(address)), "r"(a), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(if (valid) trtc_simulator::store(address, a);)
}

template <Space To>
TRTC_DEVICE void store_8(void* address, uint32 a, uint32 b, bool valid) {
  TRTC_PTX(if constexpr (To == Space::global) asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(address), "r"(a), "r"(b), "r"(int32{valid}) : "memory");)
  TRTC_PTX(if constexpr (To == Space::shared) asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.shared.v2.b32 [%0], {%1, %2};}" ::"r"(shared_address(address)), "r"(a), "r"(b), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(if (valid) trtc_simulator::store(address, uint2{a, b});)
}

template <Space To>
TRTC_DEVICE void store_16(void* address, uint32 a, uint32 b, uint32 c, uint32 d, bool valid) {
  TRTC_PTX(if constexpr (To == Space::global) asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d), "r"(int32{valid}) : "memory");)
  TRTC_PTX(if constexpr (To == Space::shared) asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.shared.v4.b32 [%0], {%1, %2, %3, %4};}" ::"r"(shared_address(address)), "r"(a), "r"(b), "r"(c), "r"(d), "r"(int32{valid}) : "memory");)
  TRTC_PORTABLE(if (valid) trtc_simulator::store(address, uint4{a, b, c, d});)
}

// As load_4_each(): stores to global memory.
template <int At>
TRTC_DEVICE void store_4_each(void* address, uint32 a, uint32 b, uint32 c, uint32 d, int first, int end) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p<4>;"
      "setp.lt.s32 p0, %5, %8; setp.gt.and.s32 p0, %6, %7, p0; setp.lt.s32 p1, %5, %9; setp.gt.and.s32 p1, %6, %8, p1;"
      "setp.lt.s32 p2, %5, %10; setp.gt.and.s32 p2, %6, %9, p2; setp.lt.s32 p3, %5, %11; setp.gt.and.s32 p3, %6, %10, p3;"
      "@p0 st.global.b32 [%0], %1;   @p1 st.global.b32 [%0+4], %2;"
      "@p2 st.global.b32 [%0+8], %3; @p3 st.global.b32 [%0+12], %4;}"
      ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d), "r"(first), "r"(end), "n"(At), "n"(At + 1), "n"(At + 2), "n"(At + 3), "n"(At + 4) : "memory");)
  TRTC_PORTABLE(const uint32 word[4] = {a, b, c, d}; trtc_simulator::store_each<uint32>(address, word, first - At, end - At);)
}

template <int At>
TRTC_DEVICE void store_2_each(void* address, uint32 a, uint32 b, int first, int end) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p<4>; .reg .b16 h<4>; mov.b32 {h0, h1}, %1; mov.b32 {h2, h3}, %2;"
      "setp.lt.s32 p0, %3, %6; setp.gt.and.s32 p0, %4, %5, p0; setp.lt.s32 p1, %3, %7; setp.gt.and.s32 p1, %4, %6, p1;"
      "setp.lt.s32 p2, %3, %8; setp.gt.and.s32 p2, %4, %7, p2; setp.lt.s32 p3, %3, %9; setp.gt.and.s32 p3, %4, %8, p3;"
      "@p0 st.global.b16 [%0], h0;   @p1 st.global.b16 [%0+2], h1;"
      "@p2 st.global.b16 [%0+4], h2; @p3 st.global.b16 [%0+6], h3;}"
      ::"l"(address), "r"(a), "r"(b), "r"(first), "r"(end), "n"(At), "n"(At + 1), "n"(At + 2), "n"(At + 3), "n"(At + 4) : "memory");)
  TRTC_PORTABLE(const uint32 word[2] = {a, b}; trtc_simulator::store_each<uint16>(address, word, first - At, end - At);)
}

template <int At>
TRTC_DEVICE void store_1_each(void* address, uint32 a, int first, int end) {
  TRTC_PTX(asm volatile(
      "{.reg .pred p<4>; .reg .b32 r<4>; shr.b32 r1, %1, 8; shr.b32 r2, %1, 16; shr.b32 r3, %1, 24;"
      "setp.lt.s32 p0, %2, %5; setp.gt.and.s32 p0, %3, %4, p0; setp.lt.s32 p1, %2, %6; setp.gt.and.s32 p1, %3, %5, p1;"
      "setp.lt.s32 p2, %2, %7; setp.gt.and.s32 p2, %3, %6, p2; setp.lt.s32 p3, %2, %8; setp.gt.and.s32 p3, %3, %7, p3;"
      "@p0 st.global.b8 [%0], %1;   @p1 st.global.b8 [%0+1], r1;"
      "@p2 st.global.b8 [%0+2], r2; @p3 st.global.b8 [%0+3], r3;}"
      ::"l"(address), "r"(a), "r"(first), "r"(end), "n"(At), "n"(At + 1), "n"(At + 2), "n"(At + 3), "n"(At + 4) : "memory");)
  TRTC_PORTABLE(const uint32 word[1] = {a}; trtc_simulator::store_each<unsigned char>(address, word, first - At, end - At);)
}

// The bits of a word from `first` to before `end`, which may be outside it; for the others, `fill`'s.
TRTC_DEVICE uint32 keep_bits(uint32 word, int first, int end, uint32 fill) {
  uint32 bits;
  TRTC_PTX(asm(
      "{.reg .b32 f, e; max.s32 f, %2, 0; max.s32 e, %3, 0;"
      "bmsk.clamp.b32 f, 0, f; bmsk.clamp.b32 e, 0, e; lop3.b32 f, e, f, 0, 0x30; lop3.b32 %0, %1, %4, f, 0xe4;}"
      : "=r"(bits) : "r"(word), "r"(first), "r"(end), "r"(fill));)
  TRTC_PORTABLE(
      const auto lowest = [](int count) { return count <= 0 ? 0 : count < 32 ? (1u << count) - 1 : 0xffffffffu; };
      const uint32 kept = lowest(end) & ~lowest(first);
      bits = (word & kept) | (fill & ~kept);)
  return bits;
}

// What is computed of these bits behind this is computed anew.
TRTC_DEVICE void forget_uses(uint32& bits) {
  TRTC_PTX(asm volatile("" : "+r"(bits));)
  TRTC_PORTABLE(static_cast<void>(bits);)
}
TRTC_DEVICE void forget_uses(char*& address) {
  TRTC_PTX(asm volatile("" : "+l"(address));)
  TRTC_PORTABLE(static_cast<void>(address);)
}

// ---- Asynchronous copies from global to shared memory: 4, 8 or 16 bytes, aligned ------------------------------------
// They pass through no register, so that many can be in flight. A thread may read what it copied once it has waited.

// `Line`: the L2 brings the 128 bytes that they are among. Of rows that begin anywhere, warps or CTAs ask for parts of one
// line at different times: 256 bytes are slower. Not where a part of a row is used: what is beside it would be read too.
template <int Bytes, bool Line = false>
TRTC_DEVICE void copy_async(void* shared, const void* global) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "there is no other");
  TRTC_PTX(const uint32 to = shared_address(shared);)
  TRTC_PTX(if constexpr (Bytes == 16 && Line) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");)
  TRTC_PTX(if constexpr (Bytes == 16 && !Line) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");)
  TRTC_PTX(if constexpr (Bytes < 16 && Line) asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(Bytes) : "memory");)
  TRTC_PTX(if constexpr (Bytes < 16 && !Line) asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(Bytes) : "memory");)
  TRTC_PORTABLE(trtc_simulator::copy_async(shared, global, Bytes);)
}

// Of `Bytes` of shared memory, those from `first` to before `end` are copied, and behind them are zeros. What is before
// them is of no use; the instruction reads it, as above.
template <int Bytes>
TRTC_DEVICE void copy_async_part(void* shared, const void* global, int first, int end) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "there is no other");
  TRTC_PTX(const uint32 to = shared_address(shared);)
  TRTC_PTX(if constexpr (Bytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(end) : "memory");)
  TRTC_PTX(if constexpr (Bytes < 16) asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(Bytes), "r"(end) : "memory");)
  TRTC_PORTABLE(
      if (first == 0 && end == Bytes) return trtc_simulator::copy_async(shared, global, Bytes);
      if (first == Bytes) trtc_simulator::load<uint32>(global);  // nothing of use, and may be no memory
      for (int i = 0; i < Bytes; i += 4) trtc_simulator::store(static_cast<char*>(shared) + i, uint32{0});
      const int size = (first | end) % 2 == 0 ? 2 : 1;  // of an element
      for (int i = first; i < end; i += size) {
        trtc_simulator::copy_async(static_cast<char*>(shared) + i, static_cast<const char*>(global) + i, size);
      })
}

// Waits for all of them.
TRTC_DEVICE void wait_async() {
  TRTC_PTX(asm volatile("cp.async.wait_all;" ::: "memory");)
  TRTC_PORTABLE(trtc_simulator::commit_copies();)
  TRTC_PORTABLE(trtc_simulator::wait_copies(0);)
}

// Closes a group: the copies since the last one, or none.
TRTC_DEVICE void commit_async() {
  TRTC_PTX(asm volatile("cp.async.commit_group;" ::: "memory");)
  TRTC_PORTABLE(trtc_simulator::commit_copies();)
}

// Waits for all groups but the last `Pending` ones.
template <int Pending>
TRTC_DEVICE void wait_async() {
  TRTC_PTX(asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");)
  TRTC_PORTABLE(trtc_simulator::wait_copies(Pending);)
}

// ---- One asynchronous copy of many bytes (sm_90 and newer) ----------------------------------------------------------
#if TRTC_ARCHITECTURE >= 90

// Copies `bytes`, a multiple of 16, from global memory to shared memory of this CTA, both aligned to 16 bytes, and tells
// the barrier. What is before `first` and from `end` on is of no use.
TRTC_DEVICE void copy_bulk(void* shared, const void* global, int bytes, uint64* barrier, int first, int end) {
  TRTC_PTX(asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");)
  TRTC_PORTABLE(trtc_simulator::copy_bulk(shared, global, static_cast<uint32>(bytes), barrier, static_cast<uint32>(first), static_cast<uint32>(end));)
}

// What this thread has done with shared memory comes before bulk copies that are ordered behind it.
TRTC_DEVICE void fence_bulk() {
  TRTC_PTX(asm volatile("fence.proxy.async.shared::cta;" ::: "memory");)
}

#endif

// ---- Between the threads of a grid ----------------------------------------------------------------------------------

// What is there, while others may change it by accesses of this kind.
TRTC_DEVICE float load_atomically_global(const float* address) {
  float value;
  TRTC_PTX(asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");)
  TRTC_PORTABLE(value = float_from_bits(trtc_simulator::load_atomically(reinterpret_cast<const uint32*>(address), trtc_simulator::Order::relaxed));)
  return value;
}

// The maximum of what is there and `value`, neither with a sign: they compare as their bits do, NaN above infinity.
TRTC_DEVICE void maximum_global(float* address, float value) {
  TRTC_PTX(asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(address), "r"(bits_from_float(value)) : "memory");)
  TRTC_PORTABLE(trtc_simulator::change_atomically<uint32, trtc_simulator::Maximum>(reinterpret_cast<uint32*>(address), bits_from_float(value), trtc_simulator::Order::relaxed);)
}

// Adds with release semantics: what this thread wrote, and what it saw others write, is visible to whoever acquires.
TRTC_DEVICE void add_release_global(uint32* address, uint32 value) {
  TRTC_PTX(asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");)
  TRTC_PORTABLE(trtc_simulator::change_atomically<uint32, trtc_simulator::Add>(address, value, trtc_simulator::Order::release);)
}

TRTC_DEVICE uint32 load_acquire_global(const uint32* address) {
  uint32 value;
  TRTC_PTX(asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");)
  TRTC_PORTABLE(value = trtc_simulator::load_atomically(address, trtc_simulator::Order::acquire);)
  return value;
}

// Served by the L2 cache, which all CTAs share. What another CTA stored must have been acquired: the simulator takes
// these two for plain accesses.
TRTC_DEVICE float load_relaxed_global(const float* address) {
  TRTC_PTX(return load_atomically_global(address);)
  TRTC_PORTABLE(return trtc_simulator::load<float>(address);)
}

TRTC_DEVICE void store_relaxed_global(float* address, float value) {
  TRTC_PTX(asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");)
  TRTC_PORTABLE(trtc_simulator::store(address, value);)
}

// ---- Between launches ------------------------------------------------------------------------------------------------
// Programmatic dependent launch (sm_90 and newer): a launch may begin when every CTA of the one before it on the stream
// has left or let it. Here it waits until that has ended and what it wrote is there: every kernel's first statement,
// before any access to global memory.
TRTC_DEVICE void wait_for_last_launch() {
#if TRTC_ARCHITECTURE >= 90
  TRTC_PTX(asm volatile("griddepcontrol.wait;" ::: "memory");)
#endif
}

// Where a few of the kernel's statements are left. Earlier, the next launch's CTAs take places and bandwidth from CTAs
// that work; and before another operator's launch nothing is gained.
TRTC_DEVICE void let_next_launch_begin() {
#if TRTC_ARCHITECTURE >= 90
  TRTC_PTX(asm volatile("griddepcontrol.launch_dependents;" ::: "memory");)
#endif
}

// ---- Between the CTAs of a cluster (sm_90 and newer) -------------------------------------------------------------
#if TRTC_ARCHITECTURE >= 90

// Says that this CTA has come here, and waits until all have. The arrival orders no memory: a release there is a
// MEMBAR.ALL.GPU, which cost a fifth of the bandwidth of long rows.
TRTC_DEVICE void cluster_arrive_relaxed() {
  TRTC_PTX(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");)
  TRTC_PORTABLE(trtc_simulator::cluster_arrive(false);)
}

TRTC_DEVICE void cluster_wait() {
  TRTC_PTX(asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");)
  TRTC_PORTABLE(trtc_simulator::cluster_wait();)
}

// A barrier in shared memory whose phases complete when the bytes that they expect have come: by store_cluster_async,
// from this CTA or another of the cluster, or by copy_bulk. Initialised by one thread; others of the cluster use it after
// cluster_wait(), and others of the CTA after its barrier.
TRTC_DEVICE void transaction_barrier_init(uint64* barrier) {
  TRTC_PTX(asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");)
  TRTC_PTX(asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");)
  TRTC_PORTABLE(trtc_simulator::barrier_init(barrier, 1);)
  TRTC_PORTABLE(trtc_simulator::barrier_publish();)
}

// Lets the next phase expect `bytes`. By one thread, once it has waited for the last phase; stores that come earlier
// count.
TRTC_DEVICE void transaction_barrier_expect(uint64* barrier, uint32 bytes) {
  TRTC_PTX(const uint32 address = shared_address(barrier);)
  TRTC_PTX(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");)
  TRTC_PORTABLE(trtc_simulator::barrier_arrive(barrier, bytes);)
}

// Waits for the phases with this parity, 0 for the first one. Whoever has waited sees what was stored.
TRTC_DEVICE void transaction_barrier_wait(uint64* barrier, uint32 parity = 0) {
  TRTC_PTX(const uint32 address = shared_address(barrier);)
  TRTC_PTX(
    uint32 done = 0;
    while (done == 0) {
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}" : "=r"(done) : "r"(address), "r"(parity) : "memory");
    })
  TRTC_PORTABLE(trtc_simulator::barrier_wait(barrier, parity);)
}

// Stores `value` where CTA `rank` of the cluster has the shared variable that this CTA has at `to`, and tells the
// barrier there.
TRTC_DEVICE void store_cluster_async(float* to, uint64* barrier, int rank, float value) {
  TRTC_PTX(uint32 remote, remote_barrier;)
  TRTC_PTX(asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(to)), "r"(rank));)
  TRTC_PTX(asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(rank));)
  TRTC_PTX(asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote), "r"(bits_from_float(value)), "r"(remote_barrier) : "memory");)
  TRTC_PORTABLE(trtc_simulator::store_async(to, bits_from_float(value), barrier, static_cast<uint32>(rank));)
}

#endif

// clang-format on

}  // namespace trtc
