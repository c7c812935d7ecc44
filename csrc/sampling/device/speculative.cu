// The entry of the kernel that verifies speculative drafts.

#include "sampling/device/speculative.cuh"

namespace attn {

constexpr int kSpeculateCtasPerSm = 3;

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kSpeculateCtasPerSm)
    speculate_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::speculate(params);
}
