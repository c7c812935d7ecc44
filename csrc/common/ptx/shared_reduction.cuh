// red.shared: atomic operations on shared memory whose result nobody asks for. nvcc turns atomicAdd() on one address
// into a sum over the warp first, which takes longer where few threads take part.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

__device__ __forceinline__ void shared_add(int32_t* address, int32_t value) {
  asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))),
               "r"(value)
               : "memory");
}

__device__ __forceinline__ void shared_max(int32_t* address, int32_t value) {
  asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))),
               "r"(value)
               : "memory");
}

__device__ __forceinline__ void shared_min(int32_t* address, int32_t value) {
  asm volatile("red.shared.min.s32 [%0], %1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))),
               "r"(value)
               : "memory");
}

}  // namespace attn::ptx
