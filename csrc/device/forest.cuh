// The prefix forest on the device: the same result as host/forest.cpp. The first CTA of the planner makes it from what the others find (prefix_search.cuh); where no
// two requests have the same first page, which it sees for itself, it waits for nobody.
//
// All of this is short code that runs once, so its time is that of memory, barriers and fetched instructions: as many warps take part as there are requests for, and
// steps that most batches can do without are left out when nobody needs them.
#pragma once

#include "attn/forest.h"
#include "attn/planning.h"
#include "device/plan_threads.cuh"
#include "device/prefix_search.cuh"

namespace attn {

/// Groups keys that are at least 0: the smallest number that was inserted with a key.
struct SmallestOfKey {
  static constexpr int32_t kEmpty = -1;
  int32_t* keys;        // [slots]
  uint32_t* smallest;   // [slots], behind the keys
  int32_t slots;        // a power of two, at least twice the number of keys

  __device__ __forceinline__ void clear(const PlanTeam& team) const {
    team.for_each(slots / 2, [&](int32_t i) { reinterpret_cast<int4*>(keys)[i] = int4{kEmpty, kEmpty, kEmpty, kEmpty}; });
  }

  /// Returns the key's slot; for a key below 0: -1. For whole warps, whose numbers increase: if all have the same key, the first one inserts for all.
  __device__ __forceinline__ int32_t insert(int32_t key, int32_t number) const {
    int same;
    __match_all_sync(0xffffffffu, key, &same);
    int32_t slot = -1;
    if (key >= 0 && (!same || threadIdx.x % 32 == 0)) {
      slot = static_cast<int32_t>((static_cast<uint32_t>(key) * 2654435761u) >> 12) & (slots - 1);
#pragma unroll 1
      for (;; slot = (slot + 1) & (slots - 1)) {
        const int32_t was = atomicCAS(keys + slot, kEmpty, key);
        if (was == kEmpty || was == key) break;
      }
      atomicMin(smallest + slot, static_cast<uint32_t>(number));
    }
    return same ? __shfl_sync(0xffffffffu, slot, 0) : slot;
  }
};

/// Dynamic shared memory of the forest.
struct ForestMemory {
  SmallestOfKey groups;
  int64_t* table_begin;   // [requests]
  Forest forest;
  int32_t* first_entry;   // [requests]: of the page table
  int32_t* newest;        // [leaders]: a node on the leader's path; -1: none
  int32_t* next;          // [nodes]: another one on the same path; -1: none
  int32_t* top;           // [requests]: the deepest taken node that a request is in; -1: none
  int32_t* taken;         // the taken nodes in order

  __device__ ForestMemory(char* memory, int32_t requests)
      : groups{reinterpret_cast<int32_t*>(memory), nullptr, forest_hash_slots(requests)},
        table_begin(reinterpret_cast<int64_t*>(memory + 8 * groups.slots)),
        forest(reinterpret_cast<int32_t*>(table_begin + requests), requests) {
    groups.smallest = reinterpret_cast<uint32_t*>(groups.keys + groups.slots);
    first_entry = forest.leader + Forest::kArrays * requests;
    newest = first_entry + requests;
    next = newest + requests;
    top = next + requests;
    taken = top + requests;
  }

  __device__ PlannedRequests requests() const { return PlannedRequests{table_begin, forest.qo_begin, forest.qo_len, forest.kv_len, forest.pages, first_entry}; }
};

struct ForestShared {
  SumMemory sums;
  unsigned long long saved;
  int32_t states;            // that taking every node would need
  int32_t max_depth;
  int32_t max_taken_depth;   // 0: no node was taken
};

/// Finds out which requests share a first page, and receives where those attach. Returns whether there is a forest to be made of it. `errors`: of this thread.
__device__ __forceinline__ bool receive_attachments(const PlanParams& p, const ForestMemory& m, ForestShared& shared, const PlanTeam& team, uint32_t& errors) {
  const Forest& f = m.forest;
  if (threadIdx.x == 0) {
    shared.saved = 0;
    shared.states = shared.max_taken_depth = 0;
    shared.max_depth = 1;
  }
  m.groups.clear(team);
  read_requests(p, team, m.requests(), f.size, errors);
  const bool wrong = team.sync_or(errors != 0);
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i - static_cast<int32_t>(threadIdx.x) < f.size; i += team.count) {
    const int32_t slot = m.groups.insert(i < f.size && f.pages[i] > 0 ? m.first_entry[i] : -1, i);
    if (i < f.size) f.node[i] = slot;
  }
  team.sync();
  bool shares = false;
  team.for_each(f.size, [&](int32_t i) {
    const bool attaches = f.node[i] >= 0 && m.groups.smallest[f.node[i]] != static_cast<uint32_t>(i);
    f.leader[i] = attaches ? 0 : -1;
    shares |= attaches;
  });
  if (!team.sync_or(shares)) return false;
  m.groups.clear(team);
  team.for_each(f.size, [&](int32_t i) {
    if (f.leader[i] < 0) return;
    const Attachment attachment = AttachmentMail(p.schedule.attachments + i).receive();
    f.leader[i] = attachment.leader;
    f.pages[i] = attachment.pages;
  });
  team.sync();
  return !wrong;   // what is wrong is not shared; the mail had to be received all the same
}

/// What follows from the attachments: nodes, parents, sums.
__device__ __forceinline__ void find_nodes(const PlanParams& p, const ForestMemory& m, ForestShared& shared, const PlanTeam& team) {
  const Forest& f = m.forest;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll 1
  for (int32_t i = thread; i - thread < f.size; i += team.count) {
    const int32_t slot = m.groups.insert(i < f.size && f.leader[i] >= 0 ? f.pages[i] << Forest::kNodeBits | f.leader[i] : -1, i);
    if (i >= f.size) continue;
    f.node[i] = slot;
    f.deepest[i] = m.newest[i] = -1;
    f.depth[i] = f.rows[i] = f.requests[i] = f.weight[i] = 0;
  }
  team.sync();
  team.for_each(f.size, [&](int32_t i) {
    const int32_t node = f.node[i] >= 0 ? static_cast<int32_t>(m.groups.smallest[f.node[i]]) : -1;
    f.node[i] = node;
    if (node != i) {
      p.schedule.nodes[i].leader = -1;
      return;
    }
    m.next[i] = atomicExch(m.newest + f.leader[i], i);
    atomicMax(f.deepest + f.leader[i], f.deepest_key(i));
  });
  team.sync();
  bool deep = false;
#pragma unroll 1
  for (int32_t i = thread; i - thread < f.size; i += team.count) {
    if (i < f.size && f.is_node(i)) {
      int32_t parent = -1;
#pragma unroll 1
      for (int32_t other = m.newest[f.leader[i]]; other >= 0; other = m.next[other]) parent = closer_parent(f, i, other, parent);
      if (parent < 0) parent = f.node[f.leader[i]];
      f.parent[i] = parent;
      f.depth[i] = 1;
      deep |= parent >= 0;
    }
    // A warp whose requests are all in the same node adds them up.
    const int32_t innermost = i < f.size ? f.innermost(i) : -1;
    int32_t rows = innermost >= 0 ? f.qo_len[i] : 0;
    int32_t requests = innermost >= 0 ? 1 : 0;
    int32_t weight = innermost >= 0 ? kv_tile_cost_of_rows(p.config, rows) : 0;
    const int32_t all_rows = __reduce_add_sync(0xffffffffu, rows);
    if (thread % 32 == 0) atomicAdd(&shared.states, 2 * all_rows);
    int uniform;
    __match_all_sync(0xffffffffu, innermost, &uniform);
    if (uniform) {
      rows = all_rows;
      requests = __reduce_add_sync(0xffffffffu, requests);
      weight = __reduce_add_sync(0xffffffffu, weight);
    }
    if (innermost < 0 || (uniform && thread % 32 != 0)) continue;
    atomicAdd(f.rows + innermost, rows);
    atomicAdd(f.requests + innermost, requests);
    atomicAdd(f.weight + innermost, weight);
  }
  if (!team.sync_or(deep)) return;

  // Nodes below nodes: what was added to each so far are the requests that are in no deeper one. It is kept in `taken` and `group` while all is added to those above.
  team.for_each(f.size, [&](int32_t n) {
    f.taken[n] = f.rows[n];
    f.group[n] = f.requests[n];
  });
  team.sync();
  team.for_each(f.size, [&](int32_t n) {
    if (!f.is_node(n)) return;
    int32_t depth = 1;
#pragma unroll 1
    for (int32_t at = f.parent[n]; at >= 0; at = f.parent[at]) {
      atomicAdd(f.rows + at, f.taken[n]);
      atomicAdd(f.requests + at, f.group[n]);
      ++depth;
    }
    f.depth[n] = depth;
    atomicMax(&shared.max_depth, depth);
    atomicAdd(&shared.states, f.taken[n] * (depth - 1));
  });
  team.sync();
  team.for_each(f.size, [&](int32_t n) {
    if (f.depth[n] > 1) atomicAdd(f.weight + f.parent[n], kv_tile_cost_of_rows(p.config, f.rows[n]));
  });
  team.sync();
}

/// Decides which nodes are taken. Returns whether any is.
__device__ __forceinline__ bool decide(const PlanParams& p, const ForestMemory& m, ForestShared& shared, const PlanTeam& team) {
  const Forest& f = m.forest;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  int32_t room = forest_states(p.config);
  // Nodes compete for room: one after another, in the order of the host.
  const bool compete = shared.states > room;
#pragma unroll 1
  for (int32_t depth = 1; depth <= shared.max_depth; ++depth) {
#pragma unroll 1
    for (int32_t n = thread; n < f.size; n += compete ? 1 : team.count) {
      if (compete && thread != 0) break;
      if (f.depth[n] != depth) continue;
      const int64_t saved = decide_node(p, f, n, room);
      if (f.taken[n] != n) continue;
      if (compete) room -= node_states(f, n);
      atomicAdd(&shared.saved, static_cast<unsigned long long>(saved));
      atomicMax(&shared.max_taken_depth, f.taken_depth[n]);
    }
    team.sync();
  }
  if (shared.max_taken_depth == 0) return false;
  if (forest_pays(p.config, static_cast<int64_t>(shared.saved))) return true;
  team.for_each(f.size, [&](int32_t n) {
    if (f.is_node(n)) drop_node(p, f, n);
  });
  return false;
}

/// Numbers the taken nodes, their rows and the rows of their requests.
__device__ __forceinline__ void place_forest(const ForestMemory& m, ForestShared& shared, const PlanTeam& team, Planned& planned) {
  constexpr int kBits = 32;
  const Forest& f = m.forest;
  PlanSums before_all{0, 0};     // rows of requests in taken nodes, and above them rows of taken nodes; taken nodes
#pragma unroll 1
  for (int32_t first = 0; first < f.size; first += team.count) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const int32_t innermost = i < f.size ? f.innermost(i) : -1;
    const int32_t top = innermost >= 0 ? f.taken[innermost] : -1;
    const bool is_taken = i < f.size && f.is_node(i) && f.taken[i] == i;
    const PlanSums own{(top >= 0 ? f.qo_len[i] : 0) + (is_taken ? static_cast<int64_t>(f.rows[i]) << kBits : 0), is_taken};
    PlanSums total;
    bool any = false;
    if (first > 0) team.sync();
    const PlanSums before = before_all + sum_before(team, shared.sums, own, total, any);
    before_all = before_all + total;
    if (i < f.size) {
      m.top[i] = top;
      f.merge_begin[i] = top >= 0 ? static_cast<int32_t>(before.a) : -1;
    }
    if (is_taken) {
      f.row_begin[i] = static_cast<int32_t>(before.a >> kBits);
      f.group[i] = f.size + before.b;
      m.taken[before.b] = i;
    }
  }
  planned.num_groups += before_all.b;
  planned.num_merge_rows = static_cast<int32_t>(before_all.a);
  planned.num_links = shared.max_taken_depth + 1;
}

/// Everything but the links. Returns whether anything was taken.
__device__ __forceinline__ bool make_forest(const PlanParams& p, const ForestMemory& m, ForestShared& shared, const PlanTeam& team, Planned& planned, uint32_t& errors) {
  planned.num_requests = m.forest.size;
  if (!receive_attachments(p, m, shared, team, errors)) {
    team.for_each(m.forest.size, [&](int32_t i) { p.schedule.nodes[i].leader = -1; });
    return false;
  }
  find_nodes(p, m, shared, team);
  if (!decide(p, m, shared, team)) return false;
  place_forest(m, shared, team, planned);
  return true;
}

/// Links the rows of a taken node, which are in the order of its requests; a warp's work.
__device__ __forceinline__ void link_node_rows(const PlanParams& p, const ForestMemory& m, int32_t node) {
  const Forest& f = m.forest;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t depth = f.taken_depth[node];
  int32_t rank = 0;      // of the next row
#pragma unroll 1
  for (int32_t first = 0; rank < f.rows[node] && first < f.size; first += 32) {
    const int32_t request = first + lane;
    int32_t at = request < f.size ? m.top[request] : -1;
#pragma unroll 1
    while (at >= 0 && f.taken_depth[at] > depth) at = f.taken_above(at);
    const int32_t rows = at == node ? f.qo_len[request] : 0;
    const uint32_t members = __ballot_sync(0xffffffffu, rows > 0);
    if (__all_sync(0xffffffffu, rows <= 1)) {
      if (rows > 0) link_node_row(p, f, node, request, 0, rank + __popc(members & ((1u << lane) - 1)));
      rank += __popc(members);
      continue;
    }
    int32_t sum = rows;
#pragma unroll 1
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t below = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += below;
    }
#pragma unroll 1
    for (int32_t row = 0; row < rows; ++row) link_node_row(p, f, node, request, row, rank + sum - rows + row);
    rank += __shfl_sync(0xffffffffu, sum, 31);
  }
}

/// Links all rows of the forest: those of nodes, a warp a node, and those of requests. Warps from `first_warp` on do it.
__device__ __forceinline__ void link_forest(const PlanParams& p, const ForestMemory& m, const Planned& planned, int32_t first_warp) {
  const Forest& f = m.forest;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32 - first_warp;
  const int32_t warps = kPlanThreads / 32 - first_warp;
  if (warp < 0) return;
#pragma unroll 1
  for (int32_t i = f.size + warp; i < planned.num_groups; i += warps) link_node_rows(p, m, m.taken[i - f.size]);
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x) - 32 * first_warp; i < f.size; i += 32 * warps) {
#pragma unroll 1
    for (int32_t row = 0; f.merge_begin[i] >= 0 && row < f.qo_len[i]; ++row) link_own_row(p, f, i, row, planned.num_links);
  }
}

}  // namespace attn
