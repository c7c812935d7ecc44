// As csrc/common/ptx/mma.cuh.
#pragma once

#include "common/ptx/shared_address.h"
#include "cuda_emulation.h"

namespace attn::ptx {

// --- mma.sync
//
// from the description of the fragments there.

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

/// Eight numbers that are added and multiplied at once, however little the compiler optimizes.
using Eight = float __attribute__((vector_size(32)));

/// Calls visit(i, half, row, column) for each element of A that a lane holds: half `half` of its word i.
template <class Visit>
void visit_elements_of_a(int lane, const Visit& visit) {
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) visit(i, half, lane / 4 + i % 2 * 8, lane % 4 * 2 + i / 2 * 8 + half);
  }
}

/// What a warp does together. Words of the lanes: C; A, two registers in each; B.
template <float (*kElement)(uint32_t pair, int half)>
void multiply_fragments(const emulation::Words* lanes) {
  float a[16][16], b[16][8], sums[16][8];
  const auto visit_c = [&](const auto& visit) {
    for (int lane = 0; lane < 32; ++lane) {
      float* const c = reinterpret_cast<float*>(lanes[lane].word[0]);
      for (int i = 0; i < 4; ++i) visit(c[i], sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
  };
  for (int lane = 0; lane < 32; ++lane) {
    const uint64_t* const words = lanes[lane].word;
    visit_elements_of_a(lane, [&](int i, int half, int row, int column) {
      a[row][column] = kElement(static_cast<uint32_t>(words[1 + i / 2] >> i % 2 * 32), half);
    });
    for (int k = 0; k < 4; ++k)
      b[lane % 4 * 2 + k % 2 + k / 2 * 8][lane / 4] = kElement(static_cast<uint32_t>(words[3] >> k / 2 * 32), k % 2);
  }
  visit_c([](float& held, float& sum) { sum = held; });
  for (int row = 0; row < 16; ++row) {
    Eight sum, of_b;
    std::memcpy(&sum, sums[row], sizeof(sum));
    for (int k = 0; k < 16; ++k) {
      std::memcpy(&of_b, b[k], sizeof(of_b));
      sum += a[row][k] * of_b;
    }
    std::memcpy(sums[row], &sum, sizeof(sum));
  }
  visit_c([](float& held, float& sum) { held = sum; });
}

template <float (*kElement)(uint32_t pair, int half)>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto both = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  emulation::exchange({{reinterpret_cast<uint64_t>(c), both(a[0], a[1]), both(a[2], a[3]), both(b0, b1)}}, "mma",
                      multiply_fragments<kElement>);
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<bf16_element>(c, a, b0, b1);
}
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma<f16_element>(c, a, b0, b1); }

/// As multiply_fragments(), of bytes.
template <class OfA, class OfB>
void multiply_bytes(const emulation::Words* lanes) {
  int32_t a[16][32], b[32][8];
  for (int lane = 0; lane < 32; ++lane) {
    const uint64_t* const words = lanes[lane].word;
    for (int i = 0; i < 4; ++i) {
      for (int byte = 0; byte < 4; ++byte) {
        const int column = lane % 4 * 4 + i / 2 * 16 + byte;
        a[lane / 4 + i % 2 * 8][column] = static_cast<OfA>(words[1 + i / 2] >> (i % 2 * 32 + byte * 8));
        if (i < 2) b[lane % 4 * 4 + i * 16 + byte][lane / 4] = static_cast<OfB>(words[3] >> (i * 32 + byte * 8));
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    int32_t* const c = reinterpret_cast<int32_t*>(lanes[lane].word[0]);
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 32; ++k) c[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
    }
  }
}

template <class OfA, class OfB>
void mma_bytes(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto both = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  emulation::exchange({{reinterpret_cast<uint64_t>(c), both(a[0], a[1]), both(a[2], a[3]), both(b0, b1)}}, "mma",
                      multiply_bytes<OfA, OfB>);
}

inline void mma_s8_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bytes<int8_t, int8_t>(c, a, b0, b1);
}
inline void mma_u8_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bytes<uint8_t, int8_t>(c, a, b0, b1);
}

// --- ldmatrix, stmatrix

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

inline uint32_t transposed(uint32_t pair) {
  const emulation::Lanes<uint32_t> rows(pair, "movmatrix");
  const int column = emulated_lane() / 4, row = emulated_lane() % 4 * 2;
  const auto element = [&](int of_row) { return rows[of_row * 4 + column / 2] >> column % 2 * 16 & 0xffffu; };
  return element(row) | element(row + 1) << 16;
}

inline uint32_t load_word(uint32_t shared) {
  uint32_t d;
  std::memcpy(&d, shared_pointer(shared, 4), 4);
  return d;
}

inline void load_words(uint32_t (&d)[2], uint32_t shared) { std::memcpy(d, shared_pointer(shared, 8), 8); }
inline void load_words(uint32_t (&d)[4], uint32_t shared) { std::memcpy(d, shared_pointer(shared, 16), 16); }

inline void stmatrix_x4(uint32_t shared, const uint32_t (&d)[4]) {
  const emulation::Lanes<uint32_t> rows(shared, "stmatrix");
  for (int i = 0; i < 4; ++i) {
    char* const pair = shared_pointer(rows[i * 8 + emulated_lane() / 4], 16) + emulated_lane() % 4 * 4;
    std::memcpy(pair, &d[i], sizeof(d[i]));
    emulation::wrote_shared(pair, sizeof(d[i]));
  }
}

}  // namespace attn::ptx
