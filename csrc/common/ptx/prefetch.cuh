// prefetch: brings a line of global memory to L2.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// The line is evicted last. Nothing waits for it.
__device__ __forceinline__ void prefetch_to_l2(const char* address) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address));
}

}  // namespace attn::ptx
