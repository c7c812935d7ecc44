// The device planner: one CTA turns lengths and page tables, where the engine keeps them, into a schedule. Same steps as host/planner.cpp.
#include <cub/block/block_scan.cuh>

#include "attn/planning.h"

namespace attn {

using CountScan = cub::BlockScan<int32_t, kPlanThreads>;
using CostScan = cub::BlockScan<int64_t, kPlanThreads>;

struct PlanSharedMemory {
  union {
    CountScan::TempStorage count;
    CostScan::TempStorage cost;
  } scan;
  uint32_t errors;
};

/// Index of the row group that row tile `tile` belongs to: the last one whose first tile is at or before it.
__device__ int32_t find_group(const int32_t* tile_begin, int32_t num_groups, int32_t tile) {
  int32_t low = 0, high = num_groups;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (tile_begin[middle] <= tile) low = middle; else high = middle;
  }
  return low;
}

/// Links rows to their row groups, a warp a group; one level without a row list needs no links.
__device__ void link_rows(const PlanParams& p, int32_t num_groups, uint32_t& errors) {
  if (!keeps_row_states(p) && p.levels[0].rows == nullptr) return;
  for (int32_t g = static_cast<int32_t>(threadIdx.x) / 32; g < num_groups; g += kPlanThreads / 32) {
    const RowGroup group = p.schedule.groups[g];
    for (int32_t row = static_cast<int32_t>(threadIdx.x) % 32; row < group.qo_len; row += 32) link_row(p, group, g, row, errors);
  }
}

__device__ void plan(const PlanParams& p, int32_t* tile_begin) {
  __shared__ PlanSharedMemory shared;
  const ScheduleConfig& config = p.config;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) shared.errors = 0;

  uint32_t errors = 0;
  int32_t num_tiles = 0;
  const int32_t num_groups = count_groups(p);
  if (keeps_row_states(p)) {
    for (int64_t i = thread; i < int64_t{p.num_levels} * config.max_rows; i += kPlanThreads) p.schedule.links[i] = RowLink{-1, 0};
  }
  for (int32_t first = 0; first < num_groups; first += kPlanThreads) {
    const int32_t i = first + thread;
    RowGroup group{};
    int32_t count = 0;
    if (i < num_groups) {
      group = read_row_group(p, find_level(p, i), errors);
      count = count_row_tiles(config, group);
    }
    int32_t before, total;
    __syncthreads();
    CountScan(shared.scan.count).ExclusiveSum(count, before, total);
    if (i < num_groups) {
      group.tile_begin = num_tiles + before;
      tile_begin[i] = group.tile_begin;
      p.schedule.groups[i] = group;
    }
    num_tiles += total;
  }
  if (num_tiles > config.max_tiles) {
    errors |= kQoIndptrInvalid;
    num_tiles = config.max_tiles;
  }
  __syncthreads();
  link_rows(p, num_groups, errors);
  if (errors) atomicOr(&shared.errors, errors);

  int64_t total_cost = 0;
  for (int32_t first = 0; first < num_tiles; first += kPlanThreads) {
    const int32_t i = first + thread;
    RowTile tile{};
    int64_t cost = 0;
    if (i < num_tiles) {
      const int32_t g = find_group(tile_begin, num_groups, i);
      tile = make_row_tile(p, p.schedule.groups[g], g, i - tile_begin[g]);
      cost = row_tile_cost(config, tile) * config.num_kv_heads;
    }
    int64_t before, total;
    __syncthreads();
    CostScan(shared.scan.cost).ExclusiveSum(cost, before, total);
    if (i < num_tiles) {
      tile.cost_begin = total_cost + before;
      p.schedule.tiles[i] = tile;
    }
    total_cost += total;
  }
  __syncthreads();

  const int64_t share = cta_share(config, total_cost);
  for (int32_t cta = thread; cta <= config.num_ctas; cta += kPlanThreads) {
    p.schedule.positions[cta] = find_position(config, p.schedule.tiles, num_tiles, total_cost, cta * share);
  }
  if (thread == 0) write_header(p, num_groups, num_tiles, share, shared.errors);
  if (thread < p.num_levels) write_level(p, thread);
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kPlanThreads) plan_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ int32_t tile_begin[];   // [max_groups]
  attn::plan(params, tile_begin);
}
