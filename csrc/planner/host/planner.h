// The host planner: the steps of planner/steps.h, for CPU execution, tests and drawings of a plan.
#pragma once

#include "planner/params.h"
#include "planner/selection.h"

namespace attn {

/// Writes the schedule of `params` (all pointers on the host).
void plan_on_host(const PlanParams& params);

/// Whether rows of `params`, whose metadata is right otherwise, attend to a page of a negative id.
bool has_negative_page(const PlanParams& params);

namespace cpu {

/// Packs selected tokens on CPU threads: what planner/device/selection.cu is on a GPU.
void pack_selected_slots(const SelectionParams& params);

}  // namespace cpu
}  // namespace attn
