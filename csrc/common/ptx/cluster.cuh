// Thread block clusters. Before Hopper there are none: a cluster is then the CTA itself.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ uint32_t cluster_size() {
#if __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

/// The cluster's number in a grid of one dimension.
__device__ __forceinline__ uint32_t cluster_id() {
#if __CUDA_ARCH__ >= 900
  uint32_t id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
#else
  return blockIdx.x;
#endif
}

/// Barrier of all threads of the cluster. Earlier writes, to shared memory of any CTA, are visible after it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

/// The two halves of a barrier: the second returns once all threads of the cluster have called the first. That is
/// relaxed: it makes no earlier writes visible.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

/// Where `pointer`, into this CTA's shared memory, lies in the CTA of that rank.
template <class T>
__device__ __forceinline__ T* cluster_pointer(T* pointer, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(pointer)), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return pointer;
#endif
}

}  // namespace attn::ptx
