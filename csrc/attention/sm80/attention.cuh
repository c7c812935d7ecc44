// The generic attention kernel: tensor cores through mma.sync, copies through cp.async; Ampere and later.
//
// One launch of num_ctas CTAs serves any batch: every CTA walks its interval of the schedule. A work item is a run of
// KV tiles of one (row tile, KV head) pair. The warps of a CTA are laid out as rows x KV tokens: 1 x 4 for row tiles of
// 16 rows, 2 x 2 for 32, 4 x 1 for 64 and for 128 (two blocks of 16 rows a warp). Warps that share rows keep states of
// their own, which merge in shared memory at the end of the item.
#pragma once

#include "attention/output.cuh"
#include "attention/params.h"
#include "attention/shared_tile.cuh"
#include "attention/sm80/kv_loader.cuh"
#include "attention/sm80/shape.h"
#include "attention/variants.h"
#include "attention/warp_state.cuh"
#include "attention/work_cursor.cuh"
#include "common/elements.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/math.cuh"

namespace attn {

/// The threads that compute together.
struct WholeBlock {
  static constexpr int kWarps = attn::kWarps;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
};

/// Gathers the rows of Q that a row tile packs; rows that do not exist become zeros.
template <int kHeadDim, int kRows, bool kManyLevels>
__device__ __forceinline__ void load_q(const AttentionParams& params, const RowTileRows<kManyLevels>& rows,
                                       int32_t kv_head, char* shared_q) {
  constexpr int kChunks = SharedTile<kHeadDim>::kRowChunks;
  constexpr int kRowsPerPass = kThreads / kChunks;
  constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
  const int chunk = threadIdx.x % kChunks;
  uint4 values[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const OutputRow row(params, rows, kv_head, threadIdx.x / kChunks + i * kRowsPerPass);
    values[i] = make_uint4(0, 0, 0, 0);
    if (row.exists) {
      const int64_t element = row.row * params.q_row_stride + row.qo_head * params.q_head_stride + chunk * 8;
      values[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(params.q) + element * kElementBytes));
    }
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = threadIdx.x / kChunks + i * kRowsPerPass;
    if (kRows % kRowsPerPass == 0 || row < kRows)
      *reinterpret_cast<uint4*>(shared_q + SharedTile<kHeadDim>::offset(row, chunk)) = values[i];
  }
}

/// The KV tiles that the loader has brought: the walk of the ring, shared by all work items of a CTA.
struct RingCursor {
  int32_t tile = 0;  // KV tile of the interval
  int32_t pair = 0;  // its pair of slots
};

/// The work item under the cursor: from there to the end of the pair or of the interval.
template <class Element, int kHeadDim, class Variant, bool kManyLevels, int kKind>
__device__ __forceinline__ void run_work_item(const AttentionParams& params, const VariantParams& first_variant,
                                              const WorkCursor& cursor,
                                              KvLoader<kHeadDim, Variant, kManyLevels>& loader, RingCursor& ring,
                                              char* shared) {
  using Layout = WarpLayout<kHeadDim, kKind>;
  using Tile = SharedTile<kHeadDim>;
  constexpr SharedLayout layout(kHeadDim);
  constexpr int kPairs = kv_slots(kHeadDim) / 2;
  constexpr int kPending = kv_slots(kHeadDim) - 2;
  const int lane = threadIdx.x % 32;
  const Layout warp(threadIdx.x / 32);
  const RowTile& row_tile = params.schedule.tiles[cursor.now.tile];
  // Read again where it is needed: it would occupy registers over the whole item.
  const auto variant_of_level = [&] {
    return kManyLevels ? variant_params(params, params.schedule.groups[row_tile.group].level) : first_variant;
  };

  WarpState<Element, kHeadDim, Layout::kRowBlocks> state;
  const bool transforms_logits = Variant::transforms_logits(first_variant);
  state.scale = transforms_logits ? kLog2E : params.sm_scale * kLog2E;

  TokenRange unmasked;  // tokens that every row of this warp sees: their KV tiles need no mask
  {
    const RowTileRows<kManyLevels> rows(params.schedule, cursor.now.tile, params.group_size.divisor);
    __syncthreads();  // the previous item's output has left the Q tile
    load_q<kHeadDim, tile_rows(kKind)>(params, rows, cursor.now.head, shared + layout.q);
    unmasked = variant_of_level().visibility.seen_by_all(
        rows.position(warp.first_row, params.group_size),
        rows.position(warp.first_row + Layout::kRows - 1, params.group_size), TokenRange{0, row_tile.kv_end});
  }

  const uint32_t q = ptx::shared_address(shared + layout.q) + warp.first_row * Tile::kRowBytes + Tile::rows_first(lane);
  const uint32_t kv = ptx::shared_address(shared + layout.kv) + warp.first_token * Tile::kRowBytes;
  int32_t token = row_tile.kv_begin + cursor.now.kv_tile * kv_tile(kHeadDim) +
                  warp.first_token;  // this warp's first one of the KV tile
  const int32_t num_kv_tiles = cursor.last_kv_tile(row_tile.num_kv_tiles) - cursor.now.kv_tile;

  for (int32_t left = num_kv_tiles; left > 0; --left) {
    const uint32_t k_slot = kv + 2 * ring.pair * layout.kv_slot_bytes;
    float s[Layout::kRowBlocks][Layout::kTokens / 8][4];

    ptx::cp_async_wait<kPending>();
    __syncthreads();  // K is here, and nobody reads the V slot before it any more
    loader.load_v(ring.tile + kPairs - 1, ring.pair == 0 ? kPairs - 1 : ring.pair - 1);
    state.template scores<Layout::kTokens, Tile, Tile>(s, q, k_slot + Tile::columns_first(lane));

    if (transforms_logits) transform_logits<Variant>(first_variant, s);
    if (token < unmasked.begin || token + Layout::kTokens > unmasked.end) {
      const RowTileRows<kManyLevels> rows(params.schedule, cursor.now.tile, params.group_size.divisor);
      mask_scores<Variant>(variant_of_level(), s, rows, params.group_size, warp.first_row, token, row_tile.kv_end);
    }
    uint32_t p[Layout::kRowBlocks][Layout::kTokens / 8][2];
    state.update(s, p);

    ptx::cp_async_wait<kPending>();
    __syncthreads();  // V is here, and nobody reads the K slot any more
    loader.load_k(ring.tile + kPairs, ring.pair);
    state.template accumulate<Layout::kTokens, Tile>(p, k_slot + layout.kv_slot_bytes + Tile::rows_first(lane));

    token += kv_tile(kHeadDim);
    ++ring.tile;
    ring.pair = ring.pair == kPairs - 1 ? 0 : ring.pair + 1;
  }

  const RowTileRows<kManyLevels> rows(params.schedule, cursor.now.tile, params.group_size.divisor);
  const bool ends_inside = cursor.last_kv_tile(row_tile.num_kv_tiles) < row_tile.num_kv_tiles;
  const OutputTarget<kManyLevels> target(params, rows, cursor.now.head, cursor.now.kv_tile > 0, ends_inside);
  if constexpr (Layout::kKvWarps == 1) {
    write_warp_rows<Tile>(state, target, warp.first_row, shared + layout.q);
  } else {
    write_merged_warps<WholeBlock, Layout, layout.kv - layout.q>(state, target, warp, 2, shared + layout.q,
                                                                 reinterpret_cast<float*>(shared + layout.row_states));
  }
}

template <class Element, int kHeadDim, class Variant, bool kManyLevels>
__device__ __forceinline__ void run_interval(const AttentionParams& params, WorkCursor cursor) {
  extern __shared__ __align__(1024) char shared[];
  const VariantParams first_variant = variant_params(params, 0);
  KvLoader<kHeadDim, Variant, kManyLevels> loader(params, first_variant, cursor, shared);
  loader.start();
  RingCursor ring;

  while (!cursor.done()) {
    switch (params.schedule.tiles[cursor.now.tile].kind) {
      case 0:
        run_work_item<Element, kHeadDim, Variant, kManyLevels, 0>(params, first_variant, cursor, loader, ring, shared);
        break;
      case 1:
        run_work_item<Element, kHeadDim, Variant, kManyLevels, 1>(params, first_variant, cursor, loader, ring, shared);
        break;
      case 2:
        run_work_item<Element, kHeadDim, Variant, kManyLevels, 2>(params, first_variant, cursor, loader, ring, shared);
        break;
      default:
        if constexpr (max_kind(kHeadDim) >= 3)
          run_work_item<Element, kHeadDim, Variant, kManyLevels, 3>(params, first_variant, cursor, loader, ring,
                                                                    shared);
    }
    cursor.next_pair(params.num_kv_heads);
  }
  ptx::cp_async_wait<0>();
}

template <class Element, int kHeadDim, class Variant>
__device__ __forceinline__ void attention(const AttentionParams& params) {
  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();  // its blocks come as CTAs of this one leave room
  const WorkCursor cursor(params.schedule, blockIdx.x);
  if (cursor.done()) return;
  if (__builtin_expect(cursor.now.flags & kIsPlain, 1)) {
    run_interval<Element, kHeadDim, Variant, false>(params, cursor);
  } else {
    run_interval<Element, kHeadDim, Variant, true>(params, cursor);
  }
}

}  // namespace attn
