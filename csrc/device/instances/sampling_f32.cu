#include "device/sampling.cuh"
#include "device/sampling_unfiltered.cuh"

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 4) void sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample<attn::LogitSource<attn::Float32Element, false>, false>(params);
}

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 3) void masked_sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample<attn::LogitSource<attn::Float32Element, true>, false>(params);
}

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 3) void unfiltered_sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample_unfiltered<attn::LogitSource<attn::Float32Element, false>>(params);
}

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 3) void masked_unfiltered_sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample_unfiltered<attn::LogitSource<attn::Float32Element, true>>(params);
}
