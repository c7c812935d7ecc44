// The arguments of append_latent.
#pragma once

#include "cache/kv_tensor.h"
#include "cache/scaled_latent.h"
#include "common/index_array.h"
#include "common/math.h"

namespace attn {

/// Threads of a block of the kernel, which takes one token at a time: a warp for each scale.
constexpr int32_t kAppendLatentThreads = ScaledLatentRow::kScales * 32;

/// Writes bf16 latents and rotated parts to rows with scales of their own; a slot that is negative or beyond the cache
/// gets nothing.
struct LatentParams {
  const void* latent;  // [num_tokens, 512]
  const void* rope;    // [num_tokens, 64]
  int64_t latent_stride, rope_stride;
  KvTensor cache;  // written
  IndexArray slots;
  int32_t num_tokens;
  CachePages pages;

  /// Where the row of a token begins; nullptr: nowhere.
  ATTN_HD char* row(int32_t token) const {
    const int64_t slot = slots[token];
    if (!pages.has(slot)) return nullptr;
    return static_cast<char*>(const_cast<void*>(cache.data)) + cache.element(pages.place(static_cast<int32_t>(slot)));
  }
};

/// What numbers of this magnitude are divided by: the largest becomes the largest that e4m3 holds.
ATTN_HD float latent_scale(float largest) {
  constexpr float kLeast = 1.17549435e-38f;  // so that zeros are not divided by 0
  return max_of(largest / 448.0f, kLeast);
}

}  // namespace attn
