#include "planner/host/planner.h"

#include "planner/cuts.h"
#include "planner/groups.h"
#include "planner/host/forest.h"
#include "planner/schedule_writer.h"

namespace attn {
namespace {

/// Writes the row groups, without tile_begin, and links their rows.
Planned make_groups(const PlanParams& p) {
  Planned planned;
  const int32_t num_requests = count_groups(p);
  if (p.num_levels > 1) {
    for (int64_t i = 0; i < int64_t{p.num_levels} * p.config.max_merge_rows; ++i) p.schedule.links[i] = RowLink{-1, 0};
  }
  for (int32_t i = 0; i < num_requests; ++i) {
    const RowGroup group = read_row_group(p, find_level(p, i), planned.errors);
    const int32_t num_chunks = count_chunks(p, group);
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk, ++planned.num_groups) {
      p.schedule.groups[planned.num_groups] = make_chunk(p, group, i, chunk, num_chunks, planned.num_groups);
    }
    if (p.config.batch_invariant) {
      for (int32_t chunk = num_chunks > 1 ? num_chunks : 0; chunk < p.config.max_links; ++chunk)
        p.schedule.links[int64_t{chunk} * p.config.max_merge_rows + i] = RowLink{-1, 0};
    }
    for (int32_t row = 0; links_rows(p) && row < group.qo_len; ++row) {
      const int32_t end = link_row(p, group, i, row, planned.errors);
      if (p.num_levels > 1) planned.num_merge_rows = max_of(planned.num_merge_rows, end);
    }
  }
  planned.num_links = p.num_levels;
  if (p.config.batch_invariant && planned.num_groups > num_requests) {
    planned.num_merge_rows = num_requests;
    planned.num_links = p.config.max_links;
  }
  if (p.seeks_forest) {
    planned.num_requests = num_requests;
    for (int32_t i = 0; i < num_requests; ++i) p.schedule.nodes[i].leader = -1;
    if (planned.errors == 0) add_forest_on_host(p, planned);
  }
  return planned;
}

}  // namespace

void plan_on_host(const PlanParams& p) {
  const ScheduleConfig& config = p.config;
  Planned planned = make_groups(p);
  int64_t counted = 0;
  for (int32_t i = 0; i < planned.num_groups; ++i) {
    RowGroup& group = p.schedule.groups[i];
    group.tile_begin = static_cast<int32_t>(counted);
    planned.has_largest_tiles |= group.kind == config.max_kind && group.qo_len > 0;
    counted += count_row_tiles(config, group);
  }
  if (counted > config.max_tiles) planned.errors |= kQoIndptrInvalid;
  planned.num_tiles = static_cast<int32_t>(min_of<int64_t>(counted, config.max_tiles));

  int64_t total_cost = 0;
  int32_t i = 0;
  for (int32_t g = 0; g < planned.num_groups; ++g) {
    const RowGroup& group = p.schedule.groups[g];
    const int32_t end = min_of(group.tile_begin + count_row_tiles(config, group), planned.num_tiles);
    for (; i < end; ++i) {
      RowTile tile = make_row_tile(p, group, g, i - group.tile_begin);
      const int64_t whole_pair_cost = pair_cost(config, cost_kind(tile.kind, group.state_begin), tile.num_kv_tiles);
      int32_t& longest = tile.kind == config.max_kind ? planned.longest_pair : planned.longest_small_pair;
      longest = max_of(longest, narrow_cost(whole_pair_cost));
      tile.cost_begin = total_cost;
      total_cost += whole_pair_cost * config.num_kv_heads;
      p.schedule.tiles[i] = tile;
    }
  }

  const auto tiles = [&](int32_t i) {
    return placed_tile(p.schedule.tiles[i], p.schedule.groups[p.schedule.tiles[i].group]);
  };
  finish_plan(p, planned.num_tiles > 0 ? tiles(0) : PlacedTile{}, total_cost, planned);
  if (has_one_prefix(p, planned) && planned.errors == 0) {  // without errors all of its row tiles exist
    const int32_t tile = p.schedule.groups[planned.num_groups - 1].tile_begin;
    const SharedPairs pairs{tile, tiles(tile), (planned.num_tiles - tile) * config.num_kv_heads};
    EvenCut best = cut_evenly(p, pairs, 1);
    for (int32_t parts = 2; parts <= kMaxAlignedParts; ++parts) {
      const EvenCut cut = cut_evenly(p, pairs, parts);
      if (cut.cost < best.cost) best = cut;
    }
    align_prefix(p, pairs, best, planned);
  }
  for (int32_t cta = 0; cta <= config.num_ctas; ++cta)
    p.schedule.positions[cta] = find_position(p, tiles, planned, total_cost, cta);
  write_header(p, planned);
  const bool without_list = node_needs_no_list(p, planned);
  for (int32_t level = 0; level < count_levels(p); ++level) write_level(p, level, without_list);
}

bool has_negative_page(const PlanParams& p) {
  for (int32_t number = 0; number < p.num_levels; ++number) {
    const PlanLevel& level = p.levels[number];
    const PageTable& table = level.table;
    if (table.indices == nullptr) continue;
    for (int32_t i = 0; i < level.num_groups; ++i) {
      uint32_t errors = 0;
      const RowGroup group = read_row_group(p, GroupPlace{number, i}, errors);
      const int64_t pages = group.qo_len > 0 ? ceil_div<int64_t>(group.kv_len, table.page_size) : 0;
      const int64_t first_token =
          level.visibility.window_left < 0
              ? 0
              : max_of<int64_t>(int64_t{group.kv_len} - group.qo_len - level.visibility.window_left, 0);
      int32_t signs = 0;
      for (int64_t page = first_token / table.page_size; page < pages; ++page)
        signs |= table.indices[group.table_begin + page * table.entry_step];
      if (signs < 0) return true;
    }
  }
  return false;
}

}  // namespace attn
