// row_ranges.h on a GPU: a CTA takes one row after another. If the variant skips KV tiles, the CTAs of a second row of
// the grid list them meanwhile.
#pragma once

#include "attention/variant/kv_tile_lists.cuh"
#include "attention/variant/row_ranges.h"

namespace attn {

/// The sum over all threads of the CTA, in each of them. `warp_sums`: free when all threads arrive here.
__device__ __forceinline__ RangeSum sum_of_cta(RangeSum sum, RangeSum* warp_sums) {
  sum.begin = __reduce_min_sync(0xffffffffu, sum.begin);
  sum.end = __reduce_max_sync(0xffffffffu, sum.end);
  sum.full = __reduce_add_sync(0xffffffffu, sum.full);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = warp_sums[0];
  for (int warp = 1; warp < kRowRangeThreads / 32; ++warp) {
    sum.begin = min_of(sum.begin, warp_sums[warp].begin);
    sum.end = max_of(sum.end, warp_sums[warp].end);
    sum.full += warp_sums[warp].full;
  }
  __syncthreads();
  return sum;
}

template <class Variant>
__device__ __forceinline__ void find_row_ranges(const RowRangeParams& params) {
  if constexpr (Variant::kSkipsTiles) {
    if (blockIdx.y == 1) return list_kv_tiles<Variant>(params);
  }
  __shared__ RangeSum warp_sums[kRowRangeThreads / 32];
  const int32_t num_rows = rows_of_level(params.plan.levels[params.level]);
  for (int32_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const RangedRow row(params.plan, params.level, i);
    const RangeSum sum = sum_of_cta(sum_tokens<Variant>(params, row, threadIdx.x, kRowRangeThreads), warp_sums);
    const Holes own = find_holes<Variant>(params, row, sum, threadIdx.x, kRowRangeThreads);
    const RangeSum holes = sum_of_cta(RangeSum{own.first, own.last, 0}, warp_sums);
    if (threadIdx.x == 0) params.row_ranges[i] = make_row_range(row, sum, Holes{holes.begin, holes.end});
  }
}

}  // namespace attn
