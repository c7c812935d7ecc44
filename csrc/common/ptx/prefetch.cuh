// Prefetches that nothing waits for.
#pragma once

namespace attn::ptx {

/// Brings the line of `global` into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace attn::ptx
