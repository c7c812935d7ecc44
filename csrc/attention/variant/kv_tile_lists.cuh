// kv_tile_lists.h on a GPU: a CTA takes one row tile after another, each of its warps a KV tile.
#pragma once

#include "attention/variant/kv_tile_lists.h"

namespace attn {

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

}  // namespace attn
