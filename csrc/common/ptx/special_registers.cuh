// Special registers, read where they are used: a copy of threadIdx.x that lives through a whole kernel costs a
// register.
#pragma once

#include "common/platform.h"

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

/// Blocks of a grid of one or two dimensions.
__device__ __forceinline__ uint32_t num_blocks() {
  uint32_t blocks;
  asm volatile("{\n.reg .u32 y;\nmov.u32 y, %%nctaid.y;\nmov.u32 %0, %%nctaid.x;\nmul.lo.u32 %0, %0, y;\n}"
               : "=r"(blocks));
  return blocks;
}

__device__ __forceinline__ uint32_t block_id() {
  uint32_t block;
  asm volatile(
      "{\n.reg .u32 x, y;\nmov.u32 x, %%ctaid.x;\nmov.u32 y, %%ctaid.y;\nmov.u32 %0, %%nctaid.x;\nmad.lo.u32 %0, %0, "
      "y, x;\n}"
      : "=r"(block));
  return block;
}

}  // namespace attn::ptx
