// Row tiles of 16 rows are multiplied with mma.sync: each warpgroup takes every other part of a KV tile, and its four
// warps share the part's tokens. The states of all eight warps merge in shared memory at the end.
//
// Over an 8-bit cache, a warp widens its tokens in registers. If a variant transforms them, the warp first dequantizes
// them into its rows of a tile that wgmma reads in larger row tiles. There it transforms and multiplies them.
#pragma once

#include "attention/sm90/consumer_base.cuh"
#include "attention/sm90/held_query.cuh"
#include "attention/tile/widened_tile.cuh"

namespace attn::sm90 {

template <class Traits>
struct MmaConsumer : ConsumerBase<Traits> {
  using Base = ConsumerBase<Traits>;
  using Base::finish_scores;
  using Base::first_start;
  using Base::kQkColumns;
  using Base::kSkips;
  using Base::kStep;
  using Base::kTokens;
  using Base::kv;
  using Base::kVColumns;
  using Base::next_start;
  using Base::params;
  using Base::scale;
  using Base::shared;
  using Base::tokens_of;
  using Base::variant;
  using typename Base::Element;
  using typename Base::Keys;
  using typename Base::OfKey;
  using typename Base::OfValue;
  using typename Base::Output;
  using typename Base::Query;
  using typename Base::Rows;
  using typename Base::Shared;
  using typename Base::StoredKeys;
  using typename Base::StoredValues;
  using typename Base::Target;
  using typename Base::Values;
  using typename Base::Variant;

  using Base::Base;

  static constexpr bool kStages = Traits::kStages;
  static constexpr bool kWidensInRegisters = Traits::kWidensInRegisters;

  /// Transforms the rows of a KV tile that only this warp multiplies.
  template <class Transform, class Tile, int kColumns>
  __device__ __forceinline__ void transform_own(const WorkItem& item, char* tile, int row, int32_t token) const {
    if constexpr (Transform::kExists) {
      constexpr int kRowsAtOnce = kStages && !leaves_registers(kVColumns) ? 1 : 2;
      const TileTokens find = tokens_of(item, token - row);
      transform_rows<Transform, Tile, Element, kColumns, 32, kMmaTokens, kRowsAtOnce, 4>(
          tile, row, row + kMmaTokens, ptx::lane_id(), Transform(variant(item.kv_head), find.tokens), find);
      ptx::fence_async_proxy();  // before TMA writes it again
      __syncwarp();
    }
  }

  /// Widens the rows of a KV tile that only this warp multiplies, from `row` on, to rows of `staged` from `to_row` on.
  template <class Stored, class Wide>
  __device__ __forceinline__ void stage_own(const char* tile, int row, char* staged, int to_row,
                                            const TokenRange& readable) const {
    __syncwarp();  // all lanes have multiplied the previous rows
    widen_tile_rows<Stored, Wide, Element, typename Traits::KvElement, kMmaTokens, 32>(tile, row, staged, to_row,
                                                                                       ptx::lane_id(), readable);
    __syncwarp();
  }

  /// Where this warp multiplies its rows of the KV tile at `place`.
  __device__ __forceinline__ char* own_tile(const typename Shared::KvPlace& place) const {
    return kStages ? shared.widened(warpgroup()) : shared.kv(place.slot);
  }

  /// How the warps share an item: all have the same 16 rows, and 16 tokens each of a part of a KV tile.
  struct MmaLayout {
    static constexpr int kKvWarps = kConsumerWarps;           // all share the rows
    static constexpr bool kFourColumns = kWidensInRegisters;  // as in stage_rows()
    static constexpr int first_row = 0;
    int32_t first_token;  // of the part
    int32_t kv_warp;

    __device__ __forceinline__ explicit MmaLayout(int warp) : first_token(warp % 4 * kMmaTokens), kv_warp(warp) {}
  };
  static constexpr int kMmaTokens = Shared::kPartTokens / 4;

  using Held = HeldQuery<Element, Query, kQkColumns, kVColumns>;
  using MmaElement = typename Conditional<kWidensInRegisters, typename Held::Multiplied, Element>::Type;
  using MmaState = WarpState<MmaElement, kVColumns, 1>;
  using MultipliedKeys = typename Conditional<kStages, Keys, StoredKeys>::Type;
  using MultipliedValues = typename Conditional<kStages, Values, StoredValues>::Type;

  __device__ __forceinline__ void run_mma_item(const WorkItem& item, int q_slot) {
    const int lane = ptx::lane_id();
    const MmaLayout warp(consumer_warp());
    MmaState state;
    state.scale = scale(item);
    if constexpr (!Variant::kUsesSoftmax) state.start_sum(consumer_warp() == 0);
    Rows rows(params, item.rows, item.group, item.kv_head, 0);
    const TokenRange unmasked = unmasked_tokens(params, item, 0, kWarpRows);
    const uint32_t q =
        ptx::shared_address(shared.q(q_slot)) + (kWidensInRegisters ? Held::offset(lane) : Query::rows_first(lane));
    constexpr int kParts = Shared::kParts;
    const int part = kParts == 2 ? warpgroup() : 0;
    const int row = part * Shared::kPartTokens + warp.first_token;  // of a KV tile
    const int own_row = kStages ? warp.first_token : row;  // where this warp multiplies its rows, in own_tile()

    if constexpr (Base::kRewritesQuery)
      this->template rewrite_query<kConsumerThreads>(item, q_slot, 0, kWarpRows);
    else if constexpr (kStages)
      Consumers::sync();  // no warp multiplies what is in the widened tiles
    Held held;
    if constexpr (kWidensInRegisters) held.load(q);
    int32_t token = Base::enter(first_start(item), rows) + row;
    KvTileStart next{token, false};  // the next KV tile
    for (int tile = 0; tile < item.num_kv_tiles;
         ++tile, token = kSkips ? Base::enter(next, rows) + row : token + kStep, kv = kv.ahead(2 * kParts)) {
      if constexpr (kSkips)
        next = next_start(item, token, item.num_kv_tiles - tile - 1);  // early: it may have to be loaded
      const typename Shared::KvPlace keys = kv.ahead(part);
      const typename Shared::KvPlace values = kv.ahead(kParts + part);
      if (kParts == 1 && tile % 2 != warpgroup()) {
        // This warpgroup may need the same parts in the ring's next round: it must see this phase of their barriers,
        // too.
        shared.wait_kv_full(keys);
        shared.wait_kv_full(values);
        continue;
      }
      shared.wait_kv_full(keys);
      if constexpr (kStages)
        stage_own<StoredKeys, Keys>(shared.kv(keys.slot), row, own_tile(keys), own_row, TokenRange{0, kTokens});
      transform_own<OfKey, Keys, Traits::Shape::kQk>(item, own_tile(keys), own_row, token);
      float s[1][kMmaTokens / 8][4];
      uint32_t p[1][kMmaTokens / 8][2];
      const uint32_t k = ptx::shared_address(own_tile(keys)) + own_row * MultipliedKeys::kRowBytes +
                         MultipliedKeys::columns_first(lane);
      if constexpr (kWidensInRegisters) {
        state.template widened_scores<kQkColumns, kMmaTokens, MultipliedKeys, typename Traits::KvElement>(
            s, [&](int, int d, uint32_t (&a)[4]) { held.get(a, q, d); }, k);
        held.finish(s);
      } else {
        state.template scores<kQkColumns, kMmaTokens, Query, MultipliedKeys>(s, q, k);
      }
      shared.free_kv(keys, 2);
      finish_scores(item, s, 0, token, unmasked, rows);
      if constexpr (Variant::kUsesSoftmax)
        state.update(s, p);
      else
        MmaState::pack_weights(s, p);

      shared.wait_kv_full(values);
      if constexpr (kStages)
        stage_own<StoredValues, Values>(shared.kv(values.slot), row, own_tile(values), own_row,
                                        TokenRange{item.readable.begin - token + row, item.readable.end - token + row});
      transform_own<OfValue, Values, Traits::Shape::kV>(item, own_tile(values), own_row, token);
      if (!kStages && (token < item.readable.begin || token + kMmaTokens > item.readable.end)) {
        zero_rows<StoredValues, 32>(shared.kv(values.slot), row, row + kMmaTokens, item.readable.begin - token + row,
                                    item.readable.end - token + row, lane);
        __syncwarp();
      }
      const uint32_t v = ptx::shared_address(own_tile(values)) + own_row * MultipliedValues::kRowBytes +
                         MultipliedValues::rows_first(lane);
      if constexpr (kWidensInRegisters)
        state.template widened_accumulate<kMmaTokens, MultipliedValues, typename Traits::KvElement>(p, v);
      else
        state.template accumulate<kMmaTokens, MultipliedValues>(p, v);
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
