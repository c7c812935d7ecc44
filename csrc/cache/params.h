// The arguments of append.
#pragma once

#include "cache/kv_tensor.h"
#include "common/index_array.h"

namespace attn {

/// Threads of a block of the append kernel.
constexpr int32_t kAppendThreads = 128;

/// Copies new tokens into the paged cache: token i goes to slot slots[i]; see CachePages.
struct AppendParams {
  HeadRows k;  // [num_tokens, num_kv_heads, columns of K]; V's may be others
  HeadRows v;
  KvTensor k_cache;  // written
  KvTensor v_cache;
  IndexArray slots;  // [num_tokens]
  int32_t num_tokens;
  CachePages pages;
  int32_t num_kv_heads;
  int32_t k_head_bytes;  // columns * sizeof(element)
  int32_t v_head_bytes;
  int32_t element_bytes;
};

}  // namespace attn
