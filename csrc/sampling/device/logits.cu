// The entries of the sampling kernels that read logits. The source that includes this file defines
// attn::KernelElement, of the logits.

#include "common/platform.h"
#include "sampling/device/filtered.cuh"
#include "sampling/device/unfiltered.cuh"
#include "sampling/device/write_rows.cuh"

namespace attn {

using Logits = LogitSource<KernelElement, false>;
using MaskedLogits = LogitSource<KernelElement, true>;

/// As many CTAs share a multiprocessor as fit without spilled registers.
constexpr int kUnfilteredCtasPerSm = is_same<KernelElement, Float32Element> ? 4 : 3;
constexpr int kMaskedUnfilteredCtasPerSm = 3;
constexpr int kFilteredCtasPerSm = 3;
constexpr int kMaskedFilteredCtasPerSm = 2;
constexpr int kWriteRowsCtasPerSm = 3;

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kUnfilteredCtasPerSm)
    sample_unfiltered_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample_unfiltered<attn::Logits>(params);
}

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kMaskedUnfilteredCtasPerSm)
    masked_sample_unfiltered_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample_unfiltered<attn::MaskedLogits>(params);
}

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kFilteredCtasPerSm)
    sample_filtered_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample_filtered<attn::Logits>(params);
}

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kMaskedFilteredCtasPerSm)
    masked_sample_filtered_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::sample_filtered<attn::MaskedLogits>(params);
}

extern "C" __global__ void __launch_bounds__(attn::kSamplingThreads, attn::kWriteRowsCtasPerSm)
    write_rows_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::write_rows<attn::Logits>(params);
}
