// Included in front of the host planner's sources: every row group gets row tiles of the kind that `planned_kind`
// names, however many rows it has.
#pragma once

#include "planner/schedule.h"

namespace attn {

extern int32_t planned_kind;

inline int32_t choose_planned_kind(const ScheduleConfig&, int64_t /*packed_rows*/, int32_t /*smallest*/ = 0) {
  return planned_kind;
}

}  // namespace attn

#define choose_kind choose_planned_kind
