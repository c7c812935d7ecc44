// Selection inside a CTA: sums over the block, the threshold at which a sum is reached, by bisection of keys that
// threads hold or in a running sum.
#pragma once

#include "common/ptx/special_registers.cuh"
#include "common/ptx/warp.cuh"
#include "sampling/sampling.h"

namespace attn {

constexpr int32_t kBins = 4096;
constexpr int32_t kOctaveBins = 256;
constexpr int32_t kThreadBins = kBins / kSamplingThreads;
constexpr int32_t kMaxCandidates = 1536;
constexpr int32_t kHeld = kMaxCandidates / kSamplingThreads;  // candidates of a thread

/// Where a running sum reaches its target.
struct Crossing {
  uint64_t before;  // sum of what comes before `index`: of everything, if it is not reached
  int32_t index;
  bool found;
};

/// What the functions below keep in shared memory.
struct SelectScratch {
  uint64_t sums[2][kSamplingWarps];
  Crossing crossing;
};

/// Sums over the block that every thread gets. Calls take turns with two buffers, so that one barrier a call is enough.
class BlockSums {
 public:
  __device__ __forceinline__ explicit BlockSums(SelectScratch& scratch) : scratch_(scratch) {}

  __device__ __forceinline__ uint64_t operator()(uint64_t x) { return finish(ptx::warp_add(x)); }
  __device__ __forceinline__ uint32_t operator()(uint32_t x) { return static_cast<uint32_t>(finish(ptx::warp_add(x))); }

 private:
  __device__ __forceinline__ uint64_t finish(uint64_t of_warp) {
    turn_ ^= 1;
    if (ptx::lane_id() == 0) scratch_.sums[turn_][threadIdx.x / 32] = of_warp;
    __syncthreads();
    uint64_t sum = 0;
#pragma unroll
    for (int32_t w = 0; w < kSamplingWarps; ++w) sum += scratch_.sums[turn_][w];
    return sum;
  }

  SelectScratch& scratch_;
  int32_t turn_ = 0;
};

/// Largest key in [low, high) such that elements at or above weigh at least `target` together, which those at or above
/// `low` do. Where any key with the same elements at or above it is as good (`as_set`), it may end early.
/// sum_from(key): weight of the elements at or above, the same in all threads. At most 32 rounds.
template <class Sum, class SumFrom>
__device__ __forceinline__ uint32_t bisect(uint32_t low, uint32_t high, Sum target, bool as_set,
                                           const SumFrom& sum_from) {
#pragma unroll 1
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const Sum sum = sum_from(middle);
    if (sum >= target)
      low = middle;
    else
      high = middle;
    if (as_set && sum == target) break;
  }
  return low;
}

/// Every thread has kItems numbers item(i), thread 0 the first ones: finds the first item with which the running sum is
/// at least `target`.
template <int32_t kItems, class Item>
__device__ __forceinline__ Crossing find_crossing(SelectScratch& scratch, uint64_t target, const Item& item) {
  uint64_t mine = 0;
#pragma unroll 4
  for (int32_t i = 0; i < kItems; ++i) mine += item(i);
  const int32_t lane = ptx::lane_id();
  uint64_t through = ptx::warp_inclusive_sum(mine, lane);
  __syncthreads();  // the scratch may still be read
  if (lane == 31) scratch.sums[0][threadIdx.x / 32] = through;
  __syncthreads();
#pragma unroll
  for (int32_t w = 0; w < kSamplingWarps; ++w)
    through += w < static_cast<int32_t>(threadIdx.x / 32) ? scratch.sums[0][w] : 0;
  if (through - mine < target && target <= through) {
    uint64_t before = through - mine;
    int32_t i = 0;
#pragma unroll 1
    for (; i < kItems - 1 && before + item(i) < target; ++i) before += item(i);
    scratch.crossing = Crossing{before, static_cast<int32_t>(threadIdx.x) * kItems + i, true};
  }
  if (threadIdx.x == kSamplingThreads - 1 && through < target)
    scratch.crossing = Crossing{through, kSamplingThreads * kItems, false};
  __syncthreads();
  return scratch.crossing;
}

}  // namespace attn
