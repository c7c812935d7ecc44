// Reductions and scans of a warp, all lanes taking part.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

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

}  // namespace attn::ptx
