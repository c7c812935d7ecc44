// Decode: row tiles of 16 rows, multiplied with mma.sync. Two warpgroups share each KV tile (kSharesTiles), or each
// takes every other one, and a warpgroup's four warps share its tokens. The states of all eight warps merge in shared
// memory at the end.
//
// Over an 8-bit cache, a warp dequantizes its tokens in registers. TokenScales multiply scores and probabilities. Where
// kFeedsAll holds (traits.cuh), the producer has dequantized the tiles in the ring (dequantizer.cuh). The warp
// transforms and multiplies them there. Other tiles of 4-bit caches are packed_decode.cuh's.
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/held_query.cuh"
#include "attention/sm90/integer_query.cuh"
#include "attention/sm90/output.cuh"
#include "attention/sm90/prepared_tiles.cuh"
#include "attention/sm90/scores.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/warp_state.cuh"

namespace attn::sm90 {

template <class Traits>
struct Decode {
  using Element = typename Traits::Element;
  using KvElement = typename Traits::KvElement;
  using Variant = typename Traits::Variant;
  using Shared = SharedMemory<Traits>;
  using Walk = KvWalk<Traits>;
  using Query = QTile<Traits>;
  // False for variants with custom weights.
  static constexpr bool kUsesSoftmax = Variant::kUsesSoftmax;
  // Sparse masks.
  static constexpr bool kSkipsTiles = Variant::kSkipsTiles;
  // Q hooks, rotation, and Q of another 16-bit type.
  static constexpr bool kRewritesQuery = Traits::kRewritesQuery;
  // 8-bit caches without transforms.
  static constexpr bool kDequantizesInRegisters = Traits::kDequantizesInRegisters;
  // Scales of tokens multiply scores and probabilities. Tiles that the producer has dequantized need none.
  static constexpr bool kScalesInShared = Traits::kScalesInShared;
  // int8 caches, if registers hold Q.
  static constexpr bool kMultipliesIntegers = kDequantizesInRegisters && is_same<typename Traits::KvElement, Int8> &&
                                              leaves_registers(max_of(Traits::Shape::kQkMultiplied, Traits::kVColumns));
  static constexpr bool kMayKeepSums = !kScalesInShared || Traits::Shape::kQk <= 64;  // registers are few
  static constexpr bool kSharesTiles = SharedMemory<Traits>::kParts == 2;  // KV tiles of 128 tokens: narrow heads
  using Keys = typename Conditional<kDequantizesInRegisters, KTile<Traits>, WgmmaKTile<Traits>>::Type;
  using Values = typename Conditional<kDequantizesInRegisters, VTile<Traits>, WgmmaVTile<Traits>>::Type;
  using Held = typename Conditional<kMultipliesIntegers, IntegerQuery<Element, Query, Traits::Shape::kQkMultiplied>,
                                    HeldQuery<Element, Query, Traits::Shape::kQkMultiplied, Traits::kVColumns>>::Type;
  using State = WarpState<typename Conditional<kDequantizesInRegisters, typename Held::Multiplied, Element>::Type,
                          Traits::kVColumns, 1>;
  static constexpr int kQkColumns = Traits::Shape::kQkMultiplied;
  // A dequantized tile may take two stages. Consumers wait for the first, and only free the second.
  static constexpr int kTileParts = kDequantizesInRegisters ? Shared::kParts : Shared::kTileParts;
  static constexpr bool kHasSecondStage = kTileParts > Shared::kParts;
  static_assert(!Traits::kTuning.has_third_consumer || Shared::kTileParts == Shared::kParts, "PreparedTiles::skip()");
  static constexpr int kTokens = Shared::kPartTokens / 4;  // tokens of a KV tile that a warp takes
  static constexpr int kFreedFor = 2;  // warps: this one, and one of the warpgroup that does not read the part

  /// How the warps share an item: all have the same 16 rows, and 16 or more tokens each of a part of a KV tile.
  struct Layout {
    static constexpr int kKvWarps = kSharingWarps;                 // all share the rows
    static constexpr bool kFourColumns = kDequantizesInRegisters;  // as in stage_rows()
    static constexpr int first_row = 0;
    int32_t first_token;  // of the part
    int32_t kv_warp;

    __device__ __forceinline__ explicit Layout(int warp) : first_token(warp % 4 * kTokens), kv_warp(warp) {}
  };

  const TmaParams& tma_params;
  KvRing<Traits>& ring;
  const AttentionParams& params{tma_params.attention};
  const Scores<Traits> scores{params};

  __device__ __forceinline__ void run(const WorkItem& item, int q_stage) {
    const Shared& shared = ring.shared;
    const int lane = ptx::lane_id();
    const Layout warp(consumer_warp());
    State state;
    state.scale = scores.scale(item);
    if constexpr (!kUsesSoftmax) state.start_sum(consumer_warp() == 0);
    LaneRows<Variant, 1> rows(params, item.rows, item.group, item.kv_head, 0);
    const auto constants = scores.constants(item, 0);
    const int part = kSharesTiles ? warpgroup() : 0;
    const int row = part * Shared::kPartTokens + warp.first_token;  // of a KV tile

    // Q: all warps multiply the same rows.
    const uint32_t q = ptx::shared_address(shared.q(q_stage)) +
                       (kDequantizesInRegisters ? Held::offset(lane) : Query::rows_first(lane));
    if constexpr (kRewritesQuery) rewrite_query<Traits, kSharingThreads>(params, item, shared.q(q_stage), 0, kWarpRows);
    Held held;
    if constexpr (kDequantizesInRegisters) held.load(q);

    int32_t token = Walk::enter(Walk::first(params, item), rows) + row;
    KvTileStart next{token, false};  // the next iteration's KV tile, set before it is read; used only if kSkipsTiles
    for (int tile = 0; tile < item.num_kv_tiles; ++tile,
             token = kSkipsTiles ? Walk::enter(next, rows) + row : token + Walk::kStep,
             ring.kv = ring.kv.ahead(2 * kTileParts)) {
      if constexpr (kSkipsTiles)
        next = Walk::next(params, item, token, item.num_kv_tiles - tile - 1);  // early: it may have to be loaded
      const typename Shared::KvPlace keys = ring.kv.ahead(part);
      const typename Shared::KvPlace values = ring.kv.ahead(kTileParts + part);
      if (!kSharesTiles && tile % 2 != warpgroup()) {
        // This warpgroup may need the same parts in the ring's next round. A wait tells phases apart by their parity
        // only, so it must see this phase of their barriers, too.
        shared.wait_kv_full(keys);
        shared.wait_kv_full(values);
        continue;
      }

      // S = Q K^T
      shared.wait_kv_full(keys);
      transform<KeyTransform<Variant>, Keys>(item, keys.index, row, token);
      float s[1][kTokens / 8][4];
      uint32_t p[1][kTokens / 8][2];
      const uint32_t k = ptx::shared_address(shared.kv(keys.index)) + row * Keys::kRowBytes + Keys::columns_first(lane);
      if constexpr (kMultipliesIntegers) {
        held.template scores<kTokens, Keys>(s, k);
      } else if constexpr (kDequantizesInRegisters) {
        state.template dequantized_scores<kQkColumns, kTokens, Keys, KvElement, kMayKeepSums>(
            s, [&](int, int d, uint32_t (&a)[4]) { held.get(a, q, d); }, k);
        held.finish(s);
      } else {
        state.template scores<kQkColumns, kTokens, Query, Keys>(s, q, k);
      }
      if constexpr (kScalesInShared) {
        float2 factors[kTokens / 8];
        load_scales(factors, shared.token_scales(keys.index) + warp.first_token * 4);
        multiply_columns(s, factors);
      }
      shared.free_kv(keys, kFreedFor);
      if constexpr (kHasSecondStage) shared.free_kv(keys.ahead(Shared::kParts), kFreedFor);

      // P = softmax(S)
      scores.finish(item, s, 0, token, constants, rows);
      if constexpr (kScalesInShared) {
        shared.wait_kv_full(values);
        scale_probabilities(state, s, p, shared.token_scales(values.index) + warp.first_token * 4);
      } else if constexpr (kUsesSoftmax) {
        state.update(s, p);
      } else {
        State::pack_weights(s, p);
      }

      // O += P V
      shared.wait_kv_full(values);
      const TokenRange readable{item.readable.begin - token + row, item.readable.end - token + row};  // rows of V
      transform<ValueTransform<Variant>, Values>(item, values.index, row, token);
      if (token < item.readable.begin || token + kTokens > item.readable.end) {
        zero_rows<Values, 32>(shared.kv(values.index), row, row + kTokens, readable.begin, readable.end, lane);
        __syncwarp();
      }
      const uint32_t v =
          ptx::shared_address(shared.kv(values.index)) + row * Values::kRowBytes + Values::rows_first(lane);
      if constexpr (kDequantizesInRegisters)
        state.template dequantized_accumulate<kTokens, Values, KvElement>(p, v);
      else
        state.template accumulate<kTokens, Values>(p, v);
      shared.free_kv(values, kFreedFor);
      if constexpr (kHasSecondStage) shared.free_kv(values.ahead(Shared::kParts), kFreedFor);
    }

    // Epilogue: the warps' states merge.
    const int halves = item.rows.count <= 8 ? 1 : 2;
    const ItemTarget<Traits> target(params, item, Shared::requests(item));
    write_merged_warps<Consumers, Layout, OTile<Traits>::kHeadColumns, Shared::kLayout.q_stage_bytes>(
        state, target, warp, halves, shared.q(q_stage), shared.row_states());
  }

  /// The lane's columns of `scales`, which are in shared memory.
  template <int kBlocks>
  __device__ __forceinline__ static void load_scales(float2 (&pairs)[kBlocks], uint32_t scales) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      uint32_t words[2];
      ptx::load_words(words, scales + (8 * n + ptx::lane_id() % 4 * 2) * 4);
      pairs[n] = make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ static void multiply_columns(float (&s)[1][kBlocks][4], const float2 (&factors)[kBlocks]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      s[0][n][0] *= factors[n].x;
      s[0][n][1] *= factors[n].y;
      s[0][n][2] *= factors[n].x;
      s[0][n][3] *= factors[n].y;
    }
  }

  /// P = softmax(S) times V's TokenScales. If no row sees a token, its scale may be NaN or infinite. Limits keep such
  /// scales out of P.
  template <int kBlocks>
  __device__ __forceinline__ static void scale_probabilities(State& state, float (&s)[1][kBlocks][4],
                                                             uint32_t (&p)[1][kBlocks][2], uint32_t scales) {
    constexpr float kSmallest = 1e-30f, kLargest = 1e30f;
    float2 weights[kBlocks];
    load_scales(weights, scales);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      weights[n] =
          make_float2(fminf(fmaxf(weights[n].x, kSmallest), kLargest), fminf(fmaxf(weights[n].y, kSmallest), kLargest));
    if constexpr (kUsesSoftmax) {
      state.update(s, p, weights);
    } else {
      multiply_columns(s, weights);
      State::pack_weights(s, p);
    }
  }

  /// Transforms the warp's rows of the tile at `part`, from `row` on. `token`: of the first.
  template <class Transform, class Tile>
  __device__ __forceinline__ void transform(const WorkItem& item, int part, int row, int32_t token) const {
    if constexpr (Transform::kExists) {
      transform_tokens<Traits, Transform, Tile, 32, kTokens, 2, 4>(params, item, ring.shared.kv(part), row,
                                                                   row + kTokens, ptx::lane_id(), token - row);
      ptx::fence_async_proxy();  // before TMA writes it again
      __syncwarp();
    }
  }
};

}  // namespace attn::sm90
