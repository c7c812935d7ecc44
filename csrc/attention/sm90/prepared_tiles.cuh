// Steps between a tile's arrival in shared memory and its product: rows that do not exist become zeros, variants
// transform rows, and tiles of 8-bit caches are dequantized.
//
// Where a variant transforms K or V, a warpgroup starts the products of a KV tile. Then it rewrites the tiles that it
// multiplies next, while the tensor cores work. Where the ring has no room for that, it rewrites them just before their
// products (kTransformsEarly). In the largest row tiles each warpgroup rewrites half of each KV tile.
//
// wgmma reads dequantized tiles from two places next to the ring. Each warpgroup always dequantizes half of a tile,
// also in items that it does not multiply. The warpgroups wait for each other twice: until no warp reads the previous
// tile, and until the next one is complete. Transforms then rewrite the dequantized rows.
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/row_tile.cuh"
#include "attention/tile/transform_tile.cuh"
#include "common/elements.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"

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

/// Dequantizes kRows rows of a tile, those from `first_row` on, by the four warps of a warpgroup. Rows outside of
/// `readable` become zeros: the ring or the cache may hold NaN there, which must not reach the output.
template <class Stored, class Wide, int kRows>
__device__ __forceinline__ void dequantize_rows(const char* from, char* to, int first_row, const TokenRange& readable) {
  constexpr int kChunks = 4;      // of 16 elements: a block of the wide tile
  constexpr int kRowsOfWarp = 8;  // that a warp takes at a time
  const int lane = ptx::lane_id();
  // Eight lanes take a pair of rows, chosen so that neither their loads nor their stores fall into the same banks.
  const int row_of_warp = ptx::thread_id() / 32 % 4 * kRowsOfWarp + (lane / 8 ^ lane / 4 % 2 * 5);
  const int chunk = lane % kChunks;
#pragma unroll 1  // unrolled, it takes registers that the output needs
  for (int i = 0; i < kRows; i += 4 * kRowsOfWarp) {
    const int row = first_row + i + row_of_warp;
    const bool is_readable = row >= readable.begin && row < readable.end;
#pragma unroll Wide::kBlocks <= 2 ? 2 : 1
    for (int block = 0; block < Wide::kBlocks; ++block) {
      uint4 bytes = *reinterpret_cast<const uint4*>(from + Stored::offset(row, block * kChunks + chunk));
      if (!is_readable) bytes = make_uint4(0, 0, 0, 0);
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
      uint32_t wide[4][2];
#pragma unroll
      for (int w = 0; w < 4; ++w) dequantize<typename Wide::Element, typename Stored::Element>(words[w], wide[w]);
      const uint32_t target = Wide::offset(row, (block * kChunks + chunk) * 2);
      *reinterpret_cast<uint4*>(to + target) = make_uint4(wide[0][0], wide[0][1], wide[1][0], wide[1][1]);
      *reinterpret_cast<uint4*>(to + (target ^ 16)) = make_uint4(wide[2][0], wide[2][1], wide[3][0], wide[3][1]);
    }
  }
}

/// Converts and transforms rows [first_row, end_row) of the Q tile, by kLanes consumer threads: a warpgroup, or both.
/// After it these threads may read them.
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
  if constexpr (Traits::kConvertsQuery) {
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
  static constexpr bool kDequantizes = Traits::kDequantizes;
  static constexpr bool kTransformsRing = Traits::kTransformsCache && !kDequantizes;

  const AttentionParams& params;
  KvRing<Traits>& ring;
  uint32_t transformed_parity = 0;

  __device__ __forceinline__ char* keys(int part) const {
    return kDequantizes ? ring.shared.dequantized(0) : ring.shared.kv(part);
  }
  __device__ __forceinline__ char* values(int part) const {
    return kDequantizes ? ring.shared.dequantized(1) : ring.shared.kv(part);
  }

  /// Prepares the first product of an item: its Q tile, and its first K tile, at ring.kv.
  __device__ __forceinline__ void prepare_first(const WorkItem& item, char* q) {
    if constexpr (!kDequantizes) ring.wait_for_tile(ring.kv);
    if constexpr (Traits::kRewritesQuery) {
      const int first_row = warpgroup() * 64;
      rewrite_query<Traits, kWarpgroupThreads>(params, item, q, first_row, first_row + 64);
    }
    if constexpr (OfKey::kExists && kTransformsRing) {
      transform_in_ring<OfKey, Keys>(item, ring.kv, Walk::first(params, item).token);
      arrive_transformed(item);
      wait_transformed(item);
    }
    dequantize(item, ring.kv, ring.kv, item.kv_begin, false, true, 0);
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
    if constexpr (kDequantizes) return dequantize(item, values, ring.kv, token, true, has_keys, left);
    if (has_keys)
      ring.wait_for_tiles(ring.kv, values);
    else
      ring.wait_for_tile(values);
    if constexpr (kTransformsRing) {
      if constexpr (!Traits::kTransformsEarly) transform(item, values, ring.kv, token, has_keys, left);
      wait_transformed(item);
    }
    clear_unreadable<Values, kTokens>(ring.shared.kv(values.index), token, readable);
  }

  /// Takes part in an item that only other warpgroups multiply: a KV tile is free when all have freed it, and
  /// transformed when all have arrived.
  __device__ __forceinline__ void skip(const WorkItem& item) {
    if constexpr (kDequantizes) {
      dequantize(item, ring.kv, ring.kv, item.kv_begin, false, true, 0);
      for (int left = item.num_kv_tiles, token = Walk::first(params, item).token; left > 0;
           --left, token = Walk::next(params, item, token, left).token) {
        ring.next_tile();
        const Place values = ring.kv;
        ring.next_tile();
        dequantize(item, values, ring.kv, token, true, left > 1, left - 1);
      }
    } else {
      if (kTransformsRing && OfKey::kExists) skip_transform(item);
      for (int tile = 0; tile < 2 * item.num_kv_tiles; ++tile) {
        if (kTransformsRing && tile % 2 == 0) skip_transform(item);
        ring.wait_for_tile(ring.kv);
        ring.free_tile(ring.kv);
        ring.next_tile();
      }
    }
  }

  /// Frees a tile after its products. dequantize() has freed tiles of 8-bit caches.
  __device__ __forceinline__ void free(const Place& place) const {
    if constexpr (!kDequantizes) ring.free_tile(place);
  }

  /// Dequantizes and transforms the V tile from `token` on, if `has_values`, and the K tile after it, if `has_keys`.
  /// `left`: KV tiles of the item after the V tile. Both warpgroups call it with the same arguments, when they have no
  /// products under way. Frees the tiles in the ring.
  __device__ __forceinline__ void dequantize(const WorkItem& item, const Place& values, const Place& keys,
                                             int32_t token, bool has_values, bool has_keys, int32_t left) const {
    if constexpr (kDequantizes) {
      const Shared& shared = ring.shared;
      if (has_values) ring.wait_for_tile(values);
      if (has_keys) ring.wait_for_tile(keys);
      Consumers::sync();
      const TokenRange readable{item.readable.begin - token, item.readable.end - token};
      const int first_row = warpgroup() * (kTokens / 2);  // of this warpgroup's half
      if (has_values)
        dequantize_rows<VTile<Traits>, Values, kTokens / 2>(shared.kv(values.index), shared.dequantized(1), first_row,
                                                            readable);
      if (has_keys)
        dequantize_rows<KTile<Traits>, Keys, kTokens / 2>(shared.kv(keys.index), shared.dequantized(0), first_row,
                                                          TokenRange{0, kTokens});
      if constexpr (Traits::kDequantizesInTiles) {
        sync_warpgroup();
        if (has_values) transform_share<OfValue, Values>(item, shared.dequantized(1), token, true);
        if (has_keys) {
          const KvTileStart start = has_values ? Walk::next(params, item, token, left) : Walk::first(params, item);
          transform_share<OfKey, Keys>(item, shared.dequantized(0), start.token, true);
        }
      }
      ptx::fence_async_proxy();
      if (has_values) ring.free_tile(values);
      if (has_keys) ring.free_tile(keys);
      Consumers::sync();
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
      constexpr int kRowsAtOnce = kDequantizes && !leaves_registers(Traits::kVColumns) ? 1 : 2;
      const int first_row = is_half ? warpgroup() * (kTokens / 2) : 0;
      transform_tokens<Traits, Transform, Tile, kWarpgroupThreads, kTokens / 2, kRowsAtOnce, 2>(
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
