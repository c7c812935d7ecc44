// Rows of scores, K and V as variants see them.
#pragma once

#include "attention/variant/variants.h"
#include "planner/schedule.h"

namespace attn {

/// Row number `index` of a row group that knows its request: row `row` of Q, head `qo_head`.
ATTN_HD ScoreRow score_row(const RowGroup& group, const RowPositions& given, int32_t index, int32_t row,
                           int32_t qo_head) {
  ScoreRow made{row, group.request, qo_head, group.q_position + index, index, group.q_position + group.qo_len};
  const int32_t given_row = clamp(row, 0, given.num_rows - 1);
  if (given.positions != nullptr) made.position = given.positions[given_row];
  if (given.requests != nullptr) made.request = given.requests[given_row];
  return made;
}

/// Row number `index` of a row group: row `row` of Q, head `qo_head`.
ATTN_HD ScoreRow score_row(const Schedule& schedule, int32_t group_number, int32_t index, int32_t row,
                           int32_t qo_head) {
  const RowGroup* group = &schedule.groups[group_number];
  const RowPositions& given = schedule.header->levels[group->level].positions;
  if (group->request < 0) {  // of a node of the forest: the row's own group, which comes first, knows its positions
    group = &schedule.groups[schedule.row_requests[group->qo_begin + index]];
    index = row - group->qo_begin;
  }
  return score_row(*group, given, index, row, qo_head);
}

/// The tokens of a row group as variants see them.
struct KvTokens {
  KvToken first;  // token 0: the others differ from it in their positions

  ATTN_HD KvTokens(const RowGroup& group, int32_t kv_head)
      : first{group.request, group.kv_offset, kv_head, group.q_position + group.qo_len} {}

  /// Token number `token` of the row group.
  ATTN_HD KvToken at(int32_t token) const {
    return KvToken{first.request, first.position + token, first.kv_head, first.kv_len};
  }
};

}  // namespace attn
