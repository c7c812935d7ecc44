// int4 numbers as packed_decode.cuh multiplies them.
//
// They need no conversion. Moved to the low bits of both halves of a word, two of them are a pair of f16 numbers, 2^-24
// times as large; or 2^-20 if they are 4 bits further left. So a word of eight numbers takes five instructions. Zero
// points are subtracted from the sums. Scores start at a zero point of K times the sum of a row of Q. Zero points of V
// are one more product.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "cache/quantizers.h"
#include "common/elements.cuh"
#include "common/platform.h"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// Pairs of numbers (i, i + 4) of a word; 16 times as large if i is odd.
__device__ __forceinline__ void split_int4(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kLow = 0x000f000f, kHigh = 0x00f000f0;
  pairs[0] = word & kLow;
  pairs[1] = word & kHigh;
  word >>= 8;
  pairs[2] = word & kLow;
  pairs[3] = word & kHigh;
}

template <class Traits, class Stored>
struct PackedNumbers;

template <class Traits>
struct PackedNumbers<Traits, Int4> {
  using Shared = SharedMemory<Traits>;
  using Multiplied = Float16;
  static constexpr int kWordColumns = 8;
  static constexpr int kExponent = 24, kOddExponent = 20;
  static constexpr bool kHasZeroPoints = true;
  static constexpr bool kWeighsTokens = true;
  static constexpr float kHeadroom = 0.0f;

  /// The stored scales of the lane's tokens g + 8i.
  template <int kCount>
  __device__ __forceinline__ static void load_scales(float (&stored)[kCount], const Shared& shared, int part, int row) {
    const uint32_t first = shared.token_scales(part) + (row + ptx::lane_id() / 4) * 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) stored[i] = __uint_as_float(ptx::load_word(first + 32 * i));
  }

  template <int kFragments>
  struct Keys {
    float stored[2 * kFragments];

    __device__ __forceinline__ Keys(const Shared& shared, int part, int row) { load_scales(stored, shared, part, row); }

    template <class Query, int kEights>
    __device__ __forceinline__ void start(const Query& query, float (&s)[kEights][kFragments][4]) const {
      constexpr uint32_t kInteger = 0x4b000000;  // 2^23: integers are its lowest bits
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) {
        const float zero_point =
            __uint_as_float((__float_as_uint(stored[i]) & Int4Scale::kZeroPoint) | kInteger) - 0x1p23f;
#pragma unroll
        for (int b = 0; b < kEights; ++b) {
#pragma unroll
          for (int r = 0; r < 2; ++r) s[b][i / 2][i % 2 * 2 + r] = -zero_point * query.sums[b][r];
        }
      }
    }

    __device__ __forceinline__ void split(uint32_t word, int, int, uint32_t (&pairs)[4]) const {
      split_int4(word, pairs);
    }

    template <class Query, int kEights>
    __device__ __forceinline__ void finish(const Query& query, float (&s)[kEights][kFragments][4]) const {
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) {
        const float of_token = Int4Scale(stored[i]).scale;
#pragma unroll
        for (int b = 0; b < kEights; ++b) {
#pragma unroll
          for (int r = 0; r < 2; ++r) s[b][i / 2][i % 2 * 2 + r] *= of_token * query.to_score[b][r];
        }
      }
    }
  };

  /// If no row sees a token, its scale may be NaN or infinite: limits keep such scales out of P. A scale of 0 has no
  /// logarithm.
  template <int kFragments>
  struct Values {
    float weights[2 * kFragments];
    uint32_t zero_points[2 * kFragments];  // of tokens 8i + 2t and 8i + 2t + 1

    __device__ __forceinline__ Values(const Shared& shared, int part, int row, bool all_seen) {
      constexpr float kSmallest = 1e-30f, kLargest = 1e30f;
      const int lane = ptx::lane_id();
      load_scales(weights, shared, part, row);
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) {
        uint32_t stored[2];
        ptx::load_words(stored, shared.token_scales(part) + (row + 8 * i + lane % 4 * 2) * 4);
        zero_points[i] = __byte_perm(stored[0], stored[1], 0x5410) & Int4Scale::kZeroPoint * 0x10001u;
        weights[i] = Int4Scale(weights[i]).scale;
      }
#pragma unroll
      for (float& weight : weights) {
        const bool is_large = !(weight <= kLargest), is_small = weight < kSmallest;  // NaN is large
        weight = is_small ? kSmallest : is_large & !all_seen ? kLargest : weight;
      }
    }

    /// Fragment number f of 16 tokens.
    template <int kEights>
    __device__ __forceinline__ void add_zero_points(float (&zeros)[kEights][4], int f,
                                                    const uint32_t (&p)[kEights][kFragments][2]) const {
      const uint32_t a[4] = {zero_points[2 * f], zero_points[2 * f], zero_points[2 * f + 1], zero_points[2 * f + 1]};
#pragma unroll
      for (int b = 0; b < kEights; ++b) ptx::mma_f16(zeros[b], a, p[b][f][0], p[b][f][1]);
    }

    __device__ __forceinline__ void split(uint32_t word, int, int, uint32_t (&pairs)[4]) const {
      split_int4(word, pairs);
    }
  };
};

}  // namespace attn::sm90
