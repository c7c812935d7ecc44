// The clock that all multiprocessors share.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// Nanoseconds. It moves in steps, of 32 ns on Hopper, and never back.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

/// The longest that a CTA waits for another one: far longer than any launch takes, even under a sanitizer.
constexpr uint64_t kMaxWait = 4'000'000'000;

}  // namespace attn::ptx
