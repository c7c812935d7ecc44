// The entry of the merge kernel. The source that includes this file defines attn::KernelElement, of O, and
// attn::KernelVariant.

#include "attention/merge/merge.cuh"
#include "common/kernel_code.cuh"

extern "C" __global__ void __launch_bounds__(attn::kMergeThreads, attn::kMergeBlocks)
    merge_kernel(const __grid_constant__ attn::AttentionParams params) {
  attn::merge<attn::KernelElement, attn::KernelVariant>(params);
}

extern "C" __device__ attn::KernelCode merge_kernel_code{&attn::unknown_code, 0};
