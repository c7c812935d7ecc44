// kv_tile_lists.h on a GPU: a CTA takes one row tile after another, each of its warps a KV tile.
#pragma once

#include "attention/variant/kv_tile_lists.h"

namespace attn {

/// Asks the mask about all rows of a row tile and a KV tile. A warp asks together; all of its lanes get the answer.
template <class Variant>
__device__ __forceinline__ SeenOrHidden ask_rows(const RowRangeParams& params, const TileOfLevel& level_tile,
                                                 int32_t kv_tile) {
  const TokenRange tokens = level_tile.tokens(params.plan, kv_tile);
  SeenOrHidden answer{false, false};
  for (int32_t row = level_tile.first_row; row < level_tile.end_row && !answer.both(); ++row) {
    const SeenOrHidden lane_answer =
        ask_row<Variant>(params, level_tile, row, tokens, static_cast<int32_t>(threadIdx.x % 32), 32);
    answer.some_seen |= __any_sync(0xffffffffu, lane_answer.some_seen) != 0;
    answer.some_hidden |= __any_sync(0xffffffffu, lane_answer.some_hidden) != 0;
  }
  return answer;
}

template <class Variant>
__device__ __forceinline__ void list_kv_tiles(const RowRangeParams& params) {
  constexpr int kWarps = kRowRangeThreads / 32;
  __shared__ int32_t seen_by_warps[kWarps];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t number = blockIdx.x; number < params.num_kv_tile_lists; number += gridDim.x) {
    const TileOfLevel level_tile(params.plan, params.level, number);
    if (!level_tile.exists()) continue;
    KvTileList& list = params.kv_tile_lists[number];
    int32_t count = 0;
    for (int32_t first = 0; first < level_tile.tile.num_kv_tiles; first += kWarps) {
      const int32_t kv_tile = first + warp;
      SeenOrHidden answer{false, false};
      if (kv_tile < level_tile.tile.num_kv_tiles) answer = ask_rows<Variant>(params, level_tile, kv_tile);
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
