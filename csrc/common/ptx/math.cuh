// Approximate functions, and conversions.
#pragma once

#include "common/math.h"
#include "common/platform.h"

namespace attn::ptx {

/// An instruction of one float.
#define ATTN_UNARY(name, instruction)               \
  __device__ __forceinline__ float name(float x) {  \
    float y;                                        \
    asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                       \
  }

/// An instruction of two words, which hold pairs of 16-bit numbers.
#define ATTN_BINARY(name, instruction)                               \
  __device__ __forceinline__ uint32_t name(uint32_t a, uint32_t b) { \
    uint32_t d;                                                      \
    asm(instruction " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));      \
    return d;                                                        \
  }

// --- approximate functions of the special function unit, and conversion of pairs

ATTN_UNARY(ex2, "ex2.approx.ftz.f32")  // 2^x; 0 for -inf
ATTN_UNARY(lg2, "lg2.approx.ftz.f32")  // log2(x); -inf for 0
ATTN_UNARY(tanh, "tanh.approx.f32")    // with a relative error of 2^-11

ATTN_BINARY(sub_f16, "sub.rn.f16x2")
ATTN_BINARY(mul_f16, "mul.rn.f16x2")
ATTN_BINARY(mul_bf16, "mul.rn.bf16x2")
ATTN_BINARY(min_u16, "min.u16x2")
#undef ATTN_UNARY
#undef ATTN_BINARY

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

// --- conversion of pairs of 8-bit numbers to f16. All of them are f16 numbers, too.

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

/// The two e4m3 numbers in one half of a word.
template <int kHalf>
__device__ __forceinline__ uint32_t f16_of_e4m3_in(uint32_t word) {
#if __CUDA_ARCH__ >= 890
  uint32_t d;
  if (kHalf == 0)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(d) : "r"(word));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(d) : "r"(word));
  return d;
#else
  return f16_of_e4m3(static_cast<uint16_t>(word >> kHalf * 16));
#endif
}

/// Two e5m2 numbers: the upper bytes of f16 numbers.
__device__ __forceinline__ uint32_t f16_of_e5m2(uint16_t pair) { return __byte_perm(pair, 0, 0x1404); }

/// One half of a word, twice. (From C++ the compiler makes an instruction; products can take a half twice as it is.)
template <int kHalf>
__device__ __forceinline__ uint32_t twice(uint32_t word) {
  uint32_t d;
  if (kHalf == 0)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(d) : "r"(word));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(d) : "r"(word));
  return d;
}

/// Bits of `a` where kMask has ones, of `b` elsewhere. (From C++ the compiler makes two instructions.)
template <uint32_t kMask>
__device__ __forceinline__ uint32_t merged_bits(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(a), "r"(b), "n"(kMask));
  return d;
}

/// The nearest integers, to even among equals; the largest for what is larger; 0 for NaN. `low` in the lower byte.
__device__ __forceinline__ uint16_t pack_int8(float low, float high) {
  uint32_t bytes[2];
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(bytes[0]) : "f"(low));
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(bytes[1]) : "f"(high));
  return static_cast<uint16_t>(__byte_perm(bytes[0], bytes[1], 0x7740));
}

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
