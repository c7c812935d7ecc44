// How a consumer warp writes its rows of a row tile for wgmma: by TMA where it can, through the rows of the Q tile that
// the warp has multiplied.
#pragma once

#include "attention/feed/params.h"
#include "attention/feed/shared_memory.cuh"
#include "attention/feed/work_item.cuh"
#include "attention/sm90/shape.h"
#include "attention/sm90/traits.cuh"
#include "attention/tile/output.cuh"
#include "attention/tile/rotation.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// Whether TMA may store the warp's rows: all of them exist, are complete and consecutive, and no lse is wanted.
template <class Target>
__device__ __forceinline__ bool is_box(const TmaParams& params, const Target& target, int first_row) {
  return params.has_row_maps && params.attention.lse == nullptr && target.complete && target.rows.list == nullptr &&
         first_row + kWarpRows <= target.rows.count;
}

/// Stores the warp's rows by TMA, from its rows of `staged`, a tile of layout Tile.
template <class Tile, class State, class Target>
__device__ __forceinline__ void store_rows(const TmaParams& params, const State& state, const Target& target,
                                           int first_row, char* staged) {
  const FastDivisor& group_size = params.attention.group_size;
  const int lane = ptx::lane_id();
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    inverse[half] = end_of_row(state, target, 0, half, first_row + half * 8 + lane / 4).factor;
  stage_rows<Tile>(state, target, 0, inverse, first_row, staged);
  ptx::fence_async_proxy();
  __syncwarp();
  if (lane != 0) return;
  const int32_t row = target.rows.qo_begin + group_size.divide(target.rows.packed_begin + first_row);
  const uint32_t from = ptx::shared_address(staged) + first_row * Tile::kRowBytes;
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) {
    ptx::store_box(params.o, from + block * Tile::kBlockBytes, block * Tile::kBoxColumns,
                   target.kv_head * group_size.divisor, row, 0);
  }
  ptx::bulk_commit();
  ptx::bulk_wait_read();  // then the tile may be filled again
}

/// Where the rows of an item go.
template <class Traits>
using ItemTarget = OutputTarget<typename Traits::OutElement, true, typename Traits::Variant>;

/// Writes the rows of a warp that has seen all tokens of the item, through its rows of the Q tile.
template <class Traits, class State>
__device__ __forceinline__ void write_rows(const TmaParams& params, const WorkItem& item, State& state, int first_row,
                                           char* q) {
  const ItemTarget<Traits> target(params.attention, item, SharedMemory<Traits>::requests(item));
  if constexpr (Traits::Variant::kRotates) rotate_back<Traits::Shape::kV, false>(state);
  if (!is_box(params, target, first_row))  // the frequent way second: ptxas spilled otherwise
    write_warp_rows<OTile<Traits>>(state, target, first_row, q);
  else
    store_rows<OTile<Traits>>(params, state, target, first_row, q);
}

}  // namespace attn::sm90
