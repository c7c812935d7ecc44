// Variants: what is compiled into the attention kernels to change scores between Q K^T and the softmax.
//
// A variant is a struct (tests/csrc/slanted_variant.h is one) with
// - Params: plain data, at most VariantParams::kBytes, the same for a whole launch;
// - a constructor from (Params, KV head): one is made for each (row tile, KV head);
// - transforms_logits(): whether logits() changes anything; uniform over a launch;
// - logits(logit, row, kv_position): the transformed logit; q . k * sm_scale goes in, natural units in and out;
// - kHasMask, and if it is true sees(row, kv_position): whether a score counts.
//
// A row sees an interval of tokens by its level's Visibility, which plans know: kernels skip KV tiles outside it and
// mask only those at its ends. sees() is asked for every score inside it, and only if kHasMask.
#pragma once

#include <cstring>

#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// The coordinates of a row of scores; made once for each row of a KV tile.
struct ScoreRow {
  int32_t row;  // of Q
  int32_t qo_head;
  int32_t position;  // of the query among the tokens of its row group: the request's own in a plain schedule, not in a
                     // node of the forest, a chunk or a level of a composition
};

/// A variant's Params, whichever it is.
struct VariantParams {
  static constexpr int kBytes = 64;
  alignas(16) unsigned char bytes[kBytes];

  template <class Params>
  ATTN_HD const Params& as() const {
    static_assert(sizeof(Params) <= kBytes && alignof(Params) <= 16, "larger data belongs behind a pointer");
    return *reinterpret_cast<const Params*>(bytes);
  }

  template <class Params>
  void set(const Params& params) {
    static_assert(sizeof(Params) <= kBytes && alignof(Params) <= 16, "larger data belongs behind a pointer");
    std::memcpy(bytes, &params, sizeof(Params));
  }
};

/// cap * tanh(logit / cap): Gemma 2, Grok.
ATTN_HD float soft_cap(float logit, float cap) {
#if defined(__CUDA_ARCH__)
  // tanh(x) = 1 - 2 / (exp(2x) + 1), to about 1e-6, in seven instructions: each is emitted once for every score that a
  // thread holds. (PTX as in common/ptx/math.cuh, which is not for headers that g++ reads, too.)
  const float exponent = logit * __fdividef(2.0f * kLog2E, cap);
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(power + 1.0f));
  return cap - cap * (2.0f * inverse);
#else
  return cap * tanh_rational(logit / cap);
#endif
}

/// What all models of the standard kernels need: a soft cap, which may be off.
struct StandardVariant {
  struct Params {
    float logits_soft_cap;  // 0: off
  };
  static constexpr bool kHasMask = false;

  float cap;

  ATTN_HD StandardVariant(const Params& params, int32_t /*kv_head*/) : cap(params.logits_soft_cap) {}
  ATTN_HD bool transforms_logits() const { return cap > 0.0f; }
  ATTN_HD float logits(float logit, const ScoreRow&, int32_t /*kv_position*/) const { return soft_cap(logit, cap); }
};

}  // namespace attn
