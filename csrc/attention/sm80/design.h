// The generic kernel, of Ampere and later, as the planner and the launcher see it.
#pragma once

#include "attention/kernel_design.h"
#include "attention/sm80/shape.h"

namespace attn {

constexpr KernelCosts kSm80Costs{{4, 4, 5, 7, 4, 4, 5, 7}, {2, 2, 8, 18, 2, 2, 8, 18}, 0, 8, 470, 5250};

inline int32_t make_sm80_arguments(const AttentionParams& params, const LaunchContext& /*context*/,
                                   KernelArguments& arguments) {
  arguments.make<AttentionParams>() = params;
  return 0;
}

constexpr KernelDesign sm80_design() {
  KernelDesign design{};
  design.name = "sm80";
  design.costs = design.invariant_costs = kSm80Costs;
  design.max_kind = max_kind;
  design.kv_tile = kv_tile;
  design.kernels[0] = "attention";
  design.threads = kThreads;
  design.shared_bytes = shared_bytes;
  design.make_arguments = make_sm80_arguments;
  return design;
}
constexpr KernelDesign kSm80Design = sm80_design();

}  // namespace attn
