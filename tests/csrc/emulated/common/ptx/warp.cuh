// As csrc/common/ptx/warp.cuh.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

constexpr uint32_t kAllLanes = 0xffffffffu;

inline uint32_t warp_max(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }
inline uint32_t warp_min(uint32_t x) { return __reduce_min_sync(kAllLanes, x); }

/// Of integers and floats.
template <class T>
T warp_add(T x) {
  for (int32_t step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

template <class T>
T warp_inclusive_sum(T x, int32_t lane) {
  for (int32_t step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, x, step);
    x += lane >= step ? before : 0;
  }
  return x;
}

/// The larger one; NaN if either is.
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }

}  // namespace attn::ptx
