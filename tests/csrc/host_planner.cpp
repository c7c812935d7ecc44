// The host planner with any configuration, for ctypes: what the device planner's schedules are compared with, bit for
// bit.
#include "planner/host/planner.h"

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

#ifdef choose_kind  // one_kind.h
int32_t attn::planned_kind = 0;

extern "C" void host_planner_set_kind(int32_t kind) { attn::planned_kind = kind; }
#endif
