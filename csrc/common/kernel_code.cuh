// Prefetches kernels' code to L2. Otherwise multiprocessors fetch it line by line from memory, because what runs
// between two launches evicts it (ADR 20).
#pragma once

#include "common/kernel_code.h"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

/// The symbol that a KernelCode points to in a source: `extern "C" __device__ attn::KernelCode
/// NAME_code{&attn::unknown_code, 0};`.
__device__ char unknown_code;

/// Thread `thread` of each block prefetches one of the lines, if there are enough, to be evicted last. Nothing waits
/// for them.
__device__ __forceinline__ void prefetch_code(const KernelCode& code, uint32_t thread) {
  constexpr uint32_t kLineBytes = 128;
  const uint32_t offset = (thread * ptx::num_blocks() + ptx::block_id()) * kLineBytes;
  if (offset < code.bytes) ptx::prefetch_to_l2(code.address + offset);
}

}  // namespace attn
