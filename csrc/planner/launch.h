// The launch of a plan: what its CTAs are, and what follows from its parameters before they run.
#pragma once

#include "planner/groups.h"
#include "planner/params.h"
#include "planner/schedule.h"

namespace attn {

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

/// Fills in what follows from the rest of the parameters. Decides whether a forest is sought in what is to be planned
/// (`seeks_prefixes`: whether it may be); if so, describes the level of its row groups: the pages of the view, seen as
/// a whole by the rows of a list that the planner writes (unless node_needs_no_list()).
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
