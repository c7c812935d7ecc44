// Which KV tiles the row tiles of a level need under a variant's mask that has holes: those in which some row sees a
// token, found by asking the mask. Plans then count only these, and kernels go from one to the next. They do not ask
// again in KV tiles that are fully visible.
#pragma once

#include "attention/variant/row_ranges.h"

namespace attn {

/// A row tile of a level, as a plan makes it for the whole request.
struct TileOfLevel {
  RowGroup group;
  RowTile tile;
  int32_t first_row;  // rows [first_row, end_row) of the row group
  int32_t end_row;    // not above first_row: there is no such row tile

  /// `list`: number of its list (first_kv_tile_list()).
  ATTN_HD TileOfLevel(const PlanParams& p, int32_t level_number, int32_t list) : tile{}, first_row(0), end_row(0) {
    const PlanLevel& level = p.levels[level_number];
    const auto first_list = [&](int32_t i) {
      const int32_t begin = level.qo_indptr.narrow(level.qo_indptr.words(i));
      return first_kv_tile_list(p.config, i, clamp(begin, 0, level.max_rows));
    };
    const int32_t number = find_last(level.num_groups, [&](int32_t i) { return first_list(i) <= list; });
    uint32_t errors = 0;  // the planner reports them
    group = read_row_group(p, GroupPlace{level_number, number}, errors);
    const int32_t index = list - first_list(number);
    if (index < 0 || index >= count_row_tiles(p.config, group)) return;
    tile = make_row_tile(p, group, 0, index);
    first_row = p.group_size.divide(tile.packed_begin);
    const int64_t packed_end = int64_t{tile.packed_begin} + tile_rows(tile.kind) - 1;
    end_row = min_of(group.qo_len, p.group_size.divide(static_cast<int32_t>(min_of(packed_end, kMaxInt32))) + 1);
  }

  ATTN_HD bool exists() const { return first_row < end_row; }

  /// Tokens of a KV tile, in the row group.
  ATTN_HD TokenRange tokens(const PlanParams& p, int32_t kv_tile) const {
    const int32_t begin = tile.kv_begin + kv_tile * p.config.kv_tile;
    return TokenRange{begin, min_of(begin + p.config.kv_tile, tile.kv_end)};
  }
};

/// The mask's answer for some rows and tokens, among the tokens that visibility leaves.
struct SeenOrHidden {
  bool some_seen;
  bool some_hidden;

  ATTN_HD bool both() const { return some_seen && some_hidden; }
};

/// Asks the mask about a row, with all heads, and the tokens first, first + step, ... of a KV tile. Stops once it has
/// found visible and hidden ones.
template <class Variant>
ATTN_HD SeenOrHidden ask_row(const RowRangeParams& params, const TileOfLevel& level_tile, int32_t row,
                             TokenRange tokens, int32_t first, int32_t step) {
  SeenOrHidden answer{false, false};
  const RangedRow ranged(params.plan, level_tile.group, row);
  const TokenRange visible{max_of(tokens.begin, ranged.tokens.begin), min_of(tokens.end, ranged.tokens.end)};
  const int32_t num_heads = heads_of_mask<Variant>(params);
  for (int32_t head = 0; head < num_heads; ++head) {
    const HeadOfRow<Variant> head_row(params, ranged, head);
    const TokenRange asked = head_row.narrowed(visible);
    if (visible.begin < visible.end && (asked.begin > visible.begin || asked.end < visible.end))
      answer.some_hidden = true;
    for (int32_t token = asked.begin + first; token < asked.end && !answer.both(); token += step)
      (head_row.sees(token) ? answer.some_seen : answer.some_hidden) = true;
  }
  return answer;
}

/// Asks the mask about all rows of a row tile and a KV tile. Lanes `first`, of `step`, ask together: any(answer) is
/// whether one of them has this answer.
template <class Variant, class Any>
ATTN_HD SeenOrHidden ask_rows(const RowRangeParams& params, const TileOfLevel& level_tile, int32_t kv_tile,
                              int32_t first, int32_t step, const Any& any) {
  const TokenRange tokens = level_tile.tokens(params.plan, kv_tile);
  SeenOrHidden answer{false, false};
  for (int32_t row = level_tile.first_row; row < level_tile.end_row && !answer.both(); ++row) {
    const SeenOrHidden lane_answer = ask_row<Variant>(params, level_tile, row, tokens, first, step);
    answer.some_seen |= any(lane_answer.some_seen);
    answer.some_hidden |= any(lane_answer.some_hidden);
  }
  return answer;
}

/// The entry of a KV tile in which some row sees a token.
ATTN_HD ListedKvTile listed(const PlanParams& p, const TileOfLevel& level_tile, int32_t kv_tile, SeenOrHidden answer) {
  return ListedKvTile::make(level_tile.group.kv_offset + level_tile.tokens(p, kv_tile).begin, !answer.some_hidden);
}

/// KvTileList::count for a list of `kv_tiles` KV tiles.
ATTN_HD int32_t listed_count(int32_t kv_tiles) { return kv_tiles <= kMaxListedKvTiles ? kv_tiles : -1; }

}  // namespace attn
