// A row tile as the producer reads it, and a work item as the producer describes it to the consumers. Consumers never
// read the schedule.
#pragma once

#include "attention/feed/params.h"
#include "attention/feed/tuning.h"
#include "attention/tile/row_tile.h"
#include "attention/tile/work_cursor.cuh"
#include "planner/page_table.h"

namespace attn::feed {

/// Where the pages of a row group are.
struct GroupPages {
  int32_t entry_step;
  const int32_t* indices;  // nullptr: ragged
  int64_t num_entries;
  int64_t table_begin;

  GroupPages() = default;
  __device__ __forceinline__ GroupPages(const RowGroup& group, const Level& level)
      : entry_step(level.entry_step),
        indices(level.indices),
        num_entries(level.num_entries),
        table_begin(group.table_begin) {}

  /// Starts to read the page table, for page number `page` of the row group.
  __device__ __forceinline__ int32_t entry(int32_t page) const {
    if (indices == nullptr) return static_cast<int32_t>(min_of<int64_t>(table_begin + page, 0x7fffffff));
    return __ldg(indices + clamp<int64_t>(table_begin + static_cast<int64_t>(page) * entry_step, 0, num_entries - 1));
  }

  /// The page of an entry; outside the cache: clamped and reported.
  __device__ __forceinline__ int32_t page(int32_t entry, int32_t num_pages, ScheduleHeader& header) const {
    const int32_t wanted = indices == nullptr || entry_step == 1 ? entry : page_of_slot(entry, entry_step);
    const int32_t page = clamp(wanted, 0, num_pages - 1);
    if (page != wanted) atomicOr(&header.errors, kPageIndexInvalid);
    return page;
  }
};

/// A row tile, read once.
struct LoadedRowTile {
  RowTileRows<true> rows;
  TokenRange readable;  // from the first token that some row sees to the end of the row group's tokens: all of them
                        // are in the cache, seen or not
  int32_t kv_begin;     // as RowTile's
  int32_t num_kv_tiles;
  int32_t kind;
  int32_t group;
  Visibility visibility;  // of its level
  GroupPages pages;

  __device__ __forceinline__ LoadedRowTile(const AttentionParams& params, int32_t tile_number) {
    const RowTile& tile = params.schedule.tiles[tile_number];
    kv_begin = tile.kv_begin;
    num_kv_tiles = tile.num_kv_tiles;
    kind = tile.kind;
    group = tile.group;
    const RowGroup& row_group = params.schedule.groups[tile.group];
    const Level& level = params.schedule.header->levels[row_group.level];
    pages = GroupPages(row_group, level);
    visibility = level.visibility;
    rows = RowTileRows<true>(params.schedule, tile, row_group, params.group_size.divisor);
    const TokenRange all{0, params.num_pages > 0 ? row_group.kv_len : 0};
    readable = visibility.seen_by_any(rows.position(0, params.group_size),
                                      rows.position(rows.count - 1, params.group_size), all);
    readable.end = all.end;
  }

  /// Takes the tokens from DequantizedKv, if the plan has placed them. No page is looked up then. To save registers,
  /// `pages` marks this with entry_step 0, and table_begin is the row of token 0.
  __device__ __forceinline__ void find_dequantized(const TmaParams& params) {
    const RowGroup& row_group = params.attention.schedule.groups[group];
    if (!params.has_dequantized || row_group.dequantized_row < 0) return;
    pages.entry_step = 0;
    pages.table_begin = row_group.dequantized_row - row_group.dequantized_token;
  }
  __device__ __forceinline__ bool is_dequantized() const { return pages.entry_step == 0; }
  __device__ __forceinline__ int32_t dequantized_row(int32_t token) const {
    return static_cast<int32_t>(pages.table_begin) + token;
  }

  /// Starts to read the page table, for a token of the request.
  __device__ __forceinline__ int32_t entry(const AttentionParams& params, int32_t token) const {
    return pages.entry(params.page_size.divide(token));
  }

  __device__ __forceinline__ int32_t page(const AttentionParams& params, int32_t entry) const {
    return pages.page(entry, params.num_pages, *params.schedule.header);
  }
};

/// A run of KV tiles of one (row tile, KV head) pair.
struct WorkItem {
  RowTileRows<true> rows;
  TokenRange readable;   // of its row tile: tokens of its KV tiles outside of it are not in the cache
  int32_t num_kv_tiles;  // 0: there is no further item
  int32_t kv_begin;  // the item's first token; negative: as RowTile::kv_begin, moved past the KV tiles before the item
  int32_t kind;
  int32_t kv_head;
  int32_t group;
  Visibility visibility;  // of its level
  int32_t starts_inside;  // KV tiles of the same pair lie before this item
  int32_t ends_inside;    // or after it

  WorkItem() = default;

  /// The KV tiles from the cursor to the end of its pair, or of the interval. `kv_begin_`: where the one under the
  /// cursor begins.
  __device__ __forceinline__ WorkItem(const LoadedRowTile& tile, const WorkCursor& cursor, int32_t kv_begin_) {
    const int32_t end = cursor.end_kv_tile(tile.num_kv_tiles);
    rows = tile.rows;
    readable = tile.readable;
    num_kv_tiles = end - cursor.now.kv_tile;
    kv_begin = kv_begin_;
    kind = tile.kind;
    kv_head = cursor.now.head;
    group = tile.group;
    visibility = tile.visibility;
    starts_inside = cursor.now.kv_tile > 0;
    ends_inside = end < tile.num_kv_tiles;
  }

  /// Keeps the first or the second half of the rows, if the row tile is larger than row tiles of `largest_kind`. It is
  /// full then; otherwise there is one half.
  __device__ __forceinline__ void keep_half(int32_t half, int32_t largest_kind) {
    kind = min_of(kind, largest_kind);
    rows.packed_begin += half * tile_rows(largest_kind);
    rows.count = min_of(rows.count, tile_rows(largest_kind));
  }
};
static_assert(sizeof(WorkItem) <= kWorkItemBytes && kWorkItemBytes % 16 == 0);

}  // namespace attn::feed
