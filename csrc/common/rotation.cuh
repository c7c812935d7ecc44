// The parts of rotation.h for rows that the lanes of a warp share. H is a product of levels, one for each bit of a
// column's number, in any order: a level takes sums and differences of the columns that differ in its bit.
#pragma once

#include "common/platform.h"
#include "common/ptx/warp.cuh"
#include "common/rotation.h"

namespace attn {

/// A level whose bit tells registers apart: those kStep apart are a pair.
template <int kStep, int kCount>
__device__ __forceinline__ void hadamard_of_registers(float (&x)[kCount]) {
  static_assert(kCount % (2 * kStep) == 0);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i & kStep) continue;
    const float a = x[i], b = x[i + kStep];
    x[i] = a + b;
    x[i + kStep] = a - b;
  }
}

/// A level whose bit tells lanes apart: those `step` apart are a pair. All lanes of a warp take part.
template <int kCount>
__device__ __forceinline__ void hadamard_of_lanes(float (&x)[kCount], int step) {
  const float sign = ptx::lane_id() & step ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = x[i] * sign + __shfl_xor_sync(ptx::kAllLanes, x[i], step);
}

}  // namespace attn
