// A row of K or V as variants see it.
#pragma once

#include "attention/variant/variants.h"
#include "planner/schedule.h"

namespace attn {

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
