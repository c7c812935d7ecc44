// What becomes of a warp's scores between Q K^T and the softmax: scales of the cache, the variant's logits, and masks.
// Scores are laid out as WarpState has them, or transposed (LaneRows): tokens are the rows of products, a block has 16.
#pragma once

#include "attention/tile/row_tile.cuh"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/math.h"
#include "common/ptx/warp.cuh"

namespace attn {

/// Tokens of a warp's scores, which have kBlocks blocks of tokens. Rows: LaneRows.
template <class Rows, int kBlocks>
constexpr int kScoreTokens = kBlocks * (Rows::kTransposed ? 16 : 8);

/// Calls change(score, ScoreRow, KV position) for every score of a lane. `first_token`: of the warp, in the row group.
template <int kRowBlocks, int kBlocks, class Rows, class Change>
__device__ __forceinline__ void for_each_score(float (&s)[kRowBlocks][kBlocks][4], int32_t first_token,
                                               const Rows& rows, const Change& change) {
  const int32_t first = rows.kv_offset + first_token + Rows::first_token_of_lane();
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if constexpr (Rows::kTransposed)
            change(s[b][n][2 * c + r], rows.rows[b][r], first + n * 16 + 8 * c);
          else
            change(s[b][n][2 * r + c], rows.rows[b][r], first + n * 8 + c);
        }
      }
    }
  }
}

/// Turns scores into natural logits. `rows`: LaneRows.
template <class Variant, int kRowBlocks, int kBlocks, class Rows>
__device__ __forceinline__ void transform_logits(const Variant& variant, float sm_scale,
                                                 float (&s)[kRowBlocks][kBlocks][4], int32_t first_token,
                                                 const Rows& rows) {
  if constexpr (VariantHooks<Variant>::kBiasSlope && !Rows::kTransposed) {
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
    sm_scale *= variant.scales.q.for_all_requests(variant.kv_head);
  if constexpr (Variant::kHasScales && !VariantHooks<Variant>::kKey)
    return sm_scale * variant.scales.k.for_all_requests(variant.kv_head);
  return sm_scale;
}

/// Applies the variant's mask. Without softmax, masked scores become zero weights.
template <class Variant, int kRowBlocks, int kBlocks, class Rows>
__device__ __forceinline__ void apply_variant_mask(const Variant& variant, float (&s)[kRowBlocks][kBlocks][4],
                                                   int32_t first_token, const Rows& rows) {
  if constexpr (VariantHooks<Variant>::kMask) {
    if (first_token < rows.seen.begin || first_token + kScoreTokens<Rows, kBlocks> > rows.seen.end) {
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
