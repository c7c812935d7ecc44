// As csrc/common/ptx/mma.cuh, from the description of the fragments there.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

inline float bf16_element(uint32_t pair, int half) {
  return emulation::from_bits<float>(half != 0 ? pair & 0xffff0000u : pair << 16);
}
/// Every float16: conversions take most of the time otherwise.
struct Float16Table {
  float values[1 << 16];

  Float16Table() {
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) values[bits] = emulation::from_bits<_Float16>(bits);
  }
};
inline const Float16Table kFloat16Table;

inline float f16_element(uint32_t pair, int half) {
  return kFloat16Table.values[half != 0 ? pair >> 16 : pair & 0xffffu];
}

template <class Element>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Element& element) {
  const auto both = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  const emulation::Words* const lanes =
      emulation::exchange({{both(a[0], a[1]), both(a[2], a[3]), both(b0, b1)}}, "mma");
  const int lane = emulated_lane(), row = lane / 4, column = lane % 4 * 2;
  float rows[2][16], columns[2][16];  // what this lane's elements of C are products of: rows `row` and `row + 8`,
                                      // columns `column` and `column + 1`
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 2; ++i) {
      rows[i][k] = element(static_cast<uint32_t>(lanes[row * 4 + k % 8 / 2].word[k / 8] >> i * 32), k % 2);
      columns[i][k] = element(static_cast<uint32_t>(lanes[(column + i) * 4 + k % 8 / 2].word[2] >> k / 8 * 32), k % 2);
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
