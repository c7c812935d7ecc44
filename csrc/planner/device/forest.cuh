// The prefix forest on the device: the same result as planner/host/forest.cpp. The first CTA of the planner makes it
// from what the others find (prefix_search.cuh).
#pragma once

#include "planner/device/context.cuh"
#include "planner/device/prefix_search.cuh"
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

  __device__ __forceinline__ ForestMemory(char* memory, int32_t size) {
    forest.requests = reinterpret_cast<ForestRequest*>(memory);
    forest.nodes = reinterpret_cast<ForestNode*>(forest.requests + size);
    forest.size = size;
    path = reinterpret_cast<int32_t*>(forest.nodes + size);
    place = path + 2 * size;
    taken = place + size;
  }
};

/// Whether a request may attach there. If lengths changed between the reads of two CTAs, the two CTAs may contradict
/// each other.
__device__ __forceinline__ bool may_attach(const Forest& f, int32_t request, Attachment attachment) {
  return attachment.leader >= 0 && attachment.leader < request && attachment.pages > 0 &&
         attachment.pages <= min_of(f.requests[request].shareable, f.requests[attachment.leader].shareable);
}

/// Receives the attachments. Returns whether a forest exists: a request attaches, and no error occurred so far.
__device__ __forceinline__ bool receive_attachments(PlanContext& c, const Forest& f) {
  const uint32_t number = c.shared.launch;
  const uint64_t tag = launch_tag(number);
  const uint64_t deadline = ptx::global_timer() + ptx::kMaxWait;
  bool attaches = false;
  for_each(f.size, [&](int32_t i) {
    Attachment attachment;
    const bool has_arrived = receive_attachment(c.p, tag, i, deadline, attachment);
    f.requests[i].leader = attachment.leader;
    f.requests[i].pages = attachment.pages;
    attaches |= attachment.leader >= 0;
    if (!has_arrived || (attachment.leader != -1 && !may_attach(f, i, attachment)))
      report(c.shared, kPrefixSearchFailed);
  });
  attaches = __syncthreads_or(attaches);
  if (thread_index() == 0) launch(c.p).advance(number, (c.shared.errors & kPrefixSearchFailed) == 0);
  return attaches && c.shared.errors == 0;
}

/// Finds the node where each request attaches, and the parents of nodes. Requests that attach to the same leader are on
/// one path; they go up along it until each has found its node. In a round every request offers itself to the place
/// that it has come to, at first the place of the path's deepest node. The request with the most pages names the node
/// there: requests with as many pages stay, all others go on to the place above.
__device__ __forceinline__ void find_nodes(const ForestMemory& m) {
  const Forest& f = m.forest;
  for_each(f.size, [&](int32_t i) {
    m.path[i] = m.path[f.size + i] = f.requests[i].node = -1;
    m.place[i] = f.requests[i].leader;
  });
  bool more;
  do {
    __syncthreads();
    for_each(f.size, [&](int32_t i) {
      if (m.place[i] >= 0) atomicMax(&m.path[m.place[i]], path_key(i, f.requests[i].pages));
    });
    __syncthreads();
    more = false;
    for_each(f.size, [&](int32_t i) {
      if (m.place[i] < 0) return;
      const int32_t found = m.path[m.place[i]];
      const bool is_own = pages_of(found) == f.requests[i].pages;
      if (is_own) f.requests[i].node = request_of(found);
      m.place[i] = is_own ? -1 : f.size + request_of(found);
      more |= !is_own;
    });
  } while (__syncthreads_or(more));
  for_each(f.size, [&](int32_t i) {
    const int32_t deepest = m.path[i];
    f.requests[i].innermost = deepest >= 0 ? request_of(deepest) : f.requests[i].node;
    const int32_t above = m.path[f.size + i];
    f.nodes[i] = ForestNode{};
    f.nodes[i].pages = f.requests[i].pages;
    f.nodes[i].parent = above >= 0 ? request_of(above) : f.is_node(i) ? f.requests[f.requests[i].leader].node : -1;
  });
  __syncthreads();
}

/// Adds up the rows and costs of nodes.
__device__ __forceinline__ void add_up_nodes(PlanContext& c, const Forest& f) {
  for_each_together(f.size, [&](int32_t i) {
    const bool exists = i < f.size;
    int32_t n = exists ? f.requests[i].innermost : -1;
    const int32_t rows = exists ? f.requests[i].qo_len : 0;
    add_to_node(f.nodes, n, &ForestNode::weight, rows_cost(c.p.config, rows, false).kv_tile);
    add_to_node(f.nodes, n, &ForestNode::direct_rows, rows);
#pragma unroll 1
    for (; __any_sync(ptx::kAllLanes, n >= 0); n = n >= 0 ? f.nodes[n].parent : -1) {
      add_to_node(f.nodes, n, &ForestNode::rows, rows);
      add_to_node(f.nodes, n, &ForestNode::num_requests, 1);
    }
    int32_t depth = 0;
#pragma unroll 1
    for (int32_t at = exists && f.is_node(i) ? i : -1; at >= 0; at = f.nodes[at].parent) ++depth;
    if (depth > 0) f.nodes[i].depth = depth;
    shared_max(&c.shared.max_depth, depth);
  });
  __syncthreads();
  for_each(f.size, [&](int32_t n) {
    if (!f.is_node(n)) return;
    const ForestNode& node = f.nodes[n];
    if (node.parent >= 0) atomicAdd(&f.nodes[node.parent].weight, rows_cost(c.p.config, node.rows, true).kv_tile);
    atomicAdd(&c.shared.states, node_states(node.rows, node.depth - 1));
  });
  __syncthreads();
}

/// Decides which nodes are taken, those at the roots first.
__device__ __forceinline__ void decide(PlanContext& c, const Forest& f) {
  int32_t free_states = forest_states(c.p.config);
  // Where there is no room for all nodes they compete for it: one thread decides on them in the order of the host.
  const bool compete = c.shared.states > free_states;
  const int32_t first = compete && thread_index() > 0 ? f.size : thread_index();
  const int32_t step = compete ? 1 : kPlanThreads;
#pragma unroll 1
  for (int32_t depth = 1; depth <= c.shared.max_depth; ++depth) {
#pragma unroll 1
    for (int32_t n = first; n < f.size; n += step) {
      if (!f.is_node(n) || f.nodes[n].depth != depth) continue;
      const int32_t saved = decide_node(c.p, f, n, free_states);
      if (f.nodes[n].taken != n) continue;
      if (compete) free_states -= node_states(f.nodes[n].rows, f.nodes[n].begin);
      atomicAdd(&c.shared.saved, saved);
    }
    __syncthreads();
  }
  if (!forest_pays(c.p.config, c.shared.saved)) {
    for_each(f.size, [&](int32_t n) {
      if (f.is_node(n)) drop_node(c.p, f, n);
    });
    __syncthreads();
  }
}

/// Gives the taken nodes row groups after the requests' row groups, and cuts their pages from the requests' row groups.
__device__ __forceinline__ void add_row_groups(PlanContext& c, const ForestMemory& m) {
  const Forest& f = m.forest;
  enum Sum { kMergeRows, kGroups, kNodeRows };
  int32_t totals[] = {0, f.size, 0};
  for_each_together(f.size, [&](int32_t i) {
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
    shared_max(&c.shared.max_taken_depth, taken_depth);
    running_sums(c.shared, values, totals);
    if (i < f.size) f.requests[i].merge_begin = f.requests[i].top >= 0 ? values[kMergeRows] : -1;
    if (!is_taken) return;
    f.nodes[i].group = c.p.schedule.nodes[i].group = values[kGroups];
    f.nodes[i].row_begin = values[kNodeRows];
    m.taken[values[kGroups] - f.size] = i;
  });
  c.planned.num_merge_rows = totals[kMergeRows];
  c.planned.num_groups = totals[kGroups];
  __syncthreads();
  if (c.shared.max_taken_depth > 0) c.planned.num_links = c.shared.max_taken_depth + 1;
  for_each(f.size, [&](int32_t i) { make_groups(c.p, f, i, c.planned.num_merge_rows); });
}

/// Links rows to the row groups that they are in: first to their requests' row groups, then, a warp a node, to the row
/// groups of taken nodes. A node's rows are in the order of its requests.
__device__ __forceinline__ void link_forest(const PlanContext& c, const ForestMemory& m) {
  const Forest& f = m.forest;
  if (c.planned.num_merge_rows == 0) return;
  for_each(f.size, [&](int32_t i) { link_own_rows(c.p, f, i, c.planned.num_links); });
  // Starts with the last warp: the first ones have other things to write.
#pragma unroll 1
  for (int32_t number = kPlanWarps - 1 - warp_index(); number < c.planned.num_groups - f.size; number += kPlanWarps) {
    const int32_t n = m.taken[number];
    int32_t num_rows = 0;  // so far
#pragma unroll 1
    for (int32_t first = 0; first < f.size; first += 32) {
      const int32_t i = first + lane_index();
      const bool is_member = i < f.size && f.taken_at(i, f.nodes[n].taken_depth) == n;
      if (!__any_sync(ptx::kAllLanes, is_member)) continue;
      const int32_t own_rows = is_member ? f.requests[i].qo_len : 0;
      const int32_t up_to_lane = num_rows + ptx::warp_inclusive_sum(own_rows, lane_index());
#pragma unroll 1
      for (int32_t row = 0; row < own_rows; ++row) link_node_row(c.p, f, n, i, row, up_to_lane - own_rows + row);
      num_rows = __shfl_sync(ptx::kAllLanes, up_to_lane, 31);
    }
  }
}

/// Seeks shared prefixes among the requests whose row groups are written, cuts what is taken from those, and adds the
/// row groups of the taken nodes.
__device__ __forceinline__ void add_forest(PlanContext& c, const ForestMemory& m) {
  const Forest& f = m.forest;
  if (thread_index() == 0) c.shared.launch = launch(c.p).open(launch(c.p).read());
  for_each(f.size, [&](int32_t i) {
    const RowGroup& group = c.p.schedule.groups[i];
    f.requests[i].qo_begin = group.qo_begin;
    f.requests[i].qo_len = group.qo_len;
    f.requests[i].shareable = shareable_pages(c.p, group);  // at most: the other CTAs look at the pages
    c.p.schedule.nodes[i].leader = -1;
  });
  __syncthreads();
  if (!receive_attachments(c, f)) return;
  find_nodes(m);
  add_up_nodes(c, f);
  decide(c, f);
  add_row_groups(c, m);
}

}  // namespace attn
