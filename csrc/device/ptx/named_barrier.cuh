// bar: barriers of some of a CTA's warps. `id` 0 is __syncthreads().
#pragma once

#include "attn/platform.h"

namespace attn::ptx {

/// Waits for `threads` threads, whole warps. What they wrote before is visible behind it.
__device__ __forceinline__ void barrier_sync(int32_t id, int32_t threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// Likewise; returns whether any of them says so.
__device__ __forceinline__ bool barrier_sync_or(int32_t id, int32_t threads, bool value) {
  int32_t any;
  asm volatile("{\n.reg .pred in, out;\nsetp.ne.s32 in, %3, 0;\nbar.red.or.pred out, %1, %2, in;\nselp.s32 %0, 1, 0, out;\n}"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(static_cast<int32_t>(value))
               : "memory");
  return any != 0;
}

}  // namespace attn::ptx
