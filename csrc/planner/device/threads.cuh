// The threads of the CTA that plans: their loops, and what they find out together. OneThread in
// planner/host/planner.cpp is the same for a CPU.
#pragma once

#include "common/ptx/warp.cuh"
#include "planner/context.h"
#include "planner/work_list.h"

namespace attn {

struct CtaThreads {
  static constexpr int32_t kCount = kPlanThreads, kWarps = kPlanWarps, kLanes = 32;

  __device__ __forceinline__ static int32_t thread() { return static_cast<int32_t>(threadIdx.x); }
  __device__ __forceinline__ static int32_t lane() { return thread() % 32; }
  __device__ __forceinline__ static int32_t warp() { return thread() / 32; }

  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ static bool any(bool value) { return __syncthreads_or(value); }
  __device__ __forceinline__ static bool any_of_warp(bool value) { return __any_sync(ptx::kAllLanes, value); }

  __device__ __forceinline__ static void add(int32_t& sum, int32_t value) { atomicAdd(&sum, value); }
  __device__ __forceinline__ static void raise(int32_t& largest, int32_t value) { atomicMax(&largest, value); }
  __device__ __forceinline__ static void report(uint32_t& errors, uint32_t found) {
    if (found != 0) atomicOr(&errors, found);
  }

  /// Raises a number in shared memory to the largest of a warp's values.
  __device__ __forceinline__ static void raise_by_warp(int32_t& largest, int32_t value) {
    const int32_t of_warp = __reduce_max_sync(ptx::kAllLanes, value);
    if (lane() == 0) atomicMax(&largest, of_warp);
  }

  /// atomicAdd(&(nodes[n].*field), value) for all lanes of a warp with n >= 0. Under one prefix they all have the same
  /// node: then it is one addition, since additions of many threads to one address take a long time.
  template <class Node>
  __device__ __forceinline__ static void add_to_node(Node* nodes, int32_t n, int32_t Node::* field, int32_t value) {
    const int32_t any = __reduce_max_sync(ptx::kAllLanes, n);
    if (any < 0) return;
    if (__all_sync(ptx::kAllLanes, n < 0 || n == any)) {
      const int32_t sum = __reduce_add_sync(ptx::kAllLanes, n < 0 ? 0 : value);
      if (lane() == 0) atomicAdd(&(nodes[any].*field), sum);
    } else if (n >= 0) {
      atomicAdd(&(nodes[n].*field), value);
    }
  }

  /// Several running sums over the threads. Each of `values` becomes its total so far plus the values of all threads
  /// before this one. Then the values of all threads are added to `totals`. All threads have the same `totals`.
  template <class Int, int32_t kSums>
  __device__ __forceinline__ static void running_sums(PlanShared& shared, Int (&values)[kSums], Int (&totals)[kSums]) {
    static_assert(kSums <= kMaxSums, "room for the sums of warps");
    Int up_to_lane[kSums];
#pragma unroll
    for (int32_t k = 0; k < kSums; ++k) up_to_lane[k] = ptx::warp_inclusive_sum(values[k], lane());
    __syncthreads();  // all threads have read the sums before
#pragma unroll
    for (int32_t k = 0; k < kSums && lane() == 31; ++k) shared.warp_sums[k][warp()] = up_to_lane[k];
    __syncthreads();
#pragma unroll
    for (int32_t k = 0; k < kSums; ++k) {
      const Int warp_sum = lane() < kPlanWarps ? static_cast<Int>(shared.warp_sums[k][lane()]) : 0;
      const Int up_to_warp = ptx::warp_inclusive_sum(warp_sum, lane());
      values[k] = totals[k] + __shfl_sync(ptx::kAllLanes, up_to_warp - warp_sum, warp()) + up_to_lane[k] - values[k];
      totals[k] += __shfl_sync(ptx::kAllLanes, up_to_warp, 31);
    }
  }

  /// The same of one value of each lane of a warp: returns `total` plus the values of the lanes before this one.
  __device__ __forceinline__ static int32_t running_sum_of_warp(int32_t value, int32_t& total) {
    const int32_t up_to_lane = total + ptx::warp_inclusive_sum(value, lane());
    total = __shfl_sync(ptx::kAllLanes, up_to_lane, 31);
    return up_to_lane - value;
  }

  /// The row group that row tile `tile` belongs to: the last one whose first tile is at or before it.
  __device__ __forceinline__ static int32_t find_group(const int32_t* tile_begin, int32_t num_groups, int32_t tile,
                                                       int32_t /*before*/) {
    return find_last(num_groups, [&](int32_t i) { return tile_begin[i] <= tile; });
  }

  /// The best even cut of a shared prefix; each warp finds it, a lane looks at one number of parts.
  __device__ __forceinline__ static EvenCut best_even_cut(const PlanParams& p, const SharedPairs& pairs) {
    static_assert(kMaxAlignedParts == 32, "a lane each");
    const EvenCut cut = cut_evenly(p, pairs, lane() + 1);
    const int32_t cost = __reduce_min_sync(ptx::kAllLanes, cut.cost);
    const int32_t best = __ffs(static_cast<int32_t>(__ballot_sync(ptx::kAllLanes, cut.cost == cost))) - 1;
    return EvenCut{best + 1, __shfl_sync(ptx::kAllLanes, cut.kv_tiles, best),
                   __shfl_sync(ptx::kAllLanes, cut.share, best), cost};
  }
};

}  // namespace attn
