// The device planner: turns lengths and page tables, where the engine keeps them, into a schedule. The same steps as
// planner/host/planner.cpp give the same schedule, bit for bit.
//
// One launch. Its first CTA plans, in steps that all its threads take together:
//   read    lengths and page tables become row groups, with invalid values clamped (groups.h)
//   search  with cascade on, the other CTAs compare page tables and tell the first one which requests share leading
//           pages (prefix_search.cuh)
//   decide  the first CTA makes a forest of that, decides which nodes pay, and adds their row groups (forest.cuh)
//   place   row groups become row tiles, each with its cost, in one list (schedule.h)
//   cut     the list is cut into an interval for each CTA of the attention kernel (cost_model.h, cuts.h)
//   write   header, levels, and the links of rows to the row groups of the forest
// A step is a loop over requests, nodes, row groups, row tiles or CTAs that the threads share; the CTA's running sum
// counts the elements before an element. Row groups and row tiles lie in the schedule itself, in global memory; shared
// memory holds the forest, the first row tile of each group and the first row tiles' places in the list.
#include "planner/cuts.h"
#include "planner/device/context.cuh"
#include "planner/device/forest.cuh"
#include "planner/groups.h"
#include "planner/schedule_writer.h"

namespace attn {

/// Links rows to the row groups of a composition, a warp a group, and checks row lists.
__device__ __forceinline__ void link_rows(PlanContext& c) {
  uint32_t errors = 0;
  int32_t num_merge_rows = 0;
#pragma unroll 1
  for (int32_t g = warp_index(); g < c.planned.num_groups; g += kPlanWarps) {
    const RowGroup group = c.p.schedule.groups[g];
#pragma unroll 1
    for (int32_t row = lane_index(); row < group.qo_len; row += 32)
      num_merge_rows = max_of(num_merge_rows, link_row(c.p, group, g, row, errors));
  }
  report(c.shared, errors);
  if (c.p.num_levels > 1) shared_max(&c.shared.num_merge_rows, num_merge_rows);
}

/// Reads row groups, cuts the row groups of a batch invariant plan into KV chunks, and links their rows.
__device__ __forceinline__ void read_groups(PlanContext& c) {
  const PlanParams& p = c.p;
  const int32_t num_requests = count_groups(p);
  uint32_t errors = 0;
  if (p.num_levels > 1) {
#pragma unroll 1
    for (int64_t i = thread_index(); i < static_cast<int64_t>(p.num_levels) * p.config.max_merge_rows;
         i += kPlanThreads)
      p.schedule.links[i] = RowLink{-1, 0};
  }
  for_each_together(num_requests, [&](int32_t i) {
    RowGroup group{};
    int32_t num_chunks = 0;
    if (i < num_requests) {
      group = read_row_group(p, find_level(p, i), errors);
      num_chunks = count_chunks(p, group);
    }
    // Without chunks row groups are where their requests are, which spares the sum.
    const int32_t first = p.config.batch_invariant ? running_sum(c.shared, num_chunks, c.planned.num_groups) : i;
#pragma unroll 1
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk)
      p.schedule.groups[first + chunk] = make_chunk(p, group, i, chunk, num_chunks, first + chunk);
    if (!p.config.batch_invariant || i >= num_requests) return;
#pragma unroll 1
    for (int32_t chunk = num_chunks > 1 ? num_chunks : 0; chunk < p.config.max_links; ++chunk)
      p.schedule.links[static_cast<int64_t>(chunk) * p.config.max_merge_rows + i] = RowLink{-1, 0};
  });
  if (!p.config.batch_invariant) c.planned.num_groups = num_requests;
  report(c.shared, errors);
  c.planned.num_links = p.num_levels;
  if (p.config.batch_invariant && c.planned.num_groups > num_requests) {
    c.planned.num_merge_rows = num_requests;
    c.planned.num_links = p.config.max_links;
  }
  if (p.seeks_forest) c.planned.num_requests = num_requests;
  __syncthreads();
  if (links_rows(p)) link_rows(c);
}

/// Counts the row tiles of row groups.
__device__ __forceinline__ void count_tiles(PlanContext& c) {
  const ScheduleConfig& config = c.p.config;
  int64_t num_tiles = 0;
  __syncthreads();  // all row groups are written
  for_each_together(c.planned.num_groups, [&](int32_t g) {
    RowGroup group{};
    if (g < c.planned.num_groups) {
      group = c.p.schedule.groups[g];
      if (group.kind == config.max_kind && group.qo_len > 0) c.shared.has_largest_tiles = 1;
    }
    const int64_t tile_begin = running_sum(c.shared, int64_t{count_row_tiles(config, group)}, num_tiles);
    if (g < c.planned.num_groups)
      c.tile_begin[g] = c.p.schedule.groups[g].tile_begin = static_cast<int32_t>(tile_begin);
  });
  if (num_tiles > config.max_tiles) report(c.shared, kQoIndptrInvalid);
  c.planned.num_tiles = static_cast<int32_t>(min_of<int64_t>(num_tiles, config.max_tiles));
}

/// The row group that row tile `tile` belongs to: the last one whose first tile is at or before it.
__device__ __forceinline__ int32_t find_group(const PlanContext& c, int32_t tile) {
  return find_last(c.planned.num_groups, [&](int32_t i) { return c.tile_begin[i] <= tile; });
}

/// Places the row tiles of all row groups in the list of work, one thread for each tile, and finds the longest pairs.
__device__ __forceinline__ void place_tiles(PlanContext& c) {
  count_tiles(c);
  __syncthreads();
  for_each_together(c.planned.num_tiles, [&](int32_t i) {
    RowTile tile{};
    PlacedTile placed{};
    int64_t cost = 0;
    int32_t longest = -1, longest_small = 0;
    if (i < c.planned.num_tiles) {
      const int32_t g = find_group(c, i);
      const RowGroup group = c.p.schedule.groups[g];
      tile = make_row_tile(c.p, group, g, i - group.tile_begin);
      placed = placed_tile(tile, group);
      const int64_t whole_pair_cost = pair_cost(c.p.config, placed.cost_kind, tile.num_kv_tiles);
      cost = whole_pair_cost * c.p.config.num_kv_heads;
      (tile.kind == c.p.config.max_kind ? longest : longest_small) = narrow_cost(whole_pair_cost);
    }
    shared_max(&c.shared.longest_pair, longest);
    shared_max(&c.shared.longest_small_pair, longest_small);
    placed.cost_begin = tile.cost_begin = running_sum(c.shared, cost, c.total_cost);
    if (i < c.planned.num_tiles) c.p.schedule.tiles[i] = tile;
    if (i < min_of(c.planned.num_tiles, kCachedTiles)) c.shared.tiles[i] = placed;
  });
  __syncthreads();
}

/// The best even cut of a shared prefix; each warp finds it, a lane looks at one number of parts.
__device__ __forceinline__ EvenCut best_even_cut(const PlanParams& p, const SharedPairs& pairs) {
  static_assert(kMaxAlignedParts == 32, "a lane each");
  const EvenCut cut = cut_evenly(p, pairs, lane_index() + 1);
  const int32_t cost = __reduce_min_sync(ptx::kAllLanes, cut.cost);
  const int32_t best = __ffs(static_cast<int32_t>(__ballot_sync(ptx::kAllLanes, cut.cost == cost))) - 1;
  return EvenCut{best + 1, __shfl_sync(ptx::kAllLanes, cut.kv_tiles, best),
                 __shfl_sync(ptx::kAllLanes, cut.share, best), cost};
}

/// Cuts the list of work: finds the positions of CTAs.
__device__ __forceinline__ void cut_work(PlanContext& c) {
  const PlanParams& p = c.p;
  Planned& planned = c.planned;
  planned.longest_pair = c.shared.longest_pair;
  planned.longest_small_pair = c.shared.longest_small_pair;
  planned.has_largest_tiles = c.shared.has_largest_tiles;
  planned.errors = c.shared.errors;
  if (p.num_levels > 1) planned.num_merge_rows = c.shared.num_merge_rows;
  const auto tiles = [&](int32_t i) {
    if (i < kCachedTiles) return c.shared.tiles[i];
    return placed_tile(p.schedule.tiles[i], p.schedule.groups[p.schedule.tiles[i].group]);
  };
  finish_plan(p, planned.num_tiles > 0 ? tiles(0) : PlacedTile{}, c.total_cost, planned);
  if (has_one_prefix(p, planned) && planned.errors == 0) {  // without errors all of its row tiles exist
    const int32_t tile = c.tile_begin[planned.num_groups - 1];
    const SharedPairs pairs{tile, tiles(tile), (planned.num_tiles - tile) * p.config.num_kv_heads};
    align_prefix(p, pairs, best_even_cut(p, pairs), planned);
  }
  for_each(p.config.num_ctas + 1,
           [&](int32_t cta) { p.schedule.positions[cta] = find_position(p, tiles, planned, c.total_cost, cta); });
}

/// Writes the header and the levels.
__device__ __forceinline__ void write_plan(const PlanContext& c) {
  const bool without_list = node_needs_no_list(c.p, c.planned);
  for_each(count_levels(c.p) + 1, [&](int32_t i) {
    if (i == 0)
      write_header(c.p, c.planned);
    else
      write_level(c.p, i - 1, without_list);
  });
}

/// Shared memory: PlanShared, the forest, the first tile of each row group; of the CTAs that search what
/// search_prefixes() makes of it.
template <bool kSeeksForest>
__device__ __forceinline__ void plan(const PlanParams& p, char* memory) {
  if (kSeeksForest && blockIdx.x > 0) {
    search_prefixes(p, memory);
    return;
  }
  PlanShared& shared = *reinterpret_cast<PlanShared*>(memory);
  const int32_t forest_size = kSeeksForest ? p.levels[0].num_groups : 0;
  char* const forest = memory + sizeof(PlanShared);
  PlanContext c{p, shared, reinterpret_cast<int32_t*>(forest + forest_shared_bytes(forest_size)), Planned{}, 0};
  if (thread_index() == 0) {
    shared.errors = 0;
    shared.num_merge_rows = shared.longest_small_pair = shared.has_largest_tiles = 0;
    shared.longest_pair = -1;
    shared.max_depth = shared.states = shared.saved = shared.max_taken_depth = 0;
  }
  __syncthreads();
  read_groups(c);
  const ForestMemory m(forest, forest_size);
  if constexpr (kSeeksForest) add_forest(c, m);
  place_tiles(c);
  cut_work(c);
  write_plan(c);
  if constexpr (kSeeksForest) link_forest(c, m);
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1)
    plan_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan<false>(params, memory);
}

/// Where a forest is sought.
extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1)
    plan_forest_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan<true>(params, memory);
}
