// The search for shared prefixes, by every CTA except the first. Each CTA compares the page tables of some requests
// with the page tables of all earlier requests, and sends the attachments (forest.h) to the first CTA. It waits for no
// other CTA.
#pragma once

#include "common/launch_number.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/message.cuh"
#include "common/ptx/warp.cuh"
#include "planner/device/threads.cuh"
#include "planner/forest.h"
#include "planner/work_list.h"

namespace attn {

__device__ __forceinline__ LaunchNumber launch(const PlanParams& p) {
  return LaunchNumber{reinterpret_cast<uint32_t*>(p.schedule.attachments + p.config.max_nodes)};
}

/// The tag of a launch's messages. The XOR makes a workspace that is filled with one value hold no valid message.
__device__ __forceinline__ uint64_t launch_tag(uint32_t number) {
  constexpr uint64_t kLaunchXor = 0x9e3779b97f4a7c15;
  return number ^ kLaunchXor;
}

static_assert(sizeof(AttachmentSlot) == sizeof(ptx::Message), "a slot holds one message");

/// Sends the attachment of a request to the first CTA, also if it has none. The tag arrives together with the
/// attachment, so no other memory has to become visible.
__device__ __forceinline__ void send_attachment(const PlanParams& p, uint64_t tag, int32_t request,
                                                Attachment attachment) {
  ptx::send(
      reinterpret_cast<ptx::Message*>(p.schedule.attachments + request),
      ptx::Message{tag, static_cast<uint64_t>(attachment.pages) << 32 | static_cast<uint32_t>(attachment.leader)});
}

/// Waits for the attachment of a request until `deadline`. Returns whether it arrived.
__device__ __forceinline__ bool receive_attachment(const PlanParams& p, uint64_t tag, int32_t request,
                                                   uint64_t deadline, Attachment& attachment) {
  ptx::Message message;
  do {
    message = ptx::receive(reinterpret_cast<ptx::Message*>(p.schedule.attachments + request));
  } while (message.low != tag && ptx::global_timer() <= deadline);
  attachment = Attachment{static_cast<int32_t>(message.high), static_cast<int32_t>(message.high >> 32)};
  return message.low == tag;
}

/// Whether a request may attach there. If lengths changed between the reads of two CTAs, the two CTAs may contradict
/// each other.
__device__ __forceinline__ bool may_attach(const Forest& f, int32_t request, Attachment attachment) {
  return attachment.leader >= 0 && attachment.leader < request && attachment.pages > 0 &&
         attachment.pages <= min_of(f.requests[request].shareable, f.requests[attachment.leader].shareable);
}

/// The first CTA, with what the others find.
struct PlanningCta : CtaThreads {
  __device__ __forceinline__ static void begin_search(PlanContext<PlanningCta>& c) {
    if (thread() == 0) c.shared.launch = launch(c.p).open(launch(c.p).read());
  }

  /// Receives the attachments. Returns whether a forest exists: a request attaches, and no error occurred so far.
  __device__ __forceinline__ static bool find_attachments(PlanContext<PlanningCta>& c, const Forest& f) {
    const uint32_t number = c.shared.launch;
    const uint64_t tag = launch_tag(number);
    const uint64_t deadline = ptx::global_timer() + ptx::kMaxWait;
    bool attaches = false;
    for_each<CtaThreads>(f.size, [&](int32_t i) {
      Attachment attachment;
      const bool has_arrived = receive_attachment(c.p, tag, i, deadline, attachment);
      f.requests[i].leader = attachment.leader;
      f.requests[i].pages = attachment.pages;
      attaches |= attachment.leader >= 0;
      if (!has_arrived || (attachment.leader != -1 && !may_attach(f, i, attachment)))
        report(c.shared.errors, kPrefixSearchFailed);
    });
    attaches = any(attaches);
    if (thread() == 0) launch(c.p).advance(number, (c.shared.errors & kPrefixSearchFailed) == 0);
    return attaches && c.shared.errors == 0;
  }
};

/// A searching CTA's data about the requests.
struct SearchContext {
  const PageTable& table;
  int64_t* table_begin;  // of each request, in shared memory
  int32_t* shareable;    // leading pages that it can share

  __device__ __forceinline__ const int32_t* entry(int32_t request, int32_t page) const {
    return table.indices + table_begin[request] + static_cast<int64_t>(page) * table.entry_step;
  }
};

struct SearchShared {
  uint64_t tag;                   // of this launch's messages
  int32_t minima[2][kPlanWarps];  // of each team; two sets, used alternately
};

/// Threads that look for where a request attaches: whole warps.
struct SearchTeam {
  static constexpr int32_t kWarps = 4;
  static constexpr int32_t kThreads = 32 * kWarps;
  static constexpr int32_t kTeams = kPlanWarps / kWarps;

  int32_t (&minima)[2][kPlanWarps];
  int32_t index = CtaThreads::thread() / kThreads;
  int32_t thread = CtaThreads::thread() % kThreads;
  int32_t uses = 0;

  /// The smallest value of all threads.
  __device__ __forceinline__ int32_t minimum(int32_t value) {
    int32_t smallest = __reduce_min_sync(ptx::kAllLanes, value);
    int32_t* warp_minima = minima[uses++ % 2] + index * kWarps;
    if (CtaThreads::lane() == 0) warp_minima[thread / 32] = smallest;
    ptx::barrier_sync(1 + index, kThreads);
#pragma unroll
    for (int32_t warp = 0; warp < kWarps; ++warp) smallest = min_of(smallest, warp_minima[warp]);
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
  // Thread 0 needs the number only after the requests are read.
  uint32_t number = CtaThreads::thread() == 0 ? launch(p).read() : 0;
  for_each<CtaThreads>(size, [&](int32_t i) {
    uint32_t errors = 0;  // the first CTA sees them too
    const RowGroup group = read_row_group(p, GroupPlace{0, i}, errors);
    s.table_begin[i] = group.table_begin;
    s.shareable[i] = begins_with_page(level.table, group) ? shareable_pages(p, group) : 0;
  });
  bool is_open = false;
  if (CtaThreads::thread() == 0) {
    is_open = launch(p).wait_until_open(number);
    shared.tag = launch_tag(number);
  }
  if (!__syncthreads_or(is_open)) return;
  const uint64_t tag = shared.tag;
  // Requests from all over the batch, as later ones are compared with more others; one team for each.
  SearchTeam team{shared.minima};
  const int32_t ctas = static_cast<int32_t>(gridDim.x) - 1;
  const int32_t first = static_cast<int32_t>(blockIdx.x) - 1 + team.index * ctas;
#pragma unroll 1
  for (int32_t request = first; request < size; request += team.kTeams * ctas) {
    const Attachment best = attach(s, team, request);
    if (team.thread == 0) send_attachment(p, tag, request, best);
  }
}

}  // namespace attn
