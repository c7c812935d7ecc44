// The arithmetic of a plan, an element at a time: what steps.h does for each row group, row tile and CTA.
//
//   read    an engine's metadata becomes row groups; values that cannot be right are clamped and reported
//   chunk   batch invariant plans cut a row group into KV chunks
//   place   a row group becomes row tiles
//   cost    what pairs of row tiles and KV heads cost, what each CTA should get, and how pairs are handed out
//   cut     where each CTA's interval starts
#pragma once

#include "planner/params.h"
#include "planner/schedule.h"

namespace attn {

// ---- Read ----

/// The level that row group `group` belongs to, and its number in that level.
struct GroupPlace {
  int32_t level;
  int32_t index;
};

ATTN_HD GroupPlace find_level(const PlanParams& p, int32_t group) {
  GroupPlace place{0, group};
  while (place.index >= p.levels[place.level].num_groups) place.index -= p.levels[place.level++].num_groups;
  return place;
}

ATTN_HD int32_t count_groups(const PlanParams& p) {
  int32_t count = 0;
  for (int32_t level = 0; level < p.num_levels; ++level) count += p.levels[level].num_groups;
  return count;
}

/// Elements of a level's `indices` that belong to a row group.
struct TableRange {
  int64_t begin;
  int64_t entries;
};

/// Reads where the pages of row group i of a level are. Invalid values are clamped, so that nothing outside the
/// buffers is ever reached, and reported in `errors`.
ATTN_HD TableRange read_table_range(const PageTable& table, int32_t i, uint32_t& errors) {
  if (table.indptr) {
    const int64_t first = table.indptr[i];
    const int64_t last = table.indptr[i + 1];
    const int64_t begin = clamp<int64_t>(first, 0, table.num_entries);
    const int64_t end = clamp<int64_t>(last, begin, table.num_entries);
    if (begin != first || end != last || (i == 0 && first != 0)) errors |= kKvIndptrInvalid;
    return TableRange{begin, end - begin};
  }
  const int32_t wanted = table.rows ? table.rows.narrow(table.rows.words(i)) : i;
  const int32_t row = clamp(wanted, 0, table.num_rows - 1);
  if (row != wanted) errors |= kTableRowInvalid;
  return TableRange{row * table.row_stride, table.row_entries};
}

/// Whether a batch-invariant plan treats row group number `index` of a level as a decode. Other row groups are prompts
/// or drafts: a row's result then depends only on its position and its KV, however many rows precede it in the group.
ATTN_HD bool is_decode(const PlanLevel& level, int32_t index, int32_t qo_len) {
  return qo_len == 1 && (level.prompts == nullptr || level.prompts[index] == 0);
}

/// Reads row group number place.index of a level. Invalid values are clamped and reported, as above. Lengths are used
/// only once all are read: a GPU then waits once for all of them, and for what is read after them.
ATTN_HD RowGroup read_row_group(const PlanParams& p, GroupPlace place, uint32_t& errors) {
  const PlanLevel& level = p.levels[place.level];
  const PageTable& table = level.table;
  const IndexArray::Words qo_first_words = level.qo_indptr.words(place.index);
  const IndexArray::Words qo_last_words = level.qo_indptr.words(place.index + 1);
  const IndexArray::Words length_words = level.kv_length.words(place.index);  // of kv_lens, or else last_page_len
  const TableRange range = read_table_range(table, place.index, errors);
  const int32_t qo_first = level.qo_indptr.narrow(qo_first_words);
  const int32_t qo_last = level.qo_indptr.narrow(qo_last_words);
  const int32_t length = level.kv_length.narrow(length_words);
  RowGroup group;
  group.table_begin = range.begin;
  group.qo_begin = clamp(qo_first, 0, level.max_rows);
  const int32_t qo_end = clamp(qo_last, group.qo_begin, level.max_rows);
  if (group.qo_begin != qo_first || qo_end != qo_last || (place.index == 0 && qo_first != 0))
    errors |= kQoIndptrInvalid;
  group.qo_len = qo_end - group.qo_begin;

  const int32_t entries = static_cast<int32_t>(min_of(range.entries, kMaxInt32));
  const int32_t pages = table.entry_step == 1 ? entries : entries / table.entry_step;
  const int32_t capacity =
      static_cast<int32_t>(min_of<int64_t>(static_cast<int64_t>(pages) * table.page_size, kMaxInt32));
  group.kv_len = capacity;
  if (table.kv_lens) {
    const int32_t limit =
        table.entry_step == 1 ? capacity : entries;  // one entry a token: the last page may be partly filled
    group.kv_len = clamp(length, 0, limit);
    if (group.kv_len != length) errors |= kKvLengthInvalid;
  } else if (table.last_page_len && pages > 0) {
    const int32_t last_page_len = clamp(length, 1, table.page_size);
    if (last_page_len != length) errors |= kLastPageLenInvalid;
    group.kv_len = capacity - table.page_size + last_page_len;
  }
  group.tile_begin = 0;
  group.dequantized_row = -1;
  group.dequantized_token = 0;
  group.level = place.level;
  // A row's arithmetic depends on the kind of its row tile. How many rows a prompt's chunk has depends on the batch and
  // on the cached prefix: all of them use the same kind.
  const bool keeps_bits = p.config.batch_invariant && !is_decode(level, place.index, group.qo_len);
  group.kind = choose_kind(p.config, packed_rows_of(p.config, group.qo_len), keeps_bits ? p.config.max_kind : 0);
  group.state_begin = p.num_levels > 1 ? place.level * p.config.max_rows + group.qo_begin : -1;
  const int32_t most = static_cast<int32_t>(kMaxInt32) - group.kv_len;  // no position wraps around
  group.kv_offset = level.kv_offsets != nullptr ? clamp(level.kv_offsets[place.index], 0, most) : 0;
  group.q_position = group.kv_offset + group.kv_len - group.qo_len;
  group.request = place.index;
  return group;
}

// ---- Chunk ----

/// About how many tokens a KV chunk of a batch invariant plan has. Shorter chunks cost states and keep the memory less
/// busy; longer ones leave CTAs idle where requests are few and short. Where a KV tile has few tokens, as heads are
/// wide, a CTA starts an item more slowly (ADR 10).
constexpr int32_t kChunkTokens = 768;
constexpr int32_t kLongChunkTokens = 1024;
constexpr int32_t kUncutRequest = 1024;  // is one chunk
constexpr int32_t kLongRequest = 8192;   // has long chunks

/// Tokens of the KV chunks that a batch invariant plan cuts a request's row group into: equal numbers of whole KV tiles
/// and pages. The length depends on nothing but the request. A decode is cut, unless a window bounds what it sees. The
/// row tiles of longer queries are many enough, and the last row of a prompt must get the same bits in a longer query.
ATTN_HD int32_t chunk_tokens(const PlanParams& p, const RowGroup& group) {
  const PlanLevel& level = p.levels[group.level];
  const bool is_cut = p.config.batch_invariant && level.visibility.window_left < 0;
  if (!is_cut || !is_decode(level, group.request, group.qo_len)) return max_of(group.kv_len, 1);
  const bool is_long = group.kv_len <= kUncutRequest || group.kv_len >= kLongRequest || p.config.kv_tile < 128;
  const int64_t chunks =
      clamp<int64_t>(ceil_div<int64_t>(group.kv_len, is_long ? kLongChunkTokens : kChunkTokens), 1, kMaxLinks);
  const int64_t least = ceil_div<int64_t>(max_of(group.kv_len, 1), chunks);
  const int64_t page_size = level.table.page_size;
  const int64_t kv_tile = p.config.kv_tile;
  return static_cast<int32_t>(min_of(ceil_div(ceil_div(least, kv_tile) * kv_tile, page_size) * page_size, kMaxInt32));
}

/// Chunks of a request's row group; at least 1.
ATTN_HD int32_t count_chunks(const PlanParams& p, const RowGroup& group) {
  if (!p.config.batch_invariant) return 1;
  return max_of(static_cast<int32_t>(ceil_div<int64_t>(group.kv_len, chunk_tokens(p, group))), 1);
}

/// Chunk number `chunk` of request `request`, which becomes row group `group_index`; linked to the request's row.
ATTN_HD RowGroup make_chunk(const PlanParams& p, const RowGroup& whole, int32_t request, int32_t chunk,
                            int32_t num_chunks, int32_t group_index) {
  if (num_chunks == 1) return whole;
  const PageTable& table = p.levels[whole.level].table;
  const int32_t tokens = chunk_tokens(p, whole);
  const int32_t begin = chunk * tokens;
  RowGroup group = whole;
  group.table_begin += static_cast<int64_t>(begin / table.page_size) * table.entry_step;
  group.kv_len = min_of(tokens, whole.kv_len - begin);
  group.kv_offset += begin;
  group.state_begin = group_index;
  p.schedule.links[static_cast<int64_t>(chunk) * p.config.max_merge_rows + request] = RowLink{group_index, 0};
  return group;
}

// ---- Place ----

/// Row tiles of a row group.
ATTN_HD int32_t count_row_tiles(const ScheduleConfig& config, const RowGroup& group) {
  return row_tiles_of(packed_rows_of(config, group.qo_len), group.kind);
}

/// The tokens of a row group that belong in DequantizedKv.
struct DequantizedTokens {
  int32_t first;
  int64_t num_rows;  // that they take there; 0: the row group has too few rows of Q
};

ATTN_HD DequantizedTokens dequantized_tokens_of(const PlanParams& p, const RowGroup& group) {
  const ScheduleConfig& config = p.config;
  if (packed_rows_of(config, group.qo_len) < config.min_dequantized_rows) return DequantizedTokens{0, 0};
  const int32_t offset = group.kv_len - group.qo_len;
  const TokenRange seen =
      p.levels[group.level].visibility.seen_by_any(offset, offset + group.qo_len - 1, TokenRange{0, group.kv_len});
  // A row tile's first KV tile may begin before the first token that its rows see.
  const int32_t first = p.kv_tile.divide(clamp(seen.begin, 0, group.kv_len)) * config.kv_tile;
  return DequantizedTokens{first, ceil_div<int64_t>(group.kv_len - first, kDequantizedRows) * kDequantizedRows};
}

/// Narrows `range`, in tokens of the row group, to what any of its rows [first, last] sees.
ATTN_HD TokenRange seen_by_any_row(const RowRange* row_ranges, const RowGroup& group, int32_t first, int32_t last,
                                   TokenRange range) {
  int32_t begin = range.end, end = range.begin;
  for (int32_t i = first; i <= last; ++i) {
    const RowRange row = row_ranges[group.qo_begin + i];
    if (row.begin >= row.end) continue;
    begin = min_of(begin, row.begin - group.kv_offset);
    end = max_of(end, row.end - group.kv_offset);
  }
  return TokenRange{max_of(range.begin, begin), min_of(range.end, end)};
}

/// Number of the list of KV tiles of a request's first row tile. The lists of its other row tiles follow. Each request
/// has its own lists, and there are no more than max_row_tiles() of a level.
ATTN_HD int32_t first_kv_tile_list(const ScheduleConfig& config, int32_t request, int32_t qo_begin) {
  return request + row_tile_of(static_cast<uint32_t>(packed_rows_of(config, qo_begin)), config.max_kind);
}

/// How many of a list's KV tiles begin before `token`.
ATTN_HD int32_t count_listed_before(const KvTileList& list, int32_t token) {
  return find_last(list.count + 1, [&](int32_t i) { return list.kv_tiles[i - 1].token() < token; });
}

/// Reduces row tile number `index` of a row group to its listed KV tiles. A row group may be a part of its request: a
/// KV chunk, or what follows a shared prefix. If its KV tiles begin at other tokens than the whole request's KV tiles,
/// the row tile keeps all of them.
ATTN_HD void skip_kv_tiles(const PlanParams& p, const RowGroup& group, int32_t index, RowTile& tile) {
  const PlanLevel& level = p.levels[group.level];
  const int32_t number = first_kv_tile_list(p.config, group.request, group.qo_begin) + index;
  if (number >= level.num_kv_tile_lists) return;  // of wrong metadata
  const KvTileList& list = level.kv_tile_lists[number];
  if (list.count < 0 || list.count > kMaxListedKvTiles) return;
  int32_t first = 0, end = 0;
  if (list.count > 0) {
    if ((list.kv_tiles[0].token() - group.kv_offset) % p.config.kv_tile != 0) return;
    const int32_t first_token = group.kv_offset + tile.kv_begin, end_token = group.kv_offset + tile.kv_end;
    // Mostly the row tile has the whole list.
    first = list.kv_tiles[0].token() >= first_token ? 0 : count_listed_before(list, first_token);
    end = list.kv_tiles[list.count - 1].token() < end_token ? list.count : count_listed_before(list, end_token);
  }
  if (first >= end) {
    tile.kv_begin = tile.kv_end = 0;
    tile.num_kv_tiles = 1;
    return;
  }
  tile.num_kv_tiles = end - first;
  const int32_t first_token = list.kv_tiles[first].token(), last_token = list.kv_tiles[end - 1].token();
  tile.kv_begin = first_token - group.kv_offset;
  const bool has_holes = last_token - first_token > (end - 1 - first) * p.config.kv_tile;
  if (!has_holes) return;
  // The lists of all levels lie after the first one's row ranges.
  const ListedKvTile* const memory = reinterpret_cast<const ListedKvTile*>(p.levels[0].row_ranges);
  tile.kv_begin = ~static_cast<int32_t>(list.kv_tiles + first - memory);
}

/// Row tile number `index` of a row group; cost_begin is left to the caller.
ATTN_HD RowTile make_row_tile(const PlanParams& p, const RowGroup& group, int32_t group_index, int32_t index) {
  const ScheduleConfig& config = p.config;
  const int32_t packed_rows = packed_rows_of(config, group.qo_len);
  RowTile tile;
  tile.cost_begin = 0;
  tile.group = group_index;
  tile.kind = group.kind;
  tile.packed_begin = index * tile_rows(tile.kind);

  const PlanLevel& level = p.levels[group.level];
  const int32_t offset = group.kv_len - group.qo_len;
  const uint32_t packed_end = static_cast<uint32_t>(tile.packed_begin) + tile_rows(tile.kind);
  const int32_t last = packed_end >= static_cast<uint32_t>(packed_rows)
                           ? group.qo_len - 1
                           : p.group_size.divide(static_cast<int32_t>(packed_end - 1));
  const bool needs_first = level.visibility.window_left >= 0 || level.row_ranges != nullptr;
  const int32_t first = needs_first ? p.group_size.divide(tile.packed_begin) : 0;
  TokenRange range = level.visibility.seen_by_any(offset + first, offset + last, TokenRange{0, group.kv_len});
  if (level.row_ranges != nullptr) range = seen_by_any_row(level.row_ranges, group, first, last, range);
  tile.kv_end = max_of(range.end, 0);
  const int32_t begin = clamp(range.begin, 0, tile.kv_end);
  tile.kv_begin = p.kv_tile.divide(begin) * config.kv_tile;
  const bool may_shift = !config.batch_invariant && level.row_ranges == nullptr;
  if (may_shift && begin - tile.kv_begin >= config.kv_tile / 2) tile.kv_begin += config.kv_tile / 2;
  tile.num_kv_tiles = tile.kv_end > tile.kv_begin ? p.kv_tile.divide(tile.kv_end - 1 - tile.kv_begin) + 1 : 1;
  if (level.kv_tile_lists != nullptr) skip_kv_tiles(p, group, index, tile);
  return tile;
}

// ---- Cost ----

/// What find_position() must know of a row tile in the list of work.
struct PlacedTile {
  int64_t cost_begin;
  int32_t cost_kind;
  int32_t num_kv_tiles;
};

/// Cost of a (row tile, KV head) pair.
ATTN_HD int64_t pair_cost(const ScheduleConfig& config, int32_t cost_kind, int32_t num_kv_tiles) {
  return config.pair_cost[cost_kind] + static_cast<int64_t>(num_kv_tiles) * config.kv_tile_cost[cost_kind];
}

/// Costs of pairs that are compared, not added up.
ATTN_HD int32_t narrow_cost(int64_t cost) { return static_cast<int32_t>(min_of(cost, kMaxInt32)); }

/// `group`: the row tile's.
ATTN_HD PlacedTile placed_tile(const RowTile& tile, const RowGroup& group) {
  return PlacedTile{tile.cost_begin, cost_kind(tile.kind, group.state_begin), tile.num_kv_tiles};
}

/// The cost that each CTA gets of a list of `num_pairs` (row tile, head) pairs. `first`: its first row tile;
/// `equal_cost`, `equal_pairs`: a CTA's part of the list if all parts are equal. Each CTA gets whole pairs if all pairs
/// cost the same and whole pairs cost at most 4 % more than an equal share. Then nothing has to be merged, and CTAs
/// that share a KV head's tokens read them at the same time (ADR 8). The test compares averages, so a mixed list may
/// pass it. Such a list loses at most the same 4 %.
ATTN_HD int64_t cta_share(const PlanParams& p, const PlacedTile& first, int64_t num_pairs, int64_t total_cost,
                          int64_t equal_cost, int64_t equal_pairs) {
  const int64_t share = max_of<int64_t>(equal_cost, p.config.min_share);
  const int64_t whole_pair_cost = pair_cost(p.config, first.cost_kind, first.num_kv_tiles);
  const int64_t whole_pairs = equal_pairs * whole_pair_cost;
  return num_pairs * whole_pair_cost == total_cost && whole_pairs >= share && (whole_pairs - share) * 25 <= share
             ? whole_pairs
             : share;
}

/// The plan so far. write_header() writes it.
struct Planned {
  int32_t num_groups = 0;
  int32_t num_tiles = 0;
  int32_t num_merge_rows = 0;
  int32_t num_links = 0;
  int32_t num_requests = 0;  // that the forest was sought in
  int64_t share = 0;
  int32_t longest_pair = -1;       // the largest cost of a pair with the largest kind of row tile
  int32_t longest_small_pair = 0;  // and of all others
  int32_t has_largest_tiles = 0;
  int32_t whole_pairs = 0;   // no (row tile, head) is shared by CTAs
  int32_t flags = 0;         // ScheduleFlag bits
  int32_t aligned_tile = 0;  // as in ScheduleHeader, from align_prefix()
  int32_t aligned_cta = 0;
  int32_t aligned_parts = 0;
  int32_t aligned_kv_tiles = 0;  // of each part but the first, which has what is left
  int32_t dequantized_tokens = 0;
  uint32_t errors = 0;
};

/// Whether one shared prefix is all that a forest has become.
ATTN_HD bool has_one_prefix(const PlanParams& p, const Planned& planned) {
  return p.seeks_forest && planned.num_groups == p.levels[0].num_groups + 1;
}

/// KV tiles of a large row tile that a CTA computes in about the time of a merge.
constexpr int32_t kMergeKvTiles = 5;

/// If row groups have at least this many row tiles on average, they read K and V from L2 when their pairs come from the
/// queue. That saves more than a sixteenth of a share, so CTAs may end that far apart (ADR 48).
constexpr int32_t kSharingRowTiles = 4;
constexpr int32_t kSharingSlack = 16;

/// Pairs of unequal cost come from the queue if a share holds at least this many of the longest. The short pairs are
/// taken last and fill the gaps.
constexpr int32_t kUnequalQueuePairs = 2;

/// Decides how pairs are distributed to CTAs. Pairs of the largest row tiles stay whole if CTAs then end no further
/// apart than what cutting costs. That is a merge, and what comes before a pair's KV tiles once more. If there are more
/// pairs than CTAs, they go to the work queue. Row groups must then have several row tiles, or a CTA would wait longer
/// for its next pair than it computes. `most_pairs`: of a CTA, if all get equally many.
ATTN_HD void distribute_pairs(const PlanParams& p, Planned& planned, int64_t total_cost, int64_t most_pairs) {
  const ScheduleConfig& config = p.config;
  const int32_t kind = config.max_kind;
  const int64_t longest = planned.longest_pair;
  planned.whole_pairs = config.batch_invariant != 0;
  if (config.min_queue_pairs == 0 || longest < planned.longest_small_pair) return;
  const int64_t num_pairs = static_cast<int64_t>(planned.num_tiles) * config.num_kv_heads;
  const bool shares_kv = planned.num_tiles >= kSharingRowTiles * planned.num_groups && most_pairs > 1;
  const int64_t slack = planned.share + config.pair_cost[kind] + kMergeKvTiles * config.kv_tile_cost[kind] +
                        (shares_kv ? planned.share / kSharingSlack : 0);
  const bool is_even = longest <= slack && most_pairs * total_cost <= slack * num_pairs;
  // As is_uncut(), without its limit of KV tiles.
  const bool longest_is_uncut =
      longest <= planned.share && longest <= 2 * config.pair_cost[kind] + config.kv_tile_cost[kind];
  const bool stays_whole =
      planned.num_merge_rows == 0 && is_even && (!longest_is_uncut || 2 * longest <= planned.share);
  const bool is_unequal = 4 * total_cost <= 3 * longest * num_pairs;
  const bool has_many = longest * (is_unequal ? kUnequalQueuePairs : config.min_queue_pairs) <= planned.share;
  const bool uses_queue = planned.num_tiles >= 2 * planned.num_groups && (has_many || (stays_whole && most_pairs > 1));
  planned.flags |= uses_queue ? kUsesQueue : 0;
  planned.whole_pairs |= uses_queue || (stays_whole && most_pairs == 1);
}

/// Decides on share and flags, once everything else is known.
ATTN_HD void finish_plan(const PlanParams& p, const PlacedTile& first, int64_t total_cost, Planned& planned) {
  const int64_t num_pairs = static_cast<int64_t>(planned.num_tiles) * p.config.num_kv_heads;
  const int64_t equal_cost = divide(total_cost + p.config.num_ctas - 1, p.num_ctas);
  const int64_t equal_pairs = divide(num_pairs + p.config.num_ctas - 1, p.num_ctas);
  planned.share = cta_share(p, first, num_pairs, total_cost, equal_cost, equal_pairs);
  planned.aligned_tile = planned.num_tiles;
  planned.aligned_cta = p.config.num_ctas;
  planned.aligned_parts = planned.aligned_kv_tiles = 0;
  const bool is_plain = planned.num_merge_rows == 0 && p.num_levels == 1 && p.levels[0].rows == nullptr;
  planned.flags = (is_plain ? kIsPlain : 0) | (planned.has_largest_tiles ? kHasLargestTiles : 0);
  distribute_pairs(p, planned, total_cost, equal_pairs);
}

// ---- Cut ----

/// Most CTAs among which a pair is cut evenly: on the device a warp looks at all numbers at once.
constexpr int32_t kMaxAlignedParts = 32;

/// The pairs of the only shared prefix of a plan, whose row tiles are the last of the list, from `tile` on. They may be
/// cut evenly, each among the same number of CTAs. A CTA then has one part: it loads Q and leaves states once. The
/// parts that see the same tokens run at the same time, and find them in L2.
struct SharedPairs {
  int32_t tile;
  PlacedTile first;  // row tile `tile`
  int32_t count;     // pairs
};

/// An even cut of the pairs of a shared prefix.
struct EvenCut {
  int32_t parts;     // Parts of a pair.
  int32_t kv_tiles;  // KV tiles of a part. The first part has the rest.
  int32_t share;     // The cost that another CTA gets of the pairs before the prefix.
  int32_t cost;      // The cost of the busiest CTA. kNoCut: pairs are not cut like this.
  static constexpr int32_t kNoCut = kMaxInt32;
};

/// Lists that cost more than kMaxCost (seconds of GPU time) are not cut evenly, so that no product exceeds 32 bits.
/// There are no branches: a GPU overlaps the two divisions.
ATTN_HD EvenCut cut_evenly(const PlanParams& p, const SharedPairs& shared, int32_t parts) {
  constexpr uint32_t kMaxCost = EvenCut::kNoCut / kMaxAlignedParts;
  const int32_t others = p.config.num_ctas - shared.count * parts;  // CTAs that are left for the rest of the list
  const uint32_t divisor = static_cast<uint32_t>(max_of(others, 1));
  const uint32_t cost_before = static_cast<uint32_t>(shared.first.cost_begin);
  const uint32_t share = (cost_before + divisor - 1) / divisor;
  const uint32_t kv_tiles = ceil_div(static_cast<uint32_t>(shared.first.num_kv_tiles), static_cast<uint32_t>(parts));
  const uint32_t part_cost = static_cast<uint32_t>(p.config.pair_cost[shared.first.cost_kind]) +
                             kv_tiles * static_cast<uint32_t>(p.config.kv_tile_cost[shared.first.cost_kind]);
  const uint32_t cost = max_of(part_cost, share);
  const bool whole = shared.count <= p.config.num_ctas && others >= 1 &&
                     static_cast<uint32_t>(parts - 1) * kv_tiles < static_cast<uint32_t>(shared.first.num_kv_tiles);
  const bool fits = shared.first.cost_begin <= kMaxInt32 && kv_tiles < kMaxCost / 64 && cost < kMaxCost;
  return EvenCut{parts, static_cast<int32_t>(kv_tiles), max_of(static_cast<int32_t>(share), p.config.min_share),
                 whole && fits ? static_cast<int32_t>(cost) : EvenCut::kNoCut};
}

/// Cuts the pairs of a shared prefix evenly, unless the busiest CTA is then slower than with equal shares. With equal
/// shares, a CTA that starts inside a pair pays the pair's own cost again. `best` is the cheapest cut. If several are,
/// it is the one with the fewest parts.
ATTN_HD void align_prefix(const PlanParams& p, const SharedPairs& shared, const EvenCut& best, Planned& planned) {
  if (best.cost == EvenCut::kNoCut || best.cost > planned.share + p.config.pair_cost[shared.first.cost_kind]) return;
  planned.aligned_parts = best.parts;
  planned.aligned_tile = shared.tile;
  planned.aligned_kv_tiles = best.kv_tiles;
  planned.aligned_cta = p.config.num_ctas - shared.count * best.parts;
  planned.share = best.share;
  planned.flags &= ~kUsesQueue;
  planned.whole_pairs = p.config.batch_invariant;
}

/// Where CTA `cta` starts: at the first KV tile at or after its cost in the list that an interval may start with. A
/// pair's own cost lies before its KV tiles. `tiles(i)` is the PlacedTile of row tile i.
template <class Tiles>
ATTN_HD Position find_position(const PlanParams& p, const Tiles& tiles, const Planned& planned, int64_t total_cost,
                               int32_t cta) {
  const int32_t num_tiles = planned.aligned_tile;
  if (cta >= planned.aligned_cta && planned.aligned_parts > 0) {
    const int32_t number = cta - planned.aligned_cta;
    const int32_t pair = number / planned.aligned_parts;
    const int32_t remaining =
        planned.aligned_parts - (number - pair * planned.aligned_parts);  // parts of this pair that have not begun
    const int32_t tile = pair / p.config.num_kv_heads;
    const int32_t kv_tile =
        remaining == planned.aligned_parts ? 0 : tiles(num_tiles).num_kv_tiles - remaining * planned.aligned_kv_tiles;
    return Position{num_tiles + tile, pair - tile * p.config.num_kv_heads, kv_tile, planned.flags};
  }
  if (planned.aligned_parts > 0) total_cost = tiles(num_tiles).cost_begin;
  const int64_t cost = cta * planned.share;
  if (cost >= total_cost) return Position{num_tiles, 0, 0, planned.flags};
  const ScheduleConfig& config = p.config;
  const int32_t low = find_last(num_tiles, [&](int32_t i) { return tiles(i).cost_begin <= cost; });
  const PlacedTile tile = tiles(low);
  const int32_t own_cost = config.pair_cost[tile.cost_kind];
  const int32_t kv_tile_cost = config.kv_tile_cost[tile.cost_kind];
  const int64_t head_cost = pair_cost(config, tile.cost_kind, tile.num_kv_tiles);
  const int64_t inside = cost - tile.cost_begin;
  Position position;
  position.tile = low;
  position.flags = planned.flags;
  position.head = static_cast<int32_t>(divide(inside, head_cost));
  const int64_t inside_kv_tiles = max_of<int64_t>(inside - position.head * head_cost - own_cost, 0);
  position.kv_tile = static_cast<int32_t>(divide(inside_kv_tiles + kv_tile_cost - 1, p.kv_tile_cost[tile.cost_kind]));
  const bool uncut = planned.whole_pairs || is_uncut(own_cost, kv_tile_cost, tile.num_kv_tiles, planned.share);
  if (position.kv_tile == tile.num_kv_tiles || (uncut && position.kv_tile > 0)) {
    position.kv_tile = 0;
    if (++position.head == config.num_kv_heads) {
      position.head = 0;
      ++position.tile;
    }
  }
  return position;
}

}  // namespace attn
