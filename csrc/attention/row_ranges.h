// What a variant's mask lets each row of a view see, found by asking it about every token: plans then skip the KV tiles
// that no row of a row tile sees, and kernels do not ask again inside what all of a warp's rows see.
#pragma once

#include "attention/score_row.h"
#include "attention/variants.h"
#include "planner/groups.h"

namespace attn {

constexpr int kRowRangeThreads = 256;  // of a CTA of row_ranges_kernel

/// The arguments of row_ranges_kernel.
struct RowRangeParams {
  PlanParams plan;  // of one level
  VariantParams variant;
  RowRange* row_ranges;  // [rows of the view]
  int32_t num_kv_heads;
};

/// A row of a view, and the tokens of its row group that it may see.
struct RangedRow {
  RowGroup group;
  int32_t index;  // of the row in it
  int32_t row;    // of Q
  TokenRange tokens;

  /// `row_of_view`: below the last element of qo_indptr. Empty if metadata is wrong there.
  ATTN_HD RangedRow(const PlanParams& p, int32_t row_of_view) {
    const PlanLevel& level = p.levels[0];
    int32_t low = 0;  // the last row group that begins at or before the row
    for (int32_t high = level.num_groups; high - low > 1;) {
      const int32_t middle = low + (high - low) / 2;
      if (level.qo_indptr.narrow(level.qo_indptr.words(middle)) <= row_of_view)
        low = middle;
      else
        high = middle;
    }
    uint32_t errors = 0;  // the planner reports them
    group = read_row_group(p, GroupPlace{0, low}, errors);
    index = row_of_view - group.qo_begin;
    row = level.rows != nullptr ? level.rows[row_of_view] : row_of_view;
    const int32_t position = group.kv_len - group.qo_len + index;
    tokens = level.visibility.seen_by_any(position, position, TokenRange{0, group.kv_len});
    tokens.begin = max_of(tokens.begin, 0);
    if (index < 0 || index >= group.qo_len) tokens = TokenRange{0, 0};
  }
};

/// What some tokens add up to.
struct RangeSum {
  int32_t begin;  // first that any head sees
  int32_t end;    // behind the last one
  int32_t full;   // how many all heads see
};

/// Tokens first, first + step, ... of a row.
template <class Variant>
ATTN_HD RangeSum sum_tokens(const RowRangeParams& params, const RangedRow& row, int32_t first, int32_t step) {
  const int32_t group_size = params.plan.config.group_size;
  const int32_t num_heads = Variant::kMaskReadsHead ? params.num_kv_heads * group_size : 1;
  RangeSum sum{static_cast<int32_t>(kMaxInt32), -1, 0};
  for (int32_t head = 0; head < num_heads; ++head) {
    const Variant variant(params.variant.as<typename Variant::Params>(), head / group_size);
    const ScoreRow of_head = score_row(row.group, params.plan.levels[0].positions, row.index, row.row, head);
    for (int32_t token = row.tokens.begin + first; token < row.tokens.end; token += step) {
      if (!variant.mask(of_head, row.group.kv_offset + token)) continue;
      sum.begin = min_of(sum.begin, token);
      sum.end = max_of(sum.end, token + 1);
      ++sum.full;
    }
  }
  return sum;
}

/// The range of a row from the sums over all its tokens.
template <class Variant>
ATTN_HD RowRange make_row_range(const RowRangeParams& params, const RangedRow& row, const RangeSum& sum) {
  if (sum.end < 0) return RowRange{0, 0, 0, 0};
  const int32_t heads = Variant::kMaskReadsHead ? params.num_kv_heads * params.plan.config.group_size : 1;
  const int32_t begin = sum.begin + row.group.kv_offset, end = sum.end + row.group.kv_offset;
  const bool is_full = static_cast<int64_t>(sum.end - sum.begin) * heads == sum.full;
  return RowRange{begin, end, is_full ? begin : 0, is_full ? end : 0};
}

/// Rows of the view, as far as there is room for them.
ATTN_HD int32_t rows_of_view(const PlanParams& p) {
  const PlanLevel& level = p.levels[0];
  const int32_t end = level.qo_indptr.narrow(level.qo_indptr.words(level.num_groups));
  return clamp(end, 0, level.max_rows);
}

}  // namespace attn
