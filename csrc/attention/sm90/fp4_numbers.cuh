// NVFP4 numbers as packed_decode.cuh multiplies them.
//
// The bits of e2m1, moved to sign, exponent and mantissa of an f16, are the number times 2^-14. The product with its
// block's e4m3 scale is exact in f16, whose smallest number is 2^-24: numbers are multiples of 2^-1, scales of 2^-9. A
// word of eight numbers takes eleven instructions, and four products with pairs of scales.
//
// Scales multiply numbers, not sums: the columns of a product are of two blocks, and so are its rows in V^T P^T.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "common/platform.h"
#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// Pairs of numbers (i, i + 4) of a word of e2m1, times 2^-14.
__device__ __forceinline__ void split_e2m1(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80808080, kNumbers = 0x8e008e00;
  const uint32_t odd = ptx::merged_bits<kSigns>(word, word >> 3);  // in bytes, whose other bits do not count
  const uint32_t even = ptx::merged_bits<kSigns>(word << 4, word << 1);
  pairs[0] = even << 8 & kNumbers;
  pairs[1] = odd << 8 & kNumbers;
  pairs[2] = even & kNumbers;
  pairs[3] = odd & kNumbers;
}

/// e4m3 numbers, with 448 for NaN.
__device__ __forceinline__ uint32_t finite_e4m3(uint32_t word) {
  const uint32_t nan = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  return word - (nan >> 7);
}

template <class Traits>
struct Fp4Numbers {
  using Shared = SharedMemory<Traits>;
  static constexpr int kExponent = 14, kOddExponent = 14;
  static constexpr bool kHasZeroPoints = false;
  static constexpr bool kWeighsTokens = false;
  static constexpr float kHeadroom = 7.0f;
  static constexpr int kWords = Traits::kTuning.token_scale_words;  // of a token, each of 64 columns

  /// The scales of token g + 8i: its words in products have columns 8t to 8t + 7 of each 32.
  template <int kFragments>
  struct Keys {
    uint32_t scales[2 * kFragments][kWords];  // of columns 32c to 32c + 31 for even c, then for odd c; e4m3

    __device__ __forceinline__ Keys(const Shared& shared, int part, int row) {
      const int lane = ptx::lane_id();
      const uint32_t selector = 0x4420 + 0x0011 * (lane % 4 / 2);
      const uint32_t first = shared.token_scales(part) + (row + lane / 4) * kWords * 4;
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) {
        uint32_t words[kWords];
        load(words, first + i * 8 * kWords * 4);
#pragma unroll
        for (int d = 0; d < kWords; ++d) scales[i][d] = __byte_perm(words[d], 0, selector);
      }
    }

    template <class Query, int kEights>
    __device__ __forceinline__ void start(const Query&, float (&s)[kEights][kFragments][4]) const {
#pragma unroll
      for (int b = 0; b < kEights; ++b) {
#pragma unroll
        for (int i = 0; i < 4 * kFragments; ++i) s[b][i / 4][i % 4] = 0.0f;
      }
    }

    /// A word of tokens 8i to 8i + 7, and of columns 32c to 32c + 31.
    __device__ __forceinline__ void split(uint32_t word, int i, int c, uint32_t (&pairs)[4]) const {
      split_e2m1(word, pairs);
      const uint32_t of_halves = ptx::f16_of_e4m3_in<0>(scales[i][c / 2]);
#pragma unroll
      for (int n = 0; n < 4; ++n)
        pairs[n] = c % 2 == 0 ? ptx::mul_f16_by<0>(pairs[n], of_halves) : ptx::mul_f16_by<1>(pairs[n], of_halves);
    }

    template <class Query, int kEights>
    __device__ __forceinline__ void finish(const Query& query, float (&s)[kEights][kFragments][4]) const {
#pragma unroll
      for (int b = 0; b < kEights; ++b) {
#pragma unroll
        for (int i = 0; i < 4 * kFragments; ++i) s[b][i / 4][i % 4] *= query.to_score[b][i % 2];
      }
    }
  };

  /// The scales of tokens 8i + 2t and 8i + 2t + 1: their words in products have columns 4g to 4g + 3 of each 32. If no
  /// row sees a token, its scale may be NaN: it must not reach O.
  template <int kFragments>
  struct Values {
    uint32_t scales[2 * kFragments][kWords];  // a pair of columns 32c to 32c + 31 for even c, then for odd c; e4m3

    __device__ __forceinline__ Values(const Shared& shared, int part, int row, bool all_seen) {
      const int lane = ptx::lane_id();
      const uint32_t selector = 0x6240 + 0x1111 * (lane / 16);
      const uint32_t first = shared.token_scales(part) + (row + lane % 4 * 2) * kWords * 4;
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) {
        uint32_t words[2 * kWords];
        load(words, first + i * 8 * kWords * 4);
#pragma unroll
        for (int d = 0; d < kWords; ++d) scales[i][d] = __byte_perm(words[d], words[kWords + d], selector);
      }
      if (all_seen) return;
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) {
#pragma unroll
        for (int d = 0; d < kWords; ++d) scales[i][d] = finite_e4m3(scales[i][d]);
      }
    }

    __device__ __forceinline__ void split(uint32_t word, int i, int c, uint32_t (&pairs)[4]) const {
      split_e2m1(word, pairs);
      const uint32_t scale =
          c % 2 == 0 ? ptx::f16_of_e4m3_in<0>(scales[i][c / 2]) : ptx::f16_of_e4m3_in<1>(scales[i][c / 2]);
#pragma unroll
      for (int n = 0; n < 4; ++n) pairs[n] = ptx::mul_f16(pairs[n], scale);
    }
  };

 private:
  template <int kCount>
  __device__ __forceinline__ static void load(uint32_t (&words)[kCount], uint32_t from) {
    if constexpr (kCount == 1)
      words[0] = ptx::load_word(from);
    else
      ptx::load_words(words, from);
  }
};

}  // namespace attn::sm90
