// The search for shared prefixes. The first CTA plans (forest.cuh); all others compare page tables, each those of some
// requests with those of the requests before them, and tell the first CTA where its requests attach. They wait for
// nobody.
#pragma once

#include "common/ptx/global_timer.cuh"
#include "common/ptx/mail.cuh"
#include "common/ptx/shared_reduction.cuh"
#include "planner/device/plan_threads.cuh"
#include "planner/forest.h"
#include "planner/groups.h"
#include "planner/launch.h"

namespace attn {

/// Dynamic shared memory of a forest. No static shared memory goes with it: its address would be worked out again
/// wherever it is used.
struct ForestMemory {
  int32_t* slots;  // [1 << slot_bits]: of group_by_key(), then of count_node_rows(); other CTAs keep what their teams
                   // tell each other here
  int32_t slot_bits;
  int64_t* table_begin;  // [requests]
  Forest forest;

  __device__ __forceinline__ ForestMemory(char* memory, int32_t requests)
      : slots(reinterpret_cast<int32_t*>(memory)),
        slot_bits(forest_slot_bits(requests)),
        table_begin(reinterpret_cast<int64_t*>(slots + (1 << slot_bits))),
        forest{reinterpret_cast<ForestEntry*>(table_begin + requests), requests} {}
};

/// Reads request i. Returns whether it may share pages; if it `kCompares`, with request 0, whose first page it reads
/// beside its own.
template <bool kCompares>
__device__ __forceinline__ bool read_request(const PlanParams& p, const ForestMemory& m, int32_t i, uint32_t& errors) {
  const PlanLevel& level = p.levels[0];
  uint32_t ignored = 0;
  const TableRange range = read_table_range(level.table, i, errors);  // these first, as they branch
  const TableRange range_of_first = kCompares ? read_table_range(level.table, 0, ignored) : range;
  const GroupLengths lengths = read_lengths(level, i);
  const int32_t first_entry = read_first_entry(level.table, range.begin);
  const int32_t entry_of_first = kCompares ? read_first_entry(level.table, range_of_first.begin) : first_entry;
  const RowGroup group = make_row_group(p, GroupPlace{0, i}, lengths, range, errors);
  const int32_t pages = shareable_pages(p, group, first_entry);
  ForestEntry& entry = m.forest[i];
  m.table_begin[i] = group.table_begin;
  entry.qo_begin = group.qo_begin;
  entry.qo_len = group.qo_len;
  entry.kv_len = group.kv_len;
  entry.pages = pages;
  entry.key = first_entry;
  return pages > 0 && first_entry == entry_of_first;
}

/// What is sent in this launch carries its number with some bits turned over, so that a workspace filled with one value
/// holds none of it. The number is the same for all CTAs: the planning one counts it on when all have read it
/// (end_search() in forest.cuh).
constexpr uint64_t kTurnedBits = 0x9e3779b97f4a7c15;

__device__ __forceinline__ uint64_t* launch_number(const PlanParams& p) {
  return &p.schedule.attachments[p.config.max_nodes].launch;
}
__device__ __forceinline__ uint64_t read_launch(const PlanParams& p) {
  return ptx::load_relaxed(launch_number(p)) ^ kTurnedBits;
}

/// An attachment on its way from the CTA that found it to the one that plans, with the number of the launch. Both
/// arrive together and are all that is told: no other memory has to be made visible. A first word may come before the
/// last one: the attachment if no other request shares more. A last one comes for every request, also for one that
/// attaches nowhere.
///
/// What a slot held before the launch is not believed, whoever wrote it. A wait ends after ptx::kMostWait, with
/// Attachment{-1, 0}.
class AttachmentMail {
 public:
  __device__ AttachmentMail(AttachmentSlot* slot, uint64_t launch)
      : slot_(reinterpret_cast<ptx::Mail*>(slot)), launch_(launch) {}

  __device__ void send(Attachment attachment, bool is_last) const {
    const uint32_t leader = static_cast<uint32_t>(attachment.leader) & ~kIsLast;
    ptx::send(slot_,
              ptx::Mail{launch_, static_cast<uint64_t>(attachment.pages) << 32 | (is_last ? kIsLast : 0) | leader});
  }

  /// Waits for the last word.
  __device__ Attachment wait() const {
    const uint64_t begin = ptx::global_timer();
    do {
      const ptx::Mail mail = ptx::receive(slot_);
      if (mail.low == launch_ && (mail.high & kIsLast) != 0) return attachment(mail);
    } while (ptx::global_timer() - begin <= ptx::kMostWait);
    return Attachment{-1, 0};
  }

  /// Waits for any word of two at once.
  __device__ static void wait_for_first(const AttachmentMail& a, const AttachmentMail& b, Attachment& of_a,
                                        Attachment& of_b) {
    const uint64_t begin = ptx::global_timer();
    ptx::Mail first, second;
    bool are_there;
    do {
      first = ptx::receive(a.slot_);
      second = ptx::receive(b.slot_);
      are_there = first.low == a.launch_ && second.low == b.launch_;
    } while (!are_there && ptx::global_timer() - begin <= ptx::kMostWait);
    of_a = are_there ? attachment(first) : Attachment{-1, 0};
    of_b = are_there ? attachment(second) : Attachment{-1, 0};
  }

 private:
  static constexpr uint32_t kIsLast = 1u << 31;

  __device__ static Attachment attachment(const ptx::Mail& mail) {
    return Attachment{static_cast<int32_t>(static_cast<uint32_t>(mail.high) & ~kIsLast),
                      static_cast<int32_t>(mail.high >> 32)};
  }

  ptx::Mail* slot_;
  uint64_t launch_;
};
static_assert(sizeof(AttachmentSlot) == sizeof(ptx::Mail), "what is sent");

/// The threads that look after one request.
struct SearchTeam {
  static constexpr int32_t kThreads = kSearchTeamThreads;
  static constexpr int32_t kWarps = kThreads / 32;

  int32_t index;
  int32_t thread;
  int32_t uses;
  int32_t* minima;  // [2][warps of the CTA]: one for every second use

  /// The smallest value of all threads.
  __device__ int32_t minimum(int32_t value) {
    int32_t* of_warp = minima + uses++ % 2 * (kMaxPlanThreads / 32) + index * kWarps;
    const int32_t smallest = __reduce_min_sync(0xffffffffu, value);
    if (thread % 32 == 0) of_warp[thread / 32] = smallest;
    ptx::barrier_sync(1 + index, kThreads);
    int32_t result = of_warp[0];
#pragma unroll
    for (int32_t warp = 1; warp < kWarps; ++warp) result = min_of(result, of_warp[warp]);
    return result;
  }
};

/// The first of the first `limit` pages in which this warp sees requests a and b to differ, `limit` if there is none:
/// number `warp` of `warps`, which share the pages. A lane compares kBatch of them at a time.
template <int32_t kBatch>
__device__ __forceinline__ int32_t first_difference(const PageTable& table, const ForestMemory& m, int32_t warp,
                                                    int32_t warps, int32_t a, int32_t b, int32_t limit) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int64_t stride = 32 * static_cast<int64_t>(table.entry_step);  // between entries that a thread reads
  const int64_t begin = static_cast<int64_t>(warp * 32 * kBatch + lane) * table.entry_step;
  const int32_t* x = table.indices + m.table_begin[a] + begin;
  const int32_t* y = table.indices + m.table_begin[b] + begin;
  int32_t differs = limit;
#pragma unroll 1
  for (int32_t first = warp * 32 * kBatch; first < differs; first += warps * 32 * kBatch) {
    int32_t of_x[kBatch], of_y[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t page = first + i * 32 + lane;
      of_x[i] = of_y[i] = 0;
      if (page < limit) {
        of_x[i] = __ldg(x);
        of_y[i] = __ldg(y);
      }
      x += stride;
      y += stride;
    }
    x += stride * kBatch * (warps - 1);
    y += stride * kBatch * (warps - 1);
#pragma unroll
    for (int32_t i = kBatch - 1; i >= 0; --i) {
      if (of_x[i] != of_y[i]) differs = first + i * 32 + lane;
    }
    differs = __reduce_min_sync(0xffffffffu, differs);
  }
  return differs;
}

/// Leading pages that requests a and b share.
__device__ __forceinline__ int32_t common_pages(const PageTable& table, const ForestMemory& m, SearchTeam& team,
                                                int32_t a, int32_t b) {
  const int32_t limit = min_of(m.forest[a].pages, m.forest[b].pages);
  const int32_t warp = team.thread / 32;
  return team.minimum(limit <= 2 * SearchTeam::kThreads
                          ? first_difference<2>(table, m, warp, SearchTeam::kWarps, a, b, limit)
                          : first_difference<8>(table, m, warp, SearchTeam::kWarps, a, b, limit));
}

/// The smallest request with the same first page; `request` itself if there is no smaller one. Each warp finds it for
/// itself: it is nearly always among the first.
__device__ __forceinline__ int32_t first_candidate(const Forest& f, int32_t request) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t first_entry = f[request].key;
  if (f[0].key == first_entry && f[0].pages > 0) return 0;  // behind one prefix it is the first of all
#pragma unroll 1
  for (int32_t begin = 0; begin < request; begin += 32) {
    const int32_t i = begin + lane;
    const uint32_t same = __ballot_sync(0xffffffffu, i < request && f[i].pages > 0 && f[i].key == first_entry);
    if (same != 0) return begin + __ffs(static_cast<int>(same)) - 1;
  }
  return request;
}

/// The smallest request behind `other` that may share more than the first `pages` pages: it has the same first page,
/// and the same behind those. `request` itself if there is no smaller one. `candidates`: of the requests that this
/// thread looks at, a bit each, those that were candidates so far.
__device__ __forceinline__ int32_t next_candidate(const PageTable& table, const ForestMemory& m, SearchTeam& team,
                                                  int32_t request, int32_t other, int32_t pages, uint32_t& candidates) {
  constexpr int32_t kBatch = 4;
  static_assert(kMaxForestRequests <= 32 * SearchTeam::kThreads, "a bit each");
  const Forest& f = m.forest;
  const int32_t first_entry = f[request].key;
  const int32_t* behind = table.indices + static_cast<int64_t>(pages) * table.entry_step;
  const int32_t wanted = __ldg(behind + m.table_begin[request]);
  int32_t next = request;
#pragma unroll 1
  for (int32_t number = 0; number * SearchTeam::kThreads < request; number += kBatch) {
    int32_t entry[kBatch];
#pragma unroll
    for (int32_t k = 0; k < kBatch; ++k) {
      const int32_t i = team.thread + (number + k) * SearchTeam::kThreads;
      entry[k] = ~wanted;
      if (i > other && i < request && (candidates >> (number + k) & 1) != 0 && f[i].pages > pages &&
          f[i].key == first_entry)
        entry[k] = __ldg(behind + m.table_begin[i]);
    }
#pragma unroll
    for (int32_t k = kBatch - 1; k >= 0; --k) {
      if (entry[k] == wanted) {
        next = min_of(next, team.thread + (number + k) * SearchTeam::kThreads);
      } else {
        candidates &= ~(1u << (number + k));
      }
    }
  }
  return team.minimum(next);
}

/// Finds where a request attaches, and sends it.
__device__ __forceinline__ void attach(const PageTable& table, const ForestMemory& m, SearchTeam& team, int32_t request,
                                       const AttachmentMail& mail) {
  const int32_t own = m.forest[request].pages;
  Attachment best{-1, 0};
  uint32_t candidates = ~0u;
  int32_t other = own > 0 ? first_candidate(m.forest, request) : request;
#pragma unroll 1
  for (int32_t comparisons = 1; other < request; ++comparisons) {
    const int32_t common = common_pages(table, m, team, request, other);
    if (common > best.pages) best = Attachment{other, common};
    if (best.pages == own || comparisons == kMaxComparisons) break;
    if (comparisons == 1 && team.thread == 0) mail.send(best, false);
    other = next_candidate(table, m, team, request, other, best.pages, candidates);
  }
  if (team.thread == 0) mail.send(best, true);
}

/// What the threads of a searching CTA tell each other, beside their teams.
struct SearchMemory {
  uint64_t launch;  // number of it
  int32_t
      best;  // path_key() of where the CTA's only request attaches so far, with the leader in the place of the request
  uint32_t candidates[kMaxSearchCtas / 32];  // a bit for each request
};

/// Behind what teams use.
__device__ __forceinline__ SearchMemory& search_memory(const ForestMemory& m) {
  return *reinterpret_cast<SearchMemory*>(m.slots + 2 * (kMaxPlanThreads / 32));
}
static_assert(2 * (kMaxPlanThreads / 32) * sizeof(int32_t) % alignof(SearchMemory) == 0 &&
                  2 * (kMaxPlanThreads / 32) * sizeof(int32_t) + sizeof(SearchMemory) <= 4 << 7,
              "room for it");

/// Finds where the only request of this CTA attaches, and sends it. One team compares it with the first candidate; then
/// each warp compares it with another of those that may share more.
__device__ __forceinline__ void attach_alone(const PageTable& table, const ForestMemory& m, SearchTeam& team,
                                             int32_t request, const AttachmentMail& mail) {
  const Forest& f = m.forest;
  SearchMemory& shared = search_memory(m);
  const int32_t own = f[request].pages;
  const int32_t first = first_candidate(f, request);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if (own == 0 || first == request) {
    if (thread == 0) mail.send(Attachment{-1, 0}, true);
    return;
  }
  const int32_t warps = plan_threads() / 32;
  if (team.index == 0) {
    const int32_t common = common_pages(table, m, team, request, first);
    if (thread == 0) {
      mail.send(Attachment{first, common}, false);
      shared.best = Forest::path_key(first, common);
    }
  }
  bool is_candidate = thread > first && thread < request && f[thread].key == f[request].key;  // request number `thread`
  int32_t left;
  do {
    __syncthreads();
    const int32_t pages = Forest::pages_of(shared.best);
    if (pages == own) break;
    const int32_t* behind = table.indices + static_cast<int64_t>(pages) * table.entry_step;
    is_candidate = is_candidate && f[thread].pages > pages &&
                   __ldg(behind + m.table_begin[thread]) == __ldg(behind + m.table_begin[request]);
    const uint32_t candidates = __ballot_sync(0xffffffffu, is_candidate);
    if (thread % 32 == 0 && thread < kMaxSearchCtas) shared.candidates[thread / 32] = candidates;
    __syncthreads();
    int32_t before = 0;  // candidates in the words so far
    int32_t other = -1;  // that this warp compares
    int32_t rank = 0;    // of this thread's candidate
#pragma unroll
    for (int32_t word = 0; word < kMaxSearchCtas / 32; ++word) {
      const uint32_t bits = shared.candidates[word];
      const int32_t below = before + __popc(bits & ((1u << thread % 32) - 1));
      const uint32_t chosen = __ballot_sync(0xffffffffu, (bits >> thread % 32 & 1) != 0 && below == thread / 32);
      if (chosen != 0) other = word * 32 + __ffs(static_cast<int>(chosen)) - 1;
      if (word == thread / 32) rank = below;
      before += __popc(bits);
    }
    is_candidate = is_candidate && rank >= warps;
    left = before - warps;
    if (other >= 0) {
      const int32_t common = first_difference<8>(table, m, 0, 1, request, other, min_of(own, f[other].pages));
      if (thread % 32 == 0) ptx::shared_max(&shared.best, Forest::path_key(other, common));
    }
  } while (left > 0);
  __syncthreads();
  if (thread == 0) mail.send(Attachment{Forest::node_of(shared.best), Forest::pages_of(shared.best)}, true);
}

/// The work of every CTA but the first.
__device__ __forceinline__ void search_prefixes(const PlanParams& p, const ForestMemory& m) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  SearchTeam team{thread / SearchTeam::kThreads, thread % SearchTeam::kThreads, 0, m.slots};
  const int32_t size = p.levels[0].num_groups;
  // A CTA looks after requests from all over the batch: later ones are compared with more.
  const int32_t ctas = static_cast<int32_t>(gridDim.x) - 1;
  uint32_t errors = 0;                                           // the first CTA sees them too
  const uint64_t own_launch = thread == 0 ? read_launch(p) : 0;  // looked at when the requests have been read
  PlanTeam{0, plan_threads()}.for_each(size, [&](int32_t i) { read_request<false>(p, m, i, errors); });
  if (thread == 0) search_memory(m).launch = own_launch;
  __syncthreads();
  const uint64_t launch = search_memory(m).launch;
  const int32_t first = static_cast<int32_t>(blockIdx.x) - 1;
  if (compares_with_all(size, m.forest[first].pages)) {
    attach_alone(p.levels[0].table, m, team, first, AttachmentMail(p.schedule.attachments + first, launch));
    return;
  }
#pragma unroll 1
  for (int32_t request = first + team.index * ctas; request < size;
       request += plan_threads() / SearchTeam::kThreads * ctas) {
    attach(p.levels[0].table, m, team, request, AttachmentMail(p.schedule.attachments + request, launch));
  }
}

}  // namespace attn
