// As csrc/common/ptx/ldmatrix.cuh.
#pragma once

#include "common/ptx/shared_address.h"
#include "cuda_emulation.h"

namespace attn::ptx {

/// Two elements of row `row` of matrix number i, from element `first` on.
inline uint32_t matrix_pair(const emulation::Lanes<uint32_t>& rows, int i, int row, int first) {
  uint32_t pair;
  std::memcpy(&pair, shared_pointer(rows[i * 8 + row], 16) + first * 2, 4);
  return pair;
}

inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared) {
  const emulation::Lanes<uint32_t> rows(shared, "ldmatrix");
  for (int i = 0; i < 4; ++i) d[i] = matrix_pair(rows, i, emulated_lane() / 4, emulated_lane() % 4 * 2);
}

inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t shared) {
  const emulation::Lanes<uint32_t> rows(shared, "ldmatrix.trans");
  const int column = emulated_lane() / 4, row = emulated_lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    uint32_t element[2];
    for (int j = 0; j < 2; ++j) element[j] = matrix_pair(rows, i, row + j, column & ~1) >> column % 2 * 16 & 0xffffu;
    d[i] = element[0] | element[1] << 16;
  }
}

inline uint32_t load_word(uint32_t shared) {
  uint32_t d;
  std::memcpy(&d, shared_pointer(shared, 4), 4);
  return d;
}

inline void load_words(uint32_t (&d)[2], uint32_t shared) { std::memcpy(d, shared_pointer(shared, 8), 8); }

inline void stmatrix_x4(uint32_t shared, const uint32_t (&d)[4]) {
  const emulation::Lanes<uint32_t> rows(shared, "stmatrix");
  for (int i = 0; i < 4; ++i) {
    char* const pair = shared_pointer(rows[i * 8 + emulated_lane() / 4], 16) + emulated_lane() % 4 * 4;
    std::memcpy(pair, &d[i], sizeof(d[i]));
    emulation::wrote_shared(pair, sizeof(d[i]));
  }
}

}  // namespace attn::ptx
