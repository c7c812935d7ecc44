// What the numbers of an 8-bit cache, and of Q in 8 bits, are multiplied by.
#pragma once

#include "common/data_type.h"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Scales of K, of V or of Q: one for all, or one for each KV head, request, or both.
struct KvScale {
  const float* data;  // read when the kernel runs; nullptr: `value` for all
  float value;
  int32_t head_stride;     // in elements; 0: one for all heads
  int32_t request_stride;  // in elements; 0: one for all requests
  int32_t num_requests;

  ATTN_HD bool is_of_requests() const { return request_stride != 0; }

  /// A request that has none takes the nearest.
  ATTN_HD float of(int32_t request, int32_t kv_head) const {
    if (data == nullptr) return value;
    const int64_t row = clamp(request, 0, num_requests - 1);
    return data[row * request_stride + static_cast<int64_t>(kv_head) * head_stride];
  }

  /// The scale of all requests; 1 if requests have their own.
  ATTN_HD float for_all_requests(int32_t kv_head) const { return is_of_requests() ? 1.0f : of(0, kv_head); }
};

struct alignas(16) KvScales {
  KvScale k;
  KvScale v;
  DataType element;  // of the cache
};

/// What attention over an 8-bit cache is given.
struct alignas(16) AttentionScales {
  KvScale k;
  KvScale v;
  KvScale q;           // of Q in 8 bits, not of requests; 1 of others
  DataType element;    // of the cache
  DataType q_element;  // of Q
};

}  // namespace attn
