// Writing the schedule's header, levels and links. The device planner and the host planner share it: the same
// arithmetic gives the same schedule, bit for bit.
#pragma once

#include "planner/cost_model.h"
#include "planner/params.h"
#include "planner/schedule.h"

namespace attn {

/// Levels of the schedule: the composition's levels, and one with the forest's row groups.
ATTN_HD int32_t count_levels(const PlanParams& p) { return p.num_levels + (p.seeks_forest ? 1 : 0); }

/// Writes the header, without the levels.
ATTN_HD void write_header(const PlanParams& p, const Planned& planned) {
  ScheduleHeader& header = *p.schedule.header;
  header.num_groups = planned.num_groups;
  header.num_tiles = planned.num_tiles;
  header.errors = planned.errors;
  header.num_levels = count_levels(p);
  header.num_merge_rows = planned.num_merge_rows;
  header.num_links = planned.num_links;
  header.flags = planned.flags;
  header.whole_pairs = planned.whole_pairs;
  header.num_requests = planned.num_requests;
  header.queue_head = header.second_queue_head = 0;
  header.aligned_tile = planned.aligned_tile;
  header.aligned_cta = planned.aligned_cta;
  header.aligned_parts = planned.aligned_parts;
  header.share = planned.share;
  header.section_tokens = p.config.section_tokens;
  for (int32_t kind = 0; kind < kNumCostKinds; ++kind) {
    header.kv_tile_cost[kind] = p.config.kv_tile_cost[kind];
    header.pair_cost[kind] = p.config.pair_cost[kind];
  }
}

/// Whether a forest of one node has all rows of the requests, in their order. Its row group then needs no row list, and
/// Q of the largest row tiles loads faster (ADR 13). The rows must fill such tiles: Q may hold anything after the
/// last.
ATTN_HD bool node_needs_no_list(const PlanParams& p, const Planned& planned) {
  if (!has_one_prefix(p, planned)) return false;
  const RowGroup& last = p.schedule.groups[p.levels[0].num_groups - 1];
  const int32_t num_rows = last.qo_begin + last.qo_len;
  return planned.num_merge_rows == num_rows && packed_rows_of(p.config, num_rows) % tile_rows(p.config.max_kind) == 0;
}

/// Describes a level. `without_list`: the forest's, if node_needs_no_list().
ATTN_HD void write_level(const PlanParams& p, int32_t index, bool without_list) {
  const PlanLevel& level = p.levels[index];
  const int32_t* rows = index == p.num_levels && without_list ? nullptr : level.rows;
  int32_t group_begin = 0;
  for (int32_t i = 0; i < index; ++i) group_begin += p.levels[i].num_groups;
  p.schedule.header->levels[index] = Level{level.table.indices,     rows,
                                           level.positions,         level.row_ranges,
                                           level.table.num_entries, level.table.entry_step,
                                           level.visibility,        group_begin};
}

/// Links row number `index` of a group of a composition, and reports a row that does not exist. Returns the row's
/// number plus 1, 0 if it does not exist.
ATTN_HD int32_t link_row(const PlanParams& p, const RowGroup& group, int32_t group_index, int32_t index,
                         uint32_t& errors) {
  const int32_t* rows = p.levels[group.level].rows;
  const int32_t row = rows != nullptr ? rows[group.qo_begin + index] : group.qo_begin + index;
  if (row < 0 || row >= p.config.max_rows) {
    errors |= kRowInvalid;
    return 0;
  }
  if (p.num_levels > 1)
    p.schedule.links[static_cast<int64_t>(group.level) * p.config.max_merge_rows + row] = RowLink{group_index, index};
  return row + 1;
}

/// Whether rows must be linked to their groups, or at least checked.
ATTN_HD bool links_rows(const PlanParams& p) { return p.num_levels > 1 || p.levels[0].rows != nullptr; }

}  // namespace attn
