// The arguments of append.
#pragma once

#include "cache/kv_tensor.h"
#include "common/index_array.h"
#include "common/math.h"

namespace attn {

/// Threads of a block of the append kernel.
constexpr int32_t kAppendThreads = 128;

/// Copies new tokens into the paged cache: token i goes to slot slots[i] (page * page_size + token in page); a negative
/// slot is skipped, so is one beyond the cache.
struct AppendParams {
  const void* k;  // [num_tokens, num_kv_heads, columns of K]; V's may be others
  const void* v;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  KvTensor k_cache;  // written
  KvTensor v_cache;
  IndexArray slots;  // [num_tokens]
  int32_t num_tokens;
  int32_t num_pages;
  int32_t num_kv_heads;
  int32_t k_head_bytes;  // columns * sizeof(element)
  int32_t v_head_bytes;
  FastDivisor page_size;
  int32_t element_bytes;
};

}  // namespace attn
