// A warp's rows of a work item in registers: the running state of their softmax (maximum, sum, output), and the
// products with mma.sync that make scores and outputs, of 16-bit KV tiles and of 8-bit KV tiles that are dequantized on
// the way.
#pragma once

#include "attention/head_shape.h"
#include "attention/tile/shared_tile.cuh"
#include "common/elements.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

/// Calls load(words, i) and then multiply(words, i) for each i below kCount. With two buffers, the next words are
/// loaded while words are multiplied.
template <int kCount, int kBuffers = 2, class Load, class Multiply>
__device__ __forceinline__ void load_and_multiply(const Load& load, const Multiply& multiply) {
  uint32_t words[kBuffers][4];
  if (kBuffers == 2) load(words[0], 0);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int next = i + kBuffers - 1;
    if (next < kCount) load(words[next % kBuffers], next);
    multiply(words[i % kBuffers], i);
  }
}

/// Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 of each block of 16 rows, and of every 8 columns the two
/// that start at 2t (mma.cuh, C operand).
/// Element_: the type in which P and V are multiplied and O is written. kColumns: of V and O.
template <class Element_, int kColumns, int kRowBlocks>
struct WarpState {
  using Element = Element_;
  static constexpr int kColumnBlocks = kColumns / 8;
  static constexpr float kSlack = 8.0f;  // to base 2

  float o[kRowBlocks][kColumnBlocks][4] = {};
  float maximum[kRowBlocks][2];   // of the scores, not scaled
  float sum[kRowBlocks][2] = {};  // of exp2(score * scale - maximum * scale), over this lane's columns
  float scale;                    // makes a score a logarithm to base 2; > 0

  __device__ __forceinline__ WarpState() {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) maximum[b][0] = maximum[b][1] = minus_infinity();
  }

  template <int kBlocks>
  __device__ __forceinline__ static void set_to_zero(float (&s)[kRowBlocks][kBlocks][4]) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) s[b][n][0] = s[b][n][1] = s[b][n][2] = s[b][n][3] = 0.0f;
    }
  }

  /// s += other, of 16 tokens.
  __device__ __forceinline__ static void add_to(float (&s)[2][4], const float (&other)[2][4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[0][c] += other[0][c];
      s[1][c] += other[1][c];
    }
  }

  /// s = Q K^T. `q` and `k`: ldmatrix addresses (rows_first, columns_first) of the warp's first rows and tokens.
  template <int kQkColumns, int kTokens, class QTile, class KTile>
  __device__ __forceinline__ void scores(float (&s)[kRowBlocks][kTokens / 8][4], uint32_t q, uint32_t k) const {
    set_to_zero(s);
    // Loads the next fragment of K while this one is multiplied. Where there are few products, two sums are kept, so
    // that a product does not have to wait for the one before.
    constexpr int kFragments = kTokens / 16;
    constexpr bool kTwoSums = kRowBlocks * kFragments == 1;
    float other[2][4] = {};
    uint32_t keys[2][4];
    ptx::ldmatrix_x4(keys[0], k);
#pragma unroll
    for (int d = 0; d < kQkColumns / 16; ++d) {
      uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) ptx::ldmatrix_x4(a[b], QTile::block(q, b, d));
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const int i = d * kFragments + n;
        const int next = i + 1;
        if (next < kQkColumns / 16 * kFragments)
          ptx::ldmatrix_x4(keys[next % 2], KTile::block(k, next % kFragments, next / kFragments));
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          float (&sum)[4] = kTwoSums && d % 2 == 1 ? other[0] : s[b][2 * n];
          float (&next_sum)[4] = kTwoSums && d % 2 == 1 ? other[1] : s[b][2 * n + 1];
          Element::mma(sum, a[b], keys[i % 2][0], keys[i % 2][1]);
          Element::mma(next_sum, a[b], keys[i % 2][2], keys[i % 2][3]);
        }
      }
    }
    if constexpr (kTwoSums) add_to(s[0], other);
  }

  /// The same with K of an 8-bit cache, which is dequantized on the way. A lane gets words of K with four neighboring
  /// columns. It uses the first two in the first half of a product's depth, and the other two in the second half.
  /// `query(b, d, a)` loads Q in the same order: rows of block b, columns from 16 * d on (load_query()).
  /// `k`: as in scores(). kMayKeepSums: there are registers for two sums.
  template <int kQkColumns, int kTokens, class KTile, class KvElement, bool kMayKeepSums = true, class Query>
  __device__ __forceinline__ void dequantized_scores(float (&s)[kRowBlocks][kTokens / 8][4], const Query& query,
                                                     uint32_t k) const {
    set_to_zero(s);
    constexpr int kFragments = kTokens / 16;
    constexpr bool kTwoSums = kMayKeepSums && kRowBlocks * kFragments == 1 && leaves_registers(kColumns);
    constexpr int kLoads = ceil_div(kQkColumns, 32) * kFragments;
    constexpr int kBuffers = kRowBlocks == 1 ? 2 : 1;  // where there are registers for the next words
    float other[2][4] = {};
    load_and_multiply<kLoads, kBuffers>(  // 16 tokens x 32 columns
        [&](uint32_t (&words)[4], int i) { ptx::ldmatrix_x4(words, KTile::block(k, i % kFragments, i / kFragments)); },
        [&](const uint32_t (&words)[4], int i) {
          const int n = i % kFragments, d = i / kFragments * 32;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (d + half * 16 >= kQkColumns) break;
            uint32_t upper[2], lower[2];  // of eight tokens each
            dequantize<Element, KvElement>(words[half], upper);
            dequantize<Element, KvElement>(words[2 + half], lower);
#pragma unroll
            for (int b = 0; b < kRowBlocks; ++b) {
              uint32_t a[4];  // read for each fragment: there are no registers to keep it
              query(b, d / 16 + half, a);
              Element::mma(kTwoSums && half == 1 ? other[0] : s[b][2 * n], a, upper[0], upper[1]);
              Element::mma(kTwoSums && half == 1 ? other[1] : s[b][2 * n + 1], a, lower[0], lower[1]);
            }
          }
        });
    if constexpr (kTwoSums) add_to(s[0], other);
  }

  /// The highest of a row's scores in this lane's columns.
  template <int kBlocks>
  __device__ __forceinline__ static float highest_score(const float (&s)[kBlocks][4], int half) {
    float m[4];  // four independent maxima, to shorten the chain of dependent instructions
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = s[i % kBlocks][2 * half];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) m[n % 4] = fmaxf(m[n % 4], fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
  }

  /// Raises the maximum of row block b, and rescales its sum, if a score exceeds it by `most`: probabilities up to
  /// 2^kSlack do not overflow, and the output is seldom rescaled. Returns whether it did (for the whole warp); then the
  /// output must be multiplied by `correction`.
  template <int kBlocks>
  __device__ __forceinline__ bool raise_maximum(int b, const float (&s)[kBlocks][4], float (&correction)[2],
                                                float most = kSlack) {
    float highest[2] = {highest_score(s, 0), highest_score(s, 1)};
    const auto exceeds = [&](int half) { return (highest[half] - maximum[b][half]) * scale > most; };
    if (!__any_sync(0xffffffffu, exceeds(0) || exceeds(1))) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = ptx::quad_max(highest[half]);
      // Only a row's own scores raise its maximum: its bits do not depend on other rows.
      const float m = exceeds(half) ? highest[half] : maximum[b][half];
      correction[half] = m == minus_infinity() ? 1.0f : ptx::ex2((maximum[b][half] - m) * scale);
      maximum[b][half] = m;
      sum[b][half] *= correction[half];
    }
    return true;
  }

  /// Gives the rows of row block b that have seen nothing yet the maximum of these scores. Returns whether all of the
  /// warp's have one.
  template <int kBlocks>
  __device__ __forceinline__ bool find_maxima(int b, const float (&s)[kBlocks][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float highest = ptx::quad_max(highest_score(s, half));
      if (maximum[b][half] == minus_infinity()) maximum[b][half] = highest;
    }
    return __all_sync(0xffffffffu, maximum[b][0] != minus_infinity() && maximum[b][1] != minus_infinity());
  }

  __device__ __forceinline__ void scale_output(int b, const float (&correction)[2]) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      o[b][n][0] *= correction[0];
      o[b][n][1] *= correction[0];
      o[b][n][2] *= correction[1];
      o[b][n][3] *= correction[1];
    }
  }

  /// The maximum that probabilities are relative to, to base 2. A row that has seen nothing: every probability is
  /// exp2(-inf) = 0.
  __device__ __forceinline__ float base(int b, int half) const {
    return maximum[b][half] == minus_infinity() ? 0.0f : maximum[b][half] * scale;
  }

  /// One step of the online softmax: turns scores into probabilities, packed for accumulate(), and rescales sum and
  /// output if the maximum changes.
  template <int kBlocks>
  __device__ __forceinline__ void update(float (&s)[kRowBlocks][kBlocks][4], uint32_t (&p)[kRowBlocks][kBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      float correction[2];
      if (raise_maximum(b, s[b], correction)) scale_output(b, correction);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float relative_to = base(b, half);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float first = ptx::ex2(s[b][n][2 * half] * scale - relative_to);
          const float second = ptx::ex2(s[b][n][2 * half + 1] * scale - relative_to);
          sum[b][half] += first + second;
          p[b][n][half] = Element::pack(first, second);
        }
      }
    }
  }

  /// The same, but packs probabilities times weights of their columns, which are above 0. Probabilities are relative to
  /// the largest product, so that it is about 1, whatever the weights are. weights[n]: of this lane's columns in block
  /// n.
  template <int kBlocks>
  __device__ __forceinline__ void update(float (&s)[1][kBlocks][4], uint32_t (&p)[1][kBlocks][2],
                                         const float2 (&weights)[kBlocks]) {
    const float per_score = __fdividef(1.0f, scale);
    float weighted[kBlocks][4];  // scores with the logarithms of weights
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float first = ptx::lg2(weights[n].x), second = ptx::lg2(weights[n].y);
#pragma unroll
      for (int c = 0; c < 4; ++c) weighted[n][c] = (c % 2 == 0 ? first : second) * per_score + s[0][n][c];
    }
    float correction[2];
    if (raise_maximum(0, weighted, correction)) scale_output(0, correction);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float relative_to = base(0, half);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float first = ptx::ex2(s[0][n][2 * half] * scale - relative_to);
        const float second = ptx::ex2(s[0][n][2 * half + 1] * scale - relative_to);
        sum[0][half] += first + second;
        p[0][n][half] = Element::pack(first * weights[n].x, second * weights[n].y);
      }
    }
  }

  /// Replaces update() for variants without softmax: the scores are weights.
  template <int kBlocks>
  __device__ __forceinline__ static void pack_weights(const float (&s)[kRowBlocks][kBlocks][4],
                                                      uint32_t (&p)[kRowBlocks][kBlocks][2]) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) p[b][n][half] = Element::pack(s[b][n][2 * half], s[b][n][2 * half + 1]);
      }
    }
  }

  /// For variants without softmax: starts a sum that is not normalized. Where warps share rows, only one of them
  /// counts.
  __device__ __forceinline__ void start_sum(bool counts) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      maximum[b][0] = maximum[b][1] = 0.0f;
      sum[b][0] = sum[b][1] = counts && ptx::lane_id() % 4 == 0 ? 1.0f : 0.0f;
    }
  }

  /// o += P V. `v`: ldmatrix address (rows_first) of the warp's first token.
  template <int kTokens, class VTile>
  __device__ __forceinline__ void accumulate(const uint32_t (&p)[kRowBlocks][kTokens / 8][2], uint32_t v) {
    constexpr int kFragments = kColumns / 16;
    load_and_multiply<kTokens / 16 * kFragments>(
        [&](uint32_t (&values)[4], int i) {
          ptx::ldmatrix_x4_trans(values, VTile::block(v, i / kFragments, i % kFragments));
        },
        [&](const uint32_t (&values)[4], int i) {
          const int k = i / kFragments, d = i % kFragments;
#pragma unroll
          for (int b = 0; b < kRowBlocks; ++b) {
            const uint32_t a[4] = {p[b][2 * k][0], p[b][2 * k][1], p[b][2 * k + 1][0], p[b][2 * k + 1][1]};
            Element::mma(o[b][2 * d], a, values[0], values[1]);
            Element::mma(o[b][2 * d + 1], a, values[2], values[3]);
          }
        });
  }

  /// The same with V of an 8-bit cache, dequantized on the way. A lane gets words of two neighboring tokens x two
  /// neighboring columns, so columns of each 16 are multiplied in another order: o[b][2i] and o[b][2i + 1] hold
  /// columns 4t, 4t + 2 and 4t + 1, 4t + 3 of the 16 from 16 * i on (four_outputs()).
  template <int kTokens, class VTile, class KvElement>
  __device__ __forceinline__ void dequantized_accumulate(const uint32_t (&p)[kRowBlocks][kTokens / 8][2], uint32_t v) {
    static_assert(kColumns % 32 == 0, "two groups of 16 columns are loaded together");
    constexpr int kFragments = kColumns / 32;
    load_and_multiply<kTokens / 16 * kFragments>(
        [&](uint32_t (&words)[4], int i) {
          ptx::ldmatrix_x4_trans(words, VTile::block(v, i / kFragments, i % kFragments));
        },
        [&](const uint32_t (&words)[4], int i) {
          const int k = i / kFragments, d = i % kFragments;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t upper[2], lower[2];  // tokens 0 to 7 and 8 to 15: of even columns, of odd ones
            dequantize_apart<Element, KvElement>(words[2 * half], upper);
            dequantize_apart<Element, KvElement>(words[2 * half + 1], lower);
#pragma unroll
            for (int b = 0; b < kRowBlocks; ++b) {
              const uint32_t a[4] = {p[b][2 * k][0], p[b][2 * k][1], p[b][2 * k + 1][0], p[b][2 * k + 1][1]};
              Element::mma(o[b][4 * d + 2 * half], a, upper[0], lower[0]);
              Element::mma(o[b][4 * d + 2 * half + 1], a, upper[1], lower[1]);
            }
          }
        });
  }

  /// Columns 8 * n + 4t to 8 * n + 4t + 3 after dequantized_accumulate(); n is even.
  __device__ __forceinline__ float4 four_outputs(int b, int n, int half, float factor) const {
    const float (&even)[4] = o[b][n];
    const float (&odd)[4] = o[b][n + 1];
    return make_float4(even[2 * half] * factor, odd[2 * half] * factor, even[2 * half + 1] * factor,
                       odd[2 * half + 1] * factor);
  }

  /// The sum over all columns, in every lane of the row.
  __device__ __forceinline__ float row_sum(int b, int half) const { return ptx::quad_add(sum[b][half]); }
};

/// The largest magnitude in row `half` of a lane's, of rows of 16-bit elements that load_query() has loaded: their
/// bits.
template <int kSteps>
__device__ __forceinline__ uint32_t largest_magnitude(const uint32_t (&rows)[kSteps][4], int half) {
  uint32_t largest = 0;
#pragma unroll
  for (int d = 0; d < kSteps; ++d) {
#pragma unroll
    for (int i = half; i < 4; i += 2)
      largest = max_of(largest, max_of(rows[d][i] & 0x7fffu, rows[d][i] >> 16 & 0x7fffu));
  }
  largest = max_of(largest, __shfl_xor_sync(ptx::kAllLanes, largest, 1));
  return max_of(largest, __shfl_xor_sync(ptx::kAllLanes, largest, 2));
}

/// Rows of Q for dequantized_scores(). `q`: the lane's address in the warp's first rows (four_columns()).
template <class QTile>
__device__ __forceinline__ void load_query(uint32_t (&a)[4], uint32_t q, int b, int d) {
  const uint32_t upper = QTile::block(q, b, d);
  uint32_t words[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::load_words(words, upper + half * 8 * QTile::kRowBytes);
    a[half] = words[0];
    a[2 + half] = words[1];
  }
}

}  // namespace attn
