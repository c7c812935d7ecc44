// The element types of the tensor-core kernels.
#pragma once

#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/mma_type.cuh"

namespace attn {

struct BFloat16 {
  static constexpr int kBytes = 2;
  static constexpr ptx::MmaType kMmaType = ptx::MmaType::kBFloat16;
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return ptx::pack_bf16(low, high); }
  /// The element in the lower 16 bits.
  __device__ __forceinline__ static float unpack(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr ptx::MmaType kMmaType = ptx::MmaType::kFloat16;
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return ptx::pack_f16(low, high); }
  __device__ __forceinline__ static float unpack(uint32_t pair) {
    return ptx::float_of_f16(static_cast<uint16_t>(pair));
  }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_f16(c, a, b0, b1);
  }
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

}  // namespace attn
