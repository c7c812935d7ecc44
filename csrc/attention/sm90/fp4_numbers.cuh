// FP4 numbers as packed_decode.cuh multiplies them. Their bits, moved to sign, exponent and mantissa of a 16-bit
// number, are the number times a power of 2, which may be subnormal. A word of eight takes eleven instructions, and
// four products with pairs of scales. These are exact:
// - NVFP4 in f16: numbers are multiples of 2^-1, scales of 2^-9, and f16 numbers of 2^-24.
// - MX in bf16: scales from 2^-47 to 2^79.
//
// Scales multiply numbers, not sums: the columns of a product are of two blocks, and so are its rows in V^T P^T.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "common/elements.cuh"
#include "common/platform.h"
#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// NVFP4, times 2^-14.
struct NvFp4Pairs {
  using Multiplied = Float16;
  static constexpr int kExponent = 14;
  static constexpr float kHeadroom = 7.0f;
  static constexpr uint32_t kKeySelector = 0x4420, kKeyStep = 0x0011;  // scales are two neighboring bytes

  /// Pairs of numbers (i, i + 4) of a word.
  __device__ __forceinline__ static void split(uint32_t word, uint32_t (&pairs)[4]) {
    constexpr uint32_t kSigns = 0x80808080, kNumbers = 0x8e008e00;
    const uint32_t odd = ptx::merged_bits<kSigns>(word, word >> 3);  // in bytes, whose other bits do not count
    const uint32_t even = ptx::merged_bits<kSigns>(word << 4, word << 1);
    pairs[0] = even << 8 & kNumbers;
    pairs[1] = odd << 8 & kNumbers;
    pairs[2] = even & kNumbers;
    pairs[3] = odd & kNumbers;
  }

  /// Multiplies pairs by scale number kNumber of two.
  template <int kNumber>
  __device__ __forceinline__ static void scale_by_one(uint32_t (&pairs)[4], uint32_t scales) {
    const uint32_t both = ptx::f16_of_e4m3_in<0>(scales);
#pragma unroll
    for (uint32_t& pair : pairs) pair = ptx::mul_f16(pair, ptx::twice<kNumber>(both));
  }

  /// Multiplies pairs by pair number kNumber of two pairs of scales, in bytes.
  template <int kNumber>
  __device__ __forceinline__ static void scale_by_pair(uint32_t (&pairs)[4], uint32_t scales) {
    const uint32_t scale = ptx::f16_of_e4m3_in<kNumber>(scales);
#pragma unroll
    for (uint32_t& pair : pairs) pair = ptx::mul_f16(pair, scale);
  }

  /// Scales, with 448 for NaN.
  __device__ __forceinline__ static uint32_t finite(uint32_t scales) {
    const uint32_t nan = ((scales & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return scales - (nan >> 7);
  }
};

/// MX, times 2^-78: numbers times 2^-126, scales times 2^48.
struct MxFp4Pairs {
  using Multiplied = BFloat16;
  static constexpr int kExponent = 126 - 48;
  static constexpr float kHeadroom = 0.0f;
  static constexpr uint32_t kKeySelector = 0x4240, kKeyStep = 0x0101;  // scales are the lower bytes of halves

  __device__ __forceinline__ static void split(uint32_t word, uint32_t (&pairs)[4]) {
    constexpr uint32_t kSigns = 0x88008800, kNumbers = 0x81c081c0;
    const uint32_t high = ptx::merged_bits<kSigns>(word, word >> 6);  // numbers 2 and 3 of each half
    const uint32_t low = ptx::merged_bits<kSigns>(word << 8, word << 2);
    pairs[0] = low << 4 & kNumbers;
    pairs[1] = low & kNumbers;
    pairs[2] = high << 4 & kNumbers;
    pairs[3] = high & kNumbers;
  }

  template <int kNumber>
  __device__ __forceinline__ static void scale_by_one(uint32_t (&pairs)[4], uint32_t scales) {
    const uint32_t both = powers(scales);
#pragma unroll
    for (uint32_t& pair : pairs) pair = ptx::mul_bf16(pair, ptx::twice<kNumber>(both));
  }

  template <int kNumber>
  __device__ __forceinline__ static void scale_by_pair(uint32_t (&pairs)[4], uint32_t scales) {
    const uint32_t scale = powers(__byte_perm(scales, 0, kNumber == 0 ? 0x4140 : 0x4342));
#pragma unroll
    for (uint32_t& pair : pairs) pair = ptx::mul_bf16(pair, scale);
  }

  __device__ __forceinline__ static uint32_t finite(uint32_t scales) { return scales; }  // as powers() makes them

 private:
  /// bf16 2^(exponent + 48 - 127) of each half. Exponents above 206, and NaN, give the largest.
  __device__ __forceinline__ static uint32_t powers(uint32_t exponents) {
    constexpr uint32_t kHalves = 0x10001;
    return ptx::min_u16(exponents, (254 - 48) * kHalves) * 128 + (48 << 7) * kHalves;
  }
};

template <class Traits, class Pairs>
struct Fp4Numbers {
  using Shared = SharedMemory<Traits>;
  using Multiplied = typename Pairs::Multiplied;
  static constexpr int kWordColumns = 8;
  static constexpr int kExponent = Pairs::kExponent, kOddExponent = kExponent;
  static constexpr bool kHasZeroPoints = false;
  static constexpr bool kWeighsTokens = false;
  static constexpr float kHeadroom = Pairs::kHeadroom;

  /// The scales of token g + 8i: its words in products have columns 8t to 8t + 7 of each 32.
  template <int kFragments>
  struct Keys {
    static constexpr int kWords = scale_words_of<Traits>(false);  // of a token, each of 64 columns
    uint32_t scales[2 * kFragments][kWords];  // of columns 32c to 32c + 31 for even c, then for odd c

    __device__ __forceinline__ Keys(const Shared& shared, int part, int row) {
      const int lane = ptx::lane_id();
      const uint32_t selector = Pairs::kKeySelector + Pairs::kKeyStep * (lane % 4 / 2);
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
      Pairs::split(word, pairs);
      if (c % 2 == 0)
        Pairs::template scale_by_one<0>(pairs, scales[i][c / 2]);
      else
        Pairs::template scale_by_one<1>(pairs, scales[i][c / 2]);
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
    static constexpr int kWords = scale_words_of<Traits>(true);
    uint32_t scales[2 * kFragments][kWords];  // a pair of columns 32c to 32c + 31 for even c, then for odd c

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
        for (int d = 0; d < kWords; ++d) scales[i][d] = Pairs::finite(scales[i][d]);
      }
    }

    __device__ __forceinline__ void split(uint32_t word, int i, int c, uint32_t (&pairs)[4]) const {
      Pairs::split(word, pairs);
      if (c % 2 == 0)
        Pairs::template scale_by_pair<0>(pairs, scales[i][c / 2]);
      else
        Pairs::template scale_by_pair<1>(pairs, scales[i][c / 2]);
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

template <class Traits, class Stored>
struct PackedNumbers;
template <class Traits>
struct PackedNumbers<Traits, NvFp4> : Fp4Numbers<Traits, NvFp4Pairs> {};
template <class Traits>
struct PackedNumbers<Traits, MxFp4> : Fp4Numbers<Traits, MxFp4Pairs> {};

}  // namespace attn::sm90
