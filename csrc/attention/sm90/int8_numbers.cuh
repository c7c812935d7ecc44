// int8 K as packed_decode.cuh multiplies it, with V of another type.
//
// Numbers plus 128, in the low bytes of both halves of a word, are a pair of f16 numbers, 2^-24 times as large. So a
// word of four numbers takes three instructions. 128 is subtracted from the sums, as int4's zero points are: scores
// start at -128 times the sum of a row of Q.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "common/elements.cuh"
#include "common/platform.h"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

template <class Traits, class Stored>
struct PackedNumbers;

template <class Traits>
struct PackedNumbers<Traits, Int8> {
  using Shared = SharedMemory<Traits>;
  using Multiplied = Float16;
  static constexpr int kWordColumns = 4;
  static constexpr int kExponent = 24, kOddExponent = 24;
  static constexpr bool kHasZeroPoints = true;

  template <int kFragments>
  struct Keys {
    float scales[2 * kFragments];  // of the lane's tokens g + 8i

    __device__ __forceinline__ Keys(const Shared& shared, int part, int row) {
      constexpr int kBytes = scale_words_of<Traits>(false) * 4;
      const uint32_t first = shared.token_scales(part) + (row + ptx::lane_id() / 4) * kBytes;
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) scales[i] = __uint_as_float(ptx::load_word(first + 8 * kBytes * i));
    }

    template <class Query, int kEights>
    __device__ __forceinline__ void start(const Query& query, float (&s)[kEights][kFragments][4]) const {
#pragma unroll
      for (int b = 0; b < kEights; ++b) {
#pragma unroll
        for (int i = 0; i < 4 * kFragments; ++i) s[b][i / 4][i % 4] = -128.0f * query.sums[b][i % 2];
      }
    }

    /// Pairs of numbers (i, i + 2).
    __device__ __forceinline__ void split(uint32_t word, int, int, uint32_t (&pairs)[2]) const {
      constexpr uint32_t kLow = 0x00ff00ff, kOffset = 0x00800080;
      pairs[0] = (word ^ kOffset) & kLow;
      pairs[1] = (word >> 8 ^ kOffset) & kLow;
    }

    template <class Query, int kEights>
    __device__ __forceinline__ void finish(const Query& query, float (&s)[kEights][kFragments][4]) const {
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) {
#pragma unroll
        for (int b = 0; b < kEights; ++b) {
#pragma unroll
          for (int r = 0; r < 2; ++r) s[b][i / 2][i % 2 * 2 + r] *= scales[i] * query.to_score[b][r];
        }
      }
    }
  };
};

}  // namespace attn::sm90
