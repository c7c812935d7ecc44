// row_ranges.h on a GPU: a CTA takes one row after another. If the variant skips KV tiles, the CTAs of a second row of
// the grid list them meanwhile.
#pragma once

#include "attention/variant/kv_tile_lists.cuh"
#include "attention/variant/row_ranges.h"

namespace attn {

/// The sum over all threads of the CTA, in each of them. `of_warps`: free when all threads arrive here.
__device__ __forceinline__ RangeSum sum_of_cta(RangeSum sum, RangeSum* of_warps) {
  sum.begin = __reduce_min_sync(0xffffffffu, sum.begin);
  sum.end = __reduce_max_sync(0xffffffffu, sum.end);
  sum.full = __reduce_add_sync(0xffffffffu, sum.full);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = of_warps[0];
  for (int warp = 1; warp < kRowRangeThreads / 32; ++warp) {
    sum.begin = min_of(sum.begin, of_warps[warp].begin);
    sum.end = max_of(sum.end, of_warps[warp].end);
    sum.full += of_warps[warp].full;
  }
  __syncthreads();
  return sum;
}

template <class Variant>
__device__ __forceinline__ void find_row_ranges(const RowRangeParams& params) {
  if constexpr (Variant::kSkipsTiles) {
    if (blockIdx.y == 1) return list_kv_tiles<Variant>(params);
  }
  __shared__ RangeSum of_warps[kRowRangeThreads / 32];
  const int32_t num_rows = rows_of_level(params.plan.levels[params.level]);
  for (int32_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const RangedRow row(params.plan, params.level, i);
    const RangeSum sum = sum_of_cta(sum_tokens<Variant>(params, row, threadIdx.x, kRowRangeThreads), of_warps);
    const Holes own = find_holes<Variant>(params, row, sum, threadIdx.x, kRowRangeThreads);
    const RangeSum holes = sum_of_cta(RangeSum{own.first, own.last, 0}, of_warps);
    if (threadIdx.x == 0) params.row_ranges[i] = make_row_range(row, sum, Holes{holes.begin, holes.end});
  }
}

}  // namespace attn
