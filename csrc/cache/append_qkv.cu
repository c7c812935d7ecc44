// The entries of append_qkv. The source that includes this file defines attn::KernelElement, of the heads,
// attn::KernelCacheElement, of a 16-bit cache, and attn::kKernelQuantizes, whether the cache has 8 bits.

#include "cache/append_qkv.cuh"

namespace attn {

/// As many CTAs share a multiprocessor as fit without spilled registers.
constexpr int kPlainCtasPerSm = kKernelQuantizes ? 8 : 9;
constexpr int kNormedCtasPerSm = 7;
constexpr int kGeneralCtasPerSm = 8;

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kPlainCtasPerSm)
    append_qkv_plain_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::KernelElement, attn::QkvKernel::kPlain, attn::kKernelQuantizes, attn::KernelCacheElement>(
      params);
}

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kNormedCtasPerSm)
    append_qkv_normed_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::KernelElement, attn::QkvKernel::kNormed, attn::kKernelQuantizes, attn::KernelCacheElement>(
      params);
}

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kGeneralCtasPerSm)
    append_qkv_general_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::KernelElement, attn::QkvKernel::kGeneral, attn::kKernelQuantizes, attn::KernelCacheElement>(
      params);
}
