// How the producer loads KV tiles of wide heads over an 8-bit cache: all four warps read rows, widen them and write
// them to the ring, which then holds what wgmma takes, as that of a 16-bit cache. Latents, whose V is in K's bytes, are
// one tile of it; others are a tile of K and a tile of V.
#pragma once

#include "attention/sm90/params.h"
#include "attention/sm90/shared_memory.cuh"
#include "attention/sm90/swizzled_tile.cuh"
#include "attention/sm90/work_item.cuh"
#include "attention/widened_row.cuh"
#include "common/ptx/cache_policy.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace attn::sm90 {

/// A warp's share of the tiles: 16 tokens. A lane has two of them, and a quarter of each block of their rows. It loads
/// piece by piece, the right part first, as the consumers take them. The next few pieces are on their way, to shared
/// memory if there is room, else to registers.
template <class Traits>
struct WideningCopier {
  static constexpr bool kGathers = true;
  using Shared = SharedMemory<Traits>;
  using Stored = typename Traits::StoredElement;
  using Tile = KTile<Traits>;
  using Row = StoredRow<typename Traits::Element, Stored, Tile::kBlocks>;
  static constexpr int kTiles = Traits::kLoadsScaled ? 1 : 2;
  static constexpr int kWarpTokens = Shared::kTuning.kv_tile / (kProducerThreads / 32);
  static constexpr int kRowsAtOnce = 8;  // of a warp: four lanes take a row
  static constexpr int kRows = kWarpTokens / kRowsAtOnce;
  static constexpr int kLeftBlocks = VTile<Traits>::kBlocks / 2;
  static constexpr bool kStages = Shared::kTuning.staged_pieces > 0;
  static constexpr int kAhead = kStages ? Shared::kTuning.staged_pieces : 5;  // pieces that are on their way

  const HopperParams& params;
  int32_t token = 0;  // the lane's first
  int32_t entry[kRows] = {};
  uint4 coming[kStages ? 1 : kAhead];
  float scales[Stored::kRowsHaveScales ? kAhead : 1];  // of these pieces, or of the cache

  template <class Share>
  __device__ __forceinline__ WideningCopier(const HopperParams& params_, const Share& /*share*/) : params(params_) {}

  /// The first of the lane's rows in the tile. Eight lanes write a pair of rows, chosen so that their stores fall into
  /// different banks.
  __device__ __forceinline__ static int first_row() {
    const int lane = ptx::lane_id();
    return ptx::thread_id() / 32 * kWarpTokens + (lane / 8 ^ lane / 4 % 2 * 5);
  }

  __device__ __forceinline__ static bool is_readable(const LoadedRowTile& tile, int32_t token) {
    return token >= tile.readable.begin && token < tile.readable.end;
  }

  __device__ __forceinline__ void look_up(const LoadedRowTile& tile, int32_t tile_token) {
    token = tile_token + first_row();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (is_readable(tile, token + i * kRowsAtOnce)) entry[i] = tile.entry(params.attention, token + i * kRowsAtOnce);
    }
  }

  /// The lane's rows of K and of V; nullptr: not in the cache.
  struct Box {
    const char* rows[kTiles][kRows];
  };

  __device__ __forceinline__ const KvTensor& tensor(int is_v) const {
    return is_v ? params.attention.v : params.attention.k;
  }

  /// Where the rows that were looked up begin, for KV head 0.
  __device__ __forceinline__ Box found(const LoadedRowTile& tile) const {
    Box box;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int is_v = 0; is_v < kTiles; ++is_v) box.rows[is_v][i] = nullptr;
      if (!is_readable(tile, token + i * kRowsAtOnce)) continue;
      const int32_t in_page = params.attention.page_size.modulo(token + i * kRowsAtOnce);
      const int32_t page = tile.page(params.attention, entry[i]);
#pragma unroll
      for (int is_v = 0; is_v < kTiles; ++is_v) {
        box.rows[is_v][i] = static_cast<const char*>(tensor(is_v).data) + page * tensor(is_v).page_stride +
                            in_page * tensor(is_v).token_stride;
      }
    }
    return box;
  }

  /// Goes to a KV head, and starts to read the first pieces, while the ring may still be full.
  __device__ __forceinline__ void start(const Shared& shared, Box& box, int32_t head) {
#pragma unroll
    for (int is_v = 0; is_v < kTiles; ++is_v) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (box.rows[is_v][i] != nullptr) box.rows[is_v][i] += head * tensor(is_v).head_stride;
      }
    }
    if constexpr (!Traits::kLoadsScaled) {
      scales[0] = 1.0f;  // scores and outputs are multiplied by the cache's
    } else if constexpr (!Stored::kRowsHaveScales) {
      using VariantParams = typename Traits::Variant::Params;
      scales[0] = params.attention.variant.template as<VariantParams>().scales.k.of(0, head);
    }
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      load(shared, box, step);
      if constexpr (kStages) ptx::cp_async_commit();
    }
  }

  /// Blocks [kFirst, kEnd) of columns of K, or of V.
  template <int kFirst, int kEnd, bool kIsV = false>
  __device__ __forceinline__ void copy(const Shared& shared, const Box& box, int32_t /*head*/, int part,
                                       ptx::CachePolicy /*policy*/) {
    constexpr int kFirstStep = kFirst > 0 ? 0 : kRightSteps, kEndStep = kFirst > 0 ? kRightSteps : kTileSteps;
    char* const tile = shared.kv(part);
#pragma unroll
    for (int i = kFirstStep; i < kEndStep; ++i) {
      const int step = i + kIsV * kTileSteps, row = step % kRows;
      row_of(box, step).template store<Tile>(tile, first_row() + row * kRowsAtOnce, piece_of(step),
                                             arrived(shared, step), scale(step));
      if (step + kAhead < kSteps) load(shared, box, step + kAhead);
      if constexpr (kStages) ptx::cp_async_commit();  // an empty group, too: arrived() counts them
    }
    ptx::fence_async_proxy();
    Shared::arrive_as_warp(shared.kv_full(part), 1);
  }

 private:
  // Steps: a piece of each row, the right pieces of a tile first.
  static constexpr int kRightSteps = kRows * (Row::kPieces - kLeftBlocks);
  static constexpr int kTileSteps = kRows * Row::kPieces;
  static constexpr int kSteps = kTiles * kTileSteps;
  static constexpr int piece_of(int step) {
    const int of_tile = step % kTileSteps;
    return of_tile < kRightSteps ? kLeftBlocks + of_tile / kRows : (of_tile - kRightSteps) / kRows;
  }

  __device__ __forceinline__ static Row row_of(const Box& box, int step) {
    return Row{box.rows[step / kTileSteps][step % kRows], ptx::lane_id() % 4};
  }

  __device__ __forceinline__ void load(const Shared& shared, const Box& box, int step) {
    const Row row = row_of(box, step);
    if constexpr (kStages) {
      const char* const from = row.data == nullptr ? static_cast<const char*>(params.attention.k.data)
                                                   : row.data + row.byte_of(piece_of(step));
      ptx::cp_async_16_or_zero(ptx::shared_address(shared.staged(step % kAhead)), from, row.data != nullptr);
    } else {
      coming[step % kAhead] = row.load(piece_of(step));
    }
    if constexpr (Stored::kRowsHaveScales) scales[step % kAhead] = row.scale(piece_of(step));
  }

  /// The piece that a step stores; only the later ones are still on their way.
  __device__ __forceinline__ uint4 arrived(const Shared& shared, int step) const {
    if constexpr (kStages) {
      ptx::cp_async_wait<kAhead - 1>();
      return *reinterpret_cast<const uint4*>(shared.staged(step % kAhead));
    } else {
      return coming[step % kAhead];
    }
  }

  /// What the numbers of a step are multiplied by.
  __device__ __forceinline__ float scale(int step) const { return scales[Stored::kRowsHaveScales ? step % kAhead : 0]; }
};

}  // namespace attn::sm90
