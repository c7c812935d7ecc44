// K or V of one layer.
#pragma once

#include "common/platform.h"

namespace attn {

/// K or V of one layer: element (page, token in page, head, i) is data[page * page_stride + token * token_stride + head
/// * head_stride + i].
struct KvTensor {
  const void* data;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
};

}  // namespace attn
