// How caches with TokenScales store numbers. Append makes a quantizer for each head of a token, or for each block of
// kScaleColumns columns. A CPU also reads 4-bit rows here; a GPU's kernels read them with the structs of
// common/elements.cuh.
//
// Members of a quantizer:
// - kBits: of a number
// - kLimits: it is made from their largest magnitude (1), or from the largest of them and of their negatives (2)
// - kOfBlocks: it is for a block, else for a head
// - stored(): its scale, as TokenScales have it
// - of 4 bits, code(): a number as it is stored; Scale: the scale as it is read, with value() of a code
#pragma once

#include "common/data_type.h"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Limits of no numbers.
template <int kLimits>
ATTN_HD float first_limit() {
  return kLimits == 1 ? 0.0f : bits_float(0xff800000u);
}

template <int kLimits>
ATTN_HD void add_to_limits(float* limits, float x) {
  limits[0] = max_number(limits[0], kLimits == 1 ? magnitude_of(x) : x);
  if constexpr (kLimits == 2) limits[1] = max_number(limits[1], -x);
}

/// For 8 bits, as in vLLM.
struct ByteQuantizer {
  static constexpr int kBits = 8, kLimits = 1;
  static constexpr bool kOfBlocks = false;
  float scale = 1.0f;  // heads of Q have no other

  ByteQuantizer() = default;
  ATTN_HD ByteQuantizer(const float* limits, float /*factor*/, DataType element)
      : scale(max_of(limits[0] / (element == DataType::kInt8 ? 127.0f : 448.0f), 1e-6f)) {}

  ATTN_HD float stored() const { return scale; }
};

/// A scale of an int4 cache. Numbers c from 0 to 15 are stored for the values scale * (c - zero_point).
struct Int4Scale {
  static constexpr uint32_t kZeroPoint = 15;  // its bits

  float scale;
  int32_t zero_point;  // from 0 to 15

  Int4Scale() = default;
  ATTN_HD explicit Int4Scale(float stored)
      : scale(bits_float(float_bits(stored) & ~kZeroPoint)),
        zero_point(static_cast<int32_t>(float_bits(stored) & kZeroPoint)) {}
  ATTN_HD Int4Scale(const float* scales, int32_t /*block*/, float /*factor*/, DataType /*element*/)
      : Int4Scale(*scales) {}

  ATTN_HD float value(int32_t code) const { return static_cast<float>(code - zero_point) * scale; }
};

/// For int4, as in vLLM.
struct Int4Quantizer {
  using Scale = Int4Scale;
  static constexpr int kBits = 4, kLimits = 2;
  static constexpr bool kOfBlocks = false;
  float scale;
  int32_t zero_point;
  float reciprocal;

  Int4Quantizer() = default;
  ATTN_HD Int4Quantizer(const float* limits, float /*factor*/, DataType /*element*/) {
    const float largest = limits[0], smallest = -limits[1];
    scale = max_of((largest - smallest) / 15.0f, 1e-6f);
    zero_point = rounded(-smallest / scale);
    reciprocal = 1.0f / scale;
  }

  ATTN_HD float stored() const {
    return bits_float((float_bits(scale) & ~Int4Scale::kZeroPoint) | static_cast<uint32_t>(zero_point));
  }

  ATTN_HD uint32_t code(float x) const {
    return static_cast<uint32_t>(rounded(x * reciprocal + static_cast<float>(zero_point)));
  }

 private:
  /// The nearest integer from 0 to 15, halves up; 0 for NaN.
  ATTN_HD static int32_t rounded(float x) {
    const float up = x + 0.5f;
    return up >= 1.0f ? static_cast<int32_t>(min_of(up, 15.0f)) : 0;
  }
};

/// A scale of an FP4 cache.
struct Fp4Scale {
  float scale;

  ATTN_HD Fp4Scale(const float* scales, int32_t block, float factor, DataType element) {
    const uint32_t stored = reinterpret_cast<const uint8_t*>(scales)[block];
    const float sign = stored < 0x80u ? factor : -factor;
    scale = element == DataType::kMxFp4 ? bits_float(stored << 23)
            : (stored & 0x7fu) == 0x7fu ? bits_float(0x7fc00000u)
                                        : e4m3_value(stored & 0x7fu) * sign;
  }

  ATTN_HD float value(int32_t code) const {
    constexpr float kValues[] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return kValues[code] * scale;
  }
};

/// For blocks of FP4. `factor`: of all scales, over NVFP4.
struct Fp4Quantizer {
  using Scale = Fp4Scale;
  static constexpr int kBits = 4, kLimits = 1;
  static constexpr bool kOfBlocks = true;
  uint32_t scale;  // as stored
  float reciprocal;
  bool ties_away;  // SGLang rounds ties away from zero, NVIDIA's instructions to even

  Fp4Quantizer() = default;
  ATTN_HD Fp4Quantizer(const float* limits, float factor, DataType element) : ties_away(element == DataType::kMxFp4) {
    constexpr float kLargest = 6.0f;  // of e2m1
    if (element == DataType::kMxFp4) {
      constexpr uint32_t kMaxExponent = 240;  // kernels multiply the scale by 2^14
      const uint32_t bits = float_bits(max_of(limits[0] / kLargest, 1e-10f));
      scale = min_of((bits + 0x7fffffu) >> 23, kMaxExponent);  // the next power of 2
      reciprocal = bits_float((254u - scale) << 23);
    } else {
      scale = e4m3_bits(limits[0] / kLargest / factor);
      reciprocal = scale == 0 ? 0.0f : 1.0f / (e4m3_value(scale) * factor);
    }
  }

  ATTN_HD uint32_t stored() const { return scale; }

  /// 0 for NaN. The numbers from 1 on are rounded in their bits, to one bit of a mantissa.
  ATTN_HD uint32_t code(float x) const {
    constexpr uint32_t kOne = 0x3f800000u, kQuarter = 0x3e800000u, kThreeQuarters = 0x3f400000u;  // float32's bits
    constexpr uint32_t kInfinity = 0x7f800000u;
    const uint32_t bits = float_bits(x * reciprocal);
    const uint32_t magnitude = bits & 0x7fffffffu, sign = bits >> 31 << 3;
    const uint32_t half = ties_away ? 0x200000u : 0x1fffffu + (bits >> 22 & 1);
    const uint32_t normal = min_of((magnitude + half) >> 22, (kOne >> 22) + 5) - (kOne >> 22) + 2;
    const uint32_t subnormal = (magnitude >= kQuarter + (ties_away ? 0 : 1) ? 1 : 0) + (magnitude >= kThreeQuarters);
    return magnitude > kInfinity ? 0 : (magnitude >= kOne ? normal : subnormal) | sign;
  }
};

/// Of K and of V, if these have different types.
template <class K_, class V_>
struct QuantizerPair {
  using K = K_;
  using V = V_;
};

/// Returns body(Quantizer{}), with the quantizer of a 4-bit type.
template <class Body>
ATTN_HD auto visit_quantizer(DataType element, const Body& body) {
  return element == DataType::kInt4 ? body(Int4Quantizer{}) : body(Fp4Quantizer{});
}

}  // namespace attn
