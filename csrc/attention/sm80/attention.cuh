// The generic attention kernel: tensor cores through mma.sync, copies through cp.async; Ampere and later.
//
// One launch of num_ctas CTAs serves any batch: every CTA walks its interval of the schedule. A work item is a run of
// KV tiles of one (row tile, KV head) pair. The warps of a CTA are laid out as rows x KV tokens: 1 x 4 for row tiles of
// 16 rows, 2 x 2 for 32, 4 x 1 for 64 and for 128 (two blocks of 16 rows a warp). Warps that share rows keep one state
// each. The states merge in shared memory at the end of the item.
#pragma once

#include "attention/params.h"
#include "attention/sm80/kv_loader.cuh"
#include "attention/sm80/shape.h"
#include "attention/tile/dequantized.cuh"
#include "attention/tile/output.cuh"
#include "attention/tile/rotation.cuh"
#include "attention/tile/row_tile.cuh"
#include "attention/tile/scores.cuh"
#include "attention/tile/transform_tile.cuh"
#include "attention/tile/warp_state.cuh"
#include "attention/tile/work_cursor.cuh"
#include "attention/traits.cuh"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm80 {

/// The threads that compute together.
struct WholeBlock {
  static constexpr int kWarps = sm80::kWarps;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ static void fence_outputs() {}  // no TMA
};

/// How the warps of a CTA share a row tile and a KV tile. With wide heads all have the same rows and tokens.
template <int kKind, int kKvTile, bool kIsWide, bool kDequantizesInRegisters>
struct WarpLayout {
  static constexpr bool kFourColumns = kDequantizesInRegisters;  // as in stage_rows()
  static constexpr int kKvWarps = kIsWide ? 1 : kKind == 0 ? 4 : kKind == 1 ? 2 : 1;
  static constexpr int kRows = kIsWide ? tile_rows(kKind) : tile_rows(kKind) * kKvWarps / kWarps;  // of a warp
  static constexpr int kRowBlocks = kRows / 16;
  static constexpr int kTokens = kKvTile / kKvWarps;  // of a warp
  int32_t first_row;
  int32_t first_token;
  int32_t kv_warp;

  __device__ __forceinline__ explicit WarpLayout(int warp)
      : first_row(kIsWide ? 0 : warp / kKvWarps * kRows),
        first_token(warp % kKvWarps * kTokens),
        kv_warp(warp % kKvWarps) {}
};

/// Gathers the rows of Q that a row tile packs, and converts them to Element. Rows that do not exist become zeros.
template <class Traits, int kRows, bool kManyLevels>
__device__ __forceinline__ void load_q(const ParamsOf<Traits>& params, const RowTileRows<kManyLevels>& rows,
                                       int32_t kv_head, char* shared_q) {
  using Tile = QTile<Traits>;
  using Pieces = RowPieces<Tile, kThreads>;
  constexpr int kChunks = Pieces::kChunks;
  constexpr int kRowsPerPass = Pieces::kRows;
  constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
#pragma unroll
  for (int piece = 0; piece < Pieces::kPieces; ++piece) {
    const int chunk = threadIdx.x % kChunks + piece * kChunks;
    using Chunk = typename Conditional<Traits::kHasFloat8Query, uint2, uint4>::Type;
    Chunk values[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const PackedRow row(params, rows, kv_head, threadIdx.x / kChunks + i * kRowsPerPass);
      values[i] = Chunk{};
      if (row.exists && (Tile::kHeadChunks == Tile::kRowChunks || chunk < Tile::kHeadChunks)) {
        QueryPart q{params.q, params.q_row_stride, params.q_head_stride};
        int column = chunk * (16 / Traits::Element::kBytes);
        if constexpr (Traits::kIsLatent) {
          if (piece * kChunks * (16 / Traits::Element::kBytes) >= Traits::Shape::kV) {
            q = params.q_rope;
            column -= Traits::Shape::kV;
          }
        }
        const int64_t element = row.row * q.row_stride + row.qo_head * q.head_stride + column;
        values[i] = __ldg(
            reinterpret_cast<const Chunk*>(static_cast<const char*>(q.data) + element * Traits::QElement::kBytes));
      }
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = threadIdx.x / kChunks + i * kRowsPerPass;
      if (kRows % kRowsPerPass != 0 && row >= kRows) continue;
      uint4& to = *reinterpret_cast<uint4*>(shared_q + Tile::offset(row, chunk));
      if constexpr (Traits::kHasFloat8Query) {
        to = dequantize_eight<typename Traits::Element, typename Traits::QElement>(values[i]);
      } else if constexpr (Traits::kConvertsQuery) {
        to = converted<typename Traits::Element, typename Traits::QElement>(values[i]);
      } else {
        to = values[i];
      }
    }
  }
}

/// Transforms the tokens of a KV tile that a warp multiplies, if there is such a transform: by the warp itself if no
/// other multiplies them, else by all warps. Then all may read them.
template <class Transform, class Tile, class Element, class Layout, int kColumns, int kKvTile>
__device__ __forceinline__ void transform_tokens(char* tile, const Layout& warp,
                                                 const typename Transform::Variant& variant, const TileTokens& find) {
  if constexpr (Transform::kExists) {
    const Transform transform(variant, find.tokens);
    if constexpr (Layout::kKvWarps == kWarps) {
      transform_rows<Transform, Tile, Element, kColumns, 32, Layout::kTokens, 2, 4>(
          tile, warp.first_token, warp.first_token + Layout::kTokens, ptx::lane_id(), transform, find);
      __syncwarp();
    } else {
      transform_rows<Transform, Tile, Element, kColumns, kThreads, kKvTile, 1, 4>(tile, 0, kKvTile, threadIdx.x,
                                                                                  transform, find);
      __syncthreads();
    }
  }
}

/// Where a tile of K or V is dequantized. It is not part of SharedLayout: only kernels that stage have it.
template <class Traits>
__device__ __forceinline__ char* staged_tile() {
  constexpr Tuning kTuning = tuning(Traits::Shape::kDims, Traits::kKvForm);
  constexpr int kBytes = kTuning.kv_tile * tile_row_bytes(Traits::Shape::kDims.widest(), Traits::Element::kBytes);
  static_assert(kBytes + kLayout<Traits>.bytes <= 99 * 1024, "what a block may have on every GPU since Ampere");
  return ptx::static_shared<kBytes>();
}

// Where a tile of the ring is multiplied: in the ring, or where it is staged.
template <class Traits>
__device__ __forceinline__ char* multiplied_tile(char* tile) {
  if constexpr (Traits::kDequantizesInTiles) return staged_tile<Traits>();
  return tile;
}
template <class Traits>
__device__ __forceinline__ uint32_t multiplied_address(uint32_t tile) {
  if constexpr (Traits::kDequantizesInTiles) return ptx::shared_address(staged_tile<Traits>());
  return tile;
}

/// Dequantizes the tokens of a KV tile that a warp multiplies, by those that transform_tokens() takes. Then these may
/// read them. `scales`: TokenScales of the tile.
template <class Traits, class Stored, class Staged, class Layout, int kKvTile>
__device__ __forceinline__ void stage_tokens(const char* tile, char* staged, const Layout& warp, const float* scales,
                                             float factor) {
  using Element = typename Traits::Element;
  using KvElement = typename Stored::Element;
  constexpr bool kScales = Traits::Variant::kHasTokenScales;
  const TokenRange all{0, kKvTile};  // the loader has replaced missing tokens by visible ones
  if constexpr (Layout::kKvWarps == kWarps) {
    dequantize_tile_rows<Stored, Staged, Element, KvElement, Layout::kTokens, 32, kScales, kScaleWords<Traits>>(
        tile, warp.first_token, staged, warp.first_token, ptx::lane_id(), all, scales, factor);
    __syncwarp();
  } else {
    dequantize_tile_rows<Stored, Staged, Element, KvElement, kKvTile, kThreads, kScales, kScaleWords<Traits>>(
        tile, 0, staged, 0, threadIdx.x, all, scales, factor);
    __syncthreads();
  }
}

/// The consumer's place in the ring of KV tiles, shared by all work items of a CTA.
struct RingCursor {
  int32_t tile = 0;  // KV tile of the interval
  int32_t pair = 0;  // its pair of stages
};

/// The work item under the cursor: from there to the end of the pair or of the interval.
template <class Traits, bool kManyLevels, int kKind>
__device__ __forceinline__ void run_work_item(const ParamsOf<Traits>& params, const Visibility& first_visibility,
                                              const WorkCursor& cursor, KvLoader<Traits, kManyLevels>& loader,
                                              RingCursor& ring, char* shared) {
  using Element = typename Traits::Element;
  using Variant = typename Traits::Variant;
  using Shape = typename Traits::Shape;
  constexpr int kKvTile = tuning(Shape::kDims, Traits::kKvForm).kv_tile;
  constexpr bool kIsWide = is_wide(Shape::kDims);
  constexpr int kColumns = kIsWide ? Shape::kV / kWarps : Shape::kVMultiplied;  // of V and O, of a warp
  static_assert(!kIsWide || kColumns * Element::kBytes % 128 == 0,
                "a warp's columns of V begin at a block of the tile");
  using Layout = WarpLayout<kKind, kKvTile, kIsWide, Traits::kDequantizesInRegisters>;
  using Query = QTile<Traits>;
  using Keys = SharedTile<MultipliedElement<Traits>, Shape::kQk>;
  using Values = SharedTile<MultipliedElement<Traits>, Shape::kV>;
  using Output = OTile<Traits>;
  constexpr SharedLayout layout = kLayout<Traits>;
  constexpr int kStages = tuning(Shape::kDims, Traits::kKvForm).kv_stages;
  constexpr int kPairs = kStages / 2;
  constexpr int kPending = kStages - 2;
  const int lane = threadIdx.x % 32;
  const Layout warp(threadIdx.x / 32);
  const RowTile& row_tile = params.schedule.tiles[cursor.now.tile];
  // Read again at each use, to save registers.
  const auto visibility = [&] {
    return kManyLevels ? params.schedule.header->levels[params.schedule.groups[row_tile.group].level].visibility
                       : first_visibility;
  };
  const Variant variant(params.variant.template as<typename Variant::Params>(), cursor.now.head);

  // Outputs of warps that share rows meet in memory whose chunks are permuted by eights (write_merged_warps).
  WarpState<Element, kColumns, Layout::kRowBlocks> state;
  const bool has_logits = transforms_logits(variant);
  if constexpr (!Variant::kUsesSoftmax) state.start_sum(warp.kv_warp == 0);
  const auto sm_scale = [&] { return score_scale(variant, params.sm_scale); };
  state.scale = has_logits ? kLog2E : sm_scale() * kLog2E;

  using OfKey = KeyTransform<Variant>;
  using OfValue = ValueTransform<Variant>;
  const auto start_of = [&](int32_t kv_tile) {
    return kv_tile_start<Variant::kSkipsTiles>(params.schedule, row_tile.group, row_tile.kv_begin, kv_tile, kKvTile);
  };
  const KvTileStart first = start_of(cursor.now.kv_tile);
  TileTokens tokens{KvTokens(params.schedule.groups[row_tile.group], cursor.now.head), TokenRange{0, 0}, first.token};

  int32_t* const requests = reinterpret_cast<int32_t*>(shared + layout.requests);  // of an 8-bit cache
  TokenRange unmasked;  // tokens that every row of this warp sees: their KV tiles need no mask
  {
    const RowTileRows<kManyLevels> rows(params.schedule, cursor.now.tile, params.group_size.divisor);
    __syncthreads();  // the previous item's output has left the Q tile
    load_q<Traits, tile_rows(kKind)>(params, rows, cursor.now.head, shared + layout.q);
    write_requests<Variant, tile_rows(kKind), kThreads>(params, rows, row_tile.group, cursor.now.head, threadIdx.x,
                                                        requests);
    if constexpr (Variant::kRotates) {
      __syncthreads();
      rotate_query_rows<Query, Element, Element, Shape::kQk, kThreads>(shared + layout.q, 0, tile_rows(kKind),
                                                                       threadIdx.x);
    }
    if constexpr (QueryTransform<Variant>::kExists) {
      __syncthreads();
      transform_rows<QueryTransform<Variant>, Query, Element, Shape::kQk, kThreads, 16, 1, 4>(
          shared + layout.q, 0, tile_rows(kKind), threadIdx.x, QueryTransform<Variant>(variant),
          TileRows<RowTileRows<kManyLevels>>{params, rows, row_tile.group, cursor.now.head});
    }
    if constexpr (Traits::kTransformsCache) {
      const TokenRange all{0, params.num_pages > 0 ? row_tile.kv_end : 0};
      tokens.readable = visibility().seen_by_any(rows.position(0, params.group_size),
                                                 rows.position(rows.count - 1, params.group_size), all);
    }
    unmasked = visibility().seen_by_all(rows.position(warp.first_row, params.group_size),
                                        rows.position(warp.first_row + Layout::kRows - 1, params.group_size),
                                        TokenRange{0, row_tile.kv_end});
  }

  LaneRows<Variant, Layout::kRowBlocks> lane_rows(
      params, RowTileRows<kManyLevels>(params.schedule, cursor.now.tile, params.group_size.divisor), row_tile.group,
      cursor.now.head, warp.first_row);
  if constexpr (Variant::kSkipsTiles) lane_rows.template enter<kKvTile>(first);
  const uint32_t q = ptx::shared_address(shared + layout.q) + warp.first_row * Query::kRowBytes +
                     (Traits::kDequantizesInRegisters ? Query::four_columns(lane) : Query::rows_first(lane));
  const uint32_t kv = ptx::shared_address(shared + layout.kv);
  const uint32_t first_key = warp.first_token * Keys::kRowBytes;
  const int first_column = kIsWide ? static_cast<int>(threadIdx.x / 32) * kColumns : 0;
  const uint32_t first_value = warp.first_token * Values::kRowBytes + first_column * Element::kBytes;
  int32_t token = first.token + warp.first_token;  // this warp's first one of the KV tile
  const int32_t num_kv_tiles = cursor.end_kv_tile(row_tile.num_kv_tiles) - cursor.now.kv_tile;

  for (int32_t left = num_kv_tiles; left > 0; --left) {
    const uint32_t k_stage = kv + ring.pair * layout.pair_bytes;
    float s[Layout::kRowBlocks][Layout::kTokens / 8][4];

    if constexpr (Variant::kHasTokenScales) loader.write_scales(0);
    ptx::cp_async_wait<kPending>();
    __syncthreads();  // K has arrived, and all warps have read the V stage before it
    loader.load_v(ring.tile + kPairs - 1, ring.pair == 0 ? kPairs - 1 : ring.pair - 1);
    char* const keys = shared + layout.kv + ring.pair * layout.pair_bytes;
    if constexpr (Traits::kDequantizesInTiles)
      stage_tokens<Traits, KTile<Traits>, Keys, Layout, kKvTile>(
          keys, staged_tile<Traits>(), warp, loader.tile_scales(0), scale_factor<Traits>(params, false));
    transform_tokens<OfKey, Keys, Element, Layout, Shape::kQk, kKvTile>(multiplied_tile<Traits>(keys), warp, variant,
                                                                        tokens);
    const uint32_t k = multiplied_address<Traits>(k_stage) + first_key + Keys::columns_first(lane);
    if constexpr (Traits::kDequantizesInRegisters) {
      state.template dequantized_scores<Shape::kQkMultiplied, Layout::kTokens, Keys, typename Traits::KvElement>(
          s, [&](int b, int d, uint32_t (&a)[4]) { load_query<Query>(a, q, b, d); }, k);
    } else {
      state.template scores<Shape::kQkMultiplied, Layout::kTokens, Query, Keys>(s, q, k);
    }

    scale_scores(variant, s, requests, warp.first_row);
    if (has_logits) transform_logits(variant, sm_scale(), s, token, lane_rows);
    if (token < unmasked.begin || token + Layout::kTokens > unmasked.end) {
      const RowTileRows<kManyLevels> rows(params.schedule, cursor.now.tile, params.group_size.divisor);
      mask_scores(visibility(), s, rows, params.group_size, warp.first_row, token, row_tile.kv_end);
    }
    apply_variant_mask(variant, s, token, lane_rows);
    uint32_t p[Layout::kRowBlocks][Layout::kTokens / 8][2];
    if constexpr (Variant::kUsesSoftmax)
      state.update(s, p);
    else
      state.pack_weights(s, p);

    ptx::cp_async_wait<kPending>();
    __syncthreads();  // V has arrived, and all warps have read the K stage
    loader.load_k(ring.tile + kPairs, ring.pair);
    if constexpr (Traits::kDequantizesInTiles)
      stage_tokens<Traits, VTile<Traits>, Values, Layout, kKvTile>(keys + layout.k_stage_bytes, staged_tile<Traits>(),
                                                                   warp, loader.tile_scales(1),
                                                                   scale_factor<Traits>(params, true));
    transform_tokens<OfValue, Values, Element, Layout, Shape::kV, kKvTile>(
        multiplied_tile<Traits>(keys + layout.k_stage_bytes), warp, variant, tokens);
    const uint32_t v =
        multiplied_address<Traits>(k_stage + layout.k_stage_bytes) + first_value + Values::rows_first(lane);
    if constexpr (Traits::kDequantizesInRegisters)
      state.template dequantized_accumulate<Layout::kTokens, Values, typename Traits::KvElement>(p, v);
    else
      state.template accumulate<Layout::kTokens, Values>(p, v);

    if constexpr (Variant::kSkipsTiles) {
      const KvTileStart next = start_of(cursor.now.kv_tile + num_kv_tiles - max_of(left - 1, 1));
      lane_rows.template enter<kKvTile>(next);
      tokens.first_token = next.token;
      token = next.token + warp.first_token;
    } else {
      token += kKvTile;
      tokens.first_token += kKvTile;
    }
    ++ring.tile;
    ring.pair = ring.pair == kPairs - 1 ? 0 : ring.pair + 1;
  }

  const RowTileRows<kManyLevels> rows(params.schedule, cursor.now.tile, params.group_size.divisor);
  const bool ends_inside = cursor.end_kv_tile(row_tile.num_kv_tiles) < row_tile.num_kv_tiles;
  using OutElement = typename Traits::OutElement;
  using Target = OutputTarget<OutElement, kManyLevels, Variant>;
  const Target target(params, rows, row_tile.group, cursor.now.head, cursor.now.kv_tile > 0, ends_inside, requests);
  if constexpr (kIsWide) {
    using Columns = SharedTile<OutElement, kColumns>;
    __syncthreads();  // all have read Q
    write_warp_rows<Columns>(state, TargetColumns<Target, OutElement::kBytes>(target, first_column), 0,
                             shared + layout.q + threadIdx.x / 32 * (Layout::kRows * Columns::kRowBytes));
  } else if constexpr (Layout::kKvWarps == 1) {
    if constexpr (Variant::kRotates) rotate_back<Shape::kV, Layout::kFourColumns>(state);
    write_warp_rows<Output, Layout::kFourColumns>(state, target, warp.first_row, shared + layout.q);
  } else {
    if constexpr (Variant::kHasTokenScales && Layout::kKvWarps == kWarps) __syncthreads();  // all have read V's scales
    write_merged_warps<WholeBlock, Layout, Output::kHeadColumns, layout.kv - layout.q>(
        state, target, warp, 2, shared + layout.q, reinterpret_cast<float*>(shared + layout.row_states));
  }
}

template <class Traits, bool kManyLevels>
__device__ __forceinline__ void run_interval(const ParamsOf<Traits>& params, WorkCursor cursor) {
  extern __shared__ __align__(1024) char shared[];
  const Visibility first_visibility = params.schedule.header->levels[0].visibility;
  KvLoader<Traits, kManyLevels> loader(params, first_visibility, cursor, shared);
  loader.start();
  RingCursor ring;

  constexpr int kMaxKind = tuning(Traits::Shape::kDims, Traits::kKvForm).max_kind;
  while (!cursor.done()) {
    switch (params.schedule.tiles[cursor.now.tile].kind) {
      case 0:
        run_work_item<Traits, kManyLevels, 0>(params, first_visibility, cursor, loader, ring, shared);
        break;
      case 1:
        if constexpr (kMaxKind >= 1)
          run_work_item<Traits, kManyLevels, 1>(params, first_visibility, cursor, loader, ring, shared);
        break;
      case 2:
        if constexpr (kMaxKind >= 2)
          run_work_item<Traits, kManyLevels, 2>(params, first_visibility, cursor, loader, ring, shared);
        break;
      default:
        if constexpr (kMaxKind >= 3)
          run_work_item<Traits, kManyLevels, 3>(params, first_visibility, cursor, loader, ring, shared);
    }
    cursor.next_pair(params.num_kv_heads);
  }
  ptx::cp_async_wait<0>();
}

template <class Traits>
__device__ __forceinline__ void attention(const ParamsOf<Traits>& params) {
  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();  // blocks of the next grid start as CTAs of this grid exit
  const WorkCursor cursor(params.schedule, blockIdx.x);
  if (cursor.done()) return;
  // A wider output leaves no register for sinks and a second path.
  constexpr bool kHasRoom = !Traits::Variant::kHasSinks || leaves_registers(Traits::Shape::kV);
  if constexpr (Traits::Variant::kReadsRows || !kHasRoom || Traits::kIsQuantized) {
    run_interval<Traits, true>(params, cursor);  // one for all schedules: compiled in a third of the time
  } else if (__builtin_expect(cursor.now.flags & kIsPlain, 1)) {
    run_interval<Traits, false>(params, cursor);
  } else {
    run_interval<Traits, true>(params, cursor);
  }
}

}  // namespace attn::sm80
