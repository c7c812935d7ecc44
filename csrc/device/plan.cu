// The device planner: turns lengths and page tables, where the engine keeps them, into a schedule. Same steps as host/planner.cpp, by one CTA; other CTAs
// only help to search the page tables for shared prefixes (prefix_search.cuh).
#include "attn/planning.h"
#include "device/forest.cuh"
#include "device/plan_threads.cuh"

namespace attn {

/// Row groups of a warp on their way to global memory.
struct StagedGroups {
  static constexpr int32_t kGroups = 16;
  int2 words[kGroups * sizeof(RowGroup) / sizeof(int2)];
};

struct PlanSharedMemory {
  SumMemory<int64_t> sums;
  ForestShared forest;
  alignas(16) PlacedTile tiles[kCachedTiles];     // the first row tiles
  StagedGroups staged[kPlanThreads / 32];
  Planned planned;
  int32_t takes_forest;
  uint32_t errors;
  int32_t num_merge_rows;
  int32_t longest_pair;
  int32_t has_largest_tiles;
};

static_assert(sizeof(PlanSharedMemory) <= kPlanSharedBytes, "what the host asks for");

/// Writes a struct in as few stores as there are, of words of 16 or 8 bytes.
template <class Word, class T>
__device__ __forceinline__ void store(T* to, const T& from) {
  constexpr size_t kWords = sizeof(T) / sizeof(Word);
  static_assert(sizeof(T) % sizeof(Word) == 0, "whole words");
  union {
    T value;
    Word words[kWords];
  } copy{from};
#pragma unroll
  for (size_t i = 0; i < kWords; ++i) reinterpret_cast<Word*>(to)[i] = copy.words[i];
}

/// Writes the row groups of a warp from `to` on, a lane one, of which there are `count`: by way of shared memory, so that whole lines reach the L2.
__device__ __forceinline__ void store_groups(RowGroup* to, int32_t count, const RowGroup& group, StagedGroups& staged) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  constexpr int32_t kWords = sizeof(RowGroup) / sizeof(int2);
#pragma unroll
  for (int32_t begin = 0; begin < 32; begin += StagedGroups::kGroups) {
    __syncwarp();
    if (lane >= begin && lane < begin + StagedGroups::kGroups) store<int2>(reinterpret_cast<RowGroup*>(staged.words) + lane - begin, group);
    __syncwarp();
#pragma unroll
    for (int32_t first = 0; first < StagedGroups::kGroups * kWords; first += 32) {
      const int32_t word = first + lane;
      if (word < min_of(count - begin, StagedGroups::kGroups) * kWords) reinterpret_cast<int2*>(to + begin)[word] = staged.words[word];
    }
  }
}

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
__device__ void make_chunks(const PlanParams& p, PlanSharedMemory& shared, Planned& planned, uint32_t& errors) {
  const PlanTeam team{0, kPlanThreads};
  const int32_t num_requests = planned.num_groups;
  planned.num_groups = 0;
#pragma unroll 1
  for (int32_t first = 0; first < num_requests; first += kPlanThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    RowGroup group{};
    int32_t num_chunks = 0;
    if (i < num_requests) {
      group = read_row_group(p, GroupPlace{0, i}, errors);
      num_chunks = count_chunks(p, group);
    }
    PlanSums<int64_t> total;
    bool any = false;
    __syncthreads();
    const int32_t before = planned.num_groups + sum_before(team, shared.sums, num_requests - first, PlanSums<int64_t>{0, num_chunks}, total, any).b;
#pragma unroll 1
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk) p.schedule.groups[before + chunk] = make_chunk(p, group, i, chunk, num_chunks, before + chunk);
#pragma unroll 1
    for (int32_t chunk = num_chunks > 1 ? num_chunks : 0; i < num_requests && chunk < p.config.max_links; ++chunk) {
      p.schedule.links[static_cast<int64_t>(chunk) * p.config.max_merge_rows + i] = RowLink{-1, 0};
    }
    planned.num_groups += total.b;
  }
  planned.num_merge_rows = planned.num_groups > num_requests ? num_requests : 0;
  planned.num_links = p.config.max_links;
  __syncthreads();
}

/// Most row tiles of a group that one thread places.
constexpr int32_t kTilesOfThread = 32;

/// What the line of work holds.
struct Line {
  int32_t num_tiles;
  int64_t cost;
};

/// Reads row group i, as it is before it has a place on the line.
template <bool kSeeksForest>
__device__ __forceinline__ RowGroup find_row_group(const PlanParams& p, const ForestMemory& m, const PlanSharedMemory& shared, int32_t i, uint32_t& errors) {
  if constexpr (!kSeeksForest) {
    if (p.config.batch_invariant) return p.schedule.groups[i];
    return read_row_group(p, p.num_levels == 1 ? GroupPlace{0, i} : find_level(p, i), errors);
  }
  const Forest& f = m.forest;
  if (i >= f.size) return node_group(p, f, f[i - f.size].taken_node, m.table_begin[f[i - f.size].taken_node], shared.planned.num_merge_rows);
  const int32_t kind = choose_kind(p.config, static_cast<int64_t>(f[i].qo_len) * p.config.group_size);
  RowGroup group{m.table_begin[i], f[i].qo_begin, f[i].qo_len, f[i].kv_len, 0, 0, kind, -1, 0};
  if (shared.takes_forest) cut_group(p.levels[0].table, f, i, f[i].top, group);
  return group;
}

/// Lays the row groups on the line, a thread a group, and their row tiles where all tiles of a group cost the same. `tile_begin` receives the first tile of
/// each group. Returns whether all tiles were laid.
template <bool kSeeksForest>
__device__ __forceinline__ bool place_groups(const PlanParams& p, const ForestMemory& m, PlanSharedMemory& shared, int32_t* tile_begin, const Planned& planned,
                                             Line& line, uint32_t& errors) {
  const ScheduleConfig& config = p.config;
  const PlanTeam team{0, kPlanThreads};
  const bool staged = planned.num_groups > 128;   // few are there sooner the direct way
  bool differ = false;
  int32_t longest = 0;
  bool has_largest_tiles = false;
  line = Line{0, 0};
#pragma unroll 1
  for (int32_t first = 0; first < planned.num_groups; first += kPlanThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    RowGroup group{};
    RowTile tile{};
    int32_t count = 0;
    int64_t cost = 0;
    if (i < planned.num_groups) {
      group = find_row_group<kSeeksForest>(p, m, shared, i, errors);
      count = count_row_tiles(config, group);
      longest = max_of(longest, longest_pair(p, group));
      has_largest_tiles |= group.kind == config.max_kind && count > 0;
      if (count > 0) {
        tile = make_row_tile(p, group, i, 0);
        cost = pair_cost(config, cost_kind(tile.kind, group.state_begin), tile.num_kv_tiles) * config.num_kv_heads;
        const PlanLevel& level = p.levels[group.level];
        differ |= count > 1 && (level.causal || level.window_left >= 0 || count > kTilesOfThread);
      }
    }
    PlanSums<int64_t> total;
    if (first > 0) __syncthreads();
    const PlanSums<int64_t> before = sum_before(team, shared.sums, planned.num_groups - first, PlanSums<int64_t>{cost * count, count}, total, differ);
    if (i < planned.num_groups) {
      group.tile_begin = line.num_tiles + before.b;
      tile_begin[i] = group.tile_begin;
      if (!staged) store<int2>(p.schedule.groups + i, group);
      tile.cost_begin = line.cost + before.a;
#pragma unroll 1
      for (int32_t index = group.tile_begin; index < group.tile_begin + count && !differ && index < config.max_tiles; ++index) {
        store<int4>(p.schedule.tiles + index, tile);
        if (index < kCachedTiles) store<int4>(shared.tiles + index, placed_tile(tile, group));
        tile.cost_begin += cost;
        tile.packed_begin += tile_rows(tile.kind);
      }
    }
    const int32_t of_warp = i - static_cast<int32_t>(threadIdx.x) % 32;
    if (staged && of_warp < planned.num_groups) store_groups(p.schedule.groups + of_warp, planned.num_groups - of_warp, group, shared.staged[threadIdx.x / 32]);
    line.num_tiles += total.b;
    line.cost += total.a;
  }
  // Behind the barriers of the sums: the first thread has set these to 0.
  if (has_largest_tiles) shared.has_largest_tiles = 1;
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (threadIdx.x % 32 == 0 && longest > 0) atomicMax(&shared.longest_pair, longest);
  return !differ && line.num_tiles <= config.max_tiles;
}

/// Lays the row tiles on the line, a thread a tile.
__device__ __forceinline__ void place_tiles(const PlanParams& p, PlanSharedMemory& shared, const int32_t* tile_begin, int32_t num_groups, Line& line) {
  const PlanTeam team{0, kPlanThreads};
  line.cost = 0;
#pragma unroll 1
  for (int32_t first = 0; first < line.num_tiles; first += kPlanThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    RowTile tile{};
    int32_t kind = 0;
    int64_t cost = 0;
    __syncthreads();   // groups and their first tiles are there, and the sums before have been read
    if (i < line.num_tiles) {
      const int32_t g = find_group(tile_begin, num_groups, i);
      const RowGroup& group = p.schedule.groups[g];
      tile = make_row_tile(p, group, g, i - tile_begin[g]);
      kind = cost_kind(tile.kind, group.state_begin);
      cost = pair_cost(p.config, kind, tile.num_kv_tiles) * p.config.num_kv_heads;
    }
    PlanSums<int64_t> total;
    bool any = false;
    tile.cost_begin = line.cost + sum_before(team, shared.sums, line.num_tiles - first, PlanSums<int64_t>{cost, 0}, total, any).a;
    if (i < line.num_tiles) {
      if (i < kCachedTiles) store<int4>(shared.tiles + i, PlacedTile{tile.cost_begin, kind, tile.num_kv_tiles});
      store<int4>(p.schedule.tiles + i, tile);
    }
    line.cost += total.a;
  }
}

/// Everything behind the forest; all threads' work. `m`: of the forest, where one was sought; `linkers`: the threads that link its rows.
template <bool kSeeksForest>
__device__ __forceinline__ void plan(const PlanParams& p, const ForestMemory& m, const PlanTeam& linkers, PlanSharedMemory& shared, int32_t* tile_begin,
                                     Planned planned, uint32_t errors) {
  const ScheduleConfig& config = p.config;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if constexpr (!kSeeksForest) {
    if (p.num_levels > 1) {
      for (int64_t i = thread; i < static_cast<int64_t>(p.num_levels) * config.max_merge_rows; i += kPlanThreads) p.schedule.links[i] = RowLink{-1, 0};
    }
    if (config.batch_invariant) make_chunks(p, shared, planned, errors);
  }
  Line line;
  const bool placed = place_groups<kSeeksForest>(p, m, shared, tile_begin, planned, line, errors);
  const bool fits = line.num_tiles <= config.max_tiles;
  if (!fits) {
    errors |= kQoIndptrInvalid;
    line.num_tiles = config.max_tiles;
  }
  if constexpr (!kSeeksForest) {
    if (links_rows(p)) {
      __syncthreads();
      link_rows(p, planned.num_groups, shared, errors);
    }
  }
  if (errors) atomicOr(&shared.errors, errors);
  if (!placed) place_tiles(p, shared, tile_begin, planned.num_groups, line);
  __syncthreads();

  // From here on threads wait for nothing but each other's links: as many as there are requests link rows, one writes the header and others the levels, and
  // the first ones find positions.
  if constexpr (kSeeksForest) {
    if (shared.takes_forest && linkers.has_this_thread()) link_forest(p, m, linkers, planned);
  }
  planned.num_tiles = line.num_tiles;
  planned.errors = shared.errors;
  planned.longest_pair = shared.longest_pair;
  planned.has_largest_tiles = shared.has_largest_tiles;
  if (!kSeeksForest && p.num_levels > 1) planned.num_merge_rows = shared.num_merge_rows;
  finish_plan(p, line.num_tiles > 0 ? shared.tiles[0] : PlacedTile{}, line.cost, planned);
  const auto tiles = [&](int32_t i) {
    if (i < kCachedTiles) return shared.tiles[i];
    return placed_tile(p.schedule.tiles[i], p.schedule.groups[p.schedule.tiles[i].group]);
  };
  if constexpr (kSeeksForest) {
    if (planned.num_groups == p.levels[0].num_groups + 1 && fits) {
      const int32_t tile = tile_begin[planned.num_groups - 1];
      const SharedPairs pairs{tile, tiles(tile), (line.num_tiles - tile) * config.num_kv_heads};
      align_prefix(p, pairs, __reduce_min_sync(0xffffffffu, judge_alignment(p, pairs, thread % 32 + 1)), planned);
    }
  }
  const int32_t from_last = kPlanThreads - 1 - thread;
  if (from_last == 0) write_header(p, planned);
  if (from_last > 0 && from_last % 32 == 0 && from_last / 32 <= count_levels(p)) write_level(p, from_last / 32 - 1);
#pragma unroll 1
  for (int32_t cta = thread; cta <= config.num_ctas; cta += kPlanThreads) {
    store<int4>(p.schedule.positions + cta, find_position(p, tiles, planned, line.cost, cta));
  }
}

/// The work of a CTA. `memory`: ForestMemory, PlanSharedMemory, the first tile of each row group.
template <bool kSeeksForest>
__device__ __forceinline__ void plan_as_cta(const PlanParams& p, char* memory) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t size = kSeeksForest ? p.levels[0].num_groups : 0;
  const ForestMemory m(memory, size);
  if (kSeeksForest && blockIdx.x > 0) {
    search_prefixes(p, m);
    return;
  }
  PlanSharedMemory& shared = *reinterpret_cast<PlanSharedMemory*>(memory + forest_shared_bytes(size));
  if (thread == 0) shared.errors = shared.num_merge_rows = shared.takes_forest = shared.longest_pair = shared.has_largest_tiles = 0;
  Planned planned{};
  planned.num_groups = kSeeksForest ? size : p.num_levels == 1 ? p.levels[0].num_groups : count_groups(p);
  planned.num_links = p.num_levels;
  uint32_t errors = 0;
  const PlanTeam team{1, min_of((size + 31) / 32 * 32, kPlanThreads)};
  // Where there are threads left, those that link rows are others than those that find positions.
  const PlanTeam linkers{1, team.count, team.count <= kPlanThreads / 2 ? kPlanThreads / 2 : 0};
  if constexpr (kSeeksForest) {
    if (team.has_this_thread()) {
      const bool taken = make_forest(p, m, shared.forest, team, planned, errors);
      if (thread == 0) {
        shared.takes_forest = taken;
        shared.planned = planned;
      }
    }
    __syncthreads();
    planned = shared.planned;
    const int32_t num_taken = planned.num_groups - size;
    if (linkers.has_this_thread() && num_taken > 1) count_node_rows(m, linkers, 0, count_columns(m, num_taken));
  }
  int32_t* tile_begin = reinterpret_cast<int32_t*>(&shared + 1);
  plan<kSeeksForest>(p, m, linkers, shared, tile_begin, planned, errors);
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1) plan_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan_as_cta<false>(params, memory);
}

/// Where a forest is sought. A kernel of its own: code that is not there is not fetched, nor jumped over.
extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1) plan_forest_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan_as_cta<true>(params, memory);
}
