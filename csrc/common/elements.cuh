// The 16-bit element types of the tensor-core kernels.
#pragma once

#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"

namespace attn {

struct BFloat16 {
  static constexpr bool kIsBFloat16 = true;
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return ptx::pack_bf16(low, high); }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
};

struct Float16 {
  static constexpr bool kIsBFloat16 = false;
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return ptx::pack_f16(low, high); }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_f16(c, a, b0, b1);
  }
};

/// Both are stored in 2 bytes.
constexpr int32_t kElementBytes = 2;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

}  // namespace attn
