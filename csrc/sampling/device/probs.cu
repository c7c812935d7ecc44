// The entries of the sampling kernels that read probabilities.

#include "sampling/device/filtered.cuh"
#include "sampling/device/write_rows.cuh"

namespace attn {

constexpr int kProbCtasPerSm = 3;

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kProbCtasPerSm)
    sample_filtered_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample_filtered<attn::ProbSource<false>>(params);
}

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kProbCtasPerSm)
    write_rows_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::write_rows<attn::ProbSource<false>>(params);
}
