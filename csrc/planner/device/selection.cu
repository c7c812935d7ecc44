// Packs selected tokens on a GPU (planner/selection.h): a CTA a row.
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/warp.cuh"
#include "planner/selection.h"

namespace attn {

constexpr int32_t kSelectionWarps = kSelectionThreads / 32;

/// A thread takes four entries at a time. The place of a slot is the number of slots before it. All threads have read
/// what a thread overwrites, so a row may be packed in place. `shared_counts`: [kSelectionWarps], of the CTA.
__device__ __forceinline__ void pack_selected_slots(const SelectionParams& p, int32_t* shared_counts) {
  constexpr int32_t kEntries = 4;
  const int32_t row_number = static_cast<int32_t>(blockIdx.x), thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32, warp = thread / 32;
  int32_t count = 0;  // of the entries before
  if (row_number < p.num_rows) {
    const int32_t* const indices = p.indices + row_number * p.indices_stride;
    int32_t* const slots = p.slots + row_number * p.slots_stride;
    const SelectionRow row = selection_row(p, row_number);
    for (int32_t begin = 0; begin < p.num_indices; begin += kSelectionThreads * kEntries) {
      int32_t tokens[kEntries], found[kEntries], own = 0;
#pragma unroll
      for (int32_t i = 0; i < kEntries; ++i) {
        const int32_t entry = begin + thread * kEntries + i;
        tokens[i] = entry < p.num_indices ? indices[entry] : -1;
      }
#pragma unroll
      for (int32_t i = 0; i < kEntries; ++i) {
        found[i] = selected_slot(p, row, tokens[i]);
        own += found[i] >= 0;
      }
      const int32_t up_to = ptx::warp_inclusive_sum(own, lane);
      if (lane == 31) shared_counts[warp] = up_to;
      __syncthreads();
      int32_t place = count + up_to - own;
#pragma unroll
      for (int32_t i = 0; i < kSelectionWarps; ++i) {
        const int32_t warp_count = shared_counts[i];
        if (i < warp) place += warp_count;
        count += warp_count;
      }
#pragma unroll
      for (int32_t i = 0; i < kEntries; ++i) {
        if (found[i] >= 0) slots[place++] = found[i];
      }
      __syncthreads();
    }
    for (int32_t i = count + thread; i < p.num_slots; i += kSelectionThreads) slots[i] = -1;
  }
  set_selection_length(p.plan, row_number, count, thread, kSelectionThreads);
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kSelectionThreads)
    selected_slots_kernel(const __grid_constant__ attn::SelectionParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself, before it reads the schedule and the slots
  __shared__ int32_t counts[attn::kSelectionWarps];
  attn::pack_selected_slots(params, counts);
}
