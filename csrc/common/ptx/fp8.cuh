// Conversion of pairs of 8-bit floating-point numbers to f16. All of them are f16 numbers, too.
#pragma once

#include "common/float8.h"
#include "common/platform.h"

namespace attn::ptx {

/// Two e4m3 numbers, the first in the lower byte.
__device__ __forceinline__ uint32_t f16_of_e4m3(uint16_t pair) {
  uint32_t d;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
#else
  // Moves exponent and mantissa to where an f16 has them. The product corrects the exponent's bias, for subnormal
  // numbers, too. 0x7f is NaN: all bits below the sign are set.
  const uint32_t high = __byte_perm(pair, 0, 0x1404);  // each in the upper byte of its half
  const uint32_t magnitude = high & 0x7f007f00u;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(magnitude >> 1), "r"(0x5c005c00u));  // 2^8
  const uint32_t nan = (magnitude + 0x01000100u) & 0x80008000u;
  d |= (nan - (nan >> 15)) | (high & 0x80008000u);
#endif
  return d;
}

/// Two e5m2 numbers: the upper bytes of f16 numbers.
__device__ __forceinline__ uint32_t f16_of_e5m2(uint16_t pair) { return __byte_perm(pair, 0, 0x1404); }

/// The nearest e4m3 numbers, to even among equals; the largest for what is larger. `low` in the lower byte.
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
#else
  return static_cast<uint16_t>(e4m3_bits(high) << 8 | e4m3_bits(low));
#endif
}

__device__ __forceinline__ uint16_t pack_e5m2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
#else
  return static_cast<uint16_t>(e5m2_bits(high) << 8 | e5m2_bits(low));
#endif
}

}  // namespace attn::ptx
