// What row tiles cost, and what each CTA should get of the whole.
#pragma once

#include "planner/params.h"
#include "planner/schedule.h"

namespace attn {

/// What find_position() (cuts.h) must know of a row tile in the list of work.
struct PlacedTile {
  int64_t cost_begin;
  int32_t cost_kind;
  int32_t num_kv_tiles;
};

/// Cost of a (row tile, KV head) pair.
ATTN_HD int64_t pair_cost(const ScheduleConfig& config, int32_t cost_kind, int32_t num_kv_tiles) {
  return config.pair_cost[cost_kind] + static_cast<int64_t>(num_kv_tiles) * config.kv_tile_cost[cost_kind];
}

/// Costs of pairs that are compared, not added up.
ATTN_HD int32_t narrow_cost(int64_t cost) { return static_cast<int32_t>(min_of(cost, kMaxInt32)); }

/// `group`: the row tile's.
ATTN_HD PlacedTile placed_tile(const RowTile& tile, const RowGroup& group) {
  return PlacedTile{tile.cost_begin, cost_kind(tile.kind, group.state_begin), tile.num_kv_tiles};
}

/// The cost that each CTA gets of a list of `num_pairs` (row tile, head) pairs. `first`: its first row tile;
/// `equal_cost`, `equal_pairs`: a CTA's part of the list if all parts are equal. Each CTA gets whole pairs if all pairs
/// cost the same and whole pairs cost at most 4 % more than an equal share. Then nothing has to be merged, and CTAs
/// that share a KV head's tokens read them at the same time (ADR 8). The test compares averages, so a mixed list may
/// pass it. Such a list loses at most the same 4 %.
ATTN_HD int64_t cta_share(const PlanParams& p, const PlacedTile& first, int64_t num_pairs, int64_t total_cost,
                          int64_t equal_cost, int64_t equal_pairs) {
  const int64_t share = max_of<int64_t>(equal_cost, p.config.min_share);
  const int64_t whole_pair_cost = pair_cost(p.config, first.cost_kind, first.num_kv_tiles);
  const int64_t whole_pairs = equal_pairs * whole_pair_cost;
  return num_pairs * whole_pair_cost == total_cost && whole_pairs >= share && (whole_pairs - share) * 25 <= share
             ? whole_pairs
             : share;
}

/// The plan so far. write_header() writes it.
struct Planned {
  int32_t num_groups = 0;
  int32_t num_tiles = 0;
  int32_t num_merge_rows = 0;
  int32_t num_links = 0;
  int32_t num_requests = 0;  // that the forest was sought in
  int64_t share = 0;
  int32_t longest_pair = -1;       // the largest cost of a pair with the largest kind of row tile
  int32_t longest_small_pair = 0;  // and of all others
  int32_t has_largest_tiles = 0;
  int32_t whole_pairs = 0;   // no (row tile, head) is shared by CTAs
  int32_t flags = 0;         // ScheduleFlag bits
  int32_t aligned_tile = 0;  // as in ScheduleHeader, from align_prefix()
  int32_t aligned_cta = 0;
  int32_t aligned_parts = 0;
  int32_t aligned_kv_tiles = 0;  // of each part but the first, which has what is left
  int32_t dequantized_tokens = 0;
  uint32_t errors = 0;
};

/// Whether one shared prefix is all that a forest has become.
ATTN_HD bool has_one_prefix(const PlanParams& p, const Planned& planned) {
  return p.seeks_forest && planned.num_groups == p.levels[0].num_groups + 1;
}

/// KV tiles of a large row tile that a CTA computes in about the time of a merge.
constexpr int32_t kMergeKvTiles = 5;

/// If row groups have at least this many row tiles on average, they read K and V from L2 when their pairs come from the
/// queue. That saves more than a sixteenth of a share, so CTAs may end that far apart (ADR 48).
constexpr int32_t kSharingRowTiles = 4;
constexpr int32_t kSharingSlack = 16;

/// Pairs of unequal cost come from the queue if a share holds at least this many of the longest. The short pairs are
/// taken last and fill the gaps.
constexpr int32_t kUnequalQueuePairs = 2;

/// Decides how pairs are distributed to CTAs. Pairs of the largest row tiles stay whole if CTAs then end no further
/// apart than what cutting costs. That is a merge, and what comes before a pair's KV tiles once more. If there are more
/// pairs than CTAs, they go to the work queue. Row groups must then have several row tiles, or a CTA would wait longer
/// for its next pair than it computes. `most_pairs`: of a CTA, if all get equally many.
ATTN_HD void distribute_pairs(const PlanParams& p, Planned& planned, int64_t total_cost, int64_t most_pairs) {
  const ScheduleConfig& config = p.config;
  const int32_t kind = config.max_kind;
  const int64_t longest = planned.longest_pair;
  planned.whole_pairs = config.batch_invariant != 0;
  if (config.min_queue_pairs == 0 || longest < planned.longest_small_pair) return;
  const int64_t num_pairs = static_cast<int64_t>(planned.num_tiles) * config.num_kv_heads;
  const bool shares_kv = planned.num_tiles >= kSharingRowTiles * planned.num_groups && most_pairs > 1;
  const int64_t slack = planned.share + config.pair_cost[kind] + kMergeKvTiles * config.kv_tile_cost[kind] +
                        (shares_kv ? planned.share / kSharingSlack : 0);
  const bool is_even = longest <= slack && most_pairs * total_cost <= slack * num_pairs;
  const bool is_uncut =
      longest <= planned.share &&
      longest <= 2 * config.pair_cost[kind] + config.kv_tile_cost[kind];  // is_uncut(), of the longest
  const bool stays_whole = planned.num_merge_rows == 0 && is_even && (!is_uncut || 2 * longest <= planned.share);
  const bool is_unequal = 4 * total_cost <= 3 * longest * num_pairs;
  const bool has_many = longest * (is_unequal ? kUnequalQueuePairs : config.min_queue_pairs) <= planned.share;
  const bool uses_queue = planned.num_tiles >= 2 * planned.num_groups && (has_many || (stays_whole && most_pairs > 1));
  planned.flags |= uses_queue ? kUsesQueue : 0;
  planned.whole_pairs |= uses_queue || (stays_whole && most_pairs == 1);
}

/// Decides on share and flags, once everything else is known.
ATTN_HD void finish_plan(const PlanParams& p, const PlacedTile& first, int64_t total_cost, Planned& planned) {
  const int64_t num_pairs = static_cast<int64_t>(planned.num_tiles) * p.config.num_kv_heads;
  const int64_t equal_cost = divide(total_cost + p.config.num_ctas - 1, p.num_ctas);
  const int64_t equal_pairs = divide(num_pairs + p.config.num_ctas - 1, p.num_ctas);
  planned.share = cta_share(p, first, num_pairs, total_cost, equal_cost, equal_pairs);
  planned.aligned_tile = planned.num_tiles;
  planned.aligned_cta = p.config.num_ctas;
  planned.aligned_parts = planned.aligned_kv_tiles = 0;
  const bool is_plain = planned.num_merge_rows == 0 && p.num_levels == 1 && p.levels[0].rows == nullptr;
  planned.flags = (is_plain ? kIsPlain : 0) | (planned.has_largest_tiles ? kHasLargestTiles : 0);
  distribute_pairs(p, planned, total_cost, equal_pairs);
}

}  // namespace attn
