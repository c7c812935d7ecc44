// A plan on its way through its steps (steps.h), and the loops and sums of the threads that take them. `Threads` says
// what these are and what they do together: the threads of a CTA (device/threads.cuh), or one thread of a CPU
// (host/planner.cpp).
#pragma once

#include "planner/params.h"
#include "planner/work_list.h"

#if defined(__CUDACC__)
#define ATTN_STEP __device__ __forceinline__
#else
#define ATTN_STEP inline
#endif

namespace attn {

constexpr int32_t kPlanWarps = kPlanThreads / 32;
constexpr int32_t kMaxSums = 3;  // of running_sums()

/// Shared by the threads that plan, besides the forest.
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

/// A plan on its way through the steps. Each thread has one, with the same content.
template <class Threads>
struct PlanContext {
  const PlanParams& p;
  PlanShared& shared;
  int32_t* tile_begin;  // the first row tile of each row group
  Planned planned;
  int64_t total_cost;  // of all row tiles
};

/// Runs `body(i)` for every i below `end`; the threads share them. (Loops are not unrolled: most run once or twice, and
/// what they cost is fetching their code.)
template <class Threads, class Body>
ATTN_STEP void for_each(int32_t end, const Body& body) {
#pragma unroll 1
  for (int32_t i = Threads::thread(); i < end; i += Threads::kCount) body(i);
}

/// Like for_each(), for a `body` in which the threads work together: all call it equally often, also with i >= end.
template <class Threads, class Body>
ATTN_STEP void for_each_together(int32_t end, const Body& body) {
#pragma unroll 1
  for (int32_t first = 0; first < end; first += Threads::kCount) body(first + Threads::thread());
}

/// A running sum over the threads (Threads::running_sums()).
template <class Threads, class Int>
ATTN_STEP Int running_sum(PlanShared& shared, Int value, Int& total) {
  Int values[] = {value}, totals[] = {total};
  Threads::running_sums(shared, values, totals);
  total = totals[0];
  return values[0];
}

}  // namespace attn
