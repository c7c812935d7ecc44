// As csrc/common/ptx/fp8.cuh.
#pragma once

#include "common/cpu/scalar_elements.h"
#include "common/ptx/math.cuh"

namespace attn::ptx {

template <class Float8>
uint32_t f16_of_pair(uint16_t pair) {
  const auto wide = [](uint32_t byte) {
    return f16_of(cpu::ScalarElements::to_float(Float8{static_cast<uint8_t>(byte)}));
  };
  return wide(pair & 0xff) | wide(pair >> 8) << 16;
}

inline uint32_t f16_of_e4m3(uint16_t pair) { return f16_of_pair<cpu::Float8E4M3>(pair); }
inline uint32_t f16_of_e5m2(uint16_t pair) { return f16_of_pair<cpu::Float8E5M2>(pair); }

inline uint16_t pack_e4m3(float low, float high) {
  return static_cast<uint16_t>(e4m3_bits(high) << 8 | e4m3_bits(low));
}
inline uint16_t pack_e5m2(float low, float high) {
  return static_cast<uint16_t>(e5m2_bits(high) << 8 | e5m2_bits(low));
}

}  // namespace attn::ptx
