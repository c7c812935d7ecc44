// Variants: the functors that are compiled into the attention kernels. One source for nvcc, NVRTC and g++.
//
// A mask functor says which (query position, KV position) pairs are visible, and narrows token ranges so that kernels skip what nobody sees and leave out the
// mask where everybody sees everything. A logits functor transforms a scaled logit before the softmax. Positions are absolute: query row i of a request with
// qo_len rows and kv_len tokens stands at kv_len - qo_len + i (below 0 for a query that is longer than its KV).
#pragma once

#include "attn/math.h"
#include "attn/params.h"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace attn {

/// Tokens [begin, end).
struct TokenRange {
  int32_t begin;
  int32_t end;
};

/// A query sees the tokens up to its own position. (`|` and `&` here and below: evaluated for every score of a masked KV tile, so without branches.)
struct CausalMask {
  ATTN_HD static bool visible(const VariantParams& p, int32_t qo_pos, int32_t kv_pos) { return (p.causal == 0) | (kv_pos <= qo_pos); }

  /// Narrows `range` to the tokens that any query in [first, last] sees.
  ATTN_HD static TokenRange any(const VariantParams& p, int32_t, int32_t last, TokenRange range) {
    if (p.causal) range.end = min_of(range.end, last + 1);
    return range;
  }

  /// Narrows `range` to the tokens that every query in [first, last] sees.
  ATTN_HD static TokenRange all(const VariantParams& p, int32_t first, int32_t, TokenRange range) {
    if (p.causal) range.end = min_of(range.end, first + 1);
    return range;
  }
};

/// A query sees the tokens at most window_left before its own position. (A window may be as long as an int32 holds: no difference here wraps around.)
struct SlidingWindow {
  ATTN_HD static bool visible(const VariantParams& p, int32_t qo_pos, int32_t kv_pos) { return (p.window_left < 0) | (qo_pos - kv_pos <= p.window_left); }

  ATTN_HD static TokenRange any(const VariantParams& p, int32_t first, int32_t, TokenRange range) {
    if (p.window_left >= 0) range.begin = max_of(range.begin, max_of(first, 0) - p.window_left);
    return range;
  }

  ATTN_HD static TokenRange all(const VariantParams& p, int32_t, int32_t last, TokenRange range) {
    if (p.window_left >= 0) range.begin = max_of(range.begin, max_of(last, 0) - p.window_left);
    return range;
  }
};

/// cap * tanh(logit / cap): Gemma 2, Grok.
struct SoftCap {
  ATTN_HD static bool active(const VariantParams& p) { return p.logits_soft_cap > 0.0f; }

  ATTN_HD static float logits(const VariantParams& p, float logit) {
#if defined(__CUDA_ARCH__)
    // tanh(x) = 1 - 2 / (exp(2x) + 1), to about 1e-6, in seven instructions: each is there once for every score that a thread holds.
    // (PTX as in device/ptx/math.cuh, which is not for headers that g++ reads, too.)
    const float exponent = logit * __fdividef(2.0f * kLog2E, p.logits_soft_cap);
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(power + 1.0f));
    return p.logits_soft_cap - p.logits_soft_cap * (2.0f * inverse);
#else
    return p.logits_soft_cap * tanh_rational(logit / p.logits_soft_cap);
#endif
  }
};

/// A variant from one logits functor and any number of mask functors.
template <class Logits, class... Masks>
struct Variant {
  static constexpr bool kUseSoftmax = true;

  ATTN_HD static bool visible(const VariantParams& p, int32_t qo_pos, int32_t kv_pos) { return (Masks::visible(p, qo_pos, kv_pos) & ...); }

  ATTN_HD static TokenRange any(const VariantParams& p, int32_t first, int32_t last, TokenRange range) {
    ((range = Masks::any(p, first, last, range)), ...);
    return range;
  }

  ATTN_HD static TokenRange all(const VariantParams& p, int32_t first, int32_t last, TokenRange range) {
    ((range = Masks::all(p, first, last, range)), ...);
    return range;
  }

  /// Whether logits() changes anything; uniform over a launch.
  ATTN_HD static bool transforms_logits(const VariantParams& p) { return Logits::active(p); }

  /// `logit` is q . k * sm_scale.
  ATTN_HD static float logits(const VariantParams& p, float logit) { return Logits::logits(p, logit); }
};

/// The variant of the standard kernels: every parameter is a runtime value.
using StandardVariant = Variant<SoftCap, CausalMask, SlidingWindow>;

}  // namespace attn
