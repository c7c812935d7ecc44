// bar: barriers among some of a CTA's warps. Number 0 is that of __syncthreads().
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// Waits for `threads` threads, whole warps. What they wrote before is visible behind it.
__device__ __forceinline__ void barrier_sync(int32_t barrier, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <int kBarrier, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

/// Likewise; returns whether any of them says so.
__device__ __forceinline__ bool barrier_sync_or(int32_t barrier, int32_t threads, bool value) {
  int32_t any;
  asm volatile(
      "{\n.reg .pred in, out;\nsetp.ne.s32 in, %3, 0;\nbar.red.or.pred out, %1, %2, in;\nselp.s32 %0, 1, 0, out;\n}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int32_t>(value))
      : "memory");
  return any != 0;
}

}  // namespace attn::ptx
