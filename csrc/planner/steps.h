// The steps of a plan, taken by the threads of a CTA (device/plan.cu) or by one thread of a CPU (host/planner.cpp).
// Both give the same schedule, bit for bit.
//
//   read_groups  lengths and page tables become row groups, with invalid values clamped
//   add_forest   shared prefixes become nodes of a forest; those that pay add row groups (forest.h)
//   place_tiles  row groups become row tiles, each with its cost, in one list
//   cut_work     the list is cut into an interval for each CTA of the attention kernel
//   write_plan   header and levels
//   link_forest  links of rows to the row groups of the forest (forest.h)
//
// A step is a loop over requests, nodes, row groups, row tiles or CTAs that the threads share. Their running sum counts
// the elements before an element. work_list.h has the arithmetic of an element. Row groups and row tiles lie in the
// schedule itself. Other memory (shared memory, on a GPU) holds the forest, the first row tile of each group and the
// first row tiles' places in the list.
#pragma once

#include "planner/context.h"
#include "planner/forest.h"
#include "planner/work_list.h"

namespace attn {

/// Checks row lists, and links the rows of a composition to their row groups, a warp a group.
template <class Threads>
ATTN_STEP void link_rows(PlanContext<Threads>& c) {
  const PlanParams& p = c.p;
  uint32_t errors = 0;
  int32_t num_merge_rows = 0;
#pragma unroll 1
  for (int32_t g = Threads::warp(); g < c.planned.num_groups; g += Threads::kWarps) {
    const RowGroup group = p.schedule.groups[g];
    const int32_t* const rows = p.levels[group.level].rows;
#pragma unroll 1
    for (int32_t i = Threads::lane(); i < group.qo_len; i += Threads::kLanes) {
      const int32_t row = rows != nullptr ? rows[group.qo_begin + i] : group.qo_begin + i;
      if (row < 0 || row >= p.config.max_rows) {
        errors |= kRowInvalid;
        continue;
      }
      num_merge_rows = max_of(num_merge_rows, row + 1);
      if (p.num_levels > 1)
        p.schedule.links[static_cast<int64_t>(group.level) * p.config.max_merge_rows + row] = RowLink{g, i};
    }
  }
  Threads::report(c.shared.errors, errors);
  if (p.num_levels > 1) Threads::raise_by_warp(c.shared.num_merge_rows, num_merge_rows);
}

/// Reads row groups, cuts the row groups of a batch invariant plan into KV chunks, and links their rows.
template <class Threads>
ATTN_STEP void read_groups(PlanContext<Threads>& c) {
  const PlanParams& p = c.p;
  const int32_t num_requests = count_groups(p);
  uint32_t errors = 0;
  if (p.num_levels > 1) {
#pragma unroll 1
    for (int64_t i = Threads::thread(); i < static_cast<int64_t>(p.num_levels) * p.config.max_merge_rows;
         i += Threads::kCount)
      p.schedule.links[i] = RowLink{-1, 0};
  }
  for_each_together<Threads>(num_requests, [&](int32_t i) {
    RowGroup group{};
    int32_t num_chunks = 0;
    if (i < num_requests) {
      group = read_row_group(p, find_level(p, i), errors);
      num_chunks = count_chunks(p, group);
    }
    // Without chunks row groups are where their requests are, which spares the sum.
    const int32_t first =
        p.config.batch_invariant ? running_sum<Threads>(c.shared, num_chunks, c.planned.num_groups) : i;
#pragma unroll 1
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk)
      p.schedule.groups[first + chunk] = make_chunk(p, group, i, chunk, num_chunks, first + chunk);
    if (!p.config.batch_invariant || i >= num_requests) return;
#pragma unroll 1
    for (int32_t chunk = num_chunks > 1 ? num_chunks : 0; chunk < p.config.max_links; ++chunk)
      p.schedule.links[static_cast<int64_t>(chunk) * p.config.max_merge_rows + i] = RowLink{-1, 0};
  });
  if (!p.config.batch_invariant) c.planned.num_groups = num_requests;
  Threads::report(c.shared.errors, errors);
  c.planned.num_links = p.num_levels;
  if (p.config.batch_invariant && c.planned.num_groups > num_requests) {
    c.planned.num_merge_rows = num_requests;
    c.planned.num_links = p.config.max_links;
  }
  if (p.seeks_forest) c.planned.num_requests = num_requests;
  Threads::sync();
  if (p.num_levels > 1 || p.levels[0].rows != nullptr) link_rows(c);
}

/// Counts the row tiles of row groups.
template <class Threads>
ATTN_STEP void count_tiles(PlanContext<Threads>& c) {
  const ScheduleConfig& config = c.p.config;
  int64_t num_tiles = 0;
  Threads::sync();  // all row groups are written
  for_each_together<Threads>(c.planned.num_groups, [&](int32_t g) {
    RowGroup group{};
    if (g < c.planned.num_groups) {
      group = c.p.schedule.groups[g];
      if (group.kind == config.max_kind && group.qo_len > 0) c.shared.has_largest_tiles = 1;
    }
    const int64_t tile_begin = running_sum<Threads>(c.shared, int64_t{count_row_tiles(config, group)}, num_tiles);
    if (g < c.planned.num_groups)
      c.tile_begin[g] = c.p.schedule.groups[g].tile_begin = static_cast<int32_t>(tile_begin);
  });
  if (num_tiles > config.max_tiles) Threads::report(c.shared.errors, kQoIndptrInvalid);
  c.planned.num_tiles = static_cast<int32_t>(min_of<int64_t>(num_tiles, config.max_tiles));
}

/// Places the tokens of long row groups in DequantizedKv, as far as there is room.
template <class Threads>
ATTN_STEP void place_dequantized(PlanContext<Threads>& c) {
  const int64_t room = c.p.config.dequantized_tokens;
  int64_t num_rows = 0;
  for_each_together<Threads>(c.planned.num_groups, [&](int32_t g) {
    DequantizedTokens tokens{};
    if (g < c.planned.num_groups) tokens = dequantized_tokens_of(c.p, c.p.schedule.groups[g]);
    const int64_t row = running_sum<Threads>(c.shared, tokens.num_rows, num_rows);
    if (tokens.num_rows == 0) return;
    c.p.schedule.groups[g].dequantized_token = tokens.first;
    if (row + tokens.num_rows <= room) c.p.schedule.groups[g].dequantized_row = static_cast<int32_t>(row);
  });
  c.planned.dequantized_tokens = static_cast<int32_t>(min_of(num_rows, room));
}

/// Places the row tiles of all row groups in the list of work, one thread for each tile, and finds the longest pairs.
template <class Threads>
ATTN_STEP void place_tiles(PlanContext<Threads>& c) {
  count_tiles(c);
  if (c.p.config.dequantized_tokens > 0) place_dequantized(c);
  Threads::sync();
  int32_t g = 0;  // the row group that a row tile belongs to
  int32_t longest = -1, longest_small = 0;
  for_each_together<Threads>(c.planned.num_tiles, [&](int32_t i) {
    RowTile tile{};
    PlacedTile placed{};
    int64_t cost = 0;
    if (i < c.planned.num_tiles) {
      g = Threads::find_group(c.tile_begin, c.planned.num_groups, i, g);
      const RowGroup group = c.p.schedule.groups[g];
      tile = make_row_tile(c.p, group, g, i - group.tile_begin);
      placed = placed_tile(tile, group);
      const int64_t whole_pair_cost = pair_cost(c.p.config, placed.cost_kind, tile.num_kv_tiles);
      cost = whole_pair_cost * c.p.config.num_kv_heads;
      const int32_t narrow = narrow_cost(whole_pair_cost);
      const bool is_largest = tile.kind == c.p.config.max_kind;
      longest = max_of(longest, is_largest ? narrow : -1);  // a reference to one of the two would put both on the stack
      longest_small = max_of(longest_small, is_largest ? 0 : narrow);
    }
    placed.cost_begin = tile.cost_begin = running_sum<Threads>(c.shared, cost, c.total_cost);
    if (i < c.planned.num_tiles) c.p.schedule.tiles[i] = tile;
    if (i < min_of(c.planned.num_tiles, kCachedTiles)) c.shared.tiles[i] = placed;
  });
  Threads::raise_by_warp(c.shared.longest_pair, longest);
  Threads::raise_by_warp(c.shared.longest_small_pair, longest_small);
  Threads::sync();
}

/// Cuts the list of work: finds the positions of CTAs.
template <class Threads>
ATTN_STEP void cut_work(PlanContext<Threads>& c) {
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
    align_prefix(p, pairs, Threads::best_even_cut(p, pairs), planned);
  }
  for_each<Threads>(p.config.num_ctas + 1, [&](int32_t cta) {
    p.schedule.positions[cta] = find_position(p, tiles, planned, c.total_cost, cta);
  });
}

/// Levels of the schedule: the composition's levels, and one with the forest's row groups.
ATTN_HD int32_t count_levels(const PlanParams& p) { return p.num_levels + (p.seeks_forest ? 1 : 0); }

/// Writes the header, without the levels.
ATTN_HD void write_header(const PlanParams& p, const Planned& planned) {
  ScheduleHeader& header = *p.schedule.header;
  header.num_groups = planned.num_groups;
  header.num_tiles = planned.num_tiles;
  header.errors = planned.errors;
  header.num_levels = count_levels(p);
  header.num_merge_rows = planned.num_merge_rows;
  header.num_links = planned.num_links;
  header.flags = planned.flags;
  header.whole_pairs = planned.whole_pairs;
  header.num_requests = planned.num_requests;
  header.queue_head = header.second_queue_head = 0;
  header.aligned_tile = planned.aligned_tile;
  header.aligned_cta = planned.aligned_cta;
  header.aligned_parts = planned.aligned_parts;
  header.share = planned.share;
  header.section_tokens = p.config.section_tokens;
  header.dequantized_tokens = planned.dequantized_tokens;
  for (int32_t kind = 0; kind < kNumCostKinds; ++kind) {
    header.kv_tile_cost[kind] = p.config.kv_tile_cost[kind];
    header.pair_cost[kind] = p.config.pair_cost[kind];
  }
}

/// Whether a forest of one node has all rows of the requests, in their order. Its row group then needs no row list, and
/// Q of the largest row tiles loads faster (ADR 13). The rows must fill such tiles: Q may hold anything after the
/// last.
ATTN_HD bool node_needs_no_list(const PlanParams& p, const Planned& planned) {
  if (!has_one_prefix(p, planned)) return false;
  const RowGroup& last = p.schedule.groups[p.levels[0].num_groups - 1];
  const int32_t num_rows = last.qo_begin + last.qo_len;
  return planned.num_merge_rows == num_rows && packed_rows_of(p.config, num_rows) % tile_rows(p.config.max_kind) == 0;
}

/// Describes a level. `without_list`: the forest's, if node_needs_no_list().
ATTN_HD void write_level(const PlanParams& p, int32_t index, bool without_list) {
  const PlanLevel& level = p.levels[index];
  const int32_t* rows = index == p.num_levels && without_list ? nullptr : level.rows;
  int32_t group_begin = 0;
  for (int32_t i = 0; i < index; ++i) group_begin += p.levels[i].num_groups;
  p.schedule.header->levels[index] = Level{level.table.indices,     rows,
                                           level.positions,         level.row_ranges,
                                           level.table.num_entries, level.table.entry_step,
                                           level.visibility,        group_begin};
}

/// Writes the header and the levels.
template <class Threads>
ATTN_STEP void write_plan(const PlanContext<Threads>& c) {
  const bool without_list = node_needs_no_list(c.p, c.planned);
  for_each<Threads>(count_levels(c.p) + 1, [&](int32_t i) {
    if (i == 0)
      write_header(c.p, c.planned);
    else
      write_level(c.p, i - 1, without_list);
  });
}

/// Takes all steps. `memory`: PlanShared, the forest, the first tile of each row group.
template <class Threads, bool kSeeksForest>
ATTN_STEP void make_plan(const PlanParams& p, char* memory) {
  PlanShared& shared = *reinterpret_cast<PlanShared*>(memory);
  const int32_t forest_size = kSeeksForest ? p.levels[0].num_groups : 0;
  char* const forest = memory + sizeof(PlanShared);
  PlanContext<Threads> c{p, shared, reinterpret_cast<int32_t*>(forest + forest_shared_bytes(forest_size)), Planned{},
                         0};
  if (Threads::thread() == 0) {
    shared.errors = 0;
    shared.num_merge_rows = shared.longest_small_pair = shared.has_largest_tiles = 0;
    shared.longest_pair = -1;
    shared.max_depth = shared.states = shared.saved = shared.max_taken_depth = 0;
  }
  Threads::sync();
  read_groups(c);
  const ForestMemory m(forest, forest_size);
  if constexpr (kSeeksForest) add_forest(c, m);
  place_tiles(c);
  cut_work(c);
  write_plan(c);
  if constexpr (kSeeksForest) link_forest(c, m);
}

}  // namespace attn
