// How the producer loads KV tiles of wide heads over an 8-bit cache: all four warps read rows, dequantize them and
// write them to the ring. The ring then holds 16-bit tiles that wgmma reads, as with a 16-bit cache. Latents, whose V
// is in K's bytes, are one tile of it; others are a tile of K and a tile of V.
#pragma once

#include "attention/feed/kv_copiers.cuh"
#include "attention/feed/params.h"
#include "attention/feed/shared_memory.cuh"
#include "attention/feed/tiles.cuh"
#include "attention/feed/work_item.cuh"
#include "attention/tile/dequantized.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/types.cuh"
#include "common/ptx/warp.cuh"

namespace attn::feed {

/// A warp's share of the tiles: 16 tokens. A lane has two of them, and a quarter of each block of their rows. It loads
/// piece by piece, the right part first, as the consumers take them. The next few pieces are on their way, to shared
/// memory if there is room, else to registers; these run on into the next KV tile.
///
/// With two CTAs, which need the same KV tiles, each dequantizes half of the tokens, so a lane has one. A warp copies
/// its tokens from its own stage to the other CTA's. A stage is free when the consumers of both CTAs have freed it.
template <class Traits, int kCtas = 1>
struct DequantizingCopier {
  static constexpr bool kGathers = true;
  using Shared = SharedMemory<Traits>;
  using Stored = typename Traits::StoredElement;
  using Tile = KTile<Traits>;
  using Row = StoredRow<typename Traits::Element, Stored, Tile::kBlocks>;
  static constexpr int kTiles = Traits::kLoadsScaled ? 1 : 2;
  static constexpr int kWarpTokens = Traits::kTuning.kv_tile / (kCtas * kProducerThreads / 32);
  static constexpr int kRowsAtOnce = 8;  // of a warp: four lanes take a row
  static constexpr int kRows = kWarpTokens / kRowsAtOnce;
  static constexpr int kLeftBlocks = VTile<Traits>::kBlocks / 2;
  // Steps: a piece of each row, the right pieces of a tile first.
  static constexpr int kRightSteps = kRows * (Row::kPieces - kLeftBlocks);
  static constexpr int kTileSteps = kRows * Row::kPieces;
  static constexpr int kSteps = kTiles * kTileSteps;
  static constexpr int piece_of(int step) {
    const int tile_step = step % kTileSteps;
    return tile_step < kRightSteps ? kLeftBlocks + tile_step / kRows : (tile_step - kRightSteps) / kRows;
  }

  static constexpr bool kBuffersPieces = Traits::kTuning.staged_pieces > 0;
  static constexpr int kAhead =
      kBuffersPieces ? Traits::kTuning.staged_pieces : kSteps * kCtas / 2;  // pieces on their way
  static constexpr bool kRunsOn = kSteps % kAhead == 0;  // into the next KV tile: a step's piece is always in one place

  const TmaParams& params;
  int32_t token = 0;  // the lane's first
  int32_t entry[kRows] = {};
  uint4 coming[kBuffersPieces ? 1 : kAhead];
  float scales[Stored::kRowsHaveScales ? Row::Latent::kScales * kRows : 1];  // of the rows, or the cache's

  __device__ __forceinline__ DequantizingCopier(const TmaParams& params_, const KvShare<Traits>& /*share*/)
      : params(params_) {}

  /// Of a warp at a barrier.
  __device__ __forceinline__ static uint32_t arrivals(const TmaParams&) { return 32; }

  /// The first of the warp's rows in the tile.
  __device__ __forceinline__ static int warp_row() {
    const int row = ptx::thread_id() / 32 * kWarpTokens;
    return kCtas == 1 ? row : static_cast<int>(ptx::cluster_rank()) * (Traits::kTuning.kv_tile / kCtas) + row;
  }

  /// The first of the lane's. Eight lanes write a pair of rows, chosen so that their stores fall into different banks.
  __device__ __forceinline__ static int first_row() {
    const int lane = ptx::lane_id();
    return warp_row() + (lane / 8 ^ lane / 4 % 2 * 5);
  }

  __device__ __forceinline__ static bool is_readable(const LoadedRowTile& tile, int32_t token) {
    return token >= tile.readable.begin && token < tile.readable.end;
  }

  template <class TokenOf>
  __device__ __forceinline__ void look_up(const LoadedRowTile& tile, const TokenOf& token_of, int /*count*/) {
    look_up_from(tile, token_of(0));
  }
  __device__ __forceinline__ void look_up_from(const LoadedRowTile& tile, int32_t tile_token) {
    token = tile_token + first_row();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (is_readable(tile, token + i * kRowsAtOnce)) entry[i] = tile.entry(params.attention, token + i * kRowsAtOnce);
    }
  }

  /// The lane's rows of K and of V; nullptr: not in the cache.
  struct Rows {
    const char* begin[kTiles][kRows];
  };

  __device__ __forceinline__ const KvTensor& tensor(int is_v) const {
    return is_v ? params.attention.v : params.attention.k;
  }

  /// Where the rows that were looked up begin.
  __device__ __forceinline__ Rows found(const LoadedRowTile& tile, int32_t head) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int is_v = 0; is_v < kTiles; ++is_v) rows.begin[is_v][i] = nullptr;
      if (!is_readable(tile, token + i * kRowsAtOnce)) continue;
      const int32_t in_page = params.attention.page_size.modulo(token + i * kRowsAtOnce);
      const int32_t page = tile.page(params.attention, entry[i]);
#pragma unroll
      for (int is_v = 0; is_v < kTiles; ++is_v) {
        rows.begin[is_v][i] = static_cast<const char*>(tensor(is_v).data) + page * tensor(is_v).page_stride +
                              in_page * tensor(is_v).token_stride + head * tensor(is_v).head_stride;
      }
    }
    return rows;
  }

  /// Brings the rows to L2: pieces on their way to registers are too few to keep the memory busy.
  __device__ __forceinline__ void prefetch(const Rows& rows) const {
    static_assert(kTiles * kRows <= 4, "a lane for each row");
    const char* data = nullptr;
#pragma unroll
    for (int row = 0; row < kTiles * kRows; ++row) {
      if (ptx::lane_id() % 4 == row) data = rows.begin[row / kRows][row % kRows];
    }
    if (data != nullptr) ptx::prefetch_bytes_to_l2(data, Row::kBytes);
  }

  /// Starts to read the first pieces, while the ring may still be full.
  __device__ __forceinline__ void start(const Shared& shared, const Rows& rows, int32_t head) {
    if constexpr (!Traits::kLoadsScaled) {
      scales[0] = 1.0f;  // scores and outputs are multiplied by the cache's
    } else if constexpr (!Stored::kRowsHaveScales) {
      using VariantParams = typename Traits::Variant::Params;
      scales[0] = params.attention.variant.template as<VariantParams>().scales.k.of(0, head);
    }
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      load(shared, rows, step);
      if constexpr (kBuffersPieces) ptx::cp_async_commit();
    }
  }

  /// Steps [kFirst, kEnd) of K, or of V. `next`: of the next KV tile.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy(const Shared& shared, const Rows& rows, const Rows& next, int part, int is_v) {
    char* const tile = shared.kv(part);
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const int step = i + is_v * kTileSteps, row = step % kRows;
      row_of(rows, step)
          .template store<Tile>(tile, first_row() + row * kRowsAtOnce, piece_of(step), arrived(shared, step),
                                scale(step));
      if constexpr (kCtas > 1) continue;
      if (step + kAhead < kSteps)
        load(shared, rows, step + kAhead);
      else if (kRunsOn)
        load(shared, next, step + kAhead - kSteps);
      if constexpr (kBuffersPieces) ptx::cp_async_commit();  // an empty group, too: arrived() counts them
    }
    ptx::fence_async_proxy();
    if constexpr (kCtas == 1) {
      Shared::arrive_as_warp(shared.kv_full(part), 1);
    } else {
      exchange<kFirst == 0 ? kLeftBlocks : 0, kFirst == 0 ? Tile::kBlocks : kLeftBlocks>(shared, part);
      static_assert(kAhead == kSteps, "the next KV tile's, for which the fence need not wait");
#pragma unroll
      for (int step = kFirst; step < kEnd; ++step) load(shared, next, step);
    }
  }

  /// Copies blocks [kFirst, kEnd) of the warp's rows to the other CTA, and expects as many bytes from there.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void exchange(const Shared& shared, int part) const {
    constexpr uint32_t kBytes = kWarpTokens * Tile::kRowBytes;  // of a block
    const uint32_t other = ptx::cluster_rank() ^ 1, full = shared.kv_full(part);
    const int lane = ptx::lane_id();
    __syncwarp();
    if (lane < kEnd - kFirst) {
      const uint32_t rows =
          ptx::shared_address(shared.kv(part)) + (kFirst + lane) * Tile::kBlockBytes + warp_row() * Tile::kRowBytes;
      ptx::copy_to_cta(ptx::cluster_address(rows, other), rows, kBytes, ptx::cluster_address(full, other));
    }
    if (lane == 0) ptx::mbarrier_arrive_expect(full, (kEnd - kFirst) * kBytes);
  }

  /// The other CTA arrives at this one's barriers, and reads what this one copies: neither may end before.
  __device__ __forceinline__ void wait_for_other(const Shared& shared, typename Shared::KvPlace place) const {
    if constexpr (kCtas > 1) {
      for (int part = 0; part < Shared::kKvParts; ++part, place = place.ahead(1)) shared.wait_kv_free(place);
    }
  }

  /// Loads `count` KV tiles to the ring. The first has been looked up. Number i begins at token_of(i).
  template <class TokenOf>
  __device__ __forceinline__ void dequantize(const Shared& shared, const LoadedRowTile& tile, int32_t head, int count,
                                             const TokenOf& token_of, typename Shared::KvPlace& place) {
    Rows rows = found(tile, head);
    if (count > 1) look_up_from(tile, token_of(1));
    for (int i = 0; i < count; ++i) {
      if (i == 0 || !kRunsOn) start(shared, rows, head);
      Rows next{};
      if (i + 1 < count) next = found(tile, head);
      if constexpr (Stored::kRowsHaveScales) prefetch(next);  // others are faster without (ADR 38)
      if (i + 2 < count) look_up_from(tile, token_of(i + 2));
#pragma unroll
      for (int is_v = 0; is_v < kTiles; ++is_v) {
        const typename Shared::KvPlace right = place.ahead(1);  // freed first, and multiplied first
        shared.wait_kv_free(right);
        copy<0, kRightSteps>(shared, rows, next, right.index, is_v);
        shared.wait_kv_free(place);
        copy<kRightSteps, kTileSteps>(shared, rows, next, place.index, is_v);
        place = place.ahead(2);
      }
      rows = next;
    }
  }

 private:
  __device__ __forceinline__ static Row row_of(const Rows& rows, int step) {
    return Row{rows.begin[step / kTileSteps][step % kRows], ptx::lane_id() % 4};
  }

  __device__ __forceinline__ void load(const Shared& shared, const Rows& rows, int step) {
    const Row row = row_of(rows, step);
    if constexpr (kBuffersPieces) {
      const char* const from = row.data == nullptr ? static_cast<const char*>(params.attention.k.data)
                                                   : row.data + row.byte_of(piece_of(step));
      ptx::cp_async_16_or_zero(ptx::shared_address(shared.staged(step % kAhead)), from, row.data != nullptr);
    } else {
      coming[step % kAhead] = row.load(piece_of(step));
    }
    if constexpr (Stored::kRowsHaveScales) {
      if (Row::is_first_of_scale(piece_of(step))) scales[place_of_scale(step)] = row.scale(piece_of(step));
    }
  }

  /// The piece that a step stores; only the later ones are still on their way.
  __device__ __forceinline__ uint4 arrived(const Shared& shared, int step) const {
    if constexpr (kBuffersPieces) {
      ptx::cp_async_wait<kAhead - 1>();
      return *reinterpret_cast<const uint4*>(shared.staged(step % kAhead));
    } else {
      return coming[step % kAhead];
    }
  }

  static constexpr int place_of_scale(int step) {
    return Stored::kRowsHaveScales ? Row::scale_of(piece_of(step)) * kRows + step % kRows : 0;
  }

  /// The factor of a step's numbers.
  __device__ __forceinline__ float scale(int step) const { return scales[place_of_scale(step)]; }
};

}  // namespace attn::feed
