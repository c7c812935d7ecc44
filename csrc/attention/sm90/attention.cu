// The entry of the Hopper attention kernel. The source that includes this file defines attn::KernelTraits
// (HopperTraits) and attn::KernelCopier (feed::BoxCopier, RowCopier or DequantizingCopier).

#include "attention/sm90/attention.cuh"
#include "common/kernel_code.cuh"

extern "C" __global__ void __launch_bounds__(attn::KernelTraits::kTuning.cta_threads(), 1)
    attention_kernel(const __grid_constant__ attn::KernelTraits::Params params) {
  attn::sm90::attention<attn::KernelTraits, attn::KernelCopier>(params);
}

extern "C" __device__ attn::KernelCode attention_kernel_code{&attn::unknown_code, 0};
