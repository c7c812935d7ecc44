// A planner's parameters from structs that Python packs (attn_backend/kernels/native.py).
#pragma once

#include <algorithm>
#include <cstdint>

#include "planner/params.h"
#include "planner/steps.h"

namespace attn {

/// `levels` as Python packs them, but for what prepare_plan() fills in.
inline PlanParams passed_params(const ScheduleConfig& config, void* workspace, const PlanLevel* levels,
                                int32_t num_levels) {
  PlanParams params{};
  params.config = config;
  params.schedule = Schedule(workspace, ScheduleLayout(config));
  params.num_levels = num_levels;
  std::copy(levels, levels + num_levels, params.levels);
  prepare_plan(params);
  return params;
}

/// Whether the last level of what was planned has a row list.
inline bool last_level_lists_rows(const PlanParams& p) {
  return p.schedule.header->levels[count_levels(p) - 1].rows != nullptr;
}

}  // namespace attn
