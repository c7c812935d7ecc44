// The device planner: turns lengths and page tables, where the engine keeps them, into a schedule. Same steps as
// planner/host/planner.cpp, by one CTA; other CTAs only help to search the page tables for shared prefixes
// (prefix_search.cuh).
#include "planner/cuts.h"
#include "planner/device/forest.cuh"
#include "planner/device/plan_threads.cuh"
#include "planner/groups.h"
#include "planner/launch.h"
#include "planner/schedule_writer.h"

namespace attn {

/// Row groups of a warp on their way to global memory.
struct StagedGroups {
  static constexpr int32_t kGroups = 16;
  int2 words[kGroups * sizeof(RowGroup) / sizeof(int2)];
};

struct PlanSharedMemory {
  SumMemory<int64_t> sums;
  SumMemory<int64_t, int64_t> forest_sums;
  ForestShared forest;
  alignas(16) PlacedTile tiles[kCachedTiles];  // the first row tiles
  StagedGroups staged[kMaxPlanThreads / 32];
  Planned planned;
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

/// Writes the row groups of a warp from `to` on, a lane one, of which there are `count`: by way of shared memory, so
/// that whole lines reach the L2.
__device__ __forceinline__ void store_groups(RowGroup* to, int32_t count, const RowGroup& group, StagedGroups& staged) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  constexpr int32_t kWords = sizeof(RowGroup) / sizeof(int2);
#pragma unroll
  for (int32_t begin = 0; begin < 32; begin += StagedGroups::kGroups) {
    __syncwarp();
    if (lane >= begin && lane < begin + StagedGroups::kGroups)
      store<int2>(reinterpret_cast<RowGroup*>(staged.words) + lane - begin, group);
    __syncwarp();
#pragma unroll
    for (int32_t first = 0; first < StagedGroups::kGroups * kWords; first += 32) {
      const int32_t word = first + lane;
      if (word < min_of(count - begin, StagedGroups::kGroups) * kWords)
        reinterpret_cast<int2*>(to + begin)[word] = staged.words[word];
    }
  }
}

/// Index of the row group that row tile `tile` belongs to: the last one whose first tile is at or before it.
__device__ int32_t find_group(const int32_t* tile_begin, int32_t num_groups, int32_t tile) {
  int32_t low = 0, high = num_groups;
#pragma unroll 1
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (tile_begin[middle] <= tile)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/// Links rows to the row groups of a composition, a warp a group.
__device__ void link_rows(const PlanParams& p, int32_t num_groups, PlanSharedMemory& shared, uint32_t& errors) {
  int32_t num_merge_rows = 0;
#pragma unroll 1
  for (int32_t g = static_cast<int32_t>(threadIdx.x) / 32; g < num_groups; g += plan_threads() / 32) {
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
  const PlanTeam team{0, plan_threads()};
  const int32_t num_requests = planned.num_groups;
  planned.num_groups = 0;
#pragma unroll 1
  for (int32_t first = 0; first < num_requests; first += plan_threads()) {
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
    const int32_t before =
        planned.num_groups +
        sum_before(team, shared.sums, num_requests - first, PlanSums<int64_t>{0, num_chunks}, total, any).b;
#pragma unroll 1
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk)
      p.schedule.groups[before + chunk] = make_chunk(p, group, i, chunk, num_chunks, before + chunk);
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
  bool placed;  // all row tiles are laid
  bool
      all_known;  // nobody reads row groups before the plan ends: each thread has its own, which is still to be written
};

/// What one thread puts on the line: a row group and its row tiles, of which all cost the same.
struct Piece {
  RowGroup group;       // without tile_begin
  RowTile tile;         // the first; without group and cost_begin
  int32_t number = -1;  // of the row group; -1: there is none
  int32_t num_tiles;
  int64_t cost;  // of each
  bool differ;   // they do not all cost the same, or are too many for a thread
};

__device__ __forceinline__ Piece make_piece(const PlanParams& p, const RowGroup& group, int32_t number) {
  Piece piece{};
  piece.group = group;
  piece.number = number;
  piece.num_tiles = count_row_tiles(p.config, group);
  if (piece.num_tiles == 0) return piece;
  piece.tile = make_row_tile(p, group, number, 0);
  piece.cost =
      pair_cost(p.config, cost_kind(group.kind, group.state_begin), piece.tile.num_kv_tiles) * p.config.num_kv_heads;
  const PlanLevel& level = p.levels[group.level];
  piece.differ = piece.num_tiles > 1 &&
                 (level.visibility.causal || level.visibility.window_left >= 0 || piece.num_tiles > kTilesOfThread);
  return piece;
}

/// A row group that is to be laid on the line: number i of the composition, or where a forest is taken request i, and
/// from `first_node` on node i - first_node.
struct Candidates {
  int32_t count;
  int32_t first_node;  // whole warps are requests or nodes; 0: no forest of several nodes is taken
};

/// Reads row group i, as it is before it has a place on the line: its states, if it leaves any, begin at 0. `number`:
/// receives its number if it is known, -1 if there is none.
template <bool kSeeksForest>
__device__ __forceinline__ RowGroup find_row_group(const PlanParams& p, const ForestMemory& m,
                                                   const Candidates& candidates, int32_t i, int32_t& number,
                                                   uint32_t& errors) {
  number = i;
  if constexpr (!kSeeksForest) {
    if (p.config.batch_invariant) return p.schedule.groups[i];
    return read_row_group(p, p.num_levels == 1 ? GroupPlace{0, i} : find_level(p, i), errors);
  }
  const Forest& f = m.forest;
  if (i >= f.size) {
    const int32_t n = i - candidates.first_node;
    const bool is_taken = n >= 0 && f[n].depth > 0 && f[n].taken == n;
    if (!is_taken) number = -1;
    return is_taken ? node_group(p, f, n, m.table_begin[n]) : RowGroup{};
  }
  const int32_t kind = choose_kind(p.config, packed_rows_of(p.config, f[i].qo_len));
  RowGroup group{m.table_begin[i], f[i].qo_begin, f[i].qo_len, f[i].kv_len, 0, 0, kind, -1, 0};
  if (candidates.first_node > 0) {
    const int32_t innermost = f.innermost(i);
    f[i].top = innermost >= 0 ? f[innermost].taken : -1;
    cut_group(p.levels[0].table, innermost >= 0 ? f[innermost].covered : 0, group);
  }
  return group;
}

/// Writes this thread's row group, of candidate i.
__device__ __forceinline__ void write_group(const PlanParams& p, PlanSharedMemory& shared, const Candidates& candidates,
                                            const Piece& piece, int32_t i) {
  const int32_t of_warp = i - static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t in_turn = candidates.first_node > 0
                              ? p.levels[0].num_groups
                              : candidates.count;  // as many candidates are the row groups of the same numbers
  if (in_turn > 128 && of_warp < in_turn) {
    store_groups(p.schedule.groups + of_warp, in_turn - of_warp, piece.group, shared.staged[threadIdx.x / 32]);
  } else if (piece.number >= 0) {  // few are there sooner the direct way
    store<int2>(p.schedule.groups + piece.number, piece.group);
  }
}

/// Sums over the requests and nodes of a forest, in one number: row tiles, states that row groups leave, and taken
/// nodes.
struct ForestSum {
  static constexpr int kTileBits = 21;
  static constexpr int kStateBits = 20;
  static_assert(kMaxForestTiles <= 1 << kTileBits && kMaxForestRequests < 1 << (52 - kTileBits - kStateBits),
                "what sum_of_lanes() adds up");
  int64_t value;

  __device__ static int64_t pack(int32_t tiles, int32_t states, int32_t nodes) {
    return static_cast<int64_t>(nodes) << (kTileBits + kStateBits) | static_cast<int64_t>(states) << kTileBits | tiles;
  }
  __device__ int32_t tiles() const { return static_cast<int32_t>(value & ((1 << kTileBits) - 1)); }
  __device__ int32_t states() const { return static_cast<int32_t>(value >> kTileBits & ((1 << kStateBits) - 1)); }
  __device__ int32_t nodes() const { return static_cast<int32_t>(value >> (kTileBits + kStateBits)); }
};

/// Gives the row group of candidate i its number and the place of its states, and returns the sums before it.
/// `planned`: numbers and states so far.
__device__ __forceinline__ PlanSums<int64_t> place_in_forest(const PlanParams& p, const ForestMemory& m,
                                                             PlanSharedMemory& shared, const Candidates& candidates,
                                                             int32_t i, Piece& piece, Planned& planned,
                                                             int32_t& states_so_far, PlanSums<int64_t>& total,
                                                             bool& differ) {
  const Forest& f = m.forest;
  const int32_t lane = i % 32;
  const bool is_node = i >= f.size && piece.number >= 0;
  const int32_t states = piece.group.state_begin >= 0 ? piece.group.qo_len : 0;
  using Sums = PlanSums<int64_t, int64_t>;
  Sums all;
  const Sums sums = sum_before(
      PlanTeam{0, plan_threads()}, shared.forest_sums, candidates.count - (i - static_cast<int32_t>(threadIdx.x)),
      Sums{piece.cost * piece.num_tiles, ForestSum::pack(piece.num_tiles, states, is_node)}, all, differ);
  const ForestSum before{sums.b}, behind{all.b};
  // Requests' states come first, and whole warps are requests.
  const int32_t warps =
      min_of((candidates.first_node - (i - static_cast<int32_t>(threadIdx.x))) / 32, plan_threads() / 32);
  planned.num_merge_rows += ForestSum{sum_of_lanes(lane < warps ? shared.forest_sums.of_warp[lane].b : 0)}.states();
  const int32_t state_begin = states_so_far + before.states();
  if (i < f.size) {
    f[i].merge_begin = piece.group.state_begin = states > 0 ? state_begin : -1;
  } else if (is_node) {
    const int32_t n = i - candidates.first_node;
    piece.number = planned.num_groups + before.nodes();
    piece.group.state_begin = state_begin;
    piece.group.qo_begin = f[n].row_begin = state_begin - planned.num_merge_rows;
    f[n].group = p.schedule.nodes[n].group = piece.number;
  }
  states_so_far += behind.states();
  planned.num_groups += behind.nodes();
  total = PlanSums<int64_t>{all.a, behind.tiles()};
  return PlanSums<int64_t>{sums.a, before.tiles()};
}

/// Lays the row groups on the line, a thread a group, and their row tiles where all tiles of a group cost the same.
/// `piece`: this thread's, if `is_known`; then its last. `tile_begin` receives the first tile of each group; `planned`
/// what is known of a forest then.
template <bool kSeeksForest>
__device__ __forceinline__ Line place_groups(const PlanParams& p, const ForestMemory& m, PlanSharedMemory& shared,
                                             const Candidates& candidates, bool is_known, Piece& piece,
                                             int32_t* tile_begin, Planned& planned, uint32_t& errors) {
  const ScheduleConfig& config = p.config;
  const PlanTeam team{0, plan_threads()};
  const bool takes_forest = kSeeksForest && candidates.first_node > 0;
  bool differ = false;
  bool has_largest_tiles = false;
  int32_t states_so_far = 0;
  Line line{};
#pragma unroll 1
  for (int32_t first = 0; first < candidates.count; first += plan_threads()) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    if (!kSeeksForest || !is_known) {
      RowGroup group{};
      int32_t number = -1;
      if (i < candidates.count) group = find_row_group<kSeeksForest>(p, m, candidates, i, number, errors);
      __syncwarp();  // requests and nodes go on together
      piece = make_piece(p, group, number);
    }
    RowGroup& group = piece.group;
    RowTile& tile = piece.tile;
    has_largest_tiles |= group.kind == config.max_kind && piece.num_tiles > 0;
    differ |= piece.differ;
    PlanSums<int64_t> total, before;
    if (first > 0) __syncthreads();
    if (takes_forest) {
      before = place_in_forest(p, m, shared, candidates, i, piece, planned, states_so_far, total, differ);
    } else {
      before = sum_before(team, shared.sums, candidates.count - first,
                          PlanSums<int64_t>{piece.cost * piece.num_tiles, piece.num_tiles}, total, differ);
    }
    if (piece.number >= 0) {
      group.tile_begin = line.num_tiles + before.b;
      tile_begin[piece.number] = group.tile_begin;
      tile.group = piece.number;
      tile.cost_begin = line.cost + before.a;
#pragma unroll 1
      for (int32_t index = group.tile_begin;
           index < group.tile_begin + piece.num_tiles && !differ && index < config.max_tiles; ++index) {
        store<int4>(p.schedule.tiles + index, tile);
        if (index < kCachedTiles) store<int4>(shared.tiles + index, placed_tile(tile, group));
        tile.cost_begin += piece.cost;
        tile.packed_begin += tile_rows(tile.kind);
      }
    }
    line.num_tiles += total.b;
    line.cost += total.a;
    line.all_known = candidates.count <= plan_threads() && !differ &&
                     line.num_tiles <= min_of(kCachedTiles, config.max_tiles) && !links_rows(p);
    if (!line.all_known) write_group(p, shared, candidates, piece, i);
  }
  // Behind the barriers of the sums: the first thread has set these to 0.
  if (has_largest_tiles) shared.has_largest_tiles = 1;
  line.placed = !differ && line.num_tiles <= config.max_tiles;
  return line;
}

/// Finds the longest pair of all row groups. `own`: this thread's, which has not been written if `all_known`.
__device__ __forceinline__ void find_longest_pair(const PlanParams& p, PlanSharedMemory& shared, int32_t num_groups,
                                                  bool all_known, const Piece& own) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  int32_t longest = all_known && own.number >= 0 ? longest_pair(p, own.group) : 0;
#pragma unroll 1
  for (int32_t i = thread; !all_known && i < num_groups; i += plan_threads())
    longest = max_of(longest, longest_pair(p, p.schedule.groups[i]));
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (threadIdx.x % 32 == 0) atomicMax(&shared.longest_pair, longest);
}

/// Lays the row tiles on the line, a thread a tile.
__device__ __forceinline__ void place_tiles(const PlanParams& p, PlanSharedMemory& shared, const int32_t* tile_begin,
                                            int32_t num_groups, Line& line) {
  const PlanTeam team{0, plan_threads()};
  line.cost = 0;
#pragma unroll 1
  for (int32_t first = 0; first < line.num_tiles; first += plan_threads()) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    RowTile tile{};
    int32_t kind = 0;
    int64_t cost = 0;
    __syncthreads();  // groups and their first tiles are there, and the sums before have been read
    if (i < line.num_tiles) {
      const int32_t g = find_group(tile_begin, num_groups, i);
      const RowGroup& group = p.schedule.groups[g];
      tile = make_row_tile(p, group, g, i - tile_begin[g]);
      kind = cost_kind(tile.kind, group.state_begin);
      cost = pair_cost(p.config, kind, tile.num_kv_tiles) * p.config.num_kv_heads;
    }
    PlanSums<int64_t> total;
    bool any = false;
    tile.cost_begin =
        line.cost + sum_before(team, shared.sums, line.num_tiles - first, PlanSums<int64_t>{cost, 0}, total, any).a;
    if (i < line.num_tiles) {
      if (i < kCachedTiles) store<int4>(shared.tiles + i, PlacedTile{tile.cost_begin, kind, tile.num_kv_tiles});
      store<int4>(p.schedule.tiles + i, tile);
    }
    line.cost += total.a;
  }
}

/// The best even cut of a shared prefix; a lane looks at one number of parts.
__device__ __forceinline__ EvenCut best_even_cut(const PlanParams& p, const SharedPairs& pairs) {
  EvenCut cut = cut_evenly(p, pairs, static_cast<int32_t>(threadIdx.x) % 32 + 1);
  cut.judged = __reduce_min_sync(0xffffffffu, cut.judged);
  const int32_t best = cut.judged % kMaxAlignedParts;  // where no cut is possible, some lane
  cut.parts = best + 1;
  cut.kv_tiles = __shfl_sync(0xffffffffu, cut.kv_tiles, best);
  cut.share = __shfl_sync(0xffffffffu, cut.share, best);
  return cut;
}

/// Finds the positions of CTAs; whole warps' work, of which one writes the header instead. `fits`: all row tiles of the
/// line are planned; `from_last`: number of the thread.
template <bool kSeeksForest>
__device__ __forceinline__ void write_positions(const PlanParams& p, const PlanSharedMemory& shared,
                                                const int32_t* tile_begin, bool fits, const Line& line,
                                                const EqualShares& equal, bool writes_header, int32_t from_last,
                                                Planned planned) {
  finish_plan(p, line.num_tiles > 0 ? shared.tiles[0] : PlacedTile{}, line.cost, equal, planned);
  const auto tiles = [&](int32_t i) {
    if (i < kCachedTiles) return shared.tiles[i];
    return placed_tile(p.schedule.tiles[i], p.schedule.groups[p.schedule.tiles[i].group]);
  };
  if constexpr (kSeeksForest) {
    if (planned.num_groups == p.levels[0].num_groups + 1 && fits) {
      const int32_t tile = tile_begin[planned.num_groups - 1];
      const SharedPairs pairs{tile, tiles(tile), (line.num_tiles - tile) * p.config.num_kv_heads};
      align_prefix(p, pairs, best_even_cut(p, pairs), planned);
    }
  }
  if (writes_header) {
    if (from_last % 32 == 0) write_header(p, planned);
    return;
  }
  // A warp's CTAs run either what is cut evenly or what lies before.
  const int32_t gap = planned.aligned_parts > 0 ? (32 - planned.aligned_cta % 32) % 32 : 0;
  const auto find_positions = [&](const auto& tiles, auto total_cost) {
#pragma unroll 1
    for (int32_t number = from_last; number <= p.config.num_ctas + gap; number += p.position_threads) {
      if (number >= planned.aligned_cta && number < planned.aligned_cta + gap) continue;
      const int32_t cta = number < planned.aligned_cta ? number : number - gap;
      store<int4>(p.schedule.positions + cta, find_position(p, tiles, planned, total_cost, cta));
    }
  };
  if (line.num_tiles <= kCachedTiles && is_short_line(p, planned, line.cost)) {
    find_positions([&](int32_t i) -> const PlacedTile& { return shared.tiles[i]; }, static_cast<int32_t>(line.cost));
  } else {
    find_positions(tiles, line.cost);
  }
}

/// Everything behind the forest; all threads' work. `m`: of the forest, where one was sought; `is_only`: it is that of
/// one node, and `piece` is this thread's.
template <bool kSeeksForest>
__device__ __forceinline__ void plan(const PlanParams& p, const ForestMemory& m, const PlanTeam& linkers,
                                     PlanSharedMemory& shared, Candidates candidates, bool is_only, Piece& piece,
                                     int32_t* tile_begin, Planned planned, uint32_t errors) {
  const ScheduleConfig& config = p.config;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if constexpr (!kSeeksForest) {
    if (p.num_levels > 1) {
      for (int64_t i = thread; i < static_cast<int64_t>(p.num_levels) * config.max_merge_rows; i += plan_threads())
        p.schedule.links[i] = RowLink{-1, 0};
    }
    if (config.batch_invariant) make_chunks(p, shared, planned, errors);
    candidates.count = planned.num_groups;
  }
  Line line = place_groups<kSeeksForest>(p, m, shared, candidates, is_only, piece, tile_begin, planned, errors);
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
  if (!line.placed) place_tiles(p, shared, tile_begin, planned.num_groups, line);
  // The last warps find positions, one before them writes the header and others the levels.
  const int32_t from_last = plan_threads() - 1 - thread;
  const int32_t warp_behind = from_last / 32 - p.position_threads / 32;  // of those before the last ones
  EqualShares equal{};
  if (warp_behind <= 0) {
    equal = equal_shares(p, line.num_tiles, line.cost);  // while the first ones lay row tiles
  } else if (from_last % 32 == 0) {
    const int32_t warps = (plan_threads() - p.position_threads) / 32 - 1;
    bool without_list = false;
    if constexpr (kSeeksForest)
      without_list =
          node_needs_no_list(p, planned, m.forest[m.forest.size - 1].qo_begin + m.forest[m.forest.size - 1].qo_len);
#pragma unroll 1
    for (int32_t level = warp_behind - 1; level < count_levels(p); level += warps) write_level(p, level, without_list);
  }
  const bool takes_forest = kSeeksForest && candidates.first_node > 0;
  if (takes_forest && linkers.has_this_thread())
    clear_counts(m, linkers, count_columns(m, planned.num_groups - m.forest.size));
  __syncthreads();
  planned.num_tiles = line.num_tiles;
  planned.has_largest_tiles = shared.has_largest_tiles;
  if (!kSeeksForest && p.num_levels > 1) planned.num_merge_rows = shared.num_merge_rows;
  if (needs_longest_pair(p, planned)) {
    find_longest_pair(p, shared, planned.num_groups, line.all_known, piece);
    __syncthreads();
    planned.longest_pair = shared.longest_pair;
  }

  // From here on threads wait for nothing but each other's links.
  if (warp_behind <= 0) {
    planned.errors = shared.errors;
    write_positions<kSeeksForest>(p, shared, tile_begin, fits, line, equal, warp_behind == 0, from_last, planned);
    if (kSeeksForest && warp_behind == 0) end_search(p, shared.forest.launch);  // this warp has nothing else to do
  }
  if (line.all_known) write_group(p, shared, candidates, piece, thread);
  if (kSeeksForest && is_only && linkers.has_this_thread()) record_only_node(p, m, shared.forest.only, linkers);
  if (takes_forest) {
    if (linkers.has_this_thread()) link_forest(p, m, linkers, planned);
    link_own_rows(p, m, planned);
  }
}

/// A plan of `num_groups` row groups, before anything is known of them.
__device__ __forceinline__ Planned empty_plan(const PlanParams& p, int32_t num_groups, int32_t num_requests) {
  Planned planned{};
  planned.num_groups = num_groups;
  planned.num_requests = num_requests;
  planned.num_links = p.num_levels;
  return planned;
}

/// A plan in which a forest is sought.
__device__ __forceinline__ void plan_with_forest(const PlanParams& p, const ForestMemory& m, PlanSharedMemory& shared,
                                                 int32_t* tile_begin) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t size = m.forest.size;
  const PlanTeam team{1, min_of(size / 32 * 32 + 32, plan_threads())};  // a request each, and one behind them
  const int32_t free_threads = plan_threads() - p.position_threads;
  PlanTeam linkers{1, min_of((size + 31) / 32 * 32, free_threads)};
  if (2 * linkers.count <= free_threads)
    linkers.first = min_of(linkers.count, free_threads - linkers.count);  // other threads than those of the requests
  const bool reports = thread == min_of(size, plan_threads() - 1);
  uint32_t errors = 0;
  Piece piece{};
  bool goes_on = false;  // nodes must be found
  const int32_t idle_from = team.count < plan_threads()
                                ? team.count
                                : 0;  // threads that have nothing to do with the forest; if there are none, all
  if (thread >= idle_from) clear_nodes(p, m.forest, PlanTeam{0, plan_threads() - idle_from, idle_from});
  if (team.has_this_thread()) {
    Planned planned = empty_plan(p, size, size);
    OnlyNode only;
    const bool shares = find_sharing(p, m, shared.forest, team, errors, only);
    goes_on = shares;
    if (reports) {  // as if it were taken
      if (only.leader >= 0) {
        ++planned.num_groups;
        planned.num_merge_rows = only.rows;
        planned.num_links = 2;
      }
      shared.planned = planned;
      shared.forest.only = only;
    }
    if (only.leader >= 0) {
      RowGroup group = expect_group(p, m, only, thread);
      goes_on = !receive_only_node(p, m, shared.forest.launch, thread, only, group);
      if (!goes_on) {
        const bool taken = only.reason == kNodeTaken;
        if (reports) {
          shared.forest.only.pages = only.pages;
          shared.forest.only.cost = only.cost;
          shared.forest.only.reason = only.reason;
          if (!taken) shared.planned = empty_plan(p, size, size);
        }
        if (thread >= size + taken) group = RowGroup{};
        __syncwarp();
        piece = make_piece(p, group, thread < size + taken ? thread : -1);
      }
    }
  }
  // First words are believed: what is planned by them is planned again if last ones say something else.
  for (bool again = false;; again = true) {
    const bool finds_nodes = __syncthreads_or(goes_on);
    Planned planned = shared.planned;
    Candidates candidates{planned.num_groups, 0};
    bool is_only = shared.forest.only.leader >= 0;
    if (finds_nodes) {
      if (team.has_this_thread()) make_forest(p, m, shared.forest, team, errors);
      if (reports) shared.longest_pair = shared.has_largest_tiles = 0;
      __syncthreads();
      is_only = false;
      planned = empty_plan(p, size, size);
      candidates.count = size;
      if (forest_is_taken(p, shared.forest)) {
        planned.num_links = shared.forest.max_taken_depth + 1;
        candidates.first_node = round_up(size, 32);
        candidates.count = candidates.first_node + shared.forest.last_taken + 1;
      } else if (team.has_this_thread()) {
        drop_forest(p, m.forest, team);
      }
    } else if (again) {
      return;
    }
    plan<true>(p, m, linkers, shared, candidates, is_only, piece, tile_begin, planned, errors);
    if (!is_only) return;
    goes_on = team.has_this_thread() && !confirm_only_node(p, m, shared.forest, thread);
  }
}

/// The work of a CTA. `memory`: ForestMemory, PlanSharedMemory, the first tile of each row group.
template <bool kSeeksForest>
__device__ __forceinline__ void plan_as_cta(const PlanParams& p, char* memory) {
  const int32_t size = kSeeksForest ? p.levels[0].num_groups : 0;
  const ForestMemory m(memory, size);
  if (kSeeksForest && blockIdx.x > 0) {
    search_prefixes(p, m);
    return;
  }
  PlanSharedMemory& shared = *reinterpret_cast<PlanSharedMemory*>(memory + forest_shared_bytes(size));
  int32_t* tile_begin = reinterpret_cast<int32_t*>(&shared + 1);
  if (threadIdx.x == 0) shared.errors = shared.num_merge_rows = shared.longest_pair = shared.has_largest_tiles = 0;
  if constexpr (kSeeksForest) {
    plan_with_forest(p, m, shared, tile_begin);
  } else {
    const Planned planned = empty_plan(p, p.num_levels == 1 ? p.levels[0].num_groups : count_groups(p), 0);
    Piece piece{};
    plan<false>(p, m, PlanTeam{}, shared, Candidates{}, false, piece, tile_begin, planned, 0);
  }
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kMaxPlanThreads, 1)
    plan_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan_as_cta<false>(params, memory);
}

/// Where a forest is sought. A kernel of its own: code that is not there is not fetched, nor jumped over.
extern "C" __global__ void __launch_bounds__(attn::kMaxPlanThreads, 1)
    plan_forest_kernel(const __grid_constant__ attn::PlanParams params) {
  extern __shared__ __align__(16) char memory[];
  attn::plan_as_cta<true>(params, memory);
}
