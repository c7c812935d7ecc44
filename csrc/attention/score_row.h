// A row of a row group as variants see it.
#pragma once

#include "attention/variants.h"
#include "planner/schedule.h"

namespace attn {

/// Row number `index` of a row group: row `row` of Q, head `qo_head`.
ATTN_HD ScoreRow score_row(const Schedule& schedule, int32_t group_number, int32_t index, int32_t row,
                           int32_t qo_head) {
  const RowGroup* group = &schedule.groups[group_number];
  const RowPositions& given = schedule.header->levels[group->level].positions;
  ScoreRow made{row, group->request, qo_head, 0, index, 0};
  if (group->request < 0) {  // of a node of the forest: the row's own group, which comes first, knows its positions
    made.request = schedule.row_requests[group->qo_begin + index];
    group = &schedule.groups[made.request];
    made.index = row - group->qo_begin;
  }
  made.position = group->q_position + made.index;
  made.kv_len = group->q_position + group->qo_len;
  const int32_t of_given = clamp(row, 0, given.num_rows - 1);
  if (given.positions != nullptr) made.position = given.positions[of_given];
  if (given.requests != nullptr) made.request = given.requests[of_given];
  return made;
}

}  // namespace attn
