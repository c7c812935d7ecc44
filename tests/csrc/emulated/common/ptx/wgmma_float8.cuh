// As csrc/common/ptx/wgmma_float8.cuh; products take effect as in wgmma.cuh.
#pragma once

#include "common/cpu/scalar_elements.h"
#include "common/ptx/wgmma.cuh"

namespace attn::ptx {

constexpr int kFloat8Depth = 32;

inline float e4m3_element(uint32_t byte) {
  return cpu::ScalarElements::to_float(cpu::Float8E4M3{static_cast<uint8_t>(byte)});
}

/// Sixteen elements; of what is not visible, NaN.
inline void load_float8_chunk(const char* chunk, float* to, int step) {
  for (int i = 0; i < 16; ++i) to[i * step] = e4m3_element(static_cast<uint8_t>(chunk == nullptr ? '\x7f' : chunk[i]));
}

/// Of B, whose columns are the k dimension.
inline void load_float8_b(const Product& product, Factors& factors) {
  const DescribedMatrix b(product.b);
  for (int k = 0; k < kFloat8Depth; k += 16) {
    for (int n = 0; n < product.to->columns; ++n)
      load_float8_chunk(b.bytes(n, static_cast<uint32_t>(k)), &factors.b[k][n], kMostProductColumns);
  }
}

/// A warp may read all rows of A, as in load_shared().
inline void load_float8_shared(const Product& product, Factors& factors) {
  const DescribedMatrix a(product.a);
  for (int k = 0; k < kFloat8Depth; k += 16) {
    bool is_visible = true;
    for (int row = 0; row < 4 * kProductRows; ++row) is_visible &= a.bytes(row, static_cast<uint32_t>(k)) != nullptr;
    for (int row = 0; row < kProductRows; ++row) {
      const char* const chunk = a.bytes(product.warp * kProductRows + row, static_cast<uint32_t>(k));
      load_float8_chunk(is_visible ? chunk : nullptr, &factors.a[row][k], 1);
    }
  }
  load_float8_b(product, factors);
}

/// Of wgmma_float8_registers(): four bytes in each word, of row g or g + 8, columns 4t on, or 16 + 4t on (PTX ISA,
/// "Register Fragments for wgmma.mma_async.m64nNk32").
inline void load_float8_registers(const Product& product, Factors& factors) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      float* const four = &factors.a[lane / 4 + i % 2 * 8][lane % 4 * 4 + i / 2 * 16];
      for (int byte = 0; byte < 4; ++byte) four[byte] = e4m3_element(product.a_of_lanes[lane][i] >> byte * 8 & 0xff);
    }
  }
  load_float8_b(product, factors);
}

/// The ISA says nothing of how products of 8-bit elements are added; Hopper keeps about 14 bits of a sum, and cuts the
/// others off.
inline float float8_sum(float sum) {
  constexpr uint32_t kDropped = (1u << 10) - 1;
  return emulation::from_bits<float>(emulation::to_bits(sum) & ~static_cast<uint64_t>(kDropped));
}

/// c = a * b^T (+ c if `accumulates`).
template <int kBlocks>
void wgmma_float8_shared(float (&c)[kBlocks][4], MatrixDescriptor a, MatrixDescriptor b, int32_t accumulates) {
  emulation::exchange({{reinterpret_cast<uint64_t>(c), a.value(), b.value(), accumulates != 0}}, "wgmma",
                      [](const emulation::Words* lanes) {
                        issue_product<kBlocks * 8, false>(lanes, load_float8_shared, kFloat8Depth, float8_sum);
                      });
}

/// c = a * b^T (+ c if `accumulates`): a in registers.
template <int kBlocks>
void wgmma_float8_registers(float (&c)[kBlocks][4], const uint32_t (&a)[4], MatrixDescriptor b, int32_t accumulates) {
  emulation::exchange({{reinterpret_cast<uint64_t>(c), reinterpret_cast<uint64_t>(a), b.value(), accumulates != 0}},
                      "wgmma", [](const emulation::Words* lanes) {
                        issue_product<kBlocks * 8, true>(lanes, load_float8_registers, kFloat8Depth, float8_sum);
                      });
}

}  // namespace attn::ptx
