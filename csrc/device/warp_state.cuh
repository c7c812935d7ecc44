// What a warp computes of a work item: the scores of its rows against a KV tile, and the running softmax state (maximum, sum, output) in registers.
#pragma once

#include "attn/tile.h"
#include "attn/variants.h"
#include "device/element.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/math.cuh"
#include "device/shared_tile.cuh"
#include "device/work.cuh"

namespace attn {

/// How the warps of a CTA share a row tile and a KV tile.
template <int kHeadDim, int kKind>
struct WarpLayout {
  static constexpr int kKvWarps = kKind == 0 ? 4 : kKind == 1 ? 2 : 1;
  static constexpr int kRows = tile_rows(kKind) * kKvWarps / kWarps;     // of a warp
  static constexpr int kRowBlocks = kRows / 16;
  static constexpr int kTokens = kv_tile(kHeadDim) / kKvWarps;           // of a warp
  int32_t first_row;
  int32_t first_token;
  int32_t kv_warp;

  __device__ __forceinline__ explicit WarpLayout(int warp) : first_row(warp / kKvWarps * kRows), first_token(warp % kKvWarps * kTokens), kv_warp(warp % kKvWarps) {}
};

/// Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 of each block of 16 rows, and of every 8 columns the two that start at 2t (mma.cuh, C operand).
template <class Element, int kHeadDim, int kRowBlocks>
struct WarpState {
  using Tile = SharedTile<kHeadDim>;
  static constexpr int kColumnBlocks = kHeadDim / 8;

  float o[kRowBlocks][kColumnBlocks][4];
  float maximum[kRowBlocks][2];   // of the scores, not scaled
  float sum[kRowBlocks][2];       // of exp2(score * scale - maximum * scale), over this lane's columns
  float scale;                    // makes a score a logarithm to base 2; > 0

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
  template <int kTokens>
  __device__ __forceinline__ void scores(float (&s)[kRowBlocks][kTokens / 8][4], uint32_t q, uint32_t k) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) s[b][n][0] = s[b][n][1] = s[b][n][2] = s[b][n][3] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) ptx::ldmatrix_x4(a[b], (q ^ d * Tile::kNextColumns) + b * Tile::kNextRows);
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) {
        uint32_t keys[4];
        ptx::ldmatrix_x4(keys, (k ^ d * Tile::kNextColumns) + n * Tile::kNextRows);
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          Element::mma(s[b][2 * n], a[b], keys[0], keys[1]);
          Element::mma(s[b][2 * n + 1], a[b], keys[2], keys[3]);
        }
      }
    }
  }

  /// Turns scores into probabilities relative to the new maximum; brings sum and output to it.
  template <int kBlocks>
  __device__ __forceinline__ void update(float (&s)[kRowBlocks][kBlocks][4]) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      float correction[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = maximum[b][half];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) m = fmaxf(m, fmaxf(s[b][n][2 * half], s[b][n][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        const float base = m == minus_infinity() ? 0.0f : m * scale;   // a row that has seen nothing yet: every probability is exp2(-inf) = 0
        correction[half] = ptx::ex2(maximum[b][half] * scale - base);
        maximum[b][half] = m;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
          for (int c = 2 * half; c < 2 * half + 2; ++c) {
            s[b][n][c] = ptx::ex2(s[b][n][c] * scale - base);
            total += s[b][n][c];
          }
        }
        sum[b][half] = sum[b][half] * correction[half] + total;
      }
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        o[b][n][0] *= correction[0];
        o[b][n][1] *= correction[0];
        o[b][n][2] *= correction[1];
        o[b][n][3] *= correction[1];
      }
    }
  }

  /// o += P V. `v`: ldmatrix address (rows_first) of the warp's first token.
  template <int kTokens>
  __device__ __forceinline__ void accumulate(const float (&p)[kRowBlocks][kTokens / 8][4], uint32_t v) {
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
      uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        a[b][0] = Element::pack(p[b][2 * k][0], p[b][2 * k][1]);
        a[b][1] = Element::pack(p[b][2 * k][2], p[b][2 * k][3]);
        a[b][2] = Element::pack(p[b][2 * k + 1][0], p[b][2 * k + 1][1]);
        a[b][3] = Element::pack(p[b][2 * k + 1][2], p[b][2 * k + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        uint32_t values[4];
        ptx::ldmatrix_x4_trans(values, (v ^ d * Tile::kNextColumns) + k * Tile::kNextRows);
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          Element::mma(o[b][2 * d], a[b], values[0], values[1]);
          Element::mma(o[b][2 * d + 1], a[b], values[2], values[3]);
        }
      }
    }
  }

  /// The sum over all columns, in every lane of the row.
  __device__ __forceinline__ float row_sum(int b, int half) const {
    float total = sum[b][half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    return total;
  }
};

/// Scores become natural logits.
template <class Variant, int kRowBlocks, int kBlocks>
__device__ __forceinline__ void transform_logits(const VariantParams& variant, float (&s)[kRowBlocks][kBlocks][4]) {
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[b][n][c] = Variant::logits(variant, s[b][n][c] * variant.sm_scale);
    }
  }
}

/// Hides what a row does not see and what lies behind the last token. `first_row`, `first_token`: of the warp.
template <class Variant, int kRowBlocks, int kBlocks>
__device__ __forceinline__ void mask_scores(const VariantParams& variant, float (&s)[kRowBlocks][kBlocks][4], const RowTileRows& rows, const FastDivisor& group_size,
                                            int32_t first_row, int32_t first_token, int32_t kv_end) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t qo_pos = rows.position(first_row + b * 16 + half * 8 + lane / 4, group_size);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int32_t kv_pos = first_token + n * 8 + (lane % 4) * 2 + c;
          const bool visible = (kv_pos < kv_end) & Variant::visible(variant, qo_pos, kv_pos);
          s[b][n][2 * half + c] = visible ? s[b][n][2 * half + c] : minus_infinity();
        }
      }
    }
  }
}

}  // namespace attn
