// kv_tile_lists.h on a GPU: a CTA a row tile, and then another; a warp a KV tile.
#pragma once

#include "attention/kv_tile_lists.h"

namespace attn {

/// By a warp, for all of its lanes.
template <class Variant>
__device__ __forceinline__ bool any_row_sees(const RowRangeParams& params, const TileOfView& of_view, int32_t kv_tile) {
  const TokenRange tokens = of_view.tokens(params.plan, kv_tile);
  for (int32_t row = of_view.first_row; row < of_view.end_row; ++row) {
    const bool seen = row_sees_any<Variant>(params, of_view, row, tokens, static_cast<int32_t>(threadIdx.x % 32), 32);
    if (__any_sync(0xffffffffu, seen)) return true;
  }
  return false;
}

template <class Variant>
__device__ __forceinline__ void list_kv_tiles(const RowRangeParams& params) {
  constexpr int kWarps = kRowRangeThreads / 32;
  __shared__ int32_t seen_by_warps[kWarps];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t number = blockIdx.x; number < params.num_kv_tile_lists; number += gridDim.x) {
    const TileOfView of_view(params.plan, number);
    if (!of_view.exists()) continue;
    KvTileList& list = params.kv_tile_lists[number];
    int32_t count = 0;
    for (int32_t first = 0; first < of_view.tile.num_kv_tiles; first += kWarps) {
      const int32_t kv_tile = first + warp;
      const bool is_seen = kv_tile < of_view.tile.num_kv_tiles && any_row_sees<Variant>(params, of_view, kv_tile);
      if (lane == 0) seen_by_warps[warp] = is_seen;
      __syncthreads();
      const uint32_t seen = __ballot_sync(0xffffffffu, lane < kWarps && seen_by_warps[lane % kWarps] != 0);
      __syncthreads();  // before it is written again
      const int32_t place = count + __popc(seen & ((1u << warp) - 1));
      if (lane == 0 && is_seen && place < kMostListedKvTiles)
        list.tokens[place] = listed_token(params.plan, of_view, kv_tile);
      count += __popc(seen);
    }
    if (threadIdx.x == 0) list.count = listed_count(count);
  }
}

}  // namespace attn
