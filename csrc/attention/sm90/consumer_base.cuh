// What consumer warpgroups need for all kinds of row tiles: the state of the ring, scores, transforms, widened tiles.
//
// Where a variant transforms K or V, the warpgroup that has started the products of a KV tile then rewrites in shared
// memory what it multiplies next, while the tensor cores work (where the ring has no room for that: just before it
// multiplies it, kTransformsEarly). Both warpgroups of the largest row tiles rewrite half of each tile, and wait for
// the other's half when they need it.
//
// K and V of an 8-bit cache are dequantized into separate tiles before wgmma reads them. Both warpgroups always
// dequantize half of the next tile, also in items that they do not multiply. They wait for each other before, until no
// warp reads the previous tile, and afterwards. Where a variant transforms K or V it does so there, half by half. For
// mma.sync they are widened in registers, or, for such a variant, in that memory, too.
#pragma once

#include "attention/sm90/feed/shared_memory.cuh"
#include "attention/sm90/feed/work_item.cuh"
#include "attention/sm90/params.h"
#include "attention/sm90/shape.h"
#include "attention/sm90/tiles.cuh"
#include "attention/sm90/widened_tile.cuh"
#include "attention/tile/output.cuh"
#include "attention/tile/row_tile.cuh"
#include "attention/tile/scores.cuh"
#include "attention/tile/transform_tile.cuh"
#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/wgmma.cuh"

namespace attn::sm90 {

__device__ __forceinline__ int consumer_thread() { return ptx::thread_id() - kProducerThreads; }
__device__ __forceinline__ int consumer_warp() { return consumer_thread() / 32; }
__device__ __forceinline__ int warpgroup() { return consumer_warp() / 4; }

/// The threads that compute a row tile of 16 rows together.
struct Consumers {
  static constexpr int kWarps = kConsumerWarps;

  __device__ __forceinline__ static int thread() { return consumer_thread(); }
  __device__ __forceinline__ static void sync() { ptx::barrier_sync<kConsumersBarrier, kConsumerThreads>(); }
  __device__ __forceinline__ static void fence_outputs() { ptx::fence_async_proxy(); }
};

__device__ __forceinline__ void sync_warpgroup() {
  ptx::barrier_sync(kWarpgroupBarrier + warpgroup(), kWarpgroupThreads);
}

/// Waits for the threads of this warpgroup, or of both.
template <int kLanes>
__device__ __forceinline__ void sync_consumers() {
  static_assert(kLanes == kWarpgroupThreads || kLanes == kConsumerThreads);
  if constexpr (kLanes == kWarpgroupThreads)
    sync_warpgroup();
  else
    Consumers::sync();
}

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

/// Tokens that all of the tile's rows [first_row, first_row + num_rows) see: their scores need no mask.
__device__ __forceinline__ TokenRange unmasked_tokens(const AttentionParams& params, const WorkItem& item,
                                                      int first_row, int num_rows) {
  return item.visibility.seen_by_all(item.rows.position(first_row, params.group_size),
                                     item.rows.position(first_row + num_rows - 1, params.group_size), item.readable);
}

template <class Traits>
struct ConsumerBase {
  using Element = typename Traits::Element;
  using Variant = typename Traits::Variant;
  using Shared = SharedMemory<Traits>;
  using Query = QTile<Traits>;
  using Keys = WideKTile<Traits>;  // as wgmma takes them
  using Values = WideVTile<Traits>;
  using StoredKeys = KTile<Traits>;  // in the ring
  using StoredValues = VTile<Traits>;
  using Output = OTile<Traits>;
  static constexpr bool kWidens = Traits::kWidens;
  static constexpr bool kSkips = Variant::kSkipsTiles;
  static constexpr int kTokens = kTuning<Traits>.kv_tile;
  // Columns that products take: the head's, and perhaps some more.
  static constexpr int kQkColumns = Traits::Shape::kQkMultiplied;
  static constexpr int kVColumns =  // that this warpgroup makes
      is_wide(Traits::Shape::kDims) ? Traits::Shape::kV / 2 : columns_of_products(Traits::Shape::kVMultiplied);
  /// Whether the variant's bias is added where scores become probabilities, and KV tiles are taken from the last to the
  /// first.
  static constexpr bool kAddsBias = kTakesLastFirst<Traits>;
  static constexpr int kStep = kAddsBias ? -kTokens : kTokens;  // from KV tile to KV tile
  /// Whether rows keep their maxima (consumer.cuh). Not where a variant's logits may grow from KV tile to KV tile: rows
  /// would outgrow their maxima all the time (a prefill of 4 x 4096 with ALiBi's took 6.8 times as long).
  static constexpr bool kKeepsMaxima =
      kTuning<Traits>.keeps_maxima && (kAddsBias || !(VariantHooks<Variant>::kLogits && Variant::kReadsRows));
  /// The state of one warp, which has 16 rows.
  using State = WarpState<Element, kVColumns, 1>;
  using Rows = LaneRows<Variant, 1>;
  using Target = OutputTarget<typename Traits::OutElement, true, Variant>;
  using OfQuery = QueryTransform<Variant>;
  /// Q is rewritten in shared memory before it is multiplied.
  static constexpr bool kRewritesQuery = Traits::kConvertsQuery || OfQuery::kExists;
  using OfKey = KeyTransform<Variant>;
  using OfValue = ValueTransform<Variant>;
  /// Whether tiles are transformed in the ring. Widened tiles are transformed where they then lie.
  static constexpr bool kTransformsRing = Traits::kTransformsCache && !kWidens;

  const HopperParams& hopper_params;
  const AttentionParams& params;
  const Shared shared;
  typename Shared::KvPlace kv;  // next part of the ring
  uint32_t transformed_parity = 0;

  __device__ __forceinline__ ConsumerBase(const HopperParams& hopper_params_, const Shared& shared_)
      : hopper_params(hopper_params_), params(hopper_params_.attention), shared(shared_) {}

  __device__ __forceinline__ Variant variant(int32_t kv_head) const {
    return Variant(params.variant.as<typename Variant::Params>(), kv_head);
  }

  __device__ __forceinline__ float scale(const WorkItem& item) const {
    return transforms_logits(variant(0)) ? kLog2E : sm_scale(item) * kLog2E;
  }

  /// params.sm_scale, and K's scale.
  __device__ __forceinline__ float sm_scale(const WorkItem& item) const {
    if constexpr (Variant::kHasScales) return shared.score_scale(item);
    return params.sm_scale;
  }

  // --- where KV tiles begin

  /// The first KV tile of an item.
  __device__ __forceinline__ KvTileStart first_start(const WorkItem& item) const {
    if constexpr (kSkips || kAddsBias)
      return kv_tile_start<kSkips>(params.schedule, item.group, item.kv_begin, kAddsBias ? item.num_kv_tiles - 1 : 0,
                                   kTokens);
    else
      return KvTileStart{item.kv_begin, false};
  }

  /// The next KV tile. `token`: the current one's first; `left`: the item's KV tiles after the current one. Not to be
  /// used if there are none.
  __device__ __forceinline__ KvTileStart next_start(const WorkItem& item, int32_t token, int32_t left) const {
    if constexpr (kSkips)
      return kv_tile_start<true>(params.schedule, item.group, item.kv_begin,
                                 kAddsBias ? max_of(left, 1) - 1 : item.num_kv_tiles - max_of(left, 1), kTokens);
    else
      return KvTileStart{token + kStep, false};
  }

  /// The first token of that KV tile.
  __device__ __forceinline__ int32_t token_after(const WorkItem& item, int32_t token, int32_t left) const {
    return next_start(item, token, left).token;
  }

  /// Goes on to a KV tile: its first token.
  __device__ __forceinline__ static int32_t enter(const KvTileStart& kv_tile, Rows& rows) {
    if constexpr (kSkips) rows.template enter<kTokens>(kv_tile);
    return kv_tile.token;
  }

  /// Turns products into masked logits; without kMakesLogits it only masks them. `s`: a warp's scores of kBlocks * 8
  /// tokens from `first_token` on. `rows`: the lane's.
  template <bool kMakesLogits = true, int kBlocks>
  __device__ __forceinline__ void finish_scores(const WorkItem& item, float (&s)[1][kBlocks][4], int first_row,
                                                int32_t first_token, const TokenRange& unmasked,
                                                const Rows& rows) const {
    scale_scores(variant(item.kv_head), s, shared.requests(item), first_row);
    if (kMakesLogits && transforms_logits(variant(0))) {
      transform_logits(variant(item.kv_head), sm_scale(item), s, first_token, rows);
    }
    if (first_token < unmasked.begin || first_token + kBlocks * 8 > unmasked.end) {
      mask_scores(item.visibility, s, item.rows, params.group_size, first_row, first_token, item.readable.end);
    }
    apply_variant_mask(variant(item.kv_head), s, first_token, rows);
  }

  // --- 8-bit caches

  /// The K and V tiles that wgmma reads.
  __device__ __forceinline__ char* wide_keys(int slot) const { return kWidens ? shared.widened(0) : shared.kv(slot); }
  __device__ __forceinline__ char* wide_values(int slot) const { return kWidens ? shared.widened(1) : shared.kv(slot); }

  /// Widens and transforms the tiles that are multiplied together: the V tile from `token` on, and the K tile after it.
  /// `has_values`, `has_keys`: whether there is one. `left`: KV tiles of the item after the V tile. Both warpgroups
  /// call it with the same arguments, when they have no products under way. Frees the parts of the ring.
  __device__ __forceinline__ void widen_tiles(const WorkItem& item, const typename Shared::KvPlace& values,
                                              const typename Shared::KvPlace& keys, int32_t token, bool has_values,
                                              bool has_keys, int32_t left) const {
    if constexpr (kWidens) {
      if (has_values) wait_for_tile(values);
      if (has_keys) wait_for_tile(keys);
      Consumers::sync();
      const TokenRange readable{item.readable.begin - token, item.readable.end - token};
      const int first_row = warpgroup() * (kTokens / 2);  // of this warpgroup's half
      if (has_values)
        widen_rows<StoredValues, Values, Traits>(shared.kv(values.slot), shared.widened(1), first_row, readable);
      if (has_keys)
        widen_rows<StoredKeys, Keys, Traits>(shared.kv(keys.slot), shared.widened(0), first_row,
                                             TokenRange{0, kTokens});
      if constexpr (Traits::kStages) {
        sync_warpgroup();
        if (has_values)
          transform_widened<OfValue, Values, Traits::Shape::kV>(item, shared.widened(1), first_row, token);
        if (has_keys)
          transform_widened<OfKey, Keys, Traits::Shape::kQk>(
              item, shared.widened(0), first_row,
              has_values ? token_after(item, token, left) : first_start(item).token);
      }
      ptx::fence_async_proxy();
      if (has_values) free_tile(values);
      if (has_keys) free_tile(keys);
      Consumers::sync();
    }
  }

  /// Transforms this warpgroup's half of a widened tile, whose first token is `token`.
  template <class Transform, class Tile, int kColumns>
  __device__ __forceinline__ void transform_widened(const WorkItem& item, char* tile, int first_row,
                                                    int32_t token) const {
    if constexpr (Transform::kExists) {
      constexpr int kRowsAtOnce = leaves_registers(kVColumns) ? 2 : 1;
      const TileTokens find = tokens_of(item, token);
      transform_rows<Transform, Tile, Element, kColumns, kWarpgroupThreads, kTokens / 2, kRowsAtOnce, 2>(
          tile, first_row, first_row + kTokens / 2, consumer_thread() % kWarpgroupThreads,
          Transform(variant(item.kv_head), find.tokens), find);
    }
  }

  // --- transforms of variants

  __device__ __forceinline__ TileTokens tokens_of(const WorkItem& item, int32_t first_token) const {
    return TileTokens{KvTokens(params.schedule.groups[item.group], item.kv_head), item.readable, first_token};
  }

  /// Converts and transforms rows [first_row, end_row) of the Q tile, by kLanes consumer threads: this warpgroup, or
  /// both. After it these may read them.
  template <int kLanes>
  __device__ __forceinline__ void rewrite_query(const WorkItem& item, int slot, int first_row, int end_row) const {
    const int thread = consumer_thread() % kLanes;
    if constexpr (Traits::kConvertsQuery) {
      convert_rows<Query, Element, typename Traits::QElement, kLanes>(shared.q(slot), first_row, end_row, thread);
      if constexpr (OfQuery::kExists) sync_consumers<kLanes>();
    }
    if constexpr (OfQuery::kExists) {
      transform_rows<OfQuery, Query, Element, Traits::Shape::kQk, kLanes, kWarpRows, 1, 2>(
          shared.q(slot), first_row, end_row, thread, OfQuery(variant(item.kv_head)),
          TileRows<RowTileRows<true>>{params, item.rows, item.group, item.kv_head});
    }
    ptx::fence_async_proxy();
    sync_consumers<kLanes>();
  }

  /// Transforms this warpgroup's share of a KV tile of an item.
  template <class Transform, class Tile, int kColumns>
  __device__ __forceinline__ void transform_share(const WorkItem& item, const typename Shared::KvPlace& place,
                                                  int32_t first_token) const {
    if constexpr (Transform::kExists && kTransformsRing) {
      const bool is_half = item.kind == kMaxKind;
      const int first_row = is_half ? warpgroup() * (kTokens / 2) : 0;
      const TileTokens find = tokens_of(item, first_token);
      wait_for_tile(place);
      transform_rows<Transform, Tile, Element, kColumns, kWarpgroupThreads, kTokens / 2, 2, 2>(
          shared.kv(place.slot), first_row, first_row + (is_half ? kTokens / 2 : kTokens),
          consumer_thread() % kWarpgroupThreads, Transform(variant(item.kv_head), find.tokens), find);
      ptx::fence_async_proxy();
    }
  }

  /// Says that this warp's part of the shares is done.
  __device__ __forceinline__ void arrive_transformed(const WorkItem& item) const {
    if constexpr (kTransformsRing) {
      if (item.kind == kMaxKind) shared.arrive_transformed();
    }
  }

  /// Waits for the shares of all that multiply the item.
  __device__ __forceinline__ void wait_transformed(const WorkItem& item) {
    if constexpr (kTransformsRing) {
      if (item.kind != kMaxKind) return sync_warpgroup();
      shared.wait_transformed(transformed_parity);
      transformed_parity ^= 1;
    }
  }

  /// Transforms what the first product of an item takes: its Q tile, and its first K tile, at `kv`.
  __device__ __forceinline__ void transform_first(const WorkItem& item, int q_slot) {
    if constexpr (kRewritesQuery) {
      const int first_row = warpgroup() * 64;
      rewrite_query<kWarpgroupThreads>(item, q_slot, first_row, first_row + 64);
    }
    if constexpr (OfKey::kExists && kTransformsRing) {
      transform_share<OfKey, Keys, Traits::Shape::kQk>(item, kv, first_start(item).token);
      arrive_transformed(item);
      wait_transformed(item);
    }
    widen_tiles(item, kv, kv, item.kv_begin, false, true, 0);
  }

  /// Transforms this warpgroup's share of what is multiplied together: the V tile from `token` on, and the K tile
  /// after it, if `has_keys`; `left`: KV tiles of the item from there on.
  __device__ __forceinline__ void transform_tiles(const WorkItem& item, const typename Shared::KvPlace& values,
                                                  const typename Shared::KvPlace& keys, int32_t token, bool has_keys,
                                                  int32_t left) const {
    transform_share<OfValue, Values, Traits::Shape::kV>(item, values, token);
    if (has_keys) transform_share<OfKey, Keys, Traits::Shape::kQk>(item, keys, token_after(item, token, left));
    arrive_transformed(item);
  }

  /// Transforms the next tiles early: the product of Q and the K tile at `kv`, which begins at `token`, has been
  /// started, and the tensor cores work meanwhile.
  __device__ __forceinline__ void transform_early(const WorkItem& item, int32_t token, bool has_keys,
                                                  int32_t left) const {
    if constexpr (kTransformsEarly<Traits>)
      transform_tiles(item, kv.ahead(Shared::kParts), kv.ahead(2 * Shared::kParts), token, has_keys, left);
  }

  /// Transforms tiles just before they are multiplied, or waits for those that were transformed early.
  __device__ __forceinline__ void transform_late(const WorkItem& item, const typename Shared::KvPlace& values,
                                                 int32_t token, bool has_keys, int32_t left) {
    if constexpr (kTransformsRing && !kTransformsEarly<Traits>)
      transform_tiles(item, values, kv, token, has_keys, left);
    widen_tiles(item, values, kv, token, true, has_keys, left);
    wait_transformed(item);
  }

  // --- the ring

  // These act on all parts of the tile at `place`.
  __device__ __forceinline__ bool is_tile_full(typename Shared::KvPlace place) const {
    bool full = true;
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part, ++place.slot) full = full & shared.is_kv_full(place);
    return full;
  }
  __device__ __forceinline__ void wait_for_tile(typename Shared::KvPlace place) const {
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part, ++place.slot) shared.wait_kv_full(place);
  }
  __device__ __forceinline__ void free_tile(typename Shared::KvPlace place) const {
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part, ++place.slot) shared.free_kv(place, 1);
  }
  /// Frees a tile after its products. (A tile that is widened was freed by widen_tiles().)
  __device__ __forceinline__ void multiplied(const typename Shared::KvPlace& place) const {
    if constexpr (!kWidens) free_tile(place);
  }
  __device__ __forceinline__ void next_tile() { kv = kv.ahead(Shared::kParts); }

  /// Waits for K and V. Usually they have arrived: testing all barriers at once is then faster than waiting for one
  /// after another.
  __device__ __forceinline__ void wait_for_tiles(typename Shared::KvPlace keys, typename Shared::KvPlace values) const {
    if (kWidens || (is_tile_full(keys) & is_tile_full(values))) return;  // widen_tiles() waits itself
    wait_for_tile(values);
    wait_for_tile(keys);
  }

  /// Zeroes the rows of a V tile that must not be read.
  __device__ __forceinline__ void clear_unreadable(const typename Shared::KvPlace& place, int32_t first_token,
                                                   const TokenRange& readable) const {
    if constexpr (kWidens) return;  // widen_tiles() does it
    if (first_token < readable.begin || first_token + kTokens > readable.end) {
      zero_rows<Values, kWarpgroupThreads>(shared.kv(place.slot), 0, kTokens, readable.begin - first_token,
                                           readable.end - first_token, consumer_thread() % kWarpgroupThreads);
      sync_warpgroup();
    }
  }
};

}  // namespace attn::sm90
