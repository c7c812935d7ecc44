// The prefix forest on the host: the same result as planner/device/forest.cuh.
#pragma once

#include "planner/cost_model.h"
#include "planner/params.h"

namespace attn {

/// Seeks shared prefixes among the requests whose row groups are written, cuts what is taken from those, adds the row
/// groups of the taken nodes, and links rows.
void add_forest_on_host(const PlanParams& params, Planned& planned);

}  // namespace attn
