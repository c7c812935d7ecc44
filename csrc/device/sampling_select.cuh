// Selection in a CTA's shared memory: sums over a block, histograms of counts or masses, and the threshold at which a sum is reached.
#pragma once

#include "attn/sampling.h"
#include "device/ptx/special_registers.cuh"
#include "device/ptx/warp.cuh"

namespace attn {

constexpr int32_t kBins = 2048;
constexpr int32_t kBinBits = 11;
constexpr int32_t kThreadBins = kBins / kSamplingThreads;
constexpr int32_t kMaxCandidates = 2048;

/// Sums of 64 bits as two arrays of words, since shared memory adds 32 bits at a time.
struct Histogram {
  alignas(16) uint32_t low[kBins];
  alignas(16) uint32_t high[kBins];

  __device__ __forceinline__ void add(int32_t bin, uint64_t x) {
    const uint32_t word = static_cast<uint32_t>(x);
    const uint32_t before = atomicAdd(&low[bin], word);
    const uint32_t carried = static_cast<uint32_t>(x >> 32) + (before + word < word ? 1u : 0u);
    if (carried != 0) atomicAdd(&high[bin], carried);
  }

  __device__ __forceinline__ uint64_t sum(int32_t bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }

  __device__ __forceinline__ void set(int32_t bin, uint64_t x) {
    low[bin] = static_cast<uint32_t>(x);
    high[bin] = static_cast<uint32_t>(x >> 32);
  }
};

/// Where a descending sum reaches its target.
struct Crossing {
  uint64_t above;     // sum of what comes before `index`
  int32_t index;
  bool found;
};

/// What the functions below keep in shared memory.
struct SelectScratch {
  uint64_t warp_sums[2][kSamplingWarps];
  Crossing crossing;
};

/// Sum over the block; every thread calls it and gets it. Two calls in a row need a barrier between them, or the other half of the scratch.
__device__ __forceinline__ uint64_t block_sum(SelectScratch& scratch, int32_t half, uint64_t x) {
  const uint64_t of_warp = ptx::warp_add(x);
  if (ptx::lane_id() == 0) scratch.warp_sums[half][threadIdx.x / 32] = of_warp;
  __syncthreads();
  uint64_t sum = 0;
#pragma unroll
  for (int32_t w = 0; w < kSamplingWarps; ++w) sum += scratch.warp_sums[half][w];
  return sum;
}

/// Every thread has kItems numbers, thread 0 the first ones: finds the first item with which the running sum is at least `target`.
template <int32_t kItems>
__device__ __forceinline__ Crossing find_crossing(SelectScratch& scratch, const uint64_t (&items)[kItems], uint64_t target) {
  uint64_t mine = 0;
#pragma unroll
  for (int32_t i = 0; i < kItems; ++i) mine += items[i];
  const int32_t lane = ptx::lane_id();
  const int32_t warp = threadIdx.x / 32;
  uint64_t before = ptx::warp_inclusive_sum(mine, lane);
  __syncthreads();      // the scratch may still be read
  if (lane == 31) scratch.warp_sums[0][warp] = before;
  if (threadIdx.x == 0) scratch.crossing = Crossing{0, 0, false};
  __syncthreads();
#pragma unroll
  for (int32_t w = 0; w < kSamplingWarps; ++w) before += w < warp ? scratch.warp_sums[0][w] : 0;
  const uint64_t through = before;
  before -= mine;
  if (before < target && target <= through) {
    bool found = false;
#pragma unroll
    for (int32_t i = 0; i < kItems; ++i) {
      if (!found && before + items[i] >= target) {
        scratch.crossing = Crossing{before, static_cast<int32_t>(threadIdx.x) * kItems + i, true};
        found = true;
      }
      before += items[i];
    }
  }
  __syncthreads();
  return scratch.crossing;
}

__device__ __forceinline__ void clear(Histogram& histogram) {
#pragma unroll
  for (int32_t i = 0; i < kBins / 4 / kSamplingThreads; ++i) {
    reinterpret_cast<uint4*>(histogram.low)[threadIdx.x + i * kSamplingThreads] = uint4{0, 0, 0, 0};
    reinterpret_cast<uint4*>(histogram.high)[threadIdx.x + i * kSamplingThreads] = uint4{0, 0, 0, 0};
  }
}

/// The highest bin from which on upwards the sum is at least `target`; 0 < target. Everything has been added, with a barrier behind it.
__device__ __forceinline__ Crossing find_bin(SelectScratch& scratch, const Histogram& histogram, uint64_t target) {
  uint64_t items[kThreadBins];
  const int32_t top = kBins - 1 - static_cast<int32_t>(threadIdx.x) * kThreadBins;
#pragma unroll
  for (int32_t i = 0; i < kThreadBins; ++i) items[i] = histogram.sum(top - i);
  Crossing crossing = find_crossing(scratch, items, target);
  crossing.index = kBins - 1 - crossing.index;
  return crossing;
}

/// Largest key such that the elements i < count with key(i) at or above it weigh at least `target` together; `low` if all of those in [low, high) weigh less.
/// Elements outside [low, high) do not count. At most three rounds, since a round settles 11 bits of the key.
template <class Key, class Weight>
__device__ __forceinline__ uint32_t select_key(SelectScratch& scratch, Histogram& histogram, int32_t count, uint32_t low, uint32_t high, uint64_t target,
                                               const Key& key, const Weight& weight) {
  const uint32_t lowest = low;
#pragma unroll 1
  while (high - low > 1) {
    const int32_t shift = max_of(32 - __clz(high - low - 1) - kBinBits, 0);
    clear(histogram);
    __syncthreads();
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < count; i += kSamplingThreads) {
      const uint32_t k = key(i);
      if (k >= low && k < high) histogram.add((k - low) >> shift, weight(i));
    }
    __syncthreads();
    const Crossing crossing = find_bin(scratch, histogram, target);
    if (!crossing.found) return lowest;
    target -= crossing.above;
    low += static_cast<uint32_t>(crossing.index) << shift;
    high = min_of(high - low, 1u << shift) + low;
  }
  return low;
}

}  // namespace attn
