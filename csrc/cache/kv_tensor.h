// K or V of one layer, and where slots are in it.
#pragma once

#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Where a token is in a cache.
struct SlotPlace {
  int32_t page;
  int32_t in_page;  // the token's number in it
};

/// K or V of one layer: element (page, token in page, head, i) is data[page * page_stride + token * token_stride + head
/// * head_stride + i].
struct KvTensor {
  const void* data;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;

  /// Number of element 0 of a token and head.
  ATTN_HD int64_t element(SlotPlace token, int32_t head = 0) const {
    return token.page * page_stride + token.in_page * token_stride + head * head_stride;
  }
};

/// Rows of heads: element (token, head, i) is data[token * token_stride + head * head_stride + i].
struct HeadRows {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

/// The pages of a cache, as slots count their tokens: slot page * page_size + token in page.
struct CachePages {
  int32_t count;
  FastDivisor page_size;

  /// Whether a slot exists. Callers skip negative slots, and slots beyond the cache.
  ATTN_HD bool has(int64_t slot) const {
    return slot >= 0 && slot < min_of<int64_t>(static_cast<int64_t>(count) * page_size.divisor, kMaxInt32);
  }

  ATTN_HD SlotPlace place(int32_t slot) const {
    const int32_t page = page_size.divide(slot);
    return SlotPlace{page, slot - page * page_size.divisor};
  }
};

/// Whether V's columns are the first of K's, in the same memory. Strides of dimensions of one element are not used, and
/// may be anything.
ATTN_HD bool v_is_in_k(const KvTensor& k, const KvTensor& v, int64_t num_pages, int64_t page_size,
                       int64_t num_kv_heads) {
  return v.data == k.data && (num_pages <= 1 || v.page_stride == k.page_stride) &&
         (page_size <= 1 || v.token_stride == k.token_stride) && (num_kv_heads <= 1 || v.head_stride == k.head_stride);
}

}  // namespace attn
