#include "device/sampling.cuh"

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, 2) void sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample<attn::ProbSource<false>, false>(params);
}
