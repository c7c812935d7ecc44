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

/// Whether V's columns are the first of K's, in the same memory. Strides of dimensions of one element are not used, and
/// may be anything.
ATTN_HD bool v_is_in_k(const KvTensor& k, const KvTensor& v, int64_t num_pages, int64_t page_size,
                       int64_t num_kv_heads) {
  return v.data == k.data && (num_pages <= 1 || v.page_stride == k.page_stride) &&
         (page_size <= 1 || v.token_stride == k.token_stride) && (num_kv_heads <= 1 || v.head_stride == k.head_stride);
}

}  // namespace attn
