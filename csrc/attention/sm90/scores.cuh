// From products to probabilities, in all regimes: scales and logits, masks, exponentials.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "attention/feed/work_item.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/row_tile.cuh"
#include "attention/tile/scores.cuh"
#include "common/ptx/math.cuh"

namespace attn::sm90 {

/// How a soft cap's tanh is computed: by one instruction, with a relative error of 2^-11, where exponentials bound the
/// kernel (ADR 51); or by five, with an error of 1e-6.
enum class SoftCap { kFast, kExact };

template <class Traits, SoftCap kSoftCap = SoftCap::kExact>
struct Scores {
  using Variant = typename Traits::Variant;
  using Shared = SharedMemory<Traits>;

  /// Constants of an item, for a warp.
  struct Constants {
    TokenRange unmasked;  // tokens that all of its rows see: their scores need no mask
    float cap_factor;     // of the standard variant's soft cap: makes a product logit / cap; 0: there is no cap
  };

  const AttentionParams& params;

  __device__ __forceinline__ Constants constants(const WorkItem& item, int first_row) const {
    const TokenRange unmasked =
        item.visibility.seen_by_all(item.rows.position(first_row, params.group_size),
                                    item.rows.position(first_row + kWarpRows - 1, params.group_size), item.readable);
    return Constants{unmasked, cap_factor(item)};
  }

  /// Makes a finished score a logarithm to base 2. Under the standard variant's soft cap a score is logit / cap.
  __device__ __forceinline__ float scale(const WorkItem& item) const {
    const Variant variant = variant_of<Traits>(params, 0);
    if (!transforms_logits(variant)) return sm_scale(item) * kLog2E;
    if constexpr (Variant::kIsStandard) return variant.cap * kLog2E;
    return kLog2E;
  }

  /// params.sm_scale, and K's scale.
  __device__ __forceinline__ float sm_scale(const WorkItem& item) const {
    if constexpr (Variant::kHasScales) return Shared::score_scale(item);
    return params.sm_scale;
  }

  /// Turns products into masked logits; without `makes_logits` it only masks them. `s`: a warp's scores from
  /// `first_token` on. `rows`: LaneRows of the lane. Returns whether visibility lets all rows see all of the tokens.
  template <int kRowBlocks, int kBlocks, class Rows>
  __device__ __forceinline__ bool finish(const WorkItem& item, float (&s)[kRowBlocks][kBlocks][4], int first_row,
                                         int32_t first_token, const Constants& constants, const Rows& rows,
                                         bool makes_logits = true) const {
    scale_scores(variant_of<Traits>(params, item.kv_head), s, Shared::requests(item), first_row);
    if constexpr (Variant::kIsStandard) {
      constexpr bool kKeepsFactor = kSoftCap == SoftCap::kFast || Rows::kTransposed;  // else registers are few
      const float factor = kKeepsFactor ? constants.cap_factor : cap_factor(item);
      if (factor != 0.0f)
        for_each_score(s, first_token, rows, [&](float& score, const ScoreRow&, int32_t) {
          score = kSoftCap == SoftCap::kFast ? ptx::tanh(score * factor) : quick_tanh(score * factor);
        });
    } else if (makes_logits && transforms_logits(variant_of<Traits>(params, 0))) {
      transform_logits(variant_of<Traits>(params, item.kv_head), sm_scale(item), s, first_token, rows);
    }
    const bool all_seen =
        first_token >= constants.unmasked.begin && first_token + kScoreTokens<Rows, kBlocks> <= constants.unmasked.end;
    if (!all_seen) {
      if constexpr (Rows::kTransposed)
        mask_transposed(item, s, first_token);
      else
        mask_scores(item.visibility, s, item.rows, params.group_size, first_row, first_token, item.readable.end);
    }
    apply_variant_mask(variant_of<Traits>(params, item.kv_head), s, first_token, rows);
    return all_seen;
  }

 private:
  __device__ __forceinline__ float cap_factor(const WorkItem& item) const {
    if constexpr (Variant::kIsStandard) {
      const float cap = variant_of<Traits>(params, 0).cap;
      if (cap > 0.0f) {
        const float factor = __fdividef(sm_scale(item), cap);
        return factor == 0.0f ? 2e-38f : factor;  // the cache's scale may be 0
      }
    }
    return 0.0f;
  }

  /// mask_scores() of a row tile's first eights of rows, with transposed scores.
  template <int kRowBlocks, int kBlocks>
  __device__ __forceinline__ void mask_transposed(const WorkItem& item, float (&s)[kRowBlocks][kBlocks][4],
                                                  int32_t first_token) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t position = item.rows.position(8 * b + ptx::lane_id() % 4 * 2 + r, params.group_size);
        const TokenRange seen = item.visibility.seen_by_all(position, position, TokenRange{0, item.readable.end});
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          const int32_t token = first_token + ptx::lane_id() / 4 + 8 * i;
          if (token < seen.begin || token >= seen.end) s[b][i / 2][i % 2 * 2 + r] = minus_infinity();
        }
      }
    }
  }
};

/// Turns scores into probabilities relative to the rows' maxima, times 2^shift; `added`: their sums over this lane's
/// columns.
template <class State, int kBlocks>
__device__ __forceinline__ void exponentiate(const State& state, float (&s)[1][kBlocks][4], float (&added)[2],
                                             float shift = 0.0f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = state.base(0, half) - shift;
    added[half] = 0.0f;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      s[0][n][2 * half] = ptx::ex2(s[0][n][2 * half] * state.scale - base);
      s[0][n][2 * half + 1] = ptx::ex2(s[0][n][2 * half + 1] * state.scale - base);
      added[half] += s[0][n][2 * half] + s[0][n][2 * half + 1];
    }
  }
}

/// Packs probabilities as A of wgmma.
template <class Element, int kBlocks>
__device__ __forceinline__ void pack_probabilities(const float (&s)[1][kBlocks][4], uint32_t (&p)[kBlocks / 2][4]) {
#pragma unroll
  for (int k = 0; k < kBlocks / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[k][i] = Element::pack(s[0][2 * k + i / 2][i % 2 * 2], s[0][2 * k + i / 2][i % 2 * 2 + 1]);
  }
}

}  // namespace attn::sm90
