// The generic kernel, of Ampere and later, as the planner and the launcher see it.
#pragma once

#include "attention/kernel_design.h"
#include "attention/sm80/shape.h"

namespace attn::sm80 {

constexpr KernelCosts kCosts{
    .kv_tile = {4, 4, 5, 7, 7, 4, 4, 5, 7, 7},
    .pair = {2, 2, 8, 18, 18, 2, 2, 8, 18, 18},
    .min_queue_pairs = 0,
    .section_bytes = 0,
    .min_share = 8,
    .state = 470,
    .forest = 5250,
};

inline int32_t make_arguments(const LatentAttentionParams& params, const LaunchContext& context,
                              KernelArguments& arguments) {
  LatentAttentionParams& made = arguments.make<LatentAttentionParams>();
  made = params;
  made.q_rope = find_q_rope(params, context);
  return 0;
}

constexpr KernelDesign make_design() {
  KernelDesign design{};
  design.name = "sm80";
  design.costs = design.invariant_costs = kCosts;
  design.max_kind = [](HeadDims dims, KvForm kv) { return tuning(dims, kv).max_kind; };
  design.kv_tile = [](HeadDims dims, KvForm kv) { return tuning(dims, kv).kv_tile; };
  design.kernels[0] = "attention";
  design.threads = [](HeadDims /*dims*/, KvForm /*kv*/) { return kThreads; };
  design.shared_bytes = [](HeadDims dims, KvForm kv) { return SharedLayout(dims, 2, kv).bytes; };
  design.make_arguments = make_arguments;
  return design;
}
constexpr KernelDesign kDesign = make_design();

}  // namespace attn::sm80
