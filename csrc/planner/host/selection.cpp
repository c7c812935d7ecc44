#include "planner/host/planner.h"

#include "common/cpu/parallel.h"

namespace attn::cpu {
namespace {

/// Returns how many slots there are. A row may be packed in place: an element is read before it is written.
int32_t pack_row(const SelectionParams& p, int32_t row_number) {
  const int32_t* const indices = p.indices + row_number * p.indices_stride;
  int32_t* const slots = p.slots + row_number * p.slots_stride;
  const SelectionRow row = selection_row(p, row_number);
  int32_t count = 0;
  for (int32_t i = 0; i < p.num_indices; ++i) {
    const int32_t slot = selected_slot(p, row, indices[i]);
    if (slot >= 0) slots[count++] = slot;
  }
  for (int32_t i = count; i < p.num_slots; ++i) slots[i] = -1;
  return count;
}

}  // namespace

void pack_selected_slots(const SelectionParams& params) {
  constexpr int64_t kFewEntries = 1 << 13;  // one thread packs these before others have begun
  const int32_t requests = params.plan.is_planned != 0 ? params.plan.num_requests : 0;
  const auto take_row = [&](int32_t row) {
    const int32_t count = row < params.num_rows ? pack_row(params, row) : 0;
    set_selection_length(params.plan, row, count, 0, 1);
  };
  const bool use_threads = int64_t{params.num_rows} * params.num_indices > kFewEntries;
  parallel_for(max_of(params.num_rows, requests), use_threads, take_row);
}

}  // namespace attn::cpu
