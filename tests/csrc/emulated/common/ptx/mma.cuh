// As csrc/common/ptx/mma.cuh, from the description of the fragments there.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

inline float bf16_element(uint32_t pair, int half) {
  return emulation::from_bits<float>(half != 0 ? pair & 0xffff0000u : pair << 16);
}
inline float f16_element(uint32_t pair, int half) {
  return emulation::from_bits<_Float16>(half != 0 ? pair >> 16 : pair & 0xffffu);
}

template <class Element>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Element& element) {
  const uint64_t words[3] = {static_cast<uint64_t>(a[1]) << 32 | a[0], static_cast<uint64_t>(a[3]) << 32 | a[2],
                             static_cast<uint64_t>(b1) << 32 | b0};
  const int lane = emulated_lane(), row = lane / 4, column = lane % 4 * 2;
  float rows[2][16], columns[2][16];  // what this lane's elements of C are products of: rows `row` and `row + 8`,
                                      // columns `column` and `column + 1`
  for (int i = 0; i < 3; ++i) {
    const uint64_t* of_lanes = emulation::exchange(words[i], "mma");
    for (int k = 0; k < 8; ++k) {
      for (int j = 0; j < 2; ++j) {
        if (i < 2)
          rows[j][i * 8 + k] = element(static_cast<uint32_t>(of_lanes[row * 4 + k / 2] >> j * 32), k % 2);
        else
          for (int half = 0; half < 2; ++half)
            columns[j][half * 8 + k] =
                element(static_cast<uint32_t>(of_lanes[(column + j) * 4 + k / 2] >> half * 32), k % 2);
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) c[i] += rows[i / 2][k] * columns[i % 2][k];
  }
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(c, a, b0, b1, bf16_element);
}
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma(c, a, b0, b1, f16_element); }

}  // namespace attn::ptx
