// Shared by the steps of the device planner: the plan so far, and loops and sums over a CTA's threads.
#pragma once

#include "common/ptx/warp.cuh"
#include "planner/cost_model.h"
#include "planner/launch.h"

namespace attn {

constexpr int32_t kPlanWarps = kPlanThreads / 32;
constexpr int32_t kMaxSums = 3;  // of running_sums()

__device__ __forceinline__ int32_t thread_index() { return static_cast<int32_t>(threadIdx.x); }
__device__ __forceinline__ int32_t lane_index() { return thread_index() % 32; }
__device__ __forceinline__ int32_t warp_index() { return thread_index() / 32; }

/// Runs `body(i)` for every i below `end`; the threads of the CTA share them. (Loops are not unrolled: most run once or
/// twice, and what they cost is fetching their code.)
template <class Body>
__device__ __forceinline__ void for_each(int32_t end, const Body& body) {
#pragma unroll 1
  for (int32_t i = thread_index(); i < end; i += kPlanThreads) body(i);
}

/// Like for_each(), for a `body` in which the threads work together: all call it equally often, also with i >= end.
template <class Body>
__device__ __forceinline__ void for_each_together(int32_t end, const Body& body) {
#pragma unroll 1
  for (int32_t first = 0; first < end; first += kPlanThreads) body(first + thread_index());
}

/// Shared by the threads of the planning CTA, besides the forest.
struct PlanShared {
  int64_t warp_sums[kMaxSums][kPlanWarps];
  uint32_t launch;  // LaunchNumber
  uint32_t errors;  // ScheduleError bits
  int32_t num_merge_rows;
  int32_t longest_pair;  // as in Planned
  int32_t longest_small_pair;
  int32_t has_largest_tiles;
  // Of the forest.
  int32_t max_depth;                           // of its nodes
  int32_t states;                              // that taking every node would need
  int32_t saved;                               // what the taken nodes save
  int32_t max_taken_depth;                     // 0: no node was taken
  alignas(16) PlacedTile tiles[kCachedTiles];  // the first row tiles
};
static_assert(sizeof(PlanShared) <= kPlanSharedBytes, "what the host asks for");

/// A plan on its way through the steps of the planning CTA. Each thread has one, with the same content.
struct PlanContext {
  const PlanParams& p;
  PlanShared& shared;
  int32_t* tile_begin;  // shared memory: the first row tile of each row group
  Planned planned;
  int64_t total_cost;  // of all row tiles
};

/// Reports what a thread found wrong.
__device__ __forceinline__ void report(PlanShared& shared, uint32_t errors) {
  if (errors != 0) atomicOr(&shared.errors, errors);
}

/// Raises a number in shared memory to the largest of a warp's values.
__device__ __forceinline__ void shared_max(int32_t* address, int32_t value) {
  const int32_t largest = __reduce_max_sync(ptx::kAllLanes, value);
  if (lane_index() == 0) atomicMax(address, largest);
}

/// atomicAdd(&(nodes[n].*field), value) for all lanes of a warp with n >= 0. Under one prefix they all have the same
/// node: then it is one addition, since additions of many threads to one address take a long time.
template <class Node>
__device__ __forceinline__ void add_to_node(Node* nodes, int32_t n, int32_t Node::* field, int32_t value) {
  const int32_t any = __reduce_max_sync(ptx::kAllLanes, n);
  if (any < 0) return;
  if (__all_sync(ptx::kAllLanes, n < 0 || n == any)) {
    const int32_t sum = __reduce_add_sync(ptx::kAllLanes, n < 0 ? 0 : value);
    if (lane_index() == 0) atomicAdd(&(nodes[any].*field), sum);
  } else if (n >= 0) {
    atomicAdd(&(nodes[n].*field), value);
  }
}

/// Running sums over the threads, several at once: each of `values` becomes its total so far plus the values of all
/// threads before this one; then the values of all threads are added to `totals`, which are the same in each of them.
template <class Int, int32_t kCount>
__device__ __forceinline__ void running_sums(PlanShared& shared, Int (&values)[kCount], Int (&totals)[kCount]) {
  static_assert(kCount <= kMaxSums, "room for the sums of warps");
  Int up_to_lane[kCount];
#pragma unroll
  for (int32_t k = 0; k < kCount; ++k) up_to_lane[k] = ptx::warp_inclusive_sum(values[k], lane_index());
  __syncthreads();  // all threads have read the sums before
#pragma unroll
  for (int32_t k = 0; k < kCount && lane_index() == 31; ++k) shared.warp_sums[k][warp_index()] = up_to_lane[k];
  __syncthreads();
#pragma unroll
  for (int32_t k = 0; k < kCount; ++k) {
    const Int warp_sum = lane_index() < kPlanWarps ? static_cast<Int>(shared.warp_sums[k][lane_index()]) : 0;
    const Int up_to_warp = ptx::warp_inclusive_sum(warp_sum, lane_index());
    values[k] =
        totals[k] + __shfl_sync(ptx::kAllLanes, up_to_warp - warp_sum, warp_index()) + up_to_lane[k] - values[k];
    totals[k] += __shfl_sync(ptx::kAllLanes, up_to_warp, 31);
  }
}

template <class Int>
__device__ __forceinline__ Int running_sum(PlanShared& shared, Int value, Int& total) {
  Int values[] = {value}, totals[] = {total};
  running_sums(shared, values, totals);
  total = totals[0];
  return values[0];
}

}  // namespace attn
