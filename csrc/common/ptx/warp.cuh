// Lanes of a warp, special registers, registers, and static shared memory.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

// --- reductions and scans of a warp, all lanes taking part

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32_t warp_max(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }
__device__ __forceinline__ uint32_t warp_min(uint32_t x) { return __reduce_min_sync(kAllLanes, x); }
__device__ __forceinline__ uint32_t warp_add(uint32_t x) { return __reduce_add_sync(kAllLanes, x); }

/// Sum over the lanes of x < 2^57, by two reductions of 32-bit words.
__device__ __forceinline__ uint64_t warp_add(uint64_t x) {
  constexpr uint32_t kLowBits = 26;
  const uint32_t low = warp_add(static_cast<uint32_t>(x) & ((1u << kLowBits) - 1));
  if (__all_sync(kAllLanes, (x >> (kLowBits + 27)) == 0))
    return low + (static_cast<uint64_t>(warp_add(static_cast<uint32_t>(x >> kLowBits))) << kLowBits);
  const uint32_t middle = warp_add(static_cast<uint32_t>(x >> kLowBits) & ((1u << kLowBits) - 1));
  const uint32_t high = warp_add(static_cast<uint32_t>(x >> (2 * kLowBits)));
  return low + (static_cast<uint64_t>(middle) << kLowBits) + (static_cast<uint64_t>(high) << (2 * kLowBits));
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

__device__ __forceinline__ float warp_add(float x) {
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ __forceinline__ double warp_add(double x) {
#pragma unroll 1
  for (int32_t step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The same of the four lanes that hold a row of an accumulator (mma.cuh).

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ __forceinline__ float quad_add(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

/// Sum of x over this lane and those before it.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T x, int32_t lane) {
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, x, step);
    x += lane >= step ? before : 0;
  }
  return x;
}

/// The larger one; NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// --- special registers, read where they are used: a copy of threadIdx.x that lives through a whole kernel costs a
// register.

__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ int thread_id() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// Blocks of a grid of one or two dimensions.
__device__ __forceinline__ uint32_t num_blocks() {
  uint32_t blocks;
  asm volatile("{\n.reg .u32 y;\nmov.u32 y, %%nctaid.y;\nmov.u32 %0, %%nctaid.x;\nmul.lo.u32 %0, %0, y;\n}"
               : "=r"(blocks));
  return blocks;
}

__device__ __forceinline__ uint32_t block_id() {
  uint32_t block;
  asm volatile(
      "{\n.reg .u32 x, y;\nmov.u32 x, %%ctaid.x;\nmov.u32 y, %%ctaid.y;\nmov.u32 %0, %%nctaid.x;\nmad.lo.u32 %0, %0, "
      "y, x;\n}"
      : "=r"(block));
  return block;
}

// --- the clock that all multiprocessors share

/// Nanoseconds. It moves in steps, of 32 ns on Hopper, and never back.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

/// The longest that a CTA waits for another one: far longer than any launch takes, even under a sanitizer.
constexpr uint64_t kMaxWait = 4'000'000'000;

// --- setmaxnreg, which moves them between the warpgroups of a CTA; numbers that are to stay in one.

/// Keeps a number that is cheap to compute: otherwise the compiler computes it again wherever it is used.
__device__ __forceinline__ void keep(uint32_t& number) { asm volatile("" : "+r"(number)); }

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- shared memory whose size a kernel knows itself

/// kBytes of static shared memory, in addition to a launch's dynamic one: every call in a kernel returns the same
/// bytes.
template <int kBytes>
__device__ __forceinline__ char* static_shared() {
  static __shared__ __align__(1024) char memory[kBytes];
  return memory;
}

/// A CTA's own dynamic shared memory. (In tests the CTAs of a cluster share an array.)
__device__ __forceinline__ char* own_shared(char* memory) { return memory; }

}  // namespace attn::ptx
