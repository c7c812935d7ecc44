// The host planner with any configuration, for ctypes: what the device planner's schedules are compared with, bit for bit.
#include <cstdint>
#include <cstring>

#include "attn/planning.h"
#include "host/planner.h"

namespace {

/// The fields of ScheduleConfig in their order, costs of a KV tile and of a pair of each kind among them.
attn::ScheduleConfig make_config(const int32_t* values) {
  attn::ScheduleConfig config{};
  static_assert(sizeof(config) % sizeof(int32_t) == 0, "nothing but int32");
  std::memcpy(&config, values, sizeof(config));
  return config;
}

}  // namespace

/// Bytes of the workspace; `offsets` receives where groups, tiles, positions, links, rows and nodes start in it.
extern "C" int64_t host_planner_layout(const int32_t* config, int64_t* offsets) {
  const attn::ScheduleLayout layout(make_config(config));
  offsets[0] = layout.groups;
  offsets[1] = layout.tiles;
  offsets[2] = layout.positions;
  offsets[3] = layout.links;
  offsets[4] = layout.rows;
  offsets[5] = layout.nodes;
  return layout.bytes;
}

/// A BSR view. arrays: qo_indptr, indptr, last_page_len, kv_lens, rows (nullptr: absent), and which of them are int64.
/// numbers: num_groups, causal, window_left, max_rows, num_entries, row_stride, num_rows, row_entries, page_size, entry_step.
struct View {
  const int32_t* indices;
  const int32_t* row_list;
  const void* arrays[5];
  int32_t is_int64[5];
  int64_t numbers[10];
};

extern "C" void host_planner_plan(const int32_t* config, void* workspace, const View* views, int32_t num_levels) {
  attn::PlanParams params{};
  params.config = make_config(config);
  params.schedule = attn::Schedule(workspace, attn::ScheduleLayout(params.config));
  params.num_levels = num_levels;
  for (int32_t i = 0; i < num_levels; ++i) {
    const View& view = views[i];
    attn::PlanLevel& level = params.levels[i];
    level.qo_indptr = attn::IndexArray{view.arrays[0], view.is_int64[0]};
    level.rows = view.row_list;
    level.table.indices = view.indices;
    level.table.indptr = attn::IndexArray{view.arrays[1], view.is_int64[1]};
    level.table.last_page_len = attn::IndexArray{view.arrays[2], view.is_int64[2]};
    level.table.kv_lens = attn::IndexArray{view.arrays[3], view.is_int64[3]};
    level.table.rows = attn::IndexArray{view.arrays[4], view.is_int64[4]};
    level.num_groups = static_cast<int32_t>(view.numbers[0]);
    level.causal = static_cast<int32_t>(view.numbers[1]);
    level.window_left = static_cast<int32_t>(view.numbers[2]);
    level.max_rows = static_cast<int32_t>(view.numbers[3]);
    level.table.num_entries = view.numbers[4];
    level.table.row_stride = view.numbers[5];
    level.table.num_rows = static_cast<int32_t>(view.numbers[6]);
    level.table.row_entries = static_cast<int32_t>(view.numbers[7]);
    level.table.page_size = static_cast<int32_t>(view.numbers[8]);
    level.table.entry_step = static_cast<int32_t>(view.numbers[9]);
  }
  attn::prepare_plan(params);
  attn::plan_on_host(params);
}
