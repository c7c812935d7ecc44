// Turns metadata into row groups and row tiles. The planner reads an engine's metadata, clamps values that cannot be
// right, and reports them.
#pragma once

#include "planner/params.h"
#include "planner/schedule.h"

namespace attn {

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
  // A row's arithmetic depends on the kind of its row tile, and how many rows a prompt's chunk has depends on the
  // batch: all of them use the same kind.
  const bool keeps_bits = p.config.batch_invariant && group.qo_len != 1;
  group.kind = choose_kind(p.config, packed_rows_of(p.config, group.qo_len), keeps_bits ? p.config.max_kind : 0);
  group.state_begin = p.num_levels > 1 ? place.level * p.config.max_rows + group.qo_begin : -1;
  const int32_t most = static_cast<int32_t>(kMaxInt32) - group.kv_len;  // no position wraps around
  group.kv_offset = level.kv_offsets != nullptr ? clamp(level.kv_offsets[place.index], 0, most) : 0;
  group.q_position = group.kv_offset + group.kv_len - group.qo_len;
  group.request = place.index;
  return group;
}

/// About how many tokens a KV chunk of a batch invariant plan has. Shorter chunks cost states and keep the memory less
/// busy; longer ones leave CTAs idle where requests are few and short. Where a KV tile has few tokens, as heads are
/// wide, a CTA starts an item more slowly (ADR 10).
constexpr int32_t kChunkTokens = 768;
constexpr int32_t kLongChunkTokens = 1024;
constexpr int32_t kUncutRequest = 1024;  // is one chunk
constexpr int32_t kLongRequest = 8192;   // has long chunks

/// Tokens of the KV chunks that a batch invariant plan cuts a request's row group into: equal numbers of whole KV tiles
/// and pages. The length depends on nothing but the request. A single query is cut, unless a window bounds what it
/// sees; the row tiles of longer queries are many enough.
ATTN_HD int32_t chunk_tokens(const PlanParams& p, const RowGroup& group) {
  const PlanLevel& level = p.levels[group.level];
  if (!p.config.batch_invariant || group.qo_len != 1 || level.visibility.window_left >= 0)
    return max_of(group.kv_len, 1);
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

}  // namespace attn
