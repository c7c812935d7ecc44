// What a warp computes of a work item: the scores of its rows against a KV tile, and the running softmax state
// (maximum, sum, output) in registers.
#pragma once

#include "attention/shared_tile.cuh"
#include "attention/variants.h"
#include "attention/work_cursor.cuh"
#include "common/elements.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/special_registers.cuh"

namespace attn {

/// Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 of each block of 16 rows, and of every 8 columns the two
/// that start at 2t (mma.cuh, C operand).
/// Element_: the type in which P and V are multiplied and O is written. kColumns: of V and O.
template <class Element_, int kColumns, int kRowBlocks>
struct WarpState {
  using Element = Element_;
  static constexpr int kColumnBlocks = kColumns / 8;
  static constexpr float kSlack = 8.0f;  // to base 2

  float o[kRowBlocks][kColumnBlocks][4];
  float maximum[kRowBlocks][2];  // of the scores, not scaled
  float sum[kRowBlocks][2];      // of exp2(score * scale - maximum * scale), over this lane's columns
  float scale;                   // makes a score a logarithm to base 2; > 0

  __device__ __forceinline__ WarpState() {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) o[b][n][0] = o[b][n][1] = o[b][n][2] = o[b][n][3] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[b][half] = minus_infinity();
        sum[b][half] = 0.0f;
      }
    }
  }

  /// s = Q K^T. `q` and `k`: ldmatrix addresses (rows_first, columns_first) of the warp's first rows and tokens.
  template <int kQkColumns, int kTokens, class QTile, class KTile>
  __device__ __forceinline__ void scores(float (&s)[kRowBlocks][kTokens / 8][4], uint32_t q, uint32_t k) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) s[b][n][0] = s[b][n][1] = s[b][n][2] = s[b][n][3] = 0.0f;
    }
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
        if (next < kQkColumns / 16 * kFragments) {
          ptx::ldmatrix_x4(keys[next % 2], KTile::block(k, next % kFragments, next / kFragments));
        }
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          float (&sum)[4] = kTwoSums && d % 2 == 1 ? other[0] : s[b][2 * n];
          float (&next_sum)[4] = kTwoSums && d % 2 == 1 ? other[1] : s[b][2 * n + 1];
          Element::mma(sum, a[b], keys[i % 2][0], keys[i % 2][1]);
          Element::mma(next_sum, a[b], keys[i % 2][2], keys[i % 2][3]);
        }
      }
    }
    if constexpr (kTwoSums) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[0][0][c] += other[0][c];
        s[0][1][c] += other[1][c];
      }
    }
  }

  /// The same with K of an 8-bit cache, which is widened on the way. A lane gets words of K with four neighbouring
  /// columns: it uses the first two as its columns of the first half of a product's depth, the others as those of the
  /// second half. `query(b, d, a)` loads Q in the same order: rows of block b, columns from 16 * d on (load_query()).
  /// `k`: as in scores().
  template <int kQkColumns, int kTokens, class KTile, class KvElement, class Query>
  __device__ __forceinline__ void widened_scores(float (&s)[kRowBlocks][kTokens / 8][4], const Query& query,
                                                 uint32_t k) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) s[b][n][0] = s[b][n][1] = s[b][n][2] = s[b][n][3] = 0.0f;
    }
    constexpr int kFragments = kTokens / 16;
    constexpr bool kTwoSums = kRowBlocks * kFragments == 1 && kColumns <= 128;
    constexpr int kLoads = ceil_div(kQkColumns, 32) * kFragments;
    float other[2][4] = {};
    constexpr int kBuffers = kRowBlocks == 1 ? 2 : 1;  // the next words, where there are registers for them
    uint32_t words[kBuffers][4];                       // of 16 tokens x 32 columns
    if (kBuffers == 2) ptx::ldmatrix_x4(words[0], k);
#pragma unroll
    for (int d = 0; d < kQkColumns; d += 32) {
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const int i = d / 32 * kFragments + n;
        const int next = i + kBuffers - 1;
        if (next < kLoads) {
          ptx::ldmatrix_x4(words[next % kBuffers], KTile::block(k, next % kFragments, next / kFragments));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (d + half * 16 >= kQkColumns) break;
          uint32_t upper[2], lower[2];  // of eight tokens each
          widen<Element, KvElement>(words[i % kBuffers][half], upper);
          widen<Element, KvElement>(words[i % kBuffers][2 + half], lower);
#pragma unroll
          for (int b = 0; b < kRowBlocks; ++b) {
            uint32_t a[4];  // read for each fragment: there are no registers to keep it
            query(b, d / 16 + half, a);
            Element::mma(kTwoSums && half == 1 ? other[0] : s[b][2 * n], a, upper[0], upper[1]);
            Element::mma(kTwoSums && half == 1 ? other[1] : s[b][2 * n + 1], a, lower[0], lower[1]);
          }
        }
      }
    }
    if constexpr (kTwoSums) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[0][0][c] += other[0][c];
        s[0][1][c] += other[1][c];
      }
    }
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
    const float slack = __fdividef(most, scale);
    if (!__any_sync(0xffffffffu, highest[0] > maximum[b][0] + slack || highest[1] > maximum[b][1] + slack))
      return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 1));
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 2));
      // Only a row's own scores raise its maximum: its bits do not depend on other rows.
      const float m = highest[half] > maximum[b][half] + slack ? highest[half] : maximum[b][half];
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
      float highest = highest_score(s, half);
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
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

  /// For variants without softmax: starts a sum that is not normalised. Where warps share rows, only one of them
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
    uint32_t values[2][4];
    ptx::ldmatrix_x4_trans(values[0], v);
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int d = 0; d < kFragments; ++d) {
        const int i = k * kFragments + d;
        const int next = i + 1;
        if (next < kTokens / 16 * kFragments) {
          ptx::ldmatrix_x4_trans(values[next % 2], VTile::block(v, next / kFragments, next % kFragments));
        }
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          const uint32_t a[4] = {p[b][2 * k][0], p[b][2 * k][1], p[b][2 * k + 1][0], p[b][2 * k + 1][1]};
          Element::mma(o[b][2 * d], a, values[i % 2][0], values[i % 2][1]);
          Element::mma(o[b][2 * d + 1], a, values[i % 2][2], values[i % 2][3]);
        }
      }
    }
  }

  /// The same with V of an 8-bit cache, widened on the way. A lane gets words of two neighbouring tokens x two
  /// neighbouring columns, so columns of each 16 are multiplied in another order: o[b][2i] and o[b][2i + 1] hold
  /// columns 4t, 4t + 2 and 4t + 1, 4t + 3 of the 16 from 16 * i on (four_outputs()).
  template <int kTokens, class VTile, class KvElement>
  __device__ __forceinline__ void widened_accumulate(const uint32_t (&p)[kRowBlocks][kTokens / 8][2], uint32_t v) {
    static_assert(kColumns % 32 == 0, "two groups of 16 columns are loaded together");
    constexpr int kFragments = kColumns / 32;
    uint32_t words[2][4];
    ptx::ldmatrix_x4_trans(words[0], v);
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int d = 0; d < kFragments; ++d) {
        const int i = k * kFragments + d;
        const int next = i + 1;
        if (next < kTokens / 16 * kFragments) {
          ptx::ldmatrix_x4_trans(words[next % 2], VTile::block(v, next / kFragments, next % kFragments));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t upper[2], lower[2];  // tokens 0 to 7 and 8 to 15: of even columns, of odd ones
          widen_apart<Element, KvElement>(words[i % 2][2 * half], upper);
          widen_apart<Element, KvElement>(words[i % 2][2 * half + 1], lower);
#pragma unroll
          for (int b = 0; b < kRowBlocks; ++b) {
            const uint32_t a[4] = {p[b][2 * k][0], p[b][2 * k][1], p[b][2 * k + 1][0], p[b][2 * k + 1][1]};
            Element::mma(o[b][4 * d + 2 * half], a, upper[0], lower[0]);
            Element::mma(o[b][4 * d + 2 * half + 1], a, upper[1], lower[1]);
          }
        }
      }
    }
  }

  /// Columns 8 * n + 4t to 8 * n + 4t + 3 after widened_accumulate(); n is even.
  __device__ __forceinline__ float4 four_outputs(int b, int n, int half, float factor) const {
    const float (&even)[4] = o[b][n];
    const float (&odd)[4] = o[b][n + 1];
    return make_float4(even[2 * half] * factor, odd[2 * half] * factor, even[2 * half + 1] * factor,
                       odd[2 * half + 1] * factor);
  }

  /// The sum over all columns, in every lane of the row.
  __device__ __forceinline__ float row_sum(int b, int half) const {
    float total = sum[b][half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    return total;
  }
};

/// Rows of Q for widened_scores(). `q`: the lane's address in the warp's first rows (four_columns()).
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

/// Calls change(score, ScoreRow, KV position) for every score of a lane. `first_token`: of the warp, in the row group.
template <int kRowBlocks, int kBlocks, class Rows, class Change>
__device__ __forceinline__ void for_each_score(float (&s)[kRowBlocks][kBlocks][4], int32_t first_token,
                                               const Rows& rows, const Change& change) {
  const int32_t first = rows.kv_offset + first_token + ptx::lane_id() % 4 * 2;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) change(s[b][n][2 * half + c], rows.rows[b][half], first + n * 8 + c);
      }
    }
  }
}

/// Turns scores into natural logits. `rows`: LaneRows.
template <class Variant, int kRowBlocks, int kBlocks, class Rows>
__device__ __forceinline__ void transform_logits(const Variant& variant, float sm_scale,
                                                 float (&s)[kRowBlocks][kBlocks][4], int32_t first_token,
                                                 const Rows& rows) {
  if constexpr (VariantHooks<Variant>::kBiasSlope) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float slope = rows.bias_slopes[b][half];
        const float first = slope * rows.bias_distance(b, half, first_token);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c)
            s[b][n][2 * half + c] = s[b][n][2 * half + c] * sm_scale + (slope * (n * 8 + c) + first);
        }
      }
    }
  } else {
    for_each_score(s, first_token, rows, [&](float& score, const ScoreRow& row, int32_t kv_position) {
      score *= sm_scale;
      if constexpr (VariantHooks<Variant>::kLogits) score = variant.logits(score, row, kv_position);
    });
  }
}

/// Multiplies scores by K's scales where requests have their own; others are part of score_scale(), and a variant that
/// transforms K has multiplied its rows. `requests`: of the tile's rows; `first_row`: of the warp.
template <class Variant, int kRowBlocks, int kBlocks>
__device__ __forceinline__ void scale_scores(const Variant& variant, float (&s)[kRowBlocks][kBlocks][4],
                                             const int32_t* requests, int first_row) {
  if constexpr (Variant::kHasScales && !VariantHooks<Variant>::kKey) {
    if (!variant.scales.k.is_of_requests()) return;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t request = requests[first_row + b * 16 + half * 8 + ptx::lane_id() / 4];
        const float scale = variant.scales.k.of(request, variant.kv_head);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          s[b][n][2 * half] *= scale;
          s[b][n][2 * half + 1] *= scale;
        }
      }
    }
  }
}

/// What all scores of a KV head are multiplied by. Scales of Q or K are not part of it if a variant transforms their
/// rows, which were multiplied by them.
template <class Variant>
__device__ __forceinline__ float score_scale(const Variant& variant, float sm_scale) {
  if constexpr (Variant::kHasQueryScale && !VariantHooks<Variant>::kQuery)
    sm_scale *= variant.scales.q.of_all_requests(variant.kv_head);
  if constexpr (Variant::kHasScales && !VariantHooks<Variant>::kKey)
    return sm_scale * variant.scales.k.of_all_requests(variant.kv_head);
  return sm_scale;
}

/// Applies the variant's mask. What is not seen has no weight where there is no softmax.
template <class Variant, int kRowBlocks, int kBlocks, class Rows>
__device__ __forceinline__ void apply_variant_mask(const Variant& variant, float (&s)[kRowBlocks][kBlocks][4],
                                                   int32_t first_token, const Rows& rows) {
  if constexpr (VariantHooks<Variant>::kMask) {
    if (first_token < rows.seen.begin || first_token + kBlocks * 8 > rows.seen.end) {
      for_each_score(s, first_token, rows, [&](float& score, const ScoreRow& row, int32_t kv_position) {
        if (!variant.mask(row, kv_position)) score = minus_infinity();
      });
    }
  }
  if constexpr (!Variant::kUsesSoftmax) {
    for_each_score(s, first_token, rows, [&](float& score, const ScoreRow&, int32_t) {
      if (score == minus_infinity()) score = 0.0f;
    });
  }
}

/// A lane's scores are two of every eight columns: returns a bit for each that lies in the first `columns` columns,
/// counted from the lane's own first column.
__device__ __forceinline__ uint32_t scores_before(int32_t columns) {
  const int32_t count = columns <= 0 ? 0 : min_of(columns / 8 * 2 + min_of(columns % 8, 2), 32);
  return static_cast<uint32_t>((1ull << count) - 1);
}

/// Masks the tokens outside a row's interval and those after the last token. `first_row`, `first_token`: of the warp.
template <int kRowBlocks, int kBlocks, class Rows>
__device__ __forceinline__ void mask_scores(const Visibility& visibility, float (&s)[kRowBlocks][kBlocks][4],
                                            const Rows& rows, const FastDivisor& group_size, int32_t first_row,
                                            int32_t first_token, int32_t kv_end) {
  static_assert(kBlocks <= 16, "a bit for each of a row's scores that a lane holds");
  const int lane = ptx::lane_id();
  const int32_t first_column = first_token + lane % 4 * 2;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
    uint32_t visible[2];  // bit 2n + c: score c of column block n
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t position = rows.position(first_row + b * 16 + half * 8 + lane / 4, group_size);
      const TokenRange tokens = visibility.seen_by_all(position, position, TokenRange{0, kv_end});
      visible[half] = scores_before(tokens.end - first_column) & ~scores_before(tokens.begin - first_column);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if ((visible[c / 2] & 1u << (2 * n + c % 2)) == 0) s[b][n][c] = minus_infinity();
      }
    }
  }
}

}  // namespace attn
