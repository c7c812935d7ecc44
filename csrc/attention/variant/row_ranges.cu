// The entry of the kernel that asks a variant's mask. The source that includes this file defines attn::KernelVariant.

#include "attention/variant/row_ranges.cuh"

extern "C" __global__ void __launch_bounds__(attn::kRowRangeThreads)
    row_ranges_kernel(const __grid_constant__ attn::RowRangeParams params) {
  attn::find_row_ranges<attn::KernelVariant>(params);
}
