// The entry of append_rounded. The source that includes this file defines attn::KernelElement, of the heads.

#include "cache/append_rounded.cuh"

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads)
    append_rounded_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_rounded<attn::KernelElement>(params);
}
