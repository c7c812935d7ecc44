// The prefix forest of a batch: which requests share leading pages, and which prefixes become row groups.
//
// Sharing is by physical page: equal entries of the page table. A request can share the leading pages all of whose
// tokens all of its rows see. It attaches to the request before it with which it shares most of them (the smallest, if
// there are several); a node of the forest is a pair (leader, pages) at which requests attach: the first `pages` pages
// of the leader, seen by the leader and by all that attach there or deeper on its path. Nodes on one leader's path are
// nested; the shallowest lies below the node at which the leader itself attaches. So parents follow from attachments
// alone, and every step below is a sum, a minimum or a maximum: the same in whatever order threads do it.
//
// A node that is taken becomes a row group: it has the rows of all its requests, and the pages that no taken ancestor
// reads. The pages of taken nodes are cut from the front of the requests' own row groups. A node that is not taken
// leaves its pages to the nodes and requests below it.
#pragma once

#include "common/math.h"
#include "planner/context.h"
#include "planner/params.h"
#include "planner/schedule.h"
#include "planner/work_list.h"

namespace attn {

/// Most requests of a batch in which a forest is sought.
constexpr int32_t kMaxForestRequests = 1024;

/// Most requests that one request is compared with, page by page: bounds the time of a plan. A forest found with fewer
/// comparisons than it has branches on a path is right all the same, only not as deep.
constexpr int32_t kMaxComparisons = 16;

/// The most leading pages of two requests that are compared.
constexpr int32_t kMaxSharedPages = 1 << 20;

/// The most row states that a forest uses.
constexpr int32_t kMaxForestStates = 1 << 19;

/// How many leading pages a request can share, if begins_with_page().
ATTN_HD int32_t shareable_pages(const PlanParams& p, const RowGroup& group) {
  const ScheduleConfig& config = p.config;
  const PlanLevel& level = p.levels[0];
  if (group.qo_len == 0) return 0;
  // Full row tiles read no less KV when they are shared; their states would only take the room of rows that gain.
  if (config.cascade != kCascadeAlways &&
      static_cast<int64_t>(group.qo_len) * config.group_size >= tile_rows(config.max_kind))
    return 0;
  // A window that hides the first token from the last row.
  if (level.visibility.window_left >= 0 && group.kv_len - 1 > level.visibility.window_left) return 0;
  const int32_t seen = level.visibility.causal ? group.kv_len - group.qo_len + 1 : group.kv_len;
  return min_of(p.page_size.divide(max_of(seen, 0)), kMaxSharedPages);
}

/// Whether a request's first entry is a page. (A request without pages may read another's, which its length then
/// hides.)
ATTN_HD bool begins_with_page(const PageTable& table, const RowGroup& group) {
  return group.table_begin < table.num_entries && table.indices[group.table_begin] >= 0;
}

/// A request as the forest sees it. (The size of this struct and of the next is an odd number of words: no two of 32
/// neighbors begin in the same bank of shared memory.)
struct ForestRequest {
  int32_t qo_begin;  // RowGroup
  int32_t qo_len;
  int32_t shareable;  // leading pages that it can share
  int32_t leader;     // Attachment
  int32_t pages;
  int32_t node;         // where it attaches; -1: nowhere
  int32_t innermost;    // the deepest node that it is in: on its own path if others attach there, else `node`
  int32_t top;          // the deepest taken node that it is in; -1: none
  int32_t merge_begin;  // first of its rows among the rows to be merged; -1: none of its nodes was taken
};
static_assert(sizeof(ForestRequest) / sizeof(int32_t) % 2 == 1, "an odd number of words");

/// A node, which has the number of the smallest request that attaches there.
struct ForestNode {
  int32_t pages;        // of its leader, from the first on
  int32_t parent;       // -1: none
  int32_t depth;        // nodes on the path from the root to it
  int32_t rows;         // of all its requests
  int32_t direct_rows;  // of those that are in no deeper node
  int32_t num_requests;
  int32_t weight;  // cost of a KV tile if its children read it: the sum over child nodes and over requests that are
                   // in no deeper node
  int32_t begin;   // pages that taken nodes above it read
  int32_t taken;   // it or the nearest ancestor that was taken; -1: none
  int32_t taken_depth;  // taken nodes on the path from the root to it
  int32_t covered;      // pages that it and those above it read, as far as they are taken
  int32_t group;        // of a taken node: its row group
  int32_t row_begin;    // of a taken node: its first row in the row list
};
static_assert(sizeof(ForestNode) / sizeof(int32_t) % 2 == 1, "an odd number of words");

struct Forest {
  ForestRequest* requests;
  ForestNode* nodes;
  int32_t size;  // requests; there are as many places for nodes

  ATTN_HD bool is_node(int32_t n) const { return requests[n].node == n; }

  ATTN_HD int32_t taken_above(int32_t n) const { return nodes[n].parent >= 0 ? nodes[nodes[n].parent].taken : -1; }

  /// The taken node of a request with `depth` taken nodes on the path from the root to it; -1: there is none.
  ATTN_HD int32_t taken_at(int32_t request, int32_t depth) const {
    int32_t n = requests[request].top;
    while (n >= 0 && nodes[n].taken_depth > depth) n = taken_above(n);
    return n >= 0 && nodes[n].taken_depth == depth ? n : -1;
  }
};

/// A request and a number of pages as one number: the largest number has the most pages and, at equal pages, the
/// smallest request. So a maximum finds the deepest node of a path.
constexpr int32_t kRequestBits = 10;
static_assert(kMaxForestRequests == 1 << kRequestBits &&
                  static_cast<int64_t>(kMaxSharedPages) << kRequestBits <= int64_t{1} << 30,
              "path_key() fits into an int32");
ATTN_HD int32_t path_key(int32_t request, int32_t pages) {
  return pages << kRequestBits | (kMaxForestRequests - 1 - request);
}
ATTN_HD int32_t request_of(int32_t path_key) { return kMaxForestRequests - 1 - (path_key & (kMaxForestRequests - 1)); }
ATTN_HD int32_t pages_of(int32_t path_key) { return path_key >> kRequestBits; }

/// Shared memory that the device planner needs for a forest, in bytes: the arrays above, and four words of scratch
/// (ForestMemory).
ATTN_HD constexpr int32_t forest_shared_bytes(int32_t num_requests) {
  const int32_t request_bytes = sizeof(ForestRequest) + sizeof(ForestNode) + 4 * sizeof(int32_t);
  return round_up(num_requests * request_bytes, 16);
}

/// Dynamic shared memory of the device planner: what every plan needs, the forest, and the first row tile of each row
/// group.
constexpr int32_t plan_shared_bytes(int32_t num_groups, int32_t num_requests) {
  return kPlanSharedBytes + forest_shared_bytes(num_requests) + num_groups * static_cast<int32_t>(sizeof(int32_t));
}
constexpr int32_t plan_forest_shared_bytes(int32_t num_requests) {
  return plan_shared_bytes(2 * num_requests, num_requests);
}

/// The cost of all row tiles of a row group, for each KV head.
struct RowsCost {
  int32_t kv_tile;  // for each KV tile
  int32_t pairs;    // beside them
};

/// The cost of a row group of `rows` rows. `is_node`: they leave states.
ATTN_HD RowsCost rows_cost(const ScheduleConfig& config, int32_t rows, bool is_node) {
  const int32_t packed_rows = packed_rows_of(config, rows);
  const int32_t kind = choose_kind(config, packed_rows);
  const int32_t tiles = row_tiles_of(packed_rows, kind);
  const int32_t cost = cost_kind(kind, is_node ? 0 : -1);
  return RowsCost{tiles * config.kv_tile_cost[cost], tiles * config.pair_cost[cost]};
}

/// Row states that are needed to take a node that reads its pages from `begin` on. The first taken node of a path makes
/// its rows' own groups keep states, too.
ATTN_HD int32_t node_states(int32_t rows, int32_t begin) { return rows * (begin == 0 ? 2 : 1); }

/// What taking a node saves and what it adds, for each KV head.
struct NodeCost {
  int64_t saved;
  int64_t added;
};

/// The cost of a node that saves `weight` for each KV tile. It adds row tiles, and `states` row states.
ATTN_HD NodeCost node_cost(const PlanParams& p, const ForestNode& node, int32_t weight, int32_t states) {
  const RowsCost rows = rows_cost(p.config, node.rows, true);
  const int32_t tokens = (node.pages - node.begin) * p.levels[0].table.page_size;
  const int32_t whole_kv_tiles = p.kv_tile.divide(tokens);
  const int32_t kv_tiles = whole_kv_tiles + (whole_kv_tiles * p.config.kv_tile < tokens);
  return NodeCost{static_cast<int64_t>(multiply(whole_kv_tiles, weight)),
                  rows.pairs + static_cast<int64_t>((multiply(states, p.config.state_cost) + 63) >> 6) +
                      static_cast<int64_t>(multiply(kv_tiles, rows.kv_tile))};
}

/// The cost of a node, compared with its children reading the pages themselves. Only the states of rows that are in no
/// deeper node count: the others leave two in any case, and the cost of a third was not measurable on a Hopper GPU
/// (ADR 11).
ATTN_HD NodeCost node_cost(const PlanParams& p, const ForestNode& node) {
  return node_cost(p, node, node.weight, node_states(node.direct_rows, node.begin));
}

/// The cost of a node, compared with each of its requests reading the pages for itself, with row tiles of the least
/// cost.
ATTN_HD NodeCost node_cost_beside_none(const PlanParams& p, const ForestNode& node) {
  const int32_t weight = max_of(node.weight, node.num_requests * p.config.kv_tile_cost[0]);
  return node_cost(p, node, weight, node_states(node.rows, node.begin));
}

/// The most that a node counts for in what a forest saves. It is far more than any forest must save, and small enough
/// that the sum over all nodes is an int32.
constexpr int32_t kMaxSaved = static_cast<int32_t>(kMaxInt32 / kMaxForestRequests);

/// Decides on a node whose ancestors have been decided on, and writes the decision down; its row group comes later.
/// `free_states`: row states that are left.
/// Returns the part of a taken node in what the forest saves, at most kMaxSaved. It is 0 if the node is not taken. It
/// is also 0 if the node costs more than it saves, which happens where all nodes are taken.
ATTN_HD int32_t decide_node(const PlanParams& p, const Forest& f, int32_t n, int32_t free_states) {
  ForestNode& node = f.nodes[n];
  const bool is_root = node.parent < 0;
  const ForestNode& parent = f.nodes[is_root ? n : node.parent];
  const int32_t depth_above = is_root ? 0 : parent.taken_depth;
  // A node lies below its parent, unless metadata changed while it was planned.
  node.begin = is_root ? 0 : min_of(parent.covered, node.pages);
  const NodeCost cost = node_cost(p, node);
  const int32_t reason = depth_above >= kMaxLevels - 1                                    ? kNodeTooDeep
                         : p.config.cascade != kCascadeAlways && cost.saved <= cost.added ? kNodeSavesTooLittle
                         : node_states(node.rows, node.begin) > free_states               ? kNodeHasNoRoom
                                                                                          : kNodeTaken;
  const bool taken = reason == kNodeTaken;
  p.schedule.nodes[n] =
      PrefixNode{f.requests[n].leader, node.parent, node.begin, node.pages, node.num_requests, node.rows, -1, reason,
                 cost.saved,           cost.added};
  node.taken = taken ? n : is_root ? -1 : parent.taken;
  node.taken_depth = depth_above + taken;
  node.covered = taken ? node.pages : node.begin;
  if (!taken) return 0;
  const NodeCost beside_none = node_cost_beside_none(p, node);
  return static_cast<int32_t>(clamp<int64_t>(beside_none.saved - beside_none.added, 0, kMaxSaved));
}

/// Cuts from the front of request i's row group the pages that taken nodes read, and writes the row group of node i, if
/// that is taken. Row lists and states of all requests come first, `num_own_states`, those of nodes after them.
/// tile_begin is left to the caller.
ATTN_HD void make_groups(const PlanParams& p, const Forest& f, int32_t i, int32_t num_own_states) {
  const PageTable& table = p.levels[0].table;
  const auto skip = [&](int32_t pages) { return static_cast<int64_t>(pages) * table.entry_step; };
  RowGroup group = p.schedule.groups[i];
  if (f.is_node(i) && f.nodes[i].taken == i) {
    const ForestNode& node = f.nodes[i];
    RowGroup node_group = group;
    node_group.table_begin += skip(node.begin);
    node_group.qo_begin = node.row_begin;
    node_group.qo_len = node.rows;
    node_group.kv_len = (node.pages - node.begin) * table.page_size;
    node_group.level = 1;
    node_group.kind = choose_kind(p.config, packed_rows_of(p.config, node.rows));
    node_group.state_begin = num_own_states + node.row_begin;
    node_group.kv_offset = node.begin * table.page_size;
    node_group.q_position = 0;
    node_group.request = -1;
    p.schedule.groups[node.group] = node_group;
  }
  const int32_t top = f.requests[i].top;
  if (top < 0) return;
  group.table_begin += skip(f.nodes[top].covered);
  // No less than 0, unless metadata changed while it was planned.
  group.kv_len = max_of(group.kv_len - f.nodes[top].covered * table.page_size, 0);
  group.state_begin = f.requests[i].merge_begin;
  group.kv_offset = f.nodes[top].covered * table.page_size;
  p.schedule.groups[i] = group;
}

/// Puts a request's row number `index` into a taken node, as row `rank` of it.
ATTN_HD void link_node_row(const PlanParams& p, const Forest& f, int32_t n, int32_t request, int32_t index,
                           int32_t rank) {
  const ForestNode& node = f.nodes[n];
  const int32_t merge_row = f.requests[request].merge_begin + index;
  p.schedule.rows[node.row_begin + rank] = f.requests[request].qo_begin + index;
  p.schedule.row_requests[node.row_begin + rank] = request;
  p.schedule.links[static_cast<int64_t>(node.taken_depth) * p.config.max_merge_rows + merge_row] =
      RowLink{node.group, rank};
}

/// Links the rows of a request that is in taken nodes to its own row group, and to nothing where it is in fewer of them
/// than others.
ATTN_HD void link_own_rows(const PlanParams& p, const Forest& f, int32_t request, int32_t num_links) {
  const ForestRequest& r = f.requests[request];
  for (int32_t index = 0; r.top >= 0 && index < r.qo_len; ++index) {
    p.schedule.links[r.merge_begin + index] = RowLink{request, index};
    for (int32_t link = f.nodes[r.top].taken_depth + 1; link < num_links; ++link)
      p.schedule.links[static_cast<int64_t>(link) * p.config.max_merge_rows + r.merge_begin + index] = RowLink{-1, 0};
  }
}

// ---- The steps, by the threads that plan: from attachments to the row groups of taken nodes, and their links ----

/// Shared memory of a forest.
struct ForestMemory {
  Forest forest;
  // Scratch, while nodes are found. `path` holds a path_key() or -1. Element i is the key of the deepest node on the
  // path of request i. Element size + n is the key of the parent of node n.
  int32_t* path;   // [2 * size]
  int32_t* place;  // [size]: the element of `path` that a request has reached. -1: the request has found its node
  int32_t* taken;  // [size]: the taken nodes, in the order of their row groups

  ATTN_STEP ForestMemory(char* memory, int32_t size) {
    forest.requests = reinterpret_cast<ForestRequest*>(memory);
    forest.nodes = reinterpret_cast<ForestNode*>(forest.requests + size);
    forest.size = size;
    path = reinterpret_cast<int32_t*>(forest.nodes + size);
    place = path + 2 * size;
    taken = place + size;
  }
};

/// Finds the node where each request attaches, and the parents of nodes. Requests that attach to the same leader are on
/// one path; they go up along it until each has found its node. In a round every request offers itself to the place
/// that it has come to, at first the place of the path's deepest node. The request with the most pages names the node
/// there: requests with as many pages stay, all others go on to the place above.
template <class Threads>
ATTN_STEP void find_nodes(const ForestMemory& m) {
  const Forest& f = m.forest;
  for_each<Threads>(f.size, [&](int32_t i) {
    m.path[i] = m.path[f.size + i] = f.requests[i].node = -1;
    m.place[i] = f.requests[i].leader;
  });
  bool more;
  do {
    Threads::sync();
    for_each<Threads>(f.size, [&](int32_t i) {
      if (m.place[i] >= 0) Threads::raise(m.path[m.place[i]], path_key(i, f.requests[i].pages));
    });
    Threads::sync();
    more = false;
    for_each<Threads>(f.size, [&](int32_t i) {
      if (m.place[i] < 0) return;
      const int32_t found = m.path[m.place[i]];
      const bool is_own = pages_of(found) == f.requests[i].pages;
      if (is_own) f.requests[i].node = request_of(found);
      m.place[i] = is_own ? -1 : f.size + request_of(found);
      more |= !is_own;
    });
  } while (Threads::any(more));
  for_each<Threads>(f.size, [&](int32_t i) {
    const int32_t deepest = m.path[i];
    f.requests[i].innermost = deepest >= 0 ? request_of(deepest) : f.requests[i].node;
    const int32_t above = m.path[f.size + i];
    f.nodes[i] = ForestNode{};
    f.nodes[i].pages = f.requests[i].pages;
    f.nodes[i].parent = above >= 0 ? request_of(above) : f.is_node(i) ? f.requests[f.requests[i].leader].node : -1;
  });
  Threads::sync();
}

/// Adds up the rows and costs of nodes.
template <class Threads>
ATTN_STEP void add_up_nodes(PlanContext<Threads>& c, const Forest& f) {
  for_each_together<Threads>(f.size, [&](int32_t i) {
    const bool exists = i < f.size;
    int32_t n = exists ? f.requests[i].innermost : -1;
    const int32_t rows = exists ? f.requests[i].qo_len : 0;
    Threads::add_to_node(f.nodes, n, &ForestNode::weight, rows_cost(c.p.config, rows, false).kv_tile);
    Threads::add_to_node(f.nodes, n, &ForestNode::direct_rows, rows);
#pragma unroll 1
    for (; Threads::any_of_warp(n >= 0); n = n >= 0 ? f.nodes[n].parent : -1) {
      Threads::add_to_node(f.nodes, n, &ForestNode::rows, rows);
      Threads::add_to_node(f.nodes, n, &ForestNode::num_requests, 1);
    }
    int32_t depth = 0;
#pragma unroll 1
    for (int32_t at = exists && f.is_node(i) ? i : -1; at >= 0; at = f.nodes[at].parent) ++depth;
    if (depth > 0) f.nodes[i].depth = depth;
    Threads::raise_by_warp(c.shared.max_depth, depth);
  });
  Threads::sync();
  for_each<Threads>(f.size, [&](int32_t n) {
    if (!f.is_node(n)) return;
    const ForestNode& node = f.nodes[n];
    if (node.parent >= 0) Threads::add(f.nodes[node.parent].weight, rows_cost(c.p.config, node.rows, true).kv_tile);
    Threads::add(c.shared.states, node_states(node.rows, node.depth - 1));
  });
  Threads::sync();
}

/// Decides which nodes are taken, those at the roots first.
template <class Threads>
ATTN_STEP void decide(PlanContext<Threads>& c, const Forest& f) {
  int32_t free_states = min_of(c.p.config.max_states, kMaxForestStates);
  // Where there is no room for all nodes they compete for it: one thread decides on them in the order of the host.
  const bool compete = c.shared.states > free_states;
  const int32_t first = compete && Threads::thread() > 0 ? f.size : Threads::thread();
  const int32_t step = compete ? 1 : Threads::kCount;
#pragma unroll 1
  for (int32_t depth = 1; depth <= c.shared.max_depth; ++depth) {
#pragma unroll 1
    for (int32_t n = first; n < f.size; n += step) {
      if (!f.is_node(n) || f.nodes[n].depth != depth) continue;
      const int32_t saved = decide_node(c.p, f, n, free_states);
      if (f.nodes[n].taken != n) continue;
      if (compete) free_states -= node_states(f.nodes[n].rows, f.nodes[n].begin);
      Threads::add(c.shared.saved, saved);
    }
    Threads::sync();
  }
  // A forest that saves no more than what using it costs is dropped.
  const ScheduleConfig& config = c.p.config;
  if (config.cascade != kCascadeAlways &&
      static_cast<int64_t>(c.shared.saved) * config.num_kv_heads < config.cascade_cost) {
    for_each<Threads>(f.size, [&](int32_t n) {
      if (!f.is_node(n)) return;
      if (f.nodes[n].taken == n) c.p.schedule.nodes[n].reason = kForestSavesTooLittle;
      f.nodes[n].taken = -1;
    });
    Threads::sync();
  }
}

/// Gives the taken nodes row groups after the requests' row groups, and cuts their pages from the requests' row groups.
template <class Threads>
ATTN_STEP void add_row_groups(PlanContext<Threads>& c, const ForestMemory& m) {
  const Forest& f = m.forest;
  enum Sum { kMergeRows, kGroups, kNodeRows };
  int32_t totals[] = {0, f.size, 0};
  for_each_together<Threads>(f.size, [&](int32_t i) {
    bool is_taken = false;
    int32_t taken_depth = 0;
    int32_t values[] = {0, 0, 0};
    if (i < f.size) {
      ForestRequest& request = f.requests[i];
      is_taken = f.is_node(i) && f.nodes[i].taken == i;
      request.top = request.innermost >= 0 ? f.nodes[request.innermost].taken : -1;
      values[kMergeRows] = request.top >= 0 ? request.qo_len : 0;
      values[kGroups] = is_taken;
      values[kNodeRows] = is_taken ? f.nodes[i].rows : 0;
      if (request.top >= 0) taken_depth = f.nodes[request.top].taken_depth;
    }
    Threads::raise_by_warp(c.shared.max_taken_depth, taken_depth);
    Threads::running_sums(c.shared, values, totals);
    if (i < f.size) f.requests[i].merge_begin = f.requests[i].top >= 0 ? values[kMergeRows] : -1;
    if (!is_taken) return;
    f.nodes[i].group = c.p.schedule.nodes[i].group = values[kGroups];
    f.nodes[i].row_begin = values[kNodeRows];
    m.taken[values[kGroups] - f.size] = i;
  });
  c.planned.num_merge_rows = totals[kMergeRows];
  c.planned.num_groups = totals[kGroups];
  Threads::sync();
  if (c.shared.max_taken_depth > 0) c.planned.num_links = c.shared.max_taken_depth + 1;
  for_each<Threads>(f.size, [&](int32_t i) { make_groups(c.p, f, i, c.planned.num_merge_rows); });
}

/// Links rows to the row groups that they are in: first to their requests' row groups, then, a warp a node, to the row
/// groups of taken nodes. A node's rows are in the order of its requests.
template <class Threads>
ATTN_STEP void link_forest(const PlanContext<Threads>& c, const ForestMemory& m) {
  const Forest& f = m.forest;
  if (c.planned.num_merge_rows == 0) return;
  for_each<Threads>(f.size, [&](int32_t i) { link_own_rows(c.p, f, i, c.planned.num_links); });
  // Starts with the last warp: the first ones have other things to write.
#pragma unroll 1
  for (int32_t number = Threads::kWarps - 1 - Threads::warp(); number < c.planned.num_groups - f.size;
       number += Threads::kWarps) {
    const int32_t n = m.taken[number];
    int32_t num_rows = 0;  // so far
#pragma unroll 1
    for (int32_t first = 0; first < f.size; first += Threads::kLanes) {
      const int32_t i = first + Threads::lane();
      const bool is_member = i < f.size && f.taken_at(i, f.nodes[n].taken_depth) == n;
      if (!Threads::any_of_warp(is_member)) continue;
      const int32_t own_rows = is_member ? f.requests[i].qo_len : 0;
      const int32_t rank = Threads::running_sum_of_warp(own_rows, num_rows);
#pragma unroll 1
      for (int32_t row = 0; row < own_rows; ++row) link_node_row(c.p, f, n, i, row, rank + row);
    }
  }
}

/// Seeks shared prefixes among the requests whose row groups are written, cuts what is taken from those, and adds the
/// row groups of the taken nodes.
template <class Threads>
ATTN_STEP void add_forest(PlanContext<Threads>& c, const ForestMemory& m) {
  const Forest& f = m.forest;
  Threads::begin_search(c);
  for_each<Threads>(f.size, [&](int32_t i) {
    const RowGroup& group = c.p.schedule.groups[i];
    f.requests[i].qo_begin = group.qo_begin;
    f.requests[i].qo_len = group.qo_len;
    f.requests[i].shareable = shareable_pages(c.p, group);  // at most: the search looks at the pages
    c.p.schedule.nodes[i].leader = -1;
  });
  Threads::sync();
  if (!Threads::find_attachments(c, f)) return;
  find_nodes<Threads>(m);
  add_up_nodes(c, f);
  decide(c, f);
  add_row_groups(c, m);
}

}  // namespace attn
