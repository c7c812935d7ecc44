// Thread block clusters.
#pragma once

#include "common/platform.h"
#include "common/ptx/warp.cuh"

namespace attn::ptx {

/// Before Hopper there are no clusters: a cluster is then the CTA itself.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
  if constexpr (kHasClusters) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size = 1;
  if constexpr (kHasClusters) asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

/// The cluster's number in a grid of one dimension.
__device__ __forceinline__ uint32_t cluster_id() {
  uint32_t id = blockIdx.x;
  if constexpr (kHasClusters) asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}

/// Barrier of all threads of the cluster. Earlier writes, to shared memory of any CTA, are visible after it.
__device__ __forceinline__ void cluster_sync() {
  if constexpr (kHasClusters)
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  else
    __syncthreads();
}

/// The two halves of a barrier: the second returns once all threads of the cluster have called the first. That is
/// relaxed: it makes no earlier writes visible.
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/// Where `pointer`, into this CTA's shared memory, lies in the CTA of that rank.
template <class T>
__device__ __forceinline__ T* cluster_pointer(T* pointer, uint32_t rank) {
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if constexpr (kHasClusters)
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(pointer)), "r"(rank));
  return reinterpret_cast<T*>(address);
}

// --- stores and copies to the shared memory of another CTA of the cluster, counted by an mbarrier there. The receiver
// waits only for these bytes. A cluster barrier would wait for all stores of all threads. Before Hopper these functions
// do nothing.

/// Where an address in this CTA's shared memory lies in the CTA of that rank.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared_address, uint32_t rank) {
  uint32_t address = shared_address;
  if constexpr (kHasClusters)
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
  return address;
}

/// Initializes an mbarrier for `arrivals` arrivals, visible to the cluster after its next barrier.
__device__ __forceinline__ void cluster_mbarrier_init(uint32_t mbarrier, uint32_t arrivals) {
  if constexpr (kHasClusters)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(mbarrier),
                 "r"(arrivals)
                 : "memory");
}

/// Stores 8 bytes asynchronously. Both addresses are cluster addresses of the same CTA.
__device__ __forceinline__ void store_async(uint32_t mbarrier, uint32_t address, uint64_t value) {
  if constexpr (kHasClusters)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
                 "r"(mbarrier)
                 : "memory");
}

/// Stores 16 bytes.
__device__ __forceinline__ void store_async(uint32_t mbarrier, uint32_t address, uint64_t low, uint64_t high) {
  if constexpr (kHasClusters)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "l"(low), "l"(high), "r"(mbarrier)
                 : "memory");
}

/// Arrives at an mbarrier of the cluster and expects bytes that are stored in this phase, before or after. Relaxed: a
/// release would first wait for every earlier store.
__device__ __forceinline__ void cluster_mbarrier_arrive_expect(uint32_t mbarrier, uint32_t bytes) {
  if constexpr (kHasClusters)
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(mbarrier),
                 "r"(bytes)
                 : "memory");
}

/// A relaxed arrival at an mbarrier of another CTA of the cluster. It orders no memory accesses. Use it after reads by
/// wgmma or bulk copies that have completed; reads by ld or ldmatrix need release and acquire at cluster scope.
__device__ __forceinline__ void cluster_mbarrier_arrive(uint32_t mbarrier) {
  if constexpr (kHasClusters)
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

/// Waits until the first phase of an mbarrier of this CTA has completed. Returns false after ptx::kMaxWait.
__device__ __forceinline__ bool cluster_mbarrier_wait(uint32_t mbarrier) {
  uint32_t done = 1;
  const uint64_t begin = global_timer();
  do {
    if constexpr (kHasClusters)
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\n"
          "selp.u32 %0, 1, 0, done;\n"
          "}"
          : "=r"(done)
          : "r"(mbarrier)
          : "memory");
  } while (done == 0 && global_timer() - begin <= kMaxWait);
  return done != 0;
}

/// Copies shared memory of this CTA to another one; an mbarrier there counts the bytes. The source must be visible to
/// the async proxy (fence_async_proxy()); the copy is. Sizes and addresses are multiples of 16 bytes.
__device__ __forceinline__ void copy_to_cta(uint32_t target, uint32_t from, uint32_t bytes, uint32_t mbarrier) {
  if constexpr (kHasClusters)
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "r"(from), "r"(bytes), "r"(mbarrier)
        : "memory");
}

}  // namespace attn::ptx
