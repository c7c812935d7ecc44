// The two consumer warpgroups compute work items from what the producer has loaded.
//
// Row tiles of 32 rows and more are multiplied with wgmma. Each warpgroup computes 64 rows of a 128-row tile; row tiles
// of 32 and 64 rows are computed by the first warpgroup alone. While the tensor cores add P V of one KV tile, the
// warpgroup computes most of the next tile's exponentials:
//
//     tensor cores  | Q K(0) |        | Q K(1) | P V(0) |        | Q K(2) | P V(1) | ...
//     warpgroup              | exp(0) |        | exp(1)          |        | exp(2)          | ...
//
// The two warpgroups are not synchronised: the products of one overlap with the softmax of the other.
//
// Where a variant transforms K or V, the warpgroup that has started the products of a KV tile then rewrites in shared
// memory what it multiplies next, while the tensor cores work (with wide heads: just before it multiplies it). Both
// warpgroups of the largest row tiles rewrite half of each tile, and wait for the other's half when they need it.
//
// K and V of an 8-bit cache are widened into tiles of their own before wgmma takes them: both warpgroups widen half of
// what is multiplied next, in every item of such row tiles, whether they multiply it or not. They wait for each other
// before, until nobody reads what was there, and behind. For mma.sync they are widened in registers.
//
// Row tiles of 16 rows are multiplied with mma.sync: each warpgroup takes every other part of a KV tile, and its four
// warps share the part's tokens. The states of all eight warps merge in shared memory at the end.
#pragma once

#include "attention/output.cuh"
#include "attention/sm90/params.h"
#include "attention/sm90/shape.h"
#include "attention/sm90/shared_memory.cuh"
#include "attention/sm90/swizzled_tile.cuh"
#include "attention/sm90/widened.cuh"
#include "attention/sm90/work_item.cuh"
#include "attention/transform_tile.cuh"
#include "attention/warp_state.cuh"
#include "common/elements.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/tensor_copy.cuh"
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
};

__device__ __forceinline__ void sync_warpgroup() {
  ptx::barrier_sync(kWarpgroupBarrier + warpgroup(), kWarpgroupThreads);
}

/// Zeroes rows of a V tile that lie outside [first, last): what the ring or the cache holds there (NaN, perhaps) must
/// not reach the output. `lane` of kLanes threads.
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

/// Columns of O that products make, at least `columns`.
ATTN_HD constexpr int columns_of_products(int columns) {
  return columns <= 64 ? 64 : columns <= 96 ? 96 : columns <= 128 ? 128 : columns <= 192 ? 192 : 256;
}

template <class Traits>
struct Consumer {
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
  static constexpr int kTokens = Shared::kTuning.kv_tile;
  // That products take: of the head, and perhaps some behind.
  static constexpr int kQkColumns = Traits::Shape::kQkMultiplied;
  static constexpr int kVColumns =  // that this warpgroup makes
      is_wide(Traits::Shape::kDims) ? Traits::Shape::kV / 2 : columns_of_products(Traits::Shape::kVMultiplied);
  /// Not where a variant's logits may grow from KV tile to KV tile, as with ALiBi: rows would outgrow their maxima all
  /// the time (a prefill of 4 x 4096 took 6.8 times as long).
  static constexpr bool kKeepsMaxima =
      Shared::kTuning.keeps_maxima && !(VariantHooks<Variant>::kLogits && Variant::kReadsRows);
  /// Of one warp: 16 rows.
  using State = WarpState<Element, kVColumns, 1>;
  using Rows = LaneRows<Variant, 1>;
  using Target = OutputTarget<Element, true, Variant>;
  using OfQuery = QueryTransform<Variant>;
  using OfKey = KeyTransform<Variant>;
  using OfValue = ValueTransform<Variant>;
  static constexpr bool kTransformsCache = OfKey::kExists || OfValue::kExists;
  /// Not where the ring may have fewer than four tiles in use (Tuning::mma_parts): early needs two behind those that
  /// are multiplied. There registers are scarce, too.
  static constexpr bool kTransformsEarly = Shared::kParts > 1;
  static_assert(!kWidens || !kTransformsCache, "an 8-bit cache is not transformed");

  const HopperParams& hopper_params;
  const AttentionParams& params;
  const Shared shared;
  typename Shared::KvPlace kv;  // next part of the ring
  uint32_t transformed_parity = 0;

  __device__ __forceinline__ Consumer(const HopperParams& hopper_params_, const Shared& shared_)
      : hopper_params(hopper_params_), params(hopper_params_.attention), shared(shared_) {}

  __device__ __forceinline__ Variant variant(int32_t kv_head) const {
    return Variant(params.variant.as<typename Variant::Params>(), kv_head);
  }

  __device__ __forceinline__ float scale(const WorkItem& item) const {
    return transforms_logits(variant(0)) ? kLog2E : sm_scale(item) * kLog2E;
  }

  /// params.sm_scale, and K's scale.
  __device__ __forceinline__ float sm_scale(const WorkItem& item) const {
    if constexpr (kWidens) return shared.score_scale(item);
    return params.sm_scale;
  }

  /// From products to logits, masked. `s`: a warp's scores of kBlocks * 8 tokens from `first_token` on; `rows`: the
  /// lane's.
  template <int kBlocks>
  __device__ __forceinline__ void finish_scores(const WorkItem& item, float (&s)[1][kBlocks][4], int first_row,
                                                int32_t first_token, const TokenRange& unmasked,
                                                const Rows& rows) const {
    scale_scores(variant(item.kv_head), s, shared.requests(item), first_row);
    if (transforms_logits(variant(0))) {
      transform_logits(variant(item.kv_head), sm_scale(item), s, first_token, rows);
    }
    if (first_token < unmasked.begin || first_token + kBlocks * 8 > unmasked.end) {
      mask_scores(item.visibility, s, item.rows, params.group_size, first_row, first_token, item.readable.end);
    }
    apply_variant_mask(variant(item.kv_head), s, first_token, rows);
  }

  __device__ __forceinline__ void run() {
    typename Shared::QPlace place;
    shared.wait_q_full(place);
    while (shared.item(place.slot).num_kv_tiles > 0) {
      const WorkItem& item = shared.item(place.slot);
      if (multiplies(item)) {
        run_wgmma_items(place);
        continue;
      }
      if (item.kind == 0) {
        run_mma_item(item, place.slot);
      } else {
        skip(item);
      }
      shared.free_q(place);
      place.next();
      shared.wait_q_full(place);
    }
  }

  /// Whether this warpgroup multiplies rows of the item with wgmma: the second has rows only of the largest row tiles.
  __device__ __forceinline__ bool multiplies(const WorkItem& item) const {
    return item.kind > 0 && (item.kind == kMaxKind || warpgroup() == 0);
  }

  /// Frees the KV tiles of an item that the other warpgroup computes alone.
  __device__ __forceinline__ void skip(const WorkItem& item) {
    if constexpr (kWidens) {
      widen_tiles(item, kv, kv, item.first_token, false, true);
      for (int left = item.num_kv_tiles, token = item.first_token; left > 0; --left, token += kTokens) {
        next_tile();
        const typename Shared::KvPlace values = kv;
        next_tile();
        widen_tiles(item, values, kv, token, true, left > 1);
      }
    } else {
      for (int slot = 0; slot < 2 * item.num_kv_tiles; ++slot) {
        wait_for_tile(kv);
        free_tile(kv);
        next_tile();
      }
    }
  }

  // --- 8-bit caches

  /// What wgmma takes of K and V.
  __device__ __forceinline__ char* wide_keys(int slot) const { return kWidens ? shared.widened(0) : shared.kv(slot); }
  __device__ __forceinline__ char* wide_values(int slot) const { return kWidens ? shared.widened(1) : shared.kv(slot); }

  /// Widens what is multiplied together: the V tile from `token` on, and the K tile behind it; `has_values`,
  /// `has_keys`: those that there are. Both warpgroups call it, with the same, when they have no products under way.
  /// Frees the parts.
  __device__ __forceinline__ void widen_tiles(const WorkItem& item, const typename Shared::KvPlace& values,
                                              const typename Shared::KvPlace& keys, int32_t token, bool has_values,
                                              bool has_keys) const {
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
      ptx::fence_async_proxy();
      if (has_values) free_tile(values);
      if (has_keys) free_tile(keys);
      Consumers::sync();
    }
  }

  // --- transforms of variants

  __device__ __forceinline__ TileTokens tokens_of(const WorkItem& item, int32_t first_token) const {
    return TileTokens{KvTokens(params.schedule.groups[item.group], item.kv_head), item.readable, first_token};
  }

  /// Transforms rows [first_row, end_row) of the Q tile; `thread` of kLanes. Then these may read them.
  template <int kLanes>
  __device__ __forceinline__ void transform_query(const WorkItem& item, int slot, int first_row, int end_row,
                                                  int thread) const {
    transform_rows<OfQuery, Query, Element, Traits::Shape::kQk, kLanes, kWarpRows, 1, 2>(
        shared.q(slot), first_row, end_row, thread, variant(item.kv_head),
        TileRows<RowTileRows<true>>{params, item.rows, item.group, item.kv_head});
    ptx::fence_async_proxy();
  }

  /// Transforms this warpgroup's share of a KV tile of an item.
  template <class Transform, class Tile, int kColumns>
  __device__ __forceinline__ void transform_share(const WorkItem& item, const typename Shared::KvPlace& place,
                                                  int32_t first_token) const {
    if constexpr (Transform::kExists) {
      const bool is_half = item.kind == kMaxKind;
      const int first_row = is_half ? warpgroup() * (kTokens / 2) : 0;
      wait_for_tile(place);
      transform_rows<Transform, Tile, Element, kColumns, kWarpgroupThreads, kTokens / 2, 2, 2>(
          shared.kv(place.slot), first_row, first_row + (is_half ? kTokens / 2 : kTokens),
          consumer_thread() % kWarpgroupThreads, variant(item.kv_head), tokens_of(item, first_token));
      ptx::fence_async_proxy();
    }
  }

  /// Says that this warp's part of the shares is done.
  __device__ __forceinline__ void arrive_transformed(const WorkItem& item) const {
    if constexpr (kTransformsCache) {
      if (item.kind == kMaxKind) shared.arrive_transformed();
    }
  }

  /// Waits for the shares of all that multiply the item.
  __device__ __forceinline__ void wait_transformed(const WorkItem& item) {
    if constexpr (kTransformsCache) {
      if (item.kind != kMaxKind) return sync_warpgroup();
      shared.wait_transformed(transformed_parity);
      transformed_parity ^= 1;
    }
  }

  /// Transforms what the first product of an item takes: its Q tile, and its first K tile, at `kv`.
  __device__ __forceinline__ void transform_first(const WorkItem& item, int q_slot) {
    if constexpr (OfQuery::kExists) {
      const int first_row = warpgroup() * 64;
      transform_query<kWarpgroupThreads>(item, q_slot, first_row, first_row + 64,
                                         consumer_thread() % kWarpgroupThreads);
      sync_warpgroup();
    }
    if constexpr (OfKey::kExists) {
      transform_share<OfKey, Keys, Traits::Shape::kQk>(item, kv, item.first_token);
      arrive_transformed(item);
      wait_transformed(item);
    }
    widen_tiles(item, kv, kv, item.first_token, false, true);
  }

  /// Transforms this warpgroup's share of what is multiplied together: the V tile from `token` on, and the K tile
  /// behind it, if `has_keys`.
  __device__ __forceinline__ void transform_tiles(const WorkItem& item, const typename Shared::KvPlace& values,
                                                  const typename Shared::KvPlace& keys, int32_t token,
                                                  bool has_keys) const {
    transform_share<OfValue, Values, Traits::Shape::kV>(item, values, token);
    if (has_keys) transform_share<OfKey, Keys, Traits::Shape::kQk>(item, keys, token + kTokens);
    arrive_transformed(item);
  }

  /// The same once the product of Q and the K tile at `kv`, from `token` on, has been started: while the tensor cores
  /// work.
  __device__ __forceinline__ void transform_early(const WorkItem& item, int32_t token, bool has_keys) const {
    if constexpr (kTransformsCache && kTransformsEarly)
      transform_tiles(item, kv.behind(Shared::kParts), kv.behind(2 * Shared::kParts), token, has_keys);
  }

  /// Just before they are multiplied; or waits for what was transformed early.
  __device__ __forceinline__ void transform_late(const WorkItem& item, const typename Shared::KvPlace& values,
                                                 int32_t token, bool has_keys) {
    if constexpr (kTransformsCache && !kTransformsEarly) transform_tiles(item, values, kv, token, has_keys);
    widen_tiles(item, values, kv, token, true, has_keys);
    wait_transformed(item);
  }

  /// Transforms the rows of a KV tile that only this warp multiplies.
  template <class Transform, class Tile, int kColumns>
  __device__ __forceinline__ void transform_own(const WorkItem& item, int slot, int row, int32_t token) const {
    if constexpr (Transform::kExists) {
      transform_rows<Transform, Tile, Element, kColumns, 32, kMmaTokens, 2, 4>(
          shared.kv(slot), row, row + kMmaTokens, ptx::lane_id(), variant(item.kv_head), tokens_of(item, token - row));
      ptx::fence_async_proxy();  // before TMA writes it again
      __syncwarp();
    }
  }

  // --- wgmma

  /// Starts s = Q K^T.
  __device__ __forceinline__ void multiply_keys(float (&s)[1][kTokens / 8][4], ptx::MatrixDescriptor q,
                                                int slot) const {
    const ptx::MatrixDescriptor keys = Keys::columns_descriptor(ptx::shared_address(wide_keys(slot)));
#pragma unroll
    for (int k = 0; k < kQkColumns / 16; ++k)
      ptx::wgmma_shared<Element::kMmaType>(s[0], Query::columns(q, k), Keys::columns(keys, k), k > 0);
    ptx::wgmma_commit();
  }

  /// Starts o += P V.
  __device__ __forceinline__ void multiply_values(State& state, const uint32_t (&p)[kTokens / 16][4], int slot) const {
    constexpr int kColumns = kVColumns > 192 ? 128 : kVColumns;  // of one product
    const ptx::MatrixDescriptor values = Values::rows_descriptor(ptx::shared_address(wide_values(slot)));
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int c = 0; c < kVColumns; c += kColumns) {
        ptx::wgmma_registers<Element::kMmaType>(reinterpret_cast<float (&)[kColumns / 8][4]>(state.o[0][c / 8]), p[k],
                                                Values::rows(values, k, c / kBlockColumns), 1);
      }
    }
    ptx::wgmma_commit();
  }

  /// Turns scores into probabilities relative to the rows' maxima; `added`: their sums over this lane's columns.
  __device__ __forceinline__ static void exponentiate(const State& state, float (&s)[1][kTokens / 8][4],
                                                      float (&added)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = state.base(0, half);
      added[half] = 0.0f;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        s[0][n][2 * half] = ptx::ex2(s[0][n][2 * half] * state.scale - base);
        s[0][n][2 * half + 1] = ptx::ex2(s[0][n][2 * half + 1] * state.scale - base);
        added[half] += s[0][n][2 * half] + s[0][n][2 * half + 1];
      }
    }
  }

  /// Online softmax with lazy maxima: a row keeps the maximum of the first KV tile in which it sees anything, until the
  /// probabilities of a lane's columns sum to more than this, or to NaN. The limit is far below what an element can
  /// hold, and a maximum that is too small costs no accuracy.
  static constexpr float kMostAdded = 4096.0f;

  __device__ __forceinline__ static bool has_outgrown(const float (&added)[2], int half) {
    return !(added[half] <= kMostAdded);
  }

  /// For rows that have outgrown their maxima: computes their scores again (the first ones were overwritten by the
  /// probabilities), finds new maxima, and rescales output and sums. Other rows stay as they are: the bits of a row
  /// depend on no other.
  __device__ __forceinline__ void recompute(State& state, const WorkItem& item, float (&s)[1][kTokens / 8][4],
                                            float (&added)[2], uint32_t q, int slot, int32_t first_token,
                                            const TokenRange& unmasked, const Rows& rows) const {
    constexpr int kStep = 16;  // tokens at a time
    const int first_row = consumer_warp() * 16;
    bool again[2];
    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      again[half] = has_outgrown(added, half);
      again[half] |= __shfl_xor_sync(0xffffffffu, again[half], 1);
      again[half] |= __shfl_xor_sync(0xffffffffu, again[half], 2);
      maximum[half] = state.maximum[0][half];
    }
    // Visits all tokens twice: first for the maxima, then for the probabilities.
#pragma unroll 1
    for (int i = 0; i < 2 * kTokens; i += kStep) {
      const int token = i % kTokens;
      if (i == kTokens) {
        float correction[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(0xffffffffu, maximum[half], 1));
          maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(0xffffffffu, maximum[half], 2));
          correction[half] = again[half] ? ptx::ex2((state.maximum[0][half] - maximum[half]) * state.scale) : 1.0f;
          if (again[half]) state.maximum[0][half] = maximum[half];
          if (again[half]) added[half] = 0.0f;
          state.sum[0][half] *= correction[half];
        }
        state.scale_output(0, correction);
      }
      float step[1][kStep / 8][4];
      state.template scores<kQkColumns, kStep, Query, Keys>(
          step, q,
          ptx::shared_address(wide_keys(slot)) + token * Keys::kRowBytes + Keys::columns_first(ptx::lane_id()));
      finish_scores(item, step, first_row, first_token + token, unmasked, rows);
#pragma unroll
      for (int j = 0; j < kStep / 8 * 4; ++j) {
        const int half = j % 4 / 2;
        if (i < kTokens) {
          maximum[half] = fmaxf(maximum[half], step[0][j / 4][j % 4]);
          continue;
        }
        const float probability = ptx::ex2(step[0][j / 4][j % 4] * state.scale - state.base(0, half));
        if (again[half]) added[half] += probability;
#pragma unroll
        for (int n = j / 4; n < kTokens / 8; n += kStep / 8)
          s[0][n][j % 4] = again[half] && n / (kStep / 8) * kStep == token ? probability : s[0][n][j % 4];
      }
    }
  }

  __device__ __forceinline__ static void pack(const float (&s)[1][kTokens / 8][4], uint32_t (&p)[kTokens / 16][4]) {
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p[k][i] = Element::pack(s[0][2 * k + i / 2][i % 2 * 2], s[0][2 * k + i / 2][i % 2 * 2 + 1]);
    }
  }

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
  /// After the products with a tile.
  __device__ __forceinline__ void multiplied(const typename Shared::KvPlace& place) const {
    if constexpr (!kWidens) free_tile(place);
  }
  __device__ __forceinline__ void next_tile() { kv = kv.behind(Shared::kParts); }

  /// Waits for K and V. Mostly they have arrived: testing all barriers at once is faster than waiting for one after
  /// another.
  __device__ __forceinline__ void wait_for_tiles(typename Shared::KvPlace keys, typename Shared::KvPlace values) const {
    if (kWidens || (is_tile_full(keys) & is_tile_full(values))) return;  // widen_tiles() waits itself
    wait_for_tile(values);
    wait_for_tile(keys);
  }

  /// Zeroes the rows of a V tile that must not be read.
  __device__ __forceinline__ void clear_unreadable(const typename Shared::KvPlace& place, int32_t first_token,
                                                   const TokenRange& readable) const {
    if constexpr (kWidens) return;  // widen_share() does it
    if (first_token < readable.begin || first_token + kTokens > readable.end) {
      zero_rows<Values, kWarpgroupThreads>(shared.kv(place.slot), 0, kTokens, readable.begin - first_token,
                                           readable.end - first_token, consumer_thread() % kWarpgroupThreads);
      sync_warpgroup();
    }
  }

  __device__ __forceinline__ ptx::MatrixDescriptor query(int slot) const {
    return Query::columns_descriptor(ptx::shared_address(shared.q(slot)) + warpgroup() * 64 * Query::kRowBytes);
  }

  /// For ldmatrix: the rows of this warp.
  __device__ __forceinline__ uint32_t q_rows(int slot) const {
    return ptx::shared_address(shared.q(slot)) + consumer_warp() * 16 * Query::kRowBytes +
           Query::rows_first(ptx::lane_id());
  }

  /// Whether TMA may store the warp's rows: all of them exist, are complete and consecutive, and no lse is wanted.
  __device__ __forceinline__ bool is_box(const Target& target, int first_row) const {
    return hopper_params.has_row_maps && params.lse == nullptr && target.complete && target.rows.list == nullptr &&
           first_row + kWarpRows <= target.rows.count;
  }

  /// Stores the warp's rows by TMA, from its rows of the Q tile.
  __device__ __forceinline__ void store_rows(State& state, const Target& target, int first_row, int slot) const {
    const int lane = ptx::lane_id();
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = state.row_sum(0, half);
      inverse[half] = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
      if (target.has_sinks()) {
        const int32_t tile_row = first_row + half * 8 + lane / 4;
        inverse[half] = target.end_row_with_sink(state.maximum[0][half] * state.scale, sum, tile_row).factor;
      }
      if constexpr (kWidens) inverse[half] = target.with_scale(inverse[half], first_row + half * 8 + lane / 4);
    }
    stage_rows<Output>(state, target, 0, inverse, first_row, shared.q(slot));
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane != 0) return;
    const int32_t row = target.rows.qo_begin + params.group_size.divide(target.rows.packed_begin + first_row);
    const uint32_t staged = ptx::shared_address(shared.q(slot)) + first_row * Output::kRowBytes;
#pragma unroll
    for (int block = 0; block < Output::kBlocks; ++block) {
      ptx::store_box(hopper_params.o, staged + block * Output::kBlockBytes, block * kBlockColumns,
                     target.kv_head * params.group_size.divisor, row, 0);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read();  // then the tile may be filled again
  }

  /// Starting at `place`, computes items until the first that this warpgroup does not multiply, and leaves `place`
  /// there. The scores of an item's first KV tile are multiplied together with the last values of the item before, and
  /// are ready when its output has been written.
  __device__ __forceinline__ void run_wgmma_items(typename Shared::QPlace& place) {
    const int first_row = consumer_warp() * 16;
    float s[1][kTokens / 8][4];
    uint32_t p[kTokens / 16][4];
    if constexpr (!kWidens) wait_for_tile(kv);
    transform_first(shared.item(place.slot), place.slot);
    ptx::wgmma_fence();
    multiply_keys(s, query(place.slot), kv.slot);

    for (bool more = true; more;) {
      const WorkItem& item = shared.item(place.slot);
      State state;
      state.scale = scale(item);
      if constexpr (!Variant::kUsesSoftmax) state.start_sum(true);
      const Rows rows(params, item.rows, item.group, item.kv_head, first_row);
      const TokenRange unmasked = unmasked_tokens(params, item, first_row, 16);
      const TokenRange readable = item.readable;
      int32_t token = item.first_token;
      typename Shared::KvPlace values;
      bool have_maxima = false;  // all rows of the warp

      transform_early(item, token, item.num_kv_tiles > 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(s[0]);
      // Turns the scores of a KV tile into probabilities, then starts the next tile's scores together with this one's
      // P V. Maxima are lazy (see kMostAdded): finding every tile's maxima takes a fifth of the softmax
      // (ADR 15).
      for (int left = item.num_kv_tiles;; token += kTokens) {
        const bool is_first = left == item.num_kv_tiles;
        float added[2], correction[2];
        bool raised = false;
        if constexpr (kWidens) state.scale = scale(item);  // read again: it is not kept over products
        finish_scores(item, s, first_row, token, unmasked, rows);
        if constexpr (!Variant::kUsesSoftmax) {
          added[0] = added[1] = 0.0f;
        } else {
          if constexpr (kKeepsMaxima) {
            if (!have_maxima) have_maxima = state.find_maxima(0, s[0]);
          } else {
            raised = state.raise_maximum(0, s[0], correction);
          }
          exponentiate(state, s, added);
        }
        ptx::wgmma_fence_operand(s[0]);  // the exponentials before the wait
        if (!is_first) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_operand(state.o[0]);
          multiplied(values);
          if constexpr (kKeepsMaxima) {
            if (__any_sync(0xffffffffu, has_outgrown(added, 0) || has_outgrown(added, 1))) {
              recompute(state, item, s, added, q_rows(place.slot), kv.slot, token, unmasked, rows);
            }
          } else if (raised) {
            state.scale_output(0, correction);
          }
        }
        state.sum[0][0] += added[0];
        state.sum[0][1] += added[1];
        multiplied(kv);
        next_tile();
        ptx::wgmma_fence_operand(s[0]);  // p is still read before the wait
        pack(s, p);
        values = kv;
        next_tile();
        if (--left == 0) break;
        wait_for_tiles(kv, values);
        transform_late(item, values, token, true);
        clear_unreadable(values, token, readable);
        ptx::wgmma_fence();
        multiply_keys(s, query(place.slot), kv.slot);
        multiply_values(state, p, values.slot);
        transform_early(item, token + kTokens, left > 1);
        ptx::wgmma_wait<1>();
        ptx::wgmma_fence_operand(s[0]);
      }

      typename Shared::QPlace next = place;
      next.next();
      more = false;
      if constexpr (Shared::kQSlots > 1) {
        shared.wait_q_full(next);
        more = shared.item(next.slot).num_kv_tiles > 0 && multiplies(shared.item(next.slot));
      }
      wait_for_tiles(more ? kv : values, values);
      transform_late(item, values, token, false);
      if (more) transform_first(shared.item(next.slot), next.slot);
      clear_unreadable(values, token, readable);
      ptx::wgmma_fence();
      multiply_values(state, p, values.slot);
      // Without a next item these scores are not used, but a branch here would serialise the products.
      if constexpr (Shared::kQSlots > 1) multiply_keys(s, query(next.slot), kv.slot);
      ptx::wgmma_wait<Shared::kQSlots - 1>();
      ptx::wgmma_fence_operand(state.o[0]);
      multiplied(values);

      sync_warpgroup();  // all of its products with Q are done: the rows of O go through the Q tile
      const Target target(params, item.rows, item.group, item.kv_head, item.starts_inside, item.ends_inside,
                          shared.requests(item));
      if (is_box(target, first_row)) {
        store_rows(state, target, first_row, place.slot);
      } else {
        write_warp_rows<Output>(state, target, first_row, shared.q(place.slot));
      }
      shared.free_q(place);
      place = next;
    }
    ptx::wgmma_wait<0>();
    if constexpr (Shared::kQSlots == 1) shared.wait_q_full(place);
  }

  // --- mma.sync

  /// How the warps share an item: all have the same 16 rows, and 16 tokens each of a part of a KV tile.
  struct MmaLayout {
    static constexpr int kKvWarps = kConsumerWarps;  // all share the rows
    static constexpr bool kFours = kWidens;          // as in stage_rows()
    static constexpr int first_row = 0;
    int32_t first_token;  // of the part
    int32_t kv_warp;

    __device__ __forceinline__ explicit MmaLayout(int warp) : first_token(warp % 4 * kMmaTokens), kv_warp(warp) {}
  };
  static constexpr int kMmaTokens = Shared::kPartTokens / 4;

  using Held = HeldQuery<Element, Query, kQkColumns, kVColumns>;
  using MmaElement = typename Conditional<kWidens, typename Held::Multiplied, Element>::Type;
  using MmaState = WarpState<MmaElement, kVColumns, 1>;

  __device__ __forceinline__ void run_mma_item(const WorkItem& item, int q_slot) {
    const int lane = ptx::lane_id();
    const MmaLayout warp(consumer_warp());
    MmaState state;
    state.scale = scale(item);
    if constexpr (!Variant::kUsesSoftmax) state.start_sum(consumer_warp() == 0);
    const Rows rows(params, item.rows, item.group, item.kv_head, 0);
    const TokenRange unmasked = unmasked_tokens(params, item, 0, kWarpRows);
    const uint32_t q =
        ptx::shared_address(shared.q(q_slot)) + (kWidens ? Query::four_columns(lane) : Query::rows_first(lane));
    constexpr int kParts = Shared::kParts;
    const int part = kParts == 2 ? warpgroup() : 0;
    const int row = part * Shared::kPartTokens + warp.first_token;  // of a KV tile

    if constexpr (OfQuery::kExists) {
      transform_query<kConsumerThreads>(item, q_slot, 0, kWarpRows, consumer_thread());
      Consumers::sync();
    }
    Held held;
    if constexpr (kWidens) held.load(q);
    int32_t token = item.first_token + row;
    for (int tile = 0; tile < item.num_kv_tiles; ++tile, token += kTokens, kv = kv.behind(2 * kParts)) {
      const typename Shared::KvPlace keys = kv.behind(part);
      const typename Shared::KvPlace values = kv.behind(kParts + part);
      if (kParts == 1 && tile % 2 != warpgroup()) {
        // This warpgroup may need the same parts in the ring's next round: it must see this phase of their barriers,
        // too.
        shared.wait_kv_full(keys);
        shared.wait_kv_full(values);
        continue;
      }
      shared.wait_kv_full(keys);
      transform_own<OfKey, Keys, Traits::Shape::kQk>(item, keys.slot, row, token);
      float s[1][kMmaTokens / 8][4];
      uint32_t p[1][kMmaTokens / 8][2];
      const uint32_t k =
          ptx::shared_address(shared.kv(keys.slot)) + row * StoredKeys::kRowBytes + StoredKeys::columns_first(lane);
      if constexpr (kWidens) {
        state.template widened_scores<kQkColumns, kMmaTokens, StoredKeys, typename Traits::KvElement>(
            s, [&](int, int d, uint32_t (&a)[4]) { held.get(a, q, d); }, k);
        held.finish(s);
      } else {
        state.template scores<kQkColumns, kMmaTokens, Query, StoredKeys>(s, q, k);
      }
      shared.free_kv(keys, 2);
      finish_scores(item, s, 0, token, unmasked, rows);
      if constexpr (Variant::kUsesSoftmax)
        state.update(s, p);
      else
        MmaState::pack_weights(s, p);

      shared.wait_kv_full(values);
      transform_own<OfValue, Values, Traits::Shape::kV>(item, values.slot, row, token);
      if (token < item.readable.begin || token + kMmaTokens > item.readable.end) {
        zero_rows<StoredValues, 32>(shared.kv(values.slot), row, row + kMmaTokens, item.readable.begin - token + row,
                                    item.readable.end - token + row, lane);
        __syncwarp();
      }
      const uint32_t v =
          ptx::shared_address(shared.kv(values.slot)) + row * StoredValues::kRowBytes + StoredValues::rows_first(lane);
      if constexpr (kWidens)
        state.template widened_accumulate<kMmaTokens, StoredValues, typename Traits::KvElement>(p, v);
      else
        state.template accumulate<kMmaTokens, StoredValues>(p, v);
      shared.free_kv(values, 2);
    }

    const Target target(params, item.rows, item.group, item.kv_head, item.starts_inside, item.ends_inside,
                        shared.requests(item));
    const int halves = item.rows.count <= 8 ? 1 : 2;
    write_merged_warps<Consumers, MmaLayout, Output::kHeadColumns, Shared::kLayout.q_slot_bytes>(
        state, target, warp, halves, shared.q(q_slot), shared.row_states());
  }
};

}  // namespace attn::sm90
