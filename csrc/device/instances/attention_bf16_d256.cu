#include "device/attention.cuh"

extern "C" __global__ __launch_bounds__(attn::kThreads, attn::ctas_per_sm(256)) void attention_kernel(const __grid_constant__ attn::AttentionParams params) {
  attn::attention<attn::BFloat16, 256, attn::StandardVariant>(params);
}
