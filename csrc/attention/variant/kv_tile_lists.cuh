// kv_tile_lists.h on a GPU: a CTA takes one row tile after another, each of its warps a KV tile.
#pragma once

#include "attention/variant/kv_tile_lists.h"

namespace attn {

/// Asks the mask about all rows of a row tile and a KV tile. A warp asks together; all of its lanes get the answer.
template <class Variant>
__device__ __forceinline__ SeenOrHidden ask_rows(const RowRangeParams& params, const TileOfLevel& of_level,
                                                 int32_t kv_tile) {
  const TokenRange tokens = of_level.tokens(params.plan, kv_tile);
  SeenOrHidden answer{false, false};
  for (int32_t row = of_level.first_row; row < of_level.end_row && !answer.both(); ++row) {
    const SeenOrHidden of_lane =
        ask_row<Variant>(params, of_level, row, tokens, static_cast<int32_t>(threadIdx.x % 32), 32);
    answer.some_seen |= __any_sync(0xffffffffu, of_lane.some_seen) != 0;
    answer.some_hidden |= __any_sync(0xffffffffu, of_lane.some_hidden) != 0;
  }
  return answer;
}

template <class Variant>
__device__ __forceinline__ void list_kv_tiles(const RowRangeParams& params) {
  constexpr int kWarps = kRowRangeThreads / 32;
  __shared__ int32_t seen_by_warps[kWarps];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t number = blockIdx.x; number < params.num_kv_tile_lists; number += gridDim.x) {
    const TileOfLevel of_level(params.plan, params.level, number);
    if (!of_level.exists()) continue;
    KvTileList& list = params.kv_tile_lists[number];
    int32_t count = 0;
    for (int32_t first = 0; first < of_level.tile.num_kv_tiles; first += kWarps) {
      const int32_t kv_tile = first + warp;
      SeenOrHidden answer{false, false};
      if (kv_tile < of_level.tile.num_kv_tiles) answer = ask_rows<Variant>(params, of_level, kv_tile);
      if (lane == 0) seen_by_warps[warp] = answer.some_seen;
      __syncthreads();
      const uint32_t seen = __ballot_sync(0xffffffffu, lane < kWarps && seen_by_warps[lane % kWarps] != 0);
      __syncthreads();  // before it is written again
      const int32_t place = count + __popc(seen & ((1u << warp) - 1));
      if (lane == 0 && answer.some_seen && place < kMostListedKvTiles)
        list.kv_tiles[place] = listed(params.plan, of_level, kv_tile, answer);
      count += __popc(seen);
    }
    if (threadIdx.x == 0) list.count = listed_count(count);
  }
}

}  // namespace attn
