// The arguments of append.
#pragma once

#include "cache/kv_tensor.h"
#include "common/index_array.h"
#include "common/math.h"

namespace attn {

/// Of a block of the append kernel.
constexpr int32_t kAppendThreads = 128;

/// Copies new tokens into the paged cache: token i goes to slot slots[i] (page * page_size + token in page); a negative
/// slot is skipped, so is one beyond the cache.
struct AppendParams {
  const void* k;  // [num_tokens, num_kv_heads, head_dim]
  const void* v;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  KvTensor k_cache;  // written
  KvTensor v_cache;
  IndexArray slots;  // [num_tokens]
  int32_t num_tokens;
  int32_t num_pages;
  int32_t num_kv_heads;
  int32_t head_bytes;  // head_dim * sizeof(element)
  FastDivisor page_size;
  int32_t element_bytes;
};

}  // namespace attn
