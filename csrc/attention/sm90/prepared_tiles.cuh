// Steps between a tile's arrival in shared memory and its product: rows that do not exist become zeros, and variants
// transform rows.
//
// Where a variant transforms K or V, a warpgroup starts the products of a KV tile. Then it rewrites the tiles that it
// multiplies next, while the tensor cores work. Without kTransformsEarly it rewrites them just before their
// products: the ring has no room, or the producer dequantizes. In the largest row tiles each of the first two
// warpgroups rewrites half of each KV tile.
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/rotation.cuh"
#include "attention/tile/row_tile.cuh"
#include "attention/tile/transform_tile.cuh"
#include "common/ptx/barrier.cuh"

namespace attn::sm90 {

/// Zeroes rows of a V tile that lie outside [first, last): the ring or the cache may hold NaN there, which must not
/// reach the output. `lane` of kLanes threads.
template <class Tile, int kLanes>
__device__ __forceinline__ void zero_rows(char* tile, int first_row, int end_row, int32_t first, int32_t last,
                                          int lane) {
  constexpr int kChunks = Tile::kRowChunks;
#pragma unroll kChunks <= 16 ? 4 : 2  // wide heads leave registers for only two rows at a time
  for (int i = lane; i < (end_row - first_row) * kChunks; i += kLanes) {
    const int row = first_row + i / kChunks;
    if (row < first || row >= last)
      *reinterpret_cast<uint4*>(tile + Tile::offset(row, i % kChunks)) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();  // before wgmma reads it, and TMA writes it again
}

/// Zeroes the rows of a V tile that must not be read, by a warpgroup.
template <class Tile, int kTokens>
__device__ __forceinline__ void clear_unreadable(char* tile, int32_t first_token, const TokenRange& readable) {
  if (first_token < readable.begin || first_token + kTokens > readable.end) {
    zero_rows<Tile, kWarpgroupThreads>(tile, 0, kTokens, readable.begin - first_token, readable.end - first_token,
                                       consumer_thread() % kWarpgroupThreads);
    sync_warpgroup();
  }
}

/// Converts, rotates and transforms rows [first_row, end_row) of the Q tile, by kLanes consumer threads: a warpgroup,
/// or both. After it these threads may read them.
template <class Traits, int kLanes>
__device__ __forceinline__ void rewrite_query(const AttentionParams& params, const WorkItem& item, char* tile,
                                              int first_row, int end_row) {
  static_assert(kLanes == kWarpgroupThreads || kLanes == kSharingThreads);
  using OfQuery = QueryTransform<typename Traits::Variant>;
  const auto sync = [] {
    if constexpr (kLanes == kWarpgroupThreads)
      sync_warpgroup();
    else
      Consumers::sync();
  };
  const int thread = consumer_thread() % kLanes;
  if constexpr (Traits::Variant::kRotates) {
    rotate_query_rows<QTile<Traits>, typename Traits::Element, typename Traits::QElement, Traits::Shape::kQk, kLanes>(
        tile, first_row, end_row, thread);
  } else if constexpr (Traits::kConvertsQuery) {
    convert_rows<QTile<Traits>, typename Traits::Element, typename Traits::QElement, kLanes>(tile, first_row, end_row,
                                                                                             thread);
    if constexpr (OfQuery::kExists) sync();
  }
  if constexpr (OfQuery::kExists) {
    transform_rows<OfQuery, QTile<Traits>, typename Traits::Element, Traits::Shape::kQk, kLanes, kWarpRows, 1, 2>(
        tile, first_row, end_row, thread, OfQuery(variant_of<Traits>(params, item.kv_head)),
        TileRows<RowTileRows<true>>{params, item.rows, item.group, item.kv_head});
  }
  ptx::fence_async_proxy();
  sync();
}

/// Transforms rows [first_row, end_row) of a tile of K or V, by thread number `thread` of kThreads. `first_token`: of
/// the tile. kMultiple, kRows and kWords: as transform_rows() takes them.
template <class Traits, class Transform, class Tile, int kThreads, int kMultiple, int kRows, int kWords>
__device__ __forceinline__ void transform_tokens(const AttentionParams& params, const WorkItem& item, char* tile,
                                                 int first_row, int end_row, int thread, int32_t first_token) {
  const TileTokens find{KvTokens(params.schedule.groups[item.group], item.kv_head), item.readable, first_token};
  transform_rows<Transform, Tile, typename Traits::Element, Tile::kHeadColumns, kThreads, kMultiple, kRows, kWords>(
      tile, first_row, end_row, thread, Transform(variant_of<Traits>(params, item.kv_head), find.tokens), find);
}

/// K and V tiles as the wgmma of row tiles of 32 rows and more reads them.
template <class Traits>
struct PreparedTiles {
  using Variant = typename Traits::Variant;
  using Shared = SharedMemory<Traits>;
  using Place = typename Shared::KvPlace;
  using Walk = KvWalk<Traits>;
  using Keys = WgmmaKTile<Traits>;
  using Values = WgmmaVTile<Traits>;
  using OfKey = KeyTransform<Variant>;
  using OfValue = ValueTransform<Variant>;
  static constexpr int kTokens = Traits::kTuning.kv_tile;

  const AttentionParams& params;
  KvRing<Traits>& ring;
  uint32_t transformed_parity = 0;

  /// Prepares the first product of an item: its Q tile, and its first K tile, at ring.kv.
  __device__ __forceinline__ void prepare_first(const WorkItem& item, char* q) {
    ring.wait_for_tile(ring.kv);
    if constexpr (Traits::kRewritesQuery) {
      const int first_row = warpgroup() * 64;
      rewrite_query<Traits, kWarpgroupThreads>(params, item, q, first_row, first_row + 64);
    }
    if constexpr (OfKey::kExists) {
      transform_in_ring<OfKey, Keys>(item, ring.kv, Walk::first(params, item).token);
      arrive_transformed(item);
      wait_transformed(item);
    }
  }

  /// Transforms the next tiles early: the product of Q and the K tile at ring.kv, which begins at `token`, has been
  /// started, and the tensor cores work meanwhile. `left`: KV tiles of the item after that one.
  __device__ __forceinline__ void prepare_early(const WorkItem& item, int32_t token, int32_t left) const {
    if constexpr (Traits::kTransformsEarly)
      transform(item, ring.kv.ahead(Shared::kTileParts), ring.kv.ahead(2 * Shared::kTileParts), token, left > 0, left);
  }

  /// Waits for and prepares the tiles that are multiplied together: the V tile from `token` on and, if `has_keys`, the
  /// K tile after it, at ring.kv. `left`: KV tiles of the item from there on.
  __device__ __forceinline__ void prepare(const WorkItem& item, const Place& values, int32_t token, bool has_keys,
                                          int32_t left, const TokenRange& readable) {
    if (has_keys)
      ring.wait_for_tiles(ring.kv, values);
    else
      ring.wait_for_tile(values);
    if constexpr (Traits::kTransformsCache) {
      if constexpr (!Traits::kTransformsEarly) transform(item, values, ring.kv, token, has_keys, left);
      wait_transformed(item);
    }
    clear_unreadable<Values, kTokens>(ring.shared.kv(values.index), token, readable);
  }

  /// Takes part in an item that only other warpgroups multiply: a KV tile is free when all have freed it, and
  /// transformed when all have arrived.
  __device__ __forceinline__ void skip(const WorkItem& item) {
    if constexpr (OfKey::kExists) skip_transform(item);
    const bool in_pairs = Traits::kTakesPacked && item.kind == 0;
    for (int tile = 0; tile < 2 * (in_pairs ? ceil_div(item.num_kv_tiles, 2) : item.num_kv_tiles); ++tile) {
      if (Traits::kTransformsCache && tile % 2 == 0) skip_transform(item);
      ring.wait_for_tile(ring.kv);
      ring.free_tile(ring.kv);
      ring.next_tile();
    }
  }

 private:
  __device__ __forceinline__ void skip_transform(const WorkItem& item) {
    if (item.kind < kTwoWarpgroupKind) return;
    arrive_transformed(item);
    wait_transformed(item);
  }

  /// Transforms this warpgroup's share of the V tile from `token` on and, if `has_keys`, of the K tile after it.
  __device__ __forceinline__ void transform(const WorkItem& item, const Place& values, const Place& keys, int32_t token,
                                            bool has_keys, int32_t left) const {
    transform_in_ring<OfValue, Values>(item, values, token);
    if (has_keys) transform_in_ring<OfKey, Keys>(item, keys, Walk::next(params, item, token, left).token);
    arrive_transformed(item);
  }

  template <class Transform, class Tile>
  __device__ __forceinline__ void transform_in_ring(const WorkItem& item, const Place& place, int32_t token) const {
    if constexpr (Transform::kExists) {
      ring.wait_for_tile(place);
      transform_share<Transform, Tile>(item, ring.shared.kv(place.index), token, item.kind >= kTwoWarpgroupKind);
      ptx::fence_async_proxy();
    }
  }

  /// Transforms this warpgroup's half of a tile, or all of it. `token`: of its first row. A third warpgroup has no
  /// part.
  template <class Transform, class Tile>
  __device__ __forceinline__ void transform_share(const WorkItem& item, char* tile, int32_t token, bool is_half) const {
    if constexpr (Transform::kExists) {
      if (is_half && !is_sharing<Traits>()) return;
      const int first_row = is_half ? warpgroup() * (kTokens / 2) : 0;
      transform_tokens<Traits, Transform, Tile, kWarpgroupThreads, kTokens / 2, 2, 2>(
          params, item, tile, first_row, first_row + (is_half ? kTokens / 2 : kTokens),
          consumer_thread() % kWarpgroupThreads, token);
    }
  }

  /// Says that this warp's part of the shares is done.
  __device__ __forceinline__ void arrive_transformed(const WorkItem& item) const {
    if (item.kind >= kTwoWarpgroupKind) ring.shared.arrive_transformed();
  }

  /// Waits for the shares of all that multiply the item.
  __device__ __forceinline__ void wait_transformed(const WorkItem& item) {
    if (item.kind < kTwoWarpgroupKind) return sync_warpgroup();
    ring.shared.wait_transformed(transformed_parity);
    transformed_parity ^= 1;
  }
};

}  // namespace attn::sm90
