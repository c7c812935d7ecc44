// The consumers' threads, their place in the ring of K and V tiles, and their way through the KV tiles of an item.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "attention/feed/work_item.cuh"
#include "attention/sm90/traits.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/warp.cuh"
#include "planner/schedule.h"

namespace attn::sm90 {

__device__ __forceinline__ int consumer_thread() { return ptx::thread_id() - kProducerThreads; }
__device__ __forceinline__ int consumer_warp() { return consumer_thread() / 32; }
__device__ __forceinline__ int warpgroup() { return consumer_warp() / 4; }

/// The first two warpgroups, which compute row tiles of 16 rows together.
struct Consumers {
  static constexpr int kWarps = kSharingWarps;

  __device__ __forceinline__ static int thread() { return consumer_thread(); }
  __device__ __forceinline__ static void sync() { ptx::barrier_sync<kConsumersBarrier, kSharingThreads>(); }
  __device__ __forceinline__ static void fence_outputs() { ptx::fence_async_proxy(); }
};

/// Whether this warpgroup is one of them.
template <class Traits>
__device__ __forceinline__ bool is_sharing() {
  return !Traits::kTuning.has_third_consumer || warpgroup() < 2;
}

__device__ __forceinline__ void sync_warpgroup() {
  ptx::barrier_sync(kWarpgroupBarrier + warpgroup(), kWarpgroupThreads);
}

/// A consumer's place in the ring of K and V tiles, as wgmma takes them. Each function acts on all parts of a tile.
template <class Traits>
struct KvRing {
  using Shared = SharedMemory<Traits>;
  using Place = typename Shared::KvPlace;

  const Shared shared;
  Place kv{};  // of the tile that is read next

  __device__ __forceinline__ bool is_tile_full(Place place) const {
    bool full = true;
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part, ++place.index) full = full & shared.is_kv_full(place);
    return full;
  }
  __device__ __forceinline__ void wait_for_tile(Place place) const {
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part, ++place.index) shared.wait_kv_full(place);
  }
  /// Usually both have arrived: testing all barriers at once is then faster than waiting for one after another.
  __device__ __forceinline__ void wait_for_tiles(Place keys, Place values) const {
    if (is_tile_full(keys) & is_tile_full(values)) return;
    wait_for_tile(values);
    wait_for_tile(keys);
  }
  __device__ __forceinline__ void free_tile(Place place) const {
#pragma unroll
    for (int part = 0; part < Shared::kTileParts; ++part, ++place.index) shared.free_kv(place, 1);
  }
  __device__ __forceinline__ void next_tile() { kv = kv.ahead(Shared::kTileParts); }
};

/// Goes through the KV tiles of an item. A variant may skip tiles; under a bias the last tile comes first.
template <class Traits>
struct KvWalk {
  static constexpr bool kSkips = Traits::Variant::kSkipsTiles;
  static constexpr bool kLastFirst = Traits::kTakesLastFirst;
  static constexpr int kTokens = Traits::kTuning.kv_tile;
  static constexpr int kStep = kLastFirst ? -kTokens : kTokens;  // from KV tile to KV tile

  __device__ __forceinline__ static KvTileStart first(const AttentionParams& params, const WorkItem& item) {
    if constexpr (kSkips || kLastFirst)
      return kv_tile_start<kSkips>(params.schedule, item.group, item.kv_begin, kLastFirst ? item.num_kv_tiles - 1 : 0,
                                   kTokens);
    else
      return KvTileStart{item.kv_begin, false};
  }

  /// The tile after the tile at `token`. `left`: the item's tiles from there on; with none the result means nothing.
  __device__ __forceinline__ static KvTileStart next(const AttentionParams& params, const WorkItem& item, int32_t token,
                                                     int32_t left) {
    if constexpr (kSkips)
      return kv_tile_start<true>(params.schedule, item.group, item.kv_begin,
                                 kLastFirst ? max_of(left, 1) - 1 : item.num_kv_tiles - max_of(left, 1), kTokens);
    else
      return KvTileStart{token + kStep, false};
  }

  /// Tells the lane's rows which tile is next; returns its first token.
  template <class Rows>
  __device__ __forceinline__ static int32_t enter(const KvTileStart& start, Rows& rows) {
    if constexpr (kSkips) rows.template enter<kTokens>(start);
    return start.token;
  }
};

}  // namespace attn::sm90
