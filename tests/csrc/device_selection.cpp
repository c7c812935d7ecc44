// csrc/planner/device/selection.cu on a CPU, for ctypes: with emulated/ in the place of CUDA. CTAs run one after
// another.
#include "no_shared_memory.h"

#include "planner/device/selection.cu"

namespace {

using namespace attn;

SelectionParams launched;
int32_t counts[kSelectionWarps];

/// What a kernel must set before it reads it.
void spoil_counts() {
  for (int32_t& count : counts) count = -1000000;
}

}  // namespace

/// pointers: indices, slots, block_table, requests, kv_lens. sizes: rows, indices of a row, slots of a row, strides of
/// indices, slots and table, rows and columns of the table, page_size, page_stride, whether requests and kv_lens are
/// int64. plan: addresses of header, row groups and row tiles, requests, group_size, KV tile, row stride, whether there
/// are chunks; nullptr: there is none. Returns what failed, or nullptr.
extern "C" const char* device_selection(const void* const* pointers, const int64_t* sizes, const int64_t* plan,
                                        uint32_t seed) {
  launched = SelectionParams{};
  launched.indices = static_cast<const int32_t*>(pointers[0]);
  launched.slots = static_cast<int32_t*>(const_cast<void*>(pointers[1]));
  launched.block_table = static_cast<const int32_t*>(pointers[2]);
  launched.num_rows = static_cast<int32_t>(sizes[0]);
  launched.num_indices = static_cast<int32_t>(sizes[1]);
  launched.num_slots = static_cast<int32_t>(sizes[2]);
  launched.indices_stride = sizes[3];
  launched.slots_stride = sizes[4];
  launched.table_stride = sizes[5];
  launched.table_rows = static_cast<int32_t>(sizes[6]);
  launched.table_columns = static_cast<int32_t>(sizes[7]);
  launched.page_size = FastDivisor(static_cast<int32_t>(sizes[8]));
  launched.page_stride = static_cast<int32_t>(sizes[9]);
  launched.requests = IndexArray{pointers[3], static_cast<int32_t>(sizes[10])};
  launched.kv_lens = IndexArray{pointers[4], static_cast<int32_t>(sizes[11])};
  int32_t ctas = launched.num_rows;
  if (plan != nullptr) {
    launched.plan.schedule.header = reinterpret_cast<ScheduleHeader*>(plan[0]);
    launched.plan.schedule.groups = reinterpret_cast<RowGroup*>(plan[1]);
    launched.plan.schedule.tiles = reinterpret_cast<RowTile*>(plan[2]);
    launched.plan.is_planned = 1;
    launched.plan.num_requests = static_cast<int32_t>(plan[3]);
    launched.plan.group_size = static_cast<int32_t>(plan[4]);
    launched.plan.kv_tile = static_cast<int32_t>(plan[5]);
    launched.plan.row_stride = plan[6];
    launched.plan.has_chunks = static_cast<int32_t>(plan[7]);
    ctas = max_of(ctas, launched.plan.num_requests);
  }
  return emulation::failure_of(seed, [&] {
    for (int32_t cta = 0; cta < ctas; ++cta) {
      spoil_counts();
      emulation::run_cta(cta, ctas, kSelectionThreads, seed, [] { pack_selected_slots(launched, counts); });
    }
  });
}
