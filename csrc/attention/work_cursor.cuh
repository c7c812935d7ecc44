// A walk over a CTA's interval of the schedule, or over the pairs that it takes from the work queue, one (row tile,
// head) pair after another.
//
// kManyLevels, here and in what includes this: whether the schedule may have row lists and rows in several row groups.
// Schedules with neither (plain ones) cost less in code without them (ADR 14).
#pragma once

#include "attention/variants.h"

namespace attn {

struct WorkCursor {
  Position now;
  Position end;

  __device__ __forceinline__ WorkCursor(const Schedule& schedule, int32_t cta)
      : now(schedule.positions[cta]), end(schedule.positions[cta + 1]) {}

  __device__ __forceinline__ bool uses_queue() const { return (now.flags & kUsesQueue) != 0; }

  /// Goes to a whole pair from the work queue.
  __device__ __forceinline__ void take(const Position& pair) {
    now = pair;
    end = Position{pair.tile, pair.head + 1, 0, 0};
  }

  __device__ __forceinline__ bool done() const { return !(now < end); }

  __device__ __forceinline__ bool in_last_pair() const { return now.tile == end.tile && now.head == end.head; }

  /// The KV tile after the last one of the current pair that belongs to this CTA.
  __device__ __forceinline__ int32_t last_kv_tile(int32_t num_kv_tiles) const {
    return in_last_pair() ? end.kv_tile : num_kv_tiles;
  }

  __device__ __forceinline__ void next_pair(int32_t num_kv_heads) {
    if (in_last_pair()) {
      now = end;
      return;
    }
    now.kv_tile = 0;
    if (++now.head == num_kv_heads) {
      now.head = 0;
      ++now.tile;
    }
  }
};

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

}  // namespace attn
