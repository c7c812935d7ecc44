// The entry of merge_states. The source that includes this file defines attn::KernelElement, of the states.

#include "attention/merge/merge_states.cuh"

extern "C" __global__ void __launch_bounds__(attn::kMergeStatesThreads)
    merge_states_kernel(const __grid_constant__ attn::MergeStatesParams params) {
  attn::merge_states<attn::KernelElement>(params);
}
