// The producer warpgroup loads Q, K and V of a CTA's work items into shared memory, as far ahead of the consumers as
// there is room. Only the producer reads the schedule. It describes work items to the consumers (work_item.cuh).
//
// Each of its four warps loads half of the tokens of every KV tile, of K or of V (kv_copiers.cuh), and may dequantize
// them (dequantizer.cuh). With wide heads over an 8-bit cache all four dequantize tokens on the way
// (dequantizing_copier.cuh). The warps that load V also load Q (query_loader.cuh).
//
// Members of a design's Traits that the feed reads (sm90/traits.cuh has them):
// - sizes and arguments: Shape, kTuning, Params, Variant
// - types of K and V: StoredElement, KvElement, Element
// - types of Q: QElement, QueryElement, kDequantizesQuery, kMultipliesFloat8
// - where K and V are dequantized: kDequantizesInFeed, kDequantizesOnLoad, kFeedsAll, kKvForm, kTakesPacked,
//   kLoadsScaled
// - others: kIsLatent, kMayBeCluster, kTakesLastFirst
// Row tiles of kind 0 are for mma.sync (`for_mma`): two consumer warpgroups share KV tiles or take them in turn.
#pragma once

#include "attention/feed/dequantizer.cuh"
#include "attention/feed/dequantizing_copier.cuh"
#include "attention/feed/kv_copiers.cuh"
#include "attention/feed/params.h"
#include "attention/feed/query_loader.cuh"
#include "attention/feed/shared_memory.cuh"
#include "attention/feed/tiles.cuh"
#include "attention/feed/tuning.h"
#include "attention/feed/work_item.cuh"
#include "attention/feed/work_queue.cuh"
#include "attention/tile/scores.cuh"
#include "attention/tile/work_cursor.cuh"
#include "attention/traits.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/warp.cuh"

namespace attn::feed {

/// Publishes a work item and loads its Q. Called by the warps that load V: the warps that load K must never wait for
/// room for Q, because consumers need K first.
template <class Traits>
__device__ __forceinline__ void produce_item(const typename Traits::Params& tma_params,
                                             const SharedMemory<Traits>& shared, const WorkItem& item,
                                             typename SharedMemory<Traits>::QPlace& place) {
  shared.wait_q_free(place);
  const uint32_t full = shared.q_full(place.index);
  if (item.num_kv_tiles > 0) load_q<Traits>(tma_params, item, shared.q(place.index), full);
  if constexpr (Traits::kDequantizesQuery) {
    ptx::fence_async_proxy();  // before wgmma reads it
    ptx::mbarrier_arrive(full);
  } else {
    ptx::mbarrier_arrive_after_cp_async(full);
  }
  if constexpr (Traits::Variant::kHasScales) {
    if (item.num_kv_tiles > 0 && ptx::thread_id() < kFirstQueryThread + 32) {
      int32_t* const requests = const_cast<int32_t*>(shared.requests(shared.item(place.index)));
      write_requests<typename Traits::Variant, Traits::kTuning.item_rows(), 32>(
          tma_params.attention, item.rows, item.group, item.kv_head, ptx::lane_id(), requests);
    }
    __syncwarp();  // the thread that publishes the item publishes them, too
  }
  if (ptx::thread_id() == kFirstQueryThread) {
    if constexpr (Traits::Variant::kHasScales) {
      using Variant = typename Traits::Variant;
      const AttentionParams& params = tma_params.attention;
      const_cast<float&>(shared.score_scale(shared.item(place.index))) =
          score_scale(Variant(params.variant.template as<typename Variant::Params>(), item.kv_head), params.sm_scale);
    }
    shared.item(place.index) = item;
    ptx::mbarrier_arrive(full);
  }
  place.next();
}

/// Waits until a part of a KV tile may be filled; if `limited`, until no more than max_parts_in_flight would be in use.
template <class Traits>
__device__ __forceinline__ void wait_for_part(const SharedMemory<Traits>& shared,
                                              const typename SharedMemory<Traits>::KvPlace& place, bool limited) {
  constexpr int kOthers = SharedMemory<Traits>::kKvParts - Traits::kTuning.max_parts_in_flight;
  if (kOthers > 0 && limited) shared.wait_kv_free(place.ahead(kOthers));
  shared.wait_kv_free(place);
}

template <class Traits, class Copier>
__device__ __forceinline__ void produce(const typename Traits::Params& tma_params, const SharedMemory<Traits>& shared,
                                        WorkCursor cursor) {
  using Shared = SharedMemory<Traits>;
  constexpr bool kIsWide = is_wide(Traits::Shape::kDims);
  static_assert(kIsWide || Shared::kParts > 1 || Traits::kTuning.max_parts_in_flight + 2 <= Shared::kKvParts,
                "what tiles_after_mma relies on");
  const AttentionParams& params = tma_params.attention;
  const KvShare<Traits> share(ptx::thread_id() / 32);
  typename Shared::QPlace q_place;
  typename Shared::KvPlace place = typename Shared::KvPlace{}.ahead(share.part);
  const int32_t flags = cursor.now.flags;
  // The pairs of a row tile are consecutive. RowCopier lacks the registers to keep the tile and reloads it. So do
  // kernels that dequantize wider heads, and kernels that decode from packed tiles.
  constexpr bool kHasFewRegisters =
      !leaves_registers(Traits::Shape::kDims.widest()) || (Traits::kTakesPacked && Traits::Shape::kDims.widest() > 64);
  constexpr bool kReloads = Copier::kGathers || (Traits::kDequantizesInFeed && kHasFewRegisters);
  WorkQueue<Traits> queue(params, shared);
  if (flags & kUsesQueue) queue.begin(cursor);
  const auto load_tile = [&] {
    LoadedRowTile tile(params, cursor.now.tile);
    if constexpr (Traits::kDequantizesInFeed) tile.find_dequantized(tma_params);
    return tile;
  };
  LoadedRowTile tile = load_tile();
  Copier copier(tma_params, share);
  InPlaceDequantizer<Traits, Copier> dequantizer(shared, share, Copier::arrivals(tma_params),
                                                 scale_factor<Traits>(params, share.is_v));

  // K and V are one tile, which the warps that load K load.
  const bool is_one_tile = kIsWide && tma_params.v_is_k;
  const bool copies = !(is_one_tile && share.is_v);
  constexpr bool kSkips = Traits::Variant::kSkipsTiles;
  int32_t item_begin = cursor.now.kv_tile;  // the item's first KV tile
  const auto first_token = [&](int ahead) {
    const int32_t kv_tile = cursor.now.kv_tile + ahead;
    return kv_tile_start<kSkips>(
               params.schedule, tile.group, tile.kv_begin,
               Traits::kTakesLastFirst ? item_begin + cursor.end_kv_tile(tile.num_kv_tiles) - 1 - kv_tile : kv_tile,
               Traits::kTuning.kv_tile)
        .token;
  };
  const auto tiles_left = [&] { return cursor.end_kv_tile(tile.num_kv_tiles) - cursor.now.kv_tile; };
  const auto look_up = [&] { copier.look_up(tile, first_token, tiles_left()); };
  look_up();
  ptx::wait_for_previous_grid();  // so far only the schedule and page tables have been read
  int32_t tiles_after_mma = 0;    // KV tiles after an item for mma.sync that are still limited (wait_for_part())
  while (!cursor.done()) {
    if (share.is_v) {
      const int32_t kv_begin = kv_begin_after<kSkips>(tile.kv_begin, cursor.now.kv_tile, params.kv_tile);
      WorkItem item(tile, cursor, kv_begin);
      if constexpr (Traits::kIsLatent) item.keep_half(static_cast<int32_t>(blockIdx.y), Traits::kTuning.max_kind);
      produce_item<Traits>(tma_params, shared, item, q_place);
    }
    const int32_t head = cursor.now.head;
    const bool for_mma = !kIsWide && tile.kind == 0;
    // Tokens of small row tiles are read once: they must not evict those that several of the largest share. The
    // shuffle tells the compiler that the policy is uniform.
    const ptx::CachePolicy policy =
        __shfl_sync(0xffffffffu, tile.kind < Traits::kTuning.max_kind && (flags & kHasLargestTiles), 0)
            ? ptx::kEvictFirst
            : ptx::kKeepNormally;
    const int32_t end = cursor.end_kv_tile(tile.num_kv_tiles);
    if constexpr (Traits::kDequantizesOnLoad) {
      copier.dequantize(shared, tile, head, tiles_left(), first_token, place);
      cursor.now.kv_tile = end;
    } else {
      bool is_filled = !copies;
      if constexpr (Traits::kDequantizesInFeed) {
        if (Traits::kFeedsAll || !for_mma) {
          const int count = end - cursor.now.kv_tile, num_limited = for_mma ? count : tiles_after_mma;
          if (tile.is_dequantized()) {
            // Never for_mma, because the plan places only row groups of many rows: num_limited is tiles_after_mma.
            const auto row_of = [&](int i) { return tile.dequantized_row(first_token(i)); };
            dequantizer.load(tma_params, head, count, tiles_after_mma, row_of, place);
          } else {
            dequantizer.fill(copier, tile, head, count, num_limited, first_token, place);
          }
          if (Shared::kParts == 1) tiles_after_mma = for_mma ? Shared::kKvParts / 2 + 1 : tiles_after_mma - count;
          is_filled = true;
        }
      }
      if (is_filled) cursor.now.kv_tile = end;
      while (!is_filled) {
        const auto found = copier.found(tile, first_token, tiles_left(), Traits::kTakesPacked);
        cursor.now.kv_tile += Traits::kTakesPacked ? 2 : 1;
        const bool last = cursor.now.kv_tile >= end;
        // Tiles that stay packed are always limited. A test at run time would spill registers.
        if (!kIsWide) wait_for_part<Traits>(shared, place, Traits::kTakesPacked || for_mma || tiles_after_mma > 0);
        // Where stages are not divided, one warpgroup frees an item's last tile for both, and the other only waits on
        // its barrier. The other one must observe the phase before the stage is refilled, or it would wait for a later
        // phase of the same parity. While few parts are in flight, refilling the stage requires freed parts of the next
        // item. No consumer reaches that item before all have synchronized at the end of this one.
        if (Shared::kParts == 1) tiles_after_mma = for_mma ? Shared::kKvParts / 2 + 1 : tiles_after_mma - 1;
        constexpr int kBlocks = KvShare<Traits>::kMaxBlocks, kLeftBlocks = KvShare<Traits>::kLeftBlocks;
        if constexpr (kIsWide) {
          const typename Shared::KvPlace right = place.ahead(1);  // freed first, and multiplied first
          shared.wait_kv_free(right);
          copier.template copy<kLeftBlocks, kBlocks>(shared, found, head, right.index, policy);
          shared.wait_kv_free(place);
          copier.template copy<0, kLeftBlocks>(shared, found, head, place.index, policy);
        } else {
          copier.template copy<0, kBlocks>(shared, found, head, place.index, policy);
        }
        place = place.ahead(is_one_tile ? Shared::kParts : 2 * Shared::kParts);
        if (last) break;
        copier.look_up_next(tile, first_token, tiles_left());
      }
    }
    cursor.next_pair(params.num_kv_heads);
    if (flags & kUsesQueue) queue.next(cursor);
    if (cursor.done()) break;
    if (kReloads || cursor.now.head == 0 || (flags & kUsesQueue)) tile = load_tile();
    item_begin = cursor.now.kv_tile;
    look_up();
  }
  if (share.is_v) produce_item<Traits>(tma_params, shared, WorkItem{}, q_place);
  if constexpr (Traits::kMayBeCluster) copier.wait_for_other(shared, place);
  ptx::cp_async_wait<0>();
}

}  // namespace attn::feed
