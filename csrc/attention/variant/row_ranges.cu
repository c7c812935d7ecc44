// row_ranges.h on a GPU: a CTA takes one row after another. If the variant skips KV tiles, the CTAs of a second row of
// the grid list them meanwhile. The source that includes this file defines attn::KernelVariant.

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

/// A CTA takes one row tile after another, each of its warps a KV tile.
template <class Variant>
__device__ __forceinline__ void list_kv_tiles(const RowRangeParams& params) {
  constexpr int kWarps = kRowRangeThreads / 32;
  __shared__ int32_t seen_by_warps[kWarps];
  const auto any = [](bool lane_answer) { return __any_sync(0xffffffffu, lane_answer) != 0; };
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t number = blockIdx.x; number < params.num_kv_tile_lists; number += gridDim.x) {
    const TileOfLevel level_tile(params.plan, params.level, number);
    if (!level_tile.exists()) continue;
    KvTileList& list = params.kv_tile_lists[number];
    int32_t count = 0;
    for (int32_t first = 0; first < level_tile.tile.num_kv_tiles; first += kWarps) {
      const int32_t kv_tile = first + warp;
      SeenOrHidden answer{false, false};
      if (kv_tile < level_tile.tile.num_kv_tiles)
        answer = ask_rows<Variant>(params, level_tile, kv_tile, lane, 32, any);
      if (lane == 0) seen_by_warps[warp] = answer.some_seen;
      __syncthreads();
      const uint32_t seen = __ballot_sync(0xffffffffu, lane < kWarps && seen_by_warps[lane % kWarps] != 0);
      __syncthreads();  // before it is written again
      const int32_t place = count + __popc(seen & ((1u << warp) - 1));
      if (lane == 0 && answer.some_seen && place < kMaxListedKvTiles)
        list.kv_tiles[place] = listed(params.plan, level_tile, kv_tile, answer);
      count += __popc(seen);
    }
    if (threadIdx.x == 0) list.count = listed_count(count);
  }
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
    const TokenRange own = find_holes<Variant>(params, row, sum, threadIdx.x, kRowRangeThreads);
    const RangeSum holes = sum_of_cta(RangeSum{own.begin, own.end, 0}, warp_sums);
    if (threadIdx.x == 0) params.row_ranges[i] = make_row_range(row, sum, TokenRange{holes.begin, holes.end});
  }
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kRowRangeThreads)
    row_ranges_kernel(const __grid_constant__ attn::RowRangeParams params) {
  attn::find_row_ranges<attn::KernelVariant>(params);
}
