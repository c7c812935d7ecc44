// Special registers, read where they are used: a copy of threadIdx.x that lives through a whole kernel costs a register.
#pragma once

#include "attn/platform.h"

namespace attn::ptx {

__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ int thread_id() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace attn::ptx
