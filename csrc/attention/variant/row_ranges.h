// The tokens that a variant's mask lets each row of a view see. A kernel asks the mask about every token (of the
// variant's range(), if it has one). Plans then skip the KV tiles that no row of a row tile sees. Attention kernels do
// not ask again where all rows of a warp see all tokens.
#pragma once

#include "attention/variant/coordinates.h"
#include "attention/variant/variants.h"
#include "planner/work_list.h"

namespace attn {

constexpr int kRowRangeThreads = 256;  // of a CTA of row_ranges_kernel

/// The arguments of row_ranges_kernel.
struct RowRangeParams {
  PlanParams plan;
  int32_t level;  // whose rows the kernel asks about
  VariantParams variant;
  RowRange* row_ranges;  // [rows of the level]
  int32_t num_kv_heads;
  KvTileList* kv_tile_lists;  // of a variant that skips KV tiles
  int32_t num_kv_tile_lists;
};

/// A row of a level, and the tokens of its row group that it may see.
struct RangedRow {
  RowGroup group;
  int32_t index;  // of the row in it
  int32_t row;    // of Q
  TokenRange tokens;

  /// `row_of_level`: below the last element of qo_indptr. Empty if metadata is wrong there.
  ATTN_HD RangedRow(const PlanParams& p, int32_t level_number, int32_t row_of_level) {
    const PlanLevel& level = p.levels[level_number];
    const int32_t number = find_last(level.num_groups, [&](int32_t i) {  // begins at or before the row
      return level.qo_indptr.narrow(level.qo_indptr.words(i)) <= row_of_level;
    });
    uint32_t errors = 0;  // the planner reports them
    group = read_row_group(p, GroupPlace{level_number, number}, errors);
    index = row_of_level - group.qo_begin;
    find_tokens(level, row_of_level);
  }

  /// Row number `index_` of a row group.
  ATTN_HD RangedRow(const PlanParams& p, const RowGroup& group_, int32_t index_) : group(group_), index(index_) {
    find_tokens(p.levels[group.level], group.qo_begin + index);
  }

 private:
  ATTN_HD void find_tokens(const PlanLevel& level, int32_t row_of_level) {
    row = level.rows != nullptr ? level.rows[row_of_level] : row_of_level;
    const int32_t position = group.kv_len - group.qo_len + index;
    tokens = level.visibility.seen_by_any(position, position, TokenRange{0, group.kv_len});
    tokens.begin = max_of(tokens.begin, 0);
    if (index < 0 || index >= group.qo_len) tokens = TokenRange{0, 0};
  }
};

/// What mask() says of some tokens, added up.
struct RangeSum {
  int32_t begin;  // first that any head sees
  int32_t end;    // after the last one
  int32_t full;   // how many all heads see
};

/// Heads whose masks may differ.
template <class Variant>
ATTN_HD int32_t heads_of_mask(const RowRangeParams& params) {
  return Variant::kMaskReadsHead ? params.num_kv_heads * params.plan.config.group_size : 1;
}

/// The mask of one head of a row.
template <class Variant>
struct HeadOfRow {
  Variant variant;
  ScoreRow row;
  int32_t kv_offset;

  ATTN_HD HeadOfRow(const RowRangeParams& params, const RangedRow& ranged, int32_t head)
      : variant(params.variant.as<typename Variant::Params>(), head / params.plan.config.group_size),
        row(score_row(ranged.group, params.plan.levels[params.level].positions, ranged.index, ranged.row, head)),
        kv_offset(ranged.group.kv_offset) {}

  ATTN_HD bool sees(int32_t token) const { return variant.mask(row, kv_offset + token); }

  /// Those of `tokens` that the variant's range() leaves.
  ATTN_HD TokenRange narrowed(TokenRange tokens) const {
    if constexpr (VariantHooks<Variant>::kRange) {
      const TokenRange range = variant.range(row);
      const auto inside = [&](int32_t token) {  // 64 bits: a user's bounds may be the limits of int32
        return static_cast<int32_t>(clamp<int64_t>(int64_t{token} - kv_offset, tokens.begin, tokens.end));
      };
      return TokenRange{inside(range.begin), inside(range.end)};
    }
    return tokens;
  }
};

/// Asks the mask about tokens first, first + step, ... of a row.
template <class Variant>
ATTN_HD RangeSum sum_tokens(const RowRangeParams& params, const RangedRow& row, int32_t first, int32_t step) {
  const int32_t num_heads = heads_of_mask<Variant>(params);
  RangeSum sum{static_cast<int32_t>(kMaxInt32), -1, 0};
  for (int32_t head = 0; head < num_heads; ++head) {
    const HeadOfRow<Variant> head_row(params, row, head);
    const TokenRange tokens = head_row.narrowed(row.tokens);
    for (int32_t token = tokens.begin + first; token < tokens.end; token += step) {
      if (!head_row.sees(token)) continue;
      sum.begin = min_of(sum.begin, token);
      sum.end = max_of(sum.end, token + 1);
      ++sum.full;
    }
  }
  return sum;
}

/// Finds the holes: tokens between the first and the last that any head sees, but that some head does not see. Looks at
/// tokens first, first + step, ... after the first visible one. Returns the range from the first hole to the last; its
/// end is not after its begin if there is none. `sum`: over all tokens.
template <class Variant>
ATTN_HD TokenRange find_holes(const RowRangeParams& params, const RangedRow& row, const RangeSum& sum, int32_t first,
                              int32_t step) {
  const int32_t num_heads = heads_of_mask<Variant>(params);
  TokenRange holes{static_cast<int32_t>(kMaxInt32), -1};
  if (sum.full == 0) return holes;  // all tokens are hidden: sum.begin is no token
  if (static_cast<int64_t>(sum.end - sum.begin) * num_heads == sum.full) return holes;
  for (int32_t head = 0; head < num_heads; ++head) {
    const HeadOfRow<Variant> head_row(params, row, head);
    for (int32_t token = sum.begin + first; token < sum.end; token += step) {
      if (head_row.sees(token)) continue;
      holes.begin = min_of(holes.begin, token);
      holes.end = max_of(holes.end, token + 1);
    }
  }
  return holes;
}

/// The range of a row. Its full part is what lies before its first hole or after its last one, whichever is longer.
ATTN_HD RowRange make_row_range(const RangedRow& row, const RangeSum& sum, const TokenRange& holes) {
  if (sum.end < 0) return RowRange{0, 0, 0, 0};
  const int32_t offset = row.group.kv_offset;
  TokenRange full{sum.begin, sum.end};
  if (holes.begin < holes.end) {
    const bool begins_full = holes.begin - sum.begin >= sum.end - holes.end;
    full = begins_full ? TokenRange{sum.begin, holes.begin} : TokenRange{holes.end, sum.end};
  }
  return RowRange{sum.begin + offset, sum.end + offset, full.begin + offset, full.end + offset};
}

/// Rows of the level, as far as there is room for them.
ATTN_HD int32_t rows_of_level(const PlanLevel& level) {
  if (level.num_groups == 0) return 0;  // whatever the one element of qo_indptr says: there is no row group to ask
  const int32_t end = level.qo_indptr.narrow(level.qo_indptr.words(level.num_groups));
  return clamp(end, 0, level.max_rows);
}

// ---- Lists of KV tiles ----
//
// Which KV tiles the row tiles of a level need under a mask that has holes: those in which some row sees a token, found
// by asking the mask. Plans then count only these, and kernels go from one to the next. They do not ask again in KV
// tiles that are fully visible.

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
