// cp.async: copies from global to shared memory that bypass registers, completed in the order of their commit groups.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

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

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of this thread's commit groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace attn::ptx
