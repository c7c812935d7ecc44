// Small integer and floating-point helpers, the same on host and device.
#pragma once

#include "attn/platform.h"

namespace attn {

constexpr int64_t kMaxInt32 = 0x7fffffff;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class Int>
ATTN_HD constexpr Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }

template <class Int>
ATTN_HD constexpr Int round_down(Int a, Int b) { return a / b * b; }

template <class T>
ATTN_HD constexpr T min_of(T a, T b) { return b < a ? b : a; }

template <class T>
ATTN_HD constexpr T max_of(T a, T b) { return a < b ? b : a; }

template <class T>
ATTN_HD constexpr T clamp(T x, T low, T high) { return min_of(max_of(x, low), high); }

/// Division of a non-negative int32 by an int32 divisor >= 1 that is known when the kernel is launched: one multiplication instead of an integer division.
/// Exact for every 0 <= n < 2^31 (Granlund and Montgomery 1994, round-up method with a 33-bit quotient avoided because n has 31 bits).
struct FastDivisor {
  int32_t divisor = 1;
  uint32_t multiplier = 0;
  int32_t shift = 0;

  FastDivisor() = default;

  ATTN_HD explicit FastDivisor(int32_t d) : divisor(d) {
    while ((int64_t{1} << shift) < d) ++shift;                       // shift = ceil(log2(d))
    const int64_t numerator = int64_t{1} << (31 + shift);
    multiplier = static_cast<uint32_t>((numerator + d - 1) / d);     // in [2^31, 2^32)
  }

  ATTN_HD int32_t divide(int32_t n) const {
    return static_cast<int32_t>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier) >> (31 + shift));
  }

  ATTN_HD int32_t modulo(int32_t n) const { return n - divide(n) * divisor; }
};

}  // namespace attn
