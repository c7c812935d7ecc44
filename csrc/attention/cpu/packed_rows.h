// The rows of work items.
#pragma once

#include "attention/cpu/kernels.h"
#include "attention/params.h"
#include "attention/tile/row_tile.h"
#include "common/math.h"
#include "planner/schedule.h"

namespace attn::cpu {

/// The packed rows of an item's row tile.
struct ItemRows : RowTileRows<true> {
  const Level& level;
  int existing;  // of the first `count`; rows of Q beyond num_rows do not exist

  ATTN_HD ItemRows(const AttentionParams& params, const WorkItem& item)
      : RowTileRows(params.schedule, item.tile, params.group_size.divisor), level(level_of(params, item)) {
    const int64_t end = (int64_t{params.num_rows} - qo_begin) * params.group_size.divisor;  // of the group
    existing = list != nullptr ? count : static_cast<int>(clamp<int64_t>(end - packed_begin, 0, count));
  }

  ATTN_HD static const Level& level_of(const AttentionParams& params, const WorkItem& item) {
    return params.schedule.header->levels[params.schedule.groups[params.schedule.tiles[item.tile].group].level];
  }
};

}  // namespace attn::cpu
