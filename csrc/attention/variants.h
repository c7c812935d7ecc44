// Variants: the functors that are compiled into the attention kernels. One source for nvcc, NVRTC and g++.
//
// A logits functor transforms a scaled logit before the softmax.
#pragma once

#include "common/math.h"
#include "common/platform.h"
#include "planner/visibility.h"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace attn {

/// The runtime values of the built-in variants.
struct VariantParams {
  float sm_scale;
  float logits_soft_cap;  // 0: off
  Visibility visibility;
};

/// cap * tanh(logit / cap): Gemma 2, Grok.
struct SoftCap {
  ATTN_HD static bool active(const VariantParams& p) { return p.logits_soft_cap > 0.0f; }

  ATTN_HD static float logits(const VariantParams& p, float logit) {
#if defined(__CUDA_ARCH__)
    // tanh(x) = 1 - 2 / (exp(2x) + 1), to about 1e-6, in seven instructions: each is there once for every score that a
    // thread holds. (PTX as in common/ptx/math.cuh, which is not for headers that g++ reads, too.)
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

/// The variant of the standard kernels: every parameter is a runtime value.
struct StandardVariant {
  /// Whether logits() changes anything; uniform over a launch.
  ATTN_HD static bool transforms_logits(const VariantParams& p) { return SoftCap::active(p); }

  /// `logit` is q . k * sm_scale.
  ATTN_HD static float logits(const VariantParams& p, float logit) { return SoftCap::logits(p, logit); }
};

}  // namespace attn
