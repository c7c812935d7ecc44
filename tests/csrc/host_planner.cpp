// The host planner with any configuration, for ctypes: what the device planner's schedules are compared with, bit for
// bit.
#include "planner/host/planner.h"

#include "plan_params.h"

/// Bytes of the workspace; `offsets` receives where groups, tiles, positions, links, rows and nodes start in it.
extern "C" int64_t host_planner_layout(const int32_t* config, int64_t* offsets) {
  const attn::ScheduleLayout layout(attn::passed_config(config));
  offsets[0] = layout.groups;
  offsets[1] = layout.tiles;
  offsets[2] = layout.positions;
  offsets[3] = layout.links;
  offsets[4] = layout.rows;
  offsets[5] = layout.nodes;
  return layout.bytes;
}

/// Returns last_level_lists_rows().
extern "C" int32_t host_planner_plan(const int32_t* config, void* workspace, const attn::PassedView* views,
                                     int32_t num_levels) {
  const attn::PlanParams params = attn::passed_params(config, workspace, views, num_levels);
  attn::plan_on_host(params);
  return attn::last_level_lists_rows(params);
}

#ifdef choose_kind  // one_kind.h
int32_t attn::planned_kind = 0;

extern "C" void host_planner_set_kind(int32_t kind) { attn::planned_kind = kind; }
#endif
