// row_ranges.h on a GPU: a CTA a row, and another one, and another one.
#pragma once

#include "attention/row_ranges.h"
#include "common/ptx/grid_dependency.cuh"

namespace attn {

template <class Variant>
__device__ __forceinline__ void find_row_ranges(const RowRangeParams& params) {
  __shared__ RangeSum of_warps[kRowRangeThreads / 32];
  const int32_t num_rows = rows_of_view(params.plan);
  for (int32_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const RangedRow row(params.plan, i);
    RangeSum sum = sum_tokens<Variant>(params, row, threadIdx.x, kRowRangeThreads);
    sum.begin = __reduce_min_sync(0xffffffffu, sum.begin);
    sum.end = __reduce_max_sync(0xffffffffu, sum.end);
    sum.full = __reduce_add_sync(0xffffffffu, sum.full);
    __syncthreads();  // the row before has been written
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) continue;
    for (int warp = 1; warp < kRowRangeThreads / 32; ++warp) {
      sum.begin = min_of(sum.begin, of_warps[warp].begin);
      sum.end = max_of(sum.end, of_warps[warp].end);
      sum.full += of_warps[warp].full;
    }
    params.row_ranges[i] = make_row_range<Variant>(params, row, sum);
  }
}

}  // namespace attn
