// Copies from global memory: cp.async, TMA, prefetches.
#pragma once

#include "common/platform.h"
#include "common/ptx/types.cuh"
#include "common/tensor_map.h"

namespace attn::ptx {

// --- cp.async: copies from global to shared memory that bypass registers, completed in the order of their commit
// groups.

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes past L1.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/// The same; if not `exists`, writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
               : "memory");
}

/// Copies 8 bytes; if not `exists`, writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_8_or_zero(uint32_t shared, const void* global, bool exists) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(exists ? 8 : 0)
               : "memory");
}

/// Copies 4 bytes; if not `exists`, writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_4_or_zero(uint32_t shared, const void* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(exists ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of this thread's commit groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- cp.async.bulk.tensor: TMA loads a box of a tensor into shared memory. One thread issues it; an mbarrier counts
// its bytes.

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

// --- prefetch: brings global memory to L2. Nothing waits for it.

/// A line, which is evicted last.
__device__ __forceinline__ void prefetch_to_l2(const char* address) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address));
}

/// `bytes`, a multiple of 16, from an address that is one, too.
__device__ __forceinline__ void prefetch_bytes_to_l2(const char* address, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
}

}  // namespace attn::ptx
