// The host planner: the same algorithm as planner/device/plan.cu, for CPU execution, tests and drawings of a plan.
#pragma once

#include "planner/params.h"

namespace attn {

/// Writes the schedule of `params` (all pointers on the host).
void plan_on_host(const PlanParams& params);

/// Whether rows of `params`, whose metadata is right otherwise, attend to a page of a negative id.
bool has_negative_page(const PlanParams& params);

}  // namespace attn
