#include "host/planner.h"

#include "attn/planning.h"

namespace attn {

void plan_on_host(const PlanParams& p) {
  const ScheduleConfig& config = p.config;
  uint32_t errors = 0;
  int64_t counted = 0;
  const int32_t num_groups = count_groups(p);
  const bool links_rows = keeps_row_states(p) || (p.num_levels == 1 && p.levels[0].rows != nullptr);
  if (keeps_row_states(p)) {
    for (int64_t i = 0; i < int64_t{p.num_levels} * config.max_rows; ++i) p.schedule.links[i] = RowLink{-1, 0};
  }
  for (int32_t i = 0; i < num_groups; ++i) {
    RowGroup group = read_row_group(p, find_level(p, i), errors);
    for (int32_t row = 0; links_rows && row < group.qo_len; ++row) link_row(p, group, i, row, errors);
    group.tile_begin = static_cast<int32_t>(counted);
    p.schedule.groups[i] = group;
    counted += count_row_tiles(config, group);
  }
  if (counted > config.max_tiles) errors |= kQoIndptrInvalid;
  const int32_t num_tiles = static_cast<int32_t>(min_of<int64_t>(counted, config.max_tiles));

  int64_t total_cost = 0;
  int32_t i = 0;
  for (int32_t g = 0; g < num_groups; ++g) {
    const RowGroup& group = p.schedule.groups[g];
    const int32_t end = min_of(group.tile_begin + count_row_tiles(config, group), num_tiles);
    for (; i < end; ++i) {
      RowTile tile = make_row_tile(p, group, g, i - group.tile_begin);
      tile.cost_begin = total_cost;
      total_cost += row_tile_cost(config, tile) * config.num_kv_heads;
      p.schedule.tiles[i] = tile;
    }
  }

  const int64_t share = cta_share(config, total_cost);
  for (int32_t cta = 0; cta <= config.num_ctas; ++cta) {
    p.schedule.positions[cta] = find_position(config, p.schedule.tiles, num_tiles, total_cost, cta * share);
  }
  write_header(p, num_groups, num_tiles, share, errors);
  for (int32_t level = 0; level < p.num_levels; ++level) write_level(p, level);
}

}  // namespace attn
