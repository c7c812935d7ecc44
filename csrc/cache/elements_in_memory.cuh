// Elements of heads from and to memory, and their rounding for an 8-bit or 4-bit cache.
#pragma once

#include "cache/params.h"
#include "cache/quantizers.h"
#include "common/data_type.h"
#include "common/math.h"
#include "common/platform.h"
#include "common/ptx/math.cuh"

namespace attn {

/// kSize elements of a 16-bit type, which lie in a row; in one piece if they are aligned, and then 8.
template <int32_t kSize, bool kAligned>
__device__ __forceinline__ void load_words(const uint16_t* from, uint32_t* words) {
  if constexpr (kAligned) {
    const uint4 piece = *reinterpret_cast<const uint4*>(from);
    words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
  } else {
#pragma unroll
    for (int32_t i = 0; i < kSize / 2; ++i) words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  }
}

template <int32_t kSize, bool kAligned>
__device__ __forceinline__ void store_words(const uint32_t* words, uint16_t* to) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int32_t i = 0; i < kSize / 2; ++i) {
      to[2 * i] = static_cast<uint16_t>(words[i]);
      to[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
    }
  }
}

template <int32_t kSize, bool kAligned>
__device__ __forceinline__ void load_floats(const float* from, uint32_t* bits) {
#pragma unroll
  for (int32_t i = 0; i < kSize; i += 4) {
    if constexpr (kAligned) {
      const uint4 piece = *reinterpret_cast<const uint4*>(from + i);
      bits[i] = piece.x, bits[i + 1] = piece.y, bits[i + 2] = piece.z, bits[i + 3] = piece.w;
    } else {
#pragma unroll
      for (int32_t j = i; j < i + 4; ++j) bits[j] = __float_as_uint(from[j]);
    }
  }
}

/// kSize elements of an 8-bit cache; in one piece if they are aligned, and then 8.
template <int32_t kSize, bool kAligned>
__device__ __forceinline__ void store_bytes(const uint32_t* words, uint8_t* to) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int32_t i = 0; i < kSize; ++i) to[i] = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
  }
}

/// Divides by a scale and rounds as IEEE 754 does, without the branches of a division: multiplies by the reciprocal,
/// and corrects the product by its remainder (Markstein 1990). What is far beyond the 8-bit numbers stays so.
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(float scale)
      : scale_(scale), reciprocal_(clamp(1.0f / scale, -3.0e38f, 3.0e38f)) {}

  __device__ __forceinline__ float divide(float x) const {
    constexpr float kBeyond = 1 << 17;
    const float quotient = fminf(fmaxf(x * reciprocal_, -kBeyond), kBeyond);
    const float corrected = __fmaf_rn(__fmaf_rn(-quotient, scale_, x), reciprocal_, quotient);
    return copysignf(corrected, quotient);  // of zero, too
  }

 private:
  float scale_;
  float reciprocal_;
};

// How K and V are written: as elements of 16 bits, divided by the scales of an 8-bit cache, or by a quantizer
// (quantizers.h).

struct Elements16Bits {
  static constexpr int kBits = 16, kLimits = 0;
  static constexpr bool kOfBlocks = false;
};

struct GivenScales {
  static constexpr int kBits = 8, kLimits = 0;
  static constexpr bool kOfBlocks = false;
  float scale = 1.0f;  // heads of Q have no other
};

/// Rounds pairs of numbers for an 8-bit cache. kOfTokens: with TokenScales.
template <bool kOfTokens>
struct BytePairs {
  Divisor divisor;
  DataType dtype;

  __device__ __forceinline__ uint32_t operator()(float low, float high) const {
    low = divisor.divide(low), high = divisor.divide(high);
    if constexpr (kOfTokens) return dtype == DataType::kInt8 ? ptx::pack_int8(low, high) : ptx::pack_e4m3(low, high);
    return dtype == DataType::kFloat8E4M3 ? ptx::pack_e4m3(low, high) : ptx::pack_e5m2(low, high);
  }
};

/// What rounds pairs: of 4 bits, the quantizer itself.
template <class Quantizer>
__device__ __forceinline__ auto rounder_of(const Quantizer& quantizer, DataType dtype) {
  if constexpr (Quantizer::kBits == 8)
    return BytePairs<(Quantizer::kLimits > 0)>{Divisor(quantizer.scale), dtype};
  else
    return quantizer;
}

/// A chunk for a cache of kBits bits, 8 or 4. Numbers of 4 bits are bytes until they are stored.
template <int32_t kSize, bool kAligned, int kBits = 8>
struct ByteChunk {
  uint32_t words[kSize / 2] = {};

  /// Pair i of the elements. Rounder: as rounder_of() makes it.
  template <class Rounder>
  __device__ __forceinline__ void set(int32_t i, float low, float high, const Rounder& rounder) {
    if constexpr (kBits == 8)
      words[i / 2] |= rounder(low, high) << i % 2 * 16;
    else
      words[i / 2] |= (rounder.code(low) | rounder.code(high) << 8) << i % 2 * 16;
  }

  __device__ __forceinline__ void interleave() {
    uint32_t was[kSize / 2];
#pragma unroll
    for (int32_t i = 0; i < kSize / 2; ++i) was[i] = words[i];
#pragma unroll
    for (int32_t i = 0; i < kSize / 4; ++i) {
      words[2 * i] = __byte_perm(was[i], was[kSize / 4 + i], 0x5140);
      words[2 * i + 1] = __byte_perm(was[i], was[kSize / 4 + i], 0x7362);
    }
  }

  /// to: of the lower half; the upper is `distance` columns further.
  __device__ __forceinline__ void store(uint8_t* to, int32_t distance) const {
    store_half(words, to);
    store_half(words + kSize / 4, to + distance * kBits / 8);
  }

 private:
  __device__ __forceinline__ static void store_half(const uint32_t* bytes, uint8_t* to) {
    if constexpr (kBits == 8) {
      store_bytes<kSize, kAligned>(bytes, to);
    } else {
      uint32_t packed = 0;
#pragma unroll
      for (int32_t i = 0; i < kSize / 4; ++i)
        packed |= (__byte_perm(bytes[i] | bytes[i] >> 4, 0, 0x4420) & 0xffffu) << i * 16;
      if constexpr (kAligned) {
        *reinterpret_cast<uint32_t*>(to) = packed;
      } else {
#pragma unroll
        for (int32_t i = 0; i < kSize / 2; ++i) to[i] = static_cast<uint8_t>(packed >> i * 8);
      }
    }
  }
};

}  // namespace attn
