// The host planner with any configuration, for ctypes: what the device planner's schedules are compared with, bit for bit.
#include <cstdint>

#include "attn/planning.h"
#include "host/planner.h"

namespace {

/// num_kv_heads, group_size, kv_tile, max_kind, num_ctas, max_groups, max_rows, max_tiles, min_share, costs of a KV tile and of a pair of each kind.
attn::ScheduleConfig make_config(const int32_t* values) {
  attn::ScheduleConfig config{};
  int32_t* const fields[] = {&config.num_kv_heads, &config.group_size, &config.kv_tile, &config.max_kind, &config.num_ctas,
                             &config.max_groups, &config.max_rows, &config.max_tiles, &config.min_share};
  for (int32_t* field : fields) *field = *values++;
  for (int32_t& cost : config.kv_tile_cost) cost = *values++;
  for (int32_t& cost : config.pair_cost) cost = *values++;
  return config;
}

}  // namespace

/// Bytes of the workspace; `offsets` receives where groups, tiles and positions start in it.
extern "C" int64_t host_planner_layout(const int32_t* config, int64_t* offsets) {
  const attn::ScheduleLayout layout(make_config(config));
  offsets[0] = layout.groups;
  offsets[1] = layout.tiles;
  offsets[2] = layout.positions;
  return layout.bytes;
}

/// arrays: qo_indptr, indptr, last_page_len, kv_lens, rows (nullptr: absent), and which of them are int64.
/// numbers: num_groups, causal, window_left, num_entries, row_stride, num_rows, row_entries, page_size, entry_step.
extern "C" void host_planner_plan(const int32_t* config, void* workspace, const int32_t* indices, const void* const* arrays, const int32_t* is_int64,
                                  const int64_t* numbers) {
  attn::PlanParams params{};
  params.config = make_config(config);
  params.schedule = attn::Schedule(workspace, attn::ScheduleLayout(params.config));
  params.qo_indptr = attn::IndexArray{arrays[0], is_int64[0]};
  params.table.indices = indices;
  params.table.indptr = attn::IndexArray{arrays[1], is_int64[1]};
  params.table.last_page_len = attn::IndexArray{arrays[2], is_int64[2]};
  params.table.kv_lens = attn::IndexArray{arrays[3], is_int64[3]};
  params.table.rows = attn::IndexArray{arrays[4], is_int64[4]};
  params.num_groups = static_cast<int32_t>(numbers[0]);
  params.causal = static_cast<int32_t>(numbers[1]);
  params.window_left = static_cast<int32_t>(numbers[2]);
  params.table.num_entries = numbers[3];
  params.table.row_stride = numbers[4];
  params.table.num_rows = static_cast<int32_t>(numbers[5]);
  params.table.row_entries = static_cast<int32_t>(numbers[6]);
  params.table.page_size = static_cast<int32_t>(numbers[7]);
  params.table.entry_step = static_cast<int32_t>(numbers[8]);
  attn::plan_on_host(params);
}
