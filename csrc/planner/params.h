// The arguments of a plan, the same bytes for the device planner and the host planner; and its launch.
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
  const int32_t* prompts = nullptr;     // [num_groups]: not 0 where the rows end a prompt, for batch-invariant plans.
                                        // nullptr: single rows are decodes
  RowPositions positions{};
  const RowRange* row_ranges = nullptr;       // see Level
  const KvTileList* kv_tile_lists = nullptr;  // by number (first_kv_tile_list()); nullptr: KV tiles have no holes
                                              // between them
  int32_t num_kv_tile_lists = 0;
  IndexArray kv_length;  // from prepare_plan(): kv_lens, or else last_page_len, or else any array of
                         // sufficient length, whose values are not used
};

struct PlanParams {
  ScheduleConfig config;
  Schedule schedule;
  PlanLevel levels[kMaxLevels];  // one after the last: of the prefix forest's row groups
  int32_t num_levels;
  // prepare_plan() fills in the fields below.
  int32_t seeks_forest;
  FastDivisor kv_tile;     // config.kv_tile
  FastDivisor group_size;  // config.group_size
  FastDivisor page_size;   // of the first level
  FastDivisor num_ctas;    // config.num_ctas
  FastDivisor kv_tile_cost[kNumCostKinds];
};

// ---- The launch: what its CTAs are, and what follows from its parameters before they run ----

/// Threads of a CTA of the device planner. The first CTA plans; the others search for shared prefixes, and there are no
/// more of them than fit onto a GPU at once.
constexpr int32_t kPlanThreads = 512;
constexpr int32_t kMaxSearchCtas = 128;

/// Bytes of shared memory that its first CTA needs in addition to the forest and the row groups: PlanShared
/// (planner/context.h).
constexpr int32_t kPlanSharedBytes = 18 * 1024;

/// A forest is sought only in plans of fewer row tiles than this, so that the cost of a KV tile of all of them is an
/// int32.
constexpr int32_t kMaxForestTiles = 1 << 21;

/// Row tiles whose place in the list of work the first CTA keeps in shared memory.
constexpr int32_t kCachedTiles = 1024;

/// CTAs of the device planner: the first, and one for each request or some requests.
inline int32_t plan_ctas(const PlanParams& p) {
  return p.seeks_forest ? 1 + min_of(p.levels[0].num_groups, kMaxSearchCtas) : 1;
}

/// Fills in the parameters that follow from the others. Decides whether the planner looks for a forest; it does not if
/// `seeks_prefixes` is false. The row groups of a forest are a level with the pages of the view. The planner writes the
/// row list of this level, unless node_needs_no_list().
inline void prepare_plan(PlanParams& p, bool seeks_prefixes = true) {
  p.kv_tile = FastDivisor(p.config.kv_tile);
  p.group_size = FastDivisor(p.config.group_size);
  p.page_size = FastDivisor(p.levels[0].table.page_size);
  p.num_ctas = FastDivisor(p.config.num_ctas);
  for (int32_t kind = 0; kind < kNumCostKinds; ++kind) p.kv_tile_cost[kind] = FastDivisor(p.config.kv_tile_cost[kind]);
  for (int32_t i = 0; i < p.num_levels; ++i) {
    const PageTable& table = p.levels[i].table;
    p.levels[i].kv_length = table.kv_lens         ? table.kv_lens
                            : table.last_page_len ? table.last_page_len
                                                  : p.levels[i].qo_indptr;
  }
  const PlanLevel& view = p.levels[0];
  const bool has_positions = view.kv_offsets || view.positions.positions || view.positions.requests;
  p.seeks_forest = seeks_prefixes && p.num_levels == 1 && view.rows == nullptr && view.table.indices != nullptr &&
                   view.num_groups > 1 && view.num_groups <= p.config.max_nodes &&
                   p.config.max_tiles < kMaxForestTiles && !has_positions;
  if (!p.seeks_forest) return;
  PlanLevel& forest = p.levels[1];
  forest = view;
  forest.num_groups = 0;
  forest.rows = p.schedule.rows;
  forest.visibility = Visibility{};
  forest.row_ranges = nullptr;  // its rows are in another order
  forest.kv_tile_lists = nullptr;
}

}  // namespace attn
