// The prefix forest on the device: the same result as host/forest.cpp.
//
// The CTAs of the planner search side by side: each compares some of the requests with those before them. The CTA that finishes last has everybody's attachments
// and plans alone. Where no two requests have the same first page, which every CTA sees for itself, the first CTA plans at once and nobody waits for anybody.
#pragma once

#include <cub/block/block_scan.cuh>
#include <cuda/atomic>

#include "attn/forest.h"
#include "attn/planning.h"

namespace attn {

/// Groups keys that are at least 0: the smallest number that was inserted with a key.
struct SmallestOfKey {
  static constexpr int32_t kEmpty = -1;
  int32_t* keys;       // [slots]
  int32_t* smallest;   // [slots]
  int32_t slots;       // a power of two, at least twice the number of keys

  __device__ void clear() const {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < slots; i += kPlanThreads) {
      keys[i] = kEmpty;
      smallest[i] = static_cast<int32_t>(kMaxInt32);
    }
  }

  /// Returns the key's slot.
  __device__ int32_t insert(int32_t key, int32_t number) const {
    int32_t slot = static_cast<int32_t>((static_cast<uint32_t>(key) * 2654435761u) >> 12) & (slots - 1);
    for (;; slot = (slot + 1) & (slots - 1)) {
      const int32_t was = atomicCAS(keys + slot, kEmpty, key);
      if (was == kEmpty || was == key) break;
    }
    atomicMin(smallest + slot, number);
    return slot;
  }
};

/// Dynamic shared memory of the forest.
struct ForestMemory {
  int64_t* table_begin;   // [requests]
  int32_t* first_entry;   // [requests]: of the page table; needed by the search only
  int32_t* placed;        // [nodes], in the same memory: rows that a node has been given
  int32_t* nodes;         // [requests]: the nodes, in any order
  Forest forest;
  SmallestOfKey groups;

  __device__ ForestMemory(char* memory, int32_t requests) : forest(reinterpret_cast<int32_t*>(memory + 16 * requests), requests) {
    table_begin = reinterpret_cast<int64_t*>(memory);
    first_entry = reinterpret_cast<int32_t*>(memory + 8 * requests);
    placed = first_entry;
    nodes = first_entry + requests;
    groups.keys = forest.leader + Forest::kArrays * requests;
    groups.slots = forest_hash_slots(requests);
    groups.smallest = groups.keys + groups.slots;
  }
};

using SumScan = cub::BlockScan<int64_t, kPlanThreads, cub::BLOCK_SCAN_WARP_SCANS>;

struct ForestShared {
  SumScan::TempStorage scan;
  unsigned long long saved;
  int32_t mismatch;       // page
  int32_t candidate;      // request
  int32_t num_nodes;
  int32_t states;         // that taking every node would need
  int32_t max_taken_depth;
  int32_t is_last;
};

/// Runs `body(i)` for every i below count; the threads of the CTA share them.
template <class Body>
__device__ __forceinline__ void for_each(int32_t count, const Body& body) {
#pragma unroll 1   // most loops run once: what they cost is fetching their code
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kPlanThreads) body(i);
}

/// Leading pages that requests a and b share; the whole CTA's work. Ends with a barrier behind it.
__device__ int32_t common_pages(const PageTable& table, const ForestMemory& m, ForestShared& shared, int32_t a, int32_t b) {
  constexpr int32_t kBatch = 8;
  const int32_t limit = min_of(m.forest.pages[a], m.forest.pages[b]);
  const int32_t* x = table.indices + m.table_begin[a];
  const int32_t* y = table.indices + m.table_begin[b];
  if (threadIdx.x == 0) shared.mismatch = limit;
  __syncthreads();
#pragma unroll 1
  for (int32_t first = 0; first < limit; first += kBatch * kPlanThreads) {
    int32_t of_a[kBatch], of_b[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t page = first + i * kPlanThreads + static_cast<int32_t>(threadIdx.x);
      of_a[i] = of_b[i] = 0;
      if (page < limit) {
        of_a[i] = __ldg(x + static_cast<int64_t>(page) * table.entry_step);
        of_b[i] = __ldg(y + static_cast<int64_t>(page) * table.entry_step);
      }
    }
#pragma unroll
    for (int32_t i = kBatch - 1; i >= 0; --i) {
      if (of_a[i] != of_b[i]) atomicMin(&shared.mismatch, first + i * kPlanThreads + static_cast<int32_t>(threadIdx.x));
    }
    __syncthreads();
    if (shared.mismatch < first + kBatch * kPlanThreads) break;   // threads that are ahead lower it to pages behind this one's at most
  }
  const int32_t common = shared.mismatch;
  __syncthreads();
  return common;
}

/// Where a request attaches; the whole CTA's work. `first`: the smallest request with the same first page, which is another one.
__device__ Attachment attach(const PageTable& table, const ForestMemory& m, ForestShared& shared, int32_t request, int32_t first) {
  const int32_t own = m.forest.pages[request];
  Attachment best{-1, 0};
  int32_t other = first;
#pragma unroll 1
  for (int32_t comparisons = 0; comparisons < kMaxComparisons && other < request; ++comparisons) {
    const int32_t common = common_pages(table, m, shared, request, other);
    if (common > best.pages) best = Attachment{other, common};
    if (best.pages == own) break;
    if (threadIdx.x == 0) shared.candidate = request;
    __syncthreads();
    const int64_t at = static_cast<int64_t>(best.pages) * table.entry_step;
    const int32_t wanted = __ldg(table.indices + m.table_begin[request] + at);
#pragma unroll 1
    for (int32_t i = other + 1 + static_cast<int32_t>(threadIdx.x); i < request; i += kPlanThreads) {
      if (m.forest.pages[i] > best.pages && m.first_entry[i] == m.first_entry[request] && __ldg(table.indices + m.table_begin[i] + at) == wanted) {
        atomicMin(&shared.candidate, i);
      }
    }
    __syncthreads();
    other = shared.candidate;
    __syncthreads();
  }
  return best;
}

/// What a CTA does next.
enum class Search { kNothing, kPlanWithoutForest, kPlanWithForest };

/// Finds the attachments of this CTA's part of the requests. All but one CTA are left with nothing to do. `own`: the row group of request threadIdx.x, if there is
/// one.
__device__ Search search_forest(const PlanParams& p, const ForestMemory& m, ForestShared& shared, const RowGroup& own, uint32_t errors) {
  const Forest& f = m.forest;
  const PageTable& table = p.levels[0].table;
  m.groups.clear();
  __syncthreads();
  for_each(f.size, [&](int32_t i) {
    const RowGroup group = i < kPlanThreads ? own : read_row_group(p, GroupPlace{0, i}, errors);
    m.table_begin[i] = group.table_begin;
    f.pages[i] = shareable_pages(p.config, p.levels[0], group);
    f.qo_begin[i] = group.qo_begin;
    f.qo_len[i] = group.qo_len;
    if (f.pages[i] > 0) {
      m.first_entry[i] = __ldg(table.indices + group.table_begin);
      f.node[i] = m.groups.insert(m.first_entry[i], i);
    }
  });
  if (__syncthreads_or(errors != 0)) return blockIdx.x == 0 ? Search::kPlanWithoutForest : Search::kNothing;

  bool shares = false;
  for_each(f.size, [&](int32_t i) {
    f.leader[i] = f.pages[i] > 0 ? m.groups.smallest[f.node[i]] : i;
    shares |= f.leader[i] != i;
  });
  if (!__syncthreads_or(shares)) return blockIdx.x == 0 ? Search::kPlanWithoutForest : Search::kNothing;

#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < f.size; i += static_cast<int32_t>(gridDim.x)) {
    if (f.leader[i] == i) continue;
    const Attachment attachment = attach(table, m, shared, i, f.leader[i]);
    if (threadIdx.x == 0) p.schedule.attachments[i] = attachment;
  }
  if (threadIdx.x == 0) {
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device> arrived(p.schedule.header->arrived);
    shared.is_last = arrived.fetch_add(1, cuda::memory_order_acq_rel) == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.is_last) return Search::kNothing;
  if (threadIdx.x == 0) p.schedule.header->arrived = 0;
  for_each(f.size, [&](int32_t i) {
    Attachment attachment{-1, 0};
    if (f.leader[i] != i) {
      const int2 read = __ldcg(reinterpret_cast<const int2*>(p.schedule.attachments + i));
      attachment = Attachment{read.x, read.y};
    }
    f.leader[i] = attachment.leader;
    if (attachment.leader >= 0) f.pages[i] = attachment.pages;
  });
  return Search::kPlanWithForest;
}

/// What follows from the attachments: nodes, parents, sums.
__device__ void find_nodes(const PlanParams& p, const ForestMemory& m, ForestShared& shared) {
  const Forest& f = m.forest;
  m.groups.clear();
  if (threadIdx.x == 0) shared.num_nodes = shared.states = 0;
  __syncthreads();
  for_each(f.size, [&](int32_t i) {
    if (f.leader[i] >= 0) f.node[i] = m.groups.insert(f.pages[i] << Forest::kNodeBits | f.leader[i], i);
    f.deepest[i] = f.merge_begin[i] = -1;
    f.depth[i] = f.rows[i] = f.requests[i] = f.weight[i] = 0;
  });
  __syncthreads();
  for_each(f.size, [&](int32_t i) {
    f.node[i] = f.leader[i] >= 0 ? m.groups.smallest[f.node[i]] : -1;
    if (f.node[i] == i) {
      m.nodes[atomicAdd(&shared.num_nodes, 1)] = i;
      atomicMax(f.deepest + f.leader[i], f.deepest_key(i));
    }
  });
  __syncthreads();
  for_each(shared.num_nodes, [&](int32_t i) {
    const int32_t n = m.nodes[i];
    int32_t parent = -1;
#pragma unroll 1
    for (int32_t j = 0; j < shared.num_nodes; ++j) parent = closer_parent(f, n, m.nodes[j], parent);
    f.parent[n] = parent >= 0 ? parent : f.node[f.leader[n]];
  });
  __syncthreads();
  for_each(shared.num_nodes, [&](int32_t i) {
    int32_t depth = 0;
#pragma unroll 1
    for (int32_t at = m.nodes[i]; at >= 0; at = f.parent[at]) ++depth;
    f.depth[m.nodes[i]] = depth;
  });
#pragma unroll 1
  for (int32_t first = 0; first < f.size; first += kPlanThreads) {
    // A warp whose requests are all in the same node adds them up before it walks to the root.
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const int32_t innermost = i < f.size ? f.innermost(i) : -1;
    int32_t rows = innermost >= 0 ? f.qo_len[i] : 0;
    int32_t requests = innermost >= 0 ? 1 : 0;
    int32_t weight = innermost >= 0 ? kv_tile_cost_of_rows(p.config, rows) : 0;
    int uniform;
    __match_all_sync(0xffffffffu, innermost, &uniform);
    if (uniform) {
      rows = __reduce_add_sync(0xffffffffu, rows);
      requests = __reduce_add_sync(0xffffffffu, requests);
      weight = __reduce_add_sync(0xffffffffu, weight);
    }
    if (innermost < 0 || (uniform && threadIdx.x % 32 != 0)) continue;
    atomicAdd(f.weight + innermost, weight);
    atomicAdd(&shared.states, rows);
#pragma unroll 1
    for (int32_t at = innermost; at >= 0; at = f.parent[at]) {
      atomicAdd(f.rows + at, rows);
      atomicAdd(f.requests + at, requests);
    }
  }
  __syncthreads();
  for_each(shared.num_nodes, [&](int32_t i) {
    const int32_t n = m.nodes[i];
    atomicAdd(&shared.states, f.rows[n]);
    if (f.parent[n] >= 0) atomicAdd(f.weight + f.parent[n], kv_tile_cost_of_rows(p.config, f.rows[n]));
  });
  __syncthreads();
}

/// Decides which nodes are taken. Returns whether any is.
__device__ bool decide(const PlanParams& p, const ForestMemory& m, ForestShared& shared) {
  const Forest& f = m.forest;
  const int32_t room = forest_states(p.config);
  if (threadIdx.x == 0) shared.saved = 0;
  bool more = true;
  for (int32_t depth = 1; __syncthreads_or(more); ++depth) {
    more = false;
    if (shared.states <= room) {
      for_each(shared.num_nodes, [&](int32_t i) {
        const int32_t n = m.nodes[i];
        if (f.depth[n] == depth) {
          const int64_t saved = decide_node(p, f, n, room);
          if (saved != 0) atomicAdd(&shared.saved, static_cast<unsigned long long>(saved));
        }
        more |= f.depth[n] > depth;
      });
    } else if (threadIdx.x == 0) {
      // Nodes compete for room: one after another, in the order of the host.
      int32_t left = depth == 1 ? room : shared.candidate;
#pragma unroll 1
      for (int32_t n = 0; n < f.size; ++n) {
        if (f.depth[n] == depth) {
          shared.saved += static_cast<unsigned long long>(decide_node(p, f, n, left));
          if (f.taken[n] == n) left -= node_states(f, n);
        }
        more |= f.depth[n] > depth;
      }
      shared.candidate = left;
    }
  }
  bool taken = false;
  const bool pays = forest_pays(p.config, static_cast<int64_t>(shared.saved));
  for_each(shared.num_nodes, [&](int32_t i) {
    if (!pays) drop_node(p, f, m.nodes[i]);
    taken |= f.taken[m.nodes[i]] == m.nodes[i];
  });
  return __syncthreads_or(taken);
}

/// Puts the rows of kPlanThreads requests, from `first` on, into the taken nodes that have `depth` taken nodes down to them. Rows of a node are in the order of its
/// requests: a warp finds the places of its own requests by itself, then one warp after another adds what the warps before it have put there.
__device__ void link_node_rows(const PlanParams& p, const ForestMemory& m, int32_t first, int32_t depth, int32_t own_states) {
  const Forest& f = m.forest;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t request = first + static_cast<int32_t>(threadIdx.x);
  const int32_t node = request < f.size ? f.taken_at(request, depth) : -1;
  const int32_t rows = node >= 0 ? f.qo_len[request] : 0;
  const uint32_t peers = __match_any_sync(0xffffffffu, node);
  const uint32_t members = __ballot_sync(0xffffffffu, node >= 0);
  int32_t rank = __popc(peers & ((1u << lane) - 1));
  int32_t total = __popc(peers);
  if (__any_sync(0xffffffffu, rows > 1)) {
    rank = total = 0;
#pragma unroll 1
    for (int32_t peer = 0; peer < 32; ++peer) {
      const int32_t of_peer = __shfl_sync(0xffffffffu, rows, peer);
      if (peers >> peer & 1) {
        total += of_peer;
        rank += peer < lane ? of_peer : 0;
      }
    }
  }
  const int32_t warps = ceil_div(min_of(f.size - first, kPlanThreads), 32);
#pragma unroll 1
  for (int32_t warp = 0; warp < warps; ++warp) {
    if (static_cast<int32_t>(threadIdx.x) / 32 == warp && node >= 0) {
      const int32_t placed = m.placed[node];
      __syncwarp(members);
      rank += placed;
      if (lane == __ffs(static_cast<int>(peers)) - 1) m.placed[node] = placed + total;
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int32_t row = 0; row < rows; ++row) link_node_row(p, f, node, request, row, rank + row, own_states);
}

/// Writes the row groups of the taken nodes behind those of the requests, and links rows.
__device__ void write_forest(const PlanParams& p, const ForestMemory& m, ForestShared& shared, Planned& planned) {
  constexpr int kBits = 20;   // of each of three sums
  const Forest& f = m.forest;
  if (threadIdx.x == 0) shared.max_taken_depth = 0;
  int64_t before = 0;         // rows of requests in taken nodes, rows of taken nodes, taken nodes
#pragma unroll 1
  for (int32_t first = 0; first < f.size; first += kPlanThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const int32_t innermost = i < f.size ? f.innermost(i) : -1;
    const bool merges = innermost >= 0 && f.taken[innermost] >= 0;
    const bool is_taken = i < f.size && f.node[i] == i && f.taken[i] == i;
    int64_t sum = (merges ? f.qo_len[i] : 0) + (is_taken ? (int64_t{1} << 2 * kBits) + (static_cast<int64_t>(f.rows[i]) << kBits) : 0);
    int64_t total;
    __syncthreads();
    SumScan(shared.scan).ExclusiveSum(sum, sum, total);
    sum += before;
    before += total;
    if (merges) {
      f.merge_begin[i] = static_cast<int32_t>(sum & ((1 << kBits) - 1));
      atomicMax(&shared.max_taken_depth, f.taken_depth[f.taken[innermost]]);
    }
    if (is_taken) {
      f.state_begin[i] = static_cast<int32_t>(sum >> kBits & ((1 << kBits) - 1));   // the requests' own states are added below
      f.group[i] = f.size + static_cast<int32_t>(sum >> 2 * kBits);
    }
  }
  const int32_t own_states = static_cast<int32_t>(before & ((1 << kBits) - 1));
  __syncthreads();
  planned.num_groups += static_cast<int32_t>(before >> 2 * kBits);
  planned.num_merge_rows = own_states;
  planned.num_links = shared.max_taken_depth + 1;
  for_each(shared.num_nodes, [&](int32_t i) {
    const int32_t n = m.nodes[i];
    if (f.taken[n] != n) return;
    m.placed[n] = 0;
    f.state_begin[n] += own_states;
    p.schedule.groups[f.group[n]] = node_group(p, f, n, m.table_begin[n], own_states);
  });
  for_each(f.size, [&](int32_t i) {
#pragma unroll 1
    for (int32_t row = 0; f.merge_begin[i] >= 0 && row < f.qo_len[i]; ++row) link_own_row(p, f, i, row, planned.num_links);
  });
  __syncthreads();
#pragma unroll 1
  for (int32_t depth = 1; depth <= shared.max_taken_depth; ++depth) {
    for (int32_t first = 0; first < f.size; first += kPlanThreads) link_node_rows(p, m, first, depth, own_states);
  }
}

/// Everything but the search: the whole forest, by one CTA. Returns whether anything was taken.
__device__ bool add_forest(const PlanParams& p, const ForestMemory& m, ForestShared& shared, Planned& planned) {
  find_nodes(p, m, shared);
  for_each(m.forest.size, [&](int32_t i) {
    if (m.forest.node[i] != i) p.schedule.nodes[i].leader = -1;
  });
  if (!decide(p, m, shared)) return false;
  write_forest(p, m, shared, planned);
  return true;
}

}  // namespace attn
