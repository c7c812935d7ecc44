// What the parts of the device planner have in common: loops, barriers and sums of the threads that work together.
#pragma once

#include "common/ptx/named_barrier.cuh"
#include "planner/launch.h"

namespace attn {

/// Threads of a CTA.
__device__ __forceinline__ int32_t plan_threads() { return static_cast<int32_t>(blockDim.x); }

/// `count` threads of a CTA from number `first` on: whole warps. Barrier 0 is that of all threads.
struct PlanTeam {
  int32_t barrier;
  int32_t count;
  int32_t first = 0;

  __device__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x) - first; }
  __device__ bool has_this_thread() const { return thread() >= 0 && thread() < count; }

  __device__ __forceinline__ void sync() const { ptx::barrier_sync(barrier, count); }
  __device__ __forceinline__ bool sync_or(bool value) const {
    return barrier == 0 ? __syncthreads_or(value) : ptx::barrier_sync_or(barrier, count, value);
  }

  /// Runs `body(i)` for every i below `end`; the threads share them.
  template <class Body>
  __device__ __forceinline__ void for_each(int32_t end, const Body& body) const {
#pragma unroll 1  // most loops run once: what they cost is fetching their code
    for (int32_t i = thread(); i < end; i += count) body(i);
  }
};

/// What is summed up at once.
template <class A, class B = int32_t>
struct PlanSums {
  A a;
  B b;
};

template <class A, class B>
__device__ __forceinline__ PlanSums<A, B> operator+(PlanSums<A, B> x, PlanSums<A, B> y) {
  return PlanSums<A, B>{x.a + y.a, x.b + y.b};
}

__device__ __forceinline__ int32_t sum_of_lanes(int32_t value) { return __reduce_add_sync(0xffffffffu, value); }

/// Of values in [0, 2^52): a warp adds up 32-bit numbers at once.
__device__ __forceinline__ int64_t sum_of_lanes(int64_t value) {
  constexpr int kLowBits = 26;
  const int32_t low = sum_of_lanes(static_cast<int32_t>(value & ((1 << kLowBits) - 1)));
  const int32_t high = sum_of_lanes(static_cast<int32_t>(value >> kLowBits));
  return (static_cast<int64_t>(high) << kLowBits) + low;
}

/// Sums of warps on their way to the others. Between two sums that use it there must be a barrier.
template <class A, class B = int32_t>
struct SumMemory {
  PlanSums<A, B> of_warp[kMaxPlanThreads / 32];
};

/// Sums over the threads of a team before this one; `total` receives the sum over all, `any` whether it was true of any
/// thread. Only the first `summands` threads have something to add: other warps only wait.
template <class A, class B>
__device__ __forceinline__ PlanSums<A, B> sum_before(const PlanTeam& team, SumMemory<A, B>& memory, int32_t summands,
                                                     PlanSums<A, B> own, PlanSums<A, B>& total, bool& any) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t warps = min_of((summands + 31) / 32, team.count / 32);
  PlanSums<A, B> sum = own;
  if (warp < warps) {
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const PlanSums<A, B> below{__shfl_up_sync(0xffffffffu, sum.a, distance),
                                 __shfl_up_sync(0xffffffffu, sum.b, distance)};
      if (lane >= distance) sum = sum + below;
    }
    if (lane == 31) memory.of_warp[warp] = sum;
  }
  any = team.sync_or(any);
  // A lane adds up a warp's: a loop over warps takes 80 cycles for each.
  const PlanSums<A, B> of_warp = lane < warps ? memory.of_warp[lane] : PlanSums<A, B>{0, 0};
  const bool is_before = lane < warp;
  total = PlanSums<A, B>{sum_of_lanes(of_warp.a), sum_of_lanes(of_warp.b)};
  return PlanSums<A, B>{sum.a - own.a + sum_of_lanes(is_before ? of_warp.a : 0),
                        sum.b - own.b + sum_of_lanes(is_before ? of_warp.b : 0)};
}

}  // namespace attn
