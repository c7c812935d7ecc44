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
  using Rows = LaneRows<Variant, 1>;

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

  /// Turns products into masked logits; without `makes_logits` it only masks them. `s`: a warp's scores of kBlocks * 8
  /// tokens from `first_token` on. `rows`: the lane's.
  template <int kBlocks>
  __device__ __forceinline__ void finish(const WorkItem& item, float (&s)[1][kBlocks][4], int first_row,
                                         int32_t first_token, const Constants& constants, const Rows& rows,
                                         bool makes_logits = true) const {
    scale_scores(variant_of<Traits>(params, item.kv_head), s, Shared::requests(item), first_row);
    if constexpr (Variant::kIsStandard) {
      const float factor =
          kSoftCap == SoftCap::kFast ? constants.cap_factor : cap_factor(item);  // else registers are few
      if (factor != 0.0f) cap(s, factor);
    } else if (makes_logits && transforms_logits(variant_of<Traits>(params, 0))) {
      transform_logits(variant_of<Traits>(params, item.kv_head), sm_scale(item), s, first_token, rows);
    }
    if (first_token < constants.unmasked.begin || first_token + kBlocks * 8 > constants.unmasked.end)
      mask_scores(item.visibility, s, item.rows, params.group_size, first_row, first_token, item.readable.end);
    apply_variant_mask(variant_of<Traits>(params, item.kv_head), s, first_token, rows);
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

  template <int kBlocks>
  __device__ __forceinline__ static void cap(float (&s)[1][kBlocks][4], float factor) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float x = s[0][n][c] * factor;
        s[0][n][c] = kSoftCap == SoftCap::kFast ? ptx::tanh(x) : quick_tanh(x);
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
