// The part of a plan's steps (steps.h) that makes a prefix forest: from attachments to the row groups of taken nodes,
// and the links of their rows.
#pragma once

#include "planner/context.h"
#include "planner/forest.h"

namespace attn {

/// Shared memory of a forest.
struct ForestMemory {
  Forest forest;
  // Scratch. The nodes on the path of each leader, while they are found: element i is the path_key() of the deepest
  // node on the path of request i, element size + n that of the next node up from node n; -1: there is none.
  int32_t* path;   // [2 * size]
  int32_t* place;  // [size]: element of `path` that a request has come to; -1: it has found its node
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
  int32_t free_states = forest_states(c.p.config);
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
  if (!forest_pays(c.p.config, c.shared.saved)) {
    for_each<Threads>(f.size, [&](int32_t n) {
      if (f.is_node(n)) drop_node(c.p, f, n);
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
