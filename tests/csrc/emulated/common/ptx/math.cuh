// As csrc/common/ptx/math.cuh.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/cpu/elements.h"
#include "cuda_emulation.h"

namespace attn::ptx {

// --- functions and pairs
//
// exact where that is approximate.

inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline float tanh(float x) { return std::tanh(x); }

/// To the nearest, to even among equals.
inline uint32_t bf16_of(float x) {
  const uint32_t bits = static_cast<uint32_t>(emulation::to_bits(x));
  return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline uint32_t f16_of(float x) { return static_cast<uint32_t>(emulation::to_bits(static_cast<_Float16>(x))); }

inline uint32_t pack_bf16(float low, float high) { return bf16_of(high) << 16 | bf16_of(low); }
inline uint32_t pack_f16(float low, float high) { return f16_of(high) << 16 | f16_of(low); }
inline uint32_t finite_f16(uint32_t pair) {
  const auto finite = [](uint32_t bits) { return (bits & 0x7fff) == 0x7c00 ? bits - 1 : bits; };
  return finite(pair >> 16) << 16 | finite(pair & 0xffff);
}
inline float float_of_f16(uint16_t bits) { return emulation::from_bits<_Float16>(bits); }

inline const char* advanced(const char* base, uint32_t count, uint32_t bytes) {
  return base + static_cast<uint64_t>(count) * bytes;
}

// --- 8-bit numbers

template <class Float8>
uint32_t f16_of_pair(uint16_t pair) {
  const auto wide = [](uint32_t byte) { return f16_of(cpu::to_float(Float8{static_cast<uint8_t>(byte)})); };
  return wide(pair & 0xff) | wide(pair >> 8) << 16;
}

inline uint32_t f16_of_e4m3(uint16_t pair) { return f16_of_pair<cpu::Float8E4M3>(pair); }
template <int kHalf>
uint32_t f16_of_e4m3_in(uint32_t word) {
  return f16_of_e4m3(static_cast<uint16_t>(word >> kHalf * 16));
}
inline uint32_t f16_of_e5m2(uint16_t pair) { return f16_of_pair<cpu::Float8E5M2>(pair); }

inline float f16_in(uint32_t pair, int half) {
  return emulation::from_bits<_Float16>(static_cast<uint16_t>(pair >> half * 16));
}
inline uint32_t sub_f16(uint32_t a, uint32_t b) {
  return f16_of(f16_in(a, 0) - f16_in(b, 0)) | f16_of(f16_in(a, 1) - f16_in(b, 1)) << 16;
}
inline uint32_t mul_f16(uint32_t a, uint32_t b) {
  return f16_of(f16_in(a, 0) * f16_in(b, 0)) | f16_of(f16_in(a, 1) * f16_in(b, 1)) << 16;
}
inline uint32_t mul_bf16(uint32_t a, uint32_t b) {
  const auto number = [](uint32_t pair, int half) {
    return emulation::from_bits<float>(static_cast<uint32_t>(pair >> half * 16 << 16));
  };
  return bf16_of(number(a, 0) * number(b, 0)) | bf16_of(number(a, 1) * number(b, 1)) << 16;
}
template <int kHalf>
uint32_t twice(uint32_t word) {
  return (word >> kHalf * 16 & 0xffff) * 0x10001;
}
inline uint32_t min_u16(uint32_t a, uint32_t b) {
  return std::min(a & 0xffff, b & 0xffff) | std::min(a >> 16, b >> 16) << 16;
}
template <uint32_t kMask>
uint32_t merged_bits(uint32_t a, uint32_t b) {
  return (a & kMask) | (b & ~kMask);
}
inline uint16_t pack_int8(float low, float high) {
  const auto byte = [](float x) {
    return x == x ? static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(clamp(x, -128.0f, 127.0f)))) : 0u;
  };
  return static_cast<uint16_t>(byte(high) << 8 | byte(low));
}

inline uint16_t pack_e4m3(float low, float high) {
  return static_cast<uint16_t>(e4m3_bits(high) << 8 | e4m3_bits(low));
}
inline uint16_t pack_e5m2(float low, float high) {
  return static_cast<uint16_t>(e5m2_bits(high) << 8 | e5m2_bits(low));
}

}  // namespace attn::ptx
