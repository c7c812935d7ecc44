// append_qkv.cuh for a cache whose K and V have different types, in one launch: some CTAs take Q and K, the others V.
// The source that includes this file defines attn::KernelElement, of the heads, attn::KernelQuantizer, a QuantizerPair,
// and attn::kKernelRotates, as in append_qkv.cu.

#include "cache/append_qkv.cuh"

namespace attn {

constexpr int kPairCtasPerSm = 5;
constexpr int kGeneralPairCtasPerSm = 8;

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kPairCtasPerSm)
    append_pair_plain_kernel(const __grid_constant__ attn::QkvPairParams params) {
  attn::append_pair<attn::KernelElement, attn::QkvKernel::kPlain, attn::KernelQuantizer, attn::kKernelRotates>(params);
}

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kPairCtasPerSm)
    append_pair_normed_kernel(const __grid_constant__ attn::QkvPairParams params) {
  attn::append_pair<attn::KernelElement, attn::QkvKernel::kNormed, attn::KernelQuantizer, attn::kKernelRotates>(params);
}

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads, attn::kGeneralPairCtasPerSm)
    append_pair_general_kernel(const __grid_constant__ attn::QkvPairParams params) {
  attn::append_pair<attn::KernelElement, attn::QkvKernel::kGeneral, attn::KernelQuantizer, attn::kKernelRotates>(
      params);
}
