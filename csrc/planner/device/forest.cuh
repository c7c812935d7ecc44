// The prefix forest on the device: the same result as planner/host/forest.cpp. The first CTA of the planner makes it
// from what the others find (prefix_search.cuh); where no two requests have the same first page, which it sees for
// itself, it waits for nobody.
//
// All of this is short code that runs once, so its time is that of memory, barriers and instructions that wait for each
// other: as many warps take part as there are requests for, and steps that most batches can do without are left out
// when nobody needs them.
#pragma once

#include "common/ptx/shared_reduction.cuh"
#include "planner/cost_model.h"
#include "planner/device/plan_threads.cuh"
#include "planner/device/prefix_search.cuh"
#include "planner/forest.h"
#include "planner/schedule_writer.h"

namespace attn {

/// A forest of one node, as it is where one prefix is all that requests share. What does not depend on where they
/// attach is found out while they still wait for that, a thread a request.
struct OnlyNode {
  int32_t leader = -1;  // -1: there may be other nodes
  int32_t number = -1;  // of the node
  int32_t pages;
  int32_t rows;
  int32_t requests;
  int32_t weight;
  int32_t tile_cost;   // of its RowsCost
  int64_t fixed_cost;  // fixed_node_cost()
  NodeCost cost;
  int32_t reason;  // NodeReason
};

struct ForestShared {
  uint64_t launch;  // number of it
  SumMemory<int32_t> sums;
  OnlyNode only;
  int32_t search_failed;   // some request does not attach as it must
  int32_t saved;           // what the taken nodes save
  int32_t states;          // that taking every node would need
  int32_t weight;          // of OnlyNode, without its leader
  int32_t first_attached;  // smallest request that attaches
  int32_t first_leader;    // smallest and largest first request of the same first page, over all requests that attach
  int32_t last_leader;
  int32_t max_depth;
  int32_t max_taken_depth;  // 0: no node was taken
  int32_t last_taken;       // the largest number of a taken node
};

/// Marks a request that takes part in group_by_key().
constexpr int32_t kGrouped = -2;

/// Groups requests by their keys: `same`, kGrouped where a request takes part, receives a request of the same key, the
/// same one for all of that key; the `smallest` of that one, so far its own number, becomes the smallest of the group.
/// Nothing has to be cleared: whoever writes to a slot last wins it for its key, and who finds another key there tries
/// another slot. Returns whether any key is that of several requests.
__device__ __forceinline__ bool group_by_key(const ForestMemory& m, const PlanTeam& team) {
  const Forest& f = m.forest;
  const auto slot = [&](int32_t key, uint32_t factor) {
    return m.slots + (static_cast<uint32_t>(key) * factor >> (32 - m.slot_bits));
  };
  bool several = false;
  bool more;
  uint32_t factor = 2654435761u;
  do {
#pragma unroll 1
    for (int32_t i = team.thread(); i - team.thread() < f.size; i += team.count) {
      int32_t* own = i < f.size && f[i].same == kGrouped ? slot(f[i].key, factor) : nullptr;
      // Whole warps of one key, as behind one prefix, would otherwise queue at one slot.
      int same;
      __match_all_sync(0xffffffffu, own == nullptr ? -1 : static_cast<int32_t>(own - m.slots), &same);
      if (own != nullptr && (!same || i % 32 == 0)) atomicExch(own, i);
    }
    team.sync();
    more = false;
#pragma unroll 1
    for (int32_t i = team.thread(); i - team.thread() < f.size; i += team.count) {
      int32_t other = -1;  // that stands for the group
      if (i < f.size && f[i].same == kGrouped) {
        const int32_t winner = *slot(f[i].key, factor);
        const bool same = f[winner].key == f[i].key;
        if (same) f[i].same = winner;
        if (same && winner != i) other = winner;
        more |= !same;
      }
      if (!__any_sync(0xffffffffu, other >= 0)) continue;
      several = true;
      int same;
      __match_all_sync(0xffffffffu, other, &same);
      if (other >= 0 && (!same || i % 32 == 0)) ptx::shared_min(&f[other].smallest, i);
    }
    factor = factor * 1664525u + 2u;
    more = team.sync_or(more);
  } while (more);
  return several;
}

/// What the only node costs: all but its pages.
__device__ __forceinline__ void expect_costs(const PlanParams& p, OnlyNode& only) {
  const RowsCost cost = rows_cost(p.config, only.rows, true);
  only.tile_cost = cost.kv_tile;
  only.fixed_cost = fixed_node_cost(p.config, cost.pairs, 2 * only.rows);
}

/// What is known of the only node, if all that attach do so at the same one: everything but its pages. Numbers the rows
/// of its requests: merge_begin. Behind it all threads have seen what was written before.
__device__ __forceinline__ OnlyNode expect_only_node(const PlanParams& p, const ForestMemory& m, ForestShared& shared,
                                                     const PlanTeam& team) {
  const Forest& f = m.forest;
  const int32_t i = team.thread();
  const bool attaches = i < f.size && f[i].key != 0;
  const int32_t leader = attaches ? f[f[i].same].smallest : 0;
  const int32_t first_leader = __reduce_min_sync(0xffffffffu, attaches ? leader : f.size);
  const int32_t last_leader = __reduce_max_sync(0xffffffffu, attaches ? leader : -1);
  const int32_t weight = __reduce_add_sync(0xffffffffu, attaches ? rows_cost(p.config, f[i].qo_len, false).kv_tile : 0);
  const int32_t first_attached = __reduce_min_sync(0xffffffffu, attaches ? i : f.size);
  if (i % 32 == 0) {
    ptx::shared_min(&shared.first_attached, first_attached);
    ptx::shared_min(&shared.first_leader, first_leader);
    ptx::shared_max(&shared.last_leader, last_leader);
    ptx::shared_add(&shared.weight, weight);
  }
  PlanSums<int32_t> total;
  bool any = false;
  const PlanSums<int32_t> before =
      sum_before(team, shared.sums, f.size, PlanSums<int32_t>{attaches ? f[i].qo_len : 0, attaches}, total, any);
  OnlyNode only;
  if (shared.first_leader != shared.last_leader) return only;
  only.leader = shared.first_leader;
  only.number = shared.first_attached;
  only.rows = total.a + f[only.leader].qo_len;
  only.requests = total.b + 1;
  only.weight = shared.weight + rows_cost(p.config, f[only.leader].qo_len, false).kv_tile;
  expect_costs(p, only);
  if (i < f.size) f[i].merge_begin = attaches ? before.a + f[only.leader].qo_len : i == only.leader ? 0 : -1;
  return only;
}

/// Finds out which requests share a first page: `key` becomes whether a request attaches. Returns whether any does;
/// where anything is wrong, nothing is shared. `errors`: of this thread; `only`: receives the only node, if there is
/// but one.
__device__ __forceinline__ bool find_sharing(const PlanParams& p, const ForestMemory& m, ForestShared& shared,
                                             const PlanTeam& team, uint32_t& errors, OnlyNode& only) {
  const Forest& f = m.forest;
  const int32_t thread = team.thread();
  const uint64_t launch = thread == 0 ? read_launch(p) : 0;
  bool alone = f.size >= team.count;  // or not known to have the first page of request 0
  int32_t tile_cost = 0;
  team.for_each(f.size, [&](int32_t i) {
    alone |= !read_request<true>(p, m, i, errors);
    f[i].same = f[i].pages > 0 ? kGrouped : -1;
    f[i].smallest = i;
    f[i].tile_cost = tile_cost = rows_cost(p.config, f[i].qo_len, false).kv_tile;
  });
  const int32_t of_warp = sum_of_lanes(tile_cost);
  if (thread % 32 == 0) shared.sums.of_warp[thread / 32].a = of_warp;
  if (thread == 0) {
    shared.launch = launch;
    shared.search_failed = shared.saved = shared.states = shared.weight = shared.max_depth = shared.max_taken_depth = 0;
    shared.first_attached = shared.first_leader = f.size;
    shared.last_leader = shared.last_taken = -1;
  }
  if (!team.sync_or(alone || errors != 0)) {
    // All attach to request 0, and as nothing is wrong, rows are numbered already. No request has rows behind the last
    // one's, even if lengths change while they are read.
    const int32_t last = f.size - 1;
    only.leader = 0;
    only.number = 1;
    only.rows = f[last].qo_begin + f[last].qo_len;
    only.requests = f.size;
    only.weight = sum_of_lanes(thread % 32 < team.count / 32 ? shared.sums.of_warp[thread % 32].a : 0);
    expect_costs(p, only);
    if (thread < f.size) {
      f[thread].key = thread > 0;
      f[thread].merge_begin = min_of(f[thread].qo_begin, only.rows);
      f[thread].qo_len = clamp(only.rows - f[thread].qo_begin, 0, f[thread].qo_len);
    }
    return true;
  }
  if (!team.sync_or(group_by_key(m, team)) || team.sync_or(errors != 0)) return false;
  team.for_each(f.size, [&](int32_t i) { f[i].key = f[i].same >= 0 && f[f[i].same].smallest != i; });
  if (f.size < team.count)
    only = expect_only_node(p, m, shared, team);
  else
    team.sync();
  return true;
}

/// The row group that is this thread's if there is but one node: a request's, or behind them the node's. Its pages are
/// not known yet.
__device__ __forceinline__ RowGroup expect_group(const PlanParams& p, const ForestMemory& m, const OnlyNode& only,
                                                 int32_t i) {
  const Forest& f = m.forest;
  if (i > f.size) return RowGroup{};
  const bool is_node = i == f.size;
  const int32_t qo_len = is_node ? only.rows : f[i].qo_len;
  return RowGroup{m.table_begin[is_node ? only.number : i],
                  is_node ? 0 : f[i].qo_begin,
                  qo_len,
                  is_node ? 0 : f[i].kv_len,
                  0,
                  is_node,
                  choose_kind(p.config, packed_rows_of(p.config, qo_len)),
                  is_node ? only.rows : f[i].merge_begin,
                  0};
}

/// Whether request i attaches anywhere. It should: if it does not, the CTA that compared it has read other metadata, or
/// its word did not come.
__device__ __forceinline__ bool attaches(int32_t i, Attachment attachment) {
  return attachment.leader >= 0 && attachment.leader < i && attachment.pages > 0;
}

/// Receives where the only node ends, if first words are the last ones, decides on it, and cuts this thread's row
/// group. Whole warps: returns whether all requests of the warp attach there, as all others must; if not, nothing is
/// decided.
__device__ __forceinline__ bool receive_only_node(const PlanParams& p, const ForestMemory& m, uint64_t launch,
                                                  int32_t i, OnlyNode& only, RowGroup& group) {
  const Forest& f = m.forest;
  const int32_t request = i < f.size && f[i].key != 0 ? i : only.number;
  Attachment own, expected;
  AttachmentMail::wait_for_first(AttachmentMail(p.schedule.attachments + request, launch),
                                 AttachmentMail(p.schedule.attachments + only.number, launch), own, expected);
  const bool attaches_there = own.leader == only.leader && own.pages == expected.pages && attaches(request, own);
  if (!__all_sync(0xffffffffu, attaches_there)) return false;
  only.pages = expected.pages;
  only.cost = node_cost(p, only.pages, only.weight, only.tile_cost, only.fixed_cost);
  only.reason = judge_node(p.config, only.cost, 0, 2 * only.rows, forest_states(p.config));
  if (only.reason == kNodeTaken && !forest_pays(p.config, bounded_saving(only.cost)))
    only.reason = kForestSavesTooLittle;
  const int32_t tokens = only.pages * p.levels[0].table.page_size;
  if (only.reason != kNodeTaken) {
    group.state_begin = -1;
  } else if (i == f.size) {
    group.kv_len = tokens;
  } else if (group.state_begin >= 0) {
    group.table_begin += static_cast<int64_t>(only.pages) * p.levels[0].table.entry_step;
    group.kv_len = max_of(group.kv_len - tokens, 0);  // no less than 0, unless lengths changed while they were read
  }
  return true;
}

/// Returns whether the last word of request i says what the first did.
__device__ __forceinline__ bool confirm_only_node(const PlanParams& p, const ForestMemory& m,
                                                  const ForestShared& shared, int32_t i) {
  if (i >= m.forest.size || m.forest[i].key == 0) return true;
  const Attachment last = AttachmentMail(p.schedule.attachments + i, shared.launch).wait();
  return last.leader == shared.only.leader && last.pages == shared.only.pages;
}

/// Writes down the only node, and links its rows, if it is taken.
__device__ __forceinline__ void record_only_node(const PlanParams& p, const ForestMemory& m, const OnlyNode& only,
                                                 const PlanTeam& team) {
  const Forest& f = m.forest;
  const bool taken = only.reason == kNodeTaken;
  team.for_each(f.size, [&](int32_t i) {
    if (i == only.number)
      p.schedule.nodes[i] = PrefixNode{only.leader,
                                       -1,
                                       0,
                                       only.pages,
                                       only.requests,
                                       only.rows,
                                       taken ? f.size : -1,
                                       only.reason,
                                       only.cost.saved,
                                       only.cost.added};
    if (!taken || f[i].merge_begin < 0) return;
    // Lengths that change while they are read may leave rows between two requests, which then are in no group.
    const int32_t behind =
        i + 1 < f.size && f[i + 1].merge_begin >= 0 ? f[i + 1].merge_begin - f[i].merge_begin : f[i].qo_len;
#pragma unroll 1
    for (int32_t row = 0; row < max_of(f[i].qo_len, behind); ++row) {
      const int32_t merge_row = f[i].merge_begin + row;
      const bool exists = row < f[i].qo_len;
      p.schedule.rows[merge_row] = f[i].qo_begin + row;
      p.schedule.links[merge_row] = RowLink{exists ? i : -1, row};
      p.schedule.links[p.config.max_merge_rows + merge_row] = RowLink{exists ? f.size : -1, merge_row};
    }
  });
}

/// What nodes are before any is known: threads that have nothing else to do see to it while requests are read.
__device__ __forceinline__ void clear_nodes(const PlanParams& p, const Forest& f, const PlanTeam& team) {
  team.for_each(f.size, [&](int32_t n) {
    p.schedule.nodes[n].leader = -1;
    f[n].node = f[n].deepest = f[n].next = -1;
    f[n].shallowest = kMaxInt32;
    f[n].depth = f[n].rows = f[n].direct_rows = f[n].requests = f[n].weight = 0;
  });
}

/// A request on its way to its node. All requests of a leader's path say where they attach; those at the deepest node
/// have found theirs, the others say it to that node, and so on up. Those at the shallowest know theirs at once, and go
/// on only as long as others do.
struct Seeker {
  int32_t key;  // path_key(); -1: it has come to its node, or has none
  bool seeks;   // it does not know its node
  int32_t leader;
  int32_t passed;  // the last node that was not its own; -1: none so far
};

/// Receives where request i attaches, and says it. `failed`: receives whether it does not attach as it must.
__device__ __forceinline__ Seeker receive_attachment(const PlanParams& p, const Forest& f, uint64_t launch, int32_t i,
                                                     bool& failed) {
  if (i >= f.size || f[i].key == 0) return Seeker{-1, false, -1, -1};
  const Attachment own = AttachmentMail(p.schedule.attachments + i, launch).wait();
  if (!attaches(i, own)) {
    failed = true;
    return Seeker{-1, false, -1, -1};
  }
  f[i].leader = own.leader;
  f[i].pages = own.pages;
  const int32_t key = Forest::path_key(i, own.pages);
  ptx::shared_max(&f[own.leader].deepest, key);
  ptx::shared_min(&f[own.leader].shallowest, own.pages << Forest::kNodeBits | i);
  return Seeker{key, true, own.leader, -1};
}

/// Takes request i one step further, behind a barrier.
__device__ __forceinline__ void seek_node(const Forest& f, int32_t i, Seeker& seeker) {
  if (seeker.key < 0) return;
  const int32_t found = seeker.passed < 0 ? f[seeker.leader].deepest : f[seeker.passed].next;
  const int32_t shallowest = f[seeker.leader].shallowest;
  const int32_t pages = Forest::pages_of(seeker.key);
  const bool is_deepest = Forest::pages_of(found) == pages;
  if (is_deepest) {
    seeker.key = -1;
  } else {
    seeker.passed = Forest::node_of(found);
    ptx::shared_max(&f[seeker.passed].next, seeker.key);
  }
  if (seeker.seeks && (is_deepest || shallowest >> Forest::kNodeBits == pages)) {
    f[i].node = is_deepest ? Forest::node_of(found) : shallowest & (kMaxForestRequests - 1);
    seeker.seeks = false;
  }
}

/// Receives where requests attach, finds the nodes, and adds up what they hold. Returns false if some request does not
/// attach as it must: there are then no nodes.
__device__ __forceinline__ bool find_nodes(const PlanParams& p, const ForestMemory& m, ForestShared& shared,
                                           const PlanTeam& team) {
  static_assert(kMaxForestRequests <= 2 * kMaxPlanThreads, "a thread has no more than two requests");
  const Forest& f = m.forest;
  const int32_t first = team.thread();
  const int32_t second = first + team.count;
  bool failed = false;
  Seeker of_first = receive_attachment(p, f, shared.launch, first, failed);
  Seeker of_second = receive_attachment(p, f, shared.launch, second, failed);
  if (failed) shared.search_failed = 1;
  bool seeks = team.sync_or(of_first.seeks || of_second.seeks);
  if (shared.search_failed != 0) return false;
  while (seeks) {
    seek_node(f, first, of_first);
    seek_node(f, second, of_second);
    seeks = team.sync_or(of_first.seeks || of_second.seeks);
  }

  // Each request adds itself to all nodes that it is in, from the deepest up; where a warp comes to the same node, one
  // lane does for all.
  const int32_t lane = team.thread() % 32;
#pragma unroll 1
  for (int32_t i = team.thread(); i - team.thread() < f.size; i += team.count) {
    int32_t at = i < f.size ? f.innermost(i) : -1;
    const int32_t own = i < f.size ? f[i].node : -1;
    const int32_t rows = at >= 0 ? f[i].qo_len : 0;
    if (at >= 0) {
      ptx::shared_add(&f[at].weight, f[i].tile_cost);
      ptx::shared_add(&f[at].direct_rows, rows);
    }
    int32_t nodes = 0;      // on the path so far
    int32_t below_own = 0;  // of them
#pragma unroll 1
    while (true) {
      const int32_t most = __reduce_max_sync(0xffffffffu, at);
      const uint32_t least = __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(at));
      if (most < 0) break;
      if (least == static_cast<uint32_t>(most)) {  // of those that have come to any
        const int32_t all_rows = sum_of_lanes(at >= 0 ? rows : 0);
        const int32_t requests = __popc(__ballot_sync(0xffffffffu, at >= 0));
        if (lane == 0) {
          ptx::shared_add(&f[most].rows, all_rows);
          ptx::shared_add(&f[most].requests, requests);
        }
      } else if (at >= 0) {
        ptx::shared_add(&f[at].rows, rows);
        ptx::shared_add(&f[at].requests, 1);
      }
      if (at < 0) continue;
      const int32_t next = f[at].next;
      const int32_t of_leader = f[f[at].leader].node;
      const int32_t parent = next >= 0 ? Forest::node_of(next) : of_leader;
      if (at == own) below_own = nodes;
      if (at == i) f[i].parent = parent;
      ++nodes;
      at = parent;
    }
    if (own == i) f[i].depth = nodes - below_own;
  }
  team.sync();
  team.for_each(f.size, [&](int32_t n) {
    if (f[n].depth == 0) return;
    const RowsCost cost = rows_cost(p.config, f[n].rows, true);
    f[n].tile_cost = cost.kv_tile;
    f[n].pair_cost = cost.pairs;
    if (f[n].parent >= 0) ptx::shared_add(&f[f[n].parent].weight, cost.kv_tile);
    ptx::shared_add(&shared.states, node_states(f[n].rows, f[n].depth - 1));
    ptx::shared_max(&shared.max_depth, f[n].depth);
  });
  team.sync();
  return true;
}

/// Decides which nodes are taken. All threads must have passed a barrier before any of them asks forest_is_taken().
__device__ __forceinline__ void decide(const PlanParams& p, const ForestMemory& m, ForestShared& shared,
                                       const PlanTeam& team) {
  const Forest& f = m.forest;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t max_depth = shared.max_depth;
  int32_t room = forest_states(p.config);
  // Nodes compete for room: one after another, in the order of the host.
  const bool compete = shared.states > room;
#pragma unroll 1
  for (int32_t depth = 1; depth <= max_depth; ++depth) {
    if (depth > 1) team.sync();
#pragma unroll 1
    for (int32_t n = thread; n < f.size; n += compete ? 1 : team.count) {
      if (compete && thread != 0) break;
      if (f[n].depth != depth) continue;
      const int32_t saved = decide_node(p, f, n, room);
      if (f[n].taken != n) continue;
      if (compete) room -= node_states(f[n].rows, f[n].begin);
      ptx::shared_add(&shared.saved, saved);
      ptx::shared_max(&shared.max_taken_depth, f[n].taken_depth);
      ptx::shared_max(&shared.last_taken, n);
    }
  }
}

/// Whether nodes were taken, and are worth it together.
__device__ __forceinline__ bool forest_is_taken(const PlanParams& p, const ForestShared& shared) {
  return shared.max_taken_depth > 0 && forest_pays(p.config, shared.saved);
}

/// Columns of the counts of rows: taken nodes that are looked after at a time. There is a count for each 32 requests.
__device__ __forceinline__ int32_t count_columns(const ForestMemory& m, int32_t num_taken) {
  return min_of(num_taken, m.forest.size <= 512 ? 128 : 64);
}

__device__ __forceinline__ void clear_counts(const ForestMemory& m, const PlanTeam& team, int32_t columns) {
  team.for_each(ceil_div(m.forest.size, 32) * columns, [&](int32_t i) { m.slots[i] = 0; });
}

/// Finds the nodes and decides on them. Where this fails, no node is left, nor that which was the only one so far.
__device__ __forceinline__ void make_forest(const PlanParams& p, const ForestMemory& m, ForestShared& shared,
                                            const PlanTeam& team, uint32_t& errors) {
  if (find_nodes(p, m, shared, team)) {
    decide(p, m, shared, team);
    return;
  }
  errors |= kPrefixSearchFailed;
  if (team.thread() == 0 && shared.only.leader >= 0) p.schedule.nodes[shared.only.number].leader = -1;
}

/// Takes back what was taken, where it is not worth it together.
__device__ __forceinline__ void drop_forest(const PlanParams& p, const Forest& f, const PlanTeam& team) {
  team.for_each(f.size, [&](int32_t n) {
    if (f[n].depth > 0) drop_node(p, f, n);
  });
}

/// Counts the rows that every 32 requests have in each taken node from number `begin` on, as many as there are columns.
__device__ __forceinline__ void count_node_rows(const ForestMemory& m, const PlanTeam& team, int32_t begin,
                                                int32_t columns) {
  const Forest& f = m.forest;
  team.for_each(f.size, [&](int32_t i) {
#pragma unroll 1
    for (int32_t node = f[i].top; node >= 0; node = f.taken_above(node)) {
      const int32_t column = f[node].group - f.size - begin;
      if (column >= 0 && column < columns) ptx::shared_add(m.slots + i / 32 * columns + column, f[i].qo_len);
    }
  });
}

/// The lanes that take part and have the same number as this one; numbers are below `end`. Bit by bit: match.any takes
/// a multiprocessor 40 to 100 cycles for each warp.
__device__ __forceinline__ uint32_t same_lanes(bool takes_part, int32_t number, int32_t end) {
  uint32_t same = __ballot_sync(0xffffffffu, takes_part);
#pragma unroll 1
  for (int32_t bit = 1; bit < end; bit *= 2) {
    const uint32_t set = __ballot_sync(0xffffffffu, (number & bit) != 0);
    same &= (number & bit) != 0 ? set : ~set;
  }
  return same;
}

/// Links the rows of those nodes: a node's rows are in the order of its requests. `depth`: of the deepest taken node.
/// Whole warps.
__device__ __forceinline__ void link_node_rows(const PlanParams& p, const ForestMemory& m, const PlanTeam& team,
                                               int32_t depth, int32_t num_taken, int32_t begin, int32_t columns) {
  const Forest& f = m.forest;
  const int32_t lane = team.thread() % 32;
#pragma unroll 1
  for (int32_t i = team.thread(); i - team.thread() < f.size; i += team.count) {
    int32_t above = i < f.size ? f[i].top : -1;  // the deepest of the request's nodes that is still to be linked
    const int32_t rows = above >= 0 ? f[i].qo_len : 0;
    const bool single = __all_sync(0xffffffffu, rows <= 1);
#pragma unroll 1
    for (int32_t at = depth; at > 0; --at) {  // requests of a node come to it together
      const int32_t node = above >= 0 && f[above].taken_depth == at ? above : -1;
      const int32_t number = node >= 0 ? f[node].group - f.size : 0;
      const uint32_t same = same_lanes(node >= 0, number, num_taken);
      int32_t rank = __popc(same & ((1u << lane) - 1));
      if (!single) {
        rank = 0;
#pragma unroll 1
        for (int32_t other = 0; other < 31; ++other) {
          const int32_t of_other = __shfl_sync(0xffffffffu, rows, other);
          if (other < lane && same >> other & 1) rank += of_other;
        }
      }
      if (node < 0) continue;
      const int32_t column = number - begin;
      if (column >= 0 && column < columns) {
#pragma unroll 4
        for (int32_t warp = 0; warp < i / 32; ++warp) rank += m.slots[warp * columns + column];
#pragma unroll 1
        for (int32_t row = 0; row < rows; ++row) link_node_row(p, f, node, i, row, rank + row);
      }
      above = f.taken_above(node);
    }
  }
}

/// Links the rows of nodes. If there is but one taken node, all rows to be merged are its rows (link_own_rows()); else
/// those of each 32 requests are counted, for as many nodes at a time as there are columns, of which those of the first
/// are empty.
__device__ __forceinline__ void link_forest(const PlanParams& p, const ForestMemory& m, const PlanTeam& team,
                                            const Planned& planned) {
  const int32_t num_taken = planned.num_groups - m.forest.size;
  const int32_t columns = count_columns(m, num_taken);
#pragma unroll 1
  for (int32_t begin = 0; num_taken > 1 && begin < num_taken; begin += columns) {
    if (begin > 0) {
      team.sync();
      clear_counts(m, team, columns);
      team.sync();
    }
    count_node_rows(m, team, begin, columns);
    team.sync();
    link_node_rows(p, m, team, planned.num_links - 1, num_taken, begin, columns);
  }
}

/// Links all rows to their requests' own row groups.
__device__ __forceinline__ void link_own_rows(const PlanParams& p, const ForestMemory& m, const Planned& planned) {
  const Forest& f = m.forest;
  const bool single = planned.num_groups == f.size + 1;
  PlanTeam{0, plan_threads()}.for_each(f.size, [&](int32_t i) {
    if (f[i].merge_begin < 0) return;
    const int32_t depth = f[f[i].top].taken_depth;
#pragma unroll 1
    for (int32_t row = 0; row < f[i].qo_len; ++row) {
      if (single) link_node_row(p, f, f[i].top, i, row, f[i].merge_begin + row);
      link_own_row(p, f, i, row, depth, planned.num_links);
    }
  });
}

/// Counts the launch on, when every searching CTA has read its number: it has if it sent a word for its first request.
/// For one warp.
__device__ __forceinline__ void end_search(const PlanParams& p, uint64_t launch) {
  const uint64_t begin = ptx::global_timer();
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t last = static_cast<int32_t>(gridDim.x) - 2;  // slot of the last searching CTA's first request
  bool all;
  do {
    uint64_t seen[kMaxSearchCtas / 32];  // asked for together: each answer takes as long as all
#pragma unroll
    for (int32_t i = 0; i < kMaxSearchCtas / 32; ++i)
      seen[i] = ptx::load_relaxed(&p.schedule.attachments[min_of(lane + 32 * i, last)].launch);
    all = true;
#pragma unroll
    for (int32_t i = 0; i < kMaxSearchCtas / 32; ++i) all &= seen[i] == launch;
  } while (!all && ptx::global_timer() - begin <= ptx::kMostWait);
  __syncwarp();
  if (lane == 0) ptx::store_relaxed(launch_number(p), (launch ^ kTurnedBits) + 1);
}

}  // namespace attn
