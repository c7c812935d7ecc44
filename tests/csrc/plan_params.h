// A planner's parameters from what ctypes can pass.
#pragma once

#include <cstdint>
#include <cstring>

#include "planner/launch.h"
#include "planner/schedule_writer.h"

namespace attn {

/// A BSR view. arrays: qo_indptr, indptr, last_page_len, kv_lens, rows (nullptr: absent), and which of them are int64.
/// numbers: num_groups, causal, window_left, max_rows, num_entries, row_stride, num_rows, row_entries, page_size,
/// entry_step.
struct PassedView {
  const int32_t* indices;
  const int32_t* row_list;
  const void* arrays[5];
  int32_t is_int64[5];
  int64_t numbers[10];
};

/// The fields of ScheduleConfig in their order, costs of a KV tile and of a pair of each kind among them.
inline ScheduleConfig passed_config(const int32_t* values) {
  ScheduleConfig config{};
  static_assert(sizeof(config) % sizeof(int32_t) == 0, "nothing but int32");
  std::memcpy(&config, values, sizeof(config));
  return config;
}

inline PlanParams passed_params(const int32_t* config, void* workspace, const PassedView* views, int32_t num_levels) {
  PlanParams params{};
  params.config = passed_config(config);
  params.schedule = Schedule(workspace, ScheduleLayout(params.config));
  params.num_levels = num_levels;
  for (int32_t i = 0; i < num_levels; ++i) {
    const PassedView& view = views[i];
    PlanLevel& level = params.levels[i];
    level.qo_indptr = IndexArray{view.arrays[0], view.is_int64[0]};
    level.rows = view.row_list;
    level.table.indices = view.indices;
    level.table.indptr = IndexArray{view.arrays[1], view.is_int64[1]};
    level.table.last_page_len = IndexArray{view.arrays[2], view.is_int64[2]};
    level.table.kv_lens = IndexArray{view.arrays[3], view.is_int64[3]};
    level.table.rows = IndexArray{view.arrays[4], view.is_int64[4]};
    level.num_groups = static_cast<int32_t>(view.numbers[0]);
    level.visibility.causal = static_cast<int32_t>(view.numbers[1]);
    level.visibility.window_left = static_cast<int32_t>(view.numbers[2]);
    level.max_rows = static_cast<int32_t>(view.numbers[3]);
    level.table.num_entries = view.numbers[4];
    level.table.row_stride = view.numbers[5];
    level.table.num_rows = static_cast<int32_t>(view.numbers[6]);
    level.table.row_entries = static_cast<int32_t>(view.numbers[7]);
    level.table.page_size = static_cast<int32_t>(view.numbers[8]);
    level.table.entry_step = static_cast<int32_t>(view.numbers[9]);
  }
  prepare_plan(params);
  return params;
}

/// Whether the last level of what was planned has a row list.
inline bool last_level_lists_rows(const PlanParams& p) {
  return p.schedule.header->levels[count_levels(p) - 1].rows != nullptr;
}

}  // namespace attn
