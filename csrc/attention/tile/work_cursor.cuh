// A walk over a CTA's interval of the schedule, or over the pairs that it takes from the work queue, one (row tile,
// head) pair after another.
#pragma once

#include "common/platform.h"
#include "planner/schedule.h"

namespace attn {

struct WorkCursor {
  Position now;
  Position end;

  __device__ __forceinline__ WorkCursor(const Schedule& schedule, int32_t cta)
      : now(schedule.positions[cta]), end(schedule.positions[cta + 1]) {}

  /// Only before take(): pairs from the queue have no flags.
  __device__ __forceinline__ bool uses_queue() const { return (now.flags & kUsesQueue) != 0; }

  /// Goes to a whole pair from the work queue.
  __device__ __forceinline__ void take(const Position& pair) {
    now = pair;
    end = Position{pair.tile, pair.head + 1, 0, 0};
  }

  __device__ __forceinline__ bool done() const { return !(now < end); }

  __device__ __forceinline__ bool in_last_pair() const { return now.tile == end.tile && now.head == end.head; }

  /// The KV tile after the last one of the current pair that belongs to this CTA.
  __device__ __forceinline__ int32_t end_kv_tile(int32_t num_kv_tiles) const {
    return in_last_pair() ? end.kv_tile : num_kv_tiles;
  }

  __device__ __forceinline__ void next_pair(int32_t num_kv_heads) {
    if (in_last_pair()) {
      now = end;
      return;
    }
    now.kv_tile = 0;
    if (++now.head == num_kv_heads) {
      now.head = 0;
      ++now.tile;
    }
  }
};

}  // namespace attn
