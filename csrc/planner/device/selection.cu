// The entry of the kernel that packs selected tokens.

#include "planner/device/selection.cuh"

extern "C" __global__ void __launch_bounds__(attn::kSelectionThreads)
    selected_slots_kernel(const __grid_constant__ attn::SelectionParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself, before it reads the schedule and the slots
  __shared__ int32_t counts[attn::kSelectionWarps];
  attn::pack_selected_slots(params, counts);
}
