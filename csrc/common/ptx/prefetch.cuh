// prefetch: brings global memory to L2. Nothing waits for it.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// A line, which is evicted last.
__device__ __forceinline__ void prefetch_to_l2(const char* address) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address));
}

/// `bytes`, a multiple of 16, from an address that is one, too.
__device__ __forceinline__ void prefetch_bytes_to_l2(const char* address, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
}

}  // namespace attn::ptx
