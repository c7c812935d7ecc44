// What the parts of the device planner have in common: loops, barriers and sums of the threads that work together.
#pragma once

#include "attn/planning.h"
#include "device/ptx/named_barrier.cuh"

namespace attn {

/// `count` threads of a CTA from number `first` on: whole warps.
struct PlanTeam {
  int32_t barrier;
  int32_t count;
  int32_t first = 0;

  __device__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x) - first; }
  __device__ bool has_this_thread() const { return thread() >= 0 && thread() < count; }

  __device__ void sync() const { ptx::barrier_sync(barrier, count); }
  __device__ bool sync_or(bool value) const { return ptx::barrier_sync_or(barrier, count, value); }

  /// Runs `body(i)` for every i below `end`; the threads share them.
  template <class Body>
  __device__ __forceinline__ void for_each(int32_t end, const Body& body) const {
#pragma unroll 1   // most loops run once: what they cost is fetching their code
    for (int32_t i = thread(); i < end; i += count) body(i);
  }
};

/// What is summed up along the line of work.
struct LineSums {
  int64_t cost;
  int32_t tiles;

  __device__ __forceinline__ LineSums of_thread_below(int32_t distance) const {
    return LineSums{__shfl_up_sync(0xffffffffu, cost, distance), __shfl_up_sync(0xffffffffu, tiles, distance)};
  }
};
__device__ __forceinline__ LineSums operator+(LineSums x, LineSums y) { return LineSums{x.cost + y.cost, x.tiles + y.tiles}; }
__device__ __forceinline__ LineSums operator-(LineSums x, LineSums y) { return LineSums{x.cost - y.cost, x.tiles - y.tiles}; }

/// Likewise, where there is a forest.
struct ForestSums {
  LineSums own;           // row groups of requests
  LineSums nodes;         // row groups of taken nodes
  int32_t merge_rows;     // rows of requests in taken nodes, and above them (kNodeShift) taken nodes
  int32_t node_rows;      // rows of taken nodes

  static constexpr int32_t kNodeShift = 20;

  __device__ __forceinline__ ForestSums of_thread_below(int32_t distance) const {
    return ForestSums{own.of_thread_below(distance), nodes.of_thread_below(distance), __shfl_up_sync(0xffffffffu, merge_rows, distance),
                      __shfl_up_sync(0xffffffffu, node_rows, distance)};
  }
};
__device__ __forceinline__ ForestSums operator+(ForestSums x, ForestSums y) {
  return ForestSums{x.own + y.own, x.nodes + y.nodes, x.merge_rows + y.merge_rows, x.node_rows + y.node_rows};
}

__device__ __forceinline__ ForestSums operator-(ForestSums x, ForestSums y) {
  return ForestSums{x.own - y.own, x.nodes - y.nodes, x.merge_rows - y.merge_rows, x.node_rows - y.node_rows};
}

/// Sums of warps on their way to the others. Between two uses there must be a barrier.
union SumMemory {
  LineSums line[kPlanThreads / 32];
  ForestSums forest[kPlanThreads / 32];
};

/// Sums over the CTA's threads before this one; `total` receives the sum over all, `any` whether it was true of any thread. Only the first `summands` threads
/// have something to add: other warps only wait.
template <class Sums>
__device__ __forceinline__ Sums sum_before(Sums* of_warps, int32_t summands, Sums own, Sums& total, bool& any) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t warps = min_of((summands + 31) / 32, kPlanThreads / 32);
  Sums before{};
  if (warp < warps) {
    Sums sum = own;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const Sums below = sum.of_thread_below(distance);
      if (lane >= distance) sum = sum + below;
    }
    if (lane == 31) of_warps[warp] = sum;
    before = sum - own;
  }
  any = ptx::barrier_sync_or(0, kPlanThreads, any);
  total = Sums{};
#pragma unroll 2
  for (int32_t w = 0; w < warps; ++w) {
    const Sums of_warp = of_warps[w];
    if (w < warp) before = before + of_warp;
    total = total + of_warp;
  }
  return before;
}

}  // namespace attn
