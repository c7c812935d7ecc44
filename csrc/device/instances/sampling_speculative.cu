#include "device/speculative.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kCtas = 1;      // of a multiprocessor: two would have registers spilled
#else
constexpr int kCtas = 2;
#endif

extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, kCtas) void sampling_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::speculate(params);
}
