#include "device/merge.cuh"

extern "C" __global__ __launch_bounds__(attn::kMergeThreads, 4) void merge_kernel(const __grid_constant__ attn::AttentionParams params) {
  attn::merge<attn::Float16>(params);
}
