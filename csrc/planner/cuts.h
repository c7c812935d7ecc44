// Where each CTA's interval starts.
#pragma once

#include "planner/cost_model.h"
#include "planner/params.h"
#include "planner/schedule_reader.h"

namespace attn {

/// Most CTAs among which a pair is cut evenly: on the device a warp looks at all numbers at once.
constexpr int32_t kMaxAlignedParts = 32;

/// The pairs of the only shared prefix of a plan, whose row tiles are the last of the list, from `tile` on. They may be
/// cut evenly, each among the same number of CTAs. A CTA then has one part: it loads Q and leaves states once. The
/// parts that see the same tokens run at the same time, and find them in L2.
struct SharedPairs {
  int32_t tile;
  PlacedTile first;  // row tile `tile`
  int32_t count;     // pairs
};

/// An even cut of the pairs of a shared prefix.
struct EvenCut {
  int32_t parts;     // of each pair
  int32_t kv_tiles;  // of each part but the first, which has what is left
  int32_t share;     // cost that each of the other CTAs gets, of what lies before
  int32_t cost;      // of the busiest CTA; kNoCut: a pair cannot be cut into so many parts
  static constexpr int32_t kNoCut = kMaxInt32;
};

/// Lists that cost more than kMaxCost (seconds of GPU time) are not cut evenly, so that no product exceeds 32 bits.
/// There are no branches: a GPU overlaps the two divisions.
ATTN_HD EvenCut cut_evenly(const PlanParams& p, const SharedPairs& shared, int32_t parts) {
  constexpr uint32_t kMaxCost = EvenCut::kNoCut / kMaxAlignedParts;
  const int32_t others = p.config.num_ctas - shared.count * parts;  // CTAs that are left for the rest of the list
  const uint32_t divisor = static_cast<uint32_t>(max_of(others, 1));
  const uint32_t cost_before = static_cast<uint32_t>(shared.first.cost_begin);
  const uint32_t share = (cost_before + divisor - 1) / divisor;
  const uint32_t kv_tiles = ceil_div(static_cast<uint32_t>(shared.first.num_kv_tiles), static_cast<uint32_t>(parts));
  const uint32_t part_cost = static_cast<uint32_t>(p.config.pair_cost[shared.first.cost_kind]) +
                             kv_tiles * static_cast<uint32_t>(p.config.kv_tile_cost[shared.first.cost_kind]);
  const uint32_t cost = max_of(part_cost, share);
  const bool whole = shared.count <= p.config.num_ctas && others >= 1 &&
                     static_cast<uint32_t>(parts - 1) * kv_tiles < static_cast<uint32_t>(shared.first.num_kv_tiles);
  const bool fits = shared.first.cost_begin <= kMaxInt32 && kv_tiles < kMaxCost / 64 && cost < kMaxCost;
  return EvenCut{parts, static_cast<int32_t>(kv_tiles), max_of(static_cast<int32_t>(share), p.config.min_share),
                 whole && fits ? static_cast<int32_t>(cost) : EvenCut::kNoCut};
}

/// Cuts the pairs of a shared prefix evenly if the busiest CTA is then no slower than with equal shares, where a CTA
/// that starts inside a pair pays the pair's own cost again. `best`: the cheapest cut; of several, the one with the
/// fewest parts.
ATTN_HD void align_prefix(const PlanParams& p, const SharedPairs& shared, const EvenCut& best, Planned& planned) {
  if (best.cost == EvenCut::kNoCut || best.cost > planned.share + p.config.pair_cost[shared.first.cost_kind]) return;
  planned.aligned_parts = best.parts;
  planned.aligned_tile = shared.tile;
  planned.aligned_kv_tiles = best.kv_tiles;
  planned.aligned_cta = p.config.num_ctas - shared.count * best.parts;
  planned.share = best.share;
  planned.flags &= ~kUsesQueue;
  planned.whole_pairs = p.config.batch_invariant;
}

/// Where CTA `cta` starts: at the first KV tile at or after its cost in the list that an interval may start with. A
/// pair's own cost lies before its KV tiles. `tiles(i)` is the PlacedTile of row tile i.
template <class Tiles>
ATTN_HD Position find_position(const PlanParams& p, const Tiles& tiles, const Planned& planned, int64_t total_cost,
                               int32_t cta) {
  const int32_t num_tiles = planned.aligned_tile;
  if (cta >= planned.aligned_cta && planned.aligned_parts > 0) {
    const int32_t number = cta - planned.aligned_cta;
    const int32_t pair = number / planned.aligned_parts;
    const int32_t remaining =
        planned.aligned_parts - (number - pair * planned.aligned_parts);  // parts of this pair that have not begun
    const int32_t tile = pair / p.config.num_kv_heads;
    const int32_t kv_tile =
        remaining == planned.aligned_parts ? 0 : tiles(num_tiles).num_kv_tiles - remaining * planned.aligned_kv_tiles;
    return Position{num_tiles + tile, pair - tile * p.config.num_kv_heads, kv_tile, planned.flags};
  }
  if (planned.aligned_parts > 0) total_cost = tiles(num_tiles).cost_begin;
  const int64_t cost = cta * planned.share;
  if (cost >= total_cost) return Position{num_tiles, 0, 0, planned.flags};
  const ScheduleConfig& config = p.config;
  const int32_t low = find_last(num_tiles, [&](int32_t i) { return tiles(i).cost_begin <= cost; });
  const PlacedTile tile = tiles(low);
  const int32_t own_cost = config.pair_cost[tile.cost_kind];
  const int32_t kv_tile_cost = config.kv_tile_cost[tile.cost_kind];
  const int64_t head_cost = pair_cost(config, tile.cost_kind, tile.num_kv_tiles);
  const int64_t inside = cost - tile.cost_begin;
  Position position;
  position.tile = low;
  position.flags = planned.flags;
  position.head = static_cast<int32_t>(divide(inside, head_cost));
  const int64_t inside_kv_tiles = max_of<int64_t>(inside - position.head * head_cost - own_cost, 0);
  position.kv_tile = static_cast<int32_t>(divide(inside_kv_tiles + kv_tile_cost - 1, p.kv_tile_cost[tile.cost_kind]));
  const bool uncut = planned.whole_pairs || is_uncut(own_cost, kv_tile_cost, tile.num_kv_tiles, planned.share);
  if (position.kv_tile == tile.num_kv_tiles || (uncut && position.kv_tile > 0)) {
    position.kv_tile = 0;
    if (++position.head == config.num_kv_heads) {
      position.head = 0;
      ++position.tile;
    }
  }
  return position;
}

}  // namespace attn
