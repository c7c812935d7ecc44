// Q where mma.sync multiplies it by K of an int8 cache, as integers: K is multiplied as it is stored.
#pragma once

#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/math.h"
#include "common/platform.h"
#include "common/ptx/mma.cuh"

namespace attn::sm90 {

/// Rows of Q as fixed-point numbers of 16 bits, in two parts of 8 bits: Q = (256 high + low) to_score. A power of 2
/// brings a row's largest number to [2^14, 2^15), so that numbers above 2^-6 of it keep the 8 bits of a bf16. Sums are
/// exact in 32 bits.
/// Element: of Q. Query: its tile.
template <class Element, class Query, int kQkColumns>
struct IntegerQuery {
  using Multiplied = Float16;  // P and V
  static constexpr int kDepth = ceil_div(kQkColumns, 32);
  static_assert(kQkColumns <= 256, "sums have room for 256 products");
  uint32_t high[kDepth][4];  // s8
  uint32_t low[kDepth][4];   // u8
  float to_score[2];         // of this lane's rows

  /// The lane's offset in the tile.
  __device__ __forceinline__ static uint32_t offset(int lane) { return Query::four_columns(lane); }

  __device__ __forceinline__ void load(uint32_t q) {
    uint32_t rows[2 * kDepth][4];
#pragma unroll
    for (int d = 0; d < 2 * kDepth; ++d) {
      if (16 * d < kQkColumns)
        load_query<Query>(rows[d], q, 0, d);
      else
        rows[d][0] = rows[d][1] = rows[d][2] = rows[d][3] = 0;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = find_factor(rows, half);
#pragma unroll
      for (int d = 0; d < 2 * kDepth; ++d) split(rows[d][half], rows[d][half + 2], factor, d, half);
    }
  }

  /// S = Q K^T of 16 tokens. `k`: as in WarpState::dequantized_scores().
  template <int kTokens, class KTile>
  __device__ __forceinline__ void scores(float (&s)[1][kTokens / 8][4], uint32_t k) const {
    static_assert(kTokens == 16);
    int32_t of_high[2][4] = {}, of_low[2][4] = {};
    uint32_t words[2][4];  // of 16 tokens x 32 columns
    ptx::ldmatrix_x4(words[0], k);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d + 1 < kDepth) ptx::ldmatrix_x4(words[(d + 1) % 2], KTile::block(k, 0, d + 1));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t (&b)[4] = words[d % 2];
        ptx::mma_s8_s8(of_high[n], high[d], b[2 * n], b[2 * n + 1]);
        ptx::mma_u8_s8(of_low[n], low[d], b[2 * n], b[2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][n][i] = static_cast<float>(of_high[n][i] * 256 + of_low[n][i]) * to_score[i / 2];
    }
  }

 private:
  /// Sets to_score of row `half` of the lane, and returns its inverse. Rows with infinities or NaN have scores of NaN.
  __device__ __forceinline__ float find_factor(const uint32_t (&rows)[2 * kDepth][4], int half) {
    const uint32_t largest = largest_magnitude(rows, half);
    const int32_t exponent = static_cast<int32_t>(__float_as_uint(Element::unpack(largest)) >> 23);  // biased
    const int32_t factor = min_of(127 + 14 + 127 - exponent, 253);
    to_score[half] = __uint_as_float(exponent == 255 ? 0x7fffffffu : static_cast<uint32_t>(254 - factor) << 23);
    return __uint_as_float(static_cast<uint32_t>(factor) << 23);
  }

  /// Splits four neighboring columns of a row, which are block d of 16's.
  __device__ __forceinline__ void split(uint32_t first, uint32_t second, float factor, int d, int half) {
    const uint32_t pairs[2] = {first, second};
    uint32_t fixed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fixed[i] = static_cast<uint32_t>(__float2int_rn(Element::unpack(pairs[i / 2] >> i % 2 * 16) * factor));
    const uint32_t left = __byte_perm(fixed[0], fixed[1], 0x5140), right = __byte_perm(fixed[2], fixed[3], 0x5140);
    low[d / 2][d % 2 * 2 + half] = __byte_perm(left, right, 0x5410);
    high[d / 2][d % 2 * 2 + half] = __byte_perm(left, right, 0x7632);
  }
};

}  // namespace attn::sm90
