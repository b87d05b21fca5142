// SPDX-License-Identifier: Apache-2.0
// What a compiler must provide: fixed-width types, launch coordinates, shared memory, warp shuffles, the architecture.
// This header and ptx.cuh are the only places that differ between NVRTC and the simulator, which runs a kernel's text
// on the CPU: there TRTC_SIMULATOR is defined, and CUDA's names are what the simulator's prelude makes of them.
#pragma once

namespace trtc {

using uint8 = unsigned char;
using int16 = short;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int32 = int;
using int64 = long long;
static_assert(sizeof(uint16) == 2 && sizeof(uint32) == 4 && sizeof(uint64) == 8, "fixed-width types");

#define TRTC_DEVICE __device__ __forceinline__
// Out of line: what is called from many places and need not be fast.
#define TRTC_OUT_OF_LINE __device__ __noinline__
#define TRTC_ENTRY extern "C" __global__
#define TRTC_LAUNCH_BOUNDS(...) __launch_bounds__(__VA_ARGS__)
// As many CTAs as are asked for, or as a multiprocessor has threads for: the compiler warns of more, and ignores them.
#define TRTC_MOST_THREADS \
  (TRTC_ARCHITECTURE == 80 || (TRTC_ARCHITECTURE >= 90 && TRTC_ARCHITECTURE < 110) ? 2048 : 1536)
#define TRTC_RESIDENT(threads, ctas) ((threads) * (ctas) <= TRTC_MOST_THREADS ? (ctas) : TRTC_MOST_THREADS / (threads))
#define TRTC_PARAMETER const __grid_constant__

// Kernels test this, never the compiler's own macro: 90 for sm_90.
#define TRTC_ARCHITECTURE (__CUDA_ARCH__ / 10)

// A static shared-memory array, and the launch's dynamic shared memory, aligned to 16 bytes. Every CTA of a cluster has
// them at the same offset. The simulator has its own.
#ifndef TRTC_SIMULATOR
#define TRTC_SHARED(type, name, count) __shared__ type name[count]
#define TRTC_DYNAMIC_SHARED(type, name) extern __shared__ __align__(128) type name[]
#endif

TRTC_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
TRTC_DEVICE int64 cta_index() { return static_cast<int64>(blockIdx.x); }
TRTC_DEVICE int64 cta_index_y() { return static_cast<int64>(blockIdx.y); }
TRTC_DEVICE int threads_in_cta() { return static_cast<int>(blockDim.x); }
TRTC_DEVICE int64 ctas_in_grid() { return static_cast<int64>(gridDim.x); }
TRTC_DEVICE int64 ctas_in_grid_y() { return static_cast<int64>(gridDim.y); }

// Waits for every thread of the CTA and orders their shared and global accesses.
TRTC_DEVICE void cta_barrier() { __syncthreads(); }

// Full-mask shuffles, to be called by converged warps. A shuffle orders no memory.
TRTC_DEVICE float shuffle_xor(float value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
TRTC_DEVICE float shuffle_from(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
TRTC_DEVICE uint32 shuffle_from(uint32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
TRTC_DEVICE uint64 shuffle_from(uint64 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Correctly rounded. Programs are compiled without contraction, so a fused multiply-add is only
// where it is written.
TRTC_DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// The other one where one is NaN.
TRTC_DEVICE float larger(float a, float b) { return fmaxf(a, b); }

TRTC_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }

TRTC_DEVICE float float_from_bits(uint32 bits) { return __uint_as_float(bits); }
TRTC_DEVICE uint32 bits_from_float(float value) { return __float_as_uint(value); }

TRTC_DEVICE float magnitude(float value) { return float_from_bits(bits_from_float(value) & 0x7fffffffu); }

TRTC_DEVICE uint32 multiply_high(uint32 a, uint32 b) { return __umulhi(a, b); }

// The low word of `high`, `low` shifted right by `bits`, which are less than 32.
TRTC_DEVICE uint32 shift_right(uint32 low, uint32 high, uint32 bits) { return __funnelshift_r(low, high, bits); }

// The high word of `high`, `low` shifted left by as many.
TRTC_DEVICE uint32 shift_left(uint32 low, uint32 high, uint32 bits) { return __funnelshift_l(low, high, bits); }

// What the lanes of a converged warp have stored before, all of them see behind it.
TRTC_DEVICE void warp_barrier() { __syncwarp(); }

// Tells a polling loop's hardware that it may wait a little.
TRTC_DEVICE void spin_hint() { __nanosleep(32); }

}  // namespace trtc
