// The steps of planning that the device planner and the host planner share: the same arithmetic gives the same schedule, bit for bit.
#pragma once

#include "attn/params.h"
#include "attn/schedule.h"
#include "attn/variants.h"

namespace attn {

/// Threads of a CTA of the device planner: fewer where they are enough, as warps that have nothing to do take turns with those that have. The first CTA plans. The others
/// search for shared prefixes: each has teams of threads that look after one request at a time, and there are no more of them than fit onto a GPU at once.
constexpr int32_t kMaxPlanThreads = 640;   // those of 512 requests and of some shared prefixes at once
constexpr int32_t kFewPlanThreads = 384;
constexpr int32_t kSearchTeamThreads = 128;
constexpr int32_t kMaxSearchCtas = 128;

/// Bytes of shared memory that its first CTA needs beside those for a forest and for row groups: PlanSharedMemory (device/plan.cu).
constexpr int32_t kPlanSharedBytes = 30 * 1024;

/// Row tiles of a plan in which a forest is sought: fewer.
constexpr int32_t kMaxForestTiles = 1 << 21;

/// Row tiles whose place on the line it keeps in shared memory.
constexpr int32_t kCachedTiles = 1024;

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

/// Threads of the device planner's CTAs, and how many CTAs there are: the first, and one for each request or some requests.
inline int32_t plan_threads(const PlanParams& p) {
  const bool few = !p.config.batch_invariant && count_groups(p) < kFewPlanThreads && p.config.num_ctas <= kFewPlanThreads / 2;
  return few ? kFewPlanThreads : kMaxPlanThreads;
}
inline int32_t plan_ctas(const PlanParams& p) { return p.seeks_forest ? 1 + min_of(p.levels[0].num_groups, kMaxSearchCtas) : 1; }

/// Fills in what follows from the rest of the parameters. Decides whether a forest is sought in what is to be planned; if so, describes the level of its row
/// groups: the pages of the view, seen as a whole by the rows of a list that the planner writes (unless node_needs_no_list()).
inline void prepare_plan(PlanParams& p) {
  p.kv_tile = FastDivisor(p.config.kv_tile);
  p.group_size = FastDivisor(p.config.group_size);
  p.page_size = FastDivisor(p.levels[0].table.page_size);
  p.num_ctas = FastDivisor(p.config.num_ctas);
  for (int32_t kind = 0; kind < kNumCostKinds; ++kind) p.kv_tile_cost[kind] = FastDivisor(p.config.kv_tile_cost[kind]);
  for (int32_t i = 0; i < p.num_levels; ++i) {
    const PageTable& table = p.levels[i].table;
    p.levels[i].kv_length = table.kv_lens ? table.kv_lens : table.last_page_len ? table.last_page_len : p.levels[i].qo_indptr;
  }
  const PlanLevel& view = p.levels[0];
  p.seeks_forest = p.num_levels == 1 && view.rows == nullptr && view.table.indices != nullptr && view.num_groups > 1 && view.num_groups <= p.config.max_nodes
                   && p.config.max_tiles < kMaxForestTiles;
  p.position_threads = min_of(round_up(p.config.num_ctas + 32, 32), plan_threads(p) / 2);   // all at once, if that is no more than half
  if (!p.seeks_forest) return;
  PlanLevel& forest = p.levels[1];
  forest = view;
  forest.num_groups = 0;
  forest.rows = p.schedule.rows;
  forest.causal = 0;
  forest.window_left = -1;
}

/// Levels of the schedule: those of the composition, and one of the forest's row groups.
ATTN_HD int32_t count_levels(const PlanParams& p) { return p.num_levels + (p.seeks_forest ? 1 : 0); }

/// Elements of a level's `indices` that belong to a row group.
struct TableRange {
  int64_t begin;
  int64_t entries;
};

/// Reads where the pages of row group i of a level are. What cannot be right is clamped so that nothing outside the buffers is ever reached, and reported in
/// `errors`.
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

/// What an engine says about the lengths of row group i of a level: elements i and i + 1 of qo_indptr, and of kv_lens or else last_page_len. As read, so that
/// a GPU waits once for all of them and for what is read after them.
struct GroupLengths {
  IndexArray::Words qo_first;
  IndexArray::Words qo_last;
  IndexArray::Words kv;
};

ATTN_HD GroupLengths read_lengths(const PlanLevel& level, int32_t i) {
  return GroupLengths{level.qo_indptr.words(i), level.qo_indptr.words(i + 1), level.kv_length.words(i)};
}

/// Row group i of a level. What cannot be right is clamped and reported, as above.
ATTN_HD RowGroup make_row_group(const PlanParams& p, GroupPlace place, const GroupLengths& lengths, TableRange range, uint32_t& errors) {
  const PlanLevel& level = p.levels[place.level];
  const PageTable& table = level.table;
  const int32_t qo_first = level.qo_indptr.narrow(lengths.qo_first);
  const int32_t qo_last = level.qo_indptr.narrow(lengths.qo_last);
  const int32_t length = level.kv_length.narrow(lengths.kv);
  RowGroup group;
  group.table_begin = range.begin;
  group.qo_begin = clamp(qo_first, 0, level.max_rows);
  const int32_t qo_end = clamp(qo_last, group.qo_begin, level.max_rows);
  if (group.qo_begin != qo_first || qo_end != qo_last || (place.index == 0 && qo_first != 0)) errors |= kQoIndptrInvalid;
  group.qo_len = qo_end - group.qo_begin;

  const int32_t entries = static_cast<int32_t>(min_of(range.entries, kMaxInt32));
  const int32_t pages = table.entry_step == 1 ? entries : entries / table.entry_step;
  const int32_t capacity = static_cast<int32_t>(min_of<int64_t>(static_cast<int64_t>(pages) * table.page_size, kMaxInt32));
  group.kv_len = capacity;
  if (table.kv_lens) {
    const int32_t limit = table.entry_step == 1 ? capacity : entries;   // one entry a token: the last page may be partly filled
    group.kv_len = clamp(length, 0, limit);
    if (group.kv_len != length) errors |= kKvLengthInvalid;
  } else if (table.last_page_len && pages > 0) {
    const int32_t last_page_len = clamp(length, 1, table.page_size);
    if (last_page_len != length) errors |= kLastPageLenInvalid;
    group.kv_len = capacity - table.page_size + last_page_len;
  }
  group.tile_begin = 0;
  group.level = place.level;
  // A row's arithmetic depends on the kind of its row tile, and how many rows a prompt's chunk has depends on the batch: all of them use the same kind.
  const bool keeps_bits = p.config.batch_invariant && group.qo_len != 1;
  group.kind = choose_kind(p.config, packed_rows_of(p.config, group.qo_len), keeps_bits ? p.config.max_kind : 0);
  group.state_begin = p.num_levels > 1 ? place.level * p.config.max_rows + group.qo_begin : -1;
  group.unused = 0;
  return group;
}

ATTN_HD RowGroup read_row_group(const PlanParams& p, GroupPlace place, uint32_t& errors) {
  const PlanLevel& level = p.levels[place.level];
  const GroupLengths lengths = read_lengths(level, place.index);
  return make_row_group(p, place, lengths, read_table_range(level.table, place.index, errors), errors);
}

/// Tokens of a KV chunk of a batch invariant plan, about. Shorter ones cost states and keep the memory less busy, longer ones leave CTAs idle where requests are few
/// and short. Where a KV tile has few tokens because they are wide, a CTA starts an item more slowly (docs/decisions.md).
constexpr int32_t kChunkTokens = 768;
constexpr int32_t kLongChunkTokens = 1024;
constexpr int32_t kUncutRequest = 1024;    // is one chunk
constexpr int32_t kLongRequest = 8192;     // has long chunks

/// Length of the KV chunks that a batch invariant plan cuts a request's row group into, in tokens: equal ones, whole KV tiles and pages. It depends on nothing but
/// the request. A single query is cut, unless a window bounds what it sees; the row tiles of longer queries are many enough.
ATTN_HD int32_t chunk_tokens(const PlanParams& p, const RowGroup& group) {
  const PlanLevel& level = p.levels[group.level];
  if (!p.config.batch_invariant || group.qo_len != 1 || level.window_left >= 0) return max_of(group.kv_len, 1);
  const bool is_long = group.kv_len <= kUncutRequest || group.kv_len >= kLongRequest || p.config.kv_tile < 128;
  const int64_t chunks = clamp<int64_t>(ceil_div<int64_t>(group.kv_len, is_long ? kLongChunkTokens : kChunkTokens), 1, kMaxLinks);
  const int64_t least = ceil_div<int64_t>(max_of(group.kv_len, 1), chunks);
  const int64_t page_size = level.table.page_size;
  const int64_t kv_tile = p.config.kv_tile;
  return static_cast<int32_t>(min_of(ceil_div(ceil_div(least, kv_tile) * kv_tile, page_size) * page_size, kMaxInt32));
}

/// Chunks of a request's row group; at least 1.
ATTN_HD int32_t count_chunks(const PlanParams& p, const RowGroup& group) { return max_of(static_cast<int32_t>(ceil_div<int64_t>(group.kv_len, chunk_tokens(p, group))), 1); }

/// Chunk number `chunk` of request `request`, which becomes row group `group_index`; linked to the request's row.
ATTN_HD RowGroup make_chunk(const PlanParams& p, const RowGroup& whole, int32_t request, int32_t chunk, int32_t num_chunks, int32_t group_index) {
  if (num_chunks == 1) return whole;
  const PageTable& table = p.levels[whole.level].table;
  const int32_t tokens = chunk_tokens(p, whole);
  const int32_t begin = chunk * tokens;
  RowGroup group = whole;
  group.table_begin += static_cast<int64_t>(begin / table.page_size) * table.entry_step;
  group.kv_len = min_of(tokens, whole.kv_len - begin);
  group.state_begin = group_index;
  p.schedule.links[static_cast<int64_t>(chunk) * p.config.max_merge_rows + request] = RowLink{group_index, 0};
  return group;
}

/// Row tiles of a row group.
ATTN_HD int32_t count_row_tiles(const ScheduleConfig& config, const RowGroup& group) {
  return row_tiles_of(packed_rows_of(config, group.qo_len), group.kind);
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
  const int32_t last = packed_end >= static_cast<uint32_t>(packed_rows) ? group.qo_len - 1 : p.group_size.divide(static_cast<int32_t>(packed_end - 1));
  const int32_t first = level.window_left >= 0 ? p.group_size.divide(tile.packed_begin) : 0;
  const VariantParams variant{1.0f, 0.0f, level.causal, level.window_left};
  const TokenRange range = StandardVariant::any(variant, offset + first, offset + last, TokenRange{0, group.kv_len});
  tile.kv_end = max_of(range.end, 0);
  const int32_t hidden = range.begin > 0 ? p.kv_tile.divide(min_of(range.begin, tile.kv_end)) : 0;   // KV tiles that no row sees
  tile.kv_begin = hidden * config.kv_tile;
  tile.num_kv_tiles = tile.kv_end > tile.kv_begin ? p.kv_tile.divide(tile.kv_end - 1) + 1 - hidden : 1;
  return tile;
}

/// What the place of a CTA's interval on the line depends on.
struct PlacedTile {
  int64_t cost_begin;
  int32_t cost_kind;
  int32_t num_kv_tiles;
};

/// Cost of a (row tile, KV head) pair.
ATTN_HD int64_t pair_cost(const ScheduleConfig& config, int32_t cost_kind, int32_t num_kv_tiles) {
  return config.pair_cost[cost_kind] + static_cast<int64_t>(num_kv_tiles) * config.kv_tile_cost[cost_kind];
}

/// Of a row tile that is on the line, of row group `group`.
ATTN_HD PlacedTile placed_tile(const RowTile& tile, const RowGroup& group) { return PlacedTile{tile.cost_begin, cost_kind(tile.kind, group.state_begin), tile.num_kv_tiles}; }

/// What each CTA gets if all get the same of a line of row tiles.
struct EqualShares {
  int64_t cost;
  int64_t pairs;         // (row tile, head) pairs, if they take about the same time
};

ATTN_HD EqualShares equal_shares(const PlanParams& p, int32_t num_tiles, int64_t total_cost) {
  const int64_t num_pairs = static_cast<int64_t>(num_tiles) * p.config.num_kv_heads;
  return EqualShares{divide(total_cost + p.config.num_ctas - 1, p.num_ctas), divide(num_pairs + p.config.num_ctas - 1, p.num_ctas)};
}

/// Cost that each CTA gets, of a line of `num_tiles` row tiles that begins with `first`. Where all pairs cost the same, as in a batch of equal lengths, it is that of
/// whole pairs if they fit by 4 % (a line whose pairs only cost as much as the first on average is treated alike: it loses no more than those 4 %): then nothing has to be merged, and CTAs that share a KV head's tokens read them at the same time (docs/decisions.md).
ATTN_HD int64_t cta_share(const PlanParams& p, const PlacedTile& first, int32_t num_tiles, int64_t total_cost, const EqualShares& equal) {
  const int64_t share = max_of<int64_t>(equal.cost, p.config.min_share);
  const int64_t of_pair = pair_cost(p.config, first.cost_kind, first.num_kv_tiles);
  const int64_t num_pairs = static_cast<int64_t>(num_tiles) * p.config.num_kv_heads;
  const int64_t whole_pairs = equal.pairs * of_pair;
  return num_pairs * of_pair == total_cost && whole_pairs >= share && (whole_pairs - share) * 25 <= share ? whole_pairs : share;
}

/// A plan as far as it is known; what write_header() is told.
struct Planned {
  int32_t num_groups;
  int32_t num_tiles;
  int32_t num_merge_rows;
  int32_t num_links;
  int32_t num_requests;    // that the forest was sought in
  int64_t share;
  int32_t longest_pair;    // the largest longest_pair() of all row groups
  int32_t has_largest_tiles;
  int32_t whole_pairs;     // no (row tile, head) is shared by CTAs
  int32_t flags;           // ScheduleFlag bits
  int32_t aligned_tile;    // as in ScheduleHeader, from align_prefix()
  int32_t aligned_cta;
  int32_t aligned_parts;
  int32_t aligned_kv_tiles;   // of each part but the first, which has what is left
  uint32_t errors;
};

/// A pair of a row group that sees all of its tokens: its cost, and in the lowest bits the kind of its row tile. The largest number is that of the longest pair.
ATTN_HD int32_t longest_pair(const PlanParams& p, const RowGroup& group) {
  const int64_t cost = pair_cost(p.config, cost_kind(group.kind, group.state_begin), p.kv_tile.divide(max_of(group.kv_len, 1) - 1) + 1);
  return static_cast<int32_t>(min_of<int64_t>(cost, kMaxInt32 / kNumTileKinds)) * kNumTileKinds + group.kind;
}

/// KV tiles of a wide row tile that a CTA computes in the time of a merge, about.
constexpr int32_t kMergeKvTiles = 5;

/// How pairs are handed out.
struct Handing {
  bool whole;            // no (row tile, head) is cut
  bool in_turn;
};

/// Pairs of the largest row tiles stay whole where CTAs then end no further apart than what cutting costs: a merge, and what comes before a pair's KV tiles once more. If there
/// are more of them than CTAs these take them in turn; row groups must have several row tiles, or a CTA would wait for what is next longer than it computes. `most_pairs`: of
/// a CTA, of EqualShares.
ATTN_HD Handing hand_out(const PlanParams& p, const Planned& planned, int64_t total_cost, int64_t most_pairs) {
  const ScheduleConfig& config = p.config;
  const int32_t kind = planned.longest_pair % kNumTileKinds;
  const int64_t longest = planned.longest_pair / kNumTileKinds;
  Handing handing{config.batch_invariant != 0, false};
  if (config.turns == 0 || kind != config.max_kind) return handing;
  const int64_t num_pairs = static_cast<int64_t>(planned.num_tiles) * config.num_kv_heads;
  const int64_t slack = planned.share + config.pair_cost[kind] + kMergeKvTiles * config.kv_tile_cost[kind];
  const bool is_even = longest <= slack && most_pairs * total_cost <= slack * num_pairs;
  const bool is_uncut = longest <= planned.share && longest <= 2 * config.pair_cost[kind] + config.kv_tile_cost[kind];   // is_uncut(), of the longest
  const bool stays_whole = planned.num_merge_rows == 0 && is_even && (!is_uncut || 2 * longest <= planned.share);
  const bool has_many = longest * config.turns <= planned.share;
  handing.in_turn = planned.num_tiles >= 2 * planned.num_groups && (has_many || (stays_whole && most_pairs > 1));
  handing.whole |= handing.in_turn || (stays_whole && most_pairs == 1);
  return handing;
}

/// Whether hand_out() asks for the longest pair. Few plans of decodes do.
ATTN_HD bool needs_longest_pair(const PlanParams& p, const Planned& planned) {
  return p.config.turns > 0 && planned.has_largest_tiles && (planned.num_merge_rows == 0 || planned.num_tiles >= 2 * planned.num_groups);
}

/// Share and flags, when everything before them is known.
ATTN_HD void finish_plan(const PlanParams& p, const PlacedTile& first, int64_t total_cost, const EqualShares& equal, Planned& planned) {
  planned.share = cta_share(p, first, planned.num_tiles, total_cost, equal);
  planned.aligned_tile = planned.num_tiles;
  planned.aligned_cta = p.config.num_ctas;
  planned.aligned_parts = planned.aligned_kv_tiles = 0;
  const Handing handing = hand_out(p, planned, total_cost, equal.pairs);
  const bool is_plain = planned.num_merge_rows == 0 && p.num_levels == 1 && p.levels[0].rows == nullptr;
  planned.flags = (is_plain ? kIsPlain : 0) | (handing.in_turn ? kInTurn : 0) | (planned.has_largest_tiles ? kHasLargestTiles : 0);
  planned.whole_pairs = handing.whole;
}

/// Most CTAs among which a pair is cut evenly: a warp looks at all numbers at once.
constexpr int32_t kMaxAlignedParts = 32;

/// One shared prefix, whose row tiles are the last of the line from `tile` on: its pairs may be cut evenly, each among the same number of CTAs. A CTA then has one part,
/// and loads Q and leaves states once; the parts of row tiles that see the same tokens run side by side, and find them in L2.
struct SharedPairs {
  int32_t tile;
  PlacedTile first;        // row tile `tile`
  int32_t count;           // pairs
};

/// An even cut of the pairs of a shared prefix.
struct EvenCut {
  int32_t parts;           // of each pair
  int32_t kv_tiles;        // of each part but the first, which has what is left
  int32_t share;           // cost that each of the other CTAs gets, of what lies before
  int32_t judged;          // cost of the busiest CTA, and in the lowest bits parts - 1: the smallest number is that of the best cut; kNoCut: there is none
  static constexpr int32_t kNoCut = 0x7fffffff;
};

/// Lines that cost more than an int32 holds, seconds of a GPU, are not cut evenly. Without branches: a GPU divides twice at the same time.
ATTN_HD EvenCut cut_evenly(const PlanParams& p, const SharedPairs& shared, int32_t parts) {
  constexpr uint32_t kMostCost = EvenCut::kNoCut / kMaxAlignedParts;
  const int32_t others = p.config.num_ctas - shared.count * parts;   // CTAs that are left for the rest of the line
  const uint32_t divisor = static_cast<uint32_t>(max_of(others, 1));
  const uint32_t cost_before = static_cast<uint32_t>(shared.first.cost_begin);
  const uint32_t share = (cost_before + divisor - 1) / divisor;
  const uint32_t kv_tiles = ceil_div(static_cast<uint32_t>(shared.first.num_kv_tiles), static_cast<uint32_t>(parts));
  const uint32_t of_part = static_cast<uint32_t>(p.config.pair_cost[shared.first.cost_kind]) + kv_tiles * static_cast<uint32_t>(p.config.kv_tile_cost[shared.first.cost_kind]);
  const uint32_t cost = max_of(of_part, share);
  const bool whole = shared.count <= p.config.num_ctas && others >= 1 && static_cast<uint32_t>(parts - 1) * kv_tiles < static_cast<uint32_t>(shared.first.num_kv_tiles);
  const bool fits = shared.first.cost_begin <= kMaxInt32 && kv_tiles < kMostCost / 64 && cost < kMostCost;
  const int32_t judged = whole && fits ? static_cast<int32_t>(cost) * kMaxAlignedParts + parts - 1 : EvenCut::kNoCut;
  return EvenCut{parts, static_cast<int32_t>(kv_tiles), max_of(static_cast<int32_t>(share), p.config.min_share), judged};
}

/// Cuts the pairs of a shared prefix evenly, if no CTA then has more than where the line is cut into equal shares and a CTA that starts inside a pair pays its cost again.
/// `best`: of all numbers of parts.
ATTN_HD void align_prefix(const PlanParams& p, const SharedPairs& shared, const EvenCut& best, Planned& planned) {
  if (best.judged == EvenCut::kNoCut || best.judged / kMaxAlignedParts > planned.share + p.config.pair_cost[shared.first.cost_kind]) return;
  planned.aligned_parts = best.parts;
  planned.aligned_tile = shared.tile;
  planned.aligned_kv_tiles = best.kv_tiles;
  planned.aligned_cta = p.config.num_ctas - shared.count * best.parts;
  planned.share = best.share;
  planned.flags &= ~kInTurn;
  planned.whole_pairs = p.config.batch_invariant;
}

/// Whether no place on the line, nor where a CTA without work would start behind it, exceeds an int32.
ATTN_HD bool is_short_line(const PlanParams& p, const Planned& planned, int64_t total_cost) { return max_of(total_cost, p.config.num_ctas * planned.share) <= kMaxInt32; }

/// Where CTA `cta` starts: at the first KV tile that starts at or after its cost on the line, of those that an interval may start with; a pair's own cost lies before its KV
/// tiles. `tiles(i)` is the PlacedTile of row tile i; `Cost`: int64_t, or int32_t if is_short_line().
template <class Cost, class Tiles>
ATTN_HD Position find_position(const PlanParams& p, const Tiles& tiles, const Planned& planned, Cost total_cost, int32_t cta) {
  const int32_t num_tiles = planned.aligned_tile;
  if (cta >= planned.aligned_cta && planned.aligned_parts > 0) {
    const int32_t number = cta - planned.aligned_cta;
    const int32_t pair = number / planned.aligned_parts;
    const int32_t behind = planned.aligned_parts - (number - pair * planned.aligned_parts);   // parts of this pair that have not begun
    const int32_t tile = pair / p.config.num_kv_heads;
    const int32_t kv_tile = behind == planned.aligned_parts ? 0 : tiles(num_tiles).num_kv_tiles - behind * planned.aligned_kv_tiles;
    return Position{num_tiles + tile, pair - tile * p.config.num_kv_heads, kv_tile, planned.flags};
  }
  if (planned.aligned_parts > 0) total_cost = static_cast<Cost>(tiles(num_tiles).cost_begin);
  const Cost cost = cta * static_cast<Cost>(planned.share);
  if (cost >= total_cost) return Position{num_tiles, 0, 0, planned.flags};
  const ScheduleConfig& config = p.config;
  int32_t low = 0;                       // row tile `low` starts at or before `cost`
  for (int32_t count = num_tiles; count > 1;) {
    const int32_t half = count / 2;      // of the `count` tiles from `low` on, the one sought is among the first count - half, or those behind `low + half`
    if (static_cast<Cost>(tiles(low + half).cost_begin) <= cost) low += half;
    count -= half;
  }
  const PlacedTile tile = tiles(low);
  const int32_t own_cost = config.pair_cost[tile.cost_kind];
  const int32_t kv_tile_cost = config.kv_tile_cost[tile.cost_kind];
  const Cost head_cost = own_cost + tile.num_kv_tiles * static_cast<Cost>(kv_tile_cost);
  const Cost inside = cost - static_cast<Cost>(tile.cost_begin);
  Position position;
  position.tile = low;
  position.flags = planned.flags;
  position.head = static_cast<int32_t>(divide(inside, head_cost));
  const Cost inside_kv_tiles = max_of<Cost>(inside - position.head * head_cost - own_cost, 0);
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

/// Everything but the levels.
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
  header.pairs_taken = 0;
  header.aligned_tile = planned.aligned_tile;
  header.aligned_cta = planned.aligned_cta;
  header.aligned_parts = planned.aligned_parts;
  header.unused = 0;
  header.share = planned.share;
  for (int32_t kind = 0; kind < kNumCostKinds; ++kind) {
    header.kv_tile_cost[kind] = p.config.kv_tile_cost[kind];
    header.pair_cost[kind] = p.config.pair_cost[kind];
  }
}

/// Whether one node is all of a forest, and its rows are all rows of the requests, the last of which ends at `end_row`: in their order, so its row group needs no list, without which
/// Q of the largest row tiles comes faster (docs/decisions.md). Only if they fill such tiles: behind the last row Q may hold anything.
ATTN_HD bool node_needs_no_list(const PlanParams& p, const Planned& planned, int32_t end_row) {
  return p.seeks_forest && planned.num_groups == p.levels[0].num_groups + 1 && planned.num_merge_rows == end_row &&
         packed_rows_of(p.config, end_row) % tile_rows(p.config.max_kind) == 0;
}

/// Describes a level. `without_list`: the forest's, if node_needs_no_list().
ATTN_HD void write_level(const PlanParams& p, int32_t index, bool without_list) {
  const PlanLevel& level = p.levels[index];
  const int32_t* rows = index == p.num_levels && without_list ? nullptr : level.rows;
  int32_t group_begin = 0;
  for (int32_t i = 0; i < index; ++i) group_begin += p.levels[i].num_groups;
  p.schedule.header->levels[index] = Level{level.table.indices, rows, level.table.num_entries, level.table.entry_step, level.causal, level.window_left, group_begin};
}

/// Links row number `index` of a group of a composition, and reports a row that does not exist. Returns the row's number plus 1, 0 if it does not exist.
ATTN_HD int32_t link_row(const PlanParams& p, const RowGroup& group, int32_t group_index, int32_t index, uint32_t& errors) {
  const int32_t* rows = p.levels[group.level].rows;
  const int32_t row = rows != nullptr ? rows[group.qo_begin + index] : group.qo_begin + index;
  if (row < 0 || row >= p.config.max_rows) {
    errors |= kRowInvalid;
    return 0;
  }
  if (p.num_levels > 1) p.schedule.links[static_cast<int64_t>(group.level) * p.config.max_merge_rows + row] = RowLink{group_index, index};
  return row + 1;
}

/// Whether rows must be linked to their groups, or at least checked.
ATTN_HD bool links_rows(const PlanParams& p) { return p.num_levels > 1 || p.levels[0].rows != nullptr; }

}  // namespace attn
