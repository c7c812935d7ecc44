// The host planner with any configuration, for ctypes: what the device planner's schedules are compared with, bit for
// bit.
#include "planner/host/planner.h"
#include "planner/schedule.h"

#include "plan_params.h"

extern "C" void host_planner_layout(const attn::ScheduleConfig* config, attn::ScheduleLayout* layout) {
  *layout = attn::ScheduleLayout(*config);
}

/// Returns last_level_lists_rows().
extern "C" int32_t host_planner_plan(const attn::ScheduleConfig* config, void* workspace, const attn::PlanLevel* levels,
                                     int32_t num_levels) {
  const attn::PlanParams params = attn::passed_params(*config, workspace, levels, num_levels);
  attn::plan_on_host(params);
  return attn::last_level_lists_rows(params);
}

/// Writes the pairs of the work queue in their order, as (row tile, KV head), and the heads of each pair's section.
/// Returns their number, at most `room`.
extern "C" int32_t host_planner_queue(const attn::ScheduleConfig* config, void* workspace, int32_t room, int32_t* pairs,
                                      int32_t* section_heads) {
  const attn::Schedule schedule(workspace, attn::ScheduleLayout(*config));
  const int32_t num_tiles = schedule.header->num_tiles;
  const int32_t count = num_tiles * config->num_kv_heads;
  for (int32_t pair = 0; pair < count && pair < room; ++pair) {
    const attn::Position position =
        attn::queued_pair(schedule, attn::FastDivisor(config->group_size), config->num_kv_heads, num_tiles, pair);
    pairs[2 * pair] = position.tile;
    pairs[2 * pair + 1] = position.head;
    const attn::RowGroup& group = schedule.groups[schedule.tiles[position.tile].group];
    section_heads[pair] = attn::section_heads(config->section_tokens, group.kv_len, config->num_kv_heads);
  }
  return count;
}

#ifdef choose_kind  // one_kind.h
int32_t attn::planned_kind = 0;

extern "C" void host_planner_set_kind(int32_t kind) { attn::planned_kind = kind; }
#endif
