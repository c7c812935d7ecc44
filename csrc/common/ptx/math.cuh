// Approximate functions of the special function unit, and conversion of pairs.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// 2^x; 0 for -inf.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x); -inf for 0.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// `low` in the lower half. (volatile: the conversion stays at its place, so that the pair takes one register from
/// there on, not two.)
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t d;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t d;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

/// Both halves limited to the finite numbers; NaN stays NaN.
__device__ __forceinline__ uint32_t finite_f16(uint32_t pair) {
  constexpr uint32_t kLargest = 0x7bff7bff, kSmallest = 0xfbfffbff;
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(kLargest));
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(kSmallest));
  return pair;
}

__device__ __forceinline__ float float_of_f16(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

/// base + count * bytes. (From C++ the compiler copies the halves of `base` before each use: prefill with pages of one
/// token took 7 % longer.)
__device__ __forceinline__ const char* advanced(const char* base, uint32_t count, uint32_t bytes) {
  const char* pointer;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(pointer) : "r"(count), "r"(bytes), "l"(base));
  return pointer;
}

}  // namespace attn::ptx
