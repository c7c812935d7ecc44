// From float32 to 8-bit floating-point numbers, the same on host and device.
#pragma once

#include "common/math.h"
#include "common/platform.h"

namespace attn {

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

}  // namespace attn
