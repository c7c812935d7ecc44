// Small integer and floating-point helpers, the same on host and device.
#pragma once

#include "common/platform.h"

namespace attn {

constexpr int64_t kMaxInt32 = 0x7fffffff;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class Int>
ATTN_HD constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

/// a * b for 0 <= a, b: one instruction on a GPU, where a signed product takes five.
ATTN_HD uint64_t multiply(int32_t a, int32_t b) {
  return static_cast<uint64_t>(static_cast<uint32_t>(a)) * static_cast<uint32_t>(b);
}

/// a / b for 0 <= a and 0 < b. On a GPU an unsigned division is shorter.
ATTN_HD int32_t divide(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

/// a / b for 0 <= a and 0 < b. A 64-bit division takes a hundred instructions on a GPU: where both fit into 32 bits, as
/// they nearly always do, it is avoided.
ATTN_HD int64_t divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

template <class Int>
ATTN_HD constexpr Int round_up(Int a, Int b) {
  return (a + b - 1) / b * b;
}

template <class T>
ATTN_HD constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <class T>
ATTN_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

template <class T>
ATTN_HD constexpr T clamp(T x, T low, T high) {
  return min_of(max_of(x, low), high);
}

/// The last index below `count` that `holds`; 0 if none does. All indices before it hold, those after it do not.
template <class Predicate>
ATTN_HD int32_t find_last(int32_t count, const Predicate& holds) {
  int32_t last = 0;
  for (int32_t end = count; end - last > 1;) {
    const int32_t middle = last + (end - last) / 2;
    (holds(middle) ? last : end) = middle;
  }
  return last;
}

// A float's bits, and back.
ATTN_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

ATTN_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

/// a * b + c, rounded once.
ATTN_HD float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

/// The larger number; if one is NaN, the other.
ATTN_HD float max_number(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return __builtin_fmaxf(a, b);
#endif
}

ATTN_HD float magnitude_of(float x) {
#if defined(__CUDA_ARCH__)
  return fabsf(x);
#else
  return __builtin_fabsf(x);
#endif
}

/// tanh to 4e-7 relative, without branches or calls: g++ vectorizes loops over it.
ATTN_HD float tanh_rational(float x) {
  x = clamp(x, -9.0f, 9.0f);  // tanh(9) = 1 - 3e-8
  const float s = x * x;
  const float numerator =
      (((1.335464479e-8f * s + 2.060906905e-5f) * s + 3.495587271e-3f) * s + 0.1338102491f) * s + 0.9999999795f;
  const float denominator =
      (((7.776551107e-7f * s + 3.285633452e-4f) * s + 0.0258769789f) * s + 0.467143405f) * s + 1.0f;
  return x * numerator / denominator;
}

/// The bits of the number nearest to x, to even among equals; `largest` for what is larger; NaN (0x7f) for NaN.
/// kMantissa: bits of the mantissa; kLeast: exponent of the smallest normal number.
template <int kMantissa, int kLeast>
ATTN_HD uint32_t float8_bits(float x, float largest) {
  const uint32_t sign = float_bits(x) >> 24 & 0x80u;
  uint32_t bits = float_bits(x) & 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7fu;
  const float magnitude = min_of(bits_float(bits), largest);
  bits = float_bits(magnitude);
  constexpr uint32_t kBias = static_cast<uint32_t>(kLeast - 1 + 127) << 23;
  constexpr int kDropped = 23 - kMantissa;
  if (bits < kBias + (1u << 23)) {
    // Subnormal: the sum is rounded at the last bit that there is, 2^(kLeast - kMantissa).
    constexpr uint32_t kUnit = static_cast<uint32_t>(kLeast - kMantissa + 23 + 127) << 23;
    return sign | (float_bits(magnitude + bits_float(kUnit)) - kUnit);
  }
  return sign | ((bits - kBias + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1u)) >> kDropped);
}

ATTN_HD uint32_t e4m3_bits(float x) { return float8_bits<3, -6>(x, 448.0f); }
ATTN_HD uint32_t e5m2_bits(float x) { return float8_bits<2, -14>(x, 57344.0f); }

/// The value of an e4m3 number without sign, not NaN.
ATTN_HD float e4m3_value(uint32_t bits) {
  constexpr float kLeast = 0.001953125f;  // 2^-9, of subnormal numbers
  return bits < 8 ? static_cast<float>(bits) * kLeast : bits_float((bits << 20) + (120u << 23));
}

/// Division of a non-negative int32 by an int32 divisor >= 1 that is known when the kernel is launched: one
/// multiplication instead of an integer division. Exact for every 0 <= n < 2^31 (Granlund and Montgomery 1994, round-up
/// method with a 33-bit quotient avoided because n has 31 bits).
struct FastDivisor {
  int32_t divisor = 1;
  uint32_t multiplier = 0;
  int32_t shift = 0;

  FastDivisor() = default;

  ATTN_HD explicit FastDivisor(int32_t d) : divisor(d) {
    while ((int64_t{1} << shift) < d) ++shift;  // shift = ceil(log2(d))
    const int64_t numerator = int64_t{1} << (31 + shift);
    multiplier = static_cast<uint32_t>((numerator + d - 1) / d);  // in [2^31, 2^32)
  }

  ATTN_HD int32_t divide(int32_t n) const {
    return static_cast<int32_t>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier) >> (31 + shift));
  }

  ATTN_HD int32_t modulo(int32_t n) const { return n - divide(n) * divisor; }
};

/// n / divisor for 0 <= n.
ATTN_HD int32_t divide(int32_t n, const FastDivisor& divisor) { return divisor.divide(n); }
ATTN_HD int64_t divide(int64_t n, const FastDivisor& divisor) {
  return n <= kMaxInt32 ? divisor.divide(static_cast<int32_t>(n)) : n / divisor.divisor;
}

}  // namespace attn
