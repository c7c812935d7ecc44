// bar: barriers among some of a CTA's warps. __syncthreads() has number 0.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// Waits for `threads` threads, whole warps. Their earlier writes are visible after it.
__device__ __forceinline__ void barrier_sync(int32_t barrier, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Arrives as one of those `threads`, without waiting.
__device__ __forceinline__ void barrier_arrive(int32_t barrier, int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <int kBarrier, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace attn::ptx
