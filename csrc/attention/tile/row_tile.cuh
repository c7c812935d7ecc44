// The packed rows of a row tile: which rows and heads of Q and O they are, and what variants and scales see of them.
//
// kManyLevels, here and in what includes this: whether the schedule may have row lists and rows in several row groups.
// Schedules with neither (plain ones) cost less in code without them (ADR 14).
#pragma once

#include "attention/params.h"
#include "attention/variant/score_row.h"
#include "attention/variant/variants.h"
#include "common/math.h"
#include "common/ptx/warp.cuh"
#include "planner/schedule.h"

namespace attn {

/// Which rows of Q and O a row tile packs, and their query positions. Cheap to read again from the schedule: not kept
/// in registers over a work item.
template <bool kManyLevels>
struct RowTileRows {
  int32_t count;  // packed rows of this tile that exist
  int32_t packed_begin;
  int32_t qo_begin;
  int32_t offset;       // query position of row 0 of the group
  const int32_t* list;  // row list of the level, or nullptr; only with many levels
  int32_t state_begin;  // of the group; only with many levels

  RowTileRows() = default;

  __device__ __forceinline__ RowTileRows(const Schedule& schedule, const RowTile& tile, const RowGroup& group,
                                         int32_t group_size) {
    if constexpr (kManyLevels) {
      list = schedule.header->levels[group.level].rows;
      state_begin = group.state_begin;
    }
    packed_begin = tile.packed_begin;
    qo_begin = group.qo_begin;
    offset = group.kv_len - group.qo_len;
    const int64_t left = static_cast<int64_t>(group.qo_len) * group_size - tile.packed_begin;
    count = static_cast<int32_t>(min_of<int64_t>(left, tile_rows(tile.kind)));
  }

  __device__ __forceinline__ RowTileRows(const Schedule& schedule, int32_t tile, int32_t group_size)
      : RowTileRows(schedule, schedule.tiles[tile], schedule.groups[schedule.tiles[tile].group], group_size) {}

  /// Query position of a row of the tile; of the last one for rows that do not exist.
  __device__ __forceinline__ int32_t position(int32_t row, const FastDivisor& group_size) const {
    return offset + group_size.divide(packed_begin + min_of(row, count - 1));
  }
};

/// Which row and head of Q and O a packed row of a row tile is.
struct PackedRow {
  bool exists;
  int32_t index;  // of the row in its group
  int32_t row;
  int32_t qo_head;

  PackedRow() = default;

  template <bool kManyLevels>
  __device__ __forceinline__ PackedRow(const AttentionParams& params, const RowTileRows<kManyLevels>& rows,
                                       int32_t kv_head, int32_t tile_row) {
    const int32_t packed = rows.packed_begin + tile_row;
    index = params.group_size.divide(packed);
    exists = tile_row < rows.count;
    row = rows.qo_begin + index;
    if constexpr (kManyLevels) {
      if (exists && rows.list != nullptr) row = __ldg(rows.list + row);
    }
    qo_head = kv_head * params.group_size.divisor + packed - index * params.group_size.divisor;
    exists = exists && row >= 0 && row < params.num_rows;
  }

  template <class Element>
  __device__ __forceinline__ char* o(const AttentionParams& params) const {
    return static_cast<char*>(params.o) +
           (row * params.o_row_stride + qo_head * params.o_head_stride) * Element::kBytes;
  }

  /// nullptr: not wanted.
  __device__ __forceinline__ float* lse(const AttentionParams& params) const {
    return params.lse == nullptr
               ? nullptr
               : params.lse + static_cast<int64_t>(row) * params.num_kv_heads * params.group_size.divisor + qo_head;
  }
};

/// The pointer that lane `source` has. Where lanes work on a row together, each of them has looked up another one.
template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, int source) {
  return reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pointer), source));
}

/// A row of the row tile, as variants see it; the last one for rows that do not exist. `group`: of the tile.
template <bool kManyLevels>
__device__ __forceinline__ ScoreRow score_row(const AttentionParams& params, const RowTileRows<kManyLevels>& rows,
                                              int32_t group, int32_t kv_head, int32_t tile_row) {
  const PackedRow row(params, rows, kv_head, min_of(tile_row, rows.count - 1));
  return score_row(params.schedule, group, row.index, row.row, row.qo_head);
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
/// at them.
template <class Variant, int kRowBlocks>
struct LaneRows {
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
        rows[b][half] = score_row(params, tile, group, kv_head, first_row + b * 16 + half * 8 + ptx::lane_id() / 4);
    }
    if constexpr (VariantHooks<Variant>::kBiasSlope) {
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
    return static_cast<float>(kv_offset + first_token + ptx::lane_id() % 4 * 2 - rows[b][half].position);
  }

 private:
  template <bool kManyLevels>
  __device__ __forceinline__ void find_seen(const AttentionParams& params, const RowTileRows<kManyLevels>& tile,
                                            int32_t group, int32_t first_row) {
    const Level& level = params.schedule.header->levels[params.schedule.groups[group].level];
    if (level.row_ranges == nullptr) return;
    int32_t begin = 0, end = static_cast<int32_t>(kMaxInt32);
    for (int32_t row = first_row + ptx::lane_id(); row < first_row + kRowBlocks * 16; row += 32) {
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
