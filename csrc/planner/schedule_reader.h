// What runs work out from the schedule: where KV tiles begin, the pairs of the work queue, and which CTAs share a pair.
#pragma once

#include "planner/schedule.h"

namespace attn {

/// Where KV tile `number` of a row tile begins in row group `group`. `kv_begin`: the row tile's, or, to count from a
/// later KV tile, kv_begin_after(). kSkips: KV tiles may be listed.
template <bool kSkips>
ATTN_HD KvTileStart kv_tile_start(const Schedule& schedule, int32_t group, int32_t kv_begin, int32_t number,
                                  int32_t kv_tile) {
  if constexpr (kSkips) {
    if (kv_begin < 0) {
      const ListedKvTile* const memory = reinterpret_cast<const ListedKvTile*>(schedule.header->levels[0].row_ranges);
      const ListedKvTile listed = memory[~kv_begin + number];
      return KvTileStart{listed.token() - schedule.groups[group].kv_offset, listed.is_seen()};
    }
  }
  return KvTileStart{kv_begin + number * kv_tile, false};
}

/// What RowTile::kv_begin would be without the row tile's first `number` KV tiles.
template <bool kSkips>
ATTN_HD int32_t kv_begin_after(int32_t kv_begin, int32_t number, int32_t kv_tile) {
  if (kSkips && kv_begin < 0) return kv_begin - number;
  return kv_begin + number * kv_tile;
}

/// KV heads of a section of a row group: at most as many as have K and V that fit a part of L2, at least one. The last
/// section may have fewer.
ATTN_HD int32_t section_heads(int32_t section_tokens, int32_t kv_len, int32_t num_kv_heads) {
  const int32_t most = clamp(section_tokens / max_of(kv_len, 1), 1, num_kv_heads);
  return ceil_div(num_kv_heads, ceil_div(num_kv_heads, most));
}

/// Pair number `pair` of the work queue. Row groups follow one another, and so do the sections of a row group. Inside a
/// section, the row tile that sees most tokens comes first, with all heads of the section. CTAs that run at the same
/// time then read the K and V of few heads, which stay in L2 (ADR 48).
ATTN_HD Position queued_pair(const Schedule& schedule, const FastDivisor& group_size, int32_t num_kv_heads,
                             int32_t num_tiles, int32_t pair) {
  const int32_t tile = pair / num_kv_heads;
  const RowGroup& group = schedule.groups[schedule.tiles[tile].group];
  const int32_t num_rows = group.qo_len * group_size.divisor;
  const int32_t group_tiles = min_of(row_tiles_of(num_rows, group.kind), num_tiles - group.tile_begin);
  const int32_t heads = section_heads(schedule.header->section_tokens, group.kv_len, num_kv_heads);
  const int32_t number = pair - group.tile_begin * num_kv_heads;  // in the row group
  const int32_t section = number / (group_tiles * heads);
  const int32_t in_section = number - section * group_tiles * heads;
  const int32_t first_head = section * heads;
  const int32_t width = min_of(heads, num_kv_heads - first_head);  // the last section may have fewer heads
  const int32_t row_tile = in_section / width;
  return Position{group.tile_begin + group_tiles - 1 - row_tile, first_head + in_section - row_tile * width, 0, 0};
}

/// Partial states. A CTA writes at most two: one of the (row tile, head) inside which its interval starts, one of that
/// inside which it ends. If both are the same pair it writes the first only.
enum PartialSlot : int32_t { kStartsInside = 0, kEndsInside = 1, kSlotsPerCta = 2 };

ATTN_HD int32_t partial_slot(int32_t cta, PartialSlot slot) { return cta * kSlotsPerCta + slot; }

/// Most KV tiles of a pair that may be uncut (is_uncut()): keeps its arithmetic in 32 bits.
constexpr int32_t kMaxUncutKvTiles = 64;

/// Whether no interval starts inside a (row tile, KV head), `share` being what each CTA gets: a CTA that did would pay
/// the pair's own cost again, and that is no less than the KV tiles that it could leave to another.
ATTN_HD bool is_uncut(int32_t pair_cost, int32_t kv_tile_cost, int32_t num_kv_tiles, int64_t share) {
  return num_kv_tiles <= kMaxUncutKvTiles && (num_kv_tiles - 1) * kv_tile_cost <= pair_cost &&
         pair_cost + num_kv_tiles * kv_tile_cost <= share;
}

/// CTAs [begin, end) whose intervals start inside a (row tile, head), after its first KV tile: the inverse of
/// find_position() (cuts.h).
struct CtaRange {
  int32_t begin;
  int32_t end;
};

ATTN_HD CtaRange ctas_inside(const Schedule& schedule, int32_t tile_number, int32_t state_begin, int32_t num_kv_heads,
                             int32_t head, int32_t num_ctas) {
  const ScheduleHeader& header = *schedule.header;
  if (tile_number >= header.aligned_tile) {
    const int32_t first =
        header.aligned_cta + ((tile_number - header.aligned_tile) * num_kv_heads + head) * header.aligned_parts;
    return CtaRange{first + 1, first + header.aligned_parts};
  }
  const RowTile& tile = schedule.tiles[tile_number];
  const int32_t cost = cost_kind(tile.kind, state_begin);
  const int32_t kv_tile_cost = header.kv_tile_cost[cost];
  if (header.whole_pairs || is_uncut(header.pair_cost[cost], kv_tile_cost, tile.num_kv_tiles, header.share))
    return CtaRange{0, 0};
  const int64_t head_cost = header.pair_cost[cost] + static_cast<int64_t>(tile.num_kv_tiles) * kv_tile_cost;
  const int64_t first = tile.cost_begin + head * head_cost + header.pair_cost[cost];
  // An interval starts inside if it starts after `first` and not after `last`.
  const int64_t last = first + (tile.num_kv_tiles - 1) * kv_tile_cost;
  return CtaRange{static_cast<int32_t>(min_of<int64_t>(divide(first, header.share) + 1, num_ctas)),
                  static_cast<int32_t>(min_of<int64_t>(divide(last, header.share) + 1, num_ctas))};
}

}  // namespace attn
