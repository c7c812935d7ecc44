// bar: barriers among some of a CTA's warps. Number 0 is that of __syncthreads().
#pragma once

namespace attn::ptx {

template <int kBarrier, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

__device__ __forceinline__ void barrier_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

}  // namespace attn::ptx
