// The device planner: turns lengths and page tables, where the engine keeps them, into a schedule. One launch. Its
// first CTA plans, in steps that all its threads take together (steps.h). With cascade on, the other CTAs compare page
// tables and tell the first one which requests share leading pages (prefix_search.cuh).
#include "planner/device/prefix_search.cuh"
#include "planner/steps.h"

namespace attn {

/// `memory`: shared memory.
template <bool kSeeksForest>
__device__ __forceinline__ void plan(const PlanParams& p, char* memory) {
  if (kSeeksForest && blockIdx.x > 0)
    search_prefixes(p, memory);
  else
    make_plan<PlanningCta, kSeeksForest>(p, memory);
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1)
    plan_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan<false>(params, memory);
}

/// Where a forest is sought.
extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1)
    plan_forest_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan<true>(params, memory);
}
