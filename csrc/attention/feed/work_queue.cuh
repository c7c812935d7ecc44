// The work queue of (row tile, KV head) pairs, as a CTA's producer takes them from it.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "attention/params.h"
#include "attention/tile/work_cursor.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/warp.cuh"
#include "planner/schedule.h"

namespace attn::feed {

/// A CTA's access to the work queue: all warps of the producer get the same pair. A CTA asks for the next pair while it
/// loads the one before, so its first two are fixed: the pair of the CTA's own number, and one of the next num_ctas in
/// the opposite order, because the first pairs take longest. In a cluster all pairs are fixed like that, without
/// asking: both CTAs must take the same pairs.
template <class Traits>
class WorkQueue {
 public:
  __device__ __forceinline__ WorkQueue(const AttentionParams& params, const SharedMemory<Traits>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void begin(WorkCursor& cursor) {
    num_tiles_ = params_.schedule.header->num_tiles;
    take(cursor, static_cast<int32_t>(blockIdx.x));
    next_ = 2 * params_.num_ctas - 1 - static_cast<int32_t>(blockIdx.x);
  }

  __device__ __forceinline__ void next(WorkCursor& cursor) {
    if (ptx::thread_id() == 0) shared_.queued_pair(number_) = next_;
    ptx::barrier_sync<kProducerBarrier, kProducerThreads>();
    const int32_t pair = shared_.queued_pair(number_);
    number_ ^= 1;
    if (pair >= num_pairs()) return;
    take(cursor, pair);
    if (SharedMemory<Traits>::cluster_ctas() > 1) {
      next_ = 2 * (pair / params_.num_ctas + 1) * params_.num_ctas - 1 - pair;
      return;
    }
    // Each CTA asks once for every pair that it takes after its first: num_pairs - num_ctas requests in all, after
    // which the counter is 0 again.
    if (ptx::thread_id() == 0) {
      next_ = 2 * params_.num_ctas + static_cast<int32_t>(atomicInc(&queue_head(), num_pairs() - params_.num_ctas - 1));
    }
  }

 private:
  /// CTAs that take the same half of row tiles share a counter.
  __device__ __forceinline__ uint32_t& queue_head() const {
    ScheduleHeader& header = *params_.schedule.header;
    if constexpr (Traits::kIsLatent) return blockIdx.y == 0 ? header.queue_head : header.second_queue_head;
    return header.queue_head;
  }

  __device__ __forceinline__ int32_t num_pairs() const { return num_tiles_ * params_.num_kv_heads; }

  __device__ __forceinline__ void take(WorkCursor& cursor, int32_t pair) const {
    cursor.take(queued_pair(params_.schedule, params_.group_size, params_.num_kv_heads, num_tiles_, pair));
  }

  const AttentionParams& params_;
  const SharedMemory<Traits>& shared_;
  int32_t num_tiles_;
  int32_t number_ = 0;
  int32_t next_;  // of thread 0
};

}  // namespace attn::feed
