// The kernels of append_qkv.cuh. The source that includes this file defines attn::KernelElement, of the heads,
// attn::KernelCacheElement, of a 16-bit cache, attn::KernelQuantizer (elements_in_memory.cuh, quantizers.h), and
// attn::kKernelRotates: rows of K and V are rotated (common/rotation.h), too.

#include "cache/append_qkv.cuh"

namespace attn {

/// As many CTAs share a multiprocessor as fit without spilled registers.
constexpr bool kKernelTakesHeads = takes_heads<KernelQuantizer>(kKernelRotates);
constexpr int kPlainCtasPerSm = KernelQuantizer::kOfBlocks      ? 5
                                : kKernelTakesHeads             ? 6
                                : KernelQuantizer::kBits == 16  ? 9
                                : KernelQuantizer::kLimits == 2 ? 7
                                                                : 8;
constexpr int kNormedCtasPerSm = kKernelTakesHeads ? 5 : KernelQuantizer::kLimits == 0 ? 7 : 6;
constexpr int kGeneralCtasPerSm = 8;

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kPlainCtasPerSm)
    append_qkv_plain_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::KernelElement, attn::QkvKernel::kPlain, attn::KernelQuantizer, attn::KernelCacheElement,
                   attn::kKernelRotates>(params, static_cast<int32_t>(blockIdx.x));
}

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kNormedCtasPerSm)
    append_qkv_normed_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::KernelElement, attn::QkvKernel::kNormed, attn::KernelQuantizer, attn::KernelCacheElement,
                   attn::kKernelRotates>(params, static_cast<int32_t>(blockIdx.x));
}

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kGeneralCtasPerSm)
    append_qkv_general_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::KernelElement, attn::QkvKernel::kGeneral, attn::KernelQuantizer, attn::KernelCacheElement,
                   attn::kKernelRotates>(params, static_cast<int32_t>(blockIdx.x));
}
