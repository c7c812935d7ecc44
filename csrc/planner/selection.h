// Sparse attention: the tokens that an engine's indexer has selected for each row become slots in the page table that a
// plan's runs read. Slots of tokens that exist come first, in the order of the tokens, and the plan gets their number.
#pragma once

#include "common/index_array.h"
#include "common/math.h"
#include "planner/schedule.h"

namespace attn {

/// Threads of a CTA of the kernel. A CTA packs one row.
constexpr int32_t kSelectionThreads = 512;

/// The level of a plan whose page table is written: its pages have one token, and all rows of a request see all of
/// them. It was planned for the most tokens that may be selected; its lengths are reduced to how many were.
struct PlannedSelection {
  Schedule schedule;
  int32_t is_planned;  // 0: there is no plan to tell
  int32_t level;
  int32_t group_begin;  // the level's first row group
  int32_t num_requests;
  int64_t row_stride;  // elements between two rows of its table
  int32_t has_chunks;  // a request may be several row groups (a batch invariant plan)
  int32_t group_size;
  int32_t kv_tile;
};

struct SelectionParams {
  const int32_t* indices;  // [num_rows, num_indices]; negative: none
  int64_t indices_stride;
  int32_t* slots;  // [num_rows, num_slots], num_slots >= num_indices; written; may be `indices`
  int64_t slots_stride;
  int32_t num_rows;
  int32_t num_indices;
  int32_t num_slots;
  int32_t page_stride;         // slots from one page to the next
  const int32_t* block_table;  // [table_rows, table_columns]; nullptr: indices are slots
  int64_t table_stride;
  int32_t table_rows;
  int32_t table_columns;
  FastDivisor page_size;
  IndexArray requests;  // [num_rows]: rows of block_table; none: row i is request i
  IndexArray kv_lens;   // [num_rows]: tokens that each row sees; none: any
  PlannedSelection plan;
};

/// Where the tokens of a row are.
struct SelectionRow {
  const int32_t* pages;  // nullptr: tokens are slots
  int32_t num_tokens;    // of the request; tokens from there on do not exist
};

ATTN_HD SelectionRow selection_row(const SelectionParams& p, int32_t row) {
  SelectionRow found{nullptr, static_cast<int32_t>(kMaxInt32)};
  if (p.kv_lens) found.num_tokens = static_cast<int32_t>(clamp<int64_t>(p.kv_lens[row], 0, kMaxInt32));
  if (p.block_table == nullptr) return found;
  const int64_t request = p.requests ? p.requests[row] : row;
  if (request < 0 || request >= p.table_rows)
    found.num_tokens = 0;  // there is no such request
  else
    found.pages = p.block_table + request * p.table_stride;
  return found;
}

/// The slot of a token; -1: there is no such token. A slot that no int32 holds becomes the largest one: runs clamp and
/// report it.
ATTN_HD int32_t selected_slot(const SelectionParams& p, const SelectionRow& row, int32_t token) {
  if (token < 0 || token >= row.num_tokens) return -1;
  if (row.pages == nullptr) return token;
  const int32_t column = p.page_size.divide(token);
  if (column >= p.table_columns) return -1;
  const int32_t page = row.pages[column];
  if (page < 0) return -1;
  const int64_t slot = static_cast<int64_t>(page) * p.page_stride + (token - column * p.page_size.divisor);
  return static_cast<int32_t>(min_of(slot, kMaxInt32));
}

ATTN_HD void report(ScheduleHeader& header, ScheduleError error) {
#if defined(__CUDA_ARCH__)
  atomicOr(&header.errors, static_cast<uint32_t>(error));
#else
  __atomic_fetch_or(&header.errors, static_cast<uint32_t>(error), __ATOMIC_RELAXED);
#endif
}

/// Shortens a row group of a request to its tokens among the request's first `count`.
ATTN_HD void set_group_length(const PlannedSelection& plan, int32_t group_number, int32_t request, int32_t count) {
  RowGroup& group = plan.schedule.groups[group_number];
  const int32_t begin = static_cast<int32_t>(group.table_begin - request * plan.row_stride);  // of a KV chunk
  // q_position keeps what was planned, kv_len does not.
  const int32_t planned = group.q_position + group.qo_len - (group.kv_offset - begin);
  if (count > planned && begin == 0) report(*plan.schedule.header, kSelectionTooLong);
  const int32_t length = max_of(min_of(count, planned) - begin, 0);
  const int32_t tiles = row_tiles_of(group.qo_len * plan.group_size, group.kind);
  int32_t group_length = length;
  for (int32_t i = 0; i < tiles; ++i) {
    RowTile& tile = plan.schedule.tiles[group.tile_begin + i];
    // Listed KV tiles have holes between them, whose tokens are not looked at.
    const int64_t room = tile.kv_begin < 0 ? kMaxInt32 : tile.kv_begin + int64_t{tile.num_kv_tiles} * plan.kv_tile;
    tile.kv_end = static_cast<int32_t>(min_of<int64_t>(length, room));
    if (plan.has_chunks) group_length = min_of(group_length, tile.kv_end);
  }
  group.kv_len = group_length;
}

/// Tells the plan how many tokens a request has. Called by each `thread` of `num_threads`.
ATTN_HD void set_selection_length(const PlannedSelection& plan, int32_t request, int32_t count, int32_t thread,
                                  int32_t num_threads) {
  if (plan.is_planned == 0 || request >= plan.num_requests) return;
  if (plan.has_chunks == 0) {
    if (thread == 0) set_group_length(plan, plan.group_begin + request, request, count);
    return;
  }
  for (int32_t i = thread; i < plan.schedule.header->num_groups; i += num_threads) {
    const RowGroup& group = plan.schedule.groups[i];
    if (group.level == plan.level && group.request == request) set_group_length(plan, i, request, count);
  }
}

}  // namespace attn
