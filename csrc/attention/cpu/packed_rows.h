// Which rows and heads of Q and O a row tile packs.
#pragma once

#include "attention/cpu/kernels.h"
#include "attention/params.h"
#include "common/math.h"
#include "planner/schedule.h"

namespace attn::cpu {

/// Isa keeps the copies of each instruction set apart (kernels.h).
template <class Isa>
struct PackedRows {
  struct Place {
    bool exists;
    int64_t row;
    int64_t head;
    int32_t index;  // of the row in its group
  };

  static const Level& level_of(const AttentionParams& params, const WorkItem& item) {
    return params.schedule.header->levels[params.schedule.groups[params.schedule.tiles[item.tile].group].level];
  }

  /// How many rows of the tile exist. Packed rows are in the order of query rows. Packed rows of query rows beyond
  /// num_rows are ignored.
  static int count(const AttentionParams& params, const WorkItem& item) {
    const RowTile& tile = params.schedule.tiles[item.tile];
    const RowGroup& group = params.schedule.groups[tile.group];
    const bool listed = level_of(params, item).rows != nullptr;
    const int64_t query_rows =
        listed ? group.qo_len : min_of<int64_t>(group.qo_len, int64_t{params.num_rows} - group.qo_begin);
    const int64_t rows = query_rows * params.group_size.divisor - tile.packed_begin;
    return static_cast<int>(clamp<int64_t>(rows, 0, tile_rows(tile.kind)));
  }

  static Place find(const AttentionParams& params, const WorkItem& item, int tile_row) {
    const RowTile& tile = params.schedule.tiles[item.tile];
    const int32_t packed = tile.packed_begin + tile_row;
    const int32_t i = params.group_size.divide(packed);
    const int64_t row = query_row(params, params.schedule.groups[tile.group], i);
    const int64_t query_head =
        int64_t{item.head} * params.group_size.divisor + (packed - i * params.group_size.divisor);
    return Place{row >= 0 && row < params.num_rows, row, query_head, i};
  }

  /// Position of a row's query.
  static int32_t position(const AttentionParams& params, const WorkItem& item, int tile_row) {
    const RowTile& tile = params.schedule.tiles[item.tile];
    const RowGroup& group = params.schedule.groups[tile.group];
    return group.kv_len - group.qo_len + params.group_size.divide(tile.packed_begin + tile_row);
  }

  /// Row of Q and O that is row number `index` of a group.
  static int64_t query_row(const AttentionParams& params, const RowGroup& group, int32_t index) {
    const int32_t* list = params.schedule.header->levels[group.level].rows;
    return list != nullptr ? list[group.qo_begin + index] : group.qo_begin + index;
  }
};

}  // namespace attn::cpu
