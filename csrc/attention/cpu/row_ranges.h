// attention/variant/row_ranges.h on a CPU: row by row, and row tile by row tile.
#pragma once

#include "attention/variant/row_ranges.h"
#include "attention/variant/variants.h"

namespace attn::cpu {

/// Lists the KV tiles that one row tile of a level needs.
template <class Variant>
void list_kv_tiles(const RowRangeParams& params, int32_t number) {
  const TileOfLevel level_tile(params.plan, params.level, number);
  if (!level_tile.exists()) return;
  KvTileList& list = params.kv_tile_lists[number];
  int32_t count = 0;
  for (int32_t kv_tile = 0; kv_tile < level_tile.tile.num_kv_tiles; ++kv_tile) {
    const SeenOrHidden answer = ask_rows<Variant>(params, level_tile, kv_tile, 0, 1, [](bool seen) { return seen; });
    if (!answer.some_seen) continue;
    if (count < kMaxListedKvTiles) list.kv_tiles[count] = listed(params.plan, level_tile, kv_tile, answer);
    ++count;
  }
  list.count = listed_count(count);
}

/// Finds the ranges of all rows of a level, and lists KV tiles if the variant skips some.
template <class Variant_>
void find_row_ranges(const RowRangeParams& params) {
  using Variant = typename WithoutScales<Variant_>::Variant;
  if constexpr (VariantHooks<Variant>::kMask) {
    const int32_t num_rows = rows_of_level(params.plan.levels[params.level]);
    for (int32_t i = 0; i < num_rows; ++i) {
      const RangedRow row(params.plan, params.level, i);
      const RangeSum sum = sum_tokens<Variant>(params, row, 0, 1);
      params.row_ranges[i] = make_row_range(row, sum, find_holes<Variant>(params, row, sum, 0, 1));
    }
    if constexpr (Variant::kSkipsTiles) {
      for (int32_t i = 0; i < params.num_kv_tile_lists; ++i) list_kv_tiles<Variant>(params, i);
    }
  }
}

}  // namespace attn::cpu
