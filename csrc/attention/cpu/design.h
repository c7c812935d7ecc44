// The executor on a CPU, as the planner sees it. It runs the schedules of every design.
#pragma once

#include "attention/kernel_design.h"

namespace attn::cpu {

/// CTAs of a schedule, if the caller does not say: tasks that threads take one after another. Fixed, so that results do
/// not depend on the number of threads.
constexpr int32_t kCtas = 32;

/// The smallest share of a task is 32 KV tiles of the smallest kind.
constexpr KernelCosts kCosts{
    .kv_tile = {2, 4, 8, 16, 16, 2, 4, 8, 16, 16},
    .pair = {0, 1, 2, 4, 4, 0, 1, 2, 4, 4},
    .min_queue_pairs = 0,
    .section_bytes = 0,
    .min_share = 64,
    .state = 16,
    .forest = 0,
};

constexpr KernelDesign make_design() {
  KernelDesign design{};
  design.name = "cpu";
  design.costs = design.invariant_costs = kCosts;
  design.max_kind = [](HeadDims /*dims*/, KvForm /*kv*/) { return 3; };
  design.kv_tile = [](HeadDims /*dims*/, KvForm /*kv*/) { return 64; };
  return design;
}
constexpr KernelDesign kDesign = make_design();

}  // namespace attn::cpu
