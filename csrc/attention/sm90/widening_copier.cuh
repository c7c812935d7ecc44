// How the producer loads KV tiles of wide heads over an 8-bit cache: all four warps read rows into registers, widen
// them and write them to the ring, which then holds what wgmma takes, as that of a 16-bit cache. V is in K's bytes.
#pragma once

#include "attention/sm90/params.h"
#include "attention/sm90/shared_memory.cuh"
#include "attention/sm90/swizzled_tile.cuh"
#include "attention/sm90/work_item.cuh"
#include "attention/widened_row.cuh"
#include "common/ptx/cache_policy.cuh"
#include "common/ptx/special_registers.cuh"

namespace attn::sm90 {

/// A warp's share of a KV tile: 16 tokens, of which a lane has two, and of their rows the quarters of blocks. It goes
/// through them piece by piece, the right ones first, as the consumers take them; the next few are on their way.
template <class Traits>
struct WideningCopier {
  static constexpr bool kGathers = true;
  using Shared = SharedMemory<Traits>;
  using Stored = typename Traits::StoredElement;
  using Tile = KTile<Traits>;
  using Row = StoredRow<typename Traits::Element, Stored, Tile::kBlocks>;
  static constexpr int kWarpTokens = Shared::kTuning.kv_tile / (kProducerThreads / 32);
  static constexpr int kRowsAtOnce = 8;  // of a warp: four lanes take a row
  static constexpr int kRows = kWarpTokens / kRowsAtOnce;
  static constexpr int kLeftBlocks = VTile<Traits>::kBlocks / 2;
  static constexpr int kAhead = 5;  // pieces that are on their way

  const HopperParams& params;
  int32_t token = 0;  // the lane's first
  int32_t entry[kRows] = {};
  uint4 coming[kAhead];
  float scales[Stored::kRowsHaveScales ? kAhead : 1];  // of these pieces, or of the cache

  template <class Share>
  __device__ __forceinline__ WideningCopier(const HopperParams& params_, const Share& /*share*/) : params(params_) {}

  /// Of the lane's rows: the first, in the tile. The rows of a pair that eight lanes write differ such that their
  /// stores fall into different banks.
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

  /// The lane's rows, of KV head 0; nullptr: not in the cache.
  struct Box {
    const char* rows[kRows];
  };

  /// Where what was looked up is.
  __device__ __forceinline__ Box found(const LoadedRowTile& tile) const {
    const KvTensor& tensor = params.attention.k;
    Box box;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      box.rows[i] = nullptr;
      if (!is_readable(tile, token + i * kRowsAtOnce)) continue;
      const int32_t in_page = params.attention.page_size.modulo(token + i * kRowsAtOnce);
      box.rows[i] = static_cast<const char*>(tensor.data) + tile.page(params.attention, entry[i]) * tensor.page_stride +
                    in_page * tensor.token_stride;
    }
    return box;
  }

  /// Goes to a KV head, and starts to read the first pieces, while the ring may still be full.
  __device__ __forceinline__ void start(Box& box, int32_t head) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (box.rows[i] != nullptr) box.rows[i] += head * params.attention.k.head_stride;
    }
    if constexpr (!Stored::kRowsHaveScales) {
      using VariantParams = typename Traits::Variant::Params;
      scales[0] = params.attention.variant.template as<VariantParams>().scales.k.of(0, head);
    }
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(box, step);
  }

  /// Blocks [kFirst, kEnd) of columns.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy(const Shared& shared, const Box& box, int32_t /*head*/, int part,
                                       ptx::CachePolicy /*policy*/) {
    constexpr int kFirstStep = kFirst > 0 ? 0 : kRightSteps, kEndStep = kFirst > 0 ? kRightSteps : kSteps;
    char* const tile = shared.kv(part);
#pragma unroll
    for (int step = kFirstStep; step < kEndStep; ++step) {
      const int row = step % kRows;
      row_of(box, row).template store<Tile>(tile, first_row() + row * kRowsAtOnce, piece_of(step),
                                            coming[step % kAhead], scale(step));
      if (step + kAhead < kSteps) load(box, step + kAhead);
    }
    ptx::fence_async_proxy();
    Shared::arrive_as_warp(shared.kv_full(part), 1);
  }

 private:
  // Steps: a piece of each row, the right pieces first.
  static constexpr int kRightSteps = kRows * (Row::kPieces - kLeftBlocks);
  static constexpr int kSteps = kRows * Row::kPieces;
  static constexpr int piece_of(int step) {
    return step < kRightSteps ? kLeftBlocks + step / kRows : (step - kRightSteps) / kRows;
  }

  __device__ __forceinline__ static Row row_of(const Box& box, int i) { return Row{box.rows[i], ptx::lane_id() % 4}; }

  __device__ __forceinline__ void load(const Box& box, int step) {
    const Row row = row_of(box, step % kRows);
    coming[step % kAhead] = row.load(piece_of(step));
    if constexpr (Stored::kRowsHaveScales) scales[step % kAhead] = row.scale(piece_of(step));
  }

  /// What the numbers of a step are multiplied by.
  __device__ __forceinline__ float scale(int step) const { return scales[Stored::kRowsHaveScales ? step % kAhead : 0]; }
};

}  // namespace attn::sm90
