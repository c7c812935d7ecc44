#include "device/kernel_code.cuh"
#include "device/merge.cuh"

extern "C" __global__ __launch_bounds__(attn::kMergeThreads, 4) void merge_kernel(const __grid_constant__ attn::AttentionParams params) {
  attn::merge<attn::Float16>(params);
}

extern "C" __device__ attn::KernelCode merge_kernel_code{&attn::unknown_code, 0};
