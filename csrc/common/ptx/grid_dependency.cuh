// griddepcontrol: programmatic dependent launch. Both do nothing before Hopper and in a launch without the attribute. A
// kernel that was compiled without them is launched without it (runtime/driver.cpp).
#pragma once

namespace attn::ptx {

/// Waits until the grids that this one depends on have finished and their writes are visible.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next grid start once every CTA has said so or ended.
__device__ __forceinline__ void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace attn::ptx
