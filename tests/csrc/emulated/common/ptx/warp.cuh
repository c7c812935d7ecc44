// As csrc/common/ptx/warp.cuh.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

constexpr uint32_t kAllLanes = 0xffffffffu;

inline uint32_t warp_max(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }
inline uint32_t warp_min(uint32_t x) { return __reduce_min_sync(kAllLanes, x); }

/// The larger one; NaN if either is.
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }

}  // namespace attn::ptx
