// Element types of tensors, as the CPU kernels see them.
#pragma once

#include <cstdint>

#include "common/data_type.h"
#include "common/math.h"

namespace attn::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

struct Float8E4M3 {
  uint8_t bits;
};

struct Float8E5M2 {
  uint8_t bits;
};

struct Int8 {
  int8_t value;
};

/// The other 16-bit type; of float, itself.
template <class Element>
using OtherElement = typename Conditional<is_same<Element, Half>, BFloat16,
                                          typename Conditional<is_same<Element, BFloat16>, Half, Element>::Type>::Type;

/// Returns body(Element{}), with the type of `dtype`: float32, float16 or bfloat16.
template <class Body>
ATTN_HD auto visit_float(DataType dtype, const Body& body) {
  if (dtype == DataType::kFloat32) return body(float{});
  if (dtype == DataType::kFloat16) return body(Half{});
  return body(BFloat16{});
}

// Conversion of one element to float32 and back.

ATTN_HD float half_to_float(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The product restores the exponent's bias, subnormal numbers included.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

ATTN_HD float to_float(float x) { return x; }
ATTN_HD float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
ATTN_HD float to_float(Half x) { return half_to_float(x.bits); }

// The product corrects the exponent's bias, for subnormal numbers, too. There are no branches, so that loops are
// vectorized.
ATTN_HD float to_float(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t nan = magnitude == 0x7fu ? 0x7fc00000u : 0u;
  return bits_float(float_bits(bits_float(magnitude << 20) * 0x1p120f) | nan | (x.bits & 0x80u) << 24);
}
ATTN_HD float to_float(Float8E5M2 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t special = magnitude >= 0x7cu ? 0x7f800000u : 0u;  // infinity and NaN have the largest exponent
  return bits_float(float_bits(bits_float(magnitude << 21) * 0x1p112f) | special | (x.bits & 0x80u) << 24);
}
ATTN_HD float to_float(Int8 x) { return static_cast<float>(x.value); }

// Rounds to nearest even; larger numbers become the largest one, NaN stays NaN.
ATTN_HD void from_float(float x, Float8E4M3& result) { result.bits = static_cast<uint8_t>(e4m3_bits(x)); }
ATTN_HD void from_float(float x, Float8E5M2& result) { result.bits = static_cast<uint8_t>(e5m2_bits(x)); }
/// NaN becomes 0.
ATTN_HD void from_float(float x, Int8& result) {
  constexpr float kRoundsToInteger = 12582912.0f;  // 1.5 * 2^23
  result.value = x == x ? static_cast<int8_t>(clamp(x, -127.0f, 127.0f) + kRoundsToInteger - kRoundsToInteger) : 0;
}

/// Limited to the finite numbers of Half; NaN stays NaN.
ATTN_HD float finite_half(float x) {
  constexpr float kLargest = 65504.0f;
  return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
}

// Rounds to nearest even.
ATTN_HD void from_float(float x, float& result) { result = x; }
ATTN_HD void from_float(float x, BFloat16& result) {
  const uint32_t bits = float_bits(x);
  result.bits = static_cast<uint16_t>(x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
ATTN_HD void from_float(float x, Half& result) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u;
  const uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to 65536 or more
  } else if (magnitude < 0x38800000u) {
    // Subnormal: the sum is rounded at half's last bit, 2^-24.
    half = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  result.bits = static_cast<uint16_t>(sign | half);
}

}  // namespace attn::cpu
