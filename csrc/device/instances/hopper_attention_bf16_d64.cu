#include "device/hopper/attention.cuh"
#include "device/kernel_code.cuh"

extern "C" __global__ __launch_bounds__(attn::hopper::kThreads, 1) void attention_kernel(const __grid_constant__ attn::HopperParams params) {
  attn::hopper::attention<attn::BFloat16, 64, attn::StandardVariant, attn::hopper::BoxCopier>(params);
}

extern "C" __device__ attn::KernelCode attention_kernel_code{&attn::unknown_code, 0};
