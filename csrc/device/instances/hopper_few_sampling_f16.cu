#include "device/sampling.cuh"

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 2) void few_sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample<attn::LogitSource<attn::Float16Element, false>, true>(params);
}

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 2) void masked_few_sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample<attn::LogitSource<attn::Float16Element, true>, true>(params);
}
