// The device planner: turns lengths and page tables, where the engine keeps them, into a schedule. Same steps as host/planner.cpp, by one CTA; other CTAs only
// help to search the page tables for shared prefixes (forest.cuh).
#include <cub/block/block_scan.cuh>

#include "attn/planning.h"
#include "device/forest.cuh"

namespace attn {

using CountScan = cub::BlockScan<int32_t, kPlanThreads, cub::BLOCK_SCAN_WARP_SCANS>;

struct PlanSharedMemory {
  union {
    CountScan::TempStorage count;
    SumScan::TempStorage cost;
  } scan;
  ForestShared forest;
  PlacedTile tiles[kCachedTiles];     // the first row tiles
  uint32_t errors;
  int32_t num_merge_rows;
};

/// Index of the row group that row tile `tile` belongs to: the last one whose first tile is at or before it.
__device__ int32_t find_group(const int32_t* tile_begin, int32_t num_groups, int32_t tile) {
  int32_t low = 0, high = num_groups;
#pragma unroll 1
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (tile_begin[middle] <= tile) low = middle; else high = middle;
  }
  return low;
}

/// Links rows to the row groups of a composition, a warp a group.
__device__ void link_rows(const PlanParams& p, int32_t num_groups, PlanSharedMemory& shared, uint32_t& errors) {
  int32_t num_merge_rows = 0;
#pragma unroll 1
  for (int32_t g = static_cast<int32_t>(threadIdx.x) / 32; g < num_groups; g += kPlanThreads / 32) {
    const RowGroup group = p.schedule.groups[g];
#pragma unroll 1
    for (int32_t row = static_cast<int32_t>(threadIdx.x) % 32; row < group.qo_len; row += 32) {
      num_merge_rows = max_of(num_merge_rows, link_row(p, group, g, row, errors));
    }
  }
  if (p.num_levels > 1) atomicMax(&shared.num_merge_rows, num_merge_rows);
}

/// Cuts the requests of a batch invariant plan into KV chunks: their row groups, without tile_begin.
__device__ void make_chunks(const PlanParams& p, PlanSharedMemory& shared, Planned& planned) {
  const int32_t num_requests = planned.num_groups;
  planned.num_groups = 0;
#pragma unroll 1
  for (int32_t first = 0; first < num_requests; first += kPlanThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    RowGroup group{};
    int32_t num_chunks = 0;
    if (i < num_requests) {
      group = read_row_group(p, GroupPlace{0, i}, planned.errors);
      num_chunks = count_chunks(p, group);
    }
    int32_t before, total;
    __syncthreads();
    CountScan(shared.scan.count).ExclusiveSum(num_chunks, before, total);
    before += planned.num_groups;
#pragma unroll 1
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk) p.schedule.groups[before + chunk] = make_chunk(p, group, i, chunk, num_chunks, before + chunk);
#pragma unroll 1
    for (int32_t chunk = num_chunks > 1 ? num_chunks : 0; i < num_requests && chunk < p.config.max_links; ++chunk) {
      p.schedule.links[static_cast<int64_t>(chunk) * p.config.max_merge_rows + i] = RowLink{-1, 0};
    }
    planned.num_groups += total;
  }
  planned.num_merge_rows = planned.num_groups > num_requests ? num_requests : 0;
  planned.num_links = p.config.max_links;
  __syncthreads();
}

/// `forest`: where there is one. `own`: row group number threadIdx.x, if there is one and it is a request's, as read and not yet cut.
__device__ void plan(const PlanParams& p, PlanSharedMemory& shared, int32_t* tile_begin, const Forest* forest, RowGroup own, Planned planned) {
  const ScheduleConfig& config = p.config;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t num_requests = count_groups(p);
  if (thread == 0) {
    shared.errors = 0;
    shared.num_merge_rows = 0;
  }
  if (p.num_levels > 1) {
    for (int64_t i = thread; i < static_cast<int64_t>(p.num_levels) * config.max_merge_rows; i += kPlanThreads) p.schedule.links[i] = RowLink{-1, 0};
  }
  if (config.batch_invariant) make_chunks(p, shared, planned);

  int32_t num_tiles = 0;
#pragma unroll 1
  for (int32_t first = 0; first < planned.num_groups; first += kPlanThreads) {
    const int32_t i = first + thread;
    RowGroup group{};
    int32_t count = 0;
    if (i < planned.num_groups) {
      if (i < num_requests && !config.batch_invariant) {
        group = first == 0 ? own : read_row_group(p, find_level(p, i), planned.errors);
        if (forest != nullptr) cut_group(p.levels[0].table, *forest, i, group);
      } else {
        group = p.schedule.groups[i];
      }
      count = count_row_tiles(config, group);
    }
    int32_t before = min_of(thread, planned.num_groups - first), total = min_of(kPlanThreads, planned.num_groups - first);
    if (!__syncthreads_and(i >= planned.num_groups || count == 1)) CountScan(shared.scan.count).ExclusiveSum(count, before, total);
    if (i < planned.num_groups) {
      group.tile_begin = num_tiles + before;
      tile_begin[i] = group.tile_begin;
      p.schedule.groups[i] = group;
    }
    if (first == 0) own = group;
    num_tiles += total;
  }
  const bool one_tile_each = num_tiles == planned.num_groups && planned.num_groups <= kPlanThreads;
  if (num_tiles > config.max_tiles) {
    planned.errors |= kQoIndptrInvalid;
    num_tiles = config.max_tiles;
  }
  planned.num_tiles = num_tiles;
  __syncthreads();
  if (links_rows(p)) link_rows(p, planned.num_groups, shared, planned.errors);
  if (planned.errors) atomicOr(&shared.errors, planned.errors);

  int64_t total_cost = 0;
#pragma unroll 1
  for (int32_t first = 0; first < num_tiles; first += kPlanThreads) {
    const int32_t i = first + thread;
    RowTile tile{};
    int64_t cost = 0;
    if (i < num_tiles) {
      if (one_tile_each && own.tile_begin == i && own.qo_len > 0) {
        tile = make_row_tile(p, own, i, 0);
      } else {
        const int32_t g = find_group(tile_begin, planned.num_groups, i);
        tile = make_row_tile(p, p.schedule.groups[g], g, i - tile_begin[g]);
      }
      cost = pair_cost(config, tile.kind, tile.num_kv_tiles) * config.num_kv_heads;
    }
    int64_t before, total;
    __syncthreads();
    SumScan(shared.scan.cost).ExclusiveSum(cost, before, total);
    if (i < num_tiles) {
      tile.cost_begin = total_cost + before;
      if (i < kCachedTiles) shared.tiles[i] = PlacedTile{tile.cost_begin, tile.kind, tile.num_kv_tiles};
      p.schedule.tiles[i] = tile;
    }
    total_cost += total;
  }
  __syncthreads();

  planned.share = cta_share(config, total_cost);
  const auto tiles = [&](int32_t i) {
    if (i < kCachedTiles) return shared.tiles[i];
    return PlacedTile{p.schedule.tiles[i].cost_begin, p.schedule.tiles[i].kind, p.schedule.tiles[i].num_kv_tiles};
  };
  if (p.num_levels > 1) planned.num_merge_rows = shared.num_merge_rows;
#pragma unroll 1
  for (int32_t cta = thread; cta <= config.num_ctas; cta += kPlanThreads) {
    p.schedule.positions[cta] = find_position(config, tiles, num_tiles, total_cost, cta * planned.share, is_plain(p, planned));
  }
  if (thread == 0) {
    planned.errors = shared.errors;
    write_header(p, planned);
  }
  if (thread < count_levels(p)) write_level(p, thread);
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1) plan_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];   // ForestMemory; then the first tile of each row group
  __shared__ attn::PlanSharedMemory shared;
  attn::Planned planned{};
  planned.num_groups = attn::count_groups(params);
  planned.num_links = params.num_levels;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  attn::RowGroup own{};
  if (thread < planned.num_groups) own = attn::read_row_group(params, attn::find_level(params, thread), planned.errors);
  if (!params.seeks_forest) {
    attn::plan(params, shared, reinterpret_cast<int32_t*>(memory), nullptr, own, planned);
    return;
  }
  const attn::ForestMemory forest(memory, planned.num_groups);
  int32_t* tile_begin = reinterpret_cast<int32_t*>(memory + attn::forest_shared_bytes(planned.num_groups));
  const attn::Search search = attn::search_forest(params, forest, shared.forest, own, planned.errors);
  if (search == attn::Search::kNothing) return;
  planned.num_requests = forest.forest.size;
  bool taken = false;
  if (search == attn::Search::kPlanWithForest) {
    taken = attn::add_forest(params, forest, shared.forest, planned);
  } else {
    attn::for_each(forest.forest.size, [&](int32_t i) { params.schedule.nodes[i].leader = -1; });
  }
  __syncthreads();
  attn::plan(params, shared, tile_begin, taken ? &forest.forest : nullptr, own, planned);
}
