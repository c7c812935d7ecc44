#include "device/sampling.cuh"

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 3) void sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample<attn::LogitSource<attn::BFloat16Element, false>>(params);
}

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 2) void masked_sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample<attn::LogitSource<attn::BFloat16Element, true>>(params);
}
