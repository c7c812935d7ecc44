// What lanes keep of the packed rows of a row tile: variants and scales look at them.
#pragma once

#include "attention/params.h"
#include "attention/tile/row_tile.h"
#include "attention/variant/variants.h"
#include "common/math.h"
#include "common/ptx/warp.cuh"
#include "planner/schedule.h"

namespace attn {

/// The pointer that lane `source` has. Where lanes work on a row together, each of them has looked up another one.
template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, int source) {
  return reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pointer), source));
}

/// Writes the requests of all rows of a row tile to shared memory, if a scale of the cache depends on them: where
/// scores are computed there are no registers left to find them. `thread` of kThreads.
template <class Variant, int kRows, int kThreads, bool kManyLevels>
__device__ __forceinline__ void write_requests(const AttentionParams& params, const RowTileRows<kManyLevels>& rows,
                                               int32_t group, int32_t kv_head, int thread, int32_t* requests) {
  if constexpr (Variant::kHasScales) {
    const AttentionScales& scales = params.variant.as<typename Variant::Params>().scales;
    if (!scales.k.is_of_requests() && !scales.v.is_of_requests()) return;
    for (int row = thread; row < kRows; row += kThreads)
      requests[row] = score_row(params, rows, group, kv_head, row).request;
  }
}

/// The rows of a work item whose scores a lane holds, as variants see them: made once for an item, if the variant looks
/// at them. kTransposed: rows are the columns of products. A block has eight, and a lane two neighbors.
template <class Variant, int kRowBlocks, bool kTransposed_ = false>
struct LaneRows {
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kBlockRows = kTransposed ? 8 : 16;
  ScoreRow rows[kRowBlocks][2];
  float bias_slopes[kRowBlocks][2];  // of a variant that has them
  int32_t kv_offset = 0;             // token t of the row group is token kv_offset + t of the request
  TokenRange seen{0, 0};             // tokens of the row group that the variant lets all of the warp's rows see

  /// `first_row`: of the warp.
  template <bool kManyLevels>
  __device__ __forceinline__ LaneRows(const AttentionParams& params, const RowTileRows<kManyLevels>& tile,
                                      int32_t group, int32_t kv_head, int32_t first_row) {
    if constexpr (!Variant::kReadsRows) return;
    kv_offset = params.schedule.groups[group].kv_offset;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[b][half] = score_row(params, tile, group, kv_head, first_row + b * kBlockRows + row_of_block(half));
    }
    if constexpr (VariantHooks<Variant>::kBiasSlope && !kTransposed) {
      const Variant variant(params.variant.as<typename Variant::Params>(), kv_head);
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) bias_slopes[b][half] = variant.bias_slope(rows[b][half]);
      }
    }
    if constexpr (VariantHooks<Variant>::kMask) find_seen(params, tile, group, first_row);
  }

  /// Goes on to a KV tile of kTokens tokens.
  template <int kTokens>
  __device__ __forceinline__ void enter(const KvTileStart& kv_tile) {
    if (kv_tile.is_seen) seen = TokenRange{kv_tile.token, kv_tile.token + kTokens};
  }

  /// How far the lane's first column of a warp's scores, which begin at `first_token`, lies after a row. A variant's
  /// bias there is its slope times this distance.
  __device__ __forceinline__ float bias_distance(int b, int half, int32_t first_token) const {
    return static_cast<float>(kv_offset + first_token + first_token_of_lane() - rows[b][half].position);
  }

  /// The first of a warp's tokens whose scores the lane holds.
  __device__ __forceinline__ static int32_t first_token_of_lane() {
    return kTransposed ? ptx::lane_id() / 4 : ptx::lane_id() % 4 * 2;
  }

 private:
  __device__ __forceinline__ static int32_t row_of_block(int half) {
    return kTransposed ? ptx::lane_id() % 4 * 2 + half : half * 8 + ptx::lane_id() / 4;
  }

  template <bool kManyLevels>
  __device__ __forceinline__ void find_seen(const AttentionParams& params, const RowTileRows<kManyLevels>& tile,
                                            int32_t group, int32_t first_row) {
    const Level& level = params.schedule.header->levels[params.schedule.groups[group].level];
    if (level.row_ranges == nullptr) return;
    int32_t begin = 0, end = static_cast<int32_t>(kMaxInt32);
    for (int32_t row = first_row + ptx::lane_id(); row < first_row + kRowBlocks * kBlockRows; row += 32) {
      const int32_t packed = tile.packed_begin + min_of(row, tile.count - 1);
      const RowRange range = level.row_ranges[tile.qo_begin + params.group_size.divide(packed)];
      begin = max_of(begin, range.full_begin);
      end = min_of(end, range.full_end);
    }
    seen =
        TokenRange{__reduce_max_sync(0xffffffffu, begin) - kv_offset, __reduce_min_sync(0xffffffffu, end) - kv_offset};
  }
};

}  // namespace attn
