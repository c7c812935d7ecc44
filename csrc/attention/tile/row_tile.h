// The packed rows of a row tile: which rows and heads of Q and O they are.
//
// kManyLevels, here and in what includes this: whether the schedule may have row lists and rows in several row groups.
// Schedules with neither (plain ones) cost less in code without them (ADR 14).
#pragma once

#include "attention/params.h"
#include "attention/variant/coordinates.h"
#include "common/index_array.h"
#include "common/math.h"
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

  ATTN_HD RowTileRows(const Schedule& schedule, const RowTile& tile, const RowGroup& group, int32_t group_size) {
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

  ATTN_HD RowTileRows(const Schedule& schedule, int32_t tile, int32_t group_size)
      : RowTileRows(schedule, schedule.tiles[tile], schedule.groups[schedule.tiles[tile].group], group_size) {}

  /// Query position of a row of the tile; of the last one for rows that do not exist.
  ATTN_HD int32_t position(int32_t row, const FastDivisor& group_size) const {
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
  ATTN_HD PackedRow(const AttentionParams& params, const RowTileRows<kManyLevels>& rows, int32_t kv_head,
                    int32_t tile_row) {
    const int32_t packed = rows.packed_begin + tile_row;
    index = params.group_size.divide(packed);
    exists = tile_row < rows.count;
    row = rows.qo_begin + index;
    if constexpr (kManyLevels) {
      if (exists && rows.list != nullptr) row = read_only(rows.list + row);
    }
    qo_head = kv_head * params.group_size.divisor + packed - index * params.group_size.divisor;
    exists = exists && row >= 0 && row < params.num_rows;
  }

  template <class Element>
  ATTN_HD char* o(const AttentionParams& params) const {
    return static_cast<char*>(params.o) +
           (row * params.o_row_stride + qo_head * params.o_head_stride) * Element::kBytes;
  }

  /// nullptr: not wanted.
  ATTN_HD float* lse(const AttentionParams& params) const {
    return params.lse == nullptr
               ? nullptr
               : params.lse + static_cast<int64_t>(row) * params.num_kv_heads * params.group_size.divisor + qo_head;
  }
};

/// A row of the row tile, as variants see it; the last one for rows that do not exist. `group`: of the tile.
template <bool kManyLevels>
ATTN_HD ScoreRow score_row(const AttentionParams& params, const RowTileRows<kManyLevels>& rows, int32_t group,
                           int32_t kv_head, int32_t tile_row) {
  const PackedRow row(params, rows, kv_head, min_of(tile_row, rows.count - 1));
  return score_row(params.schedule, group, row.index, row.row, row.qo_head);
}

}  // namespace attn
