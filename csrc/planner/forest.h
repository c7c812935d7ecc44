// The prefix forest of a batch: which requests share leading pages, and which of those prefixes become row groups of
// their own.
//
// Sharing is by physical page: equal entries of the page table. A request can share the leading pages all of whose
// tokens all of its rows see. It attaches to the request before it with which it shares most of them (the smallest, if
// there are several); a node of the forest is a pair (leader, pages) at which requests attach: the first `pages` pages
// of the leader, seen by the leader and by all that attach there or deeper on its path. Nodes on one leader's path are
// nested; the shallowest lies below the node at which the leader itself attaches. So parents follow from attachments
// alone, and every step below is a sum, a minimum or a maximum: the same in whatever order threads do it.
//
// A node that is taken becomes a row group: its rows are those of all its requests, its pages those that no taken
// ancestor reads. What the taken nodes cover is cut from the front of the requests' own row groups. A node that is not
// taken leaves its pages to the nodes and requests below it.
#pragma once

#include "common/math.h"
#include "planner/groups.h"
#include "planner/launch.h"
#include "planner/params.h"
#include "planner/schedule.h"

namespace attn {

/// Most requests of a batch in which a forest is sought.
constexpr int32_t kMaxForestRequests = 1024;

/// Most requests that one request is compared with, page by page: bounds the time of a plan. A forest found with fewer
/// comparisons than it has branches on a path is right all the same, only not as deep.
constexpr int32_t kMaxComparisons = 16;

/// Most pages of a request that is compared with all before it that may share more, as many at a time as a CTA has
/// warps.
constexpr int32_t kFewPages = 1024;

/// Whether a request is, in a batch of so many requests that each has a CTA.
ATTN_HD bool compares_with_all(int32_t num_requests, int32_t pages) {
  return num_requests <= kMaxSearchCtas && pages <= kFewPages;
}

/// Most leading pages that are compared.
constexpr int32_t kMaxSharedPages = 1 << 20;

/// Row states that a forest may use.
ATTN_HD int32_t forest_states(const ScheduleConfig& config) { return min_of(config.max_states, 1 << 19); }

/// Leading pages of a request that it can share. `first_entry`: of its pages, -1 if it has none.
ATTN_HD int32_t shareable_pages(const PlanParams& p, const RowGroup& group, int32_t first_entry) {
  const ScheduleConfig& config = p.config;
  const PlanLevel& level = p.levels[0];
  if (group.qo_len == 0) return 0;
  // Full row tiles read no less KV when they are shared; their states would only take the room of rows that gain.
  if (config.cascade != kCascadeAlways &&
      static_cast<int64_t>(group.qo_len) * config.group_size >= tile_rows(config.max_kind))
    return 0;
  if (level.visibility.window_left >= 0 && group.kv_len - 1 > level.visibility.window_left)
    return 0;  // a window hides the first token from the last row
  const int32_t seen = level.visibility.causal ? group.kv_len - group.qo_len + 1 : group.kv_len;
  const int32_t pages = min_of(p.page_size.divide(max_of(seen, 0)), kMaxSharedPages);
  return first_entry >= 0 ? pages : 0;
}

/// The first entry of a request's pages: a request without pages may read another's, which its length then hides. -1:
/// there is none.
ATTN_HD int32_t read_first_entry(const PageTable& table, int64_t table_begin) {
  return table_begin < table.num_entries ? table.indices[table_begin] : -1;
}

/// A request, and the node of its number, while a forest is planned.
struct ForestEntry {
  // Of the request.
  int32_t leader;  // Attachment
  int32_t pages;
  int32_t qo_begin;  // RowGroup
  int32_t qo_len;
  int32_t kv_len;
  int32_t node;         // where it attaches; -1: nowhere
  int32_t deepest;      // path_key() of the deepest node on its own path; -1: none
  int32_t merge_begin;  // first of its rows among the rows to be merged; -1: none of its nodes was taken
  // Of the node.
  int32_t parent;  // -1: none
  int32_t depth;   // nodes on the path from the root to it; 0: there is no node of this number
  int32_t rows;
  int32_t requests;
  int32_t weight;  // cost of a KV tile if its children read it: the sum over child nodes and over requests that are in
                   // no deeper node
  int32_t tile_cost;    // cost of a KV tile for its rows; on the device first for the request's
  int32_t pair_cost;    // of its row tiles, for each KV head
  int32_t begin;        // pages that taken nodes above it read
  int32_t taken;        // it or the nearest ancestor that was taken; -1: none
  int32_t taken_depth;  // taken nodes on the path from the root to it
  int32_t covered;      // pages that it and those above it read, as far as they are taken
  union {
    int32_t direct_rows;  // until it is decided on: of its rows those of requests that are in no deeper node
    int32_t group;        // then, of a taken node
  };
  int32_t row_begin;  // of its rows in the row list
  // Of the device planner (planner/device/forest.cuh).
  int32_t key;       // what requests are grouped by, the first entry of the page table; then whether a request attaches
  int32_t smallest;  // of the group that this request stands for
  int32_t next;      // path_key() of the next node up on the path of this node's leader; -1: none
  int32_t shallowest;  // of all that attach to this leader: pages << kNodeBits | request, the smallest
  int32_t top;         // the deepest taken node that the request is in; -1: none
  int32_t same;        // a request of the same first page, the same for all of them
};
static_assert(sizeof(ForestEntry) / sizeof(int32_t) % 2 == 1, "no two of 32 entries in one bank");

struct Forest {
  ForestEntry* entries;
  int32_t size;  // requests

  static constexpr int32_t kNodeBits = 10;
  static_assert(kMaxForestRequests == 1 << kNodeBits && static_cast<int64_t>(kMaxSharedPages) << kNodeBits <= int64_t{1}
                                                                                                                  << 30,
                "path_key() fits into an int32");

  ATTN_HD ForestEntry& operator[](int32_t i) const { return entries[i]; }

  ATTN_HD bool is_node(int32_t n) const { return entries[n].node == n; }

  /// The deepest node that a request is in: on its own path if others attach there, else where it attaches; -1: none.
  ATTN_HD int32_t innermost(int32_t request) const {
    const ForestEntry& entry = entries[request];
    return entry.deepest >= 0 ? node_of(entry.deepest) : entry.node;
  }

  /// What a request that attaches says about its node: the largest is that of the deepest node and, of all that attach
  /// there, of the smallest request.
  ATTN_HD static int32_t path_key(int32_t request, int32_t pages) {
    return pages << kNodeBits | (kMaxForestRequests - 1 - request);
  }
  ATTN_HD int32_t path_key(int32_t request) const { return path_key(request, entries[request].pages); }
  ATTN_HD static int32_t node_of(int32_t path_key) {
    return kMaxForestRequests - 1 - (path_key & (kMaxForestRequests - 1));
  }
  ATTN_HD static int32_t pages_of(int32_t path_key) { return path_key >> kNodeBits; }

  ATTN_HD int32_t taken_above(int32_t n) const {
    return entries[n].parent >= 0 ? entries[entries[n].parent].taken : -1;
  }

  /// The taken node of a request with `depth` taken nodes on the path from the root to it; -1: there is none.
  ATTN_HD int32_t taken_at(int32_t request, int32_t depth) const {
    int32_t n = innermost(request);
    if (n >= 0) n = entries[n].taken;
    while (n >= 0 && entries[n].taken_depth > depth) n = taken_above(n);
    return n >= 0 && entries[n].taken_depth == depth ? n : -1;
  }
};

/// The device planner's hash table has 2 to this power slots: at least four for each request, or two of very many. So
/// there are 128 for each 32 requests, or 64 of very many.
ATTN_HD constexpr int32_t forest_slot_bits(int32_t requests) {
  return requests <= 32 ? 7 : requests <= 64 ? 8 : requests <= 128 ? 9 : requests <= 256 ? 10 : 11;
}

/// Shared memory that the device planner needs for a forest (ForestMemory in planner/device/forest.cuh), in bytes: the
/// hash table, and for each request an int64 and an entry.
ATTN_HD constexpr int32_t forest_shared_bytes(int32_t requests) {
  if (requests == 0) return 0;
  return round_up(
      (4 << forest_slot_bits(requests)) + requests * static_cast<int32_t>(sizeof(int64_t) + sizeof(ForestEntry)), 16);
}

/// What the row tiles of a row group cost together, for each KV head.
struct RowsCost {
  int32_t kv_tile;  // for each KV tile
  int32_t pairs;    // beside them
};

/// Of a row group of `rows` rows; `of_node`: which leave states.
ATTN_HD RowsCost rows_cost(const ScheduleConfig& config, int32_t rows, bool of_node) {
  const int32_t packed_rows = packed_rows_of(config, rows);
  const int32_t kind = choose_kind(config, packed_rows);
  const int32_t tiles = row_tiles_of(packed_rows, kind);
  const int32_t cost = cost_kind(kind, of_node ? 0 : -1);
  return RowsCost{tiles * config.kv_tile_cost[cost], tiles * config.pair_cost[cost]};
}

/// Row states that taking a node needs that would read its pages from `begin` on: the first taken node of a path makes
/// its rows' own groups keep states too.
ATTN_HD int32_t node_states(int32_t rows, int32_t begin) { return rows * (begin == 0 ? 2 : 1); }

/// What taking a node saves and what it adds, for each KV head.
struct NodeCost {
  int64_t saved;
  int64_t added;
};

/// What a node adds however many pages it reads: row tiles that hold its rows, and row states.
ATTN_HD int64_t fixed_node_cost(const ScheduleConfig& config, int32_t pair_cost, int32_t states) {
  return pair_cost + static_cast<int64_t>((multiply(states, config.state_cost) + 63) >> 6);
}

/// `pages`: that the node would read; `weight`, `tile_cost`: see ForestEntry; `fixed`: fixed_node_cost().
ATTN_HD NodeCost node_cost(const PlanParams& p, int32_t pages, int32_t weight, int32_t tile_cost, int64_t fixed) {
  const int32_t tokens = pages * p.levels[0].table.page_size;
  const int32_t whole_kv_tiles = p.kv_tile.divide(tokens);
  const int32_t kv_tiles = whole_kv_tiles + (whole_kv_tiles * p.config.kv_tile < tokens);
  return NodeCost{static_cast<int64_t>(multiply(whole_kv_tiles, weight)),
                  fixed + static_cast<int64_t>(multiply(kv_tiles, tile_cost))};
}

/// Beside its children reading the pages themselves. Only rows that are in no deeper node count states: the others
/// leave two in any case, and what the third costs was not to be seen on a Hopper GPU (docs/decisions.md).
ATTN_HD NodeCost node_cost(const PlanParams& p, const ForestEntry& node) {
  return node_cost(p, node.pages - node.begin, node.weight, node.tile_cost,
                   fixed_node_cost(p.config, node.pair_cost, node_states(node.direct_rows, node.begin)));
}

/// Beside each of its requests reading them for itself, with row tiles of the least cost.
ATTN_HD NodeCost node_cost_beside_none(const PlanParams& p, const ForestEntry& node) {
  const int32_t weight = max_of(node.weight, node.requests * p.config.kv_tile_cost[0]);
  return node_cost(p, node.pages - node.begin, weight, node.tile_cost,
                   fixed_node_cost(p.config, node.pair_cost, node_states(node.rows, node.begin)));
}

/// Most that a node counts for in what a forest saves: far more than any forest must save, and the sum over all nodes
/// is an int32.
constexpr int32_t kMostSaved = static_cast<int32_t>(kMaxInt32 / kMaxForestRequests);

/// What a node that is taken counts for, by node_cost_beside_none(). Where everything is taken it may cost more than it
/// saves.
ATTN_HD int32_t bounded_saving(const NodeCost& cost) {
  return static_cast<int32_t>(clamp<int64_t>(cost.saved - cost.added, 0, kMostSaved));
}

/// A NodeReason but for kForestSavesTooLittle. `depth_above`: taken nodes above it; `free_states`: row states that are
/// left.
ATTN_HD int32_t judge_node(const ScheduleConfig& config, const NodeCost& cost, int32_t depth_above, int32_t states,
                           int32_t free_states) {
  if (depth_above >= kMaxLevels - 1) return kNodeTooDeep;
  if (config.cascade != kCascadeAlways && cost.saved <= cost.added) return kNodeSavesTooLittle;
  return states > free_states ? kNodeHasNoRoom : kNodeTaken;
}

/// Decides on a node whose ancestors have been decided on, and writes it down, but for its row group. Returns what it
/// counts for in what the forest saves, at most kMostSaved, if it is taken, else 0.
ATTN_HD int32_t decide_node(const PlanParams& p, const Forest& f, int32_t n, int32_t free_states) {
  ForestEntry& node = f[n];
  const bool is_root = node.parent < 0;
  const ForestEntry& parent = f[is_root ? n : node.parent];
  const int32_t depth_above = is_root ? 0 : parent.taken_depth;
  node.begin = is_root
                   ? 0
                   : min_of(parent.covered,
                            node.pages);  // a node lies below its parent, unless metadata changed while it was planned
  const NodeCost cost = node_cost(p, node);
  const int32_t reason = judge_node(p.config, cost, depth_above, node_states(node.rows, node.begin), free_states);
  const bool taken = reason == kNodeTaken;
  p.schedule.nodes[n] = PrefixNode{node.leader, node.parent, node.begin, node.pages, node.requests,
                                   node.rows,   -1,          reason,     cost.saved, cost.added};
  node.taken = taken ? n : is_root ? -1 : parent.taken;
  node.taken_depth = depth_above + taken;
  node.covered = taken ? node.pages : node.begin;
  return taken ? bounded_saving(node_cost_beside_none(p, node)) : 0;
}

/// The forest is worth more than what using it costs. `saved`: the sum of bounded_saving() over all taken nodes.
ATTN_HD bool forest_pays(const ScheduleConfig& config, int32_t saved) {
  return config.cascade == kCascadeAlways || static_cast<int64_t>(saved) * config.num_kv_heads >= config.cascade_cost;
}

/// Takes back that node n was taken.
ATTN_HD void drop_node(const PlanParams& p, const Forest& f, int32_t n) {
  if (f[n].taken == n) p.schedule.nodes[n].reason = kForestSavesTooLittle;
  f[n].taken = -1;
}

/// The row group of a taken node. qo_begin, state_begin, here 0, and tile_begin are left to the caller. `table_begin`:
/// of request n.
ATTN_HD RowGroup node_group(const PlanParams& p, const Forest& f, int32_t n, int64_t table_begin) {
  const PageTable& table = p.levels[0].table;
  const int32_t begin = f[n].begin;
  RowGroup group;
  group.table_begin = table_begin + static_cast<int64_t>(begin) * table.entry_step;
  group.qo_begin = 0;
  group.qo_len = f[n].rows;
  group.kv_len = (f[n].pages - begin) * table.page_size;
  group.tile_begin = 0;
  group.level = 1;
  group.kind = choose_kind(p.config, packed_rows_of(p.config, f[n].rows));
  group.state_begin = 0;
  group.unused = 0;
  return group;
}

/// Cuts from the front of a request's own row group the pages that taken nodes read. state_begin, here 0, is left to
/// the caller.
ATTN_HD void cut_group(const PageTable& table, int32_t pages, RowGroup& group) {
  if (pages == 0) return;
  group.state_begin = 0;
  group.table_begin += static_cast<int64_t>(pages) * table.entry_step;
  group.kv_len = max_of(group.kv_len - pages * table.page_size,
                        0);  // no less than 0, unless metadata changed while it was planned
}

/// Puts a request's row number `index` into a taken node, as row `rank` of it.
ATTN_HD void link_node_row(const PlanParams& p, const Forest& f, int32_t n, int32_t request, int32_t index,
                           int32_t rank) {
  p.schedule.rows[f[n].row_begin + rank] = f[request].qo_begin + index;
  p.schedule.links[static_cast<int64_t>(f[n].taken_depth) * p.config.max_merge_rows + f[request].merge_begin + index] =
      RowLink{f[n].group, rank};
}

/// Links a row to its request's own row group, and to nothing where it is in fewer taken nodes than others. `depth`:
/// taken nodes that it is in.
ATTN_HD void link_own_row(const PlanParams& p, const Forest& f, int32_t request, int32_t index, int32_t depth,
                          int32_t num_links) {
  const int32_t merge_row = f[request].merge_begin + index;
  p.schedule.links[merge_row] = RowLink{request, index};
  for (int32_t link = depth + 1; link < num_links; ++link)
    p.schedule.links[static_cast<int64_t>(link) * p.config.max_merge_rows + merge_row] = RowLink{-1, 0};
}

}  // namespace attn
