// The device planner: turns lengths and page tables, where the engine keeps them, into a schedule. Same steps as host/planner.cpp, by one CTA; other CTAs
// only help to search the page tables for shared prefixes (forest.cuh).
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
  SumMemory sums;
  ForestShared forest;
  alignas(16) PlacedTile tiles[kCachedTiles];     // the first row tiles
  StagedGroups staged[kPlanThreads / 32];
  uint32_t errors;
  int32_t num_merge_rows;
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
    LineSums total;
    bool any = false;
    __syncthreads();
    const int32_t before = planned.num_groups + sum_before(shared.sums.line, num_requests - first, LineSums{0, num_chunks}, total, any).tiles;
#pragma unroll 1
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk) p.schedule.groups[before + chunk] = make_chunk(p, group, i, chunk, num_chunks, before + chunk);
#pragma unroll 1
    for (int32_t chunk = num_chunks > 1 ? num_chunks : 0; i < num_requests && chunk < p.config.max_links; ++chunk) {
      p.schedule.links[static_cast<int64_t>(chunk) * p.config.max_merge_rows + i] = RowLink{-1, 0};
    }
    planned.num_groups += total.tiles;
  }
  planned.num_merge_rows = planned.num_groups > num_requests ? num_requests : 0;
  planned.num_links = p.config.max_links;
  __syncthreads();
}

/// Most row tiles of a group that one thread places.
constexpr int32_t kTilesOfThread = 32;

/// A row group's row tiles: the first one, how many there are, and what one costs if they all cost the same.
struct GroupTiles {
  RowTile first;
  int32_t count;
  int64_t cost;
  bool differ;

  __device__ __forceinline__ LineSums sums() const { return LineSums{cost * count, count}; }
};

__device__ __forceinline__ GroupTiles make_tiles(const PlanParams& p, const RowGroup& group, int32_t group_index) {
  GroupTiles tiles{};
  tiles.count = count_row_tiles(p.config, group);
  if (tiles.count == 0) return tiles;
  tiles.first = make_row_tile(p, group, group_index, 0);
  tiles.cost = pair_cost(p.config, tiles.first.kind, tiles.first.num_kv_tiles) * p.config.num_kv_heads;
  const PlanLevel& level = p.levels[group.level];
  tiles.differ = tiles.count > 1 && (level.causal || level.window_left >= 0 || tiles.count > kTilesOfThread);
  return tiles;
}

/// Writes the row tiles of a group, all of the same cost. `before`: what lies before them on the line.
__device__ __forceinline__ void store_tiles(const PlanParams& p, PlanSharedMemory& shared, GroupTiles tiles, LineSums before) {
  tiles.first.cost_begin = before.cost;
#pragma unroll 1
  for (int32_t index = before.tiles; index < min_of(before.tiles + tiles.count, p.config.max_tiles); ++index) {
    store<int4>(p.schedule.tiles + index, tiles.first);
    if (index < kCachedTiles) store<int4>(shared.tiles + index, PlacedTile{tiles.first.cost_begin, tiles.first.kind, tiles.first.num_kv_tiles});
    tiles.first.cost_begin += tiles.cost;
    tiles.first.packed_begin += tile_rows(tiles.first.kind);
  }
}

/// Reads row group i, as it is before it has a place on the line. `forest`: of the requests, where one was sought.
__device__ __forceinline__ RowGroup find_row_group(const PlanParams& p, const ForestMemory& m, int32_t i, uint32_t& errors) {
  if (p.config.batch_invariant) return p.schedule.groups[i];
  if (!p.seeks_forest) return read_row_group(p, p.num_levels == 1 ? GroupPlace{0, i} : find_level(p, i), errors);
  const ForestEntry& entry = m.forest[i];
  const int32_t kind = choose_kind(p.config, static_cast<int64_t>(entry.qo_len) * p.config.group_size);
  return RowGroup{m.table_begin[i], entry.qo_begin, entry.qo_len, entry.kv_len, 0, 0, kind, -1, 0};
}

/// Lays the row groups on the line, a thread a request: its own, and the one of the node of its number if that was taken; and their row tiles where all tiles
/// of a group cost the same. `tile_begin` receives the first tile of each group; `planned` what follows from the forest. Returns whether all tiles were laid.
__device__ __forceinline__ bool place_groups(const PlanParams& p, const ForestMemory& m, PlanSharedMemory& shared, bool uses_forest, int32_t* tile_begin,
                                             Planned& planned, LineSums& line, uint32_t& errors) {
  const Forest& f = m.forest;
  const int32_t size = planned.num_groups;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const bool staged = size > 128;   // few are there sooner the direct way
  // What nodes need to know about all requests is known behind the sums, if one round of threads suffices for the requests; else it takes a round for the
  // sums alone.
  const bool counts_first = uses_forest && size > kPlanThreads;
  bool differ = false;
  ForestSums all{};
#pragma unroll 1
  for (int32_t round = counts_first ? 0 : 1; round < 2; ++round) {
    ForestSums so_far{};
#pragma unroll 1
    for (int32_t begin = 0; begin < size; begin += kPlanThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      RowGroup group{}, of_node{};
      GroupTiles tiles{}, node_tiles{};
      ForestSums own{};
      bool is_taken = false;
      if (i < size) {
        group = find_row_group(p, m, i, errors);
        if (uses_forest) {
          const int32_t innermost = f.innermost(i);
          const int32_t top = innermost >= 0 ? f[innermost].taken : -1;
          f[i].top = top;
          if (top >= 0) own.merge_rows = group.qo_len;
          cut_group(p.levels[0].table, f, top, group);
          is_taken = f.is_node(i) && f[i].taken == i;
          if (is_taken) {
            of_node = node_group(p, f, i, m.table_begin[i]);
            node_tiles = make_tiles(p, of_node, 0);
            own.merge_rows += 1 << ForestSums::kNodeShift;
            own.node_rows = of_node.qo_len;
          }
        }
        tiles = make_tiles(p, group, i);
      }
      differ |= tiles.differ || node_tiles.differ;
      if (begin > 0 || (counts_first && round > 0)) __syncthreads();
      ForestSums before, total;
      if (uses_forest) {
        own.own = tiles.sums();
        own.nodes = node_tiles.sums();
        before = so_far + sum_before(shared.sums.forest, size - begin, own, total, differ);
      } else {
        before.own = so_far.own + sum_before(shared.sums.line, size - begin, tiles.sums(), total.own, differ);
        so_far.own = so_far.own + total.own;
      }
      if (uses_forest) so_far = so_far + total;
      if (round == 0) continue;
      if (!counts_first) all = so_far;
      constexpr int32_t kRows = (1 << ForestSums::kNodeShift) - 1;
      if (i < size) {
        group.tile_begin = tile_begin[i] = before.own.tiles;
        if (uses_forest && f[i].top >= 0) group.state_begin = f[i].merge_begin = before.merge_rows & kRows;
        if (!differ) store_tiles(p, shared, tiles, before.own);
        if (!staged) store<int2>(p.schedule.groups + i, group);
      }
      if (is_taken) {
        const int32_t number = size + (before.merge_rows >> ForestSums::kNodeShift);
        const LineSums in_front = all.own + before.nodes;
        place_node_group(p, f, i, number, before.node_rows, all.merge_rows & kRows, of_node);
        of_node.tile_begin = tile_begin[number] = in_front.tiles;
        store<int2>(p.schedule.groups + number, of_node);
        node_tiles.first.group = number;
        if (!differ) store_tiles(p, shared, node_tiles, in_front);
      }
      if (staged && i - lane < size) store_groups(p.schedule.groups + i - lane, size - i + lane, group, shared.staged[threadIdx.x / 32]);
    }
    all = so_far;
  }
  line = all.own;
  if (uses_forest) {
    line = line + all.nodes;
    planned.num_groups += all.merge_rows >> ForestSums::kNodeShift;
    planned.num_merge_rows = all.merge_rows & ((1 << ForestSums::kNodeShift) - 1);
    planned.num_links = shared.forest.max_taken_depth + 1;
  }
  return !differ && line.tiles <= p.config.max_tiles;
}

/// Lays the row tiles on the line, a thread a tile.
__device__ __forceinline__ void place_tiles(const PlanParams& p, PlanSharedMemory& shared, const int32_t* tile_begin, int32_t num_groups, LineSums& line) {
  line.cost = 0;
#pragma unroll 1
  for (int32_t first = 0; first < line.tiles; first += kPlanThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    RowTile tile{};
    int64_t cost = 0;
    __syncthreads();   // groups and their first tiles are there, and the sums before have been read
    if (i < line.tiles) {
      const int32_t g = find_group(tile_begin, num_groups, i);
      tile = make_row_tile(p, p.schedule.groups[g], g, i - tile_begin[g]);
      cost = pair_cost(p.config, tile.kind, tile.num_kv_tiles) * p.config.num_kv_heads;
    }
    LineSums total;
    bool any = false;
    tile.cost_begin = line.cost + sum_before(shared.sums.line, line.tiles - first, LineSums{cost, 0}, total, any).cost;
    if (i < line.tiles) {
      if (i < kCachedTiles) store<int4>(shared.tiles + i, PlacedTile{tile.cost_begin, tile.kind, tile.num_kv_tiles});
      store<int4>(p.schedule.tiles + i, tile);
    }
    line.cost += total.cost;
  }
}

/// Everything behind the forest; all threads' work. `m`: of the forest, where one was sought; `linkers`: the threads that link its rows.
__device__ __forceinline__ void plan(const PlanParams& p, const ForestMemory& m, bool uses_forest, const PlanTeam& linkers, PlanSharedMemory& shared,
                                     int32_t* tile_begin, Planned planned, uint32_t errors) {
  const ScheduleConfig& config = p.config;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if (p.num_levels > 1) {
    for (int64_t i = thread; i < static_cast<int64_t>(p.num_levels) * config.max_merge_rows; i += kPlanThreads) p.schedule.links[i] = RowLink{-1, 0};
  }
  if (config.batch_invariant) make_chunks(p, shared, planned, errors);
  LineSums line;
  const bool placed = place_groups(p, m, shared, uses_forest, tile_begin, planned, line, errors);
  if (line.tiles > config.max_tiles) {
    errors |= kQoIndptrInvalid;
    line.tiles = config.max_tiles;
  }
  if (links_rows(p)) {
    __syncthreads();
    link_rows(p, planned.num_groups, shared, errors);
  }
  if (errors) atomicOr(&shared.errors, errors);
  if (!placed) place_tiles(p, shared, tile_begin, planned.num_groups, line);
  __syncthreads();

  // From here on threads wait for nothing but each other's links: as many as there are requests link rows, one writes the header and others the levels, and
  // the first ones find positions.
  if (uses_forest && linkers.has_this_thread()) link_forest(p, m, linkers, planned);
  planned.num_tiles = line.tiles;
  planned.share = cta_share(p, line.cost);
  planned.errors = shared.errors;
  if (p.num_levels > 1) planned.num_merge_rows = shared.num_merge_rows;
  const int32_t from_last = kPlanThreads - 1 - thread;
  if (from_last == 0) write_header(p, planned);
  if (from_last > 0 && from_last % 32 == 0 && from_last / 32 <= count_levels(p)) write_level(p, from_last / 32 - 1);
  const auto tiles = [&](int32_t i) {
    if (i < kCachedTiles) return shared.tiles[i];
    return PlacedTile{p.schedule.tiles[i].cost_begin, p.schedule.tiles[i].kind, p.schedule.tiles[i].num_kv_tiles};
  };
#pragma unroll 1
  for (int32_t cta = thread; cta <= config.num_ctas; cta += kPlanThreads) {
    store<int4>(p.schedule.positions + cta, find_position(p, tiles, line.tiles, line.cost, cta * planned.share, is_plain(p, planned)));
  }
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kPlanThreads, 1) plan_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];   // ForestMemory, PlanSharedMemory, the first tile of each row group
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t size = params.seeks_forest ? params.levels[0].num_groups : 0;
  const attn::ForestMemory m(memory, size);
  if (blockIdx.x > 0) {
    attn::search_prefixes(params, m);
    return;
  }
  attn::PlanSharedMemory& shared = *reinterpret_cast<attn::PlanSharedMemory*>(memory + attn::forest_shared_bytes(size));
  if (thread == 0) shared.errors = shared.num_merge_rows = 0;
  attn::Planned planned{};
  planned.num_groups = params.num_levels == 1 ? params.levels[0].num_groups : attn::count_groups(params);
  planned.num_links = params.num_levels;
  planned.num_requests = size;
  uint32_t errors = 0;
  bool uses_forest = false;
  const attn::PlanTeam team{1, attn::min_of((size + 31) / 32 * 32, attn::kPlanThreads)};
  // Where there are threads left, those that link rows are others than those that find positions.
  const attn::PlanTeam linkers{1, team.count, team.count <= attn::kPlanThreads / 2 ? attn::kPlanThreads / 2 : 0};
  if (params.seeks_forest) {
    if (team.has_this_thread()) attn::make_forest(params, m, shared.forest, team, errors);
    __syncthreads();
    uses_forest = attn::uses_forest(params, shared.forest);
    if (uses_forest) {
      if (linkers.has_this_thread()) attn::clear_counts(m, linkers);
    } else if (shared.forest.has_nodes && team.has_this_thread()) {
      attn::drop_forest(params, m, team);
    }
  }
  int32_t* tile_begin = reinterpret_cast<int32_t*>(&shared + 1);
  attn::plan(params, m, uses_forest, linkers, shared, tile_begin, planned, errors);
}
