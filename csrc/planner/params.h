// The arguments of a plan: plain data, the same bytes for the device planner and the host planner.
#pragma once

#include "common/index_array.h"
#include "common/math.h"
#include "planner/page_table.h"
#include "planner/schedule.h"
#include "planner/visibility.h"

namespace attn {

/// One level of a composition: a BSR view.
struct PlanLevel {
  IndexArray qo_indptr;  // [num_groups + 1]
  PageTable table;
  const int32_t* rows = nullptr;  // row list, see Level
  int32_t max_rows = 0;           // no row group reaches beyond: elements of `rows`, or the rows of Q
  int32_t num_groups = 0;
  Visibility visibility;
  const int32_t* kv_offsets = nullptr;  // [num_groups]: tokens of its request before each row group's first; nullptr: 0
  RowPositions positions{};
  const RowRange* row_ranges = nullptr;       // see Level
  const KvTileList* kv_tile_lists = nullptr;  // by number (first_kv_tile_list()); nullptr: KV tiles have no holes
                                              // between them
  int32_t num_kv_tile_lists = 0;
  IndexArray kv_length;  // from prepare_plan (launch.h): kv_lens, or else last_page_len, or else any array that is long
                         // enough to be read, and is not looked at
};

struct PlanParams {
  ScheduleConfig config;
  Schedule schedule;
  PlanLevel levels[kMaxLevels];  // one after the last: of the prefix forest's row groups
  int32_t num_levels;
  // prepare_plan() (launch.h) fills in the fields below.
  int32_t seeks_forest;
  FastDivisor kv_tile;     // config.kv_tile
  FastDivisor group_size;  // config.group_size
  FastDivisor page_size;   // of the first level
  FastDivisor num_ctas;    // config.num_ctas
  FastDivisor kv_tile_cost[kNumCostKinds];
};

}  // namespace attn
