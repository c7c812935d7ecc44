// The search for shared prefixes, by every CTA but the first: each compares the page tables of some requests with those
// of the requests before them, and tells the first CTA where its requests attach (forest.h). They wait for no other
// CTA.
#pragma once

#include "common/ptx/global_timer.cuh"
#include "common/ptx/message.cuh"
#include "common/ptx/named_barrier.cuh"
#include "planner/device/context.cuh"
#include "planner/forest.h"
#include "planner/groups.h"

namespace attn {

/// Messages carry the launch number with some bits inverted, so that a workspace filled with one value holds no valid
/// message. The number is the same for all CTAs: the first one increments it when all messages have arrived
/// (docs/adr/0001).
constexpr uint64_t kTurnedBits = 0x9e3779b97f4a7c15;

__device__ __forceinline__ uint64_t* launch_number(const PlanParams& p) {
  return &p.schedule.attachments[p.config.max_nodes].launch;
}
__device__ __forceinline__ uint64_t read_launch(const PlanParams& p) {
  return ptx::load_relaxed(launch_number(p)) ^ kTurnedBits;
}
__device__ __forceinline__ void end_launch(const PlanParams& p, uint64_t launch) {
  ptx::store_relaxed(launch_number(p), (launch ^ kTurnedBits) + 1);
}

static_assert(sizeof(AttachmentSlot) == sizeof(ptx::Message), "what is sent");

/// Tells the first CTA where a request attaches, or that it does not. The number of the launch arrives together with
/// the attachment: no other memory has to be made visible.
__device__ __forceinline__ void send_attachment(const PlanParams& p, uint64_t launch, int32_t request,
                                                Attachment attachment) {
  ptx::send(
      reinterpret_cast<ptx::Message*>(p.schedule.attachments + request),
      ptx::Message{launch, static_cast<uint64_t>(attachment.pages) << 32 | static_cast<uint32_t>(attachment.leader)});
}

/// Waits until `deadline` for where a request attaches. Returns whether it arrived; what a slot held before the launch
/// is ignored.
__device__ __forceinline__ bool receive_attachment(const PlanParams& p, uint64_t launch, int32_t request,
                                                   uint64_t deadline, Attachment& attachment) {
  ptx::Message message;
  do {
    message = ptx::receive(reinterpret_cast<ptx::Message*>(p.schedule.attachments + request));
  } while (message.low != launch && ptx::global_timer() <= deadline);
  attachment = Attachment{static_cast<int32_t>(message.high), static_cast<int32_t>(message.high >> 32)};
  return message.low == launch;
}

/// What a searching CTA knows of the requests.
struct SearchContext {
  const PageTable& table;
  int64_t* table_begin;  // of each request, in shared memory
  int32_t* shareable;    // leading pages that it can share

  __device__ __forceinline__ const int32_t* entry(int32_t request, int32_t page) const {
    return table.indices + table_begin[request] + static_cast<int64_t>(page) * table.entry_step;
  }
};

struct SearchShared {
  uint64_t launch;
  int32_t minima[2][kPlanWarps];  // of each team; two sets, used alternately
};

/// Threads that look for where a request attaches: whole warps.
struct SearchTeam {
  static constexpr int32_t kWarps = 4;
  static constexpr int32_t kThreads = 32 * kWarps;
  static constexpr int32_t kTeams = kPlanWarps / kWarps;

  int32_t (&minima)[2][kPlanWarps];
  int32_t index = thread_index() / kThreads;
  int32_t thread = thread_index() % kThreads;
  int32_t uses = 0;

  /// The smallest value of all threads.
  __device__ __forceinline__ int32_t minimum(int32_t value) {
    int32_t smallest = __reduce_min_sync(ptx::kAllLanes, value);
    int32_t* of_warp = minima[uses++ % 2] + index * kWarps;
    if (lane_index() == 0) of_warp[thread / 32] = smallest;
    ptx::barrier_sync(1 + index, kThreads);
#pragma unroll
    for (int32_t warp = 0; warp < kWarps; ++warp) smallest = min_of(smallest, of_warp[warp]);
    return smallest;
  }
};

/// Leading pages that requests a and b share.
__device__ __forceinline__ int32_t common_pages(const SearchContext& s, SearchTeam& team, int32_t a, int32_t b) {
  constexpr int32_t kBatch = 8;  // pages whose loads a thread has under way at once
  const int32_t limit = min_of(s.shareable[a], s.shareable[b]);
  int32_t differs = limit;  // the first page in which this warp sees a difference
#pragma unroll 1
  for (int32_t first = team.thread; first < round_up(differs, 32); first += kBatch * team.kThreads) {
    bool same[kBatch];
#pragma unroll
    for (int32_t k = 0; k < kBatch; ++k) {
      const int32_t page = min_of(first + k * team.kThreads, limit - 1);
      same[k] = __ldg(s.entry(a, page)) == __ldg(s.entry(b, page));
    }
#pragma unroll
    for (int32_t k = 0; k < kBatch; ++k) {
      if (!same[k]) differs = min_of(differs, first + k * team.kThreads);
    }
    differs = __reduce_min_sync(ptx::kAllLanes, differs);
  }
  return team.minimum(differs);
}

/// The smallest request after `other`, and before `request`, that may share more than the first `pages` pages, as it
/// has the same page after those; `request` itself if there is none. `candidates`: a bit for each request that this
/// thread looks at. Those that have another page lose theirs, and are never asked again.
__device__ __forceinline__ int32_t next_candidate(const SearchContext& s, SearchTeam& team, int32_t request,
                                                  int32_t other, int32_t pages, uint32_t& candidates) {
  constexpr int32_t kBatch = 4;  // requests whose loads a thread has under way at once
  const int32_t wanted = __ldg(s.entry(request, pages));
  const auto candidate = [&](int32_t number) { return number * team.kThreads + team.thread; };
  int32_t next = request;
#pragma unroll 1
  for (int32_t first = 0; first * team.kThreads < request; first += kBatch) {
    int32_t found[kBatch];
#pragma unroll
    for (int32_t k = 0; k < kBatch; ++k) {
      const int32_t i = candidate(first + k);
      found[k] = ~wanted;
      if (i < request && (candidates >> (first + k) & 1) != 0 && s.shareable[i] > pages)
        found[k] = __ldg(s.entry(i, pages));
    }
#pragma unroll
    for (int32_t k = 0; k < kBatch; ++k) {
      const int32_t i = candidate(first + k);
      if (found[k] != wanted)
        candidates &= ~(1u << (first + k));
      else if (i > other)
        next = min_of(next, i);
    }
  }
  return team.minimum(next);
}

/// Where a request attaches.
__device__ __forceinline__ Attachment attach(const SearchContext& s, SearchTeam& team, int32_t request) {
  static_assert(kMaxForestRequests <= 32 * SearchTeam::kThreads, "a bit for each request");
  uint32_t candidates = ~0u;
  Attachment best{-1, 0};
  int32_t other = -1;
#pragma unroll 1
  for (int32_t i = 0; i < kMaxComparisons && best.pages < s.shareable[request]; ++i) {
    other = next_candidate(s, team, request, other, best.pages, candidates);
    if (other == request) break;
    const int32_t common = common_pages(s, team, request, other);
    if (common > best.pages) best = Attachment{other, common};
  }
  return best;
}

/// The work of every CTA but the first. `memory`: shared memory.
__device__ __forceinline__ void search_prefixes(const PlanParams& p, char* memory) {
  const PlanLevel& level = p.levels[0];
  const int32_t size = level.num_groups;
  SearchShared& shared = *reinterpret_cast<SearchShared*>(memory);
  int64_t* table_begin = reinterpret_cast<int64_t*>(&shared + 1);
  const SearchContext s{level.table, table_begin, reinterpret_cast<int32_t*>(table_begin + size)};
  const uint64_t own_launch = thread_index() == 0 ? read_launch(p) : 0;  // under way while requests are read
  for_each(size, [&](int32_t i) {
    uint32_t errors = 0;  // the first CTA sees them too
    const RowGroup group = read_row_group(p, GroupPlace{0, i}, errors);
    s.table_begin[i] = group.table_begin;
    s.shareable[i] = begins_with_page(level.table, group) ? shareable_pages(p, group) : 0;
  });
  if (thread_index() == 0) shared.launch = own_launch;
  __syncthreads();
  const uint64_t launch = shared.launch;
  // Requests from all over the batch, as later ones are compared with more others; each by a team of its own.
  SearchTeam team{shared.minima};
  const int32_t ctas = static_cast<int32_t>(gridDim.x) - 1;
  const int32_t first = static_cast<int32_t>(blockIdx.x) - 1 + team.index * ctas;
#pragma unroll 1
  for (int32_t request = first; request < size; request += team.kTeams * ctas) {
    const Attachment best = attach(s, team, request);
    if (team.thread == 0) send_attachment(p, launch, request, best);
  }
}

}  // namespace attn
