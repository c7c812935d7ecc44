// The host planner with any configuration, for ctypes: what the device planner's schedules are compared with, bit for bit.
#include <cstdint>

#include "attn/planning.h"
#include "host/planner.h"

namespace {

/// num_kv_heads, group_size, kv_tile, max_kind, num_ctas, max_groups, max_rows, max_levels, max_tiles, min_share, costs of a KV tile and of a pair of each kind.
attn::ScheduleConfig make_config(const int32_t* values) {
  attn::ScheduleConfig config{};
  int32_t* const fields[] = {&config.num_kv_heads, &config.group_size, &config.kv_tile, &config.max_kind, &config.num_ctas,
                             &config.max_groups, &config.max_rows, &config.max_levels, &config.max_tiles, &config.min_share};
  for (int32_t* field : fields) *field = *values++;
  for (int32_t& cost : config.kv_tile_cost) cost = *values++;
  for (int32_t& cost : config.pair_cost) cost = *values++;
  return config;
}

}  // namespace

/// Bytes of the workspace; `offsets` receives where groups, tiles, positions and links start in it.
extern "C" int64_t host_planner_layout(const int32_t* config, int64_t* offsets) {
  const attn::ScheduleLayout layout(make_config(config));
  offsets[0] = layout.groups;
  offsets[1] = layout.tiles;
  offsets[2] = layout.positions;
  offsets[3] = layout.links;
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
  attn::plan_on_host(params);
}
