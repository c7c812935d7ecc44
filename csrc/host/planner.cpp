#include "host/planner.h"

#include "attn/planning.h"

namespace attn {

void plan_on_host(const PlanParams& p) {
  const ScheduleConfig& config = p.config;
  uint32_t errors = 0;
  int64_t counted = 0;
  for (int32_t i = 0; i < p.num_groups; ++i) {
    RowGroup group = read_row_group(p, i, errors);
    group.tile_begin = static_cast<int32_t>(counted);
    p.schedule.groups[i] = group;
    counted += count_row_tiles(config, group);
  }
  if (counted > config.max_tiles) errors |= kQoIndptrInvalid;
  const int32_t num_tiles = static_cast<int32_t>(min_of<int64_t>(counted, config.max_tiles));

  int64_t total_cost = 0;
  int32_t i = 0;
  for (int32_t g = 0; g < p.num_groups; ++g) {
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
  *p.schedule.header = make_header(p, num_tiles, errors);
}

}  // namespace attn
