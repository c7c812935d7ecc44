// The host planner: the same algorithm as device/plan.cu, for CPU execution, tests and drawings of a plan.
#pragma once

#include "attn/params.h"

namespace attn {

/// Writes the schedule of `params` (all pointers on the host).
void plan_on_host(const PlanParams& params);

}  // namespace attn
