// cp.async.bulk.tensor: TMA loads a box of a tensor into shared memory. One thread issues it; an mbarrier counts
// its bytes.
#pragma once

#include "common/ptx/cache_policy.cuh"
#include "common/tensor_map.h"

namespace attn::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap& map, uint32_t barrier, int32_t c0,
                                         int32_t c1, int32_t c2, int32_t c3, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

/// Stores a box from shared memory to a tensor; elements outside the tensor are skipped. The box must be visible to the
/// async proxy (fence_async_proxy()). The store belongs to the issuing thread's next bulk_commit().
__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t shared, int32_t c0, int32_t c1, int32_t c2,
                                          int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace attn::ptx
