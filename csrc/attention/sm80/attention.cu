// The entry of the generic attention kernel. The source that includes this file defines attn::KernelTraits (Traits).

#include "attention/sm80/attention.cuh"

extern "C" __global__ void __launch_bounds__(attn::sm80::kThreads, attn::sm80::kCtasPerMultiprocessor)
    attention_kernel(const __grid_constant__ attn::sm80::ParamsOf<attn::KernelTraits> params) {
  attn::sm80::attention<attn::KernelTraits>(params);
}
